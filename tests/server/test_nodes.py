"""A client of several nodes: it finds owners and keeper, and goes on when a node dies at any moment."""

from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
from tests.server.support import LOOPBACK, nodes_at, open_memory, qualify, serving, stored
from tests.server.support_nodes import TestNodes, two_nodes
from tests.sizes import only
from tests.waiting import HANG_SECONDS

from floodmark.codec.values import encode_value
from floodmark.model.change import Stamp
from floodmark.model.errors import NamespaceExists, OutcomeUnknown, SiteMismatch, Unreachable
from floodmark.model.partition import ApplyStream, PutStream
from floodmark.server import serve
from floodmark.site import Namespace, Site
from floodmark.site.connecting import connect
from floodmark.wire import Connection

ATTEMPTS_MAX = 5
LONG = timedelta(seconds=HANG_SECONDS)


@pytest.fixture
def nodes() -> Iterator[TestNodes]:
    with two_nodes() as nodes:
        yield nodes


@pytest.fixture
def client(nodes: TestNodes) -> Iterator[Site]:
    with connect(nodes.url, timeout=LONG) as site:
        yield site


@pytest.fixture
def users(client: Site) -> Namespace:
    return client.create_namespace("users")


# Who answers


def test_one_url_is_enough_to_find_the_owner_and_the_keeper(nodes: TestNodes) -> None:
    with connect(nodes.urls[2]) as client:
        users = client.create_namespace("users")
        version = users.put(b"ada", b"1")
        assert users.get(b"ada") == b"1"
        assert client.resolved_version() >= version
    assert (1, "create_namespace") in nodes.asked


def test_calls_go_straight_to_the_keeper_once_it_is_known(nodes: TestNodes, client: Site) -> None:
    client.create_namespace("users")
    nodes.asked.clear()
    client.create_namespace("orders")
    assert nodes.asked == [(1, "create_namespace")]
    nodes.take_over()
    client.create_namespace("bills")
    client.create_namespace("notes")
    assert [number for number, name in nodes.asked[1:] if name == "create_namespace"] == [1, 2, 2]


def test_a_refusal_that_names_no_keeper_leads_to_another_node(nodes: TestNodes) -> None:
    nodes.tells_keeper = False
    nodes.keeper = 2
    with connect(nodes.urls[1]) as client:
        client.host.router.maps.refresh()
        client.create_namespace("users")
    assert (2, "create_namespace") in nodes.asked


def test_writes_and_reads_follow_a_partition_that_moves(nodes: TestNodes, users: Namespace) -> None:
    users.put(b"ada", b"1")
    nodes.take_over()
    assert users.get(b"ada") == b"1"
    users.put(b"ada", b"2")
    nodes.default_owner = 1
    assert users.compare_and_set(b"ada", b"2", b"3")
    assert list(users.scan()) == [(b"ada", b"3")]


def test_many_keys_go_to_the_owners_of_their_partitions(
    nodes: TestNodes, client: Site, users: Namespace
) -> None:
    _, right = client.host.partitions.split("users", b"m")
    nodes.owners[right] = 2
    pairs = {b"%c" % letter: b"x" for letter in b"abcdefghijklmnopqrstuvwxyz"}
    users.put_many(pairs)
    assert dict(users.scan()) == pairs
    assert users.get_many([b"a", b"z"]) == [b"x", b"x"]
    assert [key for key, _ in users.scan(reverse=True)] == sorted(pairs, reverse=True)
    assert users.delete_range(b"k", b"p") == 5


def test_nodes_of_different_sites_are_refused() -> None:
    with (
        serving() as (_, first),
        serve(open_memory("bergen"), LOOPBACK) as second,
        closing(nodes_at(first.url, second.url)) as both,
    ):
        both.run(Connection.hello)
        with pytest.raises(SiteMismatch, match="name only nodes of one site"):
            both.run_once(Connection.hello, first=second.url)


def test_a_call_ends_when_its_time_is_over(nodes: TestNodes) -> None:
    with connect(nodes.url, timeout=timedelta(seconds=0.5)) as client:
        users = client.create_namespace("users")
        for server in nodes.servers.values():
            server.close()
        for call in (lambda: users.get(b"ada"), lambda: users.put(b"ada", b"1"), client.resolved_version):
            with pytest.raises(Unreachable, match=r"asked grpc://127.0.0.1:\d+, grpc://127.0.0.1:\d+ for"):
                call()


# A node that dies


READS: dict[str, Callable[[Site, Namespace], Any]] = {
    "get": lambda _, users: users.get(b"ada"),
    "get_many": lambda _, users: users.get_many([b"ada", b"bob"]),
    "record": lambda _, users: users.record(b"ada").value,  # type: ignore[union-attr]
    "scan": lambda _, users: list(users.scan()),
    "reverse": lambda _, users: list(users.scan(reverse=True)),
    "changes": lambda site, _: [(change.key, change.value) for change in site.changes("users")],
    "find": lambda site, _: site.namespace("users").name,
    "topology": lambda site, _: site.host.membership.topology(),
    "merge": lambda site, _: site.host.namespaces.find_namespace("users").id,
}


class Scene(NamedTuple):
    """Two nodes, a client, and a namespace with two keys."""

    nodes: TestNodes
    client: Site
    users: Namespace


def at_every_position(work: Callable[[Scene], None]) -> int:
    """Let the first node die at each of its messages while something is done; how many there were."""
    position = 0
    while True:
        with two_nodes() as nodes, connect(nodes.url, timeout=LONG) as client:
            users = client.create_namespace("users")
            users.put_many({b"ada": b"1", b"bob": b"2"})
            nodes.proxy.cut_after(position)
            work(Scene(nodes, client, users))
            if not nodes.proxy.has_cut:
                return position
        position += 1


@pytest.mark.parametrize("name", only(("get", "scan", "changes"), READS))
def test_a_read_goes_on_when_the_node_dies(name: str) -> None:
    expected: list[Any] = []

    def read(scene: Scene) -> None:
        found = READS[name](scene.client, scene.users)
        expected.append(found)
        assert found == expected[0]

    assert at_every_position(read) > 1


def test_a_put_happens_once_or_is_unknown() -> None:
    outcomes = set()

    def put(scene: Scene) -> None:
        try:
            scene.users.put(b"ada", b"new")
            outcomes.add("done")
        except OutcomeUnknown:
            outcomes.add("unknown")
        changes = [change.value for change in scene.client.changes("users") if change.key == b"ada"]
        assert changes in ([b"1", b"new"], [b"1"])
        assert scene.users.get(b"ada") == changes[-1]

    assert at_every_position(put) > 1
    assert outcomes == {"done", "unknown"}


def test_a_namespace_is_made_once_or_unknown() -> None:
    outcomes = set()

    def create(scene: Scene) -> None:
        for _ in range(ATTEMPTS_MAX):
            try:
                scene.client.create_namespace("orders")
                outcomes.add("done")
                break
            except OutcomeUnknown:
                outcomes.add("unknown")
            except NamespaceExists:
                break
        assert scene.client.namespace("orders").name == "orders"

    assert at_every_position(create) > 1
    assert {"done", "unknown"} <= outcomes


def test_a_follower_goes_on_at_another_node() -> None:
    def follow(scene: Scene) -> None:
        follower = scene.client.changes("users", follow=True)
        assert [next(follower).key, next(follower).key] == [b"ada", b"bob"]
        scene.nodes.site.namespace("users").put(b"eve", b"3")
        assert next(follower).key == b"eve"
        scene.nodes.site.namespace("users").put(b"fay", b"4")
        assert next(follower).key == b"fay"
        follower.close()  # type: ignore[attr-defined]

    assert at_every_position(follow) > 1


def stamped(version: int, site_id: int = 3) -> bytes:
    """A value that another site wrote."""
    return encode_value(b"copy", origin=Stamp(version, site_id))


@pytest.mark.slow
def test_copies_are_sent_again_to_another_node() -> None:
    def copy(scene: Scene) -> None:
        version = scene.client.resolved_version()
        with closing(scene.client.host.write_stream(ApplyStream(True))) as stream:
            sent = [stream.send({qualify(scene.users, b"%d" % n): stamped(version + n)}) for n in range(3)]
            assert all(future.result(HANG_SECONDS) >= 0 for future in sent)
        copies = [(change.key, change.value) for change in scene.client.changes("users")]
        assert sorted(copies[2:]) == [(b"%d" % number, b"copy") for number in range(3)]

    assert at_every_position(copy) > 1


@pytest.mark.slow
def test_a_stream_of_puts_says_which_batches_are_unknown() -> None:
    def put(scene: Scene) -> None:
        with closing(scene.client.host.write_stream(PutStream(True))) as stream:
            sent = [stream.send({qualify(scene.users, b"%d" % n): stored(b"x")}) for n in range(3)]
        failures = [future.exception(HANG_SECONDS) for future in sent]
        assert all(error is None or isinstance(error, OutcomeUnknown) for error in failures), failures
        changes = [change.key for change in scene.client.changes("users")]
        assert len(changes) == len(set(changes))
        assert {b"%d" % n for n in range(3) if failures[n] is None} <= set(changes)

    assert at_every_position(put) > 1


def test_changes_are_read_at_the_owner_of_their_first_key(nodes: TestNodes, client: Site) -> None:
    client.create_namespace("users")
    _, right = client.host.partitions.split("users", b"m")
    nodes.owners[right] = 2
    client.host.router.maps.refresh()
    opened: list[str] = []
    original = Connection.open_reader

    def open_reader(self: Connection, ticket: bytes) -> Any:
        opened.append(self.url)
        return original(self, ticket)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Connection, "open_reader", open_reader)
        assert list(client.changes("users", start_key=b"n")) == []
        assert list(client.changes("users", end_key=b"c")) == []
    assert opened == [nodes.urls[2], nodes.urls[1]]
