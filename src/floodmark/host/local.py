"""Implementations of the simpler ports, by calls to the parts of a site in this process."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta

from msgspec import UNSET

from floodmark.codec.changelog import CommitRow, decode_log_key, decode_row, encode_log_range
from floodmark.codec.ordered import encode_namespace
from floodmark.feed import ChangeReader, SafePoint
from floodmark.feed.reading.cut import ChangesCut, CutRequest, cut_changes
from floodmark.host.background import Background
from floodmark.host.balancing import halving_key
from floodmark.host.catalog import NamespaceRow, NamespaceSettings
from floodmark.host.garbage import GarbageCollection
from floodmark.host.overview import SiteOverview
from floodmark.host.parts import LocalPort, SiteParts
from floodmark.host.ports import NamespaceUpdate, PeerCommands, PeerReply, PeerVersions, SplitByLoad
from floodmark.host.sharing import Sharing
from floodmark.host.statistics import (
    GarbageReport,
    NamespaceStatistics,
    PartitionHeat,
    PartitionStatistics,
    ReplicationStatistics,
    SiteStatistics,
)
from floodmark.model.actions import SITE_OWNER
from floodmark.model.change import Heartbeat
from floodmark.model.errors import InvalidConfiguration, InvalidOption, PartitionNotFound
from floodmark.model.limits import PAGE_BYTES_MAX, PAGE_ROWS_MAX
from floodmark.model.partition import Fate
from floodmark.model.stream import OnGeneration
from floodmark.model.version import VERSION_MAX, Version, moment_of
from floodmark.partition import LocalPartition, Node
from floodmark.partition.families import LOG
from floodmark.partition.node import resolved_versions


class LocalNamespaces(LocalPort):
    """The port to namespaces."""

    def __init__(self, site: SiteParts, sharing: Sharing) -> None:
        super().__init__(site)
        self._sharing = sharing

    def create_namespace(self, namespace: str, settings: NamespaceSettings) -> NamespaceRow:
        return self._catalog.create(namespace, settings)

    def find_namespace(self, namespace: str) -> NamespaceRow:
        return self._catalog.get(namespace)

    def list_namespaces(self) -> list[NamespaceRow]:
        return sorted(self._catalog.all(), key=lambda row: row.name)

    def update_namespace(self, namespace: str, update: NamespaceUpdate) -> NamespaceRow:
        def change(settings: NamespaceSettings) -> NamespaceSettings:
            return replace(
                settings,
                ttl=settings.ttl if update.ttl is UNSET else update.ttl,
                retention=settings.retention if update.retention is UNSET else update.retention,
            )

        self._catalog.update(namespace, change)
        return self._catalog.get(namespace)

    def drop_namespace(self, namespace: str) -> None:
        self._sharing.require_unshared(namespace)
        self._catalog.drop(namespace)


class LocalVersions(LocalPort):
    """The port to versions."""

    def read_version(self) -> Version:
        return self._node.committer.read_version()

    def resolved_version(self) -> Version:
        return self._node.resolved_version()

    def now(self) -> Version:
        return self._node.committer.now()

    def observe(self, version: Version) -> None:
        self._node.observe(version)

    def pass_version(self, version: Version) -> None:
        self._node.committer.observe(version)

    def sync(self) -> None:
        self._node.committer.sync()

    def heartbeat(self) -> Heartbeat:
        return self._node.heartbeat()

    def open_epoch(self, namespace: str, stream: str, epoch: int, owner: str = SITE_OWNER) -> Version:
        return self._site.epochs.open(self._catalog.get(namespace).id, stream, epoch, owner)

    def cut_changes(
        self,
        namespace: str,
        since: Version,
        changes_max: int | None,
        until: Version | None,
        at_heartbeat: bool,
        own: bool = False,
        on_generation: OnGeneration = OnGeneration.FAIL,
    ) -> ChangesCut:
        if own:
            self._members.require_rejoined()
        request = CutRequest(
            namespace=self._catalog.get(namespace).id,
            since=since,
            until=until,
            changes_max=changes_max,
            at_heartbeat=at_heartbeat,
            own=own,
            on_generation=on_generation,
        )
        return cut_changes(self._node, self._site.safe_points, request, self._catalog.swap_after)


class LocalPeers(LocalPort):
    """The port of a node for calls of the other nodes."""

    def __init__(self, site: SiteParts, fate: Callable[[str], Fate]) -> None:
        super().__init__(site)
        self.fate = fate
        # Acquires the keeper's lease.  Set by a node of several.
        self.keep: Callable[[], None] = lambda: None
        # Runs commands over RESP.  Set by the server of a node of several.
        self.run: Callable[[PeerCommands], PeerReply] | None = None

    def peer_partitions(self) -> list[PartitionStatistics]:
        return partition_statistics(self._node, self._own())

    def peer_heat(self) -> list[PartitionHeat]:
        return partition_heat(self._node, self._own())

    def split_peer(self, key: bytes) -> tuple[int, int]:
        return self._node.reshaping.split(key)

    def merge_peer(self, left: int, right: int) -> int:
        return self._node.reshaping.merge(left, right)

    def move_peer(self, partition: int, node: int) -> int:
        return self._node.reshaping.move(partition, node)

    def refresh_peer(self) -> None:
        self._node.refresh()

    def keep_peer(self) -> None:
        self.keep()

    def run_commands(self, commands: PeerCommands) -> PeerReply:
        if self.run is None:
            raise InvalidConfiguration("the node that owns the keys serves no RESP; start it with --resp")
        return self.run(commands)

    def _own(self) -> list[LocalPartition]:
        return [each for each in self._node.map.partitions if not each.retired]

    def peer_versions(self) -> PeerVersions:
        return PeerVersions(
            self._node.committer.read_version(), resolved_versions(self._node), self._node.written()[0]
        )

    def settle_peer(self) -> Version:
        # Between two commit rounds, so that all versions minted for writes are below the returned one.
        with self._node.storage.settled():
            self._node.committer.sync_in_turn()
            version = self._node.clock.now()
        self._node.storage.entrance.catch_up()
        return version

    def pass_peer_version(self, version: Version) -> None:
        self._node.committer.observe(version)


class LocalPartitions(LocalPort):
    """The port to partitions."""

    def partitions(self) -> list[PartitionStatistics]:
        return partition_statistics(self._node, self._node.map.partitions)

    def split(self, namespace: str, key: bytes) -> tuple[int, int]:
        return self.split_at(encode_namespace(self._catalog.get(namespace).id) + key)

    def split_at(self, key: bytes) -> tuple[int, int]:
        """`split` before a qualified key."""
        return self._node.reshaping.split(key)

    def split_by_load(self, partition: int) -> SplitByLoad:
        key = halving_key(recent_keys(self._node, partition))
        if key is None:
            raise InvalidOption(
                f"the last writes to partition {partition} do not tell where to cut it: they went to one "
                "key, or there were none. Name a key: `floodmark partition split LOCATION NAMESPACE KEY`"
            )
        left, right = self.split_at(key)
        return SplitByLoad(left=left, right=right, key=key)

    def merge(self, left: int, right: int) -> int:
        return self._node.reshaping.merge(left, right)

    def heat(self) -> list[PartitionHeat]:
        return partition_heat(self._node, self._node.map.partitions)


def partition_statistics(node: Node, partitions: Sequence[LocalPartition]) -> list[PartitionStatistics]:
    """The counters of some partitions at a node; zeros for partitions of other nodes."""
    owners = {row.id: row.node for row in node.rows}
    now_ms = node.clock.physical_ms()
    return [
        PartitionStatistics(
            id=partition.id,
            range=partition.range,
            writes=partition.heat.writes,
            reads=partition.heat.reads,
            bytes_written=partition.heat.bytes_written,
            rate=partition.heat.rate(now_ms),
            node=owners.get(partition.id, node.number),
        )
        for partition in partitions
    ]


def partition_heat(node: Node, partitions: Sequence[LocalPartition]) -> list[PartitionHeat]:
    """The load of some partitions, as counted by a node."""
    now_ms = node.clock.time_source()
    return [
        PartitionHeat(id=partition.id, range=partition.range, samples=partition.heat.history(now_ms))
        for partition in partitions
    ]


def recent_keys(node: Node, partition_id: int) -> list[bytes]:
    """The qualified keys of the last writes to a partition: a page of its change log, and of its parents'."""
    row = next((row for row in node.rows if row.id == partition_id), None)
    if row is None:
        raise PartitionNotFound(
            f"no partition {partition_id}; `floodmark partition list` shows them", partition=partition_id
        )
    logs = {log.id: log for log in node.logs}
    keys: list[bytes] = []
    for log in (row.log, *logs[row.log].parents):
        start, end = encode_log_range(log, 0, VERSION_MAX)
        page = node.engine.scan(
            LOG, start, end, rows_max=PAGE_ROWS_MAX, bytes_max=PAGE_BYTES_MAX, reverse=True
        )
        for key, stored in page:
            decoded = decode_row(decode_log_key(key)[1], stored)
            if isinstance(decoded, CommitRow):
                keys += [each for each in decoded.keys if row.range.contains(each)]
    return keys


class LocalRetention(LocalPort):
    """The port to safe points and garbage collection."""

    def __init__(self, site: SiteParts, garbage: GarbageCollection) -> None:
        super().__init__(site)
        self._safe_points = site.safe_points
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


class LocalStatus(LocalPort):
    """The port to statistics."""

    def __init__(
        self,
        site: SiteParts,
        garbage: GarbageCollection,
        reader: ChangeReader,
        background: Background,
        *,
        replication: Callable[[], ReplicationStatistics],
        overview: Callable[[], SiteOverview],
    ) -> None:
        super().__init__(site)
        self._garbage = garbage
        self._reader = reader
        self._background = background
        self.replication = replication
        self.overview = overview

    def statistics(self) -> SiteStatistics:
        node, identity = self._node, self._site.identity
        changes, bytes_written = node.written()
        sizes, heartbeat = node.engine.sizes(), node.heartbeats.last
        is_stopped = node.storage.stopped
        return SiteStatistics(
            site=identity.site,
            site_id=identity.site_id,
            format=identity.format,
            version=node.clock.latest,
            resolved_version=node.committer.announced_version() if is_stopped else node.resolved_version(),
            clock_ahead_ms=node.clock.ahead_ms(),
            commits=node.committer.counting.commits,
            changes=changes,
            bytes_written=bytes_written,
            rounds=node.committer.counting.rounds,
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
            partitions=LocalPartitions(self._site).partitions(),
            garbage=self._garbage.total,
            readers=self._reader.statistics(),
            held_back_by=node.holds.long(),
        )
