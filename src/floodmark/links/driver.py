"""Runs all links of a topology, until it is stopped or until the present changes have arrived.

The driver stores nothing: the targets store the positions of links.  So it may be killed, moved to another
machine, or run twice.  An unreachable site, or a wrong clock, stops only the links of that site.  A runner
retries these as long as it runs, and their targets show the reason.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import dataclass, field
from threading import Event
from typing import Final, Protocol, TypeAlias

import msgspec

from floodmark.clock import monotonic_ms
from floodmark.host.ports import published_version
from floodmark.host.statistics import LinkStatistics
from floodmark.links.connections import SiteConnections, at_once
from floodmark.links.entering import Entering
from floodmark.links.planning import LinkOptions
from floodmark.model.errors import FloodmarkError, InvalidConfiguration, LinkStalled, Retryable
from floodmark.model.version import Version
from floodmark.replication.topology import Direction, Topology
from floodmark.site.address import SiteAddress

# The poll interval of the thread that supervises the runner.
LOOK_SECONDS: Final = 0.2
# A run with `once` fails if no link has moved for this long.
STANDSTILL_MS_MAX: Final = 120_000


class LinkProgress(Protocol):
    """Receives reports about the progress of the links."""

    def report(self, stage: str, done: int, total: int | None, doing: str = "") -> None:
        """Report that `done` of `total` links have arrived; `total` is None for a run without end.

        `doing` describes what the run waits for.
        """
        ...


class Runner(Protocol):
    """Takes the steps of links, from `start` until its context ends."""

    @property
    def restarts(self) -> int:
        """How often the runner was restarted."""
        ...

    def start(self, links: Sequence[LinkOptions]) -> None:
        """Begin to take steps, in other threads or processes."""
        ...

    def check(self, stop: Event) -> None:
        """Restart the runner if it has failed, unless `stop` is set; raises its error if that is final."""
        ...


class LinkSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one direction.  The lag is that of the last minutes, from commit to commit.

    `changes` counts those that arrived in this run.  `findings` counts all intervals between heartbeats in
    which changes were ever lost or duplicated, and `wrong` those of this run.  They are None if the target
    did not answer before or after the run.
    """

    source: str
    target: str
    namespaces: list[str]
    changes: int | None
    backlog_ms: int | None
    lag_ms_p50: int | None
    lag_ms_p99: int | None
    findings: int
    wrong: int | None
    stalled: str | None


class TopologySummary(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a run.  `changes` and `wrong` are sums over the links.

    A new copy begins with a snapshot where the change log does not reach back far enough: `snapshot_records`.
    """

    epoch: int
    elapsed_ms: int
    restarts: int
    snapshot_records: int = 0
    changes: int
    wrong: int
    links: list[LinkSummary]


LinkWatch: TypeAlias = Callable[[Callable[[], TopologySummary]], None]


def run_links(
    topology: Topology,
    addresses: Mapping[str, SiteAddress],
    runner: AbstractContextManager[Runner],
    *,
    once: bool = False,
    progress: LinkProgress | None = None,
    watch: LinkWatch | None = None,
    stop: Event | None = None,
) -> TopologySummary:
    """Run all links between the sites that have an address, until `stop` is set.

    With `once`, return when all changes that were there at the beginning have arrived; raises LinkStalled
    if no link has moved for two minutes.  Links of a site that was restored, and has not all data back, are
    not waited for; their summaries say so.  The topology is put in force at every site as soon as it answers;
    with `once` all sites must answer.  `watch` gets a function that asks the targets for the summary so far.
    """
    began_ms = monotonic_ms()
    entering = Entering(topology, addresses)
    failure = entering.try_all()
    if failure is not None and (once or not isinstance(failure, Retryable)):
        raise failure
    links = [
        _Link(each, _options(topology, each, addresses), entering)
        for each in topology.directions()
        if each.source in addresses and each.target in addresses
    ]
    stop = stop or Event()

    def summarize() -> TopologySummary:
        summaries = at_once(_Link.summarize, links)
        return TopologySummary(
            epoch=topology.epoch,
            elapsed_ms=monotonic_ms() - began_ms,
            restarts=running.restarts,
            changes=sum(link.changes or 0 for link in summaries),
            wrong=sum(link.wrong or 0 for link in summaries),
            links=summaries,
        )

    with runner as running:
        if watch is not None:
            watch(summarize)
        if once:
            _run_once(running, [link for link in links if link.why_absent is None], stop, progress)
        else:
            if progress is not None:
                progress.report("links", len(links), None)
            _run(running, links, stop, entering)
    return summarize()


def site_addresses(
    topology: Topology,
    *,
    token_file: str | None = None,
    tls_root: str | None = None,
    tls_certificate: str | None = None,
    tls_key: str | None = None,
) -> dict[str, SiteAddress]:
    """The addresses of the active sites; the credentials are for sites that name none of their own."""
    addresses = {}
    for name, site in topology.sites.items():
        if not site.is_active:
            continue
        if site.url is None:
            raise InvalidConfiguration(f"site {name!r} has no url in the topology; add it", site=name)
        addresses[name] = SiteAddress(
            location=site.url,
            token_file=site.token_file or token_file,
            tls_root=site.tls_root_certificate or tls_root,
            tls_certificate=tls_certificate,
            tls_key=tls_key,
            name=name,
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
    """One direction, and the versions at which it has arrived."""

    direction: Direction
    options: LinkOptions
    entering: Entering
    goals: dict[str, Version] = field(default_factory=dict)

    @property
    def why_absent(self) -> str | None:
        """Why a restored site of the link takes no part yet; None if both sites take part."""
        returning = self.entering.returning
        return returning.get(self.direction.source) or returning.get(self.direction.target)

    def set_goals(self, sites: SiteConnections) -> None:
        """Remember the present end of the source's changes."""
        versions = sites.get(self.options.source).host.versions
        for name in self.direction.namespaces:
            self.goals[name] = published_version(versions, name)

    def left(self, sites: SiteConnections) -> dict[str, Version]:
        """The positions of the namespaces that have not arrived."""
        replication = sites.get(self.options.target).host.replication
        positions = replication.link_positions(self.options.source_id, list(self.goals))
        through = {each.name: each.through for each in positions}
        return {
            name: through.get(name, 0) for name, goal in self.goals.items() if through.get(name, 0) < goal
        }

    def statistics(self) -> list[LinkStatistics]:
        """The target's statistics of the link; none if the target does not answer."""
        with suppress(FloodmarkError), self.options.target.connect() as target:
            links = target.host.status.replication().links
            return [link for link in links if link.source == self.direction.source]
        return []

    def summarize(self) -> LinkSummary:
        links = [each for each in self.statistics() if each.namespace in self.direction.namespaces]
        findings = sum(link.intervals_wrong for link in links)
        before = self.entering.before.get(self.direction.target)
        earlier = [each for each in before or () if each.source == self.direction.source]
        known = before is not None and bool(links)
        return LinkSummary(
            source=self.direction.source,
            target=self.direction.target,
            namespaces=list(self.direction.namespaces),
            changes=_grown([each.changes_ever for each in links], [each.changes_ever for each in earlier])
            if known
            else None,
            backlog_ms=max((link.backlog_ms for link in links), default=None),
            lag_ms_p50=max((link.lag_ms_p50 for link in links if link.lag_ms_p50 is not None), default=None),
            lag_ms_p99=max((link.lag_ms_p99 for link in links if link.lag_ms_p99 is not None), default=None),
            findings=findings,
            wrong=_grown([findings], [each.intervals_wrong for each in earlier]) if known else None,
            stalled=self.why_absent
            or next((link.stalled for link in links if link.stalled is not None), None),
        )


def _grown(now: Sequence[int], before: Sequence[int]) -> int:
    """The growth of a sum of counters; those of a target that was restarted meanwhile began at 0 again."""
    return sum(now) - sum(before) if sum(now) >= sum(before) else sum(now)


def _run(runner: Runner, links: Sequence[_Link], stop: Event, entering: Entering) -> None:
    """Supervise the runner until `stop` is set, and put the topology in force at late sites."""
    runner.start([link.options for link in links])
    while not stop.wait(LOOK_SECONDS):
        runner.check(stop)
        entering.go_on()


def _run_once(runner: Runner, links: Sequence[_Link], stop: Event, progress: LinkProgress | None) -> None:
    """Supervise the runner until the present changes have arrived."""
    with closing(SiteConnections()) as sites:
        for link in links:
            link.set_goals(sites)
        runner.start([link.options for link in links])
        waiting, moved_at_ms = list(links), monotonic_ms()
        seen: dict[str, dict[str, Version]] = {}
        while waiting and not stop.wait(LOOK_SECONDS):
            runner.check(stop)
            with suppress(Retryable):
                found = {str(link.direction): link.left(sites) for link in waiting}
                waiting = [link for link in waiting if found[str(link.direction)]]
                if found != seen:
                    seen, moved_at_ms = found, monotonic_ms()
            if progress is not None:
                progress.report("links", len(links) - len(waiting), len(links), _describe(waiting))
            if monotonic_ms() - moved_at_ms > STANDSTILL_MS_MAX:
                raise _stands_still(waiting)


def _describe(waiting: Sequence[_Link]) -> str:
    """The changes that a run waits for, as a text."""
    if not waiting:
        return "all changes have arrived"
    first = waiting[0].direction
    more = f" and {len(waiting) - 1:,} more" if len(waiting) > 1 else ""
    return f"waiting for changes from {first.source} to {first.target}{more}"


def _stands_still(links: Sequence[_Link]) -> LinkStalled:
    link = links[0]
    reason = next((each.stalled for each in link.statistics() if each.stalled is not None), None)
    return LinkStalled(
        f"no changes have come from {link.direction.source} to {link.direction.target} for "
        f"{STANDSTILL_MS_MAX // 1000} s: "
        f"{reason or 'no reason was reported; run `floodmark status` on both sites'}"
    )
