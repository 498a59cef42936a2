"""What Spark's tasks do for a named feed: deliver ranges of it to its sink, for a few seconds.

A task reads the changes of a range from its checkpoint on, writes them to the range's sink, and says in the
end how far it came.  Whatever goes wrong is part of what it says: the other ranges' progress must not be
lost by it.  A task looks by itself whether the runner still has the feed's lease.  So one that is left over
when its driver is killed stops before another runner may begin, though nobody tells it to.
"""

import pickle
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from threading import Event
from typing import Any, Final

import msgspec
import pyarrow

from floodmark.accounting.counting import Counting
from floodmark.clock import TimeSource, monotonic_ms
from floodmark.codec.ordered import NAMESPACE_BYTES, encode_namespace
from floodmark.feed import Decoder
from floodmark.feed.named.buffer import Batch, RangeBuffer, measure_bytes
from floodmark.feed.named.feeds import Feed, FeedState, RangeProgress
from floodmark.feed.named.round import user_keys
from floodmark.feed.named.store import FeedStore
from floodmark.feed.reading.damage import Damage
from floodmark.feed.reading.rate import RateLimit
from floodmark.feed.sinks import AllowedSinks, Sink, SinkContext
from floodmark.model.errors import (
    FeedNotFound,
    FloodmarkError,
    LeaseHeld,
    Retryable,
    SinkFailed,
    VersionCollected,
)
from floodmark.model.limits import FEED_BUFFER_BYTES_MAX
from floodmark.model.stream import ChangesRequest
from floodmark.model.version import Version
from floodmark.site.site import Site
from floodmark.spark.source.address import SiteAddress

# How long a task delivers before it says how far it is, and how often it looks at the lease.
ROUND_MS: Final = 5_000
LOOK_MS: Final = 1_000

RUNNING: Final = (FeedState.NORMAL, FeedState.ERROR)

REPORT: Final = "report binary"
_REPORT_SCHEMA: Final = pyarrow.schema([("report", pyarrow.binary())])


class RangeReport(msgspec.Struct, frozen=True, kw_only=True):
    """How far a range came, what was delivered of it, and what stopped it, as a pickled error.

    `collected` says that changes are gone from the site.
    """

    progress: RangeProgress
    changes: int = 0
    value_bytes: int = 0
    batches: int = 0
    error: bytes | None = None
    collected: bool = False

    @property
    def problem(self) -> Exception | None:
        """What stopped it."""
        if self.error is None:
            return None
        error = pickle.loads(self.error)
        assert isinstance(error, Exception)
        return error


@dataclass(frozen=True, kw_only=True)
class Work:
    """A round: the ranges of a feed that are behind a version, shared out among tasks."""

    source: SiteAddress
    feed: Feed
    sinks: Sequence[str]
    holder: str
    lease_seconds: float
    through: Version
    shares: Sequence[Sequence[RangeProgress]]

    def __call__(self, batches: Iterable[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
        """Do the shares whose numbers come."""
        for batch in batches:
            for number in batch.column(0).to_pylist():
                for report in self._share(self.shares[number]):
                    encoded = msgspec.msgpack.encode(report)
                    yield pyarrow.RecordBatch.from_arrays([[encoded]], schema=_REPORT_SCHEMA)

    def _share(self, ranges: Sequence[RangeProgress]) -> Iterator[RangeReport]:
        try:
            site = self.source.connect()
        except FloodmarkError as error:
            yield from (_failed(progress, error) for progress in ranges)
            return
        with site:
            began_ms = monotonic_ms()
            lease = LeaseWatch(site, self.feed, self.holder, self.lease_seconds)
            rate_bytes = self.feed.spec.options.rate_bytes_max
            share_bytes = None if rate_bytes is None else max(1, rate_bytes // len(self.shares))
            rate = RateLimit(share_bytes, monotonic_ms, Event().wait)
            for number, progress in enumerate(ranges):
                # What is left of the time is for the ranges that are left.
                left_ms = max(0, began_ms + ROUND_MS - monotonic_ms()) // (len(ranges) - number)
                delivery = RangeDelivery(site, self.feed, AllowedSinks(self.sinks), progress, lease, rate)
                yield delivery.run(self.through, monotonic_ms() + left_ms)


class LeaseWatch:
    """Looks now and then whether a runner still has a feed."""

    def __init__(
        self, site: Site, feed: Feed, holder: str, seconds: float, elapsed_ms: TimeSource = monotonic_ms
    ) -> None:
        self._store: FeedStore = site.host.feeds
        self._site_ms = site.host.physical_ms
        self._feed = feed
        self._holder = holder
        self._writable_ms = int(seconds * 1000) * 2 // 3
        self._elapsed_ms = elapsed_ms
        self._seen_ms: int | None = None
        self._looked_ms: int | None = None
        self._goes_on = True

    def goes_on(self, range_id: int) -> bool:
        """Whether a range is still to be delivered; `LeaseHeld` if that is no longer this runner's to do."""
        now_ms = self._elapsed_ms()
        if self._looked_ms is None or now_ms - self._looked_ms >= LOOK_MS:
            self._looked_ms = now_ms
            self._look(now_ms)
        return self._goes_on and any(part.id == range_id for part in self._feed.ranges)

    def _look(self, now_ms: int) -> None:
        try:
            self._feed = self._store.find(self._feed.name)
        except FeedNotFound:
            self._goes_on = False
            return
        except Retryable as error:
            # A third of the lease is left for a write under way.
            if self._seen_ms is None or now_ms - self._seen_ms >= self._writable_ms:
                raise self._lost() from error
            return
        self._seen_ms = now_ms
        self._goes_on = self._feed.state in RUNNING
        lease = self._feed.lease
        if self._goes_on and (
            lease is None or lease.holder != self._holder or lease.expires_at_ms <= self._site_ms()
        ):
            raise self._lost()

    def _lost(self) -> LeaseHeld:
        return LeaseHeld(
            f"{self._holder} has lost its lease of feed {self._feed.name!r}, or nobody renews it, and its "
            "tasks have stopped writing; another runner may have taken over",
            feed=self._feed.name,
        )


class RangeDelivery:
    """Delivers one range for a while."""

    def __init__(
        self,
        site: Site,
        feed: Feed,
        sinks: AllowedSinks,
        progress: RangeProgress,
        lease: LeaseWatch,
        rate: RateLimit,
    ) -> None:
        self._site = site
        self._feed = feed
        self._sinks = sinks
        self._progress = progress
        self._lease = lease
        self._rate = rate
        self._decoder = Decoder(
            site.id, lambda: {feed.namespace_id: feed.spec.namespace}, site.host.physical_ms
        )
        self._damage = Damage(feed.name, feed.spec.on_corrupt)
        self._checkpoint, self._snapshot = progress.checkpoint, progress.snapshot
        # Heartbeats tell of all keys: there is nothing to hold against a feed of some.
        self._counting = (
            Counting(progress.checkpoint, site_id=site.id, namespace=feed.namespace_id)
            if feed.spec.is_whole
            else None
        )
        self._changes = self._bytes = self._batches = 0

    def run(self, through: Version, end_ms: int) -> RangeReport:
        """Deliver up to a version, or until it is time to stop; how far it came."""
        problem: FloodmarkError | None = None
        collected = False
        try:
            self._deliver(through, end_ms)
        except _Uncollectable as error:
            problem, collected = error.reason, True
        except FloodmarkError as error:
            problem = error
        report = RangeReport(
            progress=msgspec.structs.replace(
                self._progress,
                checkpoint=self._checkpoint,
                snapshot=self._snapshot,
                resolved=max(self._progress.resolved, self._checkpoint),
                counted=None if self._counting is None else self._counting.report()[1],
                skipped=self._damage.skipped(),
            ),
            changes=self._changes,
            value_bytes=self._bytes,
            batches=self._batches,
        )
        return report if problem is None else _with_error(report, problem, collected=collected)

    def _deliver(self, through: Version, end_ms: int) -> None:
        if not self._lease.goes_on(self._progress.id):
            return
        sink = _from_sink(lambda: self._sinks.open(self._feed.spec.sink, self._context()))
        try:
            with closing(self._batches_up_to(through)) as batches:
                for batch in batches:
                    if not self._lease.goes_on(self._progress.id):
                        return
                    self._write(sink, batch)
                    if monotonic_ms() >= end_ms:
                        return
            self._reach(Batch(self._checkpoint, (), through))
        finally:
            # Whatever was flushed is safe, and the rest will be written again.
            with suppress(Exception):
                sink.close()

    def _write(self, sink: Sink, batch: Batch) -> None:
        if batch.changes:
            size = measure_bytes(batch.changes)
            self._rate.spend(size)
            _from_sink(lambda: sink.write(batch.changes, since=batch.since, through=batch.through))
            _from_sink(sink.flush)
            self._changes += len(batch.changes)
            self._bytes += size
            self._batches += 1
        self._reach(batch)

    def _reach(self, batch: Batch) -> None:
        """Note that a batch was delivered, and with it everything up to its place."""
        if self._counting is not None and batch.through > self._checkpoint:
            self._counting.deliver([change.version for change in batch.changes], batch.through)
        self._checkpoint, self._snapshot = batch.through, batch.snapshot

    def _batches_up_to(self, through: Version) -> Generator[Batch, None, None]:
        """The changes of the range in batches of whole commits, about as large as the feed wants them."""
        records = self._feed.spec.options.batch_records
        prefix = encode_namespace(self._feed.namespace_id)
        buffer = RangeBuffer(self._checkpoint, self._snapshot, prefix=prefix)
        waiting = 0
        request = ChangesRequest(
            keys=self._progress.keys,
            namespace=self._feed.namespace_id,
            since=self._checkpoint,
            until=through,
            heartbeats=self._counting is not None,
            snapshot=self._snapshot,
        )
        try:
            stream = self._site.host.changes(request)
            for read in stream:
                changes = self._decoder.decode(read, self._damage)
                # Heartbeats sum up commits, and not what a snapshot finds.
                if self._counting is not None and read.snapshot is None:
                    self._counting.read(read)
                buffer.put(changes, read.through, read.snapshot)
                waiting += len(changes)
                # Never so much that there would be no room for the next ones.
                while buffer.has_more and (waiting >= records or buffer.bytes >= FEED_BUFFER_BYTES_MAX // 2):
                    batch = buffer.take(records)
                    assert batch is not None
                    waiting -= len(batch.changes)
                    yield batch
        except VersionCollected as error:
            raise _Uncollectable(error) from error
        while buffer.has_more:
            batch = buffer.take(records)
            assert batch is not None
            yield batch

    def _context(self) -> SinkContext:
        return SinkContext(
            site=self._site.name,
            feed=self._feed.name,
            namespace=self._feed.spec.namespace,
            range_id=self._progress.id,
            keys=user_keys(self._progress.keys, self._feed.namespace_id),
            since=self._checkpoint,
            snapshot=None if self._snapshot is None else self._snapshot[NAMESPACE_BYTES:],
        )


class _Uncollectable(Exception):
    """The site says that changes of the feed are gone; a sink that says so means something else."""

    def __init__(self, reason: VersionCollected) -> None:
        super().__init__(str(reason))
        self.reason = reason


def _from_sink(step: Callable[[], Any]) -> Any:
    """Take a step at a sink; whatever a sink raises that is not ours is tried again."""
    try:
        return step()
    except FloodmarkError:
        raise
    except Exception as error:
        raise SinkFailed(f"the sink refused: {type(error).__name__}: {error}") from error


def _failed(progress: RangeProgress, error: FloodmarkError) -> RangeReport:
    return _with_error(RangeReport(progress=progress), error, collected=False)


def _with_error(report: RangeReport, error: FloodmarkError, *, collected: bool) -> RangeReport:
    return msgspec.structs.replace(report, error=pickle.dumps(error), collected=collected)
