"""The overview of a site at one moment, which the console shows to operators, in one call.

It can be requested every second: lists are cut to the length of a page, the worst items first, and no record
is read.  Versions have more digits than JavaScript's numbers, so the overview has ages instead.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from shutil import disk_usage
from typing import Any, Final, Protocol

import msgspec

from floodmark.engine.base import RECOVERY_ROOM_BYTES
from floodmark.feed import SafePoint
from floodmark.feed.named.feeds import Feed, measure
from floodmark.feed.subscription.subscriptions import SubscriptionRow
from floodmark.host.comparisons import Comparisons, ToldComparison
from floodmark.host.examination import CheckResult, Severity, check_nodes
from floodmark.host.statistics import (
    LinkStatistics,
    NodeStatistics,
    PartitionHeat,
    PartitionStatistics,
    SiteStatistics,
)
from floodmark.host.transaction_port import LogReport, TransactionCounts
from floodmark.model.errors import FloodmarkError, SubscriptionNotFound
from floodmark.model.limits import (
    FEEDS_MAX,
    NAMESPACES_MAX,
    NODES_MAX,
    PARTITIONS_MAX,
    SAFE_POINTS_MAX,
    SUBSCRIPTIONS_MAX,
    TRANSACTIONS_OPEN_MAX,
)
from floodmark.model.ranges import KeyRange
from floodmark.model.text import show_bytes
from floodmark.model.version import physical_ms

ROWS_MAX: Final = 100
PARTITIONS_SHOWN_MAX: Final = 30
TRANSACTIONS_SHOWN_MAX: Final = 10
# Backlogs are counted for this many subscriptions at most, because counting reads changes.
BACKLOGS_MAX: Final = 20
# The number of intervals of heat that are shown for a partition.
INTERVALS_MAX: Final = 60


class NodeOverview(msgspec.Struct, frozen=True, kw_only=True):
    """A node: the age of its last beat, and how far its ceiling is ahead of the site's time."""

    node: int
    url: str
    keeps: bool
    lives: bool
    drained: bool
    beat_age_ms: int
    ceiling_ahead_ms: int
    load: int
    partitions: int


class PartitionOverview(msgspec.Struct, frozen=True, kw_only=True):
    """The load of a partition: calls a second now, and its writes and reads in intervals up to now."""

    id: int
    node: int
    start: str
    end: str
    rate: float
    seconds: float
    writes: list[int]
    reads: list[int]


class ReaderOverview(msgspec.Struct, frozen=True, kw_only=True):
    """A feed or a subscription.  `safe_point_ms` is the time until its safe point expires."""

    kind: str
    name: str
    namespace: str
    state: str
    lag_ms: int
    backlog: int | None = None
    backlog_is_exact: bool = True
    holder: str | None
    error: str | None = None
    safe_point_ms: int | None = None


class SafePointOverview(msgspec.Struct, frozen=True, kw_only=True):
    """A safe point: how far back it holds garbage collection, and when it expires."""

    name: str
    namespace: str | None
    age_ms: int
    expires_in_ms: int


class TransactionOverview(msgspec.Struct, frozen=True, kw_only=True):
    """A transaction that has not ended."""

    id: str
    state: str
    age_ms: int
    waits_for: list[str]


class LogOverview(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of records and entries written to a log of transactions since the site was opened."""

    log: str
    owner: str
    records: int
    entries: int
    live_records: int


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    """How much of a limit is used."""

    name: str
    used: int
    most: int


class MachineOverview(msgspec.Struct, frozen=True, kw_only=True):
    """The machine of the process that serves the site.  The expiry of certificates is in unix seconds."""

    release: str
    python: str
    disk_free: int | None
    disk_total: int | None
    disk_reserve: int
    clock_ahead_ms: int
    certificates: dict[str, float]
    limits: list[Limit]


class SiteOverview(msgspec.Struct, frozen=True, kw_only=True):
    """A site at one moment.  `findings` are the problems, the worst first, with advice."""

    site: str
    site_id: int
    format: int
    now_ms: int
    resolved_age_ms: int
    commits: int
    changes: int
    bytes_written: int
    data_bytes: int
    log_bytes: int
    topology: int | None
    namespaces: list[str]
    findings: list[CheckResult]
    links: list[LinkStatistics]
    nodes: list[NodeOverview]
    partitions_count: int
    partitions: list[PartitionOverview]
    readers: list[ReaderOverview]
    safe_points: list[SafePointOverview]
    holds: list[str]
    transactions: dict[str, int]
    oldest_transaction_ms: int
    open_transactions: list[TransactionOverview]
    transaction_commits: dict[str, int]
    logs: list[LogOverview]
    whole_comparison: ToldComparison | None
    last_comparison: ToldComparison | None
    running_comparison: ToldComparison | None
    machine: MachineOverview


class ServingFacts:
    """Facts that only the server of a site knows, and sets."""

    def __init__(self) -> None:
        self.release = ""
        self.certificates: Mapping[str, float] = {}
        # The outcomes of commits of transactions with reads.
        self.transaction_commits: Callable[[], dict[str, int]] = dict


class Overlooked(Protocol):
    """The parts of a site in this process that an overview reads, beside the ports of `EmbeddedHost`."""

    facts: ServingFacts
    comparisons: Comparisons
    status: Any
    partitions: Any
    node_port: Any
    retention: Any
    transactions: Any
    feeds: Any
    subscriptions: Any
    verification: Any
    disk: Any

    def physical_ms(self) -> int: ...


def look_over(host: Overlooked) -> SiteOverview:
    """The overview of a site at this moment."""
    statistics: SiteStatistics = host.status.statistics()
    now_ms, resolved = host.physical_ms(), statistics.resolved_version
    names = {each.id: each.name for each in statistics.namespaces}
    replication, nodes = host.status.replication(), host.node_port.nodes()
    safe_points = host.retention.safe_points()
    expiries = {point.name: point.expires_at_ms - now_ms for point in safe_points}
    feeds, subscriptions = host.feeds.list(), host.subscriptions.list()
    counts = host.transactions.count()
    findings = [*host.verification.examine(True), *check_nodes(nodes), *_judge_feeds(feeds, now_ms)]
    findings += _judge_comparison(host.comparisons.last())
    readers = [_of_feed(feed, resolved, now_ms, expiries) for feed in feeds]
    readers += [
        each
        for place, row in enumerate(subscriptions)
        if (each := _of_subscription(host, row, now_ms, expiries, counts=place < BACKLOGS_MAX)) is not None
    ]
    return SiteOverview(
        site=statistics.site,
        site_id=statistics.site_id,
        format=statistics.format,
        now_ms=now_ms,
        resolved_age_ms=max(0, now_ms - physical_ms(resolved)),
        commits=statistics.commits,
        changes=statistics.changes,
        bytes_written=statistics.bytes_written,
        data_bytes=statistics.data_bytes,
        log_bytes=statistics.log_bytes,
        topology=replication.epoch,
        namespaces=sorted(names.values())[:ROWS_MAX],
        findings=_worst_findings(findings),
        links=_worst_links(replication.links),
        nodes=[_of_node(each, now_ms) for each in nodes],
        partitions_count=len(statistics.partitions),
        partitions=_hottest(statistics.partitions, host.partitions.heat(), names),
        readers=sorted(readers, key=lambda each: -each.lag_ms)[:ROWS_MAX],
        safe_points=_oldest_safe_points(safe_points, names, now_ms),
        holds=[str(hold) for hold in statistics.held_back_by],
        transactions={state.value: number for state, number in counts.states.items() if number},
        oldest_transaction_ms=counts.oldest_age_ms,
        open_transactions=_oldest_transactions(host, counts),
        transaction_commits=host.facts.transaction_commits(),
        logs=[_of_log(each) for each in host.transactions.logs()[:ROWS_MAX]],
        whole_comparison=host.comparisons.whole(),
        last_comparison=host.comparisons.last(),
        running_comparison=host.comparisons.running(now_ms),
        machine=_look_at_machine(
            host,
            statistics,
            {
                "namespaces": (len(names), NAMESPACES_MAX),
                "partitions": (len(statistics.partitions), PARTITIONS_MAX),
                "nodes": (len(nodes), NODES_MAX),
                "feeds": (len(feeds), FEEDS_MAX),
                "subscriptions": (len(subscriptions), SUBSCRIPTIONS_MAX),
                "safe points": (len(safe_points), SAFE_POINTS_MAX),
                "open transactions": (sum(counts.states.values()), TRANSACTIONS_OPEN_MAX),
            },
        ),
    )


def _worst_findings(findings: Iterable[CheckResult]) -> list[CheckResult]:
    order = (Severity.PROBLEM, Severity.WARNING, Severity.UNKNOWN)
    bad = [each for each in findings if each.severity in order]
    return sorted(bad, key=lambda each: order.index(each.severity))[:ROWS_MAX]


def _of_node(node: NodeStatistics, now_ms: int) -> NodeOverview:
    return NodeOverview(
        node=node.node,
        url=node.url,
        keeps=node.keeps,
        lives=node.lives,
        drained=node.drained,
        beat_age_ms=max(0, now_ms - node.beat_ms),
        ceiling_ahead_ms=physical_ms(node.ceiling) - now_ms,
        load=node.load,
        partitions=len(node.partitions),
    )


def _oldest_safe_points(
    points: Iterable[SafePoint], names: Mapping[int, str], now_ms: int
) -> list[SafePointOverview]:
    return [
        SafePointOverview(
            name=each.name,
            namespace=None if each.namespace is None else names.get(each.namespace, "dropped"),
            age_ms=max(0, now_ms - physical_ms(each.version)),
            expires_in_ms=each.expires_at_ms - now_ms,
        )
        for each in sorted(points, key=lambda each: each.version)[:ROWS_MAX]
    ]


def _of_log(log: LogReport) -> LogOverview:
    return LogOverview(
        log=log.log.value,
        owner=log.owner,
        records=log.statistics.records,
        entries=log.statistics.entries,
        live_records=log.live_records,
    )


def _worst_links(links: Iterable[LinkStatistics]) -> list[LinkStatistics]:
    return sorted(links, key=lambda link: (not link.alarms, -link.backlog_ms))[:ROWS_MAX]


def _hottest(
    partitions: Sequence[PartitionStatistics], heats: Iterable[PartitionHeat], names: Mapping[int, str]
) -> list[PartitionOverview]:
    known, found = {each.id: each for each in partitions}, []
    for heat in heats:
        if heat.id not in known:
            continue
        samples = heat.samples[-INTERVALS_MAX:]
        calls = sum(sample.writes + sample.reads for sample in samples)
        found.append((calls, known[heat.id], samples))
    found.sort(key=lambda each: (-each[0], each[1].id))
    return [
        PartitionOverview(
            id=each.id,
            node=each.node,
            start=_show_bound(each.range, "start", names),
            end=_show_bound(each.range, "end", names),
            rate=each.rate,
            seconds=(samples[-1].to_ms - samples[0].from_ms) / 1_000,
            writes=[sample.writes for sample in samples],
            reads=[sample.reads for sample in samples],
        )
        for _, each, samples in found[:PARTITIONS_SHOWN_MAX]
    ]


def _show_bound(keys: KeyRange, which: str, names: Mapping[int, str]) -> str:
    """A bound of a partition as NAMESPACE/KEY; empty at the ends of the keys."""
    key = getattr(keys, which)
    if not key:
        return ""
    namespace = int.from_bytes(key[:3].ljust(3, b"\0"), "big")
    return f"{names.get(namespace, f'#{namespace}')}/{show_bytes(key[3:])}"


def _of_feed(feed: Feed, resolved: int, now_ms: int, expiries: Mapping[str, int]) -> ReaderOverview:
    told = measure(feed, resolved, now_ms)
    return ReaderOverview(
        kind="feed",
        name=feed.name,
        namespace=feed.namespace,
        state=feed.state.value,
        lag_ms=told.checkpoint_lag_ms,
        holder=told.holder,
        error=None if feed.error is None else feed.error.text,
        safe_point_ms=expiries.get(f"feed/{feed.name}"),
    )


def _of_subscription(
    host: Overlooked, row: SubscriptionRow, now_ms: int, expiries: Mapping[str, int], *, counts: bool
) -> ReaderOverview | None:
    told = None
    if counts:
        with suppress(SubscriptionNotFound):
            told = host.subscriptions.statistics(row.name)
        if told is None:
            return None
    holder = row.holder_at(now_ms)
    return ReaderOverview(
        kind="subscription",
        name=row.name,
        namespace=row.namespace,
        state="idle" if holder is None else "consumed",
        lag_ms=max(0, now_ms - physical_ms(row.needed_version)) if told is None else told.lag_ms,
        backlog=None if told is None else told.backlog,
        backlog_is_exact=told is not None and told.backlog_is_exact,
        holder=holder,
        safe_point_ms=expiries.get(f"subscription/{row.name}"),
    )


def _judge_feeds(feeds: Iterable[Feed], now_ms: int) -> list[CheckResult]:
    """Findings about feeds that have recently lost or duplicated changes."""
    advice = "compare the sink with the site, and load it anew from a snapshot if it lacks changes"
    return [
        CheckResult("feeds", Severity.PROBLEM, f"feed {feed.name!r}: {alarm}", advice)
        for feed in feeds
        if (alarm := feed.checked.alarm(now_ms)) is not None
    ]


def _judge_comparison(last: ToldComparison | None) -> list[CheckResult]:
    if last is None or last.report.outcome in (None, "agree"):
        return []
    report = last.report
    between = " and ".join(report.sites)
    if report.drift:
        advice = (
            "floodmark verify SITE SITE --repair gives each key its winner back (docs/operations/verify.md)"
        )
        message = f"the last comparison of {between} found {report.drift:,} keys that have drifted apart"
        return [CheckResult("verify", Severity.PROBLEM, message, advice)]
    message = f"the last comparison of {between} left doubts: {'; '.join(report.doubts[:3])}"
    return [
        CheckResult("verify", Severity.WARNING, message, "remove the cause, and run floodmark verify again")
    ]


def _oldest_transactions(host: Overlooked, counts: TransactionCounts) -> list[TransactionOverview]:
    # Listing very many transactions costs more than counting them, so list only old ones then.
    many = sum(counts.states.values()) > ROWS_MAX
    older_than = timedelta(milliseconds=counts.oldest_age_ms // 2 if many else 0)
    return [
        TransactionOverview(
            id=each.id,
            state=each.state.value,
            age_ms=each.age_ms,
            waits_for=[waiting.participant.name for waiting in each.waiting_for],
        )
        for each in host.transactions.list(older_than)[:TRANSACTIONS_SHOWN_MAX]
    ]


def _look_at_machine(
    host: Overlooked, statistics: SiteStatistics, used: Mapping[str, tuple[int, int]]
) -> MachineOverview:
    disk = None
    with suppress(OSError, FloodmarkError):
        disk = None if host.disk is None else disk_usage(host.disk)
    return MachineOverview(
        release=host.facts.release,
        python=".".join(map(str, sys.version_info[:3])),
        disk_free=None if disk is None else disk.free,
        disk_total=None if disk is None else disk.total,
        disk_reserve=RECOVERY_ROOM_BYTES,
        clock_ahead_ms=statistics.clock_ahead_ms,
        certificates=dict(host.facts.certificates),
        limits=sorted(
            (Limit(name=name, used=number, most=most) for name, (number, most) in used.items()),
            key=lambda limit: -limit.used / limit.most,
        ),
    )
