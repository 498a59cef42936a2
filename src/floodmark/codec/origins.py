"""Origins put into stored values and taken out of them, a whole column at a time.

A record that leaves the site where it was first written gets its stamp, which stands behind the user's value
and before everything else (`values.py`):

    as stored      | user value |             | stamps | expiry | flags              |
    with origin    | user value | version 8,  | stamps | expiry | flags | HAS_ORIGIN |
                                | site 1      |

All rows are cut at that place at once, over the same bytes, and the pieces are joined anew.
"""

from itertools import repeat
from typing import Any, Final, TypeAlias

import numpy
import pyarrow
import pyarrow.compute
from numpy.typing import NDArray

from floodmark.codec.digest import SEED, hash_bytes
from floodmark.codec.stamps import STAMP_BYTES
from floodmark.codec.values import HAS_EXPIRY, HAS_ORIGIN, HAS_STAMPS, KNOWN_FLAGS, STAMPS_LENGTH_BYTES
from floodmark.model.errors import Corruption

Bytes: TypeAlias = NDArray[numpy.uint8]
Places: TypeAlias = NDArray[numpy.int64]
Versions: TypeAlias = NDArray[numpy.uint64]

_BINARY: Final = pyarrow.binary()
_NOTHING: Final = pyarrow.scalar(b"", _BINARY)
_STAMP: Final = numpy.dtype([("version", ">u8"), ("site", "u1")])
_KEY_LENGTH: Final = numpy.dtype(">u2")
_FLAGS_BYTES: Final = 1
_EXPIRY_BYTES: Final = 8


def add_origins(stored: pyarrow.BinaryArray, versions: Versions, site: int) -> pyarrow.BinaryArray:
    """Give records that were first written at a site their stamps.  One that has its stamp keeps it.

    >>> added = add_origins(pyarrow.array([b"a\\x00"]), numpy.array([7], numpy.uint64), 2)
    >>> added.to_pylist()
    [b'a\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x07\\x02\\x04']
    >>> add_origins(added, numpy.array([9], numpy.uint64), 2) == added
    True
    """
    if not len(stored):
        return stored
    data, starts, ends = _layout(stored)
    bare = _find_flags(data, starts, ends) & HAS_ORIGIN == 0
    if not bare.all():
        # A site that was restored has got changes of its own back from others.
        added = add_origins(stored.filter(pyarrow.array(bare)), versions[bare], site)
        return pyarrow.compute.replace_with_mask(stored, pyarrow.array(bare), added)
    places = _find_places(data, starts, ends, expected=0)
    stamps = numpy.empty(len(stored), _STAMP)
    stamps["version"], stamps["site"] = versions, site
    values, rests = _cut(data, [starts, places], ends)
    return _join(values, _fixed(stamps), rests)


def digest_records(keys: pyarrow.BinaryArray, records: pyarrow.BinaryArray) -> Versions:
    """The digests of changes whose records carry their origin: `digest_change` for whole columns.

    >>> from floodmark.codec.digest import digest_change
    >>> record = pyarrow.array([b"a\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x07\\x02\\x04"])
    >>> digest_records(pyarrow.array([b"ada"]), record).tolist() == [digest_change(7, 2, b"ada", b"a\\x00")]
    True
    """
    if not len(records):
        return numpy.zeros(0, numpy.uint64)
    data, starts, ends = _layout(records)
    places = _find_places(data, starts, ends, expected=HAS_ORIGIN)
    values, origins, rests = _cut(data, [starts, places - STAMP_BYTES, places], ends)
    lengths = pyarrow.compute.binary_length(keys).to_numpy().astype(_KEY_LENGTH)
    changes = _join(origins, _fixed(lengths), keys, values, rests).to_pylist()
    return numpy.fromiter(map(hash_bytes, changes, repeat(SEED)), numpy.uint64, len(changes))


def _layout(records: pyarrow.BinaryArray) -> tuple[Bytes, Places, Places]:
    """A copy of the bytes of a column, and where its values begin and end."""
    _, offsets, data = records.buffers()
    places = numpy.frombuffer(offsets, numpy.int32, len(records) + 1, 4 * records.offset).astype(numpy.int64)
    first, last = int(places[0]), int(places[-1])
    places -= first
    return numpy.frombuffer(data or b"", numpy.uint8)[first:last].copy(), places[:-1], places[1:]


def _find_flags(data: Bytes, starts: Places, ends: Places) -> Bytes:
    if (starts == ends).any():
        raise Corruption("a stored record is empty; it must end with a byte of flags")
    flags: Bytes = data[ends - _FLAGS_BYTES]
    if (flags & ~numpy.uint8(KNOWN_FLAGS)).any():
        raise Corruption("a stored record has flags that are unknown here")
    return flags


def _find_places(data: Bytes, starts: Places, ends: Places, *, expected: int) -> Places:
    """Where the origins of records end or would end; the flag that announces them is turned over in `data`.

    All of the records must have an origin, or none, as `expected` says.
    """
    flags = _find_flags(data, starts, ends)
    if ((flags & HAS_ORIGIN) != expected).any():
        raise Corruption("a record carries no origin" if expected else "a record carries an origin already")
    data[ends - _FLAGS_BYTES] = flags ^ HAS_ORIGIN
    places: Places = ends - _FLAGS_BYTES - _EXPIRY_BYTES * ((flags & HAS_EXPIRY) != 0)
    stamped = numpy.flatnonzero(flags & HAS_STAMPS)
    if len(stamped):
        if (places[stamped] - STAMPS_LENGTH_BYTES < starts[stamped]).any():
            raise _too_short()
        steps = numpy.arange(STAMPS_LENGTH_BYTES)
        lengths = data[places[stamped, None] - STAMPS_LENGTH_BYTES + steps].view(">u4")[:, 0]
        places[stamped] -= STAMPS_LENGTH_BYTES + lengths.astype(numpy.int64)
    if (places - (STAMP_BYTES if expected else 0) < starts).any():
        raise _too_short()
    return places


def _cut(data: Bytes, begins: list[Places], ends: Places) -> list[pyarrow.BinaryArray]:
    """Each record in as many pieces as it has beginnings, a column for each."""
    count, pieces = len(ends), len(begins)
    borders = numpy.empty(pieces * count + 1, numpy.int32)
    for index, places in enumerate(begins):
        borders[index:-1:pieces] = places
    borders[-1] = ends[-1]
    buffers = [None, pyarrow.py_buffer(borders), pyarrow.py_buffer(data)]
    cut = pyarrow.Array.from_buffers(_BINARY, pieces * count, buffers)
    return [cut.take(pyarrow.array(numpy.arange(index, pieces * count, pieces))) for index in range(pieces)]


def _fixed(values: NDArray[Any]) -> pyarrow.BinaryArray:
    """Values of one size as a column of bytes."""
    borders = numpy.arange(len(values) + 1, dtype=numpy.int32) * values.dtype.itemsize
    buffers = [None, pyarrow.py_buffer(borders.astype(numpy.int32)), pyarrow.py_buffer(values.tobytes())]
    return pyarrow.Array.from_buffers(_BINARY, len(values), buffers)


def _join(*columns: pyarrow.BinaryArray) -> pyarrow.BinaryArray:
    return pyarrow.compute.binary_join_element_wise(*columns, _NOTHING)


def _too_short() -> Corruption:
    return Corruption("a stored record is too short for what its flags promise")
