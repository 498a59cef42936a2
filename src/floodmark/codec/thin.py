"""Records without their values, for comparing sites.

A *thin* record is a stored record (`values.py`) with digests in place of values:

    last write    the user's value is empty
    fields        the text of each field is the 8 bytes of its digest, big-endian
    counter       unchanged

Each thin record has a digest beside it: XXH64 with seed 42 over the record as it is stored, without its
origin and the bit of a batch.  A state has exactly one encoding (`states.py`), so equal digests mean equal
records, at all sites.
"""

from typing import Final

from floodmark.codec.digest import SEED, hash_bytes
from floodmark.codec.stamps import STAMP_BYTES
from floodmark.codec.states import CounterState, Field, FieldsState, decode_state, encode_state
from floodmark.codec.values import HAS_ORIGIN, PLAIN, decode_value, encode_value, unmark_batch
from floodmark.model.record import Record

DIGEST_BYTES: Final = 8

_COPIED: Final = bytes([HAS_ORIGIN])
_COPIED_END: Final = -1 - STAMP_BYTES


def thin_record(stored: bytes) -> tuple[bytes, int]:
    """A stored record without its values, and its digest.

    >>> thin, digest = thin_record(encode_value(b"a long value", expires_at=2))
    >>> decode_value(thin)
    Record(value=b'', expires_at=2, deleted=False, origin=None, stamps=None, batched=False)
    >>> digest == thin_record(encode_value(b"another value", expires_at=2))[1]
    False
    """
    # Most records are a value and nothing else, or a copy of one.
    if stored[-1:] == PLAIN:
        return PLAIN, hash_bytes(stored, SEED)
    if stored[-1:] == _COPIED and len(stored) >= -_COPIED_END:
        return stored[_COPIED_END:], hash_bytes(stored[:_COPIED_END] + PLAIN, SEED)
    stored = unmark_batch(stored) if stored else stored
    record = decode_value(stored)
    digest = hash_bytes(_without_origin(stored, record), SEED)
    if record.stamps is None:
        return encode_value(b"", record.expires_at, record.deleted, origin=record.origin), digest
    state = decode_state(stored)
    if isinstance(state, CounterState):
        return stored, digest
    return encode_state(
        FieldsState(state.deleted, tuple(map(_thin_field, state.fields))), record.origin
    ), digest


def digest_record(stored: bytes) -> int:
    """The digest of a stored record, which is the same at every site that holds it.

    >>> from floodmark.model.change import Stamp
    >>> digest_record(encode_value(b"ada")) == digest_record(encode_value(b"ada", origin=Stamp(7, 2)))
    True
    """
    record = decode_value(stored)
    return hash_bytes(_without_origin(unmark_batch(stored), record), SEED)


def _without_origin(stored: bytes, record: Record) -> bytes:
    if record.origin is None:
        return stored
    # Most records have neither an expiry nor a tombstone.
    if stored[-1] == HAS_ORIGIN:
        return stored[:_COPIED_END] + PLAIN
    return encode_value(record.value, record.expires_at, record.deleted, stamps=record.stamps)


def _thin_field(field: Field) -> Field:
    if field.text is None:
        return field
    digest = hash_bytes(field.text, SEED).to_bytes(DIGEST_BYTES, "big")
    return Field(field.name, digest, field.stamp, field.expires_at)
