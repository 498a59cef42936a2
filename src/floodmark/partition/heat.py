"""How busy a partition is: a short history of counters."""

from collections import deque
from dataclasses import dataclass
from typing import Final

HEAT_SAMPLES_MAX: Final = 120


@dataclass(frozen=True, kw_only=True)
class HeatSample:
    """The counters of a partition over an interval."""

    from_ms: int
    to_ms: int
    writes: int
    reads: int
    bytes_written: int


class Heat:
    """Counters of one partition.  Reads are counted without a lock and may miss a few under threads."""

    __slots__ = ("_samples", "_seen", "bytes_written", "reads", "writes")

    def __init__(self, now_ms: int) -> None:
        self.writes = self.reads = self.bytes_written = 0
        self._seen = (now_ms, 0, 0, 0)
        self._samples: deque[HeatSample] = deque(maxlen=HEAT_SAMPLES_MAX)

    def add_writes(self, changes: int, size: int) -> None:
        """Count a commit.  The caller holds the turn, so it is exact."""
        self.writes += changes
        self.bytes_written += size

    def sample(self, now_ms: int) -> None:
        """Close the present interval, and drop the oldest if there are too many."""
        if now_ms > self._seen[0]:
            self._samples.append(self._since(now_ms))
            self._seen = (now_ms, self.writes, self.reads, self.bytes_written)

    def history(self, now_ms: int) -> list[HeatSample]:
        """The intervals, the oldest first; the last one is still open."""
        return [*self._samples, self._since(now_ms)]

    def rate(self, now_ms: int) -> float:
        """Reads and writes a second over the history."""
        samples = self.history(now_ms)
        calls = sum(sample.writes + sample.reads for sample in samples)
        return calls * 1_000 / max(1_000, now_ms - samples[0].from_ms)

    def _since(self, now_ms: int) -> HeatSample:
        since_ms, writes, reads, size = self._seen
        return HeatSample(
            from_ms=since_ms,
            to_ms=now_ms,
            writes=self.writes - writes,
            reads=self.reads - reads,
            bytes_written=self.bytes_written - size,
        )
