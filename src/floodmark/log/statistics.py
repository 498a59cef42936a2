"""Statistics of a batched writer.

The buckets are those of Pulsar's PIP-160, each in the unit of its name: sizes in bytes, delays in seconds.  A
bucket counts the numbers at or below its bound; the last one counts those above all bounds.
"""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from typing import Final

from floodmark.model.limits import KIB, MIB

RECORDS_BUCKETS: Final = (10, 50, 100, 200, 500, 1_000)
BYTES_BUCKETS: Final = (128, 512, 1 * KIB, 2 * KIB, 4 * KIB, 16 * KIB, 100 * KIB, 1 * MIB)
DELAY_SECONDS_BUCKETS: Final = (0.001, 0.005, 0.01)


class Trigger(StrEnum):
    """Why a batch was written when it was."""

    # It had as many records as an entry may have.
    COUNT = "count"
    # It was as large as an entry may be, or the next record did not fit.
    BYTES = "bytes"
    # Its oldest record had waited for longer than `max_delay_ms`, while an earlier append took that long.
    AGE = "age"
    # Nothing was being written.
    IDLE = "idle"
    # It is one record that is too large to share an entry.
    LARGE = "large"


@dataclass(frozen=True, kw_only=True)
class Histogram:
    """The number of observations in each bucket, and their sum."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float

    @property
    def count(self) -> int:
        return sum(self.counts)

    def cumulative(self) -> list[tuple[str, int]]:
        """Each bound with the number of observations at or below it, as Prometheus wants them.

        >>> Histogram(bounds=(0.001, 0.005), counts=(3, 0, 1), sum=0.2).cumulative()
        [('0.001', 3), ('0.005', 3), ('+Inf', 4)]
        """
        names = [*(f"{bound:.10g}" for bound in self.bounds), "+Inf"]
        return list(zip(names, accumulate(self.counts), strict=True))


@dataclass(frozen=True, kw_only=True)
class LogStatistics:
    """A writer's totals since it was made.  The histograms and `flushes` count batched entries only."""

    enabled: bool
    records: int
    bare_entries: int
    bare_bytes: int
    failed_appends: int
    bytes_in_flight: int
    flushes: Mapping[Trigger, int]
    records_per_entry: Histogram
    entry_size_bytes: Histogram
    oldest_record_delay_seconds: Histogram

    @property
    def batched_entries(self) -> int:
        return sum(self.flushes.values())

    @property
    def entries(self) -> int:
        return self.batched_entries + self.bare_entries

    @property
    def bytes(self) -> int:
        return int(self.entry_size_bytes.sum) + self.bare_bytes


class _Observed:
    """Observations on their way into a histogram."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum: float = 0

    def add(self, number: float) -> None:
        self.counts[bisect_left(self.bounds, number)] += 1
        self.sum += number

    def histogram(self) -> Histogram:
        return Histogram(bounds=self.bounds, counts=tuple(self.counts), sum=self.sum)


class FlushCounter:
    """Counts flushes.  Only the thread that writes to the ledger changes it, so it needs no lock."""

    def __init__(self) -> None:
        self._bare_entries = self._bare_bytes = self.failed_appends = 0
        self._flushes = dict.fromkeys(Trigger, 0)
        self._records, self._bytes = _Observed(RECORDS_BUCKETS), _Observed(BYTES_BUCKETS)
        self._delays = _Observed(DELAY_SECONDS_BUCKETS)

    def flushed(self, trigger: Trigger, records: int, size: int, delay_seconds: float) -> None:
        """Count a batch that was written."""
        self._flushes[trigger] += 1
        self._records.add(records)
        self._bytes.add(size)
        self._delays.add(delay_seconds)

    def wrote_bare(self, size: int) -> None:
        """Count a record that was written without batching."""
        self._bare_entries += 1
        self._bare_bytes += size

    def statistics(self, *, enabled: bool, bytes_in_flight: int) -> LogStatistics:
        return LogStatistics(
            enabled=enabled,
            records=int(self._records.sum) + self._bare_entries,
            bare_entries=self._bare_entries,
            bare_bytes=self._bare_bytes,
            failed_appends=self.failed_appends,
            bytes_in_flight=bytes_in_flight,
            flushes=dict(self._flushes),
            records_per_entry=self._records.histogram(),
            entry_size_bytes=self._bytes.histogram(),
            oldest_record_delay_seconds=self._delays.histogram(),
        )
