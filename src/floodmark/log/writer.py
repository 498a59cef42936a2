"""Many records, one entry: a writer that puts what comes while the disk is busy into one append.

**Who appends.**  Whoever waits.  The first thread that waits for a record leads: it appends what has
gathered, for everybody, and leaves when its own record is durable.  So a lone writer is never handed over
to another thread and back, which costs as much as half a sync.  Records that nobody waits for (callbacks,
asyncio) and those that a leader leaves behind are appended by one thread, which is started when it is first
needed and sleeps without a timer until it is called.

**When.**  There is never a wait for more to come.  If nothing is being written, a record goes at once;
what arrives during an append goes with the next one.  A batch is closed when it is full, by count or by
bytes; a record as large as an entry may be goes alone, behind what stands before it.  The delay therefore
holds nobody up.  It only tells, by flushes with the trigger `age`, that the disk kept records waiting for
longer than somebody wants.

**Order.**  Records are appended in the order in which they were added, and callbacks run in that order, in
the thread that leads, before the next append: they must not wait for the log that they hold up.

**Failure.**  A record that cannot be encoded fails alone.  A failed append fails the records of its batch and
no others.  Whatever happens, each record that was taken gets an answer.

**Interruption.**  Ctrl-C ends a wait, not a write: a record that was taken is written all the same.  So what
follows from it is done by its promise, in whatever thread that is told, and never by the one who waits.
"""

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from threading import Condition, Lock, Thread, get_ident
from typing import Any, Final, Generic, TypeVar

from floodmark.clock import monotonic_seconds
from floodmark.codec.entries import encode_bare, encode_batch
from floodmark.log.acknowledgement import Acknowledgements
from floodmark.log.base import Ledger, Position
from floodmark.log.batches import Batch, Promise, Receipt, complete, fail
from floodmark.log.gathering import Gathering, require_limits
from floodmark.log.statistics import FlushCounter, LogStatistics, Trigger
from floodmark.model.errors import (
    Closed,
    InvalidArgument,
    InvalidValue,
    StorageFailed,
)
from floodmark.model.limits import LEDGER_RECORD_BYTES_MAX, MIB

RECORDS_MAX: Final = 512
BYTES_MAX: Final = 4 * MIB
DELAY_MS_MAX: Final = 1
BYTES_IN_FLIGHT_MAX: Final = 64 * MIB
WAIT_SECONDS_MAX: Final = 60.0

Record = TypeVar("Record")
Result = TypeVar("Result")


class BatchedWriter(Generic[Record]):
    """Appends records to a ledger, many to an entry.  Safe to use from many threads.

    >>> from floodmark.log.memory import MemoryLedger
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
        self._ledger = ledger
        self._encode = encode
        self._max_bytes = max_bytes
        self._max_delay_seconds = max_delay_ms / 1_000
        self._bytes_in_flight_max = bytes_in_flight_max
        self._wait_seconds_max = wait_seconds_max
        self._time_seconds = time_seconds
        self._acknowledgements = acknowledgements or Acknowledgements(ledger)
        self._counter = FlushCounter()

        self._lock = Lock()
        # For the thread, and for everybody else who waits for something to change.
        self._called = Condition(self._lock)
        self._changed = Condition(self._lock)
        self._thread: Thread | None = None
        self._enabled = enabled
        self._closed = False
        self._gathering = Gathering(max_records=max_records, max_bytes=max_bytes, time_seconds=time_seconds)
        self._bytes_in_flight = 0
        # How many wait for what was handed over before.
        self._flushing = 0
        # Those who wait for room, in order.
        self._line: deque[object] = deque()
        # Who appends now, and what.
        self._leader: int | None = None
        self._current: Batch | None = None
        self._marks_refused = False

    # What users call

    def add(self, record: Record) -> Future[Position]:
        """Hand a record over; its position comes when it is durable.

        Waits only while too many bytes are in flight.  A callback of the future runs in the order of the
        records and must not wait for this writer.
        """
        receipt = Receipt()
        self.hand_over(record, receipt)
        return receipt

    def hand_over(self, record: Record, promise: Promise[Any]) -> None:
        """`add`, for those who have a future of their own, which is told where a callback would be.

        If the record was not taken, that is raised, and the promise is left as it is.  An interruption may
        be raised either way: `is_taken` tells.
        """
        try:
            encoded = self._encoded(record)
        except Exception as error:
            promise.fail(error)
            return
        promise.help_out = self._help_out
        try:
            with self._lock:
                self._require_room(len(encoded))
                self._require_thread()
                self._put(encoded, promise)
                if self._leader is None:
                    self._called.notify()
        except BaseException:
            self._leave_to_thread()
            raise

    def write(self, record: Record) -> Position:
        """Append a record and return when it is durable: `add`, for those who wait anyway.

        A record whose writer is interrupted has nobody who knows where it stands, and is let go of.
        """
        receipt = Receipt()
        try:
            return self.write_for(record, receipt)
        except BaseException:
            if receipt.is_taken:
                receipt.add_done_callback(self._let_go)
            raise

    def write_for(self, record: Record, promise: Promise[Result]) -> Result:
        """`hand_over`, for those who wait anyway: what comes of the promise."""
        self._require_no_callback()
        encoded = self._encoded(record)
        try:
            if not self._write_alone(encoded, promise):
                promise.help_out = self._help_out
                with self._lock:
                    self._require_room(len(encoded))
                    self._require_thread()
                    self._put(encoded, promise)
            return promise.result()
        except BaseException:
            self._leave_to_thread()
            raise

    def _leave_to_thread(self) -> None:
        """See to it that somebody writes what one who was interrupted has left."""
        with self._lock:
            if self._leader is None and self._gathering:
                self._called.notify()

    def _let_go(self, receipt: Future[Position]) -> None:
        if receipt.exception() is None:
            # A closed log keeps it, for whoever opens it again.
            with suppress(Closed):
                self.acknowledge([receipt.result()])

    def acknowledge(self, positions: Iterable[Position]) -> None:
        """Let go of records.  What that changes is stored with the next append, or now if nothing is written.

        If it cannot be stored now, it is with the next append that succeeds.
        """
        self._acknowledgements.acknowledge(positions)
        with self._lock:
            self._require_open()
            if self._leader is not None or self._gathering:
                # Whoever appends takes it along, or leaves it to the thread.
                self._want_thread()
                return
        self._lead(lambda: True)

    @property
    def ledger(self) -> Ledger:
        """Where records are written to."""
        return self._ledger

    @property
    def acknowledgements(self) -> Acknowledgements:
        """Which records are live."""
        return self._acknowledgements

    @property
    def enabled(self) -> bool:
        """Whether records are batched.  Holds for those that are added from now on."""
        return self._enabled

    @enabled.setter
    def enabled(self, enabled: bool) -> None:
        with self._lock:
            if enabled != self._enabled:
                self._enabled = enabled
                # What comes next must not join what was gathered before records of the other kind.
                self._gathering.shut()

    def statistics(self) -> LogStatistics:
        """What this writer has done so far."""
        return self._counter.statistics(enabled=self._enabled, bytes_in_flight=self._bytes_in_flight)

    def flush(self, seconds_max: float) -> bool:
        """Wait until all that was handed over before is written; whether it was."""
        self._require_no_callback()
        with self._lock:
            last = self._gathering.last or self._current
            self._flushing += 1
            try:
                return self._changed.wait_for(lambda: last is None or last.is_over, seconds_max)
            finally:
                self._flushing -= 1

    def drain(self) -> None:
        """Return when all that was handed over is written, and all that was let go of is stored as such."""
        self._require_no_callback()
        while not self._wait_drained():
            self._lead(lambda: False)

    def close(self) -> None:
        """Write what was handed over, then refuse.  Closing twice is harmless.

        In a callback, it returns at once, and what is left is written behind it.
        """
        with self._lock:
            self._closed = True
            self._changed.notify_all()
            if self._leader == get_ident():
                return
        self.drain()
        with self._lock:
            self._called.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()

    # Taking records in.  The lock is held.

    def _encoded(self, record: Record) -> bytes:
        encoded = record if self._encode is None else self._encode(record)
        if not isinstance(encoded, bytes):
            raise InvalidValue(f"a record is written as bytes, not as {type(encoded).__name__}")
        if len(encoded) > LEDGER_RECORD_BYTES_MAX:
            raise InvalidValue(
                f"a record of {len(encoded):,} bytes is larger than {LEDGER_RECORD_BYTES_MAX:,} bytes; "
                "keep in the log only what is needed to go on"
            )
        return encoded

    def _require_open(self) -> None:
        if self._closed:
            raise Closed("the log was closed; open it again")

    def _require_no_callback(self) -> None:
        if self._leader == get_ident():
            raise InvalidArgument(
                "a callback of the log waits for the log, which waits for the callback; add a record with a "
                "callback of its own, or hand the work to another thread"
            )

    def _require_room(self, size: int) -> None:
        """Wait for room in the order of arrival.  A callback is let in: the log would wait for itself."""
        self._require_open()
        if (not self._line and self._has_room(size)) or self._leader == get_ident():
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
                f"{self._bytes_in_flight:,} bytes are on their way to the log and no room was made within "
                f"{self._wait_seconds_max:g} s; nothing was written. Look after the disk, then try again"
            )

    def _has_room(self, size: int) -> bool:
        return not self._bytes_in_flight or self._bytes_in_flight + size <= self._bytes_in_flight_max

    def _require_thread(self) -> None:
        """Make sure that somebody appends what others leave; before a record is taken, for it may fail."""
        if self._thread is None:
            thread = Thread(target=self._run, name="floodmark-log", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                raise StorageFailed(
                    f"no thread can be started that writes the log ({error}), and nothing was written; let "
                    "the process have more threads, then try again"
                ) from error
            self._thread = thread

    def _want_thread(self) -> None:
        """The same for what can also wait until somebody comes by."""
        with suppress(StorageFailed):
            self._require_thread()

    def _put(self, record: bytes, receipt: Promise[Any]) -> None:
        self._bytes_in_flight += self._gathering.put(record, receipt, bare=not self._enabled)

    # Leading

    def _help_out(self, receipt: Promise[Any]) -> None:
        """Append until a record is durable, if nobody does."""
        self._require_no_callback()
        self._lead(receipt.done)

    def _run(self) -> None:
        """What the thread does: lead where nobody else does."""
        while self._wait_called():
            # Those whose records it was have been told; the thread is needed for those to come.
            with suppress(BaseException):
                self._lead(lambda: False)

    def _wait_called(self) -> bool:
        """Sleep until somebody has to lead; False at the end."""
        with self._lock:
            while self._leader is not None or not (self._gathering or self._has_marks()):
                if self._closed and self._leader is None:
                    return False
                self._called.wait()
            return True

    def _wait_drained(self) -> bool:
        """Wait until nobody leads; False if something is left."""
        with self._lock:
            self._changed.wait_for(lambda: self._leader is None)
            return not self._gathering and not self._has_marks()

    def _has_marks(self) -> bool:
        """Whether something was let go of that is to be stored, though nothing is appended."""
        return self._acknowledgements.has_changes and not self._marks_refused

    def _write_alone(self, record: bytes, promise: Promise[Any]) -> bool:
        """Append a record at once; False if others are there."""
        try:
            with self._lock:
                if self._leader is not None or self._gathering or self._line or self._closed:
                    return False
                self._leader = get_ident()
                trigger = Trigger.LARGE if len(record) >= self._max_bytes else Trigger.IDLE
                self._current = Batch(self._time_seconds(), bare=not self._enabled, trigger=trigger)
                self._current.add(record, 0, promise)
            self._append(self._current)
            self._current = None
            self._resign()
        except BaseException as interruption:
            self._abandon(interruption)
            raise
        return True

    def _lead(self, is_enough: Callable[[], bool]) -> None:
        """Append one batch after the other, unless somebody does."""
        try:
            with self._lock:
                if self._leader is not None:
                    # It may leave before all is done.
                    self._want_thread()
                    return
                self._leader = get_ident()
            while self._go_on(is_enough):
                if self._current is None:
                    self._store_marks()
                else:
                    self._append(self._current)
                    self._current = None
        except BaseException as interruption:
            self._abandon(interruption)
            raise

    def _abandon(self, interruption: BaseException) -> None:
        """Leave the lead, if it was taken, in the middle of an append."""
        if self._leader != get_ident():
            return
        batch, self._current = self._current, None
        try:
            if batch is not None:
                self._settle(batch, interruption)
        finally:
            self._resign()

    def _go_on(self, is_enough: Callable[[], bool]) -> bool:
        """Take the next batch, or only marks; or give up the lead."""
        with self._lock:
            if self._gathering and not is_enough():
                self._current = self._gathering.take()
                return True
            if not self._gathering and self._has_marks():
                return True
        self._resign()
        return False

    def _resign(self) -> None:
        """Let another lead."""
        with self._lock:
            self._leader = None
            if self._gathering or self._closed or self._has_marks():
                self._called.notify()
            self._changed.notify_all()

    def _append(self, batch: Batch) -> None:
        """Append a batch, and tell everybody."""
        try:
            self._store(batch)
        except Exception as failure:
            self._settle(batch, failure)
        else:
            self._settle(batch)

    def _settle(self, batch: Batch, failure: BaseException | None = None) -> None:
        """Tell everybody what came of a batch.  May be called again after an interruption.

        What is durable is told as such, whatever went wrong since.
        """
        self._make_room(batch)
        if batch.entry is not None:
            if not batch.is_live:
                self._acknowledgements.opened(batch.entry, len(batch.receipts))
                batch.is_live = True
            complete(batch, batch.entry)
        elif failure is not None:
            fail(batch, failure)

    def _store(self, batch: Batch) -> None:
        """Append an entry, with the marks of earlier ones."""
        records = batch.records
        if not records:
            # Somebody was interrupted before a record was added.
            return
        delay = max(0.0, self._time_seconds() - batch.since)
        trigger = batch.trigger or (Trigger.AGE if delay >= self._max_delay_seconds else Trigger.IDLE)
        marks = self._acknowledgements.take()
        try:
            entry = encode_bare(records[0]) if batch.bare else encode_batch(records)
            batch.entry = self._ledger.append(entry, marks)
        except BaseException:
            self._acknowledgements.give_back(marks)
            self._counter.failed_appends += 1
            raise
        self._marks_refused = False
        if batch.bare:
            self._counter.wrote_bare(len(entry))
        else:
            self._counter.flushed(trigger, len(records), len(entry), delay)

    def _store_marks(self) -> None:
        marks = self._acknowledgements.take()
        try:
            self._ledger.mark(marks)
        except BaseException as failure:
            self._acknowledgements.give_back(marks)
            # They go with the next append that succeeds; trying again at once would only fail again.
            self._marks_refused = True
            if not isinstance(failure, Exception):
                raise

    def _make_room(self, batch: Batch) -> None:
        with self._lock:
            # An interruption may have kept a record from being counted.
            self._bytes_in_flight = max(0, self._bytes_in_flight - batch.bytes)
            batch.bytes = 0
            batch.is_over = True
            if self._line or self._flushing:
                self._changed.notify_all()
