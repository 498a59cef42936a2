"""Partitions of a server, with the interface of those of this process."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from functools import wraps
from threading import Lock
from typing import Concatenate, ParamSpec, TypeVar

import pyarrow

from floodmark.codec.columns import records_schema
from floodmark.model.errors import FloodmarkError, PartitionMoved, Retryable, Unreachable, WireMismatch
from floodmark.model.limits import QUICK_CALL_BYTES_MAX, REQUEST_BYTES_MAX
from floodmark.model.partition import (
    CommitLimits,
    Content,
    LinkGuard,
    Partition,
    PartitionMap,
)
from floodmark.model.ranges import KeyRange
from floodmark.model.version import Version
from floodmark.wire.cluster import ELSEWHERE, Nodes
from floodmark.wire.columns import decode_pairs, require_records
from floodmark.wire.connection import Connection
from floodmark.wire.messages import (
    ABORT_PREPARED,
    APPLY,
    ASK_PREPARED,
    COMMIT_PREPARED,
    COMPARE_AND_SET,
    DELETE_UNCHANGED,
    ENDED_PREPARED,
    FIND,
    GET,
    GET_FRESH,
    GET_MANY,
    GET_MANY_KEYS_MAX,
    LOAD,
    MAP,
    MERGE,
    PREPARE,
    PREPARE_BATCH,
    PUT,
    PUT_UNCHANGED,
    READ_BATCHES,
    REPAIR,
    RESERVE,
    RESOLVED,
    SETTLE,
    TICKET,
    VALIDATE,
    WRITE,
    MapReply,
    Method,
    RecordsTicket,
    ScanTicket,
    Ticket,
)

# Bytes of keys in one request; the rest of a request is for the encoding around them.
_KEYS_BYTES_MAX = REQUEST_BYTES_MAX // 2


Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def _remote(
    called: Callable[Concatenate[Partition, Parameters], Result], method: Method[Result]
) -> "Callable[Concatenate[RemotePartition, Parameters], Result]":
    """A method of a partition as a call to the server that has it."""

    @wraps(called)
    def call(own: "RemotePartition", /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        return own.connection.call(method, own.id, *args, **kwargs)

    return call


class RemotePartition:
    """A range of qualified keys that a server serves."""

    def __init__(
        self,
        connection: Connection,
        partition_id: int,
        keys: KeyRange,
        limits: CommitLimits,
        *,
        is_alone: bool = False,
    ) -> None:
        self.id = partition_id
        self.range = keys
        self.limits = limits
        self.place = connection.url
        self.is_alone = is_alone
        # To the server that has it.
        self.connection = connection

    def __repr__(self) -> str:
        return f"RemotePartition({self.id}, {self.place!r})"

    # Reads

    get = _remote(Partition.get, GET)
    get_fresh = _remote(Partition.get_fresh, GET_FRESH)
    find = _remote(Partition.find, FIND)
    read_batches = _remote(Partition.read_batches, READ_BATCHES)

    def get_many(self, keys: Sequence[bytes], at: Version | None = None) -> list[bytes | None]:
        values: list[bytes | None] = []
        # An answer may have fewer values than keys, if they are large.
        while len(values) < len(keys):
            found = self.connection.call(GET_MANY, self.id, _portion(keys, len(values)), at)
            if not found:
                raise WireMismatch(f"{self.connection.url} gave no values for keys that were asked for")
            values += found
        return values

    def scan(
        self, keys: KeyRange, at: Version, *, rows_max: int | None = None, reverse: bool = False
    ) -> Iterator[list[tuple[bytes, bytes]]]:
        for batch in _batches(self.connection, ScanTicket(self.id, keys, at, rows_max, reverse)):
            yield decode_pairs(batch)

    def scan_records(
        self, keys: KeyRange, at: Version, *, dead: bool = False, content: Content = Content.WHOLE
    ) -> Iterator[pyarrow.RecordBatch]:
        schema = records_schema(content)
        for batch in _batches(self.connection, RecordsTicket(self.id, keys, at, dead, content)):
            require_records(batch, schema)
            yield batch

    # Writes

    put = _remote(Partition.put, PUT)
    merge = _remote(Partition.merge, MERGE)
    write = _remote(Partition.write, WRITE)
    apply = _remote(Partition.apply, APPLY)
    load = _remote(Partition.load, LOAD)
    compare_and_set = _remote(Partition.compare_and_set, COMPARE_AND_SET)
    delete_unchanged = _remote(Partition.delete_unchanged, DELETE_UNCHANGED)
    put_unchanged = _remote(Partition.put_unchanged, PUT_UNCHANGED)
    _prepare = _remote(Partition.prepare, PREPARE)
    _prepare_batch = _remote(Partition.prepare, PREPARE_BATCH)
    commit_prepared = _remote(Partition.commit_prepared, COMMIT_PREPARED)
    abort_prepared = _remote(Partition.abort_prepared, ABORT_PREPARED)
    ask_prepared = _remote(Partition.ask_prepared, ASK_PREPARED)
    ended_prepared = _remote(Partition.ended_prepared, ENDED_PREPARED)
    validate = _remote(Partition.validate, VALIDATE)
    reserve = _remote(Partition.reserve, RESERVE)
    settle = _remote(Partition.settle, SETTLE)
    repair = _remote(Partition.repair, REPAIR)
    resolved_version = _remote(Partition.resolved_version, RESOLVED)

    def prepare(
        self,
        transaction: str,
        keys: Sequence[bytes],
        values: Sequence[bytes],
        siblings: Sequence[bytes] = (),
        members: Sequence[bytes] = (),
        link: LinkGuard | None = None,
        waits: bool = True,
        batch: bool = False,
    ) -> Version:
        if siblings and sum(map(len, (*keys, *values, *siblings, *members))) <= QUICK_CALL_BYTES_MAX // 2:
            try:
                return self._prepare_batch(transaction, keys, values, siblings, members, link, False)
            except Retryable as error:
                # A subclass means that this partition cannot prepare the batch.
                if type(error) is not Retryable or not waits:
                    raise
        return self._prepare(transaction, keys, values, siblings, members, link, waits, batch)


class RemotePartitionMaps:
    """The map of a site's partitions, as a node has last returned it."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._lock = Lock()
        self._map: PartitionMap[Partition] | None = None

    @property
    def known(self) -> PartitionMap[Partition] | None:
        """The map, or None if no node was asked for it yet."""
        return self._map

    @property
    def map(self) -> PartitionMap[Partition]:
        known = self._map
        return self._fetch(None) if known is None else known

    def refresh(self) -> None:
        self._fetch(self._map)

    def moves(self, *, stream: bool) -> "RemoteMoves":
        """The retries of one call, or one stream of rows, after partitions have moved."""
        return RemoteMoves(self, self._nodes, stream=stream)

    def look(self, first: str | None) -> None:
        """Ask the nodes for the map, each at most once, beginning with `first`, until one answers."""
        self._take_in(self._nodes.run_once(_ask_map, first=first))

    def _fetch(self, known: PartitionMap[Partition] | None) -> PartitionMap[Partition]:
        """A map that is newer than `known`.  If many threads ask at once, one of them fetches it."""

        def fetch() -> PartitionMap[Partition]:
            with self._lock:
                if self._map is not known and self._map is not None:
                    return self._map
                return self._take_in(self._nodes.run_once(_ask_map))

        return self._nodes.patiently(fetch)

    def _take_in(self, reply: MapReply) -> PartitionMap[Partition]:
        self._nodes.learn(reply)
        partitions = [
            RemotePartition(
                self._nodes.owner(entry.node),
                entry.id,
                entry.range,
                reply.limits,
                is_alone=not reply.nodes,
            )
            for entry in reply.partitions
        ]
        self._map = PartitionMap([entry.range.start for entry in reply.partitions], partitions)
        return self._map


class RemoteMoves:
    """The retries of a call or stream while a partition moves, or its owner does not answer.

    With only one server, an unanswered call is not retried here: its connection has done so.  A stream is.
    """

    def __init__(self, maps: RemotePartitionMaps, nodes: Nodes, *, stream: bool) -> None:
        self._maps = maps
        self._nodes = nodes
        self._stream = stream
        self._attempts = nodes.stream_attempts() if stream else nodes.attempts()
        self._is_first = True

    def follows(self, error: FloodmarkError) -> bool:
        """Whether to repeat the call: it had no effect, and a newer map may help."""
        if isinstance(error, PartitionMoved):
            return True
        if self._nodes.are_several:
            return isinstance(error, ELSEWHERE)
        return self._stream and isinstance(error, Unreachable)

    def follow(self, error: FloodmarkError, partition: Partition | None) -> None:
        """Fetch the map again, after a pause; raises the error if that does not help, or no time is left."""
        if not self.follows(error):
            raise error
        url = partition.place if isinstance(partition, RemotePartition) else None
        is_moved = isinstance(error, PartitionMoved)
        if is_moved:
            self._attempts.prolong()
        # Most often a partition has moved before it was called, and the next map is right.
        if not self._is_first or not is_moved:
            self._attempts.pause(error)
        self._is_first = False
        if url is not None and not is_moved:
            self._nodes.leave(url)
        # The node that refused is the first to know the new owner.  Until a node answers, the old map stays.
        with suppress(*ELSEWHERE):
            self._maps.look(url if is_moved else None)

    def renew(self) -> None:
        """Reset the retries, after progress of the stream."""
        self._is_first = True
        self._attempts.renew()


def _ask_map(connection: Connection) -> MapReply:
    return connection.call(MAP)


def _batches(connection: Connection, ticket: Ticket) -> Iterator[pyarrow.RecordBatch]:
    with closing(connection.open_reader(TICKET.encode_request(ticket))) as reader:
        for batch, _ in reader:
            yield batch


def _portion(keys: Sequence[bytes], start: int) -> list[bytes]:
    """The keys from `start` on, as many as fit into one request."""
    size = 0
    end = start
    while end < min(len(keys), start + GET_MANY_KEYS_MAX):
        size += len(keys[end])
        if size > _KEYS_BYTES_MAX and end > start:
            break
        end += 1
    return list(keys[start:end])
