"""A histogram of the lag of changes: small, exact to three digits, and additive."""

import msgspec
import numpy
from numpy.typing import NDArray

from floodmark.model.version import COUNTER_BITS


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
