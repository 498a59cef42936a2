"""How long to wait before trying again, and when to give up.

Each pause is twice as long as the one before, up to a minute; together they may last half an hour.  There
is no jitter: a feed has one runner, so there is no herd to spread, and what it does can be foretold.
"""

from typing import Final

from floodmark.feed.named.feeds import BACKOFF_MS_MAX

BUDGET_MS: Final = 30 * 60_000


class Backoff:
    """The pauses of one task that fails again and again.

    >>> backoff = Backoff(100, longest_ms=300, budget_ms=1_000)
    >>> [backoff.next_ms() for _ in range(6)]
    [100, 200, 300, 300, 100, None]
    >>> backoff.failures, backoff.left_ms
    (6, 0)
    >>> backoff.reset()
    >>> backoff.next_ms()
    100
    """

    def __init__(
        self, first_ms: int, *, longest_ms: int = BACKOFF_MS_MAX, budget_ms: int = BUDGET_MS
    ) -> None:
        self._first_ms = first_ms
        self._longest_ms = longest_ms
        self._budget_ms = budget_ms
        self.reset()

    def reset(self) -> None:
        """It worked: begin anew."""
        self.failures = 0
        self.left_ms = self._budget_ms

    def next_ms(self) -> int | None:
        """How long to wait after a failure; None if the budget is spent."""
        # A shift of more than 60 bits would only be cut to the longest pause again.
        pause_ms = min(self._first_ms << min(self.failures, 60), self._longest_ms, self.left_ms)
        self.failures += 1
        self.left_ms -= pause_ms
        return pause_ms or None
