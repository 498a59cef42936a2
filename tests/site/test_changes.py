"""Reading changes: in commit order, from any version, and never silently fewer than there are."""

from collections.abc import Iterator
from datetime import timedelta
from threading import Event

import pytest
from tests.site.support import HookedEngine, node_of, nothing, open_memory
from tests.waiting import HANG_SECONDS, run_threads

from floodmark.model.change import Change, ChangeType, Stamp
from floodmark.model.errors import (
    Closed,
    InvalidRange,
    InvalidVersion,
    NamespaceNotFound,
    VersionCollected,
)
from floodmark.model.version import moment_of
from floodmark.site import Namespace, Site
from floodmark.testing.clock import SimulatedTime

DAY_MS = 24 * 60 * 60 * 1000
LARGE = b"large" * 2000


def versions(changes: Iterator[Change]) -> list[int]:
    return [change.version for change in changes]


def test_change_tells_all_about_its_write(site: Site, users: Namespace, time: SimulatedTime) -> None:
    first = users.put(b"ada", b"countess", ttl=timedelta(seconds=5))
    second = users.delete(b"ada")
    partition = site.partitions()[0].id
    assert list(site.changes("users")) == [
        Change(
            namespace="users",
            key=b"ada",
            value=b"countess",
            type=ChangeType.UPSERT,
            version=first,
            stamp=Stamp(first, site.id),
            partition=partition,
            expires_at=time() // 1000 + 6,
        ),
        Change(
            namespace="users",
            key=b"ada",
            value=None,
            type=ChangeType.DELETE,
            version=second,
            stamp=Stamp(second, site.id),
            partition=partition,
        ),
    ]


def test_since_is_exclusive_and_until_is_inclusive(site: Site, users: Namespace) -> None:
    first, second, third, fourth = (users.put(b"key", b"%d" % index) for index in range(4))
    assert versions(site.changes("users", since=first)) == [second, third, fourth]
    assert versions(site.changes("users", since=first - 1)) == [first, second, third, fourth]
    assert versions(site.changes("users", until=second)) == [first, second]
    assert versions(site.changes("users", since=first, until=third)) == [second, third]
    assert versions(site.changes("users", since=first, until=third - 1)) == [second]
    assert versions(site.changes("users", since=second, until=second)) == []
    assert versions(site.changes("users", since=fourth)) == []


def test_moments_name_versions(site: Site, users: Namespace, time: SimulatedTime) -> None:
    first = users.put(b"key", b"1")
    time.advance(10)
    second = users.put(b"key", b"2")
    assert versions(site.changes("users", since=moment_of(first))) == [second]
    assert versions(site.changes("users", until=moment_of(first))) == [first]


def test_bad_questions_are_refused_at_once(site: Site, users: Namespace) -> None:
    version = users.put(b"key", b"1")
    with pytest.raises(InvalidVersion):
        site.changes("users", since=version, until=version - 1)
    with pytest.raises(InvalidVersion):
        site.changes("users", since=-1)
    with pytest.raises(InvalidRange):
        site.changes("users", start_key=b"b", end_key=b"a")
    with pytest.raises(InvalidRange):
        site.changes(prefix=b"a")
    with pytest.raises(NamespaceNotFound):
        site.changes("nobody")


@pytest.mark.parametrize("split", [False, True], ids=["one partition", "three partitions"])
def test_key_ranges_and_prefixes_choose_changes(site: Site, users: Namespace, split: bool) -> None:
    if split:
        site.split("users", b"ab")
        site.split("users", b"b")
    keys = [b"a", b"ab", b"ab\xff", b"abc", b"ac", b"b", b"\xff", b"\xff\xff"]
    for key in keys:
        users.put(key, b"1")
    users.put_many(dict.fromkeys(keys, b"2"))

    def chosen(start: bytes = b"", end: bytes | None = None, prefix: bytes | None = None) -> set[bytes]:
        found = list(site.changes("users", start_key=start, end_key=end, prefix=prefix))
        assert len(found) == 2 * len({change.key for change in found})
        return {change.key for change in found}

    assert chosen() == set(keys)
    assert chosen(b"ab", b"b") == {b"ab", b"ab\xff", b"abc", b"ac"}
    assert chosen(b"b") == {b"b", b"\xff", b"\xff\xff"}
    assert chosen(prefix=b"ab") == {b"ab", b"ab\xff", b"abc"}
    assert chosen(prefix=b"\xff") == {b"\xff", b"\xff\xff"}
    assert chosen(b"abc", prefix=b"ab") == {b"abc", b"ab\xff"}
    assert chosen(b"b", prefix=b"ab") == set()
    assert chosen(b"ab", b"ab") == set()


def test_large_values_are_looked_up(site: Site, users: Namespace) -> None:
    users.put(b"one", LARGE)
    users.put_many({b"two": LARGE, b"small": b"1", b"three": LARGE + b"!"})
    users.put(b"one", b"overwritten")
    found = [(change.key, change.value) for change in site.changes("users")]
    assert found[0] == (b"one", LARGE)
    assert set(found[1:4]) == {(b"two", LARGE), (b"small", b"1"), (b"three", LARGE + b"!")}
    assert found[4] == (b"one", b"overwritten")


def test_commit_of_several_log_rows_comes_whole(site: Site, users: Namespace) -> None:
    pairs = {b"key-%04d" % index: b"%04d" % index * 900 for index in range(1000)}
    version = users.put_many(pairs)
    found = list(site.changes("users"))
    assert {change.key: change.value for change in found} == pairs
    assert len(found) == len(pairs)
    assert {change.version for change in found} == {version}


def test_changes_of_all_namespaces_come_in_one_order(site: Site, users: Namespace) -> None:
    orders = site.create_namespace("orders")
    written = [(space.name, space.put(b"key", b"%d" % n)) for n in range(5) for space in (users, orders)]
    assert [(change.namespace, change.version) for change in site.changes()] == written


def test_changes_of_several_partitions_come_in_commit_order(site: Site, users: Namespace) -> None:
    for boundary in (b"c", b"f", b"m"):
        site.split("users", boundary)
    written = [users.put(key, b"%d" % n) for n in range(5) for key in (b"z", b"a", b"d", b"k")]
    found = list(site.changes("users"))
    assert [change.version for change in found] == written
    assert len({change.partition for change in found}) == 4


def test_follow_sees_what_another_thread_writes_and_ends_at_until(site: Site, users: Namespace) -> None:
    before = [users.put(b"key", b"%d" % index) for index in range(3)]
    caught_up = Event()
    written: list[int] = []
    last = site.now() + 20

    def write() -> None:
        caught_up.wait(HANG_SECONDS)
        while (version := users.put(b"key", b"more")) <= last:
            written.append(version)

    def read() -> None:
        seen = []
        for change in site.changes("users", until=last, follow=True):
            seen.append(change.version)
            if change.version == before[-1]:
                caught_up.set()
        assert seen == before + written

    run_threads(read, write)
    assert written


def test_follow_with_nothing_to_come_ends_at_until(site: Site, users: Namespace) -> None:
    version = users.put(b"key", b"1")
    assert versions(site.changes("users", until=version, follow=True)) == [version]
    assert versions(site.changes("users", since=version, until=version, follow=True)) == []


def test_follow_that_is_closed_from_outside_lets_go_of_what_it_held(
    site: Site, users: Namespace, time: SimulatedTime
) -> None:
    version = users.put(b"key", b"1")
    users.put(b"key", b"2")
    following = site.changes("users", since=version - 1, follow=True)
    assert next(following).version == version
    time.advance(2 * DAY_MS)
    site.collect_garbage()
    assert users.get(b"key", at=version) == b"1"
    following.close()  # type: ignore[attr-defined]
    site.collect_garbage()
    with pytest.raises(VersionCollected):
        users.get(b"key", at=version)


def test_follow_ends_with_an_error_when_the_site_is_closed(engine: HookedEngine, time: SimulatedTime) -> None:
    site = open_memory(engine, time)
    version = site.create_namespace("users").put(b"key", b"1")
    waiting = Event()

    def read() -> None:
        following = site.changes("users", follow=True)
        assert next(following).version == version
        waiting.set()
        with pytest.raises(Closed):
            next(following)

    def close() -> None:
        waiting.wait(HANG_SECONDS)
        site.close()

    run_threads(read, close)


def test_changes_that_were_trimmed_are_an_error_at_once(
    site: Site, users: Namespace, time: SimulatedTime
) -> None:
    first, second = users.put(b"key", b"1"), users.put(b"key", b"2")
    time.advance(2 * DAY_MS)
    third = users.put(b"key", b"3")
    trimmed = site.collect_garbage().log_trimmed_version
    assert second < trimmed < third
    for since in (first - 1, first, second, trimmed - 1):
        with pytest.raises(VersionCollected) as refused:
            next(site.changes("users", since=since))
        assert refused.value.details["oldest"] == trimmed
        with pytest.raises(VersionCollected):
            next(site.changes(since=since))
    assert versions(site.changes("users", since=trimmed)) == [third]


def test_namespace_made_after_a_trim_is_read_from_its_beginning(
    site: Site, users: Namespace, time: SimulatedTime
) -> None:
    """Nothing of it was ever lost, so the default `since` must not be refused."""
    users.put(b"key", b"1")
    time.advance(2 * DAY_MS)
    site.collect_garbage()
    version = site.create_namespace("orders").put(b"key", b"1")
    assert versions(site.changes("orders")) == [version]
    site.collect_garbage()
    assert versions(site.changes("orders")) == [version]


def test_young_site_that_has_collected_is_read_from_its_beginning(site: Site, users: Namespace) -> None:
    version = users.put(b"key", b"1")
    site.collect_garbage()
    assert versions(site.changes("users")) == [version]
    assert versions(site.changes()) == [version]


def test_asynchronous_writes_appear_only_when_they_are_durable(
    site: Site, users: Namespace, engine: HookedEngine
) -> None:
    for index in range(5):
        users.put(b"key-%d" % index, b"1", durability="async")
    for change in site.changes("users"):
        survivor = engine.crashed()
        with open_memory(survivor, SimulatedTime()) as after_power_cut:
            assert change in after_power_cut.changes("users")


def test_asynchronous_write_is_not_published_while_its_sync_is_under_way(
    site: Site, users: Namespace, engine: HookedEngine
) -> None:
    version = users.put(b"key", b"1", durability="async")
    announced: list[int] = []

    def look(operation: str) -> None:
        if operation == "sync":
            announced.append(site.resolved_version())

    engine.before = look
    assert versions(site.changes("users")) == [version]
    engine.before = nothing
    assert announced
    assert all(resolved < version for resolved in announced)


def test_dropped_namespace_gives_its_name_to_a_new_set(site: Site, users: Namespace) -> None:
    users.put(b"key", b"old")
    site.drop_namespace("users")
    with pytest.raises(NamespaceNotFound):
        site.changes("users")
    version = site.create_namespace("users").put(b"key", b"new")
    assert versions(site.changes("users")) == [version]


def test_reader_holds_a_bounded_part_in_memory(site: Site, users: Namespace, engine: HookedEngine) -> None:
    """The first change comes after one page of each log, not after all of it."""
    for _ in range(4):
        users.put_many({b"key-%03d" % index: b"x" * 4000 for index in range(600)})
    scans: list[str] = []
    engine.before = lambda operation: scans.append(operation) if operation == "scan log" else None
    reader = site.changes("users")
    next(reader)
    early = len(scans)
    assert sum(1 for _ in reader) == 2399
    engine.before = nothing
    assert early < len(scans)


def test_node_refuses_what_was_trimmed_while_it_was_read(
    site: Site, users: Namespace, time: SimulatedTime
) -> None:
    """A reader without a safe point, as a node's own, is told; it does not find an empty log."""
    first = users.put(b"key", b"1")
    time.advance(2 * DAY_MS)
    last = users.put(b"key", b"2")
    node = node_of(site)
    entries = node.read_log(first - 1, last, site.partitions()[0].range)
    site.collect_garbage()
    with pytest.raises(VersionCollected):
        list(entries)
