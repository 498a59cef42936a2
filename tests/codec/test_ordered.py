"""Keys in the engine: TiKV's bytes, an order that never lies, and no tolerance for damage."""

from contextlib import suppress

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from floodmark.codec.ordered import (
    decode_bytes,
    decode_key,
    decode_user_key,
    decode_version,
    encode_bytes,
    encode_key,
    encode_namespace,
    encode_prefix,
    encode_prefixes,
    encode_version,
)
from floodmark.model.errors import Corruption
from floodmark.model.limits import KEY_BYTES_MAX
from floodmark.model.version import VERSION_MAX, Version

# Bytes that padding and markers are made of are where an encoding goes wrong.
AWKWARD_BYTES = st.lists(st.sampled_from([0x00, 0x01, 0xF7, 0xFE, 0xFF]), max_size=26).map(bytes)
KEYS = st.binary(max_size=26) | AWKWARD_BYTES
VERSIONS = st.integers(1, VERSION_MAX)
NAMESPACES = st.integers(0, (1 << 24) - 1)

BYTES_TABLE = [
    ("", "0000000000000000f7"),
    ("010203", "0102030000000000fa"),
    ("01020304050607", "0102030405060700fe"),
    ("0102030405060708", "0102030405060708ff0000000000000000f7"),
]


@pytest.mark.parametrize(("plain", "encoded"), BYTES_TABLE)
def test_bytes_are_encoded_as_tikv_does(plain: str, encoded: str) -> None:
    assert encode_bytes(bytes.fromhex(plain)).hex() == encoded
    assert decode_bytes(bytes.fromhex(encoded)) == (bytes.fromhex(plain), b"")


def test_key_is_encoded_as_tikv_does() -> None:
    assert encode_key(0, b"abc", 30).hex() == "7200000061626300fe" + "ffffffffffffffe1"
    assert decode_key(bytes.fromhex("7200000061626300feffffffffffffffe1")) == (0, b"abc", 30)


@given(KEYS, st.binary(max_size=20))
def test_bytes_survive_a_round_trip_whatever_follows(data: bytes, following: bytes) -> None:
    assert decode_bytes(encode_bytes(data) + following) == (data, following)


@given(KEYS, KEYS)
@example(b"a", b"a\x00")
@example(b"12345678", b"12345678\x00")
@example(b"\xff" * 8, b"\xff" * 9)
def test_encoded_bytes_sort_as_the_bytes_do(left: bytes, right: bytes) -> None:
    assert (encode_bytes(left) < encode_bytes(right)) == (left < right)


@given(KEYS, KEYS)
def test_no_encoded_bytes_are_the_beginning_of_others(left: bytes, right: bytes) -> None:
    assert left == right or not encode_bytes(left).startswith(encode_bytes(right))


@given(NAMESPACES, KEYS, VERSIONS)
def test_key_survives_a_round_trip(namespace: int, key: bytes, version: Version) -> None:
    assert decode_key(encode_key(namespace, key, version)) == (namespace, key, version)
    assert decode_version(encode_key(namespace, key, version)) == version


@pytest.mark.parametrize("length", [0, 1, 3, 4, 5, 11, 12, 13, KEY_BYTES_MAX - 1, KEY_BYTES_MAX])
def test_key_of_any_allowed_length_survives_a_round_trip(length: int) -> None:
    key = bytes(index % 251 for index in range(length))
    assert decode_key(encode_key(7, key, 9)) == (7, key, 9)
    assert decode_user_key(encode_prefix(encode_namespace(7) + key)) == key


@given(
    st.lists(
        st.tuples(
            st.sampled_from([0, 1, 2, 255, 256, (1 << 24) - 1]),
            st.sampled_from([b"", b"a", b"a\x00", b"a\xff", b"b", b"abcdefgh", b"abcdefgh\x00"]) | KEYS,
            st.sampled_from([1, 2, 255, 256, VERSION_MAX]) | VERSIONS,
        ),
        max_size=30,
    )
)
def test_engine_keys_sort_by_namespace_then_key_then_newest_version(
    keys: list[tuple[int, bytes, Version]],
) -> None:
    by_bytes = sorted(keys, key=lambda key: encode_key(*key))
    assert by_bytes == sorted(keys, key=lambda key: (key[0], key[1], -key[2]))


@given(NAMESPACES, KEYS, VERSIONS)
def test_fast_way_to_the_user_key_agrees_with_the_careful_one(
    namespace: int, key: bytes, version: Version
) -> None:
    engine_key = encode_key(namespace, key, version)
    assert decode_user_key(engine_key[:-8]) == decode_key(engine_key)[1] == key


@pytest.mark.parametrize(
    ("encoded", "reason"),
    [
        ("", "middle of a group"),
        ("01", "middle of a group"),
        ("0102030405060708", "middle of a group"),
        ("0102030405060708ff", "middle of a group"),
        ("0102030405060708ff00", "middle of a group"),
        ("0102030405060708ff000000000000f7", "middle of a group"),
        ("0000000000000000f6", "impossible marker"),
        ("000000000000000000", "impossible marker"),
        ("0102030405060708ff0000000000000000f6", "impossible marker"),
        ("0102030000000001fa", "not zero"),
        ("0102030400000000fa", "not zero"),
        ("0000000000000001f7", "not zero"),
        ("01020304050607ffff0000000000000001f7", "not zero"),
    ],
)
def test_damaged_bytes_are_refused(encoded: str, reason: str) -> None:
    with pytest.raises(Corruption, match=reason):
        decode_bytes(bytes.fromhex(encoded))


@pytest.mark.parametrize(
    ("engine_key", "reason"),
    [
        (encode_bytes(b"r\x00\x00\x01a"), "0 bytes of version"),
        (encode_bytes(b"r\x00\x00\x01a") + bytes(7), "7 bytes of version"),
        (encode_bytes(b"r\x00\x00\x01a") + bytes(9), "9 bytes of version"),
        (encode_bytes(b"x\x00\x00\x01a") + bytes(8), "does not start"),
        (encode_bytes(b"") + bytes(8), "does not start"),
        (encode_bytes(b"r\x00\x00") + bytes(8), "does not start"),
        (b"", "middle of a group"),
        (bytes(8), "middle of a group"),
    ],
)
def test_damaged_keys_are_refused(engine_key: bytes, reason: str) -> None:
    with pytest.raises(Corruption, match=reason):
        decode_key(engine_key)


@pytest.mark.parametrize(
    "prefix",
    [
        b"",
        b"r\x00\x00\x01",
        b"r\x00\x00\x01abcd",
        encode_bytes(b"r\x00\x00\x01abc") + b"x",
        encode_bytes(b"r\x00\x00\x01abc") + bytes(8),
        encode_bytes(b"r\x00\x00\x01abcdefgh")[:-1],
        bytes.fromhex("7200000161626364f6"),
        bytes.fromhex("7200000161626364ff"),
        bytes.fromhex("7200000161626364fe6162636465666768fe"),
        encode_bytes(b"r\x00\x00"),
        encode_bytes(b""),
    ],
)
def test_fast_way_refuses_a_prefix_of_impossible_shape(prefix: bytes) -> None:
    """It may trust the padding, but a scan must never fail with anything but Corruption."""
    with pytest.raises(Corruption):
        decode_user_key(prefix)


@given(st.binary(max_size=40))
def test_any_bytes_decode_or_are_refused_as_corrupt(engine_key: bytes) -> None:
    try:
        namespace, key, version = decode_key(engine_key)
    except Corruption:
        return
    assert encode_key(namespace, key, version) == engine_key


@given(KEYS, VERSIONS, st.data())
def test_flipped_bit_gives_another_key_or_is_refused(
    key: bytes, version: Version, data: st.DataObject
) -> None:
    engine_key = encode_key(1, key, version)
    bit = data.draw(st.integers(0, len(engine_key) * 8 - 1))
    flipped = bytearray(engine_key)
    flipped[bit // 8] ^= 1 << bit % 8
    with suppress(Corruption):
        assert decode_key(bytes(flipped)) != (1, key, version)


def test_newest_version_has_the_smallest_suffix() -> None:
    assert encode_version(VERSION_MAX) == bytes(8)
    assert encode_version(0) == b"\xff" * 8
    assert encode_version(2) < encode_version(1)


@pytest.mark.parametrize("length", range(20))
def test_many_keys_of_one_length_are_encoded_as_each_is(length: int) -> None:
    keys = [
        (number * 0x9E3779B97F4A7C15 % (1 << 160)).to_bytes(20, "little")[:length] for number in range(70)
    ]
    assert encode_prefixes(keys) == [encode_prefix(key) for key in keys]


def test_many_keys_of_a_few_lengths_are_encoded_as_each_alone() -> None:
    keys = [bytes([number % 256]) * (number % 7) for number in range(1_000)]
    assert encode_prefixes(keys) == [encode_prefix(key) for key in keys]
