"""A site takes its place in a topology: the namespaces that it begins to share.

A namespace joins empty.  What was deleted in it before has left no tombstone that the others would wait for,
and what was written before carries stamps from a time when nobody waited for anybody: shared as it is, it
could come back at one site and not at another.  Data that is there is therefore written again first, under
new stamps (`floodmark namespace rewrite`).

A namespace that is no longer shared is one as if it had never been: nobody waits for anybody again.
"""

from collections.abc import Iterable

from floodmark.feed import SafePoints
from floodmark.host.catalog import Catalog, NamespaceRow, NamespaceSettings
from floodmark.model.errors import InvalidConfiguration, NamespaceExists, VersionCollected
from floodmark.model.version import Version, moment_of
from floodmark.partition import Node
from floodmark.replication.links import Links
from floodmark.replication.members import Members
from floodmark.replication.topology import Topology


class Sharing:
    """The port to a site's part in a topology."""

    def __init__(
        self, node: Node, catalog: Catalog, members: Members, links: Links, safe_points: SafePoints
    ) -> None:
        self._node = node
        self._catalog = catalog
        self._members = members
        self._links = links
        self._safe_points = safe_points

    def topology(self) -> Topology | None:
        """The topology in force."""
        return self._members.topology

    def set_topology(self, topology: Topology) -> None:
        """Put a topology in force, and make the namespaces that are missing here.

        The topology comes first: what arrives for a namespace is judged by it.  If the site fails in between,
        the same call goes on.
        """
        rows = {row.name: row for row in self._catalog.live()}
        if self._members.check(topology):
            if self._members.is_reborn_by(topology):
                self._require_lost(rows.values())
            for name in self._members.joined_by(topology):
                if name in rows:
                    self._require_fit(rows[name], topology)
                    self._note_empty(rows[name])
            left = [rows[name].id for name in self._members.left_by(topology) if name in rows]
            joined = [rows[name].id for name in self._members.joined_by(topology) if name in rows]
            self._members.store(topology, self._links.forgetting([*left, *joined]), left=left)
            self._links.reload()
        for name in self._members.shared:
            if name not in rows:
                self._make(name, topology)

    def require_unshared(self, namespace: str) -> None:
        """Refuse to go on with a namespace that others count on."""
        peers = self._members.peers(namespace)
        if peers:
            raise InvalidConfiguration(
                f"namespace {namespace!r} is shared with {', '.join(peers.values())}, and a site that drops "
                "it alone would never get back what it wrote; leave it out of the topology first, at all "
                "sites",
                namespace=namespace,
            )

    def declare_loaded(self, namespace: str) -> Version:
        """Let the history of a namespace begin behind what it was loaded with."""
        row = self._catalog.get(namespace)
        with self._node.storage.settled(), self._safe_points.lock:
            retention = self._node.retention
            if not retention.loaded_version(row.id):
                retention.declare_loaded(row.id, self._node.committer.sync_in_turn())
            return retention.loaded_version(row.id)

    def shared_since(self, namespace: str, position: Version) -> Version:
        """Behind which version a link at a position finds all that was first written here.

        One that has no position begins where everything was written here, first or again.  In what a
        namespace was loaded with there is nothing that was first written here and is not known to all who
        shared it then; to one that came later it is no longer told.
        """
        row = self._catalog.get(namespace)
        told = self._members.told_version(row.id)
        if position < told and self._members.rewritten_since(row.id) <= told:
            raise VersionCollected(
                f"this site was restored, and what it wrote to {namespace!r} up to "
                f"{moment_of(told).isoformat()} is not in its change log; a site that lacks it begins with a "
                "backup (docs/operations/join.md)",
                namespace=namespace,
                oldest=told,
            )
        begun = position or max(row.created_at, self._members.rewritten_since(row.id))
        return max(begun, self._node.retention.loaded_version(row.id))

    def note_rewritten(self, namespace: str, since: Version) -> None:
        """Remember that everything in a namespace has been written again above a version."""
        self._node.observe(since)
        self._members.note_rewritten(self._catalog.get(namespace).id, since)

    def rewritable_version(self, namespace: str) -> Version:
        """What was written up to here by the sites that share a namespace is in."""
        now = self._node.committer.read_version()
        row = self._catalog.get(namespace)
        watermark = self._links.watermark(row.id)
        entries = [
            watermark.get(site, 0)
            for site, member in self._members.of(namespace).items()
            if site != self._members.site_id and not member.has_ended(watermark.get(site, 0))
        ]
        return min([now, *entries])

    def adopt_watermark(self, namespace: str, watermark: dict[int, Version], horizon: Version) -> None:
        """Go on from where the site stood from which a namespace was loaded.

        The watermark's entry of this site itself says how far all others have what it wrote.
        """
        own = self._members.site_id
        peers = dict.fromkeys(self._members.peers(namespace), 0)
        if namespace not in self._members.shared:
            raise InvalidConfiguration(
                f"namespace {namespace!r} is not shared here; set the topology first, then load it",
                namespace=namespace,
            )
        sources = {source: at for source, at in {**peers, **watermark}.items() if source != own}
        self._links.adopt(self._catalog.get(namespace).id, sources, horizon, watermark.get(own, 0))

    def finish_rejoining(self) -> list[str]:
        """Let the site take part again, unless namespaces have not got everything back: these."""
        topology = self._members.topology
        shared = [] if topology is None else topology.shared_by(self._members.site)
        begun = {namespace for namespace, _ in self._links.rows}
        ids = {row.name: row.id for row in self._catalog.live()}
        begun |= {each for each in ids.values() if self._members.told_version(each)}
        missing = [name for name in shared if ids.get(name) not in begun]
        with self._node.storage.settled():
            if not missing and self._members.is_rejoining:
                self._members.note_rejoined(self._node.committer.sync_in_turn())
        return missing

    def _note_empty(self, row: NamespaceRow) -> None:
        """What is empty has no stamps: those that will be written lie above this moment."""
        passed = self._node.committer.passed_version()
        if self._node.is_unwritten(row.id):
            self._members.note_rewritten(row.id, passed)

    def _make(self, name: str, topology: Topology) -> None:
        try:
            self._catalog.create(name, NamespaceSettings(merge=topology.namespaces[name].merge))
        except NamespaceExists:
            # Somebody else made it, or this site did before it failed and recovered.
            _require_policy(self._catalog.get(name), topology)

    def _require_lost(self, rows: Iterable[NamespaceRow]) -> None:
        """Refuse that a site which has its data becomes another incarnation of itself."""
        for row in rows:
            if not self._node.is_unwritten(row.id):
                raise InvalidConfiguration(
                    f"the topology counts the incarnation of this site up, as if its data were lost, and "
                    f"namespace {row.name!r} is there; count it up for a site that is built up anew",
                    namespace=row.name,
                )

    def _require_fit(self, row: NamespaceRow, topology: Topology) -> None:
        _require_policy(row, topology)
        retention = self._node.retention
        forgotten = max(retention.collected_version(row.id), retention.collected_horizon(row.id), 1)
        if not self._node.is_unwritten(row.id) and self._members.rewritten_since(row.id) < forgotten:
            raise InvalidConfiguration(
                f"namespace {row.name!r} holds data from before it is shared; give it new stamps with "
                f"`floodmark namespace rewrite LOCATION {row.name}`, then set the topology again",
                namespace=row.name,
            )


def _require_policy(row: NamespaceRow, topology: Topology) -> None:
    merge = topology.namespaces[row.name].merge
    if row.merge != merge:
        raise InvalidConfiguration(
            f"namespace {row.name!r} merges by {row.merge!r} here, and by {merge!r} in the topology; the "
            "policy is for life, so name the one that it has, or share a namespace of another name",
            namespace=row.name,
        )
