"""Timeouts by a clock that only grows, pauses, and a sweeper that sleeps until there is something to do."""

from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import count
from threading import Event

import pytest
from tests.transaction.support import (
    ABORT,
    ABORTING,
    COMMIT,
    COMMITTING,
    LONG,
    OPEN,
    World,
    decide,
    partition,
)
from tests.waiting import HANG_SECONDS, wait_until

from floodmark.clock import monotonic_ms
from floodmark.log import FAMILY
from floodmark.model.errors import OutcomeUnknown, TransactionEnded
from floodmark.model.partition import Decision
from floodmark.model.transaction import Participant, TransactionState, TransactionStatistics
from floodmark.testing import Fault, FaultPlan, FaultyEngine
from floodmark.transaction import TransactionCoordinator, start_sweeping
from floodmark.transaction.book import NEVER_MS, Agenda, HeldTransaction

P, Q = partition("0a"), partition("0b")
SECOND, HOUR_MS = timedelta(seconds=1), 3_600_000


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.coordinator.close()
    assert not world.parts.wrong


# Timeouts


def test_a_transaction_is_aborted_when_its_time_is_over_and_not_before(world: World) -> None:
    coordinator = world.coordinator
    transaction = coordinator.begin(SECOND)
    coordinator.join(transaction, P)
    world.advance(999)
    coordinator.sweep()
    assert world.states() == {transaction: OPEN}
    world.advance(1)
    coordinator.sweep()
    assert world.states() == {}
    assert world.parts.told == {(transaction, P): (ABORT, 0)}
    assert coordinator.show(transaction).reason == "its time was over"
    with pytest.raises(TransactionEnded, match="its time was over"):
        coordinator.commit(transaction, 5)
    assert world.live() == []


def test_over_its_time_a_transaction_can_only_be_aborted(world: World) -> None:
    coordinator = world.coordinator
    transaction, other = coordinator.begin(SECOND), coordinator.begin(SECOND)
    world.advance(1_000)
    coordinator.abort(transaction, "too slow")
    assert coordinator.show(transaction).reason == "too slow"
    assert coordinator.fate(other).decision is Decision.ABORT, "whoever asks makes it so"
    assert world.states() == {other: ABORTING}


LATE: dict[str, Callable[[TransactionCoordinator, str], object]] = {
    "commit": lambda coordinator, transaction: coordinator.commit(transaction, 5),
    "join": lambda coordinator, transaction: coordinator.join(transaction, Q),
    "take part": lambda coordinator, transaction: coordinator.taking_part(transaction, Q).__enter__(),
}


@pytest.mark.parametrize("late", LATE)
def test_who_hears_that_time_is_over_can_rely_on_it(late: str) -> None:
    """A commit of unknown outcome is in the log; only an abort behind it keeps a crash from finding it."""
    engine = FaultyEngine((FAMILY,))
    world = World(engine)
    coordinator = world.coordinator
    transaction = coordinator.begin(SECOND)
    coordinator.join(transaction, P)
    engine.arm(FaultPlan(at=2, kind=Fault.UNKNOWN_APPLIED, recover_failures=1))
    with pytest.raises(OutcomeUnknown):
        coordinator.commit(transaction, 5)
    assert world.open(engine.crash()).fate(transaction).decision is Decision.COMMIT
    world.advance(1_000)
    with pytest.raises(TransactionEnded, match="past its deadline; begin another one, with a longer timeout"):
        LATE[late](coordinator, transaction)
    for keep in range(engine.unsynced + 1):
        assert world.open(engine.crash(keep=keep)).fate(transaction).decision is Decision.ABORT
    coordinator.sweep()
    assert world.parts.decisions(transaction) == {(ABORT, 0)}
    assert world.live() == []


@pytest.mark.parametrize("late", ["commit", "join", "take part"])
def test_time_that_is_over_is_unknown_to_the_world_while_it_cannot_be_logged(late: str) -> None:
    engine = FaultyEngine((FAMILY,))
    world = World(engine)
    transaction = world.coordinator.begin(SECOND)
    world.coordinator.join(transaction, P)
    world.advance(1_000)
    engine.arm(FaultPlan(at=1, kind=Fault.PERSISTENT))
    with pytest.raises(OutcomeUnknown, match=r"past its deadline.*cannot be logged yet.*ask later"):
        LATE[late](world.coordinator, transaction)
    assert world.states() == {transaction: OPEN}
    engine.heal()
    with pytest.raises(TransactionEnded, match="past its deadline"):
        LATE[late](world.coordinator, transaction)
    world.coordinator.sweep()
    assert world.parts.decisions(transaction) == {(ABORT, 0)}


@pytest.mark.parametrize("late", LATE)
def test_whoever_is_late_hears_it_without_waiting_for_participants(world: World, late: str) -> None:
    transaction = world.coordinator.begin(SECOND)
    world.coordinator.join(transaction, P)
    world.parts.failing = {P}
    world.advance(1_000)
    with pytest.raises(TransactionEnded, match="past its deadline"):
        LATE[late](world.coordinator, transaction)
    assert not world.parts.calls, "they are told by whoever sweeps"
    assert world.states() == {transaction: ABORTING}
    world.coordinator.sweep()
    world.parts.failing = set()
    world.advance(1_000)
    world.coordinator.sweep()
    assert world.states() == {}
    assert world.live() == []


@pytest.mark.parametrize("late", LATE)
def test_whoever_is_late_hears_it_while_another_does_its_part_which_is_told_when_it_is_done(
    world: World, late: str
) -> None:
    coordinator = world.coordinator
    # Whoever waited would not come back.
    coordinator._wait_seconds_max = 3_600
    transaction = coordinator.begin(SECOND)
    with coordinator.taking_part(transaction, P):
        world.advance(1_000)
        with pytest.raises(TransactionEnded, match="past its deadline"):
            LATE[late](coordinator, transaction)
        assert coordinator.fate(transaction).decision is Decision.ABORT
        coordinator.sweep()
        assert not world.parts.calls, "it may still write something"
    coordinator.sweep()
    assert world.parts.told == {(transaction, P): (ABORT, 0)}
    assert world.live() == []


def test_they_are_counted_by_state_with_the_age_of_the_oldest(world: World) -> None:
    coordinator = world.coordinator
    assert coordinator.count() == ({}, 0)
    ids = []
    for _ in range(4):
        ids.append(coordinator.begin(LONG))
        world.advance(1_000)
    decide(coordinator, ids[1], 5)
    decide(coordinator, ids[2])
    assert coordinator.count() == ({OPEN: 2, COMMITTING: 1, ABORTING: 1}, 4_000)
    coordinator.commit(ids[0], 6)
    coordinator.sweep()
    assert coordinator.count() == ({OPEN: 1}, 1_000)


def test_nobody_waits_while_they_are_listed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are taken while rows are made, and those that have ended meanwhile are left out."""
    coordinator = world.coordinator
    first, second, third = (coordinator.begin(LONG) for _ in range(3))
    make, calls = HeldTransaction.statistics, count()

    def work_meanwhile(held: HeldTransaction, number: int, now_ms: int) -> TransactionStatistics:
        if next(calls) == 0:
            coordinator.commit(second, 5)
            decide(coordinator, third, 6)
            coordinator.begin(LONG)
        return make(held, number, now_ms)

    monkeypatch.setattr(HeldTransaction, "statistics", work_meanwhile)
    listed = [(each.id, each.state, each.version) for each in coordinator.transactions()]
    assert listed == [(first, OPEN, 0), (third, COMMITTING, 6)]


def test_many_that_are_over_their_time_are_aborted_in_few_entries(world: World) -> None:
    coordinator = world.coordinator
    ids = [coordinator.begin(SECOND) for _ in range(400)]
    before = coordinator.log.statistics().entries
    world.advance(1_000)
    coordinator.sweep()
    assert world.states() == {}
    assert coordinator.log.statistics().entries - before <= len(ids) / 4
    assert world.live() == []


@pytest.mark.parametrize("hours", [-48, -1, 1, 48])
def test_a_wall_clock_that_is_set_neither_ends_a_transaction_nor_keeps_it(world: World, hours: int) -> None:
    coordinator = world.coordinator
    transaction = coordinator.begin(SECOND)
    world.wall.advance(hours * HOUR_MS)
    coordinator.sweep()
    coordinator.join(transaction, P)
    assert coordinator.fate(transaction).decision is Decision.UNDECIDED
    assert coordinator.show(transaction).remaining_ms == 1_000
    world.growing.advance(999)
    coordinator.sweep()
    assert world.states() == {transaction: OPEN}
    world.growing.advance(1)
    coordinator.sweep()
    assert world.states() == {}


def test_a_deadline_outlives_a_restart(world: World) -> None:
    transaction = world.coordinator.begin(timedelta(seconds=10))
    world.advance(4_000)
    coordinator = world.restart()
    shown = coordinator.show(transaction)
    assert (shown.state, shown.age_ms, shown.remaining_ms) == (OPEN, 4_000, 6_000)
    world.advance(6_000)
    coordinator.sweep()
    assert world.states() == {}


def test_after_a_restart_a_deadline_is_never_further_away_than_the_timeout(world: World) -> None:
    """Nobody can tell how long a site was closed but by the wall; if that was set back, the timeout holds."""
    transaction = world.coordinator.begin(timedelta(seconds=10))
    world.wall.advance(-48 * HOUR_MS)
    coordinator = world.restart()
    assert coordinator.show(transaction).remaining_ms == 10_000
    world.wall.advance(96 * HOUR_MS)
    coordinator.sweep()
    assert world.states() == {transaction: OPEN}
    world.restart().sweep()
    assert world.states() == {}


def test_old_transactions_are_listed_first_and_the_slow_ones_alone_if_asked_for(world: World) -> None:
    coordinator = world.coordinator
    ids = []
    for _ in range(3):
        ids.append(coordinator.begin(LONG))
        world.advance(1_000)
    assert [each.id for each in coordinator.transactions()] == ids
    assert [each.age_ms for each in coordinator.transactions()] == [3_000, 2_000, 1_000]
    slow = coordinator.transactions(older_than=timedelta(seconds=2))
    assert [each.id for each in slow] == ids[:2]


# The sweeper


class Sweeping(World):
    """A world by the real clock, with a thread that sweeps."""

    def open(self, engine: object = None) -> TransactionCoordinator:
        coordinator = super().open()
        coordinator._growing_ms = coordinator._book.growing_ms = monotonic_ms
        return coordinator

    def wait_asleep_until(self, low_ms: int, high_ms: int) -> None:
        """Return when the sweeper sleeps until a time between these."""
        self.wait(lambda: low_ms <= self.coordinator._book._asleep_until_ms <= high_ms)

    def wait(self, is_met: Callable[[], bool]) -> None:
        wait_until(is_met, "it did not come to that")


@pytest.fixture
def sweeping() -> Iterator[Sweeping]:
    world = Sweeping()
    thread = start_sweeping(world.coordinator)
    yield world
    world.coordinator.close()
    thread.join(HANG_SECONDS)
    assert not thread.is_alive()


def test_the_sweeper_sleeps_for_ever_while_nothing_is_open(sweeping: Sweeping) -> None:
    sweeping.wait_asleep_until(NEVER_MS, NEVER_MS)
    for number in range(3):
        sweeping.coordinator.commit(sweeping.coordinator.begin(LONG), number)
    sweeping.coordinator.begin(timedelta(milliseconds=1))
    sweeping.wait(lambda: not sweeping.states())
    sweeping.wait_asleep_until(NEVER_MS, NEVER_MS)


def test_the_sweeper_wakes_up_earlier_if_there_is_something_to_do(sweeping: Sweeping) -> None:
    coordinator = sweeping.coordinator
    first, second = coordinator.begin(LONG), coordinator.begin(LONG)
    sweeping.wait_asleep_until(monotonic_ms() + HOUR_MS, NEVER_MS - 1)
    coordinator.join(first, P)
    decide(coordinator, first, 5)
    sweeping.wait(lambda: sweeping.states() == {second: OPEN})
    assert sweeping.parts.told == {(first, P): (COMMIT, 5)}
    sweeping.wait_asleep_until(monotonic_ms() + HOUR_MS, NEVER_MS - 1)
    late = coordinator.begin(timedelta(milliseconds=1))
    sweeping.wait(lambda: sweeping.states() == {second: OPEN})
    assert coordinator.show(late).reason == "its time was over"


def test_the_sweeper_tells_again_until_a_participant_is_back(sweeping: Sweeping) -> None:
    coordinator = sweeping.coordinator
    calls, back = count(1), Event()

    def on_call(_: Participant) -> None:
        if next(calls) == 3:
            sweeping.parts.failing = set()
            back.set()

    sweeping.parts.failing = {P}
    sweeping.parts.on_call = on_call
    transaction = coordinator.begin(LONG)
    coordinator.join(transaction, P)
    decide(coordinator, transaction, 5)
    assert back.wait(HANG_SECONDS)
    sweeping.wait_asleep_until(NEVER_MS, NEVER_MS)
    assert coordinator.show(transaction).state is TransactionState.COMMITTED


# The agenda


def agenda_of(held: dict[str, HeldTransaction]) -> Agenda:
    agenda = Agenda(held)
    for each in held.values():
        agenda.note(each)
    return agenda


def test_transactions_come_in_the_order_of_their_dues_and_as_many_as_asked_for() -> None:
    held = {
        name: HeldTransaction(name, 0, expires_ms)
        for name, expires_ms in [("a", 30), ("b", 10), ("c", 20), ("d", 40)]
    }
    agenda = agenda_of(held)
    assert agenda.first_ms() == 10
    assert [each.id for each in agenda.take(30, 2)] == ["b", "c"]
    assert [each.id for each in agenda.take(30, 2)] == ["a"]
    assert agenda.first_ms() == 40


def test_what_was_put_off_comes_later_and_what_was_brought_forward_sooner() -> None:
    held = {name: HeldTransaction(name, 0, 100) for name in "abc"}
    agenda = agenda_of(held)
    held["a"].retried_ms = 200
    held["b"].expires_ms = 50
    agenda.note(held["b"])
    del held["c"]
    assert [each.id for each in agenda.take(50, 9)] == ["b"]
    assert agenda.take(199, 9) == []
    assert agenda.first_ms() == 200
    assert [each.id for each in agenda.take(200, 9)] == ["a"]
    assert agenda.first_ms() == NEVER_MS


def test_one_that_somebody_works_on_comes_when_it_is_noted_again() -> None:
    held = {"a": HeldTransaction("a", 0, 100)}
    agenda = agenda_of(held)
    held["a"].parts = 1
    assert agenda.take(100, 9) == []
    assert agenda.first_ms() == NEVER_MS
    held["a"].parts = 0
    agenda.note(held["a"])
    assert [each.id for each in agenda.take(100, 9)] == ["a"]


def test_the_agenda_is_as_long_as_what_is_open_not_as_what_was(world: World) -> None:
    for _ in range(3_000):
        world.coordinator.abort(world.coordinator.begin(LONG))
    assert len(world.coordinator._book._agenda._notes) <= 1_001
