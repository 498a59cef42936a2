"""Ending on purpose: the first signal asks, the second one ends the process at once."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def on_stop_signal(request_stop: Callable[[], object]) -> Iterator[None]:
    """Call a function when the user presses Ctrl-C or the system ends the process.

    After that the signals have their usual effect again: whoever does not want to wait sends another.
    """

    def handle(_number: int, _frame: FrameType | None) -> None:
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        request_stop()

    before = {number: signal.signal(number, handle) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
