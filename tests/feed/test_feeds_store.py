"""The store of feeds: safe points, checkpoints, leases, and cutting anew."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import msgspec
import pytest
from tests.feed.support_feeds import USERS, World, moved

from floodmark.feed.leased import HOLD_EVERY_MS, LeasedReaders
from floodmark.feed.named.feeds import Feed, FeedState, FeedUpdate
from floodmark.feed.named.store import FEEDS
from floodmark.feed.safepoints import SafePoint
from floodmark.model.actions import SITE_OWNER
from floodmark.model.errors import (
    FeedExists,
    FeedNotFound,
    InvalidVersion,
    LimitExceeded,
    NamespaceNotFound,
    StorageFull,
    VersionCollected,
    VersionInFuture,
)
from floodmark.model.version import Version, compose
from floodmark.partition import META

DAY_MS = timedelta(hours=24) // timedelta(milliseconds=1)


@pytest.fixture
def world() -> World:
    return World()


# Creating


def test_a_feed_begins_where_it_is_told_to(world: World) -> None:
    start = world.put(b"a")
    feed = world.create(since=start, description="a copy")
    assert feed.checkpoint == start
    assert feed.state is FeedState.NORMAL
    assert world.store.find("copy") == feed
    assert world.store.list() == [feed]


def test_a_feed_from_the_beginning_begins_with_its_namespace(world: World) -> None:
    assert world.create().checkpoint == world.namespaces["users"][1]


def test_a_feed_holds_a_safe_point_of_its_namespace_for_a_day(world: World) -> None:
    feed = world.create()
    assert world.safe_point() == SafePoint(
        "feed/copy", feed.checkpoint, world.time() + DAY_MS, USERS, SITE_OWNER
    )


def test_feeds_are_listed_by_name(world: World) -> None:
    for name in ("b", "c", "a"):
        world.create(name)
    assert [feed.name for feed in world.store.list()] == ["a", "b", "c"]


def test_a_name_is_given_once(world: World) -> None:
    feed = world.create()
    world.put(b"a")
    with pytest.raises(FeedExists, match="'copy'"):
        world.create(since=world.node.resolved_version())
    assert world.store.find("copy") == feed
    point = world.safe_point()
    assert point is not None
    assert point.version == feed.checkpoint, "the other's safe point was moved"


def test_an_unknown_feed_is_refused_with_those_that_there_are(world: World) -> None:
    world.create("known")
    with pytest.raises(FeedNotFound, match="known"):
        world.store.find("unknown")


def test_a_feed_of_an_unknown_namespace_is_refused(world: World) -> None:
    with pytest.raises(NamespaceNotFound):
        world.create(namespace="nobody")
    assert world.store.list() == []
    assert world.safe_points.list() == []


def test_a_feed_cannot_begin_in_the_future(world: World) -> None:
    with pytest.raises(VersionInFuture):
        world.create(since=compose(world.time() + 60_000, 0))
    assert world.safe_points.list() == []


def test_a_target_before_the_namespace_is_refused(world: World) -> None:
    with pytest.raises(InvalidVersion):
        world.create(until=1)


def test_the_number_of_feeds_is_limited(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world.store._readers, "kind", replace(FEEDS, rows_max=2))
    world.create("a")
    world.create("b")
    with pytest.raises(LimitExceeded):
        world.create("c")
    world.store.remove("a")
    world.create("c")


def test_a_full_disk_refuses_new_feeds_and_lets_the_others_go_on(world: World) -> None:
    world.create()
    world.store.acquire("copy", "runner", 30)
    world.node.storage.refuse(StorageFull("no room"))
    with pytest.raises(StorageFull):
        world.create("other")
    assert [point.name for point in world.safe_points.list()] == ["feed/copy"]
    world.time.advance(2 * HOLD_EVERY_MS)
    assert world.move().state is FeedState.NORMAL
    world.store.release("copy", "runner")
    world.store.acquire("copy", "runner", 30)
    world.store.pause("copy")
    world.store.remove("copy")
    assert world.store.list() == []


def test_a_feed_that_is_not_held_any_more_does_not_start_on_a_full_disk(world: World) -> None:
    world.create()
    world.time.advance(DAY_MS)
    world.safe_points.forget_expired()
    world.node.storage.refuse(StorageFull("no room"))
    with pytest.raises(StorageFull):
        world.store.acquire("copy", "runner", 30)


# What was collected


def test_a_feed_whose_changes_were_collected_fails_at_once_and_leaves_nothing(world: World) -> None:
    start = world.put(b"a")
    world.put(b"a")
    oldest = world.collect()
    with pytest.raises(VersionCollected) as refusal:
        world.create(since=start)
    assert refusal.value.details == {"version": start, "oldest": oldest}
    assert world.store.list() == []
    assert world.safe_points.list() == []
    assert World(world.engine, world.time).store.list() == []


def test_resuming_looks_again_and_the_feed_fails_at_once(world: World) -> None:
    start = world.put(b"a")
    world.create(since=start)
    world.store.pause("copy")
    world.time.advance(DAY_MS)
    world.put(b"a")
    oldest = world.collect()
    assert oldest > start
    with pytest.raises(VersionCollected):
        world.store.resume("copy")
    assert world.store.find("copy").state is FeedState.FAILED
    # It goes on where a person says.
    assert world.store.resume("copy", oldest).checkpoint == oldest
    assert world.safe_point() is not None


def test_a_feed_that_nobody_ran_for_too_long_fails_when_it_is_run(world: World) -> None:
    world.create(since=world.put(b"a"))
    world.time.advance(DAY_MS)
    world.put(b"a")
    world.collect()
    with pytest.raises(VersionCollected):
        world.store.acquire("copy", "runner", 30)
    feed = world.store.find("copy")
    assert feed.state is FeedState.FAILED
    assert feed.error is not None
    assert "collected" in feed.error.text


def test_a_runner_that_was_away_for_too_long_is_told_that_the_feed_has_failed(world: World) -> None:
    feed = world.create(since=world.put(b"a"))
    world.store.acquire("copy", "runner", 30)
    world.time.advance(DAY_MS)
    world.put(b"a")
    world.collect()
    assert world.move(to=feed.checkpoint).state is FeedState.FAILED


def test_a_safe_point_is_set_before_the_version_is_checked() -> None:
    """Garbage collection comes at every moment at which it can: it is seen, or it sees."""
    outcomes = set(interleavings(World))
    assert outcomes == {"created", "refused"}


def test_the_check_for_the_order_finds_its_canary(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that looks first and holds afterwards is found out."""

    def hold(readers: Any, feed: Feed, version: Version) -> None:
        if version < readers._safe_points.oldest_version(feed.namespace_id):
            raise VersionCollected("too late")
        expires_at_ms = readers.now_ms() + DAY_MS
        point = SafePoint(f"feed/{feed.name}", version, expires_at_ms, feed.namespace_id, SITE_OWNER)
        with readers.storage.settled():
            row = (META, b"safe-points/" + point.name.encode(), msgspec.json.encode(point))
            readers.storage.store([row])
            readers._safe_points._load()

    monkeypatch.setattr(LeasedReaders, "hold", hold)
    assert "lost" in set(interleavings(World))


def interleavings(world_type: type[World]) -> Iterator[str]:
    """Create a feed, with a collection of garbage before the first, second, … turn to write."""
    position = 0
    while True:
        world = world_type()
        start = world.put(b"a")
        world.put(b"a")
        came = collect_before(world, position)
        try:
            feed = world.create(since=start)
        except VersionCollected:
            assert world.store.list() == []
            yield "refused"
        else:
            world.collect()
            yield "created" if world.node.retention.collected_version(USERS) <= feed.checkpoint else "lost"
        if not came:
            return
        position += 1


def collect_before(world: World, position: int) -> list[bool]:
    """Let a collection come before the turn of this number; the list says whether it came."""
    storage = world.node.storage
    settled = storage.settled
    turns = 0
    came: list[bool] = []

    @contextmanager
    def after_collection() -> Iterator[None]:
        nonlocal turns
        if turns == position and not came:
            came.append(True)
            world.collect()
        turns += 1
        with settled():
            yield

    replacement: AbstractContextManager[None] | object = after_collection
    storage.settled = replacement  # type: ignore[method-assign, assignment]
    return came


# Safe points that move


def test_the_safe_point_follows_the_checkpoint_at_most_once_a_minute(world: World) -> None:
    feed = world.create()
    world.store.acquire("copy", "runner", 30)
    held = []
    for _ in range(5):
        world.time.advance(HOLD_EVERY_MS // 2)
        world.put(b"a")
        feed = world.move()
        point = world.safe_point()
        assert point is not None
        assert point.version <= feed.checkpoint
        held.append(point.version)
    assert held[0] == world.namespaces["users"][1]
    assert len(set(held)) == 3
    assert held[1] == held[2] < held[3] == held[4]


def test_an_idle_feed_keeps_its_safe_point_alive(world: World) -> None:
    world.create()
    world.store.acquire("copy", "runner", 30)
    for _ in range(50):
        world.time.advance(DAY_MS // 24)
        world.move()
    point = world.safe_point()
    assert point is not None
    assert point.expires_at_ms == world.time() + DAY_MS


def test_a_stopped_feed_is_held_for_a_day_and_no_longer(world: World) -> None:
    world.create()
    world.store.pause("copy")
    world.time.advance(DAY_MS - 1)
    assert world.safe_point() is not None
    world.time.advance(1)
    assert world.safe_point() is None


def test_removing_lets_go(world: World) -> None:
    world.create()
    world.store.remove("copy")
    assert world.safe_points.list() == []
    assert World(world.engine, world.time).store.list() == []


def test_removing_works_when_the_safe_point_is_gone_already(world: World) -> None:
    world.create()
    world.time.advance(DAY_MS)
    world.store.remove("copy")
    assert world.store.list() == []


# Checkpoints


def test_checkpoints_never_move_back(world: World) -> None:
    world.create()
    world.store.acquire("copy", "runner", 30)
    first = world.put(b"a")
    later = world.put(b"b")
    assert world.move(to=later).checkpoint == later
    assert world.move(to=first).checkpoint == later


def test_a_checkpoint_that_nobody_can_have_reached_is_refused(world: World) -> None:
    feed = world.create()
    world.store.acquire("copy", "runner", 30)
    with pytest.raises(InvalidVersion):
        world.move(to=world.node.resolved_version() + (1 << 30))
    assert world.store.find("copy").checkpoint == feed.checkpoint


def test_resuming_from_another_version_voids_what_is_reported_of_the_old_ranges(world: World) -> None:
    start = world.put(b"a")
    world.create(since=start)
    old = world.store.acquire("copy", "runner", 30)
    world.put(b"b")
    world.move()
    world.store.pause("copy")
    assert world.store.resume("copy", start).checkpoint == start
    late = [moved(part, world.node.resolved_version()) for part in old.ranges]
    assert world.store.report("copy", "runner", late, None).checkpoint == start


def test_statistics_tell_the_lags(world: World) -> None:
    world.create(since=world.put(b"a"))
    world.time.advance(4_000)
    told = world.store.statistics("copy")
    assert (told.checkpoint_lag_ms, told.resolved_lag_ms, told.holder) == (4_000, 0, None)


# Updates


def test_an_update_changes_the_target_and_keeps_the_checkpoint(world: World) -> None:
    feed = world.create(until=compose(world.time() + 1_000, 0))
    world.store.pause("copy")
    changed = world.store.update("copy", FeedUpdate(until=None, sink="stdout:?concurrency=7"))
    assert changed.spec.until is None
    assert changed.spec.sink == "stdout:"
    assert changed.spec.options.concurrency == 7
    assert changed.ranges == feed.ranges


def test_a_target_behind_the_checkpoint_is_refused(world: World) -> None:
    world.create(since=world.put(b"a"))
    world.store.acquire("copy", "runner", 30)
    checkpoint = world.move(to=world.put(b"b")).checkpoint
    world.store.pause("copy")
    with pytest.raises(InvalidVersion, match="checkpoint"):
        world.store.update("copy", FeedUpdate(until=checkpoint))


def test_another_number_of_ranges_cuts_anew(world: World) -> None:
    for key in (b"d", b"g", b"p"):
        world.split(key)
    feed = world.create(ranges=2)
    assert len(feed.ranges) == 2
    world.store.pause("copy")
    changed = world.store.update("copy", FeedUpdate(ranges=4))
    assert len(changed.ranges) == 4
    assert changed.checkpoint == feed.checkpoint
