"""The part of a partition of this process that takes the steps of prepared writes, and settles them."""

from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Final

from floodmark.codec.appends import highest_after, mark_write
from floodmark.codec.stamps import find_origins, stamp_version
from floodmark.engine import Engine
from floodmark.model.partition import CommitLimits, Fate, LinkGuard
from floodmark.model.ranges import KeyRange
from floodmark.model.version import Version
from floodmark.partition.commit.commit import CommitTally, Writes, arrange
from floodmark.partition.commit.entering import Entrance, WriteKind, check_fits
from floodmark.partition.commit.merging import has_origins, is_state, newest_version
from floodmark.partition.committer import Committer, moved
from floodmark.partition.conflicts import Reserve
from floodmark.partition.families import META
from floodmark.partition.heat import Heat
from floodmark.partition.prepared.outcomes import BATCHES
from floodmark.partition.prepared.settling import SETTLES_MAX, settle_writes, try_settle, wait_seconds_max
from floodmark.partition.prepared.steps import AbortPrepared, CommitPrepared, Prepare, require_preparable
from floodmark.partition.prepared.writes import OpenWrite, PreparedWrites, conflict

# How often a prepare polls for the end of a conflicting write; it waits in line for the same time.
PREPARE_ASKS_MAX: Final = 40


class PreparingPartition:
    """Prepares, commits and aborts writes of transactions and atomic batches."""

    id: int
    range: KeyRange
    log_id: int
    limits: CommitLimits
    retired: bool
    sealing: bool
    tallies: deque[CommitTally]
    heat: Heat
    _committer: Committer
    _prepared: PreparedWrites
    _entrance: Entrance
    _engine: Engine

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
        writes = self._check_prepared(transaction, keys, values, siblings, members)
        if batch:
            writes.values = list(map(mark_write, writes.values))
        self._committer.observe(highest_after(values))
        lines = self._prepared.lines
        # If this one has prepared already, those in line may wait for it.  A batch waits for no transaction.
        is_first = siblings or not waits or lines.is_free(writes.keys)
        if is_first or self._prepared.find(transaction, self.range) is not None:
            step = self._try_prepare(transaction, writes, siblings, members, link)
            if not step.blocking:
                return step.version
            if not waits:
                raise conflict(step.blocking[0])
        wait_seconds = wait_seconds_max(PREPARE_ASKS_MAX)
        with nullcontext() if siblings else lines.standing(writes.keys, seconds_max=wait_seconds):
            for _ in range(SETTLES_MAX):
                step = self._try_prepare(transaction, writes, siblings, members, link)
                if not step.blocking:
                    return step.version
                # Not for long: two transactions that wait for each other would wait until their deadline.
                settle_writes(self, step.blocking, self._prepared.ask, asks=PREPARE_ASKS_MAX)
        raise conflict(step.blocking[0])

    def plan_prepare(
        self,
        transaction: str,
        keys: Sequence[bytes],
        values: Sequence[bytes],
        siblings: Sequence[bytes],
        members: Sequence[bytes],
        link: LinkGuard | None,
    ) -> Prepare:
        """The step of a `prepare`, checked, for a round that the caller leads."""
        writes = self._check_prepared(transaction, keys, values, siblings, members)
        return Prepare(self._committer.place, self, transaction, writes, siblings, members, link)

    def plan_commit(self, transaction: str, version: Version) -> CommitPrepared:
        """The step of a `commit_prepared`, for a round that the caller leads."""
        self._committer.observe(version)
        return CommitPrepared(self._committer.place, self, transaction, version)

    def _check_prepared(
        self,
        transaction: str,
        keys: Sequence[bytes],
        values: Sequence[bytes],
        siblings: Sequence[bytes],
        members: Sequence[bytes],
    ) -> Writes:
        if siblings and has_origins(values):
            writes = self._enter(keys, values, WriteKind.COPY, own=False)
            self._observe_stamps(writes)
        else:
            writes = self._enter(keys, values, WriteKind.WRITE)
        require_preparable(self, transaction, writes, siblings, members)
        return writes

    def _try_prepare(
        self,
        transaction: str,
        writes: Writes,
        siblings: Sequence[bytes],
        members: Sequence[bytes],
        link: LinkGuard | None,
    ) -> Prepare:
        """Prepare a write unless others conflict with it; returns the step."""
        step = Prepare(self._committer.place, self, transaction, writes, siblings, members, link)
        self._committer.commit(step)
        return step

    def commit_prepared(self, transaction: str, version: Version) -> bool:
        return self._committer.commit(self.plan_commit(transaction, version)) != 0

    def abort_prepared(self, transaction: str, key: bytes | None = None) -> bool:
        if key is not None and not self.range.contains(key):
            raise moved(self)
        step = AbortPrepared(self._committer.place, self, transaction, key)
        return self._committer.commit(step) != 0

    def ask_prepared(self, transaction: str, key: bytes) -> Fate:
        if not self.range.contains(key):
            raise moved(self)
        step = AbortPrepared(self._committer.place, self, transaction, key, asks=True)
        self._committer.commit(step)
        return step.fate

    def ended_prepared(self, transactions: Sequence[str], siblings: Sequence[bytes]) -> list[bool]:
        named = zip(transactions, siblings, strict=True)
        found = [self._prepared.find_first(transaction, key) is None for transaction, key in named]
        # A new owner may have it prepared.  Any read checks the lease.
        self._engine.get(META, BATCHES)
        if self.retired or not all(map(self.range.contains, siblings)):
            raise moved(self)
        return found

    def reserve(self, transaction: str, within: KeyRange, at: Version | None = None) -> Version:
        conflicts = self._committer.conflicts
        if at is not None:
            conflicts.decide(transaction, at)
            return 0
        if self.range.intersect(within) != within:
            raise moved(self)
        engine = self._committer.place.engine
        return self._committer.commit(Reserve(conflicts, engine, self, transaction, (within,)))

    def settle_prepared(self) -> None:
        """Return when the writes that are prepared here now have ended."""
        self._settle(self._prepared.within(self.range))

    def settle_decided(self, until: Version) -> None:
        """End the writes that were prepared here at or below a version and are decided."""
        for write in self._prepared.within(self.range, until):
            try_settle(self, write, self._prepared.ask)

    def _settle(self, writes: Sequence[OpenWrite]) -> None:
        settle_writes(self, writes, self._prepared.ask)

    def _enter(
        self,
        keys: Sequence[bytes],
        values: Sequence[bytes],
        kind: WriteKind,
        *,
        own: bool = True,
        loaded: bool = False,
    ) -> Writes:
        """Check keys and values; returns the rows of their commit."""
        self._entrance.check(keys, values, kind)
        writes = arrange(keys, values, own=own, loaded=loaded)
        check_fits(self.limits, len(writes.keys), writes.size)
        return writes

    def _observe_stamps(self, writes: Writes) -> None:
        """Move the clock past the stamps of copies: later writes of this site must win over all of them."""
        origin = stamp_version(max(find_origins(writes.values)))
        self._committer.observe(max([origin, *map(newest_version, filter(is_state, writes.values))]))
