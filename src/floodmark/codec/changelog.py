"""Rows of the change log.

One row per commit and log, so that reading changes back is one sequential scan.  Its key sorts by
log, then by version:

    log id: 4 bytes | commit version: 8 bytes | chunk: 2 bytes          (big-endian)

A commit row holds the qualified keys (namespace and user key) that the commit wrote and the stored
values, column by column, so that a thousand changes are packed and unpacked by a handful of calls:

    +---+-------+--------------------+----------------------+------+--------+
    | 1 | count | key lengths        | value lengths        | keys | values |
    | 1 |   4   | 2 bytes each       | 4 bytes each         |      |        |
    +---+-------+--------------------+----------------------+------+--------+

Numbers in it are little-endian.  A value length of 0xFFFFFFFF means that the value is large and is
read from the data, where it stands under the same key and version.  A commit that does not fit into
one row goes on in the next chunk; chunks are written together.

A heartbeat row:

    +---+------+-----+---------+-------+---------+------------+------------+
    | 2 | node | log | wall ms | since | through | watermark  | sums       |
    | 1 |   1  |  4  |    8    |   8   |    8    | 4 + 12 * n | 4 + 27 * n |
    +---+------+-----+---------+-------+---------+------------+------------+

    watermark entry   namespace 3, site 1, version 8
    sums entry        namespace 3, own count 4, own digest 8, all count 4, all digest 8
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from struct import Struct, iter_unpack, pack, unpack_from
from struct import error as StructError
from typing import Final, NamedTuple

from floodmark.model.change import Heartbeat, Sums, Tally
from floodmark.model.errors import Corruption
from floodmark.model.limits import LOG_INLINE_VALUE_BYTES_MAX, LOG_ROW_BYTES_MAX
from floodmark.model.ranges import KeyRange
from floodmark.model.version import VERSION_MAX, Version

LOG_ID_BYTES: Final = 4

_KEY: Final = Struct(">IQH")
_COMMIT: Final = 1
_HEARTBEAT: Final = 2
_COMMIT_HEAD: Final = Struct("<BI")
_SINGLE: Final = Struct("<BIHI")
_COMMIT_BYTE: Final = bytes([_COMMIT])
_BY_REFERENCE: Final = 0xFFFFFFFF
_ONE_CHANGE: Final = _COMMIT_HEAD.pack(_COMMIT, 1)

_HEARTBEAT_HEAD: Final = Struct("<BBIQQQ")
_NO_LOG: Final = 0xFFFFFFFF
_COUNT: Final = Struct("<I")
_MARK: Final = Struct("<3sBQ")
_SUMS: Final = Struct("<3sIQIQ")


class CommitRow(NamedTuple):
    """The changes of one row: qualified keys, and stored values or None for "look it up"."""

    keys: list[bytes]
    values: list[bytes | None]


def encode_log_key(log: int, version: Version, chunk: int = 0) -> bytes:
    """The key of a row."""
    return _KEY.pack(log, version, chunk)


def decode_log_key(key: bytes) -> tuple[int, Version, int]:
    """Undo `encode_log_key`: log, version, chunk."""
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
    """The row of a commit of one key: what `encode_commit` gives, without its lists."""
    if len(value) > LOG_INLINE_VALUE_BYTES_MAX:
        return _SINGLE.pack(_COMMIT, 1, len(key), _BY_REFERENCE) + key
    return _SINGLE.pack(_COMMIT, 1, len(key), len(value)) + key + value


def encode_commit(keys: Sequence[bytes], values: Sequence[bytes]) -> list[bytes]:
    """The rows of a commit, in order of their chunks."""
    total = sum(map(len, keys)) + sum(map(len, values))
    if total <= LOG_ROW_BYTES_MAX:
        return [_encode_chunk(keys, values)]
    rows: list[bytes] = []
    start = size = 0
    for index, (key, value) in enumerate(zip(keys, values, strict=True)):
        inline = len(value) if len(value) <= LOG_INLINE_VALUE_BYTES_MAX else 0
        if size and size + len(key) + inline > LOG_ROW_BYTES_MAX:
            rows.append(_encode_chunk(keys[start:index], values[start:index]))
            start, size = index, 0
        size += len(key) + inline
    rows.append(_encode_chunk(keys[start:], values[start:]))
    return rows


def _encode_chunk(keys: Sequence[bytes], values: Sequence[bytes]) -> bytes:
    count = len(keys)
    lengths = list(map(len, values))
    if max(lengths) > LOG_INLINE_VALUE_BYTES_MAX:
        values = [value if len(value) <= LOG_INLINE_VALUE_BYTES_MAX else b"" for value in values]
        lengths = [length if length <= LOG_INLINE_VALUE_BYTES_MAX else _BY_REFERENCE for length in lengths]
    return b"".join(
        (
            _COMMIT_HEAD.pack(_COMMIT, count),
            pack(f"<{count}H", *map(len, keys)),
            pack(f"<{count}I", *lengths),
            *keys,
            *values,
        )
    )


def decode_single(row: bytes) -> tuple[bytes, bytes] | None:
    """The qualified key and the stored value of a row of one change; None if the row is of another kind.

    Most rows of a busy site are of this kind, and it takes a fraction of what `decode_row` takes.
    """
    if not row.startswith(_ONE_CHANGE) or len(row) < _SINGLE.size:
        return None
    _, _, key_length, value_length = _SINGLE.unpack_from(row)
    end = _SINGLE.size + key_length
    return (row[_SINGLE.size : end], row[end:]) if len(row) - end == value_length else None


def count_changes(row: bytes, keys: KeyRange) -> int:
    """How many changes of a row lie in a range of qualified keys.  Values are not looked at.

    >>> (row,) = encode_commit([b"a", b"b", b"c"], [b"1", b"2", b"3"])
    >>> count_changes(row, KeyRange(b"b", None)), count_changes(row, KeyRange(b"a", b"b"))
    (2, 1)
    """
    if row.startswith(_ONE_CHANGE) and len(row) >= _SINGLE.size:
        end = _SINGLE.size + _SINGLE.unpack_from(row)[2]
        if end <= len(row):
            return int(keys.contains(row[_SINGLE.size : end]))
    if row[:1] != _COMMIT_BYTE:
        decode_row(0, row)
        return 0
    try:
        count: int = _COMMIT_HEAD.unpack_from(row)[1]
        lengths = unpack_from(f"<{count}H", row, _COMMIT_HEAD.size)
    except StructError as error:
        raise Corruption("a change-log row is too short") from error
    written = _cut(row, _COMMIT_HEAD.size + 6 * count, lengths)
    if sum(map(len, written)) != sum(lengths):
        raise Corruption(f"a change-log row of {len(row)} bytes does not match its own lengths")
    if count and keys.contains(min(written)) and keys.contains(max(written)):
        return count
    return sum(map(keys.contains, written))


def decode_row(version: Version, row: bytes) -> CommitRow | Heartbeat:
    """A row is a commit or a heartbeat; anything else is corrupt."""
    kind = row[0] if row else None
    try:
        if kind == _COMMIT:
            return _decode_commit(row)
        if kind == _HEARTBEAT:
            return _decode_heartbeat(version, row)
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
    marks = [
        _MARK.pack(namespace.to_bytes(3, "big"), site, version)
        for namespace, entries in sorted(heartbeat.watermark.items())
        for site, version in sorted(entries.items())
    ]
    sums = [
        _SUMS.pack(namespace.to_bytes(3, "big"), *own, *everything)
        for namespace, (own, everything) in sorted(heartbeat.sums.items())
    ]
    log = _NO_LOG if heartbeat.log is None else heartbeat.log
    head = _HEARTBEAT_HEAD.pack(
        _HEARTBEAT, heartbeat.node, log, heartbeat.wall_ms, heartbeat.since, heartbeat.through
    )
    return b"".join((head, _COUNT.pack(len(marks)), *marks, _COUNT.pack(len(sums)), *sums))


def _decode_heartbeat(version: Version, row: bytes) -> Heartbeat:
    _, node, log, wall_ms, since, through = _HEARTBEAT_HEAD.unpack_from(row)
    position = _HEARTBEAT_HEAD.size
    watermark: dict[int, dict[int, Version]] = {}
    (count,) = _COUNT.unpack_from(row, position)
    position += _COUNT.size
    for offset in range(position, position + count * _MARK.size, _MARK.size):
        namespace, site, mark = _MARK.unpack_from(row, offset)
        watermark.setdefault(int.from_bytes(namespace, "big"), {})[site] = mark
    position += count * _MARK.size
    (count,) = _COUNT.unpack_from(row, position)
    position += _COUNT.size
    sums: Mapping[int, Sums] = {
        int.from_bytes(namespace, "big"): Sums(Tally(own, own_digest), Tally(every, digest))
        for namespace, own, own_digest, every, digest in (
            _SUMS.unpack_from(row, offset)
            for offset in range(position, position + count * _SUMS.size, _SUMS.size)
        )
    }
    if position + count * _SUMS.size != len(row):
        raise Corruption(f"the heartbeat at version {version} does not match its own lengths")
    return Heartbeat(
        version=version,
        node=node,
        wall_ms=wall_ms,
        since=since,
        through=through,
        watermark=watermark,
        sums=sums,
        log=None if log == _NO_LOG else log,
    )
