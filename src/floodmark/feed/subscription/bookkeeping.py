"""A consumer's account of its deliveries, and its reports to the site.

Reports are sent in order, by one thread at a time; a report without an answer is repeated before any other.
Before an acknowledgement in a transaction, unreported deliveries are reported, because the site must know the
deliveries.  If all are reported, it waits for no other thread, and the acknowledgements of many threads are
sent concurrently.

A change that is acknowledged in a transaction is *held*: live, but not delivered.  For a transaction that was
ended elsewhere, the consumer asks the site in two steps: first whether the change is still pending, and if
not, then whether the row has it as live.  The order matters, because a commit changes the row first.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from threading import Condition, Lock
from typing import TypeAlias

import msgspec

from floodmark.feed.subscription.acknowledgement import (
    Acknowledgement,
    ChangePosition,
    Deliveries,
    DeliveryAccount,
    Progress,
)
from floodmark.feed.subscription.pending import Pending, PendingAcknowledgement, conflict
from floodmark.feed.subscription.subscriptions import SubscriptionRow, SubscriptionStore
from floodmark.model.errors import FloodmarkError, LeaseHeld, Retryable, SubscriptionNotFound, Terminal

# Acknowledges in a transaction: takes its id, the subscription's name and epoch, the progress, and the
# changes.
SendIn: TypeAlias = Callable[[str, str, int, Progress, Acknowledgement], object]


class ChangeHold(msgspec.Struct):
    """The hold of a transaction on a change.

    It is being sent until the answer arrives.  Without an answer it is uncertain, and the site must be asked.
    """

    transaction: str
    is_sent: bool = False
    is_certain: bool = True


class Bookkeeping:
    """A consumer's account of its deliveries and of the transactions that hold changes.

    Order of locks: `sending`, held by the one thread that calls the site; then that of `changed`, which
    guards the state and is never held while a thread waits for the site.
    """

    def __init__(
        self, store: SubscriptionStore, row: SubscriptionRow, pending: Iterable[PendingAcknowledgement]
    ) -> None:
        self.name = row.name
        self.store = store
        self.epoch = row.epoch
        self.sending = Lock()
        self.changed = Condition(Lock())
        # The error after which the consumer cannot continue.
        self.failure: FloodmarkError | None = None
        self.account = DeliveryAccount(row.through, row.live, row.snapshot, row.mark)
        # A report that got no answer, to be repeated.
        self._unanswered: Progress | None = None
        self.held = _find_pending(self.account.deliveries, pending)
        # The positions to deliver again, and the generation; streams opened for an earlier generation end.
        self.due = set(self.available())
        self.generation = 0

    # Methods for callers that hold the lock of `changed`

    def move(self, row: SubscriptionRow) -> None:
        """Replace the state by that of a row."""
        self.epoch, self.account = row.epoch, DeliveryAccount(row.through, row.live, row.snapshot, row.mark)
        self._unanswered = None
        self.held, self.due = {}, set()
        self.generation += 1
        self.changed.notify_all()

    def available(self) -> Iterator[ChangePosition]:
        """The positions that are live and not held, in order."""
        return (each for each in self.account.deliveries.live_positions() if each not in self.held)

    def is_available(self, position: ChangePosition) -> bool:
        """Whether a position is live and not held."""
        return position not in self.held and self.account.deliveries.is_live(position)

    def deliver_again(self, positions: Iterable[ChangePosition]) -> None:
        """Deliver changes once more, before all others."""
        self.due.update(positions)
        self.generation += 1
        self.changed.notify_all()

    def require_not_held(self, acknowledgement: Acknowledgement, *, but: str | None = None) -> None:
        """Raise `AcknowledgementConflict` if a transaction other than `but` holds one of the changes."""
        found = self._find_other(acknowledgement, but)
        if found is not None:
            position, owner = found
            raise conflict(self.name, position, f"is pending in transaction {owner}", owner)

    def _find_other(
        self, acknowledgement: Acknowledgement, but: str | None
    ) -> tuple[ChangePosition, str] | None:
        """One of the changes that a transaction other than `but` holds, and that transaction."""
        for each in self._covered(acknowledgement) if self.held else ():
            hold = self.held.get(each)
            if hold is not None and hold.transaction != but:
                return each, hold.transaction
        return None

    def _covered(self, acknowledgement: Acknowledgement) -> list[ChangePosition]:
        """The live changes that an acknowledgement covers."""
        deliveries, through = self.account.deliveries, acknowledgement.through
        below = [] if through is None else deliveries.live_positions(through)
        return [*filter(deliveries.is_live, acknowledgement.positions), *below]

    def _release(self, ended: Mapping[ChangePosition, ChangeHold]) -> list[ChangePosition]:
        """Release the positions that still have the given holds, and return them."""
        released = [each for each, hold in ended.items() if self.held.get(each) is hold]
        for each in released:
            del self.held[each]
        return released

    def _settle(
        self, ended: Mapping[ChangePosition, ChangeHold], is_committed: Callable[[ChangePosition], bool]
    ) -> None:
        """Release positions whose transactions have ended: acknowledge them, or deliver them again."""
        released = self._release(ended)
        committed = [each for each in released if is_committed(each)]
        self.account.deliveries.acknowledge(Acknowledgement(positions=committed))
        if len(committed) < len(released):
            self.deliver_again(each for each in released if not is_committed(each))
        self.changed.notify_all()

    # Reports

    def report(self, *, renew: bool = False) -> None:
        """Report unreported progress to the site; without any, renew the lease if `renew`."""
        with self.sending:
            self._send_unanswered()
            with self.changed:
                self._unanswered = self.account.take()
            if self._unanswered is not None:
                self._send_unanswered()
            elif renew:
                with self.noting_failure():
                    self.store.acknowledge(self.name, self.epoch, Progress(through=0))

    def _send_unanswered(self) -> None:
        if self._unanswered is not None:
            with self.noting_failure():
                self.store.acknowledge(self.name, self.epoch, self._unanswered)
            self._unanswered = None

    @contextmanager
    def noting_failure(self, *harmless: type[FloodmarkError]) -> Iterator[None]:
        """Store an error after which the consumer cannot continue, to raise it from all later calls."""
        try:
            yield
        except (LeaseHeld, Terminal) as error:
            if not isinstance(error, harmless):
                self._fail(error)
            raise

    def _fail(self, error: FloodmarkError) -> None:
        with self.changed:
            self.failure = error
            self.changed.notify_all()

    # Transactions

    def acknowledge_in(
        self, send: SendIn, transaction: str, acknowledgement: Acknowledgement, check: Callable[[], None]
    ) -> None:
        """Send an acknowledgement in a transaction, unless `check` raises.

        One thread reports all deliveries entered so far, and the threads that waited for it continue
        together: their acknowledgements become one entry of the log.
        """
        with self.changed:
            check()
            is_ready = self._is_ready(transaction, acknowledgement)
        if not is_ready:
            self._get_ready(transaction, acknowledgement)
        with self.changed:
            check()
            self.require_not_held(acknowledgement, but=transaction)
            self.account.deliveries.require_delivered(acknowledgement)
            epoch, progress = self.epoch, Progress(through=self.account.told_through)
            fresh = [each for each in self._covered(acknowledgement) if each not in self.held]
            holds = {each: ChangeHold(transaction, is_sent=True, is_certain=False) for each in fresh}
            self.held |= holds
        try:
            send(transaction, self.name, epoch, progress, acknowledgement)
        except (Retryable, Terminal) as error:
            with self.changed:
                due = self.due.intersection(self._release(holds))
                if due:
                    # A stream may have skipped them while they were held.
                    self.deliver_again(due)
            if isinstance(error, SubscriptionNotFound | LeaseHeld) and epoch == self.epoch:
                self._fail(error)
            raise
        except BaseException:
            self._answer(holds, is_certain=False)
            raise
        self._answer(holds, is_certain=True)

    def _answer(self, holds: Mapping[ChangePosition, ChangeHold], *, is_certain: bool) -> None:
        with self.changed:
            for hold in holds.values():
                hold.is_sent, hold.is_certain = False, is_certain

    def _is_ready(self, transaction: str, acknowledgement: Acknowledgement) -> bool:
        """Whether the site knows the deliveries and no other transaction holds any of them."""
        unanswered = self._unanswered
        return (
            self.account.is_told(acknowledgement)
            and (unanswered is None or not unanswered.tells_of(acknowledgement))
            and self._find_other(acknowledgement, transaction) is None
        )

    def _get_ready(self, transaction: str, acknowledgement: Acknowledgement) -> None:
        with self.sending:
            self._send_unanswered()
            with self.changed:
                if not self.account.is_told(acknowledgement):
                    self._unanswered = self.account.take()
            self._send_unanswered()
            with self.changed:
                is_held = self._find_other(acknowledgement, transaction) is not None
            if is_held:
                # The other transaction may have ended since.
                self._ask()

    def settle(self, transaction: str, *, committed: bool) -> None:
        """Release the positions of an ended transaction for which the site has confirmed the hold."""
        with self.changed:
            ended = {
                each: hold
                for each, hold in sorted(self.held.items())
                if hold.transaction == transaction and hold.is_certain
            }
            self._settle(ended, lambda _: committed)

    def look(self) -> None:
        """Ask the site which transactions that hold positions have ended, and release those positions."""
        with self.sending:
            # The site must know a delivery before it can tell whether the change is live.
            self._send_unanswered()
            self._ask()

    def _ask(self) -> None:
        with self.changed:
            asked = {each: hold for each, hold in self.held.items() if not hold.is_sent}
        if not asked:
            return
        with self.noting_failure():
            pending = _gather(self.store.pending(self.name))
            ended = {each: hold for each, hold in asked.items() if pending.owner(each) != hold.transaction}
            row = self.store.find(self.name) if ended else None
        if row is not None and row.epoch == self.epoch:
            site = Deliveries(row.through, row.live)
            with self.changed:
                self._settle(ended, lambda each: site.is_delivered(each) and not site.is_live(each))


def _find_pending(
    deliveries: Deliveries, acknowledgements: Iterable[PendingAcknowledgement]
) -> dict[ChangePosition, ChangeHold]:
    """The live changes that are pending."""
    pending = _gather(acknowledgements)
    owners = ((position, pending.owner(position)) for position in deliveries.live_positions())
    return {position: ChangeHold(owner) for position, owner in owners if owner is not None}


def _gather(acknowledgements: Iterable[PendingAcknowledgement]) -> Pending:
    pending = Pending("")
    for each in acknowledgements:
        pending.add(each.transaction, each.acknowledgement)
    return pending
