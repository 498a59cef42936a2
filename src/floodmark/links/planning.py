"""The next step of each link, its size, and how often an idle link moves.

A site that does not answer, or refuses, must not delay other links.  A runner that shares a batch among links
plans each in a thread of its own, waits half a second at most, and takes the steps that are ready
(`plan_all`).  A late plan goes into the next batch.  A link pauses after a failed plan, and after a step that
the target did not note.  The duration of each step determines the size of the next one: the overhead of a
small step exceeds its work, and a large one makes other links wait.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from datetime import timedelta
from typing import Final, NamedTuple

import msgspec

from floodmark.clock import monotonic_ms
from floodmark.feed import LIFETIME
from floodmark.links.bringing import bring_data_sets
from floodmark.links.connections import Rest, SiteConnections, at_once, begin
from floodmark.links.reading import Piece, whole_step
from floodmark.links.steps import plan_step, positions_after
from floodmark.model.errors import Closed, FloodmarkError, Unreachable
from floodmark.model.version import physical_ms
from floodmark.replication.step import LinkStep, NamespacePosition, NamespaceStep
from floodmark.site.address import SiteAddress
from floodmark.site.site import Site

# Sources write a heartbeat each second; a link forwards it also without changes.
BEAT_MS: Final = 1_000
# After the last changes a few heartbeats are forwarded at once, to prove that all changes arrived.  Later
# ones are sent in fewer steps.  Targets raise an alarm after ten seconds without heartbeats.
QUIET_STEPS: Final = 3
QUIET_BEAT_MS: Final = 4_000
# The poll interval of a link without changes, at first and after a while.
PAUSE_SECONDS: Final = 0.05
QUIET_PAUSE_SECONDS: Final = 0.25
# Two round trips around the world fit into this time.
PLAN_SECONDS: Final = 0.5
# The target duration of a step: while other links wait for it, and while none does.
STEP_MS: Final = 2_000
STEP_MS_ALONE: Final = 6_000
# The size of a step changes at most by this factor.
GROWTH_MAX: Final = 4
CHANGES_FIRST: Final = 200_000
CHANGES_MIN: Final = 500
# The changes that are repeated after a failure.
CHANGES_MAX: Final = 1_000_000
# The interval at which a link moves its safe points and asks its target again.
HOLD_MS: Final = 10_000


class LinkOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a link.  They hold no secret, so that they can be part of a Spark plan."""

    source_id: int
    source: SiteAddress
    target: SiteAddress
    namespaces: tuple[str, ...]
    incarnation: int = 1
    changes_max: int = CHANGES_MAX
    lifetime: timedelta = LIFETIME


class Planned(NamedTuple):
    """A step, and the pieces that each of its tasks reads."""

    step: LinkStep
    shares: list[list[Piece]]


class LinkPace:
    """Decides whether to take a step now: steps with changes always, heartbeats less often if idle."""

    def __init__(self) -> None:
        self._steps_without_changes = 0

    @property
    def is_quiet(self) -> bool:
        """Whether there have been no changes for a while."""
        return self._steps_without_changes >= QUIET_STEPS

    def takes(self, step: LinkStep) -> bool:
        """Whether to take a step now; if not, it is planned again later, and covers more."""
        if step.changes != 0:
            self._steps_without_changes = 0
            return True
        is_due = _is_due(step, QUIET_BEAT_MS if self.is_quiet else BEAT_MS)
        self._steps_without_changes += is_due
        return is_due


class Planner:
    """Plans the steps of one link.  `share` cuts a step into tasks.

    A runner either plans in its own thread (`next_step`), or begins a plan and takes it later.
    """

    def __init__(
        self,
        link: LinkOptions,
        sites: SiteConnections,
        share: Callable[[LinkStep, Site], list[list[Piece]]] = lambda step, _: [whole_step(step)],
    ) -> None:
        self._link = link
        self._sites = sites
        self._share = share
        # The plan in progress in a thread of its own, one at a time.
        self._planning: Future[Planned] | None = None
        self._planned: Planned | None = None
        # The positions that the target noted last, if this process moved the link there.
        self._positions: list[NamespacePosition] | None = None
        self._rest = Rest()
        self._changes_max = min(CHANGES_FIRST, link.changes_max)
        self._planned_at_ms = 0
        self._held_at_ms: int | None = None
        # Whether its step was among the largest of the last batch, and so decided the batch's duration.
        self.leads = True
        self.pace = LinkPace()
        # The target duration of the batch.
        self.step_ms = STEP_MS

    def next_step(self) -> LinkStep | None:
        """Plan the next step in this thread.  None if there is nothing to do now, or the link pauses."""
        if not self._rest.is_over:
            return None
        self._adapt()
        return self._judge(self._plan_or_report)

    def begin(self) -> "Future[Planned] | None":
        """Begin to plan in another thread.  None if the link pauses, or an earlier plan is not ready."""
        if self._planning is not None or not self._rest.is_over:
            return None
        self._adapt()
        self._planning = begin(self._plan_or_report)
        return self._planning

    def take(self) -> LinkStep | None:
        """The step that was begun.  None if it is not ready, or there is nothing to do now."""
        if self._planning is None or not self._planning.done():
            return None
        planning, self._planning = self._planning, None
        return self._judge(planning.result)

    def shares(self, step: LinkStep) -> list[list[Piece]]:
        """The tasks of the step that was taken last; any other step is one task."""
        if self._planned is not None and self._planned.step == step:
            return self._planned.shares
        return [whole_step(step)]

    def confirm(self, step: LinkStep) -> None:
        """The target noted a step: plan the next one without asking for its position."""
        self._positions = positions_after(step)

    def fail(self, reason: str | None = None) -> None:
        """A step failed: ask for the position again, after a pause and a report if there is a reason."""
        self._positions = self._planned = None
        if reason is not None:
            self._report(reason)
            self._rest.begin()

    def _judge(self, planned_by: Callable[[], Planned]) -> LinkStep | None:
        try:
            planned = planned_by()
        except FloodmarkError:
            self._rest.begin()
            return None
        last, self._planned = self._planned, None
        if last is not None and _positions(planned.step) == _positions(last.step):
            # The target did not note the last step, and was told why.
            self._rest.begin()
            return None
        self._rest.forget()
        if not self.pace.takes(planned.step):
            return None
        self._planned, self._planned_at_ms = planned, monotonic_ms()
        return planned.step

    def _plan_or_report(self) -> Planned:
        try:
            return self._plan()
        except Closed:
            # Another link dropped the connection that both use.
            raise
        except FloodmarkError as error:
            self._report(str(error))
            raise

    def _plan(self) -> Planned:
        link = self._link
        source, target = self._sites.get(link.source), self._sites.get(link.target)
        is_due = self._held_at_ms is None or monotonic_ms() - self._held_at_ms >= HOLD_MS
        positions, self._positions = None if is_due else self._positions, None
        try:
            step = plan_step(
                source.host,
                target.host,
                link.namespaces,
                incarnation=link.incarnation,
                changes_max=self._changes_max,
                positions=positions,
            )
            if is_due:
                self._hold(step, source, target)
                bring_data_sets(source.host, target.host, step)
            planned = Planned(step, self._share(step, source))
        except Unreachable:
            self._sites.drop(link.source)
            self._sites.drop(link.target)
            raise
        self._positions = positions
        return planned

    def _adapt(self) -> None:
        """Choose the size of the next step by the duration of the last one."""
        if self._planned is None:
            return
        took_ms = max(1, monotonic_ms() - self._planned_at_ms)
        size = self._changes_max
        wanted = (self._planned.step.changes or size) * self.step_ms // took_ms
        # The duration of a small step says nothing about a larger one.
        smallest = size // GROWTH_MAX if self.leads and took_ms > self.step_ms else size
        size = max(smallest, min(wanted, size * GROWTH_MAX))
        self._changes_max = min(max(size, CHANGES_MIN), self._link.changes_max)

    def _report(self, reason: str) -> None:
        with suppress(FloodmarkError):
            report_stalled(self._sites.get(self._link.target), self._link, reason)

    def _hold(self, step: LinkStep, source: Site, target: Site) -> None:
        """Hold the changes that the target lacks, also while no link runs; report stalled namespaces."""

        def hold(namespace: NamespaceStep) -> None:
            source.host.retention.hold_safe_point(
                f"link/{target.id}-{namespace.source_id}",
                namespace.begin,
                self._link.lifetime,
                namespace.name,
            )

        at_once(hold, step.namespaces)
        for name, reason in step.stalled.items():
            target.host.replication.stall_link(self._link.source_id, [name], reason)
        self._held_at_ms = monotonic_ms()


def plan_all(planners: Sequence[Planner]) -> list[tuple[int, LinkStep]]:
    """The next steps of all links that have one by now, each with the place of its link.

    Waits for half a second at most, and only for plans that begin now: a silent site costs this once for each
    attempt.
    """
    wait([begun for planner in planners if (begun := planner.begin()) is not None], PLAN_SECONDS)
    steps = [(place, step) for place, planner in enumerate(planners) if (step := planner.take()) is not None]
    most = max((step.changes or 0 for _, step in steps), default=0)
    moving = sum(step.changes != 0 for _, step in steps)
    for place, step in steps:
        planners[place].leads = step.changes is None or 2 * step.changes >= most
        planners[place].step_ms = STEP_MS_ALONE if moving == 1 else STEP_MS
    return steps


def report_stalled(target: Site, link: LinkOptions, reason: str) -> None:
    """Report to the target why the link does not move; the target shows the reason."""
    target.host.replication.stall_link(link.source_id, list(link.namespaces), reason)


def _positions(step: LinkStep) -> list[tuple[str, int]]:
    return [(namespace.name, namespace.since) for namespace in step.namespaces]


def _is_due(step: LinkStep, beat_ms: int) -> bool:
    """Whether it is time to forward the heartbeats since the last step."""
    return any(
        physical_ms(namespace.until) - physical_ms(namespace.since) >= beat_ms
        for namespace in step.namespaces
    )
