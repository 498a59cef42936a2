"""One wrong reading of the machine's clock is refused, and right ones are believed however long it took."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.clock.fakes import FakeBound, FakeTime

from floodmark.clock import GuardedTime, HybridClock, elapsed_ms
from floodmark.clock.guard import GAP_MS_MAX, JUMP_MS_MAX
from floodmark.model.errors import ClockSkew
from floodmark.model.version import physical_ms

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
YEAR_MS = 365 * DAY_MS


def test_reading_a_year_ahead_is_refused_and_the_next_right_one_believed() -> None:
    wall, elapsed = FakeTime(), FakeTime(0)
    time = GuardedTime(wall, elapsed)
    before = time()
    wall.ms += YEAR_MS
    for _ in range(3):
        with pytest.raises(ClockSkew, match=r"8,760 hours later.*doctor DIRECTORY --accept-clock") as refused:
            time()
    assert refused.value.details["ahead_ms"] == YEAR_MS
    wall.ms -= YEAR_MS - 5
    assert time() == before + 5


@pytest.mark.parametrize("slept_ms", [1, DAY_MS, 10 * YEAR_MS])
def test_time_that_has_really_passed_is_believed(slept_ms: int) -> None:
    wall, elapsed = FakeTime(), FakeTime(0)
    time = GuardedTime(wall, elapsed)
    time()
    wall.ms += slept_ms
    elapsed.ms += slept_ms
    assert time() == wall.ms


def test_jump_is_tolerated_up_to_the_limit() -> None:
    wall, elapsed = FakeTime(), FakeTime(0)
    time = GuardedTime(wall, elapsed)
    time()
    wall.ms += JUMP_MS_MAX + 1
    with pytest.raises(ClockSkew):
        time()
    wall.ms -= 1
    assert time() == wall.ms


@pytest.mark.parametrize("measured", [False, True])
def test_first_reading_is_compared_with_what_is_stored(measured: bool) -> None:
    """Nothing has measured how long a site was closed."""
    wall = FakeTime()
    time = GuardedTime(wall, FakeTime(0) if measured else None)
    time.start(wall.ms - GAP_MS_MAX)
    assert time() == wall.ms
    late = GuardedTime(wall, FakeTime(0) if measured else None)
    late.start(wall.ms - GAP_MS_MAX - 1)
    with pytest.raises(ClockSkew):
        late()


def test_clock_of_a_new_site_is_believed() -> None:
    time = GuardedTime(FakeTime(10 * YEAR_MS), FakeTime(0))
    time.start(0)
    assert time() == 10 * YEAR_MS


def test_jump_back_is_no_matter_for_the_guard() -> None:
    wall, elapsed = FakeTime(), FakeTime(0)
    time = GuardedTime(wall, elapsed)
    time()
    wall.ms -= YEAR_MS
    assert time() == wall.ms
    wall.ms += YEAR_MS
    assert time() == wall.ms


@given(
    st.lists(st.tuples(st.integers(0, 3 * DAY_MS), st.sampled_from([0, 0, HOUR_MS, YEAR_MS])), max_size=30)
)
def test_believed_readings_never_lead_what_has_passed_by_more_than_the_jumps_that_were_tolerated(
    steps: list[tuple[int, int]],
) -> None:
    wall, elapsed = FakeTime(), FakeTime(0)
    time = GuardedTime(wall, elapsed)
    start, tolerated = time(), 0
    for passed_ms, jump_ms in steps:
        wall.ms += passed_ms + jump_ms
        elapsed.ms += passed_ms
        try:
            assert time() <= start + elapsed.ms + tolerated + jump_ms
            assert jump_ms <= JUMP_MS_MAX
            tolerated += jump_ms
        except ClockSkew:
            assert jump_ms == YEAR_MS
            wall.ms -= jump_ms


def test_one_reading_a_year_ahead_is_not_kept_across_a_restart() -> None:
    wall, bound = FakeTime(), FakeBound()
    clock = HybridClock(GuardedTime(wall, FakeTime(0)), upper_bound=bound)
    before = clock.now()
    wall.ms += YEAR_MS
    with pytest.raises(ClockSkew):
        clock.now()
    assert clock.latest == before
    wall.ms -= YEAR_MS
    guarded = GuardedTime(wall, FakeTime(0))
    reborn = HybridClock(guarded, upper_bound=bound)
    guarded.start(physical_ms(reborn.latest))
    assert physical_ms(reborn.now()) - wall.ms < HOUR_MS


# Expiry


def test_expiry_is_judged_by_real_time_after_a_set_back() -> None:
    wall = FakeTime()
    clock = HybridClock(wall)
    version = clock.now()
    wall.ms -= HOUR_MS
    assert wall.ms <= clock.physical_ms() <= wall.ms + 500
    assert wall.ms <= clock.judged_ms(version) <= wall.ms + 500
    wall.ms += 60_000
    assert wall.ms <= clock.physical_ms() <= wall.ms + 500


def test_the_time_of_the_next_version_never_goes_back() -> None:
    wall = FakeTime()
    clock = HybridClock(wall)
    wall.ms += 1
    assert clock.version_ms() == wall.ms
    version = clock.now()
    wall.ms -= HOUR_MS
    assert clock.version_ms() == physical_ms(version) == physical_ms(clock.now())


def test_expiry_is_judged_at_the_last_version_if_that_is_a_little_ahead() -> None:
    wall = FakeTime()
    clock = HybridClock(wall)
    version = clock.now()
    wall.ms -= 300
    assert clock.physical_ms() == physical_ms(version)
    assert clock.judged_ms(version - (HOUR_MS << 18)) == physical_ms(version) - HOUR_MS


def test_reads_go_on_while_the_clock_is_not_believed() -> None:
    wall = FakeTime()
    clock = HybridClock(GuardedTime(wall, FakeTime(0)))
    version = clock.now()
    wall.ms += YEAR_MS
    assert physical_ms(version) <= clock.physical_ms() <= physical_ms(version) + 500
    assert clock.ahead_ms() == 0


def test_elapsed_time_grows() -> None:
    first = elapsed_ms()
    assert elapsed_ms() >= first > 0
