"""The batches that records gather in while the disk is busy."""

from collections import deque
from collections.abc import Callable
from typing import Any

from floodmark.log.batches import Batch, Promise
from floodmark.log.statistics import Trigger
from floodmark.model.errors import InvalidArgument
from floodmark.model.limits import LEDGER_ENTRY_RECORDS_MAX, LEDGER_RECORD_BYTES_MAX


class Gathering:
    """Batches to be appended, in order.  Whoever uses it holds the lock of the writer.

    >>> gathering = Gathering(max_records=2, max_bytes=100, time_seconds=lambda: 0.0)
    >>> for record in (b"a", b"b", b"c"):
    ...     _ = gathering.put(record, Promise[int](), bare=False)
    >>> gathering.take().records, gathering.take().records, bool(gathering)
    ([b'a', b'b'], [b'c'], False)
    """

    def __init__(self, *, max_records: int, max_bytes: int, time_seconds: Callable[[], float]) -> None:
        self._max_records = max_records
        self._max_bytes = max_bytes
        self._time_seconds = time_seconds
        self._batches: deque[Batch] = deque()
        # The one that still takes records, which is the last.
        self._open: Batch | None = None

    def __bool__(self) -> bool:
        return bool(self._batches)

    def put(self, record: bytes, receipt: Promise[Any], *, bare: bool) -> int:
        """Put a record into the batch where it belongs; its size."""
        size = len(record)
        if bare:
            batch = self._begin(bare=True)
        elif size >= self._max_bytes:
            self.shut(Trigger.BYTES)
            batch = self._begin(trigger=Trigger.LARGE)
        else:
            batch = self._open_for(size)
        batch.add(record, size, receipt)
        if batch is self._open:
            if len(batch.receipts) >= self._max_records:
                self.shut(Trigger.COUNT)
            elif batch.bytes == self._max_bytes:
                self.shut(Trigger.BYTES)
        return size

    def take(self) -> Batch:
        """Take the first batch out.

        A signal is handled where something is called, so nothing is: a batch that was taken out before the
        caller has it would be nobody's.
        """
        batch = self._batches[0]
        if batch is self._open:
            self._open = None
        del self._batches[0]
        return batch

    @property
    def last(self) -> Batch | None:
        """The last batch."""
        return self._batches[-1] if self._batches else None

    def shut(self, trigger: Trigger | None = None) -> None:
        """Let what comes next not join what was gathered."""
        if self._open is not None:
            self._open.trigger = trigger
            self._open = None

    def _open_for(self, size: int) -> Batch:
        """The batch that takes a record of a size."""
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
    """Refuse limits of an entry that no writer keeps."""
    _require_between("max_records", max_records, LEDGER_ENTRY_RECORDS_MAX)
    _require_between("max_bytes", max_bytes, LEDGER_RECORD_BYTES_MAX)
    _require_between("max_delay_ms", max_delay_ms, 3_600_000)


def _require_between(name: str, number: int, highest: int) -> None:
    if not 1 <= number <= highest:
        raise InvalidArgument(f"{name} must be between 1 and {highest:,}, but is {number:,}")
