"""Several runners of one feed: one writes, another takes over, and who lost the lease stops."""

from threading import Event

import pytest
from tests.feed.support_feeds import Task
from tests.feed.support_runner import Stage, WatchedStore, versions

from floodmark.feed.named.feeds import FeedState, SinkOptions
from floodmark.model.errors import LeaseHeld, Unreachable
from floodmark.testing.sinks import HANG_SECONDS, MemorySinks


@pytest.fixture
def stage() -> Stage:
    return Stage()


def test_another_runner_takes_over_when_the_first_one_dies(stage: Stage) -> None:
    """The first is cut off and hangs in its sink, as a process that was killed never comes back."""
    world = stage.world
    for number in range(20):
        world.put(b"%02d" % number)
    world.create(options=SinkOptions(batch_records=5))
    hangs, released = Event(), Event()
    sinks = MemorySinks()

    def hang(operation: str, _range_id: int) -> None:
        if operation == "write" and sinks.changes:
            hangs.set()
            assert released.wait(HANG_SECONDS)

    sinks.before = hang
    cut_off = WatchedStore(world.store)
    first = stage.runner("first", store=cut_off, open_sink=sinks.open_uri, elapsed_ms=world.time)
    dying = Task(first.run)
    assert hangs.wait(HANG_SECONDS)
    cut_off.wait_until(lambda feed: feed.checkpoint >= sinks.changes[-1].version)

    def refuse(_call: str) -> None:
        raise Unreachable("cut off")

    cut_off.before = refuse
    written_by_first = len(sinks.changes)

    second = stage.runner("second", wait_for_lease=True, wait=Event.wait)
    taking_over = Task(second.run)
    world.put(b"more")
    world.time.advance(30_000)
    wanted = versions(world.changes())
    stage.sinks.wait_until(
        lambda others: wanted <= versions(others.changes) | versions(sinks.changes[:written_by_first])
    )
    assert stage.sinks.contexts[0].since >= sinks.changes[written_by_first - 1].version
    # The dead one wakes up: the write that it was in is done, and it begins no other.
    released.set()
    with pytest.raises(LeaseHeld):
        dying.result()
    assert len(sinks.changes) <= written_by_first + 5
    second.request_stop()
    assert taking_over.result() is FeedState.NORMAL


def test_a_runner_waits_for_the_lease_and_gets_it_when_it_is_given_back(stage: Stage) -> None:
    world = stage.world
    world.put(b"a")
    world.create()
    first, second = stage.runner("first"), stage.runner("second", wait_for_lease=True, wait=Event.wait)
    running = Task(first.run)
    stage.sinks.wait_until(lambda sinks: len(sinks.contexts) == 1)
    waiting = Task(second.run)
    first.request_stop()
    running.result()
    version = world.put(b"b")
    stage.wait_delivered(version)
    second.request_stop()
    assert waiting.result() is FeedState.NORMAL


def test_a_runner_that_waits_can_be_stopped(stage: Stage) -> None:
    stage.world.create()
    stage.world.store.acquire("copy", "other", 3_600)
    second = stage.runner("second", wait_for_lease=True, wait=Event.wait)
    waiting = Task(second.run)
    second.request_stop()
    assert waiting.result() is FeedState.NORMAL


def test_a_runner_that_waits_ends_when_the_other_one_has_finished(stage: Stage) -> None:
    world = stage.world
    world.create(until=world.put(b"a"))
    world.store.acquire("copy", "first", 30)
    asked = Event()
    stage.store.before = lambda call: asked.set() if call == "acquire" else None
    waiting = Task(stage.runner("second", wait_for_lease=True, wait=Event.wait).run)
    assert asked.wait(HANG_SECONDS)
    part = world.store.find("copy").ranges[0]
    done = type(part)(id=part.id, keys=part.keys, checkpoint=world.node.resolved_version())
    world.store.report("copy", "first", [done], None)
    assert waiting.result() is FeedState.FINISHED
    assert stage.sinks.contexts == []


def test_a_runner_that_waits_ends_when_the_feed_is_removed(stage: Stage) -> None:
    world = stage.world
    world.create()
    world.store.acquire("copy", "first", 30)
    asked = Event()
    stage.store.before = lambda call: asked.set() if call == "acquire" else None
    waiting = Task(stage.runner("second", wait_for_lease=True, wait=Event.wait).run)
    assert asked.wait(HANG_SECONDS)
    world.store.remove("copy")
    assert waiting.result() is FeedState.REMOVED


def test_who_lost_the_lease_stops_at_its_next_report(stage: Stage) -> None:
    world = stage.world
    world.put(b"a")
    world.create()
    task = Task(stage.runner("first").run)
    stage.sinks.wait_until(lambda sinks: bool(sinks.changes))

    def taken(call: str) -> None:
        lease = world.store.find("copy").lease
        if call == "report" and lease is not None and lease.holder == "first":
            world.store.release("copy", "first")
            world.store.acquire("copy", "thief", 30)

    stage.store.before = taken
    with pytest.raises(LeaseHeld, match="thief"):
        task.result()
    lease = world.store.find("copy").lease
    assert lease is not None
    assert lease.holder == "thief", "it gave back a lease that was not its own"


def test_a_runner_that_cannot_renew_its_lease_stops_writing_before_it_is_over(stage: Stage) -> None:
    world = stage.world
    world.create(options=SinkOptions(batch_records=1))
    runner = stage.runner("first", lease_seconds=30, elapsed_ms=world.time)

    def cut_off(call: str) -> None:
        if call == "report":
            raise Unreachable("cut off")

    stage.store.before = cut_off
    task = Task(runner.run)
    stage.wait_delivered(world.put(b"a"))
    # Two thirds of the lease: nobody else can have begun yet.
    world.time.advance(20_000)
    before = len(stage.sinks.changes)
    world.put(b"b")
    with pytest.raises(LeaseHeld, match="stopped writing"):
        task.result()
    assert len(stage.sinks.changes) == before


def test_an_idle_runner_that_cannot_report_ends_when_its_lease_is_over(stage: Stage) -> None:
    world = stage.world
    world.create()
    reports = Event()

    def cut_off(call: str) -> None:
        if call == "report":
            reports.set()
            raise Unreachable("cut off")

    stage.store.before = cut_off
    task = Task(stage.runner("first", elapsed_ms=world.time).run)
    assert reports.wait(HANG_SECONDS)
    world.time.advance(30_000)
    with pytest.raises(LeaseHeld, match="stopped writing"):
        task.result()


def test_a_runner_that_waits_comes_back_after_it_was_cut_off(stage: Stage) -> None:
    world = stage.world
    world.create(options=SinkOptions(batch_records=1))
    runner = stage.runner("first", wait_for_lease=True, wait=Event.wait, elapsed_ms=world.time)
    connected = Event()
    connected.set()

    def sometimes(_call: str) -> None:
        if not connected.is_set():
            raise Unreachable("cut off")

    stage.store.before = sometimes
    task = Task(runner.run)
    stage.wait_delivered(world.put(b"a"))
    connected.clear()
    world.time.advance(25_000)
    world.put(b"b")
    connected.set()
    stage.wait_delivered(world.put(b"c"))
    runner.request_stop()
    assert task.result() is FeedState.NORMAL
    assert versions(stage.sinks.changes) == versions(world.changes())


def test_the_lease_is_kept_while_a_slow_sink_finishes(stage: Stage) -> None:
    world = stage.world
    world.put(b"a")
    world.create()
    writing, released = Event(), Event()

    def slow(operation: str, _range_id: int) -> None:
        if operation == "write":
            writing.set()
            assert released.wait(HANG_SECONDS)

    stage.sinks.before = slow
    runner = stage.runner("first")
    task = Task(runner.run)
    assert writing.wait(HANG_SECONDS)
    runner.request_stop()
    stage.store.wait_reports(3)
    with pytest.raises(LeaseHeld):
        world.store.acquire("copy", "second", 30)
    released.set()
    assert task.result() is FeedState.NORMAL
    assert world.store.find("copy").checkpoint >= world.changes()[0].version
