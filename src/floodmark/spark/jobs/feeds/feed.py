"""Run a named feed on Spark.

The driver holds the feed's lease and gives out rounds: Spark's tasks deliver the feed's ranges for a few
seconds, each range in one task, and say how far they came.  The driver reports that to the site, where the
feed's only checkpoints are; Spark keeps nothing.  So a feed can be run here today and by `floodmark feed
run` tomorrow, and a driver that is killed leaves nothing behind but what its sinks have more than the
checkpoint says, which is written again, as always.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from os import getpid
from socket import gethostname
from threading import Event, Lock, Thread
from typing import Final, NamedTuple, NoReturn
from uuid import uuid4

import msgspec
from pyspark.sql import SparkSession

from floodmark.accounting.checks import CheckStatistics
from floodmark.accounting.counting import Counted, count_idle
from floodmark.clock import monotonic_ms
from floodmark.codec.ordered import encode_namespace
from floodmark.feed.named.backoff import Backoff
from floodmark.feed.named.feeds import Feed, FeedError, FeedState, RangeProgress
from floodmark.feed.named.runner import LEASE_SECONDS, REPORT_SECONDS
from floodmark.feed.sinks import AllowedSinks, parse_sink, require_sink
from floodmark.model.errors import (
    FeedNotFound,
    FloodmarkError,
    InvalidArgument,
    LeaseHeld,
    OutcomeUnknown,
    Retryable,
    Terminal,
    VersionCollected,
)
from floodmark.model.ranges import KeyRange, prefix_end
from floodmark.model.stream import ChangesRequest
from floodmark.model.version import Version
from floodmark.site.site import Site
from floodmark.spark.jobs.feeds.tasks import REPORT, RUNNING, RangeReport, Work
from floodmark.spark.runtime.failures import raising_floodmark_errors
from floodmark.spark.runtime.progress import SILENT, Progress
from floodmark.spark.session import use_session
from floodmark.spark.source.address import SiteAddress

# How soon a feed that has nothing to do notices changes.
IDLE_MS: Final = 200

# A file sink clears away what its own process does not write: its ranges must share one.
_ONE_TASK: Final = frozenset({"parquet"})


class FeedRunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What a run of a feed did, and how it left the feed."""

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
    progress: Progress | None = None,
    stop: Event | None = None,
    lease_seconds: float = LEASE_SECONDS,
) -> FeedRunSummary:
    """Run a feed until it is told to stop, or the feed is paused, finished, failed or taken away.

    It writes only to `sinks`, which are beginnings of URIs (`site.feeds.runner` says more); where they name
    files, the workers read them.  With `once` it stops when everything is delivered that was there when it
    began.  Raises `LeaseHeld` if another runner has the feed, `NotAllowed` if its sink is not among `sinks`,
    `VersionCollected` if changes are gone, and what the sink said if it refuses for good.
    """
    source.require_url("fed from")
    with source.connect() as site:
        _require_workers_can(site.feeds.show(name), sinks)
        with use_session(spark, f"floodmark feed {name}") as session, raising_floodmark_errors():
            run = _FeedRun(
                session, source, site, name, sinks, lease_seconds, progress or SILENT, stop or Event()
            )
            return run.run(once=once)


def _require_workers_can(feed: Feed, sinks: Sequence[str]) -> None:
    require_sink(feed.spec.sink)
    AllowedSinks(sinks).admit(feed.spec.sink)
    if parse_sink(feed.spec.sink).scheme == "stdout":
        raise InvalidArgument(
            f"feed {feed.name!r} writes to stdout:, which nobody sees where Spark's tasks run; run it with "
            "`floodmark feed run` without Spark"
        )


class _FeedRun:
    """One run of a feed."""

    def __init__(
        self,
        spark: SparkSession,
        source: SiteAddress,
        site: Site,
        name: str,
        sinks: Sequence[str],
        lease_seconds: float,
        progress: Progress,
        stop: Event,
    ) -> None:
        self._spark = spark
        self._source = source
        self._host = site.host
        self._host = site.host
        self._store = site.host.feeds
        self._name = name
        self._sinks = sinks
        self._holder = f"spark-{gethostname()}-{getpid()}-{uuid4().hex[:8]}"
        self._lease_seconds = lease_seconds
        self._report_seconds = min(REPORT_SECONDS, lease_seconds / 10)
        self._progress = progress
        self._stop = stop
        self._lock = Lock()
        self._held_until_ms = self._reported_ms = 0
        self._checkpoint: Version = 0
        self._checks = CheckStatistics()
        self._problem: Exception | None = None
        self._changes = self._bytes = self._batches = self._rounds = 0

    def run(self, *, once: bool) -> FeedRunSummary:
        """Take the lease, and do rounds until there is a reason to end."""
        began_ms = asked_ms = monotonic_ms()
        end = self._host.versions.resolved_version() if once else None
        feed = self._store.acquire(self._name, self._holder, self._lease_seconds)
        self._renewed(asked_ms, feed)
        try:
            state = self._run(feed, end)
        except FeedNotFound:
            state = FeedState.REMOVED
        except LeaseHeld:
            # A feed that has ended has no lease; perhaps the answer that said so was lost on its way.
            state = self._left_state()
            if state in RUNNING:
                raise
        finally:
            with suppress(FloodmarkError):
                self._store.release(self._name, self._holder)
        return FeedRunSummary(
            feed=self._name,
            state=state,
            checkpoint=self._checkpoint,
            changes=self._changes,
            bytes=self._bytes,
            batches=self._batches,
            rounds=self._rounds,
            elapsed_ms=monotonic_ms() - began_ms,
            checks=self._checks,
        )

    # Rounds

    def _run(self, feed: Feed, end: Version | None) -> FeedState:
        backoff = Backoff(feed.spec.options.backoff_ms)
        while feed.state in RUNNING and not self._stop.is_set() and not feed.has_reached(end):
            round_ = self._next_round(feed, end)
            self._problem = round_.problem
            if round_.problem is None:
                backoff.reset()
                pause_ms = 0 if round_.delivered else IDLE_MS
            else:
                pause_ms = backoff.next_ms() or self._give_up(round_.problem, round_.progress)
            if round_.delivered or round_.problem is not None or end is not None or self._is_report_due():
                feed = self._report(round_.progress) or feed
            feed = self._wait(pause_ms) or feed
        return feed.state

    def _next_round(self, feed: Feed, end: Version | None) -> "_Round":
        """Deliver what there is, if there is something."""
        ends = [version for version in (feed.spec.until, end) if version is not None]
        try:
            cut = self._host.versions.cut_changes(
                feed.spec.namespace, feed.checkpoint, None, min(ends, default=None), False
            )
        except VersionCollected as error:
            self._give_up(error, [], collected=True)
        except (Retryable, OutcomeUnknown) as error:
            return _Round([], problem=error)
        behind = [part for part in feed.ranges if part.checkpoint < cut.version or part.snapshot is not None]
        if not behind or (cut.changes == 0 and not feed.is_at_snapshot):
            # Nobody is told of it before the next report.
            due = end is not None or self._is_report_due()
            return self._pass_over(feed, behind if due else [], cut.version)
        if feed.spec.options.linger_ms:
            self._wait(feed.spec.options.linger_ms)
        return self._conclude(self._deliver(feed, behind, cut.version))

    def _pass_over(self, feed: Feed, ranges: Sequence[RangeProgress], version: Version) -> "_Round":
        """Move ranges to a version up to which there is nothing to deliver, past its heartbeats."""
        if not ranges or not feed.spec.is_whole:
            return _Round([_at(part, version) for part in ranges])
        prefix = encode_namespace(feed.namespace_id)
        request = ChangesRequest(
            keys=KeyRange(prefix, prefix_end(prefix)),
            namespace=feed.namespace_id,
            since=feed.checkpoint,
            until=version,
            heartbeats=True,
        )
        try:
            counted = count_idle(
                self._host.changes(request),
                feed.checkpoint,
                version,
                site_id=self._host.identity.site_id,
                namespace=feed.namespace_id,
            )
        except (Retryable, OutcomeUnknown) as error:
            return _Round([], problem=error)
        return _Round([_at(part, version, counted) for part in ranges])

    def _deliver(self, feed: Feed, ranges: Sequence[RangeProgress], through: Version) -> list[RangeReport]:
        """Let Spark's tasks deliver ranges, each of them some, and keep the lease meanwhile."""
        one = parse_sink(feed.spec.sink).scheme in _ONE_TASK
        tasks = 1 if one else min(feed.spec.options.concurrency, len(ranges))
        work = Work(
            source=self._source,
            feed=feed,
            sinks=self._sinks,
            holder=self._holder,
            lease_seconds=self._lease_seconds,
            through=through,
            shares=[ranges[number::tasks] for number in range(tasks)],
        )
        with self._keeping_lease():
            rows = self._spark.range(0, tasks, 1, tasks).mapInArrow(work, REPORT).collect()
        return [msgspec.msgpack.decode(row.report, type=RangeReport) for row in rows]

    def _conclude(self, reports: Sequence[RangeReport]) -> "_Round":
        """Take in what tasks say; raise what there is no going on after."""
        self._rounds += 1
        self._changes += sum(report.changes for report in reports)
        self._bytes += sum(report.value_bytes for report in reports)
        self._batches += sum(report.batches for report in reports)
        self._progress.report(self._name, self._changes, None)
        progress = [report.progress for report in reports]
        problems = [(error, report.collected) for report in reports if (error := report.problem) is not None]
        for error, collected in problems:
            if collected or isinstance(error, Terminal):
                self._give_up(error, progress, collected=collected)
        for error, _ in problems:
            if isinstance(error, LeaseHeld):
                raise error
        return _Round(progress, delivered=True, problem=problems[0][0] if problems else None)

    def _give_up(
        self, error: Exception, progress: Sequence[RangeProgress], *, collected: bool = False
    ) -> NoReturn:
        with suppress(FloodmarkError):
            self._store.report(
                self._name, self._holder, list(progress), FeedError.of(error, collected=collected)
            )
        raise error

    # The lease

    def _report(self, progress: Sequence[RangeProgress]) -> Feed | None:
        """Renew the lease, and tell how far the feed is; None if the site could not be told."""
        with self._lock:
            asked_ms = monotonic_ms()
            if asked_ms >= self._held_until_ms:
                raise LeaseHeld(
                    f"{self._holder} could not renew its lease of feed {self._name!r} in time and has "
                    "stopped; another runner may have taken over",
                    feed=self._name,
                )
            error = None if self._problem is None else FeedError.of(self._problem)
            try:
                feed = self._store.report(self._name, self._holder, list(progress), error)
            except LeaseHeld:
                raise
            except (Retryable, OutcomeUnknown):
                # What this report did not bring, the sinks are given again.
                return None
            self._renewed(asked_ms, feed)
            return feed

    def _renewed(self, asked_ms: int, feed: Feed) -> None:
        """The lease holds from when it was asked for, at least."""
        self._held_until_ms = asked_ms + int(self._lease_seconds * 1000)
        self._reported_ms = asked_ms
        self._checkpoint = feed.checkpoint
        self._checks = feed.checked

    def _is_report_due(self) -> bool:
        return monotonic_ms() - self._reported_ms >= self._report_seconds * 1000

    @contextmanager
    def _keeping_lease(self) -> Iterator[None]:
        """Renew the lease while a round is under way.

        Whatever else the answers say, the tasks find out by themselves, and the next report says it again.
        """
        ended = Event()

        def renew() -> None:
            while not ended.wait(self._report_seconds):
                with suppress(FloodmarkError):
                    self._report([])

        renewer = Thread(target=renew, name=f"feed {self._name} lease", daemon=True)
        renewer.start()
        try:
            yield
        finally:
            ended.set()
            renewer.join()

    def _wait(self, pause_ms: int) -> Feed | None:
        """Wait, but not without renewing the lease; the feed as it was heard of last."""
        feed, end_ms = None, monotonic_ms() + pause_ms
        while (left_ms := end_ms - monotonic_ms()) > 0:
            if self._stop.wait(min(left_ms / 1000, self._report_seconds)):
                break
            if self._is_report_due():
                feed = self._report([]) or feed
                if feed is not None and feed.state not in RUNNING:
                    break
        return feed

    def _left_state(self) -> FeedState:
        """The state of a feed that this runner does not run any more, as far as it can be told."""
        try:
            return self._store.find(self._name).state
        except FeedNotFound:
            return FeedState.REMOVED
        except Retryable:
            return FeedState.NORMAL


class _Round(NamedTuple):
    """How far a round came, whether tasks were at work, and what was in the way."""

    progress: list[RangeProgress]
    delivered: bool = False
    problem: Exception | None = None


def _at(progress: RangeProgress, version: Version, counted: Counted | None = None) -> RangeProgress:
    """A range that has nothing to deliver up to a version."""
    return msgspec.structs.replace(
        progress, checkpoint=version, resolved=max(progress.resolved, version), counted=counted
    )
