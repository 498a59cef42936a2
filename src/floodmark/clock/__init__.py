"""Hybrid time.  The only room that reads the real clock."""

from floodmark.clock.hybrid import HybridClock, UpperBound
from floodmark.clock.sources import TimeSource, monotonic_ms, monotonic_seconds, system_time_ms

__all__ = ["HybridClock", "TimeSource", "UpperBound", "monotonic_ms", "monotonic_seconds", "system_time_ms"]
