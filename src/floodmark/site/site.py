"""A site: one place that takes reads and writes, with the log of its changes."""

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
    """An open site: its namespaces, changes, feeds, transactions and administration.

    Made by `floodmark.open` or `floodmark.connect`.  Close it after use, or use it as a `with` block.
    """

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
        # Identifies this object as a holder of leases of feeds and subscriptions.
        self._openings = count()
        self._holder = f"{gethostname()}-{getpid()}-{uuid4().hex[:8]}"

    def __enter__(self) -> "Site":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Site({self.name!r}, id={self.id})"

    def close(self) -> None:
        """Cancel the watches, finish all operations, flush all writes to disk and release the site.

        Closing twice is harmless.
        """
        self._closed = True
        self._watches.close()
        self._host.close()

    @property
    def host(self) -> Host:
        """The host of this site.  Raises Closed after `close`."""
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
        """Create a namespace and return a handle to it.

        `merge` is the policy for writes of several sites to one record: "last_write" keeps the last value;
        "fields" merges JSON objects field by field; "counter" adds up the numbers, and reads return int.  The
        policy cannot be changed later.  `ttl` is the default time to live of writes; `retention`, how long
        old versions are kept, is 24 hours by default.  For `codec`, see `namespace`.  With `large_values` the
        namespace takes values of any size; open it later with `namespace(name, large_values=True)`.

        Raises NamespaceExists if the name is taken.  With `exist_ok` the existing namespace is returned
        instead, with its own settings, provided that its merge policy is `merge`.
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
        """A handle to an existing namespace.  Raises NamespaceNotFound.

        Keys and values are bytes; the values of a `CounterNamespace` are int.  With `codec` keys are text,
        and values are text ("text"), JSON values ("json"), or the objects that your own `Codec` encodes and
        decodes.  Use `large_values` for a namespace that was created with it.
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
        """Change the given settings of a namespace and keep the others.  The merge policy cannot be changed.

        Raises WrongPolicy for a `ttl` if the namespace belongs to a layer, whose rows must not expire.
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
        """Drop a namespace.  Its keys are gone at once; their space is freed after the retention."""
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
        """Iterate over the changes of one namespace, or of all namespaces, in commit order.

        `since` is exclusive: a checkpoint (the version of a `Resolved` marker, or of the last change of a
        completely read commit), a moment, "beginning", "snapshot" or "now".  `VersionCollected` is raised if
        changes above it have been collected.  The stream ends at `until`, by default at the present; with
        `follow=True` it waits for new changes.

        A "snapshot" first yields every live key at one version, as changes with `snapshot` set, in key order,
        then the changes above that version.  To resume inside a snapshot, pass the last `Resolved` marker as
        `since`.

        With `before_images` an update is two changes, as in Delta's change data feed.  `resolved_markers`
        adds `Resolved` items, which are checkpoints; `heartbeats` adds the site's heartbeats.  A damaged
        change raises `Corruption`, or is passed to `on_damaged` and skipped.

        At the publication of a data set the stream fails with `GenerationSwapped`.  With `on_generation` it
        instead yields a change of type `generation` and continues: with "difference", by the puts and deletes
        that lead to the new data set; with "snapshot", by all of its rows, which replace everything read
        before.
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
        """Open a durable subscription to the changes of a namespace, and create it if it does not exist.

        The site stores which changes were acknowledged, one by one, and delivers the others again.  A
        subscription has one consumer at a time.  `holder` is the consumer's name: a new consumer with the
        same name takes over at once.  A new subscription begins at `start`: with a snapshot of every key, or
        at any `since` of `changes`.  `on_generation` is as for `changes`.

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
        """The named feeds of this site, which write changes to sinks and store their checkpoints."""
        return Feeds(lambda: self.host, self._holder)

    @property
    def generations(self) -> Generations:
        """The generations of namespaces: publish a whole data set, or roll back to an earlier one."""
        # Each access gets its own publisher name: threads may publish at the same time.
        return Generations(lambda: self.host, f"{self._holder}-{next(self._openings)}")

    @property
    def subscriptions(self) -> Subscriptions:
        """The subscriptions of this site: list, seek, remove."""
        return Subscriptions(lambda: self.host)

    def resolved_version(self) -> Version:
        """The resolved version: every change at or below it is durable and published, none will be added."""
        return self.host.versions.resolved_version()

    def now(self) -> Version:
        """A fresh version, above everything that this site has seen."""
        return self.host.versions.now()

    def sync(self) -> None:
        """Flush all writes made with durability "async" to disk."""
        self.host.versions.sync()

    def heartbeat(self) -> Heartbeat:
        """Write a heartbeat now, in addition to the one that a background thread writes each second."""
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
        """Keep garbage collection from everything a reader at `version` sees.

        The safe point holds until it is released or `lifetime` is over, for one namespace or for all.
        """
        require_name(name, "safe point")
        require_lifetime(name, lifetime)
        if namespace is not None:
            require_name(namespace, "namespace")
        return self.host.retention.hold_safe_point(name, to_version(version), lifetime, namespace)

    def release_safe_point(self, name: str) -> None:
        """Release a safe point.  Those of feeds and subscriptions are released when these are removed."""
        require_name(name, "safe point")
        self.host.retention.release_safe_point(name)

    def safe_points(self) -> list[SafePoint]:
        """The safe points that are in force."""
        return self.host.retention.safe_points()

    def collect_garbage(self) -> GarbageReport:
        """Remove the versions and changes that no safe point protects, as the background thread also does."""
        return self.host.retention.collect_garbage()

    # Other sites

    def topology(self) -> Topology | None:
        """The topology in force here: the sites and the namespaces that they share; None if there is none."""
        return self.host.membership.topology()

    def set_topology(self, topology: Topology) -> None:
        """Put a topology in force here, and create its missing namespaces.

        A changed topology must have a higher `epoch`.
        """
        self.host.membership.set_topology(check_kind(topology, Topology, "topology"))

    def replication(self) -> ReplicationStatistics:
        """The state of each link that brings changes of another site, with its lag and its last error."""
        return self.host.status.replication()

    def covers(self, namespace: str, stamp: Stamp, *, at: At | None = None) -> bool:
        """Whether this site has every change that the stamp's site committed at or below the stamp's version.

        With `at`, as of a version or moment.  A record with the stamp is no proof: a link may apply the
        changes of one step in any order.  Always true for this site, and for sites whose changes no link
        brings, or none any more.
        """
        if stamp.site == self.id:
            return True
        return self.host.replication.covers(namespace, stamp, None if at is None else to_version(at))

    # Statistics

    def statistics(self) -> SiteStatistics:
        """The statistics of the site at this moment."""
        return self.host.status.statistics()


def _require_plain(is_plain: bool) -> None:
    """Raise InvalidArgument unless the settings are the defaults, the only ones for large values."""
    if not is_plain:
        raise InvalidArgument("large values have no merge policy, time to live or codec: leave these out")
