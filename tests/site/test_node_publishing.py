"""Data sets at a site of several nodes: each partition has another owner, and any node may publish."""

from collections.abc import Iterator
from datetime import timedelta
from functools import partial

import pytest
from tests.nodes import NodeCluster, node_cluster

from floodmark import ChangeType, Site
from floodmark.codec.ordered import encode_namespace
from floodmark.codec.values import encode_value
from floodmark.host.catalog import GenerationRow, GenerationState
from floodmark.host.publishing import PUBLISHING
from floodmark.host.publishing import _wait_resolved as wait_resolved
from floodmark.model.errors import Conflict, GenerationSwapped, PartitionStopped, PublicationConflict
from floodmark.model.partition import Decision, Fate, GenerationStream
from floodmark.partition import Node

OLD = {b"ada": b"1", b"ken": b"1", b"zoe": b"1"}
NEW = {b"bob": b"2", b"ken": b"2", b"zoe": b"2"}


@pytest.fixture
def cluster() -> Iterator[NodeCluster]:
    with node_cluster() as nodes:
        nodes.spread()
        nodes.sites[1].namespace("users").put_many(OLD)
        yield nodes


def begin(site: Site, pairs: dict[bytes, bytes] = NEW, base: int = 0) -> GenerationRow:
    """Load a data set that is not swapped in yet."""
    generation = site.host.generations.begin_generation("users", base, "test")
    load(site, generation, pairs)
    return generation


def load(site: Site, generation: GenerationRow, pairs: dict[bytes, bytes]) -> None:
    namespace = site.namespace("users").id
    stream = site.host.write_stream(GenerationStream(namespace, generation.number))
    prefix = encode_namespace(namespace)
    stream.send({prefix + key: encode_value(value) for key, value in pairs.items()}).result()
    stream.close()


def swap(site: Site, generation: GenerationRow) -> int:
    swapped = site.host.generations.swap_generation("users", generation.number, 1)
    assert swapped.since is not None
    return swapped.since


def check(cluster: NodeCluster, version: int, old: dict[bytes, bytes], new: dict[bytes, bytes]) -> None:
    """Look at both sides of a swap, by each node."""
    cluster.tick()
    for site in cluster.sites.values():
        users = site.namespace("users")
        assert dict(users.scan()) == new
        assert dict(users.scan(at=version)) == new
        assert dict(users.scan(at=version - 1)) == old
        keys = sorted(old | new)
        assert users.get_many(keys) == [new.get(key) for key in keys]
        assert site.read_atomic([(users, key) for key in keys]) == [new.get(key) for key in keys]
        assert [users.get(key, at=version - 1) for key in keys] == [old.get(key) for key in keys]


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_data_set_replaces_what_all_nodes_serve(cluster: NodeCluster, number: int) -> None:
    published = cluster.sites[number].generations.publish("users", NEW)
    assert published.rows == 3
    check(cluster, published.version, OLD, NEW)
    for key, site in zip((b"ada", b"ken", b"zoe"), cluster.sites.values(), strict=True):
        site.namespace("users").put(key, b"3")
    back = cluster.sites[number].generations.rollback("users")
    assert back.since is not None
    later = dict.fromkeys(OLD, b"3")
    check(cluster, back.since, NEW | later, later)


def test_a_client_publishes_through_any_node(cluster: NodeCluster) -> None:
    for number in cluster.sites:
        with cluster.connect(number) as site:
            published = site.generations.publish("users", {b"bob": b"%d" % number})
            assert site.read_atomic([(site.namespace("users"), key) for key in (b"bob", b"zoe")]) == [
                b"%d" % number,
                None,
            ]
            cluster.tick()
            assert published.version <= site.host.versions.read_version()


def test_changes_since_the_base_at_all_nodes_go_on(cluster: NodeCluster) -> None:
    base = cluster.sites[1].host.versions.read_version()
    cluster.tick()
    for number, (key, site) in enumerate(zip((b"ada", b"ken", b"zoe"), cluster.sites.values(), strict=True)):
        site.namespace("users").put(key, b"since %d" % number)
    published = cluster.sites[2].generations.publish("users", NEW, base=base)
    assert published.replayed == 3
    assert dict(cluster.sites[3].namespace("users").scan()) == {
        b"ada": b"since 0",
        b"bob": b"2",
        b"ken": b"since 1",
        b"zoe": b"since 2",
    }


def test_a_transaction_that_read_before_a_swap_does_not_commit_after_it(cluster: NodeCluster) -> None:
    site = cluster.sites[3]
    users = site.namespace("users")

    def read_and_write() -> None:
        with site.transaction() as transaction:
            assert transaction.get(users, b"ken") == b"1"
            cluster.sites[1].generations.publish("users", NEW)
            transaction.put(users, b"zoe", b"3")
            transaction.put(users, b"ada", b"3")

    with pytest.raises(Conflict):
        read_and_write()
    cluster.tick()
    assert dict(users.scan()) == NEW


@pytest.mark.parametrize("number", [1, 3])
def test_a_stream_at_any_node_meets_the_swap(cluster: NodeCluster, number: int) -> None:
    site = cluster.sites[number]
    before = site.resolved_version()
    base = cluster.sites[2].host.versions.read_version()
    cluster.sites[2].namespace("users").put(b"zoe", b"kept")
    published = cluster.sites[2].generations.publish("users", NEW, base=base)
    cluster.tick()
    late = cluster.sites[2].namespace("users").put(b"ken", b"3")
    cluster.tick()
    with pytest.raises(GenerationSwapped):
        list(site.changes("users", since=before, until=late))
    changes = [
        (change.type, change.key)
        for change in site.changes("users", since=before, until=late, on_generation="difference")
    ]
    assert changes == [
        (ChangeType.UPSERT, b"zoe"),
        (ChangeType.GENERATION, b""),
        (ChangeType.DELETE, b"ada"),
        (ChangeType.UPSERT, b"bob"),
        (ChangeType.UPSERT, b"ken"),
        (ChangeType.UPSERT, b"ken"),
    ]
    assert published.version < late


def test_the_keeper_dies_before_the_swap_and_another_goes_on(cluster: NodeCluster) -> None:
    generation = begin(cluster.sites[2])
    cluster.kill(1)
    cluster.take_over()
    cluster.sites[3].namespace("users").put(b"zoe", b"3")
    load(cluster.sites[2], generation, NEW)
    version = swap(cluster.sites[2], generation)
    check(cluster, version, OLD | {b"zoe": b"3"}, NEW | {b"zoe": b"3"})


def test_a_row_that_comes_after_the_swap_is_refused_at_every_node(cluster: NodeCluster) -> None:
    generation = begin(cluster.sites[2])
    swap(cluster.sites[2], generation)
    for site in cluster.sites.values():
        with pytest.raises(PublicationConflict):
            load(site, generation, {b"late": b"4"})
    assert b"late" not in dict(cluster.sites[3].namespace("users").scan())


def test_a_publication_at_work_through_any_node_is_not_taken_for_one_that_was_left(
    cluster: NodeCluster,
) -> None:
    generation = begin(cluster.sites[2])
    for number in (2, 3, 2, 3):
        cluster.time.advance(PUBLISHING // timedelta(milliseconds=1) * 2 // 3)
        cluster.tick()
        load(cluster.sites[number], generation, NEW)
        cluster.sites[1].host.retention.collect_garbage()
    assert swap(cluster.sites[3], generation)
    cluster.tick()
    assert dict(cluster.sites[3].namespace("users").scan()) == NEW


def test_earlier_generations_go_after_the_retention(cluster: NodeCluster) -> None:
    cluster.sites[2].generations.publish("users", NEW, keep=0)
    cluster.time.advance(timedelta(days=2) // timedelta(milliseconds=1))
    cluster.tick()
    cluster.sites[3].host.retention.collect_garbage()
    (left,) = cluster.sites[3].generations.list("users")
    assert left.state is GenerationState.CURRENT
    for site in cluster.sites.values():
        assert dict(site.namespace("users").scan()) == NEW


@pytest.mark.parametrize("turn", ["publish", "rollback"])
def test_a_client_waits_only_once_for_a_prepared_write(
    cluster: NodeCluster, turn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("floodmark.host.publishing.JOIN_MS_MAX", 10)
    users, waits = cluster.sites[1].namespace("users"), list[int]()
    cluster.sites[1].generations.publish("users", NEW)

    def count(node: Node, through: int) -> None:
        if waits:
            partition.commit_prepared("0-7", cluster.sites[1].now())
        waits.append(through)
        wait_resolved(node, through)

    monkeypatch.setattr("floodmark.host.publishing._wait_resolved", count)
    cluster.time.advance(1_000)
    cluster.tick()
    node, key = cluster.host(1).shared.node, encode_namespace(users.id) + b"ada"
    node.settle_by(lambda _: Fate(Decision.UNDECIDED))
    partition = node.map.route(key)
    partition.prepare("0-7", [key], [encode_value(b"3")])
    with cluster.connect(2) as site:
        # From now on it knows all nodes, and asks them again after other errors.
        site.namespace("users").put(b"zoe", b"4")
        generations = site.generations
        work = partial(generations.publish, rows=OLD) if turn == "publish" else generations.rollback
        with pytest.raises(PartitionStopped, match="a transaction is open"):
            work("users")
    assert len(waits) == 1
    assert [each.number for each in cluster.sites[1].generations.list("users")] == [1, 2]
    partition.commit_prepared("0-7", cluster.sites[1].now())
