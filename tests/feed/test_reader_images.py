"""Before-images: what each change replaced, in the words of Delta's change data feed."""

from datetime import timedelta

import pytest
from tests.feed.support import (
    DAY_MS,
    HOUR_MS,
    LARGE,
    Follower,
    World,
    delivered,
    open_world,
    trim_log,
)

from floodmark.model.change import Change, ChangeType
from floodmark.model.stream import Way
from floodmark.model.version import Version

LOG_RETENTION = timedelta(minutes=1)
INSERT, DELETE = ChangeType.INSERT, ChangeType.DELETE
BEFORE, AFTER = ChangeType.UPDATE_PREIMAGE, ChangeType.UPDATE_POSTIMAGE

Image = tuple[ChangeType, bytes, bytes | None]


def images(world: World, since: Version = 0) -> list[Image]:
    """What a reader of before-images gets, by the log or by a scan."""
    return [image(change) for change in world.site.changes("users", since=since, before_images=True)]


def image(change: Change) -> Image:
    return change.type, change.key, change.value


def test_each_change_says_what_it_replaced() -> None:
    with open_world() as world:
        users = world.users
        versions = [users.put(b"a", b"1"), users.put(b"a", b"2"), users.delete(b"a"), users.put(b"a", b"3")]
        found = list(world.site.changes("users", before_images=True))
        assert [image(change) for change in found] == [
            (INSERT, b"a", b"1"),
            (BEFORE, b"a", b"1"),
            (AFTER, b"a", b"2"),
            (DELETE, b"a", b"2"),
            (INSERT, b"a", b"3"),
        ]
        places = [0, 1, 1, 2, 3]
        assert [change.version for change in found] == [versions[place] for place in places]
        assert [change.stamp.version for change in found] == [versions[place] for place in places]


def test_delete_of_what_was_not_there_has_no_value() -> None:
    with open_world() as world:
        world.users.delete(b"never")
        world.users.put(b"a", b"1")
        world.users.delete(b"a")
        world.users.delete(b"a")
        assert images(world) == [
            (DELETE, b"never", None),
            (INSERT, b"a", b"1"),
            (DELETE, b"a", b"1"),
            (DELETE, b"a", None),
        ]


def test_empty_value_is_a_value() -> None:
    with open_world() as world:
        world.users.put(b"a", b"")
        world.users.put(b"a", b"1")
        world.users.put(b"a", b"")
        world.users.delete(b"a")
        assert images(world) == [
            (INSERT, b"a", b""),
            (BEFORE, b"a", b""),
            (AFTER, b"a", b"1"),
            (BEFORE, b"a", b"1"),
            (AFTER, b"a", b""),
            (DELETE, b"a", b""),
        ]


def test_expired_before_image_counts_as_absent() -> None:
    with open_world() as world:
        world.users.put(b"updated", b"1", ttl=10)
        world.users.put(b"deleted", b"1", ttl=10)
        world.time.advance(HOUR_MS)
        since = world.site.now()
        world.users.put(b"updated", b"2")
        world.users.delete(b"deleted")
        assert images(world, since) == [(INSERT, b"updated", b"2"), (DELETE, b"deleted", None)]


def test_expired_put_is_a_delete_of_what_was_before() -> None:
    with open_world() as world:
        world.users.put(b"a", b"1")
        since = world.users.put(b"b", b"0")
        world.users.put(b"a", b"2", ttl=10)
        world.time.advance(HOUR_MS)
        assert images(world, since) == [(DELETE, b"a", b"1")]


def test_expiry_belongs_to_the_image_that_carries_it() -> None:
    with open_world() as world:
        now_s = world.time() // 1000
        world.users.put(b"a", b"1", ttl=100)
        world.users.put(b"a", b"2", ttl=200)
        world.users.delete(b"a")
        found = world.site.changes("users", before_images=True)
        assert [change.expires_at for change in found] == [
            now_s + 101,
            now_s + 101,
            now_s + 201,
            now_s + 201,
        ]


@pytest.mark.parametrize("large", [b"small", LARGE], ids=["inline", "by reference"])
def test_images_are_the_same_by_every_way(large: bytes) -> None:
    with open_world(LOG_RETENTION) as world:
        follower = Follower(world.site, "users", before_images=True)
        follower.catch_up()
        users = world.users
        users.put_many({b"a": large, b"b": b"1", b"c": large})
        follower.catch_up()
        world.site.split("users", b"b")
        users.put_many({b"a": b"2", b"b": large, b"d": b"2"})
        follower.catch_up()
        users.delete_range(b"b", b"d")
        left, right = world.site.partitions()
        world.site.merge(left.id, right.id)
        users.put_many({b"a": large, b"c": b"3"}, ttl=timedelta(days=9))
        follower.catch_up()
        logged = images(world)
        trim_log(world)
        scanned = images(world)
        assert [image(change) for change in follower.changes] == logged == scanned
        assert set(delivered(world.site)) == set(Way) - {Way.SNAPSHOT}
        assert logged == [
            (INSERT, b"a", large),
            (INSERT, b"b", b"1"),
            (INSERT, b"c", large),
            (BEFORE, b"a", large),
            (AFTER, b"a", b"2"),
            (BEFORE, b"b", b"1"),
            (AFTER, b"b", large),
            (INSERT, b"d", b"2"),
            (DELETE, b"b", large),
            (DELETE, b"c", large),
            (BEFORE, b"a", b"2"),
            (AFTER, b"a", large),
            (INSERT, b"c", b"3"),
        ]


@pytest.mark.parametrize("trimmed", [False, True], ids=["log", "scan"])
def test_first_image_survives_the_collection_of_everything_older(trimmed: bool) -> None:
    """The stream begins where the last version before it is just still kept, and needs that one."""
    with open_world(LOG_RETENTION if trimmed else None) as world:
        users = world.users
        for value in (b"1", b"2", b"3"):
            users.put_many(dict.fromkeys([b"updated", b"deleted", b"expired", b"dead"], value))
        users.put(b"expired", b"4", ttl=10)
        users.delete(b"dead")
        world.time.advance(HOUR_MS)
        since = world.site.now()
        world.site.hold_safe_point("reader", since, lifetime=timedelta(days=9))
        users.put_many(dict.fromkeys([b"updated", b"expired", b"dead"], b"5"))
        users.delete(b"deleted")
        expected = images(world, since)
        world.time.advance(2 * DAY_MS)
        assert world.site.collect_garbage().versions_removed > 8
        assert images(world, since) == expected
        assert expected == [
            (INSERT, b"dead", b"5"),
            (INSERT, b"expired", b"5"),
            (BEFORE, b"updated", b"3"),
            (AFTER, b"updated", b"5"),
            (DELETE, b"deleted", b"3"),
        ]
        assert set(delivered(world.site)) == ({Way.LOG, Way.SCAN} if trimmed else {Way.LOG})


def test_images_rebuild_the_state_going_backwards() -> None:
    """Undoing all changes from the end leads to the beginning: no image is missing and none is wrong."""
    with open_world() as world:
        users = world.users
        for index in range(60):
            key = b"key-%d" % (index * 7 % 11)
            if index % 5 == 4:
                users.delete(key)
            else:
                users.put(key, b"%d" % index)
            if index == 30:
                middle, past = world.site.now(), dict(users.scan())
        state = dict(users.scan())
        changes = list(world.site.changes("users", since=middle, before_images=True))
        for change in reversed(changes):
            if change.type in (INSERT, AFTER):
                assert state.pop(change.key) == change.value
            elif change.value is not None:
                assert change.key not in state
                state[change.key] = change.value
        assert state == past
