"""The rows of a step: what the source wrote, in order, with its origin, and the heartbeats in between."""

from collections.abc import Iterator
from typing import Any

import pyarrow
from tests.replication.support_links import Mesh

from floodmark.codec.values import decode_value
from floodmark.links.reading import ROWS, RowKind, decode_beat, read_part, read_step
from floodmark.links.steps import plan_step
from floodmark.model.change import Stamp, Tally
from floodmark.model.ranges import KeyRange


def rows_of(batches: Iterator[pyarrow.RecordBatch]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pyarrow.Table.from_batches(batches, ROWS).to_pylist()
    return rows


def test_rows_carry_keys_records_with_origin_and_the_versions_of_their_commits(mesh: Mesh) -> None:
    users = mesh["oslo"].namespace("users")
    first = users.put_many({b"a": b"1", b"b": b"2"})
    second = users.put(b"c", b"", ttl=60)
    third = users.delete(b"a")
    rows = rows_of(read_step(mesh["oslo"].host, mesh.plan("oslo", "rome")))
    assert [(row["namespace"], row["kind"], row["version"], row["key"]) for row in rows] == [
        (0, RowKind.CHANGE, first, b"a"),
        (0, RowKind.CHANGE, first, b"b"),
        (0, RowKind.CHANGE, second, b"c"),
        (0, RowKind.CHANGE, third, b"a"),
    ]
    records = [decode_value(row["record"]) for row in rows]
    assert [record.origin for record in records] == [Stamp(v, 1) for v in (first, first, second, third)]
    assert [record.value for record in records] == [b"1", b"2", b"", b""]
    assert [record.deleted for record in records] == [False, False, False, True]
    assert records[2].expires_at == mesh.time() // 1000 + 60


def test_what_came_from_another_site_is_left_out_also_of_a_commit_in_the_tail_or_the_log(mesh: Mesh) -> None:
    mesh.put("rome", b"a")
    mesh["rome"].namespace("users").put_many({b"b": b"1", b"c": b"2"})
    mesh.step("rome", "oslo")
    mesh.put("oslo", b"d")
    rows = rows_of(read_step(mesh["oslo"].host, mesh.plan("oslo", "rome")))
    assert [row["key"] for row in rows] == [b"d"]


def test_heartbeats_stand_at_their_places_and_tell_of_their_namespace(mesh: Mesh) -> None:
    mesh["oslo"].create_namespace("other").put(b"x", b"1")
    mesh.beat("oslo")
    mesh.put("oslo", b"a")
    mesh.beat("oslo")
    mesh.put("oslo", b"b")
    rows = rows_of(read_step(mesh["oslo"].host, mesh.plan("oslo", "rome")))
    assert [row["kind"] for row in rows] == [
        RowKind.HEARTBEAT,
        RowKind.CHANGE,
        RowKind.HEARTBEAT,
        RowKind.CHANGE,
    ]
    versions = [row["version"] for row in rows]
    assert versions == sorted(versions)
    beats = [decode_beat(row["record"]) for row in rows if row["kind"] == RowKind.HEARTBEAT]
    assert [(beat.site, beat.version, beat.own.changes) for beat in beats] == [
        (1, versions[0], 0),
        (1, versions[2], 1),
    ]
    assert beats[0].own == Tally()


def test_every_range_has_all_heartbeats_and_its_own_changes(mesh: Mesh) -> None:
    users = mesh["oslo"].namespace("users")
    users.put_many({b"a": b"1", b"m": b"2", b"z": b"3"})
    mesh.beat("oslo")
    users.put(b"m", b"4")
    step = mesh.plan("oslo", "rome")
    parts = []
    for keys in (KeyRange(b"", b"m"), KeyRange(b"m", b"n"), KeyRange(b"n")):
        rows = rows_of(read_part(mesh["oslo"].host, step, 0, keys))
        parts.append([row["key"] for row in rows])
    assert parts == [[b"a", b""], [b"m", b"", b"m"], [b"z", b""]]


def test_namespaces_come_one_after_the_other_under_their_places_in_the_step(mesh: Mesh) -> None:
    for name in mesh.sites:
        mesh[name].create_namespace("orders")
    mesh.put("oslo", b"a")
    mesh["oslo"].namespace("orders").put(b"b", b"1")
    mesh.put("oslo", b"c")
    step = plan_step(mesh["oslo"].host, mesh["rome"].host, ["orders", "users"])
    rows = rows_of(read_step(mesh["oslo"].host, step))
    assert [(row["namespace"], row["key"]) for row in rows] == [(0, b"b"), (1, b"a"), (1, b"c")]


def test_a_step_that_goes_nowhere_has_no_rows(mesh: Mesh) -> None:
    step = plan_step(mesh["oslo"].host, mesh["rome"].host, [])
    assert step.namespaces == ()
    assert list(read_step(mesh["oslo"].host, step)) == []
