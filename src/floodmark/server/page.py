"""Pages of metrics in Prometheus' text format, rendered at each request."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from platform import python_version
from shutil import disk_usage

from prometheus_client import CollectorRegistry, Metric, ProcessCollector, generate_latest
from prometheus_client.registry import Collector

from floodmark import __version__
from floodmark.feed.named.feeds import FeedStatistics
from floodmark.feed.named.store import FeedStore
from floodmark.host.ports import Host
from floodmark.model.errors import FeedNotFound, FloodmarkError, SubscriptionNotFound
from floodmark.server import metrics
from floodmark.server.counters import ServerMetrics
from floodmark.site.site import Site

_log = logging.getLogger("floodmark.server")


class Page(Collector):
    """A page of the metrics that a subclass collects, and of those of the process."""

    def __init__(self) -> None:
        # A registry of its own: the library's global one would collect what others register.
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def render(self) -> bytes:
        """The page that Prometheus reads."""
        return generate_latest(self._registry)


class MetricsPage(Page):
    """All metrics of one server: its own and, on the keeper, those of the site and its feeds.

    `expiries` has the moment at which each file of certificates expires, in unix seconds.
    """

    def __init__(
        self, site: Site, server: ServerMetrics, expiries: Mapping[str, float] | None = None
    ) -> None:
        self._site = site
        # Kept, because `site.host` raises once the site is closed.
        self._host = site.host
        self._server = server
        self._expiries = expiries or {}
        super().__init__()

    def collect(self) -> Iterator[Metric]:
        """The families of one rendering; the registry calls it."""
        name = self._site.name
        yield from self._server.families(name)
        families = self._of_host(_site_families if self._host.keeps else _ready_families)
        yield from metrics.UP.families([((name,), bool(families))])
        yield from metrics.BUILD.families([((name, __version__, python_version()), None)])
        expiries = [((name, file), moment) for file, moment in self._expiries.items()]
        yield from metrics.CERTIFICATE.families(expiries)
        yield from families
        # Other nodes would have to ask the keeper, whose own page has the metrics of the whole site.
        of_site = (
            _feed_families,
            _subscription_families,
            _link_families,
            _transaction_families,
            _node_families,
        )
        for part in (*of_site, _process_families) if self._host.keeps else (_process_families,):
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


def _site_families(host: Host) -> Iterator[Metric]:
    statistics = host.status.statistics()
    site = statistics.site
    info = (site, str(statistics.site_id), str(statistics.format))
    yield from metrics.INFO.families([(info, statistics)])
    yield from metrics.SITE.families([((site,), statistics)])
    namespaces = statistics.namespaces[: metrics.NAMESPACES_SHOWN_MAX]
    yield from metrics.NAMESPACE.families(((site, each.name), each) for each in namespaces)
    yield from metrics.PARTITION.families(((site, str(each.id)), each) for each in statistics.partitions)


def _ready_families(host: Host) -> Iterator[Metric]:
    """The identity of a node that is not the keeper; raises if it is not ready."""
    host.require_ready()
    identity = host.identity
    info = (identity.site, str(identity.site_id), str(identity.format))
    yield from metrics.INFO.families([(info, identity)])


def _feed_families(host: Host) -> Iterator[Metric]:
    feeds = feed_statistics(host.feeds)
    return metrics.FEED.families(((host.identity.site, feed.name), feed) for feed in feeds)


def _subscription_families(host: Host) -> Iterator[Metric]:
    found = []
    for row in host.subscriptions.list()[: metrics.SUBSCRIPTIONS_SHOWN_MAX]:
        with suppress(SubscriptionNotFound):
            statistics = host.subscriptions.statistics(row.spec.name)
            found.append(((host.identity.site, row.spec.namespace, row.spec.name), statistics))
    return metrics.SUBSCRIPTION.families(found)


def _link_families(host: Host) -> Iterator[Metric]:
    found = host.status.replication()
    return metrics.LINK.families(((found.site, link.source, link.namespace), link) for link in found.links)


def _node_families(host: Host) -> Iterator[Metric]:
    nodes = host.node_port.nodes()
    return metrics.NODE.families(((host.identity.site, str(each.node)), each) for each in nodes)


def _process_families(host: Host) -> Iterator[Metric]:
    """Metrics that this process reads without a call to another node."""
    site = host.identity.site
    free = [] if host.disk is None else [((site,), disk_usage(host.disk).free)]
    yield from metrics.DISK.families(free)
    if (measures := host.engine_measures()) is not None:
        yield from metrics.ENGINE.families([((site,), measures.whole)])
        found = measures.families.items()
        yield from metrics.ENGINE_FAMILY.families(((site, family), each) for family, each in found)
    if (counters := host.node_counters()) is not None:
        yield from metrics.NODE_COUNTERS.families([((site, str(counters.node)), counters)])


def _transaction_families(host: Host) -> Iterator[Metric]:
    site, transactions = host.identity.site, host.transactions
    yield from metrics.TRANSACTIONS.families([((site,), transactions.count())])
    logs = transactions.logs()
    yield from metrics.LOG.families(((site, log.log.value, log.owner), log) for log in logs)
