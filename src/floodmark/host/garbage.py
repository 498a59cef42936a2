"""When to collect garbage, and up to where: the site's side of it."""

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from threading import Lock

from floodmark.feed import SafePoint, SafePoints
from floodmark.host.catalog import Catalog, NamespaceRow
from floodmark.host.epochs import Epochs
from floodmark.host.statistics import GarbageReport
from floodmark.merge.policies import LAST_WRITE
from floodmark.model.actions import SITE_OWNER
from floodmark.model.errors import Corruption
from floodmark.model.version import COUNTER_BITS, VERSION_MAX, Version
from floodmark.partition import Node
from floodmark.partition.pruning import prune_namespace
from floodmark.replication.links import Links
from floodmark.replication.members import Members


class GarbageCollection:
    """Finds each namespace's safe point, and removes what lies behind it.  One run at a time."""

    def __init__(
        self,
        node: Node,
        catalog: Catalog,
        safe_points: SafePoints,
        log_retention: timedelta | None = None,
        *,
        epochs: Epochs,
        links: Links,
        members: Members,
    ) -> None:
        self._epochs = epochs
        self._links = links
        self._members = members
        self._log_retention = log_retention
        self._node = node
        self._catalog = catalog
        self._safe_points = safe_points
        self._lock = Lock()
        self.total = GarbageReport()

    def run(self, pause: Callable[[], bool] = lambda: True) -> GarbageReport:
        """Collect in all namespaces.  `pause` is called between pages and ends the run if False."""
        with self._lock:
            self._tell_expiries(pause)
            rows, safe_points = self._raise_safe_points()
            read = removed = keys = namespaces = 0
            damage: Corruption | None = None
            for row in rows:
                if row.dropped_at is not None:
                    if row.dropped_at <= safe_points[row.id]:
                        self._node.retention.remove_namespace(row.id)
                        self._links.forget(row.id)
                        self._members.forget(row.id)
                        self._catalog.forget(row.id)
                        namespaces += 1
                    continue
                try:
                    settled = self._settled_version(row)
                    told_through = self._node.expiries.told_through
                    collected = self._node.retention.collect(
                        row.id, pause, settled, told_through=told_through
                    )
                    if row.merge != LAST_WRITE:
                        prune_namespace(self._node, row.id, settled, pause)
                except Corruption as error:
                    # One damaged record must not let the others, and the logs, grow without end.
                    damage = damage or error
                    continue
                self._links.forget_marks(row.id, safe_points[row.id])
                read += collected.versions_read
                removed += collected.versions_removed
                keys += collected.keys_removed
            if safe_points:
                self._node.trim_logs(max(min(safe_points.values()), self._oldest_log_version()))
            self._safe_points.forget_expired()
            report = GarbageReport(
                runs=1,
                versions_read=read,
                versions_removed=removed,
                keys_removed=keys,
                namespaces_removed=namespaces,
                log_trimmed_version=self._node.retention.trimmed_version(),
            )
            self.total = replace(
                report,
                runs=self.total.runs + 1,
                versions_read=self.total.versions_read + read,
                versions_removed=self.total.versions_removed + removed,
                keys_removed=self.total.keys_removed + keys,
                namespaces_removed=self.total.namespaces_removed + namespaces,
            )
            if damage is not None:
                raise damage
            return report

    def _tell_expiries(self, pause: Callable[[], bool]) -> None:
        """Let followers know of expired records before these are removed."""
        expiries = self._node.expiries
        expiries.index_older(pause)
        while not expiries.tell(anew=True) and not self._node.storage.is_unusual and pause():
            pass

    def _settled_version(self, row: NamespaceRow) -> Version:
        """What was deleted at or below this need not be remembered: nothing older can come any more.

        Neither from a stream from outside that writes an epoch again, nor from another site.
        """
        members = self._members.of(row.name)
        sources = self._members.sources(row.name)
        settled = self._links.settled_version(row.id, members, sources) if members else VERSION_MAX
        return min(settled, self._epochs.oldest_version(row.id))

    def _raise_safe_points(self) -> tuple[list[NamespaceRow], dict[int, Version]]:
        resolved = self._node.resolved_version()
        with self._node.storage.settled(), self._safe_points.lock:
            # Looked up in the turn: a namespace made a moment earlier has a say in what is trimmed.
            rows = self._catalog.all()
            safe_points = {row.id: self._safe_point(row, resolved) for row in rows}
            # Before its creation a namespace was empty, and everyone may still know that.
            created = {row.id: row.created_at for row in rows}
            self._node.retention.declare_collected(
                {
                    namespace: safe_point
                    for namespace, safe_point in safe_points.items()
                    if safe_point > created[namespace]
                }
            )
        return rows, safe_points

    def _oldest_log_version(self) -> Version:
        """What the change log need not keep, though a reader may still ask for it."""
        if self._log_retention is None:
            return 0
        aged_ms = self._node.clock.time_source() - self._log_retention // timedelta(milliseconds=1)
        return min(max(0, aged_ms) << COUNTER_BITS, self._node.resolved_version())

    def _safe_point(self, row: NamespaceRow, resolved: Version) -> Version:
        """The retention's age, but never past what is resolved or held."""
        aged = max(0, self._node.clock.time_source() - row.retention_ms) << COUNTER_BITS
        return self._safe_points.lowest(row.id, min(aged, resolved))


class LocalRetention:
    """The port to safe points and garbage collection, over those of a node."""

    def __init__(
        self, node: Node, catalog: Catalog, safe_points: SafePoints, garbage: GarbageCollection
    ) -> None:
        self._node = node
        self._catalog = catalog
        self._safe_points = safe_points
        self._garbage = garbage

    def hold_safe_point(
        self,
        name: str,
        version: Version,
        lifetime: timedelta,
        namespace: str | None,
        owner: str = SITE_OWNER,
    ) -> SafePoint:
        scope = None if namespace is None else self._catalog.get(namespace).id
        return self._safe_points.hold(name, version, lifetime, scope, owner)

    def release_safe_point(self, name: str, owner: str = SITE_OWNER) -> None:
        self._safe_points.release(name, owner)

    def safe_points(self) -> list[SafePoint]:
        return self._safe_points.list()

    def oldest_version(self, namespace: str | None) -> Version:
        if namespace is None:
            return max(self._node.born_version(), self._safe_points.oldest_version(None))
        row = self._catalog.get(namespace)
        return max(row.created_at, self._safe_points.oldest_version(row.id))

    def collect_garbage(self) -> GarbageReport:
        return self._garbage.run()
