"""Ranges that transactions declare as written, over several nodes: reserved, decided, moved and forgotten."""

from typing import Any

import pytest
from tests.nodes import NodeCluster

from floodmark.codec.ordered import qualify_range
from floodmark.model.errors import Conflict, Retryable
from floodmark.model.partition import ReadSet
from floodmark.model.ranges import KeyRange
from floodmark.partition import conflicts
from floodmark.partition.conflicts import CONFLICTS, Declared, WriteConflicts
from floodmark.site import Site, Transaction

ALL = KeyRange()


def reader(site: Site, *keys: bytes) -> Transaction:
    """A transaction that has read keys, and writes one."""
    transaction, users = site.transaction(), site.namespace("users")
    transaction.get_many(users, keys)
    transaction.put(users, b"mine", b"1")
    return transaction


def declare(site: Site, *keys: bytes) -> None:
    """Commit a transaction that writes at one node and declares keys of others."""
    with site.transaction() as transaction:
        transaction.put(site.namespace("users"), b"ada", b"1")
        for key in keys:
            transaction.add_write_conflict(site.namespace("users"), key)


def stored(cluster: NodeCluster) -> list[Any]:
    return cluster.engine.scan("meta", CONFLICTS, CONFLICTS + b"\xff" * 9, rows_max=10, bytes_max=10_000)


def test_declared_keys_of_other_nodes_are_a_conflict_for_their_readers(cluster: NodeCluster) -> None:
    with cluster.connect(2) as client:
        touched, untouched = reader(client, b"zoe"), reader(client, b"zora", b"bob")
        everything = client.transaction()
        list(everything.scan(client.namespace("users"), b"i"))
        everything.put(client.namespace("users"), b"mine", b"1")
        declare(client, b"zoe", b"max")
        # Later by the clocks of all nodes: what commits below does not conflict.
        cluster.tick()
        for transaction in (touched, everything):
            with pytest.raises(Conflict):
                transaction.commit()
        untouched.commit()
        # Decided, they conflict with no transaction that begins now.
        reader(client, b"zoe", b"max").commit()


def test_a_transaction_that_reads_what_it_declares_does_not_meet_itself(cluster: NodeCluster) -> None:
    with cluster.connect(1) as client:
        transaction = reader(client, b"ada", b"max", b"zoe")
        transaction.add_write_conflict(client.namespace("users"))
        transaction.commit()


@pytest.mark.parametrize("at", [None, 0], ids=["undecided", "aborted"])
def test_a_reserved_range_is_a_conflict_until_it_is_decided(cluster: NodeCluster, at: int | None) -> None:
    with cluster.connect(1) as client:
        users = client.namespace("users")
        key = qualify_range(users.id, KeyRange(b"zoe", b"zoe\0"))
        owner = cluster.host(cluster.owner_of("users", b"zoe"))
        partition = owner.current.node.map.route(key.start)
        assert partition.reserve("0-7", key) > 0
        # It was begun after the reservation, and may still be committed below the other.
        transaction = reader(client, b"zoe")
        if at is None:
            with pytest.raises(Conflict):
                transaction.commit()
        else:
            partition.reserve("0-7", key, at)
            transaction.commit()


def test_a_transaction_that_reserves_for_too_long_is_not_committed(
    cluster: NodeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conflicts, "RESERVED_MS", 0)
    with cluster.connect(1) as client, pytest.raises(Conflict, match="too long"):
        declare(client, b"max", b"zoe")


def test_a_node_that_gets_a_partition_knows_what_was_declared(cluster: NodeCluster) -> None:
    with cluster.connect(1) as client:
        transaction = reader(client, b"zoe")
        declare(client, b"zoe")
        cluster.host(3).shared.node.reshaping.move(client.partitions()[-1].id, 2)
        cluster.tick()
        assert cluster.owner_of("users", b"zoe") == 2
        with pytest.raises(Conflict):
            transaction.commit()


def test_declared_ranges_are_forgotten_when_no_transaction_is_so_old(cluster: NodeCluster) -> None:
    with cluster.connect(1) as client:
        declare(client, b"zoe")
    assert stored(cluster)
    cluster.tick(11)
    cluster.host(3).current.node.heartbeat()
    assert stored(cluster) == []


def test_a_node_keeps_only_so_many_declared_ranges(
    cluster: NodeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conflicts, "WRITE_CONFLICTS_HELD_MAX", 2)
    known = WriteConflicts(cluster.engine)
    second = 1_000 << 18
    for number in (1, 2):
        known.add(number * second, Declared("", number * second, [ALL]))
    with pytest.raises(Retryable, match="try again"):
        known.add(3 * second, Declared("", 3 * second, [ALL]))
    known.add(12 * second, Declared("", 12 * second, [ALL]))
    reads = ReadSet(11 * second, [b"key"])
    assert known.find(reads, 20 * second, "") == (b"key", 12 * second)
    assert known.find(reads, 11 * second, "") is None
