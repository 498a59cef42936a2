"""Every metric but those of requests (`counters.py`): its name, its help, its labels and where it is read.

A metric renders statistics.  Labels take only values that are known beforehand or that a site holds, so a
caller cannot make the page grow.  A version is shown as its moment: a float has too few digits for it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import Any, Final, NamedTuple, TypeAlias

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from floodmark.divergence.outcome import Outcome
from floodmark.divergence.rules import Verdict
from floodmark.host.statistics import AlarmKind, SiteStatistics
from floodmark.log import Histogram as LogHistogram
from floodmark.model.partition import HoldKind
from floodmark.model.stream import Way
from floodmark.model.transaction import TransactionState
from floodmark.model.version import physical_ms

NAMESPACES_SHOWN_MAX: Final = 1_000
# Limited, because counting a backlog reads changes.
SUBSCRIPTIONS_SHOWN_MAX: Final = 100

# A number, one for each value of one more label, or a histogram; None if there is none.
_Value: TypeAlias = float | Mapping[str, float | None] | LogHistogram | None
# The help of a metric, the path of its attribute or a function that reads it, and the name of one more label.
_Described: TypeAlias = tuple[str, str | Callable[[Any], _Value]] | tuple[str, Callable[[Any], _Value], str]


class Described(NamedTuple):
    """A metric of some statistics."""

    family: Any
    name: str
    help: str
    read: Callable[[Any], _Value]
    label: str | None = None


class Group(NamedTuple):
    """Metrics of one kind of item, and the names of their labels."""

    labels: tuple[str, ...]
    metrics: Sequence[Described]

    def families(self, items: Iterable[tuple[Sequence[str], object]]) -> Iterator[Metric]:
        """The metrics of some items, each with the values of its labels."""
        known = list(items)
        for metric in self.metrics:
            more = () if metric.label is None else (metric.label,)
            family = metric.family(metric.name, metric.help, labels=(*self.labels, *more))
            for values, item in known:
                found = metric.read(item)
                if isinstance(found, LogHistogram):
                    family.add_metric(values, found.cumulative(), found.sum)
                    continue
                for extra, number in found.items() if isinstance(found, Mapping) else [(None, found)]:
                    if number is not None:
                        family.add_metric(values if extra is None else (*values, extra), number)
            yield family


def _describe(family: Any) -> Callable[..., list[Described]]:
    def describe(**metrics: _Described) -> list[Described]:
        return [
            Described(family, f"floodmark_{name}", text, _reader(name, source), *label)
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
UP: Final = Group(
    ("site",), _gauges(site_up=("Whether the site answers; if not, its own metrics are missing here.", float))
)
INFO: Final = Group(
    ("site", "site_id", "format"), _gauges(site_info=("The site that this server serves.", lambda _: 1))
)
BUILD: Final = Group(
    ("site", "version", "python"),
    _gauges(build_info=("The release and the Python of this server.", lambda _: 1)),
)
DISK: Final = Group(
    ("site",),
    _gauges(disk_free_bytes=("Bytes that are free on the disk of the site, if it is in a directory.", float)),
)
SITE: Final = Group(
    ("site",),
    [
        *_counters(
            commits=("Commits since the site was opened.", "commits"),
            changes=("Changes since the site was opened.", "changes"),
            written_bytes=("Bytes of keys and values written.", "bytes_written"),
            commit_rounds=("Rounds of group commit.", "rounds"),
            recoveries=("Recoveries from failures of storage.", "recoveries"),
            garbage_runs=("Runs of garbage collection.", "garbage.runs"),
            garbage_versions_read=("Versions that garbage collection read.", "garbage.versions_read"),
            garbage_versions_removed=(
                "Versions that garbage collection removed.",
                "garbage.versions_removed",
            ),
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
            version_timestamp_seconds=(
                "Moment of the latest version that the site minted or saw.",
                "version",
            ),
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
    ],
)
NAMESPACE: Final = Group(
    ("site", "namespace"),
    _gauges(
        namespace_oldest_version_timestamp_seconds=(
            f"Moment of the oldest version that can be read, {_FIRST}",
            "oldest_version",
        ),
        namespace_collected_horizon_timestamp_seconds=(
            f"Moment of the latest stamp whose key was removed entirely, {_FIRST}",
            "collected_horizon",
        ),
    ),
)
PARTITION: Final = Group(
    ("site", "partition"),
    _counters(
        partition_writes=("Changes written to a partition.", "writes"),
        partition_reads=("Reads from a partition.", "reads"),
        partition_written_bytes=("Bytes written to a partition.", "bytes_written"),
    ),
)
FEED: Final = Group(
    ("site", "feed"),
    [
        *_gauges(
            feed_state=("1 for the state that a feed is in.", lambda feed: {feed.state: 1}, "state"),
            feed_checkpoint_lag_seconds=("Lag of a feed's checkpoint.", "checkpoint_lag_ms"),
            feed_resolved_lag_seconds=(
                "Lag of the resolved version that a feed has seen.",
                "resolved_lag_ms",
            ),
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
    ],
)
SUBSCRIPTION: Final = Group(
    ("site", "namespace", "subscription"),
    _gauges(
        subscription_backlog_changes=(
            f"Changes that are not delivered or not acknowledged, {_COUNTED}",
            "backlog",
        ),
        subscription_unacked_changes=(
            f"Changes that are delivered and not acknowledged, {_COUNTED}",
            "unacked",
        ),
        subscription_lag_seconds=(f"Age of the oldest change that is not acknowledged, {_COUNTED}", "lag_ms"),
        subscription_held=(
            f"1 while a consumer has the subscription, {_COUNTED}",
            lambda found: found.holder is not None,
        ),
    ),
)
LINK: Final = Group(
    ("site", "source", "namespace"),
    [
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
    ],
)
_UNENDED: Final = (TransactionState.OPEN, TransactionState.COMMITTING, TransactionState.ABORTING)
NODE: Final = Group(
    ("site", "node"),
    _gauges(
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
    ),
)
NODE_COUNTERS: Final = Group(
    ("site", "node"),
    _counters(
        node_takeovers=("Nodes that this node has declared dead and replaced.", "takeovers"),
        node_restarts=("How often this node was fenced, and started again by itself.", "restarts"),
    ),
)
TRANSACTIONS: Final = Group(
    ("site",),
    _gauges(
        transactions=(
            "Transactions that have not ended, by state.",
            lambda counts: {state.value: counts.states.get(state, 0) for state in _UNENDED},
            "state",
        ),
        transaction_oldest_age_seconds=(
            "The age of the oldest transaction that has not ended; 0 if there is none.",
            "oldest_age_ms",
        ),
    ),
)
LOG: Final = Group(
    ("site", "log", "owner"),
    [
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
    ],
)
ENGINE: Final = Group(
    ("site",),
    [
        *_gauges(
            rocksdb_block_cache_bytes=("Memory of RocksDB's block cache.", itemgetter("block_cache_bytes")),
            rocksdb_running_compactions=("Compactions that run now.", itemgetter("running_compactions")),
            rocksdb_running_flushes=("Flushes of memtables that run now.", itemgetter("running_flushes")),
            rocksdb_writes_stopped=("1 while RocksDB stops writes.", itemgetter("writes_stopped")),
            rocksdb_delayed_write_bytes_per_second=(
                "Rate to which RocksDB slows writes down; 0 if it does not.",
                itemgetter("delayed_write_bytes_per_second"),
            ),
        ),
        *_counters(
            rocksdb_background_errors=(
                "Errors of RocksDB's flushes and compactions.",
                itemgetter("background_errors"),
            ),
        ),
    ],
)
ENGINE_FAMILY: Final = Group(
    ("site", "family"),
    _gauges(
        rocksdb_files_bytes=("Size of RocksDB's files.", itemgetter("files_bytes")),
        rocksdb_live_bytes=("Size that the files would have after a compaction.", itemgetter("live_bytes")),
        rocksdb_memtables_bytes=("Memory of memtables.", itemgetter("memtables_bytes")),
        rocksdb_table_readers_bytes=(
            "Memory of indexes and filters outside of the block cache.",
            itemgetter("table_readers_bytes"),
        ),
        rocksdb_pending_compaction_bytes=(
            "Bytes that compactions have still to rewrite.",
            itemgetter("pending_compaction_bytes"),
        ),
        rocksdb_level0_files=("Files of level 0, which a read has to look into.", itemgetter("level0_files")),
    ),
)
CERTIFICATE: Final = Group(
    ("site", "certificate"),
    _gauges(
        certificate_expiry_timestamp_seconds=(
            "Moment at which the first certificate of a file expires; the file is read at the start.",
            float,
        )
    ),
)

REPLICATE: Final = Group(
    (), _counters(replicate_restarts=("How often the runner of the links failed and began anew.", "restarts"))
)
REPLICATE_LINK: Final = Group(
    ("source", "target"),
    [
        *_gauges(
            replicate_target_up=(
                "Whether the target tells of the link; if not, its other metrics are missing here.",
                lambda link: link.backlog_ms is not None,
            ),
            replicate_backlog_seconds=(
                "Distance of the changes that are in from the present, where it is longest.",
                "backlog_ms",
            ),
            replicate_lag_seconds=(
                "Age of the changes of the last minutes when they were in: the median, and the 99th of 100.",
                lambda link: {"0.5": _seconds(link.lag_ms_p50), "0.99": _seconds(link.lag_ms_p99)},
                "quantile",
            ),
            replicate_stalled=(
                "1 while the link waits; /health says for what.",
                lambda link: link.stalled is not None,
            ),
        ),
        *_counters(
            replicate_changes=("Changes that were copied since the command began.", "changes"),
            replicate_intervals_wrong=(
                "Intervals between heartbeats in which changes were missing, doubled or altered since the "
                "command began.",
                "wrong",
            ),
        ),
    ],
)
FEED_RUN: Final = Group(
    ("feed",),
    [
        *_gauges(
            feed_run_state=(
                "1 for the state that the feed is in; waiting while another process runs it.",
                lambda runner: {runner.state or "waiting": 1},
                "state",
            ),
            feed_run_checkpoint_lag_seconds=("Lag of the feed's checkpoint.", "checkpoint_lag_ms"),
            feed_run_resolved_lag_seconds=(
                "Lag of the resolved version that the feed has seen.",
                "resolved_lag_ms",
            ),
            feed_run_buffered_bytes=("Changes that were read and not delivered yet.", "buffered_bytes"),
            feed_run_failures=("Attempts that failed in a row; 0 if the last one did not.", "failures"),
        ),
        *_counters(
            feed_run_changes=("Changes that were delivered.", "changes"),
            feed_run_delivered_bytes=("Bytes that were delivered.", "bytes"),
            feed_run_batches=("Batches that were delivered.", "batches"),
        ),
    ],
)
_DRIFT: Final = tuple(verdict for verdict in Verdict if verdict.is_drift)
VERIFY: Final = Group(
    (),
    [
        *_counters(
            verify_passes=(
                "Passes, over everything or over what has changed.",
                lambda found: found.passes,
                "kind",
            )
        ),
        *_gauges(
            verify_outcome=(
                "1 for what the last pass said of the sites.",
                lambda found: {each: found.last.outcome is each for each in Outcome} if found.last else {},
                "outcome",
            ),
            verify_pass_seconds=(
                "How long the last pass took.",
                lambda found: found.last.seconds if found.last else None,
            ),
            verify_whole_pass_age_seconds=(
                "Time since the last pass over everything that left no doubt.",
                "whole_age_ms",
            ),
        ),
    ],
)
VERIFY_COMPARED: Final = Group(
    ("namespace", "left", "right"),
    _counters(verify_keys_compared=("Keys that were compared, in all passes.", int)),
)
VERIFY_PAIR: Final = Group(
    ("namespace", "left", "right"),
    _gauges(
        verify_lag_keys=("Keys whose changes are under way.", "lag"),
        verify_drift_keys=(
            "Keys that have drifted apart.",
            lambda pair: {verdict: getattr(pair, verdict) for verdict in _DRIFT},
            "kind",
        ),
    ),
)

# Every metric, by the command that serves it; docs/make_metrics.py makes the page and the dashboard of it.
DESCRIBED: Final[Mapping[str, Sequence[Group]]] = {
    "serve": (
        UP, BUILD, INFO, SITE, DISK, ENGINE, ENGINE_FAMILY, CERTIFICATE, TRANSACTIONS, NAMESPACE, PARTITION,
        FEED, SUBSCRIPTION, LINK, NODE, NODE_COUNTERS, LOG,
    ),
    "replicate": (REPLICATE, REPLICATE_LINK),
    "feed run": (FEED_RUN,),
    "verify --watch": (VERIFY, VERIFY_COMPARED, VERIFY_PAIR),
}  # fmt: skip
