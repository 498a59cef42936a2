"""Conditional commits of a partition: decided inside their round, after conflicting prepared writes."""

from collections.abc import Sequence
from typing import Protocol

from floodmark.model.partition import CommitLimits
from floodmark.partition.commit.commit import Commit, CommittingPartition, Decide, Mint, Writes
from floodmark.partition.committer import Committer
from floodmark.partition.prepared.settling import SETTLES_MAX, SettlingPartition, settle_writes
from floodmark.partition.prepared.writes import OpenWrite, conflict


class ConditionalPartition(CommittingPartition, SettlingPartition, Protocol):
    """A partition, as far as its conditional commits need it."""

    limits: CommitLimits


class ConditionalCommits:
    """Runs the conditional commits of a partition."""

    def __init__(self, partition: ConditionalPartition, committer: Committer) -> None:
        self._partition = partition
        self._committer = committer
        self._prepared = committer.prepared

    def run(self, decide: Decide, *, durable: bool, on: Sequence[bytes] | None = None) -> Commit:
        """Run a commit; without `writes` it has decided to write nothing, and has no version.

        Prepared writes on the keys `on` are settled first, since the decision depends on these keys.
        """
        for _ in range(SETTLES_MAX):
            commit, blocking = self._try(decide, on, durable=durable)
            if not blocking:
                return commit
            settle_writes(self._partition, blocking, self._prepared.ask)
        raise conflict(blocking[0])

    def _try(
        self, decide: Decide, on: Sequence[bytes] | None, *, durable: bool
    ) -> tuple[Commit, list[OpenWrite]]:
        """Run a commit unless prepared writes conflict with it: the commit, and the conflicts."""
        blocking: list[OpenWrite] = []

        def decide_settled(mint: Mint) -> Writes | None:
            writes = decide(mint)
            if self._prepared.floor is not None:
                if on is not None:
                    blocking.extend(self._prepared.on(on))
                elif writes is not None:
                    blocking.extend(self._prepared.on_crowded(writes, self._partition.limits))
            return None if blocking else writes

        commit = Commit(self._partition, None, durable=durable, decide=decide_settled)
        self._committer.commit(commit)
        return commit, blocking
