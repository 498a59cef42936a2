"""Pages of engine rows as Arrow columns, decoded a whole column at a time (`records.py`).

Keys and values of a page become one Arrow array, in which they alternate:

    places         p0        p1        p2            p3        p4
    bytes          | key 0   | value 0 | key 1       | value 1 |
    last 8 of a key: ~version        last 1 of a value: flags

Rows whose keys have the same length are cut together; a page seldom has more than a few lengths.  The
layouts themselves are drawn in `ordered.py` and `values.py`.
"""

from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any, Final

import numpy
import pyarrow
from numpy.typing import NDArray

from floodmark.codec.digest import SEED, hash_bytes
from floodmark.codec.ordered import GROUP, MARKED_GROUP, NAMESPACE_BYTES, RAW, VERSION_BYTES
from floodmark.codec.records import (
    BINARY,
    FLAGS_BYTES,
    Bytes,
    Flags,
    Places,
    Records,
    Versions,
    replace_rows,
)
from floodmark.codec.stamps import STAMP_BYTES
from floodmark.codec.states import live_value
from floodmark.codec.thin import thin_record
from floodmark.codec.values import (
    DELETED,
    HAS_EXPIRY,
    HAS_ORIGIN,
    HAS_STAMPS,
    IN_BATCH,
    PLAIN,
    decode_value,
    encode_value,
    unmark_batch,
)
from floodmark.columns.packed import borders_of, pack_array, to_binary, window
from floodmark.model.errors import Corruption
from floodmark.model.partition import Content

RECORDS: Final = pyarrow.schema(
    [
        pyarrow.field("key", BINARY, nullable=False),
        pyarrow.field("version", pyarrow.uint64(), nullable=False),
        pyarrow.field("partition", pyarrow.uint32(), nullable=False),
        pyarrow.field("value", BINARY, nullable=False),
    ]
)
RECORDS_WITH_DIGESTS: Final = RECORDS.append(pyarrow.field("digest", pyarrow.int64(), nullable=False))

_PAIRS: Final = pyarrow.list_(BINARY)
_BIG_ENDIAN: Final = numpy.dtype(">u8")
_WHOLE_GROUP: Final = 0xFF
# 'r' and the namespace, which precede the user's key.
_SKIPPED: Final = len(RAW) + NAMESPACE_BYTES
_KEY_BYTES_MIN: Final = MARKED_GROUP + VERSION_BYTES


def records_schema(content: Content) -> pyarrow.Schema:
    """The columns of a scan of records."""
    return RECORDS if content is Content.WHOLE else RECORDS_WITH_DIGESTS


class StoredRows:
    """A page of engine rows, as columns."""

    def __init__(self, rows: Sequence[tuple[bytes, bytes]]) -> None:
        self._rows = rows
        self._pairs = pyarrow.array(rows, _PAIRS).values
        packed = pack_array(self._pairs)
        places = packed.borders
        self._data = numpy.frombuffer(packed.data, numpy.uint8)
        self._starts, self._ends, self._value_ends = places[:-1:2], places[1::2], places[2::2]
        self.versions = _cut_versions(self._data, self._starts, self._ends)

    def repeats(self) -> Flags:
        """For each row, whether it has the same key as the row before it."""
        starts, lengths = self._starts, self._ends - self._starts
        repeats = numpy.zeros(len(starts), numpy.bool_)
        candidates = numpy.flatnonzero(lengths[1:] == lengths[:-1]) + 1
        for length, chosen in _by_length(lengths[candidates]):
            rows = candidates[chosen]
            prefixes = _window(self._data, length - VERSION_BYTES)
            repeats[rows] = prefixes[starts[rows]] == prefixes[starts[rows - 1]]
        return repeats

    def dead(self, chosen: Places, physical_ms: int) -> Flags:
        """For each chosen row, whether it is dead for a reader at a time."""
        records = self._records(chosen)
        dead = records.has(DELETED)
        has_expiry = records.has(HAS_EXPIRY)
        if has_expiry.any():
            dead |= has_expiry & (records.expiries(has_expiry) <= physical_ms // 1000)
        return dead

    def take(
        self, chosen: Places, partition: int, content: Content = Content.WHOLE, physical_ms: int | None = None
    ) -> pyarrow.RecordBatch:
        """The chosen rows as records.

        With `DIGESTS`, values are empty, and another column has their digests; with `physical_ms`, the
        digests of the values that a reader finds at that time.  These records have no stamps, which would
        mean nothing without their values.  `THIN` is `thin_record` for a whole column.
        """
        columns = [
            _cut_user_keys(self._data, self._starts[chosen], self._ends[chosen]),
            pyarrow.array(self.versions[chosen]),
            pyarrow.array(numpy.full(len(chosen), partition, numpy.uint32)),
        ]
        if content is Content.WHOLE:
            columns.append(self._pairs.take(pyarrow.array(2 * chosen + 1)))
        else:
            stored = [self._rows[row][1] for row in chosen.tolist()]
            records = self._records(chosen)
            if records.has(IN_BATCH).any():
                stored = list(map(unmark_batch, stored))
                records = Records.of(pyarrow.array(stored, BINARY))
            rests, digests = (
                _thin(stored, records)
                if content is Content.THIN
                else _digest_values(stored, records, physical_ms)
            )
            # Spark has no unsigned numbers: the same bits, signed.
            columns += [rests, pyarrow.array(digests.view(numpy.int64))]
        return pyarrow.RecordBatch.from_arrays(columns, schema=records_schema(content))

    def _records(self, chosen: Places) -> Records:
        return Records(self._data, self._ends[chosen], self._value_ends[chosen])


def _digest_values(
    stored: Sequence[bytes], records: Records, physical_ms: int | None
) -> tuple[pyarrow.BinaryArray, Versions]:
    """Records without values and stamps, and the digests of their values."""
    tails = (records.ends - records.cuts).tolist()
    values = [record[:-tail] for record, tail in zip(stored, tails, strict=True)]
    if physical_ms is not None:
        for row in records.expiring.tolist():
            live = live_value(stored[row], physical_ms)
            values[row] = values[row] if live is None else live
    if records.has(HAS_STAMPS).any():
        rests = pyarrow.array([_without_content(record) for record in stored], BINARY)
    else:
        rests = _gather(records.data, records.cuts, records.ends)
    return rests, _digest(values)


def _thin(stored: Sequence[bytes], records: Records) -> tuple[pyarrow.BinaryArray, Versions]:
    """Thin records, and the digests of the records that they replace."""
    rests = _gather(records.data, records.cuts, records.ends)
    if not records.has(HAS_ORIGIN | HAS_STAMPS).any():
        return rests, _digest(stored)
    if records.have_only(HAS_ORIGIN):
        # Most copies have only the origin after their value.
        end = -STAMP_BYTES - FLAGS_BYTES
        return rests, _digest([record[:end] + PLAIN if record[-1] else record for record in stored])
    tails = (records.ends - records.cuts).tolist()
    digests = _digest([_without_origin(record, tail) for record, tail in zip(stored, tails, strict=True)])
    stamped = numpy.flatnonzero(records.has(HAS_STAMPS))
    if len(stamped):
        thin = [thin_record(stored[row]) for row in stamped.tolist()]
        digests[stamped] = [digest for _, digest in thin]
        rests = replace_rows(rests, stamped, [record for record, _ in thin])
    return rests, digests


def _digest(contents: Sequence[bytes]) -> Versions:
    return numpy.fromiter(map(hash_bytes, contents, repeat(SEED)), numpy.uint64, len(contents))


def _without_origin(record: bytes, tail: int) -> bytes:
    flags = record[-1]
    if not flags & HAS_ORIGIN:
        return record
    return record[:-tail] + record[STAMP_BYTES - tail : -FLAGS_BYTES] + bytes([flags ^ HAS_ORIGIN])


def _without_content(stored: bytes) -> bytes:
    record = decode_value(stored)
    return encode_value(b"", record.expires_at, record.deleted, origin=record.origin)


def _window(data: Bytes, width: int) -> NDArray[Any]:
    """For each place, the `width` bytes from there on."""
    return window(data, numpy.dtype(f"V{width}"))


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
    inverted: Versions = window(data, _BIG_ENDIAN)[ends - VERSION_BYTES].astype(numpy.uint64)
    return ~inverted


def _cut_user_keys(data: Bytes, starts: Places, ends: Places) -> pyarrow.BinaryArray:
    """The user keys of engine keys that are made of whole groups."""
    prefix_ends = ends - VERSION_BYTES
    padding = _WHOLE_GROUP - data[prefix_ends - 1].astype(numpy.int64)
    lengths = (prefix_ends - starts) // MARKED_GROUP * GROUP - padding - _SKIPPED
    broken = (padding < 1) | (padding > GROUP) | (lengths < 0)
    if broken.any():
        raise _broken(data, starts, ends, broken, "has an impossible last marker")
    places = borders_of(lengths)
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
    return to_binary(keys, places)


def _gather(data: Bytes, starts: Places, ends: Places) -> pyarrow.BinaryArray:
    """Copy pieces of a buffer into an array of their own; quick if they have few distinct lengths."""
    lengths = ends - starts
    places = borders_of(lengths)
    gathered = numpy.empty(int(places[-1]), numpy.uint8)
    for length, rows in _by_length(lengths):
        _window(gathered, length)[places[rows]] = _window(data, length)[starts[rows]]
    return to_binary(gathered, places)


def _broken(data: Bytes, starts: Places, ends: Places, broken: Flags, what: str) -> Corruption:
    row = int(numpy.flatnonzero(broken)[0])
    return Corruption(f"engine key {data[starts[row] : ends[row]].tobytes().hex()} {what}")
