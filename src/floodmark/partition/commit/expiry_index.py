"""The index of records by the second in which they expire.

A row is part of the metadata, is written in the same batch as its record, and has no value:

    "expiring/" | second: 8 bytes, big-endian | engine key of the record

So the rows that are due come first.  A row may outlive its record: the reader of the index checks whether
the record is still there.
"""

from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Final, NamedTuple

from floodmark.codec.values import EXPIRY_BYTES, HAS_EXPIRY
from floodmark.engine import WriteRow
from floodmark.partition.families import EXPIRING, META

_flags: Final = itemgetter(-1)


class Expiring(NamedTuple):
    """A row of the index: the engine key of a record, and the second in which it expires."""

    second: int
    engine_key: bytes


def may_expire(values: Sequence[bytes]) -> bool:
    """Whether any of the stored values has an expiry."""
    return any(flags & HAS_EXPIRY for flags in set(map(_flags, values)))


def index_row(engine_key: bytes, stored: bytes) -> WriteRow:
    """The row of a record that has an expiry.

    >>> from floodmark.codec.values import encode_value
    >>> _, key, _ = index_row(b"engine key", encode_value(b"a", expires_at=258))
    >>> key
    b'expiring/\\x00\\x00\\x00\\x00\\x00\\x00\\x01\\x02engine key'
    >>> decode_index_key(key)
    Expiring(second=258, engine_key=b'engine key')
    """
    return META, EXPIRING + stored[-EXPIRY_BYTES - 1 : -1] + engine_key, b""


def index_rows(engine_keys: Iterable[bytes], values: Iterable[bytes]) -> list[WriteRow]:
    """The rows of those records that have an expiry."""
    return [
        index_row(engine_key, stored)
        for engine_key, stored in zip(engine_keys, values, strict=True)
        if stored[-1] & HAS_EXPIRY
    ]


def index_range(first: int, last: int) -> tuple[bytes, bytes]:
    """The key range of all rows from one second to another, both included."""
    start, end = (second.to_bytes(EXPIRY_BYTES, "big") for second in (first, last + 1))
    return EXPIRING + start, EXPIRING + end


def decode_index_key(key: bytes) -> Expiring:
    """Decode the key of an index row."""
    start = len(EXPIRING)
    end = start + EXPIRY_BYTES
    return Expiring(int.from_bytes(key[start:end], "big"), key[end:])
