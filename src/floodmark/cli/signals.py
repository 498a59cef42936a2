"""Ending on purpose: the first signal asks, the second one ends the process at once."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from socket import socketpair
from threading import Thread
from types import FrameType
from typing import Final

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
# As shells have it: the exit code of what a signal has ended.
_EXIT_CODES: Final = 128
# A main thread that can run at all has heard of a signal by then.
_HANDLED_SECONDS: Final = 0.2


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

    It is called in a thread of its own, which hears of the signal from the system.  The main thread would
    hear of it only when it comes to run again, and that may take an hour if it waits, and another thread was
    the one to be interrupted; and it may hold a lock that the function needs, as `Event.set` does.

    After that the signals have their usual effect again: whoever does not want to wait sends another.
    """
    received, handled = Received(), SimpleQueue[int]()
    heard, told = socketpair()
    told.setblocking(False)

    def handle(number: int, _frame: FrameType | None) -> None:
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        # Nothing else that takes a lock is safe here.
        handled.put(number)

    def listen() -> None:
        while number := heard.recv(1):
            if number[0] in _SIGNALS:
                # Whoever sees that it ends may send the next signal at once.
                with suppress(Empty):
                    handled.get(timeout=_HANDLED_SECONDS)
                received.take(number[0])
                request_stop()
                return

    listening = Thread(target=listen, name="floodmark-signals", daemon=True)
    listening.start()
    woken = signal.set_wakeup_fd(told.fileno(), warn_on_full_buffer=False)
    before = {number: signal.signal(number, handle) for number in _SIGNALS}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(woken)
        told.close()
        listening.join()
        heard.close()
