"""Stamps read from the last bytes of records: the same as decoding each, whatever stands around them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.codec.strategies import STAMPED, STAMPS

from floodmark.codec.digest import digest_change
from floodmark.codec.stamps import NO_STAMP, digest_copies, encode_stamp, find_origins
from floodmark.codec.states import encode_state
from floodmark.codec.values import decode_value, encode_value
from floodmark.model.change import Stamp
from floodmark.model.errors import Corruption

# The site that the records are at.
HERE = 1

EXPIRIES = st.none() | st.integers(0, 99)
CONTENTS = st.one_of(
    st.builds(lambda value: lambda origin: encode_value(value, origin=origin), st.binary(max_size=20)),
    st.builds(
        lambda value, expires_at, deleted: (
            lambda origin: encode_value(value, expires_at, deleted, origin=origin)
        ),
        st.binary(max_size=20),
        EXPIRIES,
        st.booleans(),
    ),
    st.builds(lambda state: lambda origin: encode_state(state, origin), STAMPED),
)


def without_origin(stored: bytes) -> bytes:
    record = decode_value(stored)
    return encode_value(record.value, record.expires_at, record.deleted, stamps=record.stamps)


@given(st.lists(st.tuples(CONTENTS, st.none() | STAMPS), max_size=8))
def test_origins_are_found_in_all_records(facts: list[tuple]) -> None:  # type: ignore[type-arg]
    records = [content(origin) for content, origin in facts]
    expected = [
        NO_STAMP if origin is None else encode_stamp(origin.version, origin.site) for _, origin in facts
    ]
    assert find_origins(records) == expected


@given(st.lists(st.tuples(st.binary(min_size=1, max_size=9), CONTENTS, STAMPS), min_size=1, max_size=8))
def test_copies_have_the_digests_of_what_was_first_written(facts: list[tuple]) -> None:  # type: ignore[type-arg]
    keys = [b"\x00\x00\x01" + key for key, _, _ in facts]
    records = [content(origin) for _, content, origin in facts]
    expected: dict[bool, tuple[int, int]] = {}
    for (key, _, origin), record in zip(facts, records, strict=True):
        count, digest = expected.get(origin.site == HERE, (0, 0))
        digest ^= digest_change(origin.version, origin.site, key, without_origin(record))
        expected[origin.site == HERE] = count + 1, digest
    found: dict[bool, tuple[int, int]] = {}
    for namespace, changes, digest, own in digest_copies(keys, records, HERE):
        assert namespace == b"\x00\x00\x01"
        count, before = found.get(own, (0, 0))
        found[own] = count + changes, before ^ digest
    assert found == expected


@pytest.mark.parametrize("damaged", ["", "6108", "0000000000000004", "0100000000000020", "01ffffffff24"])
def test_damaged_record_is_refused(damaged: str) -> None:
    sound = encode_value(b"value", origin=Stamp(7, 2))
    with pytest.raises(Corruption):
        find_origins([sound, bytes.fromhex(damaged), sound])


@pytest.mark.parametrize("sizes", [(20,), (0,), (20, 21)], ids=["one length", "empty", "two lengths"])
@pytest.mark.parametrize("last", [Stamp(9, 2), Stamp(9, HERE)], ids=["copies", "one of its own"])
@pytest.mark.parametrize("namespaces", [(1,), (1, 2)], ids=["one namespace", "two namespaces"])
def test_many_copies_have_the_digests_that_each_has(
    sizes: tuple[int, ...], last: Stamp, namespaces: tuple[int, ...]
) -> None:
    keys = [bytes([0, 0, namespace, number]) for namespace in namespaces for number in range(100)]
    values = [bytes([number % 256]) * sizes[number % len(sizes)] for number in range(len(keys))]
    origins = [*(Stamp(7 + number, 2) for number in range(len(keys) - 1)), last]
    records = [encode_value(value, origin=origin) for value, origin in zip(values, origins, strict=True)]
    expected: dict[tuple[bytes, bool], tuple[int, int]] = {}
    for key, value, origin in zip(keys, values, origins, strict=True):
        run = key[:3], origin.site == HERE
        count, digest = expected.get(run, (0, 0))
        digest ^= digest_change(origin.version, origin.site, key[3:], encode_value(value))
        expected[run] = count + 1, digest
    found = digest_copies(keys, records, HERE)
    assert {(namespace, own): (count, digest) for namespace, count, digest, own in found} == expected
