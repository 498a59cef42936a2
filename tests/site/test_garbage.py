"""Garbage collection: what can still be asked for stays, and what was deleted stays deleted."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from functools import partial
from random import Random
from threading import Event

import pytest
from tests.site.support import HookedEngine, node_of, nothing, open_memory, rows_of, stored_versions
from tests.waiting import run_threads

from floodmark.engine.base import scan_pages
from floodmark.model.errors import (
    NamespaceNotFound,
    SafePointNotFound,
    VersionCollected,
)
from floodmark.model.version import COUNTER_BITS, Version
from floodmark.partition import partition
from floodmark.partition.layout import load_logs
from floodmark.partition.read import records
from floodmark.partition.retention import collect
from floodmark.site import Namespace, Site
from floodmark.site.rewriting import rewrite
from floodmark.testing.clock import SimulatedTime

HOUR = timedelta(hours=1)
HOUR_MS = 3_600_000
LARGE = b"large" * 2000


@pytest.fixture
def users(site: Site) -> Namespace:
    return site.create_namespace("users", retention=HOUR)


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of three rows and batches of two, so that a collection has many places to stop at."""
    monkeypatch.setattr(collect, "scan_pages", partial(scan_pages, rows_max=3))
    monkeypatch.setattr(collect, "BATCH_ROWS", 2)
    monkeypatch.setattr(partition, "PAGE_ROWS_MAX", 2)
    monkeypatch.setattr(records, "PAGE_ROWS_MAX", 2)


def oldest(site: Site, name: str = "users") -> Version:
    return next(space.oldest_version for space in site.statistics().namespaces if space.name == name)


def age(site: Site, time: SimulatedTime, hours: float = 2) -> None:
    """Let time pass and collect."""
    time.advance(int(hours * HOUR_MS))
    site.collect_garbage()


# What goes and what stays


def test_only_the_newest_version_behind_the_safe_point_stays(
    site: Site, users: Namespace, time: SimulatedTime
) -> None:
    old = [users.put(b"key", b"%d" % index) for index in range(5)]
    time.advance(2 * HOUR_MS)
    young = users.put(b"key", b"young")
    report = site.collect_garbage()
    assert stored_versions(site, "users") == {(b"key", old[-1]), (b"key", young)}
    assert (report.versions_read, report.versions_removed, report.keys_removed) == (6, 4, 0)
    assert oldest(site) == (time() - HOUR_MS) << COUNTER_BITS
    assert users.get(b"key", at=oldest(site)) == b"4"
    for version in (*old, oldest(site) - 1):
        with pytest.raises(VersionCollected):
            users.get(b"key", at=version)
        with pytest.raises(VersionCollected):
            list(users.scan(at=version))


def test_tombstones_and_expired_records_go_with_everything_older(
    site: Site, users: Namespace, time: SimulatedTime
) -> None:
    for key in (b"deleted", b"expired", b"alive"):
        for index in range(3):
            users.put(key, b"%d" % index)
    tombstone = users.delete(b"deleted")
    expired = users.put(b"expired", b"short", ttl=10)
    last = users.put(b"alive", b"last", ttl=10 * HOUR)
    time.advance(20_000)
    node_of(site).expiries.tell()
    age(site, time)
    assert stored_versions(site, "users") == {(b"alive", last)}
    assert list(users.scan()) == [(b"alive", b"last")]
    (statistics,) = site.statistics().namespaces
    assert statistics.collected_horizon == max(tombstone, expired)


def test_dead_records_above_the_safe_point_stay(site: Site, users: Namespace, time: SimulatedTime) -> None:
    put = users.put(b"deleted", b"1")
    expiring = users.put(b"expiring", b"1", ttl=HOUR / 2)
    time.advance(HOUR_MS // 2 + 1_000)
    node_of(site).expiries.tell()
    time.advance(HOUR_MS + HOUR_MS // 2 - 61_000)
    users.put(b"fresh", b"1", ttl=1)
    tombstone = users.delete(b"deleted")
    time.advance(60_000)
    site.collect_garbage()
    stored = stored_versions(site, "users")
    assert {(b"deleted", put), (b"deleted", tombstone)} < stored
    assert (b"expiring", expiring) not in stored
    assert users.get(b"deleted", at=tombstone - 1) == b"1"
    assert users.get(b"deleted") is None


def test_horizon_outlives_the_site(engine: HookedEngine, time: SimulatedTime) -> None:
    with open_memory(engine, time) as site:
        users = site.create_namespace("users", retention=HOUR)
        tombstone = users.delete(b"key")
        age(site, time)
        collected = oldest(site)
    with open_memory(engine, time) as site:
        (statistics,) = site.statistics().namespaces
        assert (statistics.collected_horizon, statistics.oldest_version) == (tombstone, collected)
        with pytest.raises(VersionCollected):
            site.namespace("users").get(b"key", at=collected - 1)


def test_retention_is_each_namespaces_own(site: Site, users: Namespace, time: SimulatedTime) -> None:
    keepers = site.create_namespace("keepers", retention=10 * HOUR)
    for space in (users, keepers):
        space.put(b"key", b"1")
        space.put(b"key", b"2")
    age(site, time)
    assert len(stored_versions(site, "users")) == 1
    assert len(stored_versions(site, "keepers")) == 2
    site.update_namespace("keepers", retention=HOUR)
    site.collect_garbage()
    assert len(stored_versions(site, "keepers")) == 1


def test_nothing_is_collected_that_is_not_durable(
    site: Site, users: Namespace, engine: HookedEngine, time: SimulatedTime
) -> None:
    users.put(b"key", b"1")
    version = users.put(b"key", b"2", durability="async")
    time.advance(2 * HOUR_MS)
    site.collect_garbage()
    assert oldest(site) < version
    for kept in range(engine.unsynced + 1):
        with open_memory(engine.crashed(kept), time) as after_power_cut:
            assert after_power_cut.namespace("users").get(b"key") in (b"1", b"2")


def test_log_is_trimmed_and_sealed_logs_are_forgotten(
    site: Site, users: Namespace, engine: HookedEngine, time: SimulatedTime
) -> None:
    for index in range(5):
        users.put(b"key-%d" % index, b"1")
        site.split("users", b"key-%d" % index)
    site.heartbeat()
    time.advance(2 * HOUR_MS)
    young = users.put(b"key-0", b"2")
    trimmed = site.collect_garbage().log_trimmed_version
    assert trimmed == oldest(site)
    assert len(rows_of(engine)["log"]) == 1
    assert all(log.sealed_at is None for log in load_logs(engine))
    assert [change.version for change in site.changes("users", since=trimmed)] == [young]
    site.close()
    with open_memory(engine, time) as again:
        assert [change.version for change in again.changes("users", since=trimmed)] == [young]
        with pytest.raises(VersionCollected):
            next(again.changes("users", since=trimmed - 1))


# Safe points


def test_lowest_of_several_holders_counts(site: Site, users: Namespace, time: SimulatedTime) -> None:
    versions = [users.put(b"key", b"%d" % index) for index in range(4)]
    site.hold_safe_point("second", versions[1])
    site.hold_safe_point("third", versions[2])
    age(site, time)
    assert oldest(site) == versions[1]
    assert [users.get(b"key", at=version) for version in versions[1:]] == [b"1", b"2", b"3"]
    site.release_safe_point("second")
    site.collect_garbage()
    assert oldest(site) == versions[2]
    site.release_safe_point("third")
    site.collect_garbage()
    assert oldest(site) > versions[3]


def test_safe_point_is_over_after_its_lifetime(site: Site, users: Namespace, time: SimulatedTime) -> None:
    version = users.put(b"key", b"1")
    held = site.hold_safe_point("reader", version, lifetime=3 * HOUR)
    assert site.safe_points() == [held]
    age(site, time, 2)
    assert oldest(site) == version
    age(site, time, 1)
    assert oldest(site) > version
    assert site.safe_points() == []
    with pytest.raises(SafePointNotFound):
        site.release_safe_point("reader")


def test_safe_point_that_is_over_cannot_be_released(
    site: Site, users: Namespace, time: SimulatedTime
) -> None:
    """Whether or not garbage collection has come by since."""
    site.hold_safe_point("reader", users.put(b"key", b"1"), lifetime=HOUR)
    time.advance(HOUR_MS)
    assert site.safe_points() == []
    with pytest.raises(SafePointNotFound):
        site.release_safe_point("reader")


def test_safe_point_outlives_the_site(engine: HookedEngine, time: SimulatedTime) -> None:
    with open_memory(engine, time) as site:
        version = site.create_namespace("users", retention=HOUR).put(b"key", b"1")
        held = site.hold_safe_point("reader", version, lifetime=5 * HOUR)
    with open_memory(engine, time) as site:
        assert site.safe_points() == [held]
        age(site, time)
        assert oldest(site) == version


# Readers


@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize("reverse", [False, True])
def test_open_scan_keeps_what_it_still_has_to_read(
    site: Site, users: Namespace, time: SimulatedTime, reverse: bool
) -> None:
    expected = [(b"key-%d" % index, b"old") for index in range(8)]
    users.put_many(dict(expected))
    rows = users.scan(reverse=reverse)
    found = [next(rows)]
    for index in range(8):
        users.put(b"key-%d" % index, b"new")
        users.delete(b"key-%d" % index)
        age(site, time)
        found += [row for row in [next(rows, None)] if row]
    assert found == (expected[::-1] if reverse else expected)
    site.collect_garbage()
    assert stored_versions(site, "users") == set()


def test_scan_that_was_not_begun_is_not_told_that_it_comes_too_late(
    site: Site, users: Namespace, time: SimulatedTime
) -> None:
    """It named no version, so there is none that it could have asked for too late."""
    users.put(b"key", b"old")
    rows = users.scan()
    users.put(b"key", b"new")
    age(site, time)
    assert list(rows) in ([(b"key", b"old")], [(b"key", b"new")])


READS_OF_THE_PRESENT: dict[str, Callable[[Site], object]] = {
    "scan": lambda site: list(site.namespace("users").scan()),
    "delete_range": lambda site: site.namespace("users").delete_range(),
    "find_records": lambda site: site.host.verification.find_records("users", [b"key"], None, False),
    "rewrite": lambda site: rewrite(site.host, "users"),
}


@pytest.mark.parametrize("read", READS_OF_THE_PRESENT)
def test_reader_that_names_no_version_is_never_told_that_it_was_collected(
    site: Site, time: SimulatedTime, monkeypatch: pytest.MonkeyPatch, read: str
) -> None:
    """A collection falls between the version of a reader and its safe point."""
    users = site.create_namespace("users", retention=timedelta(milliseconds=1))
    users.put(b"key", b"value")
    committer = node_of(site).committer
    read_version, collections = committer.read_version, [1, 1]

    def read_version_too_early() -> Version:
        version = read_version()
        if collections:
            collections.pop()
            users.put(b"key", b"value")
            time.advance(1000)
            site.collect_garbage()
            assert oldest(site) > version
        return version

    monkeypatch.setattr(committer, "read_version", read_version_too_early)
    assert READS_OF_THE_PRESENT[read](site)
    assert not collections


def test_open_reader_of_changes_keeps_what_it_still_has_to_read(
    site: Site, users: Namespace, time: SimulatedTime
) -> None:
    versions = [users.put(b"key", b"%d" % index + LARGE) for index in range(5)]
    reader = site.changes("users")
    found = [next(reader)]
    for _ in range(4):
        users.put(b"key", b"later")
        age(site, time)
        found.append(next(reader))
    assert [change.version for change in found] == versions
    assert next(reader, None) is None
    site.collect_garbage()
    assert oldest(site) > versions[-1]


def test_reader_that_is_forgotten_holds_nothing(site: Site, users: Namespace, time: SimulatedTime) -> None:
    version = users.put(b"key", b"1")
    rows = users.scan()
    next(rows)
    del rows
    age(site, time)
    assert oldest(site) > version


@pytest.mark.parametrize("gone", ["overwritten", "deleted", "dropped"])
def test_change_log_never_names_a_value_that_is_gone(
    site: Site, users: Namespace, time: SimulatedTime, gone: str
) -> None:
    """Another namespace, with a longer memory, keeps the log in which the value is named."""
    keepers = site.create_namespace("keepers", retention=10 * HOUR)
    begin = site.now()
    kept = [keepers.put(b"key", b"1"), keepers.put(b"key", LARGE)]
    users.put_many({b"key": LARGE, b"other": LARGE})
    if gone == "overwritten":
        users.put(b"key", b"small")
    elif gone == "deleted":
        users.delete_range()
    else:
        site.drop_namespace("users")
    kept.append(keepers.put(b"key", b"3"))
    age(site, time)
    assert [change.version for change in site.changes("keepers", since=begin)] == kept
    for change in site.changes(since=site.now()):
        raise AssertionError(change)


# Drops


def test_dropped_namespace_is_removed_when_the_safe_point_has_passed_the_drop(
    site: Site, users: Namespace, engine: HookedEngine, time: SimulatedTime
) -> None:
    users.put(b"key", LARGE)
    time.advance(2 * HOUR_MS)
    dropped_at = site.now()
    site.drop_namespace("users")
    with pytest.raises(NamespaceNotFound):
        users.get(b"key")
    assert site.collect_garbage().namespaces_removed == 0
    assert len(rows_of(engine)["data"]) == 1
    site.hold_safe_point("reader", dropped_at)
    time.advance(2 * HOUR_MS)
    assert site.collect_garbage().namespaces_removed == 0
    site.release_safe_point("reader")
    assert site.collect_garbage().namespaces_removed == 1
    assert rows_of(engine)["data"] == []
    assert site.collect_garbage().namespaces_removed == 0


def test_name_of_a_dropped_namespace_returns_empty_and_untouched(
    site: Site, users: Namespace, time: SimulatedTime
) -> None:
    users.put(b"key", b"old")
    site.drop_namespace("users")
    again = site.create_namespace("users", retention=10 * HOUR)
    assert again.get(b"key") is None
    version = again.put(b"key", b"new")
    age(site, time)
    assert stored_versions(site, "users") == {(b"key", version)}
    assert again.get(b"key", at=version) == b"new"


def test_write_that_meets_a_drop_leaves_nothing_behind(
    site: Site, users: Namespace, engine: HookedEngine, time: SimulatedTime
) -> None:
    """It is under way when its namespace is dropped and removed: refused, or removed as well."""

    def pairs() -> Iterator[tuple[bytes, bytes]]:
        yield b"first", LARGE
        site.drop_namespace("users")
        age(site, time)
        yield b"second", LARGE

    with suppress(NamespaceNotFound):
        users.put_many(pairs())
    age(site, time)
    assert rows_of(engine)["data"] == []
    assert list(site.changes(since=site.now())) == []


@pytest.mark.usefixtures("small_steps")
def test_key_that_is_collected_while_a_scan_reads_it_backwards_stays_dead(
    site: Site, users: Namespace, engine: HookedEngine, time: SimulatedTime
) -> None:
    """Its oldest versions are read, then it goes, and the tombstone with it that is to be read next."""
    users.put(b"ada", b"1")
    users.put(b"ada", b"2")
    users.delete(b"ada")

    def collect_once(operation: str) -> None:
        if operation == "ceiling":
            engine.before = nothing
            age(site, time)
            assert rows_of(engine)["data"] == []

    engine.before = collect_once
    assert list(users.scan(reverse=True)) == []
    assert engine.before is nothing


# Threads


@pytest.mark.usefixtures("small_steps")
def test_reads_of_the_past_during_a_collection_are_right_or_refused(site: Site, time: SimulatedTime) -> None:
    users = site.create_namespace("users", retention=timedelta(seconds=5))
    history: list[tuple[Version, dict[bytes, bytes]]] = []
    done = Event()

    def write() -> None:
        chance, state = Random(1), dict[bytes, bytes]()
        for step in range(400):
            key = b"key-%d" % chance.randrange(6)
            if chance.random() < 0.3:
                version = users.delete(key)
                state.pop(key, None)
            else:
                version = users.put(key, b"%d" % step)
                state[key] = b"%d" % step
            history.append((version, dict(state)))
            time.advance(chance.randrange(100))
        done.set()

    def collect_all() -> None:
        while not done.is_set():
            site.collect_garbage()

    def read(seed: int) -> None:
        chance, reads = Random(seed), 0
        while not done.is_set() or reads < 200:
            if history:
                version, state = history[-1 - chance.randrange(min(120, len(history)))]
                with suppress(VersionCollected):
                    check_past(users, version, state, chance)
                reads += 1

    run_threads(write, collect_all, partial(read, 1), partial(read, 2))
    site.collect_garbage()
    kept = [(version, state) for version, state in history if version >= oldest(site)]
    assert 0 < len(kept) < len(history)
    for version, state in kept:
        assert dict(users.scan(at=version)) == state


def check_past(users: Namespace, version: Version, state: dict[bytes, bytes], chance: Random) -> None:
    if chance.random() < 0.5:
        assert dict(users.scan(at=version, reverse=chance.random() < 0.5)) == state
    else:
        key = b"key-%d" % chance.randrange(6)
        assert users.get(key, at=version) == state.get(key)


def test_collection_under_writers_leaves_their_writes_alone(real_site: Site) -> None:
    users = real_site.create_namespace("users", retention=timedelta(0))
    done = Event()
    last: dict[bytes, bytes | None] = {}

    def write(seed: int) -> None:
        chance = Random(seed)
        for step in range(150):
            key = b"%d/%d" % (seed, chance.randrange(5))
            last[key] = None if chance.random() < 0.4 else b"%d" % step
            value = last[key]
            if value is None:
                users.delete(key)
            else:
                users.put(key, value)
            assert users.get(key) == value

    def write_all() -> None:
        run_threads(*(partial(write, seed) for seed in range(3)))
        done.set()

    def collect_all() -> None:
        while not done.is_set():
            real_site.collect_garbage()

    run_threads(write_all, collect_all)
    alive = {key: value for key, value in last.items() if value is not None}
    assert dict(users.scan()) == alive
    assert {key for key, _ in stored_versions(real_site, "users")} >= set(alive)
