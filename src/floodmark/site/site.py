"""A site: one place that takes reads and writes, and remembers every change."""

from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from itertools import count
from os import getpid
from socket import gethostname
from typing import Any, Literal, TypedDict, TypeVar, Unpack, overload
from uuid import uuid4

from msgspec import UNSET, UnsetType

from floodmark.codec.objects import Codec, CodecName, find_codec
from floodmark.feed import LIFETIME, Item, SafePoint
from floodmark.feed.reading.items import OnDamaged
from floodmark.feed.safepoints import require_lifetime
from floodmark.feed.subscription.consumer import Since as Start
from floodmark.feed.subscription.consumer import Subscription, SubscriptionOptions, open_subscription
from floodmark.feed.subscription.subscriptions import UNACKED_DEFAULT, SubscriptionSpec
from floodmark.host.catalog import RETENTION, NamespaceSettings
from floodmark.host.ports import Host, NamespaceUpdate
from floodmark.host.statistics import (
    GarbageReport,
    ReplicationStatistics,
    SiteStatistics,
)
from floodmark.layers import LargeValues
from floodmark.layers.ports import layer_of
from floodmark.merge.policies import MergePolicy
from floodmark.model.change import Change, Heartbeat, Resolved, Stamp
from floodmark.model.errors import (
    Closed,
    InvalidArgument,
    InvalidVersion,
    NamespaceExists,
    WrongPolicy,
)
from floodmark.model.names import require_name
from floodmark.model.stream import ChangeBatch, ChangesRequest, OnGeneration
from floodmark.model.version import Version
from floodmark.replication.topology import Topology
from floodmark.site.arguments import (
    At,
    Reaction,
    Since,
    check_kind,
    check_range,
    to_reaction,
    to_version,
)
from floodmark.site.batch import AtomicCalls
from floodmark.site.beginning import begin_at, decode_items, decoder_of, find_scope
from floodmark.site.codecs import CodedNamespace, with_codec
from floodmark.site.feeds import Feeds, Subscriptions
from floodmark.site.generations import Generations
from floodmark.site.namespace import CounterNamespace, Namespace, open_namespace
from floodmark.site.partitions import PartitionCalls
from floodmark.site.read_versions import SLOW_ANSWER, ReadVersion
from floodmark.site.transacting import TransactionCalls

Result = TypeVar("Result")
Value = TypeVar("Value")


class _ChangesOptions(TypedDict, total=False):
    since: Since
    until: At | None
    follow: bool
    start_key: bytes
    end_key: bytes | None
    prefix: bytes | None
    before_images: bool
    on_damaged: OnDamaged | None
    on_generation: Reaction


class _Settings(TypedDict, total=False):
    ttl: timedelta | None
    retention: timedelta | None
    exist_ok: bool


class _CreateOptions(_Settings, total=False):
    merge: MergePolicy


class Site(AtomicCalls, PartitionCalls, TransactionCalls):
    """Holds namespaces.  Made by `floodmark.open` or `floodmark.connect`; close it, or use `with`."""

    def __init__(
        self,
        host: Host,
        *,
        durable: bool,
        read_version: ReadVersion = "fresh",
        slow_answer: timedelta = SLOW_ANSWER,
    ) -> None:
        super().__init__(host, read_version, slow_answer)
        self.name = host.identity.site
        self.id = host.identity.site_id
        self._durable = durable
        self._host = host
        self._closed = False
        # Names this object among the runners of feeds and the consumers of subscriptions.
        self._openings = count()
        self._holder = f"{gethostname()}-{getpid()}-{uuid4().hex[:8]}"

    def __enter__(self) -> "Site":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Site({self.name!r}, id={self.id})"

    def close(self) -> None:
        """Finish what is under way, make everything durable and let go.  Closing twice is harmless."""
        self._closed = True
        self._watches.close()
        self._host.close()

    @property
    def host(self) -> Host:
        """The host of an open site; Closed after `close`."""
        if self._closed:
            raise Closed(f"site {self.name!r} was closed; open it again")
        return self._host

    # Namespaces

    @overload
    def create_namespace(
        self, name: str, *, merge: Literal["counter"], **settings: Unpack[_Settings]
    ) -> CounterNamespace: ...

    @overload
    def create_namespace(
        self, name: str, *, merge: Literal["last_write", "fields"] = ..., **settings: Unpack[_Settings]
    ) -> Namespace: ...

    @overload
    def create_namespace(
        self, name: str, *, merge: MergePolicy, **settings: Unpack[_Settings]
    ) -> Namespace[Any]: ...

    @overload
    def create_namespace(
        self, name: str, *, large_values: Literal[True], **settings: Unpack[_CreateOptions]
    ) -> LargeValues: ...

    @overload
    def create_namespace(
        self, name: str, *, codec: Literal["text"], **settings: Unpack[_CreateOptions]
    ) -> CodedNamespace[str]: ...

    @overload
    def create_namespace(
        self, name: str, *, codec: Literal["json"], **settings: Unpack[_CreateOptions]
    ) -> CodedNamespace[Any]: ...

    @overload
    def create_namespace(
        self, name: str, *, codec: Codec[Value], **settings: Unpack[_CreateOptions]
    ) -> CodedNamespace[Value]: ...

    def create_namespace(
        self,
        name: str,
        *,
        merge: MergePolicy = "last_write",
        ttl: timedelta | None = None,
        retention: timedelta | None = None,
        exist_ok: bool = False,
        codec: CodecName | Codec[Any] | None = None,
        large_values: bool = False,
    ) -> Namespace[Any] | CodedNamespace[Any] | LargeValues:
        """Add a namespace.  `ttl` holds for writes that name none; `retention` is 24 hours if not given.

        `merge` says how writes of several sites to a record become one: "last_write" keeps the last value;
        "fields" merges a JSON object field by field; "counter" adds numbers up, and reads return int.  With
        `exist_ok` a namespace that is there is returned with the settings that it has, if it merges so; else
        NamespaceExists is raised.  For `codec`, see `namespace`.  With `large_values` it takes values of any
        size; open it again by `namespace(name, large_values=True)`.
        """
        require_name(name, "namespace")
        coder = find_codec(codec)
        if large_values:
            _require_plain(merge == "last_write" and ttl is None and coder is None)
        kept = RETENTION if retention is None else retention
        settings = NamespaceSettings(merge=merge, ttl=ttl, retention=kept)
        try:
            row = self.host.namespaces.create_namespace(name, settings)
        except NamespaceExists:
            if not exist_ok:
                raise
            row = self.host.namespaces.find_namespace(name)
            if row.merge != merge:
                raise NamespaceExists(
                    f"namespace {name!r} is there and merges by {row.merge!r}, not {merge!r}, which it keeps "
                    "for life; choose another name",
                    namespace=name,
                ) from None
        if large_values:
            return LargeValues(self, name)
        return with_codec(open_namespace(row, self._host, durable=self._durable), coder)

    @overload
    def namespace(self, name: str) -> Namespace[Any]: ...

    @overload
    def namespace(self, name: str, *, codec: Literal["text"]) -> CodedNamespace[str]: ...

    @overload
    def namespace(self, name: str, *, codec: Literal["json"]) -> CodedNamespace[Any]: ...

    @overload
    def namespace(self, name: str, *, codec: Codec[Value]) -> CodedNamespace[Value]: ...

    @overload
    def namespace(self, name: str, *, large_values: Literal[True]) -> LargeValues: ...

    def namespace(
        self, name: str, *, codec: CodecName | Codec[Any] | None = None, large_values: bool = False
    ) -> Namespace[Any] | CodedNamespace[Any] | LargeValues:
        """The namespace of a name, which must be there.

        Keys and values are bytes, and counters int (the handle is a `CounterNamespace`).  With `codec` keys
        are text, and values text ("text"), what JSON can hold ("json"), or what a `Codec` of your own makes
        of the bytes.  With `large_values` it is the one that was created so.
        """
        require_name(name, "namespace")
        coder = find_codec(codec)
        row = self.host.namespaces.find_namespace(name)
        if large_values:
            _require_plain(coder is None)
            return LargeValues(self, name)
        return with_codec(open_namespace(row, self._host, durable=self._durable), coder)

    def namespaces(self) -> list[str]:
        """The names of all namespaces, in order."""
        rows = self.host.namespaces.list_namespaces()
        return [row.name for row in rows if row.dropped_at is None]

    def update_namespace(
        self,
        name: str,
        *,
        ttl: timedelta | UnsetType | None = UNSET,
        retention: timedelta | UnsetType = UNSET,
    ) -> Namespace[Any]:
        """Change the settings of a namespace; what is not named stays.  The merge policy is for life.

        WrongPolicy for a `ttl` where a layer keeps its rows, which belong together and must not expire.
        """
        require_name(name, "namespace")
        NamespaceSettings(
            ttl=None if ttl is UNSET else ttl, retention=RETENTION if retention is UNSET else retention
        )
        if isinstance(ttl, timedelta) and (layer := layer_of(self.namespace(name))) is not None:
            raise WrongPolicy(
                f"namespace {name!r} holds {layer.decode(errors='replace')}, whose rows must not expire; "
                "leave its time to live out, and delete or trim by the calls of the layer",
                namespace=name,
            )
        update = NamespaceUpdate(ttl=ttl, retention=retention)
        row = self.host.namespaces.update_namespace(name, update)
        return open_namespace(row, self._host, durable=self._durable)

    def drop_namespace(self, name: str) -> None:
        """Drop a namespace.  It is gone at once; its space is freed after its retention."""
        require_name(name, "namespace")
        self.host.namespaces.drop_namespace(name)

    # Changes

    @overload
    def changes(
        self,
        namespace: str | None = None,
        *,
        resolved_markers: Literal[False] = False,
        heartbeats: Literal[False] = False,
        **options: Unpack[_ChangesOptions],
    ) -> Iterator[Change]: ...

    @overload
    def changes(
        self,
        namespace: str | None = None,
        *,
        resolved_markers: bool = False,
        heartbeats: bool = False,
        **options: Unpack[_ChangesOptions],
    ) -> Iterator[Item]: ...

    def changes(
        self,
        namespace: str | None = None,
        *,
        since: Since = 0,
        until: At | None = None,
        follow: bool = False,
        start_key: bytes = b"",
        end_key: bytes | None = None,
        prefix: bytes | None = None,
        before_images: bool = False,
        resolved_markers: bool = False,
        heartbeats: bool = False,
        on_damaged: OnDamaged | None = None,
        on_generation: Reaction = OnGeneration.FAIL,
    ) -> Iterator[Item]:
        """The changes of one namespace or of all, in commit order.

        `since` is exclusive: a checkpoint (the version of a `Resolved` marker, or of the last change of a
        whole commit), a moment, "beginning", "snapshot" or "now".  If changes above it are gone,
        `VersionCollected` is raised.  The stream ends at the present, or at `until`; with `follow=True` it
        waits for more.

        A "snapshot" first yields every live key at one version, as changes with `snapshot` set, in order of
        keys, then the changes above it.  The last `Resolved` marker as `since` resumes in the middle of it.

        With `before_images` an update is two changes, as in Delta's change data feed.  `resolved_markers`
        adds `Resolved` items, which are checkpoints; `heartbeats` adds the site's heartbeats.  A damaged
        change raises `Corruption`, or is passed to `on_damaged` and left out.

        Where a data set was published, the stream fails with `GenerationSwapped`.  With `on_generation` it
        goes on instead: with a change of type `generation`, and the "difference" as puts and deletes, or a
        "snapshot" of all rows, which replace what was read so far.
        """
        keys = check_range(start_key, end_key, prefix)
        reaction = to_reaction(on_generation)
        if namespace is not None:
            require_name(namespace, "namespace")

        host = self.host

        def open_batches(start: Resolved) -> Iterator[ChangeBatch]:
            until_version = None if until is None else to_version(until)
            if until_version is not None and until_version < start.version:
                raise InvalidVersion(f"until {until_version} lies before since {start.version}")
            qualified, scope, created_at = find_scope(host, namespace, keys)
            return host.changes(
                ChangesRequest(
                    keys=qualified,
                    namespace=scope,
                    since=max(start.version, created_at),
                    until=until_version,
                    follow=follow,
                    before_images=before_images,
                    heartbeats=heartbeats,
                    snapshot=start.snapshot,
                    on_generation=reaction,
                )
            )

        batches = begin_at(host, since, open_batches, until=until)
        return decode_items(host, batches, resolved_markers=resolved_markers, on_damaged=on_damaged)

    def subscribe(
        self,
        name: str,
        namespace: str,
        *,
        start: Start = "snapshot",
        start_key: bytes = b"",
        end_key: bytes | None = None,
        prefix: bytes | None = None,
        holder: str | None = None,
        unacked_max: int = UNACKED_DEFAULT,
        on_generation: Reaction = OnGeneration.FAIL,
        options: SubscriptionOptions | None = None,
    ) -> Subscription:
        """A durable subscription to the changes of a namespace, made if it is not there.

        It remembers what was acknowledged, change by change, and delivers the rest again.  One consumer at
        a time has it; `holder` names this one to the others, and a consumer with the same name takes
        over at once.  A new subscription begins at `start`: with a snapshot of every key, or at a place
        where `changes` may begin.  `on_generation` is as for `changes`.

        >>> import floodmark, tempfile
        >>> with floodmark.open(tempfile.mkdtemp(), site="oslo") as site:
        ...     _ = site.create_namespace("users").put(b"ada", b"countess")
        ...     with site.subscribe("indexer", "users") as subscription:
        ...         delivery = next(iter(subscription))
        ...         delivery.acknowledge()
        ...     delivery.change.key, site.subscriptions.statistics("indexer").unacked
        (b'ada', 0)
        """
        require_name(namespace, "namespace")
        spec = SubscriptionSpec(
            name=name,
            namespace=namespace,
            keys=check_range(start_key, end_key, prefix),
            unacked_max=unacked_max,
            on_generation=to_reaction(on_generation),
        )
        return open_subscription(
            self.host.subscriptions,
            spec,
            start=start,
            holder=holder or f"{self._holder}-{next(self._openings)}",
            options=check_kind(options or SubscriptionOptions(), SubscriptionOptions, "options"),
            open_changes=self.host.changes,
            decode=decoder_of(self.host).decode,
            begin=partial(begin_at, self.host),
        )

    @property
    def feeds(self) -> Feeds:
        """The named feeds: readings of changes that remember how far they are, and write to a sink."""
        return Feeds(lambda: self.host, self._holder)

    @property
    def generations(self) -> Generations:
        """The generations of namespaces: publish a whole data set, go back to an earlier one."""
        # Threads that publish at the same time are publishers of their own.
        return Generations(lambda: self.host, f"{self._holder}-{next(self._openings)}")

    @property
    def subscriptions(self) -> Subscriptions:
        """The subscriptions that there are."""
        return Subscriptions(lambda: self.host)

    def resolved_version(self) -> Version:
        """Every change at or below this is durable and published, and none will be added."""
        return self.host.versions.resolved_version()

    def now(self) -> Version:
        """A fresh version, above everything that this site has seen."""
        return self.host.versions.now()

    def sync(self) -> None:
        """Make durable what was written with durability "async"."""
        self.host.versions.sync()

    def heartbeat(self) -> Heartbeat:
        """Write a heartbeat now.  A site does so each second by itself."""
        return self.host.versions.heartbeat()

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
        require_lifetime(name, lifetime)
        if namespace is not None:
            require_name(namespace, "namespace")
        return self.host.retention.hold_safe_point(name, to_version(version), lifetime, namespace)

    def release_safe_point(self, name: str) -> None:
        """Let garbage collection go on.  Those of feeds and subscriptions go when these are removed."""
        require_name(name, "safe point")
        self.host.retention.release_safe_point(name)

    def safe_points(self) -> list[SafePoint]:
        """The safe points that hold now."""
        return self.host.retention.safe_points()

    def collect_garbage(self) -> GarbageReport:
        """Remove versions and changes behind the safe points.  A site does so by itself as well."""
        return self.host.retention.collect_garbage()

    # Other sites

    def topology(self) -> Topology | None:
        """The sites and the namespaces that they share, as known here; None if this site shares nothing."""
        return self.host.membership.topology()

    def set_topology(self, topology: Topology) -> None:
        """Put a topology in force here, with its missing namespaces.  Each change counts `epoch` up."""
        self.host.membership.set_topology(check_kind(topology, Topology, "topology"))

    def replication(self) -> ReplicationStatistics:
        """How the changes of other sites come in, and what is wrong with that."""
        return self.host.status.replication()

    def covers(self, namespace: str, stamp: Stamp, *, at: At | None = None) -> bool:
        """Whether all is here that the stamp's site had written before, now or as of a version or moment.

        A link may apply the changes of a step in any order: a record can come before an older one.  True for
        this site, and for one whose changes no link brings, or none any more.
        """
        if stamp.site == self.id:
            return True
        return self.host.replication.covers(namespace, stamp, None if at is None else to_version(at))

    # Statistics

    def statistics(self) -> SiteStatistics:
        """The site at this moment."""
        return self.host.status.statistics()


def _require_plain(is_plain: bool) -> None:
    """Refuse settings that large values cannot have."""
    if not is_plain:
        raise InvalidArgument("large values have no merge policy, time to live or codec: leave these out")
