"""Takes the steps of links in threads of this process: for small sites, and for machines without Java.

Each link has a thread, which plans a step, runs it and plans the next.  A silent or slow site delays only its
own links.  A step is never in memory as a whole: its rows go from the source's stream into the target's, and
at most eight batches wait for an acknowledgement.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from threading import Event
from typing import Final

from floodmark.links.connections import SiteConnections, attend, begin
from floodmark.links.planning import PAUSE_SECONDS, STEP_MS_ALONE, LinkOptions, Planner
from floodmark.links.steps import run_step
from floodmark.model.errors import Closed, FloodmarkError, StaleLink, Unreachable
from floodmark.replication.step import LinkStep

# The poll interval of a link that is idle for a while, because each poll costs a request.
IDLE_PAUSE_SECONDS: Final = 0.5
# The time that running steps have to end after a stop; an interrupted step is repeated by the next run.
STOP_SECONDS: Final = 5.0


class ProcessRunner:
    """Runs links in this process.  A context manager; leaving it stops the links."""

    restarts: Final = 0

    def __init__(self) -> None:
        self._sites = SiteConnections()
        self._stop = Event()
        self._running: list[Future[None]] = []

    def __enter__(self) -> "ProcessRunner":
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        wait(self._running, STOP_SECONDS)
        self._sites.close()

    def start(self, links: Sequence[LinkOptions]) -> None:
        """Start a thread for each link."""
        for link in links:
            running = _RunningLink(link, self._sites, self._stop)
            self._running.append(begin(running.run, f"floodmark-link-{link.source_id}"))

    def check(self, stop: Event) -> None:
        """Raise the error that ended a thread: a bug, for errors of sites are retried."""
        for ended in self._running:
            if ended.done():
                ended.result()


class _RunningLink:
    """The loop of one link."""

    def __init__(self, link: LinkOptions, sites: SiteConnections, stop: Event) -> None:
        self._link = link
        self._sites = sites
        self._stop = stop
        self._planner = Planner(link, sites)
        self._planner.step_ms = STEP_MS_ALONE

    def run(self) -> None:
        while not self._stop.is_set():
            step = self._planner.next_step()
            if step is None:
                self._stop.wait(IDLE_PAUSE_SECONDS if self._planner.pace.is_quiet else PAUSE_SECONDS)
            else:
                self._take(step)

    def _take(self, step: LinkStep) -> None:
        link = self._link
        try:
            attend(self._work(step), self._sites, [link.source, link.target])
        except (StaleLink, Closed):
            # Another process runs the link as well, or another link dropped the connection that both use.
            self._planner.fail()
        except FloodmarkError as error:
            if isinstance(error, Unreachable):
                self._sites.drop(link.source)
                self._sites.drop(link.target)
            self._planner.fail(str(error))
        else:
            self._planner.confirm(step)

    def _work(self, step: LinkStep) -> Callable[[], object]:
        source, target = self._sites.get(self._link.source), self._sites.get(self._link.target)
        return partial(run_step, source.host, target.host, step)
