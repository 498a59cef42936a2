"""A transaction as its coordinator holds it in memory."""

from threading import Event
from typing import Final, NamedTuple

from floodmark.clock.backoff import doubled_ms
from floodmark.log import Position
from floodmark.model.transaction import (
    Participant,
    ParticipantKind,
    TransactionState,
    TransactionStatistics,
    Waiting,
)
from floodmark.model.version import Version
from floodmark.transaction.records import Aborting, Committing

PAUSE_MS_FIRST: Final = 50
PAUSE_MS_MAX: Final = 10_000


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


class HeldTransaction:
    """One transaction.  Callers that change it hold the coordinator's lock."""

    __slots__ = (
        "began_ms", "due_noted_ms", "ended", "expires_ms", "id", "is_deciding", "is_telling",
        "joining", "participants", "parts", "positions", "reason", "retried_ms", "retries", "state",
        "version", "waiting",
    )  # fmt: skip

    def __init__(self, transaction: str, began_ms: int, expires_ms: int) -> None:
        self.id = transaction
        self.state = TransactionState.OPEN
        self.version: Version = 0
        self.reason = ""
        # Monotonic, so that setting the clock neither ends a transaction nor keeps it open.
        self.began_ms = began_ms
        self.expires_ms = expires_ms
        # The positions of its records, which are acknowledged when it has ended.
        self.positions: list[Position] = []
        # All participants, and the last error of each that has not confirmed.
        self.participants: list[Participant] = []
        self.waiting: dict[Participant, Waiting] = {}
        # Steps under way: participants that join, participants at work, and a decision.
        self.joining = 0
        self.parts = 0
        self.is_deciding = False
        # Whether a thread is telling the participants, and the earliest time of the next attempt.
        self.is_telling = False
        self.retried_ms = 0
        self.retries = 0
        # The earliest time at which the agenda has a note of it.
        self.due_noted_ms: int | None = None
        # Set at its end, if a thread waits for that.
        self.ended: Event | None = None

    @property
    def owner(self) -> str:
        """The owner's mark."""
        return owner_of(self.id)

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
        """When a sweep has to handle it."""
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
        """Set the final state; what is remembered of the transaction."""
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
        """The time since it began."""
        return max(0, now_ms - self.began_ms)
