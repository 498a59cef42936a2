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
    """A record for the log, and what happens when it is durable, or is not.  Both are called in the lock."""

    record: Record
    apply: Callable[[Position], Held]
    give_up: Callable[[], None]


class Answer(Promise[Result]):
    """The future of a step, which is taken in the lock when its record is durable."""

    def __init__(self, step: Step, book: TransactionBook, answer: Callable[[Held], Result]) -> None:
        super().__init__()
        self._step = step
        self._book = book
        self._answer = answer

    def complete(self, position: Position) -> None:
        with self._book.lock:
            held = self._step.apply(position)
            self._book.release(held)
            result = self._answer(held)
        self.set_result(result)

    def fail(self, failure: BaseException) -> None:
        with self._book.lock:
            self._step.give_up()
        self.set_exception(failure)


def answered(result: Result) -> Future[Result]:
    """A future that is done."""
    future: Future[Result] = Future()
    future.set_result(result)
    return future
