"""Commits over any keys of a node that are decided inside their round, when all earlier commits can be read.

The caller's function reads what it needs and returns what to write.  No other commit comes between, so a
counter that is read and written here is exact, and a condition that was checked still holds.

**One node, one round.**  All partitions of a node share its engine and its committer.  So writes to several
of them are one commit: one version, and one atomic engine write with a change-log row for each partition.
It is never cut: a commit that the engine does not take in one write is refused.  An atomic batch is such a
commit whose records carry a mark (`codec/values.py`); its id is its version.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from floodmark.codec.appends import any_append, complete, late_append
from floodmark.codec.ordered import encode_prefix, encode_prefixes
from floodmark.codec.stamps import STAMP_BYTES
from floodmark.codec.values import mark_batch
from floodmark.engine import Engine, Row, WriteRow
from floodmark.merge.states import Written
from floodmark.model.partition import LinkGuard, Partition, PartitionMap
from floodmark.model.ranges import KeyRange
from floodmark.model.version import Version
from floodmark.partition.commit.commit import (
    Commit,
    CommitTally,
    Decide,
    Mint,
    RoundStep,
    Writes,
    encode_writes,
)
from floodmark.partition.commit.entering import WriteKind, check_fits
from floodmark.partition.commit.merging import Merge, has_states, is_state, merge_writes, write_at
from floodmark.partition.commit.tail import TailEntry
from floodmark.partition.committer import Committer, moved
from floodmark.partition.conflicts import Declared
from floodmark.partition.prepared.outcomes import NamedCommit
from floodmark.partition.prepared.settling import SETTLES_MAX, SettlingPartition, settle_writes
from floodmark.partition.prepared.steps import PreparingWriter, add_tally
from floodmark.partition.prepared.writes import OpenWrite, conflict
from floodmark.partition.read.records import find_stored

# Encoded values, or unstamped states, by their qualified keys; nothing is written if there are none.
Decision: TypeAlias = Callable[[], Mapping[bytes, bytes]]


class DecidingPartition(Partition, PreparingWriter, SettlingPartition, Protocol):
    """A partition of the node, as far as a decided commit needs it."""

    def copying(self, keys: Sequence[bytes], values: Sequence[bytes]) -> Decide:
        """The decision of a commit of copies."""

    def putting_unchanged(self, keys: Sequence[bytes], values: Sequence[bytes], since: Version) -> Decide:
        """The decision of a `put_unchanged`."""


Serving: TypeAlias = Callable[[], PartitionMap[DecidingPartition]]
# Checks the rows of one partition; returns the function that decides about them in the round.
Plan: TypeAlias = Callable[[DecidingPartition, Sequence[bytes], Sequence[bytes]], Decide]


class Part(NamedTuple):
    """The writes of a commit to one of its partitions."""

    partition: DecidingPartition
    writes: Writes
    tallies: Sequence[CommitTally]


class Decided(RoundStep):
    """A commit that is decided in its round, unless prepared writes block it: these are in `blocking` then,
    and the caller settles them before it tries again with another step.

    Prepared writes on the keys `on` block it.  Without `on` the decision depends on no key, and only
    prepared writes that its states would crowd block it.
    """

    is_commit = True

    def __init__(
        self,
        committer: Committer,
        serving: Serving,
        on: Sequence[bytes] | None,
        decide: Decision,
        *,
        durable: bool,
        batch: bool = False,
        checked: bool = False,
        named: NamedCommit | None = None,
        conflicts: Sequence[KeyRange] = (),
    ) -> None:
        super().__init__(None)
        self.durable = durable
        self.blocking: Sequence[OpenWrite] = ()
        self._committer = committer
        self._serving = serving
        self._on = on
        self._decision = decide
        self._is_batch = batch
        # Whether the writes were checked before, outside of the round.
        self._is_checked = checked
        self._named = named
        # The ranges that it declares as written.
        self._conflicts = conflicts
        self._parts: list[Part] = []

    @property
    def changes(self) -> int:
        """The number of keys that it wrote."""
        return sum(len(part.writes.keys) for part in self._parts)

    def take(self, mint: Mint) -> Sequence[WriteRow]:
        # Another node may change the catalog, and then a step is taken again.
        self._parts = []
        place = self._committer.place
        serving = self._serving()
        for key in self._on or ():
            route(serving, key)
        for declared in self._conflicts:
            for partition in serving.overlapping(declared):
                require_served(partition)
        if self._is_blocked():
            return ()
        if self._named is not None and (earlier := self._named.earlier(mint())):
            self.version = earlier
            return ()
        written = self._decision()
        if not written:
            return ()
        is_append = any_append([*written.values()])
        if is_append:
            written = complete(written, mint())
            if any(serving.route(key).retired for key in written):
                raise late_append(mint())
        keys = sorted(written)
        values = [written[key] for key in keys]
        if not self._is_checked:
            place.storage.entrance.check(keys, values, WriteKind.WRITE, in_turn=True)
        size = sum(map(len, keys)) + sum(map(len, values))
        if self._is_batch:
            # It is one commit at other sites, too, where each value carries its origin.
            size += STAMP_BYTES * len(keys)
        check_fits(serving.partitions[0].limits, len(keys), size)
        if place.storage.dropped:
            place.storage.require_not_dropped(keys)
        if place.storage.is_unusual:
            place.storage.require_writers()
        if self._is_batch:
            values = list(map(mark_batch, values))
        return self._encode(keys, values, serving, mint())

    def _is_blocked(self) -> bool:
        """Whether there are prepared writes on the keys that the decision depends on."""
        prepared = self._committer.prepared
        if self._on is not None and prepared.floor is not None:
            self.blocking = prepared.on(self._on)
        return bool(self.blocking)

    def _encode(
        self,
        keys: Sequence[bytes],
        values: Sequence[bytes],
        serving: PartitionMap[DecidingPartition],
        version: Version,
    ) -> Sequence[WriteRow]:
        prefixes, is_merged, parts = encode_prefixes(keys), has_states(values), []
        for partition, place in serving.group(keys):
            require_served(partition)
            own, stored = keys[place], values[place]
            writes = Writes(own, prefixes[place], stored, sum(map(len, own)) + sum(map(len, stored)))
            parts.append((partition, self._merge(partition, writes, version) if is_merged else writes))
        if self._is_batch:
            self._committer.place.batches.remember(version, frozenset(keys))
        return self._encode_parts(parts, version)

    def _encode_parts(
        self, parts: Sequence[tuple[DecidingPartition, Writes]], version: Version
    ) -> Sequence[WriteRow]:
        storage, site = self._committer.place.storage, self._committer.place.site
        rows: list[WriteRow] = []
        for partition, writes in parts:
            encoded, tallies = encode_writes(partition, writes, version, site, storage.log_row_bytes_max)
            rows += encoded
            self._parts.append(Part(partition, writes, tallies))
        if any(writes.logged is not None for _, writes in parts):
            if self._is_crowding(parts):
                return ()
            # The values fit, but the records that they are merged into may be too large for one write.
            storage.require_fitting(rows)
        if self._named is not None:
            rows.append(self._named.row(version))
        if self._conflicts:
            declared = Declared("", version, list(self._conflicts))
            rows.append(self._committer.conflicts.add(version, declared))
        self.version = version
        return rows

    def _merge(self, partition: DecidingPartition, writes: Writes, version: Version) -> Writes:
        if not has_states(writes.values):
            return writes
        place = self._committer.place
        merged = merge_writes(place.engine, writes, partition.limits, _write_any(version, place.site))
        assert merged is not None
        return merged

    def _is_crowding(self, parts: Sequence[tuple[DecidingPartition, Writes]]) -> bool:
        """Whether prepared writes block, since they would have too much to rewrite above them at commit."""
        prepared = self._committer.prepared
        if self._on is None and prepared.floor is not None:
            for partition, writes in parts:
                if not self.blocking and writes.logged is not None:
                    self.blocking = prepared.on_crowded(writes, partition.limits)
        return bool(self.blocking)

    def settle(self) -> None:
        """Wait for the end of the prepared writes that blocked the step, outside of the round."""
        for write in self.blocking:
            partition = self._serving().route(write.keys[0])
            settle_writes(partition, (write,), self._committer.prepared.ask)

    def is_written(self) -> bool:
        if not self._parts:
            # The same commit has written before, perhaps in this round.
            return self._named is not None and self._named.earlier(self.version) != 0
        partition, writes, _ = self._parts[-1]
        part = Commit(partition, writes, durable=self.durable)
        part.version = self.version
        return self._committer.is_written(part)

    def finish(self) -> None:
        tail = self._committer.tail
        if tail.is_open:
            for partition, writes, _ in self._parts:
                entry = TailEntry(self.version, partition.id, list(writes.keys), list(writes.changes))
                tail.insert(entry, {})

    def count(self, uncounted_through: Version) -> bool:
        for partition, writes, tallies in self._parts:
            for tally in tallies:
                add_tally(partition.tallies, tally)
            self._committer.counting.fold_many(partition)
            partition.heat.add_writes(len(writes.keys), writes.size)
        return True


def commit_decided(committer: Committer, make: Callable[[], Decided]) -> Decided:
    """Run a decided commit, settling the prepared writes that block it; returns the step that ran."""
    for _ in range(SETTLES_MAX):
        step = make()
        committer.commit(step)
        if not step.blocking:
            return step
        step.settle()
    raise conflict(step.blocking[0])


class PartedCommit(Decided):
    """A commit over several partitions, each of which decides which of its rows are written."""

    def __init__(
        self,
        committer: Committer,
        serving: Serving,
        on: Sequence[bytes] | None,
        planned: Sequence[tuple[DecidingPartition, Decide]],
        link: LinkGuard | None,
        *,
        durable: bool,
    ) -> None:
        super().__init__(committer, serving, on, dict, durable=durable)
        self._planned = planned
        self._link = link

    def take(self, mint: Mint) -> Sequence[WriteRow]:
        self._parts = []
        storage = self._committer.place.storage
        for partition, _ in self._planned:
            require_served(partition)
        if self._is_blocked():
            return ()
        if self._link is not None:
            # Before the records are read: a removal after that moves a guard.
            self.guards = storage.entrance.admit(self._link)
        decided = [(partition, decide(mint)) for partition, decide in self._planned]
        parts = [(partition, writes) for partition, writes in decided if writes is not None]
        for _, writes in parts:
            if storage.dropped:
                storage.require_not_dropped(writes.keys)
            if storage.is_unusual and writes.own:
                storage.require_writers()
        return self._encode_parts(parts, mint()) if parts else ()


def commit_parts(
    committer: Committer,
    serving: Serving,
    keys: Sequence[bytes],
    values: Sequence[bytes],
    plan: Plan,
    *,
    durable: bool,
    link: LinkGuard | None = None,
    on_keys: bool = False,
) -> Decided:
    """Run one commit to several partitions; returns the step, without a version if no partition wrote.

    With `on_keys` the decisions depend on the keys, and prepared writes on these are settled first.
    """
    ordered = sorted(zip(keys, values, strict=True))
    keys, values = [key for key, _ in ordered], [value for _, value in ordered]

    def make() -> Decided:
        groups = list(serving().group(keys))
        check_fits(groups[0][0].limits, len(keys), sum(map(len, keys)) + sum(map(len, values)))
        planned = [(partition, plan(partition, keys[place], values[place])) for partition, place in groups]
        return PartedCommit(committer, serving, keys if on_keys else None, planned, link, durable=durable)

    return commit_decided(committer, make)


def route(serving: PartitionMap[DecidingPartition], key: bytes) -> DecidingPartition:
    """The partition of a qualified key; PartitionMoved if another node has it."""
    partition = serving.route(key)
    require_served(partition)
    return partition


def require_served(partition: DecidingPartition) -> None:
    """Raise PartitionMoved if another node has a partition."""
    if partition.retired:
        raise moved(partition)


def newest_record(engine: Engine, key: bytes) -> tuple[Version, bytes] | None:
    """The newest record of a qualified key, dead or alive, and its version."""
    return find_stored(engine, encode_prefix(key), None)


def _write_any(version: Version, site: int) -> Merge:
    """States are merged, and other records replace what is there."""
    write = write_at(version, site)

    def merge(key: bytes, row: Row | None, value: bytes) -> Written | None:
        return write(key, row, value) if is_state(value) else Written(value, value)

    return merge
