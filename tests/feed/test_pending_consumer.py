"""A consumer whose acknowledgements wait for transactions: what it delivers, and when."""

import logging
from collections.abc import Callable, Iterator
from threading import Event, Thread

import pytest
from tests.feed.support_pending import NAME, losing, make_consumer_stage
from tests.feed.support_subscription import BY_HAND, keys_of, take, write
from tests.waiting import HANG_SECONDS

from floodmark.feed.subscription import consumer as subscription_module
from floodmark.feed.subscription.acknowledgement import ChangePosition, Progress
from floodmark.feed.subscription.consumer import Delivery, SubscriptionOptions
from floodmark.feed.subscription.pending import PendingAcknowledgement
from floodmark.feed.subscription.subscriptions import SubscriptionStore
from floodmark.model.errors import (
    AcknowledgementConflict,
    Closed,
    FloodmarkError,
    InvalidArgument,
    LeaseHeld,
    OutcomeUnknown,
    StorageFailed,
    TransactionEnded,
)


class World:
    """A site, a desk and a consumer, with five changes in three commits."""

    def __init__(self, options: SubscriptionOptions = BY_HAND, unacked_max: int = 10_000) -> None:
        self.stage, self.desk = make_consumer_stage()
        for keys in ([b"a", b"b"], [b"c"], [b"d", b"e"]):
            write(self.stage.users, *keys)
            self.stage.time.advance(1_000)
        self.subscription = self.stage.subscribe(options=options, unacked_max=unacked_max)

    def acknowledge(self, transaction: str, *deliveries: Delivery, through: bool = False) -> None:
        self.subscription.acknowledge_in(
            self.desk.store.acknowledge_in, transaction, deliveries, through=through
        )

    def commit(self, transaction: str) -> None:
        self.desk.store.commit_pending(NAME, transaction)

    def abort(self, transaction: str) -> None:
        self.desk.store.abort_pending(NAME, transaction)

    def rest(self) -> list[bytes]:
        """All that the consumer delivers now."""
        return keys_of(list(self.subscription))

    def reopen(self) -> None:
        """The consumer dies, and another one takes over."""
        self.subscription = self.stage.subscribe()


@pytest.fixture
def world() -> World:
    return World()


# The usual course


def test_what_a_committed_transaction_acknowledged_is_done_with(world: World) -> None:
    a, b, c = take(world.subscription, 3)
    world.acknowledge("t", a, c)
    world.commit("t")
    world.subscription.settle("t", committed=True)
    assert world.rest() == [b"d", b"e"]
    world.subscription.redeliver()
    assert world.rest() == [b"b", b"d", b"e"]
    b.acknowledge()
    world.subscription.close()
    world.reopen()
    assert world.rest() == [b"d", b"e"]
    assert world.subscription.statistics().unacked == 2


def test_what_an_aborted_transaction_acknowledged_is_delivered_again_next_of_all(world: World) -> None:
    a, _, c, d = take(world.subscription, 4)
    world.acknowledge("t", c)
    world.acknowledge("t", a)
    world.acknowledge("u", d)
    world.abort("t")
    world.subscription.settle("t", committed=False)
    again = list(world.subscription)
    # Neither what the consumer still has in hand, nor what another transaction has.
    assert keys_of(again) == [b"a", b"c", b"e"]
    assert [delivery.is_redelivered for delivery in again] == [True, True, False]
    again[0].acknowledge()
    world.acknowledge("v", again[1])
    world.subscription.flush()
    assert world.desk.pending() == {"u": [d.position], "v": [c.position]}


def test_all_up_to_a_change_can_be_acknowledged(world: World) -> None:
    deliveries = take(world.subscription, 4)
    world.acknowledge("t", deliveries[2], through=True)
    world.subscription.redeliver()
    assert world.rest() == [b"d", b"e"]
    world.abort("t")
    world.subscription.settle("t", committed=False)
    assert world.rest() == [b"a", b"b", b"c"]
    world.acknowledge("u", deliveries[2], through=True)
    world.commit("u")
    world.subscription.settle("u", committed=True)
    world.subscription.redeliver()
    assert world.rest() == [b"d", b"e"]


def test_what_was_acknowledged_before_is_told_along(world: World) -> None:
    a, b, _ = take(world.subscription, 3)
    a.acknowledge()
    world.acknowledge("t", b)
    world.reopen()
    assert world.rest() == [b"c", b"d", b"e"]


def test_abort_in_the_middle_of_a_redelivery_goes_on_in_order(world: World) -> None:
    _, b, *_ = list(world.subscription)
    world.acknowledge("t", b)
    world.subscription.redeliver()
    assert keys_of(take(world.subscription, 2)) == [b"a", b"c"]
    world.abort("t")
    world.subscription.settle("t", committed=False)
    assert world.rest() == [b"b", b"d", b"e"]


# What is refused


def test_what_a_transaction_holds_cannot_be_acknowledged_without_it(world: World) -> None:
    a, b, c = take(world.subscription, 3)
    world.acknowledge("t", b)
    for refused in (
        b.acknowledge,
        lambda: world.subscription.acknowledge(b.position),
        lambda: world.subscription.acknowledge_through(c),
    ):
        with pytest.raises(AcknowledgementConflict, match="floodmark txn abort t"):
            refused()
    with pytest.raises(AcknowledgementConflict):
        world.acknowledge("u", a, b)
    world.subscription.acknowledge_through(a)
    c.acknowledge()
    world.subscription.flush()
    assert world.desk.live() == [b.position]


def test_what_was_acknowledged_cannot_be_acknowledged_in_a_transaction(world: World) -> None:
    a, b = take(world.subscription, 2)
    a.acknowledge()
    with pytest.raises(AcknowledgementConflict, match="was acknowledged before"):
        world.acknowledge("t", a, b)
    # The refusal was about the transaction, not about the consumer, which goes on.
    b.acknowledge()
    world.subscription.flush()
    assert world.rest() == [b"c", b"d", b"e"]


def test_a_delivery_of_before_a_move_is_refused(world: World) -> None:
    a = next(world.subscription)
    world.subscription.seek("beginning")
    with pytest.raises(AcknowledgementConflict, match="was moved"):
        world.acknowledge("t", a)
    world.acknowledge("t", next(world.subscription))
    with pytest.raises(AcknowledgementConflict, match="have not ended"):
        world.subscription.seek("beginning")
    assert world.rest() == [b"b", b"c", b"d", b"e"]
    world.commit("t")
    world.subscription.seek("beginning")
    assert world.rest() == [b"a", b"b", b"c", b"d", b"e"]


def test_a_position_that_was_not_delivered_is_refused(world: World) -> None:
    send = world.desk.store.acknowledge_in
    with pytest.raises(InvalidArgument, match="was not delivered"):
        world.subscription.acknowledge_in(
            send, "t", [ChangePosition(world.stage.site.now(), 0)], through=False
        )
    world.subscription.acknowledge_in(send, "t", [], through=True)
    assert world.desk.pending() == {}


def test_a_consumer_that_lost_its_lease_is_told_so(world: World) -> None:
    a, b = take(world.subscription, 2)
    lost = world.subscription
    world.reopen()
    send = world.desk.store.acknowledge_in
    with pytest.raises(LeaseHeld):
        lost.acknowledge_in(send, "t", [a], through=False)
    with pytest.raises(LeaseHeld):
        b.acknowledge()
    lost.settle("t", committed=False)


def test_a_closed_consumer_acknowledges_nothing(world: World) -> None:
    a = next(world.subscription)
    world.subscription.close()
    with pytest.raises(Closed):
        world.acknowledge("t", a)
    world.subscription.settle("t", committed=None)


def test_a_call_that_was_refused_leaves_nothing_held(world: World) -> None:
    a, b = take(world.subscription, 2)
    for failure in (StorageFailed("planned"), TransactionEnded("planned")):

        def refuse(*_: object, failure: FloodmarkError = failure) -> None:
            raise failure

        with pytest.raises(type(failure)):
            world.subscription.acknowledge_in(refuse, "t", [a, b], through=False)
    a.acknowledge()
    world.acknowledge("u", b)
    world.subscription.flush()
    assert world.desk.pending() == {"u": [b.position]}


# Ends that nobody tells the consumer


@pytest.mark.parametrize("look", ["flush", "redeliver"])
@pytest.mark.parametrize("told", [False, True])
def test_an_end_that_nobody_told_is_found_out(world: World, look: str, told: bool) -> None:
    a, b, c = take(world.subscription, 3)
    world.acknowledge("t", a)
    world.acknowledge("u", b)
    world.acknowledge("v", c)
    if told:
        world.subscription.settle("t", committed=None)
        world.subscription.settle("u", committed=None)
    world.commit("t")
    world.abort("u")
    assert world.rest() == [b"d", b"e"]
    getattr(world.subscription, look)()
    expected = [b"b"] if look == "flush" else [b"b", b"d", b"e"]
    assert world.rest() == expected
    assert world.desk.pending() == {"v": [c.position]}
    world.subscription.redeliver()
    assert world.rest() == [b"b", b"d", b"e"]


def test_the_thread_of_a_consumer_finds_an_end_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscription_module, "LOOK_SECONDS", 0.01)
    world = World(SubscriptionOptions(flush_seconds=0.01))
    with world.subscription as subscription:
        deliveries = take(subscription, 5)
        world.acknowledge("t", *deliveries)
        world.abort("t")
        assert keys_of(take(subscription, 5)) == [b"a", b"b", b"c", b"d", b"e"]


def test_the_thread_of_a_consumer_that_took_over_finds_an_end_out(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscription_module, "LOOK_SECONDS", 0.01)
    world.acknowledge("t", *take(world.subscription, 5))
    # Its lease is not renewed within the time that the test waits, and nothing else happens to it.
    options = SubscriptionOptions(flush_seconds=0.01, lease_seconds=3_600.0)
    found: list[bytes] = []
    with world.stage.subscribe(options=options) as successor:
        thread = Thread(target=lambda: found.extend(keys_of(take(successor, 5))), daemon=True)
        thread.start()
        world.abort("t")
        thread.join(HANG_SECONDS)
    assert found == [b"a", b"b", b"c", b"d", b"e"]


# What a consumer tells


def test_an_acknowledgement_tells_of_deliveries_only_if_its_own_are_not_known(world: World) -> None:
    """Threads that acknowledge need not wait for each other: one tells of all deliveries there are."""
    told: list[Progress] = []

    class Listening:
        def __getattr__(self, name: str) -> object:
            return getattr(world.desk.store, name)

        def acknowledge(self, name: str, epoch: int, progress: Progress) -> None:
            told.append(progress)
            world.desk.store.acknowledge(name, epoch, progress)

    world.stage.store = Listening()  # type: ignore[assignment]
    world.reopen()
    a, b, c = take(world.subscription, 3)
    world.acknowledge("t", a)
    assert [each.version for each in told[0].delivered] == [a.position.version, c.position.version]
    d = next(world.subscription)
    world.acknowledge("u", b)
    world.acknowledge("v", c)
    assert len(told) == 1
    world.acknowledge("w", d)
    assert [each.version for each in told[1].delivered] == [d.position.version]
    take(world.subscription, 1)
    for transaction in "tu":
        world.abort(transaction)
        world.subscription.settle(transaction, committed=False)
    world.acknowledge("v", c, through=True)
    assert len(told) == 2
    assert world.desk.pending() == {"v": [a.position, b.position, c.position], "w": [d.position]}


def test_a_new_consumer_does_not_deliver_what_is_pending(world: World) -> None:
    deliveries = take(world.subscription, 4)
    world.acknowledge("t", deliveries[0], deliveries[2])
    world.acknowledge("u", deliveries[3])
    world.reopen()
    assert world.rest() == [b"b", b"e"]
    with pytest.raises(AcknowledgementConflict):
        world.subscription.acknowledge(deliveries[0].position)
    world.abort("t")
    world.commit("u")
    world.subscription.flush()
    assert world.rest() == [b"a", b"c"]
    world.subscription.redeliver()
    assert world.rest() == [b"a", b"b", b"c", b"e"]


class Meddling:
    """A store that does something at the moment when it is asked what is pending."""

    def __init__(self, store: SubscriptionStore, meddle: Callable[[], None]) -> None:
        self._store = store
        self._meddle = meddle

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def pending(self, name: str) -> list[PendingAcknowledgement]:
        self._meddle()
        return self._store.pending(name)


def test_what_is_committed_while_a_consumer_opens_is_not_delivered(world: World) -> None:
    a, b = take(world.subscription, 2)
    world.acknowledge("t", a)
    world.acknowledge("u", b)

    def end() -> None:
        world.commit("t")
        world.abort("u")

    world.stage.store = Meddling(world.desk.store, end)  # type: ignore[assignment]
    world.reopen()
    assert world.rest() == [b"b", b"c", b"d", b"e"]


def test_what_is_acknowledged_while_the_site_is_asked_stays_held(world: World) -> None:
    a, b = take(world.subscription, 2)
    world.acknowledge("t", a)
    world.subscription.flush()
    threads: list[Thread] = []

    def acknowledge() -> None:
        if not threads:
            thread = Thread(target=lambda: world.acknowledge("u", b))
            threads.append(thread)
            thread.start()

    world.subscription._book.store = Meddling(world.desk.store, acknowledge)  # type: ignore[assignment]
    world.abort("t")
    world.subscription.flush()
    threads[0].join(HANG_SECONDS)
    assert world.rest() == [b"a", b"c", b"d", b"e"]
    assert world.desk.pending() == {"u": [b.position]}


# Answers that do not come


@pytest.mark.parametrize("told", [True, False, None])
@pytest.mark.parametrize("committed", [True, False])
@pytest.mark.parametrize("arrived", [True, False])
def test_an_acknowledgement_without_an_answer_is_found_out(
    world: World, arrived: bool, committed: bool, told: bool | None
) -> None:
    a, _ = take(world.subscription, 2)
    send = losing(world.desk.store.acknowledge_in, after=arrived)
    with pytest.raises(OutcomeUnknown):
        world.subscription.acknowledge_in(send, "t", [a], through=False)
    with pytest.raises(AcknowledgementConflict):
        a.acknowledge()
    (world.commit if committed else world.abort)("t")
    world.subscription.settle("t", committed=told)
    assert world.rest() == [b"c", b"d", b"e"]
    world.subscription.flush()
    assert world.rest() == ([] if arrived and committed else [b"a"])
    world.subscription.close()
    world.reopen()
    expected = [b"b", b"c", b"d", b"e"]
    assert world.rest() == (expected if arrived and committed else [b"a", *expected])


# Limits


@pytest.fixture
def paused() -> Iterator[Event]:
    """Set when a consumer says that it waits."""
    event = Event()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "waits" in record.getMessage():
                event.set()

    handler = Handler()
    logger = logging.getLogger("floodmark.feed")
    logger.addHandler(handler)
    yield event
    logger.removeHandler(handler)


@pytest.mark.parametrize(("committed", "expected"), [(True, b"c"), (False, b"a")])
def test_what_is_held_counts_as_unacknowledged(paused: Event, committed: bool, expected: bytes) -> None:
    world = World(unacked_max=2)
    a, b = take(world.subscription, 2)
    world.acknowledge("t", a, b)
    got: list[Delivery] = []
    thread = Thread(target=lambda: got.append(next(world.subscription)))
    thread.start()
    assert paused.wait(HANG_SECONDS)
    assert not got
    (world.commit if committed else world.abort)("t")
    world.subscription.settle("t", committed=committed)
    thread.join(HANG_SECONDS)
    assert keys_of(got) == [expected]
