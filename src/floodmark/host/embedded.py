"""A site in this process: one node on one engine, and the tables and upkeep of the site."""

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Protocol
from weakref import WeakSet

from floodmark.engine.base import EngineMeasures, Measured
from floodmark.feed import ChangeReader
from floodmark.feed.named.store import LocalFeedStore
from floodmark.feed.subscription.store import LocalSubscriptionStore
from floodmark.host.administration import OneProcess
from floodmark.host.background import Background, Collect
from floodmark.host.comparisons import Comparisons
from floodmark.host.coordination import LocalTransactions
from floodmark.host.directory import Identity
from floodmark.host.examination import examine
from floodmark.host.garbage import GarbageCollection
from floodmark.host.linking import LocalLinks
from floodmark.host.local import (
    LocalNamespaces,
    LocalPartitions,
    LocalPeers,
    LocalRetention,
    LocalStatus,
    LocalVersions,
)
from floodmark.host.overview import ServingFacts, look_over
from floodmark.host.parts import SiteNodes, SiteParts
from floodmark.host.ports import Host, NodePort
from floodmark.host.publishing import LocalGenerations
from floodmark.host.sharing import Sharing
from floodmark.host.transaction_logs import TransactionLogs
from floodmark.host.verifying import LocalVerification
from floodmark.model.errors import Closed, FloodmarkError
from floodmark.model.partition import (
    ApplyStream,
    GenerationStream,
    LoadStream,
    MergeStream,
    PutStream,
    PutUnchangedStream,
    StreamCommand,
)
from floodmark.model.stream import ChangeBatch, ChangesRequest
from floodmark.model.version import Version
from floodmark.partition import Node
from floodmark.routing import Router

# The open hosts of this process.
_hosts: "WeakSet[EmbeddedHost]" = WeakSet()


def _abandon_hosts() -> None:
    for host in list(_hosts):
        host.abandon()
    _hosts.clear()


# A fork copies the engine's memory but none of its threads, and the parent would overwrite the child's
# writes.
os.register_at_fork(after_in_child=_abandon_hosts)


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


def _collect_nothing(pause: Callable[[], bool]) -> None:
    pass


class EmbeddedHost(SiteParts, Host):
    """The host of a node in this process.  No thread runs before `start`.

    One of several nodes that does not keep the site (`keeps=False`) writes nothing that concerns the whole
    site, and collects no garbage.
    """

    feeds: LocalFeedStore
    subscriptions: LocalSubscriptionStore
    transactions: LocalTransactions

    def __init__(
        self,
        identity: Identity,
        node: Node,
        *,
        make_background: Callable[[Node, Collect], Background],
        background: bool,
        release: Callable[[], None],
        abandon: Callable[[Closed], None],
        log_retention: timedelta | None,
        disk: Path | None = None,
        keeps: bool = True,
        router: Router | None = None,
        make_versions: Callable[[SiteParts], LocalVersions] = LocalVersions,
        nodes: SiteNodes | None = None,
    ) -> None:
        reloads = len(node.storage.on_recovery)
        super().__init__(identity, node, nodes)
        self.disk = disk
        self.keeps = keeps
        self._release = release
        self._abandon = abandon
        self._closed = False
        self.router = Router(node, node.storage.entrance) if router is None else router
        self.reader = ChangeReader(node, self.safe_points, self.catalog.is_live, router=self.router)
        self.reader.swap_after = self.catalog.swap_after
        self.generations: LocalGenerations = LocalGenerations(self, self.reader)
        self.garbage = GarbageCollection(self, log_retention, self.generations.collect)
        self.background = make_background(node, self.garbage.run if keeps else _collect_nothing)
        self.background.watch_disk()
        self._has_background = background
        self.feeds = self._open_feeds(node)
        logs = TransactionLogs(node)
        self.subscriptions = LocalSubscriptionStore(
            self.safe_points,
            take=node.take,
            resolve_namespace=self._resolve_namespace,
            resolved_version=node.resolved_version,
            open_changes=self.changes,
            open_log=logs.open_pending,
        )
        self.transactions = LocalTransactions(
            self, self.router, self.subscriptions, logs, sweeps=background, keeps=keeps
        )
        self.membership = Sharing(self)
        self.namespaces = LocalNamespaces(self, self.membership)
        self.versions = make_versions(self)
        self.peers: LocalPeers = LocalPeers(self, self.transactions.fate)
        self.partitions: LocalPartitions = LocalPartitions(self)
        self.node_port: NodePort = OneProcess(self)
        self.retention = LocalRetention(self, self.garbage)
        self.replication = LocalLinks(self, self.membership, self.versions)
        self.facts, self.comparisons = ServingFacts(), Comparisons(node.storage)
        self.verification = LocalVerification(
            self, partial(examine, self, disk=disk), self.router, self.versions.read_version, self.comparisons
        )
        self.status = LocalStatus(
            self,
            self.garbage,
            self.reader,
            self.background,
            replication=self.replication.statistics,
            overview=lambda: look_over(self),
        )
        # The tables that this host loads again after a recovery of the storage.
        self._reloads = node.storage.on_recovery[reloads:]
        _hosts.add(self)

    def start(self) -> None:
        """Start the background threads, unless the site was made without `background`."""
        if not self._has_background:
            return
        try:
            self.transactions.start()
            self.background.start()
        except BaseException:
            self.transactions.close()
            raise

    def _open_feeds(self, node: Node) -> LocalFeedStore:
        return LocalFeedStore(
            self.safe_points,
            resolve_namespace=self._resolve_namespace,
            partition_ranges=lambda: [partition.range for partition in node.map.partitions],
            resolved_version=node.resolved_version,
        )

    def _resolve_namespace(self, name: str) -> tuple[int, Version]:
        row = self.catalog.get(name)
        return row.id, row.created_at

    def physical_ms(self) -> int:
        return self.node.clock.physical_ms()

    def version_ms(self) -> int:
        return self.node.clock.version_ms()

    def reading(self, version: Version, namespace: int) -> AbstractContextManager[object]:
        return self.safe_points.reading(version, namespace)

    def changes(self, request: ChangesRequest) -> Iterator[ChangeBatch]:
        if request.own:
            self.members.require_rejoined()
        return self.reader.read(request)

    def wake_readers(self) -> None:
        self.node.committer.followers.wake_all()

    def write_stream(self, command: StreamCommand) -> LocalWriteStream:
        self.node.require_open()
        commit: Callable[..., int]
        match command:
            case PutStream():
                commit = self.router.put
            case MergeStream():
                commit = self.router.merge
            case LoadStream():
                commit = self.router.load
            case PutUnchangedStream():
                commit = partial(self.router.put_unchanged, since=command.since)
            case ApplyStream(link=link):
                commit = partial(self.router.apply, link=link)
            case GenerationStream(namespace=namespace, number=number):
                return LocalWriteStream(partial(self.generations.load_generation, namespace, number))
        return LocalWriteStream(partial(commit, durable=command.durable))

    def engine_measures(self) -> EngineMeasures | None:
        engine = self.node.engine
        return engine.measures() if isinstance(engine, Measured) else None

    def abandon(self) -> None:
        """Stop serving in a forked process.  Only the process that opened the site closes it."""
        self._closed = True
        refusal = Closed(
            f"site {self.identity.site!r} was opened before this process was forked, and belongs to the "
            "process that opened it. Open it in one process only; others connect to its server, or are "
            "started with multiprocessing's method 'spawn'"
        )
        self.node.abandon(refusal)
        self._abandon(refusal)

    def retire(self) -> None:
        """Stop the background threads: another host serves the engine from now on, which stays open."""
        self._closed = True
        _hosts.discard(self)
        self.background.stop()
        try:
            self.transactions.close()
        finally:
            self.subscriptions.close()
            storage = self.node.storage
            with storage.exclusive():
                storage.on_recovery[:] = [each for each in storage.on_recovery if each not in self._reloads]

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


class BuildHost(Protocol):
    """Makes the host of a node.  The keywords are those of `EmbeddedHost` that a node of several needs."""

    def __call__(
        self,
        node: Node,
        *,
        keeps: bool = True,
        router: Router | None = None,
        make_versions: Callable[[SiteParts], LocalVersions] = LocalVersions,
        nodes: SiteNodes | None = None,
    ) -> EmbeddedHost:
        """Return the host, before its threads are started."""
        ...
