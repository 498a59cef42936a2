"""The next step of each link, planned on the driver of a Spark query.

A link whose site is away, or which refuses, must not hold up the others: planning never waits.  A site that
did not answer is left alone for a while by all links, and so is a link whose last step came to nothing.

A step that is too small costs more to begin and to end than to take, and all links wait for one that is too
large: they share the micro-batch.  So the size of a step follows from how long the last one took.
"""

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Final, NamedTuple

import msgspec

from floodmark.clock import monotonic_ms
from floodmark.codec.ordered import NAMESPACE_BYTES, encode_namespace
from floodmark.feed import LIFETIME
from floodmark.model.errors import FloodmarkError, Unreachable
from floodmark.model.ranges import KeyRange, prefix_end
from floodmark.model.version import physical_ms
from floodmark.replication.planning import plan_step
from floodmark.replication.step import LinkStep, NamespaceStep
from floodmark.site.site import Site
from floodmark.spark.address import SiteAddress
from floodmark.spark.links_sites import Rest, Sites, at_once
from floodmark.spark.planning import plan_ranges
from floodmark.spark.reading import READERS

# A heartbeat comes each second, and is passed on also if nothing else is.
BEAT_MS: Final = 1_000
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


class Planner:
    """One link's side of the conversation with its two sites, on the driver."""

    def __init__(self, link: LinkOptions, sites: Sites) -> None:
        self._link = link
        self._sites = sites
        self._planned: LinkStep | None = None
        self._rest = Rest()
        self._changes_max = min(CHANGES_FIRST, link.changes_max)
        self._planned_at_ms = 0
        self._held_at_ms: int | None = None
        # Whether its step was among the largest of the last micro-batch: these say how long that takes.
        self.leads = True
        # How long that should have taken.
        self.step_ms = STEP_MS

    def plan(self) -> LinkStep | None:
        """The next step; None if there is nothing to do, or nothing to be done just now."""
        if not self._rest.is_over:
            return None
        try:
            step = self._plan()
        except FloodmarkError as error:
            self._rest.begin()
            self._tell_stalled(str(error))
            return None
        if self._planned is not None and _positions(step) == _positions(self._planned):
            # The last step came to nothing; why, the target was told.
            self._planned = None
            self._rest.begin()
            return None
        self._rest.forget()
        self._planned = None
        if step.changes == 0 and not _is_due(step):
            return None
        self._planned, self._planned_at_ms = step, monotonic_ms()
        return step

    def cut(self, step: LinkStep) -> list[list[Piece]]:
        """A step in tasks, along the partitions of the source.  A small one is not worth a second task."""
        moving = [
            (place, namespace)
            for place, namespace in enumerate(step.namespaces)
            if namespace.until > namespace.since
        ]
        if step.changes is not None and step.changes <= TASK_CHANGES:
            return [[Piece(place, KeyRange()) for place, _ in moving]]
        maps = self._sites.get(self._link.source).host.router.maps
        maps.refresh()
        partitions = [partition.range for partition in maps.map.partitions]
        return [
            [Piece(place, _user_keys(keys))]
            for place, namespace in moving
            for keys in plan_ranges(partitions, _all_keys(namespace.source_id))
        ]

    def _plan(self) -> LinkStep:
        link = self._link
        self._adapt()
        try:
            source, target = self._sites.get(link.source), self._sites.get(link.target)
            step = plan_step(
                source.host,
                target.host,
                link.namespaces,
                incarnation=link.incarnation,
                changes_max=self._changes_max,
            )
            self._hold(step, source, target)
            return step
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
        wanted = (self._planned.changes or size) * self.step_ms // took_ms
        # A step that held little says nothing about how much it could have held.
        smallest = size // GROWTH_MAX if self.leads and took_ms > self.step_ms else size
        size = max(smallest, min(wanted, size * GROWTH_MAX))
        self._changes_max = min(max(size, CHANGES_MIN), self._link.changes_max)

    def _tell_stalled(self, reason: str) -> None:
        with suppress(FloodmarkError):
            tell_stalled(self._sites.get(self._link.target), self._link, reason)

    def _hold(self, step: LinkStep, source: Site, target: Site) -> None:
        """Keep what the target lacks, also for the time that this link is not run."""
        now_ms = monotonic_ms()
        if self._held_at_ms is not None and now_ms - self._held_at_ms < HOLD_MS:
            return

        def hold(namespace: NamespaceStep) -> None:
            source.host.administration.hold_safe_point(
                f"{READERS}link-{target.id}-{namespace.source_id}",
                namespace.begin,
                self._link.lifetime,
                namespace.name,
            )

        at_once(hold, step.namespaces)
        self._held_at_ms = now_ms


def plan_all(planners: Sequence[Planner]) -> list[tuple[int, LinkStep]]:
    """The next steps of all links that have one, each with the place of its link."""
    steps = [(place, step) for place, step in enumerate(at_once(Planner.plan, planners)) if step is not None]
    most = max((step.changes or 0 for _, step in steps), default=0)
    moving = sum(step.changes != 0 for _, step in steps)
    for place, step in steps:
        planners[place].leads = step.changes is None or 2 * step.changes >= most
        planners[place].step_ms = STEP_MS_ALONE if moving == 1 else STEP_MS
    return steps


def _positions(step: LinkStep) -> list[tuple[str, int]]:
    return [(namespace.name, namespace.since) for namespace in step.namespaces]


def _is_due(step: LinkStep) -> bool:
    """Whether a heartbeat may have come since the target was told of the last one."""
    return any(
        physical_ms(namespace.until) - physical_ms(namespace.since) >= BEAT_MS
        for namespace in step.namespaces
    )


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
    target.host.administration.stall_link(link.source_id, list(link.namespaces), reason)
