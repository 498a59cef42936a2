"""The commit of a transaction without a coordinator, and what has become of one that got no answer.

A commit that goes over a wire has an id, and the node that commits it stores the id with it.  **Asking
decides**: a node that is asked for an id which it has not committed refuses it for good, before it answers.
So a client that misses an answer asks, and either has the version or sends the commit again under another id.

Only commits of clients store their ids.  A commit in this process returns, or ends with the process.
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
from floodmark.site.coordinated import PACE, Pace

# A node settles an atomic batch that its writer has left in one to two seconds.
OUTCOME_TIMEOUT: Final = timedelta(seconds=10)


def commit_uncoordinated(
    host: Host,
    rows: dict[bytes, bytes],
    reads: ReadSet | None,
    *,
    durable: bool,
    timeout: timedelta,
    pace: Pace = PACE,
) -> Version | None:
    """Commit qualified rows if nothing of `reads` has changed; None if that needs a coordinator.

    Raises Conflict, or CommitUnknown if the outcome is not known within the timeout.
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
    host: Host, transaction: str, *, timeout: timedelta = OUTCOME_TIMEOUT, pace: Pace = PACE
) -> TransactionOutcome:
    """What has become of a transaction; one that is not committed is refused for good.

    Raises Retryable if it cannot be found out within the timeout.
    """
    waiting = _Patience(timeout, pace)
    while True:
        try:
            return _ask(host, transaction)
        except Retryable as error:
            waiting.pause(error)


def finish_commit(host: Host, transaction: str, *, timeout: timedelta, pace: Pace = PACE) -> Version:
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
    """The time that is left to find an outcome out, with growing pauses."""

    def __init__(self, timeout: timedelta, pace: Pace) -> None:
        self._pace = pace
        self._until_seconds = pace.time_seconds() + timeout.total_seconds()
        self._pauses: Iterator[None] = pace.pauses()

    def pause(self, error: Exception) -> None:
        """Wait before another attempt.  Raises the error if no time is left."""
        if self._pace.time_seconds() >= self._until_seconds:
            raise error
        next(self._pauses)

    def ask(self, host: Host, unknown: CommitUnknown) -> TransactionOutcome:
        """Whether a commit has happened.  Raises `unknown` if that is not known."""
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
    """The outcome of a transaction, which is refused if it is not committed.  Raises Retryable."""
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
    # An outcome is kept for twice that time, so that clocks may differ.
    is_old = batch_age_ms(batch, host.version_ms()) > BATCH_AGE_MS_MAX
    return UNKNOWN if is_old else ABORTED
