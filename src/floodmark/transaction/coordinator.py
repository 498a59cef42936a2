"""Who decides about transactions.  One record in a log is the decision; everything else follows from it.

**Log first, memory second.**  A step is written to the log, and only when it is durable does memory
change.  So nobody ever heard of a state that a crash could take back.  It changes where the log says so, not
where somebody waits: Ctrl-C ends the wait, and what is on its way arrives all the same.

**Decided once.**  While a decision is on its way to the log, nobody joins and no other decision is let in.
If nobody knows whether it arrived, the transaction stays open; the log takes the record back before it takes
another (`log/base.py`), so the next decision is the only one.

**Nothing stays half-way.**  Once decided, the participants are told until all of them have done their part:
at once, by whoever decided; then, with growing pauses, by `sweep` (`ending.py`).

**Recovery** reads the live records, which is what was open or half-way, and answers at once; `sweep` does the
rest.  Whoever asks about a transaction that is not known hears that it is aborted: one that was committed is
let go only when no participant has anything left to ask about.

**Time** is that of a clock that only grows.  A deadline that is read from the log is never further away than
the timeout that the transaction had.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final, TypeVar

from floodmark.clock import TimeSource, monotonic_ms, system_time_ms
from floodmark.log import BatchedWriter, Position
from floodmark.model.errors import (
    Closed,
    FloodmarkError,
    InvalidArgument,
    LimitExceeded,
    OutcomeUnknown,
    PartlyDone,
    Retryable,
    TransactionEnded,
    TransactionNotFound,
)
from floodmark.model.limits import TRANSACTION_PARTICIPANTS_MAX, TRANSACTIONS_OPEN_MAX
from floodmark.model.partition import Decision, Fate
from floodmark.model.transaction import Participant, TransactionState, TransactionStatistics
from floodmark.model.version import Version
from floodmark.transaction.book import OverTime, TransactionBook, not_found
from floodmark.transaction.ending import Ending
from floodmark.transaction.held import Ended, Held
from floodmark.transaction.ports import Participants
from floodmark.transaction.records import Aborting, Begun, Committing, Joined, Record
from floodmark.transaction.recovery import replay
from floodmark.transaction.steps import Answer, Step, answered

TIMEOUT: Final = timedelta(minutes=1)
TIMEOUT_MS_MAX: Final = 24 * 3_600_000
# How long a caller waits for others who work on its transaction, and for participants; these are told of the
# decision in any case.
WAIT_SECONDS_MAX: Final = 60.0

_OWNER: Final = "by its owner"
_LATE: Final = "its time was over"
_REASON_CHARACTERS_MAX: Final = 500
# How many transactions a sweep takes up at a time.
_SWEPT_MAX: Final = 512
_UNFINISHED: Final = (TransactionState.OPEN, TransactionState.COMMITTING, TransactionState.ABORTING)
_COMMITS: Final = (TransactionState.COMMITTING, TransactionState.COMMITTED)
_ABORTS: Final = (TransactionState.ABORTING, TransactionState.ABORTED)

_log = logging.getLogger("floodmark.transaction")

Result = TypeVar("Result")


class TransactionCoordinator:
    """Decides about the transactions of one log.  Safe to use from many threads.

    Each call returns when its step is durable; those that end in `_soon` return at once, with a future, so
    that a few threads can have many transactions in flight.  `live` are the records that the log holds, and
    `mint` gives names that were never given before.
    """

    def __init__(
        self,
        number: int,
        log: BatchedWriter[Record],
        live: Sequence[tuple[Position, Record]],
        participants: Participants,
        *,
        mint: Callable[[], object],
        time_source: TimeSource = system_time_ms,
        growing_ms: TimeSource = monotonic_ms,
        wait_seconds_max: float = WAIT_SECONDS_MAX,
    ) -> None:
        self.number = number
        self.log = log
        self._mint = mint
        self._time_source = time_source
        self._growing_ms = growing_ms
        self._wait_seconds_max = wait_seconds_max
        held, orphans = replay(number, live, now_ms=growing_ms(), wall_ms=time_source())
        log.acknowledge(orphans)
        self._book = TransactionBook(held, growing_ms)
        self._lock = self._book.lock
        self._ending = Ending(self._book, log, participants)

    # What transactions do

    def begin(self, timeout: timedelta = TIMEOUT, owner: str = "") -> str:
        """Open a transaction, which is aborted if it is not decided in time; its id.

        The id ends with the owner's mark, if there is one: so it stands in the log, and lasts.
        """
        return self._write(self._begin(timeout, owner)).id

    def begin_soon(self, timeout: timedelta = TIMEOUT) -> Future[str]:
        """`begin` without waiting."""
        return self._add(self._begin(timeout), lambda held: held.id)

    def join(self, transaction: str, participant: Participant) -> None:
        """Enter something that has a part in a transaction, before it does anything for it."""
        try:
            step = self._join(transaction, participant, self._wait_seconds_max)
        except OverTime:
            raise self._expired(transaction) from None
        if step is not None:
            self._write(step)

    def join_soon(self, transaction: str, participant: Participant) -> Future[None]:
        """`join` without waiting."""
        try:
            step = self._join(transaction, participant, 0)
        except OverTime:
            return self._expired_soon(transaction)
        return answered(None) if step is None else self._add(step, lambda _: None)

    @contextmanager
    def taking_part(self, transaction: str, participant: Participant) -> Iterator[None]:
        """Enter a participant that does its part within the block.  Nobody decides meanwhile."""
        self.join(transaction, participant)
        held: Held | None = None
        try:
            with self._lock:
                held = self._require_undecided(transaction)
                held.parts += 1
            yield
        except OverTime:
            raise self._expired(transaction) from None
        finally:
            if held is not None:
                with self._lock:
                    held.parts -= 1
                    self._book.release(held)

    def commit(self, transaction: str, version: Version, *, wrote: bool | None = None) -> Version:
        """Commit at a version, and return when all participants have done their part.

        Committing again is harmless, and answers the version at which it was committed.  If it is said
        whether partitions have a part in it, it is refused if that is not so: whoever commits it learns
        that somebody else did without his writes, or is about to with others.
        """
        return self._end(Committing(transaction, version), wrote).version

    def commit_soon(self, transaction: str, version: Version) -> Future[Version]:
        """`commit` without waiting: done when it is decided.  Participants are told by `sweep`."""
        return self._end_soon(Committing(transaction, version), lambda known: known.version)

    def abort(self, transaction: str, reason: str = _OWNER) -> None:
        """Abort, and return when all participants have done their part.  Aborting again is harmless."""
        self._end(Aborting(transaction, reason[:_REASON_CHARACTERS_MAX]))

    def abort_soon(self, transaction: str, reason: str = _OWNER) -> Future[None]:
        """`abort` without waiting: done when it is decided.  Participants are told by `sweep`."""
        return self._end_soon(Aborting(transaction, reason[:_REASON_CHARACTERS_MAX]), lambda _: None)

    def require_open(self, transaction: str) -> None:
        """Refuse unless a transaction is open."""
        try:
            with self._lock:
                self._book.require_open(transaction)
        except OverTime:
            raise self._expired(transaction) from None

    def fate(self, transaction: str) -> Fate:
        """What those do who meet a write of a transaction.  One whose time is over is aborted now."""
        with self._lock:
            held = self._book.held.get(transaction)
            is_late = held is not None and self._book.is_late(held)
        if held is not None and is_late:
            self._expire([held])
        with self._lock:
            known = self._book.find(transaction)
            if known is None or known.state in _ABORTS:
                return Fate(Decision.ABORT)
            if known.state in _COMMITS:
                return Fate(Decision.COMMIT, known.version)
            return Fate(Decision.UNDECIDED)

    # What operators do

    def transactions(self, *, older_than: timedelta = timedelta(0)) -> list[TransactionStatistics]:
        """Those that have not ended, the oldest first."""
        now_ms, age_ms = self._growing_ms(), older_than // timedelta(milliseconds=1)
        held = sorted(self._book.all(), key=lambda each: each.began_ms)
        found = (each.statistics(self.number, now_ms) for each in held if each.age_ms(now_ms) >= age_ms)
        return [each for each in found if each.state in _UNFINISHED]

    def count(self) -> tuple[Counter[TransactionState], int]:
        """How many have not ended, by state, and how many milliseconds ago the oldest of them began."""
        now_ms, held = self._growing_ms(), self._book.all()
        oldest_ms = min((each.began_ms for each in held), default=now_ms)
        return Counter(each.state for each in held), max(0, now_ms - oldest_ms)

    def holds(self, transaction: str) -> bool:
        """Whether a transaction is known that has not ended."""
        with self._lock:
            return transaction in self._book.held

    def show(self, transaction: str) -> TransactionStatistics:
        """One of them, also if it has ended lately."""
        now_ms = self._growing_ms()
        with self._lock:
            known = self._book.find(transaction)
            if known is None:
                raise not_found(transaction)
            if isinstance(known, Held):
                return known.statistics(self.number, now_ms)
        shown = Held(transaction, now_ms, now_ms)
        _, shown.state, shown.version, shown.reason, _ = known
        return shown.statistics(self.number, now_ms)

    # What goes on by itself

    def sweep(self) -> None:
        """Abort what is over its time, and tell participants what was decided.

        A failure is noted where it belongs, and tried again in a later sweep.
        """
        now_ms = self._growing_ms()
        while due := self._book.take_due(now_ms, _SWEPT_MAX):
            self._expire([held for held in due if held.is_open])
            self._ending.tell(due)

    def wait_work(self) -> bool:
        """Sleep until there is something to sweep; False once the coordinator was closed.

        A coordinator without transactions sleeps for ever.
        """
        return self._book.wait_due()

    def close(self) -> None:
        """Write what is on its way to the log, then refuse.  What is open stays so in the log."""
        self._book.close()
        self.log.close()

    # Steps.  Each is checked and entered in the lock, then written without it.

    def _begin(self, timeout: timedelta, owner: str = "") -> Step:
        timeout_ms = timeout // timedelta(milliseconds=1)
        if not 1 <= timeout_ms <= TIMEOUT_MS_MAX:
            raise InvalidArgument("the timeout of a transaction is between a millisecond and 24 hours")
        transaction = f"{self.number}-{self._mint()}" + (f"-{owner}" if owner else "")
        now_ms, book = self._growing_ms(), self._book
        with self._lock:
            book.require_running()
            if len(book.held) + book.beginning >= TRANSACTIONS_OPEN_MAX:
                raise LimitExceeded(
                    f"coordinator {self.number} has {TRANSACTIONS_OPEN_MAX:,} open transactions; "
                    "end some, or give them shorter timeouts"
                )
            book.beginning += 1

        def apply(position: Position) -> Held:
            held = book.held[transaction] = Held(transaction, now_ms, now_ms + timeout_ms)
            held.positions.append(position)
            book.beginning -= 1
            return held

        def give_up() -> None:
            book.beginning -= 1

        return Step(Begun(transaction, self._time_source() + timeout_ms, timeout_ms), apply, give_up)

    def _join(self, transaction: str, participant: Participant, seconds_max: float) -> Step | None:
        """The step by which a participant joins; None if it has."""
        with self._lock:
            if seconds_max:
                self._wait(seconds_max, transaction, lambda held: not held.is_deciding)
            held = self._require_undecided(transaction)
            if participant in held.waiting:
                return None
            if len(held.participants) + held.joining >= TRANSACTION_PARTICIPANTS_MAX:
                raise LimitExceeded(
                    f"transaction {transaction} has {TRANSACTION_PARTICIPANTS_MAX} participants, "
                    "and may have no more; do it in several transactions",
                    transaction=transaction,
                )
            held.joining += 1

        def apply(position: Position) -> Held:
            held.positions.append(position)
            if participant not in held.waiting:
                held.join(participant)
            held.joining -= 1
            return held

        def give_up() -> None:
            held.joining -= 1

        return Step(Joined(transaction, participant), apply, give_up, held)

    def _decide(
        self, decision: Committing | Aborting, seconds_max: float, wrote: bool | None = None
    ) -> Step | Held | Ended:
        """The step out of OPEN; or the transaction, if it was taken before in the same direction."""
        is_commit = isinstance(decision, Committing)
        transaction = decision.transaction
        with self._lock:
            if seconds_max:
                self._wait(seconds_max, transaction, lambda held: held.is_quiet or not held.is_open)
            known = self._book.find(transaction)
            if known is not None and known.state in (_COMMITS if is_commit else _ABORTS):
                _require_as_said(known, wrote)
                return known
            # What is over its time can only be aborted.
            held = self._require_undecided(transaction, late=not is_commit)
            if not held.is_quiet:
                raise _busy(transaction)
            _require_as_said(held, wrote)
            held.is_deciding = True

        def apply(position: Position) -> Held:
            held.positions.append(position)
            held.decide(decision)
            held.is_deciding = False
            return held

        def give_up() -> None:
            held.is_deciding = False

        return Step(decision, apply, give_up, held)

    def _wait(self, seconds_max: float, transaction: str, is_met: Callable[[Held], bool]) -> None:
        """Wait for others who work on a transaction; the lock is held."""
        held = self._book.held.get(transaction)
        if held is not None and not is_met(held):
            self._book.wait(lambda: is_met(held) or self._book.is_closed, seconds_max)

    def _require_undecided(self, transaction: str, *, late: bool = False) -> Held:
        """An open transaction about which nobody is deciding; the lock is held."""
        held = self._book.require_open(transaction, late=late)
        if held.is_deciding:
            raise _busy(transaction)
        return held

    # Decisions

    def _end(self, decision: Committing | Aborting, wrote: bool | None = None) -> Held | Ended:
        """Decide, and return when all participants have done their part."""
        try:
            step = self._decide(decision, self._wait_seconds_max, wrote)
        except OverTime:
            raise self._expired(decision.transaction) from None
        known = self._write(step) if isinstance(step, Step) else step
        if isinstance(known, Held):
            try:
                self._ending.finish(known, self._wait_seconds_max)
            except BaseException:
                self._hand_on(known)
                raise
        return known

    def _hand_on(self, held: Held) -> None:
        """Leave a decided transaction to whoever sweeps."""
        with self._lock:
            self._book.release(held)

    def _end_soon(
        self, decision: Committing | Aborting, answer: Callable[[Held | Ended], Result]
    ) -> Future[Result]:
        try:
            step = self._decide(decision, 0)
        except OverTime:
            return self._expired_soon(decision.transaction)
        return self._add(step, answer) if isinstance(step, Step) else answered(answer(step))

    # Ends by time.  An earlier commit may be in the log, though nobody knows, and a crash would find it: so
    # nobody hears that time is over before the abort is in the log behind it.

    def _expired(self, transaction: str) -> FloodmarkError:
        """Abort a transaction that is over its time; what its owner hears."""
        try:
            self._end(Aborting(transaction, _LATE))
        except PartlyDone:
            return _over_time(transaction)
        except (TransactionEnded, TransactionNotFound, Closed) as ended:
            return ended
        except FloodmarkError as failure:
            return OutcomeUnknown(
                f"transaction {transaction} is over its time, and that it is aborted cannot be logged yet "
                f"({failure}); ask again what became of it",
                transaction=transaction,
            )
        return _over_time(transaction)

    def _expired_soon(self, transaction: str) -> Future[Any]:
        """`_expired` without waiting."""

        def answer(_: Held | Ended) -> None:
            raise _over_time(transaction)

        return self._end_soon(Aborting(transaction, _LATE), answer)

    def _expire(self, late: Iterable[Held]) -> None:
        """Abort transactions whose time is over, unless someone decides about them now."""
        expiring = [(held, self._expire_soon(held)) for held in late]
        for held, future in expiring:
            if future is not None and (failure := future.exception()) is not None:
                self._put_off(held, failure)

    def _expire_soon(self, held: Held) -> Future[None] | None:
        try:
            step = self._decide(Aborting(held.id, _LATE), 0)
        except (TransactionEnded, TransactionNotFound, Closed, Retryable):
            return None
        if not isinstance(step, Step):
            return None
        try:
            return self._add(step, lambda _: None)
        except FloodmarkError as failure:
            self._put_off(held, failure)
            return None

    def _put_off(self, held: Held, failure: BaseException) -> None:
        _log.warning("transaction %s is over its time and cannot be aborted yet: %s", held.id, failure)
        with self._lock:
            held.retry_later(self._growing_ms())
            self._book.release(held)

    # The log

    def _write(self, step: Step) -> Held:
        answer = Answer(step, self._book, lambda held: held, tells=True)
        try:
            return self.log.write_for(step.record, answer)
        except BaseException:
            if answer.is_taken:
                answer.abandon()
            else:
                self._leave(step)
            raise

    def _add(self, step: Step, answer: Callable[[Held], Result]) -> Future[Result]:
        future = Answer(step, self._book, answer)
        try:
            self.log.hand_over(step.record, future)
        except BaseException:
            if not future.is_taken:
                self._leave(step)
            raise
        return future

    def _leave(self, step: Step) -> None:
        with self._lock:
            step.leave(self._book)


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


def _over_time(transaction: str) -> TransactionEnded:
    return TransactionEnded(
        f"transaction {transaction} is over its time; begin another one, with a longer timeout",
        transaction=transaction,
    )


def _busy(transaction: str) -> Retryable:
    return Retryable(
        f"a step of transaction {transaction} is under way; wait for it, then try again",
        transaction=transaction,
    )
