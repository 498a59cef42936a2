"""Time that stands still until a test moves it, forwards or backwards."""

from typing import Final

START_MS: Final = 1_700_000_000_000


class SimulatedTime:
    """A time source: call it for the unix milliseconds.

    >>> time = SimulatedTime(1_000)
    >>> time.advance(500)
    >>> time()
    1500
    >>> time.set(200)
    >>> time()
    200
    """

    def __init__(self, now_ms: int = START_MS) -> None:
        self._now_ms = now_ms

    def __call__(self) -> int:
        return self._now_ms

    def __repr__(self) -> str:
        return f"SimulatedTime({self._now_ms})"

    def advance(self, ms: int) -> None:
        """Let time pass.  A negative number makes it jump back, as a corrected clock does."""
        self._now_ms += ms

    def set(self, now_ms: int) -> None:
        """Jump to a moment."""
        self._now_ms = now_ms
