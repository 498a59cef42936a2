"""The pages of commands that run until Ctrl-C: `--metrics`, for Prometheus and for monitors.

A page shows the state of the command's work, and is ready once that has begun.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Annotated, Final

from prometheus_client import Metric

from floodmark.cli.arguments import InsecureMetrics
from floodmark.cli.render.output import note
from floodmark.feed.named.runner import RunnerStatistics
from floodmark.links.connections import begin
from floodmark.links.driver import TopologySummary
from floodmark.server import metrics
from floodmark.server.access import require_safe_metrics
from floodmark.server.health import serve_health
from floodmark.server.page import Page
from floodmark.server.serving import parse_listen

if TYPE_CHECKING:
    from floodmark.server.web import WebServer

# A scrape waits this long for the targets of links, and then shows their last answers.
ASK_SECONDS: Final = 2.0


@dataclass(frozen=True, kw_only=True)
class MetricsOptions:
    """The options about a command's pages."""

    metrics: Annotated[
        str | None, "HOST:PORT", "Where to serve /metrics, /health, /healthz and /readyz over HTTP."
    ] = None
    insecure_metrics: InsecureMetrics = False


class CommandPage(Page):
    """The page of a command: its metrics, its readiness and its alarms."""

    @abstractmethod
    def why_not_ready(self) -> str | None:
        """The reason for which the work has not begun yet; None if it has."""

    @abstractmethod
    def find_alarms(self) -> list[str]:
        """Everything that an operator should look at."""


@contextmanager
def serving_page(page: CommandPage, options: MetricsOptions) -> Iterator["WebServer | None"]:
    """Serve a page within the block; yields None without `--metrics`."""
    if options.metrics is None:
        yield None
        return
    where = parse_listen(options.metrics)
    require_safe_metrics(where.host, insecure=options.insecure_metrics)
    with serve_health(
        where.host,
        where.port,
        metrics=page.render,
        is_healthy=lambda: None,
        is_ready=page.why_not_ready,
        find_alarms=page.find_alarms,
    ) as server:
        note("metrics on http://{}:{}/metrics".format(*server.address))
        yield server


class ReplicateMetrics(CommandPage):
    """The links of `replicate`, as their targets report them."""

    def __init__(self) -> None:
        self._summarize: Callable[[], TopologySummary] | None = None
        self._asking: Future[TopologySummary] | None = None
        self._last: TopologySummary | None = None
        self._lock = Lock()
        super().__init__()

    def watch(self, summarize: Callable[[], TopologySummary]) -> None:
        """Record that the links run; `summarize` requests their state from the targets."""
        self._summarize = summarize

    def why_not_ready(self) -> str | None:
        return "the links do not run yet" if self._summarize is None else None

    def find_alarms(self) -> list[str]:
        summary = self._ask()
        links = [] if summary is None else summary.links
        found = [(link, link.stalled) for link in links if link.stalled is not None]
        found += [
            (link, "changes were lost or doubled; run floodmark verify") for link in links if link.wrong
        ]
        found += [(link, "the target does not answer") for link in links if link.backlog_ms is None]
        return [f"{link.source} to {link.target}: {problem}" for link, problem in found]

    def collect(self) -> Iterator[Metric]:
        """The families of one rendering; the registry calls it."""
        summary = self._ask()
        if summary is not None:
            yield from metrics.REPLICATE.families([((), summary)])
            links = summary.links
            yield from metrics.REPLICATE_LINK.families(((link.source, link.target), link) for link in links)

    def _ask(self) -> TopologySummary | None:
        """The targets' summary, or the last one: a silent target must not delay the page."""
        with self._lock:
            if self._summarize is not None:
                if self._asking is None:
                    self._asking = begin(self._summarize)
                if wait([self._asking], ASK_SECONDS).done:
                    self._last, self._asking = self._asking.result(), None
            return self._last


class FeedRunMetrics(CommandPage):
    """The runner of a feed."""

    def __init__(self) -> None:
        self._tell: Callable[[], RunnerStatistics] | None = None
        super().__init__()

    def watch(self, tell: Callable[[], RunnerStatistics]) -> None:
        """Record that there is a runner; `tell` returns its statistics."""
        self._tell = tell

    def why_not_ready(self) -> str | None:
        if self._tell is None or self._tell().state is None:
            return "the feed does not run yet: another process may run it"
        return None

    def find_alarms(self) -> list[str]:
        runner = None if self._tell is None else self._tell()
        return [] if runner is None or runner.problem is None else [f"feed {runner.feed}: {runner.problem}"]

    def collect(self) -> Iterator[Metric]:
        """The families of one rendering; the registry calls it."""
        if self._tell is not None:
            runner = self._tell()
            yield from metrics.FEED_RUN.families([((runner.feed,), runner)])
