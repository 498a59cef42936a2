"""Where physical time comes from.  A time source is any function that returns unix milliseconds."""

import time
from collections.abc import Callable
from typing import TypeAlias

TimeSource: TypeAlias = Callable[[], int]


def system_time_ms() -> int:
    """The machine's own clock."""
    return time.time_ns() // 1_000_000


def monotonic_seconds() -> float:
    """Seconds that only ever grow, from an arbitrary beginning, as fine as the machine tells them."""
    return time.perf_counter()


def monotonic_ms() -> int:
    """Milliseconds that only ever grow, from an arbitrary beginning, to measure how long things take."""
    return time.monotonic_ns() // 1_000_000
