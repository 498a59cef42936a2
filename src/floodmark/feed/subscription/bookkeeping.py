"""A consumer's account of its deliveries, and its reports to the site.

Reports are sent in order, by one thread at a time; a report without an answer is repeated before any other.
An acknowledgement in a transaction needs the site to know of the deliveries: unreported ones are reported
first.  If there are none it waits for no other thread, and those of many threads go to the site together.

A change that is acknowledged in a transaction is *held*: live, but not to be delivered now.  The
acknowledgement is *sent* until its answer comes; if none came it is *doubtful*, and only the site can tell.
The end of a transaction that ended elsewhere shows in two steps: when its change is no longer pending, the
row says whether it is live.  In this order, because a commit changes the row first.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from threading import Condition, Lock
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

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

# Acknowledges in a transaction: its id, the subscription's name and epoch, the progress, and what is done.
SendIn: TypeAlias = Callable[[str, str, int, Progress, Acknowledgement], object]


class HeldPositions:
    """The positions that transactions hold.

    >>> held = HeldPositions()
    >>> held.begin("0-7", [ChangePosition(5, 0), ChangePosition(5, 1)])
    [ChangePosition(version=5, index=0), ChangePosition(version=5, index=1)]
    >>> held.owner(ChangePosition(5, 1)), held.certain("0-7")
    ('0-7', [])
    >>> held.confirm([ChangePosition(5, 0), ChangePosition(5, 1)])
    >>> held.release("0-7", held.certain("0-7")), len(held)
    ([ChangePosition(version=5, index=0), ChangePosition(version=5, index=1)], 0)
    """

    def __init__(self, owners: Mapping[ChangePosition, str] = MappingProxyType({})) -> None:
        self._owners = dict(owners)
        self._sent: set[ChangePosition] = set()
        self._doubtful: set[ChangePosition] = set()

    def __len__(self) -> int:
        return len(self._owners)

    def __contains__(self, position: ChangePosition) -> bool:
        return position in self._owners

    def owner(self, position: ChangePosition) -> str | None:
        """The transaction that holds a change."""
        return self._owners.get(position)

    def begin(self, transaction: str, positions: Iterable[ChangePosition]) -> list[ChangePosition]:
        """Hold positions whose acknowledgement is sent now; returns those that were not held before."""
        fresh = [position for position in positions if position not in self._owners]
        self._owners.update(dict.fromkeys(fresh, transaction))
        self._sent.update(fresh)
        return fresh

    def confirm(self, positions: Iterable[ChangePosition]) -> None:
        """The site has the acknowledgement."""
        self._sent.difference_update(positions)

    def doubt(self, positions: Iterable[ChangePosition]) -> None:
        """No answer came."""
        for position in positions:
            if position in self._sent:
                self._sent.remove(position)
                self._doubtful.add(position)

    def certain(self, transaction: str) -> list[ChangePosition]:
        """The positions that the site certainly has for a transaction, in order."""
        unclear = self._sent | self._doubtful
        return sorted(
            position
            for position, owner in self._owners.items()
            if owner == transaction and position not in unclear
        )

    def answered(self) -> dict[ChangePosition, str]:
        """The held positions whose acknowledgement is not on its way, with their transactions."""
        return {position: owner for position, owner in self._owners.items() if position not in self._sent}

    def release(self, transaction: str, positions: Iterable[ChangePosition]) -> list[ChangePosition]:
        """Release those of the positions that the transaction still holds, and return them."""
        released = [position for position in positions if self._owners.get(position) == transaction]
        for position in released:
            del self._owners[position]
            self._sent.discard(position)
            self._doubtful.discard(position)
        return released


class _Sending(NamedTuple):
    """An acknowledgement in a transaction on its way to the site."""

    transaction: str
    acknowledgement: Acknowledgement
    epoch: int
    # The version that was reported.
    progress: Progress
    held: list[ChangePosition]


class Bookkeeping:
    """The books of a consumer.

    Order of locks: `sending`, held by the one thread that talks to the site; then that of `changed`, which
    guards the books, and is never held while a thread waits for the site.
    """

    def __init__(
        self, store: SubscriptionStore, row: SubscriptionRow, pending: Iterable[PendingAcknowledgement]
    ) -> None:
        self.name = row.name
        self.store = store
        self.epoch = row.epoch
        self.sending = Lock()
        self.changed = Condition(Lock())
        # The error after which the consumer cannot go on.
        self.failure: FloodmarkError | None = None
        self.account = DeliveryAccount(row.through, row.live, row.snapshot, row.mark)
        # A report without an answer.
        self._unanswered: Progress | None = None
        self.held = HeldPositions(_find_pending(self.account.deliveries, pending))
        # The positions to deliver again; a stream that was opened for an earlier generation ends.
        self.due = set(self.available())
        self.generation = 0

    # The books, which the caller has locked

    def move(self, row: SubscriptionRow) -> None:
        """Begin anew from a row."""
        self.epoch, self.account = row.epoch, DeliveryAccount(row.through, row.live, row.snapshot, row.mark)
        self._unanswered = None
        self.held, self.due = HeldPositions(), set()
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
        """Raise `AcknowledgementConflict` if another transaction than `but` holds some of it."""
        found = self._find_held(acknowledgement, but=but)
        if found is not None:
            position, owner = found
            raise conflict(self.name, position, f"is pending in transaction {owner}", owner)

    def _find_held(
        self, acknowledgement: Acknowledgement, *, but: str | None
    ) -> tuple[ChangePosition, str] | None:
        """An acknowledged change that another transaction than `but` holds, and that transaction."""
        if not self.held:
            return None
        owners = ((each, self.held.owner(each)) for each in self._covered(acknowledgement))
        return next(((each, owner) for each, owner in owners if owner is not None and owner != but), None)

    def _covered(self, acknowledgement: Acknowledgement) -> list[ChangePosition]:
        """The live changes that are acknowledged."""
        deliveries, through = self.account.deliveries, acknowledgement.through
        below = [] if through is None else deliveries.live_positions(through)
        return [*filter(deliveries.is_live, acknowledgement.positions), *below]

    def _release(
        self, ended: dict[ChangePosition, str], is_committed: Callable[[ChangePosition], bool]
    ) -> None:
        """Release positions whose transactions ended: they are acknowledged, or delivered again."""
        released = [each for each, transaction in ended.items() if self.held.release(transaction, [each])]
        committed = [each for each in released if is_committed(each)]
        self.account.deliveries.acknowledge(Acknowledgement(positions=committed))
        if len(committed) < len(released):
            self.deliver_again(each for each in released if not is_committed(each))
        self.changed.notify_all()

    # Reports

    def report(self, *, renew: bool = False) -> None:
        """Report news to the site; without any, renew the lease if that is due."""
        with self.sending:
            self._send_unanswered()
            with self.changed:
                self._unanswered = self.account.take()
            if self._unanswered is not None:
                self._send_unanswered()
            elif renew:
                with self.noting_failure():
                    self.store.renew(self.name, self.epoch)

    def _send_unanswered(self) -> None:
        if self._unanswered is not None:
            with self.noting_failure():
                self.store.acknowledge(self.name, self.epoch, self._unanswered)
            self._unanswered = None

    @contextmanager
    def noting_failure(self, *harmless: type[FloodmarkError]) -> Iterator[None]:
        """Keep an error after which the consumer cannot go on, for all later calls."""
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
        """Send an acknowledgement in a transaction, if `check` does not refuse it.

        One thread reports all deliveries that were noted when it began, and the threads that wait for that
        go on together: their acknowledgements become one entry of the log.
        """
        with self.changed:
            check()
            is_ready = self._is_ready(transaction, acknowledgement)
        if not is_ready:
            self._get_ready(transaction, acknowledgement)
        with self.changed:
            check()
            self.require_not_held(acknowledgement, but=transaction)
            sending = self._begin(transaction, acknowledgement)
        self._send_in(send, sending)

    def _is_ready(self, transaction: str, acknowledgement: Acknowledgement) -> bool:
        """Whether the site knows of the deliveries, and no other transaction holds any of them."""
        unanswered = self._unanswered
        return (
            self.account.is_told(acknowledgement)
            and (unanswered is None or not unanswered.tells_of(acknowledgement))
            and self._find_held(acknowledgement, but=transaction) is None
        )

    def _get_ready(self, transaction: str, acknowledgement: Acknowledgement) -> None:
        with self.sending:
            self._send_unanswered()
            with self.changed:
                if not self.account.is_told(acknowledgement):
                    self._unanswered = self.account.take()
            self._send_unanswered()
            with self.changed:
                is_held = self._find_held(acknowledgement, but=transaction) is not None
            if is_held:
                # The other transaction may have ended since.
                self._ask()

    def _begin(self, transaction: str, acknowledgement: Acknowledgement) -> _Sending:
        self.account.deliveries.require_delivered(acknowledgement)
        held = self.held.begin(transaction, self._covered(acknowledgement))
        progress = Progress(through=self.account.told_through)
        return _Sending(transaction, acknowledgement, self.epoch, progress, held)

    def _send_in(self, send: SendIn, sending: _Sending) -> None:
        transaction, acknowledgement, epoch, progress, held = sending
        try:
            send(transaction, self.name, epoch, progress, acknowledgement)
        except (Retryable, Terminal) as error:
            with self.changed:
                due = self.due.intersection(self.held.release(transaction, held))
                if due:
                    # A stream may have passed them by.
                    self.deliver_again(due)
            if isinstance(error, SubscriptionNotFound | LeaseHeld) and epoch == self.epoch:
                self._fail(error)
            raise
        except BaseException:
            with self.changed:
                self.held.doubt(held)
            raise
        with self.changed:
            self.held.confirm(held)

    def settle(self, transaction: str, *, committed: bool) -> None:
        """Release the positions of a transaction that ended."""
        with self.changed:
            self._release(dict.fromkeys(self.held.certain(transaction), transaction), lambda _: committed)

    def look(self) -> None:
        """Ask the site which of the transactions that hold positions have ended."""
        with self.sending:
            # The site must know of a delivery before it can say what became of it.
            self._send_unanswered()
            self._ask()

    def _ask(self) -> None:
        with self.changed:
            asked = self.held.answered()
        if not asked:
            return
        with self.noting_failure():
            ended = _find_ended(asked, self.store.pending(self.name))
            row = self.store.find(self.name) if ended else None
        if row is not None and row.epoch == self.epoch:
            site = Deliveries(row.through, row.live)
            with self.changed:
                self._release(ended, lambda each: site.is_delivered(each) and not site.is_live(each))


def _find_pending(
    deliveries: Deliveries, acknowledgements: Iterable[PendingAcknowledgement]
) -> dict[ChangePosition, str]:
    """The live changes that are pending, with their transactions."""
    pending = _gather(acknowledgements)
    owners = {position: pending.owner(position) for position in deliveries.live_positions()}
    return {position: owner for position, owner in owners.items() if owner is not None}


def _find_ended(
    asked: Mapping[ChangePosition, str], acknowledgements: Iterable[PendingAcknowledgement]
) -> dict[ChangePosition, str]:
    """The positions that are not pending in their transactions any more."""
    pending = _gather(acknowledgements)
    return {position: owner for position, owner in asked.items() if pending.owner(position) != owner}


def _gather(acknowledgements: Iterable[PendingAcknowledgement]) -> Pending:
    pending = Pending("")
    for each in acknowledgements:
        pending.add(each.transaction, each.acknowledgement)
    return pending
