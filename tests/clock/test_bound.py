"""The stored upper bound: no version is minted twice, whenever the process dies."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.clock.fakes import FakeBound, FakeTime

from floodmark.clock import HybridClock
from floodmark.clock.hybrid import BOUND_LEAD_MS
from floodmark.model.errors import ClockSkew, StorageFailed
from floodmark.model.version import Version, compose, physical_ms

HOUR_MS = 3_600_000

STEPS = st.one_of(
    st.tuples(st.just("mint"), st.integers(1, 5)),
    st.tuples(st.just("time"), st.sampled_from([1, 100, 249, 250, 251, 1000, -1, -300, -HOUR_MS])),
    st.tuples(st.just("observe"), st.sampled_from([-5, 0, 200, 251, 499, 500, 501])),
    st.tuples(st.just("crash"), st.sampled_from([0, 1, -1, -HOUR_MS, HOUR_MS])),
    st.tuples(st.just("close"), st.sampled_from([0, 1, -1, -HOUR_MS, HOUR_MS])),
    st.tuples(st.just("disk"), st.sampled_from([0, 1])),
)


@given(st.lists(STEPS, max_size=40), st.sampled_from([(1, 0), (64, 63)]))
def test_restart_at_any_moment_never_reissues(
    steps: list[tuple[str, int]], numbering: tuple[int, int]
) -> None:
    time, bound = FakeTime(), FakeBound()
    step, offset = numbering

    def start() -> HybridClock:
        return HybridClock(time, step=step, offset=offset, upper_bound=bound)

    clock = start()
    used: list[Version] = []
    for action, amount in steps:
        if action == "mint":
            used += _mint(clock, bound, amount)
        elif action == "time":
            time.ms += amount
        elif action == "observe":
            used += _observe(clock, bound, compose(time.ms + amount, 3))
        elif action == "disk":
            bound.failing = bool(amount)
        else:
            bound.failing = False
            if action == "close":
                clock.close()
            time.ms += amount
            clock = start()
    assert all(earlier < later for earlier, later in pairwise(used))


def _mint(clock: HybridClock, bound: FakeBound, count: int) -> list[Version]:
    minted: list[Version] = []
    for _ in range(count):
        latest = clock.latest
        try:
            minted.append(clock.now())
        except StorageFailed:
            assert bound.failing
            assert clock.latest == latest
        assert clock.latest <= bound.stored or not minted
    return minted


def _observe(clock: HybridClock, bound: FakeBound, version: Version) -> list[Version]:
    """Observe, and mint at once: what was seen must stay below what is minted after a crash."""
    latest = clock.latest
    try:
        clock.observe(version)
    except (ClockSkew, StorageFailed):
        assert clock.latest == latest
        return []
    return _mint(clock, bound, 1)


def test_clock_without_a_stored_bound_does_reissue() -> None:
    """The canary of the test above: what it looks for does happen when nothing is stored."""
    time = FakeTime()
    assert HybridClock(time).now() == HybridClock(time).now()


def test_bound_is_on_disk_before_a_version_above_it_is_handed_out() -> None:
    time, bound = FakeTime(), FakeBound()
    clock = HybridClock(time, upper_bound=bound)
    for _ in range(1000):
        stores = len(bound.events)
        behind = bound.stored
        version = clock.now()
        assert version <= bound.stored
        assert (len(bound.events) > stores) == (version > behind)
        time.ms += 1
    assert 3 <= len(bound.events) <= 5, "the bound leads by a quarter of a second, to be stored seldom"


def test_bound_is_on_disk_before_an_observed_version_above_it_counts() -> None:
    time, bound = FakeTime(), FakeBound()
    clock = HybridClock(time, upper_bound=bound)
    clock.now()
    seen = compose(time.ms + 499, 0)
    clock.observe(seen)
    assert bound.stored >= seen
    time.ms -= HOUR_MS
    assert HybridClock(time, upper_bound=bound).now() > seen


def test_nothing_is_minted_while_the_bound_cannot_be_stored() -> None:
    time, bound = FakeTime(), FakeBound()
    clock = HybridClock(time, upper_bound=bound)
    bound.failing = True
    for _ in range(3):
        with pytest.raises(StorageFailed):
            clock.now()
        with pytest.raises(StorageFailed):
            clock.observe(compose(time.ms + 1, 0))
    assert clock.latest == 0
    bound.failing = False
    assert clock.now() == compose(time.ms, 0)
    bound.failing = True
    assert clock.now() == compose(time.ms, 1), "below the bound no storage is needed"


def test_restart_after_a_crash_begins_at_most_the_lead_ahead() -> None:
    time, bound = FakeTime(), FakeBound()
    last = HybridClock(time, upper_bound=bound).now()
    reborn = HybridClock(time, upper_bound=bound)
    version = reborn.now()
    assert last < version
    assert reborn.ahead_ms() <= BOUND_LEAD_MS
    assert physical_ms(version) <= time.ms + BOUND_LEAD_MS


def test_crash_after_crash_with_time_standing_still_goes_on_upwards() -> None:
    time, bound = FakeTime(), FakeBound()
    versions = [HybridClock(time, upper_bound=bound).now() for _ in range(20)]
    assert all(earlier < later for earlier, later in pairwise(versions))


def test_restart_with_time_set_back_an_hour_goes_on_above() -> None:
    time, bound = FakeTime(), FakeBound()
    clock = HybridClock(time, upper_bound=bound)
    last = max(clock.now() for _ in range(10))
    time.ms -= HOUR_MS
    assert HybridClock(time, upper_bound=bound).now() > last


def test_close_lowers_the_bound_to_what_was_used() -> None:
    time, bound = FakeTime(), FakeBound()
    clock = HybridClock(time, upper_bound=bound)
    last = clock.now()
    assert bound.stored > last
    clock.close()
    assert bound.stored == last
    reborn = HybridClock(time, upper_bound=bound)
    assert reborn.ahead_ms() == 0
    assert reborn.now() == last + 1


def test_closing_twice_is_harmless_and_a_closed_clock_stores_before_it_mints() -> None:
    time, bound = FakeTime(), FakeBound()
    clock = HybridClock(time, upper_bound=bound)
    clock.now()
    clock.close()
    clock.close()
    assert clock.now() <= bound.stored


def test_close_before_the_first_version_keeps_the_bound() -> None:
    time, bound = FakeTime(), FakeBound()
    last = HybridClock(time, upper_bound=bound).now()
    HybridClock(time, upper_bound=bound).close()
    assert bound.stored > last
