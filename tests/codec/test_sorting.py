"""Sorting in columns: any rows in order, each key once, however little memory there is."""

from itertools import pairwise

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st

from floodmark.columns.sorting import sort_pairs
from floodmark.model.errors import InvalidArgument

Rows = list[tuple[bytes, bytes]]

ROWS = st.lists(st.tuples(st.binary(max_size=2), st.binary(max_size=5)), max_size=200)


def batches_of(rows: Rows, step: int) -> list[pyarrow.RecordBatch]:
    kinds = [pyarrow.binary()] * 2
    return [
        pyarrow.RecordBatch.from_arrays(
            [
                pyarrow.array(column, kind)
                for column, kind in zip(zip(*part, strict=True), kinds, strict=True)
            ],
            names=["key", "value"],
        )
        for part in (rows[start : start + step] for start in range(0, len(rows), step))
    ]


def with_empty_ones(batches: list[pyarrow.RecordBatch]) -> list[pyarrow.RecordBatch]:
    return [part for batch in batches for part in (batch.slice(0, 0), batch, batch.slice(0, 0))]


@given(ROWS, st.integers(1, 20), st.sampled_from([64, 300, 1_000, 10_000]), st.sampled_from([1, 50, 10_000]))
def test_rows_come_in_order_and_of_each_key_the_last(
    rows: Rows, step: int, memory_bytes_max: int, bytes_max: int
) -> None:
    batches = with_empty_ones(batches_of(rows, step))
    portions = list(sort_pairs(batches, bytes_max=bytes_max, memory_bytes_max=memory_bytes_max))
    assert [pair for pairs in portions for pair in pairs.items()] == sorted(dict(rows).items())
    assert all(pairs.is_ordered and len(pairs) for pairs in portions)


@given(ROWS, st.integers(1, 20))
def test_rows_in_order_are_passed_on_and_others_refused(rows: Rows, step: int) -> None:
    ordered = sorted(rows, key=lambda row: row[0])
    portions = sort_pairs(with_empty_ones(batches_of(ordered, step)), in_order=True, bytes_max=50)
    assert [pair for pairs in portions for pair in pairs.items()] == sorted(dict(ordered).items())
    if any(left[0] > right[0] for left, right in pairwise(rows)):
        with pytest.raises(InvalidArgument):
            list(sort_pairs(batches_of(rows, step), in_order=True))


@given(ROWS, st.integers(1, 20), st.sampled_from([64, 1_000]))
def test_a_key_that_comes_twice_is_refused(rows: Rows, step: int, memory_bytes_max: int) -> None:
    def refuse(key: bytes) -> None:
        raise KeyError(key)

    keys = [key for key, _ in rows]
    batches = batches_of(rows, step)
    if len(set(keys)) == len(keys):
        assert len(list(sort_pairs(batches, refuse, memory_bytes_max=memory_bytes_max))) <= 1
        return
    with pytest.raises(KeyError) as raised:
        list(sort_pairs(batches, refuse, memory_bytes_max=memory_bytes_max))
    assert keys.count(raised.value.args[0]) > 1
