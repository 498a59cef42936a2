"""Ledger entries: pinned bytes, any mixture of bare and batched, and every kind of damage refused."""

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from floodmark.codec.entries import (
    ENTRY_HEAD_BYTES,
    FORMAT_VERSION,
    MAGIC,
    RECORD_HEAD_BYTES,
    decode_entry,
    encode_bare,
    encode_batch,
    is_batched,
)
from floodmark.model.errors import Corruption, FormatTooNew

RECORDS = st.binary(max_size=40) | st.binary(max_size=9).map(lambda rest: MAGIC + rest)


def sealed(version: int, body: bytes) -> bytes:
    checksum = xxhash.xxh64_intdigest(body, 42).to_bytes(8, "big")
    return MAGIC + version.to_bytes(2, "big") + checksum + body


def test_a_batch_has_the_drawn_layout() -> None:
    body = bytes.fromhex("000000020000000100000002616263")
    assert encode_batch([b"a", b"bc"]) == sealed(1, body)
    assert encode_batch([b"a", b"bc"]).hex() == "0e010001" + "549f47d8a47e4d80" + body.hex()


def test_overhead_is_what_the_constants_say() -> None:
    records = [b"a", b"bc", b""]
    overhead = ENTRY_HEAD_BYTES + RECORD_HEAD_BYTES * len(records)
    assert len(encode_batch(records)) == overhead + sum(map(len, records))


@given(st.lists(RECORDS, min_size=1, max_size=20))
def test_a_batch_is_read_back(records: list[bytes]) -> None:
    entry = encode_batch(records)
    assert is_batched(entry)
    assert decode_entry(entry) == records


@given(RECORDS)
def test_a_bare_record_is_itself_unless_it_looks_like_a_batch(record: bytes) -> None:
    entry = encode_bare(record)
    assert decode_entry(entry) == [record]
    assert is_batched(entry) is record.startswith(MAGIC)
    assert entry == record or record.startswith(MAGIC)


@pytest.mark.parametrize("record", [b"", MAGIC[:1], MAGIC[::-1], b"x" + MAGIC])
def test_what_only_resembles_the_magic_stays_bare(record: bytes) -> None:
    assert encode_bare(record) == record
    assert decode_entry(record) == [record]


def test_an_entry_of_no_records_cannot_be_made() -> None:
    with pytest.raises(ValueError, match="at least one"):
        encode_batch([])


@pytest.mark.parametrize("version", [FORMAT_VERSION + 1, 0xFFFF])
def test_a_later_format_is_refused_with_what_to_do(version: int) -> None:
    with pytest.raises(FormatTooNew, match=f"format {version}.*start the version that wrote it"):
        decode_entry(sealed(version, encode_batch([b"a"])[12:]))


def test_format_zero_never_was() -> None:
    with pytest.raises(Corruption):
        decode_entry(sealed(0, encode_batch([b"a"])[12:]))


def test_every_flipped_bit_behind_the_version_is_found() -> None:
    entry = encode_batch([b"ada", b"", b"grace"])
    for bit in range(8 * 4, 8 * len(entry)):
        damaged = bytearray(entry)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Corruption):
            decode_entry(bytes(damaged))


def test_every_truncation_is_found() -> None:
    entry = encode_batch([b"ada", b"grace"])
    for length in range(len(MAGIC), len(entry)):
        with pytest.raises(Corruption):
            decode_entry(entry[:length])
    with pytest.raises(Corruption):
        decode_entry(entry + b"\x00")


@pytest.mark.parametrize(
    "body",
    [
        bytes(4),
        bytes.fromhex("00000001"),
        bytes.fromhex("ffffffff"),
        bytes.fromhex("000000010000000261"),
        bytes.fromhex("000000010000000061"),
        bytes.fromhex("00000002ffffffff0000000261"),
    ],
)
def test_lengths_that_do_not_match_are_found_under_a_right_checksum(body: bytes) -> None:
    with pytest.raises(Corruption):
        decode_entry(sealed(FORMAT_VERSION, body))
