"""What can be done to a feed in which state: the whole table."""

from collections.abc import Callable
from typing import Final

import pytest
from tests.feed.support_feeds import World

from floodmark.feed.named.feeds import FeedError, FeedState, FeedUpdate
from floodmark.model.errors import FeedExists, FeedNotFound, FeedStateConflict, LeaseHeld

NORMAL, STOPPED, ERROR = FeedState.NORMAL, FeedState.STOPPED, FeedState.ERROR
FAILED, FINISHED, REMOVED = FeedState.FAILED, FeedState.FINISHED, FeedState.REMOVED

REFUSED: Final = FeedError(text="the sink refused")
GONE: Final = FeedError(text="its changes were collected", collected=True)


def make(world: World, state: FeedState) -> None:
    """A feed in a state; whoever ran it last, `runner`, has not let go of it."""
    start = world.node.resolved_version()
    target = world.put(b"a")
    world.create(since=start, until=target if state is FINISHED else None)
    world.store.acquire("copy", "runner", 30)
    if state is STOPPED:
        world.store.pause("copy")
    elif state is ERROR:
        world.move(to=start, error=REFUSED)
    elif state is FAILED:
        world.move(to=start, error=GONE)
    elif state is FINISHED:
        world.move(to=target)
    elif state is REMOVED:
        world.store.remove("copy")
    if state is not REMOVED:
        assert world.store.find("copy").state is state


def acquire_later(world: World) -> None:
    world.time.advance(60_000)
    world.store.acquire("copy", "another", 30)


def report(world: World, error: FeedError | None = None) -> None:
    feed = next((feed for feed in world.store.list()), None)
    world.store.report("copy", "runner", [] if feed is None else feed.ranges, error)


OPERATIONS: Final[dict[str, Callable[[World], object]]] = {
    "create": lambda world: world.create(),
    "find": lambda world: world.store.find("copy"),
    "statistics": lambda world: world.store.statistics("copy"),
    "pause": lambda world: world.store.pause("copy"),
    "resume": lambda world: world.store.resume("copy"),
    "update": lambda world: world.store.update("copy", FeedUpdate(description="new")),
    "update, no target": lambda world: world.store.update("copy", FeedUpdate(until=None)),
    "rebalance": lambda world: world.store.rebalance("copy"),
    "acquire": acquire_later,
    "report": report,
    "report, refused": lambda world: report(world, REFUSED),
    "report, gone": lambda world: report(world, GONE),
    "release": lambda world: world.store.release("copy", "runner"),
    "remove": lambda world: world.store.remove("copy"),
}

Outcome = FeedState | type[Exception]

# The state afterwards, or the error.
TABLE: Final[dict[str, tuple[Outcome, Outcome, Outcome, Outcome, Outcome, Outcome]]] = {
    # In the states NORMAL, STOPPED, ERROR, FAILED, FINISHED and REMOVED.
    "create": (FeedExists, FeedExists, FeedExists, FeedExists, FeedExists, NORMAL),
    "find": (NORMAL, STOPPED, ERROR, FAILED, FINISHED, FeedNotFound),
    "statistics": (NORMAL, STOPPED, ERROR, FAILED, FINISHED, FeedNotFound),
    "pause": (STOPPED, FeedStateConflict, STOPPED, FeedStateConflict, FeedStateConflict, FeedNotFound),
    "resume": (FeedStateConflict, NORMAL, NORMAL, NORMAL, FeedStateConflict, FeedNotFound),
    "update": (FeedStateConflict, STOPPED, FeedStateConflict, FAILED, FINISHED, FeedNotFound),
    "update, no target": (FeedStateConflict, STOPPED, FeedStateConflict, FAILED, FINISHED, FeedNotFound),
    "rebalance": (NORMAL, STOPPED, ERROR, FeedStateConflict, FeedStateConflict, FeedNotFound),
    "acquire": (NORMAL, FeedStateConflict, ERROR, FeedStateConflict, FeedStateConflict, FeedNotFound),
    "report": (NORMAL, STOPPED, NORMAL, LeaseHeld, LeaseHeld, FeedNotFound),
    "report, refused": (ERROR, STOPPED, ERROR, LeaseHeld, LeaseHeld, FeedNotFound),
    "report, gone": (FAILED, FAILED, FAILED, LeaseHeld, LeaseHeld, FeedNotFound),
    "release": (NORMAL, STOPPED, ERROR, FAILED, FINISHED, REMOVED),
    "remove": (REMOVED, REMOVED, REMOVED, REMOVED, REMOVED, FeedNotFound),
}

CASES: Final = [
    (operation, state, outcome)
    for operation, outcomes in TABLE.items()
    for state, outcome in zip(FeedState, outcomes, strict=True)
]


def test_the_table_is_complete() -> None:
    assert TABLE.keys() == OPERATIONS.keys()
    assert list(FeedState) == [NORMAL, STOPPED, ERROR, FAILED, FINISHED, REMOVED]


def state_of(world: World) -> FeedState:
    feeds = world.store.list()
    return feeds[0].state if feeds else REMOVED


@pytest.mark.parametrize(("operation", "state", "outcome"), CASES)
def test_an_operation_in_a_state(operation: str, state: FeedState, outcome: Outcome) -> None:
    world = World()
    make(world, state)
    if isinstance(outcome, FeedState):
        OPERATIONS[operation](world)
        assert state_of(world) is outcome
    else:
        with pytest.raises(outcome):
            OPERATIONS[operation](world)
        assert state_of(world) is state
    # Whatever was done: what is stored is what is in memory, and a feed that can go on is held.
    assert world.store.list() == World(world.engine, world.time).store.list()
    held = world.safe_point() is not None
    assert held is (state_of(world) not in (FAILED, REMOVED))


@pytest.mark.parametrize(
    ("state", "operation", "words"),
    [
        (STOPPED, "pause", ["stopped", "paused", "already"]),
        (NORMAL, "resume", ["normal", "resumed", "runner"]),
        (NORMAL, "update", ["normal", "updated", "pause it first"]),
        (STOPPED, "acquire", ["stopped", "run", "resume it first"]),
        (FAILED, "acquire", ["failed", "resume it from a version"]),
        (FINISHED, "acquire", ["finished", "target"]),
        (FINISHED, "resume", ["finished", "target"]),
        (FINISHED, "rebalance", ["finished", "rebalanced"]),
    ],
)
def test_a_refusal_says_the_state_and_what_to_do(state: FeedState, operation: str, words: list[str]) -> None:
    world = World()
    make(world, state)
    with pytest.raises(FeedStateConflict) as refusal:
        OPERATIONS[operation](world)
    for word in ["'copy'", *words]:
        assert word in str(refusal.value)
    assert refusal.value.details == {"feed": "copy", "state": state.value}


def test_a_finished_feed_goes_on_with_a_target_further_on() -> None:
    world = World()
    make(world, FINISHED)
    checkpoint = world.store.find("copy").checkpoint
    further = world.put(b"b")
    world.store.update("copy", FeedUpdate(until=further))
    assert world.store.resume("copy").checkpoint == checkpoint
    world.store.acquire("copy", "runner", 30)
    assert world.move(to=further).state is FINISHED


def test_a_feed_that_reaches_its_target_while_it_is_being_paused_is_finished() -> None:
    world = World()
    start, target = world.node.resolved_version(), world.put(b"a")
    world.create(since=start, until=target)
    world.store.acquire("copy", "runner", 30)
    world.store.pause("copy")
    assert world.move(to=target).state is FINISHED


def test_resuming_forgets_the_error() -> None:
    world = World()
    make(world, ERROR)
    error = world.store.find("copy").error
    assert error is not None
    assert error.text == REFUSED.text
    assert world.store.resume("copy").error is None


def test_an_error_is_dated_from_when_it_first_came() -> None:
    world = World()
    make(world, NORMAL)
    began_ms = world.time()
    world.move(error=REFUSED)
    world.time.advance(5_000)
    assert world.move(error=REFUSED).error == FeedError(text=REFUSED.text, at_ms=began_ms)
    other = world.move(error=FeedError(text="something else"))
    assert other.error == FeedError(text="something else", at_ms=began_ms + 5_000)
    assert world.move().error is None
