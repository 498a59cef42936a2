"""Entries of a ledger: one bare record, or a batch of records under one checksum.

    +-------+---------+----------+-------+--------------+---------+
    | magic | version | checksum | count | lengths      | records |
    |   2   |    2    |     8    |   4   | 4 bytes each |         |          (big-endian)
    +-------+---------+----------+-------+--------------+---------+

The magic is 0x0e01 and the format version 1.  The checksum is XXH64, with seed 42, of all that follows it.

An entry that does not begin with the magic is one *bare* record, byte for byte.  So a ledger may have bare
and batched entries in any order, and a reader of bare ones can read a ledger in which no batch is left.
A record that itself begins with the magic cannot be written bare: it becomes a batch of one.

>>> encode_bare(b"begin 7")
b'begin 7'
>>> decode_entry(encode_batch([b"begin 7", b"commit 3"]))
[b'begin 7', b'commit 3']
>>> is_batched(encode_bare(b"\\x0e\\x01..."))
True
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from struct import Struct, pack, unpack_from
from struct import error as StructError
from typing import Final

from floodmark.codec.digest import SEED, hash_bytes
from floodmark.model.errors import Corruption, FormatTooNew

MAGIC: Final = b"\x0e\x01"
FORMAT_VERSION: Final = 1

_HEAD: Final = Struct(">2sHQ")
_COUNT: Final = Struct(">I")
_LONE: Final = Struct(">II")

ENTRY_HEAD_BYTES: Final = _HEAD.size + _COUNT.size
RECORD_HEAD_BYTES: Final = 4


def encode_batch(records: Sequence[bytes]) -> bytes:
    """An entry of one or more records; raises ValueError for none."""
    if not records:
        raise ValueError("an entry holds at least one record")
    count = len(records)
    if count == 1:
        body = _LONE.pack(1, len(records[0])) + records[0]
    else:
        body = b"".join((pack(f">{count + 1}I", count, *map(len, records)), *records))
    return _HEAD.pack(MAGIC, FORMAT_VERSION, hash_bytes(body, SEED)) + body


def encode_bare(record: bytes) -> bytes:
    """A bare entry of one record, or a batch of one if the record begins with the magic."""
    return encode_batch([record]) if record.startswith(MAGIC) else record


def is_batched(entry: bytes) -> bool:
    """Whether only a reader that knows batches can read an entry."""
    return entry.startswith(MAGIC)


def decode_entry(entry: bytes) -> list[bytes]:
    """The records of an entry, in order.  Raises Corruption if it is damaged, FormatTooNew if unknown."""
    if not entry.startswith(MAGIC):
        return [entry]
    if len(entry) < ENTRY_HEAD_BYTES:
        raise Corruption(f"a ledger entry of {len(entry)} bytes is too short for a batch")
    _, version, checksum = _HEAD.unpack_from(entry)
    if version > FORMAT_VERSION:
        raise FormatTooNew(
            f"a ledger entry has format {version}, and this Floodmark knows formats up to {FORMAT_VERSION}; "
            "start the version that wrote it, or a later one",
            format=version,
        )
    body = entry[_HEAD.size :]
    if version < FORMAT_VERSION or hash_bytes(body, SEED) != checksum:
        raise Corruption(
            f"a ledger entry of {len(entry)} bytes is not what was written (format {version}, checksum "
            f"{checksum:016x}); restore the site from a backup or from a peer"
        )
    try:
        return _cut(body)
    except StructError as error:
        raise Corruption("a ledger entry is shorter than its own count of records says") from error


def _cut(body: bytes) -> list[bytes]:
    (count,) = _COUNT.unpack_from(body)
    lengths = unpack_from(f">{count}I", body, _COUNT.size)
    start = _COUNT.size + RECORD_HEAD_BYTES * count
    if not count or start + sum(lengths) != len(body):
        raise Corruption(f"a ledger entry with {count} records does not match its own lengths")
    return [body[first:end] for first, end in pairwise(accumulate(lengths, initial=start))]
