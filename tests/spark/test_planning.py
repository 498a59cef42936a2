"""Ranges and versions are cut so that every key and every change is in exactly one part."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from floodmark.model.ranges import KeyRange
from floodmark.spark.source.planning import cut_range, plan_ranges, plan_versions

keys_of_some_kind = st.one_of(
    st.lists(st.binary(max_size=12), max_size=50),
    st.lists(st.integers(0, 10**6).map(lambda number: b"user/%07d" % number), max_size=50),
    st.lists(st.uuids().map(lambda uuid: str(uuid).encode()), max_size=50),
    st.lists(st.integers(0, 1 << 40).map(lambda number: number.to_bytes(8, "big")), max_size=50),
)
ranges = st.one_of(
    st.binary(max_size=3).map(KeyRange),
    st.tuples(st.binary(max_size=3), st.binary(max_size=3)).map(lambda ends: KeyRange(min(ends), max(ends))),
)


def assert_tiles(parts: list[KeyRange], keys: KeyRange) -> None:
    """The parts follow each other without a gap, from the first key to the last."""
    assert parts[0].start == keys.start
    assert parts[-1].end == keys.end
    assert all(left.end == right.start for left, right in pairwise(parts))
    assert all(part.end is None or part.start <= part.end for part in parts)


@given(ranges, st.lists(st.binary(min_size=1, max_size=3), unique=True, max_size=5), keys_of_some_kind)
def test_parts_hold_every_key_once(keys: KeyRange, borders: list[bytes], stored: list[bytes]) -> None:
    ends: list[bytes | None] = [*sorted(borders), None]
    partitions = [KeyRange(start, end) for start, end in zip([b"", *sorted(borders)], ends, strict=True)]
    for count in (None, 1, 2, 7, 20):
        parts = plan_ranges(partitions, keys, count, lambda within: [k for k in stored if within.contains(k)])
        for key in stored:
            assert sum(part.contains(key) for part in parts) == keys.contains(key)


@given(ranges, st.integers(1, 40), keys_of_some_kind)
def test_cuts_leave_no_gap(keys: KeyRange, pieces: int, stored: list[bytes]) -> None:
    parts = cut_range(keys, pieces, lambda _: stored)
    assert_tiles(parts, keys)
    assert len(parts) <= pieces


@pytest.mark.parametrize(
    "stored",
    [
        [b"user/%06d" % number for number in range(10_000)],
        [number.to_bytes(8, "big") for number in range(70_000, 80_000)],
        [b"%08x-0000" % (number * 429_496) for number in range(10_000)],
        [prefix + b"%05d" % number for prefix in (b"eu-", b"us-") for number in range(5_000)],
        [b"%c/%c" % (65 + number // 100, 97 + number % 26) + b"%03d" % number for number in range(1_000)],
    ],
    ids=["decimal", "numbers", "hexadecimal", "two clusters", "letters"],
)
@pytest.mark.parametrize("pieces", [2, 8, 12])
def test_parts_are_about_equal(stored: list[bytes], pieces: int) -> None:
    def sample(keys: KeyRange) -> list[bytes]:
        inside = sorted(key for key in stored if keys.contains(key))
        return inside[:16] + inside[-16:]

    parts = cut_range(KeyRange(), pieces, sample)
    counts = [sum(part.contains(key) for key in stored) for part in parts]
    assert len(parts) == pieces
    assert max(counts) <= 1.5 * len(stored) / pieces


def test_few_partitions_are_cut_and_many_are_not() -> None:
    halves = [KeyRange(b"", b"5"), KeyRange(b"5")]
    asked: list[KeyRange] = []

    def sample(keys: KeyRange) -> list[bytes]:
        asked.append(keys)
        return [max(keys.start, b"00"), min(keys.end or b"99", b"99")]

    assert plan_ranges(halves, KeyRange(), 2, sample) == halves
    assert not asked
    assert len(plan_ranges(halves, KeyRange(), 3, sample)) == 4


def test_nothing_to_read_is_one_empty_part() -> None:
    assert plan_ranges([KeyRange(b"m")], KeyRange(b"a", b"b"), 4, lambda _: []) == [KeyRange(b"a", b"a")]


@pytest.mark.parametrize("stored", [[], [b"only"], [b"same", b"same"]])
def test_what_cannot_be_cut_stays_whole(stored: list[bytes]) -> None:
    assert cut_range(KeyRange(b"a", b"z"), 5, lambda _: stored) == [KeyRange(b"a", b"z")]


@given(st.integers(0, 1 << 62), st.integers(0, 1000), st.integers(1, 50))
def test_versions_are_cut_without_a_gap(since: int, length: int, count: int) -> None:
    parts = plan_versions(since, since + length, count)
    assert parts[0][0] == since
    assert parts[-1][1] == since + length
    assert all(left[1] == right[0] for left, right in pairwise(parts))
    assert len(parts) == max(1, min(count, length))
    assert all(start < end for start, end in parts) or length == 0
