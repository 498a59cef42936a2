"""Simulated time: one true time, which only the run advances, and the skewed clocks of sites."""

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from random import Random
from typing import Final

from floodmark.testing.clock import SimulatedTime

# Two sites may be skewed by this much in opposite directions, and still replicate.
SKEW_MS_MAX: Final = 249


class SkewedTime:
    """A site's clock: a time source that is off by some milliseconds, and jumps when it is told to.

    >>> true_time = SimulatedTime(1_000)
    >>> time = SkewedTime(true_time, offset_ms=-30)
    >>> true_time.advance(500)
    >>> time()
    1470
    """

    def __init__(self, true_time: SimulatedTime, offset_ms: int) -> None:
        self._true_time = true_time
        self.offset_ms = offset_ms
        self.is_steady = False
        """Whether it never jumps, and stays as wrong as it is."""

    def __call__(self) -> int:
        return self._true_time() + self.offset_ms

    def jump(self, random: Random, *, far: bool) -> None:
        """Set the clock to a random skew, within what peers tolerate or, with `far`, far beyond."""
        limit = 20 * SKEW_MS_MAX if far else SKEW_MS_MAX
        offset_ms = random.randint(-limit, limit)
        if not self.is_steady:
            self.offset_ms = offset_ms


class Schedule:
    """The actions that are due at true times."""

    def __init__(self, time: SimulatedTime) -> None:
        self._time = time
        self._due: list[tuple[int, int, Callable[[], None]]] = []
        self._order = count()

    def after(self, delay_ms: int, action: Callable[[], None]) -> None:
        """Schedule an action after a delay.  Actions for the same moment run in the order of the calls."""
        heappush(self._due, (self._time() + delay_ms, next(self._order), action))

    def next_due(self) -> Callable[[], None] | None:
        """Remove and return the next action that is due, or None."""
        return heappop(self._due)[2] if self._due and self._due[0][0] <= self._time() else None
