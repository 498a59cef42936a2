"""Copy the changes of namespaces from one site to another, one way, as Spark streams.

Each namespace is a streaming query of its own: the source's change feed into the target, where a change is
stored if its stamp is the highest.  So it does no harm that Spark repeats a batch after a crash, nor that
somebody writes to the target meanwhile.  Batches follow each other without a pause; what a batch costs is
what a change waits for, about.

The lag of a change is told at the end of its batch: how long ago it was committed at the source.  Spark
observes the versions as they pass by, and hands their percentiles out with the query's progress, so nothing
is read twice for it.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from threading import Event, Lock
from typing import Any, Final, Literal
from uuid import UUID

import msgspec
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.listener import StreamingQueryListener
from pyspark.sql.streaming.query import StreamingQuery

from floodmark.accounting.checks import Checks, CheckStatistics
from floodmark.clock import monotonic_ms
from floodmark.clock.backoff import Backoff
from floodmark.files.directory import directory_at
from floodmark.model.errors import (
    InvalidArgument,
    NamespaceExists,
    NamespaceNotFound,
    OutcomeUnknown,
    Retryable,
)
from floodmark.model.version import Version, physical_ms
from floodmark.replication.lag import LagCounts
from floodmark.site.site import Site
from floodmark.spark.links.quick_notes import quick_notes
from floodmark.spark.runtime.failures import find_error, raising_floodmark_errors
from floodmark.spark.runtime.progress import SILENT, Progress
from floodmark.spark.session import use_session
from floodmark.spark.source.accounts import QueryChecks
from floodmark.spark.source.address import SiteAddress
from floodmark.spark.source.options import HEARTBEATS
from floodmark.spark.source.schemas import COUNTED
from floodmark.spark.source.special import SPECIAL
from floodmark.spark.source.writing import ACCOUNT, KEEP_STAMPS

# Who looks after the queries looks up this often.
LOOK_SECONDS: Final = 0.2
BACKOFF_MS: Final = 500

_OWNER: Final = "_floodmark.json"
_FORMAT: Final = "floodmark"
_OBSERVED: Final = "replicated"
# The shares of a batch's changes whose lag is told, oldest first: 1 in 100 waits longer than the first says.
_SHARES: Final = tuple(number / 100 for number in (0, 1, 5, *range(10, 100, 10), 95, 99, 100))


class NamespaceReplication(msgspec.Struct, frozen=True, kw_only=True):
    """How one namespace went.  The target has every change at or below `through`, if that is known.

    `wrong` counts the intervals between heartbeats in which changes went astray in this run, and `checks`
    tells what was checked since the checkpoint was begun.
    """

    namespace: str
    batches: int
    changes: int
    through: Version | None
    lag_ms_p50: int | None
    lag_ms_p99: int | None
    restarts: int
    wrong: int
    checks: CheckStatistics


class ReplicateSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What a replication did.  The lag is that of the changes, from commit to the end of their batch."""

    source: str
    target: str
    batches: int
    changes: int
    lag_ms_p50: int | None
    lag_ms_p99: int | None
    elapsed_ms: int
    wrong: int
    namespaces: list[NamespaceReplication]


def replicate(
    source: SiteAddress,
    target: SiteAddress,
    namespaces: Sequence[str],
    *,
    checkpoint: str,
    once: bool = False,
    since: Literal["earliest"] | Version = "earliest",
    spark: SparkSession | None = None,
    progress: Progress | None = None,
    stop: Event | None = None,
) -> ReplicateSummary:
    """Apply the changes of namespaces to those of the same names at another site.

    Goes on until it is told to stop, or with `once` until what is there when it begins is copied.  Spark
    keeps in `checkpoint` how far it is; the next run goes on from there, and `since` is for the first one.
    A namespace that the target lacks is created with the settings of the source's.
    """
    source.require_url("replicated from")
    target.require_url("replicated to")
    names = _require_names(namespaces)
    with source.connect() as origin, target.connect() as copy:
        _require_two(origin, copy)
        for name in names:
            _ensure_namespace(origin, copy, name)
            _own_checkpoint(checkpoint, name, origin, copy)
        with use_session(spark, "floodmark replicate") as session, raising_floodmark_errors():
            work = _Replication(session, source, target, checkpoint, once=once, since=since)
            began_ms = monotonic_ms()
            tallies = work.run(names, progress or SILENT, stop or Event())
        return _summarize(origin, copy, tallies, monotonic_ms() - began_ms)


class _Replication:
    """Starts queries, looks after them, and keeps count."""

    def __init__(
        self,
        spark: SparkSession,
        source: SiteAddress,
        target: SiteAddress,
        checkpoint: str,
        *,
        once: bool,
        since: Literal["earliest"] | Version,
    ) -> None:
        self._spark = spark
        self._source = source
        self._target = target
        self._checkpoint = directory_at(checkpoint)
        self._once = once
        # What is behind a version begins with the next one.
        self._start = since if since == "earliest" else str(since + 1)

    def run(self, names: Sequence[str], progress: Progress, stop: Event) -> "list[_Tally]":
        """Let a query for each name run until its end."""
        tallies = [_Tally(namespace=name, before=self._load_checks(name)) for name in names]
        with _listening(self._spark, tallies, progress):
            for tally in tallies:
                self._begin(tally)
            try:
                active = tallies
                while active and not stop.wait(LOOK_SECONDS):
                    active = [tally for tally in active if self._goes_on(tally, stop)]
            finally:
                for tally in tallies:
                    tally.end()
        for tally in tallies:
            tally.checks = self._load_checks(tally.namespace)
        return tallies

    def _begin(self, tally: "_Tally") -> None:
        changes = (
            self._spark.readStream.format(_FORMAT)
            .schema(COUNTED)
            .options(**self._source.options())
            .option("namespace", tally.namespace)
            .option("readChangeFeed", "true")
            .option("startingVersion", self._start)
            .option(HEARTBEATS, "true")
            .load(self._source.location)
        )
        version = F.when(~F.col("_change_type").isin(*SPECIAL), F.col("_commit_version"))
        observed = changes.observe(
            _OBSERVED,
            F.count(version).alias("changes"),
            F.percentile_approx(version, list(_SHARES), 1_000).alias("versions"),
        )
        writer = (
            observed.writeStream.format(_FORMAT)
            .options(**self._target.options(), **KEEP_STAMPS)
            .option("namespace", tally.namespace)
            .option("path", self._target.location)
            .option("checkpointLocation", self._checkpoint.directory(tally.namespace).directory("query").url)
            .option(ACCOUNT, self._account_url(tally.namespace))
        )
        if self._once:
            writer = writer.trigger(availableNow=True)
        with quick_notes(self._spark, self._checkpoint.url):
            tally.began(writer.start())

    def _account_url(self, namespace: str) -> str:
        return self._checkpoint.directory(namespace).directory(ACCOUNT).url

    def _load_checks(self, namespace: str) -> Checks:
        return QueryChecks(self._account_url(namespace)).last()

    def _goes_on(self, tally: "_Tally", stop: Event) -> bool:
        """Whether a query goes on; one that failed for the time being is begun again."""
        query = tally.query
        assert query is not None
        if query.isActive:
            return True
        error = query.exception()
        if error is None:
            return False
        found = find_error(error)
        pause_ms = tally.backoff.next_ms()
        if self._once or pause_ms is None or not isinstance(found, Retryable | OutcomeUnknown):
            raise found or error
        tally.end()
        if not stop.wait(pause_ms / 1000):
            tally.restarts += 1
            self._begin(tally)
        return True


@dataclass
class _Tally:
    """A query, and what it has done.  Its progress is told by another thread, and asked for at the end."""

    namespace: str
    before: Checks = field(default_factory=Checks)
    checks: Checks = field(default_factory=Checks)
    query: StreamingQuery | None = None
    batches: int = 0
    changes: int = 0
    restarts: int = 0
    through: Version | None = None
    lags: LagCounts = field(default_factory=LagCounts)
    backoff: Backoff = field(default_factory=lambda: Backoff(BACKOFF_MS))
    _counted: int = -1
    _lock: Lock = field(default_factory=Lock)

    def began(self, query: StreamingQuery) -> None:
        """A query was started."""
        self.query = query

    def end(self) -> None:
        """Stop the query.  A batch that is under way is done again by the next one."""
        if self.query is not None:
            self.query.stop()
            # What the listener was not told in time.
            for progress in self.query.recentProgress:
                self.add(progress)

    def add(self, progress: Any) -> None:
        """Count a batch, if that was not done yet."""
        with self._lock:
            offset = progress.sources[0].endOffset if progress.sources else None
            if offset is not None:
                self.through = max(self.through or 0, msgspec.json.decode(offset)["version"])
            if not progress.numInputRows or progress.batchId <= self._counted:
                return
            self._counted = progress.batchId
            self.backoff.reset()
            observed = progress.observedMetrics.get(_OBSERVED)
            if observed is None or not observed["changes"]:
                return
            self.batches += 1
            self.changes += observed["changes"]
            ended_ms = _to_ms(progress.timestamp) + progress.durationMs["triggerExecution"]
            lags = [max(0, ended_ms - physical_ms(version)) for version in observed["versions"]]
            for low, high, lag_ms in zip(_SHARES, _SHARES[1:], lags, strict=False):
                self.lags.add(lag_ms, observed["changes"] * (high - low))


class _Listener(StreamingQueryListener):
    """Hands the progress of queries to their tallies."""

    def __init__(self, tallies: Sequence[_Tally], progress: Progress) -> None:
        self._tallies = tallies
        self._progress = progress

    def onQueryStarted(self, event: Any) -> None:
        pass

    def onQueryProgress(self, event: Any) -> None:
        tally = self._find(event.progress.id)
        if tally is not None:
            tally.add(event.progress)
            self._progress.report(tally.namespace, tally.changes, None)

    def onQueryIdle(self, event: Any) -> None:
        pass

    def onQueryTerminated(self, event: Any) -> None:
        pass

    def _find(self, query_id: UUID) -> _Tally | None:
        queries = ((tally, tally.query) for tally in self._tallies)
        return next((tally for tally, query in queries if query and query.id == str(query_id)), None)


@contextmanager
def _listening(spark: SparkSession, tallies: Sequence[_Tally], progress: Progress) -> Iterator[None]:
    listener = _Listener(tallies, progress)
    spark.streams.addListener(listener)
    try:
        yield
    finally:
        spark.streams.removeListener(listener)


def _require_names(namespaces: Sequence[str]) -> list[str]:
    names = list(namespaces)
    if not names or len(set(names)) < len(names):
        raise InvalidArgument("name the namespaces to replicate, each of them once")
    return names


def _require_two(source: Site, target: Site) -> None:
    if source.id == target.id:
        raise InvalidArgument(
            f"site {source.name!r} and site {target.name!r} have the same id {source.id}: they are one site, "
            "or their writes could not be told apart. Name another target, or give one an id of its own"
        )


def _ensure_namespace(source: Site, target: Site, name: str) -> None:
    settings = source.host.namespaces.find_namespace(name).settings
    try:
        target.host.namespaces.find_namespace(name)
    except NamespaceNotFound:
        # Somebody else may have been quicker.
        with suppress(NamespaceExists):
            target.host.namespaces.create_namespace(name, settings)


def _own_checkpoint(checkpoint: str, name: str, source: Site, target: Site) -> None:
    """Enter who is copied to whom; refuse a checkpoint of something else, whose versions mean nothing."""
    owner = {
        "source": f"{source.name} (id {source.id})",
        "target": f"{target.name} (id {target.id})",
        "namespace": name,
        "source_id": source.host.namespaces.find_namespace(name).id,
        "target_id": target.host.namespaces.find_namespace(name).id,
    }
    directory = directory_at(checkpoint).directory(name)
    stored = directory.read(_OWNER)
    if stored is None:
        directory.publish(_OWNER, msgspec.json.format(msgspec.json.encode(owner)))
        return
    known = _decode_owner(stored)
    if known != owner:
        raise InvalidArgument(
            f"{directory.location} is the checkpoint of {known.get('namespace')!r} from "
            f"{known.get('source')} to {known.get('target')}, or of a namespace that was dropped since; name "
            "another checkpoint"
        )


def _decode_owner(stored: bytes) -> Mapping[str, object]:
    try:
        return msgspec.json.decode(stored, type=dict[str, object])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return {}


def _summarize(source: Site, target: Site, tallies: Sequence[_Tally], elapsed_ms: int) -> ReplicateSummary:
    lags = LagCounts()
    for tally in tallies:
        lags = lags.plus(tally.lags)
    return ReplicateSummary(
        source=source.name,
        target=target.name,
        batches=sum(tally.batches for tally in tallies),
        changes=sum(tally.changes for tally in tallies),
        lag_ms_p50=lags.percentile(0.5),
        lag_ms_p99=lags.percentile(0.99),
        elapsed_ms=elapsed_ms,
        wrong=sum(tally.checks.wrong - tally.before.wrong for tally in tallies),
        namespaces=[
            NamespaceReplication(
                namespace=tally.namespace,
                batches=tally.batches,
                changes=tally.changes,
                through=tally.through,
                lag_ms_p50=tally.lags.percentile(0.5),
                lag_ms_p99=tally.lags.percentile(0.99),
                restarts=tally.restarts,
                wrong=tally.checks.wrong - tally.before.wrong,
                checks=CheckStatistics.of(tally.checks),
            )
            for tally in tallies
        ],
    )


def _to_ms(timestamp: str) -> int:
    """The milliseconds of a moment as Spark writes it."""
    return round(datetime.fromisoformat(timestamp.replace("Z", "+00:00")).timestamp() * 1000)
