"""Rows of the change log taken apart many at once, and not change by change.

The keys of a row stand side by side, and so do its values (`changelog.py`).  Put behind each other, those of
all rows are the bytes of two columns, and the lengths say where each of them begins.
"""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy
import pyarrow
from numpy.typing import NDArray

from floodmark.codec.changelog import COMMIT_BYTE, COMMIT_HEAD_BYTES
from floodmark.columns.packed import Packed, borders_of, window

Numbers: TypeAlias = NDArray[numpy.int64]

_COUNT: Final = numpy.dtype("<u4")
_KEY_LENGTH: Final = numpy.dtype("<u2")
_VALUE_LENGTH: Final = numpy.dtype("<u4")
_LENGTHS_BYTES: Final = _KEY_LENGTH.itemsize + _VALUE_LENGTH.itemsize


class Commits(NamedTuple):
    """The changes of several rows: how many each has, their qualified keys, and their values as stored.

    `flags` are the last bytes of the values.
    """

    counts: Numbers
    keys: pyarrow.BinaryArray
    values: pyarrow.BinaryArray
    flags: NDArray[numpy.uint8]


def decode_commits(rows: Sequence[bytes]) -> Commits | None:
    """All changes of some rows; None if one of them has to be looked at by itself.

    That is a heartbeat, or a row that names a large value, holds an empty one, or is damaged.

    >>> from floodmark.codec.changelog import encode_commit, encode_single
    >>> rows = [encode_single(b"a", b"1"), *encode_commit([b"a", b"b"], [b"2", b"33"])]
    >>> commits = decode_commits(rows)
    >>> commits.counts.tolist(), commits.keys.to_pylist(), commits.values.to_pylist()
    ([1, 2], [b'a', b'a', b'b'], [b'1', b'2', b'33'])
    """
    joined = b"".join(rows)
    sizes = numpy.fromiter(map(len, rows), numpy.int64, len(rows))
    ends = numpy.cumsum(sizes)
    starts = ends - sizes
    if not len(rows) or sizes.min() < COMMIT_HEAD_BYTES or _kinds(joined, starts) != {COMMIT_BYTE[0]}:
        return None
    counts = window(joined, _COUNT)[starts + 1].astype(numpy.int64)
    heads = starts + COMMIT_HEAD_BYTES
    keys_from = heads + _LENGTHS_BYTES * counts
    if counts.min() < 1 or (keys_from > ends).any():
        return None
    key_borders = borders_of(_cut_lengths(joined, heads, counts, _KEY_LENGTH))
    value_borders = borders_of(
        _cut_lengths(joined, heads + _KEY_LENGTH.itemsize * counts, counts, _VALUE_LENGTH)
    )
    firsts = borders_of(counts)
    values_from = keys_from + numpy.diff(key_borders[firsts])
    if (values_from + numpy.diff(value_borders[firsts]) != ends).any():
        return None
    if (value_borders[1:] == value_borders[:-1]).any():
        return None
    places = numpy.stack([keys_from, values_from, ends], axis=1).tolist()
    whole = memoryview(joined)
    keys = b"".join([whole[start:end] for start, end, _ in places])
    values = b"".join([whole[start:end] for _, start, end in places])
    flags = numpy.frombuffer(values, numpy.uint8)[value_borders[1:] - 1]
    return Commits(
        counts, Packed(keys, key_borders).to_arrow(), Packed(values, value_borders).to_arrow(), flags
    )


def _kinds(joined: bytes, starts: Numbers) -> set[int]:
    return set(numpy.frombuffer(joined, numpy.uint8)[starts].tolist())


def _cut_lengths(joined: bytes, starts: Numbers, counts: Numbers, kind: numpy.dtype[Any]) -> Numbers:
    """The numbers that stand in a row from each of some places on, one behind the other."""
    firsts = borders_of(counts)[:-1]
    places = numpy.repeat(starts - kind.itemsize * firsts, counts)
    places += kind.itemsize * numpy.arange(len(places))
    lengths: Numbers = window(joined, kind)[places].astype(numpy.int64)
    return lengths
