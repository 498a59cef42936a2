"""Facts about links that a site keeps in memory only: recent lags, and the reason of a stall.

After a restart they come back within a few heartbeats.
"""

from dataclasses import dataclass, field
from threading import Lock
from typing import Final

from floodmark.replication.lag import LagCounts

WINDOW_MS: Final = 5 * 60_000
_SLOT_MS: Final = 10_000


@dataclass(slots=True)
class RecentLink:
    """The last minutes of one link and namespace.

    The source's clock is ahead of this one by at least `ahead_ms`.  `stalled` is the reason why no changes
    come, until some do.
    """

    ahead_ms: int = 0
    stalled: str | None = None
    # Lags by intervals of ten seconds.
    _slots: dict[int, LagCounts] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    def add_lags(self, lags: LagCounts, now_ms: int) -> None:
        """Count the lags of changes that have arrived now."""
        slot = now_ms // _SLOT_MS
        with self._lock:
            self._forget(slot)
            self._slots[slot] = self._slots.get(slot, LagCounts()).plus(lags)

    def lags(self, now_ms: int) -> LagCounts:
        """The lags of the last minutes."""
        together = LagCounts()
        with self._lock:
            self._forget(now_ms // _SLOT_MS)
            for lags in self._slots.values():
                together = together.plus(lags)
        return together

    def _forget(self, now: int) -> None:
        # A clock that was set back leaves slots of the future behind, which go as well.
        for slot in [slot for slot in self._slots if not now - WINDOW_MS // _SLOT_MS < slot <= now]:
            del self._slots[slot]
