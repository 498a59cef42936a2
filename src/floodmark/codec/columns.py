"""Stored rows as Arrow columns, decoded a whole column at a time.

A Python call for each row would cost several times what reading the row costs.  So the rows of a page
become one Arrow array at once, in which keys and values take turns, and NumPy looks at its bytes through
overlapping windows: the window at byte i of width w shows the w bytes from i on, so that indexing it with
the places of some field cuts that field out of all rows.

    places         p0        p1        p2            p3        p4
    bytes          | key 0   | value 0 | key 1       | value 1 |
    last 8 of a key: ~version        last 1 of a value: flags

Rows whose keys have the same length are cut together; a page seldom has more than a few lengths.  The
layouts themselves are drawn in `ordered.py` and `values.py`.
"""

from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any, Final, NamedTuple, TypeAlias

import numpy
import pyarrow
import pyarrow.compute
from numpy.typing import NDArray

from floodmark.codec.digest import SEED, hash_bytes
from floodmark.codec.ordered import GROUP, MARKED_GROUP, NAMESPACE_BYTES, RAW, VERSION_BYTES
from floodmark.codec.states import live_value
from floodmark.codec.thin import thin_record
from floodmark.codec.values import (
    DELETED,
    EXPIRING_FIELDS,
    HAS_EXPIRY,
    HAS_ORIGIN,
    HAS_STAMPS,
    KNOWN_FLAGS,
    PLAIN,
    STAMPS_LENGTH_BYTES,
    STATE_KINDS,
    decode_value,
    encode_value,
)
from floodmark.columns.packed import window
from floodmark.model.errors import Corruption
from floodmark.model.partition import Content

_BINARY: Final = pyarrow.binary()

RECORDS: Final = pyarrow.schema(
    [
        pyarrow.field("key", _BINARY, nullable=False),
        pyarrow.field("version", pyarrow.uint64(), nullable=False),
        pyarrow.field("partition", pyarrow.uint32(), nullable=False),
        pyarrow.field("value", _BINARY, nullable=False),
    ]
)
RECORDS_WITH_DIGESTS: Final = RECORDS.append(pyarrow.field("digest", pyarrow.int64(), nullable=False))

Bytes: TypeAlias = NDArray[numpy.uint8]
Flags: TypeAlias = NDArray[numpy.bool_]
Places: TypeAlias = NDArray[numpy.int64]
Versions: TypeAlias = NDArray[numpy.uint64]

_PAIRS: Final = pyarrow.list_(_BINARY)
_BIG_ENDIAN: Final = numpy.dtype(">u8")
_LENGTH: Final = numpy.dtype(">u4")
_WHOLE_GROUP: Final = 0xFF
# 'r' and the namespace, which stand before the user's key.
_SKIPPED: Final = len(RAW) + NAMESPACE_BYTES
_KEY_BYTES_MIN: Final = MARKED_GROUP + VERSION_BYTES

_FLAGS_BYTES: Final = 1
_EXPIRY_BYTES: Final = 8
_ORIGIN_BYTES: Final = 9
# Where the origin begins in a copy that has neither expiry nor stamps.
_PLAIN_COPY: Final = -_ORIGIN_BYTES - _FLAGS_BYTES
_INT64_MAX: Final = (1 << 63) - 1
_NO_ROWS: Final[Places] = numpy.zeros(0, numpy.int64)


class StoredColumns(NamedTuple):
    """Stored values, taken apart: Arrow arrays of one length.

    `expires_at` is in unix seconds (int64), and null where there is none.  `origin_site` (int32) and
    `origin_version` (uint64) are null where the record was first written at the site that holds it.
    """

    values: pyarrow.BinaryArray
    deleted: pyarrow.BooleanArray
    expires_at: pyarrow.Int64Array
    origin_site: pyarrow.Int32Array
    origin_version: pyarrow.UInt64Array


def records_schema(content: Content) -> pyarrow.Schema:
    """The columns of a scan of records."""
    return RECORDS if content is Content.WHOLE else RECORDS_WITH_DIGESTS


def decode_keys(encoded: pyarrow.BinaryArray) -> tuple[pyarrow.BinaryArray, Versions]:
    """The user keys, without their namespaces, and the versions of engine keys.

    >>> from floodmark.codec.ordered import encode_key
    >>> keys, versions = decode_keys(pyarrow.array([encode_key(1, b"ada", 9), encode_key(1, b"alan", 7)]))
    >>> keys.to_pylist(), versions.tolist()
    ([b'ada', b'alan'], [9, 7])
    """
    data, places = _layout(encoded)
    starts, ends = places[:-1], places[1:]
    # First: it makes sure that the keys are made of whole groups.
    versions = _cut_versions(data, starts, ends)
    return _cut_user_keys(data, starts, ends), versions


def split_values(stored: pyarrow.BinaryArray, physical_ms: int | None = None) -> StoredColumns:
    """Take stored values apart; `decode_value` for a whole column.

    With a moment, the values of live records are without the fields that have expired by then; without one,
    they are as they are stored (`has_expiring_fields`).

    >>> columns = split_values(pyarrow.array([bytes.fromhex("6100"), bytes.fromhex("61000000000000000201")]))
    >>> columns.values.to_pylist(), columns.expires_at.to_pylist()
    ([b'a', b'a'], [None, 2])
    """
    data, places = _layout(stored)
    records = _Records(data, places[:-1], places[1:])
    has_expiry, has_origin = records.has(HAS_EXPIRY), records.has(HAS_ORIGIN)
    values = _take_even(_halve(stored, places, records.cuts))
    if physical_ms is not None and len(records.expiring):
        values = _render_values(stored, values, records.expiring, physical_ms)
    return StoredColumns(
        values=values,
        deleted=pyarrow.array(records.has(DELETED)),
        expires_at=_with_nulls(
            numpy.minimum(records.expiries(has_expiry), _INT64_MAX), has_expiry, pyarrow.int64()
        ),
        origin_site=_with_nulls(records.origin_sites(has_origin), has_origin, pyarrow.int32()),
        origin_version=_with_nulls(records.origin_versions(has_origin), has_origin, pyarrow.uint64()),
    )


def has_expiring_fields(stored: pyarrow.BinaryArray) -> bool:
    """Whether the value of one of some stored records depends on the moment at which it is read."""
    data, places = _layout(stored)
    return len(_Records(data, places[:-1], places[1:]).expiring) > 0


class StoredRows:
    """A page of engine rows, as columns."""

    def __init__(self, rows: Sequence[tuple[bytes, bytes]]) -> None:
        self._rows = rows
        self._pairs = pyarrow.array(rows, _PAIRS).values
        self._data, places = _layout(self._pairs)
        self._starts, self._ends, self._value_ends = places[:-1:2], places[1::2], places[2::2]
        self.versions = _cut_versions(self._data, self._starts, self._ends)

    def repeats(self) -> Flags:
        """Whether a row has the same key as the row before it."""
        starts, lengths = self._starts, self._ends - self._starts
        repeats = numpy.zeros(len(starts), numpy.bool_)
        candidates = numpy.flatnonzero(lengths[1:] == lengths[:-1]) + 1
        for length, chosen in _by_length(lengths[candidates]):
            rows = candidates[chosen]
            prefixes = _window(self._data, length - VERSION_BYTES)
            repeats[rows] = prefixes[starts[rows]] == prefixes[starts[rows - 1]]
        return repeats

    def dead(self, chosen: Places, physical_ms: int) -> Flags:
        """Which of some rows a reader at this time does not find."""
        records = _Records(self._data, self._ends[chosen], self._value_ends[chosen])
        dead = records.has(DELETED)
        has_expiry = records.has(HAS_EXPIRY)
        if has_expiry.any():
            dead |= has_expiry & (records.expiries(has_expiry) <= physical_ms // 1000)
        return dead

    def take(self, chosen: Places, partition: int) -> pyarrow.RecordBatch:
        """Some rows as records."""
        values = self._pairs.take(pyarrow.array(2 * chosen + 1))
        return pyarrow.RecordBatch.from_arrays(self._columns(chosen, partition, values), schema=RECORDS)

    def take_digests(
        self, chosen: Places, partition: int, physical_ms: int | None = None
    ) -> pyarrow.RecordBatch:
        """Some rows as records whose values are empty, with the digests of their values beside them.

        With a moment, the digests are those of the values that a reader finds then.  The records have no
        stamps: without their values these would mean nothing.
        """
        records = _Records(self._data, self._ends[chosen], self._value_ends[chosen])
        tails = (records.ends - records.cuts).tolist()
        rows = self._rows
        digests = [
            hash_bytes(rows[row][1][:-tail], SEED) for row, tail in zip(chosen.tolist(), tails, strict=True)
        ]
        if physical_ms is not None:
            for index in records.expiring.tolist():
                live = live_value(rows[chosen[index]][1], physical_ms)
                digests[index] = digests[index] if live is None else hash_bytes(live, SEED)
        if records.has(HAS_STAMPS).any():
            rests = pyarrow.array([_without_content(rows[row][1]) for row in chosen.tolist()], _BINARY)
        else:
            rests = _gather(self._data, records.cuts, records.ends)
        # Spark knows no unsigned numbers: the same bits, signed.
        signed = numpy.array(digests, numpy.uint64).view(numpy.int64)
        columns = [*self._columns(chosen, partition, rests), pyarrow.array(signed)]
        return pyarrow.RecordBatch.from_arrays(columns, schema=RECORDS_WITH_DIGESTS)

    def take_thin(self, chosen: Places, partition: int) -> pyarrow.RecordBatch:
        """Some rows as records without values, with digests of what is in them beside them.

        `thin_record` for a whole column.
        """
        records = _Records(self._data, self._ends[chosen], self._value_ends[chosen])
        rows = self._rows
        stored = [rows[row][1] for row in chosen.tolist()]
        rests = _gather(self._data, records.cuts, records.ends)
        if not records.has(HAS_ORIGIN | HAS_STAMPS).any():
            digests = numpy.fromiter(map(hash_bytes, stored, repeat(SEED)), numpy.uint64, len(stored))
        else:
            digests = _digest_contents(stored, records)
            stamped = numpy.flatnonzero(records.has(HAS_STAMPS))
            if len(stamped):
                thin = [thin_record(stored[row]) for row in stamped.tolist()]
                digests[stamped] = [digest for _, digest in thin]
                rests = _replace(rests, stamped, [record for record, _ in thin])
        columns = [*self._columns(chosen, partition, rests), pyarrow.array(digests.view(numpy.int64))]
        return pyarrow.RecordBatch.from_arrays(columns, schema=RECORDS_WITH_DIGESTS)

    def _columns(self, chosen: Places, partition: int, values: pyarrow.BinaryArray) -> list[pyarrow.Array]:
        return [
            _cut_user_keys(self._data, self._starts[chosen], self._ends[chosen]),
            pyarrow.array(self.versions[chosen]),
            pyarrow.array(numpy.full(len(chosen), partition, numpy.uint32)),
            values,
        ]


class _Records:
    """Stored values in a buffer: where they begin and end, and where the user's value ends.

    `expiring` are the rows with fields that are gone before the record is.
    """

    def __init__(self, data: Bytes, starts: Places, ends: Places) -> None:
        self._data = data
        self.ends = ends
        self.expiring = _NO_ROWS
        if (starts == ends).any():
            raise Corruption("a stored record is empty; it must end with a byte of flags")
        self._flags = data[ends - _FLAGS_BYTES]
        if unknown := self._flags[(self._flags & ~numpy.uint8(KNOWN_FLAGS)) != 0].tolist():
            raise Corruption(f"a stored record has unknown flags {unknown[0]:#04x}")
        self.cuts = ends - _FLAGS_BYTES
        if self._flags.any():
            self.cuts -= _EXPIRY_BYTES * self.has(HAS_EXPIRY)
            self._skip_stamps(starts, numpy.flatnonzero(self.has(HAS_STAMPS)))
            self.cuts -= _ORIGIN_BYTES * self.has(HAS_ORIGIN)
            _require_room(self.cuts, starts)

    def _skip_stamps(self, starts: Places, stamped: Places) -> None:
        """Move the cuts of the rows that have stamps to where these begin, and look at their kinds."""
        if not len(stamped):
            return
        places = self.cuts[stamped] - STAMPS_LENGTH_BYTES
        _require_room(places, starts[stamped])
        lengths = _window(self._data, _LENGTH)[places].astype(numpy.int64)
        places -= lengths
        _require_room(places, starts[stamped])
        kinds = self._data[places]
        if not lengths.all() or not numpy.isin(kinds, STATE_KINDS).all():
            raise Corruption("a stored record has stamps of an unknown kind")
        self.cuts[stamped] = places
        self.expiring = stamped[kinds == EXPIRING_FIELDS]

    def has(self, flag: int) -> Flags:
        having: Flags = (self._flags & flag) != 0
        return having

    def have_only(self, flags: int) -> bool:
        """Whether no row has others than these flags."""
        return not (self._flags & ~numpy.uint8(flags)).any()

    def expiries(self, having: Flags) -> Versions:
        """Unix seconds of those rows that have them, 0 for the others."""
        return self._cut(having, (self.ends - _FLAGS_BYTES - _EXPIRY_BYTES)[having])

    def origin_versions(self, having: Flags) -> Versions:
        return self._cut(having, self.cuts[having])

    def origin_sites(self, having: Flags) -> NDArray[numpy.int32]:
        sites = numpy.zeros(len(having), numpy.int32)
        sites[having] = self._data[self.cuts[having] + VERSION_BYTES]
        return sites

    def _cut(self, having: Flags, places: Places) -> Versions:
        numbers = numpy.zeros(len(having), numpy.uint64)
        if len(places):
            numbers[having] = _window(self._data, _BIG_ENDIAN)[places]
        return numbers


def _require_room(places: Places, starts: Places) -> None:
    if (places < starts).any():
        raise Corruption("a stored record is too short for what its flags promise")


def _render_values(
    stored: pyarrow.BinaryArray, values: pyarrow.BinaryArray, rows: Places, physical_ms: int
) -> pyarrow.BinaryArray:
    """Values, those in some rows as a reader at a moment finds them; dead records keep theirs."""
    rendered = []
    for row in rows.tolist():
        live = live_value(stored[row].as_py(), physical_ms)
        rendered.append(values[row].as_py() if live is None else live)
    return _replace(values, rows, rendered)


def _replace(values: pyarrow.BinaryArray, rows: Places, others: Sequence[bytes]) -> pyarrow.BinaryArray:
    """Values, with others in some rows."""
    chosen = numpy.zeros(len(values), numpy.bool_)
    chosen[rows] = True
    return pyarrow.compute.replace_with_mask(values, pyarrow.array(chosen), pyarrow.array(others, _BINARY))


def _digest_contents(stored: Sequence[bytes], records: _Records) -> Versions:
    """The digests of records without their origins."""
    if records.have_only(HAS_ORIGIN):
        # Of most copies the origin is all that stands behind the value.
        without = [record[:_PLAIN_COPY] + PLAIN if record[-1] else record for record in stored]
    else:
        tails = (records.ends - records.cuts).tolist()
        without = [_without_origin(record, tail) for record, tail in zip(stored, tails, strict=True)]
    return numpy.fromiter(map(hash_bytes, without, repeat(SEED)), numpy.uint64, len(without))


def _without_origin(record: bytes, tail: int) -> bytes:
    flags = record[-1]
    if not flags & HAS_ORIGIN:
        return record
    return record[:-tail] + record[_ORIGIN_BYTES - tail : -_FLAGS_BYTES] + bytes([flags ^ HAS_ORIGIN])


def _without_content(stored: bytes) -> bytes:
    record = decode_value(stored)
    return encode_value(b"", record.expires_at, record.deleted, origin=record.origin)


def _layout(array: pyarrow.BinaryArray) -> tuple[Bytes, Places]:
    """The bytes of an array, and the places where its values begin, with the end of the last."""
    if not len(array):
        return numpy.zeros(0, numpy.uint8), numpy.zeros(1, numpy.int64)
    _, offsets, data = array.buffers()
    places = numpy.frombuffer(offsets, numpy.int32, len(array) + 1, 4 * array.offset).astype(numpy.int64)
    return numpy.frombuffer(data or b"", numpy.uint8), places


def _window(data: Bytes, width: int | numpy.dtype[Any]) -> NDArray[Any]:
    """The bytes from each place on, as many as an element has: as they are, or as a number."""
    kind = numpy.dtype(f"V{width}") if isinstance(width, int) else width
    return window(data, kind)


def _by_length(lengths: Places) -> Iterator[tuple[int, Places]]:
    """The distinct lengths, each with the rows that have it."""
    if not len(lengths):
        return
    if (lengths == lengths[0]).all():
        yield int(lengths[0]), numpy.arange(len(lengths))
        return
    order = numpy.argsort(lengths, kind="stable")
    borders = numpy.flatnonzero(numpy.diff(lengths[order])) + 1
    for rows in numpy.split(order, borders):
        yield int(lengths[rows[0]]), rows


def _cut_versions(data: Bytes, starts: Places, ends: Places) -> Versions:
    lengths = ends - starts
    broken = (lengths < _KEY_BYTES_MIN) | ((lengths - VERSION_BYTES) % MARKED_GROUP != 0)
    if broken.any():
        raise _broken(data, starts, ends, broken, "is not made of whole groups and a version")
    if not len(ends):
        return numpy.zeros(0, numpy.uint64)
    inverted: Versions = _window(data, _BIG_ENDIAN)[ends - VERSION_BYTES].astype(numpy.uint64)
    return ~inverted


def _cut_user_keys(data: Bytes, starts: Places, ends: Places) -> pyarrow.BinaryArray:
    """The user keys of engine keys that are made of whole groups."""
    prefix_ends = ends - VERSION_BYTES
    padding = _WHOLE_GROUP - data[prefix_ends - 1].astype(numpy.int64)
    lengths = (prefix_ends - starts) // MARKED_GROUP * GROUP - padding - _SKIPPED
    broken = (padding < 1) | (padding > GROUP) | (lengths < 0)
    if broken.any():
        raise _broken(data, starts, ends, broken, "has an impossible last marker")
    places = _cumulate(lengths)
    keys = numpy.empty(int(places[-1]), numpy.uint8)
    for length, rows in _by_length(lengths):
        groups = (length + _SKIPPED) // GROUP + 1
        marked = _window(data, groups * MARKED_GROUP)[starts[rows]].view(numpy.uint8)
        marked = marked.reshape(len(rows), groups, MARKED_GROUP)
        if (marked[:, :-1, GROUP] != _WHOLE_GROUP).any():
            broken[rows] = (marked[:, :-1, GROUP] != _WHOLE_GROUP).any(axis=1)
            raise _broken(data, starts, ends, broken, "has an impossible marker")
        if length:
            bare = marked[:, :, :GROUP].reshape(len(rows), groups * GROUP)[:, _SKIPPED : _SKIPPED + length]
            _window(keys, length)[places[rows]] = numpy.ascontiguousarray(bare).view(f"V{length}")[:, 0]
    return _assemble(keys, places)


def _gather(data: Bytes, starts: Places, ends: Places) -> pyarrow.BinaryArray:
    """Pieces of a buffer, of which few lengths are distinct, as an array of their own."""
    lengths = ends - starts
    places = _cumulate(lengths)
    gathered = numpy.empty(int(places[-1]), numpy.uint8)
    for length, rows in _by_length(lengths):
        _window(gathered, length)[places[rows]] = _window(data, length)[starts[rows]]
    return _assemble(gathered, places)


def _cumulate(lengths: Places) -> Places:
    places = numpy.zeros(len(lengths) + 1, numpy.int64)
    numpy.cumsum(lengths, out=places[1:])
    return places


def _assemble(data: Bytes, places: Places) -> pyarrow.BinaryArray:
    buffers = [None, pyarrow.py_buffer(places.astype(numpy.int32)), pyarrow.py_buffer(data)]
    return pyarrow.Array.from_buffers(_BINARY, len(places) - 1, buffers)


def _halve(stored: pyarrow.BinaryArray, places: Places, cuts: Places) -> pyarrow.BinaryArray:
    """Each value as two, before and behind a place in it, over the same bytes."""
    halves = numpy.empty(2 * len(cuts) + 1, numpy.int32)
    halves[::2], halves[1::2] = places, cuts
    data = stored.buffers()[2] or pyarrow.py_buffer(b"")
    return pyarrow.Array.from_buffers(_BINARY, 2 * len(cuts), [None, pyarrow.py_buffer(halves), data])


def _take_even(halves: pyarrow.BinaryArray) -> pyarrow.BinaryArray:
    return halves.take(pyarrow.array(numpy.arange(0, len(halves), 2)))


def _with_nulls(numbers: NDArray[Any], having: Flags, kind: pyarrow.DataType) -> pyarrow.Array:
    if not having.any():
        return pyarrow.nulls(len(having), kind)
    return pyarrow.array(numbers.astype(kind.to_pandas_dtype()), kind, mask=~having)


def _broken(data: Bytes, starts: Places, ends: Places, broken: Flags, what: str) -> Corruption:
    row = int(numpy.flatnonzero(broken)[0])
    return Corruption(f"engine key {data[starts[row] : ends[row]].tobytes().hex()} {what}")
