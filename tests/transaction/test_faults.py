"""Storage that fails at every step of every operation, in every way, and a power cut at every moment.

A script runs once for each engine operation that could fail.  Whatever its callers were told must then hold
in the coordinator that goes on, and in one that recovers from each image that a power cut could leave.
"""

from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta

import pytest
from tests.sizes import only
from tests.transaction.support import COMMIT, LONG, OPEN, World, decide, partition, subscription
from tests.waiting import HANG_SECONDS

from floodmark.log import FAMILY, BatchedWriter, Position
from floodmark.model.errors import Corruption, FloodmarkError, OutcomeUnknown, TransactionEnded
from floodmark.model.partition import Decision
from floodmark.model.transaction import Participant
from floodmark.testing import UNKNOWN_FAULTS, Fault, FaultPlan, FaultyEngine, SimulatedCrash
from floodmark.transaction import TransactionCoordinator
from floodmark.transaction.book import HeldTransaction
from floodmark.transaction.ending import Ending
from floodmark.transaction.steps import TransactionStep

P, Q, S = partition("0a"), partition("0b"), subscription("indexer")
SHORT = timedelta(seconds=1)


class Told:
    """What the callers of one transaction were told."""

    def __init__(self, timeout: timedelta) -> None:
        self.timeout = timeout
        self.joined: set[Participant] = set()
        # Joins and decisions that failed, and whose records nobody knows about.
        self.perhaps_joined: set[Participant] = set()
        self.outcome: Decision | None = None
        self.perhaps: set[Decision] = set()


class Callers(World):
    """Runs steps and notes the answers; a step that fails is not repeated."""

    def __init__(self, engine: FaultyEngine, *, enabled: bool) -> None:
        super().__init__(engine, enabled=enabled)
        self.faulty = engine
        self.told: dict[str, Told] = {}

    def begin(self, timeout: timedelta) -> str | None:
        found: list[str] = []
        self._try(lambda: found.append(self.coordinator.begin(timeout)), lambda: None)
        for transaction in found:
            self.told[transaction] = Told(timeout)
        return found[0] if found else None

    def join(self, transaction: str | None, participant: Participant) -> None:
        if transaction is not None:
            told = self.told[transaction]
            done = self._try(
                lambda: self.coordinator.join(transaction, participant),
                lambda: told.perhaps_joined.add(participant),
            )
            if done:
                told.joined.add(participant)

    def end(self, transaction: str | None, outcome: Decision, *, untold: bool = False) -> None:
        if transaction is None:
            return
        told = self.told[transaction]

        def step() -> None:
            if untold:
                decide(self.coordinator, transaction, 5 if outcome is COMMIT else 0)
            elif outcome is COMMIT:
                self.coordinator.commit(transaction, 5)
            else:
                self.coordinator.abort(transaction)

        if self._try(step, lambda: told.perhaps.add(outcome)):
            told.outcome = outcome

    def flush(self) -> None:
        """Let the log store what was acknowledged, which may fail."""
        assert self.coordinator.log.flush(HANG_SECONDS)

    def _try(self, step: Callable[[], object], note_unknown: Callable[[], object]) -> bool:
        try:
            step()
        except OutcomeUnknown:
            note_unknown()
        except SimulatedCrash:
            note_unknown()
            raise
        except TransactionEnded:
            raise AssertionError("nobody has decided about it") from None
        except FloodmarkError:
            pass
        else:
            return True
        return False


def run_script(callers: Callers) -> None:
    first = callers.begin(LONG)
    callers.join(first, P)
    callers.join(first, S)
    callers.end(first, COMMIT)
    callers.flush()
    second, third = callers.begin(LONG), callers.begin(SHORT)
    callers.join(second, Q)
    callers.join(third, P)
    callers.end(second, Decision.ABORT)
    callers.flush()
    fourth = callers.begin(LONG)
    callers.join(fourth, P)
    callers.join(fourth, Q)
    callers.parts.failing = {Q}
    callers.end(fourth, COMMIT, untold=True)
    callers.coordinator.sweep()
    callers.parts.failing = set()
    callers.advance(1_000)
    callers.coordinator.sweep()
    callers.flush()
    fifth = callers.begin(LONG)
    callers.join(fifth, S)
    callers.end(fifth, Decision.ABORT, untold=True)
    callers.coordinator.sweep()
    callers.flush()
    callers.join(callers.begin(LONG), Q)


def fates_of(told: Told, *, is_recovered: bool) -> set[Decision]:
    """What a coordinator may say of a transaction.

    One that has recovered aborts what was cut off in the middle of its commit, in which a partition joined.
    """
    may = {told.outcome} if told.outcome else told.perhaps | {Decision.UNDECIDED}
    if told.timeout is SHORT:
        may |= {Decision.ABORT}
    if is_recovered and Decision.UNDECIDED in may:
        if {P, Q} & (told.joined | told.perhaps_joined):
            may |= {Decision.ABORT}
        if {P, Q} & told.joined:
            may -= {Decision.UNDECIDED}
    return may


def check(callers: Callers, coordinator: TransactionCoordinator, *, is_recovered: bool = False) -> None:
    """What a coordinator says agrees with what was told, by the last one and to the participants."""
    listed = {each.id: each for each in coordinator.transactions()}
    for transaction, told in callers.told.items():
        fate = coordinator.fate(transaction).decision
        heard = {decision for decision, _ in callers.parts.decisions(transaction)}
        may = fates_of(told, is_recovered=is_recovered)
        if transaction in listed:
            assert fate in may
            shown = listed[transaction]
            assert told.joined <= set(shown.participants) <= told.joined | told.perhaps_joined
        else:
            assert may != {Decision.UNDECIDED}, "it is lost"
            assert all((transaction, each) in callers.parts.told for each in told.joined), (
                "it is gone before all were told"
            )
        assert heard <= may, "participants were told what was not decided"
    for transaction, shown in listed.items():
        if transaction not in callers.told:
            assert shown.state is OPEN, "somebody began it, and was not told"


def finish(callers: Callers, coordinator: TransactionCoordinator) -> None:
    """Nothing stays half-way, and nothing is left in the log."""
    callers.advance(24 * 3_600_000)
    coordinator.sweep()
    assert coordinator.transactions() == []
    for transaction, told in callers.told.items():
        heard = {decision for decision, _ in callers.parts.decisions(transaction)}
        if told.outcome is not None and told.joined:
            assert heard == {told.outcome}
        for participant in told.joined:
            assert (transaction, participant) in callers.parts.told, "a participant was never told"
    assert not callers.parts.wrong
    assert coordinator.log.acknowledgements.count_live() == (0, 0)
    coordinator.close()


def check_images(callers: Callers) -> None:
    told = dict(callers.parts.told)
    for keep in range(callers.faulty.unsynced + 1):
        image = callers.faulty.crash(keep=keep)
        coordinator = callers.open(image)
        check(callers, coordinator, is_recovered=True)
        finish(callers, coordinator)
        # Another image, another future.
        callers.parts.told = dict(told)
        callers.advance(-24 * 3_600_000)


def visit(plan: FaultPlan, *, enabled: bool) -> bool:
    engine = FaultyEngine((FAMILY,))
    callers = Callers(engine, enabled=enabled)
    engine.arm(plan)
    with suppress(SimulatedCrash):
        run_script(callers)
    callers.parts.failing = set()
    check_images(callers)
    if plan.kind is Fault.CRASH and engine.fired:
        return True
    engine.heal()
    check(callers, callers.coordinator)
    finish(callers, callers.coordinator)
    return engine.fired


PLANS = [(kind, 0) for kind in Fault] + [(kind, 1) for kind in sorted(UNKNOWN_FAULTS)]


@pytest.mark.parametrize("enabled", only([True], [True, False]), ids=["batched", "bare"])
@pytest.mark.parametrize(("kind", "recover_failures"), PLANS)
def test_every_step_may_fail(kind: Fault, recover_failures: int, enabled: bool) -> None:
    steps = 0
    plan = FaultPlan(at=1, kind=kind, recover_failures=recover_failures)
    while visit(plan, enabled=enabled):
        steps += 1
        plan = FaultPlan(at=steps + 1, kind=kind, recover_failures=recover_failures)
    assert steps >= 40, "the script writes and syncs more often than that"


@pytest.mark.parametrize("enabled", [True, False], ids=["batched", "bare"])
def test_a_failed_append_leaves_memory_as_it_was(enabled: bool) -> None:
    engine = FaultyEngine((FAMILY,))
    world = World(engine, enabled=enabled)
    coordinator = world.coordinator
    transaction = coordinator.begin()
    coordinator.join(transaction, P)
    before = coordinator.show(transaction), world.live()
    steps: list[Callable[[], object]] = [
        coordinator.begin,
        lambda: coordinator.join(transaction, Q),
        lambda: coordinator.commit(transaction, 5),
        lambda: coordinator.abort(transaction),
    ]
    for kind in (Fault.TRANSIENT, Fault.UNKNOWN_SKIPPED, Fault.UNKNOWN_LOST):
        for step in steps:
            engine.arm(FaultPlan(at=1, kind=kind))
            with pytest.raises(FloodmarkError):
                step()
            assert len(coordinator.transactions()) == 1
            assert (coordinator.show(transaction), world.live()) == before
            assert coordinator.fate(transaction).decision is Decision.UNDECIDED
    assert not world.parts.told
    engine.heal()
    assert coordinator.commit(transaction, 6) == 6
    coordinator.close()


def test_a_decision_of_unknown_outcome_is_taken_back_by_the_other_one() -> None:
    engine = FaultyEngine((FAMILY,))
    world = World(engine)
    coordinator = world.coordinator
    transaction = coordinator.begin()
    coordinator.join(transaction, P)
    engine.arm(FaultPlan(at=2, kind=Fault.UNKNOWN_APPLIED, recover_failures=1))
    with pytest.raises(OutcomeUnknown):
        coordinator.commit(transaction, 5)
    assert coordinator.fate(transaction).decision is Decision.UNDECIDED
    assert world.open(engine.crash()).fate(transaction).decision is COMMIT, "after a crash, it may be there"
    coordinator.abort(transaction)
    assert world.parts.decisions(transaction) == {(Decision.ABORT, 0)}
    for keep in range(engine.unsynced + 1):
        assert world.open(engine.crash(keep=keep)).fate(transaction).decision is Decision.ABORT
    coordinator.close()


def forgive_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TransactionStep, "fail", lambda step, _: step.complete(Position(1 << 40, 1, 0)))


def let_go_early(monkeypatch: pytest.MonkeyPatch) -> None:
    tell = Ending.tell

    def and_let_go(ending: Ending, decided: Iterable[HeldTransaction]) -> None:
        telling = list(decided)
        ending._log.acknowledge(position for held in telling for position in held.positions)
        tell(ending, telling)

    monkeypatch.setattr(Ending, "tell", and_let_go)


def keep_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BatchedWriter, "acknowledge", lambda *_: None)


@pytest.mark.parametrize("sabotage", [forgive_failures, let_go_early, keep_records])
def test_the_check_finds_its_canaries(
    sabotage: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def look_everywhere() -> None:
        for kind, recover_failures in PLANS:
            test_every_step_may_fail(kind, recover_failures, enabled=True)

    sabotage(monkeypatch)
    with pytest.raises((AssertionError, Corruption)):
        look_everywhere()
