"""A link shows what it waits for before it brings a data set, and why it does not succeed."""

from typing import Any

import pytest
from tests.replication.support_links import Mesh

from floodmark.host.statistics import LinkStatistics
from floodmark.links import bringing
from floodmark.links.steps import positions_after, run_step
from floodmark.model.errors import StorageFailed
from floodmark.model.version import Version, moment_of

ROWS = {b"ada": b"2", b"joan": b"2"}


@pytest.fixture
def mesh() -> Mesh:
    return Mesh("oslo", "rome", "bonn")


def publish(mesh: Mesh) -> Version:
    """Publish at all sites but Bonn, and return the version of the swap at Oslo."""
    mesh.put("oslo", b"ada", b"1")
    mesh.exchange()
    mesh.put("rome", b"alan", b"1")
    mesh.exchange()
    mesh.put("rome", b"grace", b"1")
    mesh.beat("rome")
    mesh.step("rome", "oslo")
    return mesh["oslo"].generations.publish("users", ROWS, others=[mesh["rome"]], without=["bonn"]).version


def copy(mesh: Mesh, source: str = "oslo") -> None:
    """Take a step of a link to Bonn as its planner does."""
    mesh.beat(source)
    step = mesh.plan(source, "bonn")
    bringing.bring_data_sets(mesh[source].host, mesh["bonn"].host, step)
    run_step(mesh[source].host, mesh["bonn"].host, step)


def link(mesh: Mesh) -> LinkStatistics:
    """The link from Oslo to Bonn."""
    return next(each for each in mesh["bonn"].replication().links if each.source == "oslo")


def shown(mesh: Mesh) -> str:
    """What the link shows, in its state and in its alarm."""
    (alarm,), stalled = link(mesh).alarms, link(mesh).stalled
    assert alarm.text == stalled
    return alarm.text


def test_a_link_shows_what_it_waits_for_until_the_data_set_is_there(mesh: Mesh) -> None:
    swap = publish(mesh)
    base = mesh["oslo"].host.namespaces.find_namespace("users").present.base
    before = f"are there before it brings the data set of {moment_of(base).isoformat()} to 'users'"
    copy(mesh)
    assert shown(mesh) == f"it waits until its changes up to {moment_of(swap).isoformat()} {before}"
    copy(mesh)
    assert shown(mesh).startswith("it waits until the changes of site 2 up to ")
    assert shown(mesh).endswith(before)
    mesh.step("rome", "bonn")
    copy(mesh)
    assert dict(mesh["bonn"].namespace("users").scan()) == ROWS
    assert (link(mesh).stalled, link(mesh).alarms) == (None, [])


def test_the_reason_why_a_data_set_is_not_there_stays_while_changes_come(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(mesh)
    copy(mesh)
    mesh.step("rome", "bonn")

    def fail(*_: Any) -> int:
        raise StorageFailed("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(bringing, "_load", fail)
        copy(mesh)
    mesh.put("oslo", b"new", b"3")
    mesh.step("oslo", "bonn")
    assert mesh["bonn"].namespace("users").get(b"new") == b"3"
    assert shown(mesh) == "the data set that was published at 'oslo' is not here: the disk is full"
    copy(mesh)
    assert (link(mesh).stalled, link(mesh).alarms) == (None, [])


def test_a_planner_asks_for_the_data_set_of_the_target_again_until_it_is_there(mesh: Mesh) -> None:
    publish(mesh)
    assert positions_after(mesh.plan("oslo", "bonn")) is None
    copy(mesh)
    mesh.step("rome", "bonn")
    copy(mesh)
    assert positions_after(mesh.plan("oslo", "bonn")) is not None


def test_a_data_set_waits_for_a_change_that_the_source_has_above_its_watermark(mesh: Mesh) -> None:
    publish(mesh)
    copy(mesh)
    mesh.step("rome", "bonn")
    mesh.put("rome", b"ada", b"3")
    mesh.beat("rome")
    # Oslo has the change, which replaces a row of the data set, and has not noted the step.
    mesh.apply("rome", "oslo", mesh.plan("rome", "oslo"))
    mesh.beat("oslo")
    mesh.step("oslo", "bonn")
    copy(mesh)
    assert shown(mesh).startswith("it waits until the changes of site 2 up to ")
    assert dict(mesh["bonn"].namespace("users").scan(prefix=b"joan")) == {}
    mesh.step("rome", "bonn")
    copy(mesh)
    assert dict(mesh["bonn"].namespace("users").scan()) == ROWS | {b"ada": b"3"}
    assert (link(mesh).stalled, link(mesh).alarms) == (None, [])
