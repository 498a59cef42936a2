"""Reading changes: in commit order, from any version, and never silently fewer than there are."""

from collections.abc import Iterator

import pytest
from tests.site.support import HookedEngine, node_of, nothing, open_memory

from floodmark.model.change import Change
from floodmark.model.errors import (
    VersionCollected,
)
from floodmark.site import Namespace, Site
from floodmark.testing.clock import SimulatedTime

DAY_MS = 24 * 60 * 60 * 1000
LARGE = b"large" * 2000


def versions(changes: Iterator[Change]) -> list[int]:
    return [change.version for change in changes]


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
