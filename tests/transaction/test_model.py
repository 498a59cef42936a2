"""Any life that transactions can have, against a model: failures, clocks that jump, restarts, crashes."""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from tests.sizes import SEARCH, scaled
from tests.transaction.support import (
    ABORT,
    ABORTING,
    COMMIT,
    COMMITTING,
    OPEN,
    World,
    decide,
    partition,
    subscription,
)

from floodmark.engine.rocks import RocksEngine
from floodmark.log import FAMILY
from floodmark.model.errors import PartlyDone, TransactionEnded, TransactionNotFound
from floodmark.model.partition import Decision, Fate
from floodmark.model.transaction import Participant, ParticipantKind, TransactionState
from floodmark.testing import FaultyEngine
from floodmark.transaction import coordinator
from floodmark.transaction.book import PAUSE_MS_MAX, HeldTransaction, TransactionBook
from floodmark.transaction.ending import Ending

COMMITTED, ABORTED = TransactionState.COMMITTED, TransactionState.ABORTED
PARTICIPANTS = [partition("0a"), partition("0b"), subscription("indexer")]
TIMEOUTS_MS = (15_000, 300_000)
HOUR_MS = 3_600_000
WAYS = {COMMITTING: COMMITTED, ABORTING: ABORTED}


@dataclass
class Life:
    """A transaction as it should be."""

    timeout_ms: int
    expires_ms: int
    wall_deadline_ms: int
    state: TransactionState = OPEN
    version: int = 0
    # Whether the decision is a record of the log, and not that of a restart.
    is_logged: bool = False
    # It has ended, and the coordinator was restarted since.
    is_forgotten: bool = False
    joined: list[Participant] = field(default_factory=list)
    waiting: set[Participant] = field(default_factory=set)

    @property
    def has_ended(self) -> bool:
        return self.state in WAYS.values()

    @property
    def wrote(self) -> bool:
        return any(each.kind is ParticipantKind.PARTITION for each in self.joined)

    def decide(self, state: TransactionState, version: int = 0, *, is_logged: bool = True) -> None:
        self.state, self.version, self.is_logged = state, version, is_logged
        self.waiting = set(self.joined)

    def tell(self, failing: set[Participant]) -> None:
        self.waiting &= failing
        if self.state in WAYS and not self.waiting:
            self.state = WAYS[self.state]


class Lives(RuleBasedStateMachine):
    """What callers, participants, operators, clocks and power do to a coordinator."""

    transactions = Bundle("transactions")

    def __init__(self) -> None:
        super().__init__()
        self.engine = FaultyEngine((FAMILY,))
        self.world = World(self.engine)
        self.lives: dict[str, Life] = {}

    def is_late(self, life: Life) -> bool:
        return life.state is OPEN and life.expires_ms <= self.world.growing()

    # Callers

    @initialize(enabled=st.booleans())
    def start(self, enabled: bool) -> None:
        self.world.coordinator.log.enabled = enabled

    @rule(target=transactions, timeout_ms=st.sampled_from(TIMEOUTS_MS))
    def begin(self, timeout_ms: int) -> str:
        transaction = self.world.coordinator.begin(timedelta(milliseconds=timeout_ms))
        assert transaction not in self.lives
        self.lives[transaction] = Life(
            timeout_ms, self.world.growing() + timeout_ms, self.world.wall() + timeout_ms
        )
        return transaction

    @rule(transaction=transactions, participant=st.sampled_from(PARTICIPANTS))
    def join(self, transaction: str, participant: Participant) -> None:
        coordinator, life = self.world.coordinator, self.lives[transaction]
        try:
            coordinator.join(transaction, participant)
        except TransactionNotFound:
            assert life.is_forgotten
        except TransactionEnded:
            assert life.state is not OPEN or self.is_late(life)
            self._expire(life)
        else:
            assert life.state is OPEN
            assert not self.is_late(life)
            if participant not in life.joined:
                life.joined.append(participant)

    @rule(transaction=transactions, version=st.integers(1, 1 << 60), is_commit=st.booleans())
    def end(self, transaction: str, version: int, is_commit: bool) -> None:
        coordinator, life = self.world.coordinator, self.lives[transaction]
        ways = (COMMITTING, COMMITTED) if is_commit else (ABORTING, ABORTED)
        may = life.state in ways or (life.state is OPEN and not (is_commit and self.is_late(life)))
        try:
            if is_commit:
                answered = coordinator.commit(transaction, version)
                assert answered == (version if life.state is OPEN else life.version)
            else:
                coordinator.abort(transaction)
        except TransactionNotFound:
            assert life.is_forgotten
            return
        except TransactionEnded:
            assert not may
            self._expire(life)
            return
        except PartlyDone:
            assert set(life.joined) & self.world.parts.failing
        assert may
        if life.state is OPEN:
            life.decide(ways[0], version if is_commit else 0)
        life.tell(self.world.parts.failing)

    @rule(transaction=transactions, version=st.integers(1, 1 << 60), is_commit=st.booleans())
    def decide(self, transaction: str, version: int, is_commit: bool) -> None:
        coordinator, life = self.world.coordinator, self.lives[transaction]
        ways = (COMMITTING, COMMITTED) if is_commit else (ABORTING, ABORTED)
        may = life.state in ways or (life.state is OPEN and not (is_commit and self.is_late(life)))
        try:
            if is_commit:
                answered = decide(coordinator, transaction, version)
                assert answered == (version if life.state is OPEN else life.version)
            else:
                decide(coordinator, transaction)
        except TransactionNotFound:
            assert life.is_forgotten
            return
        except TransactionEnded:
            assert not may
            self._expire(life)
            return
        assert may
        if life.state is OPEN:
            life.decide(ways[0], version if is_commit else 0)

    def _expire(self, life: Life) -> None:
        """Whoever hears that time is over has aborted it; a sweep tells the participants."""
        if life.state is OPEN:
            life.decide(ABORTING)

    @rule(transaction=transactions)
    def ask(self, transaction: str) -> None:
        life = self.lives[transaction]
        if self.is_late(life):
            life.decide(ABORTING)
        match life.state:
            case TransactionState.OPEN:
                expected = {Fate(Decision.UNDECIDED)}
            case TransactionState.COMMITTING | TransactionState.COMMITTED:
                expected = {Fate(Decision.COMMIT, life.version)}
            case _:
                expected = {Fate(Decision.ABORT)}
        if life.is_forgotten:
            expected = {Fate(Decision.ABORT)}
        assert self.world.coordinator.fate(transaction) in expected

    # Participants, clocks, operators

    @rule(participant=st.sampled_from(PARTICIPANTS))
    def fail_or_heal(self, participant: Participant) -> None:
        self.world.parts.failing ^= {participant}

    @rule(ms=st.sampled_from([1, 14_999, 15_000]))
    def pass_time(self, ms: int) -> None:
        self.world.advance(ms)

    @rule(hours=st.integers(-10, 10))
    def set_the_wall_clock(self, hours: int) -> None:
        self.world.wall.advance(hours * HOUR_MS)

    @rule()
    def switch(self) -> None:
        self.world.coordinator.log.enabled = not self.world.coordinator.log.enabled

    @rule()
    def sweep(self) -> None:
        self.world.advance(PAUSE_MS_MAX)
        self.world.coordinator.sweep()
        for life in self.lives.values():
            if self.is_late(life):
                life.decide(ABORTING)
            life.tell(self.world.parts.failing)

    # Restarts

    @rule()
    def restart(self) -> None:
        self.world.restart()
        self._come_back()

    @rule(keep=st.integers(0, 5))
    def crash(self, keep: int) -> None:
        self.engine = self.engine.crash(keep=min(keep, self.engine.unsynced))
        self.world.engine = self.engine
        self.world.coordinator = self.world.open()
        found = self.world.states()
        for transaction, life in self.lives.items():
            if life.has_ended and transaction in found:
                # Letting records go was not durable yet: it is ended once more.
                life.state = COMMITTING if life.state is COMMITTED else ABORTING
                assert found[transaction] is life.state
        self._come_back()

    def _come_back(self) -> None:
        """Known after a restart is what the log says: a deadline by the wall, and nothing of who was told.

        What was cut off in the middle of its commit, in which a partition joins, is aborted.
        """
        for life in self.lives.values():
            left_ms = min(max(0, life.wall_deadline_ms - self.world.wall()), life.timeout_ms)
            life.expires_ms = self.world.growing() + left_ms
            life.is_forgotten = life.has_ended
            if life.state is OPEN and life.wrote:
                life.decide(ABORTING, is_logged=False)
            if life.state in WAYS:
                life.waiting = set(life.joined)

    # What always holds

    @invariant()
    def everything_is_as_it_should_be(self) -> None:
        assert not self.world.parts.wrong
        expected = {
            transaction: (
                life.state,
                life.version,
                life.joined,
                set() if life.state is OPEN else life.waiting,
            )
            for transaction, life in self.lives.items()
            if not life.has_ended
        }
        shown = {
            each.id: (
                each.state,
                each.version,
                each.participants,
                {who.participant for who in each.waiting_for},
            )
            for each in self.world.coordinator.transactions()
        }
        assert shown == expected

    @invariant()
    def the_log_holds_what_has_not_ended_and_nothing_else(self) -> None:
        expected = {
            transaction: 1 + len(life.joined) + life.is_logged
            for transaction, life in self.lives.items()
            if not life.has_ended
        }
        live = [record.transaction for record in self.world.live()]
        assert {transaction: live.count(transaction) for transaction in live} == expected

    @invariant()
    def participants_were_told_what_was_decided(self) -> None:
        for (transaction, _), (decision, version) in self.world.parts.told.items():
            life = self.lives[transaction]
            assert life.state in ((COMMITTING, COMMITTED) if decision is COMMIT else (ABORTING, ABORTED))
            assert decision is ABORT or version == life.version

    def teardown(self) -> None:
        """Whatever happened, everything ends once participants are there."""
        self.world.parts.failing = set()
        self.world.advance(max(TIMEOUTS_MS))
        self.world.coordinator.sweep()
        assert self.world.coordinator.transactions() == []
        assert self.world.live() == []
        for transaction, life in self.lives.items():
            assert all((transaction, each) in self.world.parts.told for each in life.joined)
        self.world.coordinator.close()


class LivesOnDisk(Lives):
    """The same over RocksDB, where a crash is a restart."""

    def __init__(self) -> None:
        super().__init__()
        self.world.coordinator.close()
        self.directory = TemporaryDirectory()
        self.rocks = RocksEngine(Path(self.directory.name) / "engine", (FAMILY,))
        self.world = World(self.rocks)

    @rule()
    def restart(self) -> None:
        self.world.coordinator.close()
        self.rocks.close()
        self.rocks = self.world.engine = RocksEngine(Path(self.directory.name) / "engine", (FAMILY,))
        self.world.coordinator = self.world.open()
        self._come_back()

    @rule(keep=st.just(0))
    def crash(self, keep: int) -> None:
        self.restart()

    def teardown(self) -> None:
        super().teardown()
        self.rocks.close()
        self.directory.cleanup()


@pytest.mark.parametrize(("machine", "times"), [(Lives, 1), (LivesOnDisk, 0.04)])
def test_a_coordinator_does_what_the_model_does(machine: type[Lives], times: float) -> None:
    run_state_machine_as_test(machine, settings=scaled(times, stateful_step_count=30))


def forget_at_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "replay", lambda *_, **__: ({}, []))


def leave_open_at_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HeldTransaction, "wrote", property(lambda _: False))


def tell_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ending, "_tell_one", lambda *_: None)


def never_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TransactionBook, "is_late", lambda *_: False)


@pytest.mark.parametrize("sabotage", [forget_at_restart, leave_open_at_restart, tell_nobody, never_late])
def test_the_model_finds_its_canaries(
    sabotage: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    sabotage(monkeypatch)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(Lives, settings=settings(SEARCH, stateful_step_count=30))
