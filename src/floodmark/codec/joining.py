"""Qualified keys and stored values, made a whole column at a time: the way back from `columns.py`.

What stands behind the user's value in a record without stamps (`values.py`) is at most 18 bytes.  They are
laid out for all rows as if every record had them all, and then what a record does not have is left out:

    | origin version 8 | origin site 1 | expiry 8 | flags 1 |
"""

from typing import Any, Final

import numpy
import pyarrow
import pyarrow.compute
from numpy.typing import NDArray

from floodmark.codec.ordered import encode_namespace
from floodmark.codec.values import DELETED, HAS_EXPIRY, HAS_ORIGIN, PLAIN

_BINARY: Final = pyarrow.binary()
_TAIL: Final = numpy.dtype([("version", ">u8"), ("site", "u1"), ("expiry", ">u8"), ("flags", "u1")])
_ORIGIN_END: Final = 9
_EXPIRY_END: Final = 17


def qualify_keys(namespace: int, keys: pyarrow.BinaryArray) -> pyarrow.BinaryArray:
    """Users' keys with the three bytes of their namespace in front.

    >>> qualify_keys(1, pyarrow.array([b"ada"])).to_pylist()
    [b'\\x00\\x00\\x01ada']
    """
    return _join(pyarrow.scalar(encode_namespace(namespace), _BINARY), keys)


def join_values(
    values: pyarrow.BinaryArray,
    *,
    deleted: pyarrow.BooleanArray | None = None,
    expires_at: pyarrow.Int64Array | None = None,
    origin_site: pyarrow.Array | None = None,
    origin_version: pyarrow.Array | None = None,
) -> pyarrow.BinaryArray:
    """Stored values: `encode_value` for a whole column, and what `split_values` takes apart.

    `expires_at` is in unix seconds, and null where there is none; the other columns have no nulls.  Either
    all records carry their origin or none does.

    >>> join_values(pyarrow.array([b"a", b"a"]), expires_at=pyarrow.array([None, 2])).to_pylist()
    [b'a\\x00', b'a\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x02\\x01']
    """
    if deleted is None and expires_at is None and origin_site is None:
        return _join(values, pyarrow.scalar(PLAIN, _BINARY))
    tails = numpy.zeros(len(values), _TAIL)
    kept = numpy.zeros((len(values), _TAIL.itemsize), numpy.bool_)
    kept[:, _EXPIRY_END:] = True
    if deleted is not None:
        tails["flags"] |= numpy.where(_numbers(deleted), DELETED, 0).astype(numpy.uint8)
    if expires_at is not None:
        expiring = _numbers(expires_at.is_valid())
        tails["expiry"] = _numbers(expires_at.fill_null(0))
        tails["flags"] |= numpy.where(expiring, HAS_EXPIRY, 0).astype(numpy.uint8)
        kept[:, _ORIGIN_END:_EXPIRY_END] = expiring[:, None]
    if origin_site is not None and origin_version is not None:
        tails["version"], tails["site"] = _numbers(origin_version), _numbers(origin_site)
        tails["flags"] |= HAS_ORIGIN
        kept[:, :_ORIGIN_END] = True
    return _join(values, _cut(tails, kept))


def _join(left: Any, right: Any) -> pyarrow.BinaryArray:
    return pyarrow.compute.binary_join_element_wise(left, right, pyarrow.scalar(b"", _BINARY))


def _numbers(column: pyarrow.Array) -> NDArray[Any]:
    return column.to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]


def _cut(tails: NDArray[Any], kept: NDArray[numpy.bool_]) -> pyarrow.BinaryArray:
    """The bytes of each row that are kept."""
    offsets = numpy.zeros(len(tails) + 1, numpy.int32)
    numpy.cumsum(kept.sum(axis=1), out=offsets[1:])
    data = tails.view(numpy.uint8).reshape(kept.shape)[kept]
    buffers = [None, pyarrow.py_buffer(offsets), pyarrow.py_buffer(data)]
    return pyarrow.Array.from_buffers(_BINARY, len(tails), buffers)
