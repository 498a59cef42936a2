"""The port to transactions, and the structures that describe them and their logs."""

from datetime import timedelta
from enum import StrEnum
from typing import Final, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from floodmark.feed.subscription.acknowledgement import Acknowledgement, Progress
from floodmark.log import BatchSettings, LogStatistics, Segment
from floodmark.model.access import Role
from floodmark.model.actions import SITE_OWNER, Action, Owned, Scope
from floodmark.model.partition import ReadSet
from floodmark.model.transaction import TransactionOutcome, TransactionState, TransactionStatistics
from floodmark.model.version import Version

# The owner of what a process begins that has the site open itself: no caller of a server has this mark
# (`server/ownership.py`).
OWN_MARK: Final = "0" * 16


class LogKind(StrEnum):
    """The logs that transactions are written to."""

    COORDINATOR = "coordinator"
    """Transactions that were begun and decided: one log for each coordinator."""

    PENDING_ACK = "pending-ack"
    """Acknowledgements of open transactions: one log for each subscription."""


class NamespaceWrites(msgspec.Struct, frozen=True, array_like=True):
    """The writes of a transaction to a namespace: stored values, or unstamped states, by key."""

    namespace: str
    id: int
    rows: dict[bytes, bytes]


class BatchUpdate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Changed settings of a kind of log.  `enabled` holds at once, the others for logs opened from now on."""

    enabled: bool | UnsetType = UNSET
    max_records: int | UnsetType = UNSET
    max_bytes: int | UnsetType = UNSET
    max_delay_ms: int | UnsetType = UNSET
    max_bytes_in_flight: int | UnsetType = UNSET


class LogReport(msgspec.Struct, frozen=True, kw_only=True):
    """A log at this moment.  `owner` is the number of a coordinator or the name of a subscription.

    While `holds_batches`, a reader that knows only bare entries cannot read it.
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
    """Begins, commits, aborts and shows transactions.  Each call may be repeated."""

    @Action(Role.WRITE, repeatable=True, owned=Owned.TRANSACTION)
    def begin(self, timeout: timedelta, coordinator: int, owner: str = "") -> str:
        """Open a transaction, aborted if not decided in time; its id.  A server sets `owner` itself."""

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
        """Acknowledge changes of the caller's subscription if its transaction commits."""

    @Action(
        Role.WRITE,
        Scope.NAMESPACE,
        large=True,
        owned=Owned.TRANSACTION,
        namespaces=lambda arguments: [each.namespace for each in arguments["writes"]],
        lengthy=True,
    )
    def commit(
        self, transaction: str, writes: list[NamespaceWrites], reads: ReadSet | None = None
    ) -> Version:
        """Commit; returns the version when all participants have applied it.

        Conflict if anything of `reads` was written after it was read.
        """

    @Action(Role.WRITE, audited=True, owned=Owned.TRANSACTION, repeatable=True, lengthy=True)
    def abort(self, transaction: str, reason: str) -> None:
        """Abort; returns when all participants have dropped the transaction."""

    @Action(Role.WRITE, owned=Owned.TRANSACTION, repeatable=True, lengthy=True)
    def outcome(self, transaction: str) -> TransactionOutcome:
        """How a transaction with a coordinator has ended.  One that is not decided is aborted first."""

    @Action(Role.READ, Scope.SITE, repeatable=True)
    def show(self, transaction: str) -> TransactionStatistics:
        """A transaction, also one that has ended lately."""

    @Action(Role.READ, Scope.SITE, repeatable=True)
    def count(self) -> TransactionCounts:
        """The number of transactions that have not ended: cheaper than to list very many."""

    @Action(Role.READ, Scope.SITE, repeatable=True)
    def logs(self) -> list[LogReport]:
        """All logs, those of coordinators first."""

    @Action(Role.READ, Scope.SITE, repeatable=True)
    def log_records(self, log: LogKind, owner: str, limit: int) -> list[LogRecord]:
        """The first live records of a log."""

    @Action(Role.READ, Scope.SITE, repeatable=True)
    def batching(self, log: LogKind) -> BatchSettings:
        """The batch settings of all logs of a kind."""

    @Action(Role.ADMIN, Scope.SITE, audited=True, repeatable=True)
    def set_batching(self, log: LogKind, update: BatchUpdate) -> BatchSettings:
        """Change the batch settings of all logs of a kind, durably."""

    @Action(Role.READ, Scope.SITE, repeatable=True)
    def list(self, older_than: timedelta) -> list[TransactionStatistics]:
        """The transactions that have not ended, the oldest first."""
