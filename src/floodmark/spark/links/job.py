"""Let the sites of a topology copy each other, in all directions, as a Spark stream.

All links are one streaming query (`spark/links/steps.py`).  A site that is away, or a clock that is wrong,
holds up the links that it is part of and no others: these are tried again for as long as the job runs, and
their targets show why nothing comes.

The sites keep how far each link is.  So there is nothing to keep here: the job may be killed, run elsewhere,
or run twice, and what Spark writes down about its query goes with it.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from tempfile import TemporaryDirectory
from threading import Event
from typing import Final

import msgspec
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from floodmark.clock import monotonic_ms
from floodmark.clock.backoff import Backoff
from floodmark.host.statistics import LinkStatistics
from floodmark.model.errors import FloodmarkError, InvalidConfiguration, LinkStalled, Retryable
from floodmark.model.version import Version
from floodmark.replication.topology import Direction, Topology
from floodmark.spark.links.entering import Entering
from floodmark.spark.links.planning import LinkOptions
from floodmark.spark.links.quick_notes import quick_notes
from floodmark.spark.links.sites import Sites, at_once
from floodmark.spark.links.steps import DIRECT, FORMAT, OPTION, LinksSource, encode_links
from floodmark.spark.runtime.failures import find_error, raising_floodmark_errors
from floodmark.spark.runtime.progress import SILENT, Progress
from floodmark.spark.runtime.threads import make_active
from floodmark.spark.session import use_session
from floodmark.spark.source.address import SiteAddress

_log = logging.getLogger("floodmark.replication")

# Who looks after the query looks up this often.
LOOK_SECONDS: Final = 0.2
BACKOFF_MS: Final = 500
BACKOFF_MS_MAX: Final = 30_000
# A run that is to end gives up if no link has moved for so long.
STANDSTILL_MS_MAX: Final = 120_000


class LinkSummary(msgspec.Struct, frozen=True, kw_only=True):
    """How one direction went.  The lag is that of the last minutes, from commit to commit.

    `findings` counts all intervals between heartbeats in which changes ever went astray, and `wrong` those
    that were found during this run; None if the target could not be asked before or after it.
    """

    source: str
    target: str
    namespaces: list[str]
    backlog_ms: int | None
    lag_ms_p50: int | None
    lag_ms_p99: int | None
    findings: int
    wrong: int | None
    stalled: str | None


class TopologySummary(msgspec.Struct, frozen=True, kw_only=True):
    """What a run of all links has done.  `wrong` sums up what is known of the links."""

    epoch: int
    elapsed_ms: int
    restarts: int
    wrong: int
    links: list[LinkSummary]


def replicate_topology(
    topology: Topology,
    addresses: Mapping[str, SiteAddress],
    *,
    once: bool = False,
    spark: SparkSession | None = None,
    progress: Progress | None = None,
    stop: Event | None = None,
    transform: Callable[[DataFrame], DataFrame] | None = None,
) -> TopologySummary:
    """Run all links of a topology until told to stop; with `once`, until what is there now has arrived.

    The topology is put in force at every site as soon as it can be reached.  With `once` all must be there.

    `transform` is a stage in the middle of the query: it is given the rows of all links on their way from the
    sources to the targets, in the columns of `spark/links/steps.py`, and hands them on.  It is there to look
    at what passes.  A row that it drops or changes, the next heartbeat finds.
    """
    began_ms = monotonic_ms()
    entering = Entering(topology, addresses)
    failure = entering.try_all()
    if failure is not None and (once or not isinstance(failure, Retryable)):
        raise failure
    links = [_Link(each, _options(topology, each, addresses), entering) for each in topology.directions()]
    with use_session(spark, "floodmark replicate") as session, raising_floodmark_errors():
        session.dataSource.register(LinksSource)
        with TemporaryDirectory(prefix="floodmark-links-") as notes:
            work = _Work(session, f"file://{notes}", links, transform)
            if once:
                work.run_once(progress or SILENT, stop or Event())
            else:
                work.run(progress or SILENT, stop or Event(), entering)
    summaries = at_once(_Link.summarize, links)
    return TopologySummary(
        epoch=topology.epoch,
        elapsed_ms=monotonic_ms() - began_ms,
        restarts=work.restarts,
        wrong=sum(link.wrong or 0 for link in summaries),
        links=summaries,
    )


def site_addresses(
    topology: Topology,
    *,
    token_file: str | None = None,
    tls_root: str | None = None,
    tls_certificate: str | None = None,
    tls_key: str | None = None,
) -> dict[str, SiteAddress]:
    """Where the active sites of a topology are; what it leaves open about credentials is the same for all."""
    addresses = {}
    for name, site in topology.sites.items():
        if not site.is_active:
            continue
        if site.url is None:
            raise InvalidConfiguration(f"site {name!r} has no url in the topology, so nobody can get there")
        addresses[name] = SiteAddress(
            location=site.url,
            token_file=site.token_file or token_file,
            tls_root=site.tls_root_certificate or tls_root,
            tls_certificate=tls_certificate,
            tls_key=tls_key,
        )
    return addresses


def _options(topology: Topology, direction: Direction, addresses: Mapping[str, SiteAddress]) -> LinkOptions:
    source = topology.sites[direction.source]
    return LinkOptions(
        source_id=source.id,
        source=addresses[direction.source],
        target=addresses[direction.target],
        namespaces=direction.namespaces,
        incarnation=source.incarnation,
    )


@dataclass
class _Link:
    """One direction, what its sites had found wrong when they entered, and how far it is to go."""

    direction: Direction
    options: LinkOptions
    entering: Entering
    goals: dict[str, Version] = field(default_factory=dict)

    def set_goals(self, sites: Sites) -> None:
        """Remember what is there now."""
        host = sites.get(self.options.source).host
        for name in self.direction.namespaces:
            # To cut makes durable, and publishes, what was written without waiting for the disk.
            resolved = host.versions.resolved_version()
            self.goals[name] = host.versions.cut_changes(name, resolved, None, None, False).resolved

    def left(self, sites: Sites) -> dict[str, Version]:
        """How far the target is with the namespaces that have not got to where they are to go."""
        host = sites.get(self.options.target).host
        positions = host.replication.link_positions(self.options.source_id, list(self.goals))
        through = {each.name: each.through for each in positions}
        return {
            name: through.get(name, 0) for name, goal in self.goals.items() if through.get(name, 0) < goal
        }

    def statistics(self) -> list[LinkStatistics]:
        """What the target says about the link; nothing if it cannot be reached."""
        with suppress(FloodmarkError), self.options.target.connect() as target:
            links = target.host.status.replication().links
            return [link for link in links if link.source == self.direction.source]
        return []

    def summarize(self) -> LinkSummary:
        links = self.statistics()
        findings = sum(link.intervals_wrong for link in links)
        before = self.entering.found.get(self.direction.target)
        return LinkSummary(
            source=self.direction.source,
            target=self.direction.target,
            namespaces=list(self.direction.namespaces),
            backlog_ms=max((link.backlog_ms for link in links), default=None),
            lag_ms_p50=max((link.lag_ms_p50 for link in links if link.lag_ms_p50 is not None), default=None),
            lag_ms_p99=max((link.lag_ms_p99 for link in links if link.lag_ms_p99 is not None), default=None),
            findings=findings,
            wrong=None if before is None or not links else max(0, findings - before[self.direction.source]),
            stalled=next((link.stalled for link in links if link.stalled is not None), None),
        )


class _Work:
    """Runs the query of all links, and begins it anew when it fails."""

    def __init__(
        self,
        spark: SparkSession,
        notes: str,
        links: Sequence[_Link],
        transform: Callable[[DataFrame], DataFrame] | None,
    ) -> None:
        self._spark = spark
        self._notes = notes
        self._links = links
        self._transform = transform
        self._query: StreamingQuery | None = None
        self._backoff = Backoff(BACKOFF_MS, longest_ms=BACKOFF_MS_MAX)
        self._began_ms = 0
        self.restarts = 0

    def run(self, progress: Progress, stop: Event, entering: Entering) -> None:
        """Let all links run until they are told to stop, also those of sites that come late."""
        progress.report("links", len(self._links), None)
        try:
            self._begin()
            while not stop.wait(LOOK_SECONDS):
                self._look_after(stop)
                entering.go_on()
        finally:
            self._end()

    def run_once(self, progress: Progress, stop: Event) -> None:
        """Let all links run until what was there at the beginning has arrived."""
        with closing(Sites()) as sites:
            for link in self._links:
                link.set_goals(sites)
            self._wait_for_goals(sites, progress, stop)

    def _wait_for_goals(self, sites: Sites, progress: Progress, stop: Event) -> None:
        waiting, moved_at_ms = list(self._links), monotonic_ms()
        seen: dict[str, dict[str, Version]] = {}
        try:
            self._begin()
            while waiting and not stop.wait(LOOK_SECONDS):
                self._look_after(stop)
                with suppress(Retryable):
                    found = {str(link.direction): link.left(sites) for link in waiting}
                    waiting = [link for link in waiting if found[str(link.direction)]]
                    if found != seen:
                        seen, moved_at_ms = found, monotonic_ms()
                progress.report("links", len(self._links) - len(waiting), len(self._links))
                if monotonic_ms() - moved_at_ms > STANDSTILL_MS_MAX:
                    raise _stands_still(waiting)
        finally:
            self._end()

    def _begin(self) -> None:
        make_active(self._spark)
        option = encode_links([link.options for link in self._links])
        reader = self._spark.readStream.format(FORMAT).option(OPTION, option)
        if self._transform is None:
            rows = reader.option(DIRECT, "true").load()
        else:
            rows = self._transform(reader.load())
        writer = (
            rows.writeStream.format(FORMAT)
            .option(OPTION, option)
            # A place of its own each time: the targets know better than old notes where to go on.
            .option("checkpointLocation", f"{self._notes}/{self.restarts}")
        )
        with quick_notes(self._spark, self._notes):
            self._query = writer.start()
        self._began_ms = monotonic_ms()

    def _end(self) -> None:
        """Stop the query.  A step that is under way is taken again by the next one."""
        if self._query is not None:
            self._query.stop()
            self._query = None

    def _look_after(self, stop: Event) -> None:
        query = self._query
        assert query is not None
        if query.isActive:
            return
        error = query.exception()
        assert error is not None, "a query that has no end has ended"
        if monotonic_ms() - self._began_ms >= BACKOFF_MS_MAX:
            self._backoff.reset()
        failure, pause_ms = find_error(error) or error, self._backoff.next_ms()
        if pause_ms is None:
            raise failure
        _log.warning("the query of the links failed and is begun again: %s", str(failure).partition("\n")[0])
        self._end()
        if not stop.wait(pause_ms / 1000):
            self.restarts += 1
            self._begin()


def _stands_still(links: Sequence[_Link]) -> LinkStalled:
    link = links[0]
    reason = next((each.stalled for each in link.statistics() if each.stalled is not None), None)
    return LinkStalled(
        f"nothing has come from {link.direction.source} to {link.direction.target} for "
        f"{STANDSTILL_MS_MAX // 1000} s: {reason or 'nobody says why; ask both with floodmark status'}"
    )
