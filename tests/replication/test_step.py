"""Steps: from where the target is to where commits are whole, all namespaces together."""

from collections.abc import Iterator
from datetime import timedelta

import pytest
from tests.replication.support_links import IDS, Mesh, embedded

from floodmark.links.steps import plan_step, run_step
from floodmark.model.errors import InvalidArgument, NamespaceNotFound, VersionCollected
from floodmark.replication.step import LinkStep


@pytest.fixture
def mesh() -> Iterator[Mesh]:
    mesh = Mesh("oslo", "rome", topology=False)
    for site in mesh.sites.values():
        site.create_namespace("orders")
    yield mesh
    for site in mesh.sites.values():
        site.close()


def plan(mesh: Mesh, *names: str, changes_max: int | None = None) -> LinkStep:
    return plan_step(mesh["oslo"].host, mesh["rome"].host, names, changes_max=changes_max)


def test_a_step_names_the_source_and_the_ids_of_its_namespaces_at_both_sites(mesh: Mesh) -> None:
    mesh["rome"].create_namespace("first-at-rome")
    for site in mesh.sites.values():
        site.create_namespace("late")
    step = plan_step(mesh["oslo"].host, mesh["rome"].host, ["late"], incarnation=3)
    (late,) = step.namespaces
    assert (step.source, step.source_id, step.incarnation) == ("oslo", 1, 3)
    assert late.source_id == mesh["oslo"].host.namespaces.find_namespace("late").id
    assert late.target_id == mesh["rome"].host.namespaces.find_namespace("late").id
    assert late.source_id != late.target_id


def test_a_step_begins_where_the_target_is_and_goes_to_the_present(mesh: Mesh) -> None:
    version = mesh.put("oslo", b"a")
    first = plan(mesh, "users")
    assert first.namespaces[0].since == 0
    assert first.namespaces[0].until >= version
    run_step(mesh["oslo"].host, mesh["rome"].host, first)
    assert plan(mesh, "users").namespaces[0].since == first.namespaces[0].until


def test_a_step_holds_at_most_so_many_changes_and_whole_commits(mesh: Mesh) -> None:
    users = mesh["oslo"].namespace("users")
    users.put_many(dict.fromkeys([b"a", b"b", b"c"], b"1"))
    users.put_many(dict.fromkeys([b"a", b"b", b"c"], b"2"))
    counts = []
    for _ in range(3):
        step = plan(mesh, "users", changes_max=2)
        counts.append(run_step(mesh["oslo"].host, mesh["rome"].host, step).changes)
    assert counts == [3, 3, 0]


def test_what_came_from_others_does_not_count(mesh: Mesh) -> None:
    for number in range(20):
        mesh.put("rome", b"%d" % number)
    mesh.step("rome", "oslo")
    mesh.put("oslo", b"own")
    step = plan(mesh, "users", changes_max=5)
    assert run_step(mesh["oslo"].host, mesh["rome"].host, step).changes == 1


def test_all_namespaces_that_keep_up_go_to_one_version(mesh: Mesh) -> None:
    orders = mesh["oslo"].namespace("orders")
    for number in range(6):
        mesh.put("oslo", b"%d" % number)
        orders.put_many({b"%d" % each: b"1" for each in range(number)} or {b"x": b"1"})
    while True:
        step = plan(mesh, "users", "orders", changes_max=4)
        assert len({part.since for part in step.namespaces}) == 1
        assert len({part.until for part in step.namespaces}) == 1
        applied = run_step(mesh["oslo"].host, mesh["rome"].host, step)
        assert all(each.changes <= 5 for each in applied.namespaces.values())
        if not applied.changes:
            break
    assert dict(mesh["rome"].namespace("orders").scan()) == dict(orders.scan())


def test_a_namespace_that_has_just_joined_does_not_hold_the_others_up(mesh: Mesh) -> None:
    orders = mesh["oslo"].namespace("orders")
    for number in range(10):
        orders.put(b"%d" % number, b"1")
    mesh.put("oslo", b"a")
    run_step(mesh["oslo"].host, mesh["rome"].host, plan(mesh, "users"))
    latest = mesh.put("oslo", b"b")
    step = plan(mesh, "users", "orders", changes_max=4)
    users_part, orders_part = step.namespaces
    assert users_part.until >= latest
    assert orders_part.until < users_part.since
    run_step(mesh["oslo"].host, mesh["rome"].host, step)
    for _ in range(2):
        step = plan(mesh, "users", "orders", changes_max=4)
        run_step(mesh["oslo"].host, mesh["rome"].host, step)
    assert len({part.until for part in step.namespaces}) == 1
    assert mesh["rome"].namespace("orders").get(b"9") == b"1"


def test_a_namespace_must_be_at_both_sites_and_be_named_once(mesh: Mesh) -> None:
    mesh["oslo"].create_namespace("only-here")
    with pytest.raises(NamespaceNotFound):
        plan(mesh, "only-here")
    with pytest.raises(InvalidArgument, match="once"):
        plan(mesh, "users", "users")


def test_a_namespace_that_is_not_there_or_too_old_does_not_hold_the_others_up() -> None:
    mesh = Mesh("oslo", "rome", topology=False)
    for name in ("orders", "gone"):
        mesh["oslo"].create_namespace(name, retention=timedelta(hours=1))
    mesh["rome"].create_namespace("orders")
    mesh["oslo"].namespace("orders").put(b"one", b"1")
    mesh.time.advance(2 * 3_600_000)
    mesh["oslo"].collect_garbage()
    users = mesh["oslo"].namespace("users")
    embedded(mesh["oslo"]).members.note_rewritten(users.id, mesh["oslo"].now())
    mesh.put("oslo", b"ada")
    step = plan_step(mesh["oslo"].host, mesh["rome"].host, ["gone", "users", "orders"])
    assert [part.name for part in step.namespaces] == ["users"]
    assert "not there" in step.stalled["gone"]
    assert "away for too long" in step.stalled["orders"]
    run_step(mesh["oslo"].host, mesh["rome"].host, step)
    assert mesh["rome"].namespace("users").get(b"ada") == b"value"
    for names, problem in ((["gone"], NamespaceNotFound), (["orders"], VersionCollected)):
        with pytest.raises(problem):
            plan_step(mesh["oslo"].host, mesh["rome"].host, names)


def test_reason_of_a_stall_is_kept_for_the_namespaces_that_are_there() -> None:
    mesh = Mesh("oslo", "rome")
    mesh["rome"].host.replication.stall_link(IDS["oslo"], ["gone", "users"], "the disk is full")
    (link,) = mesh["rome"].replication().links
    assert link.stalled == "the disk is full"
