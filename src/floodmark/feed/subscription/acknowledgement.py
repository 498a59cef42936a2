"""Tracks which delivered changes of a subscription are acknowledged.

The position of a change is its commit and its index among the commit's changes.  A subscription keeps
`through`, at or below which everything was delivered, and the *live* changes: delivered, and not
acknowledged yet.  A change at or below `through` that is not live is done.

As in the acknowledgement of batches by index, a change has one bit, and 1 means live.  A commit may have
a million changes of which two are live, so the bits are kept as runs: the indexes at which they turn.

    index   0 1 2 3 4 5 6 7
    live    1 1 0 0 1 0 0 0        runs [0, 2, 4, 5]

So the state grows only with the number of unacknowledged changes, which is limited.

A snapshot at a version is delivered as one commit of that version, however large it is.  A *mark* names a row
index and the key after which the rows from this index on are read, so that a consumer can resume in the
middle.

Bits only change from 1 to 0 and counts only grow, so reports are idempotent: a consumer that gets no answer
repeats its report.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from itertools import pairwise
from operator import attrgetter
from typing import Final

import msgspec

from floodmark.model.errors import InvalidArgument
from floodmark.model.version import Version

# The maximum number of marks that a consumer keeps for a snapshot.
MARKS_MAX: Final = 64


class ChangePosition(msgspec.Struct, frozen=True, order=True, array_like=True):
    """The position of a change: its commit version, and its index among the commit's subscribed changes.

    >>> ChangePosition(7, 2) < ChangePosition(7, 10) < ChangePosition(8, 0)
    True
    """

    version: Version
    index: int


class SnapshotMark(msgspec.Struct, frozen=True, array_like=True):
    """A position in a snapshot: the rows from `index` on have keys above the qualified key `key`."""

    index: int = 0
    key: bytes = b""


class Acknowledgement(msgspec.Struct, frozen=True, kw_only=True):
    """Acknowledged changes: single positions, and all changes at or below a position."""

    positions: list[ChangePosition] = []
    through: ChangePosition | None = None


class LiveCommit(msgspec.Struct, array_like=True):
    """A commit with the number of its delivered changes and the runs of the live ones."""

    version: Version
    count: int
    runs: list[int]

    def copy(self) -> "LiveCommit":
        return LiveCommit(self.version, self.count, self.runs.copy())

    @property
    def unacked(self) -> int:
        """How many changes are live.

        >>> LiveCommit(7, 8, [0, 2, 4, 5]).unacked
        3
        """
        return sum(self.runs[1::2]) - sum(self.runs[::2])

    def is_live(self, index: int) -> bool:
        """Whether a change is live.

        >>> [LiveCommit(7, 8, [0, 2, 4, 5]).is_live(index) for index in range(6)]
        [True, True, False, False, True, False]
        """
        return bisect_right(self.runs, index) % 2 == 1

    def extend(self, count: int, runs: list[int]) -> None:
        """Add the changes from the present count on; the runs of earlier ones are ignored.

        >>> commit = LiveCommit(7, 3, [0, 1])
        >>> commit.extend(6, [0, 4, 5, 6]); commit
        LiveCommit(version=7, count=6, runs=[0, 1, 3, 4, 5, 6])
        """
        if count <= self.count:
            return
        added = _without(runs, 0, self.count)
        if added and self.runs and added[0] == self.runs[-1]:
            # The last run continues.
            del self.runs[-1], added[0]
        self.runs += added
        self.count = count

    def acknowledge(self, start: int, end: int) -> int:
        """Clear the bits of `[start, end)`; returns how many were live.

        >>> commit = LiveCommit(7, 8, [0, 2, 4, 5])
        >>> commit.acknowledge(1, 5), commit.runs
        (2, [0, 1])
        """
        before = self.unacked
        self.runs = _without(self.runs, start, end)
        return before - self.unacked


def _without(runs: list[int], start: int, end: int) -> list[int]:
    """Runs without the indexes in `[start, end)`."""
    low, high = bisect_left(runs, start), bisect_right(runs, end)
    # A bound at an odd index ends a run: if a run is cut, a new bound replaces it.
    return runs[:low] + [start] * (low % 2) + [end] * (high % 2) + runs[high:]


def commits_of(positions: Iterable[ChangePosition]) -> list[LiveCommit]:
    """Commits in which exactly the given changes are live, in order.

    >>> commits_of([ChangePosition(8, 0), ChangePosition(7, 2), ChangePosition(7, 1)])
    [LiveCommit(version=7, count=3, runs=[1, 3]), LiveCommit(version=8, count=1, runs=[0, 1])]
    """
    commits: dict[Version, LiveCommit] = {}
    for version, index in sorted((position.version, position.index) for position in positions):
        commits.setdefault(version, LiveCommit(version, 0, [])).extend(index + 1, [index, index + 1])
    return list(commits.values())


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """A consumer's report: its deliveries and its acknowledgements.

    `delivered` are the commits with changes delivered since the last report, without those that have been
    acknowledged completely, which `through` covers.  All rows of a snapshot before `mark` are acknowledged.
    """

    through: Version
    delivered: list[LiveCommit] = []
    acknowledgement: Acknowledgement = Acknowledgement()
    mark: SnapshotMark | None = None

    def is_news(self, through: Version) -> bool:
        """Whether the report changes anything at a site that knows all deliveries up to a version.

        >>> Progress(through=7).is_news(6), Progress(through=7).is_news(7)
        (True, False)
        """
        return self.through > through or bool(self.delivered) or self.acknowledgement != Acknowledgement()

    def tells_of(self, acknowledgement: Acknowledgement) -> bool:
        """Whether the acknowledgement covers one of the reported deliveries.

        >>> progress = Progress(through=7, delivered=[LiveCommit(7, 2, [1, 2])])
        >>> progress.tells_of(Acknowledgement(positions=[ChangePosition(7, 1)]))
        True
        """
        versions = [commit.version for commit in self.delivered]
        for position in acknowledgement.positions:
            place = bisect_left(versions, position.version)
            commits = self.delivered[place : place + 1]
            if any(each.version == position.version and each.is_live(position.index) for each in commits):
                return True
        through = acknowledgement.through
        return bool(versions) and through is not None and versions[0] <= through.version

    def require_sound(self) -> None:
        """Raise `InvalidArgument` for a malformed report."""
        versions = [commit.version for commit in self.delivered]
        if not (
            all(earlier < later for earlier, later in pairwise(versions))
            and all(version <= self.through for version in versions[:-1])
            and all(map(_is_sound, self.delivered))
        ):
            raise InvalidArgument(
                "the deliveries of a subscription are reported commit by commit in order of versions, with "
                "rising runs of indexes below the commit's count, and all but the last at or below `through`"
            )


def _is_sound(commit: LiveCommit) -> bool:
    runs = commit.runs
    return (
        commit.version > 0
        and commit.count > 0
        and len(runs) % 2 == 0
        and all(earlier < later for earlier, later in pairwise(runs))
        and (not runs or (runs[0] >= 0 and runs[-1] <= commit.count))
    )


class Deliveries:
    """The deliveries of a subscription, and which of them are live.

    The commit that is being delivered is above `through`.  It is kept until it is complete, even without live
    changes, because delivery resumes at its count.

    Commits are copied on write: callers share them, so that passing thousands of them is cheap.  A copied
    commit is changed in place until it is shared again.
    """

    def __init__(self, through: Version, live: Iterable[LiveCommit] = ()) -> None:
        self.through = through
        # By version, in version order, which is also the order of delivery.
        self._commits = {commit.version: commit for commit in live}
        # The versions of commits that are not shared.
        self._own: set[Version] = set()
        self.unacked = sum(commit.unacked for commit in self._commits.values())

    def copy(self) -> "Deliveries":
        """A copy that may be changed."""
        self._own.clear()
        copied = Deliveries(self.through)
        copied._commits, copied.unacked = self._commits.copy(), self.unacked
        return copied

    @property
    def commit_count(self) -> int:
        """The number of commits with live changes, and the one that is being delivered."""
        return len(self._commits)

    def live(self) -> list[LiveCommit]:
        """The commits with live changes, and the one that is being delivered, in order."""
        self._own.clear()
        return list(self._commits.values())

    def find(self, version: Version) -> LiveCommit | None:
        """A commit with live changes, or the one that is being delivered.  The caller must not keep it."""
        return self._commits.get(version)

    def is_delivered(self, position: ChangePosition) -> bool:
        """Whether a change was delivered."""
        if position.version <= self.through:
            return True
        commit = self._commits.get(position.version)
        return commit is not None and position.index < commit.count

    def is_live(self, position: ChangePosition) -> bool:
        """Whether a change was delivered and not acknowledged."""
        commit = self._commits.get(position.version)
        return commit is not None and commit.is_live(position.index)

    def live_positions(self, through: ChangePosition | None = None) -> Iterator[ChangePosition]:
        """The live changes, all or those at or below a position, in order.

        >>> list(Deliveries(9, [LiveCommit(7, 8, [0, 2, 4, 5])]).live_positions(ChangePosition(7, 1)))
        [ChangePosition(version=7, index=0), ChangePosition(version=7, index=1)]
        """
        for commit in self._commits.values():
            for start, end in zip(commit.runs[::2], commit.runs[1::2], strict=True):
                for index in range(start, end):
                    position = ChangePosition(commit.version, index)
                    if through is not None and position > through:
                        return
                    yield position

    def deliver(self, position: ChangePosition) -> None:
        """Enter the delivery of the next change."""
        if position.version not in self._commits:
            # A commit begins when earlier ones are complete.
            self.complete(position.version - 1)
        commit = self._exchange(position.version)
        commit.extend(position.index + 1, [position.index, position.index + 1])
        self.unacked += 1

    def complete(self, through: Version) -> None:
        """Enter that every change at or below a version was delivered."""
        if through > self.through:
            self.through = through
            last = next(reversed(self._commits), None)
            if last is not None:
                self._forget_if_done(self._commits[last])

    def learn(self, progress: Progress) -> None:
        """Enter the deliveries that a consumer reports."""
        for told in progress.delivered:
            if told.version in self._commits or told.version > self.through:
                self._learn_commit(told)
            # Otherwise the commit was reported before, and acknowledged since.
        self.complete(progress.through)

    def _learn_commit(self, told: LiveCommit) -> None:
        if told.version not in self._commits:
            last = next(reversed(self._commits), 0)
            if told.version < last:
                raise InvalidArgument(
                    f"commit {told.version} was delivered out of order: {last} is known already"
                )
            self.complete(told.version - 1)
        commit = self._exchange(told.version)
        before = commit.unacked
        commit.extend(told.count, told.runs)
        self.unacked += commit.unacked - before

    def require_delivered(self, acknowledgement: Acknowledgement) -> None:
        """Raise `InvalidArgument` for changes that were not delivered."""
        through = [] if acknowledgement.through is None else [acknowledgement.through]
        for position in [*acknowledgement.positions, *through]:
            if position.index < 0 or not self.is_delivered(position):
                raise InvalidArgument(
                    f"{position} was not delivered by this subscription; acknowledge a delivery, or its "
                    "`position`, of this subscription only",
                    version=position.version,
                    index=position.index,
                )

    def has_live(self, through: ChangePosition) -> bool:
        """Whether a change at or below a position is live."""
        return any(
            commit.runs and (commit.version < through.version or commit.runs[0] <= through.index)
            for commit in self._up_to(through.version)
        )

    def has_any_live(self, acknowledgement: Acknowledgement) -> bool:
        """Whether an acknowledgement covers a live change."""
        through = acknowledgement.through
        return any(map(self.is_live, acknowledgement.positions)) or (
            through is not None and self.has_live(through)
        )

    def acknowledge(self, acknowledgement: Acknowledgement) -> int:
        """Clear the bits of delivered changes; returns how many were live."""
        before = self.unacked
        for position in acknowledgement.positions:
            self._acknowledge(position.version, position.index, position.index + 1)
        if (through := acknowledgement.through) is not None:
            for commit in list(self._up_to(through.version)):
                end = commit.count if commit.version < through.version else through.index + 1
                self._acknowledge(commit.version, 0, end)
        return before - self.unacked

    def _exchange(self, version: Version) -> LiveCommit:
        """The commit of a version, replaced by a copy if it is shared, so that it can be changed."""
        known = self._commits.get(version)
        if known is not None and version in self._own:
            return known
        commit = self._commits[version] = LiveCommit(version, 0, []) if known is None else known.copy()
        self._own.add(version)
        return commit

    def _acknowledge(self, version: Version, start: int, end: int) -> None:
        if version in self._commits:
            commit = self._exchange(version)
            self.unacked -= commit.acknowledge(start, end)
            self._forget_if_done(commit)

    def _forget_if_done(self, commit: LiveCommit) -> None:
        if not commit.runs and commit.version <= self.through:
            del self._commits[commit.version]
            self._own.discard(commit.version)

    def _up_to(self, version: Version) -> Iterator[LiveCommit]:
        for commit in self._commits.values():
            if commit.version > version:
                return
            yield commit


class DeliveryAccount:
    """A consumer's own account of its deliveries, and the part that is not reported yet.

    A change that is delivered and acknowledged between two reports is never reported, so a consumer that
    acknowledges each change at once reports little more than a version.

    `snapshot` is the version of the snapshot with which the subscription began, and `mark` a mark in it.
    """

    def __init__(
        self,
        through: Version,
        live: Iterable[LiveCommit] = (),
        snapshot: Version | None = None,
        mark: SnapshotMark | None = None,
    ) -> None:
        self.deliveries = Deliveries(through, live)
        self.snapshot = snapshot
        # Some of the marks passed in the snapshot, from which its rows can be read again.
        self._marks = [mark or SnapshotMark()]
        self._told_mark = mark
        # Unreported acknowledgements.
        self.untold = 0
        self.told_through = through
        # The number of reported changes of each commit; they may be acknowledged.
        self._told = {commit.version: commit.count for commit in self.deliveries.live()}
        # Commits with unreported changes, as an ordered set: the values are unused.
        self._grown: dict[Version, None] = {}
        self._positions: list[ChangePosition] = []
        self._through: ChangePosition | None = None

    @property
    def is_at_snapshot(self) -> bool:
        """Whether a part of the snapshot is not delivered."""
        return self.snapshot is not None and self.deliveries.through < self.snapshot

    def note_mark(self, mark: SnapshotMark) -> None:
        """Add a mark in the snapshot."""
        if mark.index > self._marks[-1].index:
            self._marks.append(mark)
            if len(self._marks) > MARKS_MAX:
                # Keep the first mark for the oldest live row, and the last one for resuming.
                del self._marks[1:-1:2]

    def find_place(self, index: int | None = None) -> tuple[Version, SnapshotMark] | None:
        """Where to read the snapshot from, for a row or for the next one; None if there is no snapshot."""
        if self.snapshot is None:
            return None
        if index is None:
            commit = self.deliveries.find(self.snapshot)
            index = 0 if commit is None else commit.count
        return self.snapshot, self._marks[self._find_mark(index)]

    def _find_mark(self, index: int) -> int:
        """The last mark at or before a row."""
        return max(0, bisect_right(self._marks, index, key=attrgetter("index")) - 1)

    def deliver(self, position: ChangePosition) -> None:
        """Enter the delivery of a change."""
        self.deliveries.deliver(position)
        self._grown[position.version] = None

    def acknowledge(self, acknowledgement: Acknowledgement) -> None:
        """Enter the acknowledgement of changes, which must have been delivered."""
        self.deliveries.require_delivered(acknowledgement)
        self._positions += [
            position
            for position in acknowledgement.positions
            if position.index < self._told.get(position.version, 0) and self.deliveries.is_live(position)
        ]
        acknowledged = self.deliveries.acknowledge(acknowledgement)
        through = acknowledgement.through
        if acknowledged and through is not None and (self._through is None or through > self._through):
            self._through = through
        self.untold += acknowledged

    def is_told(self, acknowledgement: Acknowledgement) -> bool:
        """Whether all acknowledged deliveries were reported."""
        through, untold = acknowledgement.through, next(iter(self._grown), None)
        return all(
            position.index < self._told.get(position.version, 0) for position in acknowledgement.positions
        ) and (through is None or untold is None or untold > through.version)

    def take(self) -> Progress | None:
        """The next report, which counts as reported from now on; None if nothing is unreported."""
        progress = Progress(
            through=self.deliveries.through,
            delivered=list(self._take_grown()),
            acknowledgement=Acknowledgement(positions=self._positions, through=self._through),
            mark=self._take_mark(),
        )
        is_news = self.untold > 0 or progress.is_news(self.told_through)
        self.untold = 0
        self.told_through = progress.through
        self._positions, self._through = [], None
        return progress if is_news else None

    def _take_mark(self) -> SnapshotMark | None:
        """The mark at or before the first live row of the snapshot, if it is a new one."""
        commit = None if self.snapshot is None else self.deliveries.find(self.snapshot)
        if commit is None:
            return None
        first = commit.runs[0] if commit.runs else commit.count
        # Earlier marks are needed only for earlier rows, which are acknowledged.
        del self._marks[: self._find_mark(first)]
        mark = self._marks[0]
        if mark == self._told_mark or not mark.index:
            return None
        self._told_mark = mark
        return mark

    def _take_grown(self) -> Iterator[LiveCommit]:
        for version in self._grown:
            commit = self.deliveries.find(version)
            if commit is not None:
                yield LiveCommit(version, commit.count, _without(commit.runs, 0, self._told.get(version, 0)))
                self._told[version] = commit.count
        self._grown = {}
        if len(self._told) > 2 * self.deliveries.commit_count:
            # Only sometimes, because this visits all commits.
            find = self.deliveries.find
            self._told = {version: count for version, count in self._told.items() if find(version)}
