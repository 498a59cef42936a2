"""What a runner promises, checked at every report: by checkers that are shown to catch what breaks them."""

from collections.abc import Sequence
from random import Random

import pytest
from tests.feed.support_feeds import USERS, Task, merge_or_split
from tests.feed.support_runner import Stage, by_key, versions

from floodmark.codec.ordered import encode_namespace
from floodmark.feed.named.feeds import FeedState, RangeProgress, SinkOptions
from floodmark.feed.sinks.base import Sink, SinkContext
from floodmark.model.change import Change
from floodmark.model.errors import SinkFailed
from floodmark.model.version import Version
from floodmark.testing.sinks import MemorySinks


class Violation(AssertionError):
    """A promise was broken."""


def check_reports(stage: Stage) -> None:
    """Before each report: the sink has every change at or below each checkpoint that is reported."""

    def check(progress: Sequence[RangeProgress]) -> None:
        held = versions(stage.sinks.changes)
        for part in progress:
            for change in stage.world.changes():
                inside = part.keys.contains(encode_namespace(USERS) + change.key)
                if inside and change.version <= part.checkpoint and (change.key, change.version) not in held:
                    raise Violation(f"{change.key!r} at {change.version} is not in the sink")

    stage.store.on_report = check


@pytest.mark.parametrize("seed", range(4))
def test_a_checkpoint_is_never_ahead_of_the_sink(seed: int) -> None:
    stage = Stage()
    write_and_run(stage, seed)
    assert len(stage.store.reports) > 5
    assert by_key(stage.sinks.changes).keys() == by_key(stage.world.changes()).keys()


def write_and_run(stage: Stage, seed: int) -> None:
    world, random = stage.world, Random(seed)
    world.split(b"m")
    for number in range(200):
        world.put(b"%c" % random.choice(b"adgjmpsvy"), b"%d" % number)
    world.create(until=world.put(b"last"), options=SinkOptions(batch_records=5))
    check_reports(stage)
    calls = 0

    def before(operation: str, _range_id: int) -> None:
        nonlocal calls
        calls += 1
        if operation == "write" and calls % 5 == 0:
            stage.store.wait_reports(1)
        if operation in ("write", "flush") and calls % 7 == 0:
            raise SinkFailed("now and then")

    stage.sinks.before = before
    assert stage.runner(report_seconds=0.0001).run() is FeedState.FINISHED


def test_the_check_of_checkpoints_finds_a_sink_that_loses_what_it_flushed() -> None:
    class Losing(MemorySinks):
        def keep(self, range_id: int, changes: Sequence[Change], through: Version) -> None:
            super().keep(range_id, changes[1:] if len(self.changes) > 50 else changes, through)

    stage = Stage()
    stage.sinks = Losing()
    with pytest.raises(Violation):
        write_and_run(stage, seed=1)


def test_the_check_of_checkpoints_finds_a_checkpoint_that_does_not_wait_for_the_flush() -> None:
    class Eager:
        """Says that a flush is done, and does it later."""

        def __init__(self, sink: Sink) -> None:
            self._sink = sink
            self._behind = False

        def write(self, changes: Sequence[Change], *, since: Version, through: Version) -> None:
            if self._behind:
                stage.store.wait_reported(since)
                self._sink.flush()
            self._sink.write(changes, since=since, through=through)

        def flush(self) -> None:
            self._behind = True

        def close(self) -> None:
            self._sink.flush()
            self._sink.close()

    class EagerSinks(MemorySinks):
        def open(self, context: SinkContext) -> Sink:
            return Eager(super().open(context))

    stage = Stage()
    stage.sinks = EagerSinks()
    with pytest.raises(Violation):
        write_and_run(stage, seed=1)


# Cutting anew while it runs


@pytest.mark.parametrize("seed", range(3))
def test_a_feed_that_is_cut_anew_while_it_runs_loses_nothing_and_never_goes_back(seed: int) -> None:
    stage, random = Stage(), Random(seed)
    world = stage.world
    world.create(ranges=4, options=SinkOptions(batch_records=3))
    check_reports(stage)
    runner = stage.runner()
    task = Task(runner.run)
    checkpoints = [world.store.find("copy").checkpoint]
    for number in range(120):
        world.put(b"%c" % random.choice(b"adgjmpsvy"), b"%d" % number)
        if number % 15 == 7:
            merge_or_split(world, random)
            stood = world.store.find("copy")
            balanced = world.store.rebalance("copy")
            assert balanced.checkpoint >= stood.checkpoint
        checkpoints.append(world.store.find("copy").checkpoint)
    wanted = world.changes()
    stage.sinks.wait_until(lambda sinks: versions(wanted) <= versions(sinks.changes))
    last = world.store.find("copy").ranges
    stage.sinks.wait_until(
        lambda sinks: {part.id for part in last} <= {context.range_id for context in sinks.contexts}
    )
    runner.request_stop()
    assert task.result() is FeedState.NORMAL
    assert checkpoints == sorted(checkpoints)
    for key, history in by_key(wanted).items():
        newest: Version = 0
        passed = []
        for version, value in by_key(stage.sinks.changes)[key]:
            if version > newest:
                newest = version
                passed.append((version, value))
        assert passed == history


# Rate and statistics


def test_the_rate_is_kept() -> None:
    stage = Stage()
    world = stage.world
    for number in range(10):
        world.put(b"%d" % number, bytes(999))
    until = world.changes()[-1].version
    options = SinkOptions(rate_bytes_max=1_000, batch_records=1)
    world.create(until=until, ranges=1, options=options)
    assert stage.runner().run() is FeedState.FINISHED
    # The bucket is full at first; after it, each batch of 1,000 bytes waits for a second.
    assert stage.waiting.seconds == [1.0] * 9


def test_a_runner_tells_how_it_is_getting_on() -> None:
    stage = Stage()
    world = stage.world
    for number in range(10):
        world.put(b"%d" % number, bytes(99))
    until = world.changes()[-1].version
    world.create(until=until, options=SinkOptions(batch_records=4))
    runner = stage.runner()
    before = runner.statistics()
    assert (before.state, before.changes, before.checkpoint, before.ranges) == (None, 0, 0, [])
    runner.run()
    world.time.set((until >> 18) + 2_500)
    stage.elapsed.advance(2_000)
    after = runner.statistics()
    assert after.state is FeedState.FINISHED
    assert (after.changes, after.bytes, after.batches) == (10, 1_000, 3)
    assert (after.changes_per_second, after.bytes_per_second) == (5.0, 500.0)
    assert (after.checkpoint, after.checkpoint_lag_ms, after.resolved_lag_ms) == (until, 2_500, 2_500)
    assert (after.problem, after.failures, after.buffered_bytes) == (None, 0, 0)
    assert [part.checkpoint for part in after.ranges] == [until]


def test_an_expired_put_is_delivered_as_a_delete() -> None:
    stage = Stage()
    world = stage.world
    second = world.time() // 1000
    world.put(b"short", b"x", expires_at=second + 1)
    until = world.put(b"long", b"y", expires_at=second + 1_000)
    world.create(until=until)
    world.time.advance(5_000)
    stage.runner().run()
    assert [(change.key, change.value) for change in stage.sinks.changes] == [
        (b"short", None),
        (b"long", b"y"),
    ]
