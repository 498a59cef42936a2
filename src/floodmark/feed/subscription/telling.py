"""What a consumer knows of its deliveries, and how it tells its site.

Everything is told in the order in which it happened, by one thread at a time.  What got no answer is told
again before anything else is.  An acknowledgement in a transaction takes along what is new; if nothing is, it
need not wait for others, and those of many threads go to the site together.

What became of a transaction that ended elsewhere is found out in two steps: if something is no longer
pending, the row says whether it is live.  In this order, because a commit changes the row first.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import Condition, Lock
from typing import NamedTuple, TypeAlias

from floodmark.feed.subscription.acknowledgement import (
    Account,
    Acknowledgement,
    Deliveries,
    Position,
    Progress,
)
from floodmark.feed.subscription.held import Held, find_ended, find_pending
from floodmark.feed.subscription.pending import PendingAcknowledgement, conflict
from floodmark.feed.subscription.subscriptions import SubscriptionRow, SubscriptionStore
from floodmark.model.errors import FloodmarkError, LeaseHeld, Retryable, SubscriptionNotFound, Terminal

# Acknowledges in a transaction: its id, the subscription's name and epoch, what came, and what is done.
SendIn: TypeAlias = Callable[[str, str, int, Progress, Acknowledgement], object]


class _Sending(NamedTuple):
    """An acknowledgement in a transaction on its way to the site, and what is held for it."""

    transaction: str
    acknowledgement: Acknowledgement
    epoch: int
    # What the site was told before.
    progress: Progress
    held: list[Position]


class Telling:
    """A consumer's bookkeeping.

    Of the locks, one at a time tells the site; the bookkeeping is locked last and never while anybody waits
    for the site.
    """

    def __init__(
        self,
        store: SubscriptionStore,
        row: SubscriptionRow,
        pending: Iterable[PendingAcknowledgement],
    ) -> None:
        self.name = row.name
        self._store = store
        self._epoch = row.epoch
        self._sending = Lock()
        self._changed = Condition(Lock())
        self._account = Account(row.through, row.live, row.snapshot, row.mark)
        # What was told without an answer.  It is told again before anything else is.
        self._unanswered: Progress | None = None
        self._failure: FloodmarkError | None = None
        self._held = Held(find_pending(self._account.deliveries, pending))
        # What is to be delivered again, and what a stream that was opened earlier must know.
        self._due = set(self._available())
        self._generation = 0

    def _move(self, row: SubscriptionRow) -> None:
        """Begin anew.  The bookkeeping is locked."""
        self._epoch, self._account = row.epoch, Account(row.through, row.live, row.snapshot, row.mark)
        self._unanswered = None
        self._held, self._due = Held(), set()
        self._generation += 1
        self._changed.notify_all()

    def _available(self) -> Iterator[Position]:
        """What is live and not held, in order."""
        return (each for each in self._account.deliveries.live_positions() if each not in self._held)

    def _is_available(self, position: Position) -> bool:
        return position not in self._held and self._account.deliveries.is_live(position)

    def _deliver_again(self, positions: Iterable[Position]) -> None:
        """Deliver some changes once more, before all others.  The bookkeeping is locked."""
        self._due.update(positions)
        self._generation += 1
        self._changed.notify_all()

    # Telling the site

    def _tell(self, *, renew: bool = False) -> None:
        """Tell the site what is new; if nothing is, at least that there is somebody, if that is due."""
        with self._sending:
            self._send_unanswered()
            with self._changed:
                self._unanswered = self._account.take()
            if self._unanswered is not None:
                self._send_unanswered()
            elif renew:
                with self._noting_failure():
                    self._store.renew(self.name, self._epoch)

    def _send_unanswered(self) -> None:
        if self._unanswered is not None:
            with self._noting_failure():
                self._store.acknowledge(self.name, self._epoch, self._unanswered)
            self._unanswered = None

    @contextmanager
    def _noting_failure(self, *harmless: type[FloodmarkError]) -> Iterator[None]:
        """Remember an error after which there is no going on, for everyone who comes later."""
        try:
            yield
        except (LeaseHeld, Terminal) as error:
            if not isinstance(error, harmless):
                self._fail(error)
            raise

    def _fail(self, error: FloodmarkError) -> None:
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    # Transactions

    def _acknowledge_in(
        self, send: SendIn, transaction: str, acknowledgement: Acknowledgement, check: Callable[[], None]
    ) -> None:
        """Tell the site what is acknowledged in a transaction, if the check in the bookkeeping holds.

        The site must know of the deliveries.  One thread tells it of all that were noted when it began, and
        those that wait for that go on together: their acknowledgements become one entry of the log.
        """
        with self._changed:
            check()
            is_ready = self._is_ready(transaction, acknowledgement)
        if not is_ready:
            self._get_ready(transaction, acknowledgement)
        with self._changed:
            check()
            self._require_not_held(acknowledgement, but=transaction)
            sending = self._begin(transaction, acknowledgement)
        self._send_in(send, sending)

    def _is_ready(self, transaction: str, acknowledgement: Acknowledgement) -> bool:
        """Whether the site knows of the deliveries, and only the transaction holds any of them.

        The bookkeeping is locked.
        """
        unanswered = self._unanswered
        return (
            self._account.is_told(acknowledgement)
            and (unanswered is None or not unanswered.tells_of(acknowledgement))
            and self._find_held(acknowledgement, but=transaction) is None
        )

    def _get_ready(self, transaction: str, acknowledgement: Acknowledgement) -> None:
        with self._sending:
            self._send_unanswered()
            with self._changed:
                if not self._account.is_told(acknowledgement):
                    self._unanswered = self._account.take()
            self._send_unanswered()
            with self._changed:
                is_held = self._find_held(acknowledgement, but=transaction) is not None
            if is_held:
                # The other transaction may have ended since.
                self._ask()

    def _begin(self, transaction: str, acknowledgement: Acknowledgement) -> _Sending:
        """Hold what is to be told.  The bookkeeping is locked."""
        self._account.deliveries.require_delivered(acknowledgement)
        held = self._held.begin(transaction, self._covered(acknowledgement))
        progress = Progress(through=self._account.told_through)
        return _Sending(transaction, acknowledgement, self._epoch, progress, held)

    def _send_in(self, send: SendIn, sending: _Sending) -> None:
        transaction, acknowledgement, epoch, progress, held = sending
        try:
            send(transaction, self.name, epoch, progress, acknowledgement)
        except (Retryable, Terminal) as error:
            with self._changed:
                due = self._due.intersection(self._held.release(transaction, held))
                if due:
                    # A stream may have passed them by.
                    self._deliver_again(due)
            if isinstance(error, SubscriptionNotFound | LeaseHeld) and epoch == self._epoch:
                self._fail(error)
            raise
        except BaseException:
            with self._changed:
                self._held.doubt(held)
            raise
        with self._changed:
            self._held.confirm(held)

    def _settle(self, transaction: str, *, committed: bool) -> None:
        with self._changed:
            self._let_go(dict.fromkeys(self._held.certain(transaction), transaction), lambda _: committed)

    def _look(self) -> None:
        """Find out which transactions have ended, of those that hold something."""
        with self._sending:
            # The site must know of a delivery before it can say what became of it.
            self._send_unanswered()
            self._ask()

    def _ask(self) -> None:
        """Ask the site about everything that is held.  Nobody else tells it anything meanwhile."""
        with self._changed:
            asked = self._held.answered()
        if not asked:
            return
        with self._noting_failure():
            ended = find_ended(asked, self._store.pending(self.name))
            row = self._store.find(self.name) if ended else None
        if row is not None and row.epoch == self._epoch:
            site = Deliveries(row.through, row.live)
            with self._changed:
                self._let_go(ended, lambda each: site.is_delivered(each) and not site.is_live(each))

    def _let_go(self, ended: dict[Position, str], is_committed: Callable[[Position], bool]) -> None:
        """Hold something no longer: it is acknowledged, or delivered again.  The bookkeeping is locked."""
        released = [each for each, transaction in ended.items() if self._held.release(transaction, [each])]
        committed = [each for each in released if is_committed(each)]
        self._account.deliveries.acknowledge(Acknowledgement(positions=committed))
        if len(committed) < len(released):
            self._deliver_again(each for each in released if not is_committed(each))
        self._changed.notify_all()

    def _require_not_held(self, acknowledgement: Acknowledgement, *, but: str | None = None) -> None:
        found = self._find_held(acknowledgement, but=but)
        if found is not None:
            position, owner = found
            raise conflict(self.name, position, f"is pending in transaction {owner}", owner)

    def _find_held(self, acknowledgement: Acknowledgement, *, but: str | None) -> tuple[Position, str] | None:
        """A change that an acknowledgement is about and a transaction holds, save for one."""
        if not self._held:
            return None
        owners = ((each, self._held.owner(each)) for each in self._covered(acknowledgement))
        return next(((each, owner) for each, owner in owners if owner is not None and owner != but), None)

    def _covered(self, acknowledgement: Acknowledgement) -> list[Position]:
        """The live changes that an acknowledgement is about."""
        deliveries, through = self._account.deliveries, acknowledgement.through
        below = [] if through is None else deliveries.live_positions(through)
        return [*filter(deliveries.is_live, acknowledgement.positions), *below]
