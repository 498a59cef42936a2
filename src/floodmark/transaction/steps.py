"""The steps of transactions on their way through a coordinator."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple, TypeVar

from floodmark.log import Position, Promise
from floodmark.transaction.book import TransactionBook
from floodmark.transaction.held import Held
from floodmark.transaction.records import Record

Result = TypeVar("Result")


class Step(NamedTuple):
    """A record for the log, and what happens when it is durable, or is not.  Both are called in the lock.

    Both end with what must not be done twice, so that whoever is interrupted before can do it all again.
    `held` is the transaction, unless the step begins it.
    """

    record: Record
    apply: Callable[[Position], Held]
    give_up: Callable[[], None]
    held: Held | None = None

    def leave(self, book: TransactionBook) -> None:
        """Give it up: nothing was written."""
        self.give_up()
        if self.held is not None:
            book.release(self.held)


class Answer(Promise[Result]):
    """The future of a step, which is taken in the lock when its record is durable.

    Whoever tells it takes the step, not whoever waits for it: that one may be interrupted, and the record is
    there all the same.  If `tells`, the one who waits tells the participants what was decided, and nobody
    has to be called for that.
    """

    def __init__(
        self, step: Step, book: TransactionBook, answer: Callable[[Held], Result], *, tells: bool = False
    ) -> None:
        super().__init__()
        self._step = step
        self._book = book
        self._answer = answer
        self._tells = tells
        self._held: Held | None = None
        self._is_left = False

    def complete(self, position: Position) -> None:
        with self._book.lock:
            if self._held is None:
                self._held = self._step.apply(position)
            self._book.release(self._held, is_told=self._tells and not self._held.is_open)
            result = self._answer(self._held)
        self.set_result(result)

    def fail(self, failure: BaseException) -> None:
        with self._book.lock:
            if not self._is_left:
                self._step.give_up()
                self._is_left = True
            if self._step.held is not None:
                self._book.release(self._step.held)
        self.set_exception(failure)

    def abandon(self) -> None:
        """The one who waits has left, and tells nobody."""
        with self._book.lock:
            self._tells = False
            if self._held is not None:
                self._book.release(self._held)


def answered(result: Result) -> Future[Result]:
    """A future that is done."""
    future: Future[Result] = Future()
    future.set_result(result)
    return future
