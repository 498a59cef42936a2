"""The digest of a change: pinned, because sites of different versions must agree on it."""

from functools import reduce
from operator import xor

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from floodmark.codec.digest import (
    SEED,
    digest_change,
    digest_changes,
    digest_rows,
    hash_bytes,
)
from floodmark.codec.ordered import encode_namespace
from floodmark.codec.values import encode_value
from floodmark.model.limits import KEY_BYTES_MAX
from floodmark.model.version import VERSION_MAX, Version


def test_hash_is_xxh64_with_published_values() -> None:
    assert hash_bytes(b"", 0) == 0xEF46DB3751D8E999
    assert hash_bytes(b"abc", 0) == 0x44BC2CF5AD770999
    assert SEED == 42


def test_digest_of_a_known_change_is_pinned() -> None:
    assert digest_change(411225436913926252, 7, b"ada", encode_value(b"countess", 2)) == 0xA5D880FDF53EFC7D


@given(st.integers(1, VERSION_MAX), st.integers(0, 255), st.binary(max_size=40), st.binary(max_size=40))
def test_digest_is_xxh64_of_the_drawn_layout(version: Version, site: int, key: bytes, content: bytes) -> None:
    drawn = version.to_bytes(8, "big") + bytes([site]) + len(key).to_bytes(2, "big") + key + content
    assert digest_change(version, site, key, content) == xxhash.xxh64_intdigest(drawn, 42)


def test_largest_key_has_a_digest() -> None:
    assert digest_change(1, 1, bytes(KEY_BYTES_MAX), b"\x00") > 0


@pytest.mark.parametrize(
    "other",
    [
        (2, 1, b"key", b"value\x00"),
        (1, 2, b"key", b"value\x00"),
        (1, 1, b"kez", b"value\x00"),
        (1, 1, b"key", b"valuf\x00"),
        (1, 1, b"key", b"value\x02"),
        # The length keeps a byte from moving between key and content unseen.
        (1, 1, b"keyv", b"alue\x00"),
        (1, 1, b"ke", b"yvalue\x00"),
    ],
)
def test_digest_tells_changes_apart(other: tuple[Version, int, bytes, bytes]) -> None:
    assert digest_change(*other) != digest_change(1, 1, b"key", b"value\x00")


def test_rows_have_the_digests_of_their_changes() -> None:
    keys = [b"a", b"key", bytes(KEY_BYTES_MAX)]
    contents = [b"\x00", b"value\x00", b"\x01" * 100]
    qualified = [encode_namespace(7) + key for key in keys]
    assert digest_rows([1, 2, 3], 9, qualified, contents) == [
        digest_change(version, 9, key, content)
        for version, key, content in zip([1, 2, 3], keys, contents, strict=True)
    ]


def test_sums_of_a_commit_are_those_of_its_changes_for_each_namespace() -> None:
    changes = {
        encode_namespace(namespace) + key: key + b"\x00"
        for namespace, count in ((3, 1), (7, 4), (9, 2))
        for key in [b"k" * length for length in range(1, count + 1)]
    }
    expected = {
        namespace: (count, reduce(xor, (digest_change(5, 1, b"k" * n, b"k" * n + b"\x00") for n in lengths)))
        for namespace, count, lengths in ((3, 1, (1,)), (7, 4, (1, 2, 3, 4)), (9, 2, (1, 2)))
    }
    found = digest_changes(5, 1, list(changes), list(changes.values()))
    assert {
        int.from_bytes(namespace, "big"): (count, digest) for namespace, count, digest in found
    } == expected
