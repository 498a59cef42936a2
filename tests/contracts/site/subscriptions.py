"""The site's contract: durable subscriptions."""

from collections.abc import Iterable
from datetime import timedelta
from threading import Event

from tests.contracts.site.base import SiteContractBase, age, oldest, refused
from tests.waiting import HANG_SECONDS, run_threads, wait_until

from floodmark.feed.leased import Lease
from floodmark.feed.subscription.acknowledgement import Acknowledgement, ChangePosition
from floodmark.feed.subscription.consumer import Delivery, Subscription, SubscriptionOptions
from floodmark.feed.subscription.pending import PendingAcknowledgement
from floodmark.feed.subscription.subscriptions import (
    SubscriptionRow,
    SubscriptionSpec,
    SubscriptionStatistics,
)
from floodmark.model.actions import SITE_OWNER
from floodmark.model.change import Change
from floodmark.model.errors import (
    AcknowledgementConflict,
    Closed,
    InvalidArgument,
    LeaseHeld,
    SubscriptionNotFound,
    VersionCollected,
    VersionInFuture,
)
from floodmark.model.ranges import KeyRange
from floodmark.model.version import compose, moment_of
from floodmark.site import Namespace, Site
from floodmark.testing.clock import SimulatedTime

# Nothing happens unless the test does it, and iterating ends at the present.
BY_HAND = SubscriptionOptions(follow=False, background=False)
LEASE_MS = 30_000


def keys(deliveries: Iterable[Delivery]) -> list[bytes]:
    """The keys of what was delivered, in order."""
    return [delivery.change.key for delivery in deliveries]


class SubscriptionContract(SiteContractBase):
    """Every change until it is acknowledged, to one consumer at a time."""

    def test_changes_are_delivered_in_order_with_their_positions(self, site: Site, users: Namespace) -> None:
        first = users.put(b"ada", b"countess")
        second = users.put_many({b"bob": b"builder", b"carl": b"composer"})
        with site.subscribe("indexer", "users", start="beginning", options=BY_HAND) as subscription:
            assert type(subscription) is Subscription
            assert (subscription.name, subscription.namespace) == ("indexer", "users")
            deliveries = list(subscription)
        assert [delivery.change for delivery in deliveries] == list(site.changes("users"))
        assert [type(delivery.change) for delivery in deliveries] == [Change] * 3
        assert [delivery.position for delivery in deliveries] == [
            ChangePosition(first, 0),
            ChangePosition(second, 0),
            ChangePosition(second, 1),
        ]
        assert not any(delivery.is_redelivered for delivery in deliveries)

    def test_what_was_acknowledged_is_not_delivered_again(self, site: Site, users: Namespace) -> None:
        users.put_many(dict.fromkeys([b"a", b"b", b"c", b"d", b"e"], b"x"))
        with site.subscribe("indexer", "users", options=BY_HAND) as subscription:
            for delivery in subscription:
                if delivery.change.key in (b"b", b"d"):
                    delivery.acknowledge()
                    delivery.acknowledge()
        users.put(b"f", b"x")
        with site.subscribe("indexer", "users", options=BY_HAND) as subscription:
            deliveries = list(subscription)
            assert keys(deliveries) == [b"a", b"c", b"e", b"f"]
            assert [delivery.is_redelivered for delivery in deliveries] == [True, True, True, False]
            subscription.acknowledge(deliveries[1].position)
        with site.subscribe("indexer", "users", options=BY_HAND) as subscription:
            deliveries = list(subscription)
            assert keys(deliveries) == [b"a", b"e", b"f"]
            subscription.acknowledge_through(deliveries[1])
        with site.subscribe("indexer", "users", options=BY_HAND) as subscription:
            assert keys(subscription) == [b"f"]

    def test_redelivery_can_be_asked_for(self, site: Site, users: Namespace) -> None:
        for key in (b"a", b"b", b"c"):
            users.put(key, b"x")
        with site.subscribe("indexer", "users", options=BY_HAND) as subscription:
            first, *_ = subscription
            first.acknowledge()
            subscription.redeliver()
            users.put(b"d", b"x")
            deliveries = list(subscription)
            assert keys(deliveries) == [b"b", b"c", b"d"]
            assert [delivery.is_redelivered for delivery in deliveries] == [True, True, False]

    def test_subscription_begins_where_it_is_told_to(
        self, site: Site, users: Namespace, time: SimulatedTime
    ) -> None:
        first = users.put(b"a", b"x")
        time.advance(10)
        users.put(b"b", b"x")
        starts = {"beginning": [b"a", b"b"], first: [b"b"], moment_of(first): [b"b"], "end": []}
        for number, (start, expected) in enumerate(starts.items()):
            with site.subscribe(f"reader-{number}", "users", start=start, options=BY_HAND) as subscription:  # type: ignore[arg-type]
                assert keys(subscription) == expected
        # One that is there goes on where it was.
        with site.subscribe("reader-3", "users", start="beginning", options=BY_HAND) as subscription:
            users.put(b"c", b"x")
            assert keys(subscription) == [b"c"]

    def test_subscription_may_be_to_a_range_of_keys(self, site: Site, users: Namespace) -> None:
        users.put_many(dict.fromkeys([b"a", b"ab", b"abc", b"b", b"c"], b"x"))
        with site.subscribe("one", "users", start_key=b"ab", end_key=b"c", options=BY_HAND) as subscription:
            assert keys(subscription) == [b"ab", b"abc", b"b"]
        with site.subscribe("two", "users", prefix=b"ab", options=BY_HAND) as subscription:
            assert keys(subscription) == [b"ab", b"abc"]
        assert site.subscriptions.show("two").spec.keys == KeyRange(b"ab", b"ac")
        refused(
            InvalidArgument,
            lambda: site.subscribe("two", "users", prefix=b"b", options=BY_HAND),
            subscription="two",
        )

    def test_seek_goes_anywhere(self, site: Site, users: Namespace, time: SimulatedTime) -> None:
        versions = []
        for key in (b"a", b"b", b"c"):
            versions.append(users.put(key, b"x"))
            time.advance(10)
        with site.subscribe("indexer", "users", options=BY_HAND) as subscription:
            stale, *_ = list(subscription)
            subscription.seek(versions[1])
            stale.acknowledge()
            assert keys(subscription) == [b"c"]
            subscription.seek("beginning")
            assert keys(subscription) == [b"a", b"b", b"c"]
            subscription.seek(moment_of(versions[0]))
            assert keys(subscription) == [b"b", b"c"]
            subscription.seek("end")
            assert keys(subscription) == []
        moved = site.subscriptions.seek("indexer", versions[0])
        assert (type(moved), moved.through) == (SubscriptionRow, versions[0])
        with site.subscribe("indexer", "users", options=BY_HAND) as subscription:
            assert keys(subscription) == [b"b", b"c"]
        future = compose(time() + 10_000, 0)
        refused(VersionInFuture, lambda: site.subscriptions.seek("indexer", future), version=future)

    # One consumer at a time

    def test_second_consumer_is_refused_until_the_first_lets_go(
        self, site: Site, users: Namespace, time: SimulatedTime
    ) -> None:
        users.put(b"a", b"x")
        expected = {"subscription": "indexer", "holder": "one", "expires_at_ms": time() + LEASE_MS}
        with site.subscribe("indexer", "users", holder="one", options=BY_HAND):
            error = refused(
                LeaseHeld,
                lambda: site.subscribe("indexer", "users", holder="two", options=BY_HAND),
                **expected,
            )
            assert "subscription 'indexer' is consumed by one until" in str(error)
            refused(LeaseHeld, lambda: site.subscriptions.seek("indexer", "beginning"), **expected)
            refused(LeaseHeld, lambda: site.subscriptions.remove("indexer"), **expected)
        with site.subscribe("indexer", "users", holder="two", options=BY_HAND) as subscription:
            assert subscription.holder == "two"
            assert keys(subscription) == [b"a"]

    def test_consumer_that_is_not_heard_of_loses_its_lease(
        self, site: Site, users: Namespace, time: SimulatedTime
    ) -> None:
        users.put_many({b"a": b"x", b"b": b"x"})
        lost = site.subscribe("indexer", "users", holder="one", options=BY_HAND)
        deliveries = list(lost)
        time.advance(LEASE_MS - 1)
        deliveries[0].acknowledge()
        lost.flush()
        time.advance(LEASE_MS)
        with site.subscribe("indexer", "users", holder="two", options=BY_HAND) as found:
            assert keys(found) == [b"b"]
            deliveries[1].acknowledge()
            expected = {"subscription": "indexer", "holder": "two", "expires_at_ms": time() + LEASE_MS}
            refused(LeaseHeld, lost.flush, **expected)
            refused(LeaseHeld, lambda: next(lost), **expected)
            refused(LeaseHeld, lost.close, **expected)

    def test_consumer_of_the_same_name_takes_over_at_once(self, site: Site, users: Namespace) -> None:
        users.put(b"a", b"x")
        lost = site.subscribe("indexer", "users", holder="one", options=BY_HAND)
        with site.subscribe("indexer", "users", holder="one", options=BY_HAND) as found:
            assert keys(found) == [b"a"]

            def acknowledge() -> None:
                list(lost)
                lost.flush()

            error = refused(
                LeaseHeld,
                acknowledge,
                subscription="indexer",
                holder="one",
                expires_at_ms=site.subscriptions.show("indexer").lease.expires_at_ms,  # type: ignore[union-attr]
            )
            assert "consumed by one" in str(error)

    def test_closed_subscription_can_no_longer_be_used(self, site: Site, users: Namespace) -> None:
        users.put(b"a", b"x")
        subscription = site.subscribe("indexer", "users", options=BY_HAND)
        delivery = next(subscription)
        subscription.close()
        subscription.close()
        for ask in (
            lambda: next(subscription),
            delivery.acknowledge,
            subscription.flush,
            subscription.redeliver,
            lambda: subscription.seek("end"),
        ):
            assert "was closed; subscribe again" in str(refused(Closed, ask))

    # Limits and following

    def test_no_more_is_delivered_than_may_be_unacknowledged(self, site: Site, users: Namespace) -> None:
        users.put_many(dict.fromkeys([b"a", b"b", b"c", b"d", b"e"], b"x"))
        options = SubscriptionOptions(follow=False)
        got: list[Delivery] = []
        full = Event()

        with site.subscribe("indexer", "users", unacked_max=2, options=options) as subscription:

            def consume() -> None:
                for delivery in subscription:
                    got.append(delivery)
                    if len(got) == 2:
                        full.set()

            def acknowledge() -> None:
                assert full.wait(HANG_SECONDS)
                assert subscription.statistics().unacked == 2
                assert len(got) == 2
                for number in range(5):
                    wait_until(lambda number=number: len(got) > number, "nothing is delivered")  # type: ignore[misc]
                    got[number].acknowledge()

            run_threads(consume, acknowledge)
            assert keys(got) == [b"a", b"b", b"c", b"d", b"e"]
            assert subscription.statistics().unacked == 0

    def test_follower_gets_what_comes_and_ends_when_it_is_closed(self, site: Site, users: Namespace) -> None:
        subscription = site.subscribe("indexer", "users")
        got: list[bytes] = []

        def consume() -> None:
            for delivery in subscription:
                got.append(delivery.change.key)
                delivery.acknowledge()

        def write() -> None:
            for number in range(50):
                users.put(b"%02d" % number, b"x")
            wait_until(lambda: len(got) == 50, "not everything was delivered")
            subscription.close()

        run_threads(consume, write)
        assert got == [b"%02d" % number for number in range(50)]
        assert site.subscriptions.statistics("indexer").backlog == 0

    # What the site knows

    def test_subscriptions_are_shown_and_listed(
        self, site: Site, users: Namespace, time: SimulatedTime
    ) -> None:
        version = users.put(b"a", b"x")
        site.subscribe("second", "users", start=version, prefix=b"b", options=BY_HAND).close()
        with site.subscribe("first", "users", holder="me", unacked_max=7, options=BY_HAND):
            rows = site.subscriptions.list()
            assert [row.name for row in rows] == ["first", "second"]
            first = site.subscriptions.show("first")
            assert first == rows[0]
            assert type(first) is SubscriptionRow
            assert first.spec == SubscriptionSpec(name="first", namespace="users", unacked_max=7)
            assert type(first.spec.keys) is KeyRange
            assert first.lease == Lease(
                holder="me", expires_at_ms=time() + LEASE_MS, lifetime_ms=LEASE_MS, owner=SITE_OWNER
            )
        assert site.subscriptions.show("second").through == version
        assert site.subscriptions.show("second").lease is None

    def test_statistics_tell_what_is_left(self, site: Site, users: Namespace, time: SimulatedTime) -> None:
        users.put(b"a", b"x")
        users.put(b"b", b"x")
        with site.subscribe("indexer", "users", holder="me", options=BY_HAND) as subscription:
            next(subscription)
            time.advance(5_000)
            statistics = subscription.statistics()
            assert statistics == site.subscriptions.statistics("indexer")
            assert statistics == SubscriptionStatistics(
                name="indexer",
                namespace="users",
                through=statistics.through,
                unacked=1,
                pending=0,
                backlog=2,
                backlog_is_exact=True,
                lag_ms=5_000,
                holder="me",
            )
            for delivery in subscription:
                subscription.acknowledge_through(delivery)
        done = site.subscriptions.statistics("indexer")
        assert (done.unacked, done.backlog, done.lag_ms, done.holder) == (0, 0, 0, None)

    def test_what_is_pending_in_a_transaction_is_shown_and_stays(self, site: Site, users: Namespace) -> None:
        users.put_many({b"a": b"x", b"b": b"x", b"c": b"x"})
        transaction = site.transaction()
        with site.subscribe("indexer", "users", options=BY_HAND) as subscription:
            first, _, third = subscription
            transaction.acknowledge(first, third)
            statistics = subscription.statistics()
            assert (statistics.unacked, statistics.pending, statistics.backlog) == (3, 2, 3)
            acknowledgement = Acknowledgement(positions=[first.position, third.position])
            pending = site.host.subscriptions.pending("indexer")
            assert pending == [PendingAcknowledgement(transaction.id, acknowledgement)]
            where = {"subscription": "indexer", "transaction": transaction.id}
            refused(AcknowledgementConflict, lambda: subscription.seek("beginning"), **where)
            version, index = first.position.version, first.position.index
            for attempt in (first.acknowledge, lambda: subscription.acknowledge_through(third)):
                refused(AcknowledgementConflict, attempt, **where, version=version, index=index)
        for ask in (
            lambda: site.subscriptions.seek("indexer", "beginning"),
            lambda: site.subscriptions.remove("indexer"),
        ):
            error = refused(AcknowledgementConflict, ask, **where)
            assert f"floodmark txn abort {transaction.id}" in str(error)
        transaction.commit()
        assert site.host.subscriptions.pending("indexer") == []
        with site.subscribe("indexer", "users", options=BY_HAND) as subscription:
            assert keys(subscription) == [b"b"]
        site.subscriptions.remove("indexer")
        assert all(report.owner != "indexer" for report in site.transactions.logs())

    def test_unknown_subscription_is_not_found(self, site: Site, users: Namespace) -> None:
        site.subscribe("indexer", "users", options=BY_HAND).close()
        for ask in (
            lambda: site.subscriptions.show("nobody"),
            lambda: site.subscriptions.statistics("nobody"),
            lambda: site.subscriptions.remove("nobody"),
            lambda: site.subscriptions.seek("nobody", "end"),
        ):
            error = refused(SubscriptionNotFound, ask, subscription="nobody")
            assert "no subscription 'nobody'; there are: indexer" in str(error)

    def test_subscription_keeps_what_it_has_not_delivered_until_it_is_removed(
        self, site: Site, users: Namespace, time: SimulatedTime
    ) -> None:
        version = users.put(b"a", b"1")
        site.subscribe("indexer", "users", options=BY_HAND).close()
        (point,) = site.safe_points()
        assert point.name == "subscription/indexer"
        users.put(b"a", b"2")
        age(site, time)
        with site.subscribe("indexer", "users", options=BY_HAND) as subscription:
            assert [delivery.change.value for delivery in subscription] == [b"1", b"2"]
        site.subscriptions.remove("indexer")
        assert site.subscriptions.list() == []
        assert site.safe_points() == []
        site.collect_garbage()
        assert oldest(site) > version

    def test_subscription_that_was_not_consumed_for_too_long_says_so(
        self, site: Site, users: Namespace, time: SimulatedTime
    ) -> None:
        version = users.put(b"a", b"1")
        site.subscribe("indexer", "users", start=version, options=BY_HAND).close()
        users.put(b"a", b"2")
        time.advance(timedelta(days=2) // timedelta(milliseconds=1))
        site.collect_garbage()
        error = refused(
            VersionCollected,
            lambda: site.subscribe("indexer", "users", options=BY_HAND),
            version=version,
            oldest=oldest(site),
            subscription="indexer",
        )
        assert "Seek the subscription to a snapshot" in str(error)
        site.subscriptions.seek("indexer", "snapshot")
        site.subscribe("indexer", "users", options=BY_HAND).close()
