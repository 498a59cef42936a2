"""The coordinator decides about transactions.  One record in its log is the decision.

**Log first, memory second.**  A step is written to the log, and memory changes only when the record is
durable, so no caller sees a state that a crash could undo.  The log's thread applies the step: Ctrl-C ends
only the wait of a caller, not a step that the log has accepted.

**Decided once.**  While a decision is being written to the log, participants cannot join and other decisions
are refused.  If its outcome is unknown, the transaction stays open; the log removes the record before it
writes another (`log/base.py`), so the next decision is the only one.

**Always finished.**  The coordinator retries every participant until it confirms: the thread that decided
sends the decision first, then `sweep` does, with growing pauses (`ending.py`).

**Recovery** reads the live records and aborts the transactions that no caller can still commit (`book.py`).
The coordinator then accepts calls at once, and `sweep` finishes the others.  An unknown transaction was
aborted, because a committed one is forgotten only when all participants have confirmed.

**Time** is monotonic.  A deadline that is read from the log is never further away than the timeout of its
transaction.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from threading import Thread
from typing import Final

from msgspec import structs

from floodmark.clock import TimeSource, monotonic_ms
from floodmark.log import BatchSettings, Store, open_log
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
from floodmark.transaction.book import Ended, HeldTransaction, OverTime, TransactionBook, not_found, replay
from floodmark.transaction.ending import AtOnce, Ending, Participants, one_by_one
from floodmark.transaction.records import (
    Aborting,
    Begun,
    Committing,
    Joined,
    decode_record,
    encode_record,
)
from floodmark.transaction.steps import (
    ABORTS,
    COMMITS,
    Beginning,
    Deciding,
    Joining,
    TransactionStep,
    require_undecided,
)

# The prefix of the names of coordinators' ledgers.
LEDGERS: Final = "coordinator/"

TIMEOUT: Final = timedelta(minutes=1)
TIMEOUT_MS_MAX: Final = 24 * 3_600_000
# How long a caller waits for conflicting steps of its transaction, and for participants to confirm.
WAIT_SECONDS_MAX: Final = 60.0

_OWNER: Final = "by its owner"
_LATE: Final = "its time was over"
_REASON_CHARACTERS_MAX: Final = 500
# How many transactions a sweep handles at a time.
_SWEPT_MAX: Final = 512
_UNFINISHED: Final = (TransactionState.OPEN, TransactionState.COMMITTING, TransactionState.ABORTING)

_log = logging.getLogger("floodmark.transaction")


def check_timeout(timeout: timedelta) -> int:
    """The milliseconds of a transaction's timeout; InvalidArgument if it is too short or too long."""
    timeout_ms = timeout // timedelta(milliseconds=1)
    if not 1 <= timeout_ms <= TIMEOUT_MS_MAX:
        raise InvalidArgument("the timeout of a transaction is between a millisecond and 24 hours")
    return timeout_ms


class TransactionCoordinator:
    """Decides about the transactions of one log, which it opens.  Safe to use from many threads.

    Each call returns when its step is durable.  `mint` returns a new name at each call; `is_abandoned` is
    true if the process that began an open transaction has ended; `at_once` calls the participants.
    """

    def __init__(
        self,
        number: int,
        store: Store,
        participants: Participants,
        *,
        settings: BatchSettings,
        mint: Callable[[], object],
        time_source: TimeSource,
        growing_ms: TimeSource = monotonic_ms,
        wait_seconds_max: float = WAIT_SECONDS_MAX,
        is_abandoned: Callable[[str], bool] = lambda _: False,
        at_once: AtOnce = one_by_one,
    ) -> None:
        name = f"{LEDGERS}{number}"
        log = open_log(
            store, name, settings, encode=encode_record, decode=decode_record, time_source=time_source
        )
        self.number = number
        self.log = log.writer
        self._mint = mint
        self._time_source = time_source
        self._growing_ms = growing_ms
        self._wait_seconds_max = wait_seconds_max
        held, orphans = replay(
            number, log.live, now_ms=growing_ms(), wall_ms=time_source(), is_abandoned=is_abandoned
        )
        self.log.acknowledge(orphans)
        self._book = TransactionBook(held, growing_ms)
        self._lock = self._book.lock
        self._ending = Ending(self._book, self.log, participants, at_once)

    # Called by transactions

    def begin(
        self, timeout: timedelta = TIMEOUT, owner: str = "", *, owned_max: int = TRANSACTIONS_OPEN_MAX
    ) -> str:
        """Begin a transaction, which is aborted if it is not decided within the timeout; returns its id.

        The id ends with the owner's mark, if there is one, so that the log keeps it.  Raises `LimitExceeded`
        if the owner has `owned_max` transactions that have not ended.
        """
        timeout_ms = check_timeout(timeout)
        transaction = f"{self.number}-{self._mint()}" + (f"-{owner}" if owner else "")
        record = Begun(transaction, self._time_source() + timeout_ms, timeout_ms)
        self._take(Beginning(self._book, record, self.number, self._growing_ms(), owned_max))
        return transaction

    def join(self, transaction: str, participant: Participant) -> None:
        """Add a participant to a transaction, before the participant does its part."""
        try:
            self._take(Joining(self._book, Joined(transaction, participant)))
        except OverTime:
            raise self._expired(transaction) from None

    @contextmanager
    def taking_part(self, transaction: str, participant: Participant) -> Iterator[None]:
        """Add a participant that does its part within the block.

        Within the block the transaction cannot be decided, except that its deadline may pass; the abort is
        sent to participants only after the block.
        """
        self.join(transaction, participant)
        held: HeldTransaction | None = None
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
        """Commit at a version, and return when all participants have confirmed.

        Committing again is harmless and returns the version of the first commit.  `wrote` states whether
        partitions take part; if that is wrong, another caller commits the transaction with other writes, and
        `TransactionEnded` or `InvalidArgument` is raised.
        """
        return self._end(Committing(transaction, version), wrote).version

    def abort(self, transaction: str, reason: str = _OWNER) -> None:
        """Abort, and return when all participants have confirmed.  Aborting again is harmless."""
        self._end(Aborting(transaction, reason[:_REASON_CHARACTERS_MAX]))

    def fate(self, transaction: str) -> Fate:
        """The decision about a transaction's prepared writes.  Aborts a transaction past its deadline."""
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

    # Called by operators

    def transactions(self, *, older_than: timedelta = timedelta(0)) -> list[TransactionStatistics]:
        """The transactions that have not ended, the oldest first."""
        now_ms, age_ms = self._growing_ms(), older_than // timedelta(milliseconds=1)
        held = sorted(self._book.all(), key=lambda each: each.began_ms)
        found = (each.statistics(self.number, now_ms) for each in held if each.age_ms(now_ms) >= age_ms)
        return [each for each in found if each.state in _UNFINISHED]

    def count(self) -> tuple[Counter[TransactionState], int]:
        """The number of transactions that have not ended, by state, and the age of the oldest in ms."""
        now_ms, held = self._growing_ms(), self._book.all()
        oldest_ms = min((each.began_ms for each in held), default=now_ms)
        return Counter(each.state for each in held), max(0, now_ms - oldest_ms)

    def holds(self, transaction: str) -> bool:
        """Whether a transaction is known and has not ended."""
        with self._lock:
            return transaction in self._book.held

    def show(self, transaction: str) -> TransactionStatistics:
        """The statistics of a transaction, also of one that ended recently."""
        now_ms = self._growing_ms()
        with self._lock:
            known = self._book.find(transaction)
            if known is None:
                raise not_found(transaction)
            if isinstance(known, HeldTransaction):
                return known.statistics(self.number, now_ms)
        shown = HeldTransaction(transaction, now_ms, now_ms)
        _, shown.state, shown.version, shown.reason, wrote = known
        return structs.replace(shown.statistics(self.number, now_ms), wrote=wrote)

    # Called by the sweeping thread

    def sweep(self) -> None:
        """Abort transactions past their deadline, and send decisions to their participants.

        A later sweep retries the calls that fail.
        """
        now_ms = self._growing_ms()
        while due := self._book.take_due(now_ms, _SWEPT_MAX):
            self._expire([held for held in due if held.is_open])
            self._ending.tell(due)

    def wait_work(self) -> bool:
        """Sleep until a transaction is due; False once the coordinator is closed.  Has no timer when idle."""
        return self._book.wait_due()

    def close(self) -> None:
        """Write the steps under way, then refuse.  Open transactions stay open in the log."""
        self._book.close()
        self.log.close()

    # Steps

    def _end(self, decision: Committing | Aborting, wrote: bool | None = None) -> HeldTransaction | Ended:
        """Decide, and return when all participants have confirmed."""
        try:
            known = self._take(Deciding(self._book, decision, wrote, is_awaited=True))
        except OverTime:
            raise self._expired(decision.transaction) from None
        if isinstance(known, HeldTransaction):
            self._ending.finish(known, self._wait_seconds_max)
        return known

    # Deadlines.  A commit of unknown outcome may be in the log, and recovery would find it.  So callers are
    # told that the deadline has passed only when an abort follows it in the log.

    def _expired(self, transaction: str) -> FloodmarkError:
        """Abort a transaction past its deadline; returns the error for its caller.

        `sweep` sends the abort to the participants, so that the caller does not wait for them.
        """
        try:
            self._take(Deciding(self._book, Aborting(transaction, _LATE), is_late=True))
        except (TransactionEnded, TransactionNotFound, Closed) as ended:
            return ended
        except FloodmarkError as failure:
            return OutcomeUnknown(
                f"transaction {transaction} is past its deadline, but its abort cannot be logged yet "
                f"({failure}); ask later what became of it",
                transaction=transaction,
            )
        return TransactionEnded(
            f"transaction {transaction} is past its deadline; begin another one, with a longer timeout",
            transaction=transaction,
        )

    def _expire(self, late: Iterable[HeldTransaction]) -> None:
        """Abort transactions that are past their deadline, unless another step of them is under way."""
        expiring = [(held, step) for held in late if (step := self._submit_late(held)) is not None]
        for held, step in expiring:
            if (failure := step.exception()) is not None:
                self._put_off(held, failure)

    def _submit_late(self, held: HeldTransaction) -> TransactionStep | None:
        with self._lock:
            if not held.is_quiet:
                # The step that is under way notes it for the next sweep.
                return None
        step = Deciding(self._book, Aborting(held.id, _LATE))
        try:
            self._submit(step)
        except (TransactionEnded, TransactionNotFound, Closed):
            return None
        except FloodmarkError as failure:
            self._put_off(held, failure)
            return None
        return step

    def _put_off(self, held: HeldTransaction, failure: BaseException) -> None:
        _log.warning("transaction %s is past its deadline, but cannot be aborted yet: %s", held.id, failure)
        with self._lock:
            held.retry_later(self._growing_ms())
            self._book.release(held)

    # The log

    def _take(self, step: TransactionStep) -> HeldTransaction | Ended:
        """Take a step and return the transaction when it is durable."""
        self._submit(step, self._wait_seconds_max)
        return step.result()

    def _submit(self, step: TransactionStep, seconds_max: float = 0) -> None:
        """Enter a step and hand it to the log; it is a future."""
        try:
            with self._lock:
                known = step.enter(seconds_max)
            if known is None:
                self.log.hand_over(step.record, step)
            else:
                step.set_result(known)
        except BaseException:
            step.withdraw()
            raise


def start_sweeping(coordinator: TransactionCoordinator) -> Thread:
    """Start a daemon thread that sweeps whenever a transaction is due, until the coordinator is closed."""

    def run() -> None:
        while coordinator.wait_work():
            try:
                coordinator.sweep()
            except Exception:
                _log.exception("a sweep of coordinator %d failed; the next one retries", coordinator.number)

    thread = Thread(target=run, name=f"floodmark-coordinator-{coordinator.number}", daemon=True)
    thread.start()
    return thread
