"""The turn to write: a lock with a queue, in which the holder can do the work of the threads that wait.

The turn is a token.  A thread that does not get it joins the queue and checks once more; a thread that gives
it back checks the queue *afterwards*.  So no waiter is missed.

**Ctrl-C** may raise after any call.  A token that was taken and not stored yet dies with the interrupted
frame, and a dying token creates its successor.  Giving it back, and handing it to the next waiter, is one C
call each, which cannot be interrupted.  An interrupt can still prevent a notification, so waiters poll.

Waiters whose work is done wake each other in a chain: if all woke at once, they would compete for the GIL.
"""

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from math import ceil
from queue import Empty, SimpleQueue
from typing import Any, Final, Generic, TypeVar
from weakref import ref

from floodmark.model.errors import OutcomeUnknown, PartitionStopped

WAIT_SECONDS_MAX: Final = 60.0
# Poll interval of a waiter, in case an interrupt prevented its notification.
LOOK_SECONDS: Final = 0.5


class TurnToken:
    """The right to lead.  Each turn has exactly one; a lost token is replaced."""

    __slots__ = ("_turn",)

    def __init__(self, turn: "Turn[Any]") -> None:
        self._turn = ref(turn)

    def __del__(self) -> None:
        # It may run in any frame, so it notifies no waiter: the next poll finds the new token.
        if (turn := self._turn()) is not None:
            turn.give_back(TurnToken(turn))


class Waiter:
    """A thread in the queue.  It sleeps until it gets mail: the turn, or None when its work is done."""

    mail: "SimpleQueue[TurnToken | None]"
    served = False
    abandoned = False
    following: "Waiter | None" = None


SomeWaiter = TypeVar("SomeWaiter", bound=Waiter)


class Turn(Generic[SomeWaiter]):
    """A turn that passes from leader to leader."""

    def __init__(
        self, *, look_seconds: float = LOOK_SECONDS, wait_seconds_max: float = WAIT_SECONDS_MAX
    ) -> None:
        self._look_seconds = min(look_seconds, wait_seconds_max)
        self._wait_seconds_max = wait_seconds_max
        self.reset()

    def reset(self) -> None:
        """Start again in a forked process, which has none of the threads in the queue."""
        self._free: deque[TurnToken] = deque()
        # Gives the turn back; call `lead_next` afterwards if the queue is not empty.  A C method, so that an
        # interrupt cannot come between the call and its effect.
        self.give_back: Callable[[TurnToken], None] = self._free.append
        # Each change of the queue is one step of the interpreter; for a lock, all waiters would queue again.
        self.line: deque[SomeWaiter] = deque()
        self.give_back(TurnToken(self))

    def try_take(self) -> TurnToken | None:
        """Take the turn if it is free."""
        try:
            # Not kept in a variable, in which the traceback of an interrupt would keep it alive.
            return self._free.pop()
        except IndexError:
            return None

    def wait(self, waiter: SomeWaiter) -> TurnToken | None:
        """Wait in the queue; the turn, or None if a leader has done the caller's work."""
        mail = waiter.mail = SimpleQueue()
        token: TurnToken | None = None
        try:
            self.line.append(waiter)
            for _ in range(ceil(self._wait_seconds_max / self._look_seconds)):
                if self._free:
                    self.lead_next()
                with suppress(Empty):
                    token = mail.get(timeout=self._look_seconds)
                if token is not None:
                    if self._step_out(waiter):
                        return token
                    # A leader took it out of the queue before giving the turn back: its work is done.
                    spare, token = token, None
                    self.pass_on(spare)
                if waiter.served:
                    break
        except BaseException:
            if token is not None:
                self.give_back(token)
            self._leave(waiter)
            raise
        if self._leave(waiter):
            raise PartitionStopped(
                f"storage was busy for {self._wait_seconds_max:.0f} s and nothing was done; try again"
            )
        if waiter.served:
            return None
        raise OutcomeUnknown(
            f"no answer from storage within {self._wait_seconds_max:.0f} s; read before you write again"
        )

    def take_line(self, accept: Callable[[SomeWaiter], bool]) -> list[SomeWaiter]:
        """Take waiters from the queue, up to the first that is not accepted, to do their work."""
        taken: list[SomeWaiter] = []
        while (first := self._first_in_line()) is not None and accept(first):
            if self._step_out(first):
                taken.append(first)
        return taken

    def pass_on(self, token: TurnToken) -> None:
        """Give the turn back, or to the first waiter."""
        self.give_back(token)
        if self.line:
            self.lead_next()

    def lead_next(self) -> None:
        """Hand the turn to the first waiter, if it is free."""
        while (first := self._first_in_line()) is not None:
            try:
                # In one expression, so that an interrupt cannot find the token in two places.
                first.mail.put(self._free.pop())
            except IndexError:
                # Another thread has the turn, and checks the queue when it gives it back.
                return
            if not (first.abandoned or first.served):
                return
            self._return_mail(first)

    def _first_in_line(self) -> SomeWaiter | None:
        try:
            return self.line[0]
        except IndexError:
            return None

    def _step_out(self, waiter: SomeWaiter) -> bool:
        """Remove a waiter from the queue; whether it was there."""
        try:
            self.line.remove(waiter)
        except ValueError:
            return False
        return True

    def _leave(self, waiter: SomeWaiter) -> bool:
        """Stop waiting without breaking the chain; whether no leader has begun its work."""
        # First: the sender takes back mail that comes later.
        waiter.abandoned = True
        stood_in_line = self._step_out(waiter)
        self._return_mail(waiter)
        if self.line and self._free:
            self.lead_next()
        if waiter.served:
            wake(waiter.following)
        return stood_in_line

    def _return_mail(self, waiter: SomeWaiter) -> None:
        """Give back a turn that was sent to a waiter which has left."""
        while not waiter.mail.empty():
            try:
                token = waiter.mail.get_nowait()
            except Empty:
                return
            if token is not None:
                self.give_back(token)


def chain(served: list[SomeWaiter]) -> SomeWaiter:
    """Link waiters whose work is done, each to the one that it wakes; the first of them."""
    for waiter, following in pairwise(served):
        waiter.following = following
    for waiter in served:
        waiter.served = True
    return served[0]


def wake(waiter: Waiter | None) -> None:
    """Wake the first waiter of a chain, which wakes the next.  Skips waiters that have left."""
    while waiter is not None:
        if not waiter.abandoned:
            # If it leaves meanwhile, it sees that it was served and wakes the next.
            waiter.mail.put(None)
            return
        waiter = waiter.following
