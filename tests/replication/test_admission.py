"""Whose changes a site takes in: those of members, and nothing older than what it has forgotten."""

import msgspec
import pytest
from tests.replication.support_links import IDS, RETENTION, Mesh, embedded, open_one, topology_of

from floodmark.engine import MemoryEngine
from floodmark.links.steps import run_step
from floodmark.model.errors import Fenced, InvalidConfiguration, StaleLink
from floodmark.partition import FAMILIES
from floodmark.replication.topology import SharedNamespace, Topology
from floodmark.site import Site
from floodmark.site.rewriting import rewrite

HOUR_MS = 3_600_000


@pytest.fixture
def mesh() -> Mesh:
    """Two sites that share, and a third that is there."""
    mesh = Mesh("oslo", "rome")
    mesh.exchange()
    mesh.sites["bonn"] = open_one(MemoryEngine(FAMILIES), "bonn", mesh.time)
    return mesh


def enter(mesh: Mesh, *names: str) -> None:
    """Let some sites know that there are three."""
    for name in names:
        mesh[name].set_topology(topology_of("oslo", "rome", "bonn", epoch=2))


def values(mesh: Mesh, key: bytes) -> dict[str, bytes | None]:
    there = {name: site for name, site in mesh.sites.items() if site.namespaces()}
    return {name: site.namespace("users").get(key) for name, site in there.items()}


def age(mesh: Mesh) -> None:
    """Let time pass, with all links that there are, until what is deleted may be collected."""
    for _ in range(2):
        mesh.time.advance(HOUR_MS)
        mesh.beat()
        for source, target in (("oslo", "rome"), ("rome", "oslo")):
            mesh.step(source, target)
    mesh["rome"].collect_garbage()
    assert embedded(mesh["rome"]).node.retention.collected_horizon(1)


def test_nothing_is_stored_of_a_site_that_is_not_known_here(mesh: Mesh) -> None:
    enter(mesh, "oslo", "bonn")
    mesh.put("bonn", b"ada")
    mesh.beat()
    with pytest.raises(Fenced, match="does not let this namespace come"):
        mesh.step("bonn", "rome")
    assert values(mesh, b"ada")["rome"] is None
    enter(mesh, "rome")
    mesh.step("bonn", "rome")
    assert values(mesh, b"ada")["rome"] == b"value"


def test_what_took_part_before_it_was_known_does_not_bring_back_what_was_deleted(mesh: Mesh) -> None:
    """A deletion was collected without it; so its older writes are to come as new ones, or not at all."""
    enter(mesh, "oslo", "bonn")
    mesh.put("bonn", b"ada", b"of bonn")
    mesh.time.advance(10)
    mesh.put("rome", b"ada", None)
    age(mesh)
    rewrite(mesh["rome"].host, "users")
    enter(mesh, "rome")
    for _ in range(2):
        with pytest.raises(Fenced, match=r"forgotten here.*floodmark namespace rewrite LOCATION users"):
            mesh.step("bonn", "rome")
    assert values(mesh, b"ada")["rome"] is None
    for source, target in (("oslo", "bonn"), ("rome", "bonn"), ("bonn", "oslo")):
        mesh.step(source, target)
    rewrite(mesh["bonn"].host, "users")
    mesh.exchange()
    assert set(values(mesh, b"ada").values()) == {b"of bonn"}


def test_empty_namespace_joins_though_it_is_older_than_what_was_forgotten(mesh: Mesh) -> None:
    mesh["bonn"].create_namespace("users", retention=RETENTION)
    mesh.put("rome", b"ada")
    mesh.put("rome", b"ada", None)
    age(mesh)
    rewrite(mesh["rome"].host, "users")
    enter(mesh, "oslo", "rome", "bonn")
    mesh.put("bonn", b"ada", b"of bonn")
    mesh.exchange()
    assert set(values(mesh, b"ada").values()) == {b"of bonn"}


# Leaving


def alone(epoch: int) -> Topology:
    return msgspec.structs.replace(topology_of("oslo", "rome", epoch=epoch), namespaces={})


def test_shared_namespace_is_not_dropped_by_one_site(mesh: Mesh) -> None:
    with pytest.raises(InvalidConfiguration, match=r"shared with oslo.*out of the topology"):
        mesh["rome"].drop_namespace("users")
    assert mesh["rome"].namespace("users").get(b"ada") is None
    mesh["rome"].set_topology(alone(2))
    mesh["rome"].drop_namespace("users")


def test_namespace_that_was_shared_before_is_shared_again_as_if_for_the_first_time(mesh: Mesh) -> None:
    """Nobody has waited for anybody in between: what is there gets new stamps, and all of it is told."""
    del mesh.sites["bonn"]
    mesh.put("rome", b"ada", b"1")
    mesh.exchange()
    for site in mesh.sites.values():
        rewrite(site.host, "users")
        site.set_topology(alone(2))
        assert site.host.replication.links() == []
    mesh.put("rome", b"ada", b"2")
    mesh.time.advance(10)
    mesh.put("oslo", b"ada", None)
    mesh.time.advance(2 * HOUR_MS)
    for site in mesh.sites.values():
        site.collect_garbage()
        with pytest.raises(InvalidConfiguration, match="from before it is shared"):
            site.set_topology(topology_of("oslo", "rome", epoch=3))
    for site in mesh.sites.values():
        rewrite(site.host, "users")
        site.set_topology(topology_of("oslo", "rome", epoch=3))
    mesh.exchange()
    assert values(mesh, b"ada") == {"oslo": b"2", "rome": b"2"}


def test_links_that_ended_stay_so_after_a_restart() -> None:
    mesh, engine = Mesh("oslo", "rome"), MemoryEngine(FAMILIES)
    bonn: Site = open_one(engine, "bonn", mesh.time)
    mesh.sites["bonn"] = bonn
    enter(mesh, *IDS)
    mesh.exchange()
    assert bonn.host.replication.links()
    shared = topology_of("oslo", "rome", "bonn", epoch=3)
    bonn.set_topology(msgspec.structs.replace(shared, namespaces={}))
    again = open_one(engine, "bonn", mesh.time)
    assert again.host.replication.links() == []


def test_step_of_a_namespace_that_is_no_longer_shared_is_refused(mesh: Mesh) -> None:
    mesh.put("oslo", b"ada")
    step = mesh.plan("oslo", "rome")
    mesh["rome"].set_topology(alone(2))
    with pytest.raises(StaleLink):
        run_step(mesh["oslo"].host, mesh["rome"].host, step)
    with pytest.raises(Fenced, match="does not let this namespace come"):
        mesh.step("oslo", "rome")
    assert mesh["rome"].namespace("users").get(b"ada") is None


def test_data_that_was_rewritten_long_ago_is_rewritten_again_before_it_is_shared(mesh: Mesh) -> None:
    bonn = mesh["bonn"]
    bonn.create_namespace("users", retention=RETENTION).put(b"ada", b"1")
    rewrite(bonn.host, "users")
    mesh.time.advance(2 * HOUR_MS)
    bonn.collect_garbage()
    with pytest.raises(InvalidConfiguration, match="from before it is shared"):
        enter(mesh, "bonn")
    rewrite(bonn.host, "users")
    enter(mesh, "bonn")


def test_namespace_that_is_refused_does_not_hold_up_the_others_of_its_link(mesh: Mesh) -> None:
    shared = topology_of("oslo", "rome", epoch=2)
    namespaces = {**shared.namespaces, "orders": SharedNamespace()}
    for name in ("oslo", "rome"):
        mesh[name].set_topology(msgspec.structs.replace(shared, namespaces=namespaces))
    mesh.put("oslo", b"ada")
    mesh["rome"].set_topology(topology_of("oslo", "rome", epoch=3))
    step = mesh.plan("oslo", "rome", ["orders", "users"])
    assert step.stalled.keys() == {"orders"}
    run_step(mesh["oslo"].host, mesh["rome"].host, step)
    assert values(mesh, b"ada")["rome"] == b"value"
