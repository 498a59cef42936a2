"""Records as stored values: TiKV's bytes where TiKV has them, and every unknown bit refused."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from floodmark.codec.values import (
    DELETED,
    HAS_EXPIRY,
    HAS_ORIGIN,
    HAS_STAMPS,
    PLAIN,
    STATE_KINDS,
    TOMBSTONE,
    decode_value,
    encode_value,
    mark_batch,
)
from floodmark.model.change import Stamp
from floodmark.model.errors import Corruption
from floodmark.model.record import Record
from floodmark.model.version import VERSION_MAX

STAMPS = st.builds(Stamp, st.integers(1, VERSION_MAX), st.integers(1, 255))
# What stamps may end with, so that random bytes get past it now and then.
TAILS = st.builds(
    lambda kind, length, flags: bytes([kind, 0, 0, 0, length, flags]),
    st.sampled_from((0, *STATE_KINDS)),
    st.integers(0, 4),
    st.sampled_from((32, 34, 36)),
)
BODIES = st.builds(
    lambda kind, rest: bytes([kind]) + rest, st.sampled_from(STATE_KINDS), st.binary(max_size=9)
)
RECORDS = st.builds(
    Record,
    value=st.binary(max_size=30),
    expires_at=st.none() | st.integers(0, VERSION_MAX),
    deleted=st.booleans(),
    origin=st.none() | STAMPS,
    stamps=st.none() | BODIES,
)


def encode_record(record: Record) -> bytes:
    stored = encode_value(
        record.value, record.expires_at, record.deleted, origin=record.origin, stamps=record.stamps
    )
    return mark_batch(stored) if record.batched else stored


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


def test_stamps_stand_between_origin_and_expiry_with_their_length_behind_them() -> None:
    stored = encode_value(b"a", 2, origin=Stamp(7, 9), stamps=b"\x01body")
    assert stored.hex() == "61" + "000000000000000709" + "01626f6479" + "00000005" + "0000000000000002" + "25"


def test_shortcuts_are_what_the_encoder_gives() -> None:
    assert encode_value(b"a") == b"a" + PLAIN
    assert encode_value(b"", deleted=True) == TOMBSTONE


@pytest.mark.parametrize(
    ("value", "expires_at", "deleted", "origin", "stamps", "batched"),
    list(
        product(
            (b"", b"a", b"\0\xff" * 20),
            (None, 0, VERSION_MAX),
            (False, True),
            (None, Stamp(7, 255)),
            (None, b"\x01", b"\x02" * 300),
            (False, True),
        )
    ),
)
def test_every_combination_survives_a_round_trip(
    value: bytes,
    expires_at: int | None,
    deleted: bool,
    origin: Stamp | None,
    stamps: bytes | None,
    batched: bool,
) -> None:
    record = Record(value, expires_at, deleted, origin, stamps, batched)
    assert decode_value(encode_record(record)) == record


@given(RECORDS)
def test_records_survive_a_round_trip(record: Record) -> None:
    assert decode_value(encode_record(record)) == record


@pytest.mark.parametrize("flags", [flags for flags in range(256) if flags & ~0b110111])
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


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ("000020", "too short for the length of its stamps"),
        ("010000000220", "too short for the stamps"),
        ("01ffffffff20", "too short for the stamps"),
        ("610000000020", "unknown kind"),
        ("000000000120", r"unknown kind \(00\)"),
        ("040000000120", r"unknown kind \(04\)"),
        ("010000000124", "too short for the origin"),
    ],
)
def test_stamps_must_be_there_in_full_and_of_a_known_kind(stored: str, message: str) -> None:
    with pytest.raises(Corruption, match=message):
        decode_value(bytes.fromhex(stored))
    assert decode_value(bytes.fromhex("010000000120")).stamps == b"\x01"


def test_every_flag_has_its_own_bit() -> None:
    assert [HAS_EXPIRY, DELETED, HAS_ORIGIN, HAS_STAMPS] == [1, 2, 4, 32]


def test_empty_record_is_refused() -> None:
    with pytest.raises(Corruption, match="empty"):
        decode_value(b"")


@given(st.binary(max_size=40) | st.builds(lambda head, tail: head + tail, st.binary(max_size=20), TAILS))
def test_any_bytes_decode_to_what_encodes_to_them_or_are_refused(stored: bytes) -> None:
    try:
        record = decode_value(stored)
    except Corruption:
        return
    assert encode_record(record) == stored
