"""Plans the next step of a link.

A plan follows from the knowledge of the two sites: the target stores the position of the link, and the source
knows the end of its commits.  So any process may plan the next step, whatever became of the last one: a step
that was applied in part is planned again from the same position, and applying a change twice has no effect.
Each site is asked once, because sites are often far apart.

All namespaces that keep up end at one version, so that changes of one commit arrive in one step.  A namespace
far behind follows at its own pace.  The step leaves out a namespace that is missing, that the target refuses,
or whose changes the source has collected; the others go on.

A restored site's log has old stamps at new versions.  These go in one step, however large: a target with half
of them would stand above stamps that it lacks, and believe to have them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from sys import maxsize
from typing import Final

from floodmark.feed.reading.cut import ChangesCut
from floodmark.model.errors import (
    Fenced,
    FloodmarkError,
    InvalidArgument,
    NamespaceNotFound,
    Rejoining,
    VersionCollected,
)
from floodmark.model.version import COUNTER_BITS, Version, moment_of
from floodmark.replication.admission import why_too_old
from floodmark.replication.ports import SourceSite, TargetSite
from floodmark.replication.step import LinkStep, NamespaceCut, NamespacePosition, NamespaceStep

# The changes that are repeated after a failure; a step is never in memory as a whole.
CHANGES_MAX: Final = 100_000
# Six hours: a step carries all heartbeats of its span, one a second.
SPAN: Final = (6 * 60 * 60 * 1000) << COUNTER_BITS


def plan_step(
    source: SourceSite,
    target: TargetSite,
    names: Sequence[str],
    *,
    incarnation: int = 1,
    changes_max: int | None = CHANGES_MAX,
    positions: Sequence[NamespacePosition] | None = None,
) -> LinkStep:
    """The next step of the link between two sites, with at most `changes_max` changes of each namespace.

    A larger commit makes a larger step, because commits stay whole.  Raises NamespaceNotFound, Fenced, or
    VersionCollected (the source has collected changes that the target lacks) if no namespace has a step.

    `positions` are the target's, if the caller knows them; the target is not asked then.  Outdated ones do no
    harm: the target refuses the step as stale.
    """
    if len(set(names)) < len(names):
        raise InvalidArgument("name each namespace of a link once")
    identity = source.identity
    if positions is None:
        positions = target.replication.link_positions(identity.site_id, list(names))
    stalled = _why_stalled(names, positions)
    since = {each.name: each.through for each in positions if each.name not in stalled}
    if names and not positions:
        raise NamespaceNotFound(stalled[names[0]], namespace=names[0])
    cuts = source.replication.cut_link(since, changes_max)
    horizons = {position.name: position.horizon for position in positions}
    ends = {}
    for cut in cuts:
        begin = max(since[cut.name], cut.start)
        if cut.problem is not None:
            stalled[cut.name] = cut.problem
        elif begin < horizons[cut.name]:
            stalled[cut.name] = why_too_old(identity.site, cut.name, begin, horizons[cut.name])
        else:
            ends[cut.name] = cut
    if stalled and not ends:
        raise Fenced(f"nothing is taken in from {identity.site!r}: {next(iter(stalled.values()))}")
    return LinkStep(
        source=identity.site,
        source_id=identity.site_id,
        incarnation=incarnation,
        namespaces=tuple(
            NamespaceStep(
                name=position.name,
                source_id=ends[position.name].id,
                target_id=position.id,
                since=position.through,
                start=ends[position.name].start,
                until=ends[position.name].until,
            )
            for position in positions
            if position.name in ends
        ),
        changes=_count(ends.values()),
        stalled=stalled,
    )


def positions_after(step: LinkStep) -> list[NamespacePosition] | None:
    """The positions of the target after it has noted a step; None if it has to be asked."""
    if step.stalled:
        return None
    return [
        NamespacePosition(name=each.name, id=each.target_id, through=max(each.since, each.until))
        for each in step.namespaces
    ]


def _why_stalled(names: Sequence[str], positions: Sequence[NamespacePosition]) -> dict[str, str]:
    """The namespaces that the target lacks or refuses, each with the reason."""
    there = {position.name for position in positions}
    missing = {name: _missing(name) for name in names if name not in there}
    refused = {position.name: position.refused for position in positions if position.refused is not None}
    return {**missing, **refused}


@dataclass(frozen=True)
class LinkSource:
    """What a source knows of its namespaces, by their names."""

    site: str
    find_id: Callable[[str], int]
    # The version after which a target at a position finds all that it lacks.
    shared_since: Callable[[str, Version], Version]
    # The end of what the site tells again since it was restored.
    returned_version: Callable[[], Version]
    # Where a step over the site's own changes ends: since, at most so many changes, until.
    cut_own: Callable[[str, Version, int | None, Version], ChangesCut]


def cut_link(
    source: LinkSource, positions: Mapping[str, Version], changes_max: int | None
) -> list[NamespaceCut]:
    """The source's part of a plan: where the next step from some positions begins and ends.

    The namespaces that are furthest on choose the common end.  Raises the first problem if no namespace has
    a step.
    """
    start: dict[str, Version] = {}
    cuts: dict[str, ChangesCut] = {}
    problems: dict[str, FloodmarkError] = {}
    for name, position in positions.items():
        try:
            start[name] = source.shared_since(name, position)
        except (NamespaceNotFound, VersionCollected) as problem:
            problems[name] = problem
    furthest = max(start.values(), default=0)
    common = furthest + SPAN
    returned = source.returned_version()
    for name in sorted(start, key=lambda name: start[name] < furthest):
        # Each may only bring the end closer.
        until = min(common, start[name] + SPAN)
        try:
            cut = source.cut_own(name, start[name], changes_max, until)
            if cut.version < returned:
                cut = _cut_return(source, name, start[name], returned)
            cuts[name] = cut
        except VersionCollected:
            problems[name] = _too_late(source.site, name, start[name])
            continue
        if start[name] == furthest:
            common = cuts[name].version
    if problems and not cuts:
        raise next(iter(problems.values()))
    steps = [
        NamespaceCut(
            name=name,
            id=source.find_id(name),
            start=start[name],
            until=common if start[name] == furthest else cut.version,
            changes=cut.changes,
        )
        for name, cut in cuts.items()
    ]
    return [*steps, *(NamespaceCut(name=name, problem=str(problem)) for name, problem in problems.items())]


def _cut_return(source: LinkSource, name: str, start: Version, returned: Version) -> ChangesCut:
    """A step to the end of the changes that a restored site writes to its log again."""
    cut = source.cut_own(name, start, maxsize, returned)
    if cut.resolved < returned:
        raise Rejoining(f"site {source.site!r} was restored a moment ago; ask again", site=source.site)
    # Where the log was trimmed, the cut ends earlier, and its count is not known.
    return ChangesCut(returned, cut.changes if cut.version == returned else None, cut.resolved)


def _too_late(site: str, name: str, start: Version) -> VersionCollected:
    return VersionCollected(
        f"{site!r} no longer has all changes of {name!r} since {moment_of(start).isoformat()}, and this site "
        "lacks them: it was away for too long (docs/operations/away.md), or it is new and begins with a "
        f"backup (docs/operations/join.md), or {name!r} is shared anew, and is to be written again at "
        f"{site!r} with `floodmark namespace rewrite`",
        source=site,
        namespace=name,
    )


def _missing(name: str) -> str:
    return f"namespace {name!r} is not there; put the topology in force at both sites"


def _count(cuts: Iterable[NamespaceCut]) -> int | None:
    counts = [cut.changes for cut in cuts]
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None
