"""The steps of transactions on their way through a coordinator.

A step is *entered* first, which keeps others from what does not go together with it.  When its record is
durable it is *applied*; otherwise it is *left*, as if it had never been entered.  Ctrl-C may come at any
call.  So each step knows whether it is entered, changes that together with what it counts, without a call in
between, and can be applied or left once more.
"""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, TypeVar

from floodmark.log import Position, Promise
from floodmark.model.errors import InvalidArgument, LimitExceeded, Retryable, TransactionEnded
from floodmark.model.limits import TRANSACTION_PARTICIPANTS_MAX, TRANSACTIONS_OPEN_MAX
from floodmark.model.transaction import TransactionState
from floodmark.transaction.book import TransactionBook
from floodmark.transaction.held import Ended, Held, owner_of
from floodmark.transaction.records import Aborting, Begun, Committing, Joined, Record

COMMITS: Final = (TransactionState.COMMITTING, TransactionState.COMMITTED)
ABORTS: Final = (TransactionState.ABORTING, TransactionState.ABORTED)

Result = TypeVar("Result")


class Step:
    """One step.  Whoever calls a method holds the lock of the book."""

    record: Record

    def __init__(self, book: TransactionBook) -> None:
        self._book = book
        self._is_entered = False
        # The transaction, once it is entered, unless the step begins it.
        self._held: Held | None = None

    def enter(self, seconds_max: float) -> Held | Ended | None:
        """Check the step and enter it; or the transaction, if the step was taken before.

        Waits for others who work on the transaction, for so long.
        """
        raise NotImplementedError

    def apply(self, position: Position) -> Held:
        """The record is durable."""
        raise NotImplementedError

    def leave(self) -> None:
        """Nothing was written."""
        self._exit()
        if self._held is not None:
            self._book.release(self._held)

    def _exit(self) -> None:
        """Count it no longer."""
        raise NotImplementedError


class Beginning(Step):
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

    def apply(self, position: Position) -> Held:
        transaction, now_ms = self.record.transaction, self._now_ms
        held = self._book.held[transaction] = Held(transaction, now_ms, now_ms + self.record.timeout_ms)
        held.positions.append(position)
        self._exit()
        return held

    def leave(self) -> None:
        if self._is_entered:
            self._is_entered = False
            self._book.beginning -= 1
            self._book.owned[self._owner] -= 1
            self._book.forget_owner(self._owner)

    def _exit(self) -> None:
        if self._is_entered:
            self._is_entered = False
            self._book.beginning -= 1


class Joining(Step):
    """A participant joins a transaction."""

    record: Joined

    def __init__(self, book: TransactionBook, record: Joined) -> None:
        super().__init__(book)
        self.record = record

    def enter(self, seconds_max: float) -> Held | None:
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

    def apply(self, position: Position) -> Held:
        held = self._held
        assert held is not None
        held.positions.append(position)
        if self.record.participant not in held.waiting:
            held.join(self.record.participant)
        self._exit()
        return held

    def _exit(self) -> None:
        if self._is_entered and self._held is not None:
            self._is_entered = False
            self._held.joining -= 1


class Deciding(Step):
    """A transaction is decided, when nobody works on it.

    If it `is_late`, those who do their part are not waited for: it is aborted in any case, and they are told
    so when they are done.
    """

    record: Committing | Aborting

    def __init__(
        self,
        book: TransactionBook,
        decision: Committing | Aborting,
        wrote: bool | None = None,
        *,
        is_late: bool = False,
    ) -> None:
        super().__init__(book)
        self.record = decision
        self._wrote = wrote
        self._is_late = is_late

    def enter(self, seconds_max: float) -> Held | Ended | None:
        is_commit, transaction = isinstance(self.record, Committing), self.record.transaction
        if seconds_max:
            # A commit that comes too late waits for nobody.
            self._book.wait_for(
                transaction,
                lambda held: self._may(held) or not held.is_open or (is_commit and self._book.is_late(held)),
                seconds_max,
            )
        known = self._book.find(transaction)
        if known is not None and known.state in (COMMITS if is_commit else ABORTS):
            _require_as_said(known, self._wrote)
            return known
        # What is over its time can only be aborted.
        held = require_undecided(self._book, transaction, late=not is_commit)
        if not self._may(held):
            raise _busy(transaction)
        _require_as_said(held, self._wrote)
        self._held = held
        held.is_deciding = True
        self._is_entered = True
        return None

    def apply(self, position: Position) -> Held:
        held = self._held
        assert held is not None
        held.positions.append(position)
        held.decide(self.record)
        self._exit()
        return held

    def _may(self, held: Held) -> bool:
        return not held.is_deciding if self._is_late else held.is_quiet

    def _exit(self) -> None:
        if self._is_entered and self._held is not None:
            self._is_entered = False
            self._held.is_deciding = False


class Answer(Promise[Result]):
    """The future of a step, which is taken in the lock when its record is durable.

    Whoever tells it takes the step, not whoever waits for it: that one may be interrupted, and the record is
    there all the same.  It is made before the step is entered, so that nothing lies between that and the log.
    If `tells`, the one who waits tells the participants what was decided, and nobody has to be called for
    that.
    """

    def __init__(
        self, step: Step, book: TransactionBook, answer: Callable[[Held], Result], *, tells: bool = False
    ) -> None:
        super().__init__()
        self._step = step
        self._book = book
        self._answer = answer
        self._tells = tells
        self._held: Held | None = None

    def complete(self, position: Position) -> None:
        with self._book.lock:
            if self._held is None:
                self._held = self._step.apply(position)
            self._book.release(self._held, is_told=self._tells and not self._held.is_open)
            result = self._answer(self._held)
        self.set_result(result)

    def fail(self, failure: BaseException) -> None:
        with self._book.lock:
            self._step.leave()
        self.set_exception(failure)

    def abandon(self) -> None:
        """The one who waits has left, and tells nobody.  What the log does not have is not taken."""
        with self._book.lock:
            self._tells = False
            if not self.is_taken:
                self._step.leave()
            elif self._held is not None:
                self._book.release(self._held)


def answered(result: Result) -> Future[Result]:
    """A future that is done."""
    future: Future[Result] = Future()
    future.set_result(result)
    return future


def require_undecided(book: TransactionBook, transaction: str, *, late: bool = False) -> Held:
    """An open transaction about which nobody is deciding; the lock is held."""
    held = book.require_open(transaction, late=late)
    if held.is_deciding:
        raise _busy(transaction)
    return held


def _require_as_said(known: Held | Ended, wrote: bool | None) -> None:
    """Refuse a commit with writes of what has none, and one without writes of what has some."""
    if wrote and not known.wrote:
        raise TransactionEnded(
            f"transaction {known.id} is {known.state} without these writes: somebody else committed it; its "
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
