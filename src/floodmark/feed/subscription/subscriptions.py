"""Durable subscriptions: their rows, and the port of their store.

A subscription has a name, reads one namespace or a range of its keys, and has one consumer at a time.  A
consumer holds a lease, so that another one can take over after it has died.  Every opening has a number, the
*epoch*, which the consumer sends with each call: a consumer that has lost its lease is refused.

A safe point keeps all changes that were not delivered or not acknowledged.  It remains when the consumer
closes, and expires after a day without a consumer.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec

from floodmark.codec.ordered import qualify_range
from floodmark.feed.leased import LeasedRow, ReaderSpec
from floodmark.feed.subscription.acknowledgement import LiveCommit, Progress, SnapshotMark
from floodmark.feed.subscription.pending import PendingAcknowledgement
from floodmark.model.access import Role
from floodmark.model.actions import SITE_OWNER, Action, Owned, Scope
from floodmark.model.errors import InvalidArgument, InvalidRange
from floodmark.model.limits import KEY_BYTES_MAX, UNACKED_MAX
from floodmark.model.names import require_name
from floodmark.model.ranges import KeyRange
from floodmark.model.stream import ChangeBatch, ChangesRequest, OnGeneration
from floodmark.model.version import VERSION_MAX, Version, physical_ms

UNACKED_DEFAULT: Final = 10_000
# The number at which counting a backlog ends.
BACKLOG_COUNT_MAX: Final = 100_000

OpenChanges = Callable[[ChangesRequest], Iterator[ChangeBatch]]


class SubscriptionSpec(ReaderSpec, frozen=True, kw_only=True):
    """The specification of a subscription.  `keys` are user keys.

    While `unacked_max` changes are delivered and not acknowledged, no more are delivered.  What comes at a
    swap is one commit.
    """

    keys: KeyRange = KeyRange()
    unacked_max: int = UNACKED_DEFAULT
    on_generation: OnGeneration = OnGeneration.FAIL

    def __post_init__(self) -> None:
        require_name(self.name, "subscription")
        start, end = self.keys
        longest = max(len(start), len(end or b""))
        if longest > KEY_BYTES_MAX or (end is not None and end < start):
            raise InvalidRange(
                f"subscription {self.name!r} reads keys from a start to an end at or behind it, each of at "
                f"most {KEY_BYTES_MAX:,} bytes"
            )
        if type(self.unacked_max) is not int or not 0 < self.unacked_max <= UNACKED_MAX:
            raise InvalidArgument(
                f"unacked_max is a number from 1 to {UNACKED_MAX:,}, not {self.unacked_max!r:.60}"
            )


class SubscriptionRow(LeasedRow, frozen=True, kw_only=True):
    """A subscription as it is stored and shown.  `moved` is the epoch of its last move.

    `snapshot` is the version of the snapshot that it begins with, which is one commit of that version.
    `mark` is at or before the first row of it that is not done.  The stored row includes changes up to and
    including the version `changed`.
    """

    spec: SubscriptionSpec
    through: Version
    live: list[LiveCommit] = msgspec.field(default_factory=list)
    epoch: int
    moved: int = 0
    changed: Version = 0
    snapshot: Version | None = None
    mark: SnapshotMark | None = None

    @property
    def needed_version(self) -> Version:
        needed = min(self.through, self.live[0].version - 1) if self.live else self.through
        # A snapshot is read as of its own version, and needs no earlier one.
        return max(needed, self.snapshot or 0)

    def request(
        self,
        since: Version,
        until: Version | None = None,
        *,
        follow: bool = False,
        snapshot: bytes | None = None,
    ) -> ChangesRequest:
        """The subscribed changes in `(since, until]`, or first the snapshot at `since` behind a key."""
        return ChangesRequest(
            keys=qualify_range(self.namespace_id, self.spec.keys),
            namespace=self.namespace_id,
            since=since,
            until=until,
            follow=follow,
            snapshot=snapshot,
            on_generation=self.spec.on_generation,
        )

    def waiting(self) -> tuple[ChangesRequest, int]:
        """A request for the undelivered changes, and how many of its first ones were delivered."""
        if self.snapshot is not None and self.through < self.snapshot:
            mark = self.mark or SnapshotMark()
            count = next(
                (commit.count for commit in self.live if commit.version == self.snapshot), mark.index
            )
            return self.request(self.snapshot, snapshot=mark.key), count - mark.index
        # The first changes of the commit that is being delivered are not waiting.
        counts = (commit.count for commit in self.live if commit.version > self.through)
        return self.request(self.through), sum(counts)


@dataclass(frozen=True, kw_only=True)
class SubscriptionStatistics:
    """A subscription at one moment.

    `backlog` counts the changes that are not delivered or not acknowledged; if it is not exact, there are
    more.  The lag is the age of the oldest of them, or 0.  Of the unacknowledged changes, `pending` wait for
    the end of a transaction.
    """

    name: str
    namespace: str
    through: Version
    unacked: int
    pending: int
    backlog: int
    backlog_is_exact: bool
    lag_ms: int
    holder: str | None


class SubscriptionStore(Protocol):
    """The subscriptions of a site.  Arguments and results are plain data, because calls cross processes.

    `epoch` is that of the row that `open` or `seek` returned.  A call with an earlier one is refused with
    `LeaseHeld`, because the subscription was opened or moved since; so is a call of another owner.
    """

    @Action(
        Role.WRITE,
        Scope.NAMESPACE,
        namespaces=lambda arguments: (arguments["spec"].namespace,),
        owned=Owned.LEASE,
    )
    def open(
        self,
        spec: SubscriptionSpec,
        start: Version,
        holder: str,
        lease_seconds: float,
        snapshot: bool = False,
        owner: str = SITE_OWNER,
    ) -> SubscriptionRow:
        """Take the lease of a subscription for an owner; `LeaseHeld` if another consumer has it.

        A new subscription is created, and begins behind `start`, or with the snapshot at `start`.
        """

    @Action(Role.WRITE, Scope.SUBSCRIPTION, repeatable=True, owned=Owned.LEASE)
    def acknowledge(self, name: str, epoch: int, progress: Progress, owner: str = SITE_OWNER) -> None:
        """Store a consumer's report, which may have no news, and renew its lease.

        A repeated report is harmless.  `AcknowledgementConflict` if a position is pending in a transaction.
        """

    @Action(Role.WRITE, Scope.SUBSCRIPTION, may_be_gone=True, repeatable=True, owned=Owned.LEASE)
    def release(self, name: str, epoch: int, owner: str = SITE_OWNER) -> None:
        """Release the lease, if the caller still has it."""

    @Action(Role.WRITE, Scope.SUBSCRIPTION, audited=True, owned=Owned.LEASE)
    def seek(
        self,
        name: str,
        version: Version,
        epoch: int | None = None,
        snapshot: bool = False,
        owner: str = SITE_OWNER,
    ) -> SubscriptionRow:
        """Go on behind a version, as if nothing above it was delivered and all else acknowledged.

        With `snapshot`, begin anew with the snapshot at that version.  The row has a new epoch, so that late
        reports are refused.  Without an epoch, the subscription must have no consumer.
        `AcknowledgementConflict` while an acknowledgement is pending in a transaction.
        """

    @Action(Role.READ, Scope.SUBSCRIPTION, repeatable=True)
    def find(self, name: str) -> SubscriptionRow:
        """The subscription with this name.  Raises SubscriptionNotFound."""

    @Action(Role.READ, Scope.SUBSCRIPTION, repeatable=True)
    def pending(self, name: str) -> list[PendingAcknowledgement]:
        """The acknowledgements of transactions that have not ended.

        When a change is no longer pending, the row says whether it is live: if so, its transaction aborted.
        """

    @Action(Role.ADMIN, Scope.SUBSCRIPTION, audited=True)
    def remove(self, name: str) -> None:
        """Delete a subscription, which must have no consumer, and its safe point.

        `AcknowledgementConflict` while an acknowledgement is pending in a transaction.
        """

    @Action(Role.READ, Scope.SUBSCRIPTION, repeatable=True, lengthy=True)
    def statistics(self, name: str) -> SubscriptionStatistics:
        """The progress and backlog of a subscription."""

    @Action(Role.READ, shown_by=lambda row: row.spec.namespace, repeatable=True)
    def list(self) -> list[SubscriptionRow]:
        """All subscriptions by name."""


def measure(
    row: SubscriptionRow, unacked: int, pending: int, open_changes: OpenChanges, now_ms: int
) -> SubscriptionStatistics:
    """The statistics of a subscription; its backlog is counted up to a limit."""
    oldest = next((commit.version for commit in row.live if commit.runs), VERSION_MAX)
    request, delivered = row.waiting()
    waiting = -delivered
    for batch in open_changes(request):
        waiting += len(batch.versions)
        if batch.versions and waiting > 0:
            oldest = min(oldest, batch.at if batch.is_snapshot else batch.versions[0])
        if waiting > BACKLOG_COUNT_MAX:
            break
    backlog = unacked + min(waiting, BACKLOG_COUNT_MAX)
    return SubscriptionStatistics(
        name=row.name,
        namespace=row.spec.namespace,
        through=row.through,
        unacked=unacked,
        pending=pending,
        backlog=backlog,
        backlog_is_exact=waiting <= BACKLOG_COUNT_MAX,
        lag_ms=max(0, now_ms - physical_ms(oldest)) if backlog else 0,
        holder=row.holder_at(now_ms),
    )
