"""A round of a feed delivers its ranges to its sink under one plan.

When the plan changes, because the feed was divided again or updated, the round ends and another begins from
the checkpoints.  Each range has a worker with two threads: one reads ahead, the other writes to the sink.
The workers of a round run in this process (`ThreadRound`), or in tasks elsewhere that each run such a round
for a part of the ranges.

The buffer between the two threads fills while the sink is busy: a slow sink gets large batches, and a fast
one gets changes at once.  The bytes of the buffer are bounded; when it is full the reader waits.  Batches end
where commits end, because only there a checkpoint can be set.  A snapshot can be divided after any key.
"""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from threading import BoundedSemaphore, Condition, Event, Lock, Thread
from typing import Final, NamedTuple, TypeAlias

from msgspec.structs import replace

from floodmark.accounting.counting import Counting
from floodmark.clock import TimeSource, monotonic_ms, monotonic_seconds
from floodmark.clock.backoff import BUDGET_MS, Backoff
from floodmark.codec.ordered import NAMESPACE_BYTES, encode_namespace, qualify_range
from floodmark.feed.named.feeds import Feed, RangeProgress
from floodmark.feed.reading.items import Damage, OnCorrupt, OnDamaged
from floodmark.feed.reading.rate import RateLimit
from floodmark.feed.sinks.base import AllowedSinks, OpenSink, Sink, SinkContext
from floodmark.model.change import Change, ChangeType
from floodmark.model.errors import FloodmarkError, SinkFailed, Terminal, Unreachable, VersionCollected
from floodmark.model.limits import FEED_BUFFER_BYTES_MAX
from floodmark.model.ranges import KeyRange
from floodmark.model.stream import ChangeBatch, ChangesRequest, SwapPlace, order_places
from floodmark.model.version import Version

# How long a round waits for its readers.  They notice its end at each batch, and idle streams send empty
# ones.  A reader that hangs in a call does no harm, because its buffer is closed.
READER_SECONDS_MAX: Final = 5.0
# Without a list of allowed sinks a runner writes nowhere.
_NO_SINKS: Final = AllowedSinks()

# The memory of a change beyond the bytes of its key and value.
CHANGE_BYTES: Final = 400

_version: Final = attrgetter("version")


class RangeBatch(NamedTuple):
    """All changes of a range in `(since, through]`; there may be none.

    With `snapshot`, rows of the snapshot at `through`, up to that qualified key, or of what comes at the swap
    behind it.
    """

    since: Version
    changes: Sequence[Change]
    through: Version
    snapshot: bytes | None = None

    @property
    def span(self) -> tuple[Version, Version]:
        """The `since` and `through` for the sink; equal within a snapshot or the rows of a swap."""
        if SwapPlace.decode(self.snapshot) is None:
            return self.since, self.through
        return self.through + 1, self.through + 1


class RangeBuffer:
    """Hands changes from the thread that reads a range to the thread that writes it.

    It begins behind `since`, or with the snapshot at `since` behind a qualified key; `prefix` is the prefix
    of the namespace's keys.
    """

    def __init__(
        self,
        since: Version,
        snapshot: bytes | None = None,
        *,
        prefix: bytes = b"",
        bytes_max: int = FEED_BUFFER_BYTES_MAX,
    ) -> None:
        # The position of the reader: the version, and within a snapshot the key.
        self.through, self.snapshot = since, snapshot
        self.bytes = 0
        # The position of the writer, in the same form.
        self._since, self._taken = since, snapshot
        self._prefix = prefix
        self._bytes_max = bytes_max
        # Whole commits, in their order.
        self._changes: list[Change] = []
        self._changed = Condition()
        # Whether the reader has finished, and whether the buffer was closed.
        self._is_over = self._closed = False

    def put(self, changes: Sequence[Change], through: Version, snapshot: bytes | None = None) -> bool:
        """Wait for room and add changes; return False if the buffer was closed.

        The rows of a swap are never in the buffer together with other changes.  A server does not send the
        empty batches before and after them, so they are added here: without them the position of the swap
        would be wrong.
        """
        is_further = through > self.through
        if is_further and _is_at_swap(self.snapshot) and not self._put([], self.through + 1, None):
            return False
        if is_further and _is_at_swap(snapshot) and not self._put([], through, None):
            return False
        return self._put(changes, through, snapshot)

    def _put(self, changes: Sequence[Change], through: Version, snapshot: bytes | None) -> bool:
        with self._changed:
            is_border = _is_at_swap(snapshot) != _is_at_swap(self.snapshot)
            self._changed.wait_for(
                lambda: self._closed or not (self.has_more if is_border else self._is_full())
            )
            if self._closed:
                return False
            self._changes += changes
            self.bytes += weigh(changes)
            self.through, self.snapshot = max(self.through, through), snapshot
            self._changed.notify_all()
            return True

    def take(self, records_max: int, linger_seconds: float = 0) -> RangeBatch | None:
        """Wait for a batch; None at the end.

        A batch ends with the commit in which it reaches `records_max`.  For a smaller one, this waits for
        more changes, for at most `linger_seconds`.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or self.has_more)
            if linger_seconds and self._changes:
                self._changed.wait_for(
                    lambda: self._is_over or self._is_full() or len(self._changes) >= records_max,
                    linger_seconds,
                )
            if self._closed or not self.has_more:
                return None
            batch = self._next_of_snapshot(records_max) or self._next_commits(records_max)
            del self._changes[: len(batch.changes)]
            self.bytes -= weigh(batch.changes)
            self._since, self._taken = batch.through, batch.snapshot
            self._changed.notify_all()
            return batch

    def _next_of_snapshot(self, records_max: int) -> RangeBatch | None:
        """The next rows of a snapshot, perhaps none, with the key reached; None if all of it was taken."""
        since = self._since
        if _is_at_swap(self.snapshot):
            rows = len(self._changes)
        else:
            # Its rows have the version at which the range begins, and all changes have higher ones.
            rows = 0 if self._taken is None else bisect_right(self._changes, since, key=_version)
        if rows:
            end = min(rows, records_max)
            return RangeBatch(since, self._changes[:end], since, self._place_of(self._changes[end - 1]))
        return None if self.snapshot is None else RangeBatch(since, [], since, self.snapshot)

    def _place_of(self, change: Change) -> bytes:
        """The position after a row, in the form of the last position."""
        key = self._prefix + change.key
        swap = SwapPlace.decode(self.snapshot)
        if swap is None:
            return key
        return swap._replace(key=b"" if change.type is ChangeType.GENERATION else key).encode()

    def _next_commits(self, records_max: int) -> RangeBatch:
        end, through = len(self._changes), self.through
        if end > records_max:
            last = self._changes[records_max - 1].version
            cut = bisect_right(self._changes, last, key=_version)
            if cut < end:
                end, through = cut, last
        return RangeBatch(self._since, self._changes[:end], through)

    def finish(self) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def close(self) -> None:
        """Discard all changes and wake all waiting threads."""
        with self._changed:
            self._is_over = self._closed = True
            self._changes.clear()
            self.bytes = 0
            self._changed.notify_all()

    @property
    def has_more(self) -> bool:
        """Whether a batch, perhaps an empty one, can be taken without waiting."""
        return (self.through, self.snapshot) != (self._since, self._taken)

    def _is_full(self) -> bool:
        return self.bytes >= self._bytes_max


def _is_at_swap(place: bytes | None) -> bool:
    return SwapPlace.decode(place) is not None


def weigh(changes: Sequence[Change]) -> int:
    """The approximate memory of changes, in bytes."""
    return len(changes) * CHANGE_BYTES + measure_bytes(changes)


def measure_bytes(changes: Sequence[Change]) -> int:
    return sum(len(change.key) + len(change.value or b"") for change in changes)


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """The environment of a feed's workers.

    The streams of `open_changes` must yield a batch, perhaps an empty one, at least every second or so, so
    that a reader notices that it should stop.  `wait` sleeps until the event is set or the seconds have
    passed, and returns whether it is set.  `on_corrupt` overrides the feed's own setting.
    """

    site: str
    site_id: int
    open_changes: Callable[[ChangesRequest], Iterator[ChangeBatch]]
    decode: Callable[[ChangeBatch, OnDamaged], Sequence[Change]]
    open_sink: OpenSink = _NO_SINKS.open
    elapsed_ms: TimeSource = monotonic_ms
    wait: Callable[[Event, float], bool] = Event.wait
    budget_ms: int = BUDGET_MS
    buffer_bytes_max: int = FEED_BUFFER_BYTES_MAX
    on_corrupt: OnCorrupt | None = None


class Counters:
    """A runner's totals of written changes, bytes and batches, over all ranges and rounds."""

    def __init__(self) -> None:
        self.changes = self.bytes = self.batches = 0
        self._lock = Lock()

    def add(self, changes: int, size: int, batches: int = 1) -> None:
        """Count batches that the sink has flushed."""
        with self._lock:
            self.changes += changes
            self.bytes += size
            self.batches += batches


class Effort(NamedTuple):
    """Bytes in buffers, successive failed attempts, and the time left for retries."""

    buffered_bytes: int
    failures: int
    retry_budget_ms: int


class Round(ABC):
    """Delivers the ranges of a feed until it is stopped, ends or fails.

    `nudge` is called when there is progress or an error that should be reported at once.
    """

    def __init__(self, site_id: int, feed: Feed, counters: Counters, nudge: Callable[[], None]) -> None:
        self.feed = feed
        self.counters = counters
        self.nudge = nudge
        # By range.  Heartbeats sum up all keys, so a feed of only some keys cannot be checked.
        self.countings = {
            part.id: Counting(part.checkpoint, site_id=site_id, namespace=feed.namespace_id)
            for part in (feed.ranges if feed.spec.is_whole else ())
        }
        self.stopping = Event()
        # The error that ended the round, and whether it means that undelivered changes were collected.
        self.failure: Exception | None = None
        self.collected = False
        self._lock = Lock()

    @abstractmethod
    def start(self) -> None:
        """Start the workers."""

    def stop(self) -> None:
        """Tell the workers to stop.  A write in progress is not interrupted."""
        self.stopping.set()

    @abstractmethod
    def join(self, seconds: float) -> bool:
        """Wait until all writes have ended; return False if some are still in progress after `seconds`."""

    @abstractmethod
    def progress(self) -> list[RangeProgress]:
        """The progress of each range."""

    @abstractmethod
    def report(self) -> list[RangeProgress]:
        """The progress of the ranges with their counts, for the site to store."""

    def acknowledge(self, feed: Feed) -> None:
        """Called when the site has stored the last report."""
        for part in feed.ranges:
            if part.id in self.countings:
                self.countings[part.id].acknowledge(part.checkpoint)

    @abstractmethod
    def problem(self) -> Exception | None:
        """An error that a range is retrying, or None."""

    @abstractmethod
    def effort(self) -> Effort:
        """The round's numbers for the runner's statistics."""

    def fail(self, error: Exception, *, collected: bool = False) -> None:
        """End the round with an error, unless another one has ended it already."""
        with self._lock:
            if self.failure is None:
                self.failure, self.collected = error, collected
        self.stop()
        self.nudge()

    def thread(self, task: Callable[[], None], name: str) -> Thread:
        """A daemon thread that runs a task; an error in it ends the round."""

        def guarded() -> None:
            try:
                task()
            except Exception as error:
                self.fail(error)
            finally:
                self.nudge()

        return Thread(target=guarded, name=f"feed {self.feed.name} {name}", daemon=True)


# Makes a round from a feed, counters, `require_lease`, which raises if the runner may not write, and `nudge`.
BeginRound: TypeAlias = Callable[..., Round]


class ThreadRound(Round):
    """A round whose workers are threads of this process.  It ends at the version `through`, if given."""

    def __init__(
        self,
        surroundings: Surroundings,
        feed: Feed,
        counters: Counters,
        *,
        require_lease: Callable[[], None],
        nudge: Callable[[], None],
        through: Version | None = None,
    ) -> None:
        super().__init__(surroundings.site_id, feed, counters, nudge)
        options = feed.spec.options
        self.surroundings = surroundings
        self.until = feed.spec.until if through is None else through
        self.permits = BoundedSemaphore(options.concurrency)
        self.require_lease = require_lease
        self._rate = RateLimit(
            options.rate_bytes_max, surroundings.elapsed_ms, partial(surroundings.wait, self.stopping)
        )
        self._rate_lock = Lock()
        self._workers = [RangeWorker(self, progress) for progress in feed.ranges]
        self._writers = [self.thread(worker.write, f"write {worker.id}") for worker in self._workers]
        self._readers = [self.thread(worker.read, f"read {worker.id}") for worker in self._workers]

    def start(self) -> None:
        for thread in (*self._writers, *self._readers):
            thread.start()

    def stop(self) -> None:
        super().stop()
        for worker in self._workers:
            worker.buffer.close()

    def join(self, seconds: float) -> bool:
        end = monotonic_seconds() + seconds
        for thread in self._writers:
            if thread.is_alive():
                thread.join(max(0.0, end - monotonic_seconds()))
        if any(thread.is_alive() for thread in self._writers):
            return False
        for thread in self._readers:
            if thread.is_alive():
                thread.join(READER_SECONDS_MAX / len(self._readers))
        return True

    def spend(self, size: int) -> bool:
        """Wait until the rate limit admits `size` bytes; return False if the round is over."""
        with self._rate_lock:
            return self._rate.spend(size) and not self.stopping.is_set()

    def progress(self) -> list[RangeProgress]:
        return [worker.progress() for worker in self._workers]

    def report(self) -> list[RangeProgress]:
        return [worker.report() for worker in self._workers]

    def problem(self) -> Exception | None:
        return next((worker.problem for worker in self._workers if worker.problem is not None), None)

    def has_moved(self) -> bool:
        """Whether every range has delivered something or is retrying an error."""
        return all(worker.has_moved or worker.problem is not None for worker in self._workers)

    def effort(self) -> Effort:
        efforts = [each for worker in self._workers for each in (worker.reading, worker.writing)]
        return Effort(
            sum(worker.buffer.bytes for worker in self._workers),
            max(each.failures for each in efforts),
            min(each.left_ms for each in efforts),
        )


class _Attempts(Backoff):
    """The attempts to read or to write, and the error that is being retried."""

    problem: Exception | None = None


class RangeWorker:
    """The worker of one range: reads ahead, counts the changes, writes them and tracks the progress."""

    def __init__(self, owner: ThreadRound, progress: RangeProgress) -> None:
        surroundings, options = owner.surroundings, owner.feed.spec.options
        self.id = progress.id
        # The checkpoint and the position in a snapshot, as a pair so that both are read together.
        self._place = progress.checkpoint, progress.snapshot
        # Held while the checkpoint moves, so that the counts match it.
        self._moving = Lock()
        self.buffer = RangeBuffer(
            progress.checkpoint,
            progress.snapshot,
            prefix=encode_namespace(owner.feed.namespace_id),
            bytes_max=surroundings.buffer_bytes_max,
        )
        self.reading = _Attempts(options.backoff_ms, budget_ms=surroundings.budget_ms)
        self.writing = _Attempts(options.backoff_ms, budget_ms=surroundings.budget_ms)
        self.counting = owner.countings.get(progress.id)
        self._damage = Damage(owner.feed.name, surroundings.on_corrupt or owner.feed.spec.on_corrupt)
        self._round = owner
        self._keys = progress.keys
        self._start = progress.order
        self._sink: Sink | None = None

    @property
    def problem(self) -> Exception | None:
        return self.writing.problem or self.reading.problem

    @property
    def has_moved(self) -> bool:
        """Whether the range has delivered anything."""
        return order_places(*self._place) != self._start

    def progress(self) -> RangeProgress:
        # Read first, because it must not be above the positions read after it.
        checkpoint, snapshot = self._place
        return RangeProgress(
            id=self.id,
            keys=self._keys,
            checkpoint=checkpoint,
            resolved=self.buffer.through,
            snapshot=snapshot,
            skipped=self._damage.skipped(),
        )

    def report(self) -> RangeProgress:
        """The progress of the range, with the counts up to its checkpoint."""
        if self.counting is None:
            return self.progress()
        with self._moving:
            progress = self.progress()
            _, counted = self.counting.report()
        return replace(progress, counted=counted)

    # Reading

    def read(self) -> None:
        """Read ahead until the target is reached or the round is over."""
        while not self._round.stopping.is_set():
            try:
                self._follow()
                return
            except VersionCollected as error:
                self._round.fail(error, collected=True)
                return
            except Terminal:
                raise
            except FloodmarkError as error:
                self._pause(self.reading, error)

    def _follow(self) -> None:
        feed, surroundings = self._round.feed, self._round.surroundings
        until = self._round.until
        request = ChangesRequest(
            keys=self._keys,
            namespace=feed.namespace_id,
            since=self.buffer.through,
            until=until,
            follow=True,
            heartbeats=self.counting is not None,
            snapshot=self.buffer.snapshot,
            on_generation=feed.spec.on_generation,
        )
        if until is not None and request.since >= until and request.snapshot is None:
            self.buffer.finish()
            return
        with _closed_after(surroundings.open_changes(request)) as batches:
            for batch in batches:
                changes = surroundings.decode(batch, self._damage)
                # Heartbeats sum up commits, not the rows of a snapshot.
                if self.counting is not None and batch.snapshot is None:
                    self.counting.read(batch)
                if not self.buffer.put(changes, batch.through, batch.snapshot):
                    return
                self._note_success(self.reading)
        if until is None or self.buffer.through < until or self.buffer.snapshot is not None:
            raise Unreachable(f"the changes of feed {feed.name!r} ended before their time")
        self.buffer.finish()

    # Writing

    def write(self) -> None:
        """Write the changes that were read until there are no more or the round is over."""
        try:
            # Opened before the first change arrives, so that an unusable sink is reported at once.
            if not self._persist(self._open):
                return
            options = self._round.feed.spec.options
            linger_seconds = options.linger_ms / 1000
            while (batch := self.buffer.take(options.batch_records, linger_seconds)) is not None:
                if batch.changes and not self._deliver(batch):
                    return
                with self._moving:
                    if self.counting is not None and batch.through > self._place[0]:
                        self.counting.deliver([change.version for change in batch.changes], batch.through)
                    self._place = batch.through, batch.snapshot
        finally:
            self._close()

    def _deliver(self, batch: RangeBatch) -> bool:
        size = measure_bytes(batch.changes)
        if not self._round.spend(size) or not self._persist(lambda: self._write(batch)):
            return False
        self._round.counters.add(len(batch.changes), size)
        return True

    def _persist(self, attempt: Callable[[], object]) -> bool:
        """Repeat `attempt` until it succeeds; return False if the round ends first."""
        while not self._round.stopping.is_set():
            failure = self._try(attempt)
            if failure is None:
                self._note_success(self.writing)
                return True
            self._close()
            self._pause(self.writing, failure)
        return False

    def _try(self, attempt: Callable[[], object]) -> FloodmarkError | None:
        with self._round.permits:
            self._round.require_lease()
            try:
                attempt()
            except Terminal:
                raise
            except FloodmarkError as error:
                return error
            except Exception as error:
                return SinkFailed(f"the sink refused: {type(error).__name__}: {error}")
        return None

    def _open(self) -> Sink:
        if self._sink is None:
            feed, (since, place) = self._round.feed, self._place
            swap = SwapPlace.decode(place)
            if swap is not None:
                since, place = since + 1, swap.key
            context = SinkContext(
                site=self._round.surroundings.site,
                feed=feed.name,
                namespace=feed.spec.namespace,
                range_id=self.id,
                keys=user_keys(self._keys, feed.namespace_id),
                since=since,
                snapshot=None if place is None else place[NAMESPACE_BYTES:],
            )
            self._sink = self._round.surroundings.open_sink(feed.spec.sink, context)
        return self._sink

    def _write(self, batch: RangeBatch) -> None:
        sink = self._open()
        since, through = batch.span
        sink.write(batch.changes, since=since, through=through)
        sink.flush()

    def _close(self) -> None:
        sink, self._sink = self._sink, None
        if sink is not None:
            # Flushed changes are durable, and the others will be written again.
            with suppress(Exception):
                sink.close()

    def _note_success(self, attempts: "_Attempts") -> None:
        if attempts.problem is not None:
            attempts.problem = None
            attempts.reset()
            self._round.nudge()

    def _pause(self, attempts: "_Attempts", error: FloodmarkError) -> None:
        """Wait before the next attempt; raise the error if the retry budget is used up."""
        attempts.problem = error
        pause_ms = attempts.next_ms()
        if pause_ms is None:
            raise error
        self._round.nudge()
        self._round.surroundings.wait(self._round.stopping, pause_ms / 1000)


@contextmanager
def _closed_after(batches: Iterator[ChangeBatch]) -> Iterator[Iterator[ChangeBatch]]:
    """Close a stream at the end of the block: it may hold a connection or a safe point."""
    try:
        yield batches
    finally:
        close = getattr(batches, "close", None)
        if close is not None:
            close()


def user_keys(keys: KeyRange, namespace: int) -> KeyRange:
    """A range of qualified keys as a range of user keys."""
    end = keys.end
    if end == qualify_range(namespace).end:
        end = None
    return KeyRange(keys.start[NAMESPACE_BYTES:], None if end is None else end[NAMESPACE_BYTES:])
