"""A host: where a site's data is, in this process or behind a server.  `Site` looks the same over both.

Calls that are made once in a while are ports: Protocols whose arguments and results are plain data, and whose
methods declare the role, the repeatability and the duration of each call (`model/actions.py`).  `PORTS` lists
them; client and server derive the remote calls from it.  Frequent operations have messages of their own:
partitions, found by the router, and streams of changes and writes.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final, Protocol

from floodmark.feed.named.store import FeedStore
from floodmark.feed.subscription.subscriptions import SubscriptionStore
from floodmark.host.directory import Identity
from floodmark.host.ports.membership import MembershipPort
from floodmark.host.ports.namespaces import NamespacePort
from floodmark.host.ports.partitions import PartitionPort
from floodmark.host.ports.replication import ReplicationPort
from floodmark.host.ports.retention import RetentionPort
from floodmark.host.ports.status import StatusPort
from floodmark.host.ports.transactions import Transactions
from floodmark.host.ports.verification import VerificationPort
from floodmark.host.ports.versions import VersionPort
from floodmark.model.errors import InvalidArgument, InvalidVersion
from floodmark.model.partition import LinkGuard, WriteStream
from floodmark.model.stream import ChangeBatch, ChangesRequest
from floodmark.model.version import VERSION_MAX, Version
from floodmark.routing import Router


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
    def namespaces(self) -> NamespacePort:
        """The namespaces."""
        ...

    @property
    def versions(self) -> VersionPort:
        """The clock, and how far commits reach."""
        ...

    @property
    def partitions(self) -> PartitionPort:
        """The partitions."""
        ...

    @property
    def retention(self) -> RetentionPort:
        """Safe points and garbage collection."""
        ...

    @property
    def membership(self) -> MembershipPort:
        """The part in a topology."""
        ...

    @property
    def replication(self) -> ReplicationPort:
        """The links."""
        ...

    @property
    def verification(self) -> VerificationPort:
        """Records for comparison and repair."""
        ...

    @property
    def status(self) -> StatusPort:
        """Statistics."""
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
        Repeating either, in whole or in part, changes nothing.  With `link`, applied changes are refused
        once the link has moved on.  `load` is `apply` without a trace in the change log, to build a site up.
        With `merge` the values are unstamped states, merged into the records of their keys.
        """
        ...

    def close(self) -> None:
        """Let go.  Closing twice is harmless."""
        ...


@dataclass(frozen=True)
class Port:
    """A Protocol whose methods are remote calls: its attribute of a host, and its prefix on the wire."""

    attribute: str
    protocol: type
    prefix: str


# One prefix serves several ports: earlier releases had them in one, and call their methods by these names.
_PREFIX: Final = "administration"

PORTS: Final = (
    Port("namespaces", NamespacePort, _PREFIX),
    Port("versions", VersionPort, _PREFIX),
    Port("partitions", PartitionPort, _PREFIX),
    Port("retention", RetentionPort, _PREFIX),
    Port("membership", MembershipPort, _PREFIX),
    Port("replication", ReplicationPort, _PREFIX),
    Port("verification", VerificationPort, _PREFIX),
    Port("status", StatusPort, _PREFIX),
    Port("feeds", FeedStore, "feeds"),
    Port("subscriptions", SubscriptionStore, "subscriptions"),
    Port("transactions", Transactions, "transactions"),
)
