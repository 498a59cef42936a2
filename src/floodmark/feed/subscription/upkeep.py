"""The thread of a subscription: it tells the site what is new, keeps the lease, and looks after transactions.

It does not keep the subscription alive: it holds it for a moment only, so that one that nobody has any more
can go.
"""

from collections.abc import Callable
from math import inf
from threading import Event, Thread
from typing import TypeAlias
from weakref import WeakMethod

from floodmark.clock import monotonic_seconds

# Does what is due, and renews the lease if it is told to; in how many seconds it wants to be called again at
# the latest, or None if never.
KeepUp: TypeAlias = Callable[[bool], float | None]


class Upkeep:
    """Calls a method soon after it is asked to, and now and then by itself."""

    def __init__(self, name: str, keep_up: KeepUp, *, renew_seconds: float, flush_seconds: float) -> None:
        self._wanted = Event()
        self._stopping = Event()
        self._thread = Thread(
            target=_run,
            args=(WeakMethod(keep_up), self._wanted, self._stopping, renew_seconds, flush_seconds),
            name=f"floodmark-subscription-{name}",
            daemon=True,
        )
        self._thread.start()

    def wake(self) -> None:
        """Ask for it."""
        if not self._wanted.is_set():
            self._wanted.set()

    def stop(self) -> None:
        """End the thread and wait for it."""
        self._stopping.set()
        self._wanted.set()
        self._thread.join()


def _run(
    method: "WeakMethod[KeepUp]",
    wanted: Event,
    stopping: Event,
    renew_seconds: float,
    flush_seconds: float,
) -> None:
    renewed, pause = monotonic_seconds(), inf
    while True:
        rest = renewed + renew_seconds - monotonic_seconds()
        is_wanted = wanted.wait(max(0.0, min(rest, pause)))
        if stopping.wait(flush_seconds if is_wanted else 0):
            return
        wanted.clear()
        now = monotonic_seconds()
        is_due = now - renewed >= renew_seconds
        if is_due:
            renewed = now
        keep_up = method()
        next_pause = None if keep_up is None else keep_up(is_due)
        del keep_up
        if next_pause is None:
            return
        pause = next_pause
