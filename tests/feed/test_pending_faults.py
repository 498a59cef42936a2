"""Storage fails at every step of acknowledging in a transaction, of its commit and of its abort.

Whatever happens, and whenever the power goes: what was acknowledged in a transaction that is committed is
acknowledged, nothing else is, and what others have pending stays so.
"""

from collections.abc import Callable
from itertools import count
from typing import Final

import pytest
from tests.feed.support_pending import BARE, BATCHED, NAME, Desk, make_desk, settler
from tests.sizes import only
from tests.waiting import HANG_SECONDS

from floodmark.engine import WriteRow
from floodmark.feed.subscription.acknowledgement import Acknowledgement, ChangePosition, LiveCommit, Progress
from floodmark.feed.subscription.pending import PendingLedger, PendingRecord, Writing
from floodmark.feed.subscription.rows import Judge, SubscriptionChange, SubscriptionState
from floodmark.feed.subscription.store import LocalSubscriptionStore
from floodmark.log import BatchSettings
from floodmark.model.errors import FloodmarkError, OutcomeUnknown
from floodmark.model.partition import Decision
from floodmark.model.version import Version
from floodmark.testing import UNKNOWN_FAULTS, Fault, FaultPlan, SimulatedCrash

A, B, C = (ChangePosition(10, index) for index in range(3))
D, E = (ChangePosition(20, index) for index in range(2))
NEW: Final = ChangePosition(30, 0)
MINE: Final = [A, B]
OTHERS: Final = {"other": [D]}
STEPS_MAX: Final = 50

PLANS: Final = [(kind, 0) for kind in Fault] + [(kind, 1) for kind in sorted(UNKNOWN_FAULTS)]


def prepare(settings: BatchSettings) -> Desk:
    """Another transaction has something pending, and one that has ended left marks that are not on disk."""
    desk = make_desk(settings, (3, 2))
    desk.acknowledge_in("other", D)
    desk.acknowledge_in("ended", C)
    desk.store.abort_pending(NAME, "ended")
    return desk


def acknowledge(desk: Desk) -> None:
    progress = Progress(through=30, delivered=[LiveCommit(30, 1, [0, 1])])
    desk.store.acknowledge_in("mine", NAME, desk.epoch, progress, Acknowledgement(through=B))


def commit(desk: Desk) -> None:
    desk.store.commit_pending(NAME, "mine")


def abort(desk: Desk) -> None:
    desk.store.abort_pending(NAME, "mine")


def attempt(desk: Desk, run: Callable[[Desk], None]) -> str:
    """Run an operation; what its caller knows of it."""
    try:
        run(desk)
    except (OutcomeUnknown, SimulatedCrash):
        return "unknown"
    except FloodmarkError:
        return "not done"
    return "done"


def check_acknowledged(desk: Desk, known: str) -> None:
    """Nothing is acknowledged yet, and it is pending if the caller was told so."""
    assert set(MINE) <= set(desk.live())
    pending = desk.pending()
    mine = pending.pop("mine", None)
    # Records of one that has ended may come back.
    pending.pop("ended", None)
    assert pending == OTHERS
    allowed: dict[str, list[list[ChangePosition] | None]] = {
        "done": [MINE],
        "not done": [None],
        "unknown": [None, MINE],
    }
    assert mine in allowed[known]


def check_ended(desk: Desk, *, committed: bool) -> None:
    expected = [C, D, E] if committed else [A, B, C, D, E]
    assert [position for position in desk.live() if position != NEW] == expected
    assert desk.pending() == OTHERS


def visit_acknowledge(settings: BatchSettings, plan: FaultPlan) -> bool:
    desk = prepare(settings)
    desk.engine.arm(plan)
    known = attempt(desk, acknowledge)
    fired = desk.engine.fired
    for keep in range(desk.engine.unsynced + 1):
        image = desk.image(keep)
        check_acknowledged(image, known)
        image.store.settle_pending(settler({"mine": Decision.COMMIT, "other": Decision.UNDECIDED}))
        check_ended(image, committed=not set(MINE) <= set(image.live()))
    if plan.kind is Fault.CRASH and fired:
        return fired
    desk.engine.heal()
    if known != "done":
        # What is not known to be done is not pending here, and the next record takes it back.
        assert "mine" not in desk.pending()
        desk.acknowledge_in("next", E)
        assert "mine" not in desk.image(0).pending()
        desk.store.abort_pending(NAME, "next")
        acknowledge(desk)
    assert desk.pending() == {**OTHERS, "mine": MINE}
    check_acknowledged(desk.image(0), "done")
    return fired


def visit_end(settings: BatchSettings, plan: FaultPlan, *, committed: bool) -> bool:
    desk = prepare(settings)
    acknowledge(desk)
    decision = Decision.COMMIT if committed else Decision.ABORT
    desk.engine.arm(plan)
    known = attempt(desk, commit if committed else abort)
    for log in desk.store.pending_logs().values():
        log.writer.flush(HANG_SECONDS)
    fired = desk.engine.fired
    # One that has done its part is not told again; whoever asks about it then hears that it is unknown.
    decisions = {decision, Decision.ABORT} if known == "done" else {decision}
    for keep in range(desk.engine.unsynced + 1):
        for told in decisions:
            image = desk.image(keep)
            image.store.settle_pending(settler({"mine": told, "other": Decision.UNDECIDED}))
            check_ended(image, committed=committed)
            image.acknowledge_in("next", E)
            assert sorted(image.image(0).records()) == ["next", "other"]
    if plan.kind is Fault.CRASH and fired:
        return fired
    desk.engine.heal()
    if known != "done":
        (commit if committed else abort)(desk)
    check_ended(desk, committed=committed)
    desk.acknowledge_in("next", E)
    assert sorted(desk.image(0).records()) == ["next", "other"]
    return fired


VISITS: Final[dict[str, Callable[[BatchSettings, FaultPlan], bool]]] = {
    "acknowledge": visit_acknowledge,
    "commit": lambda settings, plan: visit_end(settings, plan, committed=True),
    "abort": lambda settings, plan: visit_end(settings, plan, committed=False),
}


@pytest.mark.parametrize("settings", only([BATCHED], [BATCHED, BARE]), ids=["batched", "bare"])
@pytest.mark.parametrize(("kind", "recover_failures"), PLANS)
@pytest.mark.parametrize("operation", VISITS)
def test_every_step_may_fail(
    operation: str, kind: Fault, recover_failures: int, settings: BatchSettings
) -> None:
    for at in count(1):
        assert at <= STEPS_MAX
        plan = FaultPlan(at=at, kind=kind, recover_failures=recover_failures)
        try:
            if not VISITS[operation](settings, plan):
                break
        except AssertionError as error:
            error.add_note(f"{operation}, {plan}")
            raise
    assert at > 1, "nothing was written"


@pytest.mark.parametrize("kind", sorted(set(Fault) - {Fault.CRASH}))
def test_nothing_that_has_ended_comes_back_where_a_subscription_could_not_be_removed(kind: Fault) -> None:
    for at in count(1):
        assert at <= STEPS_MAX
        desk = prepare(BATCHED)
        desk.store.abort_pending(NAME, "other")
        desk.time.advance(30_000)
        desk.engine.arm(FaultPlan(at=at, kind=kind))
        known = attempt(desk, lambda desk: desk.store.remove(NAME))
        fired = desk.engine.fired
        desk.engine.heal()
        if not fired:
            assert known == "done"
            break
        # The next caller brings storage back, and then it is known whether it was removed.
        desk.store.release(NAME, -1)
        if desk.store.list():
            desk.open()
            desk.acknowledge_in("mine", A)
            assert set(desk.pending()) == {"mine"}
    assert at > 1, "nothing was written"


# The checks must be able to fail.


def let_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log forgets before the subscription knows."""
    change_one = LocalSubscriptionStore._change

    def change(self: LocalSubscriptionStore, name: str, judge: Judge) -> None:
        ledger = self._pending.find(name)
        if ledger is not None:
            ledger.log.writer.acknowledge(ledger._positions.get("mine", ()))
        change_one(self, name, judge)

    monkeypatch.setattr(LocalSubscriptionStore, "_change", change)


def keep_commits_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    change_one = SubscriptionState.change

    def change(
        self: SubscriptionState, version: Version, change: SubscriptionChange
    ) -> tuple[WriteRow, bool]:
        (family, key, encoded), is_compaction_due = change_one(self, version, change)
        return (family, key, encoded if change.expires_at_ms is not None else None), is_compaction_due

    monkeypatch.setattr(SubscriptionState, "change", change)


def keep_what_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def give_up(self: PendingLedger, record: PendingRecord) -> None:
        with self.lock:
            if self.is_writing(record.transaction):
                self._end_writing(record)

    monkeypatch.setattr(PendingLedger, "give_up", give_up)


def write_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    write = Writing.write

    def write_others(self: Writing) -> None:
        record = self._record
        assert record is not None
        if record.transaction == "mine":
            with self._ledger.lock:
                self._ledger._end_writing(record)
        else:
            write(self)

    monkeypatch.setattr(Writing, "write", write_others)


def forget_to_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    def let_go(self: PendingLedger, transaction: str) -> None:
        self.pending.remove(transaction)

    monkeypatch.setattr(PendingLedger, "let_go", let_go)


@pytest.mark.parametrize(
    "sabotage", [let_go_first, keep_commits_in_memory, keep_what_failed, write_nothing, forget_to_let_go]
)
def test_the_check_finds_its_canaries(
    sabotage: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def look_everywhere() -> None:
        for operation in VISITS:
            for kind in (Fault.TRANSIENT, Fault.CRASH):
                test_every_step_may_fail(operation, kind, 0, BATCHED)

    sabotage(monkeypatch)
    with pytest.raises(AssertionError):
        look_everywhere()
