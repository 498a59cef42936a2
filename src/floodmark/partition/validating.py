"""Validates the reads of a transaction in the round that commits it.

A transaction reads at a version R and commits at c.  It is serializable if nothing that it read was written
in (R, c].  In its round all earlier commits can be read and no other commit runs, so it is enough to compare
the newest versions.

**Ranges** are scanned before the round, up to the resolved version, because other commits wait for a round.
In the round only the change logs above that version are left to read: a few milliseconds of commits.
Prepared writes are above it too, so none can be inserted below.

**A prepared write** on a key that was read is a conflict, and is not waited for.  It lies above R, since the
reads at R have settled those below, and it may commit below c.

**An expiry** in (R, c] is a change like any other: a record that was alive at R and is dead at c is a
conflict, though the node may not have written its expiry yet (`expiring.py`).  It is judged as readers judge
it at R and at c.  Ranges are checked only for whole records, by the index of expiries, and not for fields.

**Garbage collection** may remove the deletion of a key.  So it is a conflict, too, if the collected version
has passed R.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from floodmark.clock import HybridClock
from floodmark.codec.changelog import CommitRow, decode_log_key, decode_row, encode_log_range
from floodmark.codec.ordered import (
    NAMESPACE_BYTES,
    VERSION_BYTES,
    decode_key,
    decode_version,
    encode_namespace,
    encode_prefixes,
    encode_version,
)
from floodmark.codec.states import live_value
from floodmark.codec.values import HAS_EXPIRY, HAS_STAMPS
from floodmark.engine import Row
from floodmark.engine.base import scan_rows
from floodmark.model.errors import Conflict, TransactionTooOld
from floodmark.model.limits import TRANSACTION_AGE_MS_MAX
from floodmark.model.partition import ReadSet
from floodmark.model.ranges import KeyRange
from floodmark.model.version import VERSION_MAX, Version, compose, physical_ms
from floodmark.partition.commit.expiry_index import decode_index_key, index_range
from floodmark.partition.committer import Committer, moved
from floodmark.partition.deciding import DecidingPartition, Serving, route
from floodmark.partition.families import DATA, LOG, META
from floodmark.partition.generations import swapped_at
from floodmark.partition.read.records import find_stored, scan_versions

_AGE_MAX: Final = compose(TRANSACTION_AGE_MS_MAX, 0)


class Validation:
    """The reads of one transaction, all of whose keys are served by one node."""

    def __init__(
        self,
        committer: Committer,
        clock: HybridClock,
        serving: Serving,
        collected: Mapping[bytes, Version],
        reads: ReadSet,
    ) -> None:
        self.reads = reads
        self._committer = committer
        self._clock = clock
        self._engine = committer.place.engine
        self._serving = serving
        self._collected = collected
        # Up to this version the ranges are known to be unchanged; these logs have all later changes, unless
        # a partition has been replaced since.
        self._seen: Version = reads.since
        self._logs: frozenset[int] = frozenset()

    def look_ahead(self) -> None:
        """Scan the ranges before the round; raises Conflict if one has changed."""
        serving = self._serving()
        # Before the version: a log that is opened later does not have all changes above it.
        self._logs = frozenset(
            partition.log_id
            for keys in self.reads.ranges
            for partition in serving.overlapping(keys)
            if not partition.retired
        )
        resolved = self._committer.resolve()
        self._scan_ranges(resolved)
        self._seen = max(self._seen, resolved)

    def require_unchanged(self, now: Version) -> None:
        """Raise Conflict if anything that was read has changed.

        `now` is a fresh version; the caller holds the turn.
        """
        self._require_known(now)
        reads, serving = self.reads, self._serving()
        keys, since = reads.keys, reads.since
        for key in keys:
            if (partition := serving.route(key)).retired:
                raise moved(partition)
        self._require_not_prepared(VERSION_MAX, "")
        self._require_not_declared(VERSION_MAX, "")
        prefixes = encode_prefixes(keys)
        if len(prefixes) == 1:
            rows = [self._engine.ceiling(DATA, prefixes[0], prefixes[0])]
        else:
            rows = self._engine.ceilings(DATA, prefixes)
        for key, row in zip(keys, rows, strict=True):
            if row is not None and (version := decode_version(row[0])) > since:
                raise self._conflict(key, version)
        if reads.ranges:
            self._require_ranges_unchanged()
        self._require_not_expired(rows, now)

    def _require_ranges_unchanged(self) -> None:
        for partition, ranges in self._ranges_by_partition().items():
            if partition.log_id not in self._logs:
                # The range may have changed in the log of the partition that this one has replaced.
                raise moved(partition)
            for version, key in self._logged(partition):
                if any(keys.contains(key) for keys in ranges):
                    raise self._conflict(key, version)

    def require_unchanged_until(self, at: Version, transaction: str) -> None:
        """Raise Conflict if anything that was read has changed at or below a version.

        The clock has passed it, and commits at or below it can be read.  The writes that the transaction
        itself has prepared do not conflict.
        """
        self._require_known(self._committer.now())
        self._require_not_prepared(at, transaction)
        self._require_not_declared(at, transaction)
        prefixes = encode_prefixes(self.reads.keys)
        rows = self._engine.ceilings(DATA, prefixes, [prefix + encode_version(at) for prefix in prefixes])
        for key, row in zip(self.reads.keys, rows, strict=True):
            if row is not None and (version := decode_version(row[0])) > self.reads.since:
                raise self._conflict(key, version)
        self._scan_ranges(at)
        self._require_not_expired(rows, at)

    def _scan_ranges(self, until: Version) -> None:
        for keys in self.reads.ranges:
            for page in scan_versions(self._engine, keys, self.reads.since, until):
                for version, key, _ in page.rows:
                    raise self._conflict(key, version)

    def _require_not_expired(self, rows: Sequence[Row | None], until: Version) -> None:
        """Raise Conflict if a record that was read, and not written since, has expired before a version.

        `rows` are the newest rows of the keys.
        """
        read_ms, now_ms = self._clock.judged_ms(self.reads.since), self._clock.judged_ms(until)
        first, last = read_ms // 1000 + 1, now_ms // 1000
        if first > last:
            # No second has begun in between.
            return
        for key, row in zip(self.reads.keys, rows, strict=True):
            if row is None or not row[1][-1] & (HAS_EXPIRY | HAS_STAMPS):
                continue
            if live_value(row[1], read_ms) != live_value(row[1], now_ms):
                raise self._expired(key, until)
        if not self.reads.ranges:
            return
        start, end = index_range(first, last)
        for index_key, _ in scan_rows(self._engine, META, start, end):
            engine_key = decode_index_key(index_key).engine_key
            namespace, user_key, version = decode_key(engine_key)
            key = encode_namespace(namespace) + user_key
            if version <= self.reads.since and any(keys.contains(key) for keys in self.reads.ranges):
                # The row may have outlived its record.
                newest = find_stored(self._engine, engine_key[:-VERSION_BYTES], self.reads.since)
                if newest is not None and newest[0] == version:
                    raise self._expired(key, until)

    def _expired(self, key: bytes, by: Version) -> Conflict:
        return conflict_on(key, by, self.reads.since, "has expired by")

    def _require_known(self, now: Version) -> None:
        """Raise if the reads are so old that changes above them may have been removed."""
        since = self.reads.since
        if now - since > _AGE_MAX:
            age_ms = physical_ms(now) - physical_ms(since)
            raise TransactionTooOld(
                f"the transaction has read at version {since}, {age_ms:,} ms ago, and may commit for "
                f"{TRANSACTION_AGE_MS_MAX:,} ms; begin it again, and let it do less",
                version=since,
            )
        for read in (*self.reads.keys, *(keys.start for keys in self.reads.ranges)):
            if since < self._collected.get(read[:NAMESPACE_BYTES], 0):
                raise Conflict(
                    f"garbage collection has passed version {since}, at which the transaction has read; "
                    "begin it again",
                    version=since,
                )
            if (version := swapped_at(self._engine, read[:NAMESPACE_BYTES])) > since:
                raise Conflict(
                    f"a data set was published at version {version}, in the place of what the transaction "
                    f"had read at {since}; begin the transaction again, as run_transaction does",
                    namespace=int.from_bytes(read[:NAMESPACE_BYTES], "big"),
                    version=version,
                )

    def _require_not_prepared(self, until: Version, transaction: str) -> None:
        prepared = self._committer.prepared
        if prepared.floor is None:
            return
        writes = prepared.on(self.reads.keys)
        for keys in self.reads.ranges:
            writes += prepared.within(keys, until)
        for write in writes:
            if write.version <= until and write.transaction != transaction:
                raise self._conflict(write.keys[0], write.version)

    def _require_not_declared(self, until: Version, transaction: str) -> None:
        found = self._committer.conflicts.find(self.reads, until, transaction)
        if found is not None:
            raise self._conflict(*found)

    def _ranges_by_partition(self) -> dict[DecidingPartition, list[KeyRange]]:
        """The ranges that were read, by partition; PartitionMoved if another node has one."""
        serving = self._serving()
        found: dict[DecidingPartition, list[KeyRange]] = {}
        for keys in self.reads.ranges:
            for partition in serving.overlapping(keys):
                route(serving, partition.range.start)
                found.setdefault(partition, []).append(keys)
        return found

    def _logged(self, partition: DecidingPartition) -> Iterator[tuple[Version, bytes]]:
        """The versions and qualified keys in the change log of a partition above the scanned version."""
        start, end = encode_log_range(partition.log_id, self._seen, VERSION_MAX)
        for log_key, row in scan_rows(self._engine, LOG, start, end):
            _, version, _ = decode_log_key(log_key)
            commit = decode_row(version, row)
            if isinstance(commit, CommitRow):
                for key in commit.keys:
                    yield version, key

    def _conflict(self, key: bytes, version: Version) -> Conflict:
        return conflict_on(key, version, self.reads.since)


def conflict_on(key: bytes, version: Version, since: Version, what: str = "was written at") -> Conflict:
    """The error for a qualified key that was written, is being written or has expired after it was read."""
    return Conflict(
        f"{key[NAMESPACE_BYTES:]!r:.60} {what} version {version}, after the transaction had read it "
        f"at {since}; begin the transaction again, as run_transaction does",
        key=key[NAMESPACE_BYTES:],
        namespace=int.from_bytes(key[:NAMESPACE_BYTES], "big"),
        version=version,
    )
