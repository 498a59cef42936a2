"""A column: a list to those who read it, and an array to those who compute with it."""

import numpy
import pyarrow
from hypothesis import given
from hypothesis import strategies as st

from floodmark.columns.column import Column


@given(st.lists(st.integers(0, (1 << 64) - 1)), st.integers(0, 3), st.booleans())
def test_a_column_is_read_like_a_list(numbers: list[int], start: int, listed: bool) -> None:
    column: Column[int] = Column(pyarrow.array(numbers, pyarrow.uint64()))
    if listed:
        assert list(column) == numbers
    assert len(column) == len(numbers)
    assert bool(column) == bool(numbers)
    assert [column[place] for place in range(-len(numbers), len(numbers))] == numbers + numbers
    assert column[start:] == numbers[start:]
    assert column == numbers
    assert numbers == column
    assert column != [*numbers, 1]
    assert column != 1
    assert repr(column) == f"Column({numbers})"


@given(st.lists(st.integers(0, (1 << 64) - 1)))
def test_a_column_is_an_array(numbers: list[int]) -> None:
    column: Column[int] = Column(pyarrow.array(numbers, pyarrow.uint64()))
    assert pyarrow.array(column, pyarrow.uint64()) is column.array
    assert numpy.array(column, numpy.uint64).tolist() == numbers
    assert numpy.asarray(column).tolist() == numbers


def test_a_column_becomes_an_array_of_another_type() -> None:
    column: Column[int] = Column(pyarrow.array([1, 2], pyarrow.uint32()))
    assert pyarrow.array(column, pyarrow.int64()).equals(pyarrow.array([1, 2], pyarrow.int64()))
