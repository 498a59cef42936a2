"""Acknowledgements in transactions: what is refused, and what becomes of those that are not."""

from collections.abc import Callable

import pytest
from tests.feed.support_pending import BARE, BATCHED, NAME, Desk, make_desk, settler

from floodmark.feed.subscription.acknowledgement import Acknowledgement, ChangePosition, LiveCommit, Progress
from floodmark.feed.subscription.pending import PENDING_LEDGERS, PendingRecord, decode_pending
from floodmark.log import BatchSettings, list_ledgers
from floodmark.model.errors import (
    AcknowledgementConflict,
    Corruption,
    InvalidArgument,
    LeaseHeld,
    LimitExceeded,
    SubscriptionNotFound,
)
from floodmark.model.partition import Decision

A, B, C = (ChangePosition(10, index) for index in range(3))
D, E = (ChangePosition(20, index) for index in range(2))
F, G, H = (ChangePosition(30, index) for index in range(3))
EVERYTHING = [A, B, C, D, E, F, G, H]

SETTINGS = pytest.mark.parametrize("settings", [BATCHED, BARE], ids=["batched", "bare"])


@pytest.fixture
def desk() -> Desk:
    return make_desk()


# What becomes of them


@SETTINGS
def test_what_a_committed_transaction_acknowledged_is_acknowledged(settings: BatchSettings) -> None:
    desk = make_desk(settings)
    desk.acknowledge_in("t", A, D)
    desk.acknowledge_in("t", C)
    assert (desk.live(), desk.pending()) == (EVERYTHING, {"t": [A, C, D]})
    assert desk.store.statistics(NAME).pending == 3
    desk.store.commit_pending(NAME, "t")
    assert (desk.live(), desk.pending()) == ([B, E, F, G, H], {})
    assert desk.store.statistics(NAME).pending == 0
    assert desk.records() == []


@SETTINGS
def test_what_an_aborted_transaction_acknowledged_is_available_again(settings: BatchSettings) -> None:
    desk = make_desk(settings)
    desk.acknowledge_in("t", A, D)
    desk.acknowledge_in("t", through=E)
    assert desk.pending() == {"t": [A, B, C, D, E]}
    desk.store.abort_pending(NAME, "t")
    assert (desk.live(), desk.pending(), desk.records()) == (EVERYTHING, {}, [])
    desk.acknowledge_in("u", A)
    desk.acknowledge(D)
    assert desk.pending() == {"u": [A]}


def test_all_up_to_a_position_can_be_acknowledged(desk: Desk) -> None:
    desk.acknowledge(B)
    desk.acknowledge_in("t", through=D)
    assert desk.pending() == {"t": [A, C, D]}
    assert desk.store.statistics(NAME).pending == 3
    desk.store.commit_pending(NAME, "t")
    assert desk.live() == [E, F, G, H]


def test_ending_a_transaction_twice_or_one_that_is_not_there_changes_nothing(desk: Desk) -> None:
    desk.acknowledge_in("t", A)
    desk.acknowledge_in("u", B)
    for end in (desk.store.commit_pending, desk.store.abort_pending):
        end(NAME, "nothing")
        end("nobody", "t")
    assert desk.pending() == {"t": [A], "u": [B]}
    desk.store.commit_pending(NAME, "t")
    desk.store.commit_pending(NAME, "t")
    desk.store.abort_pending(NAME, "t")
    desk.store.abort_pending(NAME, "u")
    desk.store.abort_pending(NAME, "u")
    desk.store.commit_pending(NAME, "u")
    assert (desk.live(), desk.pending()) == (EVERYTHING[1:], {})


def test_the_same_again_changes_nothing(desk: Desk) -> None:
    desk.acknowledge_in("t", A, A, B)
    desk.acknowledge_in("t", B, A)
    desk.acknowledge_in("t", A, C)
    desk.acknowledge_in("t", through=C)
    desk.acknowledge_in("t", through=B)
    desk.acknowledge_in("t", B, through=ChangePosition(10, 1_000))
    desk.acknowledge_in("t")
    assert desk.records() == ["t", "t", "t"]
    assert desk.pending() == {"t": [A, B, C]}


def test_a_transaction_may_go_on_with_all_up_to_a_later_position(desk: Desk) -> None:
    desk.acknowledge_in("t", E)
    desk.acknowledge_in("t", through=B)
    desk.acknowledge_in("t", through=F)
    assert desk.pending() == {"t": [A, B, C, D, E, F]}
    desk.store.commit_pending(NAME, "t")
    assert desk.live() == [G, H]


def test_what_a_consumer_tells_along_is_stored(desk: Desk) -> None:
    position = ChangePosition(40, 1)
    progress = Progress(
        through=40,
        delivered=[LiveCommit(40, 2, [0, 2])],
        acknowledgement=Acknowledgement(positions=[A], through=None),
    )
    desk.store.acknowledge_in("t", NAME, desk.epoch, progress, Acknowledgement(positions=[position]))
    desk.power_cut()
    assert desk.live() == [*EVERYTHING[1:], ChangePosition(40, 0), position]
    assert desk.pending() == {"t": [position]}


# Conflicts


def commit_a(desk: Desk) -> None:
    desk.acknowledge_in("u", A)
    desk.store.commit_pending(NAME, "u")


def acknowledge_a_and_all_in_t(desk: Desk) -> None:
    desk.acknowledge(A)
    desk.acknowledge_in("t", through=D)


def leave_a(desk: Desk) -> None:
    desk.acknowledge_in("u", A)
    desk.store.release(NAME, desk.epoch)


# What came before, what is refused, and the transaction that is in the way.
CONFLICTS: dict[str, tuple[Callable[[Desk], object], Callable[[Desk], object], str | None]] = {
    "acknowledged before": (
        lambda desk: desk.acknowledge(A),
        lambda desk: desk.acknowledge_in("t", B, A),
        None,
    ),
    "acknowledged before by a transaction": (
        commit_a,
        lambda desk: desk.acknowledge_in("t", A),
        None,
    ),
    "acknowledged before, below what the transaction acknowledged": (
        acknowledge_a_and_all_in_t,
        lambda desk: desk.acknowledge_in("t", B, A),
        None,
    ),
    "pending in another transaction": (
        lambda desk: desk.acknowledge_in("u", A),
        lambda desk: desk.acknowledge_in("t", B, A),
        "u",
    ),
    "below what another transaction acknowledged": (
        lambda desk: desk.acknowledge_in("u", through=D),
        lambda desk: desk.acknowledge_in("t", B),
        "u",
    ),
    "at what another transaction acknowledged": (
        lambda desk: desk.acknowledge_in("u", through=D),
        lambda desk: desk.acknowledge_in("t", E, D),
        "u",
    ),
    "all up to there acknowledged before": (
        lambda desk: desk.acknowledge(through=D),
        lambda desk: desk.acknowledge_in("t", through=C),
        None,
    ),
    "all up to a later position in another transaction": (
        lambda desk: desk.acknowledge_in("u", through=D),
        lambda desk: desk.acknowledge_in("t", through=B),
        "u",
    ),
    "all up to an earlier position in another transaction": (
        lambda desk: desk.acknowledge_in("u", through=B),
        lambda desk: desk.acknowledge_in("t", through=D),
        "u",
    ),
    "something below in another transaction": (
        lambda desk: desk.acknowledge_in("u", B),
        lambda desk: desk.acknowledge_in("t", through=D),
        "u",
    ),
    "something there in another transaction": (
        lambda desk: desk.acknowledge_in("u", D),
        lambda desk: desk.acknowledge_in("t", through=D),
        "u",
    ),
    "without a transaction": (
        lambda desk: desk.acknowledge_in("u", B),
        lambda desk: desk.acknowledge(A, B),
        "u",
    ),
    "without a transaction, with all before": (
        lambda desk: desk.acknowledge_in("u", B),
        lambda desk: desk.acknowledge(through=D),
        "u",
    ),
    "without a transaction, below all up to a position": (
        lambda desk: desk.acknowledge_in("u", through=D),
        lambda desk: desk.acknowledge(B),
        "u",
    ),
    "without a transaction, with all before, and all up to a position": (
        lambda desk: desk.acknowledge_in("u", through=D),
        lambda desk: desk.acknowledge(through=A),
        "u",
    ),
    "seek": (
        lambda desk: desk.acknowledge_in("u", A),
        lambda desk: desk.store.seek(NAME, 10, desk.epoch),
        "u",
    ),
    "remove": (
        leave_a,
        lambda desk: desk.store.remove(NAME),
        "u",
    ),
}


@SETTINGS
@pytest.mark.parametrize("name", CONFLICTS)
def test_a_conflict_is_refused_before_anything_is_written(name: str, settings: BatchSettings) -> None:
    prepare, attempt, owner = CONFLICTS[name]
    desk = make_desk(settings)
    prepare(desk)
    desk.time.advance(1)
    before = desk.engine.contents()
    known = desk.pending()
    with pytest.raises(AcknowledgementConflict) as refusal:
        attempt(desk)
    assert desk.engine.contents() == before
    assert desk.pending() == known
    assert refusal.value.details["transaction"] == owner
    assert refusal.value.details["subscription"] == NAME
    if owner is not None:
        assert f"floodmark txn abort {owner}" in str(refusal.value)


@pytest.mark.parametrize("end", ["commit_pending", "abort_pending"])
def test_after_the_end_there_is_no_conflict(desk: Desk, end: str) -> None:
    desk.acknowledge_in("u", through=B)
    getattr(desk.store, end)(NAME, "u")
    desk.acknowledge_in("t", C, through=D)
    desk.acknowledge_in("v", E)
    with pytest.raises(AcknowledgementConflict):
        desk.store.seek(NAME, 10, desk.epoch)
    for transaction in "tv":
        getattr(desk.store, end)(NAME, transaction)
    desk.store.seek(NAME, 10, desk.epoch)
    assert desk.live() == []


def test_what_does_not_meet_is_no_conflict(desk: Desk) -> None:
    desk.acknowledge_in("t", through=B)
    desk.acknowledge_in("u", C, H)
    desk.acknowledge_in("v", D)
    desk.acknowledge(E, F)
    assert desk.pending() == {"t": [A, B], "u": [C, H], "v": [D]}


# What else is refused


def test_only_the_consumer_acknowledges_and_only_what_it_got(desk: Desk) -> None:
    nothing = Acknowledgement(positions=[A])
    with pytest.raises(LeaseHeld):
        desk.store.acknowledge_in("t", NAME, desk.epoch - 1, desk.progress(), nothing)
    with pytest.raises(SubscriptionNotFound):
        desk.store.acknowledge_in("t", "nobody", desk.epoch, desk.progress(), nothing)
    with pytest.raises(SubscriptionNotFound):
        desk.store.pending("nobody")
    for acknowledgement in (
        Acknowledgement(positions=[A, ChangePosition(40, 0)]),
        Acknowledgement(through=ChangePosition(40, 0)),
    ):
        with pytest.raises(InvalidArgument, match="was not delivered"):
            desk.store.acknowledge_in("t", NAME, desk.epoch, desk.progress(), acknowledgement)
    many = Progress(through=40, delivered=[LiveCommit(40, 20_000, [0, 20_000])])
    with pytest.raises(LimitExceeded):
        desk.store.acknowledge_in("t", NAME, desk.epoch, many, nothing)
    assert (desk.pending(), desk.records()) == ({}, [])


def test_a_record_that_is_damaged_is_not_ignored() -> None:
    with pytest.raises(Corruption, match="restore the site from a backup"):
        decode_pending(b"\x93\x01")


# Consumers, restarts and the ledger


def test_a_transaction_outlives_the_consumer_and_its_lease(desk: Desk) -> None:
    desk.acknowledge_in("t", A)
    desk.time.advance(600_000)
    desk.open("two")
    assert desk.pending() == {"t": [A]}
    with pytest.raises(AcknowledgementConflict):
        desk.acknowledge_in("u", A)
    desk.acknowledge_in("t", B)
    desk.store.commit_pending(NAME, "t")
    assert desk.live() == EVERYTHING[2:]


def test_acknowledging_keeps_the_lease(desk: Desk) -> None:
    for position in EVERYTHING:
        desk.time.advance(15_000)
        desk.acknowledge_in("t", position)
    with pytest.raises(LeaseHeld):
        desk.open("two")


@SETTINGS
def test_a_restart_restores_what_is_open(settings: BatchSettings) -> None:
    desk = make_desk(settings)
    desk.acknowledge_in("t", A)
    desk.acknowledge_in("u", D)
    desk.acknowledge_in("t", B)
    desk.power_cut()
    assert desk.pending() == {"t": [A, B], "u": [D]}
    fates = {"t": Decision.UNDECIDED, "u": Decision.UNDECIDED}
    desk.store.settle_pending(settler(fates))
    assert desk.pending() == {"t": [A, B], "u": [D]}
    desk.store.settle_pending(settler({**fates, "t": Decision.COMMIT}))
    assert (desk.live(), desk.pending()) == (EVERYTHING[2:], {"u": [D]})
    desk.store.settle_pending(settler({}))
    assert (desk.live(), desk.pending(), desk.records()) == (EVERYTHING[2:], {}, [])


@pytest.mark.parametrize("fate", [Decision.COMMIT, Decision.ABORT])
def test_records_that_a_crash_brings_back_change_nothing(desk: Desk, fate: Decision) -> None:
    desk.acknowledge_in("t", A, through=B)
    desk.store.commit_pending(NAME, "t")
    desk.power_cut()
    assert desk.records() == ["t"]
    desk.store.settle_pending(settler({"t": fate}))
    assert (desk.live(), desk.pending(), desk.records()) == (EVERYTHING[2:], {}, [])


def test_records_from_before_a_move_mean_nothing(desk: Desk) -> None:
    desk.acknowledge_in("t", A)
    [log] = desk.store.pending_logs().values()
    stale = PendingRecord("t", desk.epoch, Acknowledgement(positions=[A, B]))
    desk.store.abort_pending(NAME, "t")
    desk.store.seek(NAME, 0, desk.epoch)
    desk.deliver(3, 2, 3)
    log.writer.write(stale)
    desk.power_cut()
    assert (desk.live(), desk.pending(), desk.records()) == (EVERYTHING, {}, [])
    desk.store.settle_pending(settler({"t": Decision.COMMIT}))
    assert desk.live() == EVERYTHING


def test_each_subscription_has_a_ledger_of_its_own_that_goes_with_it(desk: Desk) -> None:
    assert desk.store.pending_logs() == {}
    desk.acknowledge_in("t", A)
    assert list(desk.store.pending_logs()) == [NAME]
    assert list_ledgers(desk.engine) == [f"{PENDING_LEDGERS}{NAME}"]
    desk.store.commit_pending(NAME, "t")
    desk.store.release(NAME, desk.epoch)
    desk.store.remove(NAME)
    assert list_ledgers(desk.engine) == []
    assert desk.store.pending_logs() == {}
    desk.open()
    desk.deliver(1)
    desk.acknowledge_in("t", A)
    desk.power_cut()
    assert list(desk.store.pending_logs()) == [NAME]
    assert desk.pending() == {"t": [A]}


def test_the_ledger_does_not_grow_with_history(desk: Desk) -> None:
    for round_number in range(200):
        transaction = f"t{round_number}"
        desk.acknowledge_in(transaction, A, through=B)
        desk.store.abort_pending(NAME, transaction)
    assert desk.records() == []
    [log] = desk.store.pending_logs().values()
    assert sum(segment.entries for segment in log.ledger.segments()) == 0


@pytest.mark.parametrize("unacked", [10, 1_000])
def test_a_transaction_costs_the_same_however_much_is_unacknowledged(
    unacked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = make_desk(counts=(1,) * unacked)
    desk.acknowledge_in("s", ChangePosition(10, 0))
    touched: list[LiveCommit] = []
    copy, count_unacked = LiveCommit.copy, LiveCommit.unacked.fget  # type: ignore[attr-defined]

    def noting_copy(commit: LiveCommit) -> LiveCommit:
        touched.append(commit)
        return copy(commit)

    def noting_unacked(commit: LiveCommit) -> int:
        touched.append(commit)
        number: int = count_unacked(commit)
        return number

    monkeypatch.setattr(LiveCommit, "copy", noting_copy)
    monkeypatch.setattr(LiveCommit, "unacked", property(noting_unacked))
    desk.acknowledge_in("t", D)
    desk.store.commit_pending(NAME, "t")
    desk.acknowledge_in("u", ChangePosition(30, 0))
    desk.store.abort_pending(NAME, "u")
    assert {commit.version for commit in touched} == {D.version}
    assert desk.pending() == {"s": [ChangePosition(10, 0)]}
    assert D not in desk.live()


def test_a_store_that_was_closed_keeps_what_is_open(desk: Desk) -> None:
    desk.acknowledge_in("t", A)
    desk.store.close()
    desk.store.close()
    desk.store.commit_pending(NAME, "t")
    desk.power_cut()
    desk.store.settle_pending(settler({"t": Decision.COMMIT}))
    assert (desk.live(), desk.records()) == (EVERYTHING[1:], [])
