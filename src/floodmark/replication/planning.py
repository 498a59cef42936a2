"""Which step a link takes next.

A step is planned from what the two sites know and nothing else: the target says how far it is, the source
how far its commits reach.  So it does not matter who plans the next one, nor what became of the last: a step
that was applied in part is planned again from the same position, and applying twice changes nothing.

All namespaces that keep up go to one version, so that what was written together arrives in one step.  One
that is far behind, because it has just joined, comes after at its own pace and does not hold the others up.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from msgspec import structs

from floodmark.feed.cut import ChangesCut
from floodmark.model.errors import InvalidArgument, VersionCollected
from floodmark.model.version import COUNTER_BITS, Version, moment_of
from floodmark.replication.ports import SourceSite, TargetSite
from floodmark.replication.step import LinkStep, NamespaceStep

# A step is held in memory nowhere; it bounds what is done again after a failure.
CHANGES_MAX: Final = 100_000
# Six hours: a step takes all heartbeats in it along, of which there is one a second.
SPAN: Final = (6 * 60 * 60 * 1000) << COUNTER_BITS


def plan_step(
    source: SourceSite,
    target: TargetSite,
    names: Sequence[str],
    *,
    incarnation: int = 1,
    changes_max: int | None = CHANGES_MAX,
) -> LinkStep:
    """The next step of the link between two sites, with at most so many changes of each namespace.

    A commit is never cut: one with more changes makes a larger step.  Raises VersionCollected if the source
    no longer has what the target lacks.
    """
    if len(set(names)) < len(names):
        raise InvalidArgument("name each namespace of a link once")
    identity = source.identity
    positions = {
        link.namespace: link.through
        for link in target.administration.links()
        if link.source_id == identity.site_id
    }
    asked = source.administration
    since = {name: positions.get(name, 0) for name in names}
    start = {name: asked.shared_since(name, since[name]) for name in names}
    cuts = _cut(source, start, changes_max)
    return LinkStep(
        source=identity.site,
        source_id=identity.site_id,
        incarnation=incarnation,
        namespaces=tuple(
            NamespaceStep(
                name=name,
                source_id=asked.find_namespace(name).id,
                target_id=target.administration.find_namespace(name).id,
                since=since[name],
                start=start[name],
                until=cuts[name].version,
            )
            for name in names
        ),
        changes=_count(cuts.values()),
    )


def _cut(source: SourceSite, start: dict[str, Version], changes_max: int | None) -> dict[str, ChangesCut]:
    """Where each namespace ends.  Those that are furthest on choose the common end."""
    ask = source.administration.cut_changes
    furthest = max(start.values(), default=0)
    cuts: dict[str, ChangesCut] = {}
    common = furthest + SPAN
    for name in sorted(start, key=lambda name: start[name] < furthest):
        # Each call may only bring the end closer.
        until = min(common, start[name] + SPAN)
        try:
            cuts[name] = ask(name, start[name], changes_max, until, False, own=True)
        except VersionCollected as error:
            raise _too_late(source, name, start[name]) from error
        if start[name] == furthest:
            common = cuts[name].version
    return {
        name: structs.replace(cut, version=common) if start[name] == furthest else cut
        for name, cut in cuts.items()
    }


def _too_late(source: SourceSite, name: str, start: Version) -> VersionCollected:
    site = source.identity.site
    return VersionCollected(
        f"{site!r} no longer has all changes of {name!r} since {moment_of(start).isoformat()}, and this site "
        "lacks them: it was away for too long (docs/operations/away.md), or it is new and begins with a "
        "backup (docs/operations/join.md)",
        source=site,
        namespace=name,
    )


def _count(cuts: Iterable[ChangesCut]) -> int | None:
    counts = [cut.changes for cut in cuts]
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None
