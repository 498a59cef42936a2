"""Chooses the safe point of each namespace, and collects the garbage that it does not protect.

With several nodes the keeper collects, over the records of all nodes.  It needs no owner's write turn: at or
below the site's resolved version owners write nothing, neither commits nor corrections, so only the keeper
changes rows there, and the keeper's key guards each of its writes.  The collected version is stored before
the first row is deleted, and readers at every node check it after they have read.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from threading import Lock

from floodmark.engine import Guard
from floodmark.host.catalog import NamespaceRow
from floodmark.host.parts import SiteParts
from floodmark.host.statistics import GarbageReport
from floodmark.merge.policies import LAST_WRITE
from floodmark.model.errors import Corruption
from floodmark.model.version import COUNTER_BITS, VERSION_MAX, Version
from floodmark.partition.pruning import prune_namespace


class GarbageCollection:
    """Collects the garbage of all namespaces.  One run at a time."""

    def __init__(
        self,
        site: SiteParts,
        log_retention: timedelta | None,
        collect_generations: Callable[[NamespaceRow, Version], object],
    ) -> None:
        self._site = site
        self._collect_generations = collect_generations
        self._node = site.node
        self._log_retention = log_retention
        self._lock = Lock()
        self.total = GarbageReport()

    def run(self, pause: Callable[[], bool] = lambda: True) -> GarbageReport:
        """Collect in all namespaces.  `pause` is called between pages; the run ends if it returns False."""
        with self._lock:
            guards = self._node.storage.keeper_guards()
            self._tell_expiries(pause)
            rows, safe_points = self._raise_safe_points(guards)
            read = removed = keys = namespaces = 0
            damage: Corruption | None = None
            for row in rows:
                if row.dropped_at is not None:
                    if row.dropped_at <= safe_points[row.id]:
                        for generation in row.generations:
                            self._node.retention.remove_generation(generation.id)
                        self._node.retention.remove_namespace(row.id)
                        self._site.links.forget(row.id)
                        self._site.members.forget(row.id)
                        self._site.catalog.forget(row.id)
                        namespaces += 1
                    continue
                try:
                    settled = self._settled_version(row)
                    told_through = self._node.expiries.told_through
                    collected = self._node.retention.collect(
                        row.id, pause, settled, told_through=told_through, guards=guards
                    )
                    if row.merge != LAST_WRITE:
                        prune_namespace(self._node, row.id, settled, pause, guards)
                except Corruption as error:
                    # One damaged record must not keep the other garbage and the logs from being collected.
                    damage = damage or error
                    continue
                if row.generations:
                    self._collect_generations(row, safe_points[row.id])
                self._site.links.forget_marks(row.id, safe_points[row.id])
                read += collected.versions_read
                removed += collected.versions_removed
                keys += collected.keys_removed
            if safe_points:
                self._node.trim_logs(max(min(safe_points.values()), self._oldest_log_version()))
            self._site.safe_points.forget_expired()
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
        """Write the expiries of records to the change log before the records are removed."""
        expiries = self._node.expiries
        expiries.index_older(pause)
        while not expiries.tell(anew=True) and not self._node.storage.is_unusual and pause():
            pass

    def _settled_version(self, row: NamespaceRow) -> Version:
        """Deletions at or below this need no tombstone: no epoch and no other site can bring older writes."""
        members = self._site.members.of(row.name)
        sources = self._site.members.sources(row.name)
        settled = self._site.links.settled_version(row.id, members, sources) if members else VERSION_MAX
        return min(settled, self._site.epochs.oldest_version(row.id))

    def _raise_safe_points(self, guards: Sequence[Guard]) -> tuple[list[NamespaceRow], dict[int, Version]]:
        resolved = self._node.resolved_version()
        with self._node.storage.settled(), self._site.safe_points.lock:
            # Looked up in the write turn, so that a namespace created just before is taken into account.
            rows = self._site.catalog.all()
            safe_points = {row.id: self._safe_point(row, resolved) for row in rows}
            # Readers may still read a namespace as of a version before its creation, when it was empty.
            created = {row.id: row.created_at for row in rows}
            self._node.retention.declare_collected(
                {
                    namespace: safe_point
                    for namespace, safe_point in safe_points.items()
                    if safe_point > created[namespace]
                },
                guards,
            )
        return rows, safe_points

    def _oldest_log_version(self) -> Version:
        """The version up to which the change log may be trimmed although readers may still request it."""
        if self._log_retention is None:
            return 0
        aged_ms = self._node.clock.time_source() - self._log_retention // timedelta(milliseconds=1)
        return min(max(0, aged_ms) << COUNTER_BITS, self._node.resolved_version())

    def _safe_point(self, row: NamespaceRow, resolved: Version) -> Version:
        """The minimum of the version at the retention's age, the resolved version and all held versions."""
        aged = max(0, self._node.clock.time_source() - row.retention_ms) << COUNTER_BITS
        held = self._site.nodes.held_version(row.id)
        return self._site.safe_points.lowest(row.id, min(aged, resolved, held))
