"""A runner when the sink, the site or the way to it fails: what is tried again, and what is not."""

from collections.abc import Callable, Iterator
from itertools import groupby
from operator import itemgetter

import pytest
from tests.feed.support_feeds import Task
from tests.feed.support_runner import Stage, WatchedStore, by_key, versions

from floodmark.clock.backoff import BUDGET_MS, Backoff
from floodmark.feed.named.feeds import Feed, FeedError, FeedState, RangeProgress, SinkOptions
from floodmark.model.errors import (
    Corruption,
    InvalidArgument,
    NotAllowed,
    OutcomeUnknown,
    SinkFailed,
    StorageFailed,
    Unreachable,
    VersionCollected,
)
from floodmark.model.stream import ChangeBatch, ChangesRequest


@pytest.fixture
def stage() -> Stage:
    return Stage()


def fail(stage: Stage, operation: str, error: Exception, times: int = 1) -> list[int]:
    """Make an operation of the sink fail a number of times; the list grows with each failure."""
    failed: list[int] = []

    def before(called: str, range_id: int) -> None:
        if called == operation and len(failed) < times:
            failed.append(range_id)
            raise error

    stage.sinks.before = before
    return failed


# The sink


@pytest.mark.parametrize("operation", ["open", "write", "flush"])
@pytest.mark.parametrize(
    "error",
    [
        SinkFailed("the sink is full"),
        Unreachable("nobody answers"),
        OutcomeUnknown("it may have happened"),
        OSError("the disk is gone"),
        ValueError("a fault of the sink's author"),
    ],
)
def test_what_may_pass_is_tried_again_from_the_checkpoint(
    stage: Stage, operation: str, error: Exception
) -> None:
    world = stage.world
    world.put_many([b"a", b"b"])
    world.create(until=world.put(b"c"), options=SinkOptions(backoff_ms=100))
    failed = fail(stage, operation, error, times=3)
    assert stage.runner().run() is FeedState.FINISHED
    assert len(failed) == 3
    assert stage.sinks.changes == world.changes()
    assert stage.waiting.seconds == [0.1, 0.2, 0.4]


def test_a_failing_sink_is_shown_as_an_error_and_then_forgotten(stage: Stage) -> None:
    world = stage.world
    world.put(b"a")
    world.create()
    runner = stage.runner(budget_ms=10**12)
    stage.sinks.before = lambda operation, _: refuse_until_reported(stage, operation)
    task = Task(runner.run)
    stage.store.wait_until(lambda feed: feed.state is FeedState.ERROR)
    stage.sinks.wait_until(lambda sinks: bool(sinks.changes))
    stage.store.wait_until(lambda feed: feed.state is FeedState.NORMAL and feed.error is None)
    shown = [feed.error.text for feed in stage.store.answers if feed.error is not None]
    assert set(shown) == {"the sink is full"}
    runner.request_stop()
    assert task.result() is FeedState.NORMAL


def refuse_until_reported(stage: Stage, operation: str) -> None:
    if operation == "write" and all(feed.error is None for feed in stage.store.answers):
        raise SinkFailed("the sink is full")


def test_the_budget_ends_the_attempts_and_leaves_the_feed_in_error(stage: Stage) -> None:
    world = stage.world
    world.put(b"a")
    feed = world.create(options=SinkOptions(backoff_ms=10_000))
    fail(stage, "write", SinkFailed("the sink is full"), times=1_000)
    runner = stage.runner(budget_ms=200_000)
    with pytest.raises(SinkFailed, match="the sink is full"):
        runner.run()
    assert stage.waiting.seconds == [10, 20, 40, 60, 60, 10]
    left = world.store.find("copy")
    assert left.state is FeedState.ERROR
    assert left.error is not None
    assert left.error.text == "the sink is full"
    assert left.lease is None
    assert left.checkpoint < world.changes()[0].version
    assert left.checkpoint >= feed.checkpoint
    assert world.safe_point() is not None
    told = runner.statistics()
    assert (told.failures, told.retry_budget_ms, told.problem) == (7, 0, "the sink is full")


def test_success_renews_the_budget(stage: Stage) -> None:
    world = stage.world
    for number in range(5):
        world.put(b"%d" % number)
    world.create(until=world.put(b"last"), options=SinkOptions(batch_records=1, backoff_ms=1_000))
    calls = 0

    def every_other(operation: str, _range_id: int) -> None:
        nonlocal calls
        if operation == "write":
            calls += 1
            if calls % 2:
                raise SinkFailed("not now")

    stage.sinks.before = every_other
    assert stage.runner(budget_ms=1_000).run() is FeedState.FINISHED
    assert stage.waiting.seconds == [1.0] * 6


def test_pauses_grow_to_a_minute_and_last_half_an_hour() -> None:
    backoff = Backoff(100)
    pauses: list[int] = []
    while (pause_ms := backoff.next_ms()) is not None:
        pauses.append(pause_ms)
    assert pauses[:4] == [100, 200, 400, 800]
    assert max(pauses) == 60_000
    assert sum(pauses) == BUDGET_MS


@pytest.mark.parametrize("operation", ["open", "write", "flush"])
@pytest.mark.parametrize(
    "error", [InvalidArgument("no such parameter"), NotAllowed("the token may not write")]
)
def test_what_will_not_pass_is_told_at_once(stage: Stage, operation: str, error: Exception) -> None:
    world = stage.world
    world.put(b"a")
    world.create()
    fail(stage, operation, error)
    with pytest.raises(type(error)):
        stage.runner().run()
    assert stage.waiting.seconds == []
    left = world.store.find("copy")
    assert left.state is FeedState.ERROR
    assert left.error is not None
    assert left.error.text == str(error)
    # Mended, it goes on.
    world.store.resume("copy")
    stage.run_to_present()
    assert stage.sinks.changes == world.changes()


def test_a_sink_is_opened_at_once_so_that_a_bad_one_is_known_before_the_first_change(stage: Stage) -> None:
    stage.world.create()
    fail(stage, "open", InvalidArgument("no such directory"))
    with pytest.raises(InvalidArgument):
        stage.runner().run()


def test_a_sink_that_fails_to_close_does_no_harm(stage: Stage) -> None:
    world = stage.world
    world.put(b"a")
    world.create(until=world.put(b"b"))
    fail(stage, "close", OSError("it does not close"))
    assert stage.runner().run() is FeedState.FINISHED


def test_one_range_that_fails_does_not_hold_up_the_others(stage: Stage) -> None:
    """There is one permit to write, and a range that pauses leaves it to the others."""
    world = stage.world
    world.split(b"m")
    world.put(b"a")
    until = world.put(b"z")
    feed = world.create(until=until, ranges=2, options=SinkOptions(concurrency=1))

    def before(operation: str, range_id: int) -> None:
        if operation == "write" and range_id == feed.ranges[0].id and not stage.sinks.changes:
            raise SinkFailed("not this one")

    stage.sinks.before = before
    assert stage.runner(budget_ms=10**12).run() is FeedState.FINISHED
    assert [change.key for change in stage.sinks.changes] == [b"z", b"a"]


# The stream of changes


def test_a_stream_that_breaks_is_opened_again_behind_what_came(stage: Stage) -> None:
    world = stage.world
    for number in range(40):
        world.put_many([b"%02d" % number, b"other %02d" % number])
    world.create(until=world.put(b"last"), ranges=1)
    requests: list[ChangesRequest] = []

    def breaking(request: ChangesRequest) -> Iterator[ChangeBatch]:
        requests.append(request)
        for number, batch in enumerate(cut(world.read(request))):
            if len(requests) < 8 and number == 5:
                raise Unreachable("the connection was lost")
            yield batch

    assert stage.runner(open_changes=breaking).run() is FeedState.FINISHED
    assert len(requests) == 8
    assert stage.sinks.changes == world.changes()


def cut(batches: Iterator[ChangeBatch]) -> Iterator[ChangeBatch]:
    """The same changes, a commit in each batch."""
    for batch in batches:
        rows = zip(batch.versions, batch.partitions, batch.keys, batch.values, strict=True)
        for through, commit in groupby(rows, itemgetter(0)):
            versions, partitions, keys, values = zip(*commit, strict=True)
            yield ChangeBatch(
                through=through, versions=versions, partitions=partitions, keys=keys, values=values
            )
        yield ChangeBatch(through=batch.through)


def test_a_stream_that_ends_too_early_is_opened_again(stage: Stage) -> None:
    world = stage.world
    for number in range(10):
        world.put(b"%d" % number)
    world.create(until=world.put(b"last"), ranges=1)

    def short(request: ChangesRequest) -> Iterator[ChangeBatch]:
        for number, batch in enumerate(cut(world.read(request))):
            if number == 3:
                return
            yield batch

    assert stage.runner(open_changes=short).run() is FeedState.FINISHED
    assert stage.sinks.changes == world.changes()


def test_a_site_that_does_not_come_back_ends_the_runner(stage: Stage) -> None:
    world = stage.world
    world.create()

    def unreachable(_request: ChangesRequest) -> Iterator[ChangeBatch]:
        raise Unreachable("nobody answers")

    with pytest.raises(Unreachable):
        stage.runner(open_changes=unreachable, budget_ms=5_000).run()
    assert sum(stage.waiting.seconds) == 5
    assert world.store.find("copy").state is FeedState.ERROR


def test_changes_that_were_collected_fail_the_feed_at_once(stage: Stage) -> None:
    world = stage.world
    start = world.put(b"a")
    world.put(b"a")
    world.create(since=start)

    def too_late(request: ChangesRequest) -> Iterator[ChangeBatch]:
        world.safe_points.release("feed/copy")
        world.collect()
        return world.read(request)

    with pytest.raises(VersionCollected):
        stage.runner(open_changes=too_late).run()
    assert stage.waiting.seconds == []
    left = world.store.find("copy")
    assert (left.state, left.lease) == (FeedState.FAILED, None)
    assert left.error is not None
    assert "collected" in left.error.text
    assert world.safe_point() is None


def test_a_feed_that_failed_at_the_store_ends_the_runner(stage: Stage) -> None:
    world = stage.world
    world.create(since=world.put(b"a"))
    stage.sinks.before = lambda operation, _: stop_writing(operation)
    task = Task(stage.runner(budget_ms=10**12).run)
    stage.sinks.wait_until(lambda sinks: bool(sinks.contexts))

    def away(call: str) -> None:
        if call == "report" and world.safe_point() is not None:
            # A day passes in which nothing was renewed; the reader's own hold was lost with its process.
            world.time.advance(86_400_000)
            world.safe_points._readers.clear()
            world.put(b"a")
            world.collect()

    stage.store.before = away
    with pytest.raises(VersionCollected):
        task.result()
    assert world.store.find("copy").state is FeedState.FAILED


def stop_writing(operation: str) -> None:
    if operation == "write":
        raise SinkFailed("nothing goes through")


def test_damage_is_told_and_does_not_fail_the_feed_for_good(stage: Stage) -> None:
    world = stage.world
    world.create()

    def damaged(_request: ChangesRequest) -> Iterator[ChangeBatch]:
        raise Corruption("a record is damaged")

    with pytest.raises(Corruption):
        stage.runner(open_changes=damaged).run()
    assert world.store.find("copy").state is FeedState.ERROR
    assert world.safe_point() is not None


# The store


@pytest.mark.parametrize("error", [StorageFailed("the disk refused"), OutcomeUnknown("no answer came")])
def test_a_report_that_does_not_get_through_is_made_up_for_by_the_next(
    stage: Stage, error: Exception
) -> None:
    world = stage.world
    for number in range(20):
        world.put(b"%d" % number)
    world.create(until=world.put(b"last"))
    calls = 0

    def flaky(call: str) -> None:
        nonlocal calls
        calls += 1
        if call == "report" and calls % 3:
            raise error

    stage.store.before = flaky
    assert stage.runner().run() is FeedState.FINISHED
    assert stage.sinks.changes == world.changes()


def test_a_finish_whose_answer_was_lost_is_still_a_finish(stage: Stage) -> None:
    world = stage.world
    world.create(until=world.put(b"a"))

    class Forgetful(WatchedStore):
        def report(
            self, name: str, holder: str, progress: list[RangeProgress], error: FeedError | None
        ) -> Feed:
            feed = super().report(name, holder, progress, error)
            if feed.state is FeedState.FINISHED:
                raise OutcomeUnknown("no answer came")
            return feed

    assert stage.runner(store=Forgetful(world.store)).run() is FeedState.FINISHED


# Whatever fails


@pytest.mark.parametrize("seed", range(6))
def test_every_change_arrives_whatever_fails_and_keys_keep_their_order(stage: Stage, seed: int) -> None:
    world = stage.world
    for key in (b"d", b"m"):
        world.split(key)
    for number in range(120):
        key = b"%c" % (97 + (number * 7 + seed) % 20)
        if number % 3:
            world.put(key, b"%d" % number)
        else:
            world.delete(key)
    world.create(until=world.put(b"last"), ranges=3, options=SinkOptions(batch_records=4, concurrency=2))
    stage.sinks.before = failing_sometimes(seed)
    assert stage.runner().run() is FeedState.FINISHED
    wanted = by_key(world.changes())
    assert versions(stage.sinks.changes) == versions(world.changes())
    for key, held in by_key(stage.sinks.changes).items():
        assert without_repetitions(held) == wanted[key]


def failing_sometimes(seed: int) -> Callable[[str, int], None]:
    calls = 0

    def before(operation: str, _range_id: int) -> None:
        nonlocal calls
        calls += 1
        if operation in ("open", "write", "flush") and (calls * 2_654_435_761 + seed * 97) % 5 == 0:
            raise SinkFailed("now and then")

    return before


def without_repetitions(held: list[tuple[int, bytes | None]]) -> list[tuple[int, bytes | None]]:
    """A key's history as someone sees it who passes over what is not newer than what came before."""
    newest = 0
    kept = []
    for version, value in held:
        if version > newest:
            newest = version
            kept.append((version, value))
    return kept
