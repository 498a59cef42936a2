"""Stopping by signals: the first one requests a clean end, the second one ends the process at once."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from socket import socketpair
from threading import Thread
from types import FrameType
from typing import Final

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
# As in shells: a process that a signal has ended has this plus the signal's number as its exit code.
_EXIT_CODES: Final = 128
# Within this time a main thread that can run has handled the signal.
_HANDLED_SECONDS: Final = 0.2


class Received:
    """The signal that was received, if any."""

    def __init__(self) -> None:
        self._number: int | None = None

    def take(self, number: int) -> None:
        """Remember a signal."""
        self._number = number

    @property
    def exit_code(self) -> int | None:
        """The exit code of a command that the signal has ended; None without a signal.

        >>> received = Received()
        >>> received.take(signal.SIGTERM)
        >>> received.exit_code
        143
        """
        return None if self._number is None else _EXIT_CODES + self._number


@contextmanager
def on_stop_signal(request_stop: Callable[[], object]) -> Iterator[Received]:
    """Call a function when the user presses Ctrl-C or the system ends the process.

    A thread of its own calls it, woken through a socket.  Python runs handlers in the main thread, which may
    wait for an hour while another thread got the signal, or hold a lock that the function needs.

    After the first signal, signals have their default effect again: a second one ends the process at once.
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
                # The user may send the next signal as soon as the command reacts to this one.
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
