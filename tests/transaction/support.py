"""A coordinator over a real log, with time that a test moves and participants that fail when told to."""

from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from itertools import count
from threading import Event, Lock

from tests.contracts.ledger import entries_of
from tests.waiting import HANG_SECONDS

from floodmark.engine import Engine, MemoryEngine
from floodmark.log import FAMILY, Acknowledgements, BatchSettings, StoredLedger
from floodmark.model.errors import StorageFailed
from floodmark.model.partition import Decision
from floodmark.model.transaction import Participant, ParticipantKind, TransactionState
from floodmark.model.version import Version
from floodmark.testing import SimulatedTime
from floodmark.testing.ledgers import EngineStore
from floodmark.transaction import LEDGERS, TransactionCoordinator
from floodmark.transaction.book import OverTime
from floodmark.transaction.records import Aborting, Committing, Record, decode_record
from floodmark.transaction.steps import Deciding

LONG = timedelta(hours=24)
COMMIT, ABORT = Decision.COMMIT, Decision.ABORT
OPEN, COMMITTING, ABORTING = TransactionState.OPEN, TransactionState.COMMITTING, TransactionState.ABORTING


def partition(name: str) -> Participant:
    return Participant(ParticipantKind.PARTITION, name)


def subscription(name: str) -> Participant:
    return Participant(ParticipantKind.SUBSCRIPTION, name)


def decide(coordinator: TransactionCoordinator, transaction: str, version: Version = 0) -> Version:
    """Commit at a version, or abort, as a caller does that is gone before it tells the participants."""
    decision = Committing(transaction, version) if version else Aborting(transaction, "on purpose")
    try:
        return coordinator._take(Deciding(coordinator._book, decision)).version
    except OverTime:
        raise coordinator._expired(transaction) from None


class GatedEngine(MemoryEngine):
    """An engine whose syncs wait at a gate while it is shut."""

    def __init__(self) -> None:
        super().__init__((FAMILY,))
        self.gate, self.entered = Event(), Event()
        self.gate.set()

    def sync(self) -> None:
        self.entered.set()
        assert self.gate.wait(HANG_SECONDS)
        super().sync()


class Parts:
    """Participants that do their part once and for all, and remember what they were told.

    A coordinator takes an error for a reason to try again, so what must never happen is kept in `wrong`.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self.failing: set[Participant] = set()
        self.told: dict[tuple[str, Participant], tuple[Decision, Version]] = {}
        self.calls: Counter[tuple[str, Participant]] = Counter()
        self.wrong: list[str] = []
        # Called before anything else, in whatever thread it is.
        self.on_call: Callable[[Participant], None] = lambda _: None

    def commit(self, participant: Participant, transaction: str, version: Version) -> None:
        self._tell(participant, transaction, (COMMIT, version))

    def abort(self, participant: Participant, transaction: str) -> None:
        self._tell(participant, transaction, (ABORT, 0))

    def _tell(self, participant: Participant, transaction: str, told: tuple[Decision, Version]) -> None:
        self.on_call(participant)
        key = transaction, participant
        with self._lock:
            self.calls[key] += 1
            if participant in self.failing:
                raise StorageFailed(f"{participant.name} is away")
            before = self.told.setdefault(key, told)
            if before != told:
                self.wrong.append(f"{key} was told {before}, then {told}")

    def decisions(self, transaction: str) -> set[tuple[Decision, Version]]:
        """What the participants of a transaction were told."""
        return {told for (each, _), told in self.told.items() if each == transaction}


class World:
    """An engine with the log of one coordinator, which is opened as often as a test likes."""

    def __init__(self, engine: Engine | None = None, *, enabled: bool = True) -> None:
        self.engine: Engine = engine or MemoryEngine((FAMILY,))
        self.parts = Parts()
        self.wall = SimulatedTime()
        self.growing = SimulatedTime(1_000_000)
        self.names = count(1)
        self.settings = BatchSettings(enabled=enabled)
        self.is_abandoned: Callable[[str], bool] = lambda _: False
        self.coordinator = self.open()

    def open(self, engine: Engine | None = None) -> TransactionCoordinator:
        return TransactionCoordinator(
            7,
            EngineStore(engine or self.engine),
            self.parts,
            settings=self.settings,
            mint=lambda: next(self.names),
            time_source=self.wall,
            growing_ms=self.growing,
            wait_seconds_max=0.001,
            is_abandoned=self.is_abandoned,
        )

    def restart(self) -> TransactionCoordinator:
        self.coordinator.close()
        self.coordinator = self.open()
        return self.coordinator

    def advance(self, ms: int) -> None:
        """Let time pass, on the wall and elsewhere."""
        self.wall.advance(ms)
        self.growing.advance(ms)

    def ledger(self) -> StoredLedger:
        return StoredLedger(EngineStore(self.engine), f"{LEDGERS}7")

    def live(self) -> list[Record]:
        """The records that a restart would find, now that nothing is on its way."""
        assert self.coordinator.log.flush(HANG_SECONDS)
        found = Acknowledgements(self.ledger()).recover()
        return [decode_record(record) for _, record in found]

    def entries(self) -> int:
        return len(entries_of(self.ledger()))

    def states(self) -> dict[str, TransactionState]:
        return {each.id: each.state for each in self.coordinator.transactions()}
