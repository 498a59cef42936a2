"""Metrics in Prometheus' text format, made when they are asked for.

`ServerMetrics` counts what the server does.  The other metrics render the statistics of the site.  Labels
take only values that are known beforehand or that the site holds, so a caller cannot make the page grow.  A
version is shown as its moment, since a float has too few digits for it.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from math import inf
from operator import attrgetter
from platform import python_version
from shutil import disk_usage
from typing import Any, Final, NamedTuple, TypeAlias

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from floodmark import __version__
from floodmark.feed.named.feeds import FeedStatistics
from floodmark.feed.named.store import FeedStore
from floodmark.host.ports import Host
from floodmark.host.statistics import AlarmKind, SiteStatistics
from floodmark.log import Histogram as LogHistogram
from floodmark.model.errors import (
    FeedNotFound,
    FloodmarkError,
    NotAllowed,
    OutcomeUnknown,
    Retryable,
    SubscriptionNotFound,
)
from floodmark.model.partition import HoldKind
from floodmark.model.stream import Way
from floodmark.model.transaction import TransactionState
from floodmark.model.version import physical_ms
from floodmark.site.site import Site

BUCKETS_SECONDS: Final = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
OUTCOMES: Final = ("done", "retryable", "unknown", "not_allowed", "refused", "bug")
OTHER: Final = "other"
# The groups by which durations are measured.  Actions of ports, `feeds.create`, go by their port.
_GROUPS: Final = {
    **dict.fromkeys(("find", "get", "get_many"), "read"),
    **dict.fromkeys(("apply", "compare_and_set", "delete_unchanged", "load", "merge", "put"), "write"),
    **dict.fromkeys(("put_unchanged", "repair"), "write"),
    **dict.fromkeys(("abort_prepared", "commit_prepared", "prepare", "settle"), "transactions"),
    **dict.fromkeys(("records", "scan"), "scan"),
    **{"changes": "changes", "write_stream": "write_stream"},
}
NAMESPACES_SHOWN_MAX: Final = 1_000
# To count a backlog reads changes.
SUBSCRIPTIONS_SHOWN_MAX: Final = 100

_log = logging.getLogger("floodmark.server")


def group_of(action: str) -> str:
    """The group of an action, as the label of a metric.

    >>> group_of("put"), group_of("feeds.create"), group_of("resp.get"), group_of("hello")
    ('write', 'feeds', 'resp', 'other')
    """
    port, dot, _ = action.partition(".")
    return _GROUPS.get(action, port if dot else OTHER)


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


class Tally:
    """Requests of one action, counted by one thread.  Cheaper than the library's metrics, which lock."""

    __slots__ = ("buckets", "outcomes", "seconds")

    def __init__(self) -> None:
        self.buckets = [0] * (len(BUCKETS_SECONDS) + 1)
        self.seconds = 0.0
        self.outcomes = {OUTCOMES[0]: 0}

    def add(self, seconds: float, outcome: str = OUTCOMES[0], *, number: int = 1) -> None:
        """Count requests that have ended, each of which took so long."""
        self.buckets[bisect_left(BUCKETS_SECONDS, seconds)] += number
        self.seconds += number * seconds
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + number

    def samples(self, action: str) -> Iterator[Sample]:
        """The tally as the samples of the two metrics of requests."""
        for outcome, count in [*self.outcomes.items()]:
            yield Sample("floodmark_requests_total", {"action": action, "outcome": outcome}, count)
        name, count, group = "floodmark_request_seconds", 0, group_of(action)
        for bound, number in zip((*BUCKETS_SECONDS, inf), [*self.buckets], strict=True):
            count += number
            yield Sample(f"{name}_bucket", {"group": group, "le": _show_bound(bound)}, count)
        yield Sample(f"{name}_count", {"group": group}, count)
        yield Sample(f"{name}_sum", {"group": group}, self.seconds)


def add_samples(samples: Iterable[Sample]) -> Iterable[Sample]:
    """The samples, with those of one name and the same labels added up: a group has several tallies."""
    sums: dict[tuple[str, frozenset[tuple[str, str]]], Sample] = {}
    for sample in samples:
        key = sample.name, frozenset(sample.labels.items())
        found = sums.get(key)
        sums[key] = sample if found is None else sample._replace(value=found.value + sample.value)
    return sums.values()


def _show_bound(seconds: float) -> str:
    return "+Inf" if seconds == inf else str(seconds)


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
            "How long requests took, by group of actions.",
            ("group",),
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
        self._tallies: dict[str, Tally] = {}
        names = (*sorted(actions), OTHER)
        self._actions = {action: self._seconds.labels(group_of(action)) for action in names}
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

    def tally(self, action: str) -> Tally:
        """The tally of an action that one thread counts."""
        return self._tallies.setdefault(action, Tally())

    def connection_cut(self) -> None:
        """Count a client that went away before its request had ended."""
        self._cut.inc()

    def families(self, site: str) -> Iterator[Metric]:
        """The metrics as they are now, labelled with the site."""
        for metric in (
            self._requests, self._seconds, self._streams, self._received, self._sent, self._cut,
        ):  # fmt: skip
            for family in metric.collect():
                tallied = [
                    sample
                    for action, tally in [*self._tallies.items()]
                    for sample in tally.samples(action)
                    if sample.name.startswith(family.name + "_")
                ]
                family.samples = [
                    sample._replace(labels={"site": site, **sample.labels})
                    for sample in add_samples((*family.samples, *tallied))
                    # The library adds the time at which a counter was made; a page of ours never had it.
                    if not sample.name.endswith("_created")
                ]
                yield family


# A number, one for each value of one more label, or a histogram; None if there is none.
_Value: TypeAlias = float | Mapping[str, float | None] | LogHistogram | None
# The help of a metric, the path of its attribute or a function that reads it, and the name of one more label.
_Described: TypeAlias = tuple[str, str | Callable[[Any], _Value]] | tuple[str, Callable[[Any], _Value], str]


class _Metric(NamedTuple):
    """A metric of some statistics."""

    family: Any
    name: str
    help: str
    read: Callable[[Any], _Value]
    label: str | None = None


class MetricsPage(Collector):
    """All metrics of one server: its own, and those of the site and its feeds where it is kept."""

    def __init__(self, site: Site, server: ServerMetrics) -> None:
        self._site = site
        # A site that was closed hands none out.
        self._host = site.host
        self._server = server
        # A registry of its own: the library's global one would collect what others register.
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def render(self) -> bytes:
        """The page that Prometheus reads."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """The families of one rendering; the registry calls it."""
        name = self._site.name
        yield from self._server.families(name)
        families = self._of_host(_site_families if self._host.keeps else _ready_families)
        yield from _families(("site",), [((name,), bool(families))], _UP)
        build = (name, __version__, python_version())
        yield from _families(("site", "version", "python"), [(build, None)], _BUILD)
        yield from families
        # Other nodes would have to ask the keeper, whose page has all that concerns the site.
        of_site = (
            _feed_families,
            _subscription_families,
            _link_families,
            _transaction_families,
            _node_families,
        )
        for part in (*of_site, _node_counter_families) if self._host.keeps else (_node_counter_families,):
            yield from self._of_host(part)

    def _of_host(self, families: Callable[[Host], Iterator[Metric]]) -> list[Metric]:
        """Some metrics, or none if the site fails: the page is needed most when the site is in trouble."""
        try:
            return list(families(self._site.host))
        except FloodmarkError as error:
            _log.warning("metrics of the site are missing from the page: %s", error)
            return []


def feed_statistics(feeds: FeedStore) -> Iterator[FeedStatistics]:
    """The statistics of all feeds, without those that are removed meanwhile."""
    for feed in feeds.list():
        with suppress(FeedNotFound):
            yield feeds.statistics(feed.name)


def _families(
    labels: Sequence[str], items: Iterable[tuple[Sequence[str], object]], metrics: Iterable[_Metric]
) -> Iterator[Metric]:
    """Metrics of some items, each with the values of its labels."""
    known = list(items)
    for metric in metrics:
        more = () if metric.label is None else (metric.label,)
        family = metric.family(metric.name, metric.help, labels=(*labels, *more))
        for values, item in known:
            found = metric.read(item)
            if isinstance(found, LogHistogram):
                family.add_metric(values, found.cumulative(), found.sum)
                continue
            for extra, number in found.items() if isinstance(found, Mapping) else [(None, found)]:
                if number is not None:
                    family.add_metric(values if extra is None else (*values, extra), number)
        yield family


def _describe(family: Any) -> Callable[..., list[_Metric]]:
    def describe(**metrics: _Described) -> list[_Metric]:
        return [
            _Metric(family, f"floodmark_{name}", text, _reader(name, source), *label)
            for name, (text, source, *label) in metrics.items()
        ]

    return describe


_counters, _gauges = _describe(CounterMetricFamily), _describe(GaugeMetricFamily)
_histograms = _describe(HistogramMetricFamily)


def _reader(name: str, source: str | Callable[[Any], _Value]) -> Callable[[Any], _Value]:
    """Reads an attribute.  A metric of seconds shows milliseconds as seconds, or a version as its moment."""
    if not isinstance(source, str):
        return source
    get = attrgetter(source)
    if name.endswith("_timestamp_seconds"):
        return lambda item: physical_ms(get(item)) / 1000 if get(item) else None
    return (lambda item: _seconds(get(item))) if source.endswith("_ms") else get


def _seconds(milliseconds: int | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


def _held_seconds(site: SiteStatistics) -> dict[str, float | None]:
    ages_ms = {kind: [hold.age_ms for hold in site.held_back_by if hold.kind is kind] for kind in HoldKind}
    return {kind.value: max(ages, default=0) / 1000 for kind, ages in ages_ms.items()}


_FIRST: Final = f"if there is one; for the first {NAMESPACES_SHOWN_MAX:,} namespaces."
_COUNTED: Final = f"of the first {SUBSCRIPTIONS_SHOWN_MAX} subscriptions."
_UP: Final = _gauges(site_up=("Whether the site answers; if not, its own metrics are missing here.", float))
_INFO: Final = _gauges(site_info=("The site that this server serves.", lambda _: 1))
_BUILD: Final = _gauges(build_info=("The release and the Python of this server.", lambda _: 1))
_DISK: Final = _gauges(
    disk_free_bytes=("Bytes that are free on the disk of the site, if it is in a directory.", float)
)
_SITE: Final = [
    *_counters(
        commits=("Commits since the site was opened.", "commits"),
        changes=("Changes since the site was opened.", "changes"),
        written_bytes=("Bytes of keys and values written.", "bytes_written"),
        commit_rounds=("Rounds of group commit.", "rounds"),
        recoveries=("Recoveries from failures of storage.", "recoveries"),
        garbage_runs=("Runs of garbage collection.", "garbage.runs"),
        garbage_versions_read=("Versions that garbage collection read.", "garbage.versions_read"),
        garbage_versions_removed=("Versions that garbage collection removed.", "garbage.versions_removed"),
        garbage_keys_removed=("Keys that garbage collection removed entirely.", "garbage.keys_removed"),
        garbage_namespaces_removed=(
            "Dropped namespaces that garbage collection removed.",
            "garbage.namespaces_removed",
        ),
        delivered_changes=(
            "Changes that readers were given, by way.",
            lambda s: {way: s.readers.changes.get(way, 0) for way in Way},
            "way",
        ),
    ),
    *_gauges(
        version_timestamp_seconds=("Moment of the latest version that the site minted or saw.", "version"),
        resolved_version_timestamp_seconds=(
            "Moment up to which every change is durable and published.",
            "resolved_version",
        ),
        resolved_version_lag_seconds=(
            "Distance of the resolved version from the latest version.",
            lambda s: max(0, physical_ms(s.version) - physical_ms(s.resolved_version)) / 1000,
        ),
        resolved_version_held_seconds=(
            "For how long the resolved version has been held back, by what; 0 up to two seconds.",
            _held_seconds,
            "by",
        ),
        clock_ahead_seconds=("How far the site's clock runs ahead of the machine's.", "clock_ahead_ms"),
        data_bytes=("Size of the data on disk.", "data_bytes"),
        change_log_bytes=("Size of the change logs on disk.", "log_bytes"),
        last_heartbeat_timestamp_seconds=(
            "Moment of the last heartbeat.",
            lambda s: None if s.last_heartbeat is None else s.last_heartbeat.timestamp(),
        ),
        background_failing=(
            "1 while heartbeats or garbage collection fail.",
            lambda s: s.background_error is not None,
        ),
        garbage_log_trimmed_timestamp_seconds=(
            "Moment up to which change logs were trimmed.",
            "garbage.log_trimmed_version",
        ),
        change_readers=("Streams of changes that are open.", lambda s: len(s.readers.open)),
        change_readers_lag_seconds=(
            "Lag of the slowest reader that follows, if any follows.",
            lambda s: max((each.lag_ms / 1000 for each in s.readers.open if each.follow), default=None),
        ),
        namespaces=("Namespaces of the site.", lambda s: len(s.namespaces)),
        partitions=("Partitions of the site.", lambda s: len(s.partitions)),
    ),
]
_NAMESPACE: Final = _gauges(
    namespace_oldest_version_timestamp_seconds=(
        f"Moment of the oldest version that can be read, {_FIRST}",
        "oldest_version",
    ),
    namespace_collected_horizon_timestamp_seconds=(
        f"Moment of the latest stamp whose key was removed entirely, {_FIRST}",
        "collected_horizon",
    ),
)
_PARTITION: Final = _counters(
    partition_writes=("Changes written to a partition.", "writes"),
    partition_reads=("Reads from a partition.", "reads"),
    partition_written_bytes=("Bytes written to a partition.", "bytes_written"),
)
_FEED: Final = [
    *_gauges(
        feed_state=("1 for the state that a feed is in.", lambda feed: {feed.state: 1}, "state"),
        feed_checkpoint_lag_seconds=("Lag of a feed's checkpoint.", "checkpoint_lag_ms"),
        feed_resolved_lag_seconds=("Lag of the resolved version that a feed has seen.", "resolved_lag_ms"),
        feed_alarm=("1 if an operator should look at the feed.", lambda feed: feed.alarm is not None),
    ),
    *_counters(
        feed_intervals_checked=(
            "Intervals between heartbeats whose changes a feed has all delivered.",
            "checks.intervals_checked",
        ),
        feed_intervals_unchecked=(
            "Intervals between heartbeats in which a feed could not be checked.",
            "checks.intervals_unchecked",
        ),
        feed_intervals_wrong=(
            "Intervals between heartbeats in which a feed has lost, doubled or altered changes.",
            "checks.intervals_wrong",
        ),
    ),
]
_SUBSCRIPTION: Final = _gauges(
    subscription_backlog_changes=(
        f"Changes that are not delivered or not acknowledged, {_COUNTED}",
        "backlog",
    ),
    subscription_unacked_changes=(f"Changes that are delivered and not acknowledged, {_COUNTED}", "unacked"),
    subscription_lag_seconds=(f"Age of the oldest change that is not acknowledged, {_COUNTED}", "lag_ms"),
    subscription_held=(
        f"1 while a consumer has the subscription, {_COUNTED}",
        lambda found: found.holder is not None,
    ),
)
_LINK: Final = [
    *_gauges(
        link_heartbeat_age_seconds=(
            "Time since the source wrote the last heartbeat that came, if one came.",
            "heartbeat_age_ms",
        ),
        link_backlog_seconds=("Distance of the changes that are in from the present.", "backlog_ms"),
        link_lag_seconds=(
            "Age of the changes of the last minutes when they were in: the median, and the 99th of 100.",
            lambda link: {"0.5": _seconds(link.lag_ms_p50), "0.99": _seconds(link.lag_ms_p99)},
            "quantile",
        ),
        link_alarm=(
            "1 if an operator should look at the link.",
            lambda link: {kind: kind in {alarm.kind for alarm in link.alarms} for kind in AlarmKind},
            "kind",
        ),
    ),
    *_counters(
        link_intervals_checked=(
            "Intervals between heartbeats whose changes have all come.",
            "intervals_checked",
        ),
        link_intervals_unchecked=(
            "Intervals between heartbeats that could not be checked.",
            "intervals_unchecked",
        ),
        link_intervals_wrong=(
            "Intervals between heartbeats in which changes are missing, doubled or altered.",
            "intervals_wrong",
        ),
    ),
]
_UNENDED: Final = (TransactionState.OPEN, TransactionState.COMMITTING, TransactionState.ABORTING)
_NODE: Final = _gauges(
    node_up=("Whether the node beats.", lambda node: float(node.lives)),
    node_keeps=("Whether the node is the keeper of the site.", lambda node: float(node.keeps)),
    node_drained=(
        "Whether the node was drained, and has not been started again.",
        lambda node: float(node.drained),
    ),
    node_partitions=("Partitions that the node owns.", lambda node: float(len(node.partitions))),
    node_changes=("Changes that the node wrote between its last two beats.", "load"),
    node_incarnation=(
        "How often the node was started or declared dead; it rises twice in a takeover.",
        "incarnation",
    ),
)
_NODE_COUNTERS: Final = _counters(
    node_takeovers=("Nodes that this node has declared dead and replaced.", "takeovers"),
    node_restarts=("How often this node was fenced, and started again by itself.", "restarts"),
)
_TRANSACTIONS: Final = _gauges(
    transactions=(
        "Transactions that have not ended, by state.",
        lambda counts: {state.value: counts.states.get(state, 0) for state in _UNENDED},
        "state",
    ),
    transaction_oldest_age_seconds=(
        "The age of the oldest transaction that has not ended; 0 if there is none.",
        "oldest_age_ms",
    ),
)
_LOG: Final = [
    *_histograms(
        txn_log_records_per_entry=("Records in a batched entry.", "statistics.records_per_entry"),
        txn_log_entry_size_bytes=("Bytes of a batched entry.", "statistics.entry_size_bytes"),
        txn_log_oldest_record_delay_seconds=(
            "Wait of the oldest record of an entry.",
            "statistics.oldest_record_delay_seconds",
        ),
    ),
    *_counters(
        txn_log_flushes=(
            "Batched entries that were written, by trigger.",
            lambda log: log.statistics.flushes,
            "trigger",
        ),
        txn_log_bare_entries=("Entries of one record that were written.", "statistics.bare_entries"),
        txn_log_failed_appends=("Entries that could not be written.", "statistics.failed_appends"),
    ),
    *_gauges(txn_log_live_records=("Records that are needed.", "live_records")),
]

# Every metric of a site by its labels, from which docs/make_metrics.py makes the page and the dashboard.
DESCRIBED: Final[dict[tuple[str, ...], list[_Metric]]] = {
    ("site",): [*_UP, *_SITE, *_DISK, *_TRANSACTIONS],
    ("site", "version", "python"): _BUILD,
    ("site", "site_id", "format"): _INFO,
    ("site", "namespace"): _NAMESPACE,
    ("site", "partition"): _PARTITION,
    ("site", "feed"): _FEED,
    ("site", "namespace", "subscription"): _SUBSCRIPTION,
    ("site", "source", "namespace"): _LINK,
    ("site", "node"): [*_NODE, *_NODE_COUNTERS],
    ("site", "log", "owner"): _LOG,
}


def _site_families(host: Host) -> Iterator[Metric]:
    statistics = host.status.statistics()
    site = statistics.site
    info = (site, str(statistics.site_id), str(statistics.format))
    yield from _families(("site", "site_id", "format"), [(info, statistics)], _INFO)
    yield from _families(("site",), [((site,), statistics)], _SITE)
    free = [] if host.disk is None else [((site,), disk_usage(host.disk).free)]
    yield from _families(("site",), free, _DISK)
    namespaces = [((site, each.name), each) for each in statistics.namespaces[:NAMESPACES_SHOWN_MAX]]
    yield from _families(("site", "namespace"), namespaces, _NAMESPACE)
    partitions = [((site, str(each.id)), each) for each in statistics.partitions]
    yield from _families(("site", "partition"), partitions, _PARTITION)


def _ready_families(host: Host) -> Iterator[Metric]:
    """What a node tells that answers, but not for the whole site."""
    host.require_ready()
    identity = host.identity
    info = (identity.site, str(identity.site_id), str(identity.format))
    yield from _families(("site", "site_id", "format"), [(info, identity)], _INFO)


def _feed_families(host: Host) -> Iterator[Metric]:
    feeds = [((host.identity.site, feed.name), feed) for feed in feed_statistics(host.feeds)]
    return _families(("site", "feed"), feeds, _FEED)


def _subscription_families(host: Host) -> Iterator[Metric]:
    found = []
    for row in host.subscriptions.list()[:SUBSCRIPTIONS_SHOWN_MAX]:
        with suppress(SubscriptionNotFound):
            statistics = host.subscriptions.statistics(row.spec.name)
            found.append(((host.identity.site, row.spec.namespace, row.spec.name), statistics))
    return _families(("site", "namespace", "subscription"), found, _SUBSCRIPTION)


def _link_families(host: Host) -> Iterator[Metric]:
    found = host.status.replication()
    links = [((found.site, link.source, link.namespace), link) for link in found.links]
    return _families(("site", "source", "namespace"), links, _LINK)


def _node_families(host: Host) -> Iterator[Metric]:
    site = host.identity.site
    nodes = [((site, str(each.node)), each) for each in host.node_port.nodes()]
    yield from _families(("site", "node"), nodes, _NODE)


def _node_counter_families(host: Host) -> Iterator[Metric]:
    """What this process counted: no other node has to answer."""
    counters = host.node_counters()
    if counters is not None:
        labels = (host.identity.site, str(counters.node))
        yield from _families(("site", "node"), [(labels, counters)], _NODE_COUNTERS)


def _transaction_families(host: Host) -> Iterator[Metric]:
    site, transactions = host.identity.site, host.transactions
    yield from _families(("site",), [((site,), transactions.count())], _TRANSACTIONS)
    logs = [((site, log.log.value, log.owner), log) for log in transactions.logs()]
    yield from _families(("site", "log", "owner"), logs, _LOG)
