"""Puts a topology in force at a site, and prepares the namespaces that the site begins to share.

A namespace joins empty: older stamps could bring a deleted key back at one site and not at another.  Existing
data is first rewritten under new stamps (`floodmark namespace rewrite`), except at a sole source, whose
copies begin with a snapshot (`links/pair.py`).  A namespace that is no longer shared is treated as if it had
never been shared.
"""

from collections.abc import Iterable

from floodmark.engine import WriteRow
from floodmark.feed.reading.cut import has_own_changes
from floodmark.host.catalog import NamespaceRow, NamespaceSettings
from floodmark.host.parts import LocalPort
from floodmark.model.errors import InvalidConfiguration, NamespaceExists, VersionCollected
from floodmark.model.version import Version, moment_of
from floodmark.replication.members import active_others
from floodmark.replication.topology import Topology


class Sharing(LocalPort):
    """The port to a site's part in a topology."""

    def topology(self) -> Topology | None:
        return self._members.topology

    def set_topology(self, topology: Topology) -> None:
        """Store the topology, then create missing namespaces; after a failure, the call can be repeated."""
        rows = {row.name: row for row in self._catalog.live()}
        if self._members.check(topology):
            if self._members.is_reborn_by(topology):
                self._require_lost(rows.values())
            told: list[WriteRow] = []
            for name in self._members.joined_by(topology):
                if name in rows:
                    told += self._take_in(rows[name], topology)
                    self._note_empty(rows[name])
            left = [rows[name].id for name in self._members.left_by(topology) if name in rows]
            joined = [rows[name].id for name in self._members.joined_by(topology) if name in rows]
            self._members.store(topology, [*self._site.links.forgetting([*left, *joined]), *told], left=left)
            self._site.links.reload()
        for name in self._members.shared:
            if name not in rows:
                self._make(name, topology)

    def require_unshared(self, namespace: str) -> None:
        """Raise InvalidConfiguration for a namespace that other sites share."""
        peers = active_others(self._members.of(namespace), self._members.site_id)
        names = ", ".join(map(self._members.name_of, peers))
        if peers:
            raise InvalidConfiguration(
                f"namespace {namespace!r} is shared with {names}, and a site that drops it "
                "alone would never get back what it wrote; leave it out of the topology first, at all "
                "sites",
                namespace=namespace,
            )

    def declare_loaded(self, namespace: str) -> Version:
        row = self._catalog.get(namespace)
        with self._node.storage.settled(), self._site.safe_points.lock:
            retention = self._node.retention
            if not retention.loaded_version(row.id):
                retention.declare_loaded(row.id, self._node.committer.sync_in_turn())
            return retention.loaded_version(row.id)

    def shared_since(self, namespace: str, position: Version) -> Version:
        """The version after which a link at a position finds everything that was first written here.

        A link without a position begins where all data was written here, first or again.
        """
        row = self._catalog.get(namespace)
        told = self._members.told_version(row.id)
        if position < told and self._members.rewritten_since(row.id) <= told:
            raise VersionCollected(
                f"what this site wrote to {namespace!r} up to {moment_of(told).isoformat()} is not in the "
                "change log of the link, because it was restored or holds data from before it was shared; a "
                "site that lacks it begins with a backup (docs/operations/join.md)",
                namespace=namespace,
                oldest=told,
            )
        begun = position or max(row.created_at, self._members.rewritten_since(row.id))
        return max(begun, self._node.retention.loaded_version(row.id))

    def loaded_version(self, namespace: str, position: Version) -> Version:
        """The end of the data loaded after a position; 0 if this site itself wrote in between."""
        row = self._catalog.get(namespace)
        loaded = self._node.retention.loaded_version(row.id)
        return 0 if has_own_changes(self._node, row.id, position, loaded) else loaded

    def note_rewritten(self, namespace: str, since: Version) -> None:
        self._node.observe(since)
        self._members.note_rewritten(self._catalog.get(namespace).id, since)

    def rewritable_version(self, namespace: str) -> Version:
        now = self._node.committer.read_version()
        row = self._catalog.get(namespace)
        watermark = self._site.links.watermark(row.id)
        entries = [
            watermark.get(site, 0)
            for site, member in self._members.sources(namespace).items()
            if site != self._members.site_id and not member.has_ended(watermark.get(site, 0))
        ]
        return min([now, *entries])

    def adopt_watermark(self, namespace: str, watermark: dict[int, Version], horizon: Version) -> None:
        """The watermark's own entry is the version up to which all other sites have this site's writes."""
        own = self._members.site_id
        peers = dict.fromkeys(active_others(self._members.sources(namespace), own), 0)
        if namespace not in self._members.shared:
            raise InvalidConfiguration(
                f"namespace {namespace!r} is not shared here; set the topology first, then load it",
                namespace=namespace,
            )
        sources = {source: at for source, at in {**peers, **watermark}.items() if source != own}
        self._site.links.adopt(self._catalog.get(namespace).id, sources, horizon, watermark.get(own, 0))

    def missing_namespaces(self) -> list[str]:
        """The namespaces that this rejoining site still lacks."""
        if not self._members.is_rejoining:
            return []
        topology = self._members.topology
        shared = [] if topology is None else topology.shared_by(self._members.site)
        begun = {namespace for namespace, _ in self._site.links.rows}
        ids = {row.name: row.id for row in self._catalog.live()}
        begun |= {each for each in ids.values() if self._members.told_version(each)}
        return [name for name in shared if ids.get(name) not in begun]

    def finish_rejoining(self) -> list[str]:
        missing = self.missing_namespaces()
        with self._node.storage.settled():
            if not missing and self._members.is_rejoining:
                self._members.note_rejoined(self._node.committer.sync_in_turn())
        return missing

    def _note_empty(self, row: NamespaceRow) -> None:
        """Store for an empty namespace that all of its stamps will be above the present version."""
        passed = self._node.committer.passed_version()
        if self._node.is_unwritten(row.id):
            self._members.note_rewritten(row.id, passed)

    def _make(self, name: str, topology: Topology) -> None:
        try:
            self._catalog.create(name, NamespaceSettings(merge=topology.namespaces[name].merge))
        except NamespaceExists:
            # Another call made it, or this one did before the site failed and recovered.
            _require_policy(self._catalog.get(name), topology)

    def _require_lost(self, rows: Iterable[NamespaceRow]) -> None:
        """Refuse a new incarnation for a site that still has its data."""
        for row in rows:
            if not self._node.is_unwritten(row.id):
                raise InvalidConfiguration(
                    f"the topology counts the incarnation of this site up, as if its data were lost, and "
                    f"namespace {row.name!r} is there; count it up for a site that is built up anew",
                    namespace=row.name,
                )

    def _take_in(self, row: NamespaceRow, topology: Topology) -> list[WriteRow]:
        """The writes that begin to share a namespace; InvalidConfiguration if its data does not fit."""
        _require_policy(row, topology)
        retention = self._node.retention
        forgotten = max(retention.collected_version(row.id), retention.collected_horizon(row.id), 1)
        if self._node.is_unwritten(row.id) or self._members.rewritten_since(row.id) >= forgotten:
            return []
        if [*topology.sources(row.name)] == [self._members.site]:
            return [self._members.note_told(row.id, self._node.committer.passed_version())]
        rewrite = f"give it new stamps with `floodmark namespace rewrite LOCATION {row.name}`"
        if self._members.site not in topology.sources(row.name):
            rewrite = f"drop it with `floodmark namespace drop LOCATION {row.name}`, or {rewrite} to keep it"
        raise InvalidConfiguration(
            f"namespace {row.name!r} of site {self._members.site!r} holds data from before it is "
            f"shared; {rewrite}, then try again",
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
