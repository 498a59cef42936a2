"""Reading changes from every kind of beginning to every kind of end: in order, all of them, once."""

from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import pytest
from tests.feed.support import (
    DAY_MS,
    HOUR_MS,
    LARGE,
    SECOND_MS,
    Follower,
    World,
    delivered,
    open_world,
    trim_log,
)
from tests.site.support import host_of
from tests.waiting import HANG_SECONDS, run_threads

from floodmark.model.change import Change, ChangeType
from floodmark.model.errors import (
    InvalidVersion,
    NamespaceNotFound,
    VersionCollected,
    VersionInFuture,
)
from floodmark.model.stream import Way
from floodmark.model.version import VERSION_MAX, Version, moment_of
from floodmark.site.arguments import Since

LOG_RETENTION = timedelta(minutes=1)


def write_seconds(world: World, count: int) -> list[Version]:
    """Put one value a second."""
    versions = []
    for index in range(count):
        world.time.advance(SECOND_MS)
        versions.append(world.users.put(b"key-%d" % (index % 3), b"%d" % index))
    return versions


def versions_of(changes: object) -> list[Version]:
    return [change.version for change in changes]  # type: ignore[attr-defined]


# Beginnings


@pytest.mark.parametrize("trimmed", [False, True], ids=["log", "scan"])
def test_every_beginning_gives_exactly_what_lies_behind_it(trimmed: bool) -> None:
    with open_world(LOG_RETENTION) as world:
        before = world.site.now()
        versions = write_seconds(world, 8)
        if trimmed:
            assert trim_log(world) > versions[-1]
        for index, version in enumerate(versions):
            assert versions_of(world.site.changes("users", since=version)) == versions[index + 1 :]
            assert versions_of(world.site.changes("users", since=version - 1)) == versions[index:]
            assert versions_of(world.site.changes("users", since=moment_of(version))) == versions[index + 1 :]
            earlier = moment_of(version) - timedelta(milliseconds=1)
            assert versions_of(world.site.changes("users", since=earlier)) == versions[index:]
        beginnings: list[Any] = [0, 1, before, "beginning"]
        for beginning in beginnings:
            assert versions_of(world.site.changes("users", since=beginning)) == versions
            assert versions_of(world.site.changes(since=beginning)) == versions
        assert versions_of(world.site.changes("users", since="now")) == []
        assert set(delivered(world.site)) == {Way.SCAN if trimmed else Way.LOG}


@pytest.mark.parametrize("trimmed", [False, True], ids=["log", "scan"])
def test_until_is_the_last_that_comes(trimmed: bool) -> None:
    with open_world(LOG_RETENTION) as world:
        versions = write_seconds(world, 5)
        world.time.advance(SECOND_MS)
        if trimmed:
            trim_log(world)
        for index, version in enumerate(versions):
            for follow in (False, True):
                found = world.site.changes("users", until=version, follow=follow)
                assert versions_of(found) == versions[: index + 1]
                found = world.site.changes("users", until=version - 1, follow=follow)
                assert versions_of(found) == versions[:index]
                found = world.site.changes("users", until=moment_of(version), follow=follow)
                assert versions_of(found) == versions[: index + 1]
        assert versions_of(world.site.changes("users", until=VERSION_MAX)) == versions


def test_until_before_the_namespace_was_made_gives_nothing() -> None:
    with open_world() as world:
        before = world.site.now()
        orders = world.site.create_namespace("orders")
        orders.put(b"key", b"1")
        assert list(world.site.changes("orders", until=before)) == []
        assert list(world.site.changes("orders", until=before, follow=True)) == []
        assert list(world.site.changes("orders", until=1)) == []


def test_now_gives_only_what_comes_later() -> None:
    with open_world() as world:
        world.users.put(b"key", b"old")
        follower = Follower(world.site, "users", since="now")
        written = [world.users.put(b"key", b"%d" % index) for index in range(3)]
        follower.catch_up()
        assert versions_of(follower.changes) == written
        assert versions_of(world.site.changes("users", since="now")) == []


@pytest.mark.parametrize("since", [VERSION_MAX, -1, "soon", 1.5, None])
def test_impossible_beginnings_are_refused_at_the_call(since: object) -> None:
    with open_world() as world:
        world.users.put(b"key", b"1")
        with pytest.raises(InvalidVersion):
            world.site.changes("users", since=since)  # type: ignore[call-overload]


def test_beginning_in_the_future_is_refused_at_the_call() -> None:
    with open_world() as world:
        tomorrow = moment_of(world.users.put(b"key", b"1")) + timedelta(days=1)
        with pytest.raises(VersionInFuture):
            world.site.changes("users", since=tomorrow, follow=True)


def test_unknown_namespace_is_refused_at_the_call() -> None:
    with open_world() as world, pytest.raises(NamespaceNotFound):
        world.site.changes("nobody", since="beginning")


# What was collected


def test_the_beginning_is_refused_where_it_is_gone() -> None:
    with open_world() as world:
        first = world.users.put(b"key", b"1")
        world.time.advance(2 * DAY_MS)
        kept = [world.users.put(b"key", b"2"), world.users.put(b"other", b"3")]
        world.site.collect_garbage()
        for namespace in ("users", None):
            assert len(list(world.site.changes(namespace, since="snapshot"))) == len(kept)
            starts: list[Since] = [0, "beginning", first - 1, first, moment_of(first)]
            for since in starts:
                for follow in (False, True):
                    with pytest.raises(VersionCollected) as refused:
                        world.site.changes(namespace, since=since, follow=follow)
                    assert 'since="snapshot"' in str(refused.value), "it must say how to rebuild"
                    oldest = refused.value.details["oldest"]
                    assert isinstance(oldest, int)
                    assert first < oldest <= kept[0]
                    # What the error recommends works: a snapshot there, and the changes behind it.
                    snapshot = dict(world.users.scan(at=oldest))
                    assert snapshot == {b"key": b"1"}
                    assert versions_of(world.site.changes(namespace, since=oldest)) == kept


def test_refused_reader_holds_nothing() -> None:
    with open_world() as world:
        first = world.users.put(b"key", b"1")
        world.time.advance(2 * DAY_MS)
        world.users.put(b"key", b"2")
        world.site.collect_garbage()
        with pytest.raises(VersionCollected):
            world.site.changes("users", since=first)
        assert world.site.statistics().readers.open == []
        world.time.advance(2 * DAY_MS)
        before = world.site.statistics().namespaces[0].oldest_version
        world.site.collect_garbage()
        assert world.site.statistics().namespaces[0].oldest_version > before


def test_snapshot_is_not_refused_when_garbage_is_collected_under_the_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The present is always there to be asked for, also where nothing of the past is kept."""
    with open_world() as world:
        world.users.put(b"key", b"1")
        world.site.update_namespace("users", retention=timedelta(0))
        host = host_of(world.site)
        changes = host.changes

        def collect_first(request: object) -> object:
            monkeypatch.setattr(host, "changes", changes)
            world.time.advance(1)
            world.users.put(b"key", b"2")
            world.site.collect_garbage()
            return changes(request)  # type: ignore[arg-type]

        monkeypatch.setattr(host, "changes", collect_first)
        assert [change.value for change in world.site.changes("users", since="snapshot")] == [b"2"]


def test_stream_keeps_what_it_has_not_read_yet() -> None:
    with open_world(LOG_RETENTION) as world:
        versions = write_seconds(world, 3)
        stream = world.site.changes("users", since=versions[0])
        world.time.advance(2 * DAY_MS)
        world.site.collect_garbage()
        assert versions_of(stream) == versions[1:]
        world.site.collect_garbage()
        with pytest.raises(VersionCollected):
            world.site.changes("users", since=versions[0])


# Scopes


def test_key_ranges_choose_alike_by_every_way() -> None:
    keys = [b"a", b"ab", b"ab\xff", b"abc", b"ac", b"b", b"\xff", b"\xff\xff"]
    scopes: list[dict[str, bytes]] = [
        {},
        {"start_key": b"ab", "end_key": b"b"},
        {"start_key": b"b"},
        {"end_key": b"ab"},
        {"prefix": b"ab"},
        {"prefix": b"\xff"},
        {"prefix": b"ab", "start_key": b"abc"},
        {"prefix": b"ab", "start_key": b"b"},
        {"start_key": b"ab", "end_key": b"ab"},
        {"prefix": b""},
    ]
    with open_world(LOG_RETENTION) as world:
        followers = [Follower(world.site, "users", **scope) for scope in scopes]
        for follower in followers:
            follower.catch_up()
        world.site.create_namespace("orders").put_many(dict.fromkeys(keys, b"0"))
        for key in keys:
            world.users.put(key, b"1")
        world.site.split("users", b"ab")
        world.site.split("users", b"b")
        world.users.put_many(dict.fromkeys(keys, b"2"))
        world.users.put_many(dict.fromkeys(keys, LARGE))
        for follower in followers:
            follower.catch_up()
            follower.close()
        assert set(delivered(world.site)) == {Way.TAIL}
        by_log = [list(world.site.changes("users", **scope)) for scope in scopes]  # type: ignore[call-overload]
        trim_log(world)
        by_scan = [list(world.site.changes("users", **scope)) for scope in scopes]  # type: ignore[call-overload]
        for scope, follower, logged, scanned in zip(scopes, followers, by_log, by_scan, strict=True):
            wanted = [key for key in keys if in_scope(key, **scope)]
            assert sorted(change.key for change in logged) == sorted(3 * wanted), scope
            assert logged == follower.changes
            assert [changed(change) for change in scanned] == [changed(change) for change in logged]


def in_scope(key: bytes, start_key: bytes = b"", end_key: bytes | None = None, prefix: bytes = b"") -> bool:
    return key >= start_key and (end_key is None or key < end_key) and key.startswith(prefix)


def changed(change: Change) -> tuple[Version, bytes, bytes | None]:
    return change.version, change.key, change.value


def test_changes_of_a_commit_come_in_order_of_keys_by_every_way() -> None:
    keys = [b"z", b"a", b"m", b"aa", b"\xff", b"\x00", b"k" * 9, b"k" * 8, b"k" * 7]
    with open_world(LOG_RETENTION) as world:
        follower = Follower(world.site, "users")
        follower.catch_up()
        for round_ in (b"1", LARGE):
            world.users.put_many(dict.fromkeys(keys, round_))
        world.users.delete_range()
        follower.catch_up()
        logged = list(world.site.changes("users"))
        trim_log(world)
        scanned = list(world.site.changes("users"))
        assert set(delivered(world.site)) == set(Way) - {Way.SNAPSHOT}
        for found in (follower.changes, logged, scanned):
            assert [change.key for change in found] == 3 * sorted(keys)


def test_all_namespaces_come_in_one_order_by_every_way() -> None:
    with open_world(LOG_RETENTION) as world:
        follower = Follower(world.site)
        follower.catch_up()
        spaces = [world.users, world.site.create_namespace("orders"), world.site.create_namespace("a")]
        written = [(space.name, space.put(b"key", b"%d" % n)) for n in range(5) for space in spaces]
        follower.catch_up()
        logged = list(world.site.changes())
        trim_log(world)
        for found in (follower.changes, logged, world.site.changes()):
            assert [(change.namespace, change.version) for change in found] == written


def test_namespace_that_is_made_under_a_follower_of_all_is_followed() -> None:
    with open_world() as world:
        follower = Follower(world.site)
        world.users.put(b"key", b"1")
        follower.catch_up()
        later = world.site.create_namespace("later").put(b"key", b"1")
        follower.catch_up()
        assert (follower.changes[-1].namespace, follower.changes[-1].version) == ("later", later)


# Dropped namespaces


@pytest.mark.parametrize("value", [b"small", LARGE], ids=["in the log", "by reference"])
@pytest.mark.parametrize("trimmed", [False, True], ids=["log", "scan"])
def test_stream_of_a_namespace_that_is_dropped_meanwhile_is_read_to_its_end(
    value: bytes, trimmed: bool
) -> None:
    """The stream holds what it has to read, so even garbage collection takes nothing from under it."""
    with open_world(LOG_RETENTION) as world:
        written = [world.users.put(b"key-%d" % index, value) for index in range(5)]
        streams = [world.site.changes("users"), world.site.changes()]
        world.site.drop_namespace("users")
        if trimmed:
            trim_log(world)
        world.time.advance(3 * DAY_MS)
        world.site.collect_garbage()
        for stream in streams:
            assert versions_of(stream) == written
        world.site.collect_garbage()
        assert list(world.site.changes(since="beginning")) == []


@pytest.mark.parametrize("value", [b"small", LARGE], ids=["in the log", "by reference"])
def test_changes_of_a_removed_namespace_are_left_out_of_the_others(value: bytes) -> None:
    with open_world() as world:
        orders = world.site.create_namespace("orders", retention=timedelta(days=9))
        world.users.put(b"key", value)
        kept = orders.put(b"key", value)
        world.users.put(b"key", value)
        world.site.drop_namespace("users")
        world.time.advance(2 * DAY_MS)
        assert world.site.collect_garbage().namespaces_removed == 1
        assert versions_of(world.site.changes()) == [kept]
        assert versions_of(world.site.changes("orders")) == [kept]


# Values


@pytest.mark.parametrize("trimmed", [False, True], ids=["log", "scan"])
def test_put_whose_time_is_over_when_it_is_read_is_a_delete(trimmed: bool) -> None:
    with open_world(LOG_RETENTION) as world:
        follower = Follower(world.site, "users")
        world.users.put(b"short", b"1", ttl=timedelta(hours=1))
        world.users.put(b"long", LARGE, ttl=timedelta(days=9))
        world.users.put_many({b"many-1": b"1", b"many-2": LARGE}, ttl=timedelta(hours=1))
        follower.catch_up()
        assert {change.type for change in follower.changes} == {ChangeType.UPSERT}
        if trimmed:
            trim_log(world)
        world.time.advance(2 * HOUR_MS)
        found = list(world.site.changes("users"))
        assert [(change.key, change.type, change.value) for change in found] == [
            (b"short", ChangeType.DELETE, None),
            (b"long", ChangeType.UPSERT, LARGE),
            (b"many-1", ChangeType.DELETE, None),
            (b"many-2", ChangeType.DELETE, None),
        ]
        assert versions_of(found) == versions_of(follower.changes)


def test_large_values_come_whole_by_every_way() -> None:
    sizes = [0, 1, 4094, 4095, 4096, 4097, 100_000, 1 << 20]
    with open_world(LOG_RETENTION) as world:
        follower = Follower(world.site, "users")
        follower.catch_up()
        for size in sizes:
            world.users.put(b"key", b"x" * size)
        world.users.put_many({b"key-%07d" % size: b"y" * size for size in sizes})
        follower.catch_up()
        logged = list(world.site.changes("users"))
        trim_log(world)
        for found in (follower.changes, logged, list(world.site.changes("users"))):
            assert [len(change.value or b"") for change in found] == 2 * sizes
        assert set(delivered(world.site)) == set(Way) - {Way.SNAPSHOT}


# Following


def test_follower_waits_and_goes_on() -> None:
    """Writer and reader take turns: each write is seen before the next one is made."""
    with open_world() as world:
        received: SimpleQueue[Version] = SimpleQueue()

        def write() -> None:
            for index in range(20):
                assert world.users.put(b"key", b"%d" % index) == received.get(timeout=HANG_SECONDS)

        def read() -> None:
            stream = world.site.changes("users", follow=True)
            for _ in range(20):
                received.put(next(stream).version)

        run_threads(read, write)


def test_asynchronous_write_reaches_a_follower_without_anyone_syncing() -> None:
    with open_world() as world:
        follower = Follower(world.site, "users")
        follower.catch_up()
        version = world.users.put(b"key", b"1", durability="async")
        while not follower.changes:
            follower.take()
        assert versions_of(follower.changes) == [version]
        assert not world.engine.unsynced


def test_statistics_tell_where_a_stream_is_and_how_it_got_there() -> None:
    with open_world(LOG_RETENTION) as world:
        world.users.put(b"key", b"1")
        follower = Follower(world.site, "users")
        follower.catch_up()
        assert world.site.statistics().readers.open[0].way is Way.LOG
        world.users.put(b"key", b"2")
        follower.catch_up()
        world.time.advance(SECOND_MS)
        (reader,) = world.site.statistics().readers.open
        assert (reader.way, reader.follow, reader.lag_ms) == (Way.TAIL, True, SECOND_MS)
        assert reader.changes == {Way.LOG: 1, Way.TAIL: 1, Way.SCAN: 0, Way.SNAPSHOT: 0}
        follower.close()
        trim_log(world)
        assert len(list(world.site.changes("users"))) == 2
        readers = world.site.statistics().readers
        assert readers.open == []
        assert readers.changes == {Way.LOG: 1, Way.TAIL: 1, Way.SCAN: 2, Way.SNAPSHOT: 0}
