"""What a coordinator says and refuses, one transaction at a time."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import pairwise, product

import pytest
from tests.transaction.support import (
    ABORT,
    ABORTING,
    COMMIT,
    COMMITTING,
    LONG,
    OPEN,
    GatedEngine,
    World,
    decide,
    partition,
    subscription,
)
from tests.waiting import HANG_SECONDS

from floodmark.log import FAMILY
from floodmark.model.errors import (
    Closed,
    Corruption,
    FloodmarkError,
    InvalidArgument,
    LimitExceeded,
    PartlyDone,
    Retryable,
    TransactionEnded,
    TransactionNotFound,
)
from floodmark.model.limits import TRANSACTION_PARTICIPANTS_MAX
from floodmark.model.partition import Decision, Fate
from floodmark.model.transaction import TransactionState, Waiting
from floodmark.testing import Fault, FaultPlan, FaultyEngine
from floodmark.transaction import book, steps
from floodmark.transaction.records import (
    Aborting,
    Begun,
    Committing,
    Joined,
    Record,
    decode_record,
    encode_record,
)

P, Q, S = partition("0a"), partition("0b"), subscription("indexer")
COMMITTED, ABORTED = TransactionState.COMMITTED, TransactionState.ABORTED


@pytest.fixture(params=[True, False], ids=["batched", "bare"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    world = World(enabled=request.param)
    yield world
    world.coordinator.close()
    assert not world.parts.wrong


# From the beginning to the end


def test_a_transaction_is_begun_joined_and_committed(world: World) -> None:
    coordinator = world.coordinator
    transaction = coordinator.begin(timedelta(seconds=10))
    assert transaction == "7-1"
    for participant in (P, S, P):
        coordinator.join(transaction, participant)
    assert coordinator.fate(transaction) == Fate(Decision.UNDECIDED)
    shown = coordinator.show(transaction)
    assert (shown.state, shown.participants, shown.waiting_for) == (OPEN, [P, S], [])
    assert (shown.coordinator, shown.age_ms, shown.remaining_ms) == (7, 0, 10_000)

    assert coordinator.commit(transaction, 99) == 99
    assert world.parts.told == {(transaction, P): (COMMIT, 99), (transaction, S): (COMMIT, 99)}
    assert coordinator.fate(transaction) == Fate(Decision.COMMIT, 99)
    assert coordinator.show(transaction).state is COMMITTED
    assert coordinator.transactions() == []


def test_an_abort_tells_the_participants_and_keeps_its_reason(world: World) -> None:
    coordinator = world.coordinator
    transaction = coordinator.begin()
    coordinator.join(transaction, P)
    coordinator.abort(transaction, "the operator " + "x" * 1_000)
    assert world.parts.decisions(transaction) == {(ABORT, 0)}
    assert coordinator.fate(transaction) == Fate(Decision.ABORT)
    shown = coordinator.show(transaction)
    assert shown.state is ABORTED
    assert shown.reason.startswith("the operator x")
    assert len(shown.reason) == 500
    with pytest.raises(TransactionEnded, match=r"is aborted \(the operator"):
        coordinator.join(transaction, Q)


def test_the_log_has_a_record_of_each_step_and_none_after_the_end(world: World) -> None:
    coordinator = world.coordinator
    transaction = coordinator.begin(timedelta(seconds=10))
    coordinator.join(transaction, P)
    begun = Begun(transaction, world.wall() + 10_000, 10_000)
    assert world.live() == [begun, Joined(transaction, P)]
    world.parts.failing = {P}
    decide(coordinator, transaction, 5)
    coordinator.sweep()
    assert world.live() == [begun, Joined(transaction, P), Committing(transaction, 5)]
    world.parts.failing = set()
    coordinator.commit(transaction, 5)
    assert world.live() == []
    assert world.entries() == 0

    other = coordinator.begin()
    coordinator.abort(other)
    assert world.live() == []
    assert world.entries() == 0


def test_transactions_that_are_still_open_keep_only_their_own_records(world: World) -> None:
    coordinator = world.coordinator
    ids = [coordinator.begin() for _ in range(10)]
    for transaction in ids:
        coordinator.join(transaction, P)
    for index, transaction in enumerate(ids[1:], start=1):
        coordinator.commit(transaction, index)
    assert {record.transaction for record in world.live()} == {ids[0]}
    assert len(world.live()) == 2


def test_ending_twice_the_same_way_is_fine_and_the_other_way_is_refused(world: World) -> None:
    coordinator = world.coordinator
    committed, aborted = coordinator.begin(), coordinator.begin()
    assert coordinator.commit(committed, 5) == 5
    assert coordinator.commit(committed, 6) == 5, "the version at which it was committed"
    coordinator.abort(aborted)
    coordinator.abort(aborted)
    wrong: list[Callable[[], object]] = [
        lambda: coordinator.abort(committed),
        lambda: coordinator.commit(aborted, 8),
        lambda: coordinator.join(committed, P),
        lambda: coordinator.join(aborted, P),
    ]
    for call in wrong:
        with pytest.raises(TransactionEnded, match="begin another one"):
            call()
    assert world.live() == []


def test_whoever_names_a_transaction_that_never_was_is_told_so(world: World) -> None:
    coordinator = world.coordinator
    calls: list[Callable[[str], object]] = [
        lambda name: coordinator.commit(name, 1),
        coordinator.abort,
        lambda name: coordinator.join(name, P),
        coordinator.show,
    ]
    for call in calls:
        with pytest.raises(TransactionNotFound, match="has ended, or never was"):
            call("7-999")
    assert coordinator.fate("7-999") == Fate(Decision.ABORT)
    with pytest.raises(TransactionNotFound) as raised:
        coordinator.show("x" * 10_000)
    assert len(str(raised.value)) < 200


def test_only_the_last_ended_transactions_are_remembered(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(book, "ENDED_REMEMBERED", 3)
    coordinator = world.coordinator
    ids = [coordinator.begin() for _ in range(5)]
    for transaction in ids:
        coordinator.commit(transaction, 1)
    for transaction in ids[:2]:
        with pytest.raises(TransactionNotFound):
            coordinator.commit(transaction, 1)
    assert [coordinator.commit(transaction, 2) for transaction in ids[2:]] == [1, 1, 1]


def test_a_sweep_tells_the_participants_of_all_that_is_decided(world: World) -> None:
    coordinator = world.coordinator
    ids = [coordinator.begin() for _ in range(20)]
    for participant, each in product((P, S, P), ids):
        coordinator.join(each, participant)
    for number, each in enumerate(ids):
        decide(coordinator, each, 5 if number < 10 else 0)
    assert set(world.states().values()) == {COMMITTING, ABORTING}
    assert world.parts.told == {}
    coordinator.sweep()
    assert world.states() == {}
    assert all(world.parts.decisions(each) == {(COMMIT, 5)} for each in ids[:10])
    assert all(world.parts.decisions(each) == {(ABORT, 0)} for each in ids[10:])
    assert world.live() == []


# Participants that fail


def test_participants_are_told_again_with_growing_pauses_and_shown_until_they_have_done_their_part(
    world: World,
) -> None:
    coordinator = world.coordinator
    transaction = coordinator.begin(LONG)
    for participant in (P, Q, S):
        coordinator.join(transaction, participant)
    world.parts.failing = {Q, S}
    decide(coordinator, transaction, 5)
    told_at = []
    for _ in range(1_500):
        before = world.parts.calls[transaction, Q]
        coordinator.sweep()
        if world.parts.calls[transaction, Q] > before:
            told_at.append(world.growing())
        world.advance(50)
    pauses = [later - earlier for earlier, later in pairwise(told_at)]
    assert pauses[:10] == [50, 100, 200, 400, 800, 1_600, 3_200, 6_400, 10_000, 10_000]
    assert set(pauses[8:]) == {10_000}
    assert world.parts.calls[transaction, P] == 1, "who has done its part is left alone"
    [shown] = coordinator.transactions()
    assert (shown.state, shown.version, shown.remaining_ms) == (COMMITTING, 5, 0)
    attempts = len(told_at)
    assert shown.waiting_for == [
        Waiting(participant=Q, attempts=attempts, error="0b is away"),
        Waiting(participant=S, attempts=attempts, error="indexer is away"),
    ]
    world.parts.failing = {S}
    world.advance(10_000)
    coordinator.sweep()
    assert [each.participant for each in coordinator.show(transaction).waiting_for] == [S]
    world.parts.failing = set()
    world.advance(10_000)
    coordinator.sweep()
    assert coordinator.transactions() == []
    assert coordinator.show(transaction).state is COMMITTED
    assert world.live() == []


@pytest.mark.parametrize("way", ["commit", "abort"])
def test_the_caller_hears_after_a_while_that_it_is_decided_but_not_done(world: World, way: str) -> None:
    coordinator = world.coordinator
    transaction = coordinator.begin()
    coordinator.join(transaction, Q)
    world.parts.failing = {Q}

    def end() -> None:
        if way == "commit":
            coordinator.commit(transaction, 5)
        else:
            coordinator.abort(transaction)

    for attempts in (1, 2):
        with pytest.raises(PartlyDone, match="and stays so, but partition 0b has not confirmed"):
            end()
        assert world.parts.calls[transaction, Q] == attempts, "each caller tries once"
    assert coordinator.fate(transaction).decision is (Decision.COMMIT if way == "commit" else Decision.ABORT)
    with pytest.raises(TransactionEnded):
        coordinator.abort(transaction) if way == "commit" else coordinator.commit(transaction, 5)
    world.parts.failing = set()
    end()
    assert coordinator.transactions() == []


def test_a_bug_in_a_participant_keeps_neither_the_others_nor_other_transactions(world: World) -> None:
    def on_call(participant: object) -> None:
        if participant == P:
            raise ZeroDivisionError

    world.parts.on_call = on_call
    coordinator = world.coordinator
    broken, fine = coordinator.begin(), coordinator.begin()
    for transaction, participants in ((broken, (P, Q)), (fine, (Q,))):
        for participant in participants:
            coordinator.join(transaction, participant)
        decide(coordinator, transaction, 5)
    coordinator.sweep()
    assert world.parts.told == {(broken, Q): (COMMIT, 5), (fine, Q): (COMMIT, 5)}
    [shown] = coordinator.transactions()
    assert shown.waiting_for == [Waiting(participant=P, attempts=1, error="ZeroDivisionError()")]


# Taking part


def test_nobody_decides_while_a_participant_does_its_part(world: World) -> None:
    coordinator = world.coordinator
    transaction = coordinator.begin(timedelta(seconds=1))
    with coordinator.taking_part(transaction, P):
        with coordinator.taking_part(transaction, P), coordinator.taking_part(transaction, Q):
            pass
        for end in (lambda: coordinator.commit(transaction, 5), lambda: coordinator.abort(transaction)):
            with pytest.raises(Retryable, match="is under way"):
                end()
        world.advance(1_000)
        coordinator.sweep()
        assert coordinator.fate(transaction) == Fate(Decision.UNDECIDED)
        assert world.states() == {transaction: OPEN}
    coordinator.sweep()
    assert world.parts.told == {(transaction, P): (ABORT, 0), (transaction, Q): (ABORT, 0)}


def test_a_part_that_fails_leaves_the_transaction_as_it_was(world: World) -> None:
    coordinator = world.coordinator
    transaction = coordinator.begin()
    with pytest.raises(ZeroDivisionError), coordinator.taking_part(transaction, P):
        raise ZeroDivisionError
    assert coordinator.show(transaction).participants == [P]
    assert coordinator.commit(transaction, 5) == 5
    with pytest.raises(TransactionEnded), coordinator.taking_part(transaction, P):
        raise AssertionError("it has ended")


# Limits


@pytest.mark.parametrize("timeout", [timedelta(0), timedelta(microseconds=999), timedelta(-1), 1.001 * LONG])
def test_a_timeout_that_makes_no_sense_is_refused(world: World, timeout: timedelta) -> None:
    with pytest.raises(InvalidArgument, match="between a millisecond and 24 hours"):
        world.coordinator.begin(timeout)
    assert world.live() == []


def test_open_transactions_have_a_limit_and_those_on_their_way_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(steps, "TRANSACTIONS_OPEN_MAX", 3)
    world = World(engine := GatedEngine())
    ids = [world.coordinator.begin() for _ in range(2)]
    engine.entered.clear()
    engine.gate.clear()
    with ThreadPoolExecutor(1) as pool:
        third = pool.submit(world.coordinator.begin)
        assert engine.entered.wait(HANG_SECONDS)
        with pytest.raises(LimitExceeded, match="coordinator 7 has 3 open transactions; end some"):
            world.coordinator.begin()
        engine.gate.set()
    assert world.states() == dict.fromkeys([*ids, third.result()], OPEN)
    world.coordinator.abort(ids[0])
    world.coordinator.begin()
    world.coordinator.close()


def test_no_owner_holds_all_transactions_that_may_be_open(world: World) -> None:
    begun = [world.coordinator.begin(LONG, "indexer", owned_max=2) for _ in range(2)]
    for _ in range(2):
        with pytest.raises(LimitExceeded, match=r"2 open transactions of this caller.*end some"):
            world.coordinator.begin(LONG, "indexer", owned_max=2)
        assert world.coordinator.begin(LONG, "other", owned_max=2), "others go on"
        world.restart()
    world.coordinator.commit(begun[0], 5)
    begun.append(world.coordinator.begin(LONG, "indexer", owned_max=2))
    for transaction in begun[1:]:
        world.coordinator.abort(transaction)
    assert set(world.coordinator._book.owned) == {"other"}


def test_a_begin_that_fails_does_not_count_for_its_owner() -> None:
    engine = FaultyEngine((FAMILY,))
    coordinator = World(engine).coordinator
    for kind in (Fault.TRANSIENT, Fault.UNKNOWN_LOST):
        engine.arm(FaultPlan(at=1, kind=kind))
        with pytest.raises(FloodmarkError):
            coordinator.begin(LONG, "indexer", owned_max=1)
        engine.heal()
    assert coordinator.begin(LONG, "indexer", owned_max=1)


def test_participants_of_a_transaction_have_a_limit(world: World) -> None:
    coordinator = world.coordinator
    transaction = coordinator.begin()
    for number in range(TRANSACTION_PARTICIPANTS_MAX):
        coordinator.join(transaction, partition(f"{number:02x}"))
    with pytest.raises(LimitExceeded, match=r"64 participants.*in several transactions"):
        coordinator.join(transaction, S)
    coordinator.join(transaction, partition("00"))
    coordinator.commit(transaction, 5)
    assert len(world.parts.told) == TRANSACTION_PARTICIPANTS_MAX


# Closing


def test_close_writes_what_is_on_its_way_and_then_refuses(world: World) -> None:
    coordinator = world.coordinator
    ids = [coordinator.begin() for _ in range(10)]
    coordinator.close()
    calls: list[Callable[[], object]] = [
        coordinator.begin,
        lambda: coordinator.join(ids[0], P),
        lambda: coordinator.commit(ids[0], 5),
        lambda: coordinator.abort(ids[0]),
    ]
    for call in calls:
        with pytest.raises(Closed, match="open it again"):
            call()
    assert not coordinator.wait_work()
    coordinator.sweep()
    coordinator.close()
    world.coordinator = world.open()
    assert world.states() == dict.fromkeys(ids, OPEN)


def test_a_closed_coordinator_tells_nobody_and_the_next_one_does(world: World) -> None:
    coordinator = world.coordinator
    transaction = coordinator.begin(timedelta(seconds=1))
    late = coordinator.begin(timedelta(seconds=1))
    for each in (transaction, late):
        coordinator.join(each, P)
    decide(coordinator, transaction, 5)
    coordinator.close()
    with pytest.raises(PartlyDone, match="open the site again"):
        coordinator.commit(transaction, 5)
    world.advance(1_000)
    coordinator.sweep()
    assert coordinator.fate(late) == Fate(Decision.UNDECIDED)
    assert world.parts.told == {}
    world.coordinator = world.open()
    assert world.coordinator.fate(transaction) == Fate(Decision.COMMIT, 5), "it answers before it has swept"
    world.coordinator.sweep()
    assert world.parts.told == {(transaction, P): (COMMIT, 5), (late, P): (ABORT, 0)}


# Records


@pytest.mark.parametrize(
    "record",
    [Begun("7-1", 5, 6), Joined("7-1", P), Joined("", S), Committing("7-1", 1 << 62), Aborting("", "é")],
)
def test_records_come_back_as_they_were_and_never_look_like_a_batch(
    record: Begun | Joined | Committing | Aborting,
) -> None:
    encoded = encode_record(record)
    assert decode_record(encoded) == record
    assert encoded[0] >> 4 == 0x9, "an array of messagepack"


@pytest.mark.parametrize(
    "damaged", [b"", b"\x93", b"\x93\x09\xa1a\x01", encode_record(Begun("7-1", 5, 6))[:-1]]
)
def test_damaged_records_are_named(damaged: bytes) -> None:
    with pytest.raises(Corruption, match="restore the site from a backup"):
        decode_record(damaged)


def test_whoever_closes_does_not_wait_until_all_of_many_are_told(world: World) -> None:
    ids = [world.coordinator.begin(LONG) for _ in range(3)]
    for transaction in ids:
        world.coordinator.join(transaction, P)
        decide(world.coordinator, transaction, 5)
    world.parts.on_call = lambda _: world.coordinator.close()
    world.coordinator.sweep()
    assert len(world.parts.told) == 1
    world.parts.on_call = lambda _: None
    world.restart().sweep()
    assert world.parts.told == {(transaction, P): (COMMIT, 5) for transaction in ids}
    assert world.live() == []


ORPHANS: list[Record] = [Joined("7-x", P), Committing("7-x", 5), Aborting("7-x", "on purpose")]


@pytest.mark.parametrize("orphans", [ORPHANS[:1], ORPHANS[1:2], ORPHANS], ids=["joined", "decided", "all"])
def test_records_whose_transaction_has_ended_are_let_go_of_with_a_warning(
    world: World, orphans: list[Record], caplog: pytest.LogCaptureFixture
) -> None:
    transaction = world.coordinator.begin(LONG)
    for record in orphans:
        world.coordinator.log.write(record)
    again = world.restart()
    assert caplog.text.count("of transaction 7-x, which has ended; it has no effect") == len(orphans)
    assert world.states() == {transaction: OPEN}
    assert again.fate("7-x").decision is Decision.ABORT
    assert [record.transaction for record in world.live()] == [transaction]
    caplog.clear()
    world.restart()
    assert caplog.text == ""
    assert not world.parts.told


def test_of_two_decisions_in_the_log_the_later_one_holds(world: World) -> None:
    """Nobody was told of the first one: it was on its way when its process was torn out of it."""
    first, second = world.coordinator.begin(LONG), world.coordinator.begin(LONG)
    for record in (
        Committing(first, 5),
        Aborting(first, "late"),
        Aborting(second, ""),
        Committing(second, 6),
    ):
        world.coordinator.log.write(record)
    again = world.restart()
    assert again.fate(first) == Fate(Decision.ABORT)
    assert again.fate(second) == Fate(Decision.COMMIT, 6)
    again.sweep()
    assert world.live() == []
