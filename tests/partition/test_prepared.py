"""Prepared writes: who sees them, who waits for them, and what they become."""

from collections.abc import Callable
from functools import partial
from threading import Event, Thread
from typing import Any

import pytest
from tests.site.support import HookedEngine, node_of, open_memory
from tests.waiting import HANG_SECONDS, run_threads, wait_until

from floodmark.codec.ordered import encode_namespace
from floodmark.codec.values import TOMBSTONE, encode_value
from floodmark.model.change import Stamp
from floodmark.model.errors import (
    CommitTooLarge,
    InvalidArgument,
    InvalidValue,
    NamespaceNotFound,
    PartitionMoved,
    Retryable,
    StorageFull,
)
from floodmark.model.partition import Decision, Fate
from floodmark.model.version import Version
from floodmark.partition import LocalPartition, preparing
from floodmark.partition.prepared import settling
from floodmark.partition.prepared import writes as prepared
from floodmark.site import Namespace, Site
from floodmark.testing.clock import SimulatedTime

UNDECIDED = Fate(Decision.UNDECIDED)


class Coordinator:
    """Knows how transactions end: what a test says, and who asked."""

    def __init__(self) -> None:
        self.fates: dict[str, Fate] = {}
        self.asked = Event()

    def __call__(self, transaction: str) -> Fate:
        self.asked.set()
        return self.fates.get(transaction, UNDECIDED)


@pytest.fixture
def coordinator(site: Site) -> Coordinator:
    coordinator = Coordinator()
    node_of(site).committer.prepared.settler = coordinator
    return coordinator


@pytest.fixture
def partition(users: Namespace, site: Site) -> LocalPartition:
    return node_of(site).map.route(qualify(users, b"a"))


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settling, "ASK_SECONDS", 0.0)


@pytest.fixture
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing, "PREPARE_ASKS_MAX", settling.ASKS_MAX)


def qualify(users: Namespace[Any], key: bytes) -> bytes:
    return encode_namespace(users.id) + key


def prepare(partition: LocalPartition, users: Namespace, transaction: str, **values: bytes) -> Version:
    keys = [qualify(users, key.encode()) for key in values]
    return partition.prepare(transaction, keys, [encode_value(value) for value in values.values()])


# What a prepared write is


def test_prepared_write_is_seen_when_it_is_committed(
    site: Site, users: Namespace, partition: LocalPartition
) -> None:
    version = prepare(partition, users, "t", a=b"1", b=b"2")
    assert users.get(b"a") is None
    assert _prepared(site) == [("t", version)]
    assert partition.commit_prepared("t", version)
    assert (users.get(b"a"), users.get(b"b")) == (b"1", b"2")
    assert [(change.key, change.version) for change in site.changes("users")] == [
        (b"a", version),
        (b"b", version),
    ]
    record = users.record(b"a")
    assert record is not None
    assert record.stamp == Stamp(version, 7)
    assert _prepared(site) == []


def _prepared(site: Site) -> list[tuple[str, Version]]:
    return [(write.transaction, write.version) for write in node_of(site).committer.prepared.all()]


def test_aborted_write_leaves_no_trace(site: Site, users: Namespace, partition: LocalPartition) -> None:
    users.put(b"a", b"before")
    before = list(site.changes("users"))
    prepare(partition, users, "t", a=b"1")
    assert partition.abort_prepared("t")
    assert users.get(b"a") == b"before"
    assert list(site.changes("users")) == before
    assert site.resolved_version() > before[-1].version


def test_every_step_may_be_repeated(users: Namespace, partition: LocalPartition) -> None:
    version = prepare(partition, users, "t", a=b"1")
    assert prepare(partition, users, "t", a=b"1") == version
    assert [partition.commit_prepared("t", version) for _ in range(3)] == [True, False, False]
    assert not partition.abort_prepared("t")
    assert users.get(b"a") == b"1"
    prepare(partition, users, "u", a=b"2")
    assert [partition.abort_prepared("u") for _ in range(3)] == [True, False, False]
    assert not partition.commit_prepared("u", version)
    assert not partition.commit_prepared("never", version)
    assert users.get(b"a") == b"1"


def test_delete_may_be_prepared(users: Namespace, partition: LocalPartition) -> None:
    users.put(b"a", b"1")
    version = partition.prepare("t", [qualify(users, b"a")], [TOMBSTONE])
    partition.commit_prepared("t", version)
    assert users.get(b"a") is None


# What is announced


def test_resolved_stays_below_what_is_prepared(
    site: Site, users: Namespace, partition: LocalPartition
) -> None:
    first = prepare(partition, users, "t", a=b"1")
    second = prepare(partition, users, "u", b=b"1")
    written = users.put(b"c", b"1")
    assert site.resolved_version() == first - 1
    assert list(site.changes("users")) == []
    partition.commit_prepared("t", written + 1)
    assert site.resolved_version() == second - 1
    partition.abort_prepared("u")
    assert site.resolved_version() > written + 1
    assert [(change.key, change.version) for change in site.changes("users")] == [
        (b"c", written),
        (b"a", written + 1),
    ]


def test_resolved_stays_below_it_after_a_restart(
    users: Namespace, partition: LocalPartition, engine: HookedEngine, time: SimulatedTime
) -> None:
    version = prepare(partition, users, "t", a=b"1")
    users.put(b"a", b"newer")
    with open_memory(engine.crashed(), time) as again:
        assert again.resolved_version() == version - 1
        assert again.heartbeat().through == version - 1
        assert _prepared(again) == [("t", version)]
        node_of(again).map.partitions[0].commit_prepared("t", version)
        assert again.resolved_version() > version
        assert again.namespace("users").get(b"a") == b"newer"
        assert again.namespace("users").get(b"a", at=version) == b"1"


def test_follower_gets_a_late_commit_in_its_place(
    site: Site, users: Namespace, partition: LocalPartition
) -> None:
    """From the tail, which has what was written meanwhile."""
    with node_of(site).committer.tail.following(lambda: node_of(site).clock.latest):
        since = site.resolved_version()
        version = prepare(partition, users, "t", a=b"1")
        later = [users.put(b"b", b"2"), users.put(b"a", b"3")]
        assert node_of(site).committer.tail.between(since, site.resolved_version()) == []
        partition.commit_prepared("t", version)
        entries = node_of(site).committer.tail.between(since, site.resolved_version())
        assert entries is not None
        assert [entry.version for entry in entries] == [version, *later]


# Who waits


def test_read_below_it_does_not_ask(
    users: Namespace, partition: LocalPartition, coordinator: Coordinator
) -> None:
    users.put(b"a", b"old")
    version = prepare(partition, users, "t", a=b"1")
    assert users.get(b"a", at=version - 1) == b"old"
    assert users.get(b"a") == b"old"
    assert users.put(b"a", b"plain") > version
    assert users.get(b"b", at=version) is None
    assert list(users.scan(b"b", b"z")) == []
    assert not coordinator.asked.is_set()


@pytest.mark.parametrize("commits", [True, False])
@pytest.mark.parametrize(
    "read",
    [
        lambda users, at: users.get(b"a", at=at),
        lambda users, at: dict(users.scan(at=at)).get(b"a"),
        lambda users, at: dict(users.scan(b"a", b"b", reverse=True, at=at)).get(b"a"),
    ],
    ids=["get", "scan", "reverse"],
)
def test_read_at_a_version_settles_what_is_prepared_on_its_keys(
    site: Site,
    users: Namespace,
    partition: LocalPartition,
    coordinator: Coordinator,
    read: Callable[[Namespace, Version], bytes | None],
    commits: bool,
) -> None:
    users.put(b"a", b"old")
    version = prepare(partition, users, "t", a=b"1")
    coordinator.fates["t"] = Fate(Decision.COMMIT, version) if commits else Fate(Decision.ABORT)
    assert read(users, site.now()) == (b"1" if commits else b"old")
    assert _prepared(site) == []


def test_commit_above_a_snapshot_is_not_in_it(
    site: Site, users: Namespace, partition: LocalPartition, coordinator: Coordinator
) -> None:
    prepare(partition, users, "t", a=b"1")
    at = site.now()
    coordinator.fates["t"] = Fate(Decision.COMMIT, site.now())
    assert users.get(b"a", at=at) is None
    assert users.get(b"a") == b"1"


def test_read_waits_while_it_is_undecided(
    site: Site, users: Namespace, partition: LocalPartition, coordinator: Coordinator
) -> None:
    version = prepare(partition, users, "t", a=b"1")
    found: list[bytes | None] = []

    def decide() -> None:
        assert coordinator.asked.wait(HANG_SECONDS)
        partition.commit_prepared("t", version)

    run_threads(lambda: found.append(users.get(b"a", at=site.now())), decide)
    assert found == [b"1"]


@pytest.mark.usefixtures("_impatient", "coordinator")
def test_nobody_waits_for_ever(site: Site, users: Namespace, partition: LocalPartition) -> None:
    prepare(partition, users, "t", a=b"1")
    with pytest.raises(Retryable, match="has prepared a write") as refused:
        users.get(b"a", at=site.now())
    assert refused.value.details["transaction"] == "t"
    with pytest.raises(Retryable):
        users.compare_and_set(b"a", None, b"2")
    assert users.put(b"a", b"plain")


def test_closing_the_site_ends_the_waiting(
    site: Site, users: Namespace, partition: LocalPartition, coordinator: Coordinator
) -> None:
    prepare(partition, users, "t", a=b"1")
    at = site.now()

    def read() -> None:
        with pytest.raises(PartitionMoved):
            partition.get(qualify(users, b"a"), at)

    def close() -> None:
        assert coordinator.asked.wait(HANG_SECONDS)
        site.close()

    run_threads(read, close)


def test_unchanged_keys_of_several_partitions_settle_what_is_prepared_on_one(
    site: Site, users: Namespace, coordinator: Coordinator
) -> None:
    site.split("users", b"m")
    since = site.now()
    partition = node_of(site).map.route(qualify(users, b"z"))
    version = prepare(partition, users, "t", z=b"1")
    coordinator.fates["t"] = Fate(Decision.COMMIT, version)
    rows = {qualify(users, key): encode_value(b"2") for key in (b"a", b"z")}
    assert site.host.router.put_unchanged(rows, since, durable=True) == 1
    assert users.get_many([b"a", b"z"]) == [b"2", b"1"]


@pytest.mark.parametrize("commits", [True, False])
def test_compare_and_set_decides_by_how_it_ends(
    users: Namespace, partition: LocalPartition, coordinator: Coordinator, commits: bool
) -> None:
    users.put(b"a", b"old")
    version = prepare(partition, users, "t", a=b"1")
    coordinator.fates["t"] = Fate(Decision.COMMIT, version) if commits else Fate(Decision.ABORT)
    assert (users.compare_and_set(b"a", b"old", b"2") != 0) is not commits
    assert users.get(b"a") == (b"1" if commits else b"2")


def test_writes_that_depend_on_what_is_unchanged_settle_it(
    site: Site, users: Namespace, partition: LocalPartition, coordinator: Coordinator
) -> None:
    key, since = qualify(users, b"a"), site.now()
    for transaction in ("put", "delete"):
        version = prepare(partition, users, transaction, a=b"1")
        coordinator.fates[transaction] = Fate(Decision.COMMIT, version)
        if transaction == "put":
            assert partition.put_unchanged([key], [encode_value(b"2")], since, durable=True) == 0
        else:
            assert partition.delete_unchanged([key], since, durable=True) == 0
        assert users.get(b"a") == b"1"


@pytest.mark.usefixtures("_impatient")
def test_second_prepare_on_a_key_is_refused_until_the_first_is_decided(
    users: Namespace, partition: LocalPartition, coordinator: Coordinator
) -> None:
    first = prepare(partition, users, "t", a=b"1")
    with pytest.raises(Retryable, match="'t' has prepared"):
        prepare(partition, users, "u", a=b"2", b=b"2")
    assert prepare(partition, users, "u", b=b"2")
    coordinator.fates["t"] = Fate(Decision.COMMIT, first)
    second = prepare(partition, users, "v", a=b"2")
    assert users.get(b"a") == b"1"
    partition.commit_prepared("v", second)
    assert users.get(b"a") == b"2"


@pytest.mark.usefixtures("_patient")
def test_second_prepare_on_a_key_waits_for_the_first_to_end(
    users: Namespace, partition: LocalPartition, coordinator: Coordinator
) -> None:
    first = prepare(partition, users, "t", a=b"1")
    second: list[Version] = []

    def decide() -> None:
        assert coordinator.asked.wait(HANG_SECONDS)
        partition.commit_prepared("t", first)

    run_threads(lambda: second.append(prepare(partition, users, "u", a=b"2")), decide)
    assert second[0] > first
    partition.commit_prepared("u", second[0])
    assert users.get(b"a") == b"2"


@pytest.mark.usefixtures("coordinator", "_patient")
def test_those_that_wait_for_keys_get_them_in_order_of_arrival(
    users: Namespace, partition: LocalPartition, site: Site
) -> None:
    """Also one that comes when the key is free and others stand in line."""
    lines = node_of(site).committer.prepared.lines
    keys = [qualify(users, b"a")]
    order: list[str] = []

    def take(name: str) -> None:
        version = prepare(partition, users, name, a=name.encode())
        order.append(name)
        partition.commit_prepared(name, version)

    with lines.standing(keys, seconds_max=0):
        threads = [Thread(target=take, args=(name,)) for name in "xyz"]
        for number, thread in enumerate(threads, start=2):
            thread.start()
            wait_until(lambda count=number: len(lines._lines[keys[0]]) >= count, "it does not stand in line")  # type: ignore[misc]
    for thread in threads:
        thread.join(HANG_SECONDS)
    assert order == ["x", "y", "z"]
    assert users.get(b"a") == b"z"
    assert lines.is_free(keys)


@pytest.mark.usefixtures("coordinator", "_impatient")
def test_one_that_others_wait_for_does_not_stand_in_line_behind_them(
    users: Namespace, partition: LocalPartition, site: Site
) -> None:
    version = prepare(partition, users, "t", a=b"1")
    with node_of(site).committer.prepared.lines.standing([qualify(users, b"a")], seconds_max=0):
        assert prepare(partition, users, "t", a=b"1") == version
        with pytest.raises(Retryable, match="other transactions are in line"):
            prepare(partition, users, "u", a=b"1")


@pytest.mark.usefixtures("coordinator")
def test_transactions_that_race_for_keys_have_them_one_after_the_other(
    site: Site, users: Namespace, partition: LocalPartition
) -> None:
    """Each adds one to a number, by compare of what it read: none is lost.

    The coordinator says that all of them are undecided, so that none aborts what another has prepared.
    """

    def work(name: str) -> None:
        number = 0
        while number < 20:
            transaction = f"{name}-{number}"
            try:
                read = int(users.get(b"a") or b"0")
                version = prepare(partition, users, transaction, a=b"%d" % (read + 1))
                if int(users.get(b"a") or b"0") != read:
                    partition.abort_prepared(transaction)
                    continue
                assert partition.commit_prepared(transaction, version)
                number += 1
            except Retryable:
                continue

    run_threads(*(partial(work, name) for name in "xyz"))
    assert users.get(b"a") == b"60"
    assert [change.value for change in site.changes("users")] == [b"%d" % n for n in range(1, 61)]


# What is refused


def test_what_can_never_be_committed_is_refused(
    site: Site, users: Namespace, partition: LocalPartition, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, value = qualify(users, b"a"), encode_value(b"1")
    with pytest.raises(InvalidValue, match="carries an origin"):
        partition.prepare("t", [key], [encode_value(b"1", origin=Stamp(1, 3))])
    with pytest.raises(InvalidArgument, match="1 to 255 bytes"):
        partition.prepare("", [key], [value])
    with pytest.raises(InvalidArgument, match="1 to 255 bytes"):
        partition.prepare("x" * 256, [key], [value])
    with pytest.raises(InvalidArgument, match="at least one key"):
        partition.prepare("t", [], [])
    with pytest.raises(InvalidArgument, match="each key once"):
        partition.prepare("t", [key, key], [value, value])
    version = prepare(partition, users, "t", a=b"1")
    with pytest.raises(InvalidArgument, match="other writes"):
        prepare(partition, users, "t", a=b"2")
    with pytest.raises(InvalidArgument, match="cannot commit at"):
        partition.commit_prepared("t", version - 1)
    with pytest.raises(InvalidArgument, match="that of another commit"):
        partition.commit_prepared("t", users.put(b"z", b"1"))
    monkeypatch.setattr(partition, "limits", partition.limits._replace(bytes_max=100))
    with pytest.raises(CommitTooLarge):
        prepare(partition, users, "u", b=b"x" * 60)
    assert _prepared(site) == [("t", version)]


def test_keys_of_another_partition_are_refused(
    site: Site, users: Namespace, partition: LocalPartition
) -> None:
    site.split("users", b"m")
    left = node_of(site).map.route(qualify(users, b"a"))
    with pytest.raises(InvalidArgument, match="does not hold all keys"):
        prepare(left, users, "t", a=b"1", z=b"1")
    with pytest.raises(PartitionMoved):
        prepare(partition, users, "t", a=b"1")


def test_too_much_that_is_prepared_is_refused(
    users: Namespace, partition: LocalPartition, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepared, "PREPARED_WRITES_MAX", 2)
    monkeypatch.setattr(prepared, "PREPARED_BYTES_MAX", 1_000)
    version = prepare(partition, users, "t", a=b"x" * 500)
    with pytest.raises(Retryable, match="bytes may"):
        prepare(partition, users, "u", b=b"x" * 500)
    prepare(partition, users, "u", b=b"x")
    with pytest.raises(Retryable, match="at most 2"):
        prepare(partition, users, "v", c=b"x")
    partition.commit_prepared("t", version)
    assert prepare(partition, users, "v", c=b"x")


def test_refused_site_prepares_nothing(site: Site, users: Namespace, partition: LocalPartition) -> None:
    node_of(site).storage.refuse_writers(StorageFull("no room"))
    with pytest.raises(StorageFull):
        prepare(partition, users, "t", a=b"1")
    node_of(site).storage.refuse_writers(None)
    assert prepare(partition, users, "t", a=b"1")


def test_dropped_namespace_takes_no_more_but_ends_what_it_has(
    site: Site, users: Namespace, partition: LocalPartition, time: SimulatedTime
) -> None:
    version = prepare(partition, users, "t", a=b"1")
    site.drop_namespace("users")
    with pytest.raises(NamespaceNotFound):
        prepare(partition, users, "u", b=b"1")
    time.advance(10 * 24 * 3600 * 1000)
    assert site.collect_garbage().namespaces_removed == 0
    partition.commit_prepared("t", version)
    time.advance(10 * 24 * 3600 * 1000)
    assert site.collect_garbage().namespaces_removed == 1
    assert not node_of(site).retention.collected_version(users.id)
