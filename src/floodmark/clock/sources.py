"""Sources of physical time.  A time source is any function that returns unix milliseconds."""

import time
from collections.abc import Callable
from typing import Final, TypeAlias

TimeSource: TypeAlias = Callable[[], int]

# On Linux, CLOCK_MONOTONIC stops while the machine sleeps; on macOS it does not.
_ELAPSED_CLOCK: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def system_time_ms() -> int:
    """The machine's own clock."""
    return time.time_ns() // 1_000_000


def monotonic_seconds() -> float:
    """Seconds from an arbitrary beginning that never go back, in the finest resolution of the machine."""
    return time.perf_counter()


def elapsed_ms() -> int:
    """Milliseconds from an arbitrary beginning that cannot be set, including those of sleep."""
    return time.clock_gettime_ns(_ELAPSED_CLOCK) // 1_000_000


def monotonic_ms() -> int:
    """Milliseconds from an arbitrary beginning that never go back, for measuring durations."""
    return time.monotonic_ns() // 1_000_000
