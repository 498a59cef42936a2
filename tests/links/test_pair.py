"""A pair: one direction, and no key comes back that was deleted at the target and collected there."""

from typing import NamedTuple

import msgspec
import pytest
from tests.links.support import ServeSite, stored
from tests.replication.support_links import RETENTION, open_one

from floodmark.engine import MemoryEngine
from floodmark.links.driver import run_links
from floodmark.links.pair import LinkPair, begin_copy, pair_topology
from floodmark.links.process import ProcessRunner
from floodmark.links.steps import plan_step, run_step
from floodmark.model.errors import (
    Fenced,
    InvalidArgument,
    InvalidConfiguration,
    InvalidOption,
    NamespaceNotFound,
)
from floodmark.partition import FAMILIES
from floodmark.replication.topology import MemberSite, SharedNamespace, Topology
from floodmark.site import Site
from floodmark.site.address import SiteAddress
from floodmark.site.rewriting import rewrite
from floodmark.testing.clock import SimulatedTime

HOUR_MS = 3_600_000


class Two(NamedTuple):
    """Two sites under one time, each with a namespace `users`."""

    time: SimulatedTime
    oslo: Site
    rome: Site

    def pair(self) -> Topology:
        """Make the two a pair."""
        topology = pair_topology(self.oslo, self.rome, ["users"])
        for site in (self.oslo, self.rome):
            site.set_topology(topology)
        return topology

    def copy(self) -> None:
        """Let the link arrive at the present."""
        self.time.advance(1_000)
        for site in (self.oslo, self.rome):
            site.heartbeat()
        begin_copy(self.oslo.host, self.rome.host, "users")
        run_step(self.oslo.host, self.rome.host, plan_step(self.oslo.host, self.rome.host, ["users"]))

    def age(self, *sites: Site) -> None:
        """Let sites collect garbage, some hours later."""
        self.time.advance(3 * HOUR_MS)
        for site in (self.oslo, self.rome):
            site.heartbeat()
        for site in sites:
            site.collect_garbage()


@pytest.fixture
def two() -> Two:
    time = SimulatedTime()
    oslo, rome = (open_one(MemoryEngine(FAMILIES), name, time) for name in ("oslo", "rome"))
    for site in (oslo, rome):
        site.create_namespace("users", retention=RETENTION)
    return Two(time, oslo, rome)


def value(site: Site, key: bytes = b"ada") -> bytes | None:
    return site.namespace("users").get(key)


# Deleted keys stay deleted


def test_a_deletion_at_the_target_outlives_collection_while_an_older_change_is_on_its_way(two: Two) -> None:
    two.pair()
    two.copy()
    two.oslo.namespace("users").put(b"ada", b"old")
    two.time.advance(10)
    two.rome.namespace("users").delete(b"ada")
    two.age(two.rome)
    two.copy()
    assert value(two.rome) is None
    two.age(two.rome)
    assert b"ada" not in stored(two.rome, "users")


def test_a_change_older_than_a_forgotten_deletion_is_refused_with_what_to_do(two: Two) -> None:
    two.oslo.namespace("users").put(b"ada", b"old")
    two.time.advance(10)
    users = two.rome.namespace("users")
    users.put(b"ada", b"x")
    users.delete(b"ada")
    two.age(two.rome)
    with pytest.raises(InvalidConfiguration, match="floodmark namespace drop LOCATION users"):
        two.pair()
    rewrite(two.rome.host, "users")
    two.pair()
    with pytest.raises(Fenced, match="floodmark namespace rewrite LOCATION users"):
        two.copy()
    assert value(two.rome) is None


def test_a_deletion_reaches_the_copy_though_the_source_collects_it(two: Two) -> None:
    two.oslo.namespace("users").put(b"ada", b"x")
    two.pair()
    two.copy()
    assert value(two.rome) == b"x"
    two.oslo.namespace("users").delete(b"ada")
    two.copy()
    two.age(two.oslo)
    assert stored(two.oslo, "users") == {}
    assert value(two.rome) is None


# The beginning


def test_a_copy_begins_with_all_records_of_the_source_wherever_they_were_written(two: Two) -> None:
    users = two.oslo.namespace("users")
    users.put_many({b"%d" % number: b"x" for number in range(50)})
    users.delete(b"7")
    two.age(two.oslo)
    users.put(b"late", b"x")
    two.pair()
    two.copy()
    assert stored(two.rome, "users") == stored(two.oslo, "users")
    assert begin_copy(two.oslo.host, two.rome.host, "users") == 0
    users.put(b"later", b"y")
    two.copy()
    assert value(two.rome, b"later") == b"y"


def test_a_target_with_data_from_before_is_refused_with_what_to_do(two: Two) -> None:
    two.rome.namespace("users").put(b"ada", b"own")
    with pytest.raises(InvalidConfiguration, match=r"namespace drop LOCATION users.*rewrite LOCATION users"):
        two.pair()


# The topology


def test_the_same_pair_keeps_its_topology_and_another_copy_extends_it(two: Two) -> None:
    first = two.pair()
    assert [*first.directions()] == [("oslo", "rome", ("users",))]
    assert two.pair() == first
    bonn = open_one(MemoryEngine(FAMILIES), "bonn", two.time)
    bonn.create_namespace("users")
    second = pair_topology(two.oslo, bonn, ["users"])
    assert second.epoch == first.epoch + 1
    assert [direction[:2] for direction in second.directions()] == [("oslo", "bonn"), ("oslo", "rome")]
    for site in (two.oslo, bonn):
        site.set_topology(second)
    # The first copy goes on with the topology that it knows.
    two.copy()
    assert pair_topology(two.oslo, two.rome, ["users"]) == second


def test_a_pair_leaves_the_other_namespaces_of_its_sites_alone(two: Two) -> None:
    shared = Topology(
        epoch=3,
        sites={"oslo": MemberSite(id=1), "bonn": MemberSite(id=3)},
        namespaces={"orders": SharedNamespace()},
    )
    two.oslo.set_topology(shared)
    topology = two.pair()
    assert topology.epoch == 4
    assert set(topology.members("orders")) == {"oslo", "bonn"}


def test_a_namespace_with_another_source_is_refused_with_what_to_do(two: Two) -> None:
    two.pair()
    with pytest.raises(InvalidConfiguration, match=r"shared with 'oslo'.*topology file"):
        pair_topology(two.rome, two.oslo, ["users"])


def test_a_removed_site_is_refused(two: Two) -> None:
    topology = two.pair()
    sites = {**topology.sites, "rome": MemberSite(id=2, state="removed", final=1)}  # type: ignore[arg-type]
    two.oslo.set_topology(msgspec.structs.replace(topology, epoch=2, sites=sites))
    with pytest.raises(InvalidConfiguration, match="'rome' was removed"):
        pair_topology(two.oslo, two.rome, ["users"])


# Over servers


def test_a_pair_is_made_with_the_settings_of_the_source(serve_site: ServeSite) -> None:
    served = [serve_site(name) for name in ("oslo", "rome")]
    oslo, rome = (each.site for each in served)
    orders = oslo.create_namespace("orders", retention=RETENTION)
    orders.put(b"1", b"x")
    source, target = (SiteAddress(location=each.url) for each in served)
    pair = LinkPair.of(source, target, ["orders"])
    run_links(pair.topology, pair.addresses, ProcessRunner(), once=True)
    assert rome.namespace("orders").settings == orders.settings
    assert dict(rome.namespace("orders").scan()) == {b"1": b"x"}


def test_impossible_pairs_are_refused_and_change_nothing(serve_site: ServeSite) -> None:
    served = [serve_site(name) for name in ("oslo", "rome")]
    oslo, rome = (SiteAddress(location=each.url) for each in served)
    with pytest.raises(InvalidArgument, match="no namespace to copy"):
        LinkPair.of(oslo, rome)
    served[0].site.create_namespace("users")
    with pytest.raises(InvalidArgument, match="one site"):
        LinkPair.of(oslo, oslo)
    with pytest.raises(NamespaceNotFound):
        LinkPair.of(oslo, rome, ["nothing"])
    with pytest.raises(InvalidArgument, match="once"):
        LinkPair.of(oslo, rome, ["users", "users"])
    with pytest.raises(InvalidOption, match="not replicated to"):
        LinkPair.of(oslo, SiteAddress(location=str(served[1].directory)))
    assert [each.site.topology() for each in served] == [None, None]
