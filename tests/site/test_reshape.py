"""Splits and merges: keys change hands, and neither readers nor writers notice."""

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from random import Random
from threading import Event
from typing import NamedTuple

import pytest
from tests.site.support import HookedEngine, host_of, node_of, nothing, open_memory, state_after
from tests.sizes import only
from tests.waiting import run_threads

from floodmark.codec.changelog import decode_row, encode_log_range
from floodmark.codec.ordered import encode_namespace
from floodmark.model.change import Change, Heartbeat
from floodmark.model.errors import (
    InvalidKey,
    LimitExceeded,
    OutcomeUnknown,
    PartitionNotFound,
    Retryable,
)
from floodmark.model.ranges import KeyRange
from floodmark.model.version import VERSION_MAX
from floodmark.partition import partition, reshaping
from floodmark.partition.layout import LogRow, load_logs
from floodmark.partition.read import changelog
from floodmark.site import Namespace, Site
from floodmark.testing.clock import SimulatedTime

KEYS = [b"key-%02d" % index for index in range(40)]


def ids(site: Site) -> list[int]:
    return [partition.id for partition in site.partitions()]


def reshape(site: Site, chance: Random) -> None:
    """Split or merge somewhere, never into more than eight partitions."""
    present = ids(site)
    if len(present) > 1 and chance.random() < len(present) / 8:
        index = chance.randrange(len(present) - 1)
        site.merge(present[index], present[index + 1])
        return
    key = chance.choice(KEYS)
    if encode_namespace(1) + key not in [partition.range.start for partition in site.partitions()]:
        site.split("users", key)


@pytest.fixture
def short_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of three rows, so that readers come back often."""
    monkeypatch.setattr(partition, "PAGE_ROWS_MAX", 3)
    monkeypatch.setattr(changelog, "PAGE_ROWS_MAX", 3)


# What a reshape is


@pytest.mark.usefixtures("users")
def test_split_cuts_before_the_key_and_merge_undoes_it(site: Site) -> None:
    boundary = encode_namespace(1) + b"m"
    left, right = site.split("users", b"m")
    assert [(part.id, part.range) for part in site.partitions()] == [
        (left, KeyRange(b"", boundary)),
        (right, KeyRange(boundary, None)),
    ]
    joined = site.merge(left, right)
    assert [(part.id, part.range) for part in site.partitions()] == [(joined, KeyRange())]


def test_each_key_is_served_by_the_partition_of_its_range(site: Site, users: Namespace) -> None:
    site.split("users", b"f")
    site.split("users", b"m")
    for key in (b"a", b"e\xff", b"f", b"f\x00", b"l", b"m", b"z"):
        users.put(key, key)
        assert users.get(key) == key
        (change,) = site.changes("users", prefix=key, end_key=key + b"\x00")
        (serving,) = [p for p in site.partitions() if p.range.contains(encode_namespace(1) + key)]
        assert change.partition == serving.id


class Halves(NamedTuple):
    """A site that was split once, and the ids of its two partitions."""

    site: Site
    left: int
    right: int


WRONG: dict[str, Callable[[Halves], object]] = {
    "boundary": lambda halves: halves.site.split("users", b"m"),
    "order": lambda halves: halves.site.merge(halves.right, halves.left),
    "itself": lambda halves: halves.site.merge(halves.left, halves.left),
    "unknown right": lambda halves: halves.site.merge(halves.left, 999),
    "unknown left": lambda halves: halves.site.merge(999, halves.right),
    "retired": lambda halves: halves.site.merge(halves.left, halves.left - 2),
    "no neighbours": lambda halves: halves.site.merge(halves.site.split("users", b"c")[0], halves.right),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_impossible_reshapes_are_refused(site: Site, users: Namespace, wrong: str) -> None:
    users.put(b"a", b"1")
    halves = Halves(site, *site.split("users", b"m"))
    with pytest.raises(PartitionNotFound):
        WRONG[wrong](halves)
    users.put(b"z", b"2")
    assert list(users.scan()) == [(b"a", b"1"), (b"z", b"2")]


@pytest.mark.usefixtures("users")
def test_split_needs_a_key(site: Site) -> None:
    with pytest.raises(InvalidKey):
        site.split("users", b"")


@pytest.mark.usefixtures("users")
def test_number_of_partitions_is_limited(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reshaping, "PARTITIONS_MAX", 3)
    site.split("users", b"f")
    _, right = site.split("users", b"m")
    before = ids(site)
    with pytest.raises(LimitExceeded):
        site.split("users", b"t")
    assert ids(site) == before
    site.merge(before[-2], right)
    site.split("users", b"t")


def test_ids_are_never_used_again(engine: HookedEngine, time: SimulatedTime) -> None:
    chance = Random(1)
    used: set[int] = set()
    for _ in range(10):
        with open_memory(engine, time) as site:
            if not site.namespaces():
                site.create_namespace("users")
            for _ in range(8):
                before = {part.id for part in site.partitions()} | {log.id for log in load_logs(engine)}
                used |= before
                reshape(site, chance)
                fresh = {part.id for part in site.partitions()} | {log.id for log in load_logs(engine)}
                assert not (fresh - before) & used
            time.advance(2 * 24 * 3600 * 1000)
            site.collect_garbage()


# Logs


def log_rows(engine: HookedEngine, log: LogRow) -> list[tuple[bytes, bytes]]:
    start, end = encode_log_range(log.id, 0, VERSION_MAX)
    return engine.scan("log", start, end, rows_max=10**6, bytes_max=10**9)


def sealed_logs(engine: HookedEngine) -> dict[int, LogRow]:
    return {log.id: log for log in load_logs(engine) if log.sealed_at is not None}


@pytest.mark.usefixtures("users")
def test_new_logs_name_their_parents_and_open_where_those_were_sealed(
    site: Site, engine: HookedEngine
) -> None:
    (first,) = [log for log in load_logs(engine) if log.partition is not None]
    left, right = site.split("users", b"m")
    logs = {log.partition: log for log in load_logs(engine)}
    assert logs[left].parents == logs[right].parents == [first.id]
    assert logs[left].opened_at == logs[right].opened_at == sealed_logs(engine)[first.id].sealed_at
    joined = site.merge(left, right)
    logs = {log.partition: log for log in load_logs(engine)}
    assert logs[joined].parents == [logs[left].id, logs[right].id]
    assert logs[joined].opened_at == logs[left].sealed_at == logs[right].sealed_at


def test_sealed_log_ends_with_a_heartbeat_for_itself_alone(
    site: Site, users: Namespace, engine: HookedEngine
) -> None:
    site.heartbeat()
    users.put_many({b"a": b"1", b"b": b"2"})
    site.split("users", b"m")
    ((log_id, log),) = sealed_logs(engine).items()
    *commits, (_, last) = log_rows(engine, log)
    beat = decode_row(log.sealed_at or 0, last)
    assert isinstance(beat, Heartbeat)
    assert (beat.log, beat.through) == (log_id, log.sealed_at)
    assert {namespace: sums.all.changes for namespace, sums in beat.sums.items()} == {1: 2}
    assert len(commits) == 1


def test_sealed_logs_are_never_rewritten(site: Site, users: Namespace, engine: HookedEngine) -> None:
    chance = Random(2)
    seen: dict[int, tuple[LogRow, list[tuple[bytes, bytes]]]] = {}
    for step in range(60):
        users.put(chance.choice(KEYS), b"%d" % step)
        reshape(site, chance)
        now = {log_id: (log, log_rows(engine, log)) for log_id, log in sealed_logs(engine).items()}
        assert {log_id: now[log_id] for log_id in seen} == seen
        seen = now
    assert len(seen) > 50


# Readers


@pytest.mark.usefixtures("short_pages")
@pytest.mark.parametrize("seed", only(range(5), range(10)))
@pytest.mark.parametrize("reverse", [False, True])
def test_scan_across_splits_and_merges_sees_each_row_once(
    site: Site, users: Namespace, seed: int, reverse: bool
) -> None:
    chance = Random(seed)
    for step in range(120):
        users.put(chance.choice(KEYS), b"%d" % step)
        if chance.random() < 0.2:
            users.delete(chance.choice(KEYS))
    expected = list(users.scan(reverse=reverse))
    found = []
    for row in users.scan(reverse=reverse):
        found.append(row)
        reshape(site, chance)
        users.put(chance.choice(KEYS), b"too late")
    assert found == expected


@pytest.mark.usefixtures("short_pages")
@pytest.mark.parametrize("seed", only(range(5), range(10)))
def test_changes_across_splits_and_merges_come_once_and_in_order(
    site: Site, users: Namespace, seed: int
) -> None:
    chance = Random(seed)
    written = []
    for step in range(100):
        written.append(users.put(chance.choice(KEYS), b"%d" % step))
        if chance.random() < 0.2:
            reshape(site, chance)
    found = []
    for change in site.changes("users"):
        found.append(change.version)
        reshape(site, chance)
        users.put(chance.choice(KEYS), b"too late")
    assert found == written


def test_snapshots_from_before_a_reshape_stay_as_they_were(site: Site, users: Namespace) -> None:
    chance = Random(3)
    snapshots = []
    for step in range(60):
        users.put_many(dict.fromkeys(chance.sample(KEYS, 5), b"%d" % step))
        snapshots.append((site.now(), list(users.scan())))
        reshape(site, chance)
    for at, rows in snapshots:
        assert list(users.scan(at=at)) == rows
        assert users.get_many([key for key, _ in rows], at=at) == [value for _, value in rows]


# Writers


@pytest.fixture
def restless_interpreter() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("restless_interpreter")
def test_reshapes_under_writers_and_readers_lose_nothing(real_site: Site) -> None:
    users = real_site.create_namespace("users")
    acknowledged: list[tuple[bytes, bytes]] = []
    followed: list[Change] = []
    done = Event()

    def write(seed: int) -> None:
        chance = Random(seed)
        for step in range(100):
            value = b"%d/%d" % (seed, step)
            keys = chance.sample(KEYS, chance.choice([1, 1, 6]))
            if len(keys) == 1:
                users.put(keys[0], value)
            else:
                users.put_many(dict.fromkeys(keys, value))
            acknowledged.extend((key, value) for key in keys)

    def write_all() -> None:
        run_threads(*(partial(write, seed) for seed in range(3)))
        done.set()

    def reshape_all() -> None:
        chance = Random(99)
        while not done.is_set():
            reshape(real_site, chance)

    def follow_once() -> None:
        since = followed[-1].version if followed else 0
        followed.extend(real_site.changes("users", since=since))

    def follow() -> None:
        while not done.is_set():
            follow_once()

    def scan() -> None:
        while not done.is_set():
            at = real_site.now()
            first = list(users.scan(at=at))
            assert first == list(users.scan(at=at, reverse=True))[::-1]
            assert len({key for key, _ in first}) == len(first)

    run_threads(write_all, reshape_all, follow, scan)
    changes = list(real_site.changes("users"))
    assert sorted((change.key, change.value) for change in changes) == sorted(acknowledged)
    follow_once()
    assert followed == changes
    assert state_after(changes) == dict(users.scan())


# Failures


@pytest.mark.parametrize(("operation", "happened"), [("write", True), ("write", False), ("sync", True)])
@pytest.mark.parametrize("recovers", [True, False], ids=["settled", "open"])
def test_split_whose_answer_was_lost_can_be_tried_again(
    engine: HookedEngine, time: SimulatedTime, operation: str, happened: bool, recovers: bool
) -> None:
    """Were it done twice, partitions would overlap and the site could not be opened again."""
    site = open_memory(engine, time)
    users = site.create_namespace("users")
    first = users.put(b"a", b"1")
    failing = [operation] if recovers else [operation, "recover"]

    def lose_answer(done: str) -> None:
        if done in failing:
            failing.remove(done)
            raise OutcomeUnknown("no answer")

    def lose_split(begun: str) -> None:
        if begun == "recover" and not happened:
            engine.lose_unsynced()

    engine.after, engine.before = lose_answer, lose_split
    with suppress(OutcomeUnknown, Retryable):
        site.split("users", b"m")
    with suppress(PartitionNotFound):
        site.split("users", b"m")
    engine.before = nothing
    second = users.put(b"z", b"2")
    site.close()
    with open_memory(engine, time) as again:
        assert len(again.partitions()) == 2
        assert [change.version for change in again.changes("users")] == [first, second]
        assert [change.version for change in again.changes("users", since=first)] == [second]


# Heat


def test_heat_counts_what_each_partition_did(site: Site, users: Namespace) -> None:
    left, right = site.split("users", b"m")
    users.put(b"a", b"12345")
    users.put_many({b"b": b"1", b"c": b"2", b"z": b"3"})
    users.delete(b"z")
    users.compare_and_set(b"y", None, b"4")
    for _ in range(3):
        users.get(b"a")
    counted = {part.id: part for part in site.partitions()}
    assert (counted[left].writes, counted[right].writes) == (3, 3)
    # Three bytes of namespace in each key, and one of flags in each value.
    assert counted[left].bytes_written == (3 + 1 + 5 + 1) + 2 * (3 + 1 + 1 + 1)
    assert counted[left].reads == 3
    assert site.statistics().changes == 6


def test_heat_is_kept_interval_by_interval(site: Site, users: Namespace, time: SimulatedTime) -> None:
    opened_ms = time()
    for count in (2, 0, 5):
        for _ in range(count):
            users.put(b"key", b"1")
            users.get(b"key")
        time.advance(1000)
        node_of(site).sample_heat()
    users.put(b"key", b"1")
    time.advance(400)
    (heat,) = site.heat()
    assert heat.id == ids(site)[0]
    assert [(sample.writes, sample.reads) for sample in heat.samples] == [(2, 2), (0, 0), (5, 5), (1, 0)]
    assert [(sample.from_ms - opened_ms, sample.to_ms - opened_ms) for sample in heat.samples] == [
        (0, 1000),
        (1000, 2000),
        (2000, 3000),
        (3000, 3400),
    ]


@pytest.mark.usefixtures("users")
def test_heat_history_is_bounded_and_begins_anew_after_a_split(site: Site, time: SimulatedTime) -> None:
    for _ in range(300):
        time.advance(1000)
        node_of(site).sample_heat()
    (heat,) = site.heat()
    assert len(heat.samples) == 121
    site.split("users", b"m")
    assert [len(heat.samples) for heat in site.heat()] == [1, 1]


# Many partitions


def test_put_many_over_many_partitions_of_a_node_is_one_commit() -> None:
    with open_memory(HookedEngine(), SimulatedTime()) as site:
        users = site.create_namespace("users")
        for key in KEYS[1:]:
            site.split("users", key)
        counters = node_of(site).committer.counting
        rounds, commits = counters.rounds, counters.commits
        version = users.put_many(dict.fromkeys(KEYS, b"1"))
        assert (counters.rounds, counters.commits) == (rounds + 1, commits + 1)
        changes = list(site.changes("users"))
        assert [change.key for change in changes] == KEYS
        assert {change.version for change in changes} == {version}


def test_put_many_goes_on_where_partitions_have_moved_in_the_middle() -> None:
    with open_memory(HookedEngine(), SimulatedTime()) as site:
        users = site.create_namespace("users")
        for key in KEYS[1::4]:
            site.split("users", key)
        router, node = host_of(site).router, node_of(site)
        stale = node.map
        site.split("users", KEYS[2])
        site.merge(*ids(site)[-2:])
        present, node.map = node.map, stale
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(node, "refresh", lambda: setattr(node, "map", present))
            assert router.maps is node
            users.put_many(dict.fromkeys(KEYS, b"1"))
        assert dict(users.scan()) == dict.fromkeys(KEYS, b"1")
