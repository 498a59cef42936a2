"""A site goes for good.  What the others have got of it is exchanged among them first.

First the topology calls it removed, which shuts its links out: from now on nothing more of it comes from
anywhere but the others.  Then each of them gets what any other has.  Then the topology says where the site
ended, and every link from it goes up to there: garbage collection waits for it no longer.  Its entry stays,
and so does its id, which stands in the stamps of what it wrote.

Whoever is interrupted begins again, and comes to the same end.  To do it once more hands what the site wrote
over to those that have come since.
"""

from collections.abc import Callable, Mapping
from itertools import permutations
from typing import Protocol

import msgspec

from floodmark.model.errors import InvalidConfiguration
from floodmark.model.partition import LinkGuard
from floodmark.model.version import Version
from floodmark.replication.applied import Applied
from floodmark.replication.exchange import HolderSite, copy_origin
from floodmark.replication.step import LinkStep, NamespaceStep
from floodmark.replication.topology import MemberSite, SiteState, Topology


class SurvivorMembership(Protocol):
    """The part of a remaining site in the topology."""

    def topology(self) -> Topology | None: ...

    def set_topology(self, topology: Topology) -> object: ...


class SurvivorLinks(Protocol):
    """The links that end at a remaining site."""

    def watermark(self, namespace: str, at: Version | None) -> Mapping[int, Version]: ...

    def advance_link(self, step: LinkStep, applied: Applied) -> object: ...


class SurvivorSite(HolderSite, Protocol):
    """A site that stays."""

    @property
    def membership(self) -> SurvivorMembership: ...

    @property
    def replication(self) -> SurvivorLinks: ...


class Removed(msgspec.Struct, frozen=True, kw_only=True):
    """A site that was removed, where it ended, and how many of its records went from one site to another."""

    site: str
    final: Version
    epoch: int
    records_copied: int


def remove_site(
    topology: Topology,
    name: str,
    survivors: Mapping[str, SurvivorSite],
    publish: Callable[[Topology], None],
) -> Removed:
    """Remove a site from a topology; `survivors` are all others that are active, by name.

    `publish` is told each topology that is in force at all of them.
    """
    topology = _newest(topology, survivors)
    removed = topology.sites.get(name)
    if removed is None:
        raise InvalidConfiguration(
            f"there is no site {name!r} in the topology; there are: {', '.join(topology.sites)}", site=name
        )
    if removed.is_active:
        topology = _changed(topology, name, msgspec.structs.replace(removed, state=SiteState.REMOVED))
    _put_in_force(topology, survivors, publish)
    copied, last = _exchange(topology, name, survivors)
    if removed.final is None:
        ended = msgspec.structs.replace(topology.sites[name], final=last)
        topology = _changed(topology, name, ended)
        _put_in_force(topology, survivors, publish)
    final = topology.sites[name].final
    assert final is not None
    _end_links(topology, name, survivors, final)
    return Removed(site=name, final=final, epoch=topology.epoch, records_copied=copied)


def _newest(topology: Topology, survivors: Mapping[str, SurvivorSite]) -> Topology:
    """A topology, or its successor that is in force somewhere: whoever put it there was interrupted."""
    known = [site.membership.topology() for site in survivors.values()]
    return max([topology, *(each for each in known if each is not None)], key=lambda each: each.epoch)


def _exchange(topology: Topology, name: str, survivors: Mapping[str, SurvivorSite]) -> tuple[int, Version]:
    """Let every site have what any has of one that is gone; how many records, and the last version."""
    origin = topology.sites[name].id
    records, final = 0, 0
    for namespace in topology.namespaces:
        if name not in topology.members(namespace):
            continue
        holders = [survivors[each] for each in topology.active_members(namespace)]
        positions = {
            site.identity.site_id: site.replication.watermark(namespace, None).get(origin, 0)
            for site in holders
        }
        final = max(final, *positions.values())
        for source, target in permutations(holders, 2):
            position = positions[target.identity.site_id]
            guard = LinkGuard(
                source=origin,
                positions={target.namespaces.find_namespace(namespace).id: position},
                incarnation=topology.sites[name].incarnation + 1,
            )
            copied = copy_origin(source, target, namespace, position, guard)
            records, final = records + copied.records, max(final, copied.newest)
    return records, final


def _end_links(topology: Topology, name: str, survivors: Mapping[str, SurvivorSite], final: Version) -> None:
    """Let every site know that it has all that there is of one that is gone: a last step, without changes."""
    removed = topology.sites[name]
    for site in survivors.values():
        shared = [each for each in topology.shared_by(site.identity.site) if name in topology.members(each)]
        parts = [
            NamespaceStep(
                name=namespace,
                source_id=0,
                target_id=site.namespaces.find_namespace(namespace).id,
                since=site.replication.watermark(namespace, None).get(removed.id, 0),
                until=final,
            )
            for namespace in shared
        ]
        step = LinkStep(
            source=name,
            source_id=removed.id,
            incarnation=removed.incarnation,
            namespaces=tuple(part for part in parts if part.since < part.until),
        )
        site.replication.advance_link(step, Applied())


def _changed(topology: Topology, name: str, site: MemberSite) -> Topology:
    return msgspec.structs.replace(topology, epoch=topology.epoch + 1, sites={**topology.sites, name: site})


def _put_in_force(
    topology: Topology, survivors: Mapping[str, SurvivorSite], publish: Callable[[Topology], None]
) -> None:
    for site in survivors.values():
        site.membership.set_topology(topology)
    publish(topology)
