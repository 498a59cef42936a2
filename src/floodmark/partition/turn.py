"""Whose turn it is: one thread leads, the others wait in line, and nobody needs a thread of its own.

The turn is a lock that is tried, never waited for.  Whoever does not get it stands in line and tries
once more; whoever gives it back looks at the line *afterwards*.  So either the one in line gets the
turn or the one who gave it back sees the line, and no one is left behind.

Those whose work a leader has done are woken in a chain, each by the one before: if all woke at once,
they would only fight for the interpreter.
"""

from collections import deque
from collections.abc import Callable
from itertools import pairwise
from threading import Lock
from typing import Final, Generic, TypeVar

from floodmark.model.errors import OutcomeUnknown, PartitionStopped

WAIT_SECONDS_MAX: Final = 60.0


class Waiter:
    """Someone in line.  Asleep at its gate, until its work is done or it is its turn to lead."""

    gate: Lock
    leads = False
    woken = False
    abandoned = False
    following: "Waiter | None" = None


# Whether someone is woken or leaves is decided once, whoever comes first.
_fate = Lock()

SomeWaiter = TypeVar("SomeWaiter", bound=Waiter)


class Turn(Generic[SomeWaiter]):
    """A turn that passes from leader to leader."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin anew, in a process that was forked and has none of the threads that took part."""
        self._held = Lock()
        self._line_lock = Lock()
        # Read without the lock to see whether anyone is there.
        self.line: deque[SomeWaiter] = deque()

    def try_take(self) -> bool:
        """Take the turn if nobody has it."""
        return self._held.acquire(False)

    def wait(self, waiter: SomeWaiter) -> bool:
        """Stand in line; True if the caller has the turn now, False if its work was done for it."""
        gate = waiter.gate = Lock()
        gate.acquire()
        try:
            with self._line_lock:
                self.line.append(waiter)
            if self.try_take():
                with self._line_lock:
                    if waiter in self.line:
                        self.line.remove(waiter)
                        return True
                # A leader took it out of line before giving the turn back: its work is done.
                self.pass_on()
            if gate.acquire(timeout=WAIT_SECONDS_MAX):
                if not waiter.leads:
                    wake(waiter.following)
                return waiter.leads
        except BaseException:
            self._abandon(waiter)
            raise
        if self._abandon(waiter):
            raise PartitionStopped(
                f"storage was busy for {WAIT_SECONDS_MAX:.0f} s and nothing was done; try again"
            )
        raise OutcomeUnknown(
            f"no answer from storage within {WAIT_SECONDS_MAX:.0f} s; read before you write again"
        )

    def next_in_line(self) -> SomeWaiter | None:
        """Take the first out of line."""
        with self._line_lock:
            return self.line.popleft() if self.line else None

    def take_line(self, accept: Callable[[SomeWaiter], bool]) -> list[SomeWaiter]:
        """Take everyone up to the first who is not acceptable, for a leader that does their work."""
        taken: list[SomeWaiter] = []
        with self._line_lock:
            while self.line:
                first = self.line.popleft()
                if not accept(first):
                    self.line.appendleft(first)
                    break
                taken.append(first)
        return taken

    def pass_on(self) -> None:
        """Give the turn back, or to the first in line."""
        self._held.release()
        while self.line and self.try_take():
            successor = self.next_in_line()
            if successor is not None:
                successor.leads = True
                if _open_gate(successor):
                    return
            self._held.release()

    def _abandon(self, waiter: SomeWaiter) -> bool:
        """Stop waiting, without breaking the chain of those behind; whether its work was never begun."""
        with self._line_lock:
            if waiter in self.line:
                self.line.remove(waiter)
                return True
        with _fate:
            waiter.abandoned = not waiter.woken
        if waiter.woken and waiter.leads:
            self.pass_on()
            return True
        if waiter.woken:
            wake(waiter.following)
        return False


def chain(served: list[SomeWaiter]) -> SomeWaiter:
    """Link those whose work is done, each to the one that it wakes; the first of them."""
    for waiter, following in pairwise(served):
        waiter.following = following
    return served[0]


def wake(waiter: Waiter | None) -> None:
    """Wake the first of a chain; it wakes the next.  Those who have left are passed over."""
    while waiter is not None and not _open_gate(waiter):
        waiter = waiter.following


def _open_gate(waiter: Waiter) -> bool:
    """Let a waiter go on; False if it has left.  Doing it twice is harmless."""
    with _fate:
        if waiter.abandoned:
            return False
        if not waiter.woken:
            waiter.woken = True
            waiter.gate.release()
        return True
