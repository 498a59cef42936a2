"""Partitions behind a server, which look like those of this process."""

from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from threading import Lock

import pyarrow

from floodmark.codec.columns import records_schema
from floodmark.model.errors import FloodmarkError, PartitionMoved, Unreachable, WireMismatch
from floodmark.model.limits import REQUEST_BYTES_MAX
from floodmark.model.partition import (
    CommitLimits,
    Content,
    Fate,
    LinkGuard,
    Partition,
    PartitionMap,
    ReadSet,
)
from floodmark.model.ranges import KeyRange
from floodmark.model.record import AtomicAnswer, Versioned
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
    GET_MANY,
    GET_MANY_KEYS_MAX,
    LOAD,
    MAP,
    MERGE,
    PREPARE,
    PUT,
    PUT_UNCHANGED,
    READ_BATCHES,
    REPAIR,
    RESOLVED,
    SETTLE,
    TICKET,
    VALIDATE,
    WRITE,
    MapReply,
    RecordsTicket,
    ScanTicket,
    Ticket,
)

# Bytes of keys in one request; the rest of what a request may hold is for what stands between them.
_KEYS_BYTES_MAX = REQUEST_BYTES_MAX // 2


class RemotePartition:
    """A range of qualified keys, served by the process at the other end."""

    def __init__(
        self, connection: Connection, partition_id: int, keys: KeyRange, limits: CommitLimits
    ) -> None:
        self.id = partition_id
        self.range = keys
        self.limits = limits
        self.place = connection.url
        self._connection = connection

    def __repr__(self) -> str:
        return f"RemotePartition({self.id}, {self.place!r})"

    @property
    def connection(self) -> Connection:
        """The connection to the server that has it."""
        return self._connection

    # Reads

    def get(self, key: bytes, at: Version | None = None) -> bytes | None:
        return self._connection.call(GET, self.id, key, at)

    def find(self, key: bytes, at: Version | None = None) -> Versioned | None:
        return self._connection.call(FIND, self.id, key, at)

    def get_many(self, keys: Sequence[bytes], at: Version | None = None) -> list[bytes | None]:
        values: list[bytes | None] = []
        # An answer may hold fewer values than were asked for, if they are large.
        while len(values) < len(keys):
            found = self._connection.call(GET_MANY, self.id, _portion(keys, len(values)), at)
            if not found:
                raise WireMismatch(f"{self._connection.url} gave no values for keys that were asked for")
            values += found
        return values

    def read_batches(
        self, keys: Sequence[bytes], among: Sequence[bytes], at: Version | None = None
    ) -> AtomicAnswer:
        return self._connection.call(READ_BATCHES, self.id, list(keys), list(among), at)

    def scan(
        self, keys: KeyRange, at: Version, *, rows_max: int | None = None, reverse: bool = False
    ) -> Iterator[list[tuple[bytes, bytes]]]:
        for batch in self._batches(ScanTicket(self.id, keys, at, rows_max, reverse)):
            yield decode_pairs(batch)

    def scan_records(
        self, keys: KeyRange, at: Version, *, dead: bool = False, content: Content = Content.WHOLE
    ) -> Iterator[pyarrow.RecordBatch]:
        schema = records_schema(content)
        for batch in self._batches(RecordsTicket(self.id, keys, at, dead, content)):
            require_records(batch, schema)
            yield batch

    def _batches(self, ticket: Ticket) -> Iterator[pyarrow.RecordBatch]:
        with closing(self._connection.open_reader(TICKET.encode_request(ticket))) as reader:
            for batch, _ in reader:
                yield batch

    # Writes

    def put(self, keys: Sequence[bytes], values: Sequence[bytes], *, durable: bool) -> Version:
        return self._connection.call(PUT, self.id, list(keys), list(values), durable)

    def merge(self, keys: Sequence[bytes], values: Sequence[bytes], *, durable: bool) -> Version:
        return self._connection.call(MERGE, self.id, list(keys), list(values), durable)

    def write(
        self,
        keys: Sequence[bytes],
        values: Sequence[bytes],
        *,
        durable: bool,
        batch: bool = False,
        reads: ReadSet | None = None,
    ) -> Version:
        return self._connection.call(WRITE, self.id, list(keys), list(values), durable, batch, reads)

    def apply(
        self,
        keys: Sequence[bytes],
        values: Sequence[bytes],
        *,
        durable: bool,
        link: LinkGuard | None = None,
    ) -> Version:
        return self._connection.call(APPLY, self.id, list(keys), list(values), durable, link)

    def load(self, keys: Sequence[bytes], values: Sequence[bytes], *, durable: bool) -> Version:
        return self._connection.call(LOAD, self.id, list(keys), list(values), durable)

    def compare_and_set(self, key: bytes, expected: bytes | None, value: bytes, *, durable: bool) -> Version:
        return self._connection.call(COMPARE_AND_SET, self.id, key, expected, value, durable)

    def delete_unchanged(self, keys: Sequence[bytes], since: Version, *, durable: bool) -> int:
        return self._connection.call(DELETE_UNCHANGED, self.id, list(keys), since, durable)

    def put_unchanged(
        self, keys: Sequence[bytes], values: Sequence[bytes], since: Version, *, durable: bool
    ) -> int:
        return self._connection.call(PUT_UNCHANGED, self.id, list(keys), list(values), since, durable)

    def prepare(
        self,
        transaction: str,
        keys: Sequence[bytes],
        values: Sequence[bytes],
        siblings: Sequence[bytes] = (),
        members: Sequence[bytes] = (),
        link: LinkGuard | None = None,
    ) -> Version:
        return self._connection.call(
            PREPARE, self.id, transaction, list(keys), list(values), list(siblings), list(members), link
        )

    def commit_prepared(self, transaction: str, version: Version) -> bool:
        return self._connection.call(COMMIT_PREPARED, self.id, transaction, version)

    def abort_prepared(self, transaction: str, key: bytes | None = None) -> bool:
        return self._connection.call(ABORT_PREPARED, self.id, transaction, key)

    def ask_prepared(self, transaction: str, key: bytes) -> Fate:
        return self._connection.call(ASK_PREPARED, self.id, transaction, key)

    def ended_prepared(self, transactions: Sequence[str], siblings: Sequence[bytes]) -> list[bool]:
        return self._connection.call(ENDED_PREPARED, self.id, list(transactions), list(siblings))

    def validate(self, transaction: str, reads: ReadSet, at: Version) -> None:
        self._connection.call(VALIDATE, self.id, transaction, reads, at)

    def settle(self, keys: Sequence[bytes], at: Version) -> None:
        self._connection.call(SETTLE, self.id, list(keys), at)

    def repair(self, keys: Sequence[bytes], values: Sequence[bytes], seen: Sequence[Version]) -> list[bytes]:
        return self._connection.call(REPAIR, self.id, list(keys), list(values), list(seen))

    def resolved_version(self) -> Version:
        return self._connection.call(RESOLVED, self.id)


class RemotePartitionMaps:
    """The map of a site's partitions, as it was when a node was last asked for it."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._lock = Lock()
        self._map: PartitionMap[Partition] | None = None

    @property
    def known(self) -> PartitionMap[Partition] | None:
        """The map, if a node was asked for it before."""
        return self._map

    @property
    def map(self) -> PartitionMap[Partition]:
        known = self._map
        return self._fetch(None) if known is None else known

    def refresh(self) -> None:
        self._fetch(self._map)

    def moves(self, *, stream: bool) -> "RemoteMoves":
        """How one call, or one stream of rows, goes on after partitions have moved."""
        return RemoteMoves(self, self._nodes, stream=stream)

    def look(self, first: str | None) -> None:
        """Ask each node once for the map, beginning with `first`."""
        self._take_in(self._nodes.run_once(_ask_map, first=first))

    def _fetch(self, known: PartitionMap[Partition] | None) -> PartitionMap[Partition]:
        """A map that is newer than the one that is known.  Of many who ask at once, one fetches it."""

        def fetch() -> PartitionMap[Partition]:
            with self._lock:
                if self._map is not known and self._map is not None:
                    return self._map
                return self._take_in(self._nodes.run_once(_ask_map))

        return self._nodes.patiently(fetch)

    def _take_in(self, reply: MapReply) -> PartitionMap[Partition]:
        self._nodes.learn(reply)
        partitions = [
            RemotePartition(self._nodes.owner(entry.node), entry.id, entry.range, reply.limits)
            for entry in reply.partitions
        ]
        self._map = PartitionMap([entry.range.start for entry in reply.partitions], partitions)
        return self._map


class RemoteMoves:
    """Goes on at another node while a partition moves, or its owner does not answer.

    A call of a site with one server waits for no answer here, since its connection has; a stream does.
    """

    def __init__(self, maps: RemotePartitionMaps, nodes: Nodes, *, stream: bool) -> None:
        self._maps = maps
        self._nodes = nodes
        self._stream = stream
        self._attempts = nodes.stream_attempts() if stream else nodes.attempts()
        self._is_first = True

    def follows(self, error: FloodmarkError) -> bool:
        """Whether the call may be repeated: nothing was done, and a newer map may help."""
        if isinstance(error, PartitionMoved):
            return True
        if self._nodes.are_several:
            return isinstance(error, ELSEWHERE)
        return self._stream and isinstance(error, Unreachable)

    def follow(self, error: FloodmarkError, partition: Partition | None) -> None:
        """Learn the map anew, after a pause; raises the error if that does not help, or no time is left."""
        if not self.follows(error):
            raise error
        url = partition.place if isinstance(partition, RemotePartition) else None
        is_moved = isinstance(error, PartitionMoved)
        # Most often a partition has moved before it was called, and the next map is right.
        if not self._is_first or not is_moved:
            self._attempts.pause(error)
        self._is_first = False
        if url is not None and not is_moved:
            self._nodes.leave(url)
        # The node that refuses knows first where the partition is.  The old map serves until a node answers.
        with suppress(*ELSEWHERE):
            self._maps.look(url if is_moved else None)

    def renew(self) -> None:
        """Begin anew: the stream got on."""
        self._is_first = True
        self._attempts.renew()


def _ask_map(connection: Connection) -> MapReply:
    return connection.call(MAP)


def _portion(keys: Sequence[bytes], start: int) -> list[bytes]:
    """As many keys as one request may name."""
    size = 0
    end = start
    while end < min(len(keys), start + GET_MANY_KEYS_MAX):
        size += len(keys[end])
        if size > _KEYS_BYTES_MAX and end > start:
            break
        end += 1
    return list(keys[start:end])
