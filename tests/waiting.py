"""Waits and threads of tests: how long a test waits before it calls something stuck.

The time says nothing about how quick anything is: a machine under load may need most of it.
"""

from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import Event, Thread
from time import monotonic
from typing import Final, TypeVar

HANG_SECONDS: Final = 240
# The demo takes a minute by itself.
DEMO_SECONDS_MAX: Final = 900
PAUSE_SECONDS: Final = 0.01

Found = TypeVar("Found")


def wait_until(
    look: Callable[[], Found | None],
    what: str | Callable[[], str],
    *,
    seconds: float = HANG_SECONDS,
    pause_seconds: float = PAUSE_SECONDS,
) -> Found:
    """Return what `look` finds as soon as it finds something, for a condition that no event announces."""
    deadline, pause = monotonic() + seconds, Event()
    while not (found := look()):
        assert monotonic() < deadline, what if isinstance(what, str) else what()
        pause.wait(pause_seconds)
    return found


def run_threads(*work: Callable[[], object], seconds: float = HANG_SECONDS) -> None:
    """Run all at once.  Raises the first error of any of them, and AssertionError if a thread hangs."""
    outcomes: SimpleQueue[BaseException | None] = SimpleQueue()

    def guarded(task: Callable[[], object]) -> None:
        try:
            task()
            outcomes.put(None)
        except BaseException as error:
            outcomes.put(error)

    for task in work:
        Thread(target=guarded, args=(task,), daemon=True).start()
    for _ in work:
        try:
            error = outcomes.get(timeout=seconds)
        except Empty:
            raise AssertionError("a thread hangs") from None
        if error is not None:
            raise error
