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

# The owner of transactions that a process with the site open begins.  No caller of a server has this owner
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
    """Changed settings of a kind of log.  `enabled` takes effect at once, others for logs opened later."""

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
    """A live record of a log, described in text."""

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
        """Begin a transaction, which is aborted at its timeout; return its id.  A server sets `owner`."""

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
        """Commit, and return the version when all participants have applied it.

        Raises Conflict if anything in `reads` was written after it was read.
        """

    @Action(Role.WRITE, audited=True, owned=Owned.TRANSACTION, repeatable=True, lengthy=True)
    def abort(self, transaction: str, reason: str) -> None:
        """Abort, and return when all participants have dropped the transaction."""

    @Action(Role.WRITE, owned=Owned.TRANSACTION, repeatable=True, lengthy=True)
    def outcome(self, transaction: str) -> TransactionOutcome:
        """The outcome of a transaction with a coordinator.  An undecided one is aborted first."""

    @Action(Role.READ, Scope.SITE, repeatable=True)
    def show(self, transaction: str) -> TransactionStatistics:
        """The statistics of a transaction, which may have ended recently."""

    @Action(Role.READ, Scope.SITE, repeatable=True)
    def count(self) -> TransactionCounts:
        """The number of transactions that have not ended.  Cheaper than listing very many."""

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
