"""Where sites are looked at from: versions, watermarks, members, and when nothing can be told."""

import pytest
from msgspec.structs import replace
from tests.replication.support_links import Mesh, topology_of

from floodmark.divergence.comparing import Drift, Lag, compare_keys, read_horizon, take_vantage
from floodmark.model.change import Tally
from floodmark.model.errors import InvalidConfiguration, NamespaceNotFound, Rejoining
from floodmark.model.version import VERSION_MAX
from floodmark.replication.applied import Applied, NamespaceApplied
from floodmark.replication.topology import MemberSite, SiteState


@pytest.fixture
def mesh() -> Mesh:
    mesh = Mesh("oslo", "rome", "bonn")
    mesh.put("oslo", b"ada", b"1")
    mesh.exchange()
    return mesh


def test_a_vantage_names_every_member_and_the_site_itself(mesh: Mesh) -> None:
    vantage = take_vantage(mesh["oslo"].host, "users")
    assert (vantage.site, vantage.site_id) == ("oslo", 1)
    assert vantage.mark[1] == vantage.version
    assert vantage.mark == {**mesh.watermark("oslo"), 1: vantage.version}
    assert vantage.horizon_of() == 0


def test_a_member_from_which_nothing_came_has_an_entry_of_zero() -> None:
    mesh = Mesh("oslo", "rome", "bonn")
    mesh.put("rome", b"ada")
    mesh.beat()
    mesh.step("rome", "oslo")
    assert take_vantage(mesh["oslo"].host, "users").mark[3] == 0


def test_a_watermark_is_that_of_the_version(mesh: Mesh) -> None:
    before = take_vantage(mesh["oslo"].host, "users")
    mesh.put("rome", b"ada", b"2")
    mesh.exchange()
    assert mesh.watermark("oslo")[2] > before.mark[2]
    assert dict(mesh.watermark("oslo", before.version)) == {2: before.mark[2], 3: before.mark[3]}


def test_all_is_in_of_a_site_that_has_ended(mesh: Mesh) -> None:
    final = mesh.watermark("oslo")[3]
    removed = MemberSite(id=3, state=SiteState.REMOVED, final=final)
    mesh["oslo"].set_topology(topology_of("oslo", "rome", epoch=2, bonn=removed))
    mesh.time.advance(60_000)
    vantage = take_vantage(mesh["oslo"].host, "users")
    assert vantage.mark[3] == vantage.version > final


def test_nothing_is_known_of_the_end_of_a_removed_site_that_has_not_ended(mesh: Mesh) -> None:
    entry = mesh.watermark("oslo")[3]
    removed = MemberSite(id=3, state=SiteState.REMOVED)
    mesh["oslo"].set_topology(topology_of("oslo", "rome", epoch=2, bonn=removed))
    assert take_vantage(mesh["oslo"].host, "users").mark[3] == entry


def test_a_namespace_that_is_not_shared_cannot_be_judged() -> None:
    mesh = Mesh("oslo", "rome", topology=False)
    with pytest.raises(InvalidConfiguration, match="does not share namespace 'users'"):
        take_vantage(mesh["oslo"].host, "users")
    with pytest.raises(NamespaceNotFound):
        take_vantage(mesh["oslo"].host, "nowhere")


def test_sites_that_copy_each_other_without_a_topology_are_judged_by_their_watermarks() -> None:
    mesh = Mesh("oslo", "rome", topology=False)
    mesh.put("oslo", b"ada")
    mesh.exchange()
    assert take_vantage(mesh["rome"].host, "users").mark.keys() == {1, 2}


def test_a_site_that_is_rejoining_does_not_know_what_it_has_lost() -> None:
    mesh = Mesh("oslo", topology=False)
    mesh["oslo"].set_topology(topology_of("rome", oslo=MemberSite(id=1, incarnation=2)))
    with pytest.raises(Rejoining):
        take_vantage(mesh["oslo"].host, "users")


def test_the_horizon_is_that_of_collected_tombstones(mesh: Mesh) -> None:
    vantage = take_vantage(mesh["rome"].host, "users")
    deleted = mesh.put("oslo", b"ada", None)
    mesh.exchange()
    mesh.exchange()
    mesh.time.advance(2 * 3_600_000)
    mesh["rome"].collect_garbage()
    assert vantage.horizon_of() == deleted


def test_nothing_is_concluded_from_absence_once_another_site_has_joined() -> None:
    mesh = Mesh("oslo", "rome")
    mesh.put("oslo", b"ada")
    mesh.exchange()
    vantage = take_vantage(mesh["oslo"].host, "users")
    mesh["oslo"].set_topology(topology_of("oslo", "rome", "bonn", epoch=2))
    assert vantage.horizon_of() == VERSION_MAX
    assert read_horizon(mesh["oslo"].host, "users", [1, 2, 3]) == 0


def test_keys_are_compared_as_of_the_vantages(mesh: Mesh) -> None:
    hosts = [mesh[name].host for name in ("oslo", "rome", "bonn")]
    vantages = [take_vantage(host, "users") for host in hosts]
    mesh.put("oslo", b"ada", b"2")
    assert list(compare_keys(hosts, "users", [b"ada", b"bob"], vantages)) == []
    assert list(compare_keys(hosts, "users", [b"ada", b"bob"])) == [
        Lag(b"ada", "oslo", "rome"),
        Lag(b"ada", "oslo", "bonn"),
    ]


def test_a_forged_step_whose_heartbeats_fit_is_found_by_comparing(mesh: Mesh) -> None:
    """The account believes the caller that speaks for the source; the records tell what is missing."""
    mesh.put("oslo", b"bob", b"2")
    mesh.beat()
    step = mesh.plan("oslo", "rome")
    told = mesh.apply("oslo", "bonn", mesh.plan("oslo", "bonn")).namespaces["users"]
    beats = [replace(beat, own=Tally()) for beat in told.beats]
    mesh["rome"].host.replication.advance_link(step, Applied({"users": NamespaceApplied(beats=beats)}))
    mesh.exchange()
    links = mesh["rome"].host.status.replication().links
    assert [link.alarms for link in links] == [[], []]
    comparison = compare_keys([mesh["oslo"].host, mesh["rome"].host], "users", [b"ada", b"bob"])
    assert [found.key for found in comparison if isinstance(found, Drift)] == [b"bob"]
