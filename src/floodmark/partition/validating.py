"""Whether what a transaction has read is unchanged, found out in the round that commits it.

A transaction reads at a version R and commits at c.  It is serializable if nothing that it read was written
in (R, c].  In its round all earlier commits can be read and no other is at work, so the newest versions tell.

**Ranges** are looked through before the round, up to the resolved version, because other commits wait for a
round.  In the round only the change logs above that version are left to look at: a few milliseconds of
commits.  Prepared writes are above it too, so none can be inserted below.

**A prepared write** on what was read is a conflict, and is not waited for.  It lies above R, since the reads
at R have settled those below, and it may commit below c.

**Garbage collection** may remove the deletion of a key.  Of a version that it has passed, nothing can be
told, so that is a conflict too.
"""

from collections.abc import Iterator, Mapping

from floodmark.codec.changelog import CommitRow, decode_log_key, decode_row, encode_log_range
from floodmark.codec.ordered import NAMESPACE_BYTES, decode_version, encode_prefixes
from floodmark.model.errors import Conflict, TransactionTooOld
from floodmark.model.limits import PAGE_BYTES_MAX, PAGE_ROWS_MAX, TRANSACTION_AGE_MS_MAX
from floodmark.model.partition import ReadSet
from floodmark.model.ranges import KeyRange, after
from floodmark.model.version import VERSION_MAX, Version, physical_ms
from floodmark.partition.commit.entering import namespaces_of
from floodmark.partition.committer import Committer
from floodmark.partition.deciding import DecidingPartition, Serving, route
from floodmark.partition.families import DATA, LOG
from floodmark.partition.read.records import find_stored, scan_versions


class Validation:
    """The reads of one transaction, all of whose keys are served by one node."""

    def __init__(
        self, committer: Committer, serving: Serving, collected: Mapping[bytes, Version], reads: ReadSet
    ) -> None:
        self._committer = committer
        self._engine = committer.place.engine
        self._serving = serving
        self._collected = collected
        self._reads = reads
        # Up to this version the ranges are known to be unchanged.
        self._seen: Version = reads.since

    def look_ahead(self) -> None:
        """Look through the ranges before the round; Conflict if one has changed."""
        if self._reads.ranges:
            resolved = self._committer.resolve()
            self._scan_ranges(resolved)
            self._seen = max(self._seen, resolved)

    def require_unchanged(self) -> None:
        """Raise Conflict if anything that was read has changed.  The caller holds the turn."""
        self._require_known()
        reads, serving = self._reads, self._serving()
        for key in reads.keys:
            route(serving, key)
        self._require_not_prepared(VERSION_MAX, "")
        prefixes = encode_prefixes(reads.keys)
        for key, row in zip(reads.keys, self._engine.ceilings(DATA, prefixes), strict=True):
            if row is not None and (version := decode_version(row[0])) > reads.since:
                raise self._conflict(key, version)
        for partition, ranges in self._ranges_by_partition().items():
            for version, key in self._logged(partition):
                if any(keys.contains(key) for keys in ranges):
                    raise self._conflict(key, version)

    def require_unchanged_until(self, at: Version, transaction: str) -> None:
        """Raise Conflict if anything that was read has changed at or below a version.

        The clock has passed it, and commits at or below it can be read.  What the transaction itself has
        prepared is no conflict.
        """
        self._require_known()
        self._require_not_prepared(at, transaction)
        for key, prefix in zip(self._reads.keys, encode_prefixes(self._reads.keys), strict=True):
            found = find_stored(self._engine, prefix, at)
            if found is not None and found[0] > self._reads.since:
                raise self._conflict(key, found[0])
        self._scan_ranges(at)

    def _scan_ranges(self, until: Version) -> None:
        for keys in self._reads.ranges:
            for page in scan_versions(self._engine, keys, self._reads.since, until):
                for version, key, _ in page.rows:
                    raise self._conflict(key, version)

    def _require_known(self) -> None:
        """Refuse a version so old that changes above it may have been forgotten."""
        since, now = self._reads.since, self._committer.now()
        age_ms = physical_ms(now) - physical_ms(since)
        if age_ms > TRANSACTION_AGE_MS_MAX:
            raise TransactionTooOld(
                f"the transaction has read at version {since}, {age_ms:,} ms ago, and may commit for "
                f"{TRANSACTION_AGE_MS_MAX:,} ms; begin it again, and let it do less",
                version=since,
            )
        read = (*self._reads.keys, *(keys.start for keys in self._reads.ranges))
        for namespace in namespaces_of(read):
            if since < self._collected.get(namespace, 0):
                raise Conflict(
                    f"garbage collection has passed version {since}, at which the transaction has read; "
                    "begin it again",
                    version=since,
                )

    def _require_not_prepared(self, until: Version, transaction: str) -> None:
        prepared = self._committer.prepared
        if prepared.floor is None:
            return
        writes = prepared.on(self._reads.keys)
        for keys in self._reads.ranges:
            writes += prepared.within(keys, until)
        for write in writes:
            if write.version <= until and write.transaction != transaction:
                raise self._conflict(write.keys[0], write.version)

    def _ranges_by_partition(self) -> dict[DecidingPartition, list[KeyRange]]:
        """The ranges that were read, by the partitions that have them; PartitionMoved if one is elsewhere."""
        serving = self._serving()
        found: dict[DecidingPartition, list[KeyRange]] = {}
        for keys in self._reads.ranges:
            for partition in serving.overlapping(keys):
                route(serving, partition.range.start)
                found.setdefault(partition, []).append(keys)
        return found

    def _logged(self, partition: DecidingPartition) -> Iterator[tuple[Version, bytes]]:
        """The versions and qualified keys in the change log of a partition above what was looked through."""
        start, end = encode_log_range(partition.log_id, self._seen, VERSION_MAX)
        while page := self._engine.scan(LOG, start, end, rows_max=PAGE_ROWS_MAX, bytes_max=PAGE_BYTES_MAX):
            for log_key, row in page:
                _, version, _ = decode_log_key(log_key)
                commit = decode_row(version, row)
                if isinstance(commit, CommitRow):
                    for key in commit.keys:
                        yield version, key
            start = after(page[-1][0])

    def _conflict(self, key: bytes, version: Version) -> Conflict:
        return conflict_on(key, version, self._reads.since)


def conflict_on(key: bytes, version: Version, since: Version) -> Conflict:
    """The error for a qualified key that was written, or is being written, after it was read."""
    return Conflict(
        f"{key[NAMESPACE_BYTES:]!r:.60} was written at version {version}, after the transaction had read it "
        f"at {since}; begin the transaction again, as run_transaction does",
        key=key[NAMESPACE_BYTES:],
        namespace=int.from_bytes(key[:NAMESPACE_BYTES], "big"),
        version=version,
    )
