"""Atomic batches that a link brings to a site of several nodes: each is one batch there, too."""

from collections.abc import Iterator
from typing import Any

import pytest
from tests.nodes import NodeCluster

from floodmark.engine import MemoryEngine
from floodmark.links.steps import plan_step, run_step
from floodmark.partition import FAMILIES
from floodmark.replication.topology import MemberSite, SharedNamespace, Topology
from floodmark.site import Site, open_engine

# One of each node.
KEYS = (b"ada", b"max", b"zoe")


@pytest.fixture
def rome(cluster: NodeCluster) -> Iterator[Site]:
    with open_engine(
        MemoryEngine(FAMILIES), site="rome", site_id=2, time_source=cluster.time, elapsed_source=cluster.time
    ) as site:
        site.create_namespace("users")
        topology = Topology(
            epoch=1,
            sites={each.name: MemberSite(id=each.id) for each in (cluster.sites[1], site)},
            namespaces={"users": SharedNamespace()},
        )
        for each in (cluster.sites[1], site):
            each.set_topology(topology)
        yield site


def write(site: Site, value: bytes) -> None:
    with site.atomic() as batch:
        for key in KEYS:
            batch.put(site.namespace("users"), key, value)


def copy(cluster: NodeCluster, source: Site) -> int:
    """Take a step to the first node; the version of the last copied batch."""
    cluster.tick()
    target = cluster.sites[1].host
    run_step(source.host, target, plan_step(source.host, target, ("users",)))
    for number in cluster.sites:
        cluster.host(number).current.node.heartbeat()
    cluster.tick()
    return max(change.batch or 0 for change in cluster.sites[1].changes("users"))


def test_a_copied_batch_over_nodes_is_one_commit(cluster: NodeCluster, rome: Site) -> None:
    for value in (b"1", b"2"):
        write(rome, value)
        rome.namespace("users").put(b"plain", value)
    copy(cluster, rome)
    changes = list(cluster.sites[2].changes("users"))
    of_batches = [(change.version, change.key) for change in changes if change.batch]
    versions = sorted({version for version, _ in of_batches})
    assert of_batches == [(version, key) for version in versions for key in KEYS]
    assert len(versions) == 2
    for version, value in zip(versions, (b"1", b"2"), strict=True):
        users = cluster.sites[3].namespace("users")
        assert {users.get(key, at=version) for key in KEYS} == {value}


def test_a_key_that_lost_to_a_newer_stamp_leaves_the_rest_of_the_batch(
    cluster: NodeCluster, rome: Site
) -> None:
    write(rome, b"batch")
    cluster.tick()
    cluster.sites[2].namespace("users").put(b"max", b"newer")
    copy(cluster, rome)
    users = cluster.sites[3].namespace("users")
    assert cluster.sites[3].read_atomic([(users, key) for key in KEYS]) == [b"batch", b"newer", b"batch"]


def test_a_key_that_is_beaten_from_above_is_stored_below(
    cluster: NodeCluster, rome: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A snapshot between the batch and the write above it sees the whole batch."""
    write(rome, b"batch")
    users = cluster.sites[2].namespace("users")
    pool: Any = cluster.host(1).router._batches.calls  # type: ignore[union-attr]
    each, calls = pool.each, []

    def write_before_the_commit(steps: Any) -> Any:
        calls.append(len(steps))
        if len(calls) == 2:
            users.put(b"max", b"above")
        return each(steps)

    monkeypatch.setattr(pool, "each", write_before_the_commit)
    version = copy(cluster, rome)
    assert calls == [3, 3]
    assert users.get(b"max") == b"above"
    assert {users.get(key, at=version) for key in KEYS} == {b"batch"}
