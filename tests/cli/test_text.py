"""What is shown can be typed, and what is written as JSON can be read back."""

import json
from base64 import b64decode
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from floodmark.cli.render.text import (
    BARS,
    align,
    draw_bar,
    draw_sparkline,
    show_duration,
    show_expiry,
    show_moment,
    show_size,
)
from floodmark.model.text import json_bytes, read_at, read_bytes, read_duration, show_bytes
from floodmark.model.version import COUNTER_MAX, compose, version_at


@pytest.mark.slow
@given(st.one_of(st.binary(), st.text().map(lambda text: text.encode("utf-8", "replace"))))
def test_bytes_that_are_shown_can_be_typed(data: bytes) -> None:
    shown = show_bytes(data)
    assert read_bytes(shown) == data
    assert shown.isprintable()


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_text_is_taken_as_it_is_unless_it_starts_with_0x(text: str) -> None:
    if not text.startswith("0x"):
        assert read_bytes(text) == text.encode()


@pytest.mark.parametrize("text", ["0xf", "0xzz", "0x 61", "0x61 62", "0x6_1"])
def test_half_a_byte_of_hexadecimal_is_refused_with_the_way_to_type_it(text: str) -> None:
    with pytest.raises(ValueError, match=text.encode().hex()):
        read_bytes(text)


def test_arguments_that_are_not_utf8_keep_their_bytes() -> None:
    assert read_bytes(b"a\xff".decode("utf-8", "surrogateescape")) == b"a\xff"


@given(st.binary())
def test_bytes_in_json_stand_in_one_field_that_says_how(data: bytes) -> None:
    fields = json.loads(json.dumps(json_bytes("key", data)))
    assert len(fields) == 1
    if "key" in fields:
        assert fields["key"].encode() == data
    else:
        assert b64decode(fields["key_base64"]) == data
        with pytest.raises(UnicodeDecodeError):
            data.decode()


@given(
    st.timedeltas(min_value=timedelta(0)).map(lambda each: timedelta(seconds=each // timedelta(seconds=1)))
)
def test_durations_that_are_shown_can_be_typed(duration: timedelta) -> None:
    assert read_duration(show_duration(duration)) == duration


@pytest.mark.parametrize(
    ("text", "duration"),
    [
        ("90s", timedelta(seconds=90)),
        ("24h", timedelta(hours=24)),
        ("7d", timedelta(days=7)),
        ("2w", timedelta(days=14)),
        ("1.5m", timedelta(seconds=90)),
        ("0s", timedelta(0)),
    ],
)
def test_durations_have_units(text: str, duration: timedelta) -> None:
    assert read_duration(text) == duration


@pytest.mark.parametrize("text", ["", "90", "h", "1 h", "-1h", "1h-", "1y", "1h 30m", "99999999999d"])
def test_what_is_not_a_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"write for example|at most"):
        read_duration(text)


def test_moments_and_versions_are_told_apart() -> None:
    moment = datetime(2026, 1, 31, 12, tzinfo=UTC)
    assert read_at("470473302343417856") == 470473302343417856
    assert read_at("2026-01-31T12:00:00Z") == version_at(moment)
    assert read_at("2026-01-31T14:00:00+02:00") == compose(1_769_860_800_000, COUNTER_MAX)
    assert read_at(show_moment(moment)) == version_at(moment)


@pytest.mark.parametrize("text", ["", "yesterday", "-5", "1.5", "٣", "2026-01-31", "2026-01-31T12:00:00"])
def test_moments_without_a_time_zone_and_other_words_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"write for example|time zone"):
        read_at(text)


def test_an_expiry_beyond_the_calendar_is_shown_as_its_end() -> None:
    assert show_expiry(1 << 60) == "9999-12-31T23:59:59Z"
    assert show_expiry(None) is None


def test_sizes_have_units() -> None:
    shown = [show_size(size) for size in (0, 1023, 1024, 5 * 1024**2, 1024**4, 1024**5)]
    assert shown == ["0 bytes", "1023 bytes", "1.0 KiB", "5.0 MiB", "1.0 TiB", "1024.0 TiB"]


def test_columns_stand_under_each_other_whatever_the_width_of_characters() -> None:
    assert align([("名前", "b"), ("aaa", "b")]) == ["名前  b", "aaa   b"]


@given(st.lists(st.integers(0, 10**9), min_size=1))
def test_a_sparkline_has_a_bar_a_value_and_shows_all_that_is_not_nothing(values: list[int]) -> None:
    drawn = draw_sparkline(values, max(values))
    assert len(drawn) == len(values)
    assert [bar == BARS[0] for bar in drawn] == [value == 0 for value in values]
    assert max(values) == 0 or drawn[values.index(max(values))] == BARS[-1]


@given(st.integers(0, 10**9), st.integers(0, 10**9), st.integers(1, 100))
def test_a_bar_is_no_longer_than_its_width(first: int, second: int, width: int) -> None:
    top = max(first, second)
    assert len(draw_bar(first, top, width)) <= width
    assert (draw_bar(first, top, width) == "") == (first == 0)
