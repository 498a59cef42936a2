"""The runner of a feed: holds its lease, supervises its rounds, and reports its checkpoints.

The runner renews the lease with each report.  If it cannot report, it stops writing before the lease expires,
because another runner may begin then.  A process that is suspended in the middle of a write may be late,
which is one more reason why sinks have to be idempotent.

Every change is delivered at least once, and the changes of a key in their order: a range is written by one
thread, a batch is flushed before the next one is begun, and the checkpoint moves after the flush.  Between
ranges there is no order; a feed with one range delivers everything in commit order.
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import Event
from typing import Final

from floodmark.clock import TimeSource, monotonic_ms, system_time_ms
from floodmark.clock.backoff import BUDGET_MS
from floodmark.feed.named.feeds import Feed, FeedError, FeedSpec, FeedState, RangeProgress
from floodmark.feed.named.round import BeginRound, Counters, Effort, Round
from floodmark.feed.named.store import FeedStore
from floodmark.model.errors import (
    FeedNotFound,
    FeedStateConflict,
    FloodmarkError,
    LeaseHeld,
    OutcomeUnknown,
    Retryable,
    VersionCollected,
)
from floodmark.model.names import require_name
from floodmark.model.version import Version, physical_ms

LEASE_SECONDS: Final = 30.0
REPORT_SECONDS: Final = 1.0
# The interval over which rates are measured.
_RATE_MS: Final = 10_000
RUNNING: Final = (FeedState.NORMAL, FeedState.ERROR)


@dataclass(frozen=True, kw_only=True)
class RunnerStatistics:
    """The state of a runner.

    `failures` counts successive failed attempts; `retry_budget_ms` is the time left for pauses between
    retries before the runner gives up.
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
    """Runs a feed until it is told to stop, it loses the lease, or the feed is paused, finished or removed.

    `begin_round` makes the rounds that do the work.  With a `target` the runner stops when everything up to
    that version is delivered.  `time_source` is for lag, and `elapsed_ms` for durations.
    """

    def __init__(
        self,
        store: FeedStore,
        name: str,
        begin_round: BeginRound,
        *,
        holder: str,
        target: Version | None = None,
        wait_for_lease: bool = False,
        lease_seconds: float = LEASE_SECONDS,
        report_seconds: float = REPORT_SECONDS,
        stopping: Event | None = None,
        time_source: TimeSource = system_time_ms,
        elapsed_ms: TimeSource = monotonic_ms,
        wait: Callable[[Event, float], bool] = Event.wait,
    ) -> None:
        require_name(holder, "holder of a lease")
        self._store = store
        self._name = name
        self._begin_round = begin_round
        self._holder = holder
        self._target = target
        self._wait_for_lease = wait_for_lease
        self._lease_seconds = lease_seconds
        self._report_seconds = report_seconds
        self._time_source = time_source
        self._elapsed_ms = elapsed_ms
        self._wait = wait
        self._stopping = stopping or Event()
        self._nudged = Event()
        self._counters = Counters()
        self._samples: deque[tuple[int, int, int]] = deque([(elapsed_ms(), 0, 0)])
        self._round: Round | None = None
        # The feed in the site's last answer; None before the lease is acquired.
        self.feed: Feed | None = None
        self._held_until_ms = self._writable_until_ms = 0

    def request_stop(self) -> None:
        """Tell the runner to stop.  It first finishes writes in progress."""
        self._stopping.set()
        self._nudged.set()

    def run(self) -> FeedState:
        """Run the feed, and return the state in which it is left.

        Raises `LeaseHeld` if another runner has the lease, unless `wait_for_lease`; `VersionCollected` if
        undelivered changes were collected; and the last error of the sink or the site if the runner gives up.
        """
        while (feed := self._acquire()) is not None:
            try:
                return self._run(feed)
            except FeedNotFound:
                return FeedState.REMOVED
            except LeaseHeld:
                # A feed that has ended has no lease, and the answer with that state may have been lost.
                if (state := self._left_state()) not in RUNNING:
                    return state
                if not self._wait_for_lease:
                    raise
            finally:
                with suppress(FloodmarkError):
                    self._store.release(self._name, self._holder)
        return self._left_state()

    # The lease

    def _acquire(self) -> Feed | None:
        """Acquire the lease, and wait for it if configured; None if the runner should stop or has no work."""
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
                # The runner that held the lease has finished the feed, or was stopped.
                if not waited:
                    raise
                return None
            self._renewed(asked_ms, feed)
            return feed
        return None

    def _left_state(self) -> FeedState:
        """The last known state of a feed that this runner does not run."""
        try:
            return self._store.find(self._name).state
        except FeedNotFound:
            return FeedState.REMOVED
        except Retryable:
            return FeedState.NORMAL if self.feed is None else self.feed.state

    def _renewed(self, asked_ms: int, feed: Feed) -> None:
        """Note a renewed lease.

        It counts from the time of the request.  No new write begins in its last third, which is for writes in
        progress.
        """
        lease_ms = int(self._lease_seconds * 1000)
        self.feed = feed
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
        """Run rounds until the feed is left; return its state."""
        while not feed.has_reached(self._target):
            work = self._round = self._begin_round(
                feed, self._counters, require_lease=self._require_writable, nudge=self._nudged.set
            )
            work.start()
            try:
                self._oversee(work)
            finally:
                self._end(work)
            feed = self._conclude(work)
            if self._stopping.is_set() or feed.state not in RUNNING:
                break
        return feed.state

    def _oversee(self, work: Round) -> None:
        """Report the progress of a round until it ends or the plan changes."""
        while not self._stopping.is_set() and work.failure is None:
            self._nudged.wait(self._report_seconds)
            self._nudged.clear()
            feed = self._report(work, _described(work.problem()))
            if feed is not None and (
                feed.state not in RUNNING or feed.has_reached(self._target) or _plan(feed) != _plan(work.feed)
            ):
                return

    def _end(self, work: Round) -> None:
        work.stop()
        while not work.join(self._report_seconds):
            # A write is in progress: keep the lease until it is done.
            with suppress(FloodmarkError):
                self._report(work, _described(work.problem()))

    def _conclude(self, work: Round) -> Feed:
        """Report the end of a round; raise the error that ended it, if there was one."""
        failure = work.failure
        if isinstance(failure, LeaseHeld):
            raise failure
        if failure is not None:
            with suppress(FloodmarkError):
                self._report(work, FeedError.of(failure, collected=work.collected))
            raise failure
        known = self.feed or work.feed
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
        """Report the progress of the feed; None if the site did not answer."""
        self._require_before(self._held_until_ms)
        asked_ms = self._elapsed_ms()
        self._sample(asked_ms)
        try:
            feed = self._store.report(self._name, self._holder, work.report(), error)
        except LeaseHeld:
            raise
        except (Retryable, OutcomeUnknown):
            # Writing goes on until the lease expires, and the next report includes this one.
            return None
        work.acknowledge(feed)
        self._renewed(asked_ms, feed)
        return feed

    # Statistics

    def statistics(self) -> RunnerStatistics:
        work, feed, now_ms = self._round, self.feed, self._time_source()
        ranges: list[RangeProgress] = []
        effort, problem = Effort(0, 0, BUDGET_MS), None
        if work is not None:
            ranges, effort, problem = work.progress(), work.effort(), work.problem()
        checkpoint = min((part.checkpoint for part in ranges), default=0)
        resolved = min((part.resolved for part in ranges), default=0)
        before_ms, changes, size = self._samples[0]
        seconds = max(1, self._elapsed_ms() - before_ms) / 1000
        return RunnerStatistics(
            feed=self._name,
            state=None if feed is None else feed.state,
            changes=self._counters.changes,
            bytes=self._counters.bytes,
            batches=self._counters.batches,
            changes_per_second=(self._counters.changes - changes) / seconds,
            bytes_per_second=(self._counters.bytes - size) / seconds,
            checkpoint=checkpoint,
            resolved=resolved,
            checkpoint_lag_ms=_lag_ms(checkpoint, now_ms),
            resolved_lag_ms=_lag_ms(resolved, now_ms),
            buffered_bytes=effort.buffered_bytes,
            problem=None if problem is None else str(problem),
            failures=effort.failures,
            retry_budget_ms=effort.retry_budget_ms,
            ranges=ranges,
        )

    def _sample(self, now_ms: int) -> None:
        self._samples.append((now_ms, self._counters.changes, self._counters.bytes))
        while len(self._samples) > 2 and self._samples[1][0] <= now_ms - _RATE_MS:
            self._samples.popleft()


def _plan(feed: Feed) -> tuple[FeedSpec, list[int]]:
    """The plan of a round; if it changes, another round begins."""
    return feed.spec, [part.id for part in feed.ranges]


def _described(problem: Exception | None) -> FeedError | None:
    return None if problem is None else FeedError.of(problem)


def _lag_ms(version: Version, now_ms: int) -> int:
    return max(0, now_ms - physical_ms(version)) if version else 0
