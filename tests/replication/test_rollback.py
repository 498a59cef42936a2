"""A namespace that several sites share goes back to an earlier data set at all of them."""

from datetime import timedelta
from typing import Any

import pytest
from tests.replication.support_links import RETENTION, Mesh, embedded

from floodmark.divergence.comparing import compare_keys
from floodmark.links.bringing import bring_data_sets
from floodmark.links.steps import run_step
from floodmark.model.errors import InvalidConfiguration, LinkStalled, PublicationConflict
from floodmark.site import Site
from floodmark.site.earlier import wait_arrived
from floodmark.site.generations import Generations

NOW = timedelta(0)


@pytest.fixture
def mesh() -> Mesh:
    return Mesh("oslo", "rome", "bonn")


def others(mesh: Mesh) -> list[Site]:
    return [mesh["rome"], mesh["bonn"]]


def publish(mesh: Mesh, rows: dict[bytes, bytes], **how: Any) -> None:
    mesh["oslo"].generations.publish("users", rows, **{"others": others(mesh), **how})


def roll_back(mesh: Mesh, *number: int, **how: Any) -> int:
    """Go back at all sites, once all sites know what all others have."""
    mesh.exchange()
    mesh.exchange()
    generations = mesh["oslo"].generations
    return generations.rollback("users", *number, **{"others": others(mesh), "wait": NOW, **how}).number


def states(mesh: Mesh) -> list[dict[bytes, bytes]]:
    return [dict(site.namespace("users").scan()) for site in mesh.sites.values()]


def assert_all_hold(mesh: Mesh, rows: dict[bytes, bytes]) -> None:
    """At once, and also when the links have brought all."""
    assert states(mesh) == [rows] * 3
    mesh.exchange()
    mesh.exchange()
    assert states(mesh) == [rows] * 3
    hosts = [site.host for site in mesh.sites.values()]
    assert not [*compare_keys(hosts, "users", [b"ada", b"alan", b"grace", *rows])]


def test_all_sites_go_back_and_keep_what_was_written_since(mesh: Mesh) -> None:
    mesh.put("oslo", b"ada", b"1")
    mesh.put("rome", b"alan", b"1")
    mesh.put("bonn", b"grace", b"1")
    mesh.exchange()
    publish(mesh, {b"ada": b"2", b"alan": b"2", b"joan": b"2"})
    assert states(mesh) == [{b"ada": b"2", b"alan": b"2", b"joan": b"2"}] * 3
    mesh.put("rome", b"ada", b"3")
    mesh.put("bonn", b"grace", None)
    assert roll_back(mesh) == 3
    assert_all_hold(mesh, {b"ada": b"3", b"alan": b"1"})
    assert [each.present.base for each in rows_of(mesh)] == [rows_of(mesh)[0].present.base] * 3


def rows_of(mesh: Mesh) -> list[Any]:
    return [site.host.namespaces.find_namespace("users") for site in mesh.sites.values()]


def test_a_write_from_before_the_swap_that_arrives_after_it_stays(mesh: Mesh) -> None:
    base = mesh["oslo"].host.versions.now()
    mesh.time.advance(1)
    mesh.put("rome", b"late", b"1")
    mesh.put("rome", b"ada", b"1")
    publish(mesh, {b"ada": b"2"}, base=base)
    assert states(mesh)[0] == {b"ada": b"2"}
    roll_back(mesh)
    assert_all_hold(mesh, {b"ada": b"1", b"late": b"1"})


def test_what_is_written_while_the_sites_swap_stays(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh.put("oslo", b"ada", b"1")
    publish(mesh, {})
    begin, places = mesh["bonn"].host.generations.begin_generation, []

    def write_first(*arguments: Any, **named: Any) -> Any:
        places.append(mesh.put("rome", b"alan", b"3"))
        return begin(*arguments, **named)

    monkeypatch.setattr(mesh["bonn"].host.generations, "begin_generation", write_first)
    roll_back(mesh)
    assert places
    assert states(mesh)[:2] == [{b"ada": b"1"}, {b"ada": b"1", b"alan": b"3"}]
    mesh.exchange()
    assert_all_hold(mesh, {b"ada": b"1", b"alan": b"3"})


def test_records_keep_their_expiry(mesh: Mesh) -> None:
    oslo = mesh["oslo"].namespace("users")
    oslo.put(b"ada", b"1", ttl=timedelta(minutes=10))
    publish(mesh, {})
    oslo.put(b"alan", b"2", ttl=timedelta(minutes=20))
    roll_back(mesh)
    assert_all_hold(mesh, {b"ada": b"1", b"alan": b"2"})
    mesh.time.advance(11 * 60_000)
    assert_all_hold(mesh, {b"alan": b"2"})
    mesh.time.advance(10 * 60_000)
    assert_all_hold(mesh, {})


def test_large_values_and_atomic_batches_come_back(mesh: Mesh) -> None:
    large = bytes(5_000)
    with mesh["oslo"].atomic() as batch:
        batch.put(mesh["oslo"].namespace("users"), b"ada", b"1")
        batch.put(mesh["oslo"].namespace("users"), b"alan", large)
    publish(mesh, {b"ada": b"2"})
    with mesh["rome"].atomic() as batch:
        batch.put(mesh["rome"].namespace("users"), b"grace", large)
        batch.put(mesh["rome"].namespace("users"), b"joan", b"2")
    roll_back(mesh)
    assert_all_hold(mesh, {b"ada": b"1", b"alan": large, b"grace": large, b"joan": b"2"})
    users = mesh["bonn"].namespace("users")
    assert mesh["bonn"].read_atomic([(users, b"ada"), (users, b"grace")]) == [b"1", large]


def test_a_rollback_can_be_rolled_back(mesh: Mesh) -> None:
    mesh.put("oslo", b"ada", b"1")
    publish(mesh, {b"ada": b"2"})
    roll_back(mesh)
    mesh.put("bonn", b"alan", b"3")
    assert_all_hold_after_links(mesh, {b"ada": b"1", b"alan": b"3"})
    assert roll_back(mesh) == 4
    assert_all_hold(mesh, {b"ada": b"2", b"alan": b"3"})
    assert roll_back(mesh) == 5
    assert_all_hold(mesh, {b"ada": b"1", b"alan": b"3"})


def assert_all_hold_after_links(mesh: Mesh, rows: dict[bytes, bytes]) -> None:
    mesh.exchange()
    assert_all_hold(mesh, rows)


def test_sites_go_back_two_generations(mesh: Mesh) -> None:
    mesh.put("oslo", b"ada", b"1")
    mesh.put("oslo", b"alan", b"1")
    publish(mesh, {b"ada": b"2"}, keep=2)
    mesh.put("rome", b"grace", b"2")
    mesh.exchange()
    publish(mesh, {b"ada": b"3"}, keep=2)
    mesh.put("bonn", b"alan", None)
    assert roll_back(mesh, 1) == 4
    assert_all_hold(mesh, {b"ada": b"1", b"grace": b"2"})


@pytest.mark.parametrize(
    ("links", "reason"),
    [
        ([("oslo", "rome"), ("rome", "oslo")], "'bonn' has what 'oslo' wrote"),
        ([("rome", "oslo"), ("oslo", "bonn"), ("rome", "bonn")], "'rome' has what 'oslo' wrote"),
        (
            [("rome", "oslo"), ("oslo", "rome"), ("oslo", "bonn"), ("rome", "bonn")],
            "'oslo' has what 'bonn' wrote",
        ),
    ],
)
def test_a_link_that_stands_still_is_named(mesh: Mesh, links: list[tuple[str, str]], reason: str) -> None:
    publish(mesh, {})
    mesh.beat()
    for source, target in links:
        mesh.step(source, target)
    generations = mesh["oslo"].generations
    with pytest.raises(LinkStalled, match=f"{reason} .*--without"):
        generations.rollback("users", others=others(mesh), wait=timedelta(milliseconds=20))
    assert [each.state.value for each in generations.list("users")] == ["kept", "current"]


def test_the_publisher_is_never_away(mesh: Mesh) -> None:
    """Else the others would lack what it has written, and show parts of its atomic batches."""
    publish(mesh, {})
    mesh.put("oslo", b"ada", b"1")
    mesh.step("rome", "oslo")
    mesh.beat()
    for source in ("rome", "bonn"):
        mesh.step(source, "oslo")
    with pytest.raises(LinkStalled, match="has what 'oslo' wrote"):
        mesh["oslo"].generations.rollback("users", others=others(mesh), without=["oslo"], wait=NOW)


def test_a_site_that_is_away_gets_the_earlier_data_set_by_its_links(mesh: Mesh) -> None:
    mesh.put("oslo", b"ada", b"1")
    publish(mesh, {})
    mesh.put("bonn", b"alan", b"not sent")
    mesh.beat()
    for source, target in (("rome", "oslo"), ("oslo", "rome")):
        mesh.step(source, target)
    mesh["oslo"].generations.rollback("users", others=[mesh["rome"]], without=["bonn"], wait=NOW)
    assert states(mesh) == [{b"ada": b"1"}, {b"ada": b"1"}, {b"alan": b"not sent"}]
    for _ in range(2):
        bring(mesh)
    assert_all_hold(mesh, {b"ada": b"1"})


def test_no_site_shows_an_older_record_than_before(mesh: Mesh) -> None:
    """The publisher has a newer record from a site that is away, and so it has not stored an older one."""
    for value in (b"1", b"2"):
        mesh.put("oslo", b"ada", value)
        mesh.exchange()
        publish(mesh, {b"joan": value}, keep=2)
    mesh.exchange()
    mesh.put("rome", b"ada", b"3")
    mesh.beat()
    step = mesh.plan("rome", "oslo")
    mesh.time.advance(1)
    mesh.put("bonn", b"ada", b"4")
    mesh.beat()
    # What rome wrote is older than what oslo has, and than the base; what bonn wrote is above the base.
    mesh.step("bonn", "oslo")
    run_step(mesh["rome"].host, mesh["oslo"].host, step)
    mesh.step("oslo", "rome")
    assert states(mesh)[1][b"ada"] == b"3"
    mesh["oslo"].generations.rollback("users", 1, others=[mesh["rome"]], without=["bonn"], wait=NOW)
    assert states(mesh)[:2] == [{b"ada": b"4"}] * 2
    for _ in range(2):
        bring(mesh)
    assert_all_hold(mesh, {b"ada": b"4"})


def bring(mesh: Mesh) -> None:
    """A step of every link, with the data sets that it brings."""
    mesh.beat()
    for source in mesh.sites:
        for target in mesh.sites:
            if source != target:
                bring_data_sets(mesh[source].host, mesh[target].host, mesh.plan(source, target))
                mesh.step(source, target)


def test_what_cannot_go_back_is_refused(mesh: Mesh) -> None:
    generations = mesh["oslo"].generations
    with pytest.raises(
        PublicationConflict, match=r"an earlier generation: those kept are: none\. Publish the data"
    ):
        generations.rollback("users", others=others(mesh))
    publish(mesh, {})
    with pytest.raises(InvalidConfiguration, match="shared with bonn, rome; roll back at all sites"):
        generations.rollback("users")
    with pytest.raises(PublicationConflict, match=r"generation 7: those kept are: 1\. Choose one"):
        roll_back(mesh, 7)
    mesh["rome"].host.generations.begin_generation("users", 0, "nightly", 2)
    with pytest.raises(PublicationConflict, match="at site 'rome' is being published by 'nightly'"):
        roll_back(mesh)
    assert [row.loading is None for row in rows_of(mesh)] == [True, False, True]


def test_a_generation_that_was_collected_is_refused(mesh: Mesh) -> None:
    mesh.put("oslo", b"ada", b"1")
    publish(mesh, {}, keep=0)
    mesh.time.advance(2 * (RETENTION // timedelta(milliseconds=1)))
    mesh["oslo"].host.retention.collect_garbage()
    with pytest.raises(PublicationConflict, match="an earlier generation: those kept are: none"):
        mesh["oslo"].generations.rollback("users", others=others(mesh), wait=NOW)


def test_a_log_that_was_trimmed_meanwhile_is_read_from_the_versions(mesh: Mesh) -> None:
    mesh.put("oslo", b"ada", b"1")
    mesh.put("oslo", b"alan", b"1")
    publish(mesh, {}, keep=2)
    mesh.put("oslo", b"ada", b"2")
    mesh.put("rome", b"alan", None)
    mesh.exchange()
    publish(mesh, {}, keep=2)
    mesh.put("oslo", b"ada", None)
    mesh.put("bonn", b"grace", b"3")
    mesh.exchange()
    node = embedded(mesh["oslo"]).node
    node.trim_logs(node.resolved_version())
    roll_back(mesh, 1)
    assert_all_hold(mesh, {b"grace": b"3"})


def test_a_publisher_that_lacks_the_newest_data_set_waits_for_it(mesh: Mesh) -> None:
    """It would go back behind a data set that the others do not expect to lose."""
    mesh.put("oslo", b"ada", b"1")
    publish(mesh, {b"ada": b"2"})
    mesh.exchange()
    mesh["rome"].generations.publish("users", {b"ada": b"3"}, others=[mesh["bonn"]], without=["oslo"])
    with pytest.raises(LinkStalled, match=r"'oslo' lacks the data set that '(rome|bonn)' has"):
        roll_back(mesh)
    bring(mesh)
    assert states(mesh) == [{b"ada": b"3"}] * 3
    roll_back(mesh)
    assert_all_hold(mesh, {b"ada": b"2"})


@pytest.mark.parametrize("is_newer", [False, True])
def test_a_data_set_that_is_published_meanwhile_is_not_undone(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch, *, is_newer: bool
) -> None:
    mesh.put("oslo", b"ada", b"1")
    publish(mesh, {b"ada": b"2"})
    base = mesh["oslo"].host.versions.now()

    def wait_and_publish(*arguments: Any) -> Any:
        arrived = wait_arrived(*arguments)
        mesh.time.advance(1)
        publish(mesh, {b"ada": b"3"}, base=None if is_newer else base)
        return arrived

    with monkeypatch.context() as patch:
        patch.setattr("floodmark.site.generations.wait_arrived", wait_and_publish)
        with pytest.raises(PublicationConflict, match=r"another data set was published.* roll back again"):
            roll_back(mesh)
    assert [row.loading for row in rows_of(mesh)] == [None] * 3
    assert_all_hold(mesh, {b"ada": b"3"})
    roll_back(mesh)
    assert_all_hold(mesh, {b"ada": b"2"})


def test_a_site_without_a_log_up_to_the_base_says_so(mesh: Mesh) -> None:
    """Nothing holds the log there, and it was trimmed up to now."""
    publish(mesh, {}, keep=0)
    mesh.exchange()
    mesh.exchange()
    node = embedded(mesh["rome"]).node
    node.trim_logs(node.resolved_version())
    with pytest.raises(PublicationConflict, match=r"has removed its changes .* roll back again"):
        mesh["oslo"].generations.rollback("users", others=others(mesh), wait=NOW)
    assert [row.loading for row in rows_of(mesh)] == [None] * 3


def test_an_unsettled_write_of_the_publisher_is_told_as_that(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(mesh, {})
    mesh.exchange()
    begun = rows_of(mesh)[0].present.since
    versions = type(mesh["oslo"].host.versions)
    monkeypatch.setattr(versions, "resolved_version", lambda _: begun - 1)
    with pytest.raises(LinkStalled, match=r"writes of 'oslo' are settled up to .* A transaction is open"):
        mesh["oslo"].generations.rollback("users", others=others(mesh), wait=NOW)


def test_a_link_does_not_complete_what_another_publisher_has_left(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While links stand still, the next rollback has the same base, and so the same stamp."""
    mesh.put("oslo", b"ada", b"1")
    mesh.exchange()
    for name in (b"alan", b"grace"):
        publish(mesh, {name: b"2"}, keep=2)
        mesh.exchange()
        mesh.exchange()
    killed = Generations(lambda: mesh["oslo"].host, "killed")
    with monkeypatch.context() as patch:
        patch.setattr("floodmark.site.generations._rewind", lambda *_: 1 / 0)
        patch.setattr(mesh["bonn"].host.generations, "drop_generation", lambda *_: None)
        with pytest.raises(ZeroDivisionError):
            killed.rollback("users", 1, others=others(mesh), wait=NOW)
    left = rows_of(mesh)[2].loading
    mesh["oslo"].generations.rollback("users", 2, others=[mesh["rome"]], without=["bonn"], wait=NOW)
    assert rows_of(mesh)[0].present.stamp == left.stamp
    for _ in range(2):
        bring(mesh)
    assert states(mesh) == [{b"alan": b"2"}, {b"alan": b"2"}, {b"grace": b"2"}]
    mesh["bonn"].generations.drop("users", left.number)
    bring(mesh)
    assert_all_hold(mesh, {b"alan": b"2"})
