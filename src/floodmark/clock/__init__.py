"""Hybrid time.  The only package that reads the real clock."""

from floodmark.clock.guard import GuardedTime
from floodmark.clock.hybrid import HybridClock, UpperBound
from floodmark.clock.sources import TimeSource, elapsed_ms, monotonic_ms, monotonic_seconds, system_time_ms

__all__ = [
    "GuardedTime",
    "HybridClock",
    "TimeSource",
    "UpperBound",
    "elapsed_ms",
    "monotonic_ms",
    "monotonic_seconds",
    "system_time_ms",
]
