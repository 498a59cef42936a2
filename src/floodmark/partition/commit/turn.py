"""Whose turn it is: one thread leads, the others wait in line, and nobody needs a thread of its own.

The turn is a token that is tried for, never waited for.  A thread that does not get it stands in line and
looks once more; the one that gives it back looks at the line *afterwards*.  So either the one in line gets
the turn or the one that gave it back sees the line, and no one is left behind.

**Ctrl-C** may raise after any call.  A token that was taken and is not kept anywhere yet dies with the frame
that was interrupted, and a token that dies makes a new one.  Giving it back, and handing it to the next in
line, is one call of C each, which nothing interrupts.  What an interrupt can still prevent is that someone
is told, so a waiter looks for itself now and then.

Those whose work a leader has done are woken in a chain, each by the one before: if all woke at once,
they would only fight for the interpreter.
"""

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from math import ceil
from queue import Empty, SimpleQueue
from threading import Lock
from typing import Any, Final, Generic, TypeVar
from weakref import ref

from floodmark.model.errors import OutcomeUnknown, PartitionStopped

WAIT_SECONDS_MAX: Final = 60.0
# How often a waiter looks for itself, in case that an interrupt kept it from being told.
LOOK_SECONDS: Final = 0.5


class Token:
    """The right to lead.  There is one of each turn; if it is lost, there is another."""

    __slots__ = ("_turn",)

    def __init__(self, turn: "Turn[Any]") -> None:
        self._turn = ref(turn)

    def __del__(self) -> None:
        # Only this, because it may run anywhere: a waiter finds the new one when it looks.
        if (turn := self._turn()) is not None:
            turn.give_back(Token(turn))


class Waiter:
    """Someone in line.  Asleep until there is mail: the turn, or None when its work is done."""

    mail: "SimpleQueue[Token | None]"
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
        """Begin anew, in a process that was forked and has none of the threads that took part."""
        self._free: deque[Token] = deque()
        # Gives the turn back; call `lead_next` afterwards if someone is in line.  A method of C, so that no
        # interrupt comes between the call and what it does.
        self.give_back: Callable[[Token], None] = self._free.append
        self._line_lock = Lock()
        # Read without the lock to see whether anyone is there.
        self.line: deque[SomeWaiter] = deque()
        self.give_back(Token(self))

    def try_take(self) -> Token | None:
        """Take the turn if nobody has it."""
        try:
            # Not kept in a variable, in which the traceback of an interrupt would keep it alive.
            return self._free.pop()
        except IndexError:
            return None

    def wait(self, waiter: SomeWaiter) -> Token | None:
        """Stand in line; the turn if the caller is to lead now, None if its work was done for it."""
        mail = waiter.mail = SimpleQueue()
        token: Token | None = None
        try:
            with self._line_lock:
                self.line.append(waiter)
            for _ in range(ceil(self._wait_seconds_max / self._look_seconds)):
                if self._free:
                    self.lead_next()
                with suppress(Empty):
                    token = mail.get(timeout=self._look_seconds)
                if token is not None:
                    if self._step_out(waiter):
                        return token
                    # A leader took it out of line before giving the turn back: its work is done.
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

    def pass_on(self, token: Token) -> None:
        """Give the turn back, or to the first in line."""
        self.give_back(token)
        if self.line:
            self.lead_next()

    def lead_next(self) -> None:
        """Hand the turn to the first in line, if it is free."""
        while (first := self._first_in_line()) is not None:
            try:
                # From one place to the other: there is no moment at which an interrupt finds it in two.
                first.mail.put(self._free.pop())
            except IndexError:
                # Another thread has the turn, and looks at the line when it gives it back.
                return
            if not (first.abandoned or first.served):
                return
            self._return_mail(first)

    def _first_in_line(self) -> SomeWaiter | None:
        with self._line_lock:
            return self.line[0] if self.line else None

    def _step_out(self, waiter: SomeWaiter) -> bool:
        """Take a waiter out of line; whether it still stood there."""
        with self._line_lock:
            if waiter not in self.line:
                return False
            self.line.remove(waiter)
            return True

    def _leave(self, waiter: SomeWaiter) -> bool:
        """Stop waiting, without breaking the chain of those behind; whether its work was never begun."""
        # First: what comes after this is taken back by the one that sent it.
        waiter.abandoned = True
        stood_in_line = self._step_out(waiter)
        self._return_mail(waiter)
        if self.line and self._free:
            self.lead_next()
        if waiter.served:
            wake(waiter.following)
        return stood_in_line

    def _return_mail(self, waiter: SomeWaiter) -> None:
        """Give a turn back that came to someone who has left."""
        while not waiter.mail.empty():
            try:
                token = waiter.mail.get_nowait()
            except Empty:
                return
            if token is not None:
                self.give_back(token)


def chain(served: list[SomeWaiter]) -> SomeWaiter:
    """Link those whose work is done, each to the one that it wakes; the first of them."""
    for waiter, following in pairwise(served):
        waiter.following = following
    for waiter in served:
        waiter.served = True
    return served[0]


def wake(waiter: Waiter | None) -> None:
    """Wake the first of a chain; it wakes the next.  Those who have left are passed over."""
    while waiter is not None:
        if not waiter.abandoned:
            # If it leaves meanwhile, it finds that it was served and wakes the next.
            waiter.mail.put(None)
            return
        waiter = waiter.following
