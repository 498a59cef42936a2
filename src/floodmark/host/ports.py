"""The ports of a host, which has a site's data in this process or behind a server.

Infrequent calls are grouped in ports: Protocols whose arguments and results are plain data, and whose methods
declare the role, the repeatability and the duration of each call (`model/actions.py`).  `PORTS` lists them;
client and server derive the remote calls from it.  Frequent operations have their own messages: those of
partitions, which the router finds, and streams of changes and writes.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from os import PathLike
from pathlib import Path
from typing import Final, Protocol, get_type_hints

import msgspec
from msgspec import UNSET, UnsetType

from floodmark.engine.base import EngineMeasures
from floodmark.feed import SafePoint
from floodmark.feed.named.store import FeedStore
from floodmark.feed.reading.cut import ChangesCut
from floodmark.feed.safepoints import READERS_LIFETIME_MAX, is_readers_name
from floodmark.feed.subscription.subscriptions import SubscriptionStore
from floodmark.host.balancing import Move
from floodmark.host.catalog import GenerationRow, NamespaceRow, NamespaceSettings, Rewound
from floodmark.host.comparisons import ComparisonNote
from floodmark.host.directory import Identity
from floodmark.host.examination import CheckResult
from floodmark.host.overview import ServingFacts, SiteOverview
from floodmark.host.statistics import (
    GarbageReport,
    NodeCounters,
    NodeStatistics,
    PartitionHeat,
    PartitionStatistics,
    ReplicationStatistics,
    SiteStatistics,
)
from floodmark.host.transaction_port import Transactions
from floodmark.model.access import Role
from floodmark.model.actions import SITE_OWNER, Action, Exempt, Owned, Scope
from floodmark.model.change import Heartbeat, Stamp
from floodmark.model.partition import Fate, Owners, PartitionMaps, StreamCommand, WriteStream
from floodmark.model.record import FoundRecord, Repair
from floodmark.model.stream import ChangeBatch, ChangesRequest, OnGeneration
from floodmark.model.version import Version
from floodmark.replication.applied import Applied
from floodmark.replication.links import LinkPosition
from floodmark.replication.step import LinkStep, NamespaceCut, NamespacePosition
from floodmark.replication.topology import Topology
from floodmark.routing import Router


class NamespaceUpdate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Changes to the settings of a namespace; unset settings are kept."""

    ttl: timedelta | UnsetType | None = UNSET
    retention: timedelta | UnsetType = UNSET


class NamespacePort(Protocol):
    """Creates, finds, changes and drops namespaces."""

    @Action(Role.ADMIN, Scope.NAMESPACE, audited=True)
    def create_namespace(self, namespace: str, settings: NamespaceSettings) -> NamespaceRow:
        """Add a namespace."""

    @Action(Role.READ, Scope.NAMESPACE, repeatable=True, anywhere=True)
    def find_namespace(self, namespace: str) -> NamespaceRow:
        """The namespace with this name.  Raises NamespaceNotFound."""

    @Action(Role.READ, shown_by=lambda row: row.name, repeatable=True, anywhere=True)
    def list_namespaces(self) -> list[NamespaceRow]:
        """All namespaces by name, dropped ones included until their data is gone."""

    @Action(Role.ADMIN, Scope.NAMESPACE, audited=True)
    def update_namespace(self, namespace: str, update: NamespaceUpdate) -> NamespaceRow:
        """Change settings of a namespace."""

    @Action(Role.ADMIN, Scope.NAMESPACE, audited=True, lengthy=True)
    def drop_namespace(self, namespace: str) -> None:
        """Drop a namespace.  Raises InvalidConfiguration if other sites share it."""


class GenerationPort(Protocol):
    """Publishes data sets: begin, load by `GenerationStream`, rewind until little is left, swap."""

    @Action(Role.REPLICATE, Scope.NAMESPACE, audited=True, repeatable=True, lengthy=True)
    def begin_generation(
        self,
        namespace: str,
        base: Version,
        publisher: str,
        origin: int | None = None,
        brought: bool = False,
    ) -> GenerationRow:
        """Begin to publish data as of a version, 0 for now; the same publisher resumes its generation.

        For a shared namespace, `origin` is the site whose stamp the rows get at all sites.  Raises
        PublicationConflict if another publisher is at work, or if the namespace is shared and the present
        data set has the same base.  Raises VersionCollected if changes made since the base are missing in the
        change log.  The last two conditions do not matter for rows that are `brought` from a site that had
        them all.
        """

    @Action(Role.REPLICATE, Scope.NAMESPACE, repeatable=True, lengthy=True)
    def count_generation(self, namespace: str, number: int) -> int:
        """Count the rows of a generation that is loading, before changes are copied: each has its own key."""

    @Action(Role.REPLICATE, Scope.NAMESPACE, audited=True, repeatable=True, lengthy=True)
    def rewind_generation(self, namespace: str, number: int) -> Rewound:
        """Copy changes made since the base, from where the last call ended, for some seconds at most."""

    @Action(Role.REPLICATE, Scope.NAMESPACE, audited=True, repeatable=True, lengthy=True)
    def swap_generation(self, namespace: str, number: int, keep: int) -> GenerationRow:
        """Switch all readers and writers to a loaded generation; `keep` earlier ones are kept."""

    @Action(Role.REPLICATE, Scope.NAMESPACE, audited=True, lengthy=True)
    def rollback_generation(
        self, namespace: str, number: int | None, publisher: str, keep: int
    ) -> GenerationRow:
        """Publish an earlier generation again, with the changes made since; by default the last one."""

    @Action(Role.REPLICATE, Scope.NAMESPACE, audited=True, lengthy=True)
    def drop_generation(self, namespace: str, number: int) -> None:
        """Remove a generation that is not read: one that is loading, or an old one."""


class VersionPort(Protocol):
    """Returns versions for readers and writers, and moves the clock."""

    @Action(Role.READ, repeatable=True, anywhere=True, delayed=True)
    def read_version(self) -> Version:
        """The version at which a reader sees every acknowledged write."""

    @Action(Role.READ, repeatable=True, anywhere=True)
    def resolved_version(self) -> Version:
        """The resolved version: every change at or below it is durable and published, none will be added."""

    @Action(Role.READ, repeatable=True, anywhere=True)
    def now(self) -> Version:
        """A fresh version."""

    @Action(Role.READ, repeatable=True, anywhere=True)
    def observe(self, version: Version) -> None:
        """Move the clock past a version that a reader requests; it must not be in the future."""

    @Action(Role.ADMIN, Scope.SITE, audited=True, repeatable=True)
    def pass_version(self, version: Version) -> None:
        """Move the clock past a version that other sites hold; ClockSkew if it is too far ahead."""

    @Action(Role.WRITE, repeatable=True, anywhere=True)
    def sync(self) -> None:
        """Make durable all writes with durability "async"."""

    @Action(Role.ADMIN, Scope.SITE, audited=True)
    def heartbeat(self) -> Heartbeat:
        """Write a heartbeat now."""

    @Action(Role.WRITE, Scope.NAMESPACE, audited=True, repeatable=True, owned=Owned.STREAM)
    def open_epoch(self, namespace: str, stream: str, epoch: int, owner: str = SITE_OWNER) -> Version:
        """The version of an epoch of a stream from outside, drawn above all earlier writes when first opened.

        Epochs are opened in order, by the owner that opened the first.  The last 16 are remembered, until the
        stream was not used for 30 days.
        """

    @Action(Role.READ, Scope.NAMESPACE, repeatable=True, lengthy=True)
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
        """The end of the next step of a reader of changes; with `own`, of changes first written here."""


def published_version(versions: VersionPort, namespace: str) -> Version:
    """The version up to which the changes of a namespace can be read, with all acknowledged writes.

    The cut makes asynchronous writes durable, and publishes them.
    """
    resolved = versions.resolved_version()
    return versions.cut_changes(namespace, resolved, None, None, False).resolved


class SplitByLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The halves of a partition, and the qualified key before which it was split."""

    left: int
    right: int
    key: bytes


class PartitionPort(Protocol):
    """Lists, splits and merges partitions."""

    @Action(Role.READ, Scope.SITE, repeatable=True)
    def partitions(self) -> list[PartitionStatistics]:
        """The partitions in key order."""

    @Action(Role.ADMIN, Scope.NAMESPACE, audited=True, lengthy=True)
    def split(self, namespace: str, key: bytes) -> tuple[int, int]:
        """Split a partition before a key; return the ids of the halves."""

    @Action(Role.ADMIN, Scope.SITE, audited=True, lengthy=True)
    def split_by_load(self, partition: int) -> SplitByLoad:
        """Split a partition at the key that divides its last writes into halves."""

    @Action(Role.ADMIN, Scope.SITE, audited=True, lengthy=True)
    def merge(self, left: int, right: int) -> int:
        """Merge two adjacent partitions; return the id of the new one."""

    @Action(Role.READ, Scope.SITE, repeatable=True)
    def heat(self) -> list[PartitionHeat]:
        """The load of each partition over the last minutes."""


READERS: Final = Exempt(
    Role.READ,
    lambda arguments: (
        is_readers_name(arguments["name"])
        and arguments["lifetime"] <= READERS_LIFETIME_MAX
        and arguments["namespace"] is not None
    ),
    f"`read` for names of the form `KIND/NAME`, for at most {READERS_LIFETIME_MAX.days} days",
)


class Balance(StrEnum):
    """The quantity that `rebalance` balances over the nodes."""

    LOAD = "load"
    COUNT = "count"


class NodePort(Protocol):
    """Lists the nodes of a site, and moves partitions between them."""

    @Action(Role.READ, Scope.SITE, repeatable=True, anywhere=True)
    def nodes(self) -> list[NodeStatistics]:
        """The nodes that have beats, by number; empty if one process serves the site."""

    @Action(Role.ADMIN, Scope.SITE, audited=True, lengthy=True)
    def move(self, partition: int, node: int) -> int:
        """Move a partition to another node; return its new id."""

    @Action(Role.ADMIN, Scope.SITE, audited=True, lengthy=True)
    def rebalance(self, by: Balance, moves_max: int | None = None) -> list[Move]:
        """Balance the nodes; return the moves that were made, with the new ids."""

    @Action(Role.ADMIN, Scope.SITE, audited=True, lengthy=True)
    def drain(self, node: int) -> list[Move]:
        """Move all partitions away from a node, so that it can stop.  It gets none until it starts again."""

    @Action(Role.ADMIN, Scope.SITE, audited=True)
    def remove_node(self, node: int) -> None:
        """Delete the beat of a node that has stopped and owns no partitions."""


class RetentionPort(Protocol):
    """Holds and releases safe points, and collects garbage."""

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
        """Set or move a safe point.  Raises NotAllowed if another owner holds one with this name."""

    @Action(Role.READ, audited=True, owned=Owned.SAFE_POINT)
    def release_safe_point(self, name: str, owner: str = SITE_OWNER) -> None:
        """Release a safe point.  Only its owner or the site itself can do so."""

    @Action(Role.READ, Scope.SITE, repeatable=True)
    def safe_points(self) -> list[SafePoint]:
        """The safe points that are in force."""

    @Action(Role.READ, Scope.NAMESPACE, repeatable=True)
    def oldest_version(self, namespace: str | None) -> Version:
        """The version above which every change of one namespace, or of all, is still stored."""

    @Action(Role.ADMIN, Scope.SITE, audited=True, lengthy=True)
    def collect_garbage(self) -> GarbageReport:
        """Remove the versions and changes that no safe point protects."""


class PeerVersions(msgspec.Struct, frozen=True):
    """The versions of a node: at which a reader sees all its writes, and which its partitions have resolved.

    `resolved` is by partition id.  `changes` counts the writes, and grows with each commit.
    """

    read: Version
    resolved: dict[int, Version]
    changes: int = 0


class PeerCommands(msgspec.Struct, kw_only=True):
    """A write command over RESP, or the commands of a transaction, and the rights of its caller.

    `on` are the qualified keys.  `watched` has the versions of watched keys, and `watched_ms` the times at
    which the watches began; `watched` is None for a single command.
    """

    requests: list[list[bytes]]
    watched: dict[bytes, Version] | None
    watched_ms: dict[bytes, int] = {}
    on: list[bytes]
    space: str | None
    by_prefix: bool
    caller: str
    role: Role
    namespaces: list[str] | None
    durable: bool
    protocol: int


class PeerReply(msgspec.Struct, kw_only=True):
    """The encoded reply, and the version of the commit; 0 if nothing was written."""

    reply: bytes
    version: Version


class PeerPort(Protocol):
    """Calls between the nodes of a site."""

    @Action(Role.ADMIN, Scope.SITE, repeatable=True, anywhere=True)
    def peer_versions(self) -> PeerVersions:
        """The versions of this node."""

    @Action(Role.ADMIN, Scope.SITE, audited=True, repeatable=True, anywhere=True)
    def pass_peer_version(self, version: Version) -> None:
        """Move the clock of this node past a version; ClockSkew if it is too far ahead."""

    @Action(Role.ADMIN, Scope.SITE, repeatable=True, anywhere=True)
    def settle_peer(self) -> Version:
        """Make all writes of this node durable and load the catalog; return a version above all writes."""

    @Action(Role.ADMIN, Scope.SITE, repeatable=True, anywhere=True)
    def peer_partitions(self) -> list[PartitionStatistics]:
        """The partitions of this node."""

    @Action(Role.ADMIN, Scope.SITE, repeatable=True, anywhere=True)
    def peer_heat(self) -> list[PartitionHeat]:
        """The load of the partitions of this node."""

    @Action(Role.ADMIN, Scope.SITE, audited=True, lengthy=True, anywhere=True)
    def split_peer(self, key: bytes) -> tuple[int, int]:
        """Split a partition of this node before a qualified key."""

    @Action(Role.ADMIN, Scope.SITE, audited=True, lengthy=True, anywhere=True)
    def merge_peer(self, left: int, right: int) -> int:
        """Merge two partitions of this node."""

    @Action(Role.ADMIN, Scope.SITE, audited=True, lengthy=True, anywhere=True)
    def move_peer(self, partition: int, node: int) -> int:
        """Move a partition of this node to another node."""

    @Action(Role.ADMIN, Scope.SITE, repeatable=True, anywhere=True)
    def refresh_peer(self) -> None:
        """Load the partition map now, and serve the partitions that it assigns to this node."""

    @Action(Role.ADMIN, Scope.SITE, audited=True, anywhere=True)
    def keep_peer(self) -> None:
        """Take over the keeper's lease from the calling node."""

    @Action(Role.ADMIN, Scope.SITE, large=True, anywhere=True)
    def run_commands(self, commands: PeerCommands) -> PeerReply:
        """Run commands in a round of this node.  Raises PartitionMoved if it does not own all keys."""

    @Action(Role.ADMIN, Scope.SITE, repeatable=True, anywhere=True)
    def fate(self, transaction: str) -> Fate:
        """The decision about a transaction's prepared writes.  Raises NotKeeper if this is not the keeper."""


class MembershipPort(Protocol):
    """Puts topologies in force, and shares namespaces."""

    @Action(Role.READ, Scope.SITE, repeatable=True)
    def topology(self) -> Topology | None:
        """The topology in force at this site; None if the site shares nothing."""

    @Action(Role.ADMIN, Scope.SITE, audited=True, repeatable=True)
    def set_topology(self, topology: Topology) -> None:
        """Put a topology in force, and create its namespaces that are missing here."""

    @Action(Role.READ, Scope.NAMESPACE, repeatable=True)
    def rewritable_version(self, namespace: str) -> Version:
        """The version up to which all writes of other sites are in; 0 if one site has sent nothing yet."""

    @Action(Role.READ, Scope.NAMESPACE, repeatable=True)
    def shared_since(self, namespace: str, position: Version) -> Version:
        """The version above which a site at a position finds all changes of a namespace that it needs."""

    @Action(Role.REPLICATE, Scope.NAMESPACE, audited=True, repeatable=True)
    def note_rewritten(self, namespace: str, since: Version) -> None:
        """Store that all data of a namespace was rewritten above a version, so that it can be shared."""

    @Action(Role.ADMIN, Scope.NAMESPACE, audited=True, repeatable=True)
    def declare_loaded(self, namespace: str) -> Version:
        """End the loading of a namespace: its history begins at this version.  Repeating does nothing."""

    @Action(Role.ADMIN, Scope.NAMESPACE, audited=True, repeatable=True)
    def adopt_watermark(self, namespace: str, watermark: dict[int, Version], horizon: Version) -> None:
        """Set the positions of links to those of the site from which a namespace was loaded."""

    @Action(Role.ADMIN, Scope.SITE, audited=True, repeatable=True)
    def finish_rejoining(self) -> list[str]:
        """End the rejoining of a restored site, unless namespaces are missing; return the missing ones."""


class ReplicationPort(Protocol):
    """Returns and moves the positions of links."""

    @Action(Role.READ, shown_by=lambda link: link.namespace, repeatable=True)
    def links(self) -> list[LinkPosition]:
        """The positions of this site in the changes of others, by source and namespace."""

    @Action(Role.READ, Scope.NAMESPACE, namespaces=lambda arguments: arguments["namespaces"], repeatable=True)
    def link_positions(self, source_id: int, namespaces: list[str]) -> list[NamespacePosition]:
        """The positions of this site in namespaces of one source; missing namespaces are left out."""

    @Action(
        Role.READ,
        Scope.NAMESPACE,
        namespaces=lambda arguments: arguments["positions"],
        repeatable=True,
        lengthy=True,
    )
    def cut_link(self, positions: dict[str, Version], changes_max: int | None) -> list[NamespaceCut]:
        """The end of the next step of a link whose target is at these positions."""

    @Action(
        Role.REPLICATE,
        Scope.NAMESPACE,
        audited=True,
        unsaid=("applied",),
        repeatable=True,
        # A site that was away brings all heartbeats that were not delivered meanwhile.
        large=True,
        namespaces=lambda arguments: [part.name for part in arguments["step"].namespaces] or [None],
    )
    def advance_link(self, step: LinkStep, applied: Applied) -> None:
        """Store the position after a step whose changes are applied and durable.  Repeating does nothing."""

    @Action(
        Role.REPLICATE,
        Scope.NAMESPACE,
        audited=True,
        repeatable=True,
        namespaces=lambda arguments: arguments["namespaces"] or [None],
    )
    def stall_link(self, source_id: int, namespaces: list[str], reason: str) -> None:
        """Report why a link does not advance.  The reason is shown until it advances."""

    @Action(Role.READ, Scope.NAMESPACE, repeatable=True)
    def watermark(self, namespace: str, at: Version | None) -> dict[int, Version]:
        """The watermark of a namespace, without the site's own entry, now or as of a version."""

    @Action(Role.READ, Scope.NAMESPACE, repeatable=True)
    def covers(self, namespace: str, stamp: Stamp, at: Version | None) -> bool:
        """Whether this site has all changes of the stamp's site at or below the stamp's version."""


class VerificationPort(Protocol):
    """Looks records up with their stamps, repairs them, and looks for damage."""

    @Action(Role.READ, Scope.NAMESPACE, large=True, repeatable=True)
    def find_records(
        self, namespace: str, keys: list[bytes], at: Version | None, thin: bool
    ) -> list[FoundRecord | None]:
        """The newest records of keys, in order, live or deleted; with `thin`, digests in place of values."""

    @Action(Role.ADMIN, Scope.NAMESPACE, audited=True, unsaid=("repairs",), large=True)
    def repair_records(self, namespace: str, repairs: list[Repair]) -> list[bool]:
        """Store records with their stamps, if their keys are unchanged; return for each whether it was."""

    @Action(Role.WRITE, Scope.SITE, repeatable=True)
    def note_comparison(self, report: ComparisonNote) -> None:
        """Accept a report about the progress or the result of a comparison of this site with others."""

    @Action(Role.ADMIN, Scope.SITE, repeatable=True, lengthy=True)
    def examine(self, quick: bool) -> list[CheckResult]:
        """Check the site; unless `quick`, also every record and every row of the change log."""


class StatusPort(Protocol):
    """Describes a site at this moment."""

    @Action(Role.READ, Scope.SITE, repeatable=True)
    def statistics(self) -> SiteStatistics:
        """The statistics of the site at this moment."""

    @Action(Role.READ, Scope.SITE, repeatable=True)
    def replication(self) -> ReplicationStatistics:
        """The links that end at the site, and their alarms."""

    @Action(Role.READ, Scope.SITE, repeatable=True)
    def overview(self) -> SiteOverview:
        """The overview for operators, with problems and advice."""


@dataclass(frozen=True, kw_only=True)
class PeerCredentials:
    """The files with which a node verifies other nodes and authenticates itself to them."""

    tls_root: str | PathLike[str] | None = None
    tls_certificate: str | PathLike[str] | None = None
    tls_key: str | PathLike[str] | None = None


class Host(ABC):
    """The port between a `Site` and its data."""

    identity: Identity
    router: Router
    namespaces: NamespacePort
    generations: GenerationPort
    versions: VersionPort
    partitions: PartitionPort
    retention: RetentionPort
    membership: MembershipPort
    replication: ReplicationPort
    verification: VerificationPort
    status: StatusPort
    feeds: FeedStore
    subscriptions: SubscriptionStore
    transactions: Transactions
    peers: PeerPort
    node_port: NodePort
    # The directory of the site, whose disk is watched; None for a site in a database or behind a server.
    disk: Path | None = None
    # The token with which other nodes of the site authenticate; None if there are none.
    peer_token: str | None = None
    # Facts that the server of the site sets, for overviews.
    facts: ServingFacts
    # Whether this process answers for the whole site.  With several nodes, only the keeper does.
    keeps: bool = True

    @property
    def served(self) -> PartitionMaps:
        """The partitions that callers of this process find by their ids."""
        return self.router.maps

    def require_here(self, action: Action) -> None:  # noqa: B027
        """Raise NotKeeper if another node answers this call of a port."""

    def start(self) -> None:  # noqa: B027
        """Start the background work of this process."""

    def leave(self) -> None:  # noqa: B027
        """Give the partitions of this process to other nodes, before it stops."""

    def require_ready(self) -> None:
        """Raise the error because of which this process does not serve now, if any."""
        self.versions.read_version()

    def engine_measures(self) -> EngineMeasures | None:
        """Measurements of the engine; None if it has none, or is behind a network."""
        return None

    def node_counters(self) -> NodeCounters | None:
        """Counters of this process as one of several nodes; None if it is not."""
        return None

    def advertise(self, url: str, credentials: PeerCredentials) -> None:  # noqa: B027
        """Announce the URL of this process to other nodes, and set its credentials for calls to them."""

    @abstractmethod
    def physical_ms(self) -> int:
        """The site's time in unix milliseconds, from which a time to live counts."""

    @abstractmethod
    def version_ms(self) -> int:
        """The physical time of the site's next version, used for ids of commits.  It never goes back."""

    def owners(self) -> Owners:
        """The nodes that serve the site; empty if one process does."""
        return Owners()

    @abstractmethod
    def reading(self, version: Version, namespace: int) -> AbstractContextManager[object]:
        """Keep a version of a namespace while it is being read, also across partitions."""

    @abstractmethod
    def changes(self, request: ChangesRequest) -> Iterator[ChangeBatch]:
        """The requested changes; their safe point is held from the call on."""

    def serve_changes(self, request: ChangesRequest) -> Iterator[ChangeBatch]:
        """`changes` for a client that resumes at another node if this one stops."""
        return self.changes(request)

    @abstractmethod
    def wake_readers(self) -> None:
        """Wake readers that wait for changes here, so that a stopping server can end their streams."""

    @abstractmethod
    def write_stream(self, command: StreamCommand) -> WriteStream:
        """A stream of writes of one kind."""

    @abstractmethod
    def close(self) -> None:
        """Release all resources.  Closing twice is harmless."""


@dataclass(frozen=True)
class Port:
    """A Protocol whose methods are remote calls: its attribute of a host, and its prefix on the wire."""

    attribute: str
    protocol: type
    prefix: str


# Earlier releases had most ports in one, and call their methods by its name.
PORTS: Final = tuple(
    Port(
        name, kind, name if name in ("feeds", "peers", "subscriptions", "transactions") else "administration"
    )
    for name, kind in get_type_hints(Host).items()
    if Protocol in getattr(kind, "__bases__", ())
)
