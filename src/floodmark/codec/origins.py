"""Origins put into stored values and taken out of them, a whole column at a time.

A record that leaves the site where it was first written gets its stamp, which stands behind the user's value
and before everything else (`values.py`):

    as stored      | user value |             | stamps | expiry | flags              |
    with origin    | user value | version 8,  | stamps | expiry | flags | HAS_ORIGIN |
                                | site 1      |

All rows are cut at that place at once, over the same bytes, and the pieces are put together anew by one copy.
"""

from collections.abc import Sequence
from itertools import repeat
from typing import Any, Final, TypeAlias

import numpy
import pyarrow
import pyarrow.compute
from numpy.typing import NDArray

from floodmark.codec.digest import SEED, digest_bytes
from floodmark.codec.stamps import STAMP_BYTES
from floodmark.codec.values import HAS_EXPIRY, HAS_ORIGIN, HAS_STAMPS, KNOWN_FLAGS, STAMPS_LENGTH_BYTES
from floodmark.model.errors import Corruption

Bytes: TypeAlias = NDArray[numpy.uint8]
Places: TypeAlias = NDArray[numpy.int64]
Versions: TypeAlias = NDArray[numpy.uint64]
# The bytes of a column, and where its rows begin and end.
Layout: TypeAlias = tuple[Bytes, Places, Places]
# The bytes of a column, and where each piece of a row begins.  Row after row, the pieces take up all of them.
Pieces: TypeAlias = tuple[Bytes, Sequence[Places]]

_BINARY: Final = pyarrow.binary()
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
    rows = _find_rows(stored)
    if rows is not None and not rows[:, -_FLAGS_BYTES].any():
        return _add_plain(rows, _encode_stamps(versions, site))
    data, starts, ends = _layout(stored)
    bare = _find_flags(data, starts, ends) & HAS_ORIGIN == 0
    if not bare.all():
        # A site that was restored has got changes of its own back from others.
        added = add_origins(stored.filter(pyarrow.array(bare)), versions[bare], site)
        return pyarrow.compute.replace_with_mask(stored, pyarrow.array(bare), added)
    places = _find_places(data, starts, ends, expected=0)
    return _weave([(data, [starts, places]), _fixed(_encode_stamps(versions, site))], [0, 2, 1])


def _encode_stamps(versions: Versions, site: int) -> NDArray[Any]:
    stamps = numpy.empty(len(versions), _STAMP)
    stamps["version"], stamps["site"] = versions, site
    return stamps


def _add_plain(rows: Bytes, stamps: NDArray[Any]) -> pyarrow.BinaryArray:
    """The same for records that have one length, and nothing but their values."""
    count = len(rows)
    flags = numpy.broadcast_to(numpy.array([HAS_ORIGIN], numpy.uint8), (count, _FLAGS_BYTES))
    pieces = [rows[:, :-_FLAGS_BYTES], stamps.view(numpy.uint8).reshape(count, -1), flags]
    added = numpy.concatenate(pieces, axis=1)
    width = added.shape[1]
    return _column(numpy.arange(0, width * (count + 1), width, dtype=numpy.int32), added)


def digest_records(
    keys: pyarrow.BinaryArray, records: pyarrow.BinaryArray, *, key_start: int = 0
) -> Versions:
    """The digests of changes whose records carry their origin: `digest_change` for whole columns.

    The user's keys begin at `key_start` within `keys`.

    >>> from floodmark.codec.digest import digest_change
    >>> record = pyarrow.array([b"a\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x07\\x02\\x04"])
    >>> digest_records(pyarrow.array([b"ada"]), record).tolist() == [digest_change(7, 2, b"ada", b"a\\x00")]
    True
    """
    if not len(records):
        return numpy.zeros(0, numpy.uint64)
    names, stored = _find_rows(keys), _find_rows(records)
    if names is None or stored is None or not _are_plain(stored):
        changes = _join_changes(keys, records, key_start)
    else:
        changes = _join_plain(names[:, key_start:], stored)
    return numpy.frombuffer(b"".join(map(digest_bytes, changes, repeat(SEED))), ">u8").astype(numpy.uint64)


def _join_changes(keys: pyarrow.BinaryArray, records: pyarrow.BinaryArray, key_start: int) -> Sequence[bytes]:
    """What digests are made of (`digest.py`)."""
    data, starts, ends = _layout(records)
    places = _find_places(data, starts, ends, expected=HAS_ORIGIN)
    cut = data, [starts, places - STAMP_BYTES, places]
    names, begins, behind = _layout(keys)
    lengths = _fixed((behind - begins - key_start).astype(_KEY_LENGTH))
    qualified = names, [begins, begins + key_start]
    changes: list[bytes] = _weave([cut, qualified, lengths], [1, 5, 4, 0, 2]).to_pylist()
    return changes


def _join_plain(names: Bytes, stored: Bytes) -> Sequence[bytes]:
    """The same of plain copies that have one length, under keys that have one length."""
    tail = STAMP_BYTES + _FLAGS_BYTES
    count, key_bytes = names.shape
    length = numpy.array([key_bytes], _KEY_LENGTH).view(numpy.uint8)
    plain = numpy.array([0], numpy.uint8)
    pieces = [
        stored[:, -tail:-_FLAGS_BYTES],
        numpy.broadcast_to(length, (count, len(length))),
        names,
        stored[:, :-tail],
        numpy.broadcast_to(plain, (count, len(plain))),
    ]
    changes = numpy.concatenate(pieces, axis=1)
    rows: list[bytes] = changes.view(f"V{changes.shape[1]}")[:, 0].tolist()
    return rows


def _find_rows(column: pyarrow.BinaryArray) -> Bytes | None:
    """The bytes of a column whose values have one length, a row for each; None if they differ."""
    _, offsets, data = column.buffers()
    places = numpy.frombuffer(offsets, numpy.int32, len(column) + 1, 4 * column.offset)
    lengths = numpy.diff(places)
    if not lengths[0] or (lengths != lengths[0]).any():
        return None
    return numpy.frombuffer(data, numpy.uint8)[places[0] : places[-1]].reshape(len(column), -1)


def _are_plain(stored: Bytes) -> bool:
    """Whether records have an origin, and neither an expiry, a tombstone nor stamps."""
    return stored.shape[1] > STAMP_BYTES and bool((stored[:, -_FLAGS_BYTES] == HAS_ORIGIN).all())


def _layout(records: pyarrow.BinaryArray) -> Layout:
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


def _weave(columns: Sequence[Pieces], order: Sequence[int]) -> pyarrow.BinaryArray:
    """Rows of the pieces of several columns, in an order that names them by their place among all pieces.

    What no order names is left out.
    """
    count = len(columns[0][1][0])
    borders: list[NDArray[numpy.int32]] = []
    numbers: list[Places] = []
    size = first = 0
    for data, begins in columns:
        mixed = numpy.empty(len(begins) * count, numpy.int32)
        for index, places in enumerate(begins):
            mixed[index :: len(begins)] = places + size
            numbers.append(numpy.arange(first + index, first + len(mixed), len(begins)))
        borders.append(mixed)
        size, first = size + len(data), first + len(mixed)
    borders.append(numpy.array([size], numpy.int32))
    pieces = _column(numpy.concatenate(borders), numpy.concatenate([data for data, _ in columns]))
    rows = numpy.stack([numbers[index] for index in order], axis=1).reshape(-1)
    _, ends, woven = pieces.take(pyarrow.array(rows)).buffers()
    return _column(numpy.frombuffer(ends, numpy.int32, len(rows) + 1)[:: len(order)].copy(), woven)


def _column(borders: NDArray[numpy.int32], data: Any) -> pyarrow.BinaryArray:
    buffers = [None, pyarrow.py_buffer(borders), pyarrow.py_buffer(data)]
    return pyarrow.Array.from_buffers(_BINARY, len(borders) - 1, buffers)


def _fixed(values: NDArray[Any]) -> Pieces:
    """Values of one size, each a piece."""
    width = values.dtype.itemsize
    return values.view(numpy.uint8), [numpy.arange(0, width * len(values), width)]


def _too_short() -> Corruption:
    return Corruption("a stored record is too short for what its flags promise")
