"""RESP at the nodes of a site of several: a client of any node reads and writes keys of all."""

from collections.abc import Iterator
from typing import Any

import pytest
import redis
from tests.nodes import NodeCluster, node_cluster
from tests.server.support import in_threads
from tests.server.support_resp import resp_client

from floodmark.host.ports import PeerCommands
from floodmark.model.access import Role
from floodmark.model.errors import PartitionMoved

# A key of each node.
KEYS = {1: "ada", 2: "kay", 3: "tim"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[NodeCluster]:
    with node_cluster() as cluster:
        cluster.spread()
        cluster.sites[1].create_namespace("records", merge="fields")
        cluster.sites[1].create_namespace("counts", merge="counter")
        for number, key in KEYS.items():
            assert cluster.owner_of("users", key.encode()) == number
        yield cluster


@pytest.fixture
def client(cluster: NodeCluster) -> Iterator[Any]:
    """A client of the first node; all namespaces are empty."""
    for name in ("users", "records", "counts"):
        cluster.sites[1].namespace(name).delete_range()
    with resp_client(cluster.servers[1]) as client:
        yield client


@pytest.mark.usefixtures("client")
@pytest.mark.parametrize("number", KEYS)
def test_every_node_answers_for_all_keys(cluster: NodeCluster, number: int) -> None:
    with resp_client(cluster.servers[number]) as client:
        for key in KEYS.values():
            assert client.set(key, "1") is True
            assert client.get(key) == b"1"
            assert client.incr(key, 4) == 5
            assert client.append(key, "0") == 2
            assert client.set(key, "2", nx=True) is None
            assert client.set(key, "7", xx=True, get=True) == b"50"
            with pytest.raises(redis.ResponseError, match="not an integer"):
                client.incrby(key, "x")
            assert client.expire(key, 100) is True
            assert 0 < client.ttl(key) <= 101
            assert client.execute_command("FM.CAS", key, "7", "8") == 1
            version = client.execute_command("FM.VERSION")
            cluster.tick()
            assert client.execute_command("FM.HISTORY", key)[-1] == [version, b"upsert", b"8"]
            assert client.getdel(key) == b"8"
            assert client.delete(key) == 0
            assert cluster.sites[number].namespace("users").get(key.encode()) is None


def test_pipeline_over_nodes_is_answered_in_order(client: Any) -> None:
    with client.pipeline(transaction=False) as pipe:
        for step in range(10):
            for key in KEYS.values():
                pipe.set(key, step).incr(key).get(key)
        got = pipe.execute()
    assert got == [reply for step in range(10) for reply in [True, step + 1, b"%d" % (step + 1)] * 3]


def test_counting_is_exact_over_nodes(cluster: NodeCluster, client: Any) -> None:
    def count(number: int) -> None:
        with resp_client(cluster.servers[1 + number % 3]) as own:
            for _ in range(10):
                own.incr(KEYS[2])

    in_threads(count, 9)
    assert client.get(KEYS[2]) == b"90"


def test_reads_of_several_keys_go_to_their_nodes(client: Any) -> None:
    for number, key in KEYS.items():
        client.set(key, number)
    assert client.mget(*KEYS.values(), "none") == [b"1", b"2", b"3", None]
    assert client.exists(*KEYS.values(), "none") == 3
    assert [*client.scan_iter(count=1)] == [key.encode() for key in KEYS.values()]
    assert client.dbsize() == 3


@pytest.mark.usefixtures("client")
@pytest.mark.parametrize("number", KEYS)
def test_transaction_runs_at_the_node_of_its_keys(cluster: NodeCluster, number: int) -> None:
    first, second = KEYS[2], f"{KEYS[2]}2"
    with resp_client(cluster.servers[number]) as client:
        with client.pipeline(transaction=True) as pipe:
            pipe.set(first, "1").incr(first).set(second, "x").incr(second).ping().get(first)
            *replies, error, pong, last = pipe.execute(raise_on_error=False)
        assert (replies, pong, last) == ([True, 2, True], True, b"2")
        assert "not an integer" in str(error)
        assert client.mset({first: "3", second: "4"}) is True
        cluster.tick()
        changes = [*cluster.sites[number].changes("users", since=client.execute_command("FM.VERSION") - 1)]
        assert [(change.key, change.value) for change in changes] == [
            (first.encode(), b"3"), (second.encode(), b"4"),
        ]  # fmt: skip
        with client.pipeline() as pipe, resp_client(cluster.servers[3]) as other:
            pipe.watch(first)
            pipe.multi()
            pipe.incr(first)
            assert pipe.execute() == [4]
            pipe.watch(first)
            other.incr(first)
            pipe.multi()
            pipe.set(second, "never")
            with pytest.raises(redis.WatchError):
                pipe.execute()
            client.set(first, "6", ex=2)
            for is_expired in (False, True):
                pipe.watch(first)
                cluster.tick(1 + is_expired)
                pipe.multi()
                pipe.set(second, "7")
                if is_expired:
                    with pytest.raises(redis.WatchError):
                        pipe.execute()
                else:
                    assert pipe.execute() == [True]
        assert client.mget(first, second) == [None, b"7"]


def test_write_over_nodes_is_refused_and_writes_nothing(client: Any) -> None:
    with pytest.raises(redis.ResponseError, match="several nodes"):
        client.msetnx(dict.fromkeys(KEYS.values(), "1"))
    with pytest.raises(redis.ResponseError, match="several nodes"), client.pipeline() as pipe:
        pipe.set(KEYS[1], "1").set(KEYS[3], "1").execute()
    with client.pipeline() as pipe:
        pipe.watch(KEYS[3])
        pipe.multi()
        pipe.set(KEYS[2], "1")
        with pytest.raises(redis.ResponseError, match="several nodes"):
            pipe.execute()
    assert client.exists(*KEYS.values()) == 0


def test_mset_over_nodes_is_one_atomic_batch(cluster: NodeCluster, client: Any) -> None:
    assert client.mset(dict.fromkeys(KEYS.values(), "1")) is True
    assert client.mget(*KEYS.values()) == [b"1"] * len(KEYS)
    version = client.execute_command("FM.VERSION")
    cluster.tick()
    changes = cluster.sites[2].changes("users", since=version - 1)
    assert {(change.key, change.batch) for change in changes} == {
        (key.encode(), version) for key in KEYS.values()
    }


@pytest.mark.usefixtures("client")
def test_fields_and_counters_of_other_nodes(cluster: NodeCluster) -> None:
    number = next(number for number in KEYS if number != cluster.owner_of("records", b"ada"))
    with resp_client(cluster.servers[number]) as own, own.pipeline(transaction=False) as pipe:
        pipe.execute_command("SELECT", "records").hset("ada", mapping={"name": "Ada", "age": "35"})
        pipe.hincrby("ada", "age", 1).hgetall("ada").hdel("ada", "name").hlen("ada")
        assert pipe.execute()[1:] == [2, 36, {b"name": b"Ada", b"age": b"36"}, 1, 1]
        pipe.execute_command("SELECT", "counts").incr("a").incrby("a", 4).get("a").delete("a").get("a")
        assert pipe.execute()[1:] == [1, 5, b"5", 1, None]


def test_changes_of_all_nodes_are_one_stream(cluster: NodeCluster, client: Any) -> None:
    stream = "changes:users"
    cluster.tick()
    start = client.execute_command("FM.RESOLVED")
    for key in KEYS.values():
        client.set(key, "1")
    cluster.tick()
    entries = client.xrange(stream, min=f"{start + 1}-0")
    assert [entry[1][b"key"] for entry in entries] == [key.encode() for key in KEYS.values()]

    def read(number: int) -> Any:
        with resp_client(cluster.servers[1]) as own:
            if not number:
                return own.xread({stream: entries[-1][0]}, block=0)
        with resp_client(cluster.servers[2]) as own:
            own.set(KEYS[3], "2")
        cluster.tick()
        return None

    [found] = in_threads(read, 2)[0].values()
    assert [fields for _, fields in found[0]] == [{b"type": b"upsert", b"key": b"tim", b"value": b"2"}]


def test_group_is_consumed_at_one_node(cluster: NodeCluster, client: Any) -> None:
    stream = "changes:users"
    with resp_client(cluster.servers[2]) as other:
        cluster.tick()
        assert client.xgroup_create(stream, "indexers", id="$")
        other.set(KEYS[3], "1")
        cluster.tick()
        [entries] = client.xreadgroup("indexers", "ada", {stream: ">"}).values()
        assert [fields[b"key"] for _, fields in entries[0]] == [b"tim"]
        with pytest.raises(redis.ResponseError, match="resp-1"):
            other.xreadgroup("indexers", "ada", {stream: ">"})
        assert client.xack(stream, "indexers", entries[0][0][0]) == 1


def test_rights_of_the_caller_hold_at_the_owner(cluster: NodeCluster) -> None:
    key = cluster.sites[1].namespace("users").encoding.qualify(b"kay")
    commands = PeerCommands(
        requests=[[b"SET", b"kay", b"1"]], watched=None, on=[key], space="users", by_prefix=False,
        caller="reader", role=Role.READ, namespaces=["users"], durable=True, protocol=2,
    )  # fmt: skip
    answer = cluster.host(1).peer(2).run_commands(commands)
    assert answer.reply.startswith(b"-NOPERM")
    assert answer.version == 0
    with pytest.raises(PartitionMoved):
        cluster.host(1).peer(3).run_commands(commands)


def test_owner_finds_a_new_namespace_before_its_round() -> None:
    """In the round it would wait for the turn that it holds."""
    with node_cluster() as cluster:
        cluster.spread()
        more = cluster.sites[1].create_namespace("more")
        assert cluster.owner_of("more", b"ada") == 3
        assert cluster.host(3).current.catalog.name_of(more.id) is None
        commands = PeerCommands(
            requests=[[b"SET", b"more:ada", b"1"]], watched=None, on=[more.encoding.qualify(b"ada")],
            space=None, by_prefix=True, caller="writer", role=Role.WRITE, namespaces=None, durable=True,
            protocol=2,
        )  # fmt: skip
        assert cluster.host(1).peer(3).run_commands(commands).reply == b"+OK\r\n"
        assert more.get(b"ada") == b"1"


def test_keys_of_a_lost_node_are_served_by_the_next() -> None:
    with node_cluster() as cluster:
        cluster.spread()
        with resp_client(cluster.servers[1]) as client:
            assert client.incr(KEYS[2]) == 1
            cluster.kill(2)
            cluster.take_over()
            assert client.incr(KEYS[2]) == 2
            assert client.get(KEYS[2]) == b"2"
