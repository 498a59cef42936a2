"""Partitions move between the nodes of a site, by hand and by plan, and nothing written is lost."""

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.nodes import LOOPBACK, NodeCluster, node_cluster

from floodmark.host.balancing import halving_key, plan_moves
from floodmark.host.nodes import rebalance
from floodmark.host.ports import Balance
from floodmark.model.errors import InvalidOption, PartitionNotFound
from floodmark.server import serve
from floodmark.site import Site

KEYS = [b"key-%02d" % number for number in range(16)]


@pytest.fixture
def cluster() -> Iterator[NodeCluster]:
    with node_cluster(3) as cluster:
        yield cluster


@pytest.fixture
def site(cluster: NodeCluster) -> Iterator[Site]:
    with cluster.connect(1) as site:
        users = site.create_namespace("users")
        users.put_many((key, b"1") for key in KEYS)
        for key in KEYS[4::4]:
            site.split("users", key)
        yield site


def owners(site: Site) -> dict[int, list[int]]:
    return {each.node: each.partitions for each in site.host.node_port.nodes()}


def contents(site: Site) -> list[tuple[bytes, bytes]]:
    return list(site.namespace("users").scan())


def test_a_partition_is_served_by_the_node_that_it_was_moved_to(site: Site) -> None:
    for target in (2, 3, 1):
        partition = next(each for each in site.partitions() if each.node != target)
        moved = site.host.node_port.move(partition.id, target)
        assert moved in owners(site)[target]
        site.namespace("users").put(KEYS[target], b"moved")
    assert len(contents(site)) == len(KEYS)
    assert dict(contents(site))[KEYS[3]] == b"moved"


def test_a_move_to_a_node_that_cannot_serve_is_refused(site: Site) -> None:
    partition = site.partitions()[0].id
    with pytest.raises(InvalidOption, match="can move to: 1, 2, 3"):
        site.host.node_port.move(partition, 9)
    with pytest.raises(PartitionNotFound):
        site.host.node_port.move(999_999, 2)


def test_a_node_is_listed_with_its_url_when_partitions_can_be_moved_to_it(
    cluster: NodeCluster, site: Site
) -> None:
    administration, partition = site.host.node_port, site.partitions()[-1].id
    cluster.start(4, listens=False)
    cluster.tick()
    cluster.servers[4] = serve(cluster.sites[4], LOOPBACK)
    # The keeper has not seen the beat that tells it.
    assert administration.nodes()[3].url == ""
    with pytest.raises(InvalidOption, match="node 4"):
        administration.move(partition, 4)
    cluster.tick()
    assert administration.nodes()[3].url == cluster.servers[4].url
    moved = administration.move(partition, 4)
    assert owners(site)[4] == [moved]


def test_rebalance_evens_out_the_number_of_partitions(site: Site) -> None:
    moves = site.host.node_port.rebalance(Balance.COUNT)
    counts = [len(each) for each in owners(site).values()]
    assert max(counts) - min(counts) <= 1
    assert moves
    assert site.host.node_port.rebalance(Balance.COUNT) == []
    assert len(contents(site)) == len(KEYS)


def test_partitions_of_other_nodes_are_split_and_joined(site: Site) -> None:
    site.host.node_port.rebalance(Balance.COUNT)
    before = len(site.partitions())
    for key in (KEYS[2], KEYS[6], KEYS[14]):
        site.split("users", key)
    assert len(site.partitions()) == before + 3
    while len(partitions := site.partitions()) > 1:
        site.merge(partitions[0].id, partitions[1].id)
    assert len(contents(site)) == len(KEYS)


def test_a_drained_node_owns_nothing_until_it_starts_again(cluster: NodeCluster, site: Site) -> None:
    site.host.node_port.rebalance(Balance.COUNT)
    keeper = next(each.node for each in site.host.node_port.nodes() if each.keeps)
    other = next(number for number in (1, 2, 3) if number != keeper)
    with pytest.raises(InvalidOption, match="drain it"):
        site.host.node_port.remove_node(other)
    assert site.host.node_port.drain(keeper)
    cluster.tick(2)
    told = {each.node: each for each in site.host.node_port.nodes()}
    assert told[keeper].partitions == []
    assert told[keeper].drained
    assert not told[keeper].keeps
    with pytest.raises(InvalidOption):
        site.host.node_port.move(site.partitions()[0].id, keeper)
    site.namespace("users").put(b"new", b"1")
    assert len(contents(site)) == len(KEYS) + 1


def test_a_lost_node_is_listed_until_it_is_removed(cluster: NodeCluster, site: Site) -> None:
    cluster.kill(3)
    cluster.take_over()
    told = {each.node: each for each in site.host.node_port.nodes()}
    assert not told[3].lives
    assert told[3].partitions == []
    site.host.node_port.remove_node(3)
    assert [each.node for each in site.host.node_port.nodes()] == [1, 2]
    with pytest.raises(InvalidOption, match="no node 3"):
        site.host.node_port.remove_node(3)


def test_nothing_is_rebalanced_while_a_node_is_lost(cluster: NodeCluster, site: Site) -> None:
    site.host.node_port.rebalance(Balance.COUNT)
    for _ in range(200):
        site.namespace("users").get(KEYS[0])
    lost = next(each.node for each in site.host.node_port.nodes() if not each.keeps)
    before = owners(site)
    cluster.kill(lost)
    cluster.time.advance(4_000)
    for number in cluster.sites:
        rebalance(cluster.host(number))
    assert {row.id: row.node for row in cluster.host(min(cluster.sites)).shared.node.rows} == {
        partition: node for node, partitions in before.items() for partition in partitions
    }


def test_a_partition_is_cut_where_its_writes_are_halved(site: Site) -> None:
    users = site.namespace("users")
    partition = site.partitions()[-1]
    for key in (KEYS[13], KEYS[14], KEYS[14], KEYS[15], KEYS[15], KEYS[15]):
        users.put(key, b"2")
    halves = site.host.partitions.split_by_load(partition.id)
    assert halves.key.endswith(KEYS[15]) or halves.key.endswith(KEYS[14])
    assert [each.id for each in site.partitions()][-2:] == [halves.left, halves.right]


@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 20)), max_size=12),
    st.sets(st.integers(1, 4), min_size=1),
)
def test_a_plan_never_makes_the_busiest_node_busier(
    partitions: list[tuple[int, int]], nodes: set[int]
) -> None:
    owned = {number: node for number, (node, _) in enumerate(partitions)}
    loads = {number: float(load) for number, (_, load) in enumerate(partitions)}
    now = dict(owned)
    for move in plan_moves(owned, loads, sorted(nodes)):
        assert now[move.partition] == move.source != move.target
        now[move.partition] = move.target
    assert set(now.values()) <= nodes
    sums = [sum(loads[each] for each, owner in now.items() if owner == node) for node in nodes]
    if set(owned.values()) <= nodes:
        before = [sum(loads[each] for each, owner in owned.items() if owner == node) for node in nodes]
        assert max(sums) <= max(before)
    # No single move would bring the busiest and the idlest closer.
    busiest = max(nodes, key=lambda node: sum(loads[each] for each, owner in now.items() if owner == node))
    difference = max(sums) - min(sums)
    assert not any(0 < loads[each] < difference for each, owner in now.items() if owner == busiest)
    assert plan_moves(now, loads, sorted(nodes)) == []


@given(st.lists(st.binary(max_size=2), max_size=40))
def test_a_key_that_halves_has_writes_on_both_sides(keys: list[bytes]) -> None:
    cut = halving_key(keys)
    assert (cut is None) == (len(set(keys)) < 2)
    if cut is not None:
        before = sum(key < cut for key in keys)
        assert 0 < before < len(keys)
        assert all(
            abs(len(keys) / 2 - before) <= abs(len(keys) / 2 - sum(key < other for key in keys))
            for other in keys
            if any(key < other for key in keys)
        )
