"""Run a named feed on Spark.

The runner is the one of `floodmark feed run`, on the driver: it holds the lease and reports checkpoints.
Only its rounds differ, which Spark's tasks carry out for a few seconds at a time.  The checkpoints are at the
site alone, so a feed can be run here today and in one process tomorrow, and a killed driver loses nothing.

Each task runs a round (`feed/named/round.py`) for some of the ranges, and reports how far they came, also if
an error stopped one of them.  It polls the lease of its runner itself: a task that outlives its driver stops
before another runner may begin.
"""

import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from os import getpid
from socket import gethostname
from threading import Event
from typing import Final
from uuid import uuid4

import msgspec
import pyarrow
from msgspec.structs import replace
from pyspark.sql import SparkSession

from floodmark.accounting.checks import CheckStatistics
from floodmark.clock import TimeSource, monotonic_ms
from floodmark.clock.backoff import Backoff
from floodmark.feed.named.feeds import Feed, FeedState, RangeProgress
from floodmark.feed.named.round import Counters, Effort, Round, Surroundings, ThreadRound
from floodmark.feed.named.runner import LEASE_SECONDS, REPORT_SECONDS, RUNNING, FeedRunner, RunnerStatistics
from floodmark.feed.named.store import FeedStore
from floodmark.feed.reading.items import SKIPPED_KEPT, join_skipped
from floodmark.feed.sinks.base import AllowedSinks, parse_sink, require_sink
from floodmark.host.ports import Host
from floodmark.model.errors import (
    FeedNotFound,
    FloodmarkError,
    InvalidArgument,
    LeaseHeld,
    Retryable,
    Terminal,
    VersionCollected,
)
from floodmark.model.version import Version
from floodmark.site.address import SiteAddress
from floodmark.site.feeds import surroundings_of
from floodmark.spark.jobs.common import pass_heartbeats
from floodmark.spark.runtime.failures import raising_floodmark_errors
from floodmark.spark.runtime.progress import SILENT, JobProgress
from floodmark.spark.session import open_session

# How soon an idle feed notices changes.
IDLE_MS: Final = 200
# How long a task delivers before it reports, and its poll interval for the lease.
ROUND_MS: Final = 5_000
LOOK_SECONDS: Final = 1.0

REPORT: Final = "report binary"
_REPORT_SCHEMA: Final = pyarrow.schema([("report", pyarrow.binary())])

# A file sink removes temporary files that its own process does not write: its ranges must share one process.
_ONE_TASK: Final = frozenset({"parquet"})


class FeedRunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a run of a feed."""

    feed: str
    state: FeedState
    checkpoint: Version
    changes: int
    bytes: int
    batches: int
    rounds: int
    elapsed_ms: int
    checks: CheckStatistics


def run_feed(
    source: SiteAddress,
    name: str,
    *,
    sinks: Sequence[str] = (),
    once: bool = False,
    spark: SparkSession | None = None,
    progress: JobProgress | None = None,
    watch: Callable[[Callable[[], RunnerStatistics]], None] | None = None,
    stop: Event | None = None,
    lease_seconds: float = LEASE_SECONDS,
) -> FeedRunSummary:
    """Run a feed until it is told to stop, or the feed is paused, finished, failed or taken away.

    It writes only to `sinks`, which are beginnings of URIs (`site.feeds.runner` says more); the workers read
    the files that they name.  With `once` it stops when it has delivered all that was there when it began.
    Raises `LeaseHeld` if another runner has the feed, `NotAllowed` if its sink is not among `sinks`,
    `VersionCollected` if changes are gone, and the sink's error if that is final.

    `watch` is called with a function that returns the runner's statistics.
    """
    source.require_url("fed from")
    began_ms = monotonic_ms()
    with source.connect() as site:
        _require_workers_can(site.feeds.show(name), sinks)
        with open_session(name=f"floodmark feed {name}", spark=spark) as session:
            target = site.resolved_version() if once else None
            job = _FeedJob(
                spark=session,
                source=source,
                host=site.host,
                sinks=sinks,
                target=target,
                progress=progress or SILENT,
            )
            runner = FeedRunner(
                site.host.feeds,
                name,
                partial(SparkRound, job),
                holder=job.holder,
                target=target,
                lease_seconds=lease_seconds,
                report_seconds=min(REPORT_SECONDS, lease_seconds / 10),
                stopping=stop,
                time_source=site.host.physical_ms,
            )
            if watch is not None:
                watch(runner.statistics)
            state = runner.run()
    statistics = runner.statistics()
    return FeedRunSummary(
        feed=name,
        state=state,
        checkpoint=0 if runner.feed is None else runner.feed.checkpoint,
        changes=statistics.changes,
        bytes=statistics.bytes,
        batches=statistics.batches,
        rounds=job.rounds,
        elapsed_ms=monotonic_ms() - began_ms,
        checks=CheckStatistics() if runner.feed is None else runner.feed.checked,
    )


def _require_workers_can(feed: Feed, sinks: Sequence[str]) -> None:
    require_sink(feed.spec.sink)
    AllowedSinks(sinks).admit(feed.spec.sink)
    if parse_sink(feed.spec.sink).scheme == "stdout":
        raise InvalidArgument(
            f"feed {feed.name!r} writes to stdout:, which Spark's tasks write on other machines; run it with "
            "`floodmark feed run` without Spark"
        )


# In the tasks


@dataclass(frozen=True, kw_only=True)
class TaskReport:
    """The progress of a task's ranges, the counts of its writes, and its error, if any.

    With `failed` the error ends the run, else the next round retries.  With `collected`, changes that were
    not delivered have been collected.
    """

    ranges: Sequence[RangeProgress]
    changes: int = 0
    value_bytes: int = 0
    batches: int = 0
    problem: Exception | None = None
    failed: bool = False
    collected: bool = False


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
        """Deliver the shares whose numbers arrive as rows."""
        for batch in batches:
            for number in batch.column(0).to_pylist():
                report = pickle.dumps(self._deliver(self.shares[number]))
                yield pyarrow.RecordBatch.from_pydict({"report": [report]}, schema=_REPORT_SCHEMA)

    def _deliver(self, ranges: Sequence[RangeProgress]) -> TaskReport:
        feed = replace(self.feed, ranges=list(ranges))
        try:
            site = self.source.connect()
        except FloodmarkError as error:
            return TaskReport(ranges=ranges, problem=error)
        with site:
            lease = LeaseWatch(site.host.feeds, site.host.physical_ms, feed, self.holder)
            return deliver_for_a_while(surroundings_of(site.host, self.sinks), feed, self.through, lease)


def deliver_for_a_while(
    surroundings: Surroundings, feed: Feed, through: Version, lease: "LeaseWatch"
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
    end_ms = surroundings.elapsed_ms() + ROUND_MS
    try:
        if lease.look():
            work.start()
            while not work.join(LOOK_SECONDS) and lease.look():
                if surroundings.elapsed_ms() >= end_ms and work.has_moved():
                    break
    except FloodmarkError as error:
        work.fail(error)
    work.stop()
    while not work.join(LOOK_SECONDS):
        # A write in progress is not interrupted.
        pass
    return TaskReport(
        ranges=work.report(),
        changes=counters.changes,
        value_bytes=counters.bytes,
        batches=counters.batches,
        problem=work.failure or work.problem(),
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
            # If this lasts, `require_writable` stops the writers.
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
        """Raise LeaseHeld if the lease was last confirmed too long ago."""
        if self._elapsed_ms() >= self._writable_until_ms:
            raise self._lost()

    def _lost(self) -> LeaseHeld:
        return LeaseHeld(
            f"{self._holder} has lost its lease of feed {self._feed.name!r}, or does not renew it, and its "
            "tasks have stopped writing; another runner may have taken over",
            feed=self._feed.name,
        )


# On the driver


@dataclass(kw_only=True)
class _FeedJob:
    """Delivers ranges of a feed by Spark jobs."""

    spark: SparkSession
    source: SiteAddress
    host: Host
    sinks: Sequence[str]
    target: Version | None
    progress: JobProgress
    holder: str = field(default_factory=lambda: f"spark-{gethostname()}-{getpid()}-{uuid4().hex[:8]}")
    rounds: int = 0

    def deliver(self, feed: Feed, ranges: Sequence[RangeProgress], through: Version) -> list[TaskReport]:
        """Deliver ranges up to a version in Spark's tasks, which share them."""
        options = feed.spec.options
        one = parse_sink(feed.spec.sink).scheme in _ONE_TASK
        tasks = 1 if one else min(options.concurrency, len(ranges))
        rate = options.rate_bytes_max
        # Batches wait until they are full, but leave time to write.
        shared = replace(
            options,
            concurrency=max(1, options.concurrency // tasks),
            rate_bytes_max=None if rate is None else max(1, rate // tasks),
            linger_ms=ROUND_MS // 2,
        )
        work = Work(
            source=self.source,
            feed=replace(feed, spec=replace(feed.spec, options=shared)),
            sinks=self.sinks,
            holder=self.holder,
            through=through,
            shares=[ranges[number::tasks] for number in range(tasks)],
        )
        self.rounds += 1
        with raising_floodmark_errors():
            rows = self.spark.range(0, tasks, 1, tasks).mapInArrow(work, REPORT).collect()
        return [pickle.loads(row.report) for row in rows]


class SparkRound(Round):
    """A round whose workers are in Spark's tasks.  A thread of the driver starts one job after another."""

    def __init__(
        self,
        job: _FeedJob,
        feed: Feed,
        counters: Counters,
        *,
        require_lease: Callable[[], None],
        nudge: Callable[[], None],
    ) -> None:
        super().__init__(job.host.identity.site_id, feed, counters, nudge)
        self._job = job
        self._require_lease = require_lease
        self._ranges = {part.id: replace(part, counted=None) for part in feed.ranges}
        self._backoff = Backoff(feed.spec.options.backoff_ms)
        self._problem: Exception | None = None
        self._passed_ms = monotonic_ms()
        self._driver = self.thread(self._drive, "drive")

    def start(self) -> None:
        self._driver.start()

    def join(self, seconds: float) -> bool:
        self._driver.join(seconds)
        return not self._driver.is_alive()

    def progress(self) -> list[RangeProgress]:
        return list(self._ranges.values())

    def report(self) -> list[RangeProgress]:
        with self._lock:
            return [
                replace(part, counted=self.countings[part.id].report()[1] if self.countings else None)
                for part in self._ranges.values()
            ]

    def problem(self) -> Exception | None:
        return self._problem

    def effort(self) -> Effort:
        return Effort(0, self._backoff.failures, self._backoff.left_ms)

    def _drive(self) -> None:
        while not self.stopping.is_set():
            try:
                pause_ms, self._problem = self._step()
            except VersionCollected as error:
                self.fail(error, collected=True)
                return
            except (LeaseHeld, Terminal):
                raise
            except FloodmarkError as error:
                pause_ms, self._problem = 0, error
            if self._problem is None:
                self._backoff.reset()
            else:
                next_ms = self._backoff.next_ms()
                if next_ms is None:
                    raise self._problem
                pause_ms = next_ms
                self.nudge()
            self.stopping.wait(pause_ms / 1000)

    def _step(self) -> tuple[int, Exception | None]:
        """Deliver the available changes; returns the next pause, and an error to retry after, if any."""
        ends = [version for version in (self.feed.spec.until, self._job.target) if version is not None]
        checkpoint = min(part.checkpoint for part in self._ranges.values())
        is_at_snapshot = any(part.snapshot is not None for part in self._ranges.values())
        cut = self._job.host.versions.cut_changes(
            self.feed.spec.namespace,
            checkpoint,
            None,
            min(ends, default=None),
            False,
            on_generation=self.feed.spec.on_generation,
        )
        behind = [
            part
            for part in self._ranges.values()
            if part.checkpoint < cut.version or part.snapshot is not None
        ]
        if not behind or (cut.changes == 0 and not is_at_snapshot):
            self._pass_over(behind, checkpoint, cut.version)
            return IDLE_MS, None
        self.stopping.wait(self.feed.spec.options.linger_ms / 1000)
        if self.stopping.is_set():
            return 0, None
        self._require_lease()
        return 0, self._take(self._job.deliver(self.feed, behind, cut.version))

    def _pass_over(self, ranges: Sequence[RangeProgress], since: Version, version: Version) -> None:
        """Move ranges to a version up to which there is nothing to deliver, past its heartbeats."""
        now_ms = monotonic_ms()
        # Heartbeats need not be read more often than the feed's progress is reported to the site.
        if not ranges or (self._job.target is None and now_ms - self._passed_ms < REPORT_SECONDS * 1000):
            return
        self._passed_ms = now_ms
        counted = (
            pass_heartbeats(self._job.host, self.feed.namespace_id, since, version)
            if self.countings
            else None
        )
        self._move(
            replace(
                part,
                checkpoint=version,
                resolved=max(part.resolved, version),
                counted=None if counted is None else counted.behind(part.checkpoint),
            )
            for part in ranges
        )

    def _take(self, reports: Sequence[TaskReport]) -> Exception | None:
        """Record the reports of tasks; returns the error after which the next round retries, if any."""
        problem: Exception | None = None
        for report in reports:
            self._move(report.ranges)
            self.counters.add(report.changes, report.value_bytes, report.batches)
            error = report.problem
            if error is not None and report.failed:
                self.fail(error, collected=report.collected)
            problem = problem or error
        self._job.progress.report(self.feed.name, self.counters.changes, None)
        return problem

    def _move(self, ranges: Iterable[RangeProgress]) -> None:
        with self._lock:
            for part in ranges:
                if part.counted is not None and part.id in self.countings:
                    self.countings[part.id].take_over(part.counted, part.checkpoint)
                skipped = join_skipped(self._ranges[part.id].skipped, part.skipped)[-SKIPPED_KEPT:]
                self._ranges[part.id] = replace(part, counted=None, skipped=tuple(skipped))
        self.nudge()
