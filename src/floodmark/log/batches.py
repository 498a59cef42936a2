"""The records of one entry on their way to the ledger, and what those hear who wait for them."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from floodmark.log.base import EntryId, Position
from floodmark.log.statistics import Trigger
from floodmark.model.errors import FloodmarkError, OutcomeUnknown

Result = TypeVar("Result")


class Promise(Future[Result]):
    """The future of what follows from a record.  Whoever waits for it without a limit helps to write."""

    # What those do who wait for it, once it was handed over.
    help_out: Callable[["Promise[Any]"], None] | None = None
    # Whether the log has its record, and answers whatever becomes of those who wait.
    is_taken = False

    def complete(self, position: Position) -> None:
        """The record is durable.  It is told again if it was interrupted before it was done."""
        raise NotImplementedError

    def fail(self, failure: BaseException) -> None:
        """The record is not there, or nobody knows.  Told again as `complete` is."""
        self.set_exception(failure)

    def cancel(self) -> bool:
        """A record that was taken is written."""
        return False

    def done(self) -> bool:
        """Whether it was told.

        Without the lock of the future: Ctrl-C on the way out of that would keep it, and whoever tells it
        would wait for ever.
        """
        return self._state == "FINISHED"

    def result(self, timeout: float | None = None) -> Result:
        if timeout is None and self.help_out is not None and not self.done():
            self.help_out(self)
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if timeout is None and self.help_out is not None and not self.done():
            self.help_out(self)
        return super().exception(timeout)


class Receipt(Promise[Position]):
    """The future of where a record stands."""

    def complete(self, position: Position) -> None:
        self.set_result(position)


class Batch:
    """Records of one entry, with their receipts.  Once it has a trigger, or is bare, nothing is added to it.

    A signal may interrupt whoever leads between any two steps.  So a record and its receipt are added in one
    step, and `entry` tells whether they are durable, and are to be told so.
    """

    __slots__ = ("bare", "bytes", "entry", "is_live", "is_over", "receipts", "since", "trigger")

    def __init__(self, since: float, *, bare: bool = False, trigger: Trigger | None = None) -> None:
        self.since = since
        self.bare = bare
        self.trigger = trigger
        self.receipts: list[tuple[bytes, Promise[Any]]] = []
        self.bytes = 0
        self.entry: EntryId | None = None
        # Whether it is known that its records are live.
        self.is_live = False
        # Whether it was appended, one way or the other.
        self.is_over = False

    @property
    def records(self) -> list[bytes]:
        return [record for record, _ in self.receipts]

    def add(self, record: bytes, size: int, receipt: Promise[Any]) -> None:
        receipt.is_taken = True
        self.receipts.append((record, receipt))
        self.bytes += size


def complete(batch: Batch, entry: EntryId) -> None:
    """Tell everybody where their record stands."""
    size = len(batch.receipts)
    _answer(batch, lambda index, receipt: receipt.complete(Position(entry, size, index)))


def fail(batch: Batch, failure: BaseException) -> None:
    """Tell everybody whose record was in a batch, each with an error of its own."""
    _answer(batch, lambda _, receipt: receipt.fail(_error_of(failure)))


def _answer(batch: Batch, answer: Callable[[int, Promise[Any]], None]) -> None:
    """Answer in order.  A callback that ends the process must not keep the others from their answer."""
    interruption: BaseException | None = None
    for index, (_, receipt) in enumerate(batch.receipts):
        interrupted = _answer_one(index, receipt, answer)
        interruption = interruption or interrupted
    if interruption is not None:
        raise interruption


def _answer_one(
    index: int, receipt: Promise[Any], answer: Callable[[int, Promise[Any]], None]
) -> BaseException | None:
    """Answer one, once more if that was interrupted; by what it was."""
    interruption: BaseException | None = None
    for _ in range(2):
        try:
            if not receipt.done():
                answer(index, receipt)
            return interruption
        except Exception as error:
            # What goes wrong behind a record is for those to hear who wait for it, and for nobody else.
            if not receipt.done():
                receipt.set_exception(error)
            return interruption
        except BaseException as error:
            interruption = interruption or error
    if interruption is not None and not receipt.done():
        receipt.set_exception(_error_of(interruption))
    return interruption


def _error_of(failure: BaseException) -> FloodmarkError:
    if isinstance(failure, FloodmarkError):
        return failure.again()
    return OutcomeUnknown(
        f"appending to the log was interrupted ({failure!r}); whether the record is there is not known. Read "
        "the log before you write it again"
    )
