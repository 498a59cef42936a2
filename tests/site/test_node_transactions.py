"""Transactions and links over partitions of other nodes, through takeovers of owners and of the keeper."""

from datetime import timedelta
from typing import Any

import pytest
from tests.cluster import KEY, LATER, SiteCluster, serving

from floodmark.codec.values import encode_value, mark_batch
from floodmark.engine import Guard, MemoryEngine
from floodmark.host.embedded import EmbeddedHost
from floodmark.host.transaction_port import NamespaceWrites
from floodmark.model.batch import mint_batch
from floodmark.model.change import Stamp
from floodmark.model.errors import (
    CommitTooLarge,
    Conflict,
    NotKeeper,
    OutcomeUnknown,
    PartlyDone,
    StaleLink,
    TransactionEnded,
)
from floodmark.model.partition import CommitLimits, Decision, Fate, LinkGuard
from floodmark.partition import LocalPartition, atomic_reading
from floodmark.partition.committer import Committer
from floodmark.partition.families import HORIZON, META
from floodmark.partition.layout import store_version
from floodmark.replication.applied import Applied
from floodmark.replication.links import LinkRow
from floodmark.replication.step import LinkStep, NamespaceStep
from floodmark.site import Namespace, Transaction

TIMEOUT = timedelta(minutes=1)
WRITES = [NamespaceWrites(namespace="users", id=1, rows={b"ada": encode_value(b"new")})]


@pytest.fixture
def nodes() -> SiteCluster:
    """The first node keeps the site, the second one owns its partition."""
    nodes = SiteCluster()
    nodes.sites[0].create_namespace("users").put(b"ada", b"old")
    nodes.give(2)
    return nodes


def read(nodes: SiteCluster) -> bytes | None:
    return nodes.hosts[0].router.get(KEY, None)


def change_keeper(nodes: SiteCluster) -> EmbeddedHost:
    """Let the second node keep the site, as after a takeover; its host recovers the logs."""
    assert nodes.cluster.nodes[1].take_keeper()
    nodes.cluster.nodes[0].engine.keeper = None
    nodes.hosts[1] = nodes.open(nodes.cluster.nodes[1])
    return nodes.hosts[1]


def test_a_transaction_commits_at_a_partition_of_another_node(nodes: SiteCluster) -> None:
    transactions = nodes.hosts[0].transactions
    name = transactions.begin(TIMEOUT, 0)
    version = transactions.commit(name, WRITES)
    assert version % 64 == 2
    assert read(nodes) == b"new"
    assert transactions.commit(name, WRITES) == version


def test_a_reader_at_the_owner_asks_the_keeper_for_the_fate(nodes: SiteCluster) -> None:
    transactions, partition = nodes.hosts[0].transactions, serving(nodes.cluster.nodes[1])
    name = transactions.begin(TIMEOUT, 0)
    partition.prepare(name, [KEY], [encode_value(b"new")])
    assert nodes.hosts[1].transactions._settle(name) == Fate(Decision.UNDECIDED)
    transactions.abort(name, "by its owner")
    assert partition.compare_and_set(KEY, b"old", encode_value(b"newer"), durable=True)
    assert open_writes(nodes) == []


def test_a_decided_commit_is_carried_out_by_the_next_keeper(
    nodes: SiteCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, partition = nodes.hosts[0], serving(nodes.cluster.nodes[1])
    name = first.transactions.begin(TIMEOUT, 0)
    monkeypatch.setattr("floodmark.transaction.coordinator.WAIT_SECONDS_MAX", 0)
    first.transactions.coordinators[0]._wait_seconds_max = 0
    monkeypatch.setattr(partition, "commit_prepared", lambda *_: 1 // 0)
    with pytest.raises(PartlyDone):
        first.transactions.commit(name, WRITES)
    assert read(nodes) == b"old"
    monkeypatch.undo()
    second = change_keeper(nodes)
    assert read(nodes) == b"new"
    assert second.transactions.list(timedelta(0)) == []


def test_an_undecided_transaction_is_aborted_by_the_next_keeper(nodes: SiteCluster) -> None:
    first, partition = nodes.hosts[0], serving(nodes.cluster.nodes[1])
    name = first.transactions.begin(TIMEOUT, 0)
    coordinator = first.transactions.coordinators[0]
    seen: list[bytes | None] = []

    def prepare_and_lose_the_lease(
        transaction: str, keys: list[bytes], values: list[bytes], **options: Any
    ) -> int:
        version = type(partition).prepare(partition, transaction, keys, values, **options)
        change_keeper(nodes)
        seen.append(read(nodes))
        return version

    partition.prepare = prepare_and_lose_the_lease  # type: ignore[method-assign, assignment]
    with pytest.raises((NotKeeper, TransactionEnded)):
        first.transactions.commit(name, WRITES)
    assert seen == [b"old"]
    assert open_writes(nodes) == []
    assert read(nodes) == b"old"
    # What the old coordinator still believes has no effect.
    with pytest.raises(NotKeeper):
        coordinator.commit(name, 1)
    assert read(nodes) == b"old"


def test_a_keeper_that_was_replaced_aborts_no_transaction_of_the_next(nodes: SiteCluster) -> None:
    first = nodes.hosts[0]
    second = change_keeper(nodes)
    # The first node does not know it yet.
    name = second.transactions.begin(TIMEOUT, 0)
    serving(nodes.cluster.nodes[1]).prepare(name, [KEY], [encode_value(b"new")])
    with pytest.raises(NotKeeper):
        first.transactions.fate(name)
    assert first.transactions._settle(name) == Fate(Decision.UNDECIDED)
    assert second.transactions.commit(name, WRITES)
    assert read(nodes) == b"new"


def test_prepared_writes_of_a_lost_owner_are_settled_by_its_successor(nodes: SiteCluster) -> None:
    first, second = nodes.cluster.nodes
    transactions = nodes.hosts[0].transactions
    name = transactions.begin(TIMEOUT, 0)
    serving(second).prepare(name, [KEY], [encode_value(b"new")])
    nodes.cluster.bury(second)
    assert first.node.committer.prepared.all()
    assert transactions.commit(name, WRITES)
    assert serving(first).get(KEY) == b"new"


# Links


def copy(nodes: SiteCluster, stamp: int, position: int = 0) -> int:
    """Apply a change of site 9 that supposes a position, at the node that keeps."""
    value = encode_value(b"copied", origin=Stamp(stamp, 9))
    return nodes.hosts[0].router.apply({KEY: value}, durable=True, link=LinkGuard(9, {1: position}))


def advance(nodes: SiteCluster, through: int) -> None:
    links = nodes.hosts[0].links
    with nodes.hosts[0].node.storage.settled():
        links._store({(1, 9): LinkRow(through=through)})


def test_changes_of_a_link_are_applied_at_the_node_that_owns_them(nodes: SiteCluster) -> None:
    stamp = nodes.cluster.nodes[0].clock.now()
    assert copy(nodes, stamp) % 64 == 2
    assert read(nodes) == b"copied"


def test_an_owner_refuses_changes_of_a_link_that_has_moved_on_at_the_keeper(nodes: SiteCluster) -> None:
    stamp = nodes.cluster.nodes[0].clock.now()
    advance(nodes, 5)
    with pytest.raises(StaleLink):
        copy(nodes, stamp)
    assert copy(nodes, stamp, position=5)


@pytest.mark.parametrize("moved", ["position", "horizon"])
def test_a_link_that_moves_on_in_the_middle_of_a_round_refuses_it(
    nodes: SiteCluster, monkeypatch: pytest.MonkeyPatch, moved: str
) -> None:
    stamp, engine = nodes.cluster.nodes[0].clock.now(), nodes.cluster.engine
    write = MemoryEngine.write

    def advance_first(self: MemoryEngine, rows: object, guards: tuple[Guard, ...] = ()) -> bool:
        monkeypatch.undo()
        if moved == "position":
            advance(nodes, 5)
        else:
            write(engine, [store_version(HORIZON + b"\x00\x00\x01", 7)])
        return write(self, rows, guards)  # type: ignore[arg-type]

    monkeypatch.setattr(MemoryEngine, "write", advance_first)
    with pytest.raises(StaleLink):
        copy(nodes, stamp)
    assert read(nodes) == b"old"
    assert engine.get(META, HORIZON + b"\x00\x00\x01") is None or moved == "horizon"


def test_a_watermark_lies_above_the_changes_that_it_covers_at_all_nodes(nodes: SiteCluster) -> None:
    nodes.cluster.offsets[2] = 400
    applied = copy(nodes, nodes.cluster.nodes[0].clock.now())
    part = NamespaceStep(name="users", source_id=1, target_id=1, since=0, until=5)
    step = LinkStep(source="rome", source_id=9, incarnation=1, namespaces=(part,))
    nodes.hosts[0].links.advance(step, Applied())
    assert nodes.hosts[0].links.watermark(1, applied) == {}
    assert nodes.hosts[0].links.watermark(1) == {9: 5}


# Keys at several nodes


@pytest.fixture
def apart() -> SiteCluster:
    """Two nodes, of which each owns one of the keys "ada" and "zoe"; the first keeps the site."""
    nodes = SiteCluster()
    users = nodes.sites[0].create_namespace("users")
    users.put_many({b"ada": b"10", b"zoe": b"10"})
    nodes.sites[0].split("users", b"m")
    nodes.give(2, LATER)
    assert {partition.place for partition in nodes.nodes[0].map.partitions} == {"node 1", "node 2"}
    return nodes


def move(transaction: Transaction, users: Namespace) -> None:
    """Take one from "ada" and give it to "zoe"."""
    ada, zoe = map(int, transaction.get_many(users, [b"ada", b"zoe"]))
    transaction.put(users, b"ada", b"%d" % (ada - 1))
    transaction.put(users, b"zoe", b"%d" % (zoe + 1))


def open_writes(nodes: SiteCluster) -> list[object]:
    return [write for shared in nodes.cluster.nodes for write in shared.node.committer.prepared.all()]


def test_a_transaction_reads_and_writes_keys_of_several_nodes(apart: SiteCluster) -> None:
    site = apart.sites[0]
    users = site.namespace("users")
    with site.transaction() as transaction:
        move(transaction, users)
    assert users.get_many([b"ada", b"zoe"]) == [b"9", b"11"]
    assert users.get_many([b"ada", b"zoe"], at=transaction.version - 1) == [b"10", b"10"]
    assert users.get_many([b"ada", b"zoe"], at=transaction.version) == [b"9", b"11"]
    assert (open_writes(apart), site.transactions.list(timedelta(0))) == ([], [])


def test_a_transaction_over_several_nodes_is_a_batch_in_the_log(apart: SiteCluster) -> None:
    site = apart.sites[0]
    users, since = site.namespace("users"), site.now()
    with site.transaction() as transaction:
        move(transaction, users)
        transaction.append(users, b"log", b"moved")
    with site.transaction(coordinator=0) as alone:
        alone.put(users, b"zoe", b"20")
    found = [(change.key[:3], change.version, change.batch) for change in site.changes(since=since)]
    assert found == [
        *((key, transaction.version, transaction.version) for key in (b"ada", b"log", b"zoe")),
        (b"zoe", alone.version, None),
    ]


def test_prepared_writes_are_of_a_batch_also_at_the_successor_of_a_lost_owner(apart: SiteCluster) -> None:
    first, second = apart.cluster.nodes
    transactions, since = apart.hosts[0].transactions, apart.sites[0].now()
    name = transactions.begin(TIMEOUT, 0)
    rows = {b"ada": encode_value(b"9"), b"zoe": encode_value(b"11")}
    serving(second, LATER).prepare(name, [LATER], [rows[b"zoe"]], batch=True)
    apart.cluster.bury(second)
    version = transactions.commit(name, [NamespaceWrites(namespace="users", id=1, rows=rows)])
    assert [change.batch for change in apart.sites[0].changes(since=since)] == [version] * 2
    assert [change.version for change in apart.sites[0].changes(since=since)] == [version] * 2
    assert serving(first, LATER).get(LATER) == b"11"


@pytest.mark.parametrize("is_marked", [True, False])
def test_a_prepare_is_repeated_after_an_upgrade_of_its_node(apart: SiteCluster, is_marked: bool) -> None:
    partition = serving(apart.cluster.nodes[0])
    name = apart.hosts[0].transactions.begin(TIMEOUT, 0)
    versions = [
        partition.prepare(name, [KEY], [encode_value(b"9")], batch=batch) for batch in (is_marked, True)
    ]
    assert versions[0] == versions[1]


def test_a_transaction_that_is_too_much_for_one_commit_is_refused(apart: SiteCluster) -> None:
    site = apart.sites[0]
    users = site.namespace("users")
    for shared in apart.cluster.nodes:
        for partition in shared.node.map.partitions:
            partition.limits = CommitLimits(bytes_max=30, changes_max=10)
    transaction = site.transaction()
    move(transaction, users)
    with pytest.raises(CommitTooLarge):
        transaction.commit()
    assert (open_writes(apart), site.transactions.list(timedelta(0))) == ([], [])


@pytest.mark.parametrize("key", [b"ada", b"zoe", b"bob", b"tom"])
@pytest.mark.parametrize("scans", [False, True])
def test_write_at_any_node_to_what_was_read_is_a_conflict(
    apart: SiteCluster, key: bytes, scans: bool
) -> None:
    site = apart.sites[0]
    users = site.namespace("users")
    transaction = site.transaction()
    move(transaction, users)
    if scans:
        assert len(list(transaction.scan(users, b"a", b"z"))) == 1
    users.put(key, b"50")
    if scans or key in (b"ada", b"zoe"):
        with pytest.raises(Conflict) as raised:
            transaction.commit()
        assert raised.value.details["key"] == key
    else:
        transaction.commit()
    assert (open_writes(apart), site.transactions.list(timedelta(0))) == ([], [])


def test_what_another_transaction_has_locked_is_a_conflict(apart: SiteCluster) -> None:
    site = apart.sites[0]
    users, partition = site.namespace("users"), apart.nodes[0].map.route(LATER)
    transaction = site.transaction()
    assert transaction.get(users, b"zoe") == b"10"
    transaction.put(users, b"ada", b"9")
    other = site.transactions.begin(TIMEOUT, 0)
    partition.prepare(other, [LATER], [encode_value(b"50")])
    with pytest.raises(Conflict):
        transaction.commit()
    site.transactions.abort(other, "done")
    assert users.get_many([b"ada", b"zoe"]) == [b"10", b"10"]


def test_version_of_a_commit_lies_above_its_reads_though_clocks_differ(apart: SiteCluster) -> None:
    site = apart.sites[0]
    users = site.namespace("users")
    transaction = site.transaction()
    assert transaction.get(users, b"ada") == b"10"
    # It writes only at a node whose clock has not heard of the version that was read.
    transaction.put(users, b"zoe", b"11")
    assert transaction.commit() > transaction._reads.version
    with site.transaction() as transaction:
        assert transaction.get(users, b"zoe") == b"11"


@pytest.mark.parametrize("writes_before", [0, 1])
def test_batch_of_a_link_that_moves_on_while_it_is_prepared_is_refused(
    apart: SiteCluster, monkeypatch: pytest.MonkeyPatch, writes_before: int
) -> None:
    stamp = Stamp(apart.cluster.nodes[0].clock.now(), 9)
    value = mark_batch(encode_value(b"copied", origin=stamp))
    write, left = MemoryEngine.write, [None] * writes_before

    def advance_first(self: MemoryEngine, rows: object, guards: tuple[Guard, ...] = ()) -> bool:
        if left:
            left.pop()
        else:
            monkeypatch.undo()
            # The keeper's turn may be held by this very round.
            apart.hosts[0].links._store({(1, 9): LinkRow(through=5)})
        return write(self, rows, guards)  # type: ignore[arg-type]

    def copy_both(position: int) -> int:
        guard = LinkGuard(9, {1: position})
        return apart.hosts[0].router.apply({KEY: value, LATER: value}, durable=True, link=guard)

    monkeypatch.setattr(MemoryEngine, "write", advance_first)
    with pytest.raises(StaleLink):
        copy_both(0)
    users = apart.sites[0].namespace("users")
    assert users.get_many([b"ada", b"zoe"]) == [b"10", b"10"]
    assert open_writes(apart) == []
    version = copy_both(5)
    assert users.get_many([b"ada", b"zoe"], at=version) == [b"copied", b"copied"]


def test_batch_of_a_link_stays_whole_when_a_partition_moves_under_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nodes = SiteCluster()
    nodes.sites[0].create_namespace("users")
    nodes.sites[0].split("users", b"m")
    apply = LocalPartition.apply

    def move_first(self: LocalPartition, *args: Any, **named: Any) -> int:
        monkeypatch.undo()
        nodes.give(2, LATER)
        return apply(self, *args, **named)

    monkeypatch.setattr(LocalPartition, "apply", move_first)
    value = mark_batch(encode_value(b"copied", origin=Stamp(nodes.cluster.nodes[0].clock.now(), 9)))
    version = nodes.hosts[0].router.apply({KEY: value, LATER: value}, durable=True)
    assert {partition.place for partition in nodes.nodes[0].map.partitions} == {"node 1", "node 2"}
    assert [change.version for change in nodes.sites[0].changes("users", since=0)] == [version, version]


# A partition that moves to a node whose clock is behind, while its owner still answers


@pytest.fixture
def ahead() -> SiteCluster:
    """Three nodes: the first owns "ada" and "bob", and the second, whose clock is ahead, owns "zoe"."""
    nodes = SiteCluster(3)
    users = nodes.sites[0].create_namespace("users")
    users.put_many({b"ada": b"10", b"bob": b"10", b"zoe": b"10"})
    nodes.sites[0].split("users", b"m")
    nodes.give(2, LATER)
    nodes.cluster.offsets[2] = 200
    return nodes


def test_snapshot_of_a_partition_that_moves_before_the_clock_of_its_owner_has_passed_it_never_changes(
    ahead: SiteCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    users, observe = ahead.sites[0].namespace("users"), Committer.observe
    at = users.put(b"zoe", b"11")

    def move_first(self: Committer, *args: Any, **named: Any) -> None:
        monkeypatch.undo()
        ahead.give(3)
        observe(self, *args, **named)

    monkeypatch.setattr(Committer, "observe", move_first)
    assert users.get(b"ada", at=at) == b"10"
    assert users.put(b"ada", b"11") > at
    assert users.get(b"ada", at=at) == b"10"


def test_reads_of_more_keys_than_a_commit_may_write_follow_their_partition(
    ahead: SiteCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    users, get_many = ahead.sites[0].namespace("users"), LocalPartition.get_many

    def move_first(self: LocalPartition, *args: Any) -> list[bytes | None]:
        monkeypatch.undo()
        for shared in ahead.cluster.nodes:
            shared.node._limits = CommitLimits(bytes_max=100, changes_max=1)
        ahead.give(3)
        return get_many(self, *args)

    monkeypatch.setattr(LocalPartition, "get_many", move_first)
    assert users.get_many([b"ada", b"bob"]) == [b"10", b"10"]


def test_write_to_what_was_read_lies_above_the_commit_though_its_partition_moves_while_it_is_validated(
    ahead: SiteCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    users, validate = ahead.sites[0].namespace("users"), LocalPartition.validate
    transaction = ahead.sites[0].transaction()
    assert transaction.get(users, b"ada") == b"10"
    transaction.put(users, b"zoe", b"11")

    def move_first(self: LocalPartition, *args: Any) -> None:
        monkeypatch.undo()
        ahead.give(3)
        validate(self, *args)

    monkeypatch.setattr(LocalPartition, "validate", move_first)
    transaction.commit()
    assert users.put(b"ada", b"11") > transaction.version


def test_atomic_read_of_a_partition_that_moves_while_it_is_read_sees_whole_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nodes = SiteCluster()
    site = nodes.sites[0]
    users = site.create_namespace("users")
    users.put_many({b"ada": b"10", b"zoe": b"10"})
    site.split("users", b"m")
    nodes.give(2, LATER)
    nodes.cluster.offsets[1] = 400
    resolve, answers = atomic_reading._resolve, [0, 0]

    def move_first(committer: Committer, *args: Any) -> int:
        if len(answers) == 2:
            nodes.give(2)
            # Other partitions of the first node go on, above the seal.
            committer.now()
        elif len(answers) == 1:
            with site.atomic() as batch:
                batch.put(users, b"ada", b"20")
                batch.put(users, b"zoe", b"20")
        answers[:] = answers[1:]
        return resolve(committer, *args)

    monkeypatch.setattr(atomic_reading, "_resolve", move_first)
    assert len(set(site.read_atomic([(users, b"ada"), (users, b"zoe")]))) == 1


def test_read_asks_again_for_the_end_of_a_batch_if_an_answer_is_not_known(
    apart: SiteCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    partition, batch = apart.nodes[0].map.route(KEY), mint_batch(apart.cluster.time())
    version = partition.prepare(batch, [KEY], [encode_value(b"new")], [KEY, LATER], [KEY, LATER])

    def lose_the_first(*_: Any) -> Fate:
        monkeypatch.undo()
        raise OutcomeUnknown("the database gave no answer")

    monkeypatch.setattr(LocalPartition, "ask_prepared", lose_the_first)
    assert apart.sites[0].namespace("users").get(b"ada", at=version) == b"10"
    assert open_writes(apart) == []


# Writes alone


def test_writes_alone_need_no_coordinator(apart: SiteCluster) -> None:
    site = apart.sites[0]
    users = site.namespace("users")
    with site.transaction() as transaction:
        transaction.put(users, b"ada", b"1")
        transaction.put(users, b"zoe", b"1")
    assert transaction.id == ""
    assert {change.version for change in site.changes("users", since=transaction.version - 1)} == {
        transaction.version
    }
