"""The tasks of a feed that runs on Spark: each runs a round for some of its ranges, for a few seconds.

The rounds are those of a runner in one process (`feed/named/round.py`).  A task reports how far its ranges
came, also if an error stopped one of them.  It watches the lease of its runner by itself: a task that
outlives its driver stops before another runner may begin.
"""

import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import pyarrow

from floodmark.clock import TimeSource, monotonic_ms
from floodmark.feed.named.feeds import Feed, RangeProgress
from floodmark.feed.named.round import Counters, Surroundings, ThreadRound
from floodmark.feed.named.runner import RUNNING
from floodmark.feed.named.store import FeedStore
from floodmark.model.errors import FeedNotFound, FloodmarkError, LeaseHeld, Retryable
from floodmark.model.version import Version
from floodmark.site.address import SiteAddress
from floodmark.site.feeds import surroundings_of

# How long a task delivers before it reports, and how often it looks at the lease.
ROUND_MS: Final = 5_000
LOOK_SECONDS: Final = 1.0

REPORT: Final = "report binary"
_REPORT_SCHEMA: Final = pyarrow.schema([("report", pyarrow.binary())])


class TaskReport(msgspec.Struct, frozen=True, kw_only=True):
    """How far the ranges of a task came, what was written, and a pickled error.

    With `failed` the error ends the run, else the next round retries.  With `collected` changes are gone.
    """

    ranges: list[RangeProgress]
    changes: int = 0
    value_bytes: int = 0
    batches: int = 0
    error: bytes | None = None
    failed: bool = False
    collected: bool = False

    @property
    def problem(self) -> Exception | None:
        """The error."""
        if self.error is None:
            return None
        error = pickle.loads(self.error)
        assert isinstance(error, Exception)
        return error


@dataclass(frozen=True, kw_only=True)
class Work:
    """The ranges of a feed that are behind a version, shared out among tasks.

    `feed` has the options of one task.
    """

    source: SiteAddress
    feed: Feed
    sinks: Sequence[str]
    holder: str
    through: Version
    shares: Sequence[Sequence[RangeProgress]]

    def __call__(self, batches: Iterable[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
        """Deliver the shares whose numbers come."""
        for batch in batches:
            for number in batch.column(0).to_pylist():
                encoded = msgspec.msgpack.encode(self._deliver(self.shares[number]))
                yield pyarrow.RecordBatch.from_arrays([[encoded]], schema=_REPORT_SCHEMA)

    def _deliver(self, ranges: Sequence[RangeProgress]) -> TaskReport:
        feed = msgspec.structs.replace(self.feed, ranges=list(ranges))
        try:
            site = self.source.connect()
        except FloodmarkError as error:
            return TaskReport(ranges=list(ranges), error=pickle.dumps(error))
        with site:
            lease = LeaseWatch(site.host.feeds, site.host.physical_ms, feed, self.holder)
            return deliver_for_a_while(surroundings_of(site.host, self.sinks), feed, self.through, lease)


def deliver_for_a_while(
    surroundings: Surroundings,
    feed: Feed,
    through: Version,
    lease: "LeaseWatch",
    *,
    round_ms: int = ROUND_MS,
    look_seconds: float = LOOK_SECONDS,
) -> TaskReport:
    """Deliver the ranges of a feed up to a version, or until the time is over and each of them has moved."""
    counters = Counters()
    work = ThreadRound(
        surroundings,
        feed,
        counters,
        require_lease=lease.require_writable,
        nudge=lambda: None,
        through=through,
    )
    end_ms = surroundings.elapsed_ms() + round_ms
    try:
        if lease.look():
            work.start()
            while not work.join(look_seconds) and lease.look():
                if surroundings.elapsed_ms() >= end_ms and work.has_moved():
                    break
    except FloodmarkError as error:
        work.fail(error)
    work.stop()
    while not work.join(look_seconds):
        # A write in progress is not interrupted.
        pass
    problem = work.failure or work.problem()
    return TaskReport(
        ranges=work.report(),
        changes=counters.changes,
        value_bytes=counters.bytes,
        batches=counters.batches,
        error=None if problem is None else pickle.dumps(problem),
        failed=work.failure is not None,
        collected=work.collected,
    )


class LeaseWatch:
    """Watches whether the runner of a task still holds the lease of its feed."""

    def __init__(
        self,
        store: FeedStore,
        site_ms: Callable[[], int],
        feed: Feed,
        holder: str,
        elapsed_ms: TimeSource = monotonic_ms,
    ) -> None:
        self._store = store
        self._site_ms = site_ms
        self._feed = feed
        self._holder = holder
        self._elapsed_ms = elapsed_ms
        self._writable_until_ms = elapsed_ms()

    def look(self) -> bool:
        """Whether the ranges are still to be delivered; `LeaseHeld` if another runner may do so."""
        asked_ms = self._elapsed_ms()
        try:
            feed = self._store.find(self._feed.name)
        except FeedNotFound:
            return False
        except Retryable:
            # Writers stop by themselves when this goes on.
            return True
        if feed.state not in RUNNING:
            return False
        lease = feed.lease
        if lease is None or lease.holder != self._holder:
            raise self._lost()
        left_ms = lease.expires_at_ms - self._site_ms()
        if left_ms <= 0:
            raise self._lost()
        # The last third of the lease is for a write in progress.
        self._writable_until_ms = asked_ms + left_ms * 2 // 3
        return {part.id for part in self._feed.ranges} <= {part.id for part in feed.ranges}

    def require_writable(self) -> None:
        """Refuse to write when the lease was not seen for too long."""
        if self._elapsed_ms() >= self._writable_until_ms:
            raise self._lost()

    def _lost(self) -> LeaseHeld:
        return LeaseHeld(
            f"{self._holder} has lost its lease of feed {self._feed.name!r}, or does not renew it, and its "
            "tasks have stopped writing; another runner may have taken over",
            feed=self._feed.name,
        )
