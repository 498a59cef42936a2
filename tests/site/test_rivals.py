"""Transactions that lost a conflict on a key try again one after the other."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.site.support import HookedEngine, open_memory
from tests.waiting import HANG_SECONDS

from floodmark.model.errors import Conflict, Retryable
from floodmark.site import rivals
from floodmark.site.coordinated import Pace
from floodmark.site.rivals import Retries, Rivals
from floodmark.site.transaction import ATTEMPTS_MAX, Transaction, run_transaction
from floodmark.testing.clock import SimulatedTime

ADA, BOB = Conflict("lost", key=b"ada"), Conflict("lost", key=b"bob")


@pytest.fixture(autouse=True)
def keys_with_turns_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rivals, "hash", {b"ada": 0, b"bob": 1}.__getitem__, raising=False)


def begin(turns: Rivals, slept: list[float]) -> Retries:
    return turns.retries(Pace(sleep=slept.append, random=lambda: 1.0))


def test_the_turn_of_a_key_needs_no_pause_and_a_further_loss_does() -> None:
    slept: list[float] = []
    retries = begin(Rivals(), slept)
    retries.wait(ADA)
    assert slept == []
    retries.wait(ADA)
    retries.wait(ADA)
    retries.wait(BOB)
    retries.wait(Retryable("no key is named"))
    assert slept == [0.002, 0.004, 0.008]


def test_a_rival_waits_for_the_turn_and_gets_it_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rivals, "WAIT_SECONDS", HANG_SECONDS)
    turns, slept = Rivals(), list[float]()
    first, second = begin(turns, slept), begin(turns, slept)
    first.wait(ADA)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(second.wait, ADA)
        assert not waiting.done()
        first.leave()
        waiting.result(HANG_SECONDS)
    assert slept == []


def test_a_turn_that_is_not_given_back_is_not_waited_for_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rivals, "WAIT_SECONDS", 0.001)
    turns, slept = Rivals(), list[float]()
    first, second = begin(turns, slept), begin(turns, slept)
    first.wait(ADA)
    second.wait(ADA)
    second.leave()
    first.leave()


def test_a_loss_on_another_key_gives_the_turn_back() -> None:
    turns, slept = Rivals(), list[float]()
    first, second = begin(turns, slept), begin(turns, slept)
    first.wait(ADA)
    first.wait(BOB)
    second.wait(ADA)
    second.wait(ADA)
    assert slept == [0.002]


@pytest.mark.parametrize(("seconds_each", "attempts"), [(0, ATTEMPTS_MAX), (25, 3)])
def test_work_that_always_conflicts_is_given_up_after_a_number_of_attempts_or_a_time(
    engine: HookedEngine, time: SimulatedTime, seconds_each: int, attempts: int
) -> None:
    passed: list[int] = []
    with open_memory(engine, time) as site:
        users = site.create_namespace("users")

        def work(transaction: Transaction) -> None:
            transaction.put(users, b"ada", transaction.get(users, b"ada") or b"0")
            users.put(b"ada", b"of another")
            passed.append(seconds_each)

        pace = Pace(time_seconds=lambda: sum(passed), sleep=lambda _: None)
        with pytest.raises(Conflict, match="begin the transaction again"):
            run_transaction(lambda _: site.transaction(), work, pace=pace, rivals=Rivals())
    assert len(passed) == attempts
