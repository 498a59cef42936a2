"""Expiry as a change, so that a follower that saw a record alive also gets its expiry.

When a record has expired, the node writes it once more, unchanged, at a new commit version and with its
original stamp.  A reader finds a record that is dead at its own version, which every reader treats as a
delete; versions and positions, the tail, the log, scans and sums treat it as any change.
The stamp decides between sites as before, so a put that another site made before the expiry and that arrives
after it still wins.  An ordinary delete, with a stamp of that moment, would win over it.

A record is written again only while it is the newest of its key, which is checked inside the commit.  The
same write removes the row of the index, so an expiry is written once, also over restarts.  Garbage collection
leaves an expired record until then (`told_through`).  Only a record that had expired when it was committed is
left out: no reader saw it alive.  An expiry waits for the end of a prepared write on its key, whose commit
would have to remove it from the log again.

Nodes that share an engine share the index, and each writes the expiries of its own partitions.  A row that
is still in the index is an expiry that its node has not written: garbage collection stops before it.
"""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from floodmark.clock import HybridClock
from floodmark.codec.changelog import encode_commit, encode_log_key
from floodmark.codec.ordered import (
    VERSION_BYTES,
    decode_key,
    decode_version,
    encode_namespace,
    encode_prefix,
    encode_version,
)
from floodmark.codec.stamps import digest_copies
from floodmark.codec.values import HAS_EXPIRY, decode_value, encode_value
from floodmark.engine import Engine, WriteRow
from floodmark.engine.base import scan_pages
from floodmark.model.change import Stamp
from floodmark.model.errors import Corruption
from floodmark.model.limits import EXPIRIES_PER_COMMIT_MAX, PAGE_BYTES_MAX
from floodmark.model.partition import PartitionMap
from floodmark.model.ranges import after
from floodmark.model.version import Version, physical_ms
from floodmark.partition.commit.commit import BYTES_PER_BYTE, ROWS_PER_CHANGE, Mint, RoundStep
from floodmark.partition.commit.expiry_index import Expiring, decode_index_key, index_range, index_rows
from floodmark.partition.commit.tail import TailEntry
from floodmark.partition.committer import Committer
from floodmark.partition.families import DATA, EXPIRING_INDEXED, LOG, META
from floodmark.partition.partition import LocalPartition
from floodmark.partition.prepared.steps import Place

# Commits of one call: the caller has other work, too.
COMMITS_MAX: Final = 200

# The partitions of the node, which a split replaces.
Serving = Callable[[], PartitionMap[LocalPartition]]


class Expiries:
    """Writes the expiries of a node's records when they are due."""

    def __init__(
        self, committer: Committer, clock: HybridClock, serving: Serving, *, is_shared: bool
    ) -> None:
        self._told_through = 0
        # Of a pass that the last call did not finish: the second with which it began, and the next key.
        self._first = 0
        self._next: bytes | None = None
        # The lowest second of the expiries that this pass has left for a later one.
        self._waiting: int | None = None
        self._committer = committer
        self._place = committer.place
        self._clock = clock
        self._serving = serving
        # If so, the index has rows of other nodes, and partitions are taken over with their rows.
        self._is_shared = is_shared

    @property
    def told_through(self) -> int:
        """The second up to which all expiries are written; garbage collection goes no further."""
        if not self._is_shared:
            return self._told_through
        now = self._clock.physical_ms() // 1000
        first = self._place.engine.scan(META, *index_range(0, now), rows_max=1, bytes_max=PAGE_BYTES_MAX)
        return decode_index_key(first[0][0]).second - 1 if first else now

    def tell(self, *, anew: bool = False) -> bool:
        """Write the expiries of this node that are due; returns whether the pass over them has ended.

        A pass continues where the last call stopped.  It begins at the second `told_through`, or with `anew`
        at the first row of the index.  Does nothing while the storage refuses writes.
        """
        if self._place.storage.is_unusual:
            return False
        now_ms = self._clock.physical_ms()
        # A record committed since with an earlier second had expired already, unless the clock was set back.
        anew = anew or self._is_shared or now_ms // 1000 < self._told_through
        first = 0 if anew else self._told_through
        start, end = index_range(first, now_ms // 1000)
        if self._next is None or first < self._first:
            self._first, self._next, self._waiting = first, start, None
        for _ in range(COMMITS_MAX):
            step = Expire(self._place, self._serving, self._next, end, now_ms)
            self._committer.commit(step)
            self._next = step.next
            self._waiting = step.waiting if self._waiting is None else self._waiting
            if self._next is None:
                self._told_through = now_ms // 1000 if self._waiting is None else self._waiting - 1
                return True
        return False

    def index_older(self, pause: Callable[[], bool]) -> None:
        """Index, once, the records of a release that had no index.  Ends early if `pause` returns False."""
        storage, engine = self._place.storage, self._place.engine
        if engine.get(META, EXPIRING_INDEXED) is not None:
            return
        for page in scan_pages(engine, DATA, b"", None):
            rows = index_rows(*zip(*page, strict=True))
            if rows:
                storage.remove(rows)
            if not pause():
                return
        with storage.settled():
            storage.store([(META, EXPIRING_INDEXED, b"")])


class _Written(NamedTuple):
    """The commit of one partition: qualified keys in order, and their records."""

    version: Version
    partition: LocalPartition
    keys: list[bytes]
    values: list[bytes]


class Expire(RoundStep):
    """Write the first expiries that are due: a commit in each partition, at a version of its own."""

    is_commit = True

    def __init__(self, place: Place, serving: Serving, start: bytes, end: bytes, now_ms: int) -> None:
        super().__init__(None)
        # The key in the index after the rows that were read; None if no row was left.
        self.next: bytes | None = None
        # The lowest second of the expiries that wait for prepared writes.
        self.waiting: int | None = None
        self._place = place
        self._serving = serving
        self._start = start
        self._end = end
        self._now_ms = now_ms
        self._written: list[_Written] = []

    def take(self, mint: Mint) -> Sequence[WriteRow]:
        engine = self._place.engine
        # A record, a row of the log in its own partition, and the row of the index.
        rows_max = min(EXPIRIES_PER_COMMIT_MAX, engine.limits.batch_rows_max // ROWS_PER_CHANGE)
        bytes_max = min(PAGE_BYTES_MAX, engine.limits.batch_bytes_max // BYTES_PER_BYTE)
        page = engine.scan(META, self._start, self._end, rows_max=rows_max, bytes_max=PAGE_BYTES_MAX)
        records: dict[bytes, bytes] = {}
        rows: list[WriteRow] = []
        size = 0
        self.next = self.waiting = None
        self._written = []
        for key, _ in page:
            row = decode_index_key(key)
            found = None
            if not self._partition_of(row).retired:
                found = self._find(engine, row)
                if found is not None and self._place.prepared.on(found[:1]):
                    self.waiting = row.second if self.waiting is None else self.waiting
                    self.next = after(key)
                    continue
                added = 0 if found is None else len(found[0]) + len(found[1])
                if size and size + added > bytes_max:
                    break
                size += added
                rows.append((META, key, None))
            self.next = after(key)
            if found is not None:
                records[found[0]] = found[1]
        if records:
            rows += self._encode(records, mint)
        return rows

    def _partition_of(self, row: Expiring) -> LocalPartition:
        namespace, user_key, _ = decode_key(row.engine_key)
        return self._serving().route(encode_namespace(namespace) + user_key)

    def _find(self, engine: Engine, row: Expiring) -> tuple[bytes, bytes] | None:
        """The qualified key of an expired record, and the record with its stamp; None if it is gone."""
        prefix, version = row.engine_key[:-VERSION_BYTES], decode_version(row.engine_key)
        newest = engine.ceiling(DATA, prefix, prefix)
        if newest is None or newest[0] != row.engine_key or not newest[1][-1] & HAS_EXPIRY:
            return None
        try:
            record = decode_value(newest[1])
        except Corruption:
            # Every reader of the record raises this; the other expiries must not wait for it.
            return None
        if not record.is_dead_at(self._now_ms) or record.expires_at != row.second:
            return None
        namespace, user_key, _ = decode_key(row.engine_key)
        encoded = encode_namespace(namespace)
        if encoded in self._place.storage.dropped:
            return None
        if row.second * 1000 <= physical_ms(version) <= self._now_ms:
            # It had expired when it was committed.
            return None
        origin = record.origin or Stamp(version, self._place.site)
        value = encode_value(
            record.value, record.expires_at, record.deleted, origin=origin, stamps=record.stamps
        )
        return encoded + user_key, value

    def _encode(self, records: dict[bytes, bytes], mint: Mint) -> list[WriteRow]:
        """The data and change-log rows.  Fills `_written`, which is published once they are written."""
        rows: list[WriteRow] = []
        for key in sorted(records):
            partition = self._serving().route(key)
            if not self._written or self._written[-1].partition is not partition:
                self.version = mint.another()
                self._written.append(_Written(self.version, partition, [], []))
            written = self._written[-1]
            written.keys.append(key)
            written.values.append(records[key])
            rows.append((DATA, encode_prefix(key) + encode_version(written.version), records[key]))
        log_row_bytes_max = self._place.storage.log_row_bytes_max
        for version, partition, keys, values in self._written:
            for chunk, row in enumerate(encode_commit(keys, values, log_row_bytes_max)):
                rows.append((LOG, encode_log_key(partition.log_id, version, chunk), row))
        return rows

    def is_written(self) -> bool:
        last = self._written[-1]
        return self._place.engine.get(LOG, encode_log_key(last.partition.log_id, last.version)) is not None

    def finish(self) -> None:
        tail = self._place.tail
        if tail.is_open:
            for version, partition, keys, values in self._written:
                tail.insert(TailEntry(version, partition.id, keys, values), {})

    def count(self, uncounted_through: Version) -> bool:
        for version, partition, keys, values in self._written:
            for namespace, changes, digest, own in digest_copies(keys, values, self._place.site):
                partition.tallies.append((version, namespace, changes, digest, own))
            partition.heat.add_writes(len(keys), sum(map(len, values)))
        return True
