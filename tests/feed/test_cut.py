"""Where a step of a reader ends: between commits, with the changes that it says, and as far as it may."""

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from itertools import groupby, pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.feed.support import DAY_MS, HUGE, SECOND_MS, World, open_world
from tests.site.support import START_MS, HookedEngine, node_of, nothing, open_memory

from floodmark.codec.changelog import count_changes, encode_commit, encode_heartbeat
from floodmark.feed.reading.cut import ChangesCut
from floodmark.model.change import Change, Heartbeat
from floodmark.model.errors import Corruption, VersionCollected
from floodmark.model.ranges import KeyRange
from floodmark.model.version import Version
from floodmark.site import Site
from floodmark.testing.clock import SimulatedTime

NAMESPACES = ("users", "orders")


def cut(
    site: Site,
    since: Version,
    changes_max: int | None = None,
    *,
    until: Version | None = None,
    at_heartbeat: bool = False,
    namespace: str = "users",
) -> ChangesCut:
    return site.host.versions.cut_changes(namespace, since, changes_max, until, at_heartbeat)


def read(site: Site, since: Version, until: Version, namespace: str = "users") -> list[Change]:
    return list(site.changes(namespace, since=since, until=until)) if until > since else []


# Against the stream of changes itself


class Written:
    """A site with some history, and all its heartbeats."""

    def __init__(self, site: Site, time: SimulatedTime) -> None:
        self.site = site
        self.time = time
        self.beats: list[Heartbeat] = []
        self.marks: list[Version] = [0, site.now()]
        for name in NAMESPACES:
            site.create_namespace(name)

    def put(self, chance: Random) -> None:
        """Commit a few changes, or many, or large ones, in one namespace; two partitions make two commits."""
        count = chance.choice((1, 1, 1, 2, 5, 30))
        value = bytes(chance.choice((1, 1, 5_000)))
        rows = {b"%03d" % chance.randrange(200): value for _ in range(count)}
        durability = chance.choice(("fsync", "async"))
        namespace = self.site.namespace(chance.choice(NAMESPACES))
        self.marks.append(namespace.put_many(rows, durability=durability))  # type: ignore[arg-type]

    def beat(self, chance: Random) -> None:
        """Write a heartbeat."""
        self.beats.append(self.site.heartbeat())
        self.marks += [self.beats[-1].through, self.beats[-1].version]

    def split(self, chance: Random) -> None:
        """Cut a partition in two, within a namespace or between two of them."""
        key = chance.choice((b"\x00", b"050", b"100", b"150"))
        name = chance.choice(NAMESPACES)
        starts = {partition.range.start for partition in node_of(self.site).map.partitions}
        row = self.site.host.namespaces.find_namespace(name)
        if row.id.to_bytes(3, "big") + key not in starts:
            self.site.split(name, key)

    def merge(self, chance: Random) -> None:
        """Join two neighbours."""
        partitions = node_of(self.site).map.partitions
        if len(partitions) > 1:
            index = chance.randrange(len(partitions) - 1)
            self.site.merge(partitions[index].id, partitions[index + 1].id)

    def rest(self, chance: Random) -> None:
        """Let time pass."""
        self.time.advance(chance.randrange(1, 2_000))
        self.marks.append(self.site.now())


Step = Callable[[Written, Random], None]
STEPS: Sequence[Step] = (
    *[Written.put] * 6,
    Written.beat,
    Written.split,
    Written.merge,
    Written.rest,
)


def expected_end(changes: Sequence[Change], end: Version, changes_max: int) -> tuple[Version, int]:
    """The end of a step by its definition, from all changes up to `end`."""
    taken = 0
    for version, commit in groupby(changes, lambda change: change.version):
        count = len(list(commit))
        if taken and taken + count > changes_max:
            return version - 1, taken
        taken += count
    return end, taken


@given(
    steps=st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 10**6)), min_size=1, max_size=25),
    seed=st.integers(0, 10**6),
)
def test_step_is_what_the_stream_of_changes_says(steps: list[tuple[Step, int]], seed: int) -> None:
    time = SimulatedTime(START_MS)
    with open_memory(HookedEngine(), time) as site:
        written = Written(site, time)
        for step, number in steps:
            step(written, Random(number))
        chance = Random(seed)
        for _ in range(6):
            since, until = chance.choice(written.marks), chance.choice([None, *written.marks])
            name, changes_max = chance.choice(NAMESPACES), chance.choice((1, 2, 7, 40))
            check_step(written, name, since, until, changes_max)
            check_existence(site, name, since, until)


def check_step(written: Written, name: str, since: Version, until: Version | None, changes_max: int) -> None:
    site = written.site
    found = cut(site, since, changes_max, until=until, namespace=name)
    end = found.resolved if until is None else min(until, found.resolved)
    version, count = expected_end(read(site, since, end, name), end, changes_max)
    assert (found.version, found.changes) == (max(version, since), count)
    assert len(read(site, since, found.version, name)) == count
    at_beat = cut(site, since, changes_max, until=found.version, at_heartbeat=True, namespace=name)
    through = max((beat.through for beat in written.beats if beat.version <= found.version), default=0)
    assert at_beat.version == (through if since < through else found.version)
    assert at_beat.changes == len(read(site, since, at_beat.version, name))


def check_existence(site: Site, name: str, since: Version, until: Version | None) -> None:
    found = cut(site, since, until=until, namespace=name)
    assert found.version == max(since, found.resolved if until is None else min(until, found.resolved))
    assert bool(found.changes) == bool(read(site, since, found.version, name))


def test_large_commit_of_several_rows_is_counted_whole() -> None:
    with open_world() as world:
        since = world.site.now()
        version = world.users.put_many(HUGE)
        found = cut(world.site, since, 10)
        assert found.changes == len(HUGE)
        assert found.version >= version


def test_a_batch_over_partitions_is_a_step_however_small_that_may_be() -> None:
    with open_world() as world:
        for key in (b"b", b"c"):
            world.site.split("users", key)
        since = world.site.now()
        versions = []
        for number in range(3):
            with world.site.atomic() as batch:
                for key in (b"a", b"b", b"c"):
                    batch.put(world.users, key, b"%d" % number)
            versions.append(batch.version)
        for version, following in pairwise([*versions, None]):
            found = cut(world.site, since, 1)
            changes = read(world.site, since, found.version)
            assert found.changes == 3
            assert [(change.key, change.batch) for change in changes] == [
                (key, version) for key in (b"a", b"b", b"c")
            ]
            assert following is None or found.version < following
            since = found.version


# A log that was trimmed


@pytest.fixture
def trimming() -> Iterator[World]:
    """A site that keeps its change log for a second, and its versions for a day."""
    with open_world(timedelta(seconds=1)) as world:
        yield world


def test_step_ends_where_the_log_begins_if_it_was_trimmed(trimming: World) -> None:
    site, users, _, time = trimming
    since = site.now()
    for number in range(5):
        users.put(b"%d" % number, b"1")
    time.advance(10 * SECOND_MS)
    trimmed = site.collect_garbage().log_trimmed_version
    assert trimmed > since
    for number in range(5):
        users.put(b"%d" % number, b"2")
    found = cut(site, since, 2)
    assert (found.version, found.changes) == (trimmed, None)
    assert len(read(site, since, trimmed)) == 5
    whole = cut(site, since)
    assert (whole.version, whole.changes) == (whole.resolved, None)
    counted = cut(site, trimmed, 2)
    assert counted.changes == len(read(site, trimmed, counted.version)) == 2
    heartbeat = site.heartbeat()
    lowered = cut(site, since, at_heartbeat=True)
    assert (lowered.version, lowered.changes) == (heartbeat.through, None)


def test_log_that_is_trimmed_meanwhile_has_no_count(trimming: World) -> None:
    site, users, engine, time = trimming
    since = site.now()
    for number in range(1_200):
        users.put(b"%d" % number, b"1", durability="async")
    site.sync()
    time.advance(10 * SECOND_MS)
    pages = 0

    def trim(operation: str) -> None:
        nonlocal pages
        pages += operation == "scan log"
        if pages == 2:
            engine.before = nothing
            site.collect_garbage()

    engine.before = trim
    found = cut(site, since, 10_000)
    assert found.changes is None
    assert len(read(site, since, found.version)) == 1_200


def test_reader_that_came_too_late_is_told() -> None:
    with open_world() as world:
        since = world.site.now()
        for number in range(3):
            world.users.put(b"a", b"%d" % number)
        world.time.advance(2 * DAY_MS)
        world.site.collect_garbage()
        for changes_max in (None, 10):
            with pytest.raises(VersionCollected):
                cut(world.site, since, changes_max)


# Rows


def test_rows_are_counted_without_their_values() -> None:
    keys = [b"\x00\x00\x01%d" % number for number in range(10)]
    (row,) = encode_commit(keys, [bytes(size) for size in (0, 1, 5_000, 3, 4, 5, 6, 7, 8, 9)])
    assert count_changes(row, KeyRange()) == 10
    assert count_changes(row, KeyRange(keys[3], keys[7])) == 4
    assert count_changes(row, KeyRange(b"\x00\x00\x02", None)) == 0
    beat = Heartbeat(version=3, node=0, wall_ms=1, since=1, through=2, watermark={}, sums={})
    assert count_changes(encode_heartbeat(beat), KeyRange()) == 0


@pytest.mark.parametrize("length", [0, 1, 4, 6, 20])
def test_damaged_rows_are_not_counted(length: int) -> None:
    (row,) = encode_commit([b"abcdef", b"ghi"], [b"1", b"2"])
    with pytest.raises(Corruption):
        count_changes(row[:length], KeyRange())
    with pytest.raises(Corruption):
        count_changes(b"\x09" + row[1:], KeyRange())
