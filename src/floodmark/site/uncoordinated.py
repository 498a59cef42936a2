"""Commits a transaction without a coordinator, and finds the outcome of a commit that got no answer.

A commit that is sent over the wire has an id, which the node stores with the commit.  **Asking decides**: a
node that is asked about an id that it has not committed refuses this id for good, before it answers.  So a
client without an answer asks, and either gets the version or sends the commit again under another id.

Commits of an embedded site have no ids: such a commit returns, or ends with the process.
"""

from collections.abc import Iterator
from datetime import timedelta
from typing import Final

from floodmark.host.ports import Host
from floodmark.model.batch import batch_age_ms, split_commit
from floodmark.model.errors import CommitUnknown, OutcomeUnknown, Retryable, TransactionEnded, Unreachable
from floodmark.model.limits import BATCH_AGE_MS_MAX
from floodmark.model.partition import Decision, ReadSet
from floodmark.model.transaction import ABORTED, UNKNOWN, TransactionOutcome
from floodmark.model.version import Version
from floodmark.site.coordinated import Pace

# A node settles an atomic batch that its writer has abandoned within one to two seconds.
OUTCOME_TIMEOUT: Final = timedelta(seconds=10)


def commit_uncoordinated(
    host: Host,
    rows: dict[bytes, bytes],
    reads: ReadSet | None,
    *,
    durable: bool,
    timeout: timedelta,
    pace: Pace,
) -> Version | None:
    """Commit qualified rows and return the version; None if the commit needs a coordinator.

    Raises Conflict if anything in `reads` has changed, and CommitUnknown if the outcome cannot be found
    within the timeout.
    """
    waiting: _Patience | None = None
    while True:
        try:
            return host.router.write_together(rows, reads, durable=durable)
        except CommitUnknown as error:
            unknown = error
        waiting = waiting or _Patience(timeout, pace)
        outcome = waiting.ask(host, unknown)
        if outcome.version:
            return outcome.version
        waiting.pause(
            Unreachable(
                f"no answer came to the commit, and it was refused since: nothing was written ({unknown})"
            )
        )


def find_outcome(
    host: Host, transaction: str, *, timeout: timedelta = OUTCOME_TIMEOUT, pace: Pace
) -> TransactionOutcome:
    """The outcome of a transaction.  One that is not committed yet is refused for good.

    Raises Retryable if the outcome cannot be found within the timeout.
    """
    waiting = _Patience(timeout, pace)
    while True:
        try:
            return _ask(host, transaction)
        except Retryable as error:
            waiting.pause(error)


def finish_commit(host: Host, transaction: str, *, timeout: timedelta, pace: Pace) -> Version:
    """The version of a commit that got no answer.  Raises TransactionEnded if it was not committed."""
    unknown = CommitUnknown(
        f"what became of transaction {transaction} is not known yet, or not any more; read what it writes "
        "before you do it again",
        transaction=transaction,
    )
    outcome = _Patience(timeout, pace).ask(host, unknown)
    if not outcome.version:
        raise TransactionEnded(
            f"transaction {transaction} was not committed, and never will be; begin another one",
            transaction=transaction,
        )
    return outcome.version


class _Patience:
    """A deadline for finding an outcome, with growing pauses between the attempts."""

    def __init__(self, timeout: timedelta, pace: Pace) -> None:
        self._pace = pace
        self._until_seconds = pace.time_seconds() + timeout.total_seconds()
        self._pauses: Iterator[None] = pace.pauses()

    def pause(self, error: Exception) -> None:
        """Wait before the next attempt.  Raises the error after the deadline."""
        if self._pace.time_seconds() >= self._until_seconds:
            raise error
        next(self._pauses)

    def ask(self, host: Host, unknown: CommitUnknown) -> TransactionOutcome:
        """The outcome of a commit.  Raises `unknown` if it is unknown, or not found before the deadline."""
        while True:
            try:
                outcome = _ask(host, str(unknown.details["transaction"]))
            except (Retryable, OutcomeUnknown):
                self.pause(unknown)
            else:
                if outcome == UNKNOWN:
                    raise unknown
                return outcome


def _ask(host: Host, transaction: str) -> TransactionOutcome:
    """Ask once for the outcome of a transaction, which is refused if it is not committed.

    Raises Retryable if the nodes have not settled the outcome yet.
    """
    named = split_commit(transaction)
    if named is None:
        return host.transactions.outcome(transaction)
    batch, key = named
    fate = host.router.call(key, lambda partition: partition.ask_prepared(batch, key))
    if fate.decision is Decision.COMMIT:
        return TransactionOutcome("committed", fate.version)
    if fate.decision is Decision.UNDECIDED:
        raise Retryable(
            f"transaction {transaction} is prepared, and its nodes have not told yet how it ends; ask again",
            transaction=transaction,
        )
    # Outcomes are kept for twice this time, to allow for differences between clocks.
    is_old = batch_age_ms(batch, host.version_ms()) > BATCH_AGE_MS_MAX
    return UNKNOWN if is_old else ABORTED
