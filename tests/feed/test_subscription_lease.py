"""One consumer at a time: leases of subscriptions, under simulated time."""

from collections.abc import Callable

import pytest
from tests.feed.support_subscription import Stage, keys_of, make_stage, take, write

from floodmark.feed.subscription.acknowledgement import Progress
from floodmark.feed.subscription.subscriptions import SubscriptionRow, SubscriptionSpec, SubscriptionStore
from floodmark.model.errors import LeaseHeld

SPEC = SubscriptionSpec(name="indexer", namespace="users")


@pytest.fixture
def stage() -> Stage:
    return make_stage()


def open_row(stage: Stage, holder: str = "one") -> SubscriptionRow:
    return stage.subscriptions.open(SPEC, 0, holder, 30.0)


def test_another_consumer_is_told_who_has_the_lease_and_until_when(stage: Stage) -> None:
    open_row(stage)
    with pytest.raises(LeaseHeld, match=r"consumed by one until 2023-11-14T22:13:50") as caught:
        open_row(stage, "two")
    assert caught.value.details["holder"] == "one"
    assert caught.value.details["expires_at_ms"] == stage.time() + 30_000


def test_another_consumer_takes_over_in_the_moment_when_the_lease_is_over(stage: Stage) -> None:
    first = open_row(stage)
    stage.time.advance(29_999)
    with pytest.raises(LeaseHeld):
        open_row(stage, "two")
    stage.time.advance(1)
    second = open_row(stage, "two")
    assert second.lease is not None
    assert second.lease.holder == "two"
    assert second.epoch == first.epoch + 1


@pytest.mark.parametrize(
    "call",
    [
        lambda store, epoch: store.acknowledge("indexer", epoch, Progress(through=0)),
        lambda store, epoch: store.seek("indexer", 0, epoch),
    ],
)
def test_a_consumer_that_was_taken_for_dead_is_told_so(
    stage: Stage, call: Callable[[SubscriptionStore, int], object]
) -> None:
    first = open_row(stage)
    stage.time.advance(30_000)
    second = open_row(stage, "two")
    with pytest.raises(LeaseHeld, match="consumed by two"):
        call(stage.subscriptions, first.epoch)
    assert stage.subscriptions.find("indexer") == second
    stage.subscriptions.release("indexer", second.epoch)
    with pytest.raises(LeaseHeld, match="was given back"):
        call(stage.subscriptions, second.epoch)


def test_a_consumer_whose_lease_is_over_goes_on_if_nobody_came(stage: Stage) -> None:
    row = open_row(stage)
    stage.time.advance(3_600_000)
    stage.subscriptions.acknowledge("indexer", row.epoch, Progress(through=0))
    with pytest.raises(LeaseHeld):
        open_row(stage, "two")


@pytest.mark.parametrize("has_news", [True, False])
def test_whatever_is_heard_of_a_consumer_renews_its_lease(stage: Stage, has_news: bool) -> None:
    row = open_row(stage)
    progress = Progress(through=row.through if has_news else 0)
    for _ in range(5):
        stage.time.advance(20_000)
        stage.subscriptions.acknowledge("indexer", row.epoch, progress)
        with pytest.raises(LeaseHeld):
            open_row(stage, "two")


def test_a_lease_that_was_released_is_free_at_once(stage: Stage) -> None:
    row = open_row(stage)
    stage.subscriptions.release("indexer", row.epoch)
    assert open_row(stage, "two").epoch == row.epoch + 1


def test_releasing_a_lease_that_somebody_else_has_does_nothing(stage: Stage) -> None:
    first = open_row(stage)
    stage.time.advance(30_000)
    second = open_row(stage, "two")
    stage.subscriptions.release("indexer", first.epoch)
    stage.subscriptions.release("nobody", 1)
    assert stage.subscriptions.find("indexer") == second


def test_the_same_holder_takes_over_at_once_and_shuts_its_former_self_out(stage: Stage) -> None:
    former = open_row(stage)
    present = open_row(stage)
    with pytest.raises(LeaseHeld):
        stage.subscriptions.acknowledge("indexer", former.epoch, Progress(through=0))
    stage.subscriptions.acknowledge("indexer", present.epoch, Progress(through=0))


def test_a_consumer_of_a_subscription_that_was_removed_does_not_disturb_one_of_the_same_name(
    stage: Stage,
) -> None:
    former = open_row(stage)
    stage.time.advance(30_000)
    stage.subscriptions.remove("indexer")
    open_row(stage)
    with pytest.raises(LeaseHeld):
        stage.subscriptions.acknowledge("indexer", former.epoch, Progress(through=former.through))


def test_a_successor_gets_what_the_dead_consumer_had_not_acknowledged_in_order(stage: Stage) -> None:
    write(stage.users, b"a", b"b")
    write(stage.users, b"c", b"d")
    first = stage.subscribe()
    deliveries = take(first, 3)
    deliveries[1].acknowledge()
    first.flush()
    # Neither is the site told of this, nor is the lease given back.
    deliveries[0].acknowledge()
    stage.time.advance(30_000)
    assert keys_of(list(stage.subscribe(holder="two"))) == [b"a", b"c", b"d"]
    with pytest.raises(LeaseHeld, match="consumed by two"):
        first.flush()
