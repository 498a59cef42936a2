"""Removes a site for good, after the other sites have exchanged their parts of its writes.

First the topology marks it as removed, which fences its links: its changes now come from the other sites
only.  Then each of these gets all changes that any of them holds.  Then the topology records the last version
of the site, and every link from it is moved up to that version, so that garbage collection no longer waits
for it.  Its entry and its id are kept, because stamps carry the id.

An interrupted removal is repeated from the beginning, with the same result.  Repeating a finished one sends
the site's changes to sites that have joined or were restored since.
"""

from collections.abc import Callable, Collection, Mapping
from itertools import permutations

import msgspec

from floodmark.host.ports import Host
from floodmark.links.exchange import copy_origin
from floodmark.model.errors import InvalidConfiguration
from floodmark.model.partition import LinkGuard
from floodmark.model.version import Version
from floodmark.replication.applied import Applied
from floodmark.replication.step import LinkStep, NamespaceStep
from floodmark.replication.topology import MemberSite, SiteState, Topology


class Removed(msgspec.Struct, frozen=True, kw_only=True):
    """A removed site, its last version, and the number of records that were exchanged.

    The sites of `waiting` are being restored, and get its changes when that is done.
    """

    site: str
    final: Version
    epoch: int
    records_copied: int
    waiting: list[str] = []


def remove_site(
    topology: Topology,
    name: str,
    survivors: Mapping[str, Host],
    publish: Callable[[Topology], None],
) -> Removed:
    """Remove a site from a topology; `survivors` are all others that are active, by name.

    `publish` gets each topology that is in force at all of them.
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
    waiting = [each for each, site in survivors.items() if site.status.replication().rejoining]
    copied, last = exchange_removed(topology, name, survivors, waiting)
    if removed.final is None:
        ended = msgspec.structs.replace(topology.sites[name], final=last)
        topology = _changed(topology, name, ended)
        _put_in_force(topology, survivors, publish)
    final = topology.sites[name].final
    assert final is not None
    present = {each: site for each, site in survivors.items() if each not in waiting}
    _end_links(topology, name, present, final)
    return Removed(
        site=name, final=final, epoch=topology.epoch, records_copied=copied, waiting=sorted(waiting)
    )


def _newest(topology: Topology, survivors: Mapping[str, Host]) -> Topology:
    """A topology, or a later one that an interrupted removal has put in force somewhere."""
    known = [site.membership.topology() for site in survivors.values()]
    return max([topology, *(each for each in known if each is not None)], key=lambda each: each.epoch)


def exchange_removed(
    topology: Topology, name: str, survivors: Mapping[str, Host], waiting: Collection[str]
) -> tuple[int, Version]:
    """Exchange the records of a removed site; return their number, and the site's last version.

    The sites in `waiting` are being restored: records are copied from them, but not to them.
    """
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
            if target.identity.site in waiting:
                continue
            position = positions[target.identity.site_id]
            guard = LinkGuard(
                source=origin,
                positions={target.namespaces.find_namespace(namespace).id: position},
                incarnation=topology.sites[name].incarnation + 1,
            )
            copied = copy_origin(source, target, namespace, position, guard)
            records, final = records + copied.records, max(final, copied.newest)
    return records, final


def _end_links(topology: Topology, name: str, survivors: Mapping[str, Host], final: Version) -> None:
    """Move every link from a removed site to its last version: a step without changes."""
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
    topology: Topology, survivors: Mapping[str, Host], publish: Callable[[Topology], None]
) -> None:
    for site in survivors.values():
        site.membership.set_topology(topology)
    publish(topology)
