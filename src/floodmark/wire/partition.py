"""Partitions behind a server, which look like those of this process."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from threading import Lock

import pyarrow

from floodmark.codec.columns import records_schema
from floodmark.codec.ordered import NAMESPACE_BYTES
from floodmark.model.errors import Unreachable, WireMismatch
from floodmark.model.limits import REQUEST_BYTES_MAX
from floodmark.model.partition import CommitLimits, Content, Partition, PartitionMap
from floodmark.model.ranges import KeyRange, after
from floodmark.model.record import Versioned
from floodmark.model.version import Version
from floodmark.wire.columns import decode_pairs, require_records
from floodmark.wire.connection import Connection, Patience
from floodmark.wire.messages import (
    APPLY,
    COMPARE_AND_SET,
    DELETE_UNCHANGED,
    FIND,
    GET,
    GET_MANY,
    GET_MANY_KEYS_MAX,
    LOAD,
    MAP,
    MERGE,
    PUT,
    PUT_UNCHANGED,
    RESOLVED,
    TICKET,
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
        self._connection = connection

    def __repr__(self) -> str:
        return f"RemotePartition({self.id}, {self._connection.url!r})"

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

    def scan(
        self, keys: KeyRange, at: Version, *, rows_max: int | None = None, reverse: bool = False
    ) -> Iterator[list[tuple[bytes, bytes]]]:
        left = rows_max

        def ticket(keys: KeyRange) -> Ticket | None:
            return None if left == 0 else ScanTicket(self.id, keys, at, left, reverse)

        for batch in self._batches(keys, ticket, reverse=reverse):
            rows = decode_pairs(batch)
            if left is not None:
                left = max(0, left - len(rows))
            yield rows

    def scan_records(
        self, keys: KeyRange, at: Version, *, dead: bool = False, content: Content = Content.WHOLE
    ) -> Iterator[pyarrow.RecordBatch]:
        schema = records_schema(content)
        for batch in self._batches(keys, lambda keys: RecordsTicket(self.id, keys, at, dead, content)):
            require_records(batch, schema)
            yield batch

    def _batches(
        self, keys: KeyRange, ticket: Callable[[KeyRange], Ticket | None], *, reverse: bool = False
    ) -> Iterator[pyarrow.RecordBatch]:
        """The rows of a range.  If the connection is lost, a new ticket goes on behind the last row."""
        namespace = keys.start[:NAMESPACE_BYTES]
        patience = Patience(self._connection)
        left: KeyRange | None = keys
        while left is not None and (wanted := ticket(left)) is not None:
            try:
                with closing(self._connection.open_reader(TICKET.encode_request(wanted))) as reader:
                    for batch, _ in reader:
                        patience.renew()
                        if batch.num_rows and left is not None:
                            left = _behind(left, namespace + batch.column(0)[-1].as_py(), reverse=reverse)
                        yield batch
                return
            except Unreachable as error:
                patience.wait(error)

    # Writes

    def put(self, keys: Sequence[bytes], values: Sequence[bytes], *, durable: bool) -> Version:
        return self._connection.call(PUT, self.id, list(keys), list(values), durable)

    def merge(self, keys: Sequence[bytes], values: Sequence[bytes], *, durable: bool) -> Version:
        return self._connection.call(MERGE, self.id, list(keys), list(values), durable)

    def apply(
        self,
        keys: Sequence[bytes],
        values: Sequence[bytes],
        *,
        durable: bool,
        admit: Callable[[], None] | None = None,
    ) -> Version:
        assert admit is None, "only the committing process can be asked inside a commit; use an ApplyStream"
        return self._connection.call(APPLY, self.id, list(keys), list(values), durable)

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

    def resolved_version(self) -> Version:
        return self._connection.call(RESOLVED, self.id)


class RemotePartitionMaps:
    """The map of a server's partitions, as it was when last asked for."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = Lock()
        self._map: PartitionMap[Partition] | None = None

    @property
    def map(self) -> PartitionMap[Partition]:
        known = self._map
        return self._fetch(None) if known is None else known

    def refresh(self) -> None:
        self._fetch(self._map)

    def _fetch(self, known: PartitionMap[Partition] | None) -> PartitionMap[Partition]:
        """A map that is newer than the one that is known.  Of many who ask at once, one fetches it."""
        with self._lock:
            if self._map is not known and self._map is not None:
                return self._map
            reply = self._connection.call(MAP)
            partitions = [
                RemotePartition(self._connection, entry.id, entry.range, reply.limits)
                for entry in reply.partitions
            ]
            self._map = PartitionMap([entry.range.start for entry in reply.partitions], partitions)
            return self._map


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


def _behind(keys: KeyRange, last: bytes, *, reverse: bool) -> KeyRange | None:
    """What is left of a range after a key was read; None if nothing is."""
    start, end = (keys.start, last) if reverse else (after(last), keys.end)
    return KeyRange(start, end) if end is None or start < end else None
