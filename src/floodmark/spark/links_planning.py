"""The next step of each link, planned on the driver of a Spark query.

A link whose site is away, or which refuses, must not hold up the others: planning never waits.  A site that
did not answer is left alone for a while by all links, and so is a link whose last step came to nothing.
"""

from contextlib import suppress
from datetime import timedelta
from typing import Final, NamedTuple

import msgspec

from floodmark.clock import monotonic_ms
from floodmark.codec.ordered import NAMESPACE_BYTES, encode_namespace
from floodmark.feed import LIFETIME
from floodmark.feed.runner_backoff import Backoff
from floodmark.model.errors import FloodmarkError, Unreachable
from floodmark.model.ranges import KeyRange, prefix_end
from floodmark.model.version import physical_ms
from floodmark.replication.planning import CHANGES_MAX, plan_step
from floodmark.replication.step import LinkStep
from floodmark.site.site import Site
from floodmark.spark.address import SiteAddress
from floodmark.spark.planning import plan_ranges
from floodmark.spark.reading import READERS

# A heartbeat comes each second, and is passed on also if nothing else is.
BEAT_MS: Final = 1_000
# Up to so many changes one task is quicker than several.
TASK_CHANGES: Final = 10_000
# How long a step should take, at least and at most: its size is halved or doubled to get there.
STEP_MS_MIN: Final = 1_000
STEP_MS_MAX: Final = 2_500
CHANGES_FIRST: Final = 20_000
CHANGES_MIN: Final = 500
# A safe point moves at most this often.
HOLD_MS: Final = 10_000
# How long a link rests that came to nothing, at first and at most.
BACKOFF_MS: Final = 250
BACKOFF_MS_MAX: Final = 15_000


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


class _Rest:
    """How long somebody rests who has come to nothing, longer each time."""

    def __init__(self) -> None:
        self._backoff = Backoff(BACKOFF_MS, longest_ms=BACKOFF_MS_MAX)
        self._until_ms: int | None = None

    @property
    def is_over(self) -> bool:
        return self._until_ms is None or monotonic_ms() >= self._until_ms

    def begin(self) -> None:
        self._until_ms = monotonic_ms() + (self._backoff.next_ms() or BACKOFF_MS_MAX)

    def forget(self) -> None:
        self._backoff.reset()
        self._until_ms = None


class Sites:
    """The sites that the driver asks.  One that did not answer is left alone for a while, by all links."""

    def __init__(self) -> None:
        self._open: dict[SiteAddress, Site] = {}
        self._away: dict[SiteAddress, tuple[_Rest, Unreachable]] = {}

    def get(self, address: SiteAddress) -> Site:
        if address in self._open:
            return self._open[address]
        rest, error = self._away.get(address, (_Rest(), None))
        if error is not None and not rest.is_over:
            raise error.again()
        try:
            self._open[address] = address.connect()
        except Unreachable as away:
            rest.begin()
            self._away[address] = rest, away
            raise
        self._away.pop(address, None)
        return self._open[address]

    def drop(self, address: SiteAddress) -> None:
        """Connect anew the next time."""
        site = self._open.pop(address, None)
        if site is not None:
            with suppress(FloodmarkError):
                site.close()

    def close(self) -> None:
        for address in list(self._open):
            self.drop(address)


class Planner:
    """One link's side of the conversation with its two sites, on the driver."""

    def __init__(self, link: LinkOptions, sites: Sites) -> None:
        self._link = link
        self._sites = sites
        self._planned: LinkStep | None = None
        self._rest = _Rest()
        self._changes_max = min(CHANGES_FIRST, link.changes_max)
        self._planned_at_ms = 0
        self._held_at_ms: int | None = None

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
        self._adapt()
        if step.changes == 0 and not _is_due(step):
            return None
        self._planned, self._planned_at_ms = step, monotonic_ms()
        return step

    def _adapt(self) -> None:
        """Choose the size of the next step by the time that the last one took."""
        if self._planned is None:
            return
        took_ms = monotonic_ms() - self._planned_at_ms
        if took_ms > STEP_MS_MAX:
            self._changes_max = max(CHANGES_MIN, self._changes_max // 2)
        elif took_ms < STEP_MS_MIN:
            self._changes_max = min(self._link.changes_max, self._changes_max * 2)
        self._planned = None

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
            return step
        except Unreachable:
            self._sites.drop(link.source)
            self._sites.drop(link.target)
            raise

    def _tell_stalled(self, reason: str) -> None:
        with suppress(FloodmarkError):
            tell_stalled(self._sites.get(self._link.target), self._link, reason)

    def _hold(self, step: LinkStep, source: Site, target: Site) -> None:
        """Keep what the target lacks, also for the time that this link is not run."""
        now_ms = monotonic_ms()
        if self._held_at_ms is not None and now_ms - self._held_at_ms < HOLD_MS:
            return
        for namespace in step.namespaces:
            name = f"{READERS}link-{target.id}-{namespace.source_id}"
            source.host.administration.hold_safe_point(
                name, namespace.begin, self._link.lifetime, namespace.name
            )
        self._held_at_ms = now_ms


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
