"""The keeper's work over partitions of other nodes, and what nodes that do not keep have to know."""

from datetime import timedelta
from functools import partial

import pytest
from tests.cluster import LATER, SiteCluster

from floodmark.codec.values import encode_value
from floodmark.model.errors import NamespaceNotFound, NodeFenced, NotKeeper, VersionCollected
from floodmark.partition import FAMILIES
from floodmark.partition.families import DATA, LOG_TRIMMED
from floodmark.partition.layout import load_version
from floodmark.partition.membership import BEAT_MS
from floodmark.routing.batches import FORGET_MS, forget_ended
from floodmark.site import Namespace

ADA = b"\x00\x00\x01ada"
ZERO = timedelta(0)


@pytest.fixture
def nodes() -> SiteCluster:
    return SiteCluster()


def make_users(nodes: SiteCluster) -> Namespace:
    """A namespace without a history, in a partition of the second node; the first node keeps."""
    nodes.give(2)
    return nodes.sites[0].create_namespace("users", retention=ZERO)


def versions_of(nodes: SiteCluster) -> int:
    return len(nodes.cluster.engine.scan(DATA, b"", None, rows_max=1_000, bytes_max=1 << 20))


def bytes_of(nodes: SiteCluster) -> int:
    """The bytes of all rows of the engine that the nodes share."""
    scan = partial(nodes.cluster.engine.scan, start=b"", end=None, rows_max=10_000, bytes_max=1 << 20)
    return sum(len(key) + len(value) for family in FAMILIES for key, value in scan(family))


def test_a_node_writes_to_a_namespace_that_the_keeper_has_just_created(nodes: SiteCluster) -> None:
    users = make_users(nodes)
    assert users.put(b"ada", b"1") % 64 == 2
    assert users.get(b"ada") == b"1"


def test_a_commit_over_partitions_loads_a_new_namespace_before_its_round(nodes: SiteCluster) -> None:
    """In the round it would wait for the turn that it holds."""
    keeper, second = nodes.sites[0], nodes.hosts[1]
    users = keeper.create_namespace("users")
    users.put_many({b"ada": b"1", b"zoe": b"1"})
    nodes.hosts[0].partitions.split("users", b"m")
    nodes.give(2)
    nodes.give(2, LATER)
    assert second.catalog.name_of(users.id) is None
    assert users.delete_range() == 2
    more = keeper.create_namespace("more")
    assert second.catalog.name_of(more.id) is None
    with keeper.atomic() as batch:
        batch.put(users, b"ada", b"2")
        batch.put(more, b"ada", b"2")
    assert batch.version % 64 == 2
    assert (users.get(b"ada"), more.get(b"ada")) == (b"2", b"2")


def test_a_batch_over_nodes_leaves_no_more_bytes_than_plain_writes_once_it_is_forgotten() -> None:
    def added(*, atomic: bool) -> tuple[int, int]:
        """The bytes that a write to two nodes adds, when it is new and when it is forgotten."""
        nodes = SiteCluster()
        users, maps = nodes.sites[0].create_namespace("users"), nodes.nodes[0]
        nodes.hosts[0].partitions.split("users", b"m")
        nodes.give(2)
        before = bytes_of(nodes)
        if atomic:
            with nodes.sites[0].atomic() as batch:
                for key in (b"ada", b"zoe"):
                    batch.put(users, key, b"1")
        else:
            for key in (b"ada", b"zoe"):
                users.put(key, b"1")
        new = bytes_of(nodes)
        nodes.cluster.time.advance(FORGET_MS + 1)
        nodes.cluster.tick(*nodes.cluster.nodes)
        for shared in nodes.cluster.nodes:
            shared.node.committer.now()
            forget_ended(shared.node, maps, lambda key, call: call(maps.map.route(key)))
        return new - before, bytes_of(nodes) - before

    plain, batch = added(atomic=False), added(atomic=True)
    assert batch[0] > plain[0]
    assert batch[1] == plain[1]


def test_no_caller_learns_of_a_changed_catalog(nodes: SiteCluster) -> None:
    users, keeper = make_users(nodes), nodes.sites[0]
    users.put(b"ada", b"1")
    counts = keeper.create_namespace("counts", merge="counter")
    users.put(b"ada", b"2")
    keeper.create_namespace("more")
    users.put_many({b"ada": b"3", b"bob": b"3"})
    keeper.update_namespace("users", retention=timedelta(hours=1))
    counts.add(b"ada", 1)
    assert (users.get(b"ada"), counts.get(b"ada")) == (b"3", 1)


def test_a_node_refuses_writes_to_a_namespace_that_the_keeper_has_dropped(nodes: SiteCluster) -> None:
    users = make_users(nodes)
    users.put(b"ada", b"1")
    nodes.sites[0].drop_namespace("users")
    with pytest.raises(NamespaceNotFound):
        nodes.hosts[1].node.map.route(ADA).put([ADA], [encode_value(b"2")], durable=True)
    nodes.cluster.tick(*nodes.cluster.nodes)
    nodes.sites[0].collect_garbage()
    with pytest.raises(NamespaceNotFound):
        nodes.hosts[1].node.map.route(ADA).put([ADA], [encode_value(b"2")], durable=True)


def test_the_keeper_collects_versions_of_all_nodes(nodes: SiteCluster) -> None:
    users = make_users(nodes)
    first = users.put(b"ada", b"1")
    users.put(b"ada", b"2")
    nodes.cluster.time.advance(BEAT_MS)
    assert nodes.sites[0].collect_garbage().versions_removed == 1
    with pytest.raises(VersionCollected):
        nodes.sites[1].namespace("users").get(b"ada", at=first)
    assert users.get(b"ada") == b"2"
    assert load_version(nodes.cluster.engine, LOG_TRIMMED) > first


def test_garbage_collection_waits_for_the_resolved_version_of_every_node(nodes: SiteCluster) -> None:
    users = make_users(nodes)
    users.put(b"ada", b"1")
    partition = nodes.hosts[1].node.map.route(ADA)
    partition.prepare("t1", [ADA], [encode_value(b"2")])
    users.put(b"ada", b"3")
    nodes.cluster.time.advance(BEAT_MS)
    assert nodes.sites[0].collect_garbage().versions_removed == 0
    partition.abort_prepared("t1")
    assert nodes.sites[0].collect_garbage().versions_removed == 1


def test_garbage_collection_respects_readers_at_other_nodes(nodes: SiteCluster) -> None:
    users = make_users(nodes)
    first = users.put(b"ada", b"1")
    users.put(b"ada", b"2")
    nodes.cluster.time.advance(BEAT_MS)
    nodes.nodes[0].held = first
    assert nodes.sites[0].collect_garbage().versions_removed == 0
    assert users.get(b"ada", at=first) == b"1"


def test_a_node_that_keeps_no_more_collects_nothing(nodes: SiteCluster) -> None:
    users = make_users(nodes)
    users.put(b"ada", b"1")
    users.put(b"ada", b"2")
    nodes.cluster.time.advance(BEAT_MS)
    stored = versions_of(nodes)
    first, second = nodes.cluster.nodes
    with pytest.raises(NotKeeper):
        nodes.hosts[1].garbage.run()
    storage = first.node.storage
    assert second.take_keeper()
    with pytest.raises(NotKeeper):
        nodes.sites[0].collect_garbage()
    # A run that goes on when the node has got the lease back: that is another incarnation.
    assert first.take_keeper()
    with pytest.raises(NodeFenced):
        storage.remove([(DATA, b"any", None)])
    assert versions_of(nodes) == stored


def test_logs_are_trimmed_by_no_keeper_to_less_than_by_the_last(nodes: SiteCluster) -> None:
    users = make_users(nodes)
    old = users.put(b"ada", b"1")
    users.put(b"ada", b"2")
    nodes.cluster.time.advance(BEAT_MS)
    nodes.sites[0].collect_garbage()
    trimmed = load_version(nodes.cluster.engine, LOG_TRIMMED)
    assert nodes.cluster.nodes[1].take_keeper()
    assert not nodes.hosts[1].node.retention.trim((), old)
    assert load_version(nodes.cluster.engine, LOG_TRIMMED) == trimmed


def test_each_node_tells_the_expiries_of_its_own_partitions(nodes: SiteCluster) -> None:
    first, second = nodes.cluster.nodes
    users = nodes.sites[0].create_namespace("users", retention=ZERO)
    nodes.hosts[0].partitions.split("users", b"m")
    nodes.give(2)
    users.put_many({b"ada": b"1", b"zoe": b"2"}, ttl=timedelta(seconds=1))
    nodes.cluster.time.advance(3_000)
    assert first.node.expiries.tell()
    due = nodes.cluster.time() // 1_000
    assert first.node.expiries.told_through < due - 1
    # The record at the second node is not told of, and stays.
    nodes.sites[0].collect_garbage()
    assert versions_of(nodes) == 3
    since = nodes.hosts[0].node.resolved_version()
    assert second.node.expiries.tell()
    assert first.node.expiries.told_through == due
    assert [(each.key, each.value) for each in nodes.sites[0].changes("users", since=since)] == [
        (b"ada", None)
    ]
    nodes.cluster.time.advance(3_000)
    nodes.sites[0].collect_garbage()
    assert versions_of(nodes) == 0


def test_a_node_learns_of_a_changed_catalog_with_its_next_refresh(nodes: SiteCluster) -> None:
    second = nodes.hosts[1]
    nodes.sites[0].create_namespace("users")
    assert second.catalog.name_of(1) is None
    second.refresh()
    assert second.catalog.name_of(1) == "users"
