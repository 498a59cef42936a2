"""Records as stored values.

    +------------+------------------+------------------------+-------+
    | user value | extensions       | expiry: 8 bytes, big-  | flags |
    |            | (if their bits)  | endian unix seconds    |       |
    +------------+------------------+------------------------+-------+

    bit 0   an expiry is present
    bit 1   deleted: a tombstone
    bit 2   origin: version (8 bytes, big-endian), then site id (1 byte)
    bit 4   written by an atomic batch, whose id is the commit version
    bit 5   stamps: a body (`states.py`), then its length (4 bytes, big-endian)
    bit 7   another flag byte precedes

A record with no bits besides 0 and 1 is exactly TiKV's.  Extensions are in the order of their bits; the bit
of a batch has none.  An unknown bit is an error: ignoring it would lose data.

A record with stamps is a state, which is merged with others of its key.  Their first byte is its kind.
"""

from struct import Struct
from typing import Final

from floodmark.model.change import Stamp
from floodmark.model.errors import Corruption
from floodmark.model.record import Record

HAS_EXPIRY: Final = 1 << 0
DELETED: Final = 1 << 1
HAS_ORIGIN: Final = 1 << 2
IN_BATCH: Final = 1 << 4
HAS_STAMPS: Final = 1 << 5
KNOWN_FLAGS: Final = HAS_EXPIRY | DELETED | HAS_ORIGIN | IN_BATCH | HAS_STAMPS

# The kinds of states.  In a state of expiring fields, a field expires before the record does.
FIELDS: Final = 1
COUNTER: Final = 2
EXPIRING_FIELDS: Final = 3
STATE_KINDS: Final = (FIELDS, COUNTER, EXPIRING_FIELDS)

STAMPS_LENGTH_BYTES: Final = 4

_EXPIRY: Final = Struct(">Q")
EXPIRY_BYTES: Final = _EXPIRY.size
_ORIGIN: Final = Struct(">QB")
_LENGTH: Final = Struct(">I")

PLAIN: Final = b"\x00"
# The last byte of a record with only a value, of an atomic batch or not.
PLAIN_ENDS: Final = frozenset((PLAIN, bytes([IN_BATCH])))
TOMBSTONE: Final = b"\x02"


def encode_value(
    value: bytes,
    expires_at: int | None = None,
    deleted: bool = False,
    *,
    origin: Stamp | None = None,
    stamps: bytes | None = None,
) -> bytes:
    """Encode a record; `stamps` is the body of its stamps.

    >>> encode_value(b"a").hex(), encode_value(b"a", expires_at=2).hex()
    ('6100', '61000000000000000201')
    """
    flags = DELETED if deleted else 0
    parts = [value]
    if origin is not None:
        flags |= HAS_ORIGIN
        parts.append(_ORIGIN.pack(origin.version, origin.site))
    if stamps is not None:
        flags |= HAS_STAMPS
        parts += stamps, _LENGTH.pack(len(stamps))
    if expires_at is not None:
        flags |= HAS_EXPIRY
        parts.append(_EXPIRY.pack(expires_at))
    parts.append(bytes([flags]))
    return b"".join(parts)


def decode_value(stored: bytes) -> Record:
    """Decode a stored record; raises Corruption.

    >>> decode_value(bytes.fromhex("61000000000000000201"))
    Record(value=b'a', expires_at=2, deleted=False, origin=None, stamps=None, batched=False)
    """
    if not stored:
        raise Corruption("a stored record is empty; it must end with a byte of flags")
    flags = stored[-1]
    if flags & ~KNOWN_FLAGS:
        raise Corruption(f"a stored record has unknown flags {flags:#04x}")
    end = len(stored) - 1
    expires_at: int | None = None
    origin: Stamp | None = None
    stamps: bytes | None = None
    if flags & HAS_EXPIRY:
        end -= _EXPIRY.size
        _require(end, "expiry")
        (expires_at,) = _EXPIRY.unpack_from(stored, end)
    if flags & HAS_STAMPS:
        start = find_stamps(stored, end)
        stamps, end = stored[start : end - STAMPS_LENGTH_BYTES], start
    if flags & HAS_ORIGIN:
        end -= _ORIGIN.size
        _require(end, "origin")
        origin = Stamp(*_ORIGIN.unpack_from(stored, end))
    return Record(stored[:end], expires_at, bool(flags & DELETED), origin, stamps, bool(flags & IN_BATCH))


def mark_batch(stored: bytes) -> bytes:
    """A stored record with the bit of an atomic batch.

    >>> mark_batch(encode_value(b"a")).hex(), mark_batch(mark_batch(encode_value(b"a"))).hex()
    ('6110', '6110')
    """
    return stored[:-1] + bytes([stored[-1] | IN_BATCH])


def unmark_batch(stored: bytes) -> bytes:
    """A stored record without the bit of a batch, for comparisons: the last write to a merged one decides it.

    >>> unmark_batch(mark_batch(encode_value(b"a"))) == unmark_batch(encode_value(b"a")) == encode_value(b"a")
    True
    """
    return stored[:-1] + bytes([stored[-1] & ~IN_BATCH]) if stored[-1] & IN_BATCH else stored


def find_stamps(stored: bytes, end: int) -> int:
    """The beginning of the stamps that end at a place in a stored record."""
    body_end = end - STAMPS_LENGTH_BYTES
    _require(body_end, "length of its stamps")
    (length,) = _LENGTH.unpack_from(stored, body_end)
    start: int = body_end - length
    _require(start, "stamps")
    if not length or stored[start] not in STATE_KINDS:
        kind = stored[start : start + min(1, length)].hex() or "none"
        raise Corruption(f"a stored record has stamps of an unknown kind ({kind})")
    return start


def _require(position: int, extension: str) -> None:
    if position < 0:
        raise Corruption(f"a stored record is too short for the {extension} that its flags promise")
