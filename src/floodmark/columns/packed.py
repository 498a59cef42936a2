"""A column of bytes in one piece.

    data       | row 0 | row 1     | row 2 |
    borders    0       5           13      18

Thousands of rows are looked at, and copied, by a handful of calls, where a list would take one for each row.

Arrays are made of buffers: to make one of Python's or NumPy's values, Arrow imports pandas, if it is there,
and the first call to a server would wait for that.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy
import pyarrow
from numpy.typing import NDArray

from floodmark.columns.column import Column

Places: TypeAlias = NDArray[numpy.int64]


class Packed(NamedTuple):
    """The bytes of all rows, and where each begins, with the end of the last."""

    data: bytes | memoryview
    borders: Places

    @property
    def lengths(self) -> Places:
        """How long each row is."""
        lengths: Places = numpy.diff(self.borders)
        return lengths

    def to_arrow(self) -> pyarrow.BinaryArray:
        """The same over the same bytes."""
        return to_binary(self.data, self.borders)


def to_binary(data: Any, borders: NDArray[Any]) -> pyarrow.BinaryArray:
    """The rows of a buffer between borders, over the same bytes."""
    buffers = [None, pyarrow.py_buffer(borders.astype(numpy.int32)), pyarrow.py_buffer(data)]
    return pyarrow.Array.from_buffers(pyarrow.binary(), len(borders) - 1, buffers)


def pack(rows: Sequence[bytes]) -> Packed:
    """Rows in one piece; of a column that is one already, over the same bytes.

    >>> packed = pack([b"ada", b"", b"alan"])
    >>> packed.data, packed.borders.tolist()
    (b'adaalan', [0, 3, 3, 7])
    """
    if isinstance(rows, Column):
        return pack_array(rows.array)
    return Packed(b"".join(rows), borders_of(numpy.fromiter(map(len, rows), numpy.int64, len(rows))))


def pack_array(array: pyarrow.BinaryArray) -> Packed:
    """The rows of an array without nulls, over the same bytes."""
    if not len(array):
        return Packed(b"", numpy.zeros(1, numpy.int64))
    _, offsets, data = array.buffers()
    borders = numpy.frombuffer(offsets, numpy.int32, len(array) + 1, 4 * array.offset).astype(numpy.int64)
    whole = memoryview(data or b"")[borders[0] : borders[-1]]
    return Packed(whole, borders - borders[0])


def borders_of(lengths: Places) -> Places:
    """Where rows of some lengths begin, with the end of the last."""
    borders = numpy.zeros(len(lengths) + 1, numpy.int64)
    numpy.cumsum(lengths, out=borders[1:])
    return borders


def numbers_to_arrow(numbers: NDArray[Any]) -> pyarrow.Array:
    """An array of the same numbers, over the same bytes."""
    buffers = [None, pyarrow.py_buffer(numbers)]
    return pyarrow.Array.from_buffers(pyarrow.from_numpy_dtype(numbers.dtype), len(numbers), buffers)


def empty_batch(schema: pyarrow.Schema) -> pyarrow.RecordBatch:
    """A batch without rows."""
    return pyarrow.RecordBatch.from_arrays([pyarrow.nulls(0, kind) for kind in schema.types], schema=schema)


def window(data: bytes | memoryview | NDArray[numpy.uint8], kind: numpy.dtype[Any]) -> NDArray[Any]:
    """What stands at each place of some bytes, as a value of a kind.

    >>> window(b"abc", numpy.dtype(">u2")).tolist() == [0x6162, 0x6263]
    True
    """
    return numpy.ndarray((max(0, len(data) - kind.itemsize + 1),), kind, data, strides=(1,))
