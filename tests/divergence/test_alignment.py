"""Streams side by side give what dictionaries give, wherever their batches end, and hold one window."""

import tracemalloc
from collections.abc import Iterator
from itertools import combinations, pairwise

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.sizes import only

from floodmark.codec.columns import RECORDS_WITH_DIGESTS
from floodmark.divergence.alignment import Aligned, Failed, Unlike, align
from floodmark.model.errors import Unreachable
from floodmark.model.record import FoundRecord

Contents = dict[bytes, int]
keys = st.binary(min_size=1, max_size=2).map(lambda key: bytes(byte % 4 for byte in key))
contents = st.dictionaries(keys, st.integers(0, 2), max_size=40)


def batch_of(rows: list[tuple[bytes, int]]) -> pyarrow.RecordBatch:
    columns = [
        pyarrow.array([key for key, _ in rows], pyarrow.binary()),
        pyarrow.array([digest + 100 for _, digest in rows], pyarrow.uint64()),
        pyarrow.array([0] * len(rows), pyarrow.uint32()),
        pyarrow.array([b"%d" % digest for _, digest in rows], pyarrow.binary()),
        pyarrow.array([digest - 1 for _, digest in rows], pyarrow.int64()),
    ]
    return pyarrow.RecordBatch.from_arrays(columns, schema=RECORDS_WITH_DIGESTS)


def stream_of(held: Contents, cuts: list[int]) -> Iterator[pyarrow.RecordBatch]:
    rows = sorted(held.items())
    places = [0, *sorted(cut % (len(rows) + 1) for cut in cuts), len(rows)]
    for start, end in pairwise(places):
        yield batch_of(rows[start:end])


def row_of(held: Contents, key: bytes) -> FoundRecord | None:
    if key not in held:
        return None
    return FoundRecord(held[key] + 100, b"%d" % held[key], (held[key] - 1) % (1 << 64))


@given(st.lists(contents, min_size=2, max_size=3), st.lists(st.integers(0, 40)), st.integers(1, 12))
def test_windows_find_what_dictionaries_find(held: list[Contents], cuts: list[int], window_rows: int) -> None:
    streams = [stream_of(each, cuts[place:]) for place, each in enumerate(held)]
    found: dict[tuple[int, int], list[Unlike]] = {pair: [] for pair in combinations(range(len(held)), 2)}
    compared = dict.fromkeys(found, 0)
    for window in align(streams, window_rows=window_rows):
        assert isinstance(window, Aligned)
        found[window.left, window.right] += window.unlike
        compared[window.left, window.right] += window.compared
    for (left, right), unlike in found.items():
        both = sorted(held[left].keys() | held[right].keys())
        assert compared[left, right] == len(both)
        assert unlike == [
            Unlike(key, row_of(held[left], key), row_of(held[right], key))
            for key in both
            if held[left].get(key) != held[right].get(key)
        ]


def many_rows(count: int, skipped: int, read: list[int]) -> Iterator[pyarrow.RecordBatch]:
    for start in range(0, count, 500):
        read.append(500)
        numbers = [number for number in range(start, start + 500) if not skipped or number % skipped]
        yield batch_of([(b"%09d" % number, number % 7) for number in numbers])


@pytest.mark.slow
@pytest.mark.parametrize("skipped", only([1_000], [0, 1_000]))
def test_memory_does_not_grow_with_the_streams(skipped: int) -> None:
    def peak(count: int) -> int:
        tracemalloc.start()
        before = pyarrow.total_allocated_bytes()
        highest = 0
        for _ in align([many_rows(count, 0, []), many_rows(count, skipped, [])], window_rows=1_000):
            highest = max(highest, pyarrow.total_allocated_bytes() - before)
        _, python = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return highest + python

    small, large = peak(5_000), peak(50_000)
    assert large < 2 * small


def test_no_stream_is_read_further_than_a_window() -> None:
    read: list[list[int]] = [[], []]
    windows = align([many_rows(50_000, 0, read[0]), many_rows(50_000, 3, read[1])], window_rows=1_000)
    next(windows)
    assert max(map(sum, read)) <= 2_000


def test_a_stream_that_fails_is_left_out_and_the_others_go_on() -> None:
    def failing() -> Iterator[pyarrow.RecordBatch]:
        yield batch_of([(b"%09d" % number, number % 7) for number in range(500)])
        raise Unreachable("gone")

    streams = [many_rows(5_000, 0, []), failing(), many_rows(5_000, 1_000, [])]
    pairs: list[tuple[int, int]] = []
    failed: list[int] = []
    unlike = compared = 0
    for each in align(streams, window_rows=500):
        if isinstance(each, Failed):
            failed.append(each.place)
        else:
            pairs.append((each.left, each.right))
            if pairs[-1] == (0, 2):
                unlike += len(each.unlike)
                compared += each.compared
    assert failed == [1]
    assert pairs[:3] == [(0, 1), (0, 2), (1, 2)]
    assert set(pairs[3:]) == {(0, 2)}
    assert (compared, unlike) == (5_000, 5)


def test_one_stream_alone_is_not_read() -> None:
    read: list[int] = []
    assert list(align([many_rows(5_000, 0, read)])) == []
    assert read == []
