"""The coordinators of a site: opened, looked at, switched and closed while others use them."""

from collections.abc import Iterator
from datetime import timedelta
from threading import Event, Thread, current_thread
from threading import enumerate as enumerate_threads
from typing import Any

import pytest
from tests.coordinating import begin_for_client
from tests.site.support import HookedEngine, host_of
from tests.transaction.support import decide
from tests.waiting import HANG_SECONDS, wait_until

from floodmark import Site, SubscriptionOptions
from floodmark.clock import monotonic_ms
from floodmark.feed.subscription import store as subscription_store
from floodmark.host import coordination as transacting
from floodmark.host import transaction_logs
from floodmark.host.background import Background
from floodmark.host.coordination import LocalTransactions
from floodmark.host.transaction_port import BatchUpdate, LogKind
from floodmark.log import BatchedWriter, OpenLog, StoredLedger, holds_batches, open_log
from floodmark.log.base import NO_MARKS, EntryId, Marks
from floodmark.model.errors import (
    AcknowledgementConflict,
    Closed,
    Corruption,
    InvalidArgument,
    Retryable,
    TransactionEnded,
)
from floodmark.model.transaction import TransactionState, TransactionStatistics
from floodmark.model.version import Version
from floodmark.site import Transaction, open_engine
from floodmark.testing import SimulatedCrash
from floodmark.testing.ledgers import EngineStore
from floodmark.transaction import LEDGERS, TransactionCoordinator

HOUR, NO_AGE = timedelta(hours=1), timedelta(0)
OFF = BatchUpdate(enabled=False)


@pytest.fixture
def engine() -> HookedEngine:
    return HookedEngine()


@pytest.fixture
def site(engine: HookedEngine) -> Iterator[Site]:
    site = open_site(engine)
    yield site
    site.close()


def open_site(engine: HookedEngine, *, background: bool = False) -> Site:
    return open_engine(engine, site="oslo", site_id=7, background=background)


def own(site: Site) -> LocalTransactions:
    return host_of(site).transactions


class Gate:
    """A thread waits here until a test lets it pass."""

    def __init__(self) -> None:
        self.entered, self.opened = Event(), Event()

    def wait(self) -> None:
        self.entered.set()
        assert self.opened.wait(HANG_SECONDS)


# Switching


def gate_appends(writer: BatchedWriter[Any], monkeypatch: pytest.MonkeyPatch) -> Gate:
    gate, append = Gate(), writer.ledger.append

    def wait_and_append(entry: bytes, marks: Marks = NO_MARKS) -> EntryId:
        gate.wait()
        return append(entry, marks)

    monkeypatch.setattr(writer.ledger, "append", wait_and_append)
    return gate


def test_batching_is_off_when_no_batched_entry_is_to_come(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.transaction(coordinator=0).abort()
    writer = own(site).coordinators[0].log
    gate = gate_appends(writer, monkeypatch)
    begin = Thread(target=lambda: site.transactions.begin(HOUR, 0))
    begin.start()
    assert gate.entered.wait(HANG_SECONDS)
    seen: list[bool] = []

    def disable() -> None:
        site.transactions.set_batching(LogKind.COORDINATOR, OFF)
        seen.append(site.transactions.logs()[0].holds_batches)

    disabling = Thread(target=disable)
    disabling.start()
    wait_until(lambda: not writer.enabled, "the writer is not switched off")
    wait_until(lambda: bool(writer._flushing or seen), "the writer does not flush")
    gate.opened.set()
    disabling.join(HANG_SECONDS)
    begin.join(HANG_SECONDS)
    assert seen == [True], "the entry that was on its way is told of"


def test_whoever_switches_behind_a_disk_that_hangs_hears_it_and_can_ask_again(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.transaction(coordinator=0).abort()
    gate = gate_appends(own(site).coordinators[0].log, monkeypatch)
    begin = Thread(target=lambda: site.transactions.begin(HOUR, 0))
    begin.start()
    assert gate.entered.wait(HANG_SECONDS)
    with monkeypatch.context() as patch:
        patch.setattr(transaction_logs, "FLUSH_MS_MAX", 1)
        with pytest.raises(Retryable, match=r"changed for what comes.*on their way.*try again"):
            site.transactions.set_batching(LogKind.COORDINATOR, OFF)
    assert not site.transactions.batching(LogKind.COORDINATOR).enabled
    gate.opened.set()
    assert not site.transactions.set_batching(LogKind.COORDINATOR, OFF).enabled
    begin.join(HANG_SECONDS)


def test_a_coordinator_that_is_opened_meanwhile_is_switched_too(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()

    def open_slowly(*arguments: Any, **named: Any) -> TransactionCoordinator:
        opened = TransactionCoordinator(*arguments, **named)
        gate.wait()
        return opened

    monkeypatch.setattr(transacting, "TransactionCoordinator", open_slowly)
    begin = Thread(target=lambda: site.transactions.begin(HOUR, 3))
    begin.start()
    assert gate.entered.wait(HANG_SECONDS)
    site.transactions.set_batching(LogKind.COORDINATOR, OFF)
    gate.opened.set()
    begin.join(HANG_SECONDS)
    (report,) = site.transactions.logs()
    assert (report.settings.enabled, report.holds_batches) == (False, False)


def test_a_log_of_acknowledgements_that_is_opened_meanwhile_is_switched_too(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, logs, opened = Gate(), own(site)._logs, list[OpenLog[Any]]()

    def open_slowly(*arguments: Any, **named: Any) -> OpenLog[Any]:
        log = open_log(*arguments, **named)
        gate.wait()
        return log

    monkeypatch.setattr(transaction_logs, "open_log", open_slowly)
    opening = Thread(target=lambda: opened.append(logs.open_pending("indexer")))
    opening.start()
    assert gate.entered.wait(HANG_SECONDS)
    site.transactions.set_batching(LogKind.PENDING_ACK, OFF)
    gate.opened.set()
    opening.join(HANG_SECONDS)
    assert not opened[0].writer.enabled
    site.transactions.set_batching(LogKind.PENDING_ACK, BatchUpdate(enabled=True))
    assert opened[0].writer.enabled
    assert not holds_batches(opened[0].ledger)


# Opening


def cut_off_in_its_commit(transaction: Transaction, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a commit end between its prepared write and its decision, as kill -9 does."""

    def kill(*_: Any, **__: Any) -> Version:
        raise SimulatedCrash("kill -9")

    with monkeypatch.context() as patch:
        patch.setattr(TransactionCoordinator, "commit", kill)
        with pytest.raises(SimulatedCrash):
            transaction.commit()


@pytest.mark.parametrize("background", [True, False])
def test_a_commit_that_a_crash_cut_off_holds_nothing_back_once_the_site_is_opened_again(
    engine: HookedEngine, background: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_site(engine) as site:
        users = site.create_namespace("users")
        users.put(b"ada", b"before")
        with site.subscribe("counting", "users", options=SubscriptionOptions(follow=False)) as subscription:
            transaction = begin_for_client(site, HOUR)
            transaction.acknowledge(next(subscription))
            transaction.put(users, b"ada", b"countess")
            cut_off_in_its_commit(transaction, monkeypatch)
        assert site.resolved_version() < site.now() - 1
        crashed = engine.crashed()
    # Whatever the sweeps do, they come later.
    monkeypatch.setattr(TransactionCoordinator, "wait_work", lambda _: False)
    with open_site(crashed, background=background) as again:
        before = again.now()
        assert again.resolved_version() >= before
        assert dict(again.namespace("users").scan()) == {b"ada": b"before"}
        own(again).sweep()
        assert pending(again) == []
        with pytest.raises(TransactionEnded, match="restarted in the middle of its commit"):
            again.transactions.commit(transaction.id, [])
        assert again.transactions.show(transaction.id).state is TransactionState.ABORTED


def test_what_a_process_acknowledged_that_has_ended_is_available_again_at_once(engine: HookedEngine) -> None:
    with open_site(engine) as site:
        site.create_namespace("messages").put(b"ada/1", b"hello")
        with site.subscribe(
            "counting", "messages", options=SubscriptionOptions(follow=False)
        ) as subscription:
            transaction = site.transaction(timeout=HOUR)
            transaction.acknowledge(next(subscription))
        assert pending(site) == [transaction.id]
    engine.reopen()
    with open_site(engine) as again:
        assert pending(again) == []
        assert again.transactions.show(transaction.id).reason == "the process that began it has ended"


def leave_half_way(site: Site, count: int) -> list[str]:
    """Transactions with an acknowledgement each: committed, aborted and open ones.  Nobody was told."""
    messages = site.create_namespace("messages")
    for number in range(3 * count):
        messages.put(b"%d" % number, b"hello")
    ids: list[str] = []
    with site.subscribe("counting", "messages", options=SubscriptionOptions(follow=False)) as subscription:
        for delivery in subscription:
            transaction = begin_for_client(site, HOUR)
            transaction.acknowledge(delivery)
            ids.append(transaction.id)
    coordinator = own(site).coordinators[0]
    for each in ids[0::3]:
        decide(coordinator, each, site.now())
    for each in ids[1::3]:
        decide(coordinator, each)
    return ids


def pending(site: Site) -> list[str]:
    """The transactions of acknowledgements that are pending."""
    return [each.transaction for each in host_of(site).subscriptions.pending("counting")]


def test_a_site_with_much_that_is_half_way_is_opened_at_once_and_goes_on_in_the_background(
    engine: HookedEngine,
) -> None:
    count = 15
    site = open_site(engine)
    ids = leave_half_way(site, count)
    site.close()
    engine.reopen()
    syncs: list[str] = []
    engine.before = lambda operation: (
        syncs.append(operation) if operation == "sync" and current_thread() is opener else None
    )
    opener = current_thread()
    site = open_site(engine, background=True)
    assert len(syncs) < count, "not one for each of them"
    wait_until(lambda: len(site.transactions.list(NO_AGE)) == count, "there are not so many transactions")
    assert {each.state for each in site.transactions.list(NO_AGE)} == {TransactionState.OPEN}
    assert pending(site) == ids[2::3]
    site.close()


def test_acknowledgements_of_transactions_that_nobody_knows_are_available_again_at_once(
    engine: HookedEngine,
) -> None:
    site = open_site(engine)
    committing, aborting, transaction = leave_half_way(site, 1)
    coordinator = own(site).coordinators[0]
    # As if a crash had come between the end of the transaction and that of its acknowledgement.
    coordinator._ending._end([coordinator._book.held[transaction]])
    assert pending(site) == [committing, aborting, transaction]
    site.close()
    engine.reopen()
    site = open_site(engine, background=True)
    assert transaction not in pending(site)
    site.close()


@pytest.mark.parametrize("way", ["seek", "remove"])
def test_a_subscription_is_moved_or_removed_though_decided_transactions_were_not_told_yet(
    engine: HookedEngine, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sweeps of a site that was just opened have not come to them."""
    site = open_site(engine)
    ids = leave_half_way(site, 4)
    for transaction in ids[2::3]:
        decide(own(site).coordinators[0], transaction, site.now())
    site.close()
    engine.reopen()
    monkeypatch.setattr(TransactionCoordinator, "sweep", lambda _: None)
    monkeypatch.setattr(TransactionCoordinator, "wait_work", lambda _: False)
    site = open_site(engine, background=True)
    assert pending(site) == ids
    if way == "seek":
        site.subscriptions.seek("counting", "end")
        assert pending(site) == []
    else:
        site.subscriptions.remove("counting")
        assert site.subscriptions.list() == []
    site.close()


def test_of_very_many_decided_transactions_some_are_ended_at_a_time(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = leave_half_way(site, 3)
    monkeypatch.setattr(subscription_store, "SETTLED_MAX", 1)
    for left in (8, 7):
        with pytest.raises(Retryable, match=f"{left + 1} transactions .* try again") as raised:
            site.subscriptions.seek("counting", "end")
        assert not isinstance(raised.value, AcknowledgementConflict)
        assert len(pending(site)) == left
    with pytest.raises(AcknowledgementConflict, match=f"such as {ids[2]}"):
        site.subscriptions.seek("counting", "end")


def test_a_site_that_cannot_be_opened_leaves_no_thread_behind(engine: HookedEngine) -> None:
    with open_site(engine) as site:
        for number in (0, 1):
            site.transactions.begin(HOUR, number, owner="c" * 16)
    engine.reopen()
    before = set(enumerate_threads())
    wrong: Any = "sometimes"
    with pytest.raises(InvalidArgument):
        open_engine(engine, site="oslo", site_id=7, durability=wrong, background=True)
    engine.reopen()
    StoredLedger(EngineStore(engine), f"{LEDGERS}1").append(b"no record")
    with pytest.raises(Corruption):
        open_site(engine, background=True)
    assert set(enumerate_threads()) <= before


def test_a_site_whose_threads_cannot_be_started_leaves_none_behind(
    engine: HookedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_site(engine) as site:
        site.transactions.begin(HOUR, 0, owner="c" * 16)
    engine.reopen()
    before = set(enumerate_threads())

    def fail(_: Background) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(Background, "start", fail)
    with pytest.raises(RuntimeError):
        open_site(engine, background=True)
    assert set(enumerate_threads()) <= before


# Looking


def test_looking_is_not_disturbed_by_coordinators_that_are_opened(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        site.transactions.begin(HOUR, number)
    find = TransactionCoordinator.transactions

    def open_another(
        coordinator: TransactionCoordinator, *, older_than: timedelta
    ) -> list[TransactionStatistics]:
        site.transactions.begin(HOUR, coordinator.number + 10)
        return find(coordinator, older_than=older_than)

    monkeypatch.setattr(TransactionCoordinator, "transactions", open_another)
    assert len(site.transactions.list(NO_AGE)) == 3
    assert own(site).count().states == {TransactionState.OPEN: 6}


def test_looking_does_not_wait_for_a_coordinator_that_is_being_opened(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    transaction = site.transactions.begin(HOUR, 0)
    gate = Gate()

    def open_slowly(*arguments: Any, **named: Any) -> TransactionCoordinator:
        gate.wait()
        return TransactionCoordinator(*arguments, **named)

    monkeypatch.setattr(transacting, "TransactionCoordinator", open_slowly)
    begin = Thread(target=lambda: site.transactions.begin(HOUR, 1))
    begin.start()
    assert gate.entered.wait(HANG_SECONDS)
    assert [each.id for each in site.transactions.list(NO_AGE)] == [transaction]
    assert len(site.transactions.logs()) == 1
    assert site.transactions.begin(HOUR, 0) != transaction, "others go on"
    gate.opened.set()
    begin.join(HANG_SECONDS)


def test_transactions_of_all_coordinators_are_counted(site: Site) -> None:
    assert own(site).count().states == {}
    for number in (0, 0, 5):
        site.transactions.begin(HOUR, number)
    decide(own(site).coordinators[5], site.transactions.list(NO_AGE)[-1].id, 5)
    counts = own(site).count()
    assert counts.states == {TransactionState.OPEN: 2, TransactionState.COMMITTING: 1}
    assert counts.oldest_age_ms >= 0


# Sweeping by hand


def test_a_site_without_background_is_swept_by_its_owner(site: Site) -> None:
    site.create_namespace("messages").put(b"ada/1", b"hello")
    transactions = site.transactions
    assert isinstance(transactions, LocalTransactions)
    options = SubscriptionOptions(follow=False, background=False)
    with site.subscribe("counting", "messages", options=options) as subscription:
        transaction = site.transaction(timeout=HOUR)
        transaction.acknowledge(next(subscription))
        coordinator = own(site).coordinators[0]
        coordinator._growing_ms = coordinator._book.growing_ms = lambda: monotonic_ms() + 3_600_000
        assert [each.state for each in transactions.list(NO_AGE)] == [TransactionState.OPEN]
        transactions.sweep()
        assert transactions.list(NO_AGE) == []
        assert pending(site) == []
        assert transactions.show(transaction.id).reason == "its time was over"


# Closing


def test_one_coordinator_that_cannot_be_closed_keeps_no_other_from_it(
    engine: HookedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = open_site(engine, background=True)
    for number in range(3):
        site.transactions.begin(HOUR, number)
    transactions = own(site)
    close = TransactionCoordinator.close

    def fail_at_first(coordinator: TransactionCoordinator) -> None:
        close(coordinator)
        if coordinator.number != 1:
            raise ZeroDivisionError(f"closing {coordinator.number}")

    monkeypatch.setattr(TransactionCoordinator, "close", fail_at_first)
    with pytest.raises(ZeroDivisionError):
        transactions.close()
    for coordinator in transactions.coordinators.values():
        with pytest.raises(Closed):
            coordinator.begin()
    assert not any(thread.is_alive() for thread in transactions._threads)
    monkeypatch.undo()
    site.close()


def test_nothing_is_opened_once_it_was_closed(site: Site) -> None:
    transactions = own(site)
    site.transactions.begin(HOUR, 0)
    transactions.close()
    for number in (0, 1):
        with pytest.raises(Closed, match="open it again"):
            transactions.begin(HOUR, number)
    assert list(transactions.coordinators) == [0]


def test_a_transaction_takes_locks_at_once_and_waits_for_them_in_order(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gives back what it holds before it waits, so that no two transactions wait for each other."""
    users = site.create_namespace("users")
    site.split("users", b"m")
    partitions, writes = host_of(site).node.map.partitions, host_of(site).node.committer.prepared
    other = own(site).begin(HOUR, 0)
    key = users.id.to_bytes(3, "big") + b"zoe"
    partitions[1].prepare(other, [key], [b"other\x00"])
    tried: list[tuple[int, bool, list[str]]] = []

    for place, partition in enumerate(partitions):

        def prepare(
            *arguments: Any, waits: bool, batch: bool, place: int = place, real: Any = partition.prepare
        ) -> Version:
            held = [each.transaction for some in partitions for each in writes.within(some.range)]
            tried.append((place, waits, held))
            if place == 1 and waits:
                own(site).abort(other, "it gives way")
            prepared: Version = real(*arguments, waits=waits, batch=batch)
            return prepared

        monkeypatch.setattr(partition, "prepare", prepare)
    with site.transaction(coordinator=0) as transaction:
        transaction.put(users, b"ada", b"1")
        transaction.put(users, b"zoe", b"1")
    name = transaction.id
    assert tried == [
        (0, False, [other]),
        (1, False, [name, other]),
        (0, True, [other]),
        (1, True, [name, other]),
    ]
    assert users.get_many([b"ada", b"zoe"]) == [b"1", b"1"]


@pytest.mark.parametrize("coordinator", [None, 0])
def test_a_transaction_that_was_committed_in_its_block_is_not_committed_again(
    site: Site, coordinator: int | None
) -> None:
    users = site.create_namespace("users")
    with site.transaction(coordinator=coordinator) as transaction:
        transaction.put(users, b"ada", b"1")
        version = transaction.commit()
    assert transaction.version == version
    record = users.record(b"ada")
    assert record is not None
    assert record.version == version
