"""Storage fails at every place under everything that changes a subscription.

Whoever was told that it is done finds it done, whoever was told that it is not finds it as before, and
whoever was told neither finds one of the two: at once, and after every power cut.  A safe point always
keeps what the stored row needs.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any, Final, NamedTuple

import pytest
from tests.feed.support_subscription import Stage, make_stage, positions_of, take, write
from tests.sizes import only

from floodmark.feed.leased import LeasedReaders
from floodmark.feed.subscription.acknowledgement import Acknowledgement, ChangePosition, LiveCommit, Progress
from floodmark.feed.subscription.rows import SubscriptionState
from floodmark.feed.subscription.subscriptions import SubscriptionRow, SubscriptionSpec
from floodmark.model.errors import FloodmarkError, OutcomeUnknown
from floodmark.partition import FAMILIES
from floodmark.site import open_engine
from floodmark.testing import UNKNOWN_FAULTS, Fault, FaultPlan, FaultyEngine, SimulatedCrash, SimulatedTime

SPEC: Final = SubscriptionSpec(name="indexer", namespace="users")
POSITIONS_MAX: Final = 50

PLANS: Final = {
    **{str(kind): FaultPlan(at=1, kind=kind) for kind in Fault},
    **{
        f"{kind}, recovery fails once": FaultPlan(at=1, kind=kind, recover_failures=1)
        for kind in sorted(UNKNOWN_FAULTS)
    },
}


class Seen(NamedTuple):
    """What there is of the subscription, and where its safe point is."""

    row: SubscriptionRow | None
    held: int | None


def look(stage: Stage) -> Seen:
    rows = stage.subscriptions.list()
    held = [point.version for point in stage.site.safe_points() if point.name == "subscription/indexer"]
    return Seen(rows[0] if rows else None, held[0] if held else None)


def look_at_image(engine: FaultyEngine, keep: int, time: SimulatedTime) -> Seen:
    image = engine.crash(keep)
    site = open_engine(image, site="oslo", site_id=7, time_source=time)
    return look(Stage(site=site, time=time, engine=image))


def prepare() -> Stage:
    """Three commits, of which the last is half delivered and two changes are live; the lease is over."""
    stage = make_stage(FaultyEngine(FAMILIES), cut=1)
    for keys in ([b"a", b"b"], [b"c"], [b"d", b"e", b"f"]):
        write(stage.users, *keys)
        stage.time.advance(1_000)
    subscription = stage.subscribe()
    deliveries = take(subscription, 5)
    for delivery in (deliveries[0], deliveries[2], deliveries[4]):
        delivery.acknowledge()
    subscription.flush()
    stage.time.advance(600_000)
    return stage


def prepare_empty() -> Stage:
    stage = make_stage(FaultyEngine(FAMILIES))
    write(stage.users, b"a")
    return stage


def epoch_of(stage: Stage) -> int:
    return stage.subscriptions.find("indexer").epoch


def acknowledge(stage: Stage) -> None:
    row = stage.subscriptions.find("indexer")
    first, last = row.live
    assert (first.count, last.count) == (2, 2)
    acknowledgement = Acknowledgement(positions=[ChangePosition(first.version, 1)])
    progress = Progress(
        through=last.version,
        delivered=[LiveCommit(last.version, 3, [2, 3])],
        acknowledgement=acknowledgement,
    )
    stage.subscriptions.acknowledge("indexer", row.epoch, progress)


def renew(stage: Stage) -> None:
    stage.subscriptions.acknowledge("indexer", epoch_of(stage), Progress(through=0))


OPERATIONS: Final[dict[str, tuple[Callable[[], Stage], Callable[[Stage], object]]]] = {
    "open a new one": (prepare_empty, lambda stage: stage.subscriptions.open(SPEC, 0, "one", 30.0)),
    "take one over": (prepare, lambda stage: stage.subscriptions.open(SPEC, 0, "two", 30.0)),
    "acknowledge": (prepare, acknowledge),
    "renew": (prepare, renew),
    "release": (prepare, lambda stage: stage.subscriptions.release("indexer", epoch_of(stage))),
    "seek back": (
        prepare,
        lambda stage: stage.subscriptions.seek("indexer", stage.to_version("beginning"), epoch_of(stage)),
    ),
    "seek on": (
        prepare,
        lambda stage: stage.subscriptions.seek("indexer", stage.to_version("end"), epoch_of(stage)),
    ),
    "remove": (prepare, lambda stage: stage.subscriptions.remove("indexer")),
}


def check_safe_point(seen: Seen) -> None:
    if seen.row is not None:
        assert seen.held is not None
        assert seen.held <= seen.row.needed_version


def attempt(stage: Stage, run: Callable[[Stage], object]) -> set[str]:
    """Run an operation; what may have become of it, as far as the caller knows."""
    try:
        run(stage)
    except (OutcomeUnknown, SimulatedCrash):
        return {"before", "after"}
    except FloodmarkError:
        return {"before"}
    return {"after"}


def visit(operation: str, plan: FaultPlan) -> bool:
    """Run an operation with one fault; whether the fault came to pass."""
    set_up, run = OPERATIONS[operation]
    stage = set_up()
    rows = {"before": look(stage).row}
    twin = set_up()
    run(twin)
    rows["after"] = look(twin).row
    engine = stage.engine
    assert isinstance(engine, FaultyEngine)
    engine.arm(plan)
    possible = attempt(stage, run)
    fired = engine.fired
    allowed = [rows[name] for name in sorted(possible)]
    for keep in range(engine.unsynced + 1):
        image = look_at_image(engine, keep, stage.time)
        assert image.row in allowed
        check_safe_point(image)
    if plan.kind is Fault.CRASH and fired:
        return fired
    engine.heal()
    settle(stage)
    seen = look(stage)
    assert seen.row in allowed
    check_safe_point(seen)
    assert look_at_image(engine, engine.unsynced, stage.time) == seen
    return fired


def settle(stage: Stage) -> None:
    """Bring the site back, as the next caller does."""
    for _ in range(3):
        try:
            stage.subscriptions.release("indexer", -1)
            return
        except FloodmarkError:
            continue
    raise AssertionError("storage works again, and subscriptions do not")


@pytest.mark.parametrize("plan", only((Fault.CRASH, Fault.UNKNOWN_APPLIED), PLANS))
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_subscription_is_as_its_caller_was_told(operation: str, plan: str) -> None:
    for at in count(1):
        assert at <= POSITIONS_MAX
        try:
            if not visit(operation, replace(PLANS[plan], at=at)):
                break
        except AssertionError as error:
            error.add_note(f"{operation}, {plan}, at {at}")
            raise
    assert at > 1, "nothing was written"


def test_the_check_notices_a_row_that_was_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    def keep_in_memory(readers: Any, state: SubscriptionState) -> SubscriptionRow:
        readers.states[state.row.name] = state
        return state.row

    monkeypatch.setattr(LeasedReaders, "enter", keep_in_memory)
    with pytest.raises(AssertionError):
        visit("open a new one", FaultPlan(at=1_000, kind=Fault.TRANSIENT))


def test_the_check_notices_a_safe_point_that_runs_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SubscriptionRow, "needed_version", property(lambda row: row.through + (1 << 60)))
    stage = prepare_empty()
    stage.subscriptions.open(SPEC, 0, "one", 30.0)
    monkeypatch.undo()
    with pytest.raises(AssertionError):
        check_safe_point(look(stage))


@pytest.mark.parametrize("kind", sorted(set(Fault) - {Fault.CRASH, Fault.PERSISTENT}))
def test_a_consumer_gets_over_a_failed_flush(kind: Fault) -> None:
    for at in count(1):
        stage = prepare()
        subscription = stage.subscribe()
        first, second, third = subscription
        engine = stage.engine
        assert isinstance(engine, FaultyEngine)
        engine.arm(FaultPlan(at=at, kind=kind))
        second.acknowledge()
        expected = [first.position, third.position]
        try:
            subscription.flush()
        except FloodmarkError:
            first.acknowledge()
            expected = [third.position]
        fired = engine.fired
        engine.heal()
        subscription.close()
        assert positions_of(list(stage.subscribe())) == expected
        if not fired:
            break
    assert at > 1
