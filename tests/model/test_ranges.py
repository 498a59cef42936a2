"""Ranges of keys against a brute-force model: sets of all short keys over a tiny alphabet."""

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from floodmark.model.ranges import KeyRange, after, prefix_end

ALPHABET = (0x00, 0x01, 0xFE, 0xFF)
UNIVERSE = sorted(bytes(key) for length in range(4) for key in product(ALPHABET, repeat=length))

KEYS = st.sampled_from(UNIVERSE)
RANGES = st.builds(KeyRange, KEYS, st.none() | KEYS)


def members(keys: KeyRange | None) -> set[bytes]:
    """All keys of the universe in the range, straight from the definition."""
    if keys is None:
        return set()
    return {key for key in UNIVERSE if keys.start <= key and (keys.end is None or key < keys.end)}


@given(RANGES)
def test_range_contains_exactly_its_members(keys: KeyRange) -> None:
    assert {key for key in UNIVERSE if keys.contains(key)} == members(keys)


@given(RANGES, RANGES)
def test_intersection_holds_the_keys_in_both(left: KeyRange, right: KeyRange) -> None:
    both = left.intersect(right)
    assert members(both) == members(left) & members(right)
    assert both is None or both.end is None or both.start < both.end


@given(RANGES, RANGES, RANGES)
def test_intersection_is_commutative_and_associative(
    first: KeyRange, second: KeyRange, third: KeyRange
) -> None:
    assert first.intersect(second) == second.intersect(first)
    left, right = first.intersect(second), second.intersect(third)
    assert members(left and left.intersect(third)) == members(right and first.intersect(right))


@given(RANGES)
def test_range_of_everything_is_neutral(keys: KeyRange) -> None:
    assert members(KeyRange().intersect(keys)) == members(keys)
    assert KeyRange().contains(b"")


@given(KEYS)
def test_keys_with_a_prefix_are_those_up_to_its_end(prefix: bytes) -> None:
    within = KeyRange(prefix, prefix_end(prefix))
    assert members(within) == {key for key in UNIVERSE if key.startswith(prefix)}


@given(st.binary(max_size=6), st.binary(max_size=6))
def test_prefix_end_is_the_smallest_key_above(prefix: bytes, key: bytes) -> None:
    end = prefix_end(prefix)
    assert KeyRange(prefix, end).contains(key) == key.startswith(prefix)
    assert (end is None) == (prefix.strip(b"\xff") == b"")


@given(KEYS)
def test_nothing_lies_between_a_key_and_what_comes_after(key: bytes) -> None:
    assert [other for other in UNIVERSE if key < other < after(key)] == []
    assert after(key) > key
