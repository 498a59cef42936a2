"""Ending on purpose: the first signal asks, the second one ends the process at once."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
# As shells have it: the exit code of what a signal has ended.
_EXIT_CODES: Final = 128


class Received:
    """Which signal has come, if any."""

    def __init__(self) -> None:
        self._number: int | None = None

    def take(self, number: int) -> None:
        """Remember a signal."""
        self._number = number

    @property
    def exit_code(self) -> int | None:
        """That of a command which the signal has kept from its work; None as long as there is none.

        >>> received = Received()
        >>> received.take(signal.SIGTERM)
        >>> received.exit_code
        143
        """
        return None if self._number is None else _EXIT_CODES + self._number


@contextmanager
def on_stop_signal(request_stop: Callable[[], object]) -> Iterator[Received]:
    """Call a function when the user presses Ctrl-C or the system ends the process.

    After that the signals have their usual effect again: whoever does not want to wait sends another.
    """
    received = Received()

    def handle(number: int, _frame: FrameType | None) -> None:
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        received.take(number)
        request_stop()

    before = {number: signal.signal(number, handle) for number in _SIGNALS}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
