"""Pairs in columns: a mapping like others, in order of keys."""

import pyarrow
from hypothesis import given
from hypothesis import strategies as st

from floodmark.codec.pairs import Pairs

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
    assert pairs.is_distinct == (len(expected) == len(rows))
