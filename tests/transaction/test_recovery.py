"""What a coordinator knows after a restart, how soon, and from how much."""

from pathlib import Path

import pytest
from tests.transaction.support import (
    ABORT,
    ABORTING,
    COMMIT,
    COMMITTING,
    LONG,
    OPEN,
    Parts,
    World,
    decide,
    partition,
    subscription,
)
from tests.waiting import HANG_SECONDS

from floodmark.clock import system_time_ms
from floodmark.engine.rocks import RocksEngine
from floodmark.log import FAMILY, BatchSettings, holds_batches, list_ledgers
from floodmark.model.errors import TransactionEnded
from floodmark.model.partition import Decision, Fate
from floodmark.model.transaction import TransactionState
from floodmark.testing import FaultyEngine
from floodmark.testing.ledgers import EngineStore
from floodmark.transaction import TransactionCoordinator

P, Q, S = partition("0a"), partition("0b"), subscription("indexer")


@pytest.mark.parametrize("enabled", [True, False], ids=["batched", "bare"])
def test_recovery_answers_at_once_and_finishes_in_the_background(enabled: bool) -> None:
    world = World(enabled=enabled)
    coordinator = world.coordinator
    opened, committing, aborting, ended = (coordinator.begin(LONG) for _ in range(4))
    coordinator.join(opened, S)
    for transaction in (committing, aborting, ended):
        coordinator.join(transaction, P)
        coordinator.join(transaction, S)
    coordinator.commit(ended, 4)
    decide(coordinator, committing, 5)
    decide(coordinator, aborting)
    world.parts.failing = {P, S}
    told = len(world.parts.calls)

    again = world.restart()
    assert [again.fate(each).decision for each in (opened, committing, aborting)] == [
        Decision.UNDECIDED,
        Decision.COMMIT,
        Decision.ABORT,
    ]
    assert again.show(aborting).reason == "on purpose"
    assert again.show(committing).version == 5
    assert [(each.id, each.participants) for each in again.transactions()] == [
        (opened, [S]),
        (committing, [P, S]),
        (aborting, [P, S]),
    ]
    assert again.begin(LONG) not in (opened, committing, aborting, ended)
    assert len(world.parts.calls) == told, "nobody was asked for all of this"
    again.sweep()
    assert [len(again.show(each).waiting_for) for each in (committing, aborting)] == [2, 2]
    world.parts.failing = set()
    world.advance(1_000)
    again.sweep()
    assert set(world.states().values()) == {OPEN}
    assert world.parts.decisions(committing) == {(COMMIT, 5)}
    assert world.parts.decisions(aborting) == {(ABORT, 0)}
    assert again.commit(opened, 6) == 6
    again.close()
    assert not world.parts.wrong


def test_an_open_transaction_that_was_cut_off_in_its_commit_is_aborted_at_once() -> None:
    """A partition joins only inside a commit.  Others stay open for the clients that began them."""
    world = World()
    begun, acknowledged, cut_off = (world.coordinator.begin(LONG) for _ in range(3))
    world.coordinator.join(acknowledged, S)
    world.coordinator.join(cut_off, S)
    world.coordinator.join(cut_off, P)
    # The abort is in no log, and the next restart comes to the same decision.
    for _ in range(3):
        world.restart()
        assert world.states() == {begun: OPEN, acknowledged: OPEN, cut_off: ABORTING}
        assert world.coordinator.fate(cut_off).decision is ABORT
    world.coordinator.sweep()
    assert world.parts.told == {(cut_off, S): (ABORT, 0), (cut_off, P): (ABORT, 0)}
    with pytest.raises(TransactionEnded, match=r"is aborted \(the site was restarted in the middle"):
        world.coordinator.commit(cut_off, 5)
    assert world.coordinator.show(cut_off).state is TransactionState.ABORTED
    assert world.coordinator.commit(acknowledged, 6) == 6
    world.coordinator.close()


def test_an_open_transaction_of_a_process_that_has_ended_is_aborted_at_once() -> None:
    world = World()
    own, other = world.coordinator.begin(LONG, "own"), world.coordinator.begin(LONG, "other")
    world.coordinator.join(own, S)
    world.is_abandoned = lambda transaction: transaction.endswith("-own")
    world.restart()
    assert world.states() == {own: ABORTING, other: OPEN}
    assert world.coordinator.show(own).reason == "the process that began it has ended"
    world.coordinator.close()


def test_what_was_ended_before_a_power_cut_is_ended_once_more() -> None:
    engine = FaultyEngine((FAMILY,))
    world = World(engine)
    transaction = world.coordinator.begin(LONG)
    for participant in (P, Q):
        world.coordinator.join(transaction, participant)
    world.coordinator.commit(transaction, 5)
    assert world.live() == []
    assert engine.unsynced, "letting go costs no sync"
    world.engine = engine.crash(keep=0)
    world.coordinator = world.open()
    assert world.states() == {transaction: COMMITTING}
    assert world.coordinator.fate(transaction) == Fate(Decision.COMMIT, 5)
    world.coordinator.sweep()
    assert world.states() == {}
    assert world.parts.calls == {(transaction, P): 2, (transaction, Q): 2}
    assert not world.parts.wrong


def rows_after(finished: int, *, enabled: bool) -> int:
    """How many rows are left with five open transactions among many that have ended."""
    engine = FaultyEngine((FAMILY,))
    world = World(engine, enabled=enabled)
    coordinator = world.coordinator
    opened = []
    for first in range(0, finished, 50):
        begun = [coordinator.begin(LONG) for _ in range(50)]
        for each in begun:
            coordinator.join(each, S)
        ending = begun[1:] if first < 250 else begun
        opened += begun[: len(begun) - len(ending)]
        for each in ending:
            coordinator.commit(each, 5)
    again = world.restart()
    assert [each.id for each in again.transactions()] == opened
    assert len(world.live()) == 2 * len(opened)
    again.close()
    return len(engine.contents()[FAMILY])


@pytest.mark.parametrize("enabled", [True, False], ids=["batched", "bare"])
def test_the_log_that_recovery_reads_is_as_long_as_what_is_open_not_as_what_was(enabled: bool) -> None:
    short, long = rows_after(250, enabled=enabled), rows_after(1_000, enabled=enabled)
    assert long <= short + 3


def test_coordinators_side_by_side_know_only_their_own() -> None:
    world, parts = World(), Parts()
    store = EngineStore(world.engine)
    others = [
        TransactionCoordinator(
            number,
            store,
            parts,
            settings=BatchSettings(),
            mint=lambda: next(world.names),
            time_source=system_time_ms,
        )
        for number in (0, 1)
    ]
    ids = [other.begin() for other in others]
    assert ids == ["0-1", "1-2"]
    assert [other.fate(ids[0]).decision for other in others] == [Decision.UNDECIDED, Decision.ABORT]
    assert [len(other.transactions()) for other in others] == [1, 1]
    assert list_ledgers(world.engine) == ["coordinator/0", "coordinator/1"]
    for other in others:
        other.close()


def test_a_log_on_disk_outlives_its_process_and_mixes_both_kinds_of_entries(tmp_path: Path) -> None:
    engine = RocksEngine(tmp_path, (FAMILY,))
    world = World(engine)
    ids = []
    for enabled in (True, False, True, False):
        world.coordinator.log.enabled = enabled
        ids.append(world.coordinator.begin(LONG))
        for transaction in ids:
            world.coordinator.join(transaction, S)
    assert holds_batches(world.ledger())
    world.coordinator.close()
    engine.close()
    world.engine = RocksEngine(tmp_path, (FAMILY,))
    world.coordinator = world.open()
    assert world.states() == dict.fromkeys(ids, OPEN)
    for transaction in ids:
        assert world.coordinator.commit(transaction, 5) == 5
    assert world.live() == []
    world.coordinator.close()
    world.engine.close()


def test_the_way_down_to_bare_entries_is_free_once_open_transactions_have_ended() -> None:
    world = World()
    old = world.coordinator.begin(LONG)
    world.coordinator.log.enabled = False
    new = world.coordinator.begin(LONG)
    assert holds_batches(world.ledger())
    world.coordinator.commit(old, 5)
    assert world.coordinator.log.flush(HANG_SECONDS)
    assert not holds_batches(world.ledger())
    world.settings = BatchSettings(enabled=False)
    world.restart()
    assert world.states() == {new: OPEN}
    world.coordinator.close()
