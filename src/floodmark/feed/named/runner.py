"""Runs one feed in this process: reads its changes, writes them to its sink, and moves its checkpoint.

The runner holds the feed's lease and renews it with each report.  If it cannot report it stops writing
before the lease is over, for by then another runner may have begun.  A process that is held up in the
middle of a write can still be late, which is one more reason why sinks have to be idempotent.

Every change is delivered at least once, and the changes of a key in their order: a range is written by one
thread, a batch is flushed before the next one is begun, and the checkpoint moves after the flush.  Between
ranges there is no order; a feed with one range delivers everything in commit order.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import Event
from typing import Final

from floodmark.clock import TimeSource, monotonic_ms, system_time_ms
from floodmark.feed.named.backoff import BUDGET_MS
from floodmark.feed.named.feeds import Feed, FeedError, FeedSpec, FeedState, RangeProgress
from floodmark.feed.named.round import Counters, Round, Surroundings
from floodmark.feed.named.store import FeedStore
from floodmark.feed.reading.damage import OnCorrupt, OnDamaged
from floodmark.feed.sinks import AllowedSinks, OpenSink
from floodmark.model.change import Change
from floodmark.model.errors import (
    FeedNotFound,
    FeedStateConflict,
    FloodmarkError,
    LeaseHeld,
    OutcomeUnknown,
    Retryable,
    VersionCollected,
)
from floodmark.model.limits import FEED_BUFFER_BYTES_MAX
from floodmark.model.names import require_name
from floodmark.model.stream import ChangeBatch, ChangesRequest
from floodmark.model.version import Version, physical_ms

LEASE_SECONDS: Final = 30.0
REPORT_SECONDS: Final = 1.0
# Rates are those of the last few seconds.
_RATE_MS: Final = 10_000
_RUNNING: Final = (FeedState.NORMAL, FeedState.ERROR)
# What is not told where it may write writes nowhere.
_NO_PLACE: Final = AllowedSinks()


@dataclass(frozen=True, kw_only=True)
class RunnerStatistics:
    """A runner at work.

    `failures` counts failed attempts in a row; `retry_budget_ms` is how long pauses may still last before the
    runner gives up.
    """

    feed: str
    state: FeedState | None
    changes: int
    bytes: int
    batches: int
    changes_per_second: float
    bytes_per_second: float
    checkpoint: Version
    resolved: Version
    checkpoint_lag_ms: int
    resolved_lag_ms: int
    buffered_bytes: int
    problem: str | None
    failures: int
    retry_budget_ms: int
    ranges: Sequence[RangeProgress]


class FeedRunner:
    """Runs a feed until it is asked to stop, or the feed is paused, finished, failed or taken away.

    `time_source` is the time by which lag is told; `elapsed_ms` measures how long things take.
    """

    def __init__(
        self,
        store: FeedStore,
        name: str,
        *,
        site: str,
        site_id: int,
        holder: str,
        open_changes: Callable[[ChangesRequest], Iterator[ChangeBatch]],
        decode: Callable[[ChangeBatch, OnDamaged], Sequence[Change]],
        open_sink: OpenSink = _NO_PLACE.open,
        wait_for_lease: bool = False,
        lease_seconds: float = LEASE_SECONDS,
        report_seconds: float = REPORT_SECONDS,
        budget_ms: int = BUDGET_MS,
        buffer_bytes_max: int = FEED_BUFFER_BYTES_MAX,
        on_corrupt: OnCorrupt | None = None,
        time_source: TimeSource = system_time_ms,
        elapsed_ms: TimeSource = monotonic_ms,
        wait: Callable[[Event, float], bool] = Event.wait,
    ) -> None:
        require_name(holder, "holder of a lease")
        self._store = store
        self._name = name
        self._holder = holder
        self._wait_for_lease = wait_for_lease
        self._lease_seconds = lease_seconds
        self._report_seconds = report_seconds
        self._time_source = time_source
        self._elapsed_ms = elapsed_ms
        self._wait = wait
        self._surroundings = Surroundings(
            site=site,
            site_id=site_id,
            open_changes=open_changes,
            decode=decode,
            open_sink=open_sink,
            elapsed_ms=elapsed_ms,
            wait=wait,
            budget_ms=budget_ms,
            buffer_bytes_max=buffer_bytes_max,
            on_corrupt=on_corrupt,
        )
        self._stopping = Event()
        self._nudged = Event()
        self._counters = Counters()
        self._samples: deque[tuple[int, int, int]] = deque([(elapsed_ms(), 0, 0)])
        self._round: Round | None = None
        self._feed: Feed | None = None
        self._held_until_ms = self._writable_until_ms = 0

    def request_stop(self) -> None:
        """Ask the runner to end soon.  What the sink is given at the moment is finished first."""
        self._stopping.set()
        self._nudged.set()

    def run(self) -> FeedState:
        """Run, and return the state that the feed was left in.

        Raises `LeaseHeld` if another runner has the feed and is not to be waited for, `VersionCollected` if
        changes are gone, and what the sink or the site said last if the runner gave up.
        """
        while (feed := self._acquire()) is not None:
            try:
                return self._run(feed)
            except FeedNotFound:
                return FeedState.REMOVED
            except LeaseHeld:
                # A feed that has ended has no lease; perhaps the answer that said so was lost on its way.
                if (state := self._left_state()) not in _RUNNING:
                    return state
                if not self._wait_for_lease:
                    raise
            finally:
                with suppress(FloodmarkError):
                    self._store.release(self._name, self._holder)
        return self._left_state()

    # The lease

    def _acquire(self) -> Feed | None:
        """Take the lease, and wait for it if need be; None if the runner is to stop, or need not begin."""
        waited = False
        while not self._stopping.is_set():
            asked_ms = self._elapsed_ms()
            try:
                feed = self._store.acquire(self._name, self._holder, self._lease_seconds)
            except (Retryable, OutcomeUnknown):
                if not self._wait_for_lease:
                    raise
                waited = True
                self._wait(self._stopping, self._report_seconds)
                continue
            except (FeedStateConflict, FeedNotFound):
                # The one who had the lease has done it all, or was stopped.
                if not waited:
                    raise
                return None
            self._renewed(asked_ms, feed)
            return feed
        return None

    def _left_state(self) -> FeedState:
        """The state of a feed that this runner does not run, as far as it can be told."""
        try:
            return self._store.find(self._name).state
        except FeedNotFound:
            return FeedState.REMOVED
        except Retryable:
            return FeedState.NORMAL if self._feed is None else self._feed.state

    def _renewed(self, asked_ms: int, feed: Feed) -> None:
        """The lease holds from when it was asked for at least; a third of it is for a write under way."""
        lease_ms = int(self._lease_seconds * 1000)
        self._feed = feed
        self._held_until_ms = asked_ms + lease_ms
        self._writable_until_ms = asked_ms + lease_ms * 2 // 3

    def _require_writable(self) -> None:
        self._require_before(self._writable_until_ms)

    def _require_before(self, end_ms: int) -> None:
        if self._elapsed_ms() >= end_ms:
            raise LeaseHeld(
                f"{self._holder} could not renew its lease of feed {self._name!r} in time and has stopped "
                "writing; another runner may have taken over",
                feed=self._name,
            )

    # Rounds

    def _run(self, feed: Feed) -> FeedState:
        """Carry out what the feed asks for, round after round."""
        while True:
            work = self._round = Round(
                feed,
                self._surroundings,
                self._counters,
                require_lease=self._require_writable,
                nudge=self._nudged.set,
            )
            work.start()
            try:
                self._oversee(work)
            finally:
                self._end(work)
            feed = self._conclude(work)
            if self._stopping.is_set() or feed.state not in _RUNNING:
                return feed.state

    def _oversee(self, work: Round) -> None:
        """Report while a round works, until there is something else to do."""
        while not self._stopping.is_set() and work.failure is None:
            self._nudged.wait(self._report_seconds)
            self._nudged.clear()
            feed = self._report(work, _described(work.problem()))
            if feed is not None and (feed.state not in _RUNNING or _plan(feed) != _plan(work.feed)):
                return

    def _end(self, work: Round) -> None:
        work.stop()
        while not work.join(self._report_seconds):
            # The sink is still at it: keep the lease until it is done.
            with suppress(FloodmarkError):
                self._report(work, _described(work.problem()))

    def _conclude(self, work: Round) -> Feed:
        """Report the end of a round; raise what ended it, if it was an error."""
        failure = work.failure
        if isinstance(failure, LeaseHeld):
            raise failure
        if failure is not None:
            with suppress(FloodmarkError):
                self._report(work, FeedError.of(failure, collected=work.collected))
            raise failure
        known = self._feed or work.feed
        if known.state is FeedState.FAILED:
            raise VersionCollected(
                known.error.text
                if known.error is not None
                else f"the changes of feed {self._name!r} are gone"
            )
        if known.state is FeedState.FINISHED:
            return known
        return self._report(work, _described(work.problem())) or known

    def _report(self, work: Round, error: FeedError | None) -> Feed | None:
        """Tell the site how far the feed is; None if the site could not be told."""
        self._require_before(self._held_until_ms)
        asked_ms = self._elapsed_ms()
        self._sample(asked_ms)
        try:
            feed = self._store.report(self._name, self._holder, work.report(), error)
        except LeaseHeld:
            raise
        except (Retryable, OutcomeUnknown):
            # Writing goes on until the lease is over; a later report brings what this one did not.
            return None
        work.acknowledge(feed)
        self._renewed(asked_ms, feed)
        return feed

    # Statistics

    def statistics(self) -> RunnerStatistics:
        """The runner at this moment."""
        work, feed, now_ms = self._round, self._feed, self._time_source()
        ranges = [] if work is None else work.progress()
        checkpoint = min((part.checkpoint for part in ranges), default=0)
        resolved = min((part.resolved for part in ranges), default=0)
        efforts = (
            [] if work is None else [each for part in work.ranges for each in (part.reading, part.writing)]
        )
        problem = None if work is None else work.problem()
        changes_rate, bytes_rate = self._rates()
        return RunnerStatistics(
            feed=self._name,
            state=None if feed is None else feed.state,
            changes=self._counters.changes,
            bytes=self._counters.bytes,
            batches=self._counters.batches,
            changes_per_second=changes_rate,
            bytes_per_second=bytes_rate,
            checkpoint=checkpoint,
            resolved=resolved,
            checkpoint_lag_ms=_lag_ms(checkpoint, now_ms),
            resolved_lag_ms=_lag_ms(resolved, now_ms),
            buffered_bytes=0 if work is None else sum(part.buffer.bytes for part in work.ranges),
            problem=None if problem is None else str(problem),
            failures=max((effort.failures for effort in efforts), default=0),
            retry_budget_ms=min((effort.left_ms for effort in efforts), default=self._surroundings.budget_ms),
            ranges=ranges,
        )

    def _sample(self, now_ms: int) -> None:
        self._samples.append((now_ms, self._counters.changes, self._counters.bytes))
        while len(self._samples) > 2 and self._samples[1][0] <= now_ms - _RATE_MS:
            self._samples.popleft()

    def _rates(self) -> tuple[float, float]:
        before_ms, changes, size = self._samples[0]
        seconds = max(1, self._elapsed_ms() - before_ms) / 1000
        return (self._counters.changes - changes) / seconds, (self._counters.bytes - size) / seconds


def _plan(feed: Feed) -> tuple[FeedSpec, list[int]]:
    """What a round carries out; if it changes, another round begins."""
    return feed.spec, [part.id for part in feed.ranges]


def _described(problem: Exception | None) -> FeedError | None:
    return None if problem is None else FeedError.of(problem)


def _lag_ms(version: Version, now_ms: int) -> int:
    return max(0, now_ms - physical_ms(version)) if version else 0
