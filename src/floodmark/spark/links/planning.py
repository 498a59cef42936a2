"""The next step of each link, planned on the driver of a Spark query.

A link whose site is away, or which refuses, must not hold up the others: each is planned in a thread of its
own, and at most half a second after they have begun, the steps that are ready are taken.  One that is late
goes with the next micro-batch.  It is then no older than the one before that took, and if somebody else has
moved the link meanwhile the target refuses it.  A site that did not answer is left alone for a while by all
links, and so is a link whose last step came to nothing.

A step that is too small costs more to begin and to end than to take, and all links wait for one that is too
large: they share the micro-batch.  So the size of a step follows from how long the last one took.
"""

from collections.abc import Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from datetime import timedelta
from typing import Final, NamedTuple

import msgspec

from floodmark.clock import monotonic_ms
from floodmark.codec.ordered import NAMESPACE_BYTES, encode_namespace
from floodmark.feed import LIFETIME
from floodmark.model.errors import Closed, FloodmarkError, Unreachable
from floodmark.model.ranges import KeyRange, prefix_end
from floodmark.model.version import physical_ms
from floodmark.replication.planning import plan_step
from floodmark.replication.step import LinkStep, NamespaceStep
from floodmark.site.site import Site
from floodmark.spark.links.sites import Rest, Sites, at_once, begin
from floodmark.spark.source.address import SiteAddress
from floodmark.spark.source.planning import plan_ranges
from floodmark.spark.source.reading import READERS

# A heartbeat comes each second, and is passed on also if nothing else is.
BEAT_MS: Final = 1_000
# Behind the last changes a few heartbeats are passed on at once, and prove that they arrived.  Where no more
# come, fewer do: each is a micro-batch.  Targets miss a link that is silent for ten seconds.
QUIET_STEPS: Final = 3
QUIET_BEAT_MS: Final = 4_000
# Sites answer twice within this also from the other side of the world.  Who takes longer is not waited for.
PLAN_SECONDS: Final = 0.5
# Up to so many changes one task is quicker than several.
TASK_CHANGES: Final = 10_000
# How long a step should take: while others wait for it, and while nobody does.
STEP_MS: Final = 2_000
STEP_MS_ALONE: Final = 6_000
# By how much more or less than the last one the next may hold.
GROWTH_MAX: Final = 4
CHANGES_FIRST: Final = 200_000
CHANGES_MIN: Final = 500
# What is done again after a failure.
CHANGES_MAX: Final = 1_000_000
# A safe point moves at most this often.
HOLD_MS: Final = 10_000


class LinkOptions(msgspec.Struct, frozen=True, kw_only=True):
    """A link, in a form that may stand in a plan: no secret is in it."""

    source_id: int
    source: SiteAddress
    target: SiteAddress
    namespaces: tuple[str, ...]
    incarnation: int = 1
    changes_max: int = CHANGES_MAX
    lifetime: timedelta = LIFETIME


class Piece(NamedTuple):
    """A range of users' keys of one namespace of a step, which is named by its place there."""

    place: int
    keys: KeyRange


class Planned(NamedTuple):
    """A step, and what each of its tasks reads."""

    step: LinkStep
    shares: list[list[Piece]]


class Pace:
    """Decides which steps are taken: all that hold changes, and heartbeats less often where none come."""

    def __init__(self) -> None:
        self._steps_without_changes = 0

    @property
    def is_quiet(self) -> bool:
        """Whether no changes have come for a while."""
        return self._steps_without_changes >= QUIET_STEPS

    def takes(self, step: LinkStep) -> bool:
        """Whether to take a step now, or to plan it again later, when it goes further."""
        if step.changes != 0:
            self._steps_without_changes = 0
            return True
        is_due = _is_due(step, QUIET_BEAT_MS if self.is_quiet else BEAT_MS)
        self._steps_without_changes += is_due
        return is_due


class Planner:
    """One link's side of the conversation with its two sites, on the driver."""

    def __init__(self, link: LinkOptions, sites: Sites) -> None:
        self._link = link
        self._sites = sites
        # What is being planned in a thread of its own: one step at a time.
        self._planning: Future[Planned] | None = None
        self._planned: Planned | None = None
        self._rest = Rest()
        self._changes_max = min(CHANGES_FIRST, link.changes_max)
        self._planned_at_ms = 0
        self._held_at_ms: int | None = None
        # Whether its step was among the largest of the last micro-batch: these say how long that takes.
        self.leads = True
        self.pace = Pace()
        # How long that should have taken.
        self.step_ms = STEP_MS

    def begin(self) -> "Future[Planned] | None":
        """Begin to plan; None if there is nothing new to wait for: it rests, or is still being planned."""
        if self._planning is not None or not self._rest.is_over:
            return None
        self._adapt()
        self._planning = begin(self._plan_or_tell)
        return self._planning

    def take(self) -> LinkStep | None:
        """The next step; None if there is nothing to do, or nothing to be done just now."""
        if self._planning is None or not self._planning.done():
            return None
        planning, self._planning = self._planning, None
        try:
            planned = planning.result()
        except FloodmarkError:
            self._rest.begin()
            return None
        last, self._planned = self._planned, None
        if last is not None and _positions(planned.step) == _positions(last.step):
            # The last step came to nothing; why, the target was told.
            self._rest.begin()
            return None
        self._rest.forget()
        if not self.pace.takes(planned.step):
            return None
        self._planned, self._planned_at_ms = planned, monotonic_ms()
        return planned.step

    def cut(self, step: LinkStep) -> list[list[Piece]]:
        """The step that was taken last in tasks, without asking anybody; any other is one task."""
        if self._planned is not None and self._planned.step == step:
            return self._planned.shares
        return [_whole(step)]

    def _plan_or_tell(self) -> Planned:
        try:
            return self._plan()
        except Closed:
            # Another link has dropped a connection that both share.  That is no trouble of this one.
            raise
        except FloodmarkError as error:
            self._tell_stalled(str(error))
            raise

    def _plan(self) -> Planned:
        link = self._link
        source, target = self._sites.get(link.source), self._sites.get(link.target)
        try:
            step = plan_step(
                source.host,
                target.host,
                link.namespaces,
                incarnation=link.incarnation,
                changes_max=self._changes_max,
            )
            self._hold(step, source, target)
            return Planned(step, _shares(step, source))
        except Unreachable:
            self._sites.drop(link.source)
            self._sites.drop(link.target)
            raise

    def _adapt(self) -> None:
        """Choose the size of the next step by the time that the last one took."""
        if self._planned is None:
            return
        took_ms = max(1, monotonic_ms() - self._planned_at_ms)
        size = self._changes_max
        wanted = (self._planned.step.changes or size) * self.step_ms // took_ms
        # A step that held little says nothing about how much it could have held.
        smallest = size // GROWTH_MAX if self.leads and took_ms > self.step_ms else size
        size = max(smallest, min(wanted, size * GROWTH_MAX))
        self._changes_max = min(max(size, CHANGES_MIN), self._link.changes_max)

    def _tell_stalled(self, reason: str) -> None:
        with suppress(FloodmarkError):
            tell_stalled(self._sites.get(self._link.target), self._link, reason)

    def _hold(self, step: LinkStep, source: Site, target: Site) -> None:
        """Keep what the target lacks, also while this link is not run, and say what is left out."""
        now_ms = monotonic_ms()
        if self._held_at_ms is not None and now_ms - self._held_at_ms < HOLD_MS:
            return

        def hold(namespace: NamespaceStep) -> None:
            source.host.retention.hold_safe_point(
                f"{READERS}link-{target.id}-{namespace.source_id}",
                namespace.begin,
                self._link.lifetime,
                namespace.name,
            )

        at_once(hold, step.namespaces)
        for name, reason in step.stalled.items():
            target.host.replication.stall_link(self._link.source_id, [name], reason)
        self._held_at_ms = now_ms


def plan_all(planners: Sequence[Planner]) -> list[tuple[int, LinkStep]]:
    """The next steps of all links that have one by now, each with the place of its link.

    Waits for half a second at most, and only for plans that begin now: a silent site costs that once for each
    time that it is tried.
    """
    wait([begun for planner in planners if (begun := planner.begin()) is not None], PLAN_SECONDS)
    steps = [(place, step) for place, planner in enumerate(planners) if (step := planner.take()) is not None]
    most = max((step.changes or 0 for _, step in steps), default=0)
    moving = sum(step.changes != 0 for _, step in steps)
    for place, step in steps:
        planners[place].leads = step.changes is None or 2 * step.changes >= most
        planners[place].step_ms = STEP_MS_ALONE if moving == 1 else STEP_MS
    return steps


def _positions(step: LinkStep) -> list[tuple[str, int]]:
    return [(namespace.name, namespace.since) for namespace in step.namespaces]


def _is_due(step: LinkStep, beat_ms: int) -> bool:
    """Whether it is time to pass heartbeats on that came since the target was told of the last one."""
    return any(
        physical_ms(namespace.until) - physical_ms(namespace.since) >= beat_ms
        for namespace in step.namespaces
    )


def _whole(step: LinkStep) -> list[Piece]:
    return [Piece(place, KeyRange()) for place, _ in _moving(step)]


def _moving(step: LinkStep) -> list[tuple[int, NamespaceStep]]:
    places = enumerate(step.namespaces)
    return [(place, namespace) for place, namespace in places if namespace.until > namespace.since]


def _shares(step: LinkStep, source: Site) -> list[list[Piece]]:
    """A step in tasks, along the partitions of the source.  A small one is not worth a second task."""
    if step.changes is not None and step.changes <= TASK_CHANGES:
        return [_whole(step)]
    maps = source.host.router.maps
    maps.refresh()
    partitions = [partition.range for partition in maps.map.partitions]
    return [
        [Piece(place, _user_keys(keys))]
        for place, namespace in _moving(step)
        for keys in plan_ranges(partitions, _all_keys(namespace.source_id))
    ]


def _all_keys(namespace: int) -> KeyRange:
    prefix = encode_namespace(namespace)
    return KeyRange(prefix, prefix_end(prefix))


def _user_keys(qualified: KeyRange) -> KeyRange:
    prefix, end = qualified.start[:NAMESPACE_BYTES], qualified.end
    inside = end is not None and end.startswith(prefix)
    return KeyRange(
        qualified.start[NAMESPACE_BYTES:], end[NAMESPACE_BYTES:] if end is not None and inside else None
    )


def tell_stalled(target: Site, link: LinkOptions, reason: str) -> None:
    """Let the target show why nothing comes."""
    target.host.replication.stall_link(link.source_id, list(link.namespaces), reason)
