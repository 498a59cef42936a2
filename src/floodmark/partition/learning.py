"""How a node learns that another node, which shares its engine, has swapped in a new generation.

The version of a swap is above the ceilings of all nodes, which guard its write (`SharedNode.pass_ceilings`).
So a node that stores its ceiling and then loads the catalog knows all swaps up to that ceiling: later ones
are above it.
"""

from floodmark.clock import HybridClock
from floodmark.model.version import VERSION_MAX, Version
from floodmark.partition.commit.storage import Storage


class KnownSwaps:
    """The swaps that a node knows: all of them up to version `known`."""

    def __init__(self, storage: Storage, clock: HybridClock) -> None:
        self._storage = storage
        self._clock = clock
        # A node that does not share its engine makes all swaps itself.
        self.known: Version = VERSION_MAX

    def learn(self, version: Version) -> None:
        """Load all swaps at or below a version.  The caller must not hold the turn."""
        if version > self.known:
            if version > self._clock.latest:
                self._storage.retry_recovered(lambda: self._clock.pass_version(version))
            ceiling = self._clock.bound
            # In this order: the ceiling is stored, and then the catalog is checked.
            self._storage.entrance.catch_up()
            self.known = max(self.known, ceiling)
