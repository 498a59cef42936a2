"""A column of bytes in one piece.

    data       | row 0 | row 1     | row 2 |
    borders    0       5           13      18

A few calls process or copy thousands of rows, where a list would take one call for each row.

Arrays are made from buffers: to make one from Python's or NumPy's values, Arrow imports pandas, if it is
installed, and the first call to a server would wait for that.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy
import pyarrow
from numpy.typing import NDArray

from floodmark.columns.column import Column

Places: TypeAlias = NDArray[numpy.int64]


class Packed(NamedTuple):
    """The bytes of all rows; the position at which each begins, and the end of the last."""

    data: bytes | memoryview
    borders: Places

    @property
    def lengths(self) -> Places:
        """The length of each row."""
        lengths: Places = numpy.diff(self.borders)
        return lengths

    def to_arrow(self) -> pyarrow.BinaryArray:
        """The rows as an Arrow array over the same bytes."""
        return to_binary(self.data, self.borders)


def to_binary(data: Any, borders: NDArray[Any]) -> pyarrow.BinaryArray:
    """The rows of a buffer between borders, over the same bytes."""
    buffers = [None, pyarrow.py_buffer(borders.astype(numpy.int32)), pyarrow.py_buffer(data)]
    return pyarrow.Array.from_buffers(pyarrow.binary(), len(borders) - 1, buffers)


def pack(rows: Sequence[bytes]) -> Packed:
    """Pack rows; those of a `Column` over the same bytes, without a copy.

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
    """The positions at which rows of these lengths begin, and the end of the last."""
    borders = numpy.zeros(len(lengths) + 1, numpy.int64)
    numpy.cumsum(lengths, out=borders[1:])
    return borders


def numbers_to_arrow(numbers: NDArray[Any]) -> pyarrow.Array:
    """The numbers as an Arrow array over the same bytes."""
    buffers = [None, pyarrow.py_buffer(numbers)]
    return pyarrow.Array.from_buffers(pyarrow.from_numpy_dtype(numbers.dtype), len(numbers), buffers)


def empty_batch(schema: pyarrow.Schema) -> pyarrow.RecordBatch:
    """A batch without rows."""
    return pyarrow.RecordBatch.from_arrays([pyarrow.nulls(0, kind) for kind in schema.types], schema=schema)


def window(data: bytes | memoryview | NDArray[numpy.uint8], kind: numpy.dtype[Any]) -> NDArray[Any]:
    """Overlapping values: for each position in `data`, the value of type `kind` that begins there.

    >>> window(b"abc", numpy.dtype(">u2")).tolist() == [0x6162, 0x6263]
    True
    """
    return numpy.ndarray((max(0, len(data) - kind.itemsize + 1),), kind, data, strides=(1,))
