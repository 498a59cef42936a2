"""Decodes and encodes stored values (`values.py`) a whole column at a time.

A Python call for each row would cost several times as much as reading the row.  So NumPy views the bytes of a
column through overlapping windows: the window at byte i shows the bytes from i on, and indexing it with the
places of a field cuts that field out of all rows.

A record that is sent to another site gets the stamp of its origin, after the user's value and before
everything else:

    as stored      | user value |             | stamps | expiry | flags              |
    with origin    | user value | version 8,  | stamps | expiry | flags | HAS_ORIGIN |
                                | site 1      |

Most changes that a site applies are *plain copies*: records of one namespace with their origins, and with
neither an expiry, a tombstone nor stamps.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Final, NamedTuple, TypeAlias

import numpy
import pyarrow
import pyarrow.compute
from numpy.typing import NDArray

from floodmark.codec.changelog import encode_columns
from floodmark.codec.digest import SEED, digest_bytes, digest_change
from floodmark.codec.ordered import NAMESPACE_BYTES, VERSION_BYTES, encode_namespace
from floodmark.codec.stamps import STAMP_BYTES, add_origin, encode_stamp, take_origin
from floodmark.codec.states import live_value
from floodmark.codec.values import (
    DELETED,
    EXPIRING_FIELDS,
    EXPIRY_BYTES,
    HAS_EXPIRY,
    HAS_ORIGIN,
    HAS_STAMPS,
    IN_BATCH,
    KNOWN_FLAGS,
    PLAIN,
    STAMPS_LENGTH_BYTES,
    STATE_KINDS,
    decode_value,
)
from floodmark.columns.column import Column
from floodmark.columns.packed import Packed, borders_of, pack, pack_array, to_binary, window
from floodmark.model.errors import Corruption
from floodmark.model.limits import LOG_INLINE_VALUE_BYTES_MAX, LOG_ROW_BYTES_MAX
from floodmark.model.version import Version

Bytes: TypeAlias = NDArray[numpy.uint8]
Flags: TypeAlias = NDArray[numpy.bool_]
Places: TypeAlias = NDArray[numpy.int64]
Versions: TypeAlias = NDArray[numpy.uint64]
# The bytes of a column, and the beginnings of each piece of a row.  The pieces of all rows fill the column.
Pieces: TypeAlias = tuple[Bytes, Sequence[Places]]

BINARY: Final = pyarrow.binary()
FLAGS_BYTES: Final = 1

_BIG_ENDIAN: Final = numpy.dtype(">u8")
_LENGTH: Final = numpy.dtype(">u4")
_KEY_LENGTH: Final = numpy.dtype(">u2")
_STAMP: Final = numpy.dtype([("version", ">u8"), ("site", "u1")])
_TAIL: Final = numpy.dtype([("version", ">u8"), ("site", "u1"), ("expiry", ">u8"), ("flags", "u1")])
_COPY_TAIL: Final = STAMP_BYTES + FLAGS_BYTES
_INT64_MAX: Final = (1 << 63) - 1
_WITHOUT_ORIGIN: Final = "a record carries no origin"
# From this number of records on, it is quicker to look at them all at once.
MANY_RECORDS: Final = 64


class StoredColumns(NamedTuple):
    """The parts of stored values, as Arrow arrays of one length.

    `expires_at` is in unix seconds (int64), or null.  `origin_site` (int32) and `origin_version` (uint64) are
    null for records that were first written at the site that holds them.
    """

    values: pyarrow.BinaryArray
    deleted: pyarrow.BooleanArray
    expires_at: pyarrow.Int64Array
    origin_site: pyarrow.Int32Array
    origin_version: pyarrow.UInt64Array
    batched: pyarrow.BooleanArray


class Records:
    """Stored values in a buffer: their ends, and the `cuts` at which the users' values end.

    `expiring` are the rows with fields that expire before the record does.  Raises Corruption for a value
    that is empty, too short, or has unknown flags or stamps.
    """

    def __init__(self, data: Bytes, starts: Places, ends: Places) -> None:
        self.data = data
        self.starts = starts
        self.ends = ends
        self.expiring: Places = numpy.zeros(0, numpy.int64)
        if (starts == ends).any():
            raise Corruption("a stored record is empty; it must end with a byte of flags")
        self._flags = data[ends - FLAGS_BYTES]
        if unknown := self._flags[(self._flags & ~numpy.uint8(KNOWN_FLAGS)) != 0].tolist():
            raise Corruption(f"a stored record has unknown flags {unknown[0]:#04x}")
        self.cuts = ends - FLAGS_BYTES
        if self._flags.any():
            self.cuts -= EXPIRY_BYTES * self.has(HAS_EXPIRY)
            self._skip_stamps(starts, numpy.flatnonzero(self.has(HAS_STAMPS)))
            self.cuts -= STAMP_BYTES * self.has(HAS_ORIGIN)
            _require_room(self.cuts, starts)

    @classmethod
    def of(cls, stored: pyarrow.BinaryArray) -> "Records":
        """The records of a column."""
        packed = pack_array(stored)
        return cls(numpy.frombuffer(packed.data, numpy.uint8), packed.borders[:-1], packed.borders[1:])

    def _skip_stamps(self, starts: Places, stamped: Places) -> None:
        """Move the cut of each row with stamps to the beginning of the stamps."""
        if not len(stamped):
            return
        places = self.cuts[stamped] - STAMPS_LENGTH_BYTES
        _require_room(places, starts[stamped])
        lengths = window(self.data, _LENGTH)[places].astype(numpy.int64)
        places -= lengths
        _require_room(places, starts[stamped])
        kinds = self.data[places]
        if not lengths.all() or not numpy.isin(kinds, STATE_KINDS).all():
            raise Corruption("a stored record has stamps of an unknown kind")
        self.cuts[stamped] = places
        self.expiring = stamped[kinds == EXPIRING_FIELDS]

    def has(self, flag: int) -> Flags:
        """For each row, whether it has a flag."""
        having: Flags = (self._flags & flag) != 0
        return having

    def have_only(self, flags: int) -> bool:
        """Whether no row has any flag besides these."""
        return not (self._flags & ~numpy.uint8(flags)).any()

    def expiries(self, having: Flags) -> Versions:
        """The expiry of the rows that have one, in unix seconds; 0 for the others."""
        return self._numbers(having, (self.ends - FLAGS_BYTES - EXPIRY_BYTES)[having])

    def origin_versions(self, having: Flags) -> Versions:
        """The versions of the origins; 0 for rows without one."""
        return self._numbers(having, self.cuts[having])

    def origin_sites(self, having: Flags) -> NDArray[numpy.int32]:
        """The sites of the origins; 0 for rows without one."""
        sites = numpy.zeros(len(having), numpy.int32)
        sites[having] = self.data[self.cuts[having] + VERSION_BYTES]
        return sites

    def _numbers(self, having: Flags, places: Places) -> Versions:
        numbers = numpy.zeros(len(having), numpy.uint64)
        if len(places):
            numbers[having] = window(self.data, _BIG_ENDIAN)[places]
        return numbers


def _require_room(places: Places, starts: Places) -> None:
    if (places < starts).any():
        raise Corruption("a stored record is too short for what its flags promise")


def split_values(stored: pyarrow.BinaryArray, physical_ms: int | None = None) -> StoredColumns:
    """The parts of stored values: `decode_value` for a whole column.

    With `physical_ms`, the values of live records lack the fields that have expired by then; without it, they
    are as stored (`has_expiring_fields`).

    >>> columns = split_values(pyarrow.array([bytes.fromhex("6100"), bytes.fromhex("61000000000000000201")]))
    >>> columns.values.to_pylist(), columns.expires_at.to_pylist()
    ([b'a', b'a'], [None, 2])
    """
    records = Records.of(stored)
    has_expiry, has_origin = records.has(HAS_EXPIRY), records.has(HAS_ORIGIN)
    # Each value as two, before and after its cut, over the same bytes.
    halves = numpy.empty(2 * len(stored) + 1, numpy.int64)
    halves[:-1:2], halves[1::2], halves[-1] = records.starts, records.cuts, len(records.data)
    even = pyarrow.array(numpy.arange(0, 2 * len(stored), 2))
    values = to_binary(records.data, halves).take(even)
    if physical_ms is not None and len(records.expiring):
        rendered = []
        for row in records.expiring.tolist():
            live = live_value(stored[row].as_py(), physical_ms)
            rendered.append(values[row].as_py() if live is None else live)
        values = replace_rows(values, records.expiring, rendered)
    expiries = numpy.minimum(records.expiries(has_expiry), _INT64_MAX)
    return StoredColumns(
        values=values,
        deleted=pyarrow.array(records.has(DELETED)),
        expires_at=_with_nulls(expiries, has_expiry, pyarrow.int64()),
        origin_site=_with_nulls(records.origin_sites(has_origin), has_origin, pyarrow.int32()),
        origin_version=_with_nulls(records.origin_versions(has_origin), has_origin, pyarrow.uint64()),
        batched=pyarrow.array(records.has(IN_BATCH)),
    )


def has_expiring_fields(stored: pyarrow.BinaryArray) -> bool:
    """Whether the value of any of the stored records depends on the time at which it is read."""
    return len(Records.of(stored).expiring) > 0


def replace_rows(values: pyarrow.BinaryArray, rows: Places, others: Sequence[bytes]) -> pyarrow.BinaryArray:
    """Values, with others in some rows."""
    chosen = numpy.zeros(len(values), numpy.bool_)
    chosen[rows] = True
    return pyarrow.compute.replace_with_mask(values, pyarrow.array(chosen), pyarrow.array(others, BINARY))


def _with_nulls(numbers: NDArray[Any], having: Flags, kind: pyarrow.DataType) -> pyarrow.Array:
    if not having.any():
        return pyarrow.nulls(len(having), kind)
    return pyarrow.array(numbers.astype(kind.to_pandas_dtype()), kind, mask=~having)


def qualify_keys(namespace: int | pyarrow.BinaryArray, keys: pyarrow.BinaryArray) -> pyarrow.BinaryArray:
    """Qualified keys: users' keys after the three bytes of their namespace.

    `namespace` is the id of one namespace, or a column with the bytes for each key.

    >>> qualify_keys(1, pyarrow.array([b"ada"])).to_pylist()
    [b'\\x00\\x00\\x01ada']
    """
    if isinstance(namespace, int):
        namespace = pyarrow.scalar(encode_namespace(namespace), BINARY)
    return _join(namespace, keys)


def rename_keys(keys: Sequence[bytes], namespace: int) -> Column[bytes]:
    """Qualified keys with the id of another namespace.

    >>> list(rename_keys([b"\\0\\0\\1ada", b"\\0\\0\\1bob"], 2))
    [b'\\x00\\x00\\x02ada', b'\\x00\\x00\\x02bob']
    """
    packed = pack(keys)
    data = numpy.frombuffer(packed.data, numpy.uint8).copy()
    for index, byte in enumerate(encode_namespace(namespace)):
        data[packed.borders[:-1] + index] = byte
    return Column(to_binary(data, packed.borders))


def join_values(
    values: pyarrow.BinaryArray,
    *,
    deleted: pyarrow.BooleanArray | None = None,
    expires_at: pyarrow.Int64Array | None = None,
    origin_site: pyarrow.Array | None = None,
    origin_version: pyarrow.Array | None = None,
) -> pyarrow.BinaryArray:
    """Stored values without stamps: `encode_value` for a whole column, the inverse of `split_values`.

    `expires_at` is in unix seconds, or null; the other columns have no nulls.  Either all records carry their
    origin or none does.

    >>> join_values(pyarrow.array([b"a", b"a"]), expires_at=pyarrow.array([None, 2])).to_pylist()
    [b'a\\x00', b'a\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x02\\x01']
    """
    if deleted is None and expires_at is None and origin_site is None:
        return _join(values, pyarrow.scalar(PLAIN, BINARY))
    # The tails of all rows are built in full, and then the bytes that a record does not have are dropped.
    tails = numpy.zeros(len(values), _TAIL)
    kept = numpy.zeros((len(values), _TAIL.itemsize), numpy.bool_)
    kept[:, -FLAGS_BYTES:] = True
    if deleted is not None:
        tails["flags"] |= numpy.where(_to_numpy(deleted), DELETED, 0).astype(numpy.uint8)
    if expires_at is not None:
        expiring = _to_numpy(expires_at.is_valid())
        tails["expiry"] = _to_numpy(expires_at.fill_null(0))
        tails["flags"] |= numpy.where(expiring, HAS_EXPIRY, 0).astype(numpy.uint8)
        kept[:, STAMP_BYTES:-FLAGS_BYTES] = expiring[:, None]
    if origin_site is not None and origin_version is not None:
        tails["version"], tails["site"] = _to_numpy(origin_version), _to_numpy(origin_site)
        tails["flags"] |= HAS_ORIGIN
        kept[:, :STAMP_BYTES] = True
    data = tails.view(numpy.uint8).reshape(kept.shape)[kept]
    return _join(values, to_binary(data, borders_of(kept.sum(axis=1))))


def _join(left: Any, right: Any) -> pyarrow.BinaryArray:
    return pyarrow.compute.binary_join_element_wise(left, right, pyarrow.scalar(b"", BINARY))


def _to_numpy(column: pyarrow.Array) -> NDArray[Any]:
    return column.to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]


def add_origins(stored: pyarrow.BinaryArray, versions: Versions, site: int) -> pyarrow.BinaryArray:
    """Give records that were first written at a site their stamps.  A record that has its stamp keeps it.

    >>> added = add_origins(pyarrow.array([b"a\\x00"]), numpy.array([7], numpy.uint64), 2)
    >>> added.to_pylist()
    [b'a\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x07\\x02\\x04']
    >>> add_origins(added, numpy.array([9], numpy.uint64), 2) == added
    True
    """
    if len(stored) < MANY_RECORDS:
        pairs = zip(stored.to_pylist(), versions.tolist(), strict=True)
        return pack([add_origin(record, encode_stamp(version, site)) for record, version in pairs]).to_arrow()
    stamps = numpy.empty(len(versions), _STAMP)
    stamps["version"], stamps["site"] = versions, site
    rows = _find_rows(stored)
    if rows is not None and not rows[:, -FLAGS_BYTES].any():
        flags = numpy.full((len(rows), FLAGS_BYTES), HAS_ORIGIN, numpy.uint8)
        pieces = [rows[:, :-FLAGS_BYTES], stamps.view(numpy.uint8).reshape(len(rows), -1), flags]
        added = numpy.concatenate(pieces, axis=1)
        borders = numpy.arange(len(rows) + 1) * added.shape[1]
        return to_binary(added, borders)
    records = Records.of(stored)
    bare = ~records.has(HAS_ORIGIN)
    if not bare.all():
        # A restored site has its own changes back from other sites, with their origin.
        added = add_origins(stored.filter(pyarrow.array(bare)), versions[bare], site)
        return pyarrow.compute.replace_with_mask(stored, pyarrow.array(bare), added)
    cut = _turn_origin_flags(records), [records.starts, records.cuts]
    return _weave([cut, _fixed(stamps)], [0, 2, 1])


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
    if len(records) < MANY_RECORDS:
        pairs = zip(keys.to_pylist(), records.to_pylist(), strict=True)
        return numpy.array([_digest_copy(key[key_start:], record) for key, record in pairs], numpy.uint64)
    names, stored = _find_rows(keys), _find_rows(records)
    if names is None or stored is None or not _are_plain_copies(stored):
        changes = _join_changes(keys, Records.of(records), key_start)
    else:
        changes = _join_plain(names[:, key_start:], stored)
    return numpy.frombuffer(b"".join(map(digest_bytes, changes, repeat(SEED))), ">u8").astype(numpy.uint64)


def _digest_copy(key: bytes, record: bytes) -> int:
    origin = decode_value(record).origin
    if origin is None:
        raise Corruption(_WITHOUT_ORIGIN)
    return digest_change(origin.version, origin.site, key, take_origin(record)[1])


def _join_changes(keys: pyarrow.BinaryArray, records: Records, key_start: int) -> Sequence[bytes]:
    """The bytes that are digested (`digest.py`), for each change."""
    if not records.has(HAS_ORIGIN).all():
        raise Corruption(_WITHOUT_ORIGIN)
    cut = _turn_origin_flags(records), [records.starts, records.cuts, records.cuts + STAMP_BYTES]
    names = pack_array(keys)
    begins = names.borders[:-1]
    lengths = _fixed((names.lengths - key_start).astype(_KEY_LENGTH))
    qualified = numpy.frombuffer(names.data, numpy.uint8), [begins, begins + key_start]
    changes: list[bytes] = _weave([cut, qualified, lengths], [1, 5, 4, 0, 2]).to_pylist()
    return changes


def _join_plain(names: Bytes, stored: Bytes) -> Sequence[bytes]:
    """`_join_changes` for plain copies of one length, under keys of one length."""
    count, key_bytes = names.shape
    length = numpy.array([key_bytes], _KEY_LENGTH).view(numpy.uint8)
    pieces = [
        stored[:, -_COPY_TAIL:-FLAGS_BYTES],
        numpy.broadcast_to(length, (count, len(length))),
        names,
        stored[:, :-_COPY_TAIL],
        numpy.zeros((count, FLAGS_BYTES), numpy.uint8),
    ]
    changes = numpy.concatenate(pieces, axis=1)
    rows: list[bytes] = changes.view(f"V{changes.shape[1]}")[:, 0].tolist()
    return rows


def _find_rows(column: pyarrow.BinaryArray) -> Bytes | None:
    """A column whose values have one length, as a matrix of bytes; None if lengths differ, or are 0."""
    packed = pack_array(column)
    lengths = packed.lengths
    if not lengths[0] or (lengths != lengths[0]).any():
        return None
    return numpy.frombuffer(packed.data, numpy.uint8).reshape(len(column), -1)


def _are_plain_copies(stored: Bytes) -> bool:
    return stored.shape[1] >= _COPY_TAIL and bool((stored[:, -FLAGS_BYTES] == HAS_ORIGIN).all())


def _turn_origin_flags(records: Records) -> Bytes:
    """The bytes of records, with the bit `HAS_ORIGIN` of each inverted."""
    data = records.data.copy()
    data[records.ends - FLAGS_BYTES] ^= HAS_ORIGIN
    return data


def _weave(columns: Sequence[Pieces], order: Sequence[int]) -> pyarrow.BinaryArray:
    """Rows of the pieces of several columns, in an order that numbers the pieces of all columns.

    Pieces that the order does not name are left out.
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
    joined = numpy.concatenate([data for data, _ in columns])
    pieces = to_binary(joined, numpy.concatenate(borders))
    rows = numpy.stack([numbers[index] for index in order], axis=1).reshape(-1)
    _, ends, woven = pieces.take(pyarrow.array(rows)).buffers()
    return to_binary(woven, numpy.frombuffer(ends, numpy.int32, len(rows) + 1)[:: len(order)])


def _fixed(values: NDArray[Any]) -> Pieces:
    """Values of a fixed size as pieces."""
    width = values.dtype.itemsize
    return values.view(numpy.uint8), [numpy.arange(0, width * len(values), width)]


@dataclass(frozen=True, slots=True)
class Copies:
    """Plain copies of one namespace, none of which was first written at this site.

    `latest` is the highest version among their origins.
    """

    keys: Packed
    records: Packed
    latest: Version

    def digest(self) -> int:
        """The XOR of the digests of all changes."""
        digests = digest_records(self.keys.to_arrow(), self.records.to_arrow(), key_start=NAMESPACE_BYTES)
        return int(numpy.bitwise_xor.reduce(digests))

    def encode_rows(self, row_bytes_max: int = LOG_ROW_BYTES_MAX) -> list[bytes]:
        """Their rows in the change log, as `encode_commit` makes them."""
        return encode_columns(self.keys, self.records, row_bytes_max)


def gather_copies(keys: Sequence[bytes], records: Sequence[bytes], site: int) -> Copies | None:
    """The records of qualified keys, which are in order, if they are many plain copies; else None."""
    if len(keys) < MANY_RECORDS or not keys[-1].startswith(keys[0][:NAMESPACE_BYTES]):
        return None
    packed = pack(records)
    lengths = packed.lengths
    if lengths.min() < _COPY_TAIL or lengths.max() > LOG_INLINE_VALUE_BYTES_MAX:
        return None
    data, ends = numpy.frombuffer(packed.data, numpy.uint8), packed.borders[1:]
    flags, sites = data[ends - FLAGS_BYTES], data[ends - FLAGS_BYTES - 1]
    if (flags != HAS_ORIGIN).any() or (sites == site).any():
        return None
    versions = window(data, _BIG_ENDIAN)[ends - _COPY_TAIL]
    return Copies(pack(keys), packed, int(versions.max()))
