"""How a node of several learns that another node has let a new generation be read.

A swap lies above the ceilings of all nodes, and they guard its write (`SharedNode.pass_ceilings`).  So a swap
that has not happened after a node has stored its ceiling lies above that: up to there the node knows all.
"""

from floodmark.clock import HybridClock
from floodmark.model.version import VERSION_MAX, Version
from floodmark.partition.commit.storage import Storage


class KnownSwaps:
    """The swaps that a node knows: all of them up to version `known`."""

    def __init__(self, storage: Storage, clock: HybridClock) -> None:
        self._storage = storage
        self._clock = clock
        # A node that has its engine for itself makes all swaps.
        self.known: Version = VERSION_MAX

    def learn(self, version: Version) -> None:
        """Know all swaps at or below a version.  The caller does not hold the turn."""
        if version > self.known:
            if version > self._clock.latest:
                self._storage.retry_recovered(lambda: self._clock.pass_version(version))
            ceiling = self._clock.bound
            # In this order: the ceiling is stored, and then the catalog is looked at.
            self._storage.entrance.catch_up()
            self.known = max(self.known, ceiling)
