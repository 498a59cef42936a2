"""Atomic batches over several nodes: whole or not there, whoever dies, and however their partitions move."""

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import pytest
from tests.nodes import NodeCluster, node_cluster
from tests.sizes import only
from tests.waiting import run_threads, wait_until

from floodmark.codec.ordered import encode_namespace
from floodmark.codec.values import encode_value
from floodmark.model.batch import mint_batch
from floodmark.model.errors import CommitTooLarge, OutcomeUnknown, PartitionMoved
from floodmark.model.partition import CommitLimits, Partition
from floodmark.model.version import Version
from floodmark.partition.node import ended_batches
from floodmark.partition.prepared.steps import Prepare
from floodmark.partition.prepared.writes import OpenWrite
from floodmark.routing.batches import FORGET_MS, BatchWriter
from floodmark.server import ServerOptions
from floodmark.site import Site
from floodmark.testing.simulation.atomic_readers import forget_siblings

# One of each node.
KEYS = (b"ada", b"max", b"zoe")
STEPS = 6
FLIGHT = ServerOptions(resp_listen=None)


class Died(Exception):
    """A writer has died."""


def qualified(cluster: NodeCluster) -> list[bytes]:
    prefix = encode_namespace(cluster.sites[1].namespace("users").id)
    return [prefix + key for key in KEYS]


def write(site: Site, value: bytes) -> int:
    with site.atomic() as batch:
        for key in KEYS:
            batch.put(site.namespace("users"), key, value)
    return batch.version


def values(site: Site) -> set[bytes | None]:
    return set(site.namespace("users").get_many(KEYS))


def settle(cluster: NodeCluster) -> None:
    """Let seconds pass, in which each node settles what it holds for so long."""

    def have_settled() -> bool:
        cluster.tick(2)
        for number in cluster.sites:
            cluster.host(number).current.node.heartbeat()
        return not open_writes(cluster)

    wait_until(have_settled, "a batch stays open")


def open_writes(cluster: NodeCluster) -> list[Any]:
    nodes = (cluster.host(number).current.node for number in cluster.sites)
    return [write for node in nodes for write in node.committer.prepared.all()]


class DyingPartition:
    """A partition whose caller dies before a step."""

    def __init__(self, partition: Partition, step: Callable[[], None]) -> None:
        self._partition = partition
        self._step = step

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: object) -> Any:
            self._step()
            return getattr(self._partition, name)(*arguments)

        return call


def die_after(cluster: NodeCluster, steps: int, value: bytes) -> None:
    """Write a batch from the first node, by a writer that dies when it has taken some steps."""
    router, taken = cluster.host(1).router, count()

    def step() -> None:
        if next(taken) == steps:
            raise Died

    def call(key: bytes, operation: Callable[[Partition], Any]) -> Any:
        return router.call(key, lambda partition: operation(DyingPartition(partition, step)))

    groups = [
        (DyingPartition(router.maps.map.route(key), step), {key: encode_value(value)})
        for key in qualified(cluster)
    ]
    writer = BatchWriter(lambda: mint_batch(cluster.host(1).physical_ms()))
    with pytest.raises(Died):
        writer.write(call, groups)


def test_a_batch_over_nodes_is_one_commit_for_every_reader(cluster: NodeCluster) -> None:
    versions = [write(cluster.sites[number], b"%d" % number) for number in (1, 2, 3)]
    with cluster.connect(2) as client:
        versions.append(write(client, b"4"))
        assert values(client) == {b"4"}
    settle(cluster)
    changes = list(cluster.sites[3].changes("users", since="beginning"))
    assert [(change.version, change.key, change.batch) for change in changes] == [
        (version, key, version) for version in versions for key in KEYS
    ]
    for at, expected in zip(versions, (b"1", b"2", b"3", b"4"), strict=True):
        assert dict(cluster.sites[2].namespace("users").scan(at=at)) == dict.fromkeys(KEYS, expected)


def test_a_client_over_flight_writes_to_several_nodes() -> None:
    with node_cluster(options=dict.fromkeys((1, 2, 3), FLIGHT)) as cluster:
        cluster.spread()
        with cluster.connect(3) as client:
            write(client, b"1")
            assert values(client) == {b"1"}


def test_counters_and_fields_join_a_batch_over_nodes(cluster: NodeCluster) -> None:
    site = cluster.sites[2]
    unread, users = site.create_namespace("unread", merge="counter"), site.namespace("users")
    for _ in range(2):
        with site.atomic() as batch:
            batch.add(unread, b"ada", 1)
            batch.put(users, b"ada", b"hello")
    assert (unread.get(b"ada"), users.get(b"ada")) == (2, b"hello")


def test_a_part_that_others_block_is_prepared_when_these_have_ended(
    cluster: NodeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The round of a node refuses it, and its writer asks again, in a way that may wait."""
    blocked: list[str] = []

    def is_blocked(step: Prepare, _: Version, others: Sequence[OpenWrite]) -> bool:
        step.blocking = others
        blocked.extend(write.transaction for write in others)
        return bool(others)

    die_after(cluster, len(KEYS), b"1")
    monkeypatch.setattr(Prepare, "_is_crowding", is_blocked)
    write(cluster.sites[1], b"2")
    assert values(cluster.sites[2]) == {b"2"}
    assert len(set(blocked)) == 1


@pytest.mark.parametrize("steps", range(STEPS))
def test_a_batch_whose_writer_dies_is_there_whole_or_not_at_all(cluster: NodeCluster, steps: int) -> None:
    write(cluster.sites[1], b"before")
    die_after(cluster, steps, b"after")
    settle(cluster)
    assert values(cluster.sites[2]) == ({b"after"} if steps >= len(KEYS) else {b"before"})


@pytest.mark.parametrize("steps", range(1, STEPS))
def test_a_snapshot_settles_what_it_meets(cluster: NodeCluster, steps: int) -> None:
    write(cluster.sites[1], b"before")
    die_after(cluster, steps, b"after")
    users = cluster.sites[3].namespace("users")
    found = set(dict(users.scan()).values())
    assert found == ({b"after"} if steps >= len(KEYS) else {b"before"})


@pytest.mark.parametrize("steps", range(STEPS))
@pytest.mark.parametrize("forgets", only([True], [False, True]))
def test_an_atomic_read_sees_all_of_a_batch_whose_writer_has_died_or_nothing(
    cluster: NodeCluster, steps: int, forgets: bool
) -> None:
    write(cluster.sites[1], b"before")
    die_after(cluster, steps, b"after")
    if forgets:
        for number in cluster.sites:
            forget_siblings(cluster.host(number).current.node)
    with cluster.connect(2) as client:
        found = client.read_atomic([(client.namespace("users"), key) for key in KEYS])
    # What is prepared and applied nowhere need not be seen.
    assert found == [b"after" if steps > len(KEYS) else b"before"] * len(KEYS)


@pytest.mark.parametrize("steps", range(1, STEPS))
@pytest.mark.parametrize("dead", only([1], [1, 2]))
def test_a_successor_settles_what_a_dead_node_has_prepared(
    cluster: NodeCluster, steps: int, dead: int
) -> None:
    write(cluster.sites[1], b"before")
    die_after(cluster, steps, b"after")
    cluster.kill(dead)
    cluster.take_over()
    settle(cluster)
    assert values(cluster.sites[3]) == ({b"after"} if steps >= len(KEYS) else {b"before"})


def test_a_batch_follows_partitions_that_move_and_split(cluster: NodeCluster) -> None:
    first, users = cluster.host(1), cluster.sites[1].namespace("users")
    write(cluster.sites[3], b"1")
    [moved] = [row.id for row in first.shared.node.rows if row.range.contains(qualified(cluster)[0])]
    first.current.node_port.move(moved, 2)
    # The third node finds out by the refusal of the first.
    write(cluster.sites[3], b"2")
    cluster.sites[1].split("users", b"mb")
    write(cluster.sites[3], b"3")
    assert set(users.get_many(KEYS)) == {b"3"}
    settle(cluster)


def test_a_move_waits_for_no_dead_writer(cluster: NodeCluster) -> None:
    die_after(cluster, 2, b"after")
    node = cluster.host(1).shared.node
    [own] = [row.id for row in node.rows if row.node == 1 and row.range.contains(qualified(cluster)[0])]
    node.reshaping.move(own, 3)
    settle(cluster)
    assert values(cluster.sites[2]) == {None}


def test_writers_and_snapshots_at_once_see_whole_batches(cluster: NodeCluster) -> None:
    write(cluster.sites[1], b"0")
    torn: list[set[bytes]] = []

    def writing(number: int) -> None:
        for turn in range(10):
            write(cluster.sites[number], b"%d/%d" % (number, turn))

    def reading() -> None:
        users = cluster.sites[2].namespace("users")
        for _ in range(10):
            found = set(dict(users.scan()).values())
            if len(found) > 1:
                torn.append(found)

    run_threads(*(lambda number=number: writing(number) for number in (1, 2, 3)), reading)
    assert torn == []
    assert len(values(cluster.sites[1])) == 1


def test_outcomes_are_kept_while_a_prepare_may_come_late_and_then_forgotten(cluster: NodeCluster) -> None:
    write(cluster.sites[1], b"1")
    die_after(cluster, 1, b"2")
    settle(cluster)
    first = cluster.host(1)
    kept = [batch for batch, _, _ in ended_batches(first.current.node, 0)]
    assert len(kept) == 2
    first.others.forget()
    assert [batch for batch, _, _ in ended_batches(first.current.node, 0)] == kept
    cluster.time.advance(FORGET_MS)
    cluster.tick()
    for number in cluster.sites:
        cluster.host(number).current.node.committer.now()
    for number in cluster.sites:
        cluster.host(number).others.forget()
        assert list(ended_batches(cluster.host(number).current.node, 0)) == []


def test_an_outcome_is_kept_while_a_partition_has_the_batch_open(cluster: NodeCluster) -> None:
    die_after(cluster, 4, b"1")
    cluster.time.advance(FORGET_MS)
    cluster.tick()
    first = cluster.host(1)
    first.current.node.committer.now()
    first.others.forget()
    assert len(list(ended_batches(first.current.node, 0))) == 1
    settle(cluster)
    assert values(cluster.sites[2]) == {b"1"}
    first.others.forget()
    assert list(ended_batches(first.current.node, 0)) == []


def test_a_batch_that_is_too_large_for_a_partition_writes_nothing(cluster: NodeCluster) -> None:
    owner = cluster.host(2).current.node.map.route(qualified(cluster)[1])
    owner.limits = CommitLimits(bytes_max=1_000, changes_max=10)
    for site in cluster.sites.values():
        with pytest.raises(CommitTooLarge):
            write(site, b"x" * 500)
    assert values(cluster.sites[1]) == {None}
    assert open_writes(cluster) == []


def test_a_batch_of_which_a_node_gives_no_answer_is_told_to_be_unknown(cluster: NodeCluster) -> None:
    partitions = [cluster.host(1).router.maps.map.route(key) for key in qualified(cluster)]
    writer = BatchWriter(lambda: mint_batch(cluster.host(1).physical_ms()))

    def call(*_: object) -> Any:
        raise PartitionMoved("the partition is not served")

    groups = [
        (each, {key: encode_value(b"1")}) for each, key in zip(partitions, qualified(cluster), strict=True)
    ]
    with pytest.raises(OutcomeUnknown, match="is committed at version"):
        writer.write(call, groups)
    settle(cluster)
    assert values(cluster.sites[1]) == {b"1"}
