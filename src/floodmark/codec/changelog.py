"""Rows of the change log.

One row per commit and log, so that reading changes back is one sequential scan.  Its key:

    log id: 4 bytes | commit version: 8 bytes | chunk: 2 bytes          (big-endian)

A commit row holds the qualified keys (namespace and user key) and the stored values of the commit, column by
column, so that a few calls pack or unpack a thousand changes:

    +---+-------+--------------------+----------------------+------+--------+
    | 1 | count | key lengths        | value lengths        | keys | values |
    | 1 |   4   | 2 bytes each       | 4 bytes each         |      |        |
    +---+-------+--------------------+----------------------+------+--------+

Numbers in it are little-endian.  A value length of 0xFFFFFFFF means that the value is large, and is read from
the data, under the same key and version.  States are always in the row, however large: the data has the
merged record, and the log the write that was merged into it.  A commit that does not fit into one row
continues in the next chunk; chunks are written together.

A heartbeat row is small, because most of its numbers are close to `through`:

    +---+------+---------+---------+-------+---------+-----------+------------+
    | 3 | node | through | wall ms | since | log + 1 | watermark | sums       |
    | 1 |   1  |    8    |   +-    |   +-  |    n    |           | n + 27 * n |
    +---+------+---------+---------+-------+---------+-----------+------------+

    n                 a number in groups of 7 bits, the lowest first; bit 7 means that another follows
    +-                a distance from `through`, or from its milliseconds: 2 * d, or -2 * d - 1 below 0, as n
    log + 1           0 if the account is about all logs of the node
    watermark         number of sites n, and of each: site 1, number of marks n, and the marks
    mark              namespace n, version +-; of a site's second mark on, from the mark before
    sums entry        namespace 3, own count 4, own digest 8, all count 4, all digest 8

Older rows have the same fields in numbers of fixed width:

    +---+------+-----+---------+-------+---------+------------+------------+
    | 2 | node | log | wall ms | since | through | watermark  | sums       |
    | 1 |   1  |  4  |    8    |   8   |    8    | 4 + 12 * n | 4 + 27 * n |
    +---+------+-----+---------+-------+---------+------------+------------+

    watermark entry   namespace 3, site 1, version 8
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from struct import Struct, iter_unpack, pack, unpack_from
from struct import error as StructError
from typing import Any, Final, NamedTuple, TypeAlias

import numpy
import pyarrow
from numpy.typing import NDArray

from floodmark.codec.stamps import is_first_written_at
from floodmark.codec.values import HAS_ORIGIN, HAS_STAMPS, IN_BATCH
from floodmark.columns.packed import Packed, borders_of, window
from floodmark.model.change import Heartbeat, Sums, Tally
from floodmark.model.errors import Corruption
from floodmark.model.limits import LOG_INLINE_VALUE_BYTES_MAX, LOG_ROW_BYTES_MAX
from floodmark.model.ranges import KeyRange
from floodmark.model.version import VERSION_MAX, Version, physical_ms

LOG_ID_BYTES: Final = 4

_KEY: Final = Struct(">IQH")
_COMMIT: Final = 1
_WIDE_HEARTBEAT: Final = 2
_HEARTBEAT: Final = 3
_COMMIT_HEAD: Final = Struct("<BI")
_SINGLE: Final = Struct("<BIHI")
COMMIT_BYTE: Final = bytes([_COMMIT])
COMMIT_HEAD_BYTES: Final = _COMMIT_HEAD.size
# The bytes in the row of a commit of one key besides the key and the value.
SINGLE_HEAD_BYTES: Final = _SINGLE.size
_BY_REFERENCE: Final = 0xFFFFFFFF
_REFERENCE: Final = _BY_REFERENCE.to_bytes(4, "little")
_ORIGIN_BYTES: Final = 9
_NONE: Final = numpy.zeros(0, numpy.uint32)
_ONE_CHANGE: Final = _COMMIT_HEAD.pack(_COMMIT, 1)

_HEARTBEAT_HEAD: Final = Struct("<BBQ")
_WIDE_HEARTBEAT_HEAD: Final = Struct("<BBIQQQ")
_NO_LOG: Final = 0xFFFFFFFF
_SITES_MAX: Final = 256
_NAMESPACE_MAX: Final = (1 << 24) - 1
_COUNT: Final = Struct("<I")
_COUNTS: Final = numpy.dtype("<u4")
_KEY_LENGTH: Final = numpy.dtype("<u2")
_VALUE_LENGTH: Final = numpy.dtype("<u4")
_LENGTHS_BYTES: Final = _KEY_LENGTH.itemsize + _VALUE_LENGTH.itemsize

Numbers: TypeAlias = NDArray[numpy.int64]
_MARK: Final = Struct("<3sBQ")
_SUMS: Final = Struct("<3sIQIQ")


class CommitRow(NamedTuple):
    """The changes of one row: qualified keys, and stored values or None for "look it up"."""

    keys: list[bytes]
    values: list[bytes | None]


# `encode_log_key` without a Python call: log, version and chunk.
pack_log_key: Final[Callable[[int, Version, int], bytes]] = _KEY.pack


def encode_log_key(log: int, version: Version, chunk: int = 0) -> bytes:
    """The key of a row."""
    return _KEY.pack(log, version, chunk)


def decode_log_key(key: bytes) -> tuple[int, Version, int]:
    """Decode the key of a row: log, version, chunk."""
    try:
        log, version, chunk = _KEY.unpack(key)
    except StructError as error:
        raise Corruption(f"change-log key {key.hex()} is not {_KEY.size} bytes long") from error
    return log, version, chunk


def encode_log_range(log: int, since: Version, until: Version) -> tuple[bytes, bytes]:
    """The first key above `since` and the first key above `until`, both within one log."""
    return _key_above(log, since), _key_above(log, until)


def _key_above(log: int, version: Version) -> bytes:
    return _KEY.pack(log, version + 1, 0) if version < VERSION_MAX else _KEY.pack(log + 1, 0, 0)


def encode_single(key: bytes, value: bytes) -> bytes:
    """The row of a commit of one key: `encode_commit` without lists."""
    if len(value) > LOG_INLINE_VALUE_BYTES_MAX and not value[-1] & HAS_STAMPS:
        return _SINGLE.pack(_COMMIT, 1, len(key), _BY_REFERENCE) + key
    return _SINGLE.pack(_COMMIT, 1, len(key), len(value)) + key + value


def encode_commit(
    keys: Sequence[bytes], values: Sequence[bytes], row_bytes_max: int = LOG_ROW_BYTES_MAX
) -> list[bytes]:
    """The rows of a commit, in order of their chunks."""
    packed_keys, packed_values = b"".join(keys), b"".join(values)
    if len(packed_keys) + len(packed_values) <= row_bytes_max:
        lengths = list(map(len, values))
        if max(lengths) <= LOG_INLINE_VALUE_BYTES_MAX:
            return [_join_chunk(keys, packed_keys, lengths, packed_values)]
        return [_encode_chunk(keys, values)]
    rows: list[bytes] = []
    start = size = 0
    for index, (key, value) in enumerate(zip(keys, values, strict=True)):
        inline = 0 if _is_named(value) else len(value)
        if size and size + len(key) + inline > row_bytes_max:
            rows.append(_encode_chunk(keys[start:index], values[start:index]))
            start, size = index, 0
        size += len(key) + inline
    rows.append(_encode_chunk(keys[start:], values[start:]))
    return rows


def _is_named(value: bytes) -> bool:
    return len(value) > LOG_INLINE_VALUE_BYTES_MAX and not value[-1] & HAS_STAMPS


def _encode_chunk(keys: Sequence[bytes], values: Sequence[bytes]) -> bytes:
    named = list(map(_is_named, values))
    lengths = [_BY_REFERENCE if by else len(value) for by, value in zip(named, values, strict=True)]
    inline = b"".join(value for by, value in zip(named, values, strict=True) if not by)
    return _join_chunk(keys, b"".join(keys), lengths, inline)


def _join_chunk(keys: Sequence[bytes], packed_keys: bytes, lengths: Sequence[int], inline: bytes) -> bytes:
    count = len(keys)
    key_lengths = pack(f"<{count}H", *map(len, keys))
    head = _COMMIT_HEAD.pack(_COMMIT, count)
    return b"".join((head, key_lengths, pack(f"<{count}I", *lengths), packed_keys, inline))


def encode_columns(keys: Packed, values: Packed, row_bytes_max: int = LOG_ROW_BYTES_MAX) -> list[bytes]:
    """`encode_commit` of packed columns, in which no value is large.

    >>> from floodmark.columns.packed import pack
    >>> keys, values = [b"a", b"bc"], [b"12", b""]
    >>> encode_columns(pack(keys), pack(values)) == encode_commit(keys, values)
    True
    """
    sizes = keys.borders + values.borders
    key_lengths, value_lengths = keys.lengths.astype("<u2"), values.lengths.astype("<u4")
    rows: list[bytes] = []
    start, count = 0, len(key_lengths)
    while start < count:
        fitting = int(numpy.searchsorted(sizes, sizes[start] + row_bytes_max, side="right")) - 1
        end = max(fitting, start + 1)
        parts = (
            _COMMIT_HEAD.pack(_COMMIT, end - start),
            key_lengths[start:end].tobytes(),
            value_lengths[start:end].tobytes(),
            memoryview(keys.data)[keys.borders[start] : keys.borders[end]],
            memoryview(values.data)[values.borders[start] : values.borders[end]],
        )
        rows.append(b"".join(parts))
        start = end
    return rows


def decode_single(row: bytes) -> tuple[bytes, bytes] | None:
    """The qualified key and the stored value of a row of one change that is not large; None for other rows.

    Most rows of a busy site are of this kind, and it takes a fraction of the time of `decode_row`.
    """
    if not row.startswith(_ONE_CHANGE) or len(row) < _SINGLE.size:
        return None
    _, _, key_length, value_length = _SINGLE.unpack_from(row)
    end = _SINGLE.size + key_length
    return (row[_SINGLE.size : end], row[end:]) if len(row) - end == value_length else None


def count_of(row: bytes) -> int:
    """The number of changes in the row of a commit."""
    return int.from_bytes(row[1:COMMIT_HEAD_BYTES], "little")


def names_values(row: bytes) -> bool:
    """Whether the row of a commit may name large values; False is certain.

    >>> [names_values(encode_single(b"a", bytes(size))) for size in (1, 5000)]
    [False, True]
    """
    count = count_of(row)
    return _REFERENCE in row[COMMIT_HEAD_BYTES + 2 * count : COMMIT_HEAD_BYTES + 6 * count]


def count_changes(row: bytes, keys: KeyRange) -> int:
    """The number of changes of a row in a range of qualified keys.

    >>> (row,) = encode_commit([b"a", b"b", b"c"], [b"1", b"2", b"3"])
    >>> count_changes(row, KeyRange(b"b", None)), count_changes(row, KeyRange(b"a", b"b"))
    (2, 1)
    """
    if row.startswith(_ONE_CHANGE) and len(row) >= _SINGLE.size:
        end = _SINGLE.size + _SINGLE.unpack_from(row)[2]
        if end <= len(row):
            return int(keys.contains(row[_SINGLE.size : end]))
    if row[:1] != COMMIT_BYTE:
        decode_row(0, row)
        return 0
    try:
        count: int = _COMMIT_HEAD.unpack_from(row)[1]
        lengths = unpack_from(f"<{count}H", row, _COMMIT_HEAD.size)
    except StructError as error:
        raise Corruption("a change-log row is too short") from error
    start = _COMMIT_HEAD.size + 6 * count
    end = start + sum(lengths)
    if end > len(row):
        raise Corruption(f"a change-log row of {len(row)} bytes does not match its own lengths")
    # The keys of a commit are in order.
    if (
        count
        and keys.contains(row[start : start + lengths[0]])
        and keys.contains(row[end - lengths[-1] : end])
    ):
        return count
    return sum(map(keys.contains, _cut(row, start, lengths)))


def is_own(row: bytes, site: int) -> bool:
    """Whether a commit at a site was first made there; True if all values of its row are large.

    The changes of a commit are all of one kind, so its last value that is not large decides.

    >>> from floodmark.codec.values import encode_value
    >>> from floodmark.model.change import Stamp
    >>> own, copy = encode_value(b"1"), encode_value(b"1", origin=Stamp(7, 2))
    >>> [is_own(encode_commit([b"a"], [value])[0], site) for value, site in ((own, 1), (copy, 1), (copy, 2))]
    [True, False, True]
    """
    if row[:1] != COMMIT_BYTE:
        return True
    (count,) = _COUNT.unpack_from(row, 1)
    lengths = row[_COMMIT_HEAD.size + 2 * count : _COMMIT_HEAD.size + 6 * count]
    # A row whose values are all large ends with a key.
    if lengths == b"\xff" * len(lengths) or not row[-1] & HAS_ORIGIN:
        return True
    last = [length for (length,) in _COUNT.iter_unpack(lengths) if length != _BY_REFERENCE][-1]
    return is_first_written_at(site, row[-last:])


def may_be_batch(row: bytes) -> bool:
    """Whether a commit may be an atomic batch, whose changes all have the mark; False is certain.

    >>> from floodmark.codec.values import encode_value, mark_batch
    >>> value = encode_value(b"1")
    >>> [may_be_batch(encode_commit([b"a"], [each])[0]) for each in (value, mark_batch(value), bytes(5000))]
    [False, True, True]
    """
    if row[:1] != COMMIT_BYTE:
        return False
    (count,) = _COUNT.unpack_from(row, 1)
    lengths = row[_COMMIT_HEAD.size + 2 * count : _COMMIT_HEAD.size + 6 * count]
    # A row whose values are all large ends with a key.
    return lengths == b"\xff" * len(lengths) or bool(row[-1] & IN_BATCH)


def holds_copies_only(row: bytes, site: int) -> bool:
    """Whether all changes of a commit are plain copies from other sites; False is not certain.

    The readers of a site that only applies changes search its log in vain for changes of its own.  So no
    value is decoded: the origin of a plain copy ends where its flags begin.

    >>> from floodmark.codec.values import encode_value
    >>> from floodmark.model.change import Stamp
    >>> own, copy = encode_value(b"1"), encode_value(b"22", origin=Stamp(7, 2))
    >>> copies, mixed = (encode_commit([b"a", b"b"], values)[0] for values in ([copy, copy], [own, copy]))
    >>> holds_copies_only(copies, 1), holds_copies_only(copies, 2), holds_copies_only(mixed, 1)
    (True, False, False)
    """
    if row[:1] != COMMIT_BYTE or row[-1] != HAS_ORIGIN:
        return False
    (count,) = _COUNT.unpack_from(row, 1)
    values = _COMMIT_HEAD.size + 2 * count
    lengths = numpy.frombuffer(row, "<u4", count, values) if len(row) >= values + 4 * count else _NONE
    if not len(lengths) or int(lengths.min()) <= _ORIGIN_BYTES or int(lengths.max()) == _BY_REFERENCE:
        return False
    ends = len(row) - numpy.cumsum(lengths[::-1], dtype=numpy.int64) + lengths[::-1]
    if int(ends[-1] - lengths[0]) < values + 4 * count:
        return False
    whole = numpy.frombuffer(row, numpy.uint8)
    return bool((whole[ends - 1] == HAS_ORIGIN).all() and (whole[ends - 2] != site).all())


def decode_row(version: Version, row: bytes) -> CommitRow | Heartbeat:
    """The commit or heartbeat of a row; raises Corruption for any other content."""
    kind = row[0] if row else None
    try:
        if kind == _COMMIT:
            return _decode_commit(row)
        if kind == _HEARTBEAT:
            return _decode_heartbeat(version, row)
        if kind == _WIDE_HEARTBEAT:
            return _decode_wide_heartbeat(version, row)
    except StructError as error:
        raise Corruption(f"the change-log row at version {version} is too short") from error
    raise Corruption(f"the change-log row at version {version} is of an unknown kind {kind}")


def _decode_commit(row: bytes) -> CommitRow:
    _, count = _COMMIT_HEAD.unpack_from(row)
    position = _COMMIT_HEAD.size
    key_lengths = unpack_from(f"<{count}H", row, position)
    position += 2 * count
    value_lengths = unpack_from(f"<{count}I", row, position)
    position += 4 * count
    keys = _cut(row, position, key_lengths)
    position += sum(key_lengths)
    inline = [0 if length == _BY_REFERENCE else length for length in value_lengths]
    if position + sum(inline) != len(row):
        raise Corruption(f"a change-log row of {len(row)} bytes does not match its own lengths")
    values: list[bytes | None] = list(_cut(row, position, inline))
    if _BY_REFERENCE in value_lengths:
        values = [
            None if length == _BY_REFERENCE else value
            for length, value in zip(value_lengths, values, strict=True)
        ]
    return CommitRow(keys, values)


class Commits(NamedTuple):
    """The changes of several rows: their number in each, qualified keys, stored values, and value flags."""

    counts: Numbers
    keys: pyarrow.BinaryArray
    values: pyarrow.BinaryArray
    flags: NDArray[numpy.uint8]


def decode_commits(rows: Sequence[bytes]) -> Commits | None:
    """All changes of some rows; None if one is no commit, is damaged, or has a large or an empty value.

    >>> rows = [encode_single(b"a", b"1"), *encode_commit([b"a", b"b"], [b"2", b"33"])]
    >>> commits = decode_commits(rows)
    >>> commits.counts.tolist(), commits.keys.to_pylist(), commits.values.to_pylist()
    ([1, 2], [b'a', b'a', b'b'], [b'1', b'2', b'33'])
    """
    joined = b"".join(rows)
    sizes = numpy.fromiter(map(len, rows), numpy.int64, len(rows))
    ends = numpy.cumsum(sizes)
    starts = ends - sizes
    if not len(rows) or sizes.min() < _COMMIT_HEAD.size or _kinds(joined, starts) != {_COMMIT}:
        return None
    counts = window(joined, _COUNTS)[starts + 1].astype(numpy.int64)
    heads = starts + _COMMIT_HEAD.size
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
    """Runs of numbers, concatenated: at each start, as many numbers of a kind as its count."""
    firsts = borders_of(counts)[:-1]
    places = numpy.repeat(starts - kind.itemsize * firsts, counts)
    places += kind.itemsize * numpy.arange(len(places))
    lengths: Numbers = window(joined, kind)[places].astype(numpy.int64)
    return lengths


def _cut(row: bytes, position: int, lengths: Sequence[int]) -> list[bytes]:
    first = lengths[0] if lengths else 0
    if first and lengths.count(first) == len(lengths):
        # Pieces of one length are cut several times faster.
        whole = memoryview(row)[position : position + first * len(lengths)]
        if len(whole) == first * len(lengths):
            return [piece for (piece,) in iter_unpack(f"{first}s", whole)]
    return [row[start:end] for start, end in pairwise(accumulate(lengths, initial=position))]


def encode_heartbeat(heartbeat: Heartbeat) -> bytes:
    """The row of a heartbeat; its version is in the row's key."""
    through = heartbeat.through
    numbers = [
        _fold(heartbeat.wall_ms - physical_ms(through)),
        _fold(heartbeat.since - through),
        0 if heartbeat.log is None else heartbeat.log + 1,
        *_watermark_numbers(heartbeat.watermark, through),
        len(heartbeat.sums),
    ]
    sums = [
        _SUMS.pack(namespace.to_bytes(3, "big"), *own, *everything)
        for namespace, (own, everything) in sorted(heartbeat.sums.items())
    ]
    head = _HEARTBEAT_HEAD.pack(_HEARTBEAT, heartbeat.node, through)
    return b"".join((head, *map(_encode_number, numbers), *sums))


def _watermark_numbers(watermark: Mapping[int, Mapping[int, Version]], through: Version) -> Iterator[int]:
    """The marks by site, since the versions of one site are close to each other."""
    by_site: dict[int, list[tuple[int, Version]]] = {}
    for namespace, marks in sorted(watermark.items()):
        for site, mark in marks.items():
            by_site.setdefault(site, []).append((namespace, mark))
    yield len(by_site)
    for site, entries in sorted(by_site.items()):
        yield from (site, len(entries))
        before, last = 0, through
        for namespace, mark in entries:
            yield from (namespace - before, _fold(mark - last))
            before, last = namespace, mark


def _fold(number: int) -> int:
    """Encode a signed number as a natural one; numbers close to 0 stay small."""
    return 2 * number if number >= 0 else -2 * number - 1


def _unfold(number: int) -> int:
    return number // 2 if number % 2 == 0 else -(number + 1) // 2


def _encode_number(number: int) -> bytes:
    groups = bytearray()
    while number >= 0x80:
        groups.append(number & 0x7F | 0x80)
        number >>= 7
    groups.append(number)
    return bytes(groups)


class _Numbers:
    """Reads the numbers of a heartbeat one after the other."""

    def __init__(self, row: bytes, place: int) -> None:
        self._row = row
        self.place = place

    def read(self, highest: int) -> int:
        number = shift = 0
        while True:
            if self.place >= len(self._row):
                raise Corruption("a heartbeat ends in the middle of a number")
            group = self._row[self.place]
            self.place += 1
            number |= (group & 0x7F) << shift
            shift += 7
            if group < 0x80:
                break
        if number > highest or (shift > 7 and not group):
            raise Corruption(f"a heartbeat holds {number} where at most {highest} can be")
        return number

    def read_near(self, number: int) -> int:
        near = number + _unfold(self.read(2 * VERSION_MAX + 1))
        if not 0 <= near <= VERSION_MAX:
            raise Corruption(f"a heartbeat holds {near}, which is no number of 64 bits")
        return near


def _decode_heartbeat(version: Version, row: bytes) -> Heartbeat:
    _, node, through = _HEARTBEAT_HEAD.unpack_from(row)
    numbers = _Numbers(row, _HEARTBEAT_HEAD.size)
    wall_ms = numbers.read_near(physical_ms(through))
    since = numbers.read_near(through)
    log = numbers.read(_NO_LOG)
    watermark = _decode_watermark(numbers, through)
    count = numbers.read(len(row) // _SUMS.size)
    return Heartbeat(
        version=version,
        node=node,
        wall_ms=wall_ms,
        since=since,
        through=through,
        watermark=watermark,
        sums=_decode_sums(version, row, numbers.place, count),
        log=log - 1 if log else None,
    )


def _decode_watermark(numbers: _Numbers, through: Version) -> dict[int, dict[int, Version]]:
    watermark: dict[int, dict[int, Version]] = {}
    for _ in range(numbers.read(_SITES_MAX)):
        site = numbers.read(_SITES_MAX - 1)
        namespace, mark = 0, through
        for _ in range(numbers.read(_NAMESPACE_MAX + 1)):
            namespace += numbers.read(_NAMESPACE_MAX)
            mark = numbers.read_near(mark)
            if namespace > _NAMESPACE_MAX or site in watermark.get(namespace, {}):
                raise Corruption(f"a heartbeat has a mark of namespace {namespace} that cannot be")
            watermark.setdefault(namespace, {})[site] = mark
    return watermark


def _decode_sums(version: Version, row: bytes, position: int, count: int) -> Mapping[int, Sums]:
    if position + count * _SUMS.size != len(row):
        raise Corruption(f"the heartbeat at version {version} does not match its own lengths")
    return {
        int.from_bytes(namespace, "big"): Sums(Tally(own, own_digest), Tally(every, digest))
        for namespace, own, own_digest, every, digest in _SUMS.iter_unpack(row[position:])
    }


def _decode_wide_heartbeat(version: Version, row: bytes) -> Heartbeat:
    _, node, log, wall_ms, since, through = _WIDE_HEARTBEAT_HEAD.unpack_from(row)
    position = _WIDE_HEARTBEAT_HEAD.size
    watermark: dict[int, dict[int, Version]] = {}
    (count,) = _COUNT.unpack_from(row, position)
    position += _COUNT.size
    for offset in range(position, position + count * _MARK.size, _MARK.size):
        namespace, site, mark = _MARK.unpack_from(row, offset)
        watermark.setdefault(int.from_bytes(namespace, "big"), {})[site] = mark
    position += count * _MARK.size
    (count,) = _COUNT.unpack_from(row, position)
    return Heartbeat(
        version=version,
        node=node,
        wall_ms=wall_ms,
        since=since,
        through=through,
        watermark=watermark,
        sums=_decode_sums(version, row, position + _COUNT.size, count),
        log=None if log == _NO_LOG else log,
    )
