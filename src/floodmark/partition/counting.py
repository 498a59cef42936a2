"""Counts commits: running totals for operators, and the tallies of heartbeats."""

from collections.abc import Sequence
from typing import Final

from floodmark.clock import HybridClock
from floodmark.model.version import Version
from floodmark.partition.commit.commit import Commit, CommittingPartition, RoundStep
from floodmark.partition.heartbeat import fold_tallies
from floodmark.partition.prepared.writes import PreparedWrites

# When more tallies of a partition wait for a heartbeat, they are folded.
TALLIES_MAX: Final = 4_096


class CommitCounting:
    """The totals of a node; only the thread that holds the turn changes them.

    Commits at or below `uncounted_through` may be uncounted: a heartbeat interval that begins before it is
    unchecked.
    """

    def __init__(self, prepared: PreparedWrites, clock: HybridClock) -> None:
        self.rounds = self.commits = 0
        self.uncounted_through: Version = clock.latest
        self._prepared = prepared
        self._clock = clock
        self._tallies_max = TALLIES_MAX

    def count(self, batch: Sequence[Commit]) -> None:
        """Count a round."""
        self.rounds += 1
        for commit in batch:
            if commit.version and commit.error is None and commit.writes is not None:
                assert commit.writer is not None
                commit.writer.tallies.extend(commit.tallies)
                self.fold_many(commit.writer)
                commit.writer.heat.add_writes(len(commit.writes.keys), commit.writes.size)
                self.commits += 1
        for commit in batch:
            if isinstance(commit, RoundStep) and commit.version and commit.error is None:
                self.commits += commit.is_commit
                if not commit.count(self.uncounted_through):
                    self.lose()

    def fold_many(self, writer: CommittingPartition) -> None:
        """Fold the tallies of a partition if they are many, and again when there are twice as many."""
        if len(writer.tallies) > self._tallies_max:
            fold_tallies((writer,), self._prepared.versions())
            self._tallies_max = max(TALLIES_MAX, 2 * len(writer.tallies))

    def lose(self) -> None:
        """Make the next heartbeat unchecked, since commits may be uncounted."""
        self.uncounted_through = self._clock.latest
