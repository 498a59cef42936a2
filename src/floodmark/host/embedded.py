"""A site in this process: one node on one engine, and what a site keeps beside its data."""

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from weakref import WeakSet

from msgspec import UNSET

from floodmark.codec.ordered import encode_namespace
from floodmark.feed import ChangeReader, SafePoint, SafePoints
from floodmark.feed.named.store import LocalFeedStore
from floodmark.feed.reading.cut import ChangesCut, CutRequest, cut_changes
from floodmark.feed.subscription.store import LocalSubscriptionStore
from floodmark.host.background import Background
from floodmark.host.catalog import Catalog, NamespaceRow, NamespaceSettings
from floodmark.host.coordination import LocalTransactions
from floodmark.host.directory import Identity
from floodmark.host.epochs import Epochs
from floodmark.host.examination import Finding, examine
from floodmark.host.garbage import GarbageCollection
from floodmark.host.linking import LocalLinks
from floodmark.host.ports import NamespaceUpdate, check_stream_kind
from floodmark.host.sharing import Sharing
from floodmark.host.statistics import (
    GarbageReport,
    NamespaceStatistics,
    PartitionHeat,
    PartitionStatistics,
    ReplicationStatistics,
    SiteStatistics,
)
from floodmark.host.transaction_logs import TransactionLogs
from floodmark.host.verifying import LocalRecords
from floodmark.model.actions import SITE_OWNER
from floodmark.model.change import Heartbeat
from floodmark.model.errors import Closed, FloodmarkError
from floodmark.model.partition import LinkGuard
from floodmark.model.record import FoundRecord, Repair
from floodmark.model.stream import ChangeBatch, ChangesRequest
from floodmark.model.version import Version, moment_of
from floodmark.partition import Node
from floodmark.replication.applied import Applied
from floodmark.replication.links import LinkPosition, Links
from floodmark.replication.members import Members
from floodmark.replication.planning import cut_link
from floodmark.replication.step import LinkStep, NamespaceCut, NamespacePosition
from floodmark.replication.topology import Topology
from floodmark.routing import Router

# The hosts that are open in this process.
_hosts: "WeakSet[EmbeddedHost]" = WeakSet()


def _abandon_hosts() -> None:
    for host in list(_hosts):
        host.abandon()
    _hosts.clear()


# A fork copies the engine's memory and none of its threads: what the child wrote, the parent would overwrite.
os.register_at_fork(after_in_child=_abandon_hosts)


class LocalAdministration:
    """Administers a node of this process."""

    def __init__(self, host: "EmbeddedHost") -> None:
        self._host = host
        self._identity = host.identity
        self._node = host.node
        self._catalog = host.catalog
        self._safe_points = host.safe_points
        self._epochs = host.epochs
        self._garbage = host.garbage
        self._background = host.background
        self._reader = host.reader
        self._sharing = host.sharing
        self._links = LocalLinks(host.identity, host.node, host.catalog, host.links, host.members)
        self._records = LocalRecords(host.node, host.catalog, host.members)

    # Namespaces

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

    # Versions

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

    # Partitions

    def partitions(self) -> list[PartitionStatistics]:
        return [
            PartitionStatistics(
                id=partition.id,
                range=partition.range,
                writes=partition.heat.writes,
                reads=partition.heat.reads,
                bytes_written=partition.heat.bytes_written,
            )
            for partition in self._node.map.partitions
        ]

    def split(self, namespace: str, key: bytes) -> tuple[int, int]:
        row = self._catalog.get(namespace)
        return self._node.split(encode_namespace(row.id) + key)

    def merge(self, left: int, right: int) -> int:
        return self._node.merge(left, right)

    def heat(self) -> list[PartitionHeat]:
        now_ms = self._node.clock.time_source()
        return [
            PartitionHeat(id=partition.id, range=partition.range, samples=partition.heat.history(now_ms))
            for partition in self._node.map.partitions
        ]

    # Streams

    def open_epoch(self, namespace: str, stream: str, epoch: int, owner: str = SITE_OWNER) -> Version:
        return self._epochs.open(self._catalog.get(namespace).id, stream, epoch, owner)

    def cut_changes(
        self,
        namespace: str,
        since: Version,
        changes_max: int | None,
        until: Version | None,
        at_heartbeat: bool,
        own: bool = False,
    ) -> ChangesCut:
        if own:
            self._host.members.require_rejoined()
        request = CutRequest(
            namespace=self._catalog.get(namespace).id,
            since=since,
            until=until,
            changes_max=changes_max,
            at_heartbeat=at_heartbeat,
            own=own,
        )
        return cut_changes(self._node, self._safe_points, request)

    # Garbage collection

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

    # Other sites

    def topology(self) -> Topology | None:
        return self._sharing.topology()

    def set_topology(self, topology: Topology) -> None:
        self._sharing.set_topology(topology)

    def rewritable_version(self, namespace: str) -> Version:
        return self._links.rewritable_version(namespace)

    def shared_since(self, namespace: str, position: Version) -> Version:
        return self._sharing.shared_since(namespace, position)

    def returned_version(self) -> Version:
        return self._host.members.returned_version()

    def note_rewritten(self, namespace: str, since: Version) -> None:
        self._sharing.note_rewritten(namespace, since)

    def declare_loaded(self, namespace: str) -> Version:
        return self._sharing.declare_loaded(namespace)

    def adopt_watermark(self, namespace: str, watermark: dict[int, Version], horizon: Version) -> None:
        self._links.adopt(namespace, watermark, horizon)

    def finish_rejoining(self) -> list[str]:
        return self._links.finish_rejoining()

    def links(self) -> list[LinkPosition]:
        return self._links.positions()

    def link_positions(self, source_id: int, namespaces: list[str]) -> list[NamespacePosition]:
        return self._links.positions_of(source_id, namespaces)

    def cut_link(self, positions: dict[str, Version], changes_max: int | None) -> list[NamespaceCut]:
        return cut_link(self, self._identity.site, positions, changes_max)

    def advance_link(self, step: LinkStep, applied: Applied) -> None:
        self._links.advance(step, applied)

    def stall_link(self, source_id: int, namespaces: list[str], reason: str) -> None:
        self._links.stall(source_id, namespaces, reason)

    def watermark(self, namespace: str, at: Version | None) -> dict[int, Version]:
        return self._links.watermark(namespace, at)

    def find_records(
        self, namespace: str, keys: list[bytes], at: Version | None, thin: bool
    ) -> list[FoundRecord | None]:
        return self._records.find(namespace, keys, at, thin=thin)

    def repair_records(self, namespace: str, repairs: list[Repair]) -> list[bool]:
        return self._records.repair(namespace, repairs)

    def replication(self) -> ReplicationStatistics:
        return self._links.statistics()

    # Statistics

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
            partitions=self.partitions(),
            garbage=self._garbage.total,
            readers=self._reader.statistics(),
            held_back_by=node.holds.long(),
        )

    def examine(self, quick: bool) -> list[Finding]:
        return examine(self._host, quick, disk=self._host.disk)


class LocalWriteStream:
    """A write stream to a node of this process: a batch is committed when it is sent."""

    def __init__(self, commit: Callable[[Mapping[bytes, bytes]], int]) -> None:
        self._commit = commit

    def send(self, rows: Mapping[bytes, bytes]) -> "Future[int]":
        future: Future[int] = Future()
        try:
            future.set_result(self._commit(rows))
        except FloodmarkError as error:
            future.set_exception(error)
        return future

    def close(self) -> None:
        pass


class EmbeddedHost:
    """A node of this process and everything around it.

    No thread runs before `start`, so that a site which cannot be opened leaves none behind.  `sweeps` says
    that it will be called.
    """

    def __init__(
        self,
        identity: Identity,
        node: Node,
        *,
        make_background: Callable[[Node, GarbageCollection], Background],
        sweeps: bool,
        release: Callable[[], None],
        abandon: Callable[[Closed], None],
        log_retention: timedelta | None,
        disk: Path | None = None,
    ) -> None:
        self._abandon = abandon
        self.identity = identity
        self.disk = disk
        self.node = node
        self._release = release
        self.catalog = Catalog(node.storage, node.clock.now)
        self.safe_points = SafePoints(
            node.storage, node.clock.time_source, self.catalog.live_ids, node.retention
        )
        self.epochs = Epochs(node.storage, node.committer.now, node.clock.time_source, self.catalog.is_live)
        self.members = Members(node.storage, node.clock.time_source, identity.site, identity.site_id)
        self.links = Links(node, self.members, identity.site_id, self.catalog.name_of)
        node.watermarks = self.links.watermarks
        self.sharing = Sharing(node, self.catalog, self.members, self.links, self.safe_points)
        self.garbage = GarbageCollection(
            node,
            self.catalog,
            self.safe_points,
            log_retention,
            epochs=self.epochs,
            links=self.links,
            members=self.members,
        )
        self.reader = ChangeReader(node, self.safe_points, self.catalog.is_live)
        self.background = make_background(node, self.garbage)
        self.router = Router(node, node.storage.entrance)
        self.feeds = LocalFeedStore(
            node.storage,
            self.safe_points,
            node.clock.time_source,
            resolve_namespace=self._resolve_namespace,
            partition_ranges=lambda: [partition.range for partition in node.map.partitions],
            resolved_version=node.resolved_version,
        )
        logs = TransactionLogs(node)
        self.subscriptions = LocalSubscriptionStore(
            node.storage,
            self.safe_points,
            node.clock.time_source,
            take=node.take,
            resolve_namespace=self._resolve_namespace,
            resolved_version=node.resolved_version,
            open_changes=self.changes,
            open_log=logs.open_pending,
        )
        self.transactions = LocalTransactions(node, self.catalog, self.subscriptions, logs, sweeps=sweeps)
        self.administration = LocalAdministration(self)
        self._closed = False
        _hosts.add(self)

    def start(self) -> None:
        """Begin what the site does by itself."""
        try:
            self.transactions.start()
            self.background.start()
        except BaseException:
            self.transactions.close()
            raise

    def _resolve_namespace(self, name: str) -> tuple[int, Version]:
        row = self.catalog.get(name)
        return row.id, row.created_at

    def physical_ms(self) -> int:
        return self.node.clock.physical_ms()

    def reading(self, version: Version, namespace: int) -> AbstractContextManager[object]:
        return self.safe_points.reading(version, namespace)

    def changes(self, request: ChangesRequest) -> Iterator[ChangeBatch]:
        if request.own:
            self.members.require_rejoined()
        return self.reader.read(request)

    def write_stream(
        self,
        *,
        durable: bool,
        apply: bool = False,
        load: bool = False,
        merge: bool = False,
        unchanged_since: Version | None = None,
        link: LinkGuard | None = None,
    ) -> LocalWriteStream:
        check_stream_kind(apply, load, merge, unchanged_since)
        self.node.require_open()
        router = self.router
        if unchanged_since is not None:
            return LocalWriteStream(partial(router.put_unchanged, since=unchanged_since, durable=durable))
        if link is not None:
            admit = partial(self.links.admit, link)
            return LocalWriteStream(partial(router.apply, durable=durable, admit=admit))
        commit = router.apply if apply else router.load if load else router.merge if merge else router.put
        return LocalWriteStream(partial(commit, durable=durable))

    def abandon(self) -> None:
        """Serve nothing in a process that was forked; closing is for the one that opened the site."""
        self._closed = True
        refusal = Closed(
            f"site {self.identity.site!r} was opened before this process was forked, and belongs to the "
            "process that opened it. Open it in one process only; others connect to its server, or are "
            "started with multiprocessing's method 'spawn'"
        )
        self.node.abandon(refusal)
        self._abandon(refusal)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        _hosts.discard(self)
        self.background.stop()
        try:
            self.transactions.close()
            self.subscriptions.close()
            self.node.close()
        finally:
            self._release()
