"""A writer that appends many records as one entry: group commit for a ledger.

**Who appends.**  Only the log's own daemon thread, which starts with the first record and sleeps without a
timer while there is nothing to write.  Callers put records into a queue and wait for futures, so Ctrl-C can
interrupt a caller and never an append.

**When.**  The thread never waits for more records.  If it is idle, a record is written at once; records that
arrive during an append go into the next one.  A batch is full by count or by bytes; a record as large as an
entry may be is an entry of its own.  So `max_delay_ms` delays nothing: batches whose oldest record waited for
longer than that are counted as flushed by `age`, which says that the disk is slow.

**Order.**  Records are appended in the order in which they were added.  Promises and callbacks are called in
that order by the log's thread before the next append, so they must not wait for the log.

**Failure.**  A record that cannot be encoded fails alone.  A failed append fails the records of its batch and
no others.  Every record that was not cancelled gets an answer.

**Interruption.**  A caller that is interrupted cancels its promise.  If that succeeds, the record is not
written; otherwise the log answers the promise, though no caller waits for it.
"""

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from threading import Condition, Lock, Thread, current_thread
from typing import Any, Final, Generic, TypeVar

from floodmark.clock import monotonic_seconds
from floodmark.codec.entries import encode_bare, encode_batch
from floodmark.log.acknowledgement import Acknowledgements
from floodmark.log.base import EntryId, Ledger, Marks, Position
from floodmark.log.batches import Batch, Gathering, Promise, Receipt, require_limits
from floodmark.log.statistics import FlushCounter, LogStatistics, Trigger
from floodmark.model.errors import Closed, InvalidArgument, InvalidValue, StorageFailed
from floodmark.model.limits import LEDGER_RECORD_BYTES_MAX, MIB

RECORDS_MAX: Final = 512
BYTES_MAX: Final = 4 * MIB
DELAY_MS_MAX: Final = 1
BYTES_IN_FLIGHT_MAX: Final = 64 * MIB
WAIT_SECONDS_MAX: Final = 60.0

Record = TypeVar("Record")


class BatchedWriter(Generic[Record]):
    """Appends records to a ledger, many to an entry.  Safe to use from many threads.

    >>> from floodmark.testing.ledgers import MemoryLedger
    >>> ledger = MemoryLedger()
    >>> writer = BatchedWriter[bytes](ledger)
    >>> writer.write(b"begin")
    Position(entry=1, batch_size=1, batch_index=0)
    >>> writer.add(b"commit").result()
    Position(entry=2, batch_size=1, batch_index=0)
    >>> writer.close()
    """

    def __init__(
        self,
        ledger: Ledger,
        *,
        max_records: int = RECORDS_MAX,
        max_bytes: int = BYTES_MAX,
        max_delay_ms: int = DELAY_MS_MAX,
        enabled: bool = True,
        bytes_in_flight_max: int = BYTES_IN_FLIGHT_MAX,
        wait_seconds_max: float = WAIT_SECONDS_MAX,
        encode: Callable[[Record], bytes] | None = None,
        acknowledgements: Acknowledgements | None = None,
        time_seconds: Callable[[], float] = monotonic_seconds,
    ) -> None:
        require_limits(max_records, max_bytes, max_delay_ms)
        if bytes_in_flight_max < max_bytes:
            raise InvalidArgument("bytes_in_flight_max must hold at least one entry of max_bytes")
        self.ledger = ledger
        self.acknowledgements = acknowledgements or Acknowledgements(ledger)
        self._encode = encode
        self._max_delay_seconds = max_delay_ms / 1_000
        self._bytes_in_flight_max = bytes_in_flight_max
        self._wait_seconds_max = wait_seconds_max
        self._time_seconds = time_seconds
        self._counter = FlushCounter()

        self._lock = Lock()
        # Wakes the log's thread, and callers that wait for room or for a flush.
        self._called = Condition(self._lock)
        self._changed = Condition(self._lock)
        self._thread: Thread | None = None
        self._enabled = enabled
        self._closed = False
        self._gathering = Gathering(max_records=max_records, max_bytes=max_bytes, time_seconds=time_seconds)
        # How many callers wait for a flush, and the callers that wait for room, in order of arrival.
        self._flushing = 0
        self._line: deque[object] = deque()

    # Used by callers

    def add(self, record: Record) -> Future[Position]:
        """Append a record without waiting for the disk; the future of its position.

        Waits only while too many bytes are in flight.  A callback of the future must not wait for this log.
        """
        receipt = Receipt()
        self.hand_over(record, receipt)
        return receipt

    def write(self, record: Record) -> Position:
        """Append a record and return its position when it is durable."""
        self._require_no_callback()
        return self.add(record).result()

    def hand_over(self, record: Record, promise: Promise[Any]) -> None:
        """Append a record for a promise, which may be any future: `add` for callers that have their own.

        A record that cannot be encoded fails its promise.  Other errors are raised, and the record is not
        written.  After an interruption, cancel the promise to know whether it will be.
        """
        try:
            encoded = self._encoded(record)
        except Exception as error:
            promise.fail(error)
            return
        with self._lock:
            self._require_room(len(encoded))
            self._require_thread()
            # Before the record is there: if Ctrl-C comes between, the thread finds nothing, or the record.
            self._called.notify()
            self._gathering.put(encoded, promise, bare=not self._enabled)

    def acknowledge(self, positions: Iterable[Position]) -> None:
        """Remove records that are done with.  The next append stores that, or `flush`, or `close`."""
        with self._lock:
            self._require_open()
        self.acknowledgements.acknowledge(positions)

    @property
    def enabled(self) -> bool:
        """Whether later records are batched; otherwise each is an entry of its own."""
        return self._enabled

    @enabled.setter
    def enabled(self, enabled: bool) -> None:
        with self._lock:
            if enabled != self._enabled:
                self._enabled = enabled
                # Records must not join a batch that stands before records of the other kind.
                self._gathering.shut()

    def statistics(self) -> LogStatistics:
        """The totals since the writer was made."""
        return self._counter.statistics(
            enabled=self._enabled, bytes_in_flight=self._gathering.bytes_in_flight
        )

    def flush(self, seconds_max: float) -> bool:
        """Wait until earlier records and acknowledgements are stored; False after a timeout."""
        self._require_no_callback()
        with self._lock:
            if not self._closed:
                return self._wait_flushed(seconds_max)
            thread = self._thread
        if thread is not None:
            thread.join(seconds_max)
        return thread is None or not thread.is_alive()

    def _wait_flushed(self, seconds_max: float) -> bool:
        if self._thread is None and not self.acknowledgements.has_changes:
            return True
        self._require_thread()
        self._called.notify()
        end = self._gathering.put_end()
        self._flushing += 1
        try:
            return self._changed.wait_for(lambda: end.is_over, seconds_max)
        finally:
            self._flushing -= 1

    def close(self) -> None:
        """Write what was handed over, store what was acknowledged, then refuse.  Closing twice is harmless.

        A callback may close the log: then it returns at once, and the thread writes the rest.
        """
        with self._lock:
            if not self._closed:
                self._closed = True
                self._gathering.put_end()
            self._called.notify()
            self._changed.notify_all()
            thread = self._thread
        if thread is None:
            self._run()
        elif thread is not current_thread():
            thread.join()

    # Taking records in

    def _encoded(self, record: Record) -> bytes:
        encoded = record if self._encode is None else self._encode(record)
        if not isinstance(encoded, bytes):
            raise InvalidValue(f"a record is written as bytes, not as {type(encoded).__name__}")
        if len(encoded) > LEDGER_RECORD_BYTES_MAX:
            raise InvalidValue(
                f"a record of {len(encoded):,} bytes is larger than {LEDGER_RECORD_BYTES_MAX:,} bytes; "
                "store large data elsewhere and log a reference to it"
            )
        return encoded

    def _require_open(self) -> None:
        if self._closed:
            raise Closed("the log was closed; open it again")

    def _require_no_callback(self) -> None:
        if current_thread() is self._thread:
            raise InvalidArgument(
                "a callback of the log must not wait for the log; add a record with a callback, or wait in "
                "another thread"
            )

    def _require_room(self, size: int) -> None:
        """Wait in line for room.  The log's thread never waits, since only it makes room."""
        self._require_open()
        if (not self._line and self._has_room(size)) or current_thread() is self._thread:
            return
        ticket = object()
        self._line.append(ticket)
        try:
            came = self._changed.wait_for(
                lambda: self._closed or (self._line[0] is ticket and self._has_room(size)),
                self._wait_seconds_max,
            )
        finally:
            self._line.remove(ticket)
            self._changed.notify_all()
        self._require_open()
        if not came:
            raise StorageFailed(
                f"{self._gathering.bytes_in_flight:,} bytes wait to be written to the log, and after "
                f"{self._wait_seconds_max:g} s there is still no room; nothing was written. Check the disk, "
                "then try again"
            )

    def _has_room(self, size: int) -> bool:
        in_flight = self._gathering.bytes_in_flight
        return not in_flight or in_flight + size <= self._bytes_in_flight_max

    def _require_thread(self) -> None:
        """Start the log's thread, before a record is taken."""
        if self._thread is None:
            thread = Thread(target=self._run, name="floodmark-log", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                raise StorageFailed(
                    f"the log's thread cannot be started ({error}); nothing was written. Raise the process's "
                    "limit of threads, then try again"
                ) from error
            self._thread = thread

    # The log's thread

    def _run(self) -> None:
        while (batch := self._take()) is not None:
            self._write(batch)

    def _take(self) -> Batch | None:
        """Wait for the next batch; None when the log is closed and nothing is left."""
        with self._lock:
            while not self._gathering:
                if self._closed:
                    return None
                self._called.wait()
            return self._gathering.take()

    def _write(self, batch: Batch) -> None:
        """Append a batch and answer its promises.  Marks that cannot be stored go with the next append."""
        batch.begin()
        marks = self.acknowledgements.take()
        try:
            entry = self._append(batch, marks)
        except BaseException as failure:
            self.acknowledgements.give_back(marks)
            self._counter.failed_appends += bool(batch.items)
            self._make_room(batch)
            batch.fail(failure)
        else:
            self._make_room(batch)
            batch.complete(entry)

    def _append(self, batch: Batch, marks: Marks) -> EntryId:
        """Append an entry with the marks of earlier ones; its id, or 0 if there are only marks."""
        records = [record for record, _ in batch.items]
        if not records:
            if marks:
                self.ledger.mark(marks)
            return 0
        delay = max(0.0, self._time_seconds() - batch.since)
        trigger = batch.trigger or (Trigger.AGE if delay >= self._max_delay_seconds else Trigger.IDLE)
        entry = encode_bare(records[0]) if batch.bare else encode_batch(records)
        number = self.ledger.append(entry, marks)
        self.acknowledgements.opened(number, len(records))
        if batch.bare:
            self._counter.wrote_bare(len(entry))
        else:
            self._counter.flushed(trigger, len(records), len(entry), delay)
        return number

    def _make_room(self, batch: Batch) -> None:
        with self._lock:
            self._gathering.bytes_in_flight -= batch.bytes
            batch.is_over = True
            if self._line or self._flushing:
                self._changed.notify_all()
