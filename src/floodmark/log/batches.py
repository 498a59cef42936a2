"""Records on their way to a ledger, and the futures of what follows from them."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from floodmark.log.base import EntryId, Position
from floodmark.log.statistics import Trigger
from floodmark.model.errors import FloodmarkError, InvalidArgument, OutcomeUnknown
from floodmark.model.limits import LEDGER_ENTRY_RECORDS_MAX, LEDGER_RECORD_BYTES_MAX

Result = TypeVar("Result")


class Promise(Future[Result]):
    """The future of what follows from a record.  The log's thread calls `complete` or `fail`, once.

    It can be cancelled until the log begins to write its record.
    """

    def complete(self, position: Position) -> None:
        """Do what follows from a record that is durable, and set the result."""
        raise NotImplementedError

    def fail(self, failure: BaseException) -> None:
        """Undo what depends on a record that is not there, or of unknown outcome, and set the error."""
        self.set_exception(failure)


class Receipt(Promise[Position]):
    """The future of a record's position."""

    def complete(self, position: Position) -> None:
        self.set_result(position)


class Batch:
    """The records of one entry with their promises.  A batch without records stores only marks."""

    __slots__ = ("bare", "bytes", "is_over", "items", "since", "trigger")

    def __init__(self, since: float, *, bare: bool = False, trigger: Trigger | None = None) -> None:
        self.since = since
        self.bare = bare
        self.trigger = trigger
        self.items: list[tuple[bytes, Promise[Any]]] = []
        # The size of the records that were added, cancelled ones too.
        self.bytes = 0
        # Whether the append succeeded or failed.
        self.is_over = False

    def begin(self) -> None:
        """Drop the records whose promises were cancelled; from here on none can be."""
        self.items = [item for item in self.items if item[1].set_running_or_notify_cancel()]

    def complete(self, entry: EntryId) -> None:
        """Tell every promise the position of its record."""
        size = len(self.items)
        for index, (_, promise) in enumerate(self.items):
            _tell(promise, promise.complete, Position(entry, size, index))

    def fail(self, failure: BaseException) -> None:
        """Tell every promise, each with an error of its own."""
        for _, promise in self.items:
            _tell(promise, promise.fail, _error_of(failure))


class Gathering:
    """Batches that wait to be appended, in order.  The caller holds the writer's lock.

    >>> gathering = Gathering(max_records=2, max_bytes=100, time_seconds=lambda: 0.0)
    >>> for record in (b"a", b"b", b"c"):
    ...     gathering.put(record, Receipt(), bare=False)
    >>> [record for record, _ in gathering.take().items], len(gathering.take().items), bool(gathering)
    ([b'a', b'b'], 1, False)
    """

    def __init__(self, *, max_records: int, max_bytes: int, time_seconds: Callable[[], float]) -> None:
        self._max_records = max_records
        self._max_bytes = max_bytes
        self._time_seconds = time_seconds
        self._batches: deque[Batch] = deque()
        # The size of all records that are not written yet; the writer subtracts what is.
        self.bytes_in_flight = 0
        # The last batch, while it takes records.
        self._open: Batch | None = None

    def __bool__(self) -> bool:
        return bool(self._batches)

    def put(self, record: bytes, promise: Promise[Any], *, bare: bool) -> None:
        """Add a record to the open batch, or to a new one."""
        size = len(record)
        if bare:
            batch = self._begin(bare=True)
        elif size >= self._max_bytes:
            self.shut(Trigger.BYTES)
            batch = self._begin(trigger=Trigger.LARGE)
        else:
            batch = self._open_for(size)
        batch.bytes += size
        self.bytes_in_flight += size
        batch.items.append((record, promise))
        if batch is self._open:
            if len(batch.items) >= self._max_records:
                self.shut(Trigger.COUNT)
            elif batch.bytes == self._max_bytes:
                self.shut(Trigger.BYTES)

    def put_end(self) -> Batch:
        """Add a batch without records behind all others."""
        self.shut()
        return self._begin()

    def take(self) -> Batch:
        """Remove the first batch and return it."""
        batch = self._batches.popleft()
        if batch is self._open:
            self._open = None
        return batch

    def shut(self, trigger: Trigger | None = None) -> None:
        """Close the open batch: later records go into another."""
        if self._open is not None:
            self._open.trigger = trigger
            self._open = None

    def _open_for(self, size: int) -> Batch:
        if self._open is not None and self._open.bytes + size > self._max_bytes:
            self.shut(Trigger.BYTES)
        if self._open is None:
            self._open = self._begin()
        return self._open

    def _begin(self, *, bare: bool = False, trigger: Trigger | None = None) -> Batch:
        batch = Batch(self._time_seconds(), bare=bare, trigger=trigger)
        self._batches.append(batch)
        return batch


def require_limits(max_records: int, max_bytes: int, max_delay_ms: int) -> None:
    """Raise `InvalidArgument` for limits of an entry that are out of range."""
    for name, number, highest in (
        ("max_records", max_records, LEDGER_ENTRY_RECORDS_MAX),
        ("max_bytes", max_bytes, LEDGER_RECORD_BYTES_MAX),
        ("max_delay_ms", max_delay_ms, 3_600_000),
    ):
        if not 1 <= number <= highest:
            raise InvalidArgument(f"{name} must be between 1 and {highest:,}, but is {number:,}")


def _tell(promise: Promise[Any], tell: Callable[[Any], None], answer: object) -> None:
    """Call a promise.  An error in it fails this promise alone."""
    try:
        tell(answer)
    except BaseException as error:
        if not promise.done():
            promise.set_exception(error)


def _error_of(failure: BaseException) -> BaseException:
    if isinstance(failure, FloodmarkError):
        return failure.again()
    if not isinstance(failure, Exception):
        # The process is to end, so the caller must not handle it as an error.
        return failure
    return OutcomeUnknown(
        f"appending to the log failed ({failure!r}); whether the record was written is unknown. Read the log "
        "before you write it again"
    )
