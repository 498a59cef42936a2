"""The three ways to catch up give the same stream: from the tail, from the log, and by a scan.

Random histories are followed while they are written, read from the log afterwards, and read once more
when the log is gone.  Nothing but the partition may differ: a scan knows only the present one.
"""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.feed.support import (
    DAY_MS,
    HOUR_MS,
    LARGE,
    SECOND_MS,
    Follower,
    RawChange,
    World,
    delivered,
    open_world,
    raw_changes,
    read_batches,
    request_of,
    trim_log,
)
from tests.site.support import host_of

from floodmark.feed.reading.reader import ChangeReader
from floodmark.model.errors import PartitionNotFound
from floodmark.model.stream import ChangeBatch, Way
from floodmark.model.version import Version
from floodmark.site import Namespace

LOG_RETENTION = timedelta(minutes=1)
KEYS = [b"a", b"b", b"bb", b"c", b"d" * 8, b"d" * 9, b"e", b"\xff"]
VALUES = [b"", b"1", b"two", LARGE, b"x" * 4096]

Step = tuple[str, int, int, int]

steps = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "put",
                "put",
                "async",
                "many",
                "delete",
                "range",
                "ttl",
                "split",
                "merge",
                "beat",
                "later",
                "read",
            ]
        ),
        st.integers(0, len(KEYS) - 1),
        st.integers(0, len(VALUES) - 1),
        st.integers(0, 1),
    ),
    min_size=1,
    max_size=40,
)


def take_step(world: World, spaces: list[Namespace], step: Step) -> None:
    """Do one thing that a user may do."""
    kind, first, second, which = step
    space, key, value = spaces[which], KEYS[first], VALUES[second]
    if kind == "put":
        space.put(key, value)
    elif kind == "async":
        space.put(key, value, durability="async")
    elif kind == "many":
        space.put_many({KEYS[index]: value for index in range(0, first + 1)})
    elif kind == "delete":
        space.delete(key, durability="async" if which else "fsync")
    elif kind == "range":
        space.delete_range(key)
    elif kind == "ttl":
        space.put_many({key: value, KEYS[-1]: b"1"}, ttl=timedelta(minutes=10 * second + 1))
    elif kind == "split":
        try:
            world.site.split(space.name, key)
        except PartitionNotFound:
            assert any(partition.range.start.endswith(key) for partition in world.site.partitions())
    elif kind == "merge":
        partitions = world.site.partitions()
        if len(partitions) > 1:
            left = first % (len(partitions) - 1)
            world.site.merge(partitions[left].id, partitions[left + 1].id)
    elif kind == "beat":
        world.site.heartbeat()
    elif kind == "later":
        world.time.advance(first * 3 * SECOND_MS)


class RawFollower:
    """Follows by batches, as a server would, and keeps them as they are."""

    def __init__(self, world: World, namespace: str | None, *, before_images: bool) -> None:
        self._site = world.site
        request = request_of(world.site, namespace, follow=True, before_images=before_images)
        self._batches: Iterator[ChangeBatch] = host_of(world.site).changes(request)
        self._through: Version = 0
        self.batches: list[ChangeBatch] = []

    def catch_up(self) -> None:
        self._site.sync()
        target = self._site.resolved_version()
        while self._through < target:
            batch = next(self._batches)
            assert batch.through >= self._through
            self._through = batch.through
            self.batches.append(batch)


@given(steps=steps)
def test_tail_log_and_scan_give_the_same_stream(steps: list[Step]) -> None:
    with open_world(LOG_RETENTION) as world:
        spaces = [world.users, world.site.create_namespace("orders")]
        followers = {
            (namespace, images): RawFollower(world, namespace, before_images=images)
            for namespace in (None, "users", "orders")
            for images in (False, True)
        }
        for follower in followers.values():
            follower.catch_up()
        for step in steps:
            take_step(world, spaces, step)
            if step[0] == "read":
                for follower in followers.values():
                    follower.catch_up()
        for follower in followers.values():
            follower.catch_up()
        until = world.site.resolved_version()
        assert set(delivered(world.site)) <= {Way.TAIL}
        logged = {
            scope: read_batches(world.site, scope[0], until=until, before_images=scope[1])
            for scope in followers
        }
        heard = list(world.site.changes(until=until))
        assert trim_log(world) >= until
        rows_by_log = len(heard)
        for scope, follower in followers.items():
            scanned = read_batches(world.site, scope[0], until=until, before_images=scope[1])
            assert {batch.way for batch in logged[scope]} == {Way.LOG}
            assert {batch.way for batch in scanned} <= {Way.SCAN}
            assert raw_changes(follower.batches) == raw_changes(logged[scope]) == raw_changes(scanned)
        assert len(raw_changes(logged[None, False])) == rows_by_log
        check_partitions(world, logged[None, False], followers[None, False].batches)


def check_partitions(world: World, logged: list[ChangeBatch], tail: list[ChangeBatch]) -> None:
    """Log and tail agree on who wrote a change; the scan names who has its key now."""
    written = [partition for batch in logged for partition in batch.partitions]
    assert written == [partition for batch in tail for partition in batch.partitions]
    ranges = {partition.id: partition.range for partition in world.site.partitions()}
    for batch in read_batches(world.site):
        for key, partition in zip(batch.keys, batch.partitions, strict=True):
            assert ranges[partition].contains(key)


@given(before=steps, after=steps)
def test_scan_gives_the_log_s_stream_also_when_older_versions_were_collected(
    before: list[Step], after: list[Step]
) -> None:
    """A safe point stands where the stream begins, and garbage collection goes right up to it."""
    with open_world(LOG_RETENTION) as world:
        spaces = [world.users, world.site.create_namespace("orders")]
        for step in before:
            take_step(world, spaces, step)
        world.time.advance(HOUR_MS)
        since = world.site.now()
        world.site.hold_safe_point("reader", since, lifetime=timedelta(days=99))
        for step in after:
            take_step(world, spaces, step)
        world.site.sync()
        until = world.site.resolved_version()
        expected = raw_changes(read_batches(world.site, since=since, until=until, before_images=True))
        world.time.advance(2 * DAY_MS)
        report = world.site.collect_garbage()
        assert report.log_trimmed_version >= until
        batches = read_batches(world.site, since=since, until=until, before_images=True)
        assert {batch.way for batch in batches} <= {Way.SCAN}
        assert raw_changes(batches) == expected


# A scan in trouble


def fill(world: World, commits: int, keys: int) -> list[RawChange]:
    """Overwrite some keys a few times, and read what was written from the log."""
    for commit in range(commits):
        world.time.advance(SECOND_MS)
        world.users.put_many({b"key-%04d" % key: b"%d" % commit * 50 for key in range(keys)})
    return raw_changes(read_batches(world.site, "users"))


def spilling_reader(world: World, directory: Path, sort_bytes_max: int) -> ChangeReader:
    host = host_of(world.site)
    return ChangeReader(
        host.node,
        host.safe_points,
        host.catalog.is_live,
        sort_bytes_max=sort_bytes_max,
        scan_rate_bytes_max=None,
        sort_directory=directory,
    )


@pytest.mark.parametrize("sort_bytes_max", [1, 2_000, 100_000])
def test_scan_that_spills_to_disk_gives_the_same_stream(tmp_path: Path, sort_bytes_max: int) -> None:
    with open_world(LOG_RETENTION) as world:
        expected = fill(world, commits=6, keys=120)
        trim_log(world)
        reader = spilling_reader(world, tmp_path, sort_bytes_max)
        batches = list(reader.read(request_of(world.site, "users")))
        assert raw_changes(batches) == expected
        assert {batch.way for batch in batches} == {Way.SCAN}
        assert list(tmp_path.iterdir()) == []


def test_scan_that_is_left_early_frees_its_files(tmp_path: Path) -> None:
    with open_world(LOG_RETENTION) as world:
        fill(world, commits=3, keys=1500)
        trim_log(world)
        reader = spilling_reader(world, tmp_path, 10_000)
        batches = reader.read(request_of(world.site, "users"))
        first = next(batches)
        assert not first.keys, "a reader may leave before the last key was read"
        assert reader.statistics().open
        del batches
        assert not reader.statistics().open


def test_scan_is_not_disturbed_by_what_is_written_meanwhile() -> None:
    with open_world(LOG_RETENTION) as world:
        expected = fill(world, commits=4, keys=1200)
        trim_log(world)
        until = world.site.resolved_version()
        stream = host_of(world.site).changes(request_of(world.site, "users"))
        batches = []
        for number, batch in enumerate(stream):
            batches.append(batch)
            world.users.put_many({b"key-%04d" % key: b"new" for key in range(0, 1200, 7)})
            world.users.delete(b"key-0001")
            if number % 2:
                world.site.split("users", b"key-%04d" % (number * 100))
        assert len(batches) > 4
        assert [change for change in raw_changes(batches) if change.version <= until] == expected
        assert {change.version for change in raw_changes(batches) if change.version > until} == set()


def test_follower_that_begins_with_a_scan_goes_on_with_the_log_and_the_tail() -> None:
    with open_world(LOG_RETENTION) as world:
        fill(world, commits=3, keys=5)
        trim_log(world)
        follower = Follower(world.site, "users")
        follower.take()
        while len(follower.changes) + len(follower.ahead) < 7:
            follower.take()
        for _ in range(3):
            world.users.put(b"key-0001", b"meanwhile")
        follower.catch_up()
        world.users.put(b"key-0001", b"live")
        follower.catch_up()
        assert [change.version for change in follower.changes] == [
            change.version for change in world.site.changes("users")
        ]
        assert delivered(world.site)[Way.TAIL] >= 1


def test_follower_whose_log_is_trimmed_behind_its_back_misses_nothing() -> None:
    """It does not read for a long time; neither the tail nor the log reach back to it then."""
    with open_world(LOG_RETENTION) as world:
        node = host_of(world.site).node
        node.committer.tail._bytes_max = 10_000
        follower = Follower(world.site, "users")
        follower.catch_up()
        written = [world.users.put(b"key-%d" % (index % 9), b"x" * 500) for index in range(100)]
        trim_log(world)
        written.append(world.users.put(b"key-0", b"last"))
        follower.catch_up()
        assert [change.version for change in follower.changes] == written
        assert delivered(world.site) == {Way.SCAN: 101}


def test_tail_serves_a_follower_even_when_the_log_was_trimmed() -> None:
    with open_world(LOG_RETENTION) as world:
        follower = Follower(world.site, "users")
        follower.catch_up()
        written = [world.users.put(b"key-%d" % (index % 9), b"x" * 500) for index in range(100)]
        trim_log(world)
        follower.catch_up()
        assert [change.version for change in follower.changes] == written
        assert delivered(world.site) == {Way.TAIL: 100}


def test_scan_spends_its_rate() -> None:
    """As many bytes as the keys have versions, however few changes come of it."""
    waits: list[float] = []

    class Impatient:
        def wait(self, seconds: float) -> bool:
            waits.append(seconds)
            return False

    with open_world(LOG_RETENTION) as world, pytest.MonkeyPatch.context() as patch:
        fill(world, commits=5, keys=1000)
        since = world.site.now()
        last = world.users.put(b"key-0000", b"last")
        trim_log(world)
        host = host_of(world.site)
        reader = ChangeReader(host.node, host.safe_points, host.catalog.is_live, scan_rate_bytes_max=50_000)
        patch.setattr("floodmark.feed.reading.reader.Event", Impatient)
        found = raw_changes(reader.read(request_of(world.site, "users", since=since)))
        assert [change.version for change in found] == [last]
        # Between 70 and 100 bytes for each of 5,000 versions, less the second that comes for free.
        assert 7 - 1 < sum(waits) < 10 - 1


@pytest.mark.parametrize(
    ("start", "end"), [(b"", b"key-0100"), (b"key-0100", b"key-0101"), (b"key-0299", None), (b"x", None)]
)
def test_key_range_of_a_scan_is_a_part_of_the_whole(start: bytes, end: bytes | None) -> None:
    with open_world(LOG_RETENTION) as world:
        fill(world, commits=3, keys=300)
        trim_log(world)
        part = list(world.site.changes("users", start_key=start, end_key=end))
        assert part == [
            change
            for change in world.site.changes("users")
            if change.key >= start and (end is None or change.key < end)
        ]
