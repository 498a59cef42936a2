"""A partition served by this process: reads go to the engine, writes through the group commit."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from operator import gt

import pyarrow

from floodmark.clock import HybridClock
from floodmark.clock.hybrid import READ_SKEW_MS_MAX
from floodmark.codec.ordered import (
    NAMESPACE_BYTES,
    decode_version,
    encode_bytes,
    encode_prefix,
    encode_prefixes,
    encode_version,
)
from floodmark.codec.records import gather_copies
from floodmark.codec.stamps import encode_stamp, find_origins, is_later, stamp_version
from floodmark.codec.values import PLAIN_ENDS
from floodmark.engine import Engine
from floodmark.model.change import Stamp
from floodmark.model.errors import (
    ClockSkew,
    VersionInFuture,
)
from floodmark.model.limits import PAGE_ROWS_MAX, SITE_IDS_MAX
from floodmark.model.partition import CommitLimits, Content, LinkGuard, ReadSet
from floodmark.model.ranges import KeyRange, prefix_end
from floodmark.model.record import AtomicAnswer, FreshValue, Record, Versioned
from floodmark.model.version import Version, moment_of
from floodmark.partition.atomic_reading import read_batches
from floodmark.partition.commit.commit import Commit, CommitTally, Decide, Mint, Writes
from floodmark.partition.commit.entering import (
    Entrance,
    WriteKind,
    check_fits,
    check_keys,
    ends_of,
    namespaces_of,
)
from floodmark.partition.commit.merging import (
    Merge,
    apply_at,
    deletion_of,
    has_states,
    is_state,
    merge_writes,
    write_at,
    write_unchanged_at,
)
from floodmark.partition.commit.repairing import find_rows, write_where_seen
from floodmark.partition.committer import FLOOR_AGE_MAX, Committer, moved
from floodmark.partition.conditional import ConditionalCommits
from floodmark.partition.deciding import Decided, Serving, commit_decided, commit_parts
from floodmark.partition.families import DATA
from floodmark.partition.floors import Announced
from floodmark.partition.generations import as_of, published_bases, published_stamps, swapped_at
from floodmark.partition.heat import Heat
from floodmark.partition.preparing import PreparingPartition
from floodmark.partition.read.records import (
    find_first,
    find_stored,
    read_record,
    require_kept,
    scan_page,
    scan_records_page,
)
from floodmark.partition.read.stamps import newest_stamps
from floodmark.partition.validating import Validation
from floodmark.partition.writing import NodeWrites


class LocalPartition(PreparingPartition):
    """A range of qualified keys on an engine of this process."""

    place = ""

    def __init__(
        self,
        partition_id: int,
        keys: KeyRange,
        log_id: int,
        *,
        engine: Engine,
        clock: HybridClock,
        committer: Committer,
        site_id: int,
        limits: CommitLimits,
        collected: Mapping[bytes, Version],
        entrance: Entrance,
        serving: Serving,
        is_alone: bool,
    ) -> None:
        self.is_alone = is_alone
        self.id = partition_id
        self.range = keys
        self.log_id = log_id
        self.limits = limits
        self.retired = False
        self.sealing = False
        self.tallies: deque[CommitTally] = deque()
        self.heat = Heat(clock.time_source())
        self._engine = engine
        self._clock = clock
        self._committer = committer
        self._prepared = committer.prepared
        self._site_id = site_id
        self._collected = collected
        self._entrance = entrance
        # The partitions of the node, with which this one commits together.
        self._serving = serving
        self._conditional = ConditionalCommits(self, committer)
        self._writing = NodeWrites(committer, clock, serving, collected, entrance)
        self._announced = Announced()

    # Reads

    def get(self, key: bytes, at: Version | None = None) -> bytes | None:
        heat = self.heat
        heat.reads += 1
        prefix = encode_bytes(b"r" + key)
        if at is None:
            if self.retired:
                raise moved(self)
            row = self._engine.ceiling(DATA, prefix, prefix)
        else:
            self._prepare_read(key[:NAMESPACE_BYTES], at, key)
            row = self._engine.ceiling(DATA, prefix + encode_version(at), prefix)
            # Garbage collection may have passed in between.
            self._require_kept(key[:NAMESPACE_BYTES], at)
        if row is None:
            return None
        stored = row[1]
        # The hottest path: most records are plain, with no expiry, tombstone or origin.
        if stored[-1:] in PLAIN_ENDS:
            return stored[:-1]
        found = self._live(prefix, (decode_version(row[0]), stored), at)
        return None if found is None else found[1]

    def get_fresh(self, key: bytes, since: Version = 0) -> FreshValue:
        version = max(self._committer.read_version(), since)
        return FreshValue(version, self.get(key, version))

    def find(self, key: bytes, at: Version | None = None, end: bytes | None = None) -> Versioned | None:
        self.heat.reads += 1
        if end is not None:
            return self._find_first(KeyRange(key, end), at)
        prefix = encode_prefix(key)
        if at is not None:
            self._prepare_read(key[:NAMESPACE_BYTES], at, key)
        elif self.retired:
            raise moved(self)
        found = find_stored(self._engine, prefix, at)
        if at is not None:
            # Garbage collection may have passed in between.
            self._require_kept(key[:NAMESPACE_BYTES], at)
        live = self._live(prefix, found, at)
        if found is None or live is None:
            return None
        record, value = live
        return Versioned(
            key=key[NAMESPACE_BYTES:],
            value=value,
            version=found[0],
            stamp=record.origin or Stamp(found[0], self._site_id),
            expires_at=record.expires_at,
        )

    def _find_first(self, keys: KeyRange, at: Version | None) -> Versioned | None:
        namespace = keys.start[:NAMESPACE_BYTES]
        if at is not None:
            self._prepare_read(namespace, at, keys)
        elif self.retired:
            raise moved(self)
        engine = self._engine if at is None else as_of(self._engine, at)
        found = find_first(engine, keys, self.range, self._site_id)
        if at is not None:
            self._require_kept(namespace, at)
        return found if found is None or at is None or found.version <= at else None

    def get_many(self, keys: Sequence[bytes], at: Version | None = None) -> list[bytes | None]:
        if at is not None or self.retired:
            return [self.get(key, at) for key in keys]
        self.heat.reads += len(keys)
        prefixes = encode_prefixes(keys)
        values: list[bytes | None] = []
        for prefix, row in zip(prefixes, self._engine.ceilings(DATA, prefixes), strict=True):
            if row is None:
                values.append(None)
            elif row[1][-1:] in PLAIN_ENDS:
                values.append(row[1][:-1])
            else:
                live = self._live(prefix, (decode_version(row[0]), row[1]), None)
                values.append(None if live is None else live[1])
        return values

    def read_batches(
        self, keys: Sequence[bytes], among: Sequence[bytes], at: Version | None = None
    ) -> AtomicAnswer:
        return read_batches(
            self._committer, self._engine, self._clock, self._serving, keys, among, at, self._require_kept
        )

    def scan(
        self, keys: KeyRange, at: Version, *, rows_max: int | None = None, reverse: bool = False
    ) -> Iterator[list[tuple[bytes, bytes]]]:
        assert keys.end is not None
        namespace = keys.start[:NAMESPACE_BYTES]
        start, end = encode_prefix(keys.start), encode_prefix(keys.end)
        # A few more than asked for: some rows may be dead or older versions.
        page_rows = PAGE_ROWS_MAX if rows_max is None else min(rows_max + 16, PAGE_ROWS_MAX)
        resume: bytes | None = start
        judged_ms = self._clock.judged_ms(at)
        while resume is not None:
            self._prepare_read(namespace, at, keys)
            page = scan_page(self._engine, start, end, at, judged_ms, rows_max=page_rows, reverse=reverse)
            self._require_kept(namespace, at)
            self.heat.reads += len(page.rows)
            # Many dead keys one after the other are passed in ever larger pages.
            page_rows = min(2 * page_rows, PAGE_ROWS_MAX)
            yield page.rows
            resume = page.resume
            # Freed before the next page is read.
            del page
            if resume is not None:
                start, end = (start, resume) if reverse else (resume, end)

    def scan_records(
        self, keys: KeyRange, at: Version, *, dead: bool = False, content: Content = Content.WHOLE
    ) -> Iterator[pyarrow.RecordBatch]:
        assert keys.end is not None
        namespace = keys.start[:NAMESPACE_BYTES]
        resume: bytes | None = encode_prefix(keys.start)
        end = encode_prefix(keys.end)
        judged_ms = self._clock.judged_ms(at)
        while resume is not None:
            self._prepare_read(namespace, at, keys)
            batch, resume = scan_records_page(
                self._engine, resume, end, at, self.id, dead=dead, content=content, judged_ms=judged_ms
            )
            self._require_kept(namespace, at)
            self.heat.reads += batch.num_rows
            yield batch

    def settle(self, keys: Sequence[bytes], at: Version) -> None:
        for key in keys:
            self._prepare_read(key[:NAMESPACE_BYTES], at, key)
        # A read checks the lease: an owner that was replaced meanwhile does not know of later writes.
        find_rows(self._engine, encode_prefixes(keys[:1]), at)
        self.heat.reads += len(keys)

    def _live(
        self, prefix: bytes, found: tuple[Version, bytes] | None, at: Version | None
    ) -> tuple[Record, bytes] | None:
        """The record of a stored row, and its value; None if it is dead."""
        if found is None:
            return None
        version, stored = found
        now_ms = self._clock.physical_ms() if at is None else self._clock.judged_ms(at)
        return read_record(prefix + encode_version(version), stored, now_ms)

    def _prepare_read(self, namespace: bytes, at: Version, keys: bytes | KeyRange | None = None) -> None:
        """Return when no write at or below `at` is still to come; raise if history does not reach back to it.

        `keys` is the key or range to be read; None stands for the whole namespace.
        """
        if self.retired:
            raise moved(self)
        if at > self._clock.latest:
            observe_version(self._committer, at)
        if at > self._committer.swaps.known:
            self._committer.swaps.learn(at)
        self._committer.wait_applied(at)
        # Once more: a partition given away before the clock passed `at` was sealed below `at`, and its new
        # owner may still write in between.
        if self.retired:
            raise moved(self)
        floor = self._prepared.floor
        if floor is not None and floor < at:
            # Later prepares lie above `at`, which the clock has passed.
            if isinstance(keys, bytes):
                writes = [write for write in self._prepared.on((keys,)) if write.version <= at]
            else:
                within = keys or KeyRange(namespace, prefix_end(namespace))
                writes = self._prepared.within(within, until=at)
            self._settle(writes)
        self._require_kept(namespace, at)

    def _require_kept(self, namespace: bytes, at: Version) -> None:
        require_kept(at, self._collected.get(namespace, 0))

    # Writes

    def put(self, keys: Sequence[bytes], values: Sequence[bytes], *, durable: bool) -> Version:
        if len(keys) == 1 == len(values):
            key = keys[0]
            self._entrance.check(keys, values, WriteKind.PUT)
            return self._committer.commit_one(self, key, encode_bytes(b"r" + key), values[0], durable=durable)
        return self._committer.commit(plan_put(self, keys, values, durable=durable))

    def merge(self, keys: Sequence[bytes], values: Sequence[bytes], *, durable: bool) -> Version:
        writes = self._enter(keys, values, WriteKind.MERGE)

        def decide(mint: Mint) -> Writes | None:
            return _merged(self, writes, write_at(mint(), self._site_id))

        return self._conditional.run(decide, durable=durable).version

    def compare_and_set(self, key: bytes, expected: bytes | None, value: bytes, *, durable: bool) -> Version:
        writes = self._enter([key], [value], WriteKind.WRITE)

        def decide(mint: Mint) -> Writes | None:
            if self.get(key) != expected:
                return None
            return _merged(self, writes, write_at(mint(), self._site_id)) if is_state(value) else writes

        return self._conditional.run(decide, durable=durable, on=(key,)).version

    def write(
        self,
        keys: Sequence[bytes],
        values: Sequence[bytes],
        *,
        durable: bool,
        batch: bool = False,
        reads: ReadSet | None = None,
        transaction: str = "",
    ) -> Version:
        return self._writing.write(
            self, keys, values, reads, durable=durable, batch=batch, transaction=transaction
        )

    def delete_unchanged(self, keys: Sequence[bytes], since: Version, *, durable: bool) -> int:
        check_keys(keys)
        check_fits(self.limits, len(keys), sum(map(len, keys)))
        self._entrance.meet(namespaces_of(keys))

        def decide() -> dict[bytes, bytes]:
            found = ((key, _live_since(self, key, since)) for key in keys)
            return {key: deletion_of(stored) for key, stored in found if stored is not None}

        make = partial(Decided, self._committer, self._serving, keys, decide, durable=durable)
        return commit_decided(self._committer, make).changes

    def apply(
        self,
        keys: Sequence[bytes],
        values: Sequence[bytes],
        *,
        durable: bool,
        link: LinkGuard | None = None,
    ) -> Version:
        if not _are_within(self.range, keys):
            return commit_parts(
                self._committer,
                self._serving,
                keys,
                values,
                lambda partition, *rows: partition.copying(*rows),
                durable=durable,
                link=link,
            ).version
        decide = _admitted(self._entrance, link, self.copying(keys, values))
        return self._conditional.run(decide, durable=durable).version

    def load(self, keys: Sequence[bytes], values: Sequence[bytes], *, durable: bool) -> Version:
        return self._conditional.run(self.copying(keys, values, loaded=True), durable=durable).version

    def copying(self, keys: Sequence[bytes], values: Sequence[bytes], *, loaded: bool = False) -> Decide:
        """A commit of copies of other sites' records, checked, with the clock moved past their stamps."""
        writes = self._enter(keys, values, WriteKind.COPY, own=False, loaded=loaded)
        copies = gather_copies(writes.keys, writes.values, self._site_id)
        if copies is None:
            self._observe_stamps(writes)
            if has_states(writes.values):
                return lambda mint: _applied(self, writes, apply_at(mint(), self._site_id))
        else:
            writes.copies = copies
            self._committer.observe(copies.latest)

        def decide(_: Mint) -> Writes | None:
            kept = _not_replaced(self, writes)
            if kept is not None:
                newest = newest_stamps(self._engine, kept.prefixes, self._site_id)
                if any(newest):
                    kept = kept.only([*map(gt, find_origins(kept.values), newest)])
            if kept is not None and kept is not writes and copies is not None:
                kept.copies = gather_copies(kept.keys, kept.values, self._site_id)
            return kept

        return decide

    def repair(self, keys: Sequence[bytes], values: Sequence[bytes], seen: Sequence[Version]) -> list[bytes]:
        writes = self._enter(keys, values, WriteKind.COPY, own=False)
        self._committer.observe(stamp_version(max(find_origins(writes.values))))
        versions = dict(zip(keys, seen, strict=True))
        decide = write_where_seen(self._engine, writes, [versions[key] for key in writes.keys], self._site_id)
        commit = self._conditional.run(decide, durable=True, on=writes.keys)
        return [] if commit.writes is None else list(commit.writes.keys)

    def put_unchanged(
        self, keys: Sequence[bytes], values: Sequence[bytes], since: Version, *, durable: bool
    ) -> int:
        if not _are_within(self.range, keys):
            return commit_parts(
                self._committer,
                self._serving,
                keys,
                values,
                lambda partition, *rows: partition.putting_unchanged(*rows, since),
                durable=durable,
                on_keys=True,
            ).changes
        decide = self.putting_unchanged(keys, values, since)
        commit = self._conditional.run(decide, durable=durable, on=keys)
        return 0 if commit.writes is None else len(commit.writes.keys)

    def putting_unchanged(self, keys: Sequence[bytes], values: Sequence[bytes], since: Version) -> Decide:
        """A commit of the keys that were neither written nor published above `since`, checked."""
        writes = self._enter(keys, values, WriteKind.WRITE)
        self._committer.observe(since)
        # The highest stamp of that version.
        unchanged = encode_stamp(since, SITE_IDS_MAX)
        stated = has_states(values)

        def decide(mint: Mint) -> Writes | None:
            if stated:
                return _merged(self, writes, write_unchanged_at(mint(), self._site_id, since))
            newest = newest_stamps(self._engine, writes.prefixes, self._site_id)
            bases = published_bases(self._engine, writes.keys)
            pairs = zip(newest, bases, strict=True)
            return writes.only([stamp <= unchanged and base <= since for stamp, base in pairs])

        return decide

    def validate(self, transaction: str, reads: ReadSet, at: Version) -> None:
        self._committer.observe(at)
        self._committer.swaps.learn(at)
        self._committer.wait_applied(at)
        validation = Validation(self._committer, self._clock, self._serving, self._collected, reads)
        validation.require_unchanged_until(at, transaction)
        # As before a read: a new owner may still write at or below `at`.
        if self.retired:
            raise moved(self)

    def resolved_version(self) -> Version:
        # Not the node's: prepared writes hold back only the partitions that they are in.
        resolved = self._committer.resolve(self.range)
        # A new owner may write below what this node resolves to after it has given the partition away.
        if self.retired:
            raise moved(self)
        return self._announced.advance(resolved)


def _are_within(within: KeyRange, keys: Sequence[bytes]) -> bool:
    return not keys or all(map(within.contains, ends_of(keys)))


def _admitted(entrance: Entrance, link: LinkGuard | None, decide: Decide) -> Decide:
    """A decision whose writes are guarded, so that they are stored only if the link has not moved on."""
    if link is None:
        return decide

    def admit_first(mint: Mint) -> Writes | None:
        # Before the records are read: a removal after that moves a guard.
        guards = entrance.admit(link)
        writes = decide(mint)
        if writes is not None:
            writes.guards = guards
        return writes

    return admit_first


def _not_replaced(partition: LocalPartition, writes: Writes) -> Writes | None:
    """The copies that are not older than the data set published into their namespace."""
    published = published_stamps(partition._engine, writes.keys)
    if published is None:
        return writes
    pairs = zip(find_origins(writes.values), published, strict=True)
    return writes.only([origin == stamp or is_later(origin, stamp) for origin, stamp in pairs])


def _applied(partition: LocalPartition, writes: Writes, merge: Merge) -> Writes | None:
    kept = _not_replaced(partition, writes)
    return None if kept is None else _merged(partition, kept, merge)


def _merged(partition: LocalPartition, writes: Writes, merge: Merge) -> Writes | None:
    return merge_writes(partition._engine, writes, partition.limits, merge)


def _live_since(partition: LocalPartition, key: bytes, since: Version) -> bytes | None:
    """The stored record of a live key that was not written after a version."""
    if swapped_at(partition._engine, key[:NAMESPACE_BYTES]) > since:
        return None
    prefix = encode_prefix(key)
    found = find_stored(partition._engine, prefix, None)
    if found is None or found[0] > since or partition._live(prefix, found, None) is None:
        return None
    return found[1]


def observe_version(committer: Committer, version: Version) -> None:
    """Move the clock past a version that is read; raises `VersionInFuture`."""
    try:
        committer.observe(version, skew_ms_max=READ_SKEW_MS_MAX)
    except ClockSkew as error:
        raise VersionInFuture(
            f"version {version} ({moment_of(version).isoformat()}) lies in the future of this site; "
            "read at the present by leaving out the version",
            version=version,
        ) from error


def plan_put(
    partition: LocalPartition, keys: Sequence[bytes], values: Sequence[bytes], *, durable: bool
) -> Commit:
    """The commit of a `put`, checked, for a round that the caller leads."""
    return Commit(partition, partition._enter(keys, values, WriteKind.PUT), durable=durable)


def plan_write(
    partition: LocalPartition,
    keys: Sequence[bytes],
    values: Sequence[bytes],
    reads: ReadSet | None,
    *,
    durable: bool,
    batch: bool,
    transaction: str,
) -> Commit:
    """The commit of a `write` without states, checked, for a round that the caller leads."""
    return partition._writing.plan(
        partition, keys, values, reads, durable=durable, batch=batch, transaction=transaction
    )


def may_wait(partition: LocalPartition, at: Version) -> bool:
    """Whether a read as of a version, or of the read version, may wait for a round or a prepared write."""
    floor, latest = partition._committer.floors.round, partition._clock.latest
    is_at_work = floor is not None and (floor < at or latest - floor >= FLOOR_AGE_MAX)
    return is_at_work or at > latest or partition._prepared.floor is not None
