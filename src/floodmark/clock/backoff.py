"""The retry policy of Floodmark: each pause is twice as long as the one before, within a budget.

It computes pauses and does not sleep.  So each caller waits on an event that its `close` sets, and tests and
the simulation wait on simulated time.
"""

from collections.abc import Iterator
from typing import Final

LONGEST_MS: Final = 60_000
BUDGET_MS: Final = 30 * 60_000
NO_BUDGET_MS: Final = 1 << 62


def doubled_ms(first_ms: int, failures: int, longest_ms: int) -> int:
    """The pause after a failure, by the number of failures before it.

    >>> [doubled_ms(50, failures, 10_000) for failures in (0, 1, 2, 100)]
    [50, 100, 200, 10000]
    """
    # A shift of more bits would exceed every longest pause.
    return min(first_ms << min(failures, 60), longest_ms)


class Backoff:
    """The pauses of one task that fails repeatedly; `budget_ms` limits their sum.

    >>> backoff = Backoff(100, longest_ms=300, budget_ms=1_000)
    >>> [backoff.next_ms() for _ in range(6)]
    [100, 200, 300, 300, 100, None]
    >>> backoff.failures, backoff.left_ms
    (6, 0)
    >>> backoff.reset()
    >>> tuple(backoff.pauses())
    (0.1, 0.2, 0.3, 0.3, 0.1)
    """

    def __init__(self, first_ms: int, *, longest_ms: int = LONGEST_MS, budget_ms: int = BUDGET_MS) -> None:
        self._first_ms = first_ms
        self._longest_ms = longest_ms
        self._budget_ms = budget_ms
        self.reset()

    def reset(self) -> None:
        """Start again, after a success."""
        self.failures = 0
        self.left_ms = self._budget_ms

    def next_ms(self) -> int | None:
        """The pause after a failure; None if the budget is spent."""
        pause_ms = min(doubled_ms(self._first_ms, self.failures, self._longest_ms), self.left_ms)
        self.failures += 1
        self.left_ms -= pause_ms
        return pause_ms or None

    def pauses(self) -> Iterator[float]:
        """The pauses that are left, in seconds."""
        while (pause_ms := self.next_ms()) is not None:
            yield pause_ms / 1_000
