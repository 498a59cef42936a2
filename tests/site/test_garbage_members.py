"""Garbage collection among several sites: a tombstone stays until everybody has what it hides."""

import msgspec
import pytest
from tests.replication.support_links import IDS, Mesh, topology_of
from tests.site.support import stored_versions

from floodmark.replication.step import LinkStep
from floodmark.replication.topology import MemberSite, SiteState

HOUR_MS = 3_600_000
KEY = b"ada"


def collect(mesh: Mesh, name: str) -> bool:
    """Collect at a site, long after everything was written; whether the tombstone is still there."""
    mesh[name].collect_garbage()
    return any(key == KEY for key, _ in stored_versions(mesh[name], "users"))


def cut(step: LinkStep, until: int) -> LinkStep:
    """A step that ends earlier."""
    (part,) = step.namespaces
    return msgspec.structs.replace(step, namespaces=(msgspec.structs.replace(part, until=until),))


def horizon(mesh: Mesh, name: str) -> int:
    (namespace,) = mesh[name].statistics().namespaces
    return namespace.collected_horizon


@pytest.fixture
def mesh() -> Mesh:
    """Three sites; a key was written and deleted at the first, and all retention is over."""
    mesh = Mesh("oslo", "rome", "bonn")
    mesh.put("oslo", KEY)
    mesh.exchange()
    mesh.put("oslo", KEY, None)
    mesh.time.advance(2 * HOUR_MS)
    return mesh


def test_without_a_topology_a_tombstone_goes_after_its_retention() -> None:
    mesh = Mesh("oslo", topology=False)
    mesh.put("oslo", KEY)
    deleted = mesh.put("oslo", KEY, None)
    mesh.time.advance(2 * HOUR_MS)
    assert not collect(mesh, "oslo")
    assert horizon(mesh, "oslo") == deleted


def test_tombstone_stays_until_every_member_is_known_to_have_everything_up_to_it(mesh: Mesh) -> None:
    """Two rounds: in the first everybody gets everything, in the second everybody tells."""
    mesh.beat()
    mesh.step("oslo", "rome")
    mesh.step("oslo", "bonn")
    for source, target in (("rome", "oslo"), ("rome", "bonn"), ("bonn", "oslo"), ("bonn", "rome")):
        assert collect(mesh, "oslo")
        mesh.step(source, target)
    assert collect(mesh, "oslo")
    mesh.beat()
    mesh.step("rome", "oslo")
    assert collect(mesh, "oslo"), "bonn has not told yet"
    mesh.step("bonn", "oslo")
    assert not collect(mesh, "oslo")


@pytest.mark.parametrize("silent", ["rome", "bonn"])
def test_site_that_is_silent_holds_every_tombstone(mesh: Mesh, silent: str) -> None:
    others = [name for name in mesh.sites if name != silent]
    for _ in range(3):
        mesh.beat()
        for source in others:
            for target in mesh.sites:
                if source != target:
                    mesh.step(source, target)
    assert all(collect(mesh, name) for name in others)
    assert all(horizon(mesh, name) == 0 for name in others)


def test_site_that_lacks_the_changes_of_one_other_holds_the_tombstones_of_all(mesh: Mesh) -> None:
    for _ in range(3):
        mesh.beat()
        for source in mesh.sites:
            for target in mesh.sites:
                if source != target and (source, target) != ("rome", "bonn"):
                    mesh.step(source, target)
    assert collect(mesh, "oslo"), "something older of rome's may still come to bonn, and from there nowhere"
    mesh.step("rome", "bonn")
    mesh.exchange()
    assert not collect(mesh, "oslo")


def test_horizon_is_the_stamp_of_the_highest_tombstone_that_went_at_every_site(mesh: Mesh) -> None:
    later = mesh.put("rome", b"alan", None)
    mesh.put("rome", b"grace")
    for _ in range(2):
        mesh.exchange()
    mesh.time.advance(2 * HOUR_MS)
    for name in mesh.sites:
        assert not collect(mesh, name)
        assert horizon(mesh, name) == later
        assert mesh[name].namespace("users").get(b"grace") == b"value"


def test_young_tombstone_that_everybody_has_stays_for_its_retention(mesh: Mesh) -> None:
    mesh.put("rome", KEY, None)
    for _ in range(3):
        mesh.exchange()
    assert collect(mesh, "rome")


def test_removed_site_is_waited_for_up_to_its_end_and_no_longer(mesh: Mesh) -> None:
    mesh.step("bonn", "oslo")
    end = mesh.watermark("oslo")[IDS["bonn"]]
    gone = MemberSite(id=IDS["bonn"], state=SiteState.REMOVED, final=end)
    topology = topology_of("oslo", "rome", "bonn", epoch=2, bonn=gone)
    for name in ("oslo", "rome"):
        mesh[name].set_topology(topology)
    for _ in range(2):
        mesh.beat("oslo", "rome")
        mesh.step("oslo", "rome")
        mesh.step("rome", "oslo")
    assert collect(mesh, "oslo"), "rome lacks the last of bonn's changes"
    step = mesh.plan("bonn", "rome")
    (part,) = step.namespaces
    assert part.since < end
    survivors = mesh.apply("bonn", "rome", cut(step, end))
    mesh["rome"].host.replication.advance_link(cut(step, end), survivors)
    mesh.beat("rome")
    mesh.step("rome", "oslo")
    assert not collect(mesh, "oslo")
