"""Where a site's data is: in this process or behind a server.  `Site` looks the same over both.

What is called once in a while is `Administration`, plain calls whose arguments and results are plain
data, so that the server can offer exactly these.  What is called all the time has a way of its own:
partitions, found by the router, and streams of changes.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Final, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from floodmark.feed import SafePoint
from floodmark.feed.named.store import FeedStore
from floodmark.feed.reading.cut import ChangesCut
from floodmark.feed.safepoints import READERS_LIFETIME_MAX, READERS_SAFE_POINTS
from floodmark.feed.subscription.subscriptions import SubscriptionStore
from floodmark.host.catalog import NamespaceRow, NamespaceSettings
from floodmark.host.directory import Identity
from floodmark.host.examination import Finding
from floodmark.host.statistics import (
    GarbageReport,
    PartitionHeat,
    PartitionStatistics,
    ReplicationStatistics,
    SiteStatistics,
)
from floodmark.host.transaction_port import Transactions
from floodmark.model.access import Role
from floodmark.model.actions import SITE_OWNER, Action, Exempt, Owned, Scope
from floodmark.model.change import Heartbeat
from floodmark.model.errors import InvalidArgument, InvalidVersion
from floodmark.model.partition import LinkGuard, WriteStream
from floodmark.model.record import FoundRecord, Repair
from floodmark.model.stream import ChangeBatch, ChangesRequest
from floodmark.model.version import VERSION_MAX, Version
from floodmark.replication.applied import Applied
from floodmark.replication.links import LinkPosition
from floodmark.replication.step import LinkStep, NamespaceCut, NamespacePosition
from floodmark.replication.topology import Topology
from floodmark.routing import Router


class NamespaceUpdate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The settings of a namespace that change; what is not named stays."""

    ttl: timedelta | UnsetType | None = UNSET
    retention: timedelta | UnsetType = UNSET


READERS: Final = Exempt(
    Role.READ,
    lambda arguments: (
        arguments["name"].startswith(READERS_SAFE_POINTS)
        and arguments["lifetime"] <= READERS_LIFETIME_MAX
        and arguments["namespace"] is not None
    ),
    f"`read` for names that begin with `{READERS_SAFE_POINTS}`, for at most {READERS_LIFETIME_MAX.days} days",
)


class Administration(Protocol):
    """What can be asked of a site besides reading and writing."""

    @Action(Role.ADMIN, Scope.NAMESPACE, audited=True)
    def create_namespace(self, namespace: str, settings: NamespaceSettings) -> NamespaceRow:
        """Add a namespace."""
        ...

    @Action(Role.READ, Scope.NAMESPACE, repeatable=True)
    def find_namespace(self, namespace: str) -> NamespaceRow:
        """The namespace of a name."""
        ...

    @Action(Role.READ, shown_by=lambda row: row.name, repeatable=True)
    def list_namespaces(self) -> list[NamespaceRow]:
        """All namespaces by name."""
        ...

    @Action(Role.ADMIN, Scope.NAMESPACE, audited=True)
    def update_namespace(self, namespace: str, update: NamespaceUpdate) -> NamespaceRow:
        """Change settings of a namespace."""
        ...

    @Action(Role.ADMIN, Scope.NAMESPACE, audited=True, lengthy=True)
    def drop_namespace(self, namespace: str) -> None:
        """Drop a namespace."""
        ...

    @Action(Role.READ, repeatable=True)
    def read_version(self) -> Version:
        """The version at which a reader sees everything that was acknowledged."""
        ...

    @Action(Role.READ, repeatable=True)
    def resolved_version(self) -> Version:
        """Every change at or below this is durable and published, and none will be added."""
        ...

    @Action(Role.READ, repeatable=True)
    def now(self) -> Version:
        """A fresh version."""
        ...

    @Action(Role.READ, repeatable=True)
    def observe(self, version: Version) -> None:
        """Move the clock past a version that a reader asks for, which must not be in the future."""
        ...

    @Action(Role.ADMIN, Scope.SITE, audited=True, repeatable=True)
    def pass_version(self, version: Version) -> None:
        """Move the clock past a version that other sites hold; `ClockSkew` beyond what they tolerate."""
        ...

    @Action(Role.WRITE, repeatable=True)
    def sync(self) -> None:
        """Make durable what was written with durability "async"."""
        ...

    @Action(Role.ADMIN, Scope.SITE, audited=True)
    def heartbeat(self) -> Heartbeat:
        """Write a heartbeat now."""
        ...

    @Action(Role.READ, Scope.SITE, repeatable=True)
    def partitions(self) -> list[PartitionStatistics]:
        """The partitions in order of keys."""
        ...

    @Action(Role.ADMIN, Scope.NAMESPACE, audited=True, lengthy=True)
    def split(self, namespace: str, key: bytes) -> tuple[int, int]:
        """Cut a partition in two, before a key."""
        ...

    @Action(Role.ADMIN, Scope.SITE, audited=True, lengthy=True)
    def merge(self, left: int, right: int) -> int:
        """Join two neighbouring partitions."""
        ...

    @Action(Role.READ, Scope.SITE, repeatable=True)
    def heat(self) -> list[PartitionHeat]:
        """How busy each partition was over the last minutes."""
        ...

    @Action(Role.WRITE, Scope.NAMESPACE, audited=True, repeatable=True, owned=Owned.STREAM)
    def open_epoch(self, namespace: str, stream: str, epoch: int, owner: str = SITE_OWNER) -> Version:
        """The version of an epoch of a stream from outside that is written into a namespace.

        It is drawn when the epoch is opened for the first time, above everything that was written before,
        and is the same ever after.  A stream's epochs are opened in their order; the last 16 are
        remembered, until the stream was not used for 30 days.  It belongs to the owner that opened its first
        epoch: with a version that another drew too early, what the owner writes would lose.
        """
        ...

    @Action(Role.READ, Scope.NAMESPACE, repeatable=True, lengthy=True)
    def cut_changes(
        self,
        namespace: str,
        since: Version,
        changes_max: int | None,
        until: Version | None,
        at_heartbeat: bool,
        own: bool = False,
    ) -> ChangesCut:
        """The version up to which a reader of a namespace's changes goes in its next step.

        With `own` it reads, and counts, only what was first written at this site.
        """
        ...

    @Action(
        Role.ADMIN,
        Scope.NAMESPACE,
        audited=True,
        repeatable=True,
        exempt=READERS,
        owned=Owned.SAFE_POINT,
    )
    def hold_safe_point(
        self,
        name: str,
        version: Version,
        lifetime: timedelta,
        namespace: str | None,
        owner: str = SITE_OWNER,
    ) -> SafePoint:
        """Keep what a reader at `version` sees.  `NotAllowed` if another owner has one of this name."""
        ...

    @Action(Role.READ, audited=True, owned=Owned.SAFE_POINT)
    def release_safe_point(self, name: str, owner: str = SITE_OWNER) -> None:
        """Let garbage collection go on.  Only the owner of a safe point, or the site, releases it."""
        ...

    @Action(Role.READ, Scope.SITE, repeatable=True)
    def safe_points(self) -> list[SafePoint]:
        """The safe points that hold now."""
        ...

    @Action(Role.READ, Scope.NAMESPACE, repeatable=True)
    def oldest_version(self, namespace: str | None) -> Version:
        """The version after which every change of one namespace, or of all, is still there."""
        ...

    @Action(Role.ADMIN, Scope.SITE, audited=True, lengthy=True)
    def collect_garbage(self) -> GarbageReport:
        """Remove versions and changes behind the safe points."""
        ...

    @Action(Role.READ, Scope.SITE, repeatable=True)
    def topology(self) -> Topology | None:
        """The sites and the namespaces that they share, as known here; None if this site shares nothing."""
        ...

    @Action(Role.ADMIN, Scope.SITE, audited=True, repeatable=True)
    def set_topology(self, topology: Topology) -> None:
        """Put a topology in force, and make its namespaces that are missing here."""
        ...

    @Action(Role.READ, Scope.NAMESPACE, repeatable=True)
    def rewritable_version(self, namespace: str) -> Version:
        """All that other sites wrote into a namespace up to here is in; 0 if one of them sent nothing yet."""
        ...

    @Action(Role.READ, Scope.NAMESPACE, repeatable=True)
    def shared_since(self, namespace: str, position: Version) -> Version:
        """All that a site which is at a position still needs of a namespace was written after this."""
        ...

    @Action(Role.REPLICATE, Scope.NAMESPACE, audited=True, repeatable=True)
    def note_rewritten(self, namespace: str, since: Version) -> None:
        """Remember that all data of a namespace was written again above a version: it may be shared."""
        ...

    @Action(Role.ADMIN, Scope.NAMESPACE, audited=True, repeatable=True)
    def declare_loaded(self, namespace: str) -> Version:
        """End the loading of a namespace: its history begins here, and this is its first version.

        What was loaded is no change, and cannot be told apart by those who read changes; so nobody may read
        changes from before.  The same again does nothing.
        """
        ...

    @Action(Role.ADMIN, Scope.NAMESPACE, audited=True, repeatable=True)
    def adopt_watermark(self, namespace: str, watermark: dict[int, Version], horizon: Version) -> None:
        """Let links go on from where the site stood from which a namespace was loaded."""
        ...

    @Action(Role.ADMIN, Scope.SITE, audited=True, repeatable=True)
    def finish_rejoining(self) -> list[str]:
        """Let a site that was restored take part again, unless it lacks namespaces: these."""
        ...

    @Action(Role.READ, shown_by=lambda link: link.namespace, repeatable=True)
    def links(self) -> list[LinkPosition]:
        """How far this site is with the changes of others, by source and namespace."""
        ...

    @Action(Role.READ, Scope.NAMESPACE, namespaces=lambda arguments: arguments["namespaces"], repeatable=True)
    def link_positions(self, source_id: int, namespaces: list[str]) -> list[NamespacePosition]:
        """How far this site is with some namespaces of one source; those that are not here are left out."""
        ...

    @Action(
        Role.READ,
        Scope.NAMESPACE,
        namespaces=lambda arguments: arguments["positions"],
        repeatable=True,
        lengthy=True,
    )
    def cut_link(self, positions: dict[str, Version], changes_max: int | None) -> list[NamespaceCut]:
        """Where the next step of a link ends that is at some positions with namespaces of this site."""
        ...

    @Action(
        Role.REPLICATE,
        Scope.NAMESPACE,
        audited=True,
        unsaid=("applied",),
        repeatable=True,
        # A site that was away brings along all heartbeats that it has missed.
        large=True,
        namespaces=lambda arguments: [part.name for part in arguments["step"].namespaces] or [None],
    )
    def advance_link(self, step: LinkStep, applied: Applied) -> None:
        """Take note of a step whose changes are applied and durable.  The same again does nothing."""
        ...

    @Action(
        Role.REPLICATE,
        Scope.NAMESPACE,
        audited=True,
        repeatable=True,
        namespaces=lambda arguments: arguments["namespaces"] or [None],
    )
    def stall_link(self, source_id: int, namespaces: list[str], reason: str) -> None:
        """Say why a link does not go on.  Shown until it does."""
        ...

    @Action(Role.READ, Scope.NAMESPACE, repeatable=True)
    def watermark(self, namespace: str, at: Version | None) -> dict[int, Version]:
        """Up to which versions of other sites their changes were in, now or as of a version of this one."""
        ...

    @Action(Role.READ, Scope.NAMESPACE, large=True, repeatable=True)
    def find_records(
        self, namespace: str, keys: list[bytes], at: Version | None, thin: bool
    ) -> list[FoundRecord | None]:
        """The newest records of some keys, in their order, dead or alive, now or as of a version.

        With `thin` they come without their values, which their digests stand for.
        """
        ...

    @Action(Role.ADMIN, Scope.NAMESPACE, audited=True, unsaid=("repairs",), large=True)
    def repair_records(self, namespace: str, repairs: list[Repair]) -> list[bool]:
        """Store records, with the stamps that they carry, under keys that still have what was seen.

        Which of them were stored.  Each is a new version of its key and a change like others.
        """
        ...

    @Action(Role.READ, Scope.SITE, repeatable=True)
    def replication(self) -> ReplicationStatistics:
        """How the changes of other sites come in."""
        ...

    @Action(Role.READ, Scope.SITE, repeatable=True)
    def statistics(self) -> SiteStatistics:
        """The site at this moment."""
        ...

    @Action(Role.ADMIN, Scope.SITE, repeatable=True, lengthy=True)
    def examine(self, quick: bool) -> list[Finding]:
        """Look for everything that is not as it should be; unless it is to be quick, in every record."""
        ...


def check_stream_kind(apply: bool, load: bool, merge: bool, unchanged_since: Version | None) -> None:
    """Refuse a write stream that would decide in two ways, or by what is no version."""
    if apply + load + merge + (unchanged_since is not None) > 1:
        raise InvalidArgument(
            "a stream of writes applies changes, loads them, merges states or puts what is unchanged: one of "
            "them"
        )
    if unchanged_since is None:
        return
    if not 0 <= unchanged_since <= VERSION_MAX:
        raise InvalidVersion(f"{unchanged_since} is not a version; versions have 64 bits")


class Host(Protocol):
    """Everything that a `Site` stands on."""

    @property
    def identity(self) -> Identity:
        """Who the site is."""
        ...

    @property
    def administration(self) -> Administration:
        """What is called once in a while."""
        ...

    @property
    def feeds(self) -> FeedStore:
        """The named feeds."""
        ...

    @property
    def subscriptions(self) -> SubscriptionStore:
        """The durable subscriptions."""
        ...

    @property
    def transactions(self) -> Transactions:
        """The transactions, and the logs that they are written to."""
        ...

    @property
    def router(self) -> Router:
        """The way to the partition of a key."""
        ...

    def physical_ms(self) -> int:
        """The site's time in unix milliseconds, at which a time to live begins."""
        ...

    def reading(self, version: Version, namespace: int) -> AbstractContextManager[object]:
        """Keep a version of a namespace while it is being read, also across partitions."""
        ...

    def changes(self, request: ChangesRequest) -> Iterator[ChangeBatch]:
        """The changes that were asked for.  What they need is held from the call on."""
        ...

    def write_stream(
        self,
        *,
        durable: bool,
        apply: bool = False,
        load: bool = False,
        merge: bool = False,
        unchanged_since: Version | None = None,
        link: LinkGuard | None = None,
    ) -> WriteStream:
        """A stream of writes.

        With `apply` the values carry their origin, and each is stored where its stamp wins; with
        `unchanged_since`, each is stored unless the newest stamp of its key lies above that version.
        Either may be sent again, in whole or in part, and changes nothing then.  With `link` what is applied
        is refused once the link has moved on.  `load` is `apply` without a
        trace in the change log, for those who build a site up.  With `merge` the values are
        unstamped states, to be merged into what their keys hold.
        """
        ...

    def close(self) -> None:
        """Let go.  Closing twice is harmless."""
        ...
