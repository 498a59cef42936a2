"""Plans the next step of a link, and takes it.

The target stores the position of the link, and the source knows the end of its commits.  So any process can
plan the next step, whatever became of the last one: a step that was applied in part is planned again from the
same position, and applying a change twice has no effect.  Planning calls each site once, because sites are
often far apart.  The step leaves out a namespace that is missing, that the target refuses, or whose changes
the source has collected; the others continue.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from floodmark.host.ports import Host
from floodmark.links.applying import Applier
from floodmark.links.reading import read_step
from floodmark.model.errors import Fenced, InvalidArgument, NamespaceNotFound
from floodmark.replication.applied import Applied
from floodmark.replication.step import LinkStep, NamespaceCut, NamespacePosition, NamespaceStep, why_too_old

# The changes that are repeated after a failure; a step is never in memory as a whole.
CHANGES_MAX: Final = 100_000


def plan_step(
    source: Host,
    target: Host,
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
                loaded=ends[position.name].loaded,
                until=ends[position.name].until,
                data_set=_missing_data_set(ends[position.name], position),
            )
            for position in positions
            if position.name in ends
        ),
        changes=_count(ends.values()),
        batches=any(cut.batches for cut in ends.values()),
        stalled=stalled,
    )


def positions_after(step: LinkStep) -> list[NamespacePosition] | None:
    """The positions of the target after it has noted a step; None if only the target can tell them."""
    if step.stalled or any(each.data_set for each in step.namespaces):
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


def _missing_data_set(cut: NamespaceCut, position: NamespacePosition) -> bytes:
    """The stamp of a source's data set that is newer than the target's."""
    return b"" if position.data_set is None or cut.data_set <= position.data_set else cut.data_set


def run_step(source: Host, target: Host, step: LinkStep) -> Applied:
    """Take a step: read it, apply it, and have the target note it."""
    with Applier(target, step) as applier:
        for rows in read_step(source, step):
            applier.add(rows)
        applied = applier.finish()
    target.replication.advance_link(step, applied)
    return applied


def _missing(name: str) -> str:
    return f"namespace {name!r} is not there; put the topology in force at both sites"


def _count(cuts: Iterable[NamespaceCut]) -> int | None:
    counts = [cut.changes for cut in cuts]
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None
