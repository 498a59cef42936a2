"""A transaction as its coordinator holds it in memory."""

from threading import Event
from typing import Final, NamedTuple

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
    """What is remembered of a transaction that has ended."""

    id: str
    state: TransactionState
    version: Version
    reason: str
    # Whether a partition had a part in it.
    wrote: bool


def owner_of(transaction: str) -> str:
    """What the id of a transaction ends with, which is the mark of its owner if it has one.

    >>> owner_of("0-470491275818434560-5f2b9c7de014-70fa78e5ae555639")
    '70fa78e5ae555639'
    """
    return transaction.rpartition("-")[2]


class Held:
    """One transaction.  Whoever changes it holds the coordinator's lock."""

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
        # Both by a clock that only grows: setting the time must neither end a transaction nor keep it.
        self.began_ms = began_ms
        self.expires_ms = expires_ms
        # Where its records stand; they go when it has ended.
        self.positions: list[Position] = []
        # All participants, and of those that have not done their part, what they said.
        self.participants: list[Participant] = []
        self.waiting: dict[Participant, Waiting] = {}
        # At this moment: how many join, how many do their part, and whether a decision is on its way.
        self.joining = 0
        self.parts = 0
        self.is_deciding = False
        # Whether someone tells the participants now, and when someone tries again after a failure.
        self.is_telling = False
        self.retried_ms = 0
        self.retries = 0
        # The earliest time at which the agenda has it.
        self.due_noted_ms: int | None = None
        # Set at its end, for those who wait, if there are any.
        self.ended: Event | None = None

    @property
    def owner(self) -> str:
        """The mark of its owner."""
        return owner_of(self.id)

    @property
    def is_open(self) -> bool:
        """Whether it can still be decided either way."""
        return self.state is TransactionState.OPEN

    @property
    def wrote(self) -> bool:
        """Whether a partition has a part in it."""
        return any(each.kind is ParticipantKind.PARTITION for each in self.participants)

    @property
    def is_quiet(self) -> bool:
        """Whether nobody works on it at this moment."""
        return not (self.is_deciding or self.joining or self.parts or self.is_telling)

    @property
    def due_ms(self) -> int:
        """When there is something to be done about it, if nobody does before."""
        return max(self.expires_ms, self.retried_ms) if self.is_open else self.retried_ms

    def join(self, participant: Participant) -> None:
        """Enter a participant."""
        self.participants.append(participant)
        self.waiting[participant] = Waiting(participant=participant, attempts=0, error="")

    def decide(self, decision: Committing | Aborting) -> None:
        """Enter what was decided."""
        if isinstance(decision, Committing):
            self.version, self.reason, self.state = decision.version, "", TransactionState.COMMITTING
        else:
            self.version, self.reason, self.state = 0, decision.reason, TransactionState.ABORTING

    def retry_later(self, now_ms: int) -> None:
        """Something failed: wait before the next attempt, each time twice as long."""
        self.retried_ms = now_ms + min(PAUSE_MS_MAX, PAUSE_MS_FIRST << min(self.retries, 20))
        self.retries += 1

    def end(self) -> Ended:
        """All participants have done their part; what is remembered of it.  May be called again."""
        is_commit = self.state in (TransactionState.COMMITTING, TransactionState.COMMITTED)
        self.state = TransactionState.COMMITTED if is_commit else TransactionState.ABORTED
        return Ended(self.id, self.state, self.version, self.reason, self.wrote)

    def statistics(self, coordinator: int, now_ms: int) -> TransactionStatistics:
        """How it stands.  The lock is not needed: the state is set last, and read first."""
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
        """How long ago it began."""
        return max(0, now_ms - self.began_ms)
