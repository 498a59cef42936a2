"""The rules of a hybrid clock, checked against the textbook form with two separate numbers."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.clock.fakes import FakeTime

from floodmark.clock import HybridClock, system_time_ms
from floodmark.clock.hybrid import BOUND_LEAD_MS, SKEW_MS_MAX
from floodmark.model.errors import ClockSkew, Terminal
from floodmark.model.version import COUNTER_MAX, Version, compose, physical_ms, split

HOUR_MS = 3_600_000


class Textbook:
    """The published algorithm: l is the highest physical time seen, c counts within it."""

    def __init__(self) -> None:
        self.l = self.c = 0

    def local(self, physical: int) -> Version:
        moved = max(self.l, physical)
        self.c = self.c + 1 if moved == self.l else 0
        return self._carry(moved)

    def receive(self, physical: int, remote: Version) -> Version:
        moved = max(self.l, physical_ms(remote), physical)
        counters = [c for physical_part, c in ((self.l, self.c), split(remote)) if physical_part == moved]
        self.c = max(counters) + 1 if counters else 0
        return self._carry(moved)

    def _carry(self, moved: int) -> Version:
        self.l = moved
        if self.c > COUNTER_MAX:
            self.l, self.c = self.l + 1, 0
        return compose(self.l, self.c)


JUMPS = st.sampled_from([0, 0, 0, 1, 2, 500, HOUR_MS, -1, -2, -500, -HOUR_MS])
REMOTES = st.tuples(
    st.sampled_from([-HOUR_MS, -1, 0, 1, 2, 500]),
    st.sampled_from([0, 1, COUNTER_MAX - 1, COUNTER_MAX]),
)


@given(st.lists(st.tuples(JUMPS, st.none() | REMOTES), max_size=40))
def test_clock_does_what_the_textbook_says_under_any_jumps(
    steps: list[tuple[int, tuple[int, int] | None]],
) -> None:
    time, textbook = FakeTime(), Textbook()
    clock = HybridClock(time)
    versions: list[Version] = []
    for jump, remote in steps:
        time.ms += jump
        if remote is None:
            expected = textbook.local(time.ms)
        else:
            ahead_ms, counter = remote
            seen = compose(time.ms + ahead_ms, counter)
            expected = textbook.receive(time.ms, seen)
            clock.observe(seen)
            assert clock.latest >= seen
        versions.append(clock.now())
        assert versions[-1] == expected
    assert all(earlier < later for earlier, later in pairwise(versions))


def test_first_version_is_the_present_and_never_zero() -> None:
    assert HybridClock(FakeTime(1000)).now() == compose(1000, 0)
    assert HybridClock(FakeTime(0)).now() == 1


def test_full_counter_carries_into_the_physical_part() -> None:
    time = FakeTime()
    clock = HybridClock(time)
    clock.observe(compose(time.ms, COUNTER_MAX))
    assert split(clock.now()) == (time.ms + 1, 0)
    assert split(clock.now()) == (time.ms + 1, 1)


def test_clock_does_not_run_ahead_under_load() -> None:
    """A thousand versions a millisecond for a second; the naive rule would be far ahead by then."""
    time = FakeTime()
    clock = HybridClock(time)
    naive_ms = time.ms
    for _ in range(100):
        time.ms += 1
        for _ in range(1000):
            version = clock.now()
            naive_ms = max(naive_ms + 1, time.ms)
        assert split(version) == (time.ms, 999)
    assert clock.ahead_ms() == 0
    assert naive_ms - time.ms > 99_000


def test_clock_that_was_pushed_ahead_falls_back_to_physical_time() -> None:
    time = FakeTime()
    clock = HybridClock(time)
    clock.observe(compose(time.ms + 400, 7))
    assert clock.ahead_ms() == 400
    time.ms += 300
    assert clock.ahead_ms() == 100
    time.ms += 101
    assert split(clock.now()) == (time.ms, 0)
    assert clock.ahead_ms() == 0


def test_clock_says_how_far_it_is_ahead_after_a_jump_back() -> None:
    time = FakeTime()
    clock = HybridClock(time)
    before = clock.now()
    time.ms -= HOUR_MS
    assert clock.ahead_ms() == HOUR_MS
    assert clock.now() == before + 1


# The guard


def test_remote_version_is_tolerated_up_to_the_guard() -> None:
    time = FakeTime()
    clock = HybridClock(time)
    clock.observe(compose(time.ms + 500, COUNTER_MAX))
    assert clock.now() > compose(time.ms + 500, COUNTER_MAX)


def test_remote_version_beyond_the_guard_is_refused_and_leaves_the_clock() -> None:
    time = FakeTime()
    clock = HybridClock(time)
    clock.now()
    latest = clock.latest
    too_far = compose(time.ms + 501, 0)
    with pytest.raises(ClockSkew, match=r"501 ms ahead.*500 ms") as refused:
        clock.observe(too_far)
    assert refused.value.details == {"version": too_far, "ahead_ms": 501}
    assert isinstance(refused.value, Terminal)
    assert clock.latest == latest
    assert split(clock.now()) == (time.ms, 1)


@pytest.mark.parametrize("guard_ms", [0, 1, 2000])
def test_guard_is_configurable(guard_ms: int) -> None:
    time = FakeTime()
    clock = HybridClock(time, skew_ms_max=guard_ms)
    clock.observe(compose(time.ms + guard_ms, 0))
    with pytest.raises(ClockSkew):
        clock.observe(compose(time.ms + guard_ms + 1, 0))


def test_version_that_the_clock_has_passed_is_never_refused() -> None:
    """After a jump back by an hour, the site's own past lies "in the future" and is no skew."""
    time = FakeTime()
    clock = HybridClock(time)
    latest = clock.now()
    time.ms -= HOUR_MS
    clock.observe(latest)
    assert clock.now() == latest + 1
    for ahead in (compose(time.ms + HOUR_MS, 40), compose(time.ms + HOUR_MS + 1, 0)):
        with pytest.raises(ClockSkew):
            clock.observe(ahead)
    assert clock.now() == latest + 2


@pytest.mark.parametrize("tolerated_ms", [None, 250, 5_000])
def test_callers_in_turn_do_not_drive_the_clock_beyond_the_guard(tolerated_ms: int | None) -> None:
    """Each fills the counter of the clock's millisecond, so that the next version begins another one."""
    time = FakeTime()
    clock = HybridClock(time)
    guard_ms = min(SKEW_MS_MAX, tolerated_ms or SKEW_MS_MAX)
    for _ in range(1_000):
        ahead_ms = min(clock.ahead_ms() + 1, guard_ms)
        with suppress(ClockSkew):
            clock.observe(compose(time.ms + ahead_ms, COUNTER_MAX), skew_ms_max=tolerated_ms)
        with suppress(ClockSkew):
            clock.observe(clock.latest | COUNTER_MAX, skew_ms_max=tolerated_ms)
        clock.now()
    assert guard_ms <= clock.ahead_ms() <= guard_ms + 1


def test_lead_of_the_bound_stays_below_the_guard_of_peers() -> None:
    assert 0 < BOUND_LEAD_MS < SKEW_MS_MAX


# Several nodes


@given(
    st.sampled_from([2, 3, 64]),
    st.lists(st.tuples(st.integers(0, 63), st.sampled_from([0, 0, 1, -1, 5]), st.booleans()), max_size=60),
)
def test_nodes_mint_disjoint_congruent_and_growing_versions(
    step: int, minting: list[tuple[int, int, bool]]
) -> None:
    time = FakeTime()
    clocks = [HybridClock(time, step=step, offset=node) for node in range(step)]
    minted: list[tuple[int, Version]] = []
    for number, jump, seen_by_all in minting:
        node = number % step
        time.ms += jump
        version = clocks[node].now()
        assert version % step == node
        assert all(version > earlier for owner, earlier in minted if owner == node)
        minted.append((node, version))
        if seen_by_all:
            for clock in clocks:
                clock.observe(version)
            assert min(clock.now() for clock in clocks) > version
    assert len({version for _, version in minted}) == len(minted)


@pytest.mark.parametrize(("step", "offset"), [(0, 0), (-1, 0), (1, 1), (64, 64), (64, -1)])
def test_impossible_step_or_offset_is_refused(step: int, offset: int) -> None:
    with pytest.raises(ValueError, match="offset"):
        HybridClock(FakeTime(), step=step, offset=offset)


def test_negative_guard_is_refused() -> None:
    with pytest.raises(ValueError, match="skew_ms_max"):
        HybridClock(FakeTime(), skew_ms_max=-1)


def test_many_threads_never_mint_a_version_twice() -> None:
    threads, each = 8, 2500
    clock = HybridClock(FakeTime())

    def mint(_: int) -> list[Version]:
        return [clock.now() for _ in range(each)]

    with ThreadPoolExecutor(threads) as pool:
        minted = list(pool.map(mint, range(threads)))
    assert len({version for versions in minted for version in versions}) == threads * each
    for versions in minted:
        assert versions == sorted(versions)


def test_system_time_is_in_unix_milliseconds() -> None:
    # Between 2020 and 2100: seconds or microseconds would lie far outside.
    assert 1_577_836_800_000 < system_time_ms() < 4_102_444_800_000
