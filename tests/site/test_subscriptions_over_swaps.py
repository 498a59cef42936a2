"""Subscriptions that go on where a data set was published."""

from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
from tests.sizes import only

from floodmark import Change, ChangeType, Namespace, Site
from floodmark.engine import MemoryEngine
from floodmark.feed.subscription.consumer import Subscription, SubscriptionOptions
from floodmark.model.errors import GenerationSwapped, InvalidArgument
from floodmark.partition import FAMILIES
from floodmark.site.embedding import open_engine

ONCE = SubscriptionOptions(follow=False, background=False)


@pytest.fixture
def site() -> Iterator[Site]:
    with open_engine(MemoryEngine(FAMILIES), site="oslo", background=False) as site:
        yield site


@pytest.fixture
def users(site: Site) -> Namespace:
    return site.create_namespace("users")


def subscribe(site: Site, way: Any = "difference", **options: Any) -> Subscription:
    return site.subscribe("indexer", "users", on_generation=way, options=ONCE, holder="me", **options)


def state_of(changes: list[Change]) -> dict[bytes, bytes]:
    state: dict[bytes, bytes] = {}
    for change in changes:
        if change.type is ChangeType.GENERATION:
            state = {} if change.snapshot else state
        elif change.value is None:
            state.pop(change.key, None)
        else:
            state[change.key] = change.value
    return state


@pytest.mark.parametrize("way", ["difference", "snapshot"])
@pytest.mark.parametrize("seed", only([0, 1], range(5)))
def test_each_change_is_acknowledged_once_wherever_consumers_leave(
    site: Site, users: Namespace, way: Any, seed: int
) -> None:
    """Consumers take some deliveries, acknowledge some of these in any order, and leave."""
    random = Random(seed)
    users.put_many({b"%02d" % number: b"1" for number in range(6)})
    site.subscribe("indexer", "users", on_generation=way, options=ONCE).close()
    users.put(b"03", b"2")
    site.generations.publish("users", {b"%02d" % number: b"3" for number in range(3, 9)})
    users.delete(b"05")
    site.generations.rollback("users")
    users.put(b"last", b"4")
    done: list[Change] = []
    positions = set()
    for _ in range(100):
        with subscribe(site, way) as subscription:
            taken = [delivery for delivery, _ in zip(subscription, range(random.randrange(6)), strict=False)]
            for delivery in random.sample(taken, random.randint(0, len(taken))):
                delivery.acknowledge()
                assert delivery.position not in positions
                positions.add(delivery.position)
                done.append(delivery.change)
            subscription.flush()
    with subscribe(site, way) as subscription:
        for delivery in subscription:
            delivery.acknowledge()
            done.append(delivery.change)
        assert subscription.statistics().backlog == 0
    assert len([change for change in done if change.type is ChangeType.GENERATION]) == 2
    in_order = sorted(done, key=lambda change: (change.version, change.key))
    assert state_of(in_order) == dict(users.scan())


def test_a_subscription_that_failed_at_a_swap_goes_on_when_it_is_opened_so(
    site: Site, users: Namespace
) -> None:
    users.put(b"ada", b"1")
    with subscribe(site, "fail") as subscription:
        assert next(subscription).change.key == b"ada"
        site.generations.publish("users", {b"bob": b"2"})
        with pytest.raises(GenerationSwapped):
            next(subscription)
    with subscribe(site) as subscription:
        assert [delivery.change.key for delivery in subscription] == [b"ada", b"", b"ada", b"bob"]


def test_the_backlog_counts_what_comes_at_a_swap(site: Site, users: Namespace) -> None:
    users.put(b"ada", b"1")
    with subscribe(site) as subscription:
        next(subscription).acknowledge()
        site.generations.publish("users", {b"bob": b"2"})
        subscription.flush()
        assert subscription.statistics().backlog == 3


def test_the_way_over_a_swap_is_not_changed_while_deliveries_are_open(site: Site, users: Namespace) -> None:
    users.put(b"ada", b"1")
    with subscribe(site) as subscription:
        site.generations.publish("users", {b"bob": b"2"})
        deliveries = [next(subscription) for _ in range(3)]
        subscription.flush()
    for way in ("fail", "snapshot"):
        with pytest.raises(InvalidArgument, match="acknowledge them"):
            subscribe(site, way)
    with subscribe(site) as subscription:
        for delivery in subscription:
            delivery.acknowledge()
    assert deliveries[1].change.type is ChangeType.GENERATION
    subscribe(site, "snapshot").close()
