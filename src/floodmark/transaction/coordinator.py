"""Who decides about transactions.  One record in a log is the decision; everything else follows from it.

**Log first, memory second.**  A step is written to the log, and only when it is durable does memory
change.  So nobody ever heard of a state that a crash could take back.  It changes where the log says so, not
where somebody waits: Ctrl-C ends the wait, and what is on its way arrives all the same.

**Decided once.**  While a decision is on its way to the log, nobody joins and no other decision is let in.
If nobody knows whether it arrived, the transaction stays open; the log takes the record back before it takes
another (`log/base.py`), so the next decision is the only one.

**Nothing stays half-way.**  Once decided, the participants are told until all of them have done their part:
at once, by whoever decided and waits; else, with growing pauses, by `sweep` (`ending.py`).

**Recovery** reads the live records, which is what was open or half-way, aborts what no caller can still
commit (`recovery.py`), and answers at once; `sweep` does the rest.  A transaction that is not known was
aborted: one that was committed is let go only when no participant has anything left to ask about.

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

from msgspec import structs

from floodmark.clock import TimeSource, monotonic_ms, system_time_ms
from floodmark.log import BatchedWriter, Position
from floodmark.model.errors import (
    Closed,
    FloodmarkError,
    InvalidArgument,
    OutcomeUnknown,
    TransactionEnded,
    TransactionNotFound,
)
from floodmark.model.limits import TRANSACTIONS_OPEN_MAX
from floodmark.model.partition import Decision, Fate
from floodmark.model.transaction import Participant, TransactionState, TransactionStatistics
from floodmark.model.version import Version
from floodmark.transaction.book import OverTime, TransactionBook, not_found
from floodmark.transaction.ending import Ending
from floodmark.transaction.held import Ended, Held
from floodmark.transaction.ports import Participants
from floodmark.transaction.records import Aborting, Begun, Committing, Joined, Record
from floodmark.transaction.recovery import replay
from floodmark.transaction.steps import (
    ABORTS,
    COMMITS,
    Answer,
    Beginning,
    Deciding,
    Joining,
    Step,
    answered,
    require_undecided,
)

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

_log = logging.getLogger("floodmark.transaction")

Result = TypeVar("Result")


class TransactionCoordinator:
    """Decides about the transactions of one log.  Safe to use from many threads.

    Each call returns when its step is durable; those that end in `_soon` return at once, with a future, so
    that a few threads can have many transactions in flight.  `live` are the records that the log holds, and
    `mint` gives names that were never given before.  `is_abandoned` says of a transaction that was found open
    whether the process that began it has ended.
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
        is_abandoned: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self.number = number
        self.log = log
        self._mint = mint
        self._time_source = time_source
        self._growing_ms = growing_ms
        self._wait_seconds_max = wait_seconds_max
        held, orphans = replay(
            number, live, now_ms=growing_ms(), wall_ms=time_source(), is_abandoned=is_abandoned
        )
        log.acknowledge(orphans)
        self._book = TransactionBook(held, growing_ms)
        self._lock = self._book.lock
        self._ending = Ending(self._book, log, participants)

    # What transactions do

    def begin(
        self, timeout: timedelta = TIMEOUT, owner: str = "", *, owned_max: int = TRANSACTIONS_OPEN_MAX
    ) -> str:
        """Open a transaction, which is aborted if it is not decided in time; its id.

        The id ends with the owner's mark, if there is one: so it stands in the log, and lasts.  An owner may
        have `owned_max` transactions that have not ended.
        """
        return self._write(self._beginning(timeout, owner, owned_max)).id

    def begin_soon(self, timeout: timedelta = TIMEOUT) -> Future[str]:
        """`begin` without waiting."""
        return self._add(self._beginning(timeout), lambda held: held.id)

    def join(self, transaction: str, participant: Participant) -> None:
        """Enter something that has a part in a transaction, before it does anything for it."""
        try:
            self._write(Joining(self._book, Joined(transaction, participant)))
        except OverTime:
            raise self._expired(transaction) from None

    def join_soon(self, transaction: str, participant: Participant) -> Future[None]:
        """`join` without waiting."""
        try:
            return self._add(Joining(self._book, Joined(transaction, participant)), lambda _: None)
        except OverTime:
            return self._expired_soon(transaction)

    @contextmanager
    def taking_part(self, transaction: str, participant: Participant) -> Iterator[None]:
        """Enter a participant that does its part within the block.

        Nobody decides meanwhile, but that its time is over; and nobody is told of that before its end.
        """
        self.join(transaction, participant)
        held: Held | None = None
        try:
            with self._lock:
                held = require_undecided(self._book, transaction)
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

    def fate(self, transaction: str) -> Fate:
        """What those do who meet a write of a transaction.  One whose time is over is aborted now."""
        with self._lock:
            held = self._book.held.get(transaction)
            is_late = held is not None and self._book.is_late(held)
        if held is not None and is_late:
            self._expire([held])
        with self._lock:
            known = self._book.find(transaction)
            if known is None or known.state in ABORTS:
                return Fate(Decision.ABORT)
            if known.state in COMMITS:
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
        _, shown.state, shown.version, shown.reason, wrote = known
        return structs.replace(shown.statistics(self.number, now_ms), wrote=wrote)

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

    # Steps

    def _beginning(
        self, timeout: timedelta, owner: str = "", owned_max: int = TRANSACTIONS_OPEN_MAX
    ) -> Beginning:
        timeout_ms = timeout // timedelta(milliseconds=1)
        if not 1 <= timeout_ms <= TIMEOUT_MS_MAX:
            raise InvalidArgument("the timeout of a transaction is between a millisecond and 24 hours")
        transaction = f"{self.number}-{self._mint()}" + (f"-{owner}" if owner else "")
        record = Begun(transaction, self._time_source() + timeout_ms, timeout_ms)
        return Beginning(self._book, record, self.number, self._growing_ms(), owned_max)

    def _end(self, decision: Committing | Aborting, wrote: bool | None = None) -> Held | Ended:
        """Decide, and return when all participants have done their part."""
        try:
            known = self._write(Deciding(self._book, decision, wrote), tells=True)
            if isinstance(known, Held):
                self._ending.finish(known, self._wait_seconds_max)
        except OverTime:
            raise self._expired(decision.transaction) from None
        except BaseException:
            self._hand_on(decision.transaction)
            raise
        return known

    def _hand_on(self, transaction: str) -> None:
        """Leave a transaction, which may be decided, to whoever sweeps."""
        with self._lock:
            held = self._book.held.get(transaction)
            if held is not None:
                self._book.release(held)

    def _end_soon(
        self, decision: Committing | Aborting, answer: Callable[[Held | Ended], Result]
    ) -> Future[Result]:
        try:
            return self._add(Deciding(self._book, decision), answer)
        except OverTime:
            return self._expired_soon(decision.transaction)

    # Ends by time.  An earlier commit may be in the log, though nobody knows, and a crash would find it: so
    # nobody hears that time is over before the abort is in the log behind it.

    def _expired(self, transaction: str) -> FloodmarkError:
        """Abort a transaction that is over its time; what its owner hears.

        Participants are told by `sweep`, so that he hears it at once, wherever they are.
        """
        try:
            self._write(self._late(transaction))
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

        return self._add(self._late(transaction), answer)

    def _late(self, transaction: str) -> Deciding:
        return Deciding(self._book, Aborting(transaction, _LATE), is_late=True)

    def _expire(self, late: Iterable[Held]) -> None:
        """Abort transactions whose time is over, unless someone decides about them now."""
        expiring = [(held, self._expire_soon(held)) for held in late]
        for held, future in expiring:
            if future is not None and (failure := future.exception()) is not None:
                self._put_off(held, failure)

    def _expire_soon(self, held: Held) -> Future[None] | None:
        with self._lock:
            if not held.is_quiet:
                # Whoever works on it calls for the next sweep.
                return None
        try:
            return self._add(Deciding(self._book, Aborting(held.id, _LATE)), lambda _: None)
        except (TransactionEnded, TransactionNotFound, Closed):
            return None
        except FloodmarkError as failure:
            self._put_off(held, failure)
            return None

    def _put_off(self, held: Held, failure: BaseException) -> None:
        _log.warning("transaction %s is over its time and cannot be aborted yet: %s", held.id, failure)
        with self._lock:
            held.retry_later(self._growing_ms())
            self._book.release(held)

    # The log

    def _write(self, step: Step, *, tells: bool = False) -> Held | Ended:
        """Take a step, and return when it is durable; the transaction.

        If `tells`, the caller tells the participants what was decided.
        """
        answer = Answer(step, self._book, lambda held: held, tells=tells)
        try:
            with self._lock:
                known = step.enter(self._wait_seconds_max)
            return known or self.log.write_for(step.record, answer)
        except BaseException:
            answer.abandon()
            raise

    def _add(self, step: Step, answer: Callable[[Held | Ended], Result]) -> Future[Result]:
        """Take a step without waiting."""
        future = Answer(step, self._book, answer)
        try:
            with self._lock:
                known = step.enter(0)
            if known is not None:
                return answered(answer(known))
            self.log.hand_over(step.record, future)
        except BaseException:
            future.abandon()
            raise
        return future


def _over_time(transaction: str) -> TransactionEnded:
    return TransactionEnded(
        f"transaction {transaction} is over its time; begin another one, with a longer timeout",
        transaction=transaction,
    )
