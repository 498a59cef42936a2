"""Versions: two numbers in one, and moments with a time zone or not at all."""

from datetime import UTC, datetime, timedelta, timezone, tzinfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from floodmark.model.version import (
    COUNTER_MAX,
    PHYSICAL_MS_MAX,
    VERSION_MAX,
    compose,
    moment_of,
    physical_ms,
    split,
    version_at,
)

PHYSICAL = st.integers(0, PHYSICAL_MS_MAX)
COUNTERS = st.integers(0, COUNTER_MAX)
ZONES = st.integers(-14 * 60, 14 * 60).map(lambda minutes: timezone(timedelta(minutes=minutes)))
MOMENTS = st.datetimes(datetime(1970, 1, 2), datetime(4000, 1, 1), timezones=ZONES)


class ZoneWithoutOffset(tzinfo):
    """A time zone object that knows nothing, which Python treats as none at all."""

    def utcoffset(self, moment: datetime | None, /) -> timedelta | None:
        return None

    def dst(self, moment: datetime | None, /) -> timedelta | None:
        return None

    def tzname(self, moment: datetime | None, /) -> str | None:
        return None


def test_published_example() -> None:
    assert compose(1568700549751, 108) == 411225436913926252
    assert split(411225436913926252) == (1568700549751, 108)


def test_parts_fill_64_bits() -> None:
    assert compose(PHYSICAL_MS_MAX, COUNTER_MAX) == VERSION_MAX == (1 << 64) - 1
    assert compose(0, 0) == 0


@given(PHYSICAL, COUNTERS)
def test_parts_survive_a_round_trip(physical: int, counter: int) -> None:
    version = compose(physical, counter)
    assert split(version) == (physical, counter)
    assert physical_ms(version) == physical
    assert 0 <= version <= VERSION_MAX


@given(st.tuples(PHYSICAL, COUNTERS), st.tuples(PHYSICAL, COUNTERS))
def test_versions_sort_by_time_then_counter(left: tuple[int, int], right: tuple[int, int]) -> None:
    assert (compose(*left) < compose(*right)) == (left < right)


@pytest.mark.parametrize(
    ("physical", "counter"), [(-1, 0), (PHYSICAL_MS_MAX + 1, 0), (0, -1), (0, COUNTER_MAX + 1)]
)
def test_parts_that_do_not_fit_are_refused(physical: int, counter: int) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        compose(physical, counter)


@given(MOMENTS)
def test_moment_names_the_last_version_of_its_millisecond(moment: datetime) -> None:
    version = version_at(moment)
    within = (moment - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(milliseconds=1)
    assert split(version) == (within, COUNTER_MAX)
    assert version + 1 == compose(within + 1, 0)


@given(MOMENTS)
def test_moment_survives_a_round_trip_to_the_millisecond(moment: datetime) -> None:
    back = moment_of(version_at(moment))
    assert timedelta(0) <= moment - back < timedelta(milliseconds=1)
    assert back.utcoffset() == timedelta(0)


@given(PHYSICAL, COUNTERS)
def test_version_has_a_moment(physical: int, counter: int) -> None:
    moment = moment_of(compose(physical, counter))
    assert version_at(moment) == compose(physical, COUNTER_MAX)


def test_time_zones_name_the_same_instant() -> None:
    oslo = datetime(2024, 6, 1, 12, tzinfo=timezone(timedelta(hours=2)))
    assert version_at(oslo) == version_at(datetime(2024, 6, 1, 10, tzinfo=UTC))


@pytest.mark.parametrize(
    "naive",
    [datetime(2024, 6, 1, 12), datetime(2024, 6, 1, 12, tzinfo=ZoneWithoutOffset())],
    ids=["no zone", "zone without offset"],
)
def test_naive_moments_are_refused(naive: datetime) -> None:
    with pytest.raises(ValueError, match="no time zone"):
        version_at(naive)


@pytest.mark.parametrize(
    "moment",
    [
        datetime(1969, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC),
        datetime(1, 1, 1, tzinfo=UTC),
        datetime(9999, 1, 1, tzinfo=UTC),
    ],
)
def test_moments_outside_of_46_bits_are_refused(moment: datetime) -> None:
    with pytest.raises(ValueError, match="46 bits"):
        version_at(moment)


def test_bounds_of_the_representable_time() -> None:
    assert version_at(datetime(1970, 1, 1, tzinfo=UTC)) == COUNTER_MAX
    assert moment_of(0) == datetime(1970, 1, 1, tzinfo=UTC)
    assert moment_of(VERSION_MAX).year == 4199
