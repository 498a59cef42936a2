"""Nodes on a shared engine: which node serves a partition, and the fate of a node that is declared dead."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any
from unittest.mock import patch

import pytest
from tests.cluster import KEY, LATER, Cluster, put, serving

from floodmark.codec.values import encode_value
from floodmark.engine import Guard
from floodmark.engine.base import WriteRow
from floodmark.model.batch import mint_batch
from floodmark.model.change import Heartbeat
from floodmark.model.errors import (
    ClockSkew,
    InvalidOption,
    NodeFenced,
    NotKeeper,
    PartitionMoved,
    SiteLocked,
    TransactionEnded,
)
from floodmark.model.limits import NODES_MAX
from floodmark.model.partition import Decision, Fate, Partition
from floodmark.model.ranges import KeyRange
from floodmark.partition import META
from floodmark.partition.layout import load_logs, load_partitions
from floodmark.partition.membership import (
    BEAT_MS,
    DEAD_MS,
    LEASE_MS,
    SKEW_MS_MAX,
    SharedNode,
    claim,
    load_beats,
)
from floodmark.partition.node import ended_batches
from floodmark.routing.batches import ask_fate
from floodmark.testing.simulation.nodes import tick


def test_each_node_mints_versions_of_its_own() -> None:
    cluster = Cluster(3)
    for node in cluster.nodes:
        assert {node.clock.now() % NODES_MAX for _ in range(5)} == {node.number}


def test_only_the_owner_serves_a_partition() -> None:
    first, second = Cluster().nodes
    put(first, b"1")
    assert serving(first).get(KEY) == b"1"
    with pytest.raises(PartitionMoved):
        put(second, b"2")
    with pytest.raises(PartitionMoved):
        serving(second).get(KEY)
    with pytest.raises(PartitionMoved):
        second.node.reshaping.split(KEY)


def test_a_partition_moves_to_another_node_above_all_that_was_announced() -> None:
    first, second = Cluster().nodes
    put(first, b"1")
    announced = serving(first).resolved_version()
    left = serving(first)
    first.node.reshaping.move(left.id, 2)
    with pytest.raises(PartitionMoved):
        left.resolved_version()
    second.node.refresh()
    assert serving(second).get(KEY) == b"1"
    assert put(second, b"2") > announced
    with pytest.raises(PartitionMoved):
        put(first, b"3")
    parents = {log.id: log.parents for log in load_logs(second.node.engine)}
    assert parents[serving(second).log_id] == [left.log_id]


def test_the_partitions_of_a_dead_node_are_shared_out() -> None:
    cluster = Cluster(3)
    first, second, third = cluster.nodes
    put(first, b"1")
    first.node.reshaping.split(LATER)
    cluster.bury(first)
    assert {row.node for row in second.node.rows} == {2, 3}
    owner = second if not serving(second).retired else third
    assert serving(owner).get(KEY) == b"1"
    put(owner, b"2")


def test_a_zombie_can_do_no_harm_and_finds_its_way_back() -> None:
    cluster = Cluster()
    first, second = cluster.nodes
    announced = serving(first).resolved_version()
    zombie = first.node
    partition = serving(first)
    cluster.bury(first)
    with pytest.raises(NodeFenced):
        partition.put([KEY], [encode_value(b"late")], durable=True)
    with pytest.raises(NodeFenced):
        partition.get(KEY)
    with pytest.raises(NodeFenced):
        partition.resolved_version()
    version = put(second, b"1")
    assert version > announced
    cluster.tick(first, second)
    assert first.incarnations == 2
    assert first.node is not zombie
    with pytest.raises(NodeFenced):
        zombie.map.route(KEY)
    second.node.reshaping.move(serving(second).id, 1)
    cluster.tick(first, second)
    assert put(first, b"2") > version


@pytest.mark.parametrize(
    "read",
    [
        lambda partition: partition.get(KEY),
        lambda partition: partition.get_many([KEY])[0],
        lambda partition: partition.read_batches([KEY], ()).records[0].value,
    ],
    ids=["get", "get_many", "read_batches"],
)
def test_a_node_that_cannot_beat_answers_no_read_of_the_newest_state(
    read: Callable[[Partition], bytes | None],
) -> None:
    cluster = Cluster()
    first, _ = cluster.nodes
    put(first, b"1")
    cluster.time.advance(LEASE_MS)
    with pytest.raises(NodeFenced, match="could not beat for 3 seconds"):
        read(serving(first))
    first.membership.beat()
    assert read(serving(first)) == b"1"


def test_prepared_writes_hold_the_successor_back_until_they_have_ended() -> None:
    cluster = Cluster()
    first, second = cluster.nodes
    prepared = serving(first).prepare("t1", [KEY], [encode_value(b"1")])
    newer = put(first, b"2")
    cluster.bury(first)
    second.node.settle_by(lambda _: Fate(Decision.COMMIT, prepared))
    assert serving(second).resolved_version() < prepared
    assert serving(second).commit_prepared("t1", prepared)
    assert serving(second).resolved_version() > newer
    told = [line[0][:8] for page in second.node.read_log(0, newer, KeyRange()) for line in page]
    assert [int.from_bytes(version, "big") for version in told] == [prepared, newer]


@pytest.mark.parametrize("way", ["move", "takeover"])
def test_batches_and_what_became_of_them_go_with_their_keys(way: str) -> None:
    cluster = Cluster()
    first, second = cluster.nodes
    value = [encode_value(b"1")]

    def settle(batch: str, siblings: Sequence[bytes]) -> Fate:
        owner = first if not serving(first).retired else second
        return ask_fate(lambda key, call: call(serving(owner, key)), batch, siblings)

    for node in cluster.nodes:
        node.node.settle_by(lambda _: Fate(Decision.UNDECIDED), settle)
    done, refused, prepared = (mint_batch(cluster.time()) for _ in range(3))
    version = serving(first).prepare(done, [KEY], value, [KEY])
    serving(first).commit_prepared(done, version)
    serving(first).ask_prepared(refused, KEY)
    p = serving(first).prepare(prepared, [KEY], value, [KEY])
    if way == "move":
        # A move settles first.
        first.node.reshaping.move(serving(first).id, 2)
        second.node.refresh()
        assert serving(second).ask_prepared(prepared, KEY) == Fate(Decision.COMMIT, p)
    else:
        cluster.bury(first)
        assert serving(second).prepare(prepared, [KEY], value, [KEY]) == p
        assert serving(second).get(KEY, at=p) == b"1"
    assert serving(second).prepare(done, [KEY], value, [KEY]) == version
    with pytest.raises(TransactionEnded):
        serving(second).prepare(refused, [KEY], value, [KEY])
    with pytest.raises(PartitionMoved if way == "move" else NodeFenced):
        serving(first).ended_prepared([done], [KEY])
    cluster.time.advance(1)
    second.node.committer.now()
    assert {batch for batch, *_ in ended_batches(second.node, 0)} == {done, refused, prepared}


def test_changes_of_a_log_that_a_takeover_has_kept_are_counted_once() -> None:
    cluster = Cluster()
    first, second = cluster.nodes
    fates = {"t1": Fate(Decision.UNDECIDED), "t2": Fate(Decision.UNDECIDED)}
    second.node.settle_by(lambda transaction: fates[transaction])

    def beat(times: int) -> list[Heartbeat]:
        beats = []
        for _ in range(times):
            cluster.tick(second)
            beats.append(second.node.heartbeat())
        return [each for each in beats if each.node == 0]

    def prepare(name: str, node: SharedNode) -> None:
        version = serving(node).prepare(name, [KEY], [encode_value(name.encode())])
        fates[name] = Fate(Decision.UNDECIDED, version)

    def commit(name: str) -> None:
        fates[name] = Fate(Decision.COMMIT, fates[name].version)
        assert serving(second).commit_prepared(name, fates[name].version)

    put(first, b"counted by the first")
    first.node.heartbeat()
    prepare("t1", first)
    cluster.bury(first)
    put(second, b"2")
    beat(3)
    commit("t1")
    # The log is kept for longer: another write is prepared, while earlier ones are resolved and counted.
    cluster.tick(second, times=2)
    prepare("t2", second)
    cluster.tick(second, times=2)
    beats = beat(5)
    assert any(row.counted for row in load_partitions(cluster.engine))
    commit("t2")
    beats += beat(5)
    assert not any(row.counted for row in load_partitions(cluster.engine))
    # Both transactions, and one put.
    assert sum(each.sums[1].all.changes for each in beats if each.sums) == 3
    assert all(each.since for each in beats)


def test_a_takeover_fails_if_the_dead_node_starts_again_meanwhile() -> None:
    cluster = Cluster()
    first, second = cluster.nodes
    cluster.tick(second, times=DEAD_MS // BEAT_MS - 1)
    first.start()
    cluster.tick(second, first)
    put(first, b"1")
    assert second.takeovers == 0


def test_one_node_keeps_the_site_at_a_time() -> None:
    cluster = Cluster()
    first, second = cluster.nodes
    assert (first.engine.keeper is not None, second.engine.keeper) == (True, None)
    row = (META, b"safe-points/x", b"1")
    assert first.engine.write([row])
    with pytest.raises(NotKeeper, match="node 1 does"):
        second.engine.write([row])
    assert second.take_keeper()
    with pytest.raises(NotKeeper, match="node 2 does"):
        first.engine.write([row])
    cluster.bury(second)
    assert first.engine.keeper is not None
    with pytest.raises(NodeFenced):
        second.engine.write([row])


def test_no_node_writes_by_settings_that_were_changed() -> None:
    first, second = Cluster().nodes
    first.node.reshaping.move(serving(first).id, 2)
    second.node.refresh()
    assert first.engine.write([(META, b"namespaces/1", b"changed")])
    seen_as_changed: list[bool] = []
    second.engine.load_catalog = lambda: seen_as_changed.append(second.engine.is_catalog_changed())
    put(second, b"1")
    # Until the catalog is loaded, other threads must not take it for the present one.
    assert seen_as_changed == [True]
    assert not second.engine.is_catalog_changed()
    assert serving(second).get(KEY) == b"1"


def test_a_map_that_changes_while_it_is_read_is_read_again() -> None:
    first, second = Cluster().nodes
    scan, moves = second.engine.scan, [2]

    def scan_and_move(*args: Any, **options: Any) -> Any:
        page = scan(*args, **options)
        if page and moves:
            first.node.reshaping.move(serving(first).id, moves.pop())
        return page

    with patch.object(second.engine, "scan", scan_and_move):
        rows = load_partitions(second.engine)
    assert not moves
    assert [row.node for row in rows] == [2]


def test_a_beat_that_is_written_late_makes_no_clock_suspect() -> None:
    cluster = Cluster()
    first, second = cluster.nodes
    cluster.tick(first, second, times=3)
    write = second.engine.write

    def write_late(rows: Iterable[WriteRow], guards: Sequence[Guard] = ()) -> bool:
        cluster.time.advance(SKEW_MS_MAX + 1)
        first.watch()
        return write(rows, guards)

    with patch.object(second.engine, "write", write_late):
        second.beat()
    first.watch()
    put(first, b"1")


@pytest.mark.parametrize("offset_ms", [-2_000, 2_000])
def test_a_node_whose_clock_is_away_from_the_others_refuses_to_serve(offset_ms: int) -> None:
    cluster = Cluster(3)
    first = cluster.nodes[0]
    cluster.offsets[1] = offset_ms
    cluster.tick(*cluster.nodes, times=2)
    with pytest.raises(ClockSkew, match="other nodes"):
        put(first, b"1")
    with pytest.raises(ClockSkew):
        serving(first).get(KEY)
    cluster.offsets[1] = 0
    cluster.tick(*cluster.nodes, times=2)
    put(first, b"2")


def test_beats_tell_where_nodes_are() -> None:
    cluster = Cluster()
    beats = load_beats(cluster.engine)
    assert {number: beat.url for number, beat in beats.items()} == {
        1: "grpc://oslo-1:7100",
        2: "grpc://oslo-2:7100",
    }


@pytest.mark.parametrize("number", [0, NODES_MAX])
def test_a_node_of_several_has_a_number_from_1_to_63(number: int) -> None:
    with pytest.raises(InvalidOption):
        Cluster(0).start(number)


def test_a_number_is_free_once_its_beats_have_stopped() -> None:
    cluster = Cluster()
    first, second = cluster.nodes
    assert claim(cluster.engine, 5, lambda _: cluster.tick(first, second)) == 5
    with pytest.raises(SiteLocked, match="node 2"):
        claim(cluster.engine, 2, lambda _: cluster.tick(first, second))
    # The claim of 5 beats no more; of the lowest that are free, each process gets its own.
    assert claim(cluster.engine, None, lambda _: cluster.tick(first, second)) == 3
    assert claim(cluster.engine, 2, lambda _: cluster.tick(first)) == 2
    with pytest.raises(InvalidOption):
        claim(cluster.engine, NODES_MAX, lambda _: None)


def test_a_process_that_claims_a_number_serves_when_the_one_before_has_no_lease() -> None:
    cluster = Cluster()
    first, _ = cluster.nodes
    put(first, b"1")
    suspended = serving(first)
    assert claim(cluster.engine, 1, lambda seconds: cluster.time.advance(round(seconds * 1_000))) == 1
    again = cluster.start(1)
    put(again, b"2")
    with pytest.raises(NodeFenced):
        suspended.get(KEY)


def test_a_number_is_not_claimed_over_a_beat_that_came_after_the_last_look() -> None:
    cluster = Cluster()
    first, _ = cluster.nodes
    write, late = cluster.engine.write, [first.beat]

    def beat_before(rows: Sequence[WriteRow], guards: Sequence[Guard] = ()) -> bool:
        if late:
            late.pop()()
        return write(rows, guards)

    with patch.object(cluster.engine, "write", beat_before):
        assert claim(cluster.engine, 1, lambda _: cluster.time.advance(LEASE_MS)) == 1
    # It looked once more, for as long again.
    with pytest.raises(NodeFenced):
        serving(first).get(KEY)
    with pytest.raises(NodeFenced):
        first.beat()


def test_a_process_whose_number_was_claimed_does_not_take_it_back() -> None:
    cluster = Cluster()
    suspended, second = cluster.nodes
    claim(cluster.engine, 1, lambda _: cluster.tick(second))
    again = cluster.start(1)
    for _ in range(2):
        with pytest.raises(SiteLocked, match="another process has started as node 1"):
            tick(suspended)
    again.beat()
    cluster.engine.close = lambda: None  # type: ignore[method-assign]
    again.node.close()
    tick(suspended)
    assert suspended.incarnations == 2


def test_what_a_node_leaves_that_stops_is_taken_over_at_once() -> None:
    cluster = Cluster()
    first, second = cluster.nodes
    put(first, b"1")
    cluster.engine.close = lambda: None  # type: ignore[method-assign]
    first.node.close()
    assert set(load_beats(cluster.engine)) == {2}
    cluster.tick(second)
    assert second.engine.keeper is not None
    assert serving(second).get(KEY) == b"1"


def test_a_node_that_could_not_look_declares_none_dead() -> None:
    cluster = Cluster(3)
    first, second, third = cluster.nodes
    cluster.time.advance(2 * DEAD_MS)
    third.watch()
    assert third.takeovers == 0
    cluster.tick(first, second, third)
    assert (first.incarnations, second.incarnations) == (1, 1)
