"""Records and tallies: when a reader finds nothing, and why the order of counting is irrelevant."""

from datetime import timedelta
from fractions import Fraction
from functools import reduce

import pytest
from hypothesis import given
from hypothesis import strategies as st

from floodmark.model import Record, Stamp, Sums, Tally
from floodmark.site.arguments import to_expiry

TALLIES = st.builds(Tally, st.integers(0, 1000), st.integers(0, (1 << 64) - 1))


@pytest.mark.parametrize(
    ("expires_at", "physical_ms", "dead"),
    [
        (None, 1 << 46, False),
        (2, 0, False),
        (2, 1999, False),
        (2, 2000, True),
        (2, 2001, True),
        (0, 0, True),
    ],
)
def test_record_expires_at_its_second(expires_at: int | None, physical_ms: int, dead: bool) -> None:
    assert Record(b"x", expires_at=expires_at).is_dead_at(physical_ms) is dead


@pytest.mark.parametrize("expires_at", [None, 0, 1 << 40])
def test_tombstone_is_dead_at_any_time(expires_at: int | None) -> None:
    assert Record(b"", expires_at=expires_at, deleted=True).is_dead_at(0)


@given(st.integers(0, 5000), st.integers(1, 10_000_000))
def test_nothing_expires_early_however_short_it_lives(now_ms: int, lifetime_us: int) -> None:
    expiry = to_expiry(timedelta(microseconds=lifetime_us), now_ms)
    assert Fraction(expiry * 1000) >= now_ms + Fraction(lifetime_us, 1000)
    assert expiry * 1000 < now_ms + lifetime_us / 1000 + 1001


def test_stamps_order_by_version_then_site() -> None:
    assert sorted([Stamp(2, 1), Stamp(1, 255), Stamp(1, 2)]) == [Stamp(1, 2), Stamp(1, 255), Stamp(2, 1)]


@given(st.lists(TALLIES, max_size=8), st.data())
def test_tallies_add_up_in_any_order(tallies: list[Tally], data: st.DataObject) -> None:
    shuffled = data.draw(st.permutations(tallies))
    assert reduce(Tally.plus, shuffled, Tally()) == reduce(Tally.plus, tallies, Tally())


@given(TALLIES, TALLIES, TALLIES, TALLIES)
def test_sums_add_own_and_all_apart(own: Tally, every: Tally, more_own: Tally, more: Tally) -> None:
    both = Sums(own, every).plus(Sums(more_own, more))
    assert both == Sums(own.plus(more_own), every.plus(more))
    assert both.plus(Sums()) == both


def test_change_counted_twice_does_not_pass_for_one_not_counted() -> None:
    change = Tally(1, 0xABC)
    assert change.plus(change) == Tally(2, 0)
    assert change.plus(change) != Tally()
