"""Pairs in columns: a mapping like others, in order of keys."""

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st

from floodmark.columns.column import MANY, Column
from floodmark.columns.pairs import Pairs

keys = st.binary(max_size=3)


def sort(rows: list[tuple[bytes, bytes]]) -> Pairs:
    names, values = [key for key, _ in rows], [value for _, value in rows]
    return Pairs.sort(pyarrow.array(names, pyarrow.binary()), pyarrow.array(values, pyarrow.binary()))


@given(st.lists(st.tuples(keys, st.binary(max_size=3))))
def test_pairs_are_the_mapping_that_they_make(rows: list[tuple[bytes, bytes]]) -> None:
    """Of a key that stands twice, the last value counts."""
    pairs, expected = sort(rows), dict(rows)
    assert pairs == expected
    assert list(pairs.items()) == sorted(expected.items())
    assert list(pairs) == list(pairs.keys()) == sorted(expected)
    assert list(pairs.values()) == [expected[key] for key in sorted(expected)]
    assert len(pairs) == len(expected)
    assert pairs.is_ordered == (len(expected) == len(rows))


@pytest.mark.parametrize("count", [1, 2, MANY - 1, MANY, 2 * MANY])
def test_columns_are_the_rows_as_they_came(count: int) -> None:
    rows = [(b"%06d" % number, b"%d" % number) for number in range(count)]
    for some in (rows, rows[::-1]):
        names, values = [key for key, _ in some], [value for _, value in some]
        pairs = Pairs(pyarrow.array(names), pyarrow.array(values))
        assert pairs.columns() == (names, values)
        assert pairs.is_ordered == (some == rows)
        assert pairs.size == sum(map(len, names)) + sum(map(len, values))
        assert pairs == dict(rows)
        assert all(isinstance(column, Column) == (count >= MANY) for column in pairs.columns())


@pytest.mark.parametrize("count", [2, MANY, 2 * MANY])
def test_a_key_that_stands_twice_is_seen_wherever_it_stands(count: int) -> None:
    names = [b"%06d" % number for number in range(count)]
    for twice in (names[0], names[count // 2], names[-1]):
        pairs = sort([(key, b"") for key in [*names, twice]])
        assert not pairs.is_ordered
        assert len(pairs) == count
