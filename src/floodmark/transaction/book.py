"""The transactions of a coordinator in memory, and the threads that wait for them, under one lock.

The agenda is a heap of the times at which transactions are due.  A note is never later than the due time of
its transaction; if the due time has become later, the transaction is noted again when the note is reached.
So a step costs O(log n), and the sweeping thread sleeps until the first note.

**Recovery** rebuilds the transactions from the live records of the log.  A record without the beginning of
its transaction is an *orphan*: it has no effect and is dropped.  The beginning is written first and removed
together with all records that the coordinator knows, so an orphan is a record of unknown outcome that a crash
left in the log: of a participant whose caller never learned that it had joined, and which has done nothing,
or of a decision that was sent to no participant, before a later decision ended the transaction.

An open transaction is aborted at once if no caller can still commit it:

- a partition takes part.  Partitions join only inside a commit, so the restart interrupted that commit
  between the prepared write and the decision, and the prepared write holds the resolved version back.  A
  client that repeats the commit is told that the transaction is aborted, and may run it again;
- the process that began it has ended, because it had opened the site itself.

The abort needs no record: every recovery from the same records decides the same.  Other open transactions
belong to clients of a server and stay open until their deadline.
"""

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from threading import Condition, Lock
from typing import Final, NamedTuple

from floodmark.clock import TimeSource
from floodmark.clock.backoff import doubled_ms
from floodmark.log import Position
from floodmark.model.errors import Closed, FloodmarkError, TransactionEnded, TransactionNotFound
from floodmark.model.transaction import (
    Participant,
    ParticipantKind,
    TransactionState,
    TransactionStatistics,
    Waiting,
)
from floodmark.model.version import Version
from floodmark.transaction.records import Aborting, Begun, Committing, Joined, Record

NEVER_MS: Final = 1 << 62
# The agenda drops its stale notes above two notes for each transaction plus this number.
_STALE_MAX: Final = 1_000
# How many ended transactions are remembered, for callers that repeat a request.
ENDED_REMEMBERED: Final = 10_000

PAUSE_MS_FIRST: Final = 50
PAUSE_MS_MAX: Final = 10_000
# Reasons of aborts.  After the first two, the same work may succeed in another transaction.
NOT_NOW: Final = "it cannot commit now: "
RESTARTED: Final = "the site was restarted in the middle of its commit"
ABANDONED: Final = "the process that began it has ended"

_log = logging.getLogger("floodmark.transaction")


class Ended(NamedTuple):
    """A transaction that has ended, as it is remembered."""

    id: str
    state: TransactionState
    version: Version
    reason: str
    # Whether a partition took part.
    wrote: bool


def owner_of(transaction: str) -> str:
    """The owner's mark, with which the id of a transaction ends if it has an owner.

    >>> owner_of("0-470491275818434560-5f2b9c7de014-70fa78e5ae555639")
    '70fa78e5ae555639'
    """
    return transaction.rpartition("-")[2]


@dataclass(slots=True, eq=False)
class HeldTransaction:
    """One transaction.  Callers that change it hold the coordinator's lock."""

    id: str
    # Monotonic, so that setting the clock neither ends a transaction nor keeps it open.
    began_ms: int
    expires_ms: int
    state: TransactionState = TransactionState.OPEN
    version: Version = 0
    reason: str = ""
    # The positions of its records, which are acknowledged when it has ended.
    positions: list[Position] = field(default_factory=list)
    # All participants, and the last error of each that has not confirmed.
    participants: list[Participant] = field(default_factory=list)
    waiting: dict[Participant, Waiting] = field(default_factory=dict)
    # Steps under way: participants that join, participants at work, and a decision.
    joining: int = 0
    parts: int = 0
    is_deciding: bool = False
    # Whether a thread is sending the decision to participants, and the earliest time of the next attempt.
    is_telling: bool = False
    retried_ms: int = 0
    retries: int = 0
    # The earliest time at which the agenda has a note of it.
    due_noted_ms: int | None = None

    @property
    def is_open(self) -> bool:
        """Whether it can still be decided either way."""
        return self.state is TransactionState.OPEN

    @property
    def wrote(self) -> bool:
        """Whether a partition takes part."""
        return any(each.kind is ParticipantKind.PARTITION for each in self.participants)

    @property
    def is_quiet(self) -> bool:
        """Whether no step is under way."""
        return not (self.is_deciding or self.joining or self.parts or self.is_telling)

    @property
    def due_ms(self) -> int:
        """The time from which a sweep must handle it."""
        return max(self.expires_ms, self.retried_ms) if self.is_open else self.retried_ms

    def join(self, participant: Participant) -> None:
        """Add a participant.  Adding it again is harmless."""
        if participant not in self.waiting:
            self.participants.append(participant)
            self.waiting[participant] = Waiting(participant=participant, attempts=0, error="")

    def decide(self, decision: Committing | Aborting) -> None:
        """Apply a decision."""
        if isinstance(decision, Committing):
            self.version, self.reason, self.state = decision.version, "", TransactionState.COMMITTING
        else:
            self.version, self.reason, self.state = 0, decision.reason, TransactionState.ABORTING

    def retry_later(self, now_ms: int) -> None:
        """Set the time of the next attempt after a failure; the pause doubles each time."""
        self.retried_ms = now_ms + doubled_ms(PAUSE_MS_FIRST, self.retries, PAUSE_MS_MAX)
        self.retries += 1

    def end(self) -> Ended:
        """Set the final state; returns the transaction as it is remembered."""
        is_commit = self.state is TransactionState.COMMITTING
        self.state = TransactionState.COMMITTED if is_commit else TransactionState.ABORTED
        return Ended(self.id, self.state, self.version, self.reason, self.wrote)

    def statistics(self, coordinator: int, now_ms: int) -> TransactionStatistics:
        """A snapshot.  Needs no lock: `decide` sets the state last, and this reads it first."""
        state = self.state
        is_open = state is TransactionState.OPEN
        return TransactionStatistics(
            id=self.id,
            coordinator=coordinator,
            state=state,
            age_ms=self.age_ms(now_ms),
            remaining_ms=max(0, self.expires_ms - now_ms) if is_open else 0,
            version=0 if is_open else self.version,
            reason="" if is_open else self.reason,
            participants=list(self.participants),
            waiting_for=[] if is_open else list(self.waiting.values()),
            wrote=self.wrote,
        )

    def age_ms(self, now_ms: int) -> int:
        return max(0, now_ms - self.began_ms)


class Agenda:
    """The times at which transactions are due.  The caller holds the coordinator's lock.

    >>> held = {"a": HeldTransaction("a", 0, expires_ms=100)}
    >>> agenda = Agenda(held)
    >>> agenda.note(held["a"])
    100
    >>> agenda.take(99, 10), [each.id for each in agenda.take(100, 10)], agenda.take(100, 10)
    ([], ['a'], [])
    """

    def __init__(self, held: Mapping[str, HeldTransaction]) -> None:
        self._held = held
        self._notes: list[tuple[int, str]] = []

    def note(self, held: HeldTransaction) -> int:
        """Note when a transaction is due, and return that time.

        Call it when the due time may have become earlier, and when the last step under way has ended.
        """
        due_ms = held.due_ms
        if held.due_noted_ms is None or due_ms < held.due_noted_ms:
            held.due_noted_ms = due_ms
            heappush(self._notes, (due_ms, held.id))
            if len(self._notes) > 2 * len(self._held) + _STALE_MAX:
                self._forget_stale()
        return due_ms

    def take(self, now_ms: int, count: int) -> list[HeldTransaction]:
        """Up to `count` transactions that are due.  Skips one with a step under way, which notes it again."""
        taken: list[HeldTransaction] = []
        while len(taken) < count and (held := self._first()) is not None and held.due_ms <= now_ms:
            heappop(self._notes)
            held.due_noted_ms = None
            if held.is_quiet:
                taken.append(held)
        return taken

    def first_ms(self) -> int:
        """The due time of the next transaction."""
        held = self._first()
        return NEVER_MS if held is None else held.due_ms

    def _first(self) -> HeldTransaction | None:
        """The next transaction.  Drops stale notes."""
        while self._notes:
            noted_ms, transaction = self._notes[0]
            held = self._held.get(transaction)
            holds = held is not None and held.due_noted_ms == noted_ms
            if held is not None and holds and held.due_ms <= noted_ms:
                return held
            heappop(self._notes)
            if held is not None and holds:
                held.due_noted_ms = None
                self.note(held)
        return None

    def _forget_stale(self) -> None:
        noted = ((held.due_noted_ms, held.id) for held in self._held.values())
        self._notes = [(noted_ms, transaction) for noted_ms, transaction in noted if noted_ms is not None]
        heapify(self._notes)


class OverTime(Exception):
    """A transaction is past its deadline.  Internal: callers get an error once its abort is in the log."""


class TransactionBook:
    """A coordinator's transactions in memory.  Callers hold the lock, except where a method takes it."""

    def __init__(self, held: dict[str, HeldTransaction], growing_ms: TimeSource) -> None:
        self.lock = Lock()
        self.growing_ms = growing_ms
        self.held = held
        # The number of transactions whose beginning is being written to the log.
        self.beginning = 0
        # By owner, the number of transactions that have not ended, including those being begun.
        self.owned: dict[str, int] = Counter(map(owner_of, held))
        self.is_closed = False
        # Wakes the threads that wait for the end of a step or of a transaction; `_waiting` is their number.
        self._changed = Condition(self.lock)
        self._waiting = 0
        self._ended: OrderedDict[str, Ended] = OrderedDict()
        # The sweeping thread waits on this condition, until a time of the monotonic clock.
        self._work = Condition(self.lock)
        self._asleep_until_ms = 0
        self._agenda = Agenda(held)
        for each in held.values():
            self._agenda.note(each)

    # Transactions

    def find(self, transaction: str) -> HeldTransaction | Ended | None:
        """A transaction, also if it has ended recently; None if it is unknown."""
        return self.held.get(transaction) or self._ended.get(transaction)

    def require_running(self) -> None:
        if self.is_closed:
            raise Closed("the site was closed; open it again")

    def require_open(self, transaction: str, *, late: bool = False) -> HeldTransaction:
        """An open transaction.  Raises `OverTime` for one past its deadline, unless `late`."""
        self.require_running()
        held = self.held.get(transaction)
        if held is None or not held.is_open:
            raise self._ended_error(transaction)
        if not late and self.is_late(held):
            raise OverTime
        return held

    def is_late(self, held: HeldTransaction) -> bool:
        """Whether a transaction is open past its deadline."""
        return held.is_open and held.expires_ms <= self.growing_ms()

    def release(self, held: HeldTransaction) -> None:
        """After a step of a transaction: wake the threads that wait for it, and note when it is due."""
        if self._waiting:
            self._changed.notify_all()
        if held.is_quiet and self._agenda.note(held) < self._asleep_until_ms:
            self._work.notify_all()

    def wait_for(
        self, transaction: str, is_met: Callable[[HeldTransaction], bool], seconds_max: float
    ) -> None:
        """Wait until a transaction meets a condition, the book is closed, or the time is over."""
        held = self.held.get(transaction)
        if held is not None and not is_met(held):
            self._waiting += 1
            try:
                self._changed.wait_for(lambda: is_met(held) or self.is_closed, seconds_max)
            finally:
                self._waiting -= 1

    def all(self) -> list[HeldTransaction]:
        """The transactions that have not ended.  Takes the lock."""
        with self.lock:
            return list(self.held.values())

    def end(self, held: HeldTransaction) -> bool:
        """Move a transaction to those that have ended; False if that was done before."""
        if held.id not in self.held:
            return False
        self._ended[held.id] = held.end()
        del self.held[held.id]
        owner = owner_of(held.id)
        self.owned[owner] -= 1
        self.forget_owner(owner)
        if len(self._ended) > ENDED_REMEMBERED:
            self._ended.popitem(last=False)
        if self._waiting:
            self._changed.notify_all()
        return True

    def forget_owner(self, owner: str) -> None:
        """Forget an owner that has no transaction left."""
        if not self.owned.get(owner):
            self.owned.pop(owner, None)

    def _ended_error(self, transaction: str) -> FloodmarkError:
        known = self.find(transaction)
        if known is None:
            return not_found(transaction)
        why = f" ({known.reason})" if known.reason else ""
        return TransactionEnded(
            f"transaction {transaction} is {known.state}{why}; begin another one",
            transaction=transaction,
            state=str(known.state),
            **({"again": True} if known.reason.startswith((NOT_NOW, RESTARTED)) else {}),
        )

    # The sweeping thread

    def take_due(self, now_ms: int, count: int) -> list[HeldTransaction]:
        """Up to `count` transactions that are due and have no step under way.  Takes the lock."""
        with self.lock:
            return [] if self.is_closed else self._agenda.take(now_ms, count)

    def wait_due(self) -> bool:
        """Sleep until a transaction is due; False once the book is closed.  Takes the lock."""
        with self.lock:
            while not self.is_closed:
                now_ms, due_ms = self.growing_ms(), self._agenda.first_ms()
                if due_ms <= now_ms:
                    return True
                self._asleep_until_ms = due_ms
                self._work.wait(None if due_ms == NEVER_MS else (due_ms - now_ms) / 1000)
                self._asleep_until_ms = 0
            return False

    def close(self) -> None:
        """Refuse all further calls, and wake all waiting threads.  Takes the lock."""
        with self.lock:
            self.is_closed = True
            self._changed.notify_all()
            self._work.notify_all()


def not_found(transaction: str) -> TransactionNotFound:
    return TransactionNotFound(
        f"there is no transaction {transaction!r:.80}; it has ended, or never was",
        transaction=transaction[:80],
    )


def replay(
    coordinator: int,
    live: Iterable[tuple[Position, Record]],
    *,
    now_ms: int,
    wall_ms: int,
    is_abandoned: Callable[[str], bool],
) -> tuple[dict[str, HeldTransaction], list[Position]]:
    """The transactions of the live records, by id, and the positions of orphans.

    A deadline was stored in wall-clock time, and the clock may have been set since: the rest of it is at most
    the timeout of the transaction.  `is_abandoned` tells whether the process that began one has ended.
    """
    found: dict[str, HeldTransaction] = {}
    orphans: list[Position] = []
    for position, record in live:
        transaction = record.transaction
        if isinstance(record, Begun):
            left_ms = min(max(0, record.deadline_ms - wall_ms), record.timeout_ms)
            found[transaction] = HeldTransaction(
                transaction, now_ms + left_ms - record.timeout_ms, now_ms + left_ms
            )
        held = found.get(transaction)
        if held is None:
            orphans.append(position)
            _log.warning(
                "the log of coordinator %d has a record (%s) of transaction %s, which has ended; it has no "
                "effect and is removed",
                *(coordinator, type(record).__name__.lower(), transaction),
            )
            continue
        held.positions.append(position)
        if isinstance(record, Joined):
            held.join(record.participant)
        elif not isinstance(record, Begun):
            # The last decision counts: an earlier one was sent to no participant.
            held.decide(record)
    for held in found.values():
        if held.is_open and (held.wrote or is_abandoned(held.id)):
            held.decide(Aborting(held.id, RESTARTED if held.wrote else ABANDONED))
    return found, orphans
