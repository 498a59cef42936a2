"""What holds the resolved version of a node back, and for how long.

The resolved version stays below the round of commits at work, below commits that are not synced, and below
each prepared write.  All three last milliseconds in ordinary times.  Where one lasts for seconds, every feed
and every reader of a snapshot waits for it, so it has to have a name.

A prepared write is as old as its version.  A round and unsynced commits only have a *floor*, the version that
was the latest when they began, which may be old on an idle site; so they are as old as the time since which
the same floor has been seen.  The node's background work looks each second.
"""

from typing import Final

from floodmark.clock import HybridClock
from floodmark.model.partition import Hold, HoldKind
from floodmark.model.version import Version, physical_ms
from floodmark.partition.committer import Committer

# What lasts longer than this is worth a word, and so many of them are named.
HOLD_MS_MAX: Final = 2_000
HOLDS_SHOWN_MAX: Final = 10


class Holds:
    """Watches what holds the resolved version back."""

    def __init__(self, committer: Committer, clock: HybridClock) -> None:
        self._committer = committer
        self._clock = clock
        # Of each kind the floor that was last seen, and when it was first seen.
        self._seen: dict[HoldKind, tuple[Version, int]] = {}

    def long(self) -> list[Hold]:
        """The first few of those that have lasted for longer than is usual."""
        return [hold for hold in self.look() if hold.age_ms > HOLD_MS_MAX][:HOLDS_SHOWN_MAX]

    def look(self) -> list[Hold]:
        """All that hold it back at this moment, the longest first."""
        floors, now_ms = self._committer.floors(), self._clock.physical_ms()
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
