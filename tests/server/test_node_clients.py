"""Clients of a site that several real nodes serve: what they begin goes on after a takeover."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from tests.nodes import NodeCluster
from tests.server.support import open_memory
from tests.waiting import HANG_SECONDS

from floodmark.links.pair import begin_copy, pair_topology
from floodmark.links.steps import plan_step, run_step
from floodmark.model.errors import OutcomeUnknown
from floodmark.site import Namespace, Site
from floodmark.site.connecting import connect
from floodmark.wire import Connection

PAIRS = {b"ada": b"a", b"ken": b"k", b"zoe": b"z"}


@pytest.fixture
def client(cluster: NodeCluster) -> Iterator[Site]:
    with connect(cluster.url, timeout=timedelta(seconds=HANG_SECONDS)) as site:
        yield site


def during_takeover(cluster: NodeCluster, *work: Callable[[], Any]) -> list[Any]:
    """Kill the keeper, begin all of the work, and let the other nodes take over; the results."""
    cluster.kill(1)
    with ThreadPoolExecutor(len(work)) as pool:
        futures: list[Future[Any]] = [pool.submit(each) for each in work]
        cluster.take_over()
        return [future.result(HANG_SECONDS) for future in futures]


def put_surely(namespace: Namespace, key: bytes, value: bytes) -> int:
    """Put; again, if the answer of the dead node was lost."""
    try:
        return namespace.put(key, value)
    except OutcomeUnknown:
        return namespace.put(key, value)


def test_a_client_is_told_where_a_key_is_served(cluster: NodeCluster, client: Site) -> None:
    ids = [each.id for each in client.partitions()]
    for number, key in enumerate(PAIRS, 1):
        location = client.locate("users", key)
        assert (location.node, location.url) == (number, cluster.servers[number].url)
        assert location.partition == ids[number - 1]


def test_calls_wait_for_a_takeover(cluster: NodeCluster, client: Site) -> None:
    users = client.namespace("users")
    users.put_many(PAIRS)
    found = during_takeover(
        cluster,
        lambda: users.get(b"ada"),
        lambda: users.get_many(list(PAIRS)),
        lambda: dict(users.scan()),
        lambda: put_surely(users, b"bob", b"b") > 0,
        lambda: client.create_namespace("orders").name,
        lambda: client.resolved_version() > 0,
    )
    assert found[:2] == [b"a", [b"a", b"k", b"z"]]
    assert found[2].items() >= PAIRS.items()
    assert found[3:] == [True, "orders", True]
    assert dict(users.scan()) == {**PAIRS, b"bob": b"b"}


def test_watches_of_keys_at_all_nodes_outlive_a_takeover(cluster: NodeCluster, client: Site) -> None:
    users = client.namespace("users")
    watches = {key: client.watch(users, key) for key in PAIRS}
    assert users.put(b"zoe", b"z") == watches[b"zoe"].result(HANG_SECONDS)
    during_takeover(cluster, lambda: put_surely(users, b"ada", b"a"), lambda: users.put(b"ken", b"k"))
    assert all(watch.result(HANG_SECONDS) for watch in watches.values())


def test_a_follower_goes_on_after_a_takeover(cluster: NodeCluster, client: Site) -> None:
    users = client.namespace("users")
    follower = client.changes("users", follow=True)
    users.put_many(PAIRS)
    seen = {next(follower).key for _ in PAIRS}
    assert seen == set(PAIRS)
    during_takeover(cluster, lambda: put_surely(users, b"bob", b"b"))
    assert next(follower).key == b"bob"
    follower.close()  # type: ignore[attr-defined]


def test_a_consumer_keeps_its_subscription_through_a_takeover(cluster: NodeCluster, client: Site) -> None:
    users = client.namespace("users")
    users.put_many(PAIRS)
    with client.subscribe("indexer", "users", start="beginning") as subscription:
        deliveries = iter(subscription)
        first = next(deliveries)
        first.acknowledge()
        during_takeover(cluster, lambda: put_surely(users, b"bob", b"b"))
        keys = [first.change.key]
        while b"bob" not in keys:
            delivery = next(deliveries)
            keys.append(delivery.change.key)
            delivery.acknowledge()
        subscription.flush()
    assert sorted(set(keys)) == sorted([*PAIRS, b"bob"])
    assert client.subscriptions.statistics("indexer").unacked == 0


def test_a_scan_goes_on_after_a_takeover(cluster: NodeCluster, client: Site) -> None:
    users = client.namespace("users")
    pairs = {b"%c%05d" % (letter, n): bytes(500) for letter in b"akz" for n in range(1_000)}
    users.put_many(pairs)
    rows = users.scan()
    first = next(rows)
    rest = during_takeover(cluster, lambda: list(rows))[0]
    assert dict([first, *rest]) == pairs


def test_scans_are_opened_at_the_owners(cluster: NodeCluster, client: Site) -> None:
    users = client.namespace("users")
    users.put_many(PAIRS)
    opened: list[str] = []
    original = Connection.open_reader

    def open_reader(self: Connection, ticket: bytes) -> Any:
        opened.append(self.url)
        return original(self, ticket)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Connection, "open_reader", open_reader)
        assert dict(users.scan()) == PAIRS
    assert opened == [cluster.servers[number].url for number in (1, 2, 3)]


def test_a_link_goes_on_from_another_node(cluster: NodeCluster, client: Site) -> None:
    users = client.namespace("users")
    users.put_many(PAIRS)
    with open_memory("rome") as rome:
        rome.create_namespace("users")
        topology = pair_topology(client, rome, ["users"])
        for site in (client, rome):
            site.set_topology(topology)
        begin_copy(client.host, rome.host, "users")
        run_step(client.host, rome.host, plan_step(client.host, rome.host, ["users"]))
        during_takeover(cluster, lambda: put_surely(users, b"bob", b"b"))
        run_step(client.host, rome.host, plan_step(client.host, rome.host, ["users"]))
        assert dict(rome.namespace("users").scan()) == {**PAIRS, b"bob": b"b"}
