"""Changes arrive at other sites in whole commits, each once, and every loss on the way is found."""

import pickle
from collections.abc import Callable
from datetime import timedelta

import msgspec
import pyarrow
import pytest
from tests.replication.support_applying import (
    apply_rows,
    changes_of,
    commits_of,
    link_row,
    require_whole_commits,
    sliced,
    state_of,
    stored_link,
)
from tests.replication.support_links import Mesh

from floodmark.accounting.account import Account, Checked, Doubt, Unchecked
from floodmark.engine import MemoryEngine
from floodmark.engine.base import EngineLimits
from floodmark.links.applying import Applier
from floodmark.links.reading import decode_beat, encode_beat, read_part, read_step
from floodmark.links.steps import plan_step, run_step
from floodmark.model.change import Tally
from floodmark.model.errors import CommitTooLarge, StaleLink
from floodmark.model.limits import MIB
from floodmark.model.ranges import KeyRange
from floodmark.partition import FAMILIES
from floodmark.replication.applied import Applied, NamespaceApplied
from floodmark.replication.step import LinkStep
from floodmark.site import open_engine


def pairs(count: int, value: bytes = b"1") -> dict[bytes, bytes]:
    return {b"key-%04d" % number: value for number in range(count)}


def test_a_commit_is_one_commit_at_the_target_whatever_partitions_it_lies_in(mesh: Mesh) -> None:
    users = mesh["oslo"].namespace("users")
    mesh["rome"].split("users", b"key-0003")
    mesh["rome"].split("users", b"key-0007")
    mesh["oslo"].split("users", b"key-0005")
    users.put_many(pairs(10))
    users.put_many(pairs(10, b"2"))
    mesh.step("oslo", "rome")
    require_whole_commits(mesh["rome"])
    assert [len(commit) for commit in commits_of(mesh["rome"])] == [10, 10]
    assert len({change.partition for change in changes_of(mesh["rome"])}) == 3
    assert state_of(mesh["rome"]) == state_of(mesh["oslo"])


def test_a_commit_that_is_larger_than_a_batch_stays_one_commit(mesh: Mesh) -> None:
    users = mesh["oslo"].namespace("users")
    users.put(b"before", b"1")
    users.put_many(pairs(100))
    users.put(b"later", b"1")
    step = mesh.plan("oslo", "rome")
    apply_rows(mesh, "rome", step, read_step(mesh["oslo"].host, step), batch_rows_max=10)
    assert [len(commit) for commit in commits_of(mesh["rome"])] == [1, 100, 1]


def test_a_commit_whose_rows_come_in_several_batches_stays_one_commit(mesh: Mesh) -> None:
    users = mesh["oslo"].namespace("users")
    for value in (b"1", b"2", b"3"):
        users.put_many(pairs(20, value))
    step = mesh.plan("oslo", "rome")
    apply_rows(mesh, "rome", step, sliced(read_step(mesh["oslo"].host, step), 7), batch_rows_max=5)
    assert [len(commit) for commit in commits_of(mesh["rome"])] == [20, 20, 20]


def test_large_values_end_a_batch_before_many_rows_do(mesh: Mesh) -> None:
    users = mesh["oslo"].namespace("users")
    for number in range(6):
        users.put(b"%d" % number, bytes(100))
    step = mesh.plan("oslo", "rome")
    apply_rows(mesh, "rome", step, read_step(mesh["oslo"].host, step), batch_bytes_max=250)
    assert [len(commit) for commit in commits_of(mesh["rome"])] == [2, 2, 2]


def test_a_key_that_is_written_again_and_again_keeps_its_history(mesh: Mesh) -> None:
    users = mesh["oslo"].namespace("users")
    for value in range(5):
        users.put(b"ada", b"%d" % value)
        users.put_many({b"other-%d" % value: b"x", b"third": b"%d" % value})
    mesh.step("oslo", "rome")
    arrived = [change.value for change in changes_of(mesh["rome"]) if change.key == b"ada"]
    assert arrived == [b"0", b"1", b"2", b"3", b"4"]
    require_whole_commits(mesh["rome"])
    assert state_of(mesh["rome"]) == state_of(mesh["oslo"])
    assert link_row(mesh, "oslo", "rome").wrong == 0


def test_a_commit_that_repeats_a_key_in_its_middle_is_not_cut_there(mesh: Mesh) -> None:
    users = mesh["oslo"].namespace("users")
    users.put(b"b", b"1")
    users.put_many(dict.fromkeys([b"a", b"b", b"c"], b"2"))
    mesh.step("oslo", "rome")
    assert [[change.key for change in commit] for commit in commits_of(mesh["rome"])] == [
        [b"b"],
        [b"a", b"b", b"c"],
    ]


def test_both_ways_only_what_was_first_written_at_the_source_travels(mesh: Mesh) -> None:
    mesh.put("oslo", b"a", b"oslo")
    mesh.put("rome", b"b", b"rome")
    assert mesh.step("oslo", "rome").changes == 1
    assert mesh.step("rome", "oslo").changes == 1
    for _ in range(2):
        assert mesh.step("oslo", "rome").changes == 0
        assert mesh.step("rome", "oslo").changes == 0
    assert state_of(mesh["oslo"]) == state_of(mesh["rome"])
    assert len(changes_of(mesh["oslo"])) == len(changes_of(mesh["rome"])) == 2


def test_a_replayed_step_changes_nothing_and_counts_nothing_twice(mesh: Mesh) -> None:
    mesh.beat("oslo")
    mesh["oslo"].namespace("users").put_many(pairs(5))
    mesh.beat("oslo")
    step = mesh.plan("oslo", "rome")
    apply_rows(mesh, "rome", step, read_step(mesh["oslo"].host, step))
    before, row = changes_of(mesh["rome"]), link_row(mesh, "oslo", "rome")
    with pytest.raises(StaleLink):
        run_step(mesh["oslo"].host, mesh["rome"].host, step)
    assert changes_of(mesh["rome"]) == before
    assert link_row(mesh, "oslo", "rome") == row
    mesh.beat("oslo")
    mesh.step("oslo", "rome")
    assert (link_row(mesh, "oslo", "rome").checked, link_row(mesh, "oslo", "rome").wrong) == (2, 0)


def test_a_step_that_was_applied_and_not_noted_is_taken_again(mesh: Mesh) -> None:
    mesh.beat("oslo")
    mesh["oslo"].namespace("users").put_many(pairs(5))
    mesh.apply("oslo", "rome", mesh.plan("oslo", "rome"))
    mesh["oslo"].namespace("users").put_many(pairs(5, b"2"))
    mesh.beat("oslo")
    mesh.step("oslo", "rome")
    assert len(commits_of(mesh["rome"])) == 2
    assert (link_row(mesh, "oslo", "rome").checked, link_row(mesh, "oslo", "rome").wrong) == (1, 0)


def test_rows_of_an_earlier_or_a_later_step_are_dropped(mesh: Mesh) -> None:
    users = mesh["oslo"].namespace("users")
    for number in range(4):
        mesh.beat("oslo")
        users.put(b"%d" % number, b"value")
    whole = plan_step(mesh["oslo"].host, mesh["rome"].host, ["users"])
    mesh.beat("oslo")
    rows = list(read_step(mesh["oslo"].host, _until(whole, mesh["oslo"].host.versions.resolved_version())))
    first = plan_step(mesh["oslo"].host, mesh["rome"].host, ["users"], changes_max=2)
    assert apply_rows(mesh, "rome", first, rows).changes == 2
    second = plan_step(mesh["oslo"].host, mesh["rome"].host, ["users"], changes_max=1)
    assert apply_rows(mesh, "rome", second, rows).changes == 1
    with pytest.raises(StaleLink):
        apply_rows(mesh, "rome", _until(first, second.namespaces[0].until + 1), rows)
    mesh.step("oslo", "rome")
    row = link_row(mesh, "oslo", "rome")
    assert (row.checked, row.unchecked, row.wrong) == (4, 1, 0)
    assert len(changes_of(mesh["rome"])) == 4


def _until(step: LinkStep, until: int) -> LinkStep:
    (namespace,) = step.namespaces
    return msgspec.structs.replace(step, namespaces=(msgspec.structs.replace(namespace, until=until),))


def test_heartbeats_travel_also_when_nobody_writes(mesh: Mesh) -> None:
    for _ in range(3):
        mesh.beat("oslo")
    applied = mesh.step("oslo", "rome").namespaces["users"]
    assert (applied.changes, len(applied.beats), len(applied.tallies)) == (0, 3, 3)
    row = link_row(mesh, "oslo", "rome")
    assert (row.checked, row.unchecked, row.wrong) == (2, 1, 0)
    assert row.beat is not None
    assert row.beat.wall_ms == mesh.time()


def lose(rows: pyarrow.RecordBatch, place: int) -> pyarrow.RecordBatch:
    return rows.take(pyarrow.array([row for row in range(rows.num_rows) if row != place]))


def double(rows: pyarrow.RecordBatch, place: int) -> pyarrow.RecordBatch:
    return rows.take(pyarrow.array(sorted([*range(rows.num_rows), place])))


def alter(rows: pyarrow.RecordBatch, place: int) -> pyarrow.RecordBatch:
    records = rows.column("record").to_pylist()
    records[place] = b"!" + records[place][1:]
    return rows.set_column(4, rows.schema.field(4), pyarrow.array(records, pyarrow.binary()))


@pytest.mark.parametrize("tamper", [lose, double, alter])
def test_a_change_that_is_lost_doubled_or_altered_is_found_at_the_next_heartbeat(
    mesh: Mesh, tamper: Callable[[pyarrow.RecordBatch, int], pyarrow.RecordBatch]
) -> None:
    mesh.beat("oslo")
    mesh.step("oslo", "rome")
    mesh["oslo"].namespace("users").put_many(pairs(5))
    step = mesh.plan("oslo", "rome")
    rows = pyarrow.concat_batches(list(read_step(mesh["oslo"].host, step)))
    apply_rows(mesh, "rome", step, [tamper(rows, 3)])
    assert link_row(mesh, "oslo", "rome").wrong == 0
    mesh.beat("oslo")
    mesh.step("oslo", "rome")
    assert link_row(mesh, "oslo", "rome").wrong == 1
    mesh["oslo"].namespace("users").put_many(pairs(3))
    mesh.beat("oslo")
    mesh.step("oslo", "rome")
    assert (link_row(mesh, "oslo", "rome").wrong, link_row(mesh, "oslo", "rome").checked) == (1, 1)


def test_splits_and_merges_at_the_source_leave_the_sums_right(mesh: Mesh) -> None:
    oslo, users = mesh["oslo"], mesh["oslo"].namespace("users")
    mesh.beat("oslo")
    for number in range(4):
        users.put_many(pairs(10, b"%d" % number))
        left, right = oslo.split("users", b"key-0005")
        users.put_many(pairs(10, b"-%d" % number))
        if number % 2:
            # Half of the steps end between the heartbeat of a sealed log and that of its node.
            mesh.step("oslo", "rome")
        oslo.merge(left, right)
        users.put(b"one", b"more")
        mesh.beat("oslo")
    mesh.step("oslo", "rome")
    row = link_row(mesh, "oslo", "rome")
    assert (row.checked, row.unchecked, row.wrong) == (4, 1, 0)


def test_a_change_behind_a_heartbeat_that_comes_after_it_belongs_to_the_next(mesh: Mesh) -> None:
    users = mesh["oslo"].namespace("users")
    first, second = users.put(b"a", b"1"), users.put(b"b", b"2")
    mesh.beat("oslo")
    step = mesh.plan("oslo", "rome")
    rows = pyarrow.concat_batches(list(read_step(mesh["oslo"].host, step)))
    records = rows.column("record").to_pylist()
    records[2] = encode_beat(msgspec.structs.replace(decode_beat(records[2]), through=first))
    early = rows.set_column(4, rows.schema.field(4), pyarrow.array(records, pyarrow.binary()))
    with Applier(mesh["rome"].host, step) as applier:
        applier.add(early)
        applied = applier.finish().namespaces["users"]
    assert [(through, tally.changes) for through, tally in applied.tallies] == [(first, 1)]
    assert (applied.rest.changes, applied.latest) == (1, second)


def test_after_a_scan_no_heartbeat_of_the_step_proves_anything(mesh: Mesh) -> None:
    for _ in range(3):
        mesh.put("oslo", b"a")
        mesh.beat("oslo")
    applied = mesh.apply("oslo", "rome", mesh.plan("oslo", "rome")).namespaces["users"]
    # One of several ranges was scanned, and so knows of no heartbeat.
    both = NamespaceApplied(scanned=True, rest=Tally(1, 1)).plus(applied)
    assert [type(verdict) for verdict in applied.enter(Account(own=True))] == [Unchecked, Checked, Checked]
    assert [type(verdict) for verdict in both.enter(Account(own=True))] == [Unchecked] * 3


def test_parts_of_a_step_add_up_to_the_whole(mesh: Mesh) -> None:
    mesh.beat("oslo")
    for value in (b"1", b"2", b"3"):
        mesh["oslo"].namespace("users").put_many(pairs(30, value))
        mesh["oslo"].split("users", b"key-00%s5" % value)
        mesh.beat("oslo")
    step = mesh.plan("oslo", "rome")
    whole = mesh.apply("oslo", "rome", step)
    total = Applied()
    for keys in (KeyRange(b"", b"key-0007"), KeyRange(b"key-0007", b"key-0020"), KeyRange(b"key-0020")):
        with Applier(mesh["rome"].host, step) as applier:
            for rows in read_part(mesh["oslo"].host, step, 0, keys):
                applier.add(rows)
            total = total.plus(pickle.loads(pickle.dumps(applier.finish())))
    assert (
        msgspec.structs.replace(total.namespaces["users"], lags=whole.namespaces["users"].lags)
        == (whole.namespaces["users"])
    )
    mesh["rome"].host.replication.advance_link(step, total)
    row = link_row(mesh, "oslo", "rome")
    assert (row.checked, row.wrong) == (3, 0)


def test_what_was_found_by_a_scan_is_applied_and_proves_nothing(mesh: Mesh) -> None:
    with open_engine(
        MemoryEngine(FAMILIES),
        site="bonn",
        site_id=3,
        time_source=mesh.time,
        log_retention=timedelta(minutes=1),
    ) as bonn:
        users = bonn.create_namespace("users")
        for number in range(5):
            users.put_many(pairs(5, b"%d" % number))
            bonn.heartbeat()
        mesh.time.advance(300_000)
        assert bonn.collect_garbage().log_trimmed_version > users.put(b"ada", b"1") - (300_000 << 18)
        rome = mesh["rome"].host
        applied = run_step(bonn.host, rome, plan_step(bonn.host, rome, ["users"]))
        assert applied.namespaces["users"].scanned
        run_step(bonn.host, rome, plan_step(bonn.host, rome, ["users"]))
        assert state_of(mesh["rome"]) == state_of(bonn)
        assert stored_link(mesh["rome"], bonn.id).account.doubt is Doubt.SCAN
        for _ in range(2):
            users.put(b"ada", b"2")
            bonn.heartbeat()
        run_step(bonn.host, rome, plan_step(bonn.host, rome, ["users"]))
        row = stored_link(mesh["rome"], bonn.id)
        assert (row.checked, row.unchecked, row.wrong) == (1, 1, 0)


class NarrowEngine(MemoryEngine):
    """An engine that takes twenty changes in one commit."""

    limits = EngineLimits(value_bytes_max=MIB, batch_bytes_max=MIB, batch_rows_max=40)


def test_what_does_not_fit_into_a_commit_of_the_target_is_cut_between_commits_if_it_can_be(
    mesh: Mesh,
) -> None:
    users = mesh["oslo"].namespace("users")
    mesh.beat("oslo")
    for number in range(30):
        users.put(b"small-%d" % number, b"1")
    users.put_many(pairs(50))
    mesh.beat("oslo")
    with open_engine(NarrowEngine(FAMILIES), site="bonn", site_id=3, time_source=mesh.time) as narrow:
        narrow.create_namespace("users")
        step = plan_step(mesh["oslo"].host, narrow.host, ["users"])
        run_step(mesh["oslo"].host, narrow.host, step)
        assert state_of(narrow) == state_of(mesh["oslo"])
        sizes = [len(commit) for commit in commits_of(narrow)]
        assert max(sizes) <= 20
        assert all(len({change.key[:3] for change in commit}) == 1 for commit in commits_of(narrow))


def test_a_change_that_fits_nowhere_is_refused(mesh: Mesh) -> None:
    mesh.put("oslo", b"large", bytes(300_000))
    with open_engine(NarrowEngine(FAMILIES), site="bonn", site_id=3, time_source=mesh.time) as narrow:
        narrow.create_namespace("users")
        step = plan_step(mesh["oslo"].host, narrow.host, ["users"])
        with pytest.raises(CommitTooLarge):
            run_step(mesh["oslo"].host, narrow.host, step)


def test_lags_are_told_from_commit_to_acknowledgement(mesh: Mesh) -> None:
    mesh.put("oslo", b"early")
    mesh.time.advance(4_000)
    for number in range(9):
        mesh.put("oslo", b"%d" % number)
    mesh.time.advance(50)
    lags = mesh.step("oslo", "rome").namespaces["users"].lags
    assert (lags.percentile(0.5), lags.percentile(0.9), lags.percentile(1.0)) == (50, 50, 4_050)


def test_what_was_applied_travels_over_a_wire_and_into_a_store(mesh: Mesh) -> None:
    mesh.beat("oslo")
    mesh["oslo"].namespace("users").put_many(pairs(5))
    step = mesh.plan("oslo", "rome")
    applied = mesh.apply("oslo", "rome", step)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(applied), type=Applied) == applied
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(step), type=LinkStep) == step
    assert pickle.loads(pickle.dumps((step, applied))) == (step, applied)
