"""The port of transactions, and what travels through it."""

from datetime import timedelta
from enum import StrEnum
from typing import Final, Protocol, runtime_checkable

import msgspec
from msgspec import UNSET, UnsetType

from floodmark.feed.subscription.acknowledgement import Acknowledgement, Progress
from floodmark.log import BatchSettings, LogStatistics, Segment
from floodmark.model.access import Role
from floodmark.model.actions import SITE_OWNER, Action, Owned, Scope
from floodmark.model.transaction import TransactionState, TransactionStatistics
from floodmark.model.version import Version

# The owner of what a process begins that has the site open itself: no caller of a server has this mark
# (`server/ownership.py`).
OWN_MARK: Final = "0" * 16


class LogKind(StrEnum):
    """The logs that transactions are written to."""

    COORDINATOR = "coordinator"
    """What was begun and decided: one log for each coordinator."""

    PENDING_ACK = "pending-ack"
    """What was acknowledged and is not decided: one log for each subscription."""


class NamespaceWrites(msgspec.Struct, frozen=True, array_like=True):
    """What a transaction writes to a namespace: stored values, or unstamped states, by key."""

    namespace: str
    id: int
    rows: dict[bytes, bytes]


class BatchUpdate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The settings of a kind of log that change; what is not named stays.

    `enabled` holds from the next record on, the others for logs that are opened from now on.
    """

    enabled: bool | UnsetType = UNSET
    max_records: int | UnsetType = UNSET
    max_bytes: int | UnsetType = UNSET
    max_delay_ms: int | UnsetType = UNSET
    max_bytes_in_flight: int | UnsetType = UNSET


class LogReport(msgspec.Struct, frozen=True, kw_only=True):
    """A log at this moment.

    `owner` is the number of a coordinator, or the name of a subscription.  While `holds_batches`, a reader
    that knows only bare entries cannot read it.  `oldest_live` is the entry of its oldest live record.
    """

    log: LogKind
    owner: str
    settings: BatchSettings
    holds_batches: bool
    segments: list[Segment]
    live_records: int
    oldest_live: int | None
    statistics: LogStatistics


class LogRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A live record of a log, in words."""

    entry: int
    batch_size: int
    batch_index: int
    transaction: str
    kind: str
    detail: str


class TransactionCounts(msgspec.Struct, frozen=True, kw_only=True):
    """How many transactions have not ended, by state, and the age of the oldest; 0 if there is none."""

    states: dict[TransactionState, int]
    oldest_age_ms: int


class Transactions(Protocol):
    """What can be asked of a site about transactions.  Each call may be repeated."""

    @Action(Role.WRITE, repeatable=True, owned=Owned.TRANSACTION)
    def begin(self, timeout: timedelta, coordinator: int, owner: str = "") -> str:
        """Open a transaction, which is aborted if it is not decided in time; its id.

        `owner` marks whose it is, where there are callers to tell apart.  A server says that itself, and
        does not hear what a caller says.
        """
        ...

    @Action(Role.WRITE, Scope.SUBSCRIPTION, owned=Owned.LEASE, repeatable=True)
    def acknowledge(
        self,
        transaction: str,
        name: str,
        epoch: int,
        progress: Progress,
        acknowledgement: Acknowledgement,
        owner: str = SITE_OWNER,
    ) -> None:
        """Acknowledge changes of a subscription if, and when, the transaction is committed.

        The transaction and the lease of the subscription are the caller's.
        """
        ...

    @Action(
        Role.WRITE,
        Scope.NAMESPACE,
        large=True,
        owned=Owned.TRANSACTION,
        namespaces=lambda arguments: [each.namespace for each in arguments["writes"]],
        lengthy=True,
    )
    def commit(self, transaction: str, writes: list[NamespaceWrites]) -> Version:
        """Commit, and return when everything is in effect; the version of it."""
        ...

    @Action(Role.WRITE, audited=True, owned=Owned.TRANSACTION, repeatable=True, lengthy=True)
    def abort(self, transaction: str, reason: str) -> None:
        """Abort, and return when everything is as it was."""
        ...

    @Action(Role.READ, Scope.SITE, repeatable=True)
    def show(self, transaction: str) -> TransactionStatistics:
        """One of them, also if it has ended lately."""
        ...

    @Action(Role.READ, Scope.SITE, repeatable=True)
    def logs(self) -> list[LogReport]:
        """All logs, those of coordinators first."""
        ...

    @Action(Role.READ, Scope.SITE, repeatable=True)
    def log_records(self, log: LogKind, owner: str, limit: int) -> list[LogRecord]:
        """The first live records of a log."""
        ...

    @Action(Role.READ, Scope.SITE, repeatable=True)
    def batching(self, log: LogKind) -> BatchSettings:
        """How records are put into entries, in all logs of a kind."""
        ...

    @Action(Role.ADMIN, Scope.SITE, audited=True, repeatable=True)
    def set_batching(self, log: LogKind, update: BatchUpdate) -> BatchSettings:
        """Change that, for good."""
        ...

    @Action(Role.READ, Scope.SITE, repeatable=True)
    def list(self, older_than: timedelta) -> list[TransactionStatistics]:
        """Those that have not ended, the oldest first."""
        ...


@runtime_checkable
class OwnTransactions(Transactions, Protocol):
    """What can be asked besides of a site that is open in this process."""

    def sweep(self) -> None:
        """Abort what is over its time, and carry out what was decided.

        A site does so by itself, unless it was opened with `background=False`.
        """
        ...

    def count(self) -> TransactionCounts:
        """How many there are.  Looks at each of them, and holds the lock only to copy the list."""
        ...
