"""The floors of a node: versions that its resolved version does not pass."""

from threading import Lock

from floodmark.model.partition import HoldKind
from floodmark.model.ranges import KeyRange
from floodmark.model.version import Version
from floodmark.partition.prepared.writes import PreparedWrites


class Floors:
    """The floors of the running round, of the oldest unsynced commit, and of prepared writes.

    Only the thread that holds the turn changes `round` and `unsynced`.
    """

    __slots__ = ("_prepared", "round", "unsynced")

    def __init__(self, prepared: PreparedWrites) -> None:
        self.round: Version | None = None
        self.unsynced: Version | None = None
        self._prepared = prepared

    def below(self, version: Version, keys: KeyRange | None = None) -> Version:
        """The version, or the lowest floor if that is lower.

        Prepared writes hold back only the keys that they write; `keys` limits the answer to a range.  The
        version must have been minted before the call: a round that is missed here mints above it.
        """
        # In this order: a round enters its commits and prepared writes before it removes its own floor.
        prepared = self._prepared
        for floor in (
            self.round,
            self.unsynced,
            prepared.floor if keys is None else prepared.floor_of(keys),
        ):
            if floor is not None and floor < version:
                version = floor
        return version

    def settle(self, *, synced: bool) -> None:
        """End the round; unless `synced`, its commits stay unsynced."""
        # A reader reads the round's floor first, so the other must be set before it is removed.
        if synced:
            self.unsynced = None
        elif self.unsynced is None:
            self.unsynced = self.round
        self.round = None

    def holds(self) -> dict[HoldKind, Version]:
        """The floors of the round and of unsynced commits, if they are set."""
        floors = {HoldKind.COMMIT: self.round, HoldKind.UNSYNCED: self.unsynced}
        return {kind: floor for kind, floor in floors.items() if floor is not None}


class Announced:
    """The highest resolved version that was returned to a caller: the next is never lower."""

    def __init__(self) -> None:
        self.version: Version = 0
        self._lock = Lock()

    def advance(self, version: Version) -> Version:
        """Announce a version, unless a higher one was announced before; returns the highest."""
        with self._lock:
            self.version = max(self.version, version)
            return self.version
