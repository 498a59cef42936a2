"""Brings a site back under its own name, from a backup, after it has lost its data.

The other sites hold writes of its earlier incarnation: more than the backup, and not all the same.  The site
must use no stamp twice, so its clock is moved past all of its writes that they hold.  A write that only some
sites hold must reach the rest, so it goes through the site's change log again, at a new version.

Where no backup is good enough, the present state of a peer takes its place.

Every action here can be repeated.  Until all is done, the site takes no writes, and no link reads from it.  A
new site that joins from a backup of another has no earlier incarnation.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Final, NamedTuple

import msgspec
import pyarrow.compute

from floodmark.codec.ordered import qualify_range
from floodmark.host.catalog import NamespaceRow
from floodmark.host.ports import Host
from floodmark.links.exchange import Copied, HeldSnapshot, copy_origin
from floodmark.links.removing import exchange_removed, remove_site
from floodmark.merge.parts import split_record
from floodmark.model.errors import ClockSkew, InvalidArgument, InvalidConfiguration, VersionCollected
from floodmark.model.partition import ApplyStream, Content, LinkGuard, LoadStream
from floodmark.model.version import Version, moment_of
from floodmark.replication.topology import Topology
from floodmark.site.address import SiteAddress
from floodmark.site.site import Site


class BackupFacts(NamedTuple):
    """The watermark and collected horizon of a backup of a namespace, and the sites' incarnations then."""

    watermark: Mapping[int, Version]
    collected_horizon: Version
    incarnations: Mapping[int, int]


class Portion(NamedTuple):
    """The part of each record of a backup to write.

    Writes of one site above a version are applied, and the rest is loaded.
    """

    load: bool
    site: int
    above: Version

    def take(self, record: bytes) -> bytes | None:
        """The part of a stored record, with its origin, that belongs to the portion; or None."""
        part, rest = split_record(record, self.site, self.above)
        return rest if self.load else part


# Writes a portion of all records of a backup, and returns when they are durable.
WritePortion = Callable[[Portion], object]

_NOBODY: Final = 0
_INSTEAD: Final = "use a newer backup, also of another site, or with --rejoin a peer's state (--from-peers)"


class PeerReturn(msgspec.Struct, frozen=True, kw_only=True):
    """A namespace that was rebuilt from the state of a peer as of a version.

    `records` counts the peer's records, and `returned` the site's own writes that all peers gave back.  The
    site takes no writes while namespaces are `missing`.
    """

    peer: str
    site: str
    namespace: str
    version: Version
    resumed: bool
    records: int
    returned: int
    missing: list[str]


@contextmanager
def returning(
    target: SiteAddress, namespace: str, topology: Topology, addresses: Mapping[str, SiteAddress]
) -> Iterator[tuple[Site, dict[str, Host]]]:
    """A site that has lost a namespace, and all other active sites of the topology.

    First the topology, with the site's incremented incarnation, is put in force at all sites, so that changes
    of the earlier incarnation are refused.
    """
    with ExitStack() as stack:
        site = stack.enter_context(target.connect())
        name = site.name
        if namespace not in topology.shared_by(name):
            raise InvalidConfiguration(f"site {name!r} does not share {namespace!r}", site=name)
        others = {
            other: stack.enter_context(addresses[other].connect())
            for other in sorted(addresses.keys() - {name})
        }
        for other in (*others.values(), site):
            other.set_topology(topology)
        if not site.replication().rejoining:
            raise InvalidArgument(
                f"site {name!r} has the incarnation of the topology, and takes part; if it has lost its "
                "data, increment its `incarnation` in the topology first"
            )
        yield site, {other: each.host for other, each in others.items()}


def finish_return(site: Host, others: Mapping[str, Host], topology: Topology) -> list[str]:
    """End the return of a restored site, unless namespaces are missing; return the missing ones.

    The changes of a site that was removed meanwhile were exchanged without this one, and are now sent to it.
    """
    removed = [name for name, member in topology.sites.items() if member.final is not None]
    hosts = {**others, site.identity.site: site}
    for name in removed:
        exchange_removed(topology, name, hosts, waiting=[site.identity.site])
    missing = site.membership.finish_rejoining()
    for name in removed if not missing else ():
        remove_site(topology, name, hosts, lambda _: None)
    return missing


def return_from_peers(
    target: SiteAddress, namespace: str, *, topology: Topology, addresses: Mapping[str, SiteAddress]
) -> PeerReturn:
    """Rebuild a namespace that a site has lost from the present state of one of its peers.

    The peer's stamps and tombstones stay as they are.  All peers give back the site's own writes.
    """
    with returning(target, namespace, topology, addresses) as (site, others):
        members = topology.active_members(namespace)
        peers = {name: host for name, host in others.items() if name in members}
        peer, snapshot = _choose_snapshot(site.name, peers, namespace)
        snapshot.hold()
        found = _ask_peer(peers[peer], namespace, {})
        watermark = {
            **peers[peer].replication.watermark(namespace, snapshot.version),
            found.site: snapshot.version,
        }
        row = site.host.namespaces.find_namespace(namespace)
        begun = site.host.versions.open_epoch(namespace, f"return/{peer}/{snapshot.version}", 0)
        resumed = require_own(site.host, row, begun)
        records = 0

        def write(portion: Portion) -> None:
            nonlocal records
            command = LoadStream(True) if portion.load else ApplyStream(True)
            records += snapshot.copy(site.host, command, portion.take)

        facts = BackupFacts(watermark, found.collected_horizon, topology.incarnations())
        copied = return_namespace(site.host, peers, namespace, facts, write)
        missing = finish_return(site.host, others, topology)
        snapshot.release()
        return PeerReturn(
            peer=peer,
            site=site.name,
            namespace=namespace,
            version=snapshot.version,
            resumed=resumed,
            records=records,
            returned=copied.records,
            missing=missing,
        )


def _choose_snapshot(site: str, peers: Mapping[str, Host], namespace: str) -> tuple[str, HeldSnapshot]:
    """A peer and a held snapshot of it, if possible the one that an interrupted run has chosen."""
    name = f"return-{site}-{namespace}"
    found = [
        (peer, HeldSnapshot(host, namespace, name))
        for peer, host in peers.items()
        if not host.status.replication().rejoining
    ]
    if not found:
        raise InvalidConfiguration(
            f"no other site has its data of {namespace!r}; restore a backup of one of them first",
            namespace=namespace,
        )
    return min(found, key=lambda each: not each[1].is_held)


def require_own(site: Host, namespace: NamespaceRow, begun: Version) -> bool:
    """Raise InvalidArgument for records from before a restore began.  Returns whether it finds its own."""
    at = site.versions.read_version()
    keys = qualify_range(namespace.id)
    found = False
    for batch in site.router.scan_records(keys, at, dead=True, content=Content.DIGESTS):
        if not batch.num_rows:
            continue
        found = True
        if pyarrow.compute.min(batch.column("version")).as_py() <= begun:
            raise InvalidArgument(
                f"namespace {namespace.name!r} of site {site.identity.site!r} holds other records; restore "
                "into a new namespace, or into one that is empty"
            )
    return found


def join_namespace(site: Host, namespace: str, backup: BackupFacts, write: WritePortion) -> None:
    """Build a namespace of a new site from a backup of another; its links continue from there."""
    _require_complete(site, namespace, backup)
    write(Portion(load=True, site=_NOBODY, above=0))
    site.membership.declare_loaded(namespace)
    # All that the site itself has written is in its log: it has no earlier incarnation.
    watermark = {source: at for source, at in backup.watermark.items() if source != site.identity.site_id}
    site.membership.adopt_watermark(namespace, watermark, backup.collected_horizon)


def return_namespace(
    site: Host,
    peers: Mapping[str, Host],
    namespace: str,
    backup: BackupFacts,
    write: WritePortion,
    on_written: Callable[[], object] = lambda: None,
) -> Copied:
    """Rebuild a namespace that a site has lost; return the records fetched from the other sites.

    `peers` are all active sites that share it; they fence the links of the earlier incarnation already.
    `on_written` is called when all of the backup is written, and nothing else.
    """
    _require_complete(site, namespace, backup)
    own = site.identity.site_id
    written = backup.watermark.get(own, 0)
    known = prepare_return(site, peers, namespace, backup.watermark)
    write(Portion(load=True, site=own, above=known))
    # Links read after this version, so the writes that follow reach the other sites.
    site.membership.declare_loaded(namespace)
    if known < written:
        write(Portion(load=False, site=own, above=known))
    on_written()
    copied = bring_back(site, peers, namespace, written)
    # Its own entry is the version up to which all present sites have its writes.
    watermark = {**backup.watermark, own: known}
    site.membership.adopt_watermark(namespace, watermark, backup.collected_horizon)
    return copied


class PeerFacts(NamedTuple):
    """Facts of a peer about a namespace, for a backup with a given watermark.

    A link from the backup's position reads after `start`; None if the peer's log lacks changes after it.
    """

    site: int
    collected_horizon: Version
    oldest_version: Version
    start: Version | None


def find_restored(backup: Mapping[int, int], present: Mapping[int, int]) -> int | None:
    """A site that was restored since a backup was made, from the incarnations then and now; or None.

    Such a backup may hold writes that the site has lost, and that no link takes to the others.  Nor can its
    watermark be compared with the site's log, which holds writes of the earlier incarnation at new versions.
    """
    return next((site for site, number in present.items() if backup.get(site, 1) < number), None)


def why_too_old(
    watermark: Mapping[int, Version], sources: Collection[int], peers: Mapping[str, PeerFacts]
) -> str | None:
    """Why a site cannot be rebuilt from a backup with a watermark; None if it can.

    No source was restored since the backup was made (`find_restored`): one without an entry in the watermark
    wrote nothing up to the version where its log starts.
    """
    began = {peer.site: peer.start or 0 for peer in peers.values()}
    complete = min(watermark.get(source) or began.get(source, 0) for source in sources)
    for name, peer in peers.items():
        known = watermark.get(peer.site, 0)
        if peer.collected_horizon > complete:
            return (
                f"has all changes up to {_show(complete)}, and {name!r} has collected deletions up to "
                f"{_show(peer.collected_horizon)}"
            )
        if peer.site in sources and (peer.start is None or peer.start < peer.oldest_version):
            return (
                f"has the changes of {name!r} up to {_show(known)}, and {name!r} has collected changes up to "
                f"{_show(peer.oldest_version)}"
            )
    return None


def prepare_return(
    site: Host, peers: Mapping[str, Host], namespace: str, watermark: Mapping[int, Version]
) -> Version:
    """The version up to which all other sites have the writes of the site's earlier incarnation.

    `watermark` is that of the backup.  Raises VersionCollected for a backup that is too old: the other sites
    have collected deletions that it lacks, so that deleted keys would come back, or changes made since.
    """
    found = {name: _ask_peer(peer, namespace, watermark) for name, peer in peers.items()}
    problem = why_too_old(watermark, _sources(site, namespace), found)
    if problem is not None:
        raise VersionCollected(
            f"the backup of {namespace!r} {problem}; {_INSTEAD}",
            namespace=namespace,
        )
    positions = [_position(peer, namespace, site.identity.site_id) for peer in peers.values()]
    # Without other sites, there are no writes beside those of the backup.
    positions = positions or [watermark.get(site.identity.site_id, 0)]
    _pass_version(site, max(positions))
    return min(positions)


def _ask_peer(peer: Host, namespace: str, watermark: Mapping[int, Version]) -> PeerFacts:
    statistics = next(each for each in peer.status.statistics().namespaces if each.name == namespace)
    site = peer.identity.site_id
    start: Version | None = None
    with suppress(VersionCollected):
        start = peer.membership.shared_since(namespace, watermark.get(site, 0))
    return PeerFacts(
        site=site,
        collected_horizon=statistics.collected_horizon,
        oldest_version=statistics.oldest_version,
        start=start,
    )


def _require_complete(site: Host, namespace: str, backup: BackupFacts) -> None:
    """Refuse a backup from before a site was restored, and one that garbage collection overtook.

    The latter lacks deletions that are newer than its changes of some site.  Older writes of that site are
    still to come, and would bring deleted keys back.
    """
    topology = site.membership.topology()
    assert topology is not None, "a site without a topology neither joins nor returns"
    present = topology.incarnations()
    # A site that returns now may use a backup of the incarnation that it has lost.
    present[site.identity.site_id] -= site.status.replication().rejoining
    restored = find_restored(backup.incarnations, present)
    if restored is not None:
        name = next(name for name, member in topology.sites.items() if member.id == restored)
        raise VersionCollected(
            f"the backup of {namespace!r} is from before {name!r} was restored as incarnation "
            f"{present[restored]}, and may hold changes that were lost then; {_INSTEAD}",
            namespace=namespace,
        )
    sources = _sources(site, namespace) - {site.identity.site_id}
    entries = [at for source, at in backup.watermark.items() if source in sources]
    lowest = min(entries, default=backup.collected_horizon)
    if lowest < backup.collected_horizon:
        raise VersionCollected(
            f"the backup of {namespace!r} has what some site wrote only up to {_show(lowest)}, and lacks "
            f"deletions up to {_show(backup.collected_horizon)} that were forgotten while it was made; make "
            "another one, now that the site is in the topology and all sites keep deletions for it",
            namespace=namespace,
            oldest=backup.collected_horizon,
        )


def _sources(site: Host, namespace: str) -> set[int]:
    """The active sites whose changes of a namespace go to the others, by id."""
    topology = site.membership.topology()
    sources = {} if topology is None else topology.sources(namespace)
    return {source.id for source in sources.values() if source.is_active} or {site.identity.site_id}


def bring_back(site: Host, peers: Mapping[str, Host], namespace: str, above: Version) -> Copied:
    """Fetch a site's own writes above a version from all other sites, and move its clock past them."""
    topology = site.membership.topology()
    life = 1 if topology is None else topology.sites[site.identity.site].incarnation
    guard = LinkGuard(source=site.identity.site_id, positions={}, incarnation=life)
    copies = [copy_origin(peer, site, namespace, above, guard) for peer in peers.values()]
    newest = max((copied.newest for copied in copies), default=above)
    _pass_version(site, newest)
    return Copied(sum(copied.records for copied in copies), newest)


def _pass_version(site: Host, version: Version) -> None:
    """Move the clock of a site past its own writes at other sites, so that later writes are above them."""
    try:
        site.versions.pass_version(version)
    except ClockSkew as error:
        raise ClockSkew(
            f"the others have what {site.identity.site!r} wrote up to {_show(version)}, and its clock is far "
            "behind that; set the time on its machine, and restore once more",
            version=version,
        ) from error


def _position(peer: Host, namespace: str, source: int) -> Version:
    links = peer.status.replication().links
    found = [link for link in links if link.source_id == source and link.namespace == namespace]
    return found[0].through if found else 0


def _show(version: Version) -> str:
    return moment_of(version).isoformat()
