"""A site served by several nodes: each serves the whole of it, and the keeper what concerns the site."""

from collections.abc import Iterator
from contextlib import closing

import pytest
from tests.nodes import NodeCluster, node_cluster

from floodmark.host.ports import PeerCredentials, StatusPort
from floodmark.model.errors import (
    ClockSkew,
    InvalidConfiguration,
    NodeFenced,
    NotKeeper,
    PartitionMoved,
    Unreachable,
)
from floodmark.model.ranges import KeyRange
from floodmark.model.stream import ChangesRequest
from floodmark.model.version import VERSION_MAX, Version
from floodmark.partition.fencing import load_keeper
from floodmark.partition.membership import LEASE_MS, load_beats
from floodmark.wire import Connection, port_methods
from floodmark.wire.messages import GET, MAP

STATISTICS = port_methods(StatusPort, "administration")["administration.statistics"]


@pytest.fixture
def cluster() -> Iterator[NodeCluster]:
    with node_cluster() as nodes:
        yield nodes


def test_each_node_serves_the_whole_site(cluster: NodeCluster) -> None:
    cluster.spread()
    assert [cluster.owner_of("users", key) for key in (b"ada", b"ken", b"zoe")] == [1, 2, 3]
    for number, site in cluster.sites.items():
        users = site.namespace("users")
        for key in (b"ada", b"ken", b"zoe"):
            users.put(key, b"%d" % number)
            assert users.get(key) == b"%d" % number
        users.put_many({b"ada": b"a", b"ken": b"k", b"zoe": b"z"})
        assert list(users.scan()) == [(b"ada", b"a"), (b"ken", b"k"), (b"zoe", b"z")]


def test_a_namespace_made_at_any_node_is_there_at_all(cluster: NodeCluster) -> None:
    cluster.sites[2].create_namespace("made")
    for site in cluster.sites.values():
        site.namespace("made").put(b"key", b"value")
    cluster.sites[3].drop_namespace("made")
    assert all(not site.namespaces() for site in cluster.sites.values())


def test_a_node_that_does_not_keep_sends_callers_to_the_keeper(cluster: NodeCluster) -> None:
    with closing(Connection(cluster.servers[2].url)) as connection, pytest.raises(NotKeeper) as refused:
        connection.call(STATISTICS)
    assert refused.value.details == {"node": 1, "url": cluster.servers[1].url}
    with closing(Connection(cluster.servers[1].url)) as connection:
        assert connection.call(STATISTICS).site == "oslo"


def test_the_map_names_nodes_and_owners_and_a_wrong_node_refuses(cluster: NodeCluster) -> None:
    cluster.spread()
    with closing(Connection(cluster.servers[3].url)) as connection:
        reply = connection.call(MAP)
        assert reply.nodes == {number: server.url for number, server in cluster.servers.items()}
        assert reply.keeper == 1
        assert [entry.node for entry in reply.partitions] == [1, 2, 3]
        with pytest.raises(PartitionMoved):
            connection.call(GET, reply.partitions[0].id, b"\x00\x00\x01ada", None)


def test_what_is_resolved_covers_the_writes_of_all_nodes(cluster: NodeCluster) -> None:
    cluster.spread()
    written = [
        site.namespace("users").put(key, b"1")
        for site in cluster.sites.values()
        for key in (b"ada", b"ken", b"zoe")
    ]
    for site in cluster.sites.values():
        assert site.resolved_version() >= max(written)
        changes = list(site.changes("users", until=site.resolved_version()))
        assert [change.version for change in changes] == sorted(written)


def test_a_node_that_is_not_reached_holds_the_resolved_version_back(cluster: NodeCluster) -> None:
    cluster.spread()
    site = cluster.sites[1]
    site.namespace("users").put(b"zoe", b"1")
    before = site.resolved_version()
    cluster.kill(3)
    cluster.time.advance(100)
    late = site.namespace("users").put(b"ada", b"1")
    assert before <= site.resolved_version() < late
    cluster.take_over()
    assert site.resolved_version() > late


def test_a_node_that_knows_less_than_others_ends_no_stream_before_its_end(cluster: NodeCluster) -> None:
    cluster.spread()
    node, users = cluster.host(3).shared.node, cluster.sites[1].namespace("users")
    version = users.put(b"ken", b"1")
    behind = node.resolved_version()
    cluster.time.advance(100)
    late = users.put(b"ken", b"2")
    cluster.time.advance(100)
    end = cluster.sites[1].resolved_version()
    cluster.kill(2)
    assert behind <= node.resolved_version() < late <= end

    def read(until: Version) -> list[Version]:
        return [change.version for change in cluster.sites[3].changes("users", until=until)]

    with pytest.raises(Unreachable):
        read(end)
    with pytest.raises(Unreachable):
        cluster.host(3).changes(ChangesRequest(since=end, snapshot=b""))
    with pytest.raises(Unreachable):
        cluster.host(3).current.feeds._readers.require_resolved([end])
    # No node has come so far.
    assert read(VERSION_MAX) == [version]
    cluster.take_over()
    assert read(end) == [version, late]


def test_a_reader_sees_what_nodes_with_clocks_ahead_have_acknowledged(cluster: NodeCluster) -> None:
    cluster.spread()
    cluster.offsets[3] = 90
    cluster.sites[3].namespace("users").put(b"zoe", b"1")
    for site in cluster.sites.values():
        assert dict(site.namespace("users").scan()) == {b"zoe": b"1"}


def test_another_node_takes_over_and_keeps_when_the_keeper_is_lost(cluster: NodeCluster) -> None:
    cluster.spread()
    users = cluster.sites[2].namespace("users")
    users.put_many({b"ada": b"a", b"ken": b"k", b"zoe": b"z"})
    feed_position = cluster.sites[2].resolved_version()
    cluster.kill(1)
    cluster.take_over()
    assert cluster.owner_of("users", b"ada") != 1
    assert dict(users.scan()) == {b"ada": b"a", b"ken": b"k", b"zoe": b"z"}
    keepers = [number for number in cluster.sites if cluster.host(number).current.keeps]
    assert len(keepers) == 1
    cluster.sites[3].create_namespace("after")
    version = users.put(b"ada", b"2")
    changes = list(cluster.sites[3].changes("users", since=feed_position, until=version))
    assert [(change.key, change.value) for change in changes] == [(b"ada", b"2")]


def test_a_node_that_was_taken_for_dead_finds_its_way_back(cluster: NodeCluster) -> None:
    cluster.spread()
    zombie = cluster.silence(1)
    held = zombie.namespace("users")
    cluster.take_over()
    version = cluster.sites[2].namespace("users").put(b"ada", b"2")
    cluster.sites[1] = zombie
    cluster.tick(2)
    assert held.get(b"ada") == b"2"
    assert held.put(b"ada", b"3") > version
    assert cluster.host(1).shared.incarnations == 2
    assert not cluster.host(1).current.keeps
    assert zombie.create_namespace("again").put(b"key", b"1")


def test_a_node_without_a_server_works_as_a_node_like_any_other(cluster: NodeCluster) -> None:
    cluster.spread()
    site = cluster.start(9, listens=False)
    cluster.tick()
    users = site.namespace("users")
    users.put_many({b"ada": b"a", b"ken": b"k", b"zoe": b"z"})
    assert dict(users.scan()) == {b"ada": b"a", b"ken": b"k", b"zoe": b"z"}
    site.create_namespace("made")
    cluster.kill(1)
    cluster.take_over()
    assert {row.node for row in cluster.host(2).shared.node.rows} == {2, 3}


def test_beats_tell_what_readers_hold_also_after_a_new_incarnation(cluster: NodeCluster) -> None:
    cluster.spread()
    host, users = cluster.host(2), cluster.sites[2].namespace("users")
    version = users.put(b"ken", b"1")
    with host.reading(version, users.id):
        host.shared.start()
        cluster.tick(2)
        assert host.shared.incarnations == 2
        assert load_beats(cluster.engine)[2].held == {users.id: version}
        assert cluster.host(1).current.nodes.held_version(users.id) == version
    cluster.tick()
    assert not load_beats(cluster.engine)[2].held


def test_a_follower_is_woken_by_what_other_nodes_write(cluster: NodeCluster) -> None:
    cluster.spread()
    host, users = cluster.host(1), cluster.sites[1].namespace("users")
    host.others.has_news()
    assert not host.others.has_news()
    users.put(b"zoe", b"1")
    followers = host.current.node.committer.followers
    with followers.joining(KeyRange()) as follower:
        follower.expect()
        followers.is_watched = True
        host.follow()
        assert follower.is_woken()
    assert not host.others.has_news()


def test_a_node_says_why_it_does_not_serve(cluster: NodeCluster) -> None:
    for number in cluster.sites:
        cluster.host(number).require_ready()
    cluster.time.advance(LEASE_MS)
    with pytest.raises(NodeFenced, match="could not beat"):
        cluster.host(1).require_ready()
    cluster.offsets[1] = 2_000
    # A beat tells how late the one before it was, and that one must have been seen to come.
    cluster.tick(3)
    with pytest.raises(ClockSkew, match="ms ahead of other nodes"):
        cluster.host(1).require_ready()
    cluster.offsets[1] = 0
    cluster.tick(2)
    cluster.host(1).require_ready()


def test_a_node_says_only_where_others_can_reach_it(cluster: NodeCluster) -> None:
    with pytest.raises(InvalidConfiguration, match="--advertise"):
        cluster.host(1).advertise("grpc://0.0.0.0:7100", PeerCredentials())


def test_a_node_that_is_closed_leaves_its_partitions_to_the_others_at_once(cluster: NodeCluster) -> None:
    cluster.spread()
    users = cluster.sites[3].namespace("users")
    users.put(b"ada", b"1")
    del cluster.sites[1]
    cluster.servers.pop(1).close()
    # Its partitions are with others before it has ended, and so is the keeper's lease.
    assert users.put(b"ada", b"1")
    assert cluster.owner_of("users", b"ada") in (2, 3)
    keeper = load_keeper(cluster.engine)
    assert keeper is not None
    assert keeper.node in (2, 3)
    cluster.tick(2)
    assert cluster.host(2).shared.takeovers == cluster.host(3).shared.takeovers == 0
    assert users.get(b"ada") == b"1"
    assert 1 not in cluster.host(2).owners().nodes
    cluster.start(1)
    cluster.tick()
    assert cluster.sites[1].namespace("users").get(b"ada") == b"1"


def test_a_host_that_is_replaced_leaves_nothing_to_be_loaded_after_a_recovery(
    cluster: NodeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "floodmark.site")
    storage = cluster.host(2).shared.node.storage
    reloads = len(storage.on_recovery)
    cluster.host(2).shared.take_keeper()
    cluster.tick(2)
    assert "node 2 has a new host, and keeps the site" in caplog.text
    assert cluster.host(2).shared.node.storage is storage
    assert len(storage.on_recovery) == reloads
