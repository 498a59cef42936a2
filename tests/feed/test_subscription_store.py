"""What a site remembers of subscriptions: limits, safe points, and what it refuses."""

from dataclasses import replace
from datetime import timedelta

import msgspec
import pytest
from tests.feed.support_subscription import Stage, keys_of, make_stage, take, write
from tests.site.support import HookedEngine, open_memory

from floodmark.feed.subscription.acknowledgement import Acknowledgement, ChangePosition, LiveCommit, Progress
from floodmark.feed.subscription.consumer import Subscription
from floodmark.feed.subscription.rows import SUBSCRIPTIONS
from floodmark.feed.subscription.subscriptions import (
    SubscriptionRow,
    SubscriptionSpec,
    SubscriptionStore,
)
from floodmark.model.errors import (
    FloodmarkError,
    InvalidArgument,
    InvalidName,
    InvalidRange,
    InvalidVersion,
    LeaseHeld,
    LimitExceeded,
    NamespaceNotFound,
    StorageFull,
    SubscriptionNotFound,
    VersionCollected,
    VersionInFuture,
)
from floodmark.model.limits import KEY_BYTES_MAX, UNACKED_MAX
from floodmark.model.ranges import KeyRange
from floodmark.model.version import COUNTER_BITS, VERSION_MAX
from floodmark.site import Site
from floodmark.testing import SimulatedTime
from floodmark.wire.messages import port_methods

SPEC = SubscriptionSpec(name="indexer", namespace="users")
DAY_MS = 24 * 3_600_000


@pytest.fixture
def stage() -> Stage:
    return make_stage()


def open_row(stage: Stage, holder: str = "one", *, spec: SubscriptionSpec = SPEC) -> SubscriptionRow:
    return stage.subscriptions.open(spec, 0, holder, 30.0)


def held_version(stage: Stage) -> int:
    [version] = [point.version for point in stage.site.safe_points() if point.name == "subscription/indexer"]
    return version


def epoch_of(stage: Stage) -> int:
    return stage.subscriptions.find("indexer").epoch


# What is refused


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"name": ""}, InvalidName),
        ({"name": "a b"}, InvalidName),
        ({"name": "a/b"}, InvalidName),
        ({"name": "x" * 129}, InvalidName),
        ({"name": 7}, InvalidName),
        ({"keys": KeyRange(b"b", b"a")}, InvalidRange),
        ({"keys": KeyRange(b"x" * (KEY_BYTES_MAX + 1), None)}, InvalidRange),
        ({"keys": KeyRange(b"", b"x" * (KEY_BYTES_MAX + 1))}, InvalidRange),
        ({"unacked_max": 0}, InvalidArgument),
        ({"unacked_max": UNACKED_MAX + 1}, InvalidArgument),
        ({"unacked_max": 1.5}, InvalidArgument),
    ],
)
def test_settings_that_cannot_be_used_are_refused(
    settings: dict[str, object], error: type[FloodmarkError]
) -> None:
    with pytest.raises(error):
        SubscriptionSpec(**{"name": "indexer", "namespace": "users", **settings})  # type: ignore[arg-type]


@pytest.mark.parametrize(("holder", "seconds"), [("", 30.0), ("one", 0.0), ("one", 3_601.0), ("a b", 1.0)])
def test_a_lease_that_cannot_be_given_is_refused(stage: Stage, holder: str, seconds: float) -> None:
    with pytest.raises(InvalidArgument):
        stage.subscriptions.open(SPEC, 0, holder, seconds)
    assert stage.subscriptions.list() == []


def test_a_subscription_reads_the_same_for_life(stage: Stage) -> None:
    open_row(stage)
    stage.site.create_namespace("other")
    for spec in (
        SubscriptionSpec(name="indexer", namespace="other"),
        SubscriptionSpec(name="indexer", namespace="users", keys=KeyRange(b"a", None)),
    ):
        with pytest.raises(InvalidArgument, match="Choose another name, or remove it first"):
            open_row(stage, spec=spec)


def test_a_namespace_that_is_not_there_cannot_be_subscribed_to(stage: Stage) -> None:
    with pytest.raises(NamespaceNotFound):
        open_row(stage, spec=SubscriptionSpec(name="indexer", namespace="nothing"))


def test_a_namespace_of_the_same_name_is_another_one(stage: Stage) -> None:
    row = open_row(stage)
    stage.site.drop_namespace("users")
    with pytest.raises(NamespaceNotFound):
        open_row(stage)
    stage.site.create_namespace("users")
    with pytest.raises(NamespaceNotFound, match="remove the subscription and subscribe again"):
        open_row(stage)
    stage.subscriptions.release("indexer", row.epoch)
    stage.subscriptions.remove("indexer")
    assert open_row(stage).namespace_id != row.namespace_id


def test_nobody_can_begin_in_the_future(stage: Stage) -> None:
    future = (stage.time() + 1) << COUNTER_BITS
    with pytest.raises(VersionInFuture):
        stage.subscriptions.open(SPEC, future, "one", 30.0)
    row = open_row(stage)
    with pytest.raises(VersionInFuture):
        stage.subscriptions.seek("indexer", future, row.epoch)
    for version in (-1, VERSION_MAX + 1):
        with pytest.raises(InvalidVersion):
            stage.subscriptions.open(SubscriptionSpec(name="other", namespace="users"), version, "one", 30.0)


def test_nobody_can_have_got_what_is_not_resolved(stage: Stage) -> None:
    row = open_row(stage)
    with pytest.raises(InvalidVersion, match="has not resolved yet"):
        stage.subscriptions.acknowledge("indexer", row.epoch, Progress(through=stage.site.now() + 1_000))
    assert stage.subscriptions.find("indexer") == row


def test_what_is_refused_changes_nothing(stage: Stage) -> None:
    [position, *_] = write(stage.users, b"a", b"b")
    through = stage.site.resolved_version()
    row = open_row(stage)
    for progress in (
        Progress(through=through, delivered=[LiveCommit(position.version, 1, [0, 2])]),
        Progress(through=position.version - 1, acknowledgement=Acknowledgement(positions=[position])),
        Progress(through=position.version - 1, acknowledgement=Acknowledgement(through=position)),
    ):
        with pytest.raises(InvalidArgument):
            stage.subscriptions.acknowledge("indexer", row.epoch, progress)
    assert stage.subscriptions.find("indexer") == row


def test_acknowledging_again_is_harmless(stage: Stage) -> None:
    [first, second] = write(stage.users, b"a", b"b")
    through = stage.site.resolved_version()
    row = open_row(stage)
    progress = Progress(
        through=through,
        delivered=[LiveCommit(first.version, 2, [0, 2])],
        acknowledgement=Acknowledgement(positions=[first]),
    )
    stage.subscriptions.acknowledge("indexer", row.epoch, progress)
    stored = stage.subscriptions.find("indexer")
    assert stored.live == [LiveCommit(first.version, 2, [1, 2])]
    stage.subscriptions.acknowledge("indexer", row.epoch, progress)
    assert stage.subscriptions.find("indexer") == stored
    both = Progress(through=through, acknowledgement=Acknowledgement(through=second))
    for _ in range(2):
        stage.subscriptions.acknowledge("indexer", row.epoch, both)
        assert stage.subscriptions.find("indexer").live == []


def test_more_than_unacked_max_is_not_kept(stage: Stage) -> None:
    [position, *_] = write(stage.users, b"a", b"b", b"c")
    through = stage.site.resolved_version()
    row = open_row(stage, spec=SubscriptionSpec(name="indexer", namespace="users", unacked_max=2))
    with pytest.raises(LimitExceeded, match="acknowledge some first"):
        stage.subscriptions.acknowledge(
            "indexer",
            row.epoch,
            Progress(through=through, delivered=[LiveCommit(position.version, 3, [0, 3])]),
        )
    stage.subscriptions.acknowledge(
        "indexer", row.epoch, Progress(through=through, delivered=[LiveCommit(position.version, 3, [1, 3])])
    )


def test_a_smaller_limit_takes_nothing_away(stage: Stage) -> None:
    write(stage.users, b"a", b"b", b"c")
    subscription = stage.subscribe()
    take(subscription, 3)
    subscription.close()
    again = stage.subscribe(unacked_max=1)
    first, second, third = take(again, 3)
    second.acknowledge()
    again.flush()
    assert keys_of(list(stage.subscribe(unacked_max=1))) == [b"a", b"c"]
    assert (first.position, third.position) == (
        ChangePosition(first.position.version, 0),
        ChangePosition(first.position.version, 2),
    )


def test_there_is_a_limit_to_subscriptions(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage.subscriptions._readers, "kind", replace(SUBSCRIPTIONS, rows_max=1))
    open_row(stage)
    open_row(stage)
    with pytest.raises(LimitExceeded, match="remove some first"):
        open_row(stage, spec=SubscriptionSpec(name="other", namespace="users"))


def test_on_a_full_disk_none_is_made_but_those_there_are_go_on(stage: Stage) -> None:
    write(stage.users, b"a")
    subscription = stage.subscribe()
    storage = stage.subscriptions._storage
    storage.refuse(StorageFull("planned: the disk is full"))
    with pytest.raises(StorageFull):
        open_row(stage, spec=SubscriptionSpec(name="other", namespace="users"))
    assert [row.name for row in stage.subscriptions.list()] == ["indexer"]
    for delivery in subscription:
        delivery.acknowledge()
    subscription.flush()
    assert stage.subscriptions.statistics("indexer").backlog == 0


# Seeking and removing


def test_a_subscription_without_a_consumer_can_be_moved(stage: Stage) -> None:
    [position] = write(stage.users, b"a")
    write(stage.users, b"b")
    row = open_row(stage)
    with pytest.raises(LeaseHeld):
        stage.subscriptions.seek("indexer", position.version)
    stage.time.advance(30_000)
    moved = stage.subscriptions.seek("indexer", position.version)
    assert (moved.through, moved.live, moved.lease) == (position.version, [], None)
    with pytest.raises(LeaseHeld):
        stage.subscriptions.acknowledge("indexer", row.epoch, Progress(through=row.through))
    assert keys_of(list(stage.subscribe(holder="two"))) == [b"b"]


def test_seeking_before_the_namespace_was_there_is_seeking_to_its_beginning(stage: Stage) -> None:
    row = open_row(stage)
    assert stage.subscriptions.seek("indexer", 1, row.epoch).through == row.through > 1


def test_removing_forgets_everything(stage: Stage) -> None:
    write(stage.users, b"a")
    subscription = stage.subscribe()
    with pytest.raises(LeaseHeld):
        stage.subscriptions.remove("indexer")
    take(subscription, 1)
    subscription.close()
    stage.subscriptions.remove("indexer")
    assert stage.site.safe_points() == []
    for call in (stage.subscriptions.find, stage.subscriptions.remove, stage.subscriptions.statistics):
        with pytest.raises(SubscriptionNotFound, match="there are: none yet"):
            call("indexer")
    assert [delivery.is_redelivered for delivery in stage.subscribe()] == [False]


def test_the_consumer_of_a_subscription_that_was_removed_is_told(stage: Stage) -> None:
    subscription = stage.subscribe()
    stage.time.advance(30_000)
    stage.subscriptions.remove("indexer")
    write(stage.users, b"a")
    take(subscription, 1)
    with pytest.raises(SubscriptionNotFound):
        subscription.flush()
    with pytest.raises(SubscriptionNotFound):
        next(subscription)


def test_all_are_listed_by_name(stage: Stage) -> None:
    for name in ("b", "c", "a"):
        open_row(stage, spec=SubscriptionSpec(name=name, namespace="users"))
    assert [row.name for row in stage.subscriptions.list()] == ["a", "b", "c"]


def test_subscriptions_are_there_when_a_site_is_opened_again() -> None:
    time, engine = SimulatedTime(), HookedEngine()
    site: Site = open_memory(engine, time)
    site.create_namespace("users")
    stage = Stage(site=site, time=time, engine=engine)
    write(stage.users, b"a", b"b")
    subscription: Subscription = stage.subscribe()
    first, _second = take(subscription, 2)
    first.acknowledge()
    subscription.close()
    row = stage.subscriptions.find("indexer")
    site.close()
    reopened = Stage(site=open_memory(engine, time), time=time, engine=engine)
    assert reopened.subscriptions.find("indexer") == row
    assert keys_of(list(reopened.subscribe())) == [b"b"]


# Safe points


def test_the_safe_point_is_moved_at_most_once_a_minute(stage: Stage) -> None:
    write(stage.users, b"a")
    subscription = stage.subscribe()
    begun = held_version(stage)
    [delivery] = list(subscription)
    delivery.acknowledge()
    subscription.flush()
    assert held_version(stage) == begun
    stage.time.advance(59_999)
    stage.subscriptions.acknowledge("indexer", epoch_of(stage), Progress(through=0))
    assert held_version(stage) == begun
    stage.time.advance(1)
    stage.subscriptions.acknowledge("indexer", epoch_of(stage), Progress(through=0))
    assert held_version(stage) == stage.subscriptions.find("indexer").through > begun


def test_the_safe_point_stays_below_the_oldest_change_that_is_live(stage: Stage) -> None:
    positions = write(stage.users, b"a") + write(stage.users, b"b") + write(stage.users, b"c")
    subscription = stage.subscribe()
    for delivery in subscription:
        if delivery.position != positions[1]:
            delivery.acknowledge()
    stage.time.advance(60_000)
    subscription.flush()
    assert held_version(stage) == positions[1].version - 1


def test_garbage_collection_leaves_what_is_live_or_not_delivered(stage: Stage) -> None:
    stage.site.update_namespace("users", retention=timedelta(0))
    for _ in range(5):
        write(stage.users, b"a", b"b")
    subscription = stage.subscribe()
    deliveries = take(subscription, 6)
    for delivery in deliveries[:3]:
        delivery.acknowledge()
    subscription.close()
    stage.time.advance(DAY_MS - 1)
    stage.site.collect_garbage()
    left = list(stage.subscribe())
    assert [delivery.position for delivery in left[:3]] == [delivery.position for delivery in deliveries[3:]]
    assert keys_of(left) == [b"b", b"a", b"b", b"a", b"b", b"a", b"b"]


def test_a_subscription_that_nobody_consumed_for_a_day_says_how_to_go_on(stage: Stage) -> None:
    stage.site.update_namespace("users", retention=timedelta(0))
    write(stage.users, b"a")
    stage.subscribe().close()
    write(stage.users, b"a")
    stage.time.advance(DAY_MS)
    stage.site.collect_garbage()
    with pytest.raises(VersionCollected, match="Seek the subscription to a snapshot"):
        stage.subscribe()
    stage.subscriptions.seek("indexer", stage.site.resolved_version())
    write(stage.users, b"b")
    assert keys_of(list(stage.subscribe())) == [b"b"]


def test_a_new_subscription_cannot_begin_where_changes_are_gone(stage: Stage) -> None:
    stage.site.update_namespace("users", retention=timedelta(0))
    [first, *_] = write(stage.users, b"a")
    write(stage.users, b"a")
    stage.time.advance(1)
    stage.site.collect_garbage()
    with pytest.raises(VersionCollected):
        stage.subscribe(start=first.version)
    assert stage.subscriptions.list() == []
    assert stage.site.safe_points() == []


# Over the wire


def test_every_call_can_travel() -> None:
    methods = port_methods(SubscriptionStore, "subscriptions")
    stage = make_stage()
    write(stage.users, b"a", b"b", b"c")
    subscription = stage.subscribe(keys=KeyRange(b"b", None))
    take(subscription, 1)
    progress = Progress(
        through=9,
        delivered=[LiveCommit(7, 3, [0, 1, 2, 3])],
        acknowledgement=Acknowledgement(positions=[ChangePosition(7, 1)], through=ChangePosition(5, 0)),
    )
    arguments: dict[str, tuple[object, ...]] = {
        "open": (SPEC, 7, "one", 30.0),
        "acknowledge": ("indexer", 1, progress),
        "release": ("indexer", 1),
        "seek": ("indexer", 7, None),
        "find": ("indexer",),
        "pending": ("indexer",),
        "remove": ("indexer",),
        "statistics": ("indexer",),
        "list": (),
    }
    assert {method.call for method in methods.values()} == arguments.keys()
    for method in methods.values():
        request = method.request(*arguments[method.call])
        assert method.decode_request(method.encode_request(request)) == request
    subscription.flush()
    row = stage.subscriptions.find("indexer")
    assert row.live
    for name, reply in (
        ("find", row),
        ("list", [row]),
        ("statistics", stage.subscriptions.statistics("indexer")),
    ):
        method = methods[f"subscriptions.{name}"]
        assert method.decode_reply(method.encode_reply(reply)) == reply
    assert msgspec.json.decode(msgspec.json.encode(row), type=SubscriptionRow) == row
