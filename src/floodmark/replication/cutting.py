"""The source's part of a plan: the end of the next step of a link.

All namespaces that keep up end at one version, so that changes of one commit arrive in one step.  A namespace
far behind follows at its own pace.

A restored site's log has old stamps at new versions.  These are copied in one step, however large it is: the
position of a target with only a part of them would be above stamps that it lacks.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from sys import maxsize
from typing import Final

from floodmark.feed.reading.cut import ChangesCut
from floodmark.model.errors import FloodmarkError, NamespaceNotFound, Rejoining, VersionCollected
from floodmark.model.version import COUNTER_BITS, Version, moment_of
from floodmark.replication.step import NamespaceCut

# Six hours: a step carries all heartbeats of its span, one a second.
SPAN: Final = (6 * 60 * 60 * 1000) << COUNTER_BITS


@dataclass(frozen=True)
class LinkSource:
    """Functions that return facts about the source's namespaces, by name."""

    site: str
    find_id: Callable[[str], int]
    # The stamp of the data set that was published last, if one was.
    data_set: Callable[[str], bytes]
    # The version above which a target at a position finds all changes that it lacks.
    shared_since: Callable[[str, Version], Version]
    # The end of the data that was loaded after a position, if the site itself wrote nothing meanwhile; or 0.
    loaded_version: Callable[[str, Version], Version]
    # The end of the changes that a restored site has written to its log again.
    returned_version: Callable[[], Version]
    # The end of a step over the site's own changes; takes since, the maximum number of changes, and until.
    cut_own: Callable[[str, Version, int | None, Version], ChangesCut]


def cut_link(
    source: LinkSource, positions: Mapping[str, Version], changes_max: int | None
) -> list[NamespaceCut]:
    """The source's part of a plan: where the next step from some positions begins and ends.

    The namespaces that are furthest on choose the common end.  If there are atomic batches, no namespace goes
    beyond the end of another: the others wait for one that is behind, so that a batch comes whole.  Raises
    the first problem if no namespace has a step.
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
        # Each cut may only lower the end.
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
    ends = {name: common if start[name] == furthest else cut.version for name, cut in cuts.items()}
    if any(cut.batches for cut in cuts.values()):
        common = max(furthest, min(ends.values()))
        ends = {name: min(end, common) for name, end in ends.items()}
    steps = [
        NamespaceCut(
            name=name,
            id=source.find_id(name),
            start=start[name],
            until=ends[name],
            loaded=source.loaded_version(name, positions[name]) if start[name] > positions[name] else 0,
            changes=cut.changes,
            batches=cut.batches,
            data_set=source.data_set(name),
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
    return ChangesCut(returned, cut.changes if cut.version == returned else None, cut.resolved, cut.batches)


def _too_late(site: str, name: str, start: Version) -> VersionCollected:
    return VersionCollected(
        f"{site!r} no longer has all changes of {name!r} since {moment_of(start).isoformat()}, and this site "
        "lacks them: it was away for too long (docs/operations/away.md), or it is new and begins with a "
        f"backup (docs/operations/join.md), or {name!r} is shared anew, and is to be written again at "
        f"{site!r} with `floodmark namespace rewrite`",
        source=site,
        namespace=name,
    )
