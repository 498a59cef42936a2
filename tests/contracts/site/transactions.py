"""The site's contract: transactions of writes and acknowledgements."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
from tests.contracts.site.base import SiteContractBase
from tests.contracts.site.subscriptions import BY_HAND, keys
from tests.waiting import wait_until

from floodmark.feed.subscription.consumer import Subscription
from floodmark.host.transaction_port import BatchUpdate, LogKind
from floodmark.model.errors import (
    AcknowledgementConflict,
    Closed,
    CommitTooLarge,
    InvalidArgument,
    Retryable,
    TransactionEnded,
    TransactionNotFound,
)
from floodmark.model.limits import TRANSACTION_BYTES_MAX, VALUE_BYTES_MAX
from floodmark.model.transaction import ParticipantKind, TransactionState
from floodmark.site import CounterNamespace, Namespace, Site, Transaction

NO_AGE = timedelta(0)


class TransactionContract(SiteContractBase):
    """Together or not at all."""

    @pytest.fixture
    def unread(self, site: Site) -> CounterNamespace:
        """A namespace of counters."""
        return site.create_namespace("unread", merge="counter")

    # Writes

    def test_the_writes_of_a_transaction_are_one_commit(
        self, site: Site, users: Namespace, unread: CounterNamespace
    ) -> None:
        users.put(b"bob", b"builder")
        with site.transaction() as transaction:
            transaction.put(users, b"ada", b"countess")
            transaction.delete(users, b"bob")
            transaction.add(unread, b"ada", 2)
            transaction.add(unread, b"ada", 3)
            assert users.get(b"ada") is None
        assert (users.get(b"ada"), users.get(b"bob"), unread.get(b"ada")) == (b"countess", None, 5)
        written = [change for change in site.changes() if change.version == transaction.version]
        assert [change.key for change in written] == [b"ada", b"bob", b"ada"]
        assert users.get(b"ada", at=transaction.version - 1) is None
        assert users.get(b"ada", at=transaction.version) == b"countess"

    def test_nothing_is_seen_of_a_transaction_that_is_aborted(self, site: Site, users: Namespace) -> None:
        transaction = site.transaction()
        transaction.put(users, b"ada", b"countess")
        transaction.abort()
        transaction.abort()
        assert users.get(b"ada") is None
        with pytest.raises(Closed):
            transaction.put(users, b"ada", b"x")
        with pytest.raises(Closed):
            transaction.commit()

    def test_a_block_that_fails_aborts(self, site: Site, users: Namespace) -> None:
        transaction = site.transaction(coordinator=0)
        with pytest.raises(ZeroDivisionError), transaction:
            transaction.put(users, b"ada", b"%d" % (1 // 0))
        assert users.get(b"ada") is None
        shown = site.transactions.show(transaction.id)
        assert shown.state is TransactionState.ABORTED
        assert "ZeroDivisionError" in shown.reason

    def test_a_transaction_without_writes_commits_nothing(self, site: Site, users: Namespace) -> None:
        users.put(b"ada", b"x")
        with site.transaction() as transaction:
            assert transaction.get(users, b"ada") == b"x"
        assert (transaction.version, transaction.id) == (0, "")
        assert list(site.transactions.list(NO_AGE)) == []

    @pytest.mark.parametrize("coordinator", [None, 0], ids=["one round", "coordinated"])
    def test_writes_to_several_partitions_are_one_commit(
        self, site: Site, users: Namespace, coordinator: int | None
    ) -> None:
        site.split("users", b"m")
        with site.transaction(coordinator=coordinator) as transaction:
            transaction.put(users, b"ada", b"x")
            transaction.put(users, b"zoe", b"x")
        found = [(change.key, change.version) for change in site.changes("users")]
        assert found == [(b"ada", transaction.version), (b"zoe", transaction.version)]
        assert list(site.transactions.list(NO_AGE)) == []

    def test_a_commit_by_another_without_its_writes_is_told_to_its_owner(
        self, site: Site, users: Namespace, unread: CounterNamespace
    ) -> None:
        users.put(b"a", b"x")
        with self.subscribed(site) as subscription:
            transaction = site.transaction()
            transaction.add(unread, b"ada")
            transaction.acknowledge(next(subscription))
            site.transactions.commit(transaction.id, [])
            with pytest.raises(TransactionEnded, match="committed without these writes"):
                transaction.commit()
            # It is acknowledged, so nobody gets it again.
            assert keys(subscription) == []
        assert unread.get(b"ada") is None

    def test_a_write_too_much_is_refused_and_the_others_are_committed(
        self, site: Site, users: Namespace
    ) -> None:
        transaction = site.transaction()
        full, rest = divmod(TRANSACTION_BYTES_MAX, VALUE_BYTES_MAX)
        assert rest == 0
        for number in range(full - 1):
            transaction.put(users, b"%02d" % number, bytes(VALUE_BYTES_MAX))
        # Each has a key of two bytes with a namespace of three, and a value with a byte of flags.
        rest = VALUE_BYTES_MAX - full * (2 + 3 + 1)
        with pytest.raises(CommitTooLarge, match=f"{TRANSACTION_BYTES_MAX:,}"):
            transaction.put(users, b"zz", bytes(rest + 1))
        transaction.put(users, b"zz", bytes(rest))
        with pytest.raises(CommitTooLarge):
            transaction.put(users, b"y", b"")
        transaction.put(users, b"zz", b"small")
        transaction.put(users, b"y", b"one more")
        transaction.put(users, b"zz", bytes(rest - len(b"y" + b"one more") - 4))
        transaction.commit()
        assert (users.get(b"y"), users.get(b"00")) == (b"one more", bytes(VALUE_BYTES_MAX))

    def test_a_namespace_that_was_made_again_is_not_written_to(self, site: Site, users: Namespace) -> None:
        transaction = site.transaction()
        transaction.put(users, b"ada", b"x")
        site.drop_namespace("users")
        again = site.create_namespace("users")
        with pytest.raises(Exception, match="dropped"):
            transaction.commit()
        assert again.get(b"ada") is None

    def test_work_that_meets_another_transaction_is_done_again(self, site: Site, users: Namespace) -> None:
        attempts: list[Transaction] = []

        def work(transaction: Transaction) -> str:
            attempts.append(transaction)
            transaction.put(users, b"ada", b"countess")
            if len(attempts) < 3:
                raise Retryable("someone is in the way")
            return "done"

        assert site.run_transaction(work) == "done"
        assert users.get(b"ada") == b"countess"
        assert len(set(map(id, attempts))) == 3

    # Acknowledgements

    @contextmanager
    def subscribed(self, site: Site) -> Iterator[Subscription]:
        """The consumer that the tests have."""
        with site.subscribe("indexer", "users", options=BY_HAND) as subscription:
            yield subscription

    def test_what_is_acknowledged_in_a_transaction_is_done_with_its_commit(
        self, site: Site, users: Namespace, unread: CounterNamespace
    ) -> None:
        users.put_many(dict.fromkeys([b"a", b"b", b"c"], b"x"))
        with self.subscribed(site) as subscription:
            first, second, third = subscription
            with site.transaction() as transaction:
                transaction.add(unread, b"ada")
                transaction.acknowledge(first, third)
            subscription.redeliver()
            assert keys(subscription) == [b"b"]
        assert unread.get(b"ada") == 1
        with self.subscribed(site) as subscription:
            assert keys(subscription) == [b"b"]
        assert second.change.key == b"b"

    def test_what_an_aborted_transaction_acknowledged_is_delivered_again(
        self, site: Site, users: Namespace
    ) -> None:
        users.put_many(dict.fromkeys([b"a", b"b", b"c"], b"x"))
        with self.subscribed(site) as subscription:
            _, second, _ = subscription
            transaction = site.transaction()
            transaction.acknowledge_through(second)
            subscription.redeliver()
            assert keys(subscription) == [b"c"]
            transaction.abort()
            assert keys(subscription) == [b"a", b"b"]

    def test_the_next_consumer_waits_for_what_is_pending(self, site: Site, users: Namespace) -> None:
        users.put_many(dict.fromkeys([b"a", b"b"], b"x"))
        transaction = site.transaction()
        with self.subscribed(site) as subscription:
            transaction.acknowledge(next(subscription))
        with self.subscribed(site) as subscription:
            assert keys(subscription) == [b"b"]
            site.transactions.abort(transaction.id, "by an operator")
            subscription.redeliver()
            assert keys(subscription) == [b"a", b"b"]

    def test_two_transactions_cannot_acknowledge_the_same(self, site: Site, users: Namespace) -> None:
        users.put_many(dict.fromkeys([b"a", b"b"], b"x"))
        with self.subscribed(site) as subscription:
            first, second = subscription
            one, other = site.transaction(), site.transaction()
            one.acknowledge(first)
            with pytest.raises(AcknowledgementConflict):
                other.acknowledge(first)
            with pytest.raises(AcknowledgementConflict):
                other.acknowledge_through(second)
            other.acknowledge(second)
            one.commit()
            other.commit()
            subscription.redeliver()
            assert keys(subscription) == []
            with pytest.raises(AcknowledgementConflict):
                site.transaction().acknowledge(first)

    # Their end

    def test_an_operator_ends_a_transaction_and_its_owner_hears_of_it(
        self, site: Site, users: Namespace
    ) -> None:
        users.put(b"a", b"x")
        with self.subscribed(site) as subscription:
            delivery = next(subscription)
            transaction = site.transaction()
            transaction.acknowledge(delivery)
            transaction.put(users, b"ada", b"x")
            (listed,) = site.transactions.list(NO_AGE)
            assert (listed.id, listed.state) == (transaction.id, TransactionState.OPEN)
            assert [each.kind for each in listed.participants] == [ParticipantKind.SUBSCRIPTION]
            site.transactions.abort(transaction.id, "too slow")
            assert list(site.transactions.list(NO_AGE)) == []
            with pytest.raises(TransactionEnded, match="too slow"):
                transaction.commit()
            assert keys(subscription) == [b"a"]
        assert users.get(b"ada") is None

    def test_a_transaction_that_is_over_its_time_is_aborted(self, site: Site, users: Namespace) -> None:
        transaction = site.transaction(timeout=timedelta(milliseconds=1), coordinator=0)
        transaction.put(users, b"ada", b"x")

        def is_over() -> bool:
            return site.transactions.show(transaction.id).remaining_ms == 0

        wait_until(is_over, "the end of its time")
        with pytest.raises(TransactionEnded):
            transaction.commit()
        assert users.get(b"ada") is None

    def test_what_is_decided_cannot_be_turned(self, site: Site, users: Namespace) -> None:
        with site.transaction(coordinator=0) as transaction:
            transaction.put(users, b"ada", b"x")
        with pytest.raises(TransactionEnded):
            site.transactions.abort(transaction.id, "too late")
        with pytest.raises(InvalidArgument, match="the same writes"):
            site.transactions.commit(transaction.id, [])
        assert users.get(b"ada") == b"x"

    def test_who_is_not_there_is_not_found(self, site: Site) -> None:
        for wrong in ("", "0", "0-7", "999999-7", "nonsense"):
            with pytest.raises(TransactionNotFound):
                site.transactions.show(wrong)
        for coordinator in (-1, 1_000):
            with pytest.raises(InvalidArgument):
                site.transaction(coordinator=coordinator)
        for timeout in (timedelta(0), timedelta(days=2)):
            with pytest.raises(InvalidArgument):
                site.transaction(timeout=timeout)

    # Logs

    def test_the_logs_hold_what_is_open_and_nothing_else(self, site: Site, users: Namespace) -> None:
        users.put(b"a", b"x")
        with self.subscribed(site) as subscription:
            transaction = site.transaction(coordinator=3)
            transaction.acknowledge(next(subscription))
            logs = {(report.log, report.owner): report for report in site.transactions.logs()}
            assert logs.keys() == {(LogKind.COORDINATOR, "3"), (LogKind.PENDING_ACK, "indexer")}
            kinds = [each.kind for each in site.transactions.log_records(LogKind.COORDINATOR, "3", 10)]
            assert kinds == ["begun", "joined"]
            (record,) = site.transactions.log_records(LogKind.PENDING_ACK, "indexer", 10)
            assert record.transaction == transaction.id
            transaction.commit()
        for report in site.transactions.logs():
            assert (report.live_records, report.oldest_live, report.holds_batches) == (0, None, False)
            assert sum(segment.entries for segment in report.segments) == 0

    def test_batching_is_switched_while_transactions_are_open(self, site: Site, users: Namespace) -> None:
        first = site.transaction(coordinator=0)
        settings = site.transactions.set_batching(LogKind.COORDINATOR, BatchUpdate(enabled=False))
        assert settings.enabled is False
        second = site.transaction(coordinator=0)
        (report,) = site.transactions.logs()
        assert (report.settings.enabled, report.holds_batches) == (False, True)
        first.commit()
        (report,) = site.transactions.logs()
        assert report.holds_batches is False
        second.commit()
        assert site.transactions.batching(LogKind.PENDING_ACK).enabled is True
        with pytest.raises(InvalidArgument):
            site.transactions.set_batching(LogKind.COORDINATOR, BatchUpdate(max_records=0))
