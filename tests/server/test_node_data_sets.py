"""Data sets at two sites that share a namespace, each served by two nodes, over the wire."""

from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta

import pytest
from tests.nodes import NodeCluster, node_cluster

from floodmark import Site
from floodmark.divergence.comparing import compare_keys
from floodmark.links.bringing import bring_data_sets
from floodmark.links.steps import plan_step, run_step
from floodmark.partition.membership import BEAT_MS
from floodmark.replication.topology import MemberSite, SharedNamespace, Topology
from floodmark.site.connecting import connect
from floodmark.testing.clock import SimulatedTime

# Of either node.
OLD = {b"ada": b"1", b"zoe": b"1"}
NEW = {b"ada": b"2", b"tim": b"2"}
KEYS = [b"ada", b"bob", b"tim", b"zoe"]


class Pair:
    """Two sites of two nodes, which beat together; a client of each knows both of its nodes."""

    def __init__(self, stack: ExitStack) -> None:
        self.time = SimulatedTime()
        names = ("oslo", "rome")
        self.clusters = [stack.enter_context(node_cluster(2, name=each, time=self.time)) for each in names]
        for cluster in self.clusters:
            cluster.spread()
            assert cluster.owner_of("users", b"ada") != cluster.owner_of("users", b"zoe")
        self.clients = [stack.enter_context(connect(cluster.url)) for cluster in self.clusters]
        members = {each.name: MemberSite(id=each.id) for each in self.clients}
        for each in self.clients:
            each.set_topology(Topology(epoch=1, sites=members, namespaces={"users": SharedNamespace()}))
        self.tick()

    def tick(self) -> None:
        self.time.advance(BEAT_MS)
        for cluster in self.clusters:
            cluster.beat()

    def link(self, times: int = 1) -> None:
        """Let a link in each direction take a step, as its driver does."""
        oslo, rome = (each.host for each in self.clients)
        for _ in range(times):
            for source, target in ((oslo, rome), (rome, oslo)):
                self.tick()
                step = plan_step(source, target, ("users",))
                bring_data_sets(source, target, step)
                run_step(source, target, step)

    def nodes(self) -> Iterator[tuple[NodeCluster, Site]]:
        for cluster in self.clusters:
            for node in cluster.sites.values():
                yield cluster, node

    def check(self, rows: dict[bytes, bytes]) -> None:
        """All nodes of both sites hold some rows, and a comparison finds no difference."""
        self.tick()
        for cluster, node in self.nodes():
            users = node.namespace("users")
            assert dict(users.scan()) == rows, (cluster.url, node)
            assert node.read_atomic([(users, key) for key in KEYS]) == [rows.get(key) for key in KEYS]
        assert not [*compare_keys([each.host for each in self.clients], "users", KEYS)]


@pytest.fixture
def pair() -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(stack)


def test_a_link_brings_a_data_set_from_the_nodes_of_a_site_to_those_of_another(pair: Pair) -> None:
    oslo, rome = pair.clients
    oslo.namespace("users").put_many(OLD)
    pair.link(2)
    pair.check(OLD)
    oslo.generations.publish("users", NEW, without=["rome"])
    pair.tick()
    for (_, node), key in zip(pair.nodes(), (b"ada", b"zoe", b"bob", b"tim"), strict=True):
        node.namespace("users").put(key, b"3")
    assert dict(oslo.namespace("users").scan()) == {b"ada": b"3", b"tim": b"2", b"zoe": b"3"}
    pair.link(3)
    pair.check(dict.fromkeys(KEYS, b"3"))
    assert oslo.generations.list("users")[-1].base == rome.generations.list("users")[-1].base


def test_both_sites_go_back_at_all_of_their_nodes(pair: Pair) -> None:
    oslo, rome = pair.clients
    oslo.namespace("users").put_many(OLD)
    pair.link()
    rome.generations.publish("users", NEW, others=[oslo])
    pair.link()
    for (_, node), key in zip(pair.nodes(), (b"ada", b"zoe", b"bob", b"bob"), strict=True):
        node.namespace("users").put(key, b"3")
    rome.namespace("users").delete(b"zoe")
    pair.link(2)
    back = oslo.generations.rollback("users", others=[rome], wait=timedelta(0))
    assert back.number == 3
    pair.check({b"ada": b"3", b"bob": b"3"})
    pair.link(2)
    pair.check({b"ada": b"3", b"bob": b"3"})
