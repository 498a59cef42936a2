"""Records as stored values: TiKV's bytes where TiKV has them, and every unknown bit refused."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from floodmark.codec.values import (
    DELETED,
    HAS_EXPIRY,
    HAS_ORIGIN,
    PLAIN,
    TOMBSTONE,
    decode_value,
    encode_value,
)
from floodmark.model.change import Stamp
from floodmark.model.errors import Corruption
from floodmark.model.record import Record
from floodmark.model.version import VERSION_MAX

DETERMINISTIC = settings(derandomize=True, deadline=None, max_examples=200)

STAMPS = st.builds(Stamp, st.integers(1, VERSION_MAX), st.integers(1, 255))
RECORDS = st.builds(
    Record,
    value=st.binary(max_size=30),
    expires_at=st.none() | st.integers(0, VERSION_MAX),
    deleted=st.booleans(),
    origin=st.none() | STAMPS,
)


@pytest.mark.parametrize(
    ("value", "expires_at", "deleted", "stored"),
    [
        (b"", None, False, "00"),
        (b"a", None, False, "6100"),
        (b"a", 2, False, "61000000000000000201"),
        (b"", None, True, "02"),
        (b"", 2, True, "000000000000000203"),
    ],
)
def test_values_are_encoded_as_tikv_does(
    value: bytes, expires_at: int | None, deleted: bool, stored: str
) -> None:
    assert encode_value(value, expires_at, deleted).hex() == stored
    assert decode_value(bytes.fromhex(stored)) == Record(value, expires_at, deleted)


def test_origin_stands_before_the_expiry_as_drawn() -> None:
    stored = encode_value(b"a", 2, origin=Stamp(0x0102030405060708, 9))
    assert stored.hex() == "61" + "010203040506070809" + "0000000000000002" + "05"


def test_shortcuts_are_what_the_encoder_gives() -> None:
    assert encode_value(b"a") == b"a" + PLAIN
    assert encode_value(b"", deleted=True) == TOMBSTONE


@pytest.mark.parametrize(
    ("value", "expires_at", "deleted", "origin"),
    list(product((b"", b"a", b"\0\xff" * 20), (None, 0, VERSION_MAX), (False, True), (None, Stamp(7, 255)))),
)
def test_every_combination_survives_a_round_trip(
    value: bytes, expires_at: int | None, deleted: bool, origin: Stamp | None
) -> None:
    record = Record(value, expires_at, deleted, origin)
    assert decode_value(encode_value(value, expires_at, deleted, origin=origin)) == record


@DETERMINISTIC
@given(RECORDS)
def test_records_survive_a_round_trip(record: Record) -> None:
    stored = encode_value(record.value, record.expires_at, record.deleted, origin=record.origin)
    assert decode_value(stored) == record


@pytest.mark.parametrize("flags", [flags for flags in range(256) if flags & ~0b111])
def test_unknown_flags_are_refused(flags: int) -> None:
    with pytest.raises(Corruption, match="unknown flags"):
        decode_value(bytes(40) + bytes([flags]))


@pytest.mark.parametrize(
    ("flags", "needed"),
    [
        (HAS_EXPIRY, 8),
        (HAS_EXPIRY | DELETED, 8),
        (HAS_ORIGIN, 9),
        (HAS_ORIGIN | DELETED, 9),
        (HAS_ORIGIN | HAS_EXPIRY, 17),
    ],
)
def test_promised_extension_must_be_there_in_full(flags: int, needed: int) -> None:
    for length in range(needed):
        with pytest.raises(Corruption, match="too short"):
            decode_value(bytes(length) + bytes([flags]))
    assert decode_value(bytes(needed) + bytes([flags])).value == b""


def test_empty_record_is_refused() -> None:
    with pytest.raises(Corruption, match="empty"):
        decode_value(b"")


@DETERMINISTIC
@given(st.binary(max_size=40))
def test_any_bytes_decode_to_what_encodes_to_them_or_are_refused(stored: bytes) -> None:
    try:
        record = decode_value(stored)
    except Corruption:
        return
    assert encode_value(record.value, record.expires_at, record.deleted, origin=record.origin) == stored
