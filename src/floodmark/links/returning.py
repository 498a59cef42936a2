"""Brings a site back under its own name, from a backup, after it has lost its data.

The other sites hold writes of its earlier incarnation: more than the backup, and not all the same.  The site
must use no stamp twice, so its clock is moved past all of its writes that they hold.  A write that only some
sites hold must reach the rest, so it goes through the site's change log again, at a new version.

Every action here can be repeated.  The site takes no writes, and no link reads it, until it is done.  A new
site that joins from a backup of another has no earlier incarnation.
"""

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import NamedTuple

from floodmark.host.ports import Host
from floodmark.links.exchange import Copied, copy_origin
from floodmark.merge.parts import split_record
from floodmark.model.errors import ClockSkew, VersionCollected
from floodmark.model.partition import LinkGuard
from floodmark.model.version import Version, moment_of


class BackupFacts(NamedTuple):
    """The watermark and the collected horizon of a backup of a namespace."""

    watermark: Mapping[int, Version]
    collected_horizon: Version


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

_NOBODY = 0


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
) -> Copied:
    """Rebuild a namespace that a site has lost; the records that came back from the other sites.

    `peers` are all active sites that share it; they fence the links of the earlier incarnation already.
    """
    _require_complete(site, namespace, backup)
    own = site.identity.site_id
    written = backup.watermark.get(own, 0)
    known = prepare_return(site, peers, namespace, backup.watermark)
    write(Portion(load=True, site=own, above=known))
    # Links read after this version: the writes that follow go to the other sites.
    site.membership.declare_loaded(namespace)
    if known < written:
        write(Portion(load=False, site=own, above=known))
    copied = bring_back(site, peers, namespace, written)
    # Its own entry is the version up to which all present sites have its writes.
    watermark = {**backup.watermark, own: known}
    site.membership.adopt_watermark(namespace, watermark, backup.collected_horizon)
    return copied


class PeerFacts(NamedTuple):
    """What a peer says of a namespace, for a backup with a given watermark.

    A link from the backup's position reads after `start`; None if the peer's log lacks changes after it.
    """

    site: int
    collected_horizon: Version
    oldest_version: Version
    start: Version | None
    is_restored: bool


def why_too_old(
    watermark: Mapping[int, Version], sources: Collection[int], peers: Mapping[str, PeerFacts]
) -> str | None:
    """Why a site cannot be rebuilt from a backup with a watermark; None if it can.

    A source without an entry in the watermark wrote nothing up to the version where its log starts.  But the
    log of a restored source holds writes of its earlier incarnation, whose stamps are older; and a backup
    from before it was restored may hold writes that it has lost.
    """
    began = {peer.site: peer.start or 0 for peer in peers.values() if not peer.is_restored}
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
        if peer.is_restored and peer.start is not None and 0 < known < peer.start:
            return f"is from before {name!r} was restored at {_show(peer.start)}, and may hold what it lost"
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
            f"the backup of {namespace!r} {problem}; restore a newer backup, also of another site, or the "
            "present state of a peer with --from-peers",
            namespace=namespace,
        )
    positions = [_position(peer, namespace, site.identity.site_id) for peer in peers.values()]
    # Without other sites, the backup is all that there is.
    positions = positions or [watermark.get(site.identity.site_id, 0)]
    _pass_version(site, max(positions))
    return min(positions)


def _ask_peer(peer: Host, namespace: str, watermark: Mapping[int, Version]) -> PeerFacts:
    statistics = next(each for each in peer.status.statistics().namespaces if each.name == namespace)
    identity, topology = peer.identity, peer.membership.topology()
    start: Version | None = None
    with suppress(VersionCollected):
        start = peer.membership.shared_since(namespace, watermark.get(identity.site_id, 0))
    return PeerFacts(
        site=identity.site_id,
        collected_horizon=statistics.collected_horizon,
        oldest_version=statistics.oldest_version,
        start=start,
        is_restored=topology is not None and topology.sites[identity.site].incarnation > 1,
    )


def _require_complete(site: Host, namespace: str, backup: BackupFacts) -> None:
    """Refuse a backup that garbage collection overtook while it was made.

    It lacks deletions that are newer than its changes of some site.  Older writes of that site are still to
    come, and would bring deleted keys back.
    """
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
    """Let all later writes of a site lie above those that other sites hold of it."""
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
