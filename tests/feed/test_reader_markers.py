"""Resolved markers, heartbeats, and commits that are cut: how far a reader really is.

A marker is a checkpoint.  What was delivered before it and what a stream that resumes at it delivers
make the whole history, with nothing missing and nothing doubled.
"""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from tests.feed.support import (
    HOUR_MS,
    HUGE,
    LARGE,
    SECOND_MS,
    Follower,
    World,
    delivered,
    open_world,
    raw_changes,
    read_batches,
    trim_log,
)

from floodmark.model.change import Change, Heartbeat, Resolved
from floodmark.model.stream import Way
from floodmark.model.version import Version

LOG_RETENTION = timedelta(minutes=1)


def write_history(world: World) -> None:
    """Commits of all sizes, some of them cut in several rows, over splits and merges."""
    users = world.users
    for index in range(5):
        world.time.advance(SECOND_MS)
        users.put(b"key-%d" % index, b"%d" % index)
        users.put_many({b"many-%d" % key: b"%d" % index for key in range(20)})
        if index % 2:
            world.site.split("users", b"many-%d" % index)
        users.put(b"large", LARGE * 10)
    users.put_many(HUGE)
    users.delete_range(b"many", b"many-3")
    left, right, *_ = world.site.partitions()
    world.site.merge(left.id, right.id)
    users.put(b"key-1", b"last")


def key_of(change: Change) -> tuple[Version, bytes, bytes | None]:
    return change.version, change.key, change.value


def check_markers(items: list[Any], resume: Any) -> int:
    """Resume at each marker; how many were in the stream."""
    changes = [key_of(item) for item in items if isinstance(item, Change)]
    assert changes == sorted(changes, key=lambda change: change[:2])
    before: list[Any] = []
    latest: Version = 0
    markers: set[tuple[Version, int]] = set()
    for item in items:
        if isinstance(item, Change):
            assert item.version > latest, "a change came behind its marker"
            before.append(key_of(item))
        elif isinstance(item, Resolved):
            assert item.version >= latest, "a marker went back"
            latest = item.version
            if (latest, len(before)) not in markers:
                markers.add((latest, len(before)))
                later = [key_of(change) for change in resume(latest)]
                overlap = len(before) + len(later) - len(changes)
                assert before + later == changes, f"{overlap} more changes than there are"
    return len(markers)


@pytest.mark.parametrize("trimmed", [False, True], ids=["log", "scan"])
def test_resuming_at_any_marker_loses_nothing_and_doubles_nothing(trimmed: bool) -> None:
    with open_world(LOG_RETENTION) as world:
        write_history(world)
        end = world.site.now()
        if trimmed:
            trim_log(world)
        items = list(world.site.changes("users", until=end, resolved_markers=True))
        markers = check_markers(items, lambda since: world.site.changes("users", since=since, until=end))
        assert markers >= 2
        assert isinstance(items[-1], Resolved)
        assert set(delivered(world.site)) == {Way.SCAN if trimmed else Way.LOG}


def test_markers_of_a_follower_are_checkpoints() -> None:
    with open_world() as world:
        stream = world.site.changes("users", follow=True, resolved_markers=True)
        items: list[Any] = []

        def catch_up() -> None:
            target = world.site.resolved_version()
            while not items or not isinstance(items[-1], Resolved) or items[-1].version < target:
                items.append(next(stream))

        catch_up()
        write_history(world)
        catch_up()
        for index in range(20):
            world.users.put(b"key-%d" % index, b"more", durability="async" if index % 3 else "fsync")
            if index % 4 == 0:
                catch_up()
        world.site.sync()
        catch_up()
        assert delivered(world.site)[Way.TAIL] >= 20
        end = items[-1].version
        assert check_markers(items, lambda since: world.site.changes("users", since=since, until=end)) > 5


def test_marker_is_never_ahead_of_an_asynchronous_write() -> None:
    with open_world() as world:
        follower = Follower(world.site, "users")
        follower.catch_up()
        for index in range(10):
            version = world.users.put(b"key", b"%d" % index, durability="async")
            assert follower.checkpoint < version
            while not follower.changes or follower.changes[-1].version < version:
                follower.take()
                assert follower.checkpoint < version or follower.changes[-1].version == version


def test_stream_without_changes_still_has_a_marker_at_its_end() -> None:
    with open_world() as world:
        world.users.put(b"key", b"1")
        until = world.site.now()
        found = list(world.site.changes("users", prefix=b"none", until=until, resolved_markers=True))
        assert found == [Resolved(until)]


# Commits that are larger than a batch


@pytest.mark.parametrize("before_images", [False, True])
@pytest.mark.parametrize("way", [Way.LOG, Way.SCAN])
def test_commit_over_partitions_that_is_larger_than_a_batch_comes_whole(
    way: Way, before_images: bool
) -> None:
    with open_world(LOG_RETENTION) as world:
        for key in (b"huge-0500", b"huge-1000"):
            world.site.split("users", key)
        since = world.users.put(b"before", b"1")
        versions = [world.users.put_many(HUGE), world.users.put(b"between", b"1"), world.users.put_many(HUGE)]
        if way is Way.SCAN:
            trim_log(world)
        batches = read_batches(world.site, "users", since=since, before_images=before_images)
        assert {batch.way for batch in batches} == {way}
        commits = [(version, batch.through) for batch in batches for version in set(batch.versions)]
        assert sorted(version for version, _ in commits) == versions, "a commit came in two batches"
        assert all(version <= through for version, through in commits)
        assert sum(len(batch.keys) for batch in batches) == 2 * len(HUGE) + 1


def test_huge_commit_comes_whole_from_the_tail() -> None:
    with open_world() as world:
        follower = Follower(world.site, "users")
        follower.catch_up()
        # More than a batch, and less than half of what the tail holds.
        commit = {key: HUGE[key] for key in sorted(HUGE)[:1500]}
        for _ in range(3):
            world.users.put_many(commit)
            follower.catch_up()
        assert delivered(world.site) == {Way.TAIL: 3 * len(commit)}
        assert [change.key for change in follower.changes] == 3 * sorted(commit)


@pytest.mark.parametrize("beyond_ms", [0, 1, HOUR_MS], ids=["exactly there", "just behind", "far behind"])
def test_log_that_is_trimmed_in_the_middle_of_a_commit_loses_and_doubles_nothing(beyond_ms: int) -> None:
    """The consumer has half of a commit when the log is trimmed up to the commit's own version."""
    with open_world(LOG_RETENTION) as world:
        world.time.advance(HOUR_MS)
        version = world.users.put_many(HUGE)
        stream = world.site.changes("users")
        first = next(stream)
        world.time.advance(LOG_RETENTION // timedelta(milliseconds=1) + beyond_ms)
        trimmed = world.site.collect_garbage().log_trimmed_version
        assert trimmed == version if not beyond_ms else trimmed > version
        found = [first, *stream]
        assert len(found) == len(HUGE)
        assert {change.key: change.value for change in found} == HUGE


@pytest.mark.parametrize("taken", range(0, 60, 7))
def test_log_that_is_trimmed_under_a_reader_loses_and_doubles_nothing(taken: int) -> None:
    """Rows large enough that the log has many pages, and a trim at any place of the reading."""
    with open_world(LOG_RETENTION) as world:
        written = []
        for index in range(60):
            world.time.advance(SECOND_MS)
            version = world.users.put_many({b"a-%d" % key: b"%d" % index * 1000 for key in range(70)})
            written += [version] * 70
            if index % 20 == 10:
                world.site.split("users", b"a-%d" % (index % 7))
        stream = world.site.changes("users")
        found = [next(stream).version for _ in range(taken * 70)]
        world.site.collect_garbage()
        found += [next(stream).version for _ in range(100)]
        trim_log(world)
        found += [change.version for change in stream]
        assert sorted(found) == found
        assert len(found) == len(written)
        assert set(found) == {change.version for change in world.site.changes("users")}


def test_markers_of_a_stream_that_falls_back_to_a_scan_are_checkpoints() -> None:
    with open_world(LOG_RETENTION) as world:
        write_history(world)
        end = world.site.now()
        stream = world.site.changes("users", until=end, resolved_markers=True)
        items: list[Any] = [next(stream) for _ in range(500)]
        trim_log(world)
        items += stream
        assert set(delivered(world.site)) == {Way.LOG, Way.SCAN}
        check_markers(items, lambda since: world.site.changes("users", since=since, until=end))


# Heartbeats


def heartbeats_and_changes(world: World) -> tuple[list[Any], list[Version], list[Heartbeat]]:
    written, beats = [], []
    for index in range(12):
        world.time.advance(SECOND_MS)
        written.append(world.users.put(b"key-%d" % index, b"1"))
        if index % 3 == 1:
            beats.append(world.site.heartbeat())
        if index == 6:
            world.site.split("users", b"key-5")
    return list(world.site.changes(heartbeats=True)), written, beats


def test_heartbeats_stand_at_their_places() -> None:
    with open_world() as world:
        items, written, beats = heartbeats_and_changes(world)
        assert [item.version for item in items] == sorted(item.version for item in items)
        assert [item.version for item in items if isinstance(item, Change)] == written
        assert [item for item in items if isinstance(item, Heartbeat) and item.log is None] == beats
        assert len([item for item in items if isinstance(item, Heartbeat) and item.log is not None]) == 1


def test_heartbeats_account_for_the_changes_between_them() -> None:
    with open_world() as world:
        items, _, _ = heartbeats_and_changes(world)
        accounts = [item for item in items if isinstance(item, Heartbeat) and item.since and item.log is None]
        assert accounts
        sealed = [item for item in items if isinstance(item, Heartbeat) and item.log is not None]
        for beat in accounts:
            counted = sum(sums.all.changes for sums in beat.sums.values())
            counted += sum(
                sums.all.changes
                for seal in sealed
                if beat.since < seal.through <= beat.through
                for sums in seal.sums.values()
            )
            changes = [
                item
                for item in items
                if isinstance(item, Change) and beat.since < item.version <= beat.through
            ]
            assert counted == len(changes)


def test_follower_of_heartbeats_gets_each_once() -> None:
    with open_world() as world:
        follower = Follower(world.site, heartbeats=True)
        beats = []
        for index in range(10):
            world.users.put(b"key", b"%d" % index)
            beats.append(world.site.heartbeat())
            if index % 3 == 0:
                follower.catch_up()
            if index == 5:
                follower.resume()
        follower.catch_up()
        assert follower.heartbeats == beats
        assert len(follower.changes) == 10


@pytest.mark.parametrize("before_images", [False, True])
@pytest.mark.parametrize("tail", [0, 1, 5])
def test_no_heartbeat_of_a_sealed_log_is_lost_or_doubled(before_images: bool, tail: int) -> None:
    """A merge seals two logs at one version: two heartbeats that may fall on both sides of a page's end."""
    with open_world() as world:
        since = world.site.now()
        for _ in range(3):
            world.users.put(b"a", b"1")
            world.site.split("users", b"m")
            world.users.put(b"a", b"2")
            world.users.put(b"z", b"2")
            left, right = world.site.partitions()
            world.site.merge(left.id, right.id)
        for index in range(tail):
            world.users.put(b"a", b"%d" % index)

        def read(after: Version, until: Version) -> list[Any]:
            return list(
                world.site.changes(
                    since=after,
                    until=until,
                    heartbeats=True,
                    before_images=before_images,
                    resolved_markers=True,
                )
            )

        end = world.site.now()
        items = read(since, end)
        beats = [item for item in items if isinstance(item, Heartbeat)]
        assert len(beats) == len({beat.log for beat in beats}) == 9
        for place, item in enumerate(items):
            if isinstance(item, Resolved):
                before = [beat for beat in items[:place] if isinstance(beat, Heartbeat)]
                later = [beat for beat in read(item.version, end) if isinstance(beat, Heartbeat)]
                assert before + later == beats


def test_heartbeats_alone_do_not_pile_up_in_memory() -> None:
    """A site that is idle for days writes one each second, and a reader may have no change to deliver."""
    with open_world() as world:
        for _ in range(3000):
            world.site.heartbeat()
        batches = read_batches(world.site, "users", heartbeats=True)
        assert sum(len(batch.heartbeats) for batch in batches) == 3000
        assert max(len(batch.heartbeats) for batch in batches) <= 1001


def items_of(stream: Iterator[Any], kind: type) -> list[Any]:
    return [item for item in stream if isinstance(item, kind)]


def test_seals_of_logs_out_of_range_are_not_in_the_way_of_the_changes() -> None:
    with open_world() as world:
        written = []
        for index in range(6):
            written.append(world.users.put(b"a", b"%d" % index))
            world.site.split("users", b"m%d" % index)
            world.users.put(b"z", b"%d" % index)
        found = items_of(world.site.changes("users", prefix=b"a", heartbeats=True), Change)
        assert [change.version for change in found] == written
        raw = raw_changes(read_batches(world.site, "users"))
        assert len(raw) == 12
