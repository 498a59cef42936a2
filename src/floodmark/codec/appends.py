"""Writes whose keys contain the version of their commit, as requests send them.

    key      prefix | bucket: 8, if it is spread | version: 8 | index: 4
    value    the record as it will be stored | shift: 1 | after: 8 | before: 8 | flags: 0x40

The key of a request contains the version `after`, which serves only to find the partition.  The commit
replaces it by its own version, which must be between `after` and `before`, both exclusive; else it conflicts.

**The bucket** is `version >> shift` with its 64 bits reversed.  So keys of one interval of versions are next
to each other, in order, and those of neighbouring intervals far apart.  A reader computes the next bucket.

A record is never stored in this form, so all other kinds of writes refuse it.
"""

from collections.abc import Mapping, Sequence
from struct import Struct
from typing import Final, NamedTuple

from floodmark.codec.values import mark_batch
from floodmark.model.errors import Conflict, InvalidValue
from floodmark.model.version import VERSION_MAX, Version

# The flags of a write that waits for its version; no record has them.
APPEND: Final = 1 << 6
# The shift of keys without a bucket.
NO_BUCKET: Final = 255
# With this shift all versions have one bucket.
SHIFT_MAX: Final = 64

BUCKET_BYTES: Final = 8
INDEX_BYTES: Final = 4
_VERSION_BYTES: Final = 8
_TAIL: Final = Struct(">BQQB")
# Each byte with its bits in reversed order.
_REVERSED: Final = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))


class Append(NamedTuple):
    """A decoded append: the record to store, the shift of its key, and the bounds of its version."""

    stored: bytes
    shift: int
    after: Version
    before: Version


def encode_bucket(version: Version, shift: int) -> bytes:
    """The bucket of a version; buckets of neighbouring intervals are far apart.

    >>> [encode_bucket(version, 4).hex() for version in (0, 15, 16, 32)]
    ['0000000000000000', '0000000000000000', '8000000000000000', '4000000000000000']
    """
    return (version >> shift).to_bytes(BUCKET_BYTES, "little").translate(_REVERSED)


def append_key(prefix: bytes, shift: int, version: Version, index: int) -> bytes:
    """The key of a write at a version.

    >>> append_key(b"e", 4, 17, 2).hex(" ", 4)
    '65 80000000 00000000 00000000 00000011 00000002'
    """
    bucket = b"" if shift == NO_BUCKET else encode_bucket(version, shift)
    return b"".join((prefix, bucket, version.to_bytes(8, "big"), index.to_bytes(INDEX_BYTES, "big")))


def encode_append(stored: bytes, shift: int, *, after: Version = 0, before: Version = VERSION_MAX) -> bytes:
    """A stored record as the value of a request."""
    return stored + _TAIL.pack(shift, after, before, APPEND)


def is_append(value: bytes) -> bool:
    """Whether a value is an append, whose key gets its version at the commit."""
    return value[-1:] == b"\x40"


def decode_append(value: bytes) -> Append:
    """The parts of an append; raises InvalidValue for any other value, as a request may contain."""
    place = len(value) - _TAIL.size
    if place < 1 or not is_append(value):
        raise InvalidValue("a value is not a record: a write that waits for its version is cut")
    shift, after, before, _ = _TAIL.unpack_from(value, place)
    if SHIFT_MAX < shift != NO_BUCKET:
        raise InvalidValue(f"a value is not a record: it shifts its version by {shift} bits, which has 64")
    return Append(value[:place], shift, after, before)


def set_after(value: bytes, version: Version) -> bytes:
    """An append that is committed only above a version; returns other values as they are.

    >>> decode_append(set_after(encode_append(b"a\\0", 4), 17)).after
    17
    """
    if not is_append(value):
        return value
    stored, shift, after, before = decode_append(value)
    return encode_append(stored, shift, after=max(after, version), before=before)


def mark_write(value: bytes) -> bytes:
    r"""`mark_batch` for the value of a request, which may be an append.

    >>> decode_append(mark_write(encode_append(b"a\0", 4))).stored, mark_write(b"a\0")
    (b'a\x10', b'a\x10')
    """
    if not is_append(value):
        return mark_batch(value)
    stored, shift, after, before = decode_append(value)
    return encode_append(mark_batch(stored), shift, after=after, before=before)


def highest_after(values: Sequence[bytes]) -> Version:
    """The version that the clock must have passed before some values are written."""
    return max([decode_append(value).after for value in values if is_append(value)], default=0)


def append_size(key: bytes, shift: int) -> int:
    """The size of the prefix of an append's key; below `NAMESPACE_BYTES` the key is too short."""
    return len(key) - INDEX_BYTES - _VERSION_BYTES - (0 if shift == NO_BUCKET else BUCKET_BYTES)


def complete(rows: Mapping[bytes, bytes], version: Version) -> dict[bytes, bytes]:
    """Keys and values as a commit at a version writes them; Conflict if it may not write one there.

    >>> rows = {append_key(b"e", 4, 0, 2): encode_append(b"a\\0", 4), b"k": b"b\\0"}
    >>> complete(rows, 17) == {append_key(b"e", 4, 17, 2): b"a\\0", b"k": b"b\\0"}
    True
    """
    return dict(
        complete_append(key, decode_append(value), version) if is_append(value) else (key, value)
        for key, value in rows.items()
    )


def complete_append(key: bytes, append: Append, version: Version) -> tuple[bytes, bytes]:
    """The key and the value that an append writes at a version; see `complete`."""
    stored, shift, after, before = append
    if not after < version < before:
        raise late_append(version)
    index = int.from_bytes(key[-INDEX_BYTES:], "big")
    return append_key(key[: append_size(key, shift)], shift, version, index), stored


def any_append(values: Sequence[bytes]) -> bool:
    """Whether any value is an append."""
    return any(map(is_append, values))


def late_append(version: Version) -> Conflict:
    """The error for an append whose commit version is in another interval than its writer expected."""
    return Conflict(
        f"an append would be committed at version {version}, in another interval than it was meant for; "
        "begin the transaction again, as run_transaction does",
        version=version,
    )
