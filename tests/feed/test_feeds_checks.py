"""A feed of a whole namespace is held against heartbeats: what goes astray is named, and nothing else is."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from random import Random
from threading import Event
from typing import Any

import pytest
from msgspec import structs
from tests.feed.support_feeds import USERS, Task, World, merge_or_split, spec
from tests.feed.support_runner import Stage
from tests.waiting import HANG_SECONDS

from floodmark.accounting.account import Doubt
from floodmark.accounting.checks import FINDINGS_KEPT, PARTLY_READ, Checks
from floodmark.accounting.counting import BEATS_MAX
from floodmark.codec.ordered import encode_namespace
from floodmark.codec.values import encode_value
from floodmark.feed.named.feeds import Feed, FeedState, SinkOptions, measure
from floodmark.feed.reading.items import OnDamaged
from floodmark.model.change import Change, Stamp
from floodmark.model.errors import OutcomeUnknown, Unreachable
from floodmark.model.stream import ChangeBatch, ChangesRequest
from floodmark.model.version import Version

Fault = Callable[[ChangeBatch], ChangeBatch]


@pytest.fixture
def stage() -> Stage:
    return Stage()


class Astray:
    """The changes of a world, of which some go astray between the site and the feed."""

    def __init__(self, world: World, fault: Fault) -> None:
        self._world = world
        self._fault = fault

    def read(self, request: ChangesRequest) -> Iterator[ChangeBatch]:
        for batch in self._world.read(request):
            yield self._fault(batch)


def keep(batch: ChangeBatch, rows: Sequence[int]) -> ChangeBatch:
    return replace(
        batch,
        versions=[batch.versions[row] for row in rows],
        partitions=[batch.partitions[row] for row in rows],
        keys=[batch.keys[row] for row in rows],
        values=[batch.values[row] for row in rows],
    )


def lose(key: bytes) -> Fault:
    def fault(batch: ChangeBatch) -> ChangeBatch:
        return keep(batch, [row for row, each in enumerate(batch.keys) if not each.endswith(key)])

    return fault


def double(key: bytes) -> Fault:
    def fault(batch: ChangeBatch) -> ChangeBatch:
        rows = range(len(batch.keys))
        return keep(batch, [row for row in rows for _ in range(1 + batch.keys[row].endswith(key))])

    return fault


def alter(key: bytes) -> Fault:
    def fault(batch: ChangeBatch) -> ChangeBatch:
        values = [
            b"other\0" if each.endswith(key) else value
            for each, value in zip(batch.keys, batch.values, strict=True)
        ]
        return replace(batch, values=values)

    return fault


class Unanswered:
    """A store whose answers get lost now and then, or the reports themselves."""

    def __init__(self, stage: Stage, random: Random) -> None:
        self._store = stage.store
        self._random = random

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def report(self, *report: Any) -> Feed:
        luck = self._random.random()
        if luck < 0.3:
            raise Unreachable("the report was lost")
        feed = self._store.report(*report)
        if luck < 0.6:
            raise OutcomeUnknown("the answer was lost")
        return feed


def run_to(stage: Stage, version: Version, **settings: Any) -> Feed:
    """Run the feed until its checkpoint has passed a version, and stop."""
    runner = stage.runner(**settings)
    task = Task(runner.run)
    stage.store.wait_until(lambda feed: feed.checkpoint >= version)
    runner.request_stop()
    task.result()
    return stage.world.store.find("copy")


def beat(world: World) -> Version:
    """Write a heartbeat; its version."""
    world.time.advance(1_000)
    return world.node.heartbeat().version


def checks_of(feed: Feed) -> Checks:
    assert feed.checks is not None
    return feed.checks


# What goes astray


@pytest.mark.parametrize("fault", [lose, double, alter])
@pytest.mark.parametrize("ranges", [1, 3])
def test_what_goes_astray_on_the_way_is_named_within_two_heartbeats(
    stage: Stage, ranges: int, fault: Callable[[bytes], Fault]
) -> None:
    world = stage.world
    for key in (b"g", b"p"):
        world.split(key)
    beat(world)
    world.create(ranges=ranges)
    for key in (b"a", b"k", b"z"):
        world.put(key)
    start = beat(world)
    assert checks_of(run_to(stage, start)).unchecked >= 1
    astray = world.put_many([b"b", b"lost", b"x"])
    world.put(b"c")
    first = beat(world)
    feed = run_to(stage, first, open_changes=Astray(world, fault(b"lost")).read)
    (finding,) = checks_of(feed).findings
    assert finding.since < astray <= finding.through
    assert (finding.expected_changes, finding.expected_digest) != (finding.got_changes, finding.got_digest)
    assert finding.expected_changes == 4
    assert measure(feed, first, world.time()).alarm == (f"{finding.text}; compare its sink with the site")
    # Then all is well again.
    world.put(b"d")
    second = beat(world)
    later = checks_of(run_to(stage, second))
    assert (later.wrong, later.checked) == (1, checks_of(feed).checked + 1)


@pytest.mark.parametrize("repeat", [0, 2])
def test_what_the_runner_itself_loses_or_doubles_is_named(stage: Stage, repeat: int) -> None:
    world = stage.world
    beat(world)
    world.create()
    run_to(stage, beat(world))

    def decode(batch: ChangeBatch, on_damaged: OnDamaged) -> list[Change]:
        changes = world.decoder.decode(batch, on_damaged)
        return [each for each in changes for _ in range(repeat if each.key == b"astray" else 1)]

    world.put(b"astray")
    world.put(b"other")
    feed = run_to(stage, beat(world), decode=decode)
    (finding,) = checks_of(feed).findings
    assert (finding.expected_changes, finding.got_changes) == (2, 1 + repeat)


def test_a_heartbeat_that_is_lost_is_named_at_the_next(stage: Stage) -> None:
    world = stage.world
    world.create()
    beat(world)
    run_to(stage, beat(world))

    def lose_beats(batch: ChangeBatch) -> ChangeBatch:
        return replace(batch, heartbeats=())

    run_to(stage, beat(world), open_changes=Astray(world, lose_beats).read)
    feed = run_to(stage, beat(world))
    (finding,) = checks_of(feed).findings
    assert finding.expected_changes is None
    assert "a heartbeat" in finding.text


def test_a_loss_before_a_restart_is_named_after_it(stage: Stage) -> None:
    world = stage.world
    beat(world)
    world.create()
    run_to(stage, beat(world))
    world.put(b"lost")
    end = world.put(b"kept")
    run_to(stage, end, open_changes=Astray(world, lose(b"lost")).read)
    # Another process, which knows only what is stored.
    again = Stage(World(world.engine, world.time))
    again.world.put(b"more")
    feed = run_to(again, beat(again.world))
    assert [finding.got_changes for finding in checks_of(feed).findings] == [2]
    # A runner that is started anew at a site that goes on goes on as well.
    again.world.put(b"lost")
    end = again.world.put(b"kept")
    run_to(again, end, open_changes=Astray(again.world, lose(b"lost")).read)
    feed = run_to(again, beat(again.world))
    assert [finding.got_changes for finding in checks_of(feed).findings] == [2, 1]


def test_only_the_last_findings_are_kept(stage: Stage) -> None:
    world = stage.world
    beat(world)
    world.create()
    run_to(stage, beat(world))
    for _ in range(FINDINGS_KEPT + 3):
        world.put(b"lost")
        beat(world)
    end = beat(world)
    checks = checks_of(run_to(stage, end, open_changes=Astray(world, lose(b"lost")).read))
    assert checks.wrong == FINDINGS_KEPT + 3
    assert len(checks.findings) == FINDINGS_KEPT
    assert checks.findings[-1].through > checks.findings[0].through


# Silence


@pytest.mark.parametrize("seed", range(4))
def test_ordinary_runs_are_checked_and_nothing_is_found(stage: Stage, seed: int) -> None:
    """Writes of all kinds, splits, merges, runners that come and go, ranges cut anew, small batches.

    Also reports that get lost, garbage collection and restarts of the site.
    """
    world, random = stage.world, Random(seed)
    options = SinkOptions(batch_records=random.choice((1, 3, 1_000)), linger_ms=random.choice((0, 1)))
    world.create(ranges=random.randrange(1, 5), options=options)
    for turn in range(12):
        for _ in range(random.randrange(1, 12)):
            write_something(world, random)
            if random.random() < 0.15:
                merge_or_split(world, random)
        if random.random() < 0.7:
            beat(world)
        if random.random() < 0.3:
            world.store.rebalance("copy")
        if random.random() < 0.6:
            run_to(stage, world.node.resolved_version(), store=Unanswered(stage, random))
        if random.random() < 0.2:
            world.node.trim_logs(world.collect())
        if turn == 5:
            stage = Stage(World(world.engine, world.time))
            world = stage.world
    beat(world)
    checks = checks_of(run_to(stage, beat(world)))
    assert checks.findings == ()
    assert checks.checked > 0
    assert not checks.beats


def write_something(world: World, random: Random) -> None:
    key = b"%c%d" % (random.choice(b"adgjmpsvy"), random.randrange(4))
    match random.randrange(6):
        case 0:
            world.delete(key)
        case 1:
            world.put_many([b"%c" % letter for letter in random.sample(b"adgjmpsvy", 4)])
        case 2:
            # Expired before anybody reads it.
            world.put(key, expires_at=world.time() // 1000 + 1)
        case 3:
            # Too large for the change log, which only names it.
            world.put(key, bytes(5_000))
        case 4:
            origin = Stamp(world.clock.now(), 9)
            rows = {encode_namespace(USERS) + key: encode_value(b"copied", origin=origin)}
            for partition in world.node.map.partitions:
                inside = {each: value for each, value in rows.items() if partition.range.contains(each)}
                if inside:
                    partition.apply(list(inside), list(inside.values()), durable=True)
        case _:
            world.put(key, b"%d" % random.randrange(100))


def test_what_a_killed_runner_has_delivered_and_not_reported_is_counted_once(stage: Stage) -> None:
    world = stage.world
    beat(world)
    world.create()
    before = checks_of(run_to(stage, beat(world)))
    world.put(b"a")
    beat(world)
    last = world.put(b"b")

    def hear_nothing(call: str) -> None:
        if call == "report":
            raise Unreachable("nobody hears it")

    stage.store.before = hear_nothing
    runner = stage.runner()
    task = Task(runner.run)
    stage.wait_delivered(last)
    runner.request_stop()
    task.result()
    assert world.store.find("copy").checkpoint < last
    stage.store.before = lambda _: None
    checks = checks_of(run_to(stage, beat(world)))
    assert [change.key for change in stage.sinks.changes].count(b"b") == 2
    assert (checks.wrong, checks.checked) == (0, before.checked + 2)


def test_an_idle_namespace_is_checked_too(stage: Stage) -> None:
    world = stage.world
    world.create()
    for _ in range(5):
        end = beat(world)
    checks = checks_of(run_to(stage, end))
    assert (checks.unchecked, checks.checked, checks.wrong) == (1, 4, 0)


def test_ranges_that_are_far_apart_are_checked_and_little_is_kept(stage: Stage) -> None:
    """One range is held up while the other goes on for many heartbeats, over a split of its own keys."""
    world = stage.world
    world.split(b"m")
    beat(world)
    world.create(ranges=2)
    run_to(stage, beat(world))
    slow, _fast = world.store.find("copy").ranges
    released = Event()
    stage.sinks.before = lambda _, range_id: held_up(released) if range_id == slow.id else None
    runner = stage.runner()
    task = Task(runner.run)
    for number in range(300):
        world.put_many([b"a%d" % number, b"z%d" % number])
        if number == 100:
            world.split(b"b")
        end = beat(world)
    stage.store.wait_until(lambda feed: feed.ranges[1].checkpoint >= end)
    feed = world.store.find("copy")
    assert feed.checkpoint < end
    assert len(checks_of(feed).beats) <= BEATS_MAX
    assert all(len(part.counted.entries) <= BEATS_MAX + 1 for part in feed.ranges if part.counted)
    released.set()
    stage.store.wait_until(lambda feed: feed.checkpoint >= end)
    runner.request_stop()
    task.result()
    checks = checks_of(world.store.find("copy"))
    assert (checks.wrong, checks.beats) == (0, ())
    assert checks.checked > BEATS_MAX // 4


def held_up(released: Event) -> None:
    assert released.wait(HANG_SECONDS)


# What cannot be checked


@pytest.mark.parametrize("keys", [{"prefix": b"a"}, {"start_key": b"a"}, {"end_key": b"z"}])
def test_a_feed_of_some_keys_says_that_it_is_not_checked(stage: Stage, keys: dict[str, Any]) -> None:
    world = stage.world
    world.create(**keys)
    world.put(b"abc")
    end = beat(world)
    feed = run_to(stage, end)
    assert feed.checks is None
    assert measure(feed, end, world.time()).checks.unchecked_reason == PARTLY_READ


def test_what_was_caught_up_by_a_scan_is_not_checked(stage: Stage) -> None:
    world = stage.world
    world.create()
    beat(world)
    run_to(stage, beat(world))
    world.put(b"a", b"1")
    world.put(b"a", b"2")
    end = beat(world)
    world.node.trim_logs(end)
    world.put(b"b")
    run_to(stage, beat(world))
    world.put(b"c")
    checks = checks_of(run_to(stage, beat(world)))
    assert (checks.wrong, checks.reason) == (0, Doubt.SCAN)
    world.put(b"d")
    later = checks_of(run_to(stage, beat(world)))
    assert later.checked == checks.checked + 1


def test_a_runner_that_does_not_count_leaves_an_interval_unchecked(stage: Stage) -> None:
    world = stage.world
    world.create()
    beat(world)
    run_to(stage, beat(world))
    world.put(b"a")
    beat(world)
    world.store.acquire("copy", "runner", 10)
    feed = world.move()
    world.store.release("copy", "runner")
    world.put(b"b")
    later = checks_of(run_to(stage, beat(world)))
    assert (later.wrong, later.reason) == (0, Doubt.UNCOUNTED)
    assert later.unchecked == checks_of(feed).unchecked + 1


def test_a_feed_that_goes_on_elsewhere_begins_anew_and_keeps_what_was_found(stage: Stage) -> None:
    world = stage.world
    beat(world)
    world.create()
    run_to(stage, beat(world))
    world.put(b"lost")
    run_to(stage, beat(world), open_changes=Astray(world, lose(b"lost")).read)
    world.store.pause("copy")
    world.put(b"skipped")
    beat(world)
    feed = world.store.resume("copy", world.node.resolved_version())
    assert feed.state is FeedState.NORMAL
    assert checks_of(feed).wrong == 1
    world.put(b"a")
    beat(world)
    checks = checks_of(run_to(stage, beat(world)))
    assert (checks.wrong, checks.reason) == (1, Doubt.FIRST)


def test_a_feed_that_was_stored_before_there_were_checks_begins_with_none(stage: Stage) -> None:
    world = stage.world
    feed = structs.replace(world.create(), checks=None)
    assert str(measure(feed, feed.checkpoint, world.time()).checks) == "no: no heartbeat has come yet"


def test_a_whole_feed_is_one_without_bounds() -> None:
    assert spec().is_whole
    assert spec(prefix=b"").is_whole
    assert not spec(prefix=b"a").is_whole
