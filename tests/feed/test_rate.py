"""The rate limit under simulated time: never faster than promised, never slower than needed."""

from itertools import pairwise
from threading import Event, Thread

import pytest
from hypothesis import given
from hypothesis import strategies as st

from floodmark.clock.sources import monotonic_ms
from floodmark.feed.reading.rate import RateLimit
from floodmark.model.errors import InvalidArgument
from floodmark.testing import SimulatedTime

RATES = st.sampled_from([1, 3, 7, 10, 999, 1000, 1001, 64 * 1024 * 1024])


class Waiting:
    """A wait that lets simulated time pass, and a little more than asked for if so set."""

    def __init__(self, time: SimulatedTime, late_ms: int = 0) -> None:
        self.time = time
        self.late_ms = late_ms
        self.waits: list[float] = []
        self.called_off = False

    def __call__(self, seconds: float) -> bool:
        self.waits.append(seconds)
        if not self.called_off:
            self.time.advance(round(seconds * 1000) + self.late_ms)
        return self.called_off


def limited(rate: int | None, late_ms: int = 0) -> tuple[RateLimit, SimulatedTime, Waiting]:
    time = SimulatedTime()
    waiting = Waiting(time, late_ms)
    return RateLimit(rate, time, waiting), time, waiting


def assert_within(passed: list[tuple[int, int]], rate: int, burst: int) -> None:
    """Between any two moments no more went through than the rate allows, plus one burst."""
    for first, (start_ms, _) in enumerate(passed):
        total = 0
        for end_ms, amount in passed[first:]:
            total += amount
            allowed = rate * (end_ms - start_ms) / 1000 + burst
            assert total <= allowed, f"{total} bytes in {end_ms - start_ms} ms, allowed {allowed}"


def test_a_full_bucket_is_spent_without_waiting() -> None:
    limit, _, waiting = limited(100)
    assert limit.spend(60)
    assert limit.spend(40)
    assert waiting.waits == []


def test_what_is_missing_is_waited_for() -> None:
    limit, time, waiting = limited(100)
    limit.spend(100)
    assert limit.spend(25)
    assert waiting.waits == [0.25]
    time.advance(100)
    assert limit.spend(25)
    assert waiting.waits == [0.25, 0.15]


def test_idle_time_saves_up_one_second_and_no_more() -> None:
    limit, time, waiting = limited(100)
    limit.spend(100)
    time.advance(3_600_000)
    assert limit.spend(100)
    assert waiting.waits == []
    assert limit.spend(1)
    assert waiting.waits == [0.01]


def test_an_amount_above_the_bucket_waits_for_all_that_it_is_worth() -> None:
    limit, _, waiting = limited(100)
    assert limit.spend(1100)
    assert waiting.waits == [10.0]
    assert limit.spend(100)
    assert waiting.waits == [10.0, 1.0]


def test_no_limit_never_waits() -> None:
    limit, _, waiting = limited(None)
    assert all(limit.spend(1 << 60) for _ in range(3))
    assert waiting.waits == []


def test_called_off_while_waiting_spends_nothing() -> None:
    limit, time, waiting = limited(100)
    limit.spend(100)
    waiting.called_off = True
    assert not limit.spend(100)
    waiting.called_off = False
    time.advance(1000)
    assert limit.spend(100)
    assert waiting.waits == [1.0]


def test_a_clock_that_stands_still_cannot_hold_it_up() -> None:
    waits: list[float] = []
    limit = RateLimit(100, lambda: 5, waits.append)
    assert all(limit.spend(100) for _ in range(4))
    assert waits == [1.0, 1.0, 1.0]


def test_a_clock_that_is_set_back_costs_no_more_than_the_time_lost() -> None:
    limit, time, waiting = limited(100)
    limit.spend(100)
    time.advance(-3_600_000)
    assert limit.spend(100)
    assert waiting.waits == [1.0]


def test_an_event_that_is_set_ends_the_wait_of_a_real_thread() -> None:
    closing = Event()
    limit = RateLimit(1, monotonic_ms, closing.wait)
    results: list[bool] = []
    thread = Thread(target=lambda: results.append(limit.spend(1_000_000)))
    thread.start()
    closing.set()
    thread.join(timeout=30)
    assert results == [False]


@pytest.mark.parametrize("rate", [0, -1])
def test_a_rate_that_lets_nothing_through_is_refused(rate: int) -> None:
    with pytest.raises(InvalidArgument, match="None for no limit"):
        RateLimit(rate, SimulatedTime(), Event().wait)


steps = st.lists(st.tuples(st.integers(0, 1500), st.floats(0, 1)), min_size=1, max_size=30)


@given(RATES, steps, st.integers(0, 3))
def test_never_more_than_the_rate_and_one_burst(
    rate: int, pauses: list[tuple[int, float]], late_ms: int
) -> None:
    limit, time, _ = limited(rate, late_ms)
    passed: list[tuple[int, int]] = []
    for pause_ms, share in pauses:
        time.advance(pause_ms)
        amount = round(rate * share)
        assert limit.spend(amount)
        passed.append((time(), amount))
    assert_within(passed, rate, burst=rate)


@given(RATES, st.lists(st.floats(0, 4), min_size=1, max_size=30))
def test_amounts_of_any_size_flow_at_the_rate_and_no_slower(rate: int, shares: list[float]) -> None:
    limit, time, waiting = limited(rate)
    start_ms = time()
    amounts = [round(rate * share) for share in shares]
    passed: list[tuple[int, int]] = []
    for amount in amounts:
        assert limit.spend(amount)
        passed.append((time(), amount))
    assert_within(passed, rate, burst=max(rate, *amounts, 0))
    # The bucket was full at first, and each wait is rounded up to milliseconds.
    needed_ms = max(0, sum(amounts) - rate) * 1000 / rate
    assert time() - start_ms <= needed_ms + len(waiting.waits)
    assert all(seconds > 0 for seconds in waiting.waits)


def test_the_check_finds_a_limit_that_lets_too_much_through() -> None:
    passed = [(0, 100), (500, 51), (1000, 50)]
    assert all(later >= earlier for (earlier, _), (later, _) in pairwise(passed))
    with pytest.raises(AssertionError, match="151 bytes in 500 ms"):
        assert_within(passed, rate=100, burst=100)
