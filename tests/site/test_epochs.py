"""Epochs of streams from outside: one version each, on disk before it is told."""

from contextlib import suppress
from functools import partial
from typing import TypeVar

import pytest
from tests.site.support import START_MS, HookedEngine, host_of, node_of, open_memory, persist
from tests.waiting import run_threads

from floodmark.codec.ordered import encode_namespace
from floodmark.codec.values import encode_value
from floodmark.host import epochs
from floodmark.model.errors import (
    FloodmarkError,
    LimitExceeded,
    NamespaceNotFound,
    StorageFull,
)
from floodmark.model.limits import EPOCH_STREAM_IDLE_MAX, EPOCHS_REMEMBERED_MAX
from floodmark.model.version import Version
from floodmark.partition import FAMILIES, META
from floodmark.site import Namespace, Site, open_engine
from floodmark.testing.clock import SimulatedTime
from floodmark.testing.engine import Fault, FaultPlan, FaultyEngine, SimulatedCrash

STREAM = "spark/query"
DAY_MS = 24 * 3_600_000

Result = TypeVar("Result")


def open_epoch(site: Site, epoch: int, stream: str = STREAM, namespace: str = "users") -> Version:
    return site.host.versions.open_epoch(namespace, stream, epoch)


def stored_streams(site: Site) -> int:
    rows = node_of(site).engine.scan(META, b"epochs/", b"epochs0", rows_max=10**6, bytes_max=10**9)
    return len(rows)


def test_version_survives_reopening(engine: HookedEngine, time: SimulatedTime) -> None:
    with open_memory(engine, time) as site:
        site.create_namespace("users")
        opened = [open_epoch(site, epoch) for epoch in range(EPOCHS_REMEMBERED_MAX)]
    time.advance(5 * DAY_MS)
    with open_memory(engine, time) as site:
        assert [open_epoch(site, epoch) for epoch in range(EPOCHS_REMEMBERED_MAX)] == opened
        assert open_epoch(site, EPOCHS_REMEMBERED_MAX) > max(opened)
        with pytest.raises(LimitExceeded, match="checkpoint"):
            open_epoch(site, 0)


@pytest.mark.usefixtures("users")
def test_version_is_on_disk_before_it_is_told(site: Site, engine: HookedEngine) -> None:
    for epoch in range(3):
        version = open_epoch(site, epoch)
        with open_memory(engine.crashed(), SimulatedTime(START_MS)) as survivor:
            assert open_epoch(survivor, epoch) == version
            assert survivor.now() > version


@pytest.mark.usefixtures("users")
def test_known_epoch_costs_no_write(site: Site, engine: HookedEngine) -> None:
    version = open_epoch(site, 0)
    operations: list[str] = []
    engine.before = operations.append
    assert open_epoch(site, 0) == version
    assert operations == []


@pytest.mark.usefixtures("users")
def test_use_of_a_known_epoch_is_noted_once_a_day(
    site: Site, engine: HookedEngine, time: SimulatedTime
) -> None:
    version = open_epoch(site, 0)
    for day in range(1, 70):
        time.advance(DAY_MS)
        assert open_epoch(site, 0) == version
        open_epoch(site, 0, f"other/{day}")
    with open_memory(engine.crashed(), time) as survivor:
        assert open_epoch(survivor, 0) == version


@pytest.mark.usefixtures("users")
def test_streams_that_nobody_uses_make_room_for_a_new_one(
    site: Site, time: SimulatedTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(epochs, "EPOCH_STREAMS_MAX", 3)
    for stream in ("a", "b", "c"):
        open_epoch(site, 0, stream)
    with pytest.raises(LimitExceeded):
        open_epoch(site, 0, "d")
    assert open_epoch(site, 1, "a")
    time.advance(int(EPOCH_STREAM_IDLE_MAX.total_seconds() * 1000) - 1)
    open_epoch(site, 2, "b")
    with pytest.raises(LimitExceeded):
        open_epoch(site, 0, "d")
    time.advance(1)
    assert open_epoch(site, 0, "d")
    assert stored_streams(site) == 2
    assert open_epoch(site, 2, "b")


@pytest.mark.usefixtures("users")
def test_streams_of_a_dropped_namespace_make_room_too(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(epochs, "EPOCH_STREAMS_MAX", 1)
    open_epoch(site, 0)
    site.create_namespace("orders")
    with pytest.raises(LimitExceeded):
        open_epoch(site, 0, namespace="orders")
    site.drop_namespace("users")
    assert open_epoch(site, 0, namespace="orders")
    assert stored_streams(site) == 1


def test_namespace_that_is_dropped_meanwhile_gets_no_epoch(site: Site, users: Namespace) -> None:
    host, namespace = host_of(site), users.id
    site.drop_namespace("users")
    with pytest.raises(NamespaceNotFound):
        host.epochs.open(namespace, STREAM, 0)


@pytest.mark.usefixtures("users")
def test_full_disk_refuses_new_epochs_and_tells_known_ones(site: Site) -> None:
    version = open_epoch(site, 0)
    node_of(site).storage.refuse(StorageFull("full"))
    assert open_epoch(site, 0) == version
    with pytest.raises(StorageFull):
        open_epoch(site, 1)
    node_of(site).storage.refuse(None)
    assert open_epoch(site, 1) > version


def test_all_who_ask_at_once_get_one_version(users: Namespace, site: Site) -> None:
    found: list[tuple[int, Version]] = []

    def ask() -> None:
        for epoch in range(EPOCHS_REMEMBERED_MAX):
            found.append((epoch, open_epoch(site, epoch)))
            users.put(b"key", b"x", durability="async")

    run_threads(*[ask] * 8)
    versions = dict(sorted(found))
    assert len(set(found)) == len(versions) == EPOCHS_REMEMBERED_MAX
    assert list(versions.values()) == sorted(versions.values())


def test_deletion_is_remembered_as_long_as_an_epoch_before_it(
    site: Site, users: Namespace, time: SimulatedTime
) -> None:
    """Garbage collection must not let an epoch that is written again bring back what was deleted."""
    version = open_epoch(site, 0)
    rows = {encode_namespace(users.id) + key: encode_value(b"outside") for key in (b"a", b"b")}
    assert site.host.router.put_unchanged(rows, version, durable=True) == 2
    users.delete(b"a")
    users.put(b"b", b"brief", ttl=1)
    for _ in range(10):
        time.advance(2 * DAY_MS)
        site.collect_garbage()
        assert site.host.router.put_unchanged(rows, version, durable=True) == 0
    for epoch in range(1, EPOCHS_REMEMBERED_MAX + 1):
        open_epoch(site, epoch)
    time.advance(2 * DAY_MS)
    assert site.collect_garbage().keys_removed == 2


# Faults


def test_a_data_set_or_a_rollback_is_remembered_by_an_epoch_before_it(
    site: Site, users: Namespace, time: SimulatedTime
) -> None:
    """An epoch that is written again must not bring back keys that a data set lacks."""
    before, version = site.now(), open_epoch(site, 0)
    rows = {encode_namespace(users.id) + key: encode_value(b"outside") for key in (b"a", b"b")}
    assert site.host.router.put_unchanged(dict([*rows.items()][:1]), version, durable=True) == 1
    site.generations.publish("users", {b"c": b"1"}, base=before)
    # The data is older than the epoch, whose second key was not written yet.
    assert site.host.router.put_unchanged(rows, version, durable=True) == 1
    for publish in (
        lambda: site.generations.publish("users", {b"d": b"1"}),
        lambda: site.generations.publish("users", {b"e": b"1"}),
        lambda: site.generations.rollback("users"),
    ):
        time.advance(1_000)
        publish()
        expected = dict(users.scan())
        assert site.host.router.put_unchanged(rows, version, durable=True) == 0
        assert dict(users.scan()) == expected
    assert expected == {b"d": b"1"}
    assert site.host.router.put_unchanged(rows, open_epoch(site, 1), durable=True) == 2


def prepared() -> FaultyEngine:
    """An engine with a namespace and a stream that was used."""
    engine = FaultyEngine(FAMILIES)
    with open_on(engine) as site:
        site.create_namespace("users")
        open_epoch(site, 0)
    return engine.crash()


def open_on(engine: FaultyEngine) -> Site:
    return open_engine(engine, site="oslo", site_id=7, time_source=SimulatedTime(START_MS))


def close(site: Site) -> None:
    with suppress(FloodmarkError, SimulatedCrash):
        site.close()


@pytest.mark.parametrize("fault", [fault for fault in Fault if fault is not Fault.CRASH])
def test_fault_anywhere_leaves_an_epoch_with_one_version(fault: Fault) -> None:
    for position in range(1, 100):
        engine = prepared()
        engine.arm(FaultPlan(at=position, kind=fault))
        site = open_on(engine)
        told = {epoch: persist(engine, partial(open_epoch, site, epoch)) for epoch in range(4)}
        assert told == {epoch: open_epoch(site, epoch) for epoch in told}
        assert list(told.values()) == sorted(set(told.values()))
        fired = engine.fired
        engine.heal()
        close(site)
        with open_on(engine.crash(0)) as survivor:
            assert told == {epoch: open_epoch(survivor, epoch) for epoch in told}
        if not fired:
            assert position > 5
            return
    raise AssertionError("it never came to an end")


def test_crash_anywhere_leaves_what_was_told() -> None:
    for position in range(1, 100):
        engine = prepared()
        engine.arm(FaultPlan(at=position, kind=Fault.CRASH))
        site, told = open_on(engine), dict[int, Version]()
        try:
            for epoch in range(4):
                told[epoch] = open_epoch(site, epoch)
        except SimulatedCrash:
            close(site)
        else:
            close(site)
            assert position > 5
            return
        for keep in range(engine.unsynced + 1):
            with open_on(engine.crash(keep)) as survivor:
                again = {epoch: open_epoch(survivor, epoch) for epoch in range(4)}
                assert again | told == again
                assert list(again.values()) == sorted(set(again.values()))
    raise AssertionError("it never came to an end")
