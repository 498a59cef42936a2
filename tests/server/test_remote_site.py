"""A site over the wire behaves as one in this process."""

from collections.abc import Callable
from datetime import timedelta

import pytest
from tests.server.support import LOOPBACK, connected, in_threads, open_memory
from tests.waiting import HANG_SECONDS

from floodmark.codec.values import encode_value
from floodmark.engine import MemoryEngine
from floodmark.model.change import ChangeType, Resolved, Stamp
from floodmark.model.errors import (
    Closed,
    CommitTooLarge,
    InvalidKey,
    InvalidName,
    NamespaceExists,
    NamespaceNotFound,
    PartitionNotFound,
    VersionCollected,
    VersionInFuture,
)
from floodmark.model.version import compose, physical_ms
from floodmark.partition import FAMILIES
from floodmark.server import Server, serve
from floodmark.site import Namespace, Site, open_engine
from floodmark.testing import SimulatedTime


def test_a_site_says_who_it_is(remote: Site, site: Site) -> None:
    assert (remote.name, remote.id) == (site.name, site.id) == ("oslo", 7)


def test_points_are_written_and_read(users: Namespace) -> None:
    first = users.put(b"ada", b"1")
    second = users.put(b"ada", b"2", durability="async")
    assert first < second
    assert users.get(b"ada") == b"2"
    assert users.get(b"ada", at=first) == b"1"
    assert users.get(b"bob") is None
    found = users.record(b"ada")
    assert found is not None
    assert (found.value, found.version, found.stamp) == (b"2", second, Stamp(second, 7))
    assert users.delete(b"ada") > second
    assert users.get(b"ada") is None
    assert users.record(b"ada") is None


def test_many_are_written_and_read(users: Namespace) -> None:
    pairs = {b"%05d" % number: b"x" * (number % 300) for number in range(25_000)}
    assert users.put_many(pairs) > 0
    assert users.get_many([*pairs, b"none"]) == [*pairs.values(), None]
    assert users.put_many({}) == 0
    assert users.get_many([]) == []


def test_large_values_are_read_in_several_answers(users: Namespace) -> None:
    pairs = {b"%d" % number: bytes([number]) * 1024 * 1024 for number in range(40)}
    users.put_many(pairs)
    assert users.get_many(list(pairs)) == list(pairs.values())


def test_scans_give_what_is_there_in_order(users: Namespace) -> None:
    pairs = {b"%04d" % number: b"v%d" % number for number in range(3_000)}
    version = users.put_many(pairs)
    users.delete(b"0001")
    whole = sorted(pairs.items())
    left = [pair for pair in whole if pair[0] != b"0001"]
    assert list(users.scan()) == left
    assert list(users.scan(reverse=True)) == left[::-1]
    assert list(users.scan(at=version)) == whole
    assert list(users.scan(b"1000", b"1010")) == whole[1000:1010]
    assert list(users.scan(prefix=b"29", limit=7, reverse=True)) == whole[2999:2992:-1]
    assert list(users.scan(limit=0)) == []
    assert list(users.as_of(version).scan(limit=2)) == whole[:2]


def test_compare_and_set_and_ranges_of_deletes(users: Namespace) -> None:
    assert users.compare_and_set(b"ada", None, b"1")
    assert not users.compare_and_set(b"ada", None, b"2")
    assert users.compare_and_set(b"ada", b"1", b"2")
    users.put_many({b"%04d" % number: b"" for number in range(2_500)})
    assert users.delete_range(b"0", b"1") == 1_000
    assert users.delete_range(prefix=b"2") == 500
    assert len(list(users.scan())) == 1_001


def test_changes_come_in_commit_order(remote: Site, users: Namespace) -> None:
    first = users.put(b"ada", b"1", ttl=timedelta(hours=1))
    second = users.put_many({b"bob": b"2", b"cyd": b"3"})
    third = users.delete(b"ada")
    changes = list(remote.changes("users"))
    assert [(change.key, change.value, change.version) for change in changes] == [
        (b"ada", b"1", first),
        (b"bob", b"2", second),
        (b"cyd", b"3", second),
        (b"ada", None, third),
    ]
    assert [change.type for change in changes][-1] is ChangeType.DELETE
    assert changes[0].expires_at is not None
    assert [change.key for change in remote.changes("users", since=second)] == [b"ada"]
    assert [change.key for change in remote.changes("users", until=first)] == [b"ada"]
    assert [change.key for change in remote.changes("users", prefix=b"b")] == [b"bob"]
    assert list(remote.changes(since="now")) == []


def test_before_images_and_markers_travel(remote: Site, users: Namespace) -> None:
    users.put(b"ada", b"1")
    last = users.put(b"ada", b"2")
    with_before = list(remote.changes("users", before_images=True))
    assert [change.value for change in with_before] == [b"1", b"1", b"2"]
    items = list(remote.changes("users", resolved_markers=True))
    assert isinstance(items[-1], Resolved)
    assert items[-1].version >= last


def test_before_images_travel_where_the_change_log_was_trimmed() -> None:
    time = SimulatedTime()
    site = open_engine(
        MemoryEngine(FAMILIES), site="oslo", site_id=7, time_source=time, log_retention=timedelta(seconds=1)
    )
    with serve(site, LOOPBACK) as server, connected(server) as remote:
        users = remote.create_namespace("users")
        since = users.put(b"ada", b"1") - 1
        users.put(b"ada", b"2")
        time.advance(60_000)
        assert site.collect_garbage().log_trimmed_version > since
        found = [change.value for change in remote.changes("users", since=since, before_images=True)]
        assert found == [b"1", b"1", b"2"]


def test_heartbeats_travel(remote: Site, site: Site) -> None:
    beat = remote.heartbeat()
    assert beat in list(remote.changes(heartbeats=True))
    assert beat in list(site.changes(heartbeats=True))


def test_a_follower_sees_changes_as_they_come(remote: Site, users: Namespace) -> None:
    follower = remote.changes("users", since="now", follow=True)
    for number in range(20):
        version = users.put(b"key", b"%d" % number)
        change = next(follower)
        assert (change.version, change.value) == (version, b"%d" % number)
    follower.close()  # type: ignore[attr-defined]


def test_namespaces_are_administered(remote: Site, site: Site) -> None:
    made = remote.create_namespace("short", ttl=timedelta(hours=1), retention=timedelta(days=2))
    assert made.settings == site.namespace("short").settings
    assert remote.namespaces() == ["short"]
    changed = remote.update_namespace("short", ttl=None)
    assert changed.settings.ttl is None
    assert changed.settings.retention == timedelta(days=2)
    with pytest.raises(NamespaceExists):
        remote.create_namespace("short")
    remote.drop_namespace("short")
    assert remote.namespaces() == []
    with pytest.raises(NamespaceNotFound):
        remote.namespace("short")


@pytest.mark.parametrize(
    "use",
    [
        lambda users: users.get(b"ada"),
        lambda users: users.put(b"ada", b"x"),
        lambda users: users.get_many([b"ada"]),
        lambda users: list(users.scan()),
        lambda users: users.compare_and_set(b"ada", None, b"x"),
        lambda users: users.delete_range(),
    ],
)
def test_a_namespace_that_was_dropped_by_another_is_gone(
    remote: Site, site: Site, users: Namespace, use: Callable[[Namespace], object]
) -> None:
    users.put(b"ada", b"1")
    site.drop_namespace("users")
    site.create_namespace("users")
    with pytest.raises(NamespaceNotFound):
        use(users)
    assert remote.namespace("users").get(b"ada") is None


def test_partitions_are_split_merged_and_measured(remote: Site, users: Namespace) -> None:
    users.put_many({b"%03d" % number: b"x" for number in range(100)})
    left, right = remote.split("users", b"050")
    assert [row.id for row in remote.partitions()] == [left, right]
    assert len(list(users.scan())) == 100
    assert len(users.get_many([b"%03d" % number for number in range(100)])) == 100
    joined = remote.merge(left, right)
    assert [row.id for row in remote.heat()] == [joined]
    with pytest.raises(PartitionNotFound):
        remote.merge(left, right)


def test_garbage_is_collected_behind_safe_points(remote: Site) -> None:
    brief = remote.create_namespace("brief", retention=timedelta(0))
    first = brief.put(b"ada", b"1")
    held = remote.hold_safe_point("test", first, namespace="brief")
    assert remote.safe_points() == [held]
    brief.put(b"ada", b"2")
    remote.collect_garbage()
    assert brief.get(b"ada", at=first) == b"1"
    remote.release_safe_point("test")
    remote.collect_garbage()
    for read in (
        lambda: brief.get(b"ada", at=first),
        lambda: brief.scan(at=first),
        lambda: remote.changes("brief", since=first - 1),
    ):
        with pytest.raises(VersionCollected):
            read()


def test_statistics_travel(remote: Site, site: Site, users: Namespace) -> None:
    users.put(b"ada", b"1")
    there, here = remote.statistics(), site.statistics()
    assert there.commits == here.commits
    assert there.partitions[0].range == here.partitions[0].range
    assert there.namespaces == here.namespaces


def test_time_is_the_servers(remote: Site, site: Site) -> None:
    assert 0 <= remote.host.physical_ms() - site.host.physical_ms() < 5_000
    assert remote.now() < remote.resolved_version() < remote.now()


def test_versions_of_the_future_are_refused(remote: Site, users: Namespace) -> None:
    future = compose(physical_ms(remote.now()) + 10**9, 0)
    with pytest.raises(VersionInFuture):
        users.get(b"ada", at=future)
    with pytest.raises(VersionInFuture):
        remote.changes("users", since=future)
    with pytest.raises(VersionInFuture):
        users.scan(at=future)


def test_too_much_is_refused_before_anything_is_written(users: Namespace) -> None:
    megabyte = b"x" * 1024 * 1024
    with pytest.raises(CommitTooLarge):
        users.put_many({b"%d" % number: megabyte for number in range(70)})
    with pytest.raises(InvalidKey):
        users.put(b"", b"x")
    assert list(users.scan()) == []


def test_bad_settings_are_refused_by_the_server_too(remote: Site) -> None:
    with pytest.raises(InvalidName):
        remote.create_namespace("no blanks")
    with pytest.raises(InvalidName):
        remote.hold_safe_point("a b", remote.now())


def test_a_closed_site_is_closed(remote: Site, users: Namespace) -> None:
    remote.close()
    remote.close()
    with pytest.raises(Closed):
        remote.namespaces()
    with pytest.raises(Closed):
        users.get(b"ada")


def test_copied_values_keep_their_origin(remote: Site, users: Namespace) -> None:
    origin = Stamp(remote.now(), 9)
    key = b"\x00\x00\x01ada"
    router = remote.host.router
    assert router.apply({key: encode_value(b"copied", origin=origin)}, durable=True) > 0
    assert router.apply({key: encode_value(b"copied", origin=origin)}, durable=True) == 0
    found = users.record(b"ada")
    assert found is not None
    assert found.stamp == origin


@pytest.mark.soak
def test_two_hundred_clients_at_once(server: Server, users: Namespace) -> None:
    def work(number: int) -> int:
        with connected(server) as site:
            mine = site.namespace("users")
            for step in range(5):
                mine.put(b"%d" % number, b"%d" % step)
            assert mine.get(b"%d" % number) == b"4"
            return sum(1 for _ in site.changes("users", prefix=b"%d" % number, since="beginning"))

    assert min(in_threads(work, 200)) >= 5
    assert len(list(users.scan())) == 200


def test_memory_sites_are_alike() -> None:
    """The suite above means nothing if the fixture served something else."""
    with open_memory() as site:
        assert (site.name, site.id) == ("oslo", 7)
    assert HANG_SECONDS > 0
