"""A rate limit in bytes per second, by which background work leaves the disk to users.

A token bucket: it fills at the rate, holds one second's worth, and starts full.  A caller that spends more
than it holds waits for the rest.  So in any interval at most the rate times its length, plus one bucket, goes
through.  An amount larger than the bucket goes through alone, after a wait in proportion.
"""

from collections.abc import Callable
from typing import Final

from floodmark.model.errors import InvalidArgument

_MS: Final = 1000


class RateLimit:
    """Makes one thread wait, so that it spends at most `bytes_per_second`; None means no limit.

    `wait(seconds)` sleeps; it returns a true value if the caller was cancelled, as the `wait` of an event
    that is set on closing does.

    >>> limit = RateLimit(100, lambda: 0, print)
    >>> limit.spend(100)
    True
    >>> limit.spend(50)
    0.5
    True
    """

    def __init__(
        self,
        bytes_per_second: int | None,
        time_source_ms: Callable[[], int],
        wait: Callable[[float], object],
    ) -> None:
        if bytes_per_second is not None and bytes_per_second < 1:
            raise InvalidArgument(
                f"{bytes_per_second} bytes a second would never let anything through; "
                "give at least 1, or None for no limit",
                bytes_per_second=bytes_per_second,
            )
        self._rate = bytes_per_second
        self._time_source_ms = time_source_ms
        self._wait = wait
        # Thousandths of bytes: each millisecond brings in exactly `bytes_per_second` of them.
        self._balance = (bytes_per_second or 0) * _MS
        self._counted_ms = time_source_ms()

    def spend(self, amount: int) -> bool:
        """Wait until `amount` bytes may go through; False if cancelled, with nothing spent."""
        if self._rate is None:
            return True
        price, full = amount * _MS, self._rate * _MS
        self._balance = min(full, self._balance + self._elapsed_ms() * self._rate)
        if self._balance < price:
            wait_ms = -(-(price - self._balance) // self._rate)
            if self._wait(wait_ms / _MS):
                return False
            # The wait counts in full, even if the clock stood still or was set back.
            income = max(wait_ms, self._elapsed_ms()) * self._rate
            self._balance = min(max(full, price), self._balance + income)
        self._balance -= price
        return True

    def _elapsed_ms(self) -> int:
        now_ms = self._time_source_ms()
        elapsed_ms = max(0, now_ms - self._counted_ms)
        self._counted_ms = now_ms
        return elapsed_ms
