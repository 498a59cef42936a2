"""The lag of changes: histograms that are small and additive, and the last minutes of each link.

The last minutes come back within a few heartbeats after a restart.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from threading import Lock
from typing import Final

import msgspec
import numpy
from numpy.typing import NDArray

from floodmark.model.version import COUNTER_BITS

WINDOW_MS: Final = 5 * 60_000
_SLOT_MS: Final = 10_000


class LagCounts(msgspec.Struct):
    """The number of changes by lag in milliseconds, to three digits."""

    counts: dict[int, float] = {}

    def add(self, lag_ms: int, changes: float = 1) -> None:
        """Count changes with this lag."""
        rounded = round_lag(lag_ms)
        self.counts[rounded] = self.counts.get(rounded, 0) + changes

    def add_versions(self, versions: NDArray[numpy.uint64], now_ms: int) -> None:
        """Count changes of these versions that have arrived now."""
        moments, changes = numpy.unique(versions >> numpy.uint64(COUNTER_BITS), return_counts=True)
        for moment_ms, count in zip(moments.tolist(), changes.tolist(), strict=True):
            self.add(max(0, now_ms - moment_ms), count)

    def plus(self, other: "LagCounts") -> "LagCounts":
        """The sum of both histograms."""
        both = dict(self.counts)
        for lag_ms, changes in other.counts.items():
            both[lag_ms] = both.get(lag_ms, 0) + changes
        return LagCounts(both)

    def percentile(self, share: float) -> int | None:
        """The lag that a share of the changes did not exceed; None without changes."""
        left = share * sum(self.counts.values())
        for lag_ms in sorted(self.counts):
            left -= self.counts[lag_ms]
            if left <= 0:
                return lag_ms
        return max(self.counts, default=None)


def round_lag(lag_ms: int) -> int:
    """A lag to three digits.

    >>> round_lag(87), round_lag(123_456)
    (87, 123000)
    """
    unit: int = 10 ** max(0, len(str(lag_ms)) - 3)
    return round(lag_ms / unit) * unit


@dataclass(slots=True)
class RecentLink:
    """The last minutes of one link and namespace, and the number of changes since the site was opened.

    The source's clock is ahead of this one by at least `ahead_ms`.  `stalled` is the reason why the link does
    not move, until it moves; if the site lacks a data set of the source, the reason for that, until it has
    it.
    """

    changes: int = 0
    ahead_ms: int = 0
    stalled: str | None = None
    lacks_data_set: bool = False
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


class RecentLinks:
    """The last minutes of the links of a site, by namespace and source.  They are in memory only."""

    def __init__(self) -> None:
        self._links: dict[tuple[int, int], RecentLink] = {}

    def of(self, namespace: int, source: int) -> RecentLink:
        """The last minutes of one link."""
        return self._links.setdefault((namespace, source), RecentLink())

    def stall(self, source: int, namespaces: Iterable[int], reason: str) -> None:
        """Store the reason why links do not move, until they move."""
        for namespace in namespaces:
            self.of(namespace, source).stalled = reason

    def forget(self, namespace: int) -> None:
        """Forget the links of a namespace."""
        self._links = {link: recent for link, recent in [*self._links.items()] if link[0] != namespace}
