"""Whole columns decode to what each row decodes to by itself, and damage is refused."""

from collections.abc import Sequence
from itertools import pairwise

import numpy
import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.codec.strategies import STATES, fields_states

from floodmark.codec.columns import RECORDS, RECORDS_WITH_DIGESTS, StoredRows, records_schema
from floodmark.codec.digest import SEED, hash_bytes
from floodmark.codec.ordered import decode_key, encode_key
from floodmark.codec.records import has_expiring_fields, split_values
from floodmark.codec.states import Field, FieldsState, encode_state, live_value
from floodmark.codec.values import EXPIRING_FIELDS, PLAIN, decode_value, encode_value
from floodmark.model.change import Stamp
from floodmark.model.errors import Corruption
from floodmark.model.limits import KEY_BYTES_MAX
from floodmark.model.partition import Content
from floodmark.model.version import VERSION_MAX

SECONDS_MAX = (1 << 63) - 1

# Short keys around the borders of groups, and a few that have many.
KEYS = st.binary(min_size=1, max_size=30) | st.integers(1, KEY_BYTES_MAX).map(lambda size: b"\xff" * size)
VERSIONS = st.integers(0, VERSION_MAX)
ENGINE_KEYS = st.builds(encode_key, st.integers(0, (1 << 24) - 1), KEYS, VERSIONS)
ORIGINS = st.none() | st.builds(Stamp, st.integers(1, VERSION_MAX), st.integers(1, 255))
PLAIN_RECORDS = st.builds(
    lambda value, expires_at, deleted, origin: encode_value(value, expires_at, deleted, origin=origin),
    st.binary(max_size=30),
    st.none() | st.integers(0, SECONDS_MAX),
    st.booleans(),
    ORIGINS,
)
MERGED_RECORDS = st.builds(encode_state, STATES, ORIGINS)
STORED = PLAIN_RECORDS | MERGED_RECORDS


# Where the expiries of fields lie.
MOMENTS = st.integers(0, 60_000)


def column(values: Sequence[bytes]) -> pyarrow.BinaryArray:
    return pyarrow.array(values, pyarrow.binary())


def middle(values: Sequence[bytes]) -> pyarrow.BinaryArray:
    """A column that is a part of a longer one, so that its bytes do not begin with the buffer."""
    return column([b"before", *values, b"behind"])[1:-1]


def decode_keys(encoded: Sequence[bytes]) -> tuple[pyarrow.BinaryArray, pyarrow.UInt64Array]:
    """The users' keys and the versions of a page of plain records."""
    batch = StoredRows([(key, PLAIN) for key in encoded]).take(numpy.arange(len(encoded)), 0)
    return batch.column("key"), batch.column("version")


@given(st.lists(ENGINE_KEYS, max_size=20))
def test_keys_decode_as_each_does(encoded: list[bytes]) -> None:
    keys, versions = decode_keys(encoded)
    expected = [decode_key(key) for key in encoded]
    keys.validate(full=True)
    assert keys.to_pylist() == [key for _, key, _ in expected]
    assert versions.to_pylist() == [version for _, _, version in expected]


def test_keys_of_every_length_decode() -> None:
    expected = [bytes([length % 256]) * length for length in range(1, KEY_BYTES_MAX + 1)]
    keys, versions = decode_keys([encode_key(5, key, len(key)) for key in expected])
    assert keys.to_pylist() == expected
    assert versions.to_pylist() == list(range(1, KEY_BYTES_MAX + 1))


@pytest.mark.parametrize(
    ("damaged", "message"),
    [
        ("", "whole groups"),
        ("ffffffffffffffe1", "whole groups"),
        ("7200000061626300feffffffffffffff", "whole groups"),
        ("7200000061626300feffffffffffffffe100", "whole groups"),
        ("7200000061626300ffffffffffffffffe1", "last marker"),
        ("7200000061626300f6ffffffffffffffe1", "last marker"),
        ("7200000000000000faffffffffffffffe1", "last marker"),
        ("7200000061626364fe0000000000000000f7ffffffffffffffe1", "an impossible marker"),
    ],
)
def test_damaged_key_is_refused_and_shown(damaged: str, message: str) -> None:
    sound = encode_key(0, b"abc", 30)
    with pytest.raises(Corruption, match=message) as caught:
        decode_keys([sound, bytes.fromhex(damaged), sound])
    assert f"engine key {damaged} " in str(caught.value)


@pytest.mark.parametrize("arrange", [column, middle])
@given(st.lists(STORED, max_size=20))
def test_values_split_as_each_does(arrange: type, stored: list[bytes]) -> None:
    columns = split_values(arrange(stored))
    records = [decode_value(value) for value in stored]
    columns.values.validate(full=True)
    assert columns.values.to_pylist() == [record.value for record in records]
    assert columns.deleted.to_pylist() == [record.deleted for record in records]
    expiries = [record.expires_at for record in records]
    assert columns.expires_at.to_pylist() == [expiry and min(expiry, SECONDS_MAX) for expiry in expiries]
    assert columns.origin_site.to_pylist() == [record.origin and record.origin.site for record in records]
    versions = [record.origin and record.origin.version for record in records]
    assert columns.origin_version.to_pylist() == versions


@pytest.mark.parametrize("arrange", [column, middle])
@given(st.lists(PLAIN_RECORDS | st.builds(encode_state, fields_states(), ORIGINS), max_size=8), MOMENTS)
def test_values_split_as_each_is_read_at_a_moment(arrange: type, stored: list[bytes], now_ms: int) -> None:
    columns = split_values(arrange(stored), now_ms)
    columns.values.validate(full=True)
    live = [live_value(value, now_ms) for value in stored]
    expected = [
        decode_value(value).value if found is None else found
        for value, found in zip(stored, live, strict=True)
    ]
    assert columns.values.to_pylist() == expected
    assert columns[1:] == split_values(arrange(stored))[1:]


@given(st.lists(STORED, max_size=10))
def test_column_knows_whether_a_value_depends_on_the_moment(stored: list[bytes]) -> None:
    kinds = [(decode_value(value).stamps or b"\0")[0] for value in stored]
    assert has_expiring_fields(column(stored)) == (EXPIRING_FIELDS in kinds)


def test_fields_that_expire_leave_a_column_of_values_one_by_one() -> None:
    brief, lasting = Field("brief", b"1", Stamp(7, 1), expires_at=5), Field("lasting", b"2", Stamp(7, 1))
    stored = column([encode_value(b"plain"), encode_state(FieldsState(None, (brief, lasting)))])
    assert split_values(stored, 4_999).values.to_pylist() == [b"plain", b'{"brief":1,"lasting":2}']
    assert split_values(stored, 5_000).values.to_pylist() == [b"plain", b'{"lasting":2}']
    assert split_values(stored).values.to_pylist() == [b"plain", b'{"brief":1,"lasting":2}']


def test_split_columns_have_the_same_types_with_and_without_rows_that_need_them() -> None:
    full = encode_value(b"a", 5, origin=Stamp(9, 3))
    expected = [
        pyarrow.binary(),
        pyarrow.bool_(),
        pyarrow.int64(),
        pyarrow.int32(),
        pyarrow.uint64(),
        pyarrow.bool_(),
    ]
    for stored in ([], [encode_value(b"a")], [full], [full, encode_value(b"b")]):
        assert [array.type for array in split_values(column(stored))] == expected


def test_expiry_beyond_signed_numbers_is_as_late_as_they_can_say() -> None:
    (expires_at,) = split_values(column([encode_value(b"a", VERSION_MAX)])).expires_at.to_pylist()
    assert expires_at == SECONDS_MAX


@pytest.mark.parametrize(
    ("damaged", "message"),
    [
        ("", "a stored record is empty"),
        ("6108", "unknown flags 0x08"),
        ("6180", "unknown flags 0x80"),
        ("0000000000000001", "too short"),
        ("000000000000000004", "too short"),
        ("00000000000000000000000000000005", "too short"),
        ("00000120", "too short"),
        ("010000000220", "too short"),
        ("01ffffffff20", "too short"),
        ("010000000124", "too short"),
        ("0100000000000020", "unknown kind"),
        ("000000000120", "unknown kind"),
        ("040000000120", "unknown kind"),
    ],
)
def test_damaged_value_is_refused(damaged: str, message: str) -> None:
    with pytest.raises(Corruption, match=message):
        decode_value(bytes.fromhex(damaged))
    with pytest.raises(Corruption, match=message):
        split_values(column([encode_value(b"a"), bytes.fromhex(damaged), encode_value(b"b")]))


@given(st.lists(st.tuples(st.sampled_from([b"a", b"ab", b"abcd", b"abcdefgh", b"b"]), VERSIONS), min_size=1))
def test_rows_know_which_repeat_the_key_before(pairs: list[tuple[bytes, int]]) -> None:
    rows = StoredRows([(encode_key(1, key, version), encode_value(b"")) for key, version in pairs])
    keys = [key for key, _ in pairs]
    assert rows.repeats().tolist() == [False, *(left == right for left, right in pairwise(keys))]
    assert rows.versions.tolist() == [version for _, version in pairs]


@given(st.lists(STORED, min_size=1, max_size=20), st.integers(0, 1 << 45))
def test_rows_know_which_are_dead(stored: list[bytes], physical_ms: int) -> None:
    rows = StoredRows([(encode_key(1, b"key", 1), value) for value in stored])
    everything = numpy.arange(len(stored))
    expected = [decode_value(value).is_dead_at(physical_ms) for value in stored]
    assert rows.dead(everything, physical_ms).tolist() == expected
    assert rows.dead(everything[::2], physical_ms).tolist() == expected[::2]


@given(st.lists(st.tuples(KEYS, VERSIONS, STORED), min_size=1, max_size=10), st.integers(0, 3))
def test_taken_rows_are_records_with_or_without_digests(
    facts: list[tuple[bytes, int, bytes]], step: int
) -> None:
    rows = StoredRows([(encode_key(1, key, version), stored) for key, version, stored in facts])
    chosen = numpy.arange(0, len(facts), step + 1)
    taken = facts[:: step + 1]
    batch = rows.take(chosen, 64)
    batch.validate(full=True)
    assert batch.schema.equals(RECORDS)
    assert batch.to_pydict() == {
        "key": [key for key, _, _ in taken],
        "version": [version for _, version, _ in taken],
        "partition": [64] * len(taken),
        "value": [stored for _, _, stored in taken],
    }
    digests = rows.take(chosen, 64, Content.DIGESTS)
    digests.validate(full=True)
    assert digests.schema.equals(RECORDS_WITH_DIGESTS)
    assert digests.select(["key", "version", "partition"]).equals(
        batch.select(["key", "version", "partition"])
    )
    records = [decode_value(stored) for _, _, stored in taken]
    assert digests.column("digest").to_pylist() == [signed_digest(record.value) for record in records]
    assert digests.column("value").to_pylist() == [
        encode_value(b"", record.expires_at, record.deleted, origin=record.origin) for record in records
    ]


@given(st.lists(PLAIN_RECORDS | st.builds(encode_state, fields_states()), min_size=1, max_size=10), MOMENTS)
def test_digests_are_those_of_the_values_that_a_reader_finds_at_the_moment(
    stored: list[bytes], now_ms: int
) -> None:
    rows = StoredRows([(encode_key(1, b"key", 1), value) for value in stored])
    everything = numpy.arange(len(stored))
    found = split_values(column(stored), now_ms).values.to_pylist()
    for chosen in (everything, everything[::2]):
        digests = rows.take(chosen, 64, Content.DIGESTS, now_ms).column("digest").to_pylist()
        assert digests == [signed_digest(found[row]) for row in chosen]


def signed_digest(value: bytes) -> int:
    unsigned = hash_bytes(value, SEED)
    return unsigned - (1 << 64) if unsigned >> 63 else unsigned


def test_schema_follows_what_is_asked_for() -> None:
    assert records_schema(Content.WHOLE) is RECORDS
    assert records_schema(Content.DIGESTS) is records_schema(Content.THIN) is RECORDS_WITH_DIGESTS
