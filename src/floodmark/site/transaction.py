"""A transaction: writes and acknowledgements that happen together or not at all.

    with site.subscribe("counting", "messages") as subscription:
        for delivery in subscription:
            with site.transaction() as transaction:
                transaction.add(unread, recipient_of(delivery.change), 1)
                transaction.acknowledge(delivery)

A worker that is killed counts each message once.  Writes are gathered here and sent with the commit;
acknowledgements are sent at once, and the site refuses those that are taken.
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
from floodmark.host.ports import NamespaceWrites, Transactions
from floodmark.model.errors import (
    Closed,
    FloodmarkError,
    InvalidArgument,
    OutcomeUnknown,
    PartlyDone,
    Retryable,
    TransactionEnded,
    TransactionNotFound,
    Unreachable,
)
from floodmark.model.limits import TRANSACTION_BYTES_MAX
from floodmark.model.transaction import TransactionState
from floodmark.model.version import Version
from floodmark.site.gathering import GatheredWrites

TIMEOUT: Final = timedelta(minutes=1)
# How often work is retried that met another transaction, and the pauses between attempts.
ATTEMPTS_MAX: Final = 10
PAUSE_MS_FIRST: Final = 10
PAUSE_MS_MAX: Final = 1_000

_COMMITS: Final = (TransactionState.COMMITTING, TransactionState.COMMITTED)

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How a caller waits before a retry: its clock, its sleep and its randomness.

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

    def pauses(self) -> Iterator[None]:
        """Sleep at each step for half to all of a pause, so that rivals do not meet again."""
        for pause in Backoff(PAUSE_MS_FIRST, longest_ms=PAUSE_MS_MAX, budget_ms=NO_BUDGET_MS).pauses():
            self.sleep(pause * (0.5 + self.random() / 2))
            yield


PACE: Final = Pace()


class Transaction(GatheredWrites):
    """Writes and acknowledgements that wait for their commit.  Made by `Site.transaction`; for one thread.

    A `with` block commits at its end, or aborts if it fails.  Writes are to one partition.
    """

    def __init__(
        self, transactions: Transactions, transaction: str, *, timeout: timedelta = TIMEOUT, pace: Pace = PACE
    ) -> None:
        super().__init__(f"transaction {transaction}", bytes_max=TRANSACTION_BYTES_MAX)
        self.id = transaction
        self._pace = pace
        # After this the site has aborted it, unless it is decided.
        self._until_seconds = pace.time_seconds() + timeout.total_seconds()
        # At which version it was committed; 0 before.
        self.version: Version = 0
        self._transactions = transactions
        self._subscriptions: list[Subscription] = []
        self._ended = False
        # Whether a commit was sent that has not been answered, and may have happened.
        self._in_doubt = False

    def __enter__(self) -> "Transaction":
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._ended:
            return
        if error is None:
            self.commit()
        else:
            self.abort(f"its block ended with {error!r:.200}")

    def __repr__(self) -> str:
        return f"Transaction({self.id!r})"

    # Acknowledgements

    def acknowledge(self, *deliveries: Delivery) -> None:
        """Acknowledge changes of one subscription, if this transaction is committed."""
        self._acknowledge(deliveries, through=False)

    def acknowledge_through(self, delivery: Delivery) -> None:
        """Acknowledge a change and all that come before it, if this transaction is committed."""
        self._acknowledge((delivery,), through=True)

    def _acknowledge(self, deliveries: tuple[Delivery, ...], *, through: bool) -> None:
        self._require_open()
        if not deliveries:
            return
        if not all(isinstance(delivery, Delivery) for delivery in deliveries):
            raise InvalidArgument(f"acknowledge what a subscription delivered, not {deliveries!r:.200}")
        subscription = deliveries[0].subscription
        if subscription not in self._subscriptions:
            self._subscriptions.append(subscription)
        try:
            subscription.acknowledge_in(self._transactions.acknowledge, self.id, deliveries, through=through)
        except (OutcomeUnknown, Unreachable) as error:
            # To commit without it would let the change be dealt with again.
            self.abort(f"an acknowledgement got no answer: {error}")
            raise

    # The end

    def commit(self) -> Version:
        """Make everything effective; its version.

        Without an answer, it is asked for again until the transaction's timeout.  After OutcomeUnknown,
        committing again finds the outcome out, unless the site has forgotten the transaction since.
        """
        self._require_open()
        writes = [
            NamespaceWrites(namespace.name, namespace.id, rows) for namespace, rows in self._writes.values()
        ]
        try:
            self.version = self._commit(writes)
        except PartlyDone:
            # It is committed; a participant has not confirmed it yet.
            self._end(committed=None)
            raise
        except OutcomeUnknown:
            self._settle(committed=None)
            raise
        except TransactionEnded as error:
            # If another caller committed it, without these writes, its acknowledgements are in effect.
            is_committed = error.details.get("state") in _COMMITS
            if error.details.get("state") == TransactionState.ABORTING:
                # Returns when what it acknowledged is available again.
                self._abort("its commit failed")
            self._end(committed=None if is_committed else False)
            raise
        except FloodmarkError as error:
            self.version = self._give_up(error, wrote=bool(writes))
        self._end(committed=True)
        return self.version

    def _give_up(self, error: FloodmarkError, *, wrote: bool) -> Version:
        """End a transaction whose commit failed.

        After an unanswered attempt, an abort that is refused because it is committed confirms the commit.
        """
        is_aborted = self._abort("its commit failed")
        if is_aborted or not self._in_doubt:
            self._end(committed=False if is_aborted else None)
            raise error
        if version := self._confirm(wrote=wrote):
            return version
        if isinstance(error, TransactionNotFound):
            self._end(committed=None)
            raise OutcomeUnknown(
                f"a commit of transaction {self.id} got no answer, and the site, asked again, does not know "
                "of it any more: it was committed or aborted, and has ended. Read what it writes before you "
                "do it again",
                transaction=self.id,
            ) from error
        self._settle(committed=None)
        raise OutcomeUnknown(
            f"a commit of transaction {self.id} got no answer, and to ask again failed ({error}); commit "
            "it once more to find out, or read what it writes before you do it again",
            transaction=self.id,
        ) from error

    def _confirm(self, *, wrote: bool) -> Version:
        """The version at which the site says that it is committed, with its writes; 0 if it does not."""
        try:
            shown = self._transactions.show(self.id)
        except FloodmarkError:
            return 0
        return shown.version if shown.state in _COMMITS and shown.wrote == wrote else 0

    def _commit(self, writes: list[NamespaceWrites]) -> Version:
        """Commit, and ask again while no answer comes and its time is not over: it is committed once."""
        pauses = self._pace.pauses()
        while True:
            try:
                return self._send(writes)
            except PartlyDone:
                raise
            except (OutcomeUnknown, Unreachable):
                if self._pace.time_seconds() >= self._until_seconds:
                    raise
            next(pauses)

    def _send(self, writes: list[NamespaceWrites]) -> Version:
        """Ask for the commit once.  Until there is an answer, it may have happened."""
        before, self._in_doubt = self._in_doubt, True
        try:
            return self._transactions.commit(self.id, writes)
        except OutcomeUnknown:
            raise
        except FloodmarkError:
            self._in_doubt = before
            raise

    def abort(self, reason: str = "by its owner") -> None:
        """Leave everything as it was.  If the site cannot be told, the timeout does it."""
        if not self._ended:
            self._end(committed=False if self._abort(reason) else None)

    def _abort(self, reason: str) -> bool:
        """Ask for an abort; whether it is certain that there was one."""
        try:
            self._transactions.abort(self.id, reason)
        except PartlyDone:
            # It is decided; a participant has not confirmed it yet.
            return True
        except FloodmarkError:
            return False
        return True

    def _end(self, *, committed: bool | None) -> None:
        self._ended = True
        self._settle(committed=committed)

    def _settle(self, *, committed: bool | None) -> None:
        for subscription in self._subscriptions:
            subscription.settle(self.id, committed=committed)

    def _require_open(self) -> None:
        if self._ended:
            raise Closed(f"transaction {self.id} has ended; begin another one with site.transaction()")


def run_transaction(
    begin: Callable[[], Transaction], work: Callable[[Transaction], Result], *, pace: Pace = PACE
) -> Result:
    """Commit work in a transaction; retry after a conflict, or after a restart that aborted the commit."""
    pauses = pace.pauses()
    for _ in range(ATTEMPTS_MAX - 1):
        try:
            with begin() as transaction:
                return work(transaction)
        except Retryable:
            pass
        except TransactionEnded as error:
            if not error.details.get("restarted"):
                raise
        next(pauses)
    with begin() as transaction:
        return work(transaction)
