"""A site: one place that takes reads and writes, and remembers every change."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from types import TracebackType

from msgspec import UNSET, UnsetType

from floodmark.codec.ordered import encode_namespace
from floodmark.model.change import Change, Heartbeat
from floodmark.model.errors import Closed, InvalidRange, InvalidVersion
from floodmark.model.limits import KEY_BYTES_MAX
from floodmark.model.ranges import KeyRange
from floodmark.model.version import Version, moment_of
from floodmark.partition import Node
from floodmark.site.arguments import (
    At,
    check_range,
    qualify_range,
    refuse_key,
    to_version,
)
from floodmark.site.background import Background
from floodmark.site.catalog import Catalog, NamespaceSettings
from floodmark.site.changes import ChangeReader
from floodmark.site.directory import Identity, require_name
from floodmark.site.garbage import GarbageCollection
from floodmark.site.namespace import Namespace
from floodmark.site.routing import Router
from floodmark.site.safepoints import LIFETIME, SafePoint, SafePoints
from floodmark.site.statistics import (
    GarbageReport,
    NamespaceStatistics,
    PartitionHeat,
    PartitionStatistics,
    SiteStatistics,
)


@dataclass(frozen=True, kw_only=True)
class _Parts:
    node: Node
    router: Router
    catalog: Catalog
    safe_points: SafePoints
    garbage: GarbageCollection
    changes: ChangeReader
    background: Background


class Site:
    """Holds namespaces.  Made by `floodmark.open`; close it, or use it in a `with` block."""

    def __init__(
        self,
        identity: Identity,
        node: Node,
        *,
        durable: bool,
        start_background: Callable[[Node, GarbageCollection], Background],
        release: Callable[[], None],
    ) -> None:
        self.name = identity.site
        self.id = identity.site_id
        self._format = identity.format
        self._durable = durable
        self._release = release
        self._node = node
        catalog = Catalog(node.storage, node.clock.now)
        safe_points = SafePoints(node.storage, node.clock.time_source, catalog, node.retention)
        garbage = GarbageCollection(node, catalog, safe_points)
        self._parts = _Parts(
            node=node,
            router=Router(node),
            catalog=catalog,
            safe_points=safe_points,
            garbage=garbage,
            changes=ChangeReader(node, safe_points, catalog.names, self.id),
            background=start_background(node, garbage),
        )
        self._closed = False

    def __enter__(self) -> "Site":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Site({self.name!r}, id={self.id})"

    def close(self) -> None:
        """Finish what is under way, make everything durable and let go.  Closing twice is harmless."""
        if self._closed:
            return
        self._closed = True
        self._parts.background.stop()
        try:
            self._node.close()
        finally:
            self._release()

    @property
    def _open(self) -> "_Parts":
        """What the site consists of, for everyone who may still use it."""
        if self._closed:
            raise Closed(f"site {self.name!r} was closed; open it again")
        return self._parts

    # Namespaces

    def create_namespace(
        self,
        name: str,
        *,
        merge: str = "last_write",
        ttl: timedelta | None = None,
        retention: timedelta | None = None,
    ) -> Namespace:
        """Add a namespace.  `ttl` holds for writes that name none; `retention` is 24 hours if not given."""
        settings = (
            NamespaceSettings(merge=merge, ttl=ttl)
            if retention is None
            else NamespaceSettings(merge=merge, ttl=ttl, retention=retention)
        )
        self._open.catalog.create(name, settings)
        return self.namespace(name)

    def namespace(self, name: str) -> Namespace:
        """The namespace of a name, which must be there."""
        return Namespace(
            self._open.catalog.get(name),
            self._open.router,
            self._open.node.committer.read_version,
            self._open.node.clock.physical_ms,
            self._open.safe_points,
            durable=self._durable,
        )

    def namespaces(self) -> list[str]:
        """The names of all namespaces, in order."""
        return [row.name for row in self._open.catalog.live()]

    def update_namespace(
        self,
        name: str,
        *,
        ttl: timedelta | UnsetType | None = UNSET,
        retention: timedelta | UnsetType = UNSET,
    ) -> Namespace:
        """Change the settings of a namespace; what is not named stays.  The merge policy is for life."""

        def change(settings: NamespaceSettings) -> NamespaceSettings:
            return replace(
                settings,
                ttl=settings.ttl if ttl is UNSET else ttl,
                retention=settings.retention if retention is UNSET else retention,
            )

        self._open.catalog.update(name, change)
        return self.namespace(name)

    def drop_namespace(self, name: str) -> None:
        """Drop a namespace.  It is gone at once; its space is freed after its retention."""
        self._open.catalog.drop(name)

    # Changes

    def changes(
        self,
        namespace: str | None = None,
        *,
        since: At = 0,
        until: At | None = None,
        follow: bool = False,
        start_key: bytes = b"",
        end_key: bytes | None = None,
        prefix: bytes | None = None,
    ) -> Iterator[Change]:
        """The changes of one namespace or of all, in commit order.

        `since` is exclusive: pass the version of the last change that you have.  It ends at the
        present, or at `until`; with `follow=True` it waits for more.
        """
        after_version = 0 if since == 0 else self._reached(since)
        until_version = None if until is None else to_version(until)
        if until_version is not None and until_version < after_version:
            raise InvalidVersion(f"until {until_version} lies before since {after_version}")
        keys = check_range(start_key, end_key, prefix)
        if namespace is None:
            if keys != KeyRange():
                raise InvalidRange("a key range needs a namespace; name the one that it is in")
            scope, beginning = None, self._open.node.born_version()
        else:
            row = self._open.catalog.get(namespace)
            keys = qualify_range(encode_namespace(row.id), keys)
            scope, beginning = row.id, row.created_at
        return self._open.changes.read(
            keys, max(after_version, beginning), until_version, follow=follow, namespace=scope
        )

    def _reached(self, at: At) -> Version:
        """The version of a moment that is not in the future."""
        version = to_version(at)
        self._open.node.observe(version)
        return version

    def resolved_version(self) -> Version:
        """Every change at or below this is durable and published, and none will be added."""
        return self._open.node.resolved_version()

    def now(self) -> Version:
        """A fresh version, above everything that this site has seen."""
        return self._open.node.committer.now()

    def sync(self) -> None:
        """Make durable what was written with durability "async"."""
        self._open.node.committer.sync()

    def heartbeat(self) -> Heartbeat:
        """Write a heartbeat now.  A site does so each second by itself."""
        return self._open.node.heartbeat()

    # Partitions

    def partitions(self) -> list[PartitionStatistics]:
        """The partitions in order of keys."""
        return [
            PartitionStatistics(
                id=partition.id,
                range=partition.range,
                writes=partition.heat.writes,
                reads=partition.heat.reads,
                bytes_written=partition.heat.bytes_written,
            )
            for partition in self._open.node.map.partitions
        ]

    def split(self, namespace: str, key: bytes) -> tuple[int, int]:
        """Cut the partition that holds a key in two, before that key; the ids of the halves."""
        if type(key) is not bytes or not 0 < len(key) <= KEY_BYTES_MAX:
            raise refuse_key(key)
        row = self._open.catalog.get(namespace)
        return self._open.node.split(encode_namespace(row.id) + key)

    def merge(self, left: int, right: int) -> int:
        """Join two neighbouring partitions; the id of the new one."""
        return self._open.node.merge(left, right)

    def heat(self) -> list[PartitionHeat]:
        """How busy each partition was over the last minutes."""
        now_ms = self._open.node.clock.time_source()
        return [
            PartitionHeat(id=partition.id, range=partition.range, samples=partition.heat.history(now_ms))
            for partition in self._open.node.map.partitions
        ]

    # Garbage collection

    def hold_safe_point(
        self,
        name: str,
        version: At,
        *,
        lifetime: timedelta = LIFETIME,
        namespace: str | None = None,
    ) -> SafePoint:
        """Keep what a reader at `version` sees, until released or `lifetime` is over."""
        require_name(name, "safe point")
        scope = None if namespace is None else self._open.catalog.get(namespace).id
        return self._open.safe_points.hold(name, to_version(version), lifetime, scope)

    def release_safe_point(self, name: str) -> None:
        """Let garbage collection go on."""
        self._open.safe_points.release(name)

    def safe_points(self) -> list[SafePoint]:
        """The safe points that hold now."""
        return self._open.safe_points.list()

    def collect_garbage(self) -> GarbageReport:
        """Remove versions and changes behind the safe points.  A site does so by itself as well."""
        return self._open.garbage.run()

    # Statistics

    def statistics(self) -> SiteStatistics:
        """The site at this moment."""
        node = self._open.node
        counters = node.committer.counters
        changes, bytes_written = node.written()
        sizes = node.engine.sizes()
        heartbeat = node.last_heartbeat
        return SiteStatistics(
            site=self.name,
            site_id=self.id,
            format=self._format,
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
            background_error=self._open.background.error,
            namespaces=[
                NamespaceStatistics(
                    name=row.name,
                    id=row.id,
                    merge=row.merge,
                    oldest_version=node.retention.collected_version(row.id),
                    collected_horizon=node.retention.collected_horizon(row.id),
                )
                for row in self._open.catalog.live()
            ],
            partitions=self.partitions(),
            garbage=self._open.garbage.total,
        )
