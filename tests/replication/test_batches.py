"""An atomic batch is one batch at other sites, whatever partitions and namespaces it wrote to."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.replication.support_applying import apply_rows, sliced
from tests.replication.support_links import Mesh, open_one

from floodmark.engine import MemoryEngine
from floodmark.engine.base import EngineLimits
from floodmark.links.reading import read_step
from floodmark.links.steps import plan_step, run_step
from floodmark.model.errors import CommitTooLarge
from floodmark.model.limits import KIB, MIB
from floodmark.partition import FAMILIES
from floodmark.routing import Router
from floodmark.site import Site, Transaction

NAMES = ("users", "counts", "notes")


@pytest.fixture
def mesh() -> Iterator[Mesh]:
    mesh = Mesh("oslo", "rome", topology=False)
    for site in mesh.sites.values():
        site.create_namespace("counts", merge="counter")
        site.create_namespace("notes")
    yield mesh
    for site in mesh.sites.values():
        site.close()


def write(site: Site, number: int, begin: Callable[[Site], Any] = Site.atomic) -> None:
    """One batch, whose number every key of it tells, and plain writes around it."""
    users, notes = site.namespace("users"), site.namespace("notes")
    users.put(b"other", b"%d" % number)
    with begin(site) as batch:
        batch.put(users, b"a", b"%d" % number)
        batch.put(users, b"z", b"%d" % number)
        batch.put(notes, b"n", b"%d" % number)
        batch.add(site.namespace("counts"), b"batches", 1)
    notes.put(b"other", b"%d" % number)
    users.put(b"last", b"%d" % number)


def seen_at(site: Site, version: int) -> set[int]:
    """The number of the batch that each key had at a version."""
    users, notes, counts = (site.namespace(name) for name in ("users", "notes", "counts"))
    found = users.get(b"a", at=version), users.get(b"z", at=version), notes.get(b"n", at=version)
    return {int(value or 0) for value in (*found, counts.get(b"batches", at=version))}


def fractures(site: Site, since: int) -> int:
    """The number of versions at which a batch can be seen in part."""
    versions = {change.version for change in site.changes(since=since)}
    assert len(versions) > 3, "the batches came together: this proves nothing"
    return sum(len(seen_at(site, version)) > 1 for version in versions)


def coordinated(site: Site) -> Transaction:
    """A transaction with a coordinator."""
    return site.transaction(coordinator=0)


@pytest.mark.parametrize("begin", [Site.atomic, coordinated], ids=["batch", "transaction"])
@pytest.mark.parametrize("rows_max", [1, 3, 8_192])
def test_a_batch_is_seen_whole_at_every_version_of_the_target(
    mesh: Mesh, rows_max: int, begin: Callable[[Site], Any]
) -> None:
    since = mesh["rome"].now()
    mesh["rome"].split("users", b"m")
    mesh["oslo"].split("users", b"c")
    for number in range(1, 6):
        write(mesh["oslo"], number, begin)
        if number % 2:
            step = mesh.plan("oslo", "rome", NAMES)
            assert step.batches
            rows = sliced(read_step(mesh["oslo"].host, step), 2)
            apply_rows(mesh, "rome", step, rows, batch_rows_max=rows_max)
    assert fractures(mesh["rome"], since) == 0
    assert seen_at(mesh["rome"], mesh["rome"].now()) == {5}
    copied = [change for change in mesh["rome"].changes(since=since) if change.batch is not None]
    assert all(change.batch == change.version for change in copied)
    assert len(copied) == 5 * 4


@pytest.mark.parametrize("busy", NAMES)
def test_a_namespace_that_is_behind_keeps_the_others_from_bringing_half_a_batch(
    mesh: Mesh, busy: str
) -> None:
    since, oslo, rome = mesh["rome"].now(), mesh["oslo"], mesh["rome"]
    for number in range(6):
        if busy == "counts":
            oslo.namespace(busy).add(b"%d" % number, 1)
        else:
            oslo.namespace(busy).put(b"%d" % number, b"1")
    for number in range(1, 6):
        write(oslo, number)
    # Each namespace was shared at a version of its own, and a step ends where one has enough changes.
    for _ in range(100):
        step = plan_step(oslo.host, rome.host, NAMES, changes_max=2)
        if all(each.until <= each.since for each in step.namespaces):
            break
        run_step(oslo.host, rome.host, step)
    assert fractures(rome, since) == 0
    assert seen_at(rome, rome.now()) == {5}


def test_a_link_that_applies_a_batch_partition_by_partition_is_found(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    since = mesh["rome"].now()
    mesh["rome"].split("users", b"m")
    monkeypatch.setattr(Router, "_groups_by_place", Router._groups)
    for number in range(1, 4):
        write(mesh["oslo"], number)
        mesh.step("oslo", "rome", NAMES)
    assert fractures(mesh["rome"], since) > 0


def test_a_link_that_applies_one_namespace_after_the_other_is_found(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    since = mesh["rome"].now()
    monkeypatch.setattr(
        "floodmark.links.reading._merge", lambda parts: (rows for part in parts for rows in part)
    )
    for number in range(1, 4):
        write(mesh["oslo"], number)
        mesh.step("oslo", "rome", NAMES)
    assert fractures(mesh["rome"], since) > 0


def test_a_batch_of_which_a_key_lost_to_a_newer_stamp_is_whole_to_atomic_reads(mesh: Mesh) -> None:
    write(mesh["oslo"], 1)
    mesh.time.advance(1_000)
    rome = mesh["rome"]
    users, notes = rome.namespace("users"), rome.namespace("notes")
    users.put(b"a", b"newer")
    mesh.step("oslo", "rome", NAMES)
    read = [(users, b"a"), (users, b"z"), (notes, b"n"), (rome.namespace("counts"), b"batches")]
    assert rome.read_atomic(read) == [b"newer", b"1", b"1", 1]


def test_a_step_without_batches_is_read_one_namespace_after_the_other(mesh: Mesh) -> None:
    for number in range(3):
        for name in ("users", "notes"):
            mesh["oslo"].namespace(name).put(b"%d" % number, b"1")
    step = mesh.plan("oslo", "rome", NAMES)
    assert not step.batches
    places = [place for rows in read_step(mesh["oslo"].host, step) for place in rows.column(0).to_pylist()]
    assert places == sorted(places)
    mesh.step("oslo", "rome", NAMES)
    assert len(list(mesh["rome"].changes())) == 6


class SmallEngine(MemoryEngine):
    """Takes commits of 8 KiB."""

    limits = EngineLimits(value_bytes_max=MIB, batch_bytes_max=32 * KIB, batch_rows_max=1_000)


@pytest.mark.parametrize("atomic", [False, True])
def test_a_batch_that_the_target_does_not_take_is_never_divided(mesh: Mesh, atomic: bool) -> None:
    small = mesh.sites["bonn"] = open_one(SmallEngine(FAMILIES), "bonn", mesh.time)
    small.create_namespace("users")
    users = mesh["oslo"].namespace("users")
    pairs = {b"%d" % number: bytes(3_000) for number in range(5)}
    if atomic:
        with mesh["oslo"].atomic() as batch:
            for key, value in pairs.items():
                batch.put(users, key, value)
        with pytest.raises(CommitTooLarge):
            mesh.step("oslo", "bonn")
        assert list(small.changes("users")) == []
    else:
        users.put_many(pairs)
        mesh.step("oslo", "bonn")
        assert len(list(small.changes("users"))) == len(pairs)
