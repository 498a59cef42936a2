"""Subscriptions between threads: waiting, acknowledging from elsewhere, and the thread of their own."""

import gc
import logging
from collections.abc import Iterator
from queue import Queue
from threading import Barrier, Event, Thread
from weakref import ref

import pytest
from tests.feed.support_subscription import Stage, make_stage, positions_of, write
from tests.waiting import HANG_SECONDS, run_threads

from floodmark.feed.subscription.acknowledgement import ChangePosition, Progress
from floodmark.feed.subscription.consumer import Delivery, Subscription, SubscriptionOptions
from floodmark.feed.subscription.subscriptions import SubscriptionStore
from floodmark.model.errors import LeaseHeld, StorageFailed

FOLLOWING = SubscriptionOptions(background=False)
AT_ONCE = SubscriptionOptions(follow=False, flush_seconds=0.0)


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = make_stage()
    yield stage
    stage.site.close()


def consume(subscription: Subscription) -> "tuple[Thread, Queue[Delivery | BaseException | None]]":
    """Iterate in a thread of its own; what comes, and at last None or an error."""
    arrived: Queue[Delivery | BaseException | None] = Queue()

    def run() -> None:
        try:
            for delivery in subscription:
                arrived.put(delivery)
            arrived.put(None)
        except BaseException as error:
            arrived.put(error)

    thread = Thread(target=run, daemon=True)
    thread.start()
    return thread, arrived


def arrival(arrived: "Queue[Delivery | BaseException | None]") -> Delivery:
    delivery = arrived.get(timeout=HANG_SECONDS)
    assert isinstance(delivery, Delivery)
    return delivery


class Pausing(logging.Handler):
    """Knows when a subscription says that it waits."""

    def __init__(self) -> None:
        super().__init__()
        self.paused = Event()

    def emit(self, record: logging.LogRecord) -> None:
        if "waits" in record.getMessage():
            self.paused.set()


@pytest.fixture
def pausing() -> Iterator[Pausing]:
    handler = Pausing()
    logger = logging.getLogger("floodmark.feed")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


class Watched:
    """A store that tells when it was called, and fails if it is asked to."""

    def __init__(self, store: SubscriptionStore) -> None:
        self._store = store
        self.acknowledged, self.renewed = Event(), Event()
        self.failing = Event()

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def acknowledge(self, name: str, epoch: int, progress: Progress) -> None:
        called = self.renewed if progress == Progress(through=0) else self.acknowledged
        try:
            if self.failing.is_set():
                raise StorageFailed("planned: storage is away")
            self._store.acknowledge(name, epoch, progress)
        finally:
            called.set()


@pytest.fixture
def watched(stage: Stage) -> Watched:
    store = Watched(stage.subscriptions)
    stage.store = store  # type: ignore[assignment]
    return store


# Waiting


def test_a_consumer_that_follows_waits_for_more(stage: Stage) -> None:
    subscription = stage.subscribe(options=FOLLOWING)
    thread, arrived = consume(subscription)
    for key in (b"a", b"b"):
        [position] = write(stage.users, key)
        assert arrival(arrived).position == position
    subscription.close()
    assert arrived.get(timeout=HANG_SECONDS) is None
    thread.join(HANG_SECONDS)


def test_delivery_pauses_while_too_much_is_unacknowledged(stage: Stage, pausing: Pausing) -> None:
    positions = write(stage.users, *[b"%d" % number for number in range(6)])
    subscription = stage.subscribe(unacked_max=3, options=FOLLOWING)
    _, arrived = consume(subscription)
    assert pausing.paused.wait(HANG_SECONDS)
    deliveries = [arrival(arrived) for _ in range(3)]
    assert arrived.empty()
    subscription.flush()
    assert subscription.statistics().unacked == 3
    pausing.paused.clear()
    deliveries[1].acknowledge()
    deliveries.append(arrival(arrived))
    assert pausing.paused.wait(HANG_SECONDS)
    assert arrived.empty()
    subscription.acknowledge_through(deliveries[-1])
    deliveries += [arrival(arrived) for _ in range(2)]
    assert positions_of(deliveries) == positions
    subscription.close()


def test_what_is_delivered_again_is_not_held_up_by_the_limit(stage: Stage, pausing: Pausing) -> None:
    write(stage.users, b"a", b"b", b"c")
    subscription = stage.subscribe(unacked_max=2, options=FOLLOWING)
    _, arrived = consume(subscription)
    assert pausing.paused.wait(HANG_SECONDS)
    first = [arrival(arrived) for _ in range(2)]
    subscription.redeliver()
    again = [arrival(arrived) for _ in range(2)]
    assert positions_of(again) == positions_of(first)
    assert all(delivery.is_redelivered for delivery in again)
    subscription.close()


def test_closing_ends_a_consumer_that_waits_for_room(stage: Stage, pausing: Pausing) -> None:
    write(stage.users, b"a", b"b")
    subscription = stage.subscribe(unacked_max=1, options=FOLLOWING)
    _, arrived = consume(subscription)
    assert pausing.paused.wait(HANG_SECONDS)
    arrival(arrived)
    subscription.close()
    assert arrived.get(timeout=HANG_SECONDS) is None


def test_a_consumer_that_waits_learns_that_it_was_replaced(stage: Stage) -> None:
    subscription = stage.subscribe(options=FOLLOWING)
    _, arrived = consume(subscription)
    [position] = write(stage.users, b"a")
    assert arrival(arrived).position == position
    stage.time.advance(30_000)
    stage.subscribe(holder="two")
    with pytest.raises(LeaseHeld):
        subscription.flush()
    assert isinstance(arrived.get(timeout=HANG_SECONDS), LeaseHeld)


def test_seeking_reaches_a_consumer_that_waits(stage: Stage) -> None:
    [position] = write(stage.users, b"a")
    subscription = stage.subscribe(options=FOLLOWING)
    _, arrived = consume(subscription)
    assert arrival(arrived).position == position
    subscription.seek("beginning")
    again = arrival(arrived)
    assert (again.position, again.is_redelivered) == (position, False)
    subscription.close()


# Many at once


def test_acknowledgements_come_from_many_threads(stage: Stage) -> None:
    count, workers = 2_000, 8
    for start in range(0, count, 50):
        write(stage.users, *[b"%05d" % number for number in range(start, start + 50)])
    options = SubscriptionOptions(follow=False, background=False, flush_count=10)
    subscription = stage.subscribe(unacked_max=100, options=options)
    work: Queue[Delivery | None] = Queue()
    seen: list[ChangePosition] = []

    def deliver() -> None:
        for delivery in subscription:
            seen.append(delivery.position)
            work.put(delivery)
        for _ in range(workers):
            work.put(None)

    def acknowledge() -> None:
        while (delivery := work.get(timeout=HANG_SECONDS)) is not None:
            delivery.acknowledge()

    run_threads(deliver, *[acknowledge] * workers)
    subscription.close()
    assert len(seen) == len(set(seen)) == count
    assert seen == sorted(seen)
    assert stage.subscriptions.find("indexer").live == []
    assert list(stage.subscribe()) == []


def test_several_threads_share_the_changes(stage: Stage) -> None:
    count, threads = 600, 4
    write(stage.users, *[b"%05d" % number for number in range(count)])
    subscription = stage.subscribe()
    seen: Queue[ChangePosition] = Queue()
    together = Barrier(threads)

    def consume_some() -> None:
        together.wait(HANG_SECONDS)
        for delivery in subscription:
            seen.put(delivery.position)
            delivery.acknowledge()

    run_threads(*[consume_some] * threads)
    positions = [seen.get_nowait() for _ in range(seen.qsize())]
    assert len(positions) == len(set(positions)) == count
    subscription.close()
    assert list(stage.subscribe()) == []


# The thread of its own


def test_acknowledgements_reach_the_site_by_themselves(stage: Stage, watched: Watched) -> None:
    write(stage.users, b"a", b"b")
    subscription = stage.subscribe(options=AT_ONCE)
    next(subscription).acknowledge()
    assert watched.acknowledged.wait(HANG_SECONDS)
    assert [delivery.position.index for delivery in stage.subscribe()] == [1]
    subscription.close()


def test_the_lease_of_a_busy_consumer_is_renewed(stage: Stage, watched: Watched) -> None:
    subscription = stage.subscribe(options=SubscriptionOptions(lease_seconds=0.03))
    for _ in range(3):
        stage.time.advance(29)
        watched.renewed.clear()
        assert watched.renewed.wait(HANG_SECONDS)
        with pytest.raises(LeaseHeld):
            stage.subscribe(holder="two")
    subscription.close()


def test_a_consumer_that_is_busy_learns_that_it_was_replaced(stage: Stage) -> None:
    subscription = stage.subscribe(options=SubscriptionOptions(lease_seconds=0.03))
    stage.subscribe()
    with subscription._book.changed:
        assert subscription._book.changed.wait_for(
            lambda: subscription._book.failure is not None, HANG_SECONDS
        )
    assert subscription._upkeep is not None
    subscription._upkeep._thread.join(HANG_SECONDS)
    assert not subscription._upkeep._thread.is_alive()
    with pytest.raises(LeaseHeld):
        subscription.close()


def test_what_could_not_be_told_is_told_later(stage: Stage, watched: Watched) -> None:
    write(stage.users, b"a", b"b")
    subscription = stage.subscribe(options=AT_ONCE)
    watched.failing.set()
    next(subscription).acknowledge()
    assert watched.acknowledged.wait(HANG_SECONDS)
    watched.failing.clear()
    subscription.close()
    assert [delivery.position.index for delivery in stage.subscribe()] == [1]


def test_a_subscription_that_is_dropped_ends_with_its_thread(stage: Stage) -> None:
    subscription = stage.subscribe(options=SubscriptionOptions(lease_seconds=0.03))
    assert subscription._upkeep is not None
    thread, dropped = subscription._upkeep._thread, ref(subscription)
    del subscription
    thread.join(HANG_SECONDS)
    assert not thread.is_alive()
    gc.collect()
    assert dropped() is None
