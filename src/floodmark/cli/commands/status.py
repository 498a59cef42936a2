"""status: the state of a site, now or every second."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Event
from typing import Annotated, Final

from rich.console import Group
from rich.live import Live
from rich.text import Text

import floodmark
from floodmark.cli.arguments import Location
from floodmark.cli.commands.nodes import show_state
from floodmark.cli.commands.partitions import partition_fields, show_range
from floodmark.cli.opening import is_url, location_fields, open_site, show_location
from floodmark.cli.render.output import Output, Part, console_on, note, plain
from floodmark.cli.render.text import (
    align,
    draw_bar,
    draw_sparkline,
    show_lag,
    show_size,
    show_version,
)
from floodmark.clock import monotonic_ms
from floodmark.feed import ReaderStatistics
from floodmark.feed.named.feeds import FeedStatistics, measure
from floodmark.host.statistics import (
    LinkStatistics,
    NodeStatistics,
    PartitionHeat,
    ReplicationStatistics,
    SiteStatistics,
)
from floodmark.model.stream import Way
from floodmark.model.version import physical_ms

REFRESH_SECONDS: Final = 1.0
ROWS_MAX: Final = 10
BAR_WIDTH: Final = 12
INTERVALS: Final = 30

Line = Sequence[Part]


@dataclass(frozen=True, kw_only=True)
class SiteLook:
    """A site as it was seen at one moment of this machine's monotonic clock."""

    taken_at_ms: int
    lag_ms: int
    statistics: SiteStatistics
    safe_points: int
    feeds: Sequence[FeedStatistics]
    heat: Sequence[PartitionHeat]
    nodes: Sequence[NodeStatistics]
    replication: ReplicationStatistics

    @property
    def names(self) -> dict[int, str]:
        """The namespaces by id."""
        return {each.id: each.name for each in self.statistics.namespaces}


def status(
    location: Location,
    output: Output,
    watch: Annotated[bool, "Refresh every second, with rates, until Ctrl-C."] = False,
) -> None:
    """Show the state of a site, now or every second.

    With --json, all of its statistics; counters such as `commits` begin when a process opens
    the site, so they are small for a directory. With --watch, a server shows its rates.

    Examples:
      floodmark status data/oslo
      floodmark status data/oslo --json
      floodmark status grpc://127.0.0.1:7100 --watch
    """
    output.flushes = watch
    with open_site(location, background=watch) as site:
        if watch:
            _watch(output, site, location)
        else:
            look = look_at(site)
            output.result(_fields(location, look), _pairs(location, look))


def look_at(site: floodmark.Site) -> SiteLook:
    """Read everything that is shown of a site."""
    statistics = site.statistics()
    resolved, now_ms = statistics.resolved_version, site.host.physical_ms()
    return SiteLook(
        taken_at_ms=monotonic_ms(),
        lag_ms=max(0, now_ms - physical_ms(resolved)),
        statistics=statistics,
        safe_points=len(site.safe_points()),
        feeds=[measure(feed, resolved, now_ms) for feed in site.feeds.list()],
        heat=site.heat(),
        nodes=site.host.node_port.nodes(),
        replication=site.replication(),
    )


def _watch(output: Output, site: floodmark.Site, location: str) -> None:
    """Print or draw the site every second, until an interruption or an error."""
    pause = Event()
    look = look_at(site)
    if output.json or not output.is_terminal:
        while True:
            output.result(_fields(location, look), _pairs(location, look))
            pause.wait(REFRESH_SECONDS)
            look = look_at(site)
            if not output.json:
                output.line()
    if not is_url(location):
        note("watching: this process owns the site until you press Ctrl-C")
    with Live(console=console_on(sys.stdout), auto_refresh=False) as live:
        before = look
        while True:
            shown = [Text.assemble(*line) for line in draw(location, before, look, output.bars)]
            live.update(Group(*shown), refresh=True)
            pause.wait(REFRESH_SECONDS)
            before, look = look, look_at(site)


# For programs


def _fields(location: str, look: SiteLook) -> dict[str, object]:
    statistics = look.statistics
    return {
        **location_fields(location),
        **plain(statistics),
        "partitions": [partition_fields(partition, look.names) for partition in statistics.partitions],
        "nodes": [plain(each) for each in look.nodes],
        "safe_points": look.safe_points,
        "lag_ms": look.lag_ms,
        "feeds": [plain(feed) for feed in look.feeds],
        "replication": {**plain(look.replication), "alarms": look.replication.alarms},
    }


# For people


def _pairs(location: str, look: SiteLook) -> list[tuple[str, str]]:
    statistics = look.statistics
    pairs = [
        ("site", f"{statistics.site}, id {statistics.site_id}, format {statistics.format}"),
        ("server" if is_url(location) else "directory", show_location(location)),
        ("version", show_version(statistics.version)),
        ("resolved", show_version(statistics.resolved_version)),
        *[("alarm", str(hold)) for hold in statistics.held_back_by],
        ("data", f"{show_size(statistics.data_bytes)}, change log {show_size(statistics.log_bytes)}"),
        ("namespaces", ", ".join(each.name for each in statistics.namespaces) or "none yet"),
        ("partitions", f"{len(statistics.partitions):,}"),
        *[("node", f"{each.node} {show_state(each)}, {each.url}") for each in look.nodes],
        ("safe points", f"{look.safe_points:,}"),
    ]
    if statistics.readers.open:
        pairs.append(("readers", _show_readers(statistics.readers.open)))
    if look.feeds:
        pairs.append(("feeds", ", ".join(f"{feed.name} {feed.state}" for feed in look.feeds[:ROWS_MAX])))
    pairs += [("alarm", f"feed {feed.name}: {feed.alarm}") for feed in look.feeds if feed.alarm is not None]
    pairs += _link_pairs(look.replication)
    if statistics.clock_ahead_ms:
        pairs.append(("clock", f"{statistics.clock_ahead_ms:,} ms ahead of the machine's"))
    if statistics.background_error:
        pairs.append(("error", statistics.background_error))
    return pairs


def _link_pairs(replication: ReplicationStatistics) -> list[tuple[str, str]]:
    """One line for each other site, and one for each alarm."""
    sources: dict[str, list[LinkStatistics]] = {}
    for link in replication.links:
        sources.setdefault(link.source, []).append(link)
    pairs = [(f"from {source}", _show_links(links)) for source, links in sources.items()]
    return pairs + [("alarm", alarm) for alarm in replication.alarms]


def _show_links(links: Sequence[LinkStatistics]) -> str:
    """The links from one site in a line, with the worst figure of its namespaces."""
    ages = [link.heartbeat_age_ms for link in links if link.heartbeat_age_ms is not None]
    heartbeat = f"heartbeat {show_lag(max(ages))} ago" if len(ages) == len(links) else "no heartbeat yet"
    parts = [f"{len(links):,} namespaces" if len(links) > 1 else links[0].namespace, heartbeat]
    for name, lags in (
        ("p50", [link.lag_ms_p50 for link in links if link.lag_ms_p50 is not None]),
        ("p99", [link.lag_ms_p99 for link in links if link.lag_ms_p99 is not None]),
    ):
        if lags:
            parts.append(f"lag {name} {show_lag(max(lags))}")
    return ", ".join([*parts, f"{show_lag(max(link.backlog_ms for link in links))} behind"])


def _link_rows(links: Sequence[LinkStatistics]) -> list[Sequence[str]]:
    """Links with alarms first, then by backlog."""

    def lag(lag_ms: int | None) -> str:
        return "-" if lag_ms is None else show_lag(lag_ms)

    worst = sorted(links, key=lambda link: (bool(link.alarms), link.backlog_ms), reverse=True)
    return [
        (
            link.source,
            link.namespace,
            lag(link.heartbeat_age_ms),
            lag(link.lag_ms_p50),
            lag(link.lag_ms_p99),
            show_lag(link.backlog_ms),
            ", ".join(alarm.kind for alarm in link.alarms) or "no",
        )
        for link in worst[:ROWS_MAX]
    ]


def _show_readers(readers: Sequence[ReaderStatistics]) -> str:
    ways = [f"{count:,} by {way}" for way in Way if (count := sum(each.way is way for each in readers))]
    lag = show_lag(max(each.lag_ms for each in readers))
    return f"{len(readers):,} open, {', '.join(ways)}; the last is {lag} behind"


def draw(location: str, before: SiteLook, look: SiteLook, bars: str) -> list[Line]:
    """The lines that a terminal shows, with the rates between two looks."""
    pairs = [*_pairs(location, look), *_rates(before, look), ("lag", show_lag(look.lag_ms))]
    width = max(len(name) for name, _ in pairs) + 2
    lines: list[Line] = [[(name.ljust(width), "dim"), value] for name, value in pairs]
    lines += _table(("feed", "state", "lag", "run by"), _feed_rows(look.feeds))
    header = ("source", "namespace", "heartbeat", "lag p50", "lag p99", "backlog", "alarm")
    lines += _table(header, _link_rows(look.replication.links))
    lines += _table(("partition", "from", "to", "writes/s", "share", "over time"), _heat_rows(look, bars))
    return lines


def _rates(before: SiteLook, look: SiteLook) -> list[tuple[str, str]]:
    seconds = (look.taken_at_ms - before.taken_at_ms) / 1000
    old, new = before.statistics, look.statistics

    def rate(earlier: int, later: int) -> float:
        return max(0, later - earlier) / seconds if seconds > 0 else 0.0

    delivered = [
        f"{each:,.0f}/s by {way}"
        for way in Way
        if (each := rate(old.readers.changes.get(way, 0), new.readers.changes.get(way, 0)))
    ]
    size = show_size(round(rate(old.bytes_written, new.bytes_written)))
    return [
        ("writes", f"{rate(old.commits, new.commits):,.0f} commits/s, {size}/s"),
        ("changes", f"{rate(old.changes, new.changes):,.0f}/s"),
        ("delivered", ", ".join(delivered) or "none"),
    ]


def _feed_rows(feeds: Sequence[FeedStatistics]) -> list[Sequence[str]]:
    worst = sorted(feeds, key=lambda feed: feed.checkpoint_lag_ms, reverse=True)
    return [
        (feed.name, feed.state.value, show_lag(feed.checkpoint_lag_ms), feed.holder or "none")
        for feed in worst[:ROWS_MAX]
    ]


def _heat_rows(look: SiteLook, bars: str) -> list[Sequence[str]]:
    """The busiest partitions."""
    partitions = {partition.id: partition for partition in look.statistics.partitions}
    recent = {
        heat.id: [_per_second(sample.writes, sample.to_ms - sample.from_ms) for sample in heat.samples]
        for heat in look.heat
        if heat.id in partitions
    }
    now = {partition: rates[-2] if len(rates) > 1 else 0.0 for partition, rates in recent.items()}
    busiest = sorted(recent, key=lambda partition: sum(recent[partition][-INTERVALS:]), reverse=True)
    top_now, top = max(now.values(), default=0.0), _highest(recent)
    return [
        (
            str(partition),
            *show_range(partitions[partition], look.names),
            f"{now[partition]:,.0f}",
            draw_bar(now[partition], top_now, BAR_WIDTH, bars),
            draw_sparkline(recent[partition][-INTERVALS:], top, bars),
        )
        for partition in busiest[:ROWS_MAX]
    ]


def _per_second(count: int, milliseconds: int) -> float:
    return count * 1000 / milliseconds if milliseconds > 0 else 0.0


def _highest(recent: Mapping[int, Sequence[float]]) -> float:
    return max((rate for rates in recent.values() for rate in rates[-INTERVALS:]), default=0.0)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[Line]:
    if not rows:
        return []
    head, *lines = align([header, *rows])
    return [[""], [(head, "dim")], *[[line] for line in lines]]
