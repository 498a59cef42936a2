"""Where physical time comes from.  A time source is any function that returns unix milliseconds."""

import time
from collections.abc import Callable
from typing import TypeAlias

TimeSource: TypeAlias = Callable[[], int]


def system_time_ms() -> int:
    """The machine's own clock."""
    return time.time_ns() // 1_000_000
