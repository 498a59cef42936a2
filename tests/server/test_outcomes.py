"""Commits of transactions that got no answer: their outcome is found out, and none happens twice or late."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
from tests.nodes import NodeCluster
from tests.server.processes import Process, start_server
from tests.server.support import connected, serving
from tests.site.support import node_of
from tests.waiting import HANG_SECONDS, wait_until

import floodmark
from floodmark.model.batch import name_commit, split_commit
from floodmark.model.errors import (
    Closed,
    CommitUnknown,
    Conflict,
    OutcomeUnknown,
    Retryable,
    TransactionEnded,
)
from floodmark.model.limits import BATCH_AGE_MS_MAX
from floodmark.model.transaction import ABORTED, UNKNOWN, TransactionOutcome
from floodmark.partition.node import forget_commits
from floodmark.routing.batches import FORGET_MS
from floodmark.server import ServerOptions
from floodmark.site import Namespace, Site, Transaction
from floodmark.testing.clock import SimulatedTime
from floodmark.wire import RemotePartition

MOMENT, SECOND = timedelta(milliseconds=1), timedelta(seconds=1)
FLIGHT = ServerOptions(resp_listen=None)
KILLS_MAX = 20


@dataclass
class Wire:
    """What happens with the next calls of partitions over the wire; those that come later go through."""

    writes: list[Callable[[Callable[[], int]], int]] = field(default_factory=list)
    # Whether no answer comes to a client that asks for an outcome.
    is_silent: bool = False
    sent: int = 0
    late: list[Callable[[], int]] = field(default_factory=list)

    def lose_answer(self, call: Callable[[], int]) -> int:
        call()
        raise OutcomeUnknown("the answer was lost")

    def lose_question(self, call: Callable[[], int]) -> int:
        raise OutcomeUnknown("the question was lost")

    def be_late(self, call: Callable[[], int]) -> int:
        self.late.append(call)
        raise OutcomeUnknown("no answer in time")


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    wire, write, ask = Wire(), RemotePartition.write, RemotePartition.ask_prepared

    def intercept_write(partition: RemotePartition, *args: Any, **options: Any) -> int:
        def call() -> int:
            return write(partition, *args, **options)

        wire.sent += 1
        return wire.writes.pop(0)(call) if wire.writes else call()

    def intercept_ask(partition: RemotePartition, *args: Any) -> Any:
        if wire.is_silent:
            raise Retryable("no answer")
        return ask(partition, *args)

    monkeypatch.setattr(RemotePartition, "write", intercept_write)
    monkeypatch.setattr(RemotePartition, "ask_prepared", intercept_ask)
    return wire


@pytest.fixture(params=[None, FLIGHT], ids=["resp", "flight"])
def client(request: pytest.FixtureRequest) -> Iterator[Site]:
    with serving(request.param) as (_, server), connected(server) as site:
        site.create_namespace("users")
        yield site


@pytest.fixture
def users(client: Site) -> Namespace:
    return client.namespace("users")


def begin(site: Site, *, reads: bool = True, timeout: timedelta = timedelta(minutes=1)) -> Transaction:
    """A transaction that writes a key, if it `reads` by what it has read."""
    transaction, users = site.transaction(timeout=timeout), site.namespace("users")
    if reads:
        assert transaction.get(users, b"ada") is None
    transaction.put(users, b"ada", b"1")
    return transaction


def fail(transaction: Transaction, wire: Wire) -> str:
    """Commit without an answer; the id."""
    wire.is_silent = True
    with pytest.raises(CommitUnknown) as raised:
        transaction.commit()
    wire.is_silent = False
    assert raised.value.details["transaction"] == transaction.id != ""
    return transaction.id


def versions(site: Site) -> list[int]:
    """The versions of all changes."""
    return [change.version for change in site.changes("users", since="beginning")]


both_kinds = pytest.mark.parametrize("reads", [True, False], ids=["by reads", "blind"])


@both_kinds
def test_an_answer_that_was_lost_is_found_out(
    client: Site, users: Namespace, wire: Wire, reads: bool
) -> None:
    wire.writes = [wire.lose_answer]
    transaction = begin(client, reads=reads)
    version = transaction.commit()
    assert versions(client) == [version] == [transaction.version]
    assert (users.get(b"ada"), wire.sent) == (b"1", 1)


@both_kinds
def test_a_commit_that_did_not_arrive_is_sent_again(client: Site, wire: Wire, reads: bool) -> None:
    wire.writes = [wire.lose_question, wire.lose_question, wire.lose_answer]
    transaction = begin(client, reads=reads)
    assert [transaction.commit()] == versions(client)
    assert wire.sent == 3


def test_a_commit_that_is_sent_again_is_validated_again(client: Site, users: Namespace, wire: Wire) -> None:
    def lose_and_write(call: Callable[[], int]) -> int:
        users.put(b"ada", b"other")
        return wire.lose_question(call)

    wire.writes = [lose_and_write]
    with pytest.raises(Conflict):
        begin(client).commit()
    assert users.get(b"ada") == b"other"


@both_kinds
def test_a_late_commit_does_not_happen_after_it_was_said_to_be_aborted(
    client: Site, users: Namespace, wire: Wire, reads: bool
) -> None:
    wire.writes = [wire.be_late]
    transaction = fail(begin(client, reads=reads, timeout=MOMENT), wire)
    assert client.transaction_outcome(transaction) == ABORTED
    with pytest.raises(TransactionEnded):
        wire.late[0]()
    assert users.get(b"ada") is None
    assert client.transaction_outcome(transaction) == ABORTED


@both_kinds
def test_a_commit_that_arrives_twice_happens_once(client: Site, wire: Wire, reads: bool) -> None:
    def send_twice(call: Callable[[], int]) -> int:
        assert call() == call()
        return call()

    wire.writes = [send_twice]
    version = begin(client, reads=reads).commit()
    assert versions(client) == [version]


@pytest.mark.parametrize("lost", ["answer", "question"])
def test_another_client_finds_the_outcome_out_and_so_does_a_second_commit(
    client: Site, users: Namespace, wire: Wire, lost: str
) -> None:
    wire.writes = [getattr(wire, f"lose_{lost}")]
    transaction = begin(client, timeout=MOMENT)
    name = fail(transaction, wire)
    with pytest.raises(Closed, match="commit"):
        transaction.put(users, b"bob", b"1")
    found = versions(client)
    if not found:
        assert client.transaction_outcome(name) == ABORTED
        for _ in range(2):
            with pytest.raises(TransactionEnded, match="never will be"):
                transaction.commit()
    else:
        assert client.transaction_outcome(name) == TransactionOutcome("committed", found[0])
        assert transaction.commit() == found[0] == transaction.version
        with pytest.raises(Closed):
            transaction.commit()
    assert bool(found) == (lost == "answer")


def test_a_second_commit_without_an_answer_can_be_repeated(client: Site, wire: Wire) -> None:
    wire.writes = [wire.lose_answer]
    transaction = begin(client, timeout=MOMENT)
    assert fail(transaction, wire) == fail(transaction, wire)
    assert transaction.commit() > 0


def test_block_that_ends_with_an_unknown_outcome_can_still_be_found_out(client: Site, wire: Wire) -> None:
    wire.writes = [wire.lose_answer]
    transaction = begin(client, timeout=MOMENT)
    with transaction:
        fail(transaction, wire)
    assert transaction.commit() > 0


def test_an_old_outcome_is_unknown_and_not_taken_for_an_abort(client: Site, users: Namespace) -> None:
    with client.transaction() as transaction:
        transaction.put(users, b"ada", b"1")
    old_ms = client.host.physical_ms() - BATCH_AGE_MS_MAX - 1_000
    name = name_commit(f"b-{old_ms:011x}-0123456789abcdef", users.id.to_bytes(3, "big") + b"ada")
    assert split_commit(name) is not None
    assert client.transaction_outcome(name) == UNKNOWN


def test_transactions_go_on_when_the_clock_of_the_server_was_set_back(wire: Wire) -> None:
    time = SimulatedTime()
    with serving(time=time) as (site, server), connected(server) as before:
        site.create_namespace("users").put(b"zoe", b"0")
        time.advance(-10 * BATCH_AGE_MS_MAX)
        with connected(server) as client:
            for each in (before, client):
                begin(each).commit()
                each.namespace("users").delete(b"ada")
            wire.writes = [wire.lose_answer]
            transaction = begin(client, reads=False)
            transaction.commit()
            assert versions(client)[-1] == transaction.version


def test_a_commit_that_was_forgotten_does_not_happen_again_when_the_clock_is_set_back(wire: Wire) -> None:
    time = SimulatedTime()
    with serving(time=time) as (site, server), connected(server) as client:
        site.create_namespace("users")
        wire.writes = [wire.be_late]
        wire.is_silent = True
        with pytest.raises(CommitUnknown):
            begin(client, timeout=MOMENT).commit()
        late = wire.late[0]
        assert late() == late()
        # The client's clock goes on.
        time.advance(FORGET_MS + 30_000)
        forget_commits(node_of(site), FORGET_MS)
        assert stored_outcomes(node_of(site)) == 1
        # Only what is old by a version is forgotten: it stays too old to happen again.
        site.now()
        forget_commits(node_of(site), FORGET_MS)
        assert stored_outcomes(node_of(site)) == 0
        time.advance(-FORGET_MS)
        with pytest.raises(TransactionEnded, match="took too long"):
            late()


def test_outcomes_are_forgotten_while_the_clock_is_behind_the_versions() -> None:
    time = SimulatedTime()
    with serving(time=time) as (site, server):
        users = site.create_namespace("users")
        users.put(b"ada", b"0")
        with connected(server) as client, client.transaction() as transaction:
            transaction.put(client.namespace("users"), b"ada", b"1")
        time.advance(FORGET_MS + 30_000)
        users.put(b"ada", b"2")
        time.advance(-FORGET_MS)
        forget_commits(node_of(site), FORGET_MS)
        assert stored_outcomes(node_of(site)) == 0


def test_only_commits_of_clients_store_their_outcomes_and_the_tick_forgets_them() -> None:
    with serving() as (site, server):
        users, node = site.create_namespace("users"), node_of(site)
        with site.transaction() as transaction:
            transaction.put(users, b"ada", b"1")
        assert stored_outcomes(node) == 0
        with connected(server) as client, client.transaction() as transaction:
            transaction.put(client.namespace("users"), b"ada", b"2")
        forget_commits(node, FORGET_MS)
        assert stored_outcomes(node) == 1
        forget_commits(node, -1_000)
        assert stored_outcomes(node) == 0


@pytest.mark.parametrize("lost", ["answer", "question"])
def test_work_with_an_idempotency_key_is_repeated_after_an_unknown_outcome(
    client: Site, wire: Wire, lost: str
) -> None:
    counts, done = client.create_namespace("counts", merge="counter"), []

    def count(transaction: Transaction) -> int:
        transaction.add(counts, b"ada", 1)
        done.append(True)
        return len(done)

    client.run_transaction(count, idempotency_key="first")
    wire.writes, wire.is_silent = [getattr(wire, f"lose_{lost}")], True
    with pytest.raises(CommitUnknown):
        client.run_transaction(count, idempotency_key="second", timeout=MOMENT)
    wire.is_silent = False
    assert client.run_transaction(count, idempotency_key="second") == (2 if lost == "answer" else 3)
    assert counts.get(b"ada") == 2


# Several nodes


def write_all(site: Site, *, timeout: timedelta = timedelta(minutes=1)) -> Transaction:
    """A transaction that writes a key of each node, blindly."""
    transaction = site.transaction(timeout=timeout)
    for key in (b"ada", b"max", b"zoe"):
        transaction.put(site.namespace("users"), key, b"1")
    return transaction


def test_a_lost_answer_over_nodes_is_found_out(cluster: NodeCluster, wire: Wire) -> None:
    with cluster.connect(2) as client:
        wire.writes = [wire.lose_answer]
        version = write_all(client).commit()
        assert versions(cluster.sites[1]) == [version] * 3


def test_a_late_commit_over_nodes_does_not_happen_after_an_abort(cluster: NodeCluster, wire: Wire) -> None:
    with cluster.connect(2) as client:
        wire.writes = [wire.be_late]
        name = fail(write_all(client, timeout=MOMENT), wire)
        assert client.transaction_outcome(name) == ABORTED
        with pytest.raises(Retryable):
            wire.late[0]()
        assert client.namespace("users").get_many([b"ada", b"max", b"zoe"]) == [None] * 3
        # The commit is sent again under another id by a client that still waits.
        wire.writes = [wire.lose_question]
        assert write_all(client).commit() > 0


@pytest.mark.parametrize("lost", ["answer", "question"])
def test_a_node_that_takes_over_knows_the_outcome(cluster: NodeCluster, wire: Wire, lost: str) -> None:
    with floodmark.connect(cluster.url) as client:
        users = client.namespace("users")
        transaction = client.transaction(timeout=MOMENT)
        assert transaction.get(users, b"zoe") is None
        transaction.put(users, b"zoe", b"1")
        wire.writes = [getattr(wire, f"lose_{lost}")]
        name = fail(transaction, wire)
        cluster.kill(cluster.owner_of("users", b"zoe"))
        cluster.take_over()
        assert client.transaction_outcome(name).state == ("committed" if lost == "answer" else "aborted")
        assert users.get(b"zoe") == (b"1" if lost == "answer" else None)


def test_a_node_commits_transactions_when_all_clocks_were_set_back(cluster: NodeCluster) -> None:
    with cluster.connect(2) as client:
        client.namespace("users").put(b"max", b"0")
    cluster.offsets = dict.fromkeys(cluster.offsets, -10 * BATCH_AGE_MS_MAX)
    with cluster.connect(2) as client:
        for site in (cluster.sites[1], client):
            with site.transaction() as transaction:
                transaction.put(site.namespace("users"), b"max", b"1")
            assert transaction.version > 0


def test_outcomes_of_commits_are_forgotten(cluster: NodeCluster) -> None:
    with cluster.connect(2) as client, client.transaction() as transaction:
        transaction.put(client.namespace("users"), b"max", b"1")
    node = cluster.host(2).current.node
    assert stored_outcomes(node) == 1
    cluster.time.advance(2 * BATCH_AGE_MS_MAX + 1)
    cluster.tick()
    node.committer.now()
    cluster.host(2).others.forget()
    assert stored_outcomes(node) == 0


def stored_outcomes(node: Any) -> int:
    return len(node.engine.scan("meta", b"batch/", b"batch0", rows_max=10, bytes_max=10_000))


# Kill -9


@dataclass
class Ledger:
    """What clients were told of the keys that their transactions wrote."""

    committed: dict[bytes, int] = field(default_factory=dict)
    unknown: dict[bytes, str] = field(default_factory=dict)
    refused: set[bytes] = field(default_factory=set)

    def transact(self, url: str, number: int, stopping: Event) -> None:
        """Count in a key of the client, each time with a new key beside it."""
        with floodmark.connect(url, timeout=SECOND) as site:
            users = site.namespace("users")
            for attempt in range(100_000):
                if stopping.is_set():
                    return
                key = b"%d-%d" % (number, attempt)
                try:
                    with site.transaction(timeout=MOMENT) as transaction:
                        transaction.get(users, b"last-%d" % number)
                        transaction.put(users, b"last-%d" % number, key)
                        transaction.put(users, key, b"1")
                except CommitUnknown as error:
                    self.unknown[key] = str(error.details["transaction"])
                except Retryable:
                    self.refused.add(key)
                else:
                    self.committed[key] = transaction.version

    def has(self, committed: int) -> bool:
        """Whether so many transactions were committed."""
        return len(self.committed) >= committed

    def check(self, site: Site) -> None:
        """Resolve each unknown outcome, and compare all with what is stored."""
        outcomes = {key: site.transaction_outcome(name) for key, name in self.unknown.items()}
        assert {outcome.state for outcome in outcomes.values()} <= {"committed", "aborted"}
        expected = self.committed | {key: each.version for key, each in outcomes.items() if each.version}
        found = {
            change.key: change.version
            for change in site.changes("users", since="beginning")
            if not change.key.startswith(b"last")
        }
        assert found == expected


@pytest.mark.slow
def test_outcomes_that_a_killed_server_left_unknown_are_found_out_from_its_successor(tmp_path: Path) -> None:
    ledger, stopping = Ledger(), Event()
    with killed_at_the_end(start_server(tmp_path / "site")) as server:
        url = server[0].said
        with floodmark.connect(url) as site:
            site.create_namespace("users")
        threads = [Thread(target=ledger.transact, args=(url, number, stopping)) for number in range(4)]
        for thread in threads:
            thread.start()
        try:
            # It is chance whether a kill meets a commit that is under way.
            for kills in range(KILLS_MAX):
                if kills >= 2 and ledger.unknown:
                    break
                wait_until(partial(ledger.has, len(ledger.committed) + 50), "too little is committed")
                server[0].kill()
                server[0] = start_server(tmp_path / "site", url.removeprefix("grpc://"))
        finally:
            stopping.set()
            for thread in threads:
                thread.join(HANG_SECONDS)
        with floodmark.connect(url) as site:
            ledger.check(site)
    assert ledger.unknown


@contextmanager
def killed_at_the_end(process: Process) -> Iterator[list[Process]]:
    """A process that a test may replace by another."""
    running = [process]
    try:
        yield running
    finally:
        running[0].kill()
