"""A runner delivers everything, keeps its place, and ends when it is told to."""

from random import Random
from threading import Barrier

import pytest
from tests.feed.support_feeds import Task, World
from tests.feed.support_runner import Stage, by_key, versions

from floodmark.feed.named.feeds import FeedState, FeedUpdate, SinkOptions
from floodmark.model.errors import FeedStateConflict, LeaseHeld
from floodmark.model.ranges import KeyRange


@pytest.fixture
def stage() -> Stage:
    return Stage()


def write_some(world: World, seed: int, count: int = 300) -> None:
    """Puts, deletes and commits of many keys, over few keys so that many are written again."""
    random = Random(seed)
    for number in range(count):
        key = b"%c%d" % (random.choice(b"adgjmpsvy"), random.randrange(4))
        match random.randrange(5):
            case 0:
                world.delete(key)
            case 1:
                world.put_many([b"%c" % letter for letter in random.sample(b"adgjmpsvy", 4)], b"%d" % number)
            case _:
                world.put(key, b"%d" % number)


# Delivery


def test_a_feed_with_a_target_delivers_every_change_up_to_it_once_and_finishes(stage: Stage) -> None:
    world = stage.world
    write_some(world, seed=1)
    until = world.put(b"last")
    world.put(b"behind the target")
    world.create(until=until)
    assert stage.runner().run() is FeedState.FINISHED
    wanted = [change for change in world.changes() if change.version <= until]
    assert stage.sinks.changes == wanted
    feed = world.store.find("copy")
    assert (feed.state, feed.checkpoint, feed.lease) == (FeedState.FINISHED, until, None)


def test_a_feed_without_a_target_follows(stage: Stage) -> None:
    world = stage.world
    world.create()
    runner = stage.runner()
    task = Task(runner.run)
    for number in range(20):
        version = world.put(b"key", b"%d" % number)
        stage.wait_delivered(version)
    runner.request_stop()
    assert task.result() is FeedState.NORMAL
    assert stage.sinks.changes == world.changes()


@pytest.mark.parametrize("ranges", [1, 2, 5])
@pytest.mark.parametrize("concurrency", [1, 4])
@pytest.mark.parametrize("batch_records", [1, 7, 1_000])
def test_the_changes_of_a_key_keep_their_order(
    stage: Stage, ranges: int, concurrency: int, batch_records: int
) -> None:
    world = stage.world
    for key in (b"d", b"g", b"m", b"s"):
        world.split(key)
    write_some(world, seed=ranges)
    until = world.put(b"last")
    options = SinkOptions(concurrency=concurrency, batch_records=batch_records)
    feed = world.create(until=until, ranges=ranges, options=options)
    assert len(feed.ranges) == ranges
    assert stage.runner().run() is FeedState.FINISHED
    assert by_key(stage.sinks.changes) == by_key(world.changes())


def test_one_range_delivers_in_commit_order(stage: Stage) -> None:
    world = stage.world
    world.split(b"m")
    write_some(world, seed=3)
    world.create(until=world.put(b"last"), ranges=1)
    stage.runner().run()
    assert stage.sinks.changes == world.changes()


def test_only_the_keys_of_the_feed_are_delivered(stage: Stage) -> None:
    world = stage.world
    write_some(world, seed=4)
    world.create(until=world.put(b"z"), prefix=b"m")
    stage.runner().run()
    assert stage.sinks.changes == [change for change in world.changes() if change.key.startswith(b"m")]
    assert stage.sinks.contexts[0].keys == KeyRange(b"m", b"n")


def test_a_sink_learns_which_range_it_serves(stage: Stage) -> None:
    world = stage.world
    world.split(b"m")
    start = world.put(b"a")
    world.create(since=start, until=world.put(b"z"))
    stage.runner().run()
    low, high = sorted(stage.sinks.contexts, key=lambda context: context.range_id)
    assert (low.keys, high.keys) == (KeyRange(b"", b"m"), KeyRange(b"m", None))
    assert {context.since for context in (low, high)} == {start}
    assert (low.site, low.feed, low.namespace) == ("oslo", "copy", "users")


def test_a_commit_is_never_divided(stage: Stage) -> None:
    world = stage.world
    written: list[int] = []
    keys = [b"key %03d" % number for number in range(50)]
    for _ in range(5):
        world.put_many(keys)
    until = world.put(b"last")
    world.create(until=until, ranges=1, options=SinkOptions(batch_records=30))
    stage.sinks.before = lambda operation, _: (
        written.append(len(stage.sinks.changes)) if operation == "close" or operation == "write" else None
    )
    stage.runner().run()
    # Each batch ends with the commit in which it reaches 30 changes.
    assert set(written) <= {0, 50, 100, 150, 200, 250, 251}
    assert stage.sinks.changes == world.changes()


def test_as_many_ranges_write_at_a_time_as_are_allowed(stage: Stage) -> None:
    world = stage.world
    for key in (b"b", b"c", b"d"):
        world.split(key)
    world.put_many([b"a", b"b", b"c", b"d"])
    until = world.put(b"last")
    world.create(until=until, ranges=4, options=SinkOptions(concurrency=3))
    writing: set[int] = set()
    most = 0
    # Three must be in `write` together, or none of them gets through.
    meeting = Barrier(3, timeout=60)

    def before(operation: str, range_id: int) -> None:
        nonlocal most
        if operation == "write":
            writing.add(range_id)
            most = max(most, len(writing))
            if not meeting.broken and len(stage.sinks.changes) == 0:
                meeting.wait()
        elif operation == "flush":
            writing.discard(range_id)

    stage.sinks.before = before
    assert stage.runner().run() is FeedState.FINISHED
    assert most == 3
    assert versions(stage.sinks.changes) == versions(world.changes())


# Keeping its place


def test_a_feed_goes_on_where_it_was_left(stage: Stage) -> None:
    world = stage.world
    world.create()
    for seed in range(3):
        write_some(world, seed, count=50)
        stage.run_to_present()
    assert stage.sinks.changes == world.changes()


def test_the_checkpoint_moves_while_nothing_is_written(stage: Stage) -> None:
    world = stage.world
    world.create()
    runner = stage.runner()
    task = Task(runner.run)
    stage.sinks.wait_until(lambda sinks: bool(sinks.contexts))
    world.put(b"in another range of time")
    later = world.node.resolved_version()
    stage.store.wait_until(lambda feed: feed.checkpoint >= later)
    runner.request_stop()
    task.result()


# Ending


def test_a_stopped_runner_leaves_the_feed_free_and_its_place_stored(stage: Stage) -> None:
    world = stage.world
    version = world.put(b"a")
    world.create()
    stage.run_to_present()
    feed = world.store.find("copy")
    assert (feed.state, feed.lease) == (FeedState.NORMAL, None)
    assert feed.checkpoint >= version


def test_a_runner_that_is_stopped_before_it_begins_does_nothing(stage: Stage) -> None:
    stage.world.create()
    runner = stage.runner()
    runner.request_stop()
    assert runner.run() is FeedState.NORMAL
    assert stage.sinks.contexts == []


def test_pausing_ends_the_runner(stage: Stage) -> None:
    world = stage.world
    version = world.put(b"a")
    world.create()
    task = Task(stage.runner().run)
    stage.sinks.wait_until(lambda sinks: bool(sinks.changes))
    world.store.pause("copy")
    assert task.result() is FeedState.STOPPED
    feed = world.store.find("copy")
    assert (feed.state, feed.lease) == (FeedState.STOPPED, None)
    assert feed.checkpoint >= version
    with pytest.raises(FeedStateConflict, match="resume it first"):
        stage.runner().run()


def test_removing_ends_the_runner(stage: Stage) -> None:
    world = stage.world
    world.create()
    task = Task(stage.runner().run)
    stage.sinks.wait_until(lambda sinks: bool(sinks.contexts))
    world.store.remove("copy")
    assert task.result() is FeedState.REMOVED
    assert world.store.list() == []
    assert world.safe_points.list() == []


def test_an_update_while_paused_holds_from_the_next_run_on(stage: Stage) -> None:
    world = stage.world
    world.put(b"a")
    world.create()
    stage.run_to_present()
    world.store.pause("copy")
    until = world.put(b"b")
    world.store.update("copy", FeedUpdate(until=until))
    world.store.resume("copy")
    assert stage.runner().run() is FeedState.FINISHED
    assert stage.sinks.changes == world.changes()


def test_pausing_updating_and_resuming_at_once_reaches_the_runner_that_never_saw_the_pause(
    stage: Stage,
) -> None:
    world = stage.world
    world.put(b"a")
    world.create()
    task = Task(stage.runner().run)
    stage.sinks.wait_until(lambda sinks: bool(sinks.changes))
    until = world.put(b"b")

    def before(call: str) -> None:
        if call == "report" and world.store.find("copy").spec.until is None:
            world.store.pause("copy")
            world.store.update("copy", FeedUpdate(until=until))
            world.store.resume("copy")

    stage.store.before = before
    assert task.result() is FeedState.FINISHED


def test_a_feed_that_someone_else_runs_is_refused(stage: Stage) -> None:
    stage.world.create()
    stage.world.store.acquire("copy", "other", 30)
    with pytest.raises(LeaseHeld, match="other"):
        stage.runner().run()
