"""Metrics in Prometheus' text format, made when they are asked for.

`SiteStatistics` holds what a site knows about itself, and this file names it; `ServerMetrics` counts what the
server does.  Labels take only values that are known beforehand or that the site holds, so a caller cannot
make the page grow.  A version is shown as the moment that it stands for, since a float has too few digits
for it.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final, TypeAlias

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from floodmark.feed.named.feeds import FeedStatistics
from floodmark.host.ports import Transactions
from floodmark.host.statistics import (
    NamespaceStatistics,
    PartitionStatistics,
    ReplicationStatistics,
    SiteStatistics,
)
from floodmark.model.errors import FloodmarkError, NotAllowed, OutcomeUnknown, Retryable
from floodmark.model.partition import HoldKind
from floodmark.model.stream import Way
from floodmark.model.version import Version, physical_ms
from floodmark.server.metrics_links import check_families, link_families
from floodmark.server.metrics_transactions import transaction_families

BUCKETS_SECONDS: Final = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
OUTCOMES: Final = ("done", "retryable", "unknown", "not_allowed", "refused", "bug")
OTHER: Final = "other"
NAMESPACES_SHOWN_MAX: Final = 1_000

_log = logging.getLogger("floodmark.server")

# Name, state, and how many seconds its checkpoint and its resolved version lie behind; None if unknown.
FeedLag: TypeAlias = tuple[str, str, float | None, float | None]


def outcome_of(error: BaseException | None) -> str:
    """How a request ended, as the label of a metric.

    >>> from floodmark.model.errors import InvalidKey, StorageFull
    >>> outcome_of(None), outcome_of(StorageFull("x")), outcome_of(InvalidKey("x")), outcome_of(KeyError())
    ('done', 'retryable', 'refused', 'bug')
    """
    match error:
        case None:
            return "done"
        case NotAllowed():
            return "not_allowed"
        case Retryable():
            return "retryable"
        case OutcomeUnknown():
            return "unknown"
        case FloodmarkError():
            return "refused"
        case _:
            return "bug"


class ServerMetrics:
    """Counts what a server does.  Safe to use from many threads.

    `actions` are the names that a request may have; any other is counted as "other".

    >>> metrics = ServerMetrics(["put", "get"])
    >>> metrics.request("put", 0.004, "done")
    >>> metrics.request("an unknown action", 0.001, "refused")
    """

    def __init__(self, actions: Iterable[str]) -> None:
        self._requests = Counter(
            "floodmark_requests", "Requests that have ended.", ("action", "outcome"), registry=None
        )
        self._seconds = Histogram(
            "floodmark_request_seconds",
            "How long requests took.",
            ("action",),
            registry=None,
            buckets=BUCKETS_SECONDS,
        )
        self._streams = Gauge("floodmark_open_streams", "Streams that are open now.", registry=None)
        self._received = Counter("floodmark_received_bytes", "Bytes that came from clients.", registry=None)
        self._sent = Counter("floodmark_sent_bytes", "Bytes that went to clients.", registry=None)
        self._cut = Counter(
            "floodmark_cut_connections",
            "Clients that went away during a request, or were cut.",
            registry=None,
        )
        self._actions = {action: self._seconds.labels(action) for action in (*sorted(actions), OTHER)}
        # The usual outcome exists from the start, so that its rate counts the first request as well.
        done = OUTCOMES[0]
        self._outcomes = {(action, done): self._requests.labels(action, done) for action in self._actions}

    def request(self, action: str, seconds: float, outcome: str) -> None:
        """Count a request that has ended, with its duration and its outcome."""
        if action not in self._actions:
            action = OTHER
        counter = self._outcomes.get((action, outcome))
        if counter is None:
            counter = self._requests.labels(action, outcome if outcome in OUTCOMES else OTHER)
        counter.inc()
        # A clock that was set back must not make a sum go down.
        self._actions[action].observe(max(seconds, 0.0))

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Count a stream as open within the block."""
        with self._streams.track_inprogress():
            yield

    def received(self, size: int) -> None:
        """Count bytes that came from clients."""
        self._received.inc(size)

    def sent(self, size: int) -> None:
        """Count bytes that went to clients."""
        self._sent.inc(size)

    def connection_cut(self) -> None:
        """Count a client that went away before its request had ended."""
        self._cut.inc()

    def families(self, site: str) -> Iterator[Metric]:
        """The metrics as they are now, labelled with the site."""
        for metric in (
            self._requests, self._seconds, self._streams, self._received, self._sent, self._cut,
        ):  # fmt: skip
            for family in metric.collect():
                family.samples = [
                    sample._replace(labels={"site": site, **sample.labels})
                    for sample in family.samples
                    # The library adds the time at which a counter was made; a page of ours never had it.
                    if not sample.name.endswith("_created")
                ]
                yield family


class MetricsPage(Collector):
    """All metrics of one server: its own, its site's and its feeds'."""

    def __init__(
        self,
        site: str,
        statistics: Callable[[], SiteStatistics],
        server: ServerMetrics,
        feeds: Callable[[], Iterable[FeedLag]] | None = None,
        replication: Callable[[], ReplicationStatistics] | None = None,
        checked: Callable[[], Iterable[FeedStatistics]] | None = None,
        transactions: Transactions | None = None,
    ) -> None:
        self._site = site
        self._replication = replication
        self._checked = checked
        self._transactions = transactions
        self._statistics = statistics
        self._server = server
        self._feeds = feeds
        # A registry of its own: the library's global one would collect what others register.
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def render(self) -> bytes:
        """The page that Prometheus reads."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Called by the registry for each rendering."""
        yield from self._server.families(self._site)
        families = _unless_failing(lambda: _site_families(self._statistics()))
        up = "Whether the site answers; if not, its own metrics are missing here."
        yield _gauge("floodmark_site_up", up, self._site, bool(families))
        yield from families
        if self._feeds is not None:
            yield from _unless_failing(self._feed_families)
        replication = self._replication
        if replication is not None:
            yield from _unless_failing(lambda: link_families(replication()))
        checked = self._checked
        if checked is not None:
            yield from _unless_failing(lambda: check_families(self._site, checked()))
        transactions = self._transactions
        if transactions is not None:
            yield from _unless_failing(lambda: transaction_families(self._site, transactions))

    def _feed_families(self) -> Iterator[Metric]:
        assert self._feeds is not None
        labels = ("site", "feed")
        state = GaugeMetricFamily(
            "floodmark_feed_state", "1 for the state that a feed is in.", labels=(*labels, "state")
        )
        checkpoint = GaugeMetricFamily(
            "floodmark_feed_checkpoint_lag_seconds", "How far a feed's checkpoint lies behind.", labels=labels
        )
        resolved = GaugeMetricFamily(
            "floodmark_feed_resolved_lag_seconds",
            "How far the resolved version that a feed has seen lies behind.",
            labels=labels,
        )
        for name, present, checkpoint_lag, resolved_lag in self._feeds():
            state.add_metric((self._site, name, present), 1)
            if checkpoint_lag is not None:
                checkpoint.add_metric((self._site, name), checkpoint_lag)
            if resolved_lag is not None:
                resolved.add_metric((self._site, name), resolved_lag)
        yield state
        yield checkpoint
        yield resolved


_SITE_COUNTERS: Final[tuple[tuple[str, str, Callable[[SiteStatistics], int]], ...]] = (
    ("floodmark_commits", "Commits since the site was opened.", lambda s: s.commits),
    ("floodmark_changes", "Changes since the site was opened.", lambda s: s.changes),
    ("floodmark_written_bytes", "Bytes of keys and values written.", lambda s: s.bytes_written),
    ("floodmark_commit_rounds", "Rounds of group commit.", lambda s: s.rounds),
    ("floodmark_recoveries", "Recoveries from failures of storage.", lambda s: s.recoveries),
    ("floodmark_garbage_runs", "Runs of garbage collection.", lambda s: s.garbage.runs),
    (
        "floodmark_garbage_versions_read",
        "Versions that garbage collection has looked at.",
        lambda s: s.garbage.versions_read,
    ),
    (
        "floodmark_garbage_versions_removed",
        "Versions that garbage collection has removed.",
        lambda s: s.garbage.versions_removed,
    ),
    (
        "floodmark_garbage_keys_removed",
        "Keys that garbage collection has removed entirely.",
        lambda s: s.garbage.keys_removed,
    ),
    (
        "floodmark_garbage_namespaces_removed",
        "Dropped namespaces that garbage collection has removed.",
        lambda s: s.garbage.namespaces_removed,
    ),
)

_SITE_GAUGES: Final[tuple[tuple[str, str, Callable[[SiteStatistics], float | None]], ...]] = (
    (
        "floodmark_version_timestamp_seconds",
        "Moment of the latest version that the site has given or seen.",
        lambda s: _moment(s.version),
    ),
    (
        "floodmark_resolved_version_timestamp_seconds",
        "Moment up to which every change is durable and published.",
        lambda s: _moment(s.resolved_version),
    ),
    (
        "floodmark_resolved_version_lag_seconds",
        "How far the resolved version lies behind the latest version.",
        lambda s: max(0, physical_ms(s.version) - physical_ms(s.resolved_version)) / 1000,
    ),
    (
        "floodmark_clock_ahead_seconds",
        "How far the site's clock runs ahead of the machine's.",
        lambda s: s.clock_ahead_ms / 1000,
    ),
    ("floodmark_data_bytes", "Size of the data on disk.", lambda s: s.data_bytes),
    ("floodmark_change_log_bytes", "Size of the change logs on disk.", lambda s: s.log_bytes),
    (
        "floodmark_last_heartbeat_timestamp_seconds",
        "Moment of the last heartbeat.",
        lambda s: None if s.last_heartbeat is None else s.last_heartbeat.timestamp(),
    ),
    (
        "floodmark_background_failing",
        "1 while heartbeats or garbage collection fail.",
        lambda s: s.background_error is not None,
    ),
    (
        "floodmark_garbage_log_trimmed_timestamp_seconds",
        "Moment up to which change logs were trimmed.",
        lambda s: _moment(s.garbage.log_trimmed_version),
    ),
    (
        "floodmark_change_readers",
        "Streams of changes that are open.",
        lambda s: len(s.readers.open),
    ),
    (
        "floodmark_change_readers_lag_seconds",
        "How far the slowest reader that follows lies behind, if any follows.",
        lambda s: max((reader.lag_ms / 1000 for reader in s.readers.open if reader.follow), default=None),
    ),
    ("floodmark_namespaces", "Namespaces of the site.", lambda s: len(s.namespaces)),
    ("floodmark_partitions", "Partitions of the site.", lambda s: len(s.partitions)),
)

_SHOWN: Final = f"if there is one; for the first {NAMESPACES_SHOWN_MAX:,} namespaces"

_NAMESPACE_GAUGES: Final[tuple[tuple[str, str, Callable[[NamespaceStatistics], Version]], ...]] = (
    (
        "floodmark_namespace_oldest_version_timestamp_seconds",
        f"Moment of the oldest version that can be read, {_SHOWN}.",
        lambda n: n.oldest_version,
    ),
    (
        "floodmark_namespace_collected_horizon_timestamp_seconds",
        f"Moment of the latest stamp whose key was removed entirely, {_SHOWN}.",
        lambda n: n.collected_horizon,
    ),
)

_PARTITION_COUNTERS: Final[tuple[tuple[str, str, Callable[[PartitionStatistics], int]], ...]] = (
    ("floodmark_partition_writes", "Changes written to a partition.", lambda p: p.writes),
    ("floodmark_partition_reads", "Reads from a partition.", lambda p: p.reads),
    ("floodmark_partition_written_bytes", "Bytes written to a partition.", lambda p: p.bytes_written),
)


def _unless_failing(families: Callable[[], Iterator[Metric]]) -> list[Metric]:
    """All of some metrics, or none.  The page is needed most when the site is in trouble."""
    try:
        return list(families())
    except FloodmarkError as error:
        _log.warning("metrics of the site are missing from the page: %s", error)
        return []


def _site_families(statistics: SiteStatistics) -> Iterator[Metric]:
    site = statistics.site
    info = GaugeMetricFamily(
        "floodmark_site_info", "The site that this server serves.", labels=("site", "site_id", "format")
    )
    info.add_metric((site, str(statistics.site_id), str(statistics.format)), 1)
    yield info
    for name, text, count in _SITE_COUNTERS:
        yield _counter(name, text, site, count(statistics))
    for name, text, value_of in _SITE_GAUGES:
        value = value_of(statistics)
        if value is not None:
            yield _gauge(name, text, site, value)
    held = GaugeMetricFamily(
        "floodmark_resolved_version_held_seconds",
        "For how long the resolved version has been held back, by what; 0 up to two seconds.",
        labels=("site", "by"),
    )
    for kind in HoldKind:
        ages_ms = [hold.age_ms for hold in statistics.held_back_by if hold.kind is kind]
        held.add_metric((site, kind.value), max(ages_ms, default=0) / 1000)
    yield held
    delivered = CounterMetricFamily(
        "floodmark_delivered_changes", "Changes that readers were given, by way.", labels=("site", "way")
    )
    for way in Way:
        delivered.add_metric((site, way), statistics.readers.changes.get(way, 0))
    yield delivered
    for name, text, version_of in _NAMESPACE_GAUGES:
        gauge = GaugeMetricFamily(name, text, labels=("site", "namespace"))
        for namespace in statistics.namespaces[:NAMESPACES_SHOWN_MAX]:
            moment = _moment(version_of(namespace))
            if moment is not None:
                gauge.add_metric((site, namespace.name), moment)
        yield gauge
    for name, text, count_of in _PARTITION_COUNTERS:
        counter = CounterMetricFamily(name, text, labels=("site", "partition"))
        for partition in statistics.partitions:
            counter.add_metric((site, str(partition.id)), count_of(partition))
        yield counter


def _counter(name: str, text: str, site: str, value: float) -> Metric:
    family = CounterMetricFamily(name, text, labels=("site",))
    family.add_metric((site,), value)
    return family


def _gauge(name: str, text: str, site: str, value: float) -> Metric:
    family = GaugeMetricFamily(name, text, labels=("site",))
    family.add_metric((site,), value)
    return family


def _moment(version: Version) -> float | None:
    """The moment of a version in unix seconds; None for 0, which stands before everything."""
    return physical_ms(version) / 1000 if version else None
