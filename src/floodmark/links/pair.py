"""A topology of two sites with one direction, for `floodmark replicate SOURCE TARGET`.

The namespaces get SOURCE as their only source, and the rules of links hold.  TARGET begins with a snapshot if
the change log of SOURCE does not reach back to the creation of a namespace, or lacks data from before the
pair.

A site has one topology.  If the two sites have one, the pair extends it, with TARGET as another copy or with
more namespaces.  A namespace that other sites write to is refused: SOURCE does not send their changes.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import msgspec

from floodmark.clock import monotonic_ms
from floodmark.host.ports import Host
from floodmark.links.driver import TopologySummary
from floodmark.links.entering import Entering
from floodmark.links.exchange import copy_records
from floodmark.links.steps import plan_step
from floodmark.model.errors import (
    InvalidArgument,
    InvalidConfiguration,
    NamespaceExists,
    NamespaceNotFound,
    VersionCollected,
)
from floodmark.model.partition import LinkGuard
from floodmark.replication.topology import MemberSite, SharedNamespace, Topology, check_topology
from floodmark.site.address import SiteAddress
from floodmark.site.site import Site

_TOPOLOGIES: Final = "docs/operations/replication.md"


@dataclass(frozen=True)
class LinkPair:
    """The topology of a pair, the addresses of its two sites by name, and the records copied by snapshots."""

    topology: Topology
    addresses: dict[str, SiteAddress]
    snapshot_records: int
    elapsed_ms: int

    @classmethod
    def of(cls, source: SiteAddress, target: SiteAddress, namespaces: Sequence[str] = ()) -> "LinkPair":
        """Make a pair of two sites that answer: put its topology in force, and begin with snapshots.

        Copies all namespaces of the source unless some are named.  The target gets the settings of those that
        it lacks.  Repeating the call has no effect.
        """
        began_ms = monotonic_ms()
        source.require_url("replicated from")
        target.require_url("replicated to")
        with source.connect() as origin, target.connect() as copy:
            _require_two(origin, copy)
            names = _require_names(namespaces or origin.namespaces())
            for name in names:
                _ensure_namespace(origin, copy, name)
            topology = pair_topology(origin, copy, names)
            addresses = {origin.name: source, copy.name: target}
            failure = Entering(topology, addresses).try_all()
            if failure is not None:
                raise failure
            incarnation = topology.sites[origin.name].incarnation
            records = sum(begin_copy(origin.host, copy.host, name, incarnation) for name in names)
            return cls(topology, addresses, records, monotonic_ms() - began_ms)

    def complete(self, summary: TopologySummary) -> TopologySummary:
        """The summary of a run of the pair's link, with the snapshots before it."""
        return msgspec.structs.replace(
            summary,
            snapshot_records=self.snapshot_records,
            elapsed_ms=self.elapsed_ms + summary.elapsed_ms,
        )


def pair_topology(source: Site, target: Site, names: Sequence[str]) -> Topology:
    """The topology in force at both sites, extended for the pair, or the same one if it has the pair.

    Raises InvalidConfiguration if a namespace has another source, or the topologies contradict each other.
    """
    known = [topology for site in (source, target) if (topology := site.topology()) is not None]
    known.sort(key=lambda each: each.epoch)
    sites = {name: member for each in known for name, member in each.sites.items()}
    namespaces = {name: _closed(each, name) for each in known for name in each.namespaces}
    for site in (source, target):
        if not sites.setdefault(site.name, MemberSite(id=site.id)).is_active:
            raise InvalidConfiguration(
                f"site {site.name!r} was removed from the topology; let it join with a new name and id",
                site=site.name,
            )
    for name in names:
        members = _members(known, source, name)
        namespaces[name] = SharedNamespace(
            sites=tuple(dict.fromkeys((*members, source.name, target.name))),
            sources=(source.name,),
            merge=source.host.namespaces.find_namespace(name).merge,
        )
    epoch = known[-1].epoch if known else 0
    wanted = Topology(epoch=epoch, sites=sites, namespaces=namespaces)
    if known and _meaning(wanted) == _meaning(known[-1]):
        return known[-1]
    wanted = msgspec.structs.replace(wanted, epoch=epoch + 1)
    check_topology(wanted, f"the topology of {source.name!r} and {target.name!r}")
    return wanted


def begin_copy(source: Host, target: Host, namespace: str, incarnation: int = 1) -> int:
    """Begin a new copy of a namespace with a snapshot if a link cannot; return the number of records.

    Does nothing for a copy that has a position.  The target refuses the snapshot if it has forgotten
    deletions of the namespace (Fenced), and if another process moves the link meanwhile (StaleLink).
    """
    own = source.identity.site_id
    (position,) = target.replication.link_positions(own, [namespace])
    if position.through:
        return 0
    try:
        plan_step(source, target, [namespace])
    except VersionCollected:
        guard = LinkGuard(own, positions={position.id: 0}, incarnation=incarnation)
        copied = copy_records(source, target, namespace, guard)
        # Read after the snapshot, so that it covers all deletions that the snapshot lacks.
        rows = source.status.statistics().namespaces
        horizon = next(row.collected_horizon for row in rows if row.name == namespace)
        target.membership.adopt_watermark(namespace, {own: copied.newest}, horizon)
        return copied.records
    return 0


def _closed(topology: Topology, namespace: str) -> SharedNamespace:
    """A namespace with its sites by name, so that a site that joins the topology does not join it."""
    shared = topology.namespaces[namespace]
    return msgspec.structs.replace(shared, sites=tuple(topology.members(namespace)))


def _meaning(topology: Topology) -> dict[str, object]:
    """The sites and namespaces of a topology in a canonical form."""
    return {
        "sites": topology.sites,
        "namespaces": {
            name: (set(topology.members(name)), set(topology.sources(name)), shared.merge)
            for name, shared in topology.namespaces.items()
        },
    }


def _members(known: Sequence[Topology], source: Site, namespace: str) -> list[str]:
    """The sites that share a namespace now; the source must be the only one whose changes go to others."""
    members: list[str] = []
    for topology in known:
        others = topology.sources(namespace).keys() - {source.name}
        if others:
            raise InvalidConfiguration(
                f"namespace {namespace!r} is shared with {min(others)!r}, whose changes {source.name!r} does "
                f"not send on; add the target to the topology file of these sites ({_TOPOLOGIES})",
                namespace=namespace,
            )
        members += topology.members(namespace)
    return members


def _require_names(namespaces: Sequence[str]) -> list[str]:
    names = list(namespaces)
    if not names:
        raise InvalidArgument(
            "the source has no namespace to copy; create one with `floodmark namespace create`"
        )
    if len(set(names)) < len(names):
        raise InvalidArgument("name each namespace to replicate once")
    return names


def _require_two(source: Site, target: Site) -> None:
    if source.id == target.id or source.name == target.name:
        raise InvalidArgument(
            f"site {source.name!r} (id {source.id}) and site {target.name!r} (id {target.id}) are one site "
            "or cannot be told apart. Name another target, or make it with a name and an id of its own"
        )


def _ensure_namespace(source: Site, target: Site, name: str) -> None:
    """Create a namespace at the target, with the settings of the source's."""
    settings = source.host.namespaces.find_namespace(name).settings
    try:
        target.host.namespaces.find_namespace(name)
    except NamespaceNotFound:
        with suppress(NamespaceExists):
            target.host.namespaces.create_namespace(name, settings)
