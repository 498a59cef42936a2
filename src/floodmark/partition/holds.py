"""Reports what holds the resolved version of a node back, and for how long.

The resolved version stays below the running round, below unsynced commits and below each prepared write.
Usually each of these lasts milliseconds.  If one lasts seconds, all feeds and snapshot readers wait for it,
so operators have to see which.

The age of a prepared write is that of its version.  A round and unsynced commits only have a *floor*, the
latest version when they began, which may be old on an idle site; their age is the time since which the same
floor has been seen.  The node's background work calls `look` each second.
"""

from typing import Final

from floodmark.clock import HybridClock
from floodmark.model.partition import Hold, HoldKind
from floodmark.model.version import Version, physical_ms
from floodmark.partition.committer import Committer

# Holds that last longer are reported, up to this number.
HOLD_MS_MAX: Final = 2_000
HOLDS_SHOWN_MAX: Final = 10


class Holds:
    """Watches the holds of a node."""

    def __init__(self, committer: Committer, clock: HybridClock) -> None:
        self._committer = committer
        self._clock = clock
        # By kind, the last floor and the time at which it was first seen.
        self._seen: dict[HoldKind, tuple[Version, int]] = {}

    def long(self) -> list[Hold]:
        """The holds that have lasted longer than `HOLD_MS_MAX`, the longest first."""
        return [hold for hold in self.look() if hold.age_ms > HOLD_MS_MAX][:HOLDS_SHOWN_MAX]

    def look(self) -> list[Hold]:
        """All holds at this moment, the longest first."""
        floors, now_ms = self._committer.floors.holds(), self._clock.physical_ms()
        self._seen = {
            kind: seen if (seen := self._seen.get(kind)) and seen[0] == floor else (floor, now_ms)
            for kind, floor in floors.items()
        }
        holds = [
            Hold(kind=kind, version=floor, age_ms=now_ms - since_ms)
            for kind, (floor, since_ms) in self._seen.items()
        ]
        holds += [
            Hold(
                kind=HoldKind.PREPARED,
                version=write.version - 1,
                age_ms=max(0, now_ms - physical_ms(write.version)),
                transaction=write.transaction,
            )
            for write in self._committer.prepared.all()
        ]
        return sorted(holds, key=lambda hold: hold.age_ms, reverse=True)
