"""The store of feeds when storage fails: at every operation, in every way, and after a power cut.

held       a feed that can go on has a safe point at or below its checkpoint, as long as it lives
done       what was acknowledged is there after a crash
nothing    what was refused left no trace
memory     what is in memory is what is stored, once storage works again
"""

from collections.abc import Callable
from typing import Any, Final

import pytest
from tests.feed.support_feeds import World

from floodmark.feed.leased import HOLD_EVERY_MS, LeasedReaders, RowState
from floodmark.feed.named.feeds import Feed, FeedError, FeedState, FeedUpdate
from floodmark.model.errors import FloodmarkError, OutcomeUnknown
from floodmark.model.version import Version
from floodmark.partition import FAMILIES
from floodmark.testing import Fault, FaultPlan, FaultyEngine, SimulatedCrash, SimulatedTime

POSITIONS_MAX: Final = 60

FAULTS: Final = [fault for fault in Fault if fault is not Fault.PERSISTENT]

OPERATIONS: Final[dict[str, Callable[[World], object]]] = {
    "create": lambda world: world.create("other"),
    "pause": lambda world: world.store.pause("copy"),
    "resume": lambda world: world.store.resume("paused"),
    "resume elsewhere": lambda world: world.store.resume("paused", world.node.resolved_version()),
    "update": lambda world: world.store.update("paused", FeedUpdate(description="new")),
    "rebalance": lambda world: world.store.rebalance("copy"),
    "acquire": lambda world: world.store.acquire("free", "runner", 30),
    "report": lambda world: world.move(),
    "report, gone": lambda world: world.move(error=FeedError(text="gone", collected=True)),
    "release": lambda world: world.store.release("copy", "runner"),
    "remove": lambda world: world.store.remove("copy"),
}


def prepare(world_type: type[World]) -> World:
    """A site with feeds in several states, whose safe points are due to be moved."""
    world = world_type(FaultyEngine(FAMILIES), SimulatedTime())
    world.put(b"a")
    for name in ("copy", "paused", "free"):
        world.create(name)
    world.store.pause("paused")
    world.store.acquire("copy", "runner", 3_600)
    world.split(b"m")
    world.put(b"z")
    world.time.advance(HOLD_EVERY_MS)
    return world


def check_held(world: World) -> None:
    """A feed may do without its safe point only if the next who runs it would notice."""
    points = {point.name: point for point in world.safe_points.list()}
    for feed in world.store.list():
        if feed.state is not FeedState.FAILED:
            point = points.get(f"feed/{feed.name}")
            assert point is not None, f"{feed.name} is not held"
            assert point.version <= feed.checkpoint, f"{feed.name} is held too late"


def crash_images(world: World) -> list[World]:
    """The site as it is after a power cut, for each number of unsynced writes that it keeps."""
    assert isinstance(world.engine, FaultyEngine)
    engine = world.engine
    return [World(engine.crash(keep), SimulatedTime(world.time())) for keep in range(engine.unsynced + 1)]


def snapshot(world: World) -> tuple[list[Feed], list[tuple[str, Version]]]:
    return world.store.list(), [(point.name, point.version) for point in world.safe_points.list()]


def visit(name: str, fault: Fault, world_type: type[World] = World) -> int:
    """Fail one step later each time, until the operation gets through; how many steps there were."""
    for position in range(1, POSITIONS_MAX):
        world = prepare(world_type)
        before = snapshot(world)
        assert isinstance(world.engine, FaultyEngine)
        world.engine.arm(FaultPlan(at=position, kind=fault))
        refused = crashed = False
        try:
            OPERATIONS[name](world)
        except SimulatedCrash:
            crashed = True
        except FloodmarkError as error:
            refused = not isinstance(error, OutcomeUnknown)
        fired = world.engine.fired
        after = None if crashed or refused else world.store.list()
        if name != "resume elsewhere":
            for image in crash_images(world):
                check_held(image)
                assert after is None or image.store.list() == after, "what was acknowledged is gone"
        if not crashed:
            world.engine.heal()
            world.put(b"storage works again")
            assert world.store.list() == World(world.engine.crash(), world.time).store.list()
            if refused:
                assert world.store.list() == before[0], "what was refused has happened"
        if not fired:
            return position - 1
    raise AssertionError(f"{name} does not get through after {POSITIONS_MAX} faults")


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_the_promises_hold_at_every_fault(name: str, fault: Fault) -> None:
    assert visit(name, fault) >= 2


@pytest.mark.parametrize("fault", FAULTS)
def test_a_refused_creation_leaves_no_safe_point(fault: Fault) -> None:
    for position in range(1, POSITIONS_MAX):
        world = prepare(World)
        assert isinstance(world.engine, FaultyEngine)
        world.engine.arm(FaultPlan(at=position, kind=fault))
        try:
            world.create("other")
        except SimulatedCrash:
            continue
        except OutcomeUnknown:
            continue
        except FloodmarkError:
            assert world.safe_point("other") is None
        if not world.engine.fired:
            return
    raise AssertionError("it does not get through")


def test_the_checkers_find_a_store_that_moves_the_safe_point_first(monkeypatch: pytest.MonkeyPatch) -> None:
    update = LeasedReaders.update

    def update_late(readers: Any, name: str, change: Callable[[Feed], Feed], **options: bool) -> Feed:
        feed = change(readers.find(name))
        readers.hold(feed, feed.checkpoint)
        stored: Feed = update(readers, name, lambda _: feed, **options)
        return stored

    monkeypatch.setattr(LeasedReaders, "update", update_late)
    with pytest.raises(AssertionError, match="held too late"):
        visit("report", Fault.TRANSIENT, World)


def test_the_checkers_find_a_store_that_holds_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    hold, enter = LeasedReaders.hold, LeasedReaders.enter

    def hold_known(readers: Any, feed: Feed, version: Version) -> None:
        if feed.name in readers.states:
            hold(readers, feed, version)

    def enter_first(readers: Any, state: RowState[Feed]) -> Feed:
        feed: Feed = enter(readers, state)
        hold(readers, feed, feed.checkpoint)
        return feed

    monkeypatch.setattr(LeasedReaders, "hold", hold_known)
    monkeypatch.setattr(LeasedReaders, "enter", enter_first)
    with pytest.raises(AssertionError, match="other is not held"):
        visit("create", Fault.CRASH, World)
