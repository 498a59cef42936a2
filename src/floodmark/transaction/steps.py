"""The steps of transactions on their way through a coordinator.

A step is *entered* first, which excludes steps that conflict with it.  When its record is durable, the log's
thread *applies* it; otherwise the step is *left*, as if it had never been entered.
"""

from typing import Final

from floodmark.log import Position, Promise
from floodmark.model.errors import InvalidArgument, LimitExceeded, Retryable, TransactionEnded
from floodmark.model.limits import TRANSACTION_PARTICIPANTS_MAX, TRANSACTIONS_OPEN_MAX
from floodmark.model.transaction import TransactionState
from floodmark.transaction.book import PAUSE_MS_FIRST, Ended, HeldTransaction, TransactionBook, owner_of
from floodmark.transaction.records import Aborting, Begun, Committing, Joined, Record

COMMITS: Final = (TransactionState.COMMITTING, TransactionState.COMMITTED)
ABORTS: Final = (TransactionState.ABORTING, TransactionState.ABORTED)


class TransactionStep(Promise[HeldTransaction | Ended]):
    """One step, and the future of its transaction.  `enter`, `apply` and `leave` need the book's lock."""

    record: Record

    def __init__(self, book: TransactionBook) -> None:
        super().__init__()
        self._book = book
        self._is_entered = False
        # The transaction, once the step is entered; a step that begins one has none before it is applied.
        self._held: HeldTransaction | None = None

    def enter(self, seconds_max: float) -> HeldTransaction | Ended | None:
        """Check the step and enter it; or return the transaction, if the same step was taken before.

        Waits at most `seconds_max` for conflicting steps.
        """
        raise NotImplementedError

    def apply(self) -> HeldTransaction:
        """Change the transaction: the record is durable."""
        raise NotImplementedError

    def leave(self) -> None:
        """Stop excluding other steps.  Does nothing if the step is not entered."""
        if self._is_entered:
            self._is_entered = False
            self._exit()
            if self._held is not None:
                self._book.release(self._held)

    def _exit(self) -> None:
        """Undo `enter`."""
        raise NotImplementedError

    @property
    def _transaction(self) -> HeldTransaction:
        assert self._held is not None
        return self._held

    # Called by the log

    def complete(self, position: Position) -> None:
        with self._book.lock:
            held = self._held = self.apply()
            held.positions.append(position)
            self.leave()
        self.set_result(held)

    def fail(self, failure: BaseException) -> None:
        with self._book.lock:
            self.leave()
        self.set_exception(failure)

    # Called by a thread that is interrupted before it has handed the step over

    def withdraw(self) -> None:
        """Leave the step, unless the log is writing it; then the log completes it.  Takes the lock."""
        if self.cancel():
            with self._book.lock:
                self.leave()


class Beginning(TransactionStep):
    """A transaction begins."""

    record: Begun

    def __init__(
        self,
        book: TransactionBook,
        record: Begun,
        coordinator: int,
        now_ms: int,
        owned_max: int = TRANSACTIONS_OPEN_MAX,
    ) -> None:
        super().__init__(book)
        self.record = record
        self._owner = owner_of(record.transaction)
        self._owned_max = owned_max
        self._coordinator = coordinator
        self._now_ms = now_ms

    def enter(self, seconds_max: float) -> None:
        book = self._book
        book.require_running()
        if len(book.held) + book.beginning >= TRANSACTIONS_OPEN_MAX:
            raise LimitExceeded(
                f"coordinator {self._coordinator} has {TRANSACTIONS_OPEN_MAX:,} open transactions; "
                "end some, or give them shorter timeouts"
            )
        owned = book.owned.get(self._owner, 0)
        if owned >= self._owned_max:
            raise LimitExceeded(
                f"coordinator {self._coordinator} has {owned:,} open transactions of this caller, which may "
                "have no more; end some, or give them shorter timeouts"
            )
        book.beginning += 1
        book.owned[self._owner] = owned + 1
        self._is_entered = True

    def apply(self) -> HeldTransaction:
        transaction, now_ms = self.record.transaction, self._now_ms
        held = HeldTransaction(transaction, now_ms, now_ms + self.record.timeout_ms)
        self._book.held[transaction] = held
        return held

    def _exit(self) -> None:
        self._book.beginning -= 1
        if self._held is None:
            self._book.owned[self._owner] -= 1
            self._book.forget_owner(self._owner)


class Joining(TransactionStep):
    """A participant joins a transaction."""

    record: Joined

    def __init__(self, book: TransactionBook, record: Joined) -> None:
        super().__init__(book)
        self.record = record

    def enter(self, seconds_max: float) -> HeldTransaction | None:
        transaction, participant = self.record.transaction, self.record.participant
        if seconds_max:
            self._book.wait_for(transaction, lambda held: not held.is_deciding, seconds_max)
        held = require_undecided(self._book, transaction)
        if participant in held.waiting:
            return held
        if len(held.participants) + held.joining >= TRANSACTION_PARTICIPANTS_MAX:
            raise LimitExceeded(
                f"transaction {transaction} has {TRANSACTION_PARTICIPANTS_MAX} participants, "
                "and may have no more; do it in several transactions",
                transaction=transaction,
            )
        self._held = held
        held.joining += 1
        self._is_entered = True
        return None

    def apply(self) -> HeldTransaction:
        self._transaction.join(self.record.participant)
        return self._transaction

    def _exit(self) -> None:
        self._transaction.joining -= 1


class Deciding(TransactionStep):
    """A transaction is decided while no other step of it is under way.

    A step that `is_late` aborts without waiting for participants at work, which get the decision afterwards.
    If it `is_awaited`, the caller sends the decision, and a sweep does so only after a pause.
    """

    record: Committing | Aborting

    def __init__(
        self,
        book: TransactionBook,
        decision: Committing | Aborting,
        wrote: bool | None = None,
        *,
        is_late: bool = False,
        is_awaited: bool = False,
    ) -> None:
        super().__init__(book)
        self.record = decision
        self._wrote = wrote
        self._is_late = is_late
        self._is_awaited = is_awaited

    def enter(self, seconds_max: float) -> HeldTransaction | Ended | None:
        is_commit, transaction = isinstance(self.record, Committing), self.record.transaction
        if seconds_max:
            # A commit after the deadline fails without waiting.
            self._book.wait_for(
                transaction,
                lambda held: self._may(held) or not held.is_open or (is_commit and self._book.is_late(held)),
                seconds_max,
            )
        known = self._book.find(transaction)
        if known is not None and known.state in (COMMITS if is_commit else ABORTS):
            _require_as_said(known, self._wrote)
            return known
        # After the deadline a transaction can only be aborted.
        held = require_undecided(self._book, transaction, late=not is_commit)
        if not self._may(held):
            raise _busy(transaction)
        _require_as_said(held, self._wrote)
        self._held = held
        held.is_deciding = True
        self._is_entered = True
        return None

    def apply(self) -> HeldTransaction:
        held = self._transaction
        held.decide(self.record)
        if self._is_awaited:
            held.retried_ms = self._book.growing_ms() + PAUSE_MS_FIRST
        return held

    def _may(self, held: HeldTransaction) -> bool:
        return not held.is_deciding if self._is_late else held.is_quiet

    def _exit(self) -> None:
        self._transaction.is_deciding = False


def require_undecided(book: TransactionBook, transaction: str, *, late: bool = False) -> HeldTransaction:
    """An open transaction that no step is deciding.  The caller holds the lock."""
    held = book.require_open(transaction, late=late)
    if held.is_deciding:
        raise _busy(transaction)
    return held


def _require_as_said(known: HeldTransaction | Ended, wrote: bool | None) -> None:
    """Raise if `wrote` contradicts whether partitions take part."""
    if wrote and not known.wrote:
        raise TransactionEnded(
            f"transaction {known.id} is {known.state} without these writes: another caller committed it; its "
            "acknowledgements are in effect, and the writes are not",
            transaction=known.id,
            state=str(known.state),
        )
    if wrote is False and known.wrote:
        raise InvalidArgument(
            f"transaction {known.id} has writes; commit it with the same writes each time",
            transaction=known.id,
        )


def _busy(transaction: str) -> Retryable:
    return Retryable(
        f"a step of transaction {transaction} is under way; wait for it, then try again",
        transaction=transaction,
    )
