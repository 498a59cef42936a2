"""The statistics of a site of this process."""

from floodmark.feed import ChangeReader
from floodmark.host.background import Background
from floodmark.host.catalog import Catalog
from floodmark.host.directory import Identity
from floodmark.host.garbage import GarbageCollection
from floodmark.host.linking import LocalLinks
from floodmark.host.partitions import LocalPartitions
from floodmark.host.statistics import NamespaceStatistics, ReplicationStatistics, SiteStatistics
from floodmark.model.version import moment_of
from floodmark.partition import Node


class LocalStatus:
    """The port to statistics, gathered from the parts of an embedded host."""

    def __init__(
        self,
        identity: Identity,
        node: Node,
        *,
        catalog: Catalog,
        partitions: LocalPartitions,
        garbage: GarbageCollection,
        reader: ChangeReader,
        background: Background,
        links: LocalLinks,
    ) -> None:
        self._identity = identity
        self._node = node
        self._catalog = catalog
        self._partitions = partitions
        self._garbage = garbage
        self._reader = reader
        self._background = background
        self._links = links

    def replication(self) -> ReplicationStatistics:
        return self._links.statistics()

    def statistics(self) -> SiteStatistics:
        node = self._node
        counters = node.committer.counters
        changes, bytes_written = node.written()
        sizes = node.engine.sizes()
        heartbeat = node.last_heartbeat
        return SiteStatistics(
            site=self._identity.site,
            site_id=self._identity.site_id,
            format=self._identity.format,
            version=node.clock.latest,
            resolved_version=node.committer.announced_version()
            if node.storage.stopped
            else node.resolved_version(),
            clock_ahead_ms=node.clock.ahead_ms(),
            commits=counters.commits,
            changes=changes,
            bytes_written=bytes_written,
            rounds=counters.rounds,
            recoveries=node.storage.recoveries,
            data_bytes=sizes.get("data", 0),
            log_bytes=sizes.get("log", 0),
            last_heartbeat=None if heartbeat is None else moment_of(heartbeat.version),
            background_error=self._background.error,
            namespaces=[
                NamespaceStatistics(
                    name=row.name,
                    id=row.id,
                    merge=row.merge,
                    oldest_version=node.retention.collected_version(row.id),
                    collected_horizon=node.retention.collected_horizon(row.id),
                )
                for row in self._catalog.live()
            ],
            partitions=self._partitions.partitions(),
            garbage=self._garbage.total,
            readers=self._reader.statistics(),
            held_back_by=node.holds.long(),
        )
