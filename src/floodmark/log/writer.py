"""A writer that appends many records as one entry: group commit for a ledger.

**Who appends.**  Only the log's own daemon thread, which starts with the first record and sleeps without a
timer while there is nothing to write.  Callers put records into a queue and wait for futures, so Ctrl-C can
interrupt a caller and never an append.

**When.**  The thread never waits for more records.  If it is idle, a record is written at once; records that
arrive during an append go into the next one.  A batch is full by count or by bytes; a record as large as an
entry may be is an entry of its own.  So `max_delay_ms` delays nothing: batches whose oldest record waited
longer are counted as flushed by `age`, which shows that the disk is slow.

**Order.**  Records are appended in the order in which they were added.  Promises and callbacks are called in
that order by the log's thread before the next append, so they must not wait for the log.

**Failure.**  A record that cannot be encoded fails only its own promise.  A failed append fails the promises
of its batch and no others.  Every promise that was not cancelled is completed or failed.

**Interruption.**  A caller that is interrupted cancels its promise.  If that succeeds, the record is not
written; otherwise the log completes the promise, though no caller waits for it.
"""

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Condition, Lock, Thread, current_thread
from typing import Any, Final, Generic, TypeVar

import msgspec
from msgspec.structs import replace

from floodmark.clock import TimeSource, monotonic_seconds
from floodmark.codec.entries import ENTRY_HEAD_BYTES, RECORD_HEAD_BYTES, encode_bare, encode_batch
from floodmark.log.acknowledgement import Acknowledgements
from floodmark.log.base import EntryId, Ledger, Marks, Position
from floodmark.log.statistics import FlushCounter, LogStatistics, Trigger
from floodmark.log.stored import Store, StoredLedger
from floodmark.model.errors import (
    Closed,
    FloodmarkError,
    InvalidArgument,
    InvalidValue,
    OutcomeUnknown,
    StorageFailed,
)
from floodmark.model.limits import (
    LEDGER_ENTRY_RECORDS_MAX,
    LEDGER_IN_FLIGHT_BYTES_MAX,
    LEDGER_RECORD_BYTES_MAX,
    MIB,
)

WAIT_SECONDS_MAX: Final = 60.0

Record = TypeVar("Record")
Result = TypeVar("Result")


class BatchSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of an entry, and how many bytes may wait to be written before callers wait for room."""

    enabled: bool = True
    max_records: int = 512
    max_bytes: int = 4 * MIB
    max_delay_ms: int = 1
    max_bytes_in_flight: int = 64 * MIB

    def require_sound(self) -> None:
        """Raise `InvalidArgument` for settings out of range."""
        for name, lowest, highest in (
            ("max_records", 1, LEDGER_ENTRY_RECORDS_MAX),
            ("max_bytes", 1, LEDGER_RECORD_BYTES_MAX),
            ("max_delay_ms", 1, 3_600_000),
            # It holds at least one entry.
            ("max_bytes_in_flight", self.max_bytes, LEDGER_IN_FLIGHT_BYTES_MAX),
        ):
            number = getattr(self, name)
            if not lowest <= number <= highest:
                raise InvalidArgument(f"{name} must be between {lowest:,} and {highest:,}, but is {number:,}")


class Promise(Future[Result]):
    """A future that completes when a record is durable.  The log's thread calls `complete` or `fail`, once.

    It can be cancelled until the log begins to write its record.
    """

    def complete(self, position: Position) -> None:
        """Take effect, because the record is durable, and set the result."""
        raise NotImplementedError

    def fail(self, failure: BaseException) -> None:
        """Undo the preparations, because the record is missing or of unknown outcome, and set the error."""
        self.set_exception(failure)


class Receipt(Promise[Position]):
    """The future of a record's position."""

    def complete(self, position: Position) -> None:
        self.set_result(position)


@dataclass(slots=True, eq=False)
class EntryBatch:
    """The records of one entry with their promises.  A batch without records stores only marks."""

    since: float
    bare: bool = False
    trigger: Trigger | None = None
    items: list[tuple[bytes, Promise[Any]]] = field(default_factory=list)
    # The size of the records that were added, cancelled ones too.
    size: int = 0
    # Whether the append succeeded or failed.
    is_over: bool = False

    def begin(self) -> None:
        """Drop the records whose promises were cancelled; from here on none can be."""
        self.items = [item for item in self.items if item[1].set_running_or_notify_cancel()]

    def complete(self, entry: EntryId) -> None:
        """Complete every promise with the position of its record."""
        size = len(self.items)
        for index, (_, promise) in enumerate(self.items):
            _tell(promise, promise.complete, Position(entry, size, index))

    def fail(self, failure: BaseException) -> None:
        """Fail every promise, each with an error object of its own."""
        for _, promise in self.items:
            _tell(promise, promise.fail, _error_of(failure))


class Gathering:
    """Batches that wait to be appended, in order.  The caller holds the writer's lock.

    >>> gathering = Gathering(BatchSettings(max_records=2), lambda: 0.0)
    >>> for record in (b"a", b"b", b"c"):
    ...     gathering.put(record, Receipt(), bare=False)
    >>> [record for record, _ in gathering.take().items], len(gathering.take().items), bool(gathering)
    ([b'a', b'b'], 1, False)
    """

    def __init__(self, settings: BatchSettings, time_seconds: Callable[[], float]) -> None:
        self._max_records, self._max_bytes = settings.max_records, settings.max_bytes
        self._time_seconds = time_seconds
        self._batches: deque[EntryBatch] = deque()
        # The size of all records that are not written yet; the writer subtracts each batch it has written.
        self.bytes_in_flight = 0
        # The last batch, while it takes records.
        self._open: EntryBatch | None = None

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
        batch.size += size
        self.bytes_in_flight += size
        batch.items.append((record, promise))
        if batch is self._open:
            if len(batch.items) >= self._max_records:
                self.shut(Trigger.COUNT)
            elif batch.size == self._max_bytes:
                self.shut(Trigger.BYTES)

    def put_end(self) -> EntryBatch:
        """Add a batch without records after all others."""
        self.shut()
        return self._begin()

    def take(self) -> EntryBatch:
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

    def _open_for(self, size: int) -> EntryBatch:
        if self._open is not None and self._open.size + size > self._max_bytes:
            self.shut(Trigger.BYTES)
        if self._open is None:
            self._open = self._begin()
        return self._open

    def _begin(self, *, bare: bool = False, trigger: Trigger | None = None) -> EntryBatch:
        batch = EntryBatch(self._time_seconds(), bare=bare, trigger=trigger)
        self._batches.append(batch)
        return batch


class BatchedWriter(Generic[Record]):
    """Appends records to a ledger, many to an entry.  Safe to use from many threads.

    >>> from floodmark.testing.ledgers import MemoryLedger
    >>> writer = BatchedWriter[bytes](MemoryLedger())
    >>> writer.write(b"begin")
    Position(entry=1, batch_size=1, batch_index=0)
    >>> writer.add(b"commit").result()
    Position(entry=2, batch_size=1, batch_index=0)
    >>> writer.close()
    """

    def __init__(
        self,
        ledger: Ledger,
        settings: BatchSettings | None = None,
        *,
        wait_seconds_max: float = WAIT_SECONDS_MAX,
        encode: Callable[[Record], bytes] | None = None,
        acknowledgements: Acknowledgements | None = None,
        time_seconds: Callable[[], float] = monotonic_seconds,
    ) -> None:
        settings = settings or BatchSettings()
        settings.require_sound()
        self.ledger = ledger
        self.acknowledgements = acknowledgements or Acknowledgements(ledger)
        self._encode = encode
        self._max_delay_seconds = settings.max_delay_ms / 1_000
        self._bytes_in_flight_max = settings.max_bytes_in_flight
        self._wait_seconds_max = wait_seconds_max
        self._time_seconds = time_seconds
        self._counter = FlushCounter()

        self._lock = Lock()
        # Wakes the log's thread, and callers that wait for room or for a flush.
        self._called = Condition(self._lock)
        self._changed = Condition(self._lock)
        self._thread: Thread | None = None
        self._enabled = settings.enabled
        self._closed = False
        self._gathering = Gathering(settings, time_seconds)
        # How many callers wait for a flush, and the callers that wait for room, in order of arrival.
        self._flushing = 0
        self._line: deque[object] = deque()

    # Used by callers

    def add(self, record: Record) -> Future[Position]:
        """Append a record without waiting for the disk; returns the future of its position.

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
        """Append a record for a promise of the caller.

        A record that cannot be encoded fails its promise.  Other errors are raised, and the record is not
        written.  After an interruption, cancel the promise: if that succeeds, the record is not written.
        """
        try:
            encoded = self._encoded(record)
        except Exception as error:
            promise.fail(error)
            return
        with self._lock:
            self._require_room(len(encoded))
            self._require_thread()
            # Before the record is added: after Ctrl-C in between, the thread finds no record, or this one.
            self._called.notify()
            self._gathering.put(encoded, promise, bare=not self._enabled)

    def acknowledge(self, positions: Iterable[Position]) -> None:
        """Remove records that are not needed any more; the next append, `flush` or `close` stores this."""
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
                # Later records must not join a batch that precedes records of the other kind.
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
        """Write all records and store all acknowledgements handed over so far, then refuse further ones.

        May be repeated.  In a callback of the log it returns at once, and the log's thread writes the rest.
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

    def _take(self) -> EntryBatch | None:
        """Wait for the next batch; None when the log is closed and nothing is left."""
        with self._lock:
            while not self._gathering:
                if self._closed:
                    return None
                self._called.wait()
            return self._gathering.take()

    def _write(self, batch: EntryBatch) -> None:
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

    def _append(self, batch: EntryBatch, marks: Marks) -> EntryId:
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

    def _make_room(self, batch: EntryBatch) -> None:
        with self._lock:
            self._gathering.bytes_in_flight -= batch.size
            batch.is_over = True
            if self._line or self._flushing:
                self._changed.notify_all()


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


@dataclass(frozen=True)
class OpenLog(Generic[Record]):
    """A log, and the records that were live when it was opened, in order."""

    ledger: StoredLedger
    writer: BatchedWriter[Record]
    live: list[tuple[Position, Record]]


def open_log(
    store: Store,
    name: str,
    settings: BatchSettings,
    *,
    encode: Callable[[Record], bytes],
    decode: Callable[[bytes], Record],
    time_source: TimeSource,
) -> OpenLog[Record]:
    """Open the log of a name.  The first record creates its ledger.

    An entry holds as many records as the settings and the engine allow.
    """
    ledger = StoredLedger(store, name, time_source=time_source)
    heads = ENTRY_HEAD_BYTES + RECORD_HEAD_BYTES * settings.max_records
    settings = replace(settings, max_bytes=min(settings.max_bytes, max(1, ledger.entry_bytes_max - heads)))
    acknowledgements = Acknowledgements(ledger)
    live = [(position, decode(record)) for position, record in acknowledgements.recover()]
    return OpenLog(
        ledger, BatchedWriter(ledger, settings, acknowledgements=acknowledgements, encode=encode), live
    )
