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

    def complete(self, position: Position) -> None:
        """The record is durable."""
        raise NotImplementedError

    def fail(self, failure: BaseException) -> None:
        """The record is not there, or nobody knows."""
        self.set_exception(failure)

    def cancel(self) -> bool:
        """A record that was taken is written."""
        return False

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
    """Records of one entry.  Once it has a trigger, or is bare, nothing is added to it."""

    __slots__ = ("bare", "bytes", "receipts", "records", "since", "trigger")

    def __init__(self, since: float, *, bare: bool = False, trigger: Trigger | None = None) -> None:
        self.since = since
        self.bare = bare
        self.trigger = trigger
        self.records: list[bytes] = []
        self.receipts: list[Promise[Any]] = []
        self.bytes = 0

    def add(self, record: bytes, receipt: Promise[Any]) -> None:
        self.records.append(record)
        self.receipts.append(receipt)
        self.bytes += len(record)


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
    for index, receipt in enumerate(batch.receipts):
        try:
            if not receipt.done():
                answer(index, receipt)
        except Exception as error:
            # What goes wrong behind a record is for those to hear who wait for it, and for nobody else.
            if not receipt.done():
                receipt.set_exception(error)
        except BaseException as error:
            interruption = interruption or error
    if interruption is not None:
        raise interruption


def _error_of(failure: BaseException) -> FloodmarkError:
    if isinstance(failure, FloodmarkError):
        return failure.again()
    return OutcomeUnknown(
        f"appending to the log was interrupted ({failure!r}); whether the record is there is not known. Read "
        "the log before you write it again"
    )
