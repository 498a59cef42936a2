"""A reader that stands still: it costs the writers nothing, and memory only up to its settings."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.feed.support import LARGE, delivered, open_world, read_batches, trim_log
from tests.site.support import host_of

import floodmark
from floodmark.feed.reading.columns import BATCH_BYTES_MAX
from floodmark.model.change import Change, Resolved
from floodmark.model.limits import MIB, TAIL_BYTES_MAX
from floodmark.model.stream import Way
from floodmark.site import Namespace, Site

WARM_MIB = 60
WRITTEN_MIB = 200
COMMIT = 250
LOG_RETENTION = timedelta(minutes=1)
# A stream that was left in the middle of a batch holds a page of the log, the batch and its decoded
# changes, or a piece of the tail that the tail itself has let go since, with a batch of it.
STREAM_BYTES_MAX = max(3 * BATCH_BYTES_MAX, TAIL_BYTES_MAX + 2 * BATCH_BYTES_MAX)
# What RocksDB and the allocator take by themselves in this test, measured without a reader: 20 MiB.
NOISE_BYTES_MAX = 40 * MIB


class Load:
    """Writes records of a kilobyte, each of which says its number."""

    def __init__(self, site: Site, users: Namespace) -> None:
        self._site = site
        self._users = users
        self.written = 0
        self.resident_max = 0

    def write(self, mib: int) -> None:
        """Write so much, and look at the memory all the time."""
        process = psutil.Process()
        for number in range(mib * MIB // 1000 // COMMIT):
            numbers = range(self.written, self.written + COMMIT)
            self._users.put_many(
                {b"key-%08d" % each: b"%08d" % each * 125 for each in numbers}, durability="async"
            )
            self.written += COMMIT
            if number % 40 == 0:
                self.resident_max = max(self.resident_max, process.memory_info().rss)
        self._site.heartbeat()

    def check(self, stream: Iterator[Any], first: int) -> None:
        """Read on to the end: everything is there, in order."""
        expected = first
        for item in stream:
            if isinstance(item, Change):
                assert item.key == b"key-%08d" % expected
                expected += 1
            elif expected == self.written:
                return


def catch_up(stream: Iterator[Any], site: Site) -> None:
    """Read up to a marker at the present."""
    present = site.resolved_version()
    while not isinstance(item := next(stream), Resolved) or item.version < present:
        pass


@pytest.mark.slow
def test_blocked_followers_cost_bounded_memory_and_miss_nothing(tmp_path: Path) -> None:
    with floodmark.open(tmp_path / "oslo", site="oslo", background=False) as site:
        load = Load(site, site.create_namespace("users"))
        load.write(WARM_MIB)
        assert sum(1 for _ in site.changes("users")) == load.written
        since, first = site.now(), load.written
        load.resident_max = 0
        load.write(1)
        before = load.resident_max

        # One waits at a marker, one is left in a batch of the tail, and one in a page of the log.
        waiting, in_tail, in_log = (
            site.changes("users", since=since, follow=True, resolved_markers=True) for _ in range(3)
        )
        catch_up(waiting, site)
        catch_up(in_tail, site)
        reached = load.written
        load.write(10)
        assert isinstance(next(in_tail), Change)
        assert isinstance(next(in_log), Change)
        ways = [reader.way for reader in site.statistics().readers.open]
        assert sorted(ways) == [Way.LOG, Way.LOG, Way.TAIL]

        load.write(WRITTEN_MIB)
        grown = load.resident_max - before
        assert grown < TAIL_BYTES_MAX + 3 * STREAM_BYTES_MAX + NOISE_BYTES_MAX
        assert host_of(site).node.committer.tail._bytes <= TAIL_BYTES_MAX
        load.check(waiting, reached)
        load.check(in_tail, reached + 1)
        load.check(in_log, first + 1)


def test_writers_do_as_many_steps_with_blocked_followers_as_without() -> None:
    """Counted in operations of the engine: a reader that stands still adds none to a commit."""

    def operations(followers: int) -> list[str]:
        with open_world() as world:
            streams = [
                world.site.changes("users", follow=True, resolved_markers=True) for _ in range(followers)
            ]
            for stream in streams:
                next(stream)
            seen: list[str] = []
            world.engine.before = seen.append
            for index in range(200):
                world.users.put(b"key", b"%d" % index, durability="async" if index % 2 else "fsync")
                world.users.put_many({b"a": LARGE, b"b": b"%d" % index})
            return seen

    assert operations(5) == operations(0)


# What one batch holds


@pytest.mark.parametrize("trimmed", [False, True], ids=["log", "scan"])
def test_batch_of_changes_stays_near_its_bytes(trimmed: bool) -> None:
    with open_world(log_retention=LOG_RETENTION) as world:
        for index in range(40):
            world.users.put(b"large-%d" % index, b"x" * MIB)
            world.users.put_many({b"many-%d" % key: b"y" * 4000 for key in range(100)})
        if trimmed:
            trim_log(world)
        batches = read_batches(world.site, "users")
        sizes = [sum(map(len, batch.keys)) + sum(map(len, batch.values)) for batch in batches]
        assert sum(sizes) > 50 * MIB
        assert max(sizes) <= BATCH_BYTES_MAX + 2 * MIB
        assert set(delivered(world.site)) == {Way.SCAN if trimmed else Way.LOG}


@pytest.mark.parametrize("trimmed", [False, True], ids=["log", "scan"])
def test_before_images_count_in_the_size_of_a_batch(trimmed: bool) -> None:
    """A deletion takes a few bytes; what it deleted may be large."""
    with open_world(log_retention=LOG_RETENTION) as world:
        for index in range(60):
            world.users.put(b"key-%d" % index, b"x" * MIB)
        since = world.site.now()
        for index in range(60):
            world.users.delete(b"key-%d" % index)
        if trimmed:
            trim_log(world)
        batches = read_batches(world.site, "users", since=since, before_images=True)
        sizes = [sum(len(before or b"") for before in batch.befores or ()) for batch in batches]
        assert sum(sizes) > 60 * MIB
        assert max(sizes) <= BATCH_BYTES_MAX + 2 * MIB


def test_streams_that_are_forgotten_let_go_of_everything() -> None:
    with open_world() as world:
        world.users.put(b"key", b"1")
        for _ in range(20):
            stream = world.site.changes("users", follow=True)
            next(stream)
            world.site.changes("users", follow=True)
        del stream
        assert world.site.statistics().readers.open == []
        assert host_of(world.site).safe_points._readers == {}
        assert not host_of(world.site).node.committer.tail.is_open
