"""A subscription as its consumer sees it."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from tests.feed.support_subscription import (
    BY_HAND,
    Stage,
    keys_of,
    make_stage,
    positions_of,
    take,
    write,
)
from tests.site.support import host_of

import floodmark
from floodmark.feed.subscription import subscriptions
from floodmark.feed.subscription.acknowledgement import ChangePosition
from floodmark.feed.subscription.consumer import Subscription, SubscriptionOptions
from floodmark.model.change import ChangeType
from floodmark.model.errors import (
    Corruption,
    InvalidArgument,
    VersionInFuture,
)
from floodmark.model.ranges import KeyRange
from floodmark.model.stream import ChangeBatch, ChangesRequest, Way


@pytest.fixture
def stage() -> Stage:
    return make_stage()


# Delivering


def test_changes_come_in_commit_order_and_within_a_commit_in_order_of_keys(stage: Stage) -> None:
    positions = write(stage.users, b"c", b"a", b"b") + write(stage.users, b"a")
    stage.users.delete(b"b")
    deliveries = list(stage.subscribe())
    assert keys_of(deliveries) == [b"a", b"b", b"c", b"a", b"b"]
    assert positions_of(deliveries)[:4] == positions
    assert deliveries[4].change.type is ChangeType.DELETE
    assert not any(delivery.is_redelivered for delivery in deliveries)


def test_what_was_acknowledged_does_not_come_again_and_everything_else_does(stage: Stage) -> None:
    write(stage.users, b"a", b"b", b"c", b"d")
    with stage.subscribe() as subscription:
        for delivery in subscription:
            if delivery.change.key in (b"a", b"c"):
                delivery.acknowledge()
    write(stage.users, b"e")
    again = list(stage.subscribe())
    assert keys_of(again) == [b"b", b"d", b"e"]
    assert [delivery.is_redelivered for delivery in again] == [True, True, False]


def test_a_consumer_that_holds_one_change_at_a_time_gets_an_atomic_batch_whole() -> None:
    """Though it stops after each of them, and what it reads is cut inside of the batch."""
    stage = make_stage(cut=1)
    stage.site.split("users", b"b")
    with stage.site.atomic() as batch:
        for key in (b"a", b"b", b"c"):
            batch.put(stage.users, key, b"1")
    write(stage.users, b"d")
    found = []
    for _ in range(4):
        with stage.subscribe(unacked_max=1) as subscription:
            delivery = next(iter(subscription))
            found.append((delivery.change.key, delivery.change.batch))
            delivery.acknowledge()
    assert found == [*((key, batch.version) for key in (b"a", b"b", b"c")), (b"d", None)]
    assert list(stage.subscribe()) == []


def test_iterating_goes_on_where_it_was_left(stage: Stage) -> None:
    write(stage.users, b"a", b"b")
    subscription = stage.subscribe()
    for delivery in subscription:
        assert delivery.change.key == b"a"
        break
    assert keys_of(list(subscription)) == [b"b"]
    write(stage.users, b"c")
    assert keys_of(list(subscription)) == [b"c"]


def test_redeliver_brings_what_is_not_acknowledged_and_then_goes_on(stage: Stage) -> None:
    write(stage.users, b"a", b"b")
    write(stage.users, b"c", b"d")
    subscription = stage.subscribe()
    first, second, third = take(subscription, 3)
    second.acknowledge()
    subscription.redeliver()
    again = list(subscription)
    assert positions_of(again)[:2] == [first.position, third.position]
    assert keys_of(again) == [b"a", b"c", b"d"]
    assert [delivery.is_redelivered for delivery in again] == [True, True, False]


def test_what_is_acknowledged_meanwhile_is_not_delivered_again(stage: Stage) -> None:
    write(stage.users, b"a", b"b", b"c")
    subscription = stage.subscribe()
    deliveries = list(subscription)
    subscription.redeliver()
    take(subscription, 1)
    deliveries[1].acknowledge()
    assert keys_of(list(subscription)) == [b"c"]


def test_only_the_subscribed_keys_are_delivered_and_counted(stage: Stage) -> None:
    write(stage.users, b"a1", b"b1", b"b2", b"c1")
    stage.site.create_namespace("other").put(b"b3", b"")
    subscription = stage.subscribe(keys=KeyRange(b"b", b"c"))
    deliveries = list(subscription)
    assert keys_of(deliveries) == [b"b1", b"b2"]
    assert [delivery.position.index for delivery in deliveries] == [0, 1]


def test_a_commit_that_is_larger_than_a_batch_is_one_commit(stage: Stage) -> None:
    keys = [b"%05d" % number for number in range(6_000)]
    version = stage.users.put_many(dict.fromkeys(keys, b"x" * 1_000))
    subscription = stage.subscribe()
    deliveries = take(subscription, 5_500)
    assert positions_of(deliveries) == [ChangePosition(version, index) for index in range(5_500)]
    subscription.acknowledge_through(deliveries[5_000])
    deliveries[5_100].acknowledge()
    subscription.flush()
    [live] = stage.subscriptions.find("indexer").live
    assert (live.count, live.runs) == (5_500, [5_001, 5_100, 5_101, 5_500])
    again = list(stage.subscribe())
    assert keys_of(again) == keys[5_001:5_100] + keys[5_101:]


def test_positions_are_the_same_when_the_change_log_is_gone() -> None:
    stage = make_stage(log_retention=timedelta(0))
    positions = write(stage.users, b"a", b"b", b"c") + write(stage.users, b"a", b"c")
    subscription = stage.subscribe()
    deliveries = list(subscription)
    assert positions_of(deliveries) == positions
    for delivery in deliveries[1::2]:
        delivery.acknowledge()
    stage.time.advance(1)
    stage.site.collect_garbage()
    subscription.redeliver()
    assert positions_of(list(subscription)) == positions[::2]
    ways = stage.site.statistics().readers.changes
    assert ways[Way.SCAN] > 0


def test_live_changes_that_are_far_apart_are_not_read_with_all_between_them(stage: Stage) -> None:
    requests: list[ChangesRequest] = []
    open_changes = stage.open_changes

    def watch(request: ChangesRequest) -> Iterator[ChangeBatch]:
        requests.append(request)
        return open_changes(request)

    stage.open_changes = watch  # type: ignore[method-assign]
    for _ in range(5):
        write(stage.users, b"a")
        write(stage.users, b"b")
        stage.time.advance(1_000)
    subscription = stage.subscribe()
    deliveries = list(subscription)
    for delivery in deliveries[2:8]:
        delivery.acknowledge()
    subscription.redeliver()
    requests.clear()
    assert positions_of(list(subscription)) == positions_of(deliveries[:2] + deliveries[8:])
    versions = [position.version for position in positions_of(deliveries)]
    assert [(request.since, request.until) for request in requests[:2]] == [
        (versions[0] - 1, versions[1]),
        (versions[8] - 1, versions[9]),
    ]


def test_live_changes_that_cannot_be_read_again_are_not_passed_over(stage: Stage) -> None:
    write(stage.users, b"a", b"b")
    subscription = stage.subscribe()
    take(subscription, 2)
    stage.open_changes = lambda request: iter([ChangeBatch(through=request.until or 0)])  # type: ignore[method-assign]
    subscription.close()
    again = stage.subscribe()
    for _ in range(2):
        with pytest.raises(Corruption, match="2 changes"):
            next(again)


# Acknowledging


def test_acknowledging_through_a_change_covers_all_before_it(stage: Stage) -> None:
    write(stage.users, b"a", b"b")
    write(stage.users, b"c", b"d")
    with stage.subscribe() as subscription:
        deliveries = list(subscription)
        subscription.acknowledge_through(deliveries[2])
    assert keys_of(list(stage.subscribe())) == [b"d"]


def test_a_position_can_be_acknowledged_by_whoever_has_it(stage: Stage) -> None:
    positions = write(stage.users, b"a", b"b")
    with stage.subscribe() as subscription:
        list(subscription)
        subscription.acknowledge(ChangePosition(positions[0].version, 0))
    assert positions_of(list(stage.subscribe())) == [positions[1]]


def test_acknowledging_twice_is_harmless(stage: Stage) -> None:
    write(stage.users, b"a", b"b")
    with stage.subscribe() as subscription:
        first, _second = subscription
        for _ in range(3):
            first.acknowledge()
            subscription.flush()
            subscription.acknowledge_through(first)
    assert keys_of(list(stage.subscribe())) == [b"b"]


def test_what_was_not_delivered_cannot_be_acknowledged(stage: Stage) -> None:
    positions = write(stage.users, b"a", b"b")
    subscription, other = stage.subscribe(), stage.subscribe("other")
    take(subscription, 1)
    with pytest.raises(InvalidArgument, match="was not delivered"):
        subscription.acknowledge(positions[1])
    with pytest.raises(InvalidArgument, match="was not delivered by Subscription"):
        subscription.acknowledge(next(other))
    with pytest.raises(InvalidArgument, match="was not delivered by Subscription"):
        subscription.acknowledge(positions[0].version)  # type: ignore[arg-type]


def test_acknowledgements_are_told_when_there_are_enough(stage: Stage) -> None:
    write(stage.users, *[b"%d" % number for number in range(8)])
    options = SubscriptionOptions(follow=False, background=False, flush_count=3)
    left = []
    for delivery in stage.subscribe(options=options):
        delivery.acknowledge()
        left.append(stage.subscriptions.statistics("indexer").backlog)
    assert left == [8, 8, 5, 5, 5, 2, 2, 2]


# Seeking


def test_seeking_back_delivers_again_what_was_acknowledged(stage: Stage) -> None:
    positions = write(stage.users, b"a") + write(stage.users, b"b")
    subscription = stage.subscribe()
    for delivery in subscription:
        delivery.acknowledge()
    subscription.seek(positions[0].version)
    assert keys_of(list(subscription)) == [b"b"]
    subscription.seek("beginning")
    assert keys_of(list(subscription)) == [b"a", b"b"]


def test_seeking_to_the_end_takes_everything_as_acknowledged(stage: Stage) -> None:
    write(stage.users, b"a", b"b")
    subscription = stage.subscribe()
    take(subscription, 1)
    subscription.seek("end")
    assert list(subscription) == []
    subscription.redeliver()
    write(stage.users, b"c")
    assert keys_of(list(subscription)) == [b"c"]
    assert subscription.statistics().unacked == 1


def test_seeking_to_a_moment_goes_on_behind_it(stage: Stage) -> None:
    write(stage.users, b"a")
    moment = datetime.fromtimestamp(stage.time() // 1000, UTC)
    stage.time.advance(1_000)
    write(stage.users, b"b")
    subscription = stage.subscribe()
    subscription.seek(moment)
    assert keys_of(list(subscription)) == [b"b"]
    with pytest.raises(VersionInFuture):
        subscription.seek(moment + timedelta(days=1))
    assert keys_of(list(subscription)) == []


def test_a_new_subscription_begins_where_it_is_told_to_and_an_old_one_where_it_was(stage: Stage) -> None:
    write(stage.users, b"a")
    subscription = stage.subscribe(start="end")
    write(stage.users, b"b")
    assert keys_of(list(subscription)) == [b"b"]
    assert keys_of(list(stage.subscribe(start="beginning"))) == [b"b"]


def test_acknowledging_what_came_before_a_seek_has_no_effect(stage: Stage) -> None:
    write(stage.users, b"a", b"b")
    subscription = stage.subscribe()
    before = list(subscription)
    subscription.seek("beginning")
    subscription.acknowledge_through(before[1])
    before[0].acknowledge()
    take(subscription, 1)
    before[0].acknowledge()
    subscription.close()
    assert keys_of(list(stage.subscribe())) == [b"a", b"b"]


# Statistics


def test_statistics_tell_how_far_a_subscription_is_and_how_much_is_left(stage: Stage) -> None:
    write(stage.users, b"a", b"b")
    stage.time.advance(10_000)
    write(stage.users, b"c", b"d", b"e")
    subscription = stage.subscribe()
    stage.time.advance(5_000)
    statistics = subscription.statistics()
    assert (statistics.name, statistics.namespace, statistics.holder) == ("indexer", "users", "one")
    assert (statistics.unacked, statistics.backlog, statistics.backlog_is_exact) == (0, 5, True)
    assert statistics.lag_ms == 15_000
    deliveries = take(subscription, 4)
    subscription.acknowledge_through(deliveries[1])
    statistics = subscription.statistics()
    assert (statistics.unacked, statistics.backlog, statistics.lag_ms) == (2, 3, 5_000)
    assert statistics.through == deliveries[3].position.version - 1
    for delivery in (*deliveries, *subscription):
        delivery.acknowledge()
    stage.time.advance(1_000)
    statistics = subscription.statistics()
    assert (statistics.unacked, statistics.backlog, statistics.lag_ms) == (0, 0, 0)


def test_a_consumer_that_died_is_no_holder(stage: Stage) -> None:
    stage.subscribe()
    stage.time.advance(30_000)
    assert stage.subscriptions.statistics("indexer").holder is None


def test_a_long_backlog_is_not_counted_to_its_end(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscriptions, "BACKLOG_COUNT_MAX", 10)
    stage.cut = 3
    host_of(stage.site).subscriptions._open_changes = stage.open_changes
    write(stage.users, *[b"%02d" % number for number in range(10)])
    subscription = stage.subscribe()
    statistics = subscription.statistics()
    assert (statistics.backlog, statistics.backlog_is_exact) == (10, True)
    write(stage.users, b"a")
    statistics = subscription.statistics()
    assert (statistics.backlog, statistics.backlog_is_exact) == (10, False)


# End to end


def test_a_subscription_of_a_site_in_a_directory_outlives_it(tmp_path: Path) -> None:
    with floodmark.open(tmp_path / "oslo", site="oslo", background=False) as site:
        site.create_namespace("users").put_many({b"a1": b"", b"a2": b"", b"b1": b""})
        with site.subscribe("indexer", "users", prefix=b"a", options=BY_HAND) as subscription:
            first, second = subscription
            second.acknowledge()
    with floodmark.open(tmp_path / "oslo", background=False) as site:
        assert site.subscriptions.statistics("indexer").unacked == 1
        subscription = site.subscribe("indexer", "users", prefix=b"a", options=BY_HAND)
        assert positions_of(list(subscription)) == [first.position]
        assert isinstance(subscription, Subscription)
        subscription.close()
