"""The metrics of links from other sites, and of what feeds and heartbeats say about each other."""

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from floodmark.feed.named.feeds import FeedStatistics
from floodmark.host.statistics import AlarmKind, LinkStatistics, ReplicationStatistics

_LINK_GAUGES: Final[tuple[tuple[str, str, Callable[[LinkStatistics], int | None]], ...]] = (
    (
        "floodmark_link_heartbeat_age_seconds",
        "Time since the source wrote the last heartbeat that came, if one came.",
        lambda link: link.heartbeat_age_ms,
    ),
    (
        "floodmark_link_backlog_seconds",
        "How far the changes that are in lie behind the present.",
        lambda link: link.backlog_ms,
    ),
)

_LINK_COUNTERS: Final[tuple[tuple[str, str, Callable[[LinkStatistics], int]], ...]] = (
    (
        "floodmark_link_intervals_checked",
        "Intervals between heartbeats whose changes have all come.",
        lambda link: link.intervals_checked,
    ),
    (
        "floodmark_link_intervals_unchecked",
        "Intervals between heartbeats that could not be checked.",
        lambda link: link.intervals_unchecked,
    ),
    (
        "floodmark_link_intervals_wrong",
        "Intervals between heartbeats in which changes are missing, doubled or altered.",
        lambda link: link.intervals_wrong,
    ),
)


_CHECK_COUNTERS: Final[tuple[tuple[str, str, Callable[[FeedStatistics], int]], ...]] = (
    (
        "floodmark_feed_intervals_checked",
        "Intervals between heartbeats whose changes a feed has all delivered.",
        lambda feed: feed.checks.intervals_checked,
    ),
    (
        "floodmark_feed_intervals_unchecked",
        "Intervals between heartbeats in which a feed could not be checked.",
        lambda feed: feed.checks.intervals_unchecked,
    ),
    (
        "floodmark_feed_intervals_wrong",
        "Intervals between heartbeats in which a feed has lost, doubled or altered changes.",
        lambda feed: feed.checks.intervals_wrong,
    ),
)


def check_families(site: str, feeds: Iterable[FeedStatistics]) -> Iterator[Metric]:
    """What feeds were found to have delivered."""
    labels, known = ("site", "feed"), list(feeds)
    for name, text, count_of in _CHECK_COUNTERS:
        counter = CounterMetricFamily(name, text, labels=labels)
        for feed in known:
            counter.add_metric((site, feed.name), count_of(feed))
        yield counter
    alarm = GaugeMetricFamily("floodmark_feed_alarm", "1 if somebody should look at the feed.", labels=labels)
    for feed in known:
        alarm.add_metric((site, feed.name), feed.alarm is not None)
    yield alarm


def link_families(replication: ReplicationStatistics) -> Iterator[Metric]:
    """How the changes of other sites come in."""
    labels = ("site", "source", "namespace")
    links = [((replication.site, link.source, link.namespace), link) for link in replication.links]
    for name, text, milliseconds_of in _LINK_GAUGES:
        gauge = GaugeMetricFamily(name, text, labels=labels)
        for names, link in links:
            milliseconds = milliseconds_of(link)
            if milliseconds is not None:
                gauge.add_metric(names, milliseconds / 1000)
        yield gauge
    lag = GaugeMetricFamily(
        "floodmark_link_lag_seconds",
        "How old the changes of the last minutes were when they were in: the median, and the 99th of 100.",
        labels=(*labels, "quantile"),
    )
    alarm = GaugeMetricFamily(
        "floodmark_link_alarm", "1 if somebody should look at the link.", labels=(*labels, "kind")
    )
    for names, link in links:
        for quantile, lag_ms in (("0.5", link.lag_ms_p50), ("0.99", link.lag_ms_p99)):
            if lag_ms is not None:
                lag.add_metric((*names, quantile), lag_ms / 1000)
        raised = {each.kind for each in link.alarms}
        for kind in AlarmKind:
            alarm.add_metric((*names, kind), kind in raised)
    yield lag
    yield alarm
    for name, text, count_of in _LINK_COUNTERS:
        counter = CounterMetricFamily(name, text, labels=labels)
        for names, link in links:
            counter.add_metric(names, count_of(link))
        yield counter
