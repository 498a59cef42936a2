"""Records as stored values.

    +------------+------------------+------------------------+-------+
    | user value | extensions       | expiry: 8 bytes, big-  | flags |
    |            | (if their bits)  | endian unix seconds    |       |
    +------------+------------------+------------------------+-------+

    bit 0   an expiry is present
    bit 1   deleted: a tombstone
    bit 2   origin: version (8 bytes, big-endian), then site id (1 byte)
    bit 7   another flag byte precedes

A record with no bit but 0 and 1 is exactly TiKV's.  Extensions stand in the order of their bits.  A
bit that this version does not know is an error: to ignore it would be to lose data.
"""

from struct import Struct
from typing import Final

from floodmark.model.change import Stamp
from floodmark.model.errors import Corruption
from floodmark.model.record import Record

HAS_EXPIRY: Final = 1 << 0
DELETED: Final = 1 << 1
HAS_ORIGIN: Final = 1 << 2
_KNOWN: Final = HAS_EXPIRY | DELETED | HAS_ORIGIN

_EXPIRY: Final = Struct(">Q")
_ORIGIN: Final = Struct(">QB")

PLAIN: Final = b"\x00"
TOMBSTONE: Final = b"\x02"


def encode_value(
    value: bytes,
    expires_at: int | None = None,
    deleted: bool = False,
    *,
    origin: Stamp | None = None,
) -> bytes:
    """Encode a record.

    >>> encode_value(b"a").hex(), encode_value(b"a", expires_at=2).hex()
    ('6100', '61000000000000000201')
    """
    flags = DELETED if deleted else 0
    parts = [value]
    if origin is not None:
        flags |= HAS_ORIGIN
        parts.append(_ORIGIN.pack(origin.version, origin.site))
    if expires_at is not None:
        flags |= HAS_EXPIRY
        parts.append(_EXPIRY.pack(expires_at))
    parts.append(bytes([flags]))
    return b"".join(parts)


def decode_value(stored: bytes) -> Record:
    """Undo `encode_value`.

    >>> decode_value(bytes.fromhex("61000000000000000201"))
    Record(value=b'a', expires_at=2, deleted=False, origin=None)
    """
    if not stored:
        raise Corruption("a stored record is empty; it must end with a byte of flags")
    flags = stored[-1]
    if flags & ~_KNOWN:
        raise Corruption(f"a stored record has unknown flags {flags:#04x}")
    end = len(stored) - 1
    expires_at: int | None = None
    origin: Stamp | None = None
    if flags & HAS_EXPIRY:
        end -= _EXPIRY.size
        _require(end, "expiry")
        (expires_at,) = _EXPIRY.unpack_from(stored, end)
    if flags & HAS_ORIGIN:
        end -= _ORIGIN.size
        _require(end, "origin")
        origin = Stamp(*_ORIGIN.unpack_from(stored, end))
    return Record(stored[:end], expires_at, bool(flags & DELETED), origin)


def _require(position: int, extension: str) -> None:
    if position < 0:
        raise Corruption(f"a stored record is too short for the {extension} that its flags promise")
