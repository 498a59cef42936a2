"""Leases of feeds: one runner at a time, and who has lost it is told."""

import pytest
from tests.feed.support_feeds import World

from floodmark.feed.named.feeds import FeedError
from floodmark.model.errors import InvalidArgument, LeaseHeld, NamespaceNotFound


@pytest.fixture
def world() -> World:
    return World()


def test_one_holder_at_a_time(world: World) -> None:
    world.create()
    world.store.acquire("copy", "first", 30)
    until_ms = world.time() + 30_000
    world.time.advance(29_999)
    with pytest.raises(LeaseHeld, match="first") as refusal:
        world.store.acquire("copy", "second", 30)
    assert refusal.value.details == {"feed": "copy", "holder": "first", "expires_at_ms": until_ms}
    world.time.advance(1)
    lease = world.store.acquire("copy", "second", 30).lease
    assert lease is not None
    assert lease.holder == "second"


def test_a_second_holder_of_the_same_name_is_another_one(world: World) -> None:
    world.create()
    world.store.acquire("copy", "runner", 30)
    with pytest.raises(LeaseHeld):
        world.store.acquire("copy", "runner", 30)
    world.time.advance(30_000)
    world.store.acquire("copy", "runner", 30)


def test_a_report_renews_the_lease(world: World) -> None:
    world.create()
    world.store.acquire("copy", "runner", 30)
    for _ in range(10):
        world.time.advance(20_000)
        world.move()
    with pytest.raises(LeaseHeld):
        world.store.acquire("copy", "other", 30)


def test_who_lost_the_lease_is_told_and_changes_nothing(world: World) -> None:
    world.create()
    world.store.acquire("copy", "runner", 30)
    world.time.advance(30_000)
    taken = world.store.acquire("copy", "other", 30)
    world.put(b"a")
    with pytest.raises(LeaseHeld, match="other"):
        world.move()
    with pytest.raises(LeaseHeld):
        world.move(error=FeedError(text="gone", collected=True))
    world.store.release("copy", "runner")
    assert world.store.find("copy") == taken


def test_a_lease_that_nobody_took_over_is_renewed_late(world: World) -> None:
    world.create()
    world.store.acquire("copy", "runner", 30)
    world.time.advance(60_000)
    world.move()
    with pytest.raises(LeaseHeld):
        world.store.acquire("copy", "other", 30)


def test_a_lease_that_was_given_back_is_free(world: World) -> None:
    world.create()
    world.store.acquire("copy", "runner", 30)
    world.store.release("copy", "runner")
    with pytest.raises(LeaseHeld, match="was given back"):
        world.move()
    world.store.acquire("copy", "other", 30)


def test_a_feed_that_was_removed_and_made_again_is_not_the_old_runners(world: World) -> None:
    world.create()
    held = world.store.acquire("copy", "runner", 30)
    world.store.remove("copy")
    world.create()
    with pytest.raises(LeaseHeld):
        world.store.report("copy", "runner", held.ranges, None)


def test_a_lease_outlives_a_restart(world: World) -> None:
    world.create()
    world.store.acquire("copy", "runner", 30)
    again = World(world.engine, world.time)
    with pytest.raises(LeaseHeld):
        again.store.acquire("copy", "other", 30)
    again.move()


@pytest.mark.parametrize("seconds", [0, -1, 3_601, float("nan"), "30"])
def test_a_lease_of_an_odd_length_is_refused(world: World, seconds: float) -> None:
    world.create()
    with pytest.raises(InvalidArgument):
        world.store.acquire("copy", "runner", seconds)


def test_a_namespace_that_was_dropped_and_made_again_is_another_one(world: World) -> None:
    world.create()
    world.store.acquire("copy", "runner", 30)
    world.namespaces["users"] = (2, world.node.resolved_version())
    with pytest.raises(NamespaceNotFound, match="create it again"):
        world.move()
    world.store.release("copy", "runner")
    with pytest.raises(NamespaceNotFound, match="create it again"):
        world.store.acquire("copy", "runner", 30)
    world.store.remove("copy")
