"""A transaction with a coordinator: one that acknowledges changes of subscriptions, or spans several nodes.

Acknowledgements are sent at once, and the site refuses one that another transaction has made.  Writes are
sent with the commit.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from secrets import SystemRandom
from threading import Event
from typing import Final, TypeVar

from floodmark.clock import monotonic_seconds
from floodmark.clock.backoff import NO_BUDGET_MS, Backoff
from floodmark.feed.subscription.consumer import Delivery, Subscription
from floodmark.host.transaction_port import NamespaceWrites, Transactions
from floodmark.model.errors import (
    CommitUnknown,
    FloodmarkError,
    OutcomeUnknown,
    PartlyDone,
    TransactionEnded,
    TransactionNotFound,
    Unreachable,
)
from floodmark.model.partition import ReadSet
from floodmark.model.transaction import TransactionState
from floodmark.model.version import Version

TIMEOUT: Final = timedelta(minutes=1)
# The first and the longest pause before a retry.
PAUSE_MS_FIRST: Final = 10
PAUSE_MS_MAX: Final = 1_000

_COMMITS: Final = (TransactionState.COMMITTING, TransactionState.COMMITTED)

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Pace:
    """The clock, the sleep function and the randomness with which a caller waits before a retry.

    >>> slept = []
    >>> pauses = Pace(sleep=slept.append, random=lambda: 0.5).pauses()
    >>> for _ in range(3):
    ...     next(pauses)
    >>> slept
    [0.0075, 0.015, 0.03]
    """

    time_seconds: Callable[[], float] = monotonic_seconds
    sleep: Callable[[float], object] = Event().wait
    random: Callable[[], float] = SystemRandom().random

    def pauses(self, first_ms: int = PAUSE_MS_FIRST, longest_ms: int = PAUSE_MS_MAX) -> Iterator[None]:
        """Sleep at each step for a random half to all of a growing pause, so that rivals spread out."""
        for pause in Backoff(first_ms, longest_ms=longest_ms, budget_ms=NO_BUDGET_MS).pauses():
            self.sleep(pause * (0.5 + self.random() / 2))
            yield


PACE: Final = Pace()


class Coordinated:
    """A client's handle to a transaction that is open at a coordinator of the site.  For one thread."""

    def __init__(
        self, transactions: Transactions, transaction: str, *, timeout: timedelta = TIMEOUT, pace: Pace
    ) -> None:
        self.id = transaction
        self._pace = pace
        # After this time the site aborts the transaction, unless it is decided.
        self._until_seconds = pace.time_seconds() + timeout.total_seconds()
        self._transactions = transactions
        self._subscriptions: list[Subscription] = []
        self.ended = False
        # Whether a commit request was sent and not answered: the transaction may be committed.
        self._in_doubt = False

    def __repr__(self) -> str:
        return f"Coordinated({self.id!r})"

    def acknowledge(self, deliveries: tuple[Delivery, ...], *, through: bool) -> None:
        """Acknowledge changes of one subscription if this transaction commits; `through`, all up to one."""
        subscription = deliveries[0].subscription
        if subscription not in self._subscriptions:
            self._subscriptions.append(subscription)
        try:
            subscription.acknowledge_in(self._transactions.acknowledge, self.id, deliveries, through=through)
        except (OutcomeUnknown, Unreachable) as error:
            # A commit without the acknowledgement would have the change delivered and processed again.
            self.abort(f"an acknowledgement got no answer: {error}")
            raise

    # Commit and abort

    def commit(self, writes: list[NamespaceWrites], reads: ReadSet | None) -> Version:
        """Commit the transaction and return its version.

        A request without an answer is repeated until the transaction's timeout, then CommitUnknown is raised.
        Calling `commit` again then finds the outcome, unless the site no longer keeps it.
        """
        try:
            version = self._commit(writes, reads)
        except PartlyDone:
            # The transaction is committed, but a participant has not confirmed yet.
            self._end(committed=None)
            raise
        except OutcomeUnknown as error:
            self._settle(committed=None)
            raise CommitUnknown(
                f"{error}; commit transaction {self.id} once more to find out",
                **{**error.details, "transaction": self.id},
            ) from error
        except TransactionEnded as error:
            # Another caller may have committed it, without these writes: its acknowledgements are in effect.
            is_committed = error.details.get("state") in _COMMITS
            if error.details.get("state") == TransactionState.ABORTING:
                # Returns when the acknowledged changes can be acknowledged again.
                self._abort("its commit failed")
            self._end(committed=None if is_committed else False)
            raise
        except FloodmarkError as error:
            version = self._give_up(error, wrote=bool(writes))
        self._end(committed=True)
        return version

    def _give_up(self, error: FloodmarkError, *, wrote: bool) -> Version:
        """Abort a transaction whose commit failed and raise the error, or return the version if it committed.

        If an earlier attempt got no answer and the abort is refused, the site is asked for the outcome.
        """
        is_aborted = self._abort("its commit failed")
        if is_aborted or not self._in_doubt:
            self._end(committed=False if is_aborted else None)
            raise error
        if version := self._confirm(wrote=wrote):
            return version
        if isinstance(error, TransactionNotFound):
            self._end(committed=None)
            raise CommitUnknown(
                f"a commit of transaction {self.id} got no answer, and the site, asked again, does not know "
                "of it any more: it was committed or aborted, and has ended. Read what it writes before you "
                "do it again",
                transaction=self.id,
            ) from error
        self._settle(committed=None)
        raise CommitUnknown(
            f"a commit of transaction {self.id} got no answer, and to ask again failed ({error}); commit "
            "it once more to find out, or read what it writes before you do it again",
            transaction=self.id,
        ) from error

    def _confirm(self, *, wrote: bool) -> Version:
        """The commit version, if the site reports a commit that includes the writes; otherwise 0."""
        try:
            shown = self._transactions.show(self.id)
        except FloodmarkError:
            return 0
        return shown.version if shown.state in _COMMITS and shown.wrote == wrote else 0

    def _commit(self, writes: list[NamespaceWrites], reads: ReadSet | None) -> Version:
        """Send the commit, again after a lost answer, until the timeout.  The site commits only once."""
        pauses = self._pace.pauses()
        while True:
            try:
                return self._send(writes, reads)
            except PartlyDone:
                raise
            except (OutcomeUnknown, Unreachable):
                if self._pace.time_seconds() >= self._until_seconds:
                    raise
            next(pauses)

    def _send(self, writes: list[NamespaceWrites], reads: ReadSet | None) -> Version:
        """Send the commit once.  While there is no answer, the transaction is in doubt."""
        before, self._in_doubt = self._in_doubt, True
        try:
            return self._transactions.commit(self.id, writes, reads)
        except OutcomeUnknown:
            raise
        except FloodmarkError:
            self._in_doubt = before
            raise

    def abort(self, reason: str = "by its owner") -> None:
        """Discard the writes and acknowledgements.  If the site does not answer, it aborts at the timeout."""
        if not self.ended:
            self._end(committed=False if self._abort(reason) else None)

    def _abort(self, reason: str) -> bool:
        """Ask the site to abort; return whether the abort is certain."""
        try:
            self._transactions.abort(self.id, reason)
        except PartlyDone:
            # The abort is decided, but a participant has not confirmed yet.
            return True
        except FloodmarkError:
            return False
        return True

    def _end(self, *, committed: bool | None) -> None:
        self.ended = True
        self._settle(committed=committed)

    def _settle(self, *, committed: bool | None) -> None:
        for subscription in self._subscriptions:
            subscription.settle(self.id, committed=committed)
