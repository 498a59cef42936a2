"""Collections that are cut short: whatever is left of them, nobody comes back from the dead."""

from collections.abc import Callable
from datetime import timedelta
from functools import partial

import pytest
from tests.site.support import HookedEngine, host_of, node_of, nothing, open_memory, stored_versions

from floodmark.engine.base import scan_pages
from floodmark.model.version import Version
from floodmark.partition.retention import collect
from floodmark.site import Site
from floodmark.testing.clock import SimulatedTime

HOUR = timedelta(hours=1)
HOUR_MS = 3_600_000
LARGE = b"large" * 2000


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of three rows and batches of two, so that a collection has many places to stop at."""
    monkeypatch.setattr(collect, "scan_pages", partial(scan_pages, rows_max=3))
    monkeypatch.setattr(collect, "BATCH_ROWS", 2)


def oldest(site: Site) -> Version:
    return site.statistics().namespaces[0].oldest_version


class PowerCut(BaseException):
    """The machine stops."""


def fill(site: Site, time: SimulatedTime) -> None:
    """A history in which most keys end deleted or expired."""
    users = site.create_namespace("users", retention=HOUR)
    gone = site.create_namespace("gone", retention=HOUR)
    for index in range(4):
        for step in range(3):
            users.put(b"key-%d" % index, b"%d" % step)
        gone.put(b"key-%d" % index, LARGE)
    users.delete(b"key-0")
    users.delete(b"key-1")
    users.put(b"key-2", b"short", ttl=10)
    site.split("users", b"key-2")
    site.drop_namespace("gone")
    time.advance(20_000)
    node_of(site).expiries.tell()
    time.advance(2 * HOUR_MS)
    users.put(b"key-3", b"young")


def power_cuts(at: int) -> Callable[[str], None]:
    """A hook that stops the machine before the given operation, counted from 0."""
    left = at

    def hook(operation: str) -> None:
        nonlocal left
        if operation in ("write", "sync", "delete_range"):
            if left == 0:
                raise PowerCut
            left -= 1

    return hook


def test_power_cut_at_any_step_of_a_collection_raises_no_dead_key() -> None:
    cuts = 0
    while True:
        engine, time = HookedEngine(), SimulatedTime()
        site = open_memory(engine, time)
        fill(site, time)
        site.sync()
        engine.before = power_cuts(cuts)
        try:
            site.collect_garbage()
            break
        except PowerCut:
            engine.before = nothing
        for kept in range(engine.unsynced + 1):
            with open_memory(engine.crashed(kept), time) as survivor:
                check_survivor(survivor)
        cuts += 1
    assert cuts > 10


def check_survivor(site: Site) -> None:
    users = site.namespace("users")
    assert list(users.scan()) == [(b"key-3", b"young")]
    assert [users.get(b"key-%d" % index) for index in range(4)] == [None, None, None, b"young"]
    if oldest(site):
        assert users.get_many([b"key-%d" % index for index in range(4)], at=oldest(site))[3] == b"2"
        site.collect_garbage()
        assert len(stored_versions(site, "users")) == 2
    since = max(node_of(site).retention.trimmed_version(), oldest(site), 1)
    changes = [change for change in site.changes("users", since=since) if change.expires_at is None]
    assert changes[-1].value == b"young"


def test_collection_that_is_stopped_early_is_finished_by_the_next(site: Site, time: SimulatedTime) -> None:
    users = site.create_namespace("users", retention=HOUR)
    for index in range(10):
        users.put(b"key-%d" % index, b"1")
        users.delete(b"key-%d" % index)
    time.advance(2 * HOUR_MS)
    steps = 0

    def two_pages() -> bool:
        nonlocal steps
        steps += 1
        return steps % 2 == 1

    rounds = 0
    while stored_versions(site, "users"):
        host_of(site).garbage.run(two_pages)
        assert list(users.scan()) == []
        rounds += 1
    assert 2 < rounds <= 10
