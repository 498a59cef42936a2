"""Ctrl-C in the middle of a step: the step is taken or it is not, and the log can be opened again."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from typing import Any

import pytest
from tests.log.support import interrupt_at
from tests.transaction.support import COMMIT, COMMITTING, LONG, OPEN, GatedEngine, World, partition
from tests.waiting import HANG_SECONDS

from floodmark.log import BatchedWriter
from floodmark.model.errors import TransactionEnded
from floodmark.model.partition import Decision
from floodmark.transaction import TransactionCoordinator
from floodmark.transaction.book import PAUSE_MS_FIRST, HeldTransaction
from floodmark.transaction.ending import Ending
from floodmark.transaction.records import Begun
from floodmark.transaction.steps import TransactionStep

P, Q = partition("0a"), partition("0b")


class Interrupted(World):
    """A world whose log is busy when a step comes, and in which whoever waits is interrupted."""

    def __init__(self) -> None:
        self.gated = GatedEngine()
        super().__init__(self.gated)

    def interrupt(self, step: Callable[[], object]) -> None:
        """Take a step behind another one, with Ctrl-C while it waits; then let the log go on."""
        with self._busy(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(TransactionStep, "result", _interrupt)
            with pytest.raises(KeyboardInterrupt):
                step()
        assert self.coordinator.log.flush(HANG_SECONDS)

    @contextmanager
    def _busy(self) -> Iterator[None]:
        self.gated.entered.clear()
        self.gated.gate.clear()
        self.coordinator.log.add(Begun(f"7-plug-{next(self.names)}", self.wall() + 1_000, 1_000))
        assert self.gated.entered.wait(HANG_SECONDS)
        try:
            yield
        finally:
            self.gated.gate.set()


def _interrupt(*_: object, **__: object) -> Any:
    raise KeyboardInterrupt


@pytest.fixture
def world() -> Iterator[Interrupted]:
    world = Interrupted()
    yield world
    world.coordinator.close()
    assert not world.parts.wrong


def end_all(world: World) -> None:
    """After a while nothing is open, in the log neither; and the next one can read it."""
    world.advance(24 * 3_600_000)
    world.coordinator.sweep()
    assert world.states() == {}
    world.restart().sweep()
    world.advance(24 * 3_600_000)
    world.coordinator.sweep()
    assert world.states() == {}
    assert world.live() == []


def test_a_commit_that_was_interrupted_on_its_way_to_the_log_arrives_and_is_carried_out(
    world: Interrupted,
) -> None:
    transaction = world.coordinator.begin(LONG)
    world.coordinator.join(transaction, P)
    world.interrupt(lambda: world.coordinator.commit(transaction, 5))
    assert world.states() == {transaction: COMMITTING}
    world.coordinator.sweep()
    assert world.parts.told == {}, "its caller may still be about to tell them"
    world.advance(PAUSE_MS_FIRST)
    world.coordinator.sweep()
    assert world.parts.told == {(transaction, P): (COMMIT, 5)}
    assert world.coordinator.commit(transaction, 6) == 5, "whoever asks again hears what became of it"
    end_all(world)


def test_a_step_that_was_interrupted_leaves_nothing_behind_that_cannot_be_opened(world: Interrupted) -> None:
    world.interrupt(lambda: world.coordinator.begin(LONG))
    (begun,) = world.states()
    world.interrupt(lambda: world.coordinator.join(begun, P))
    assert world.coordinator.show(begun).participants == [P]
    world.interrupt(lambda: world.coordinator.abort(begun))
    end_all(world)
    assert world.parts.decisions(begun) == {(Decision.ABORT, 0)}


def test_one_that_was_interrupted_before_the_log_took_it_can_be_taken_again(
    world: Interrupted, monkeypatch: pytest.MonkeyPatch
) -> None:
    transaction = world.coordinator.begin(LONG)
    steps: list[Callable[[], object]] = [
        lambda: world.coordinator.join(transaction, P),
        lambda: world.coordinator.commit(transaction, 5),
    ]
    for step in steps:
        with monkeypatch.context() as patch:
            patch.setattr(BatchedWriter, "hand_over", _interrupt)
            with pytest.raises(KeyboardInterrupt):
                step()
    assert world.states() == {transaction: OPEN}
    assert world.coordinator.show(transaction).participants == []
    assert world.coordinator.commit(transaction, 6) == 6
    end_all(world)


@pytest.mark.parametrize("where", ["before", "between", "after"])
def test_what_was_decided_is_carried_out_though_the_one_who_did_it_was_interrupted(
    world: Interrupted, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    transaction = world.coordinator.begin(LONG)
    world.coordinator.join(transaction, P)
    world.coordinator.join(transaction, Q)
    tell = Ending._tell

    def tell_and_interrupt(ending: Ending, held: HeldTransaction) -> bool:
        tell(ending, held)
        raise KeyboardInterrupt

    def interrupt_at_second(participant: object) -> None:
        if participant == Q:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if where == "before":
            patch.setattr(Ending, "finish", _interrupt)
        elif where == "between":
            patch.setattr(world.parts, "on_call", interrupt_at_second)
        else:
            patch.setattr(Ending, "_tell", tell_and_interrupt)
        with pytest.raises(KeyboardInterrupt):
            world.coordinator.commit(transaction, 5)
    assert world.states() == {transaction: COMMITTING}
    world.advance(1_000)
    world.coordinator.sweep()
    assert world.states() == {}, "nobody has to wait for its deadline"
    assert world.parts.decisions(transaction) == {(COMMIT, 5)}
    end_all(world)


STEPS: dict[str, Callable[[TransactionCoordinator, str], object]] = {
    "begin": lambda coordinator, _: coordinator.begin(LONG),
    "join": lambda coordinator, transaction: coordinator.join(transaction, Q),
    "commit": lambda coordinator, transaction: coordinator.commit(transaction, 5),
    "abort": lambda coordinator, transaction: coordinator.abort(transaction),
}


@pytest.mark.parametrize("step", STEPS)
def test_a_step_that_is_interrupted_at_any_call_keeps_nobody_from_the_next_one(step: str) -> None:
    world = World()
    for number in count(1):
        transaction = world.coordinator.begin(LONG)
        world.coordinator.join(transaction, P)
        was_interrupted = interrupt_at(
            number, "floodmark/transaction/", partial(STEPS[step], world.coordinator, transaction)
        )
        assert world.coordinator.log.flush(HANG_SECONDS)
        book = world.coordinator._book
        assert book.beginning == 0
        assert [held for held in book.held.values() if not held.is_quiet] == []
        with suppress(TransactionEnded):
            world.coordinator.abort(transaction)
        world.advance(1_000)
        world.coordinator.sweep()
        assert transaction not in world.states()
        if not was_interrupted:
            break
    assert number > 5
    assert not world.parts.wrong
    end_all(world)
    world.coordinator.close()
