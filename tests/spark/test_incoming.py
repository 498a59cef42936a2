"""Rows become the records that a site would store for the same writes; what cannot be stored is named."""

import json
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import pyarrow
import pytest
from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from floodmark.codec.values import decode_value
from floodmark.merge.fields import update_fields
from floodmark.merge.states import merge_states, stamp_state
from floodmark.model.change import Stamp
from floodmark.model.errors import (
    FloodmarkError,
    InvalidKey,
    InvalidTimeToLive,
    InvalidValue,
    SchemaMismatch,
)
from floodmark.model.limits import KEY_BYTES_MAX, VALUE_BYTES_MAX
from floodmark.model.record import Record
from floodmark.spark.source.incoming import Encoder, Layout, check_columns

NOW_MS = 1_700_000_000_500
MICROSECONDS = pyarrow.timestamp("us", "UTC")

KEY = StructField("key", BinaryType())
VALUE = StructField("value", BinaryType())
CHANGE_TYPE = StructField("_change_type", StringType())
EXPIRES_AT = StructField("_expires_at", TimestampType())
ORIGIN = [StructField("_origin_site", IntegerType()), StructField("_origin_version", LongType())]


def encode(ttl: timedelta | None = None, *, json: bool = False, **columns: Any) -> list[tuple[bytes, Record]]:
    """The records of some columns, with the keys as they travel."""
    layout = Layout(
        names=frozenset(columns),
        fields=tuple(name for name in columns if name != "key" and name[0] != "_") if json else None,
    )
    rows = pyarrow.RecordBatch.from_pydict(columns)
    encoded = Encoder(layout, 258, ttl, lambda: NOW_MS).encode(rows)
    return [
        (key, decode_value(stored))
        for key, stored in zip(encoded["key"].to_pylist(), encoded["value"].to_pylist(), strict=True)
    ]


def refused(kind: type[FloodmarkError], match: str, **columns: Any) -> None:
    with pytest.raises(kind, match=match):
        encode(**columns)


def test_a_plain_row_is_a_key_with_its_namespace_and_a_value() -> None:
    assert encode(key=[b"ada", b"bob"], value=[b"1", b""]) == [
        (b"\x00\x01\x02ada", Record(b"1")),
        (b"\x00\x01\x02bob", Record(b"")),
    ]


@pytest.mark.parametrize("kind", [pyarrow.string(), pyarrow.large_string(), pyarrow.large_binary()])
def test_text_is_stored_as_utf8_whatever_arrow_calls_it(kind: pyarrow.DataType) -> None:
    column = pyarrow.array(["å".encode()]).cast(kind)
    assert encode(key=column, value=column) == [(b"\x00\x01\x02\xc3\xa5", Record("å".encode()))]


def test_kinds_of_changes_put_delete_or_are_passed_over() -> None:
    kinds = ["upsert", "delete", "update_preimage", "insert", "update_postimage", "delete"]
    encoded = encode(
        key=[b"%d" % number for number in range(6)],
        value=[b"a", b"gone", b"before", b"b", b"c", None],
        _change_type=kinds,
    )
    assert [(key[3:], record) for key, record in encoded] == [
        (b"0", Record(b"a")),
        (b"1", Record(b"", deleted=True)),
        (b"3", Record(b"b")),
        (b"4", Record(b"c")),
        (b"5", Record(b"", deleted=True)),
    ]


def test_rows_of_before_images_only_leave_nothing() -> None:
    assert encode(key=[b"a"], value=[b"1"], _change_type=["update_preimage"]) == []


def test_a_moment_of_expiry_is_rounded_up_and_holds_for_puts_alone() -> None:
    moments = [datetime(2030, 1, 1, 0, 0, 0, 1, UTC), None, datetime(2030, 1, 1, tzinfo=UTC)]
    encoded = encode(
        key=[b"a", b"b", b"c"],
        value=[b"1", b"2", None],
        _change_type=["upsert", "upsert", "delete"],
        _expires_at=pyarrow.array(moments, MICROSECONDS),
    )
    new_year = int(datetime(2030, 1, 1, tzinfo=UTC).timestamp())
    assert [record.expires_at for _, record in encoded] == [new_year + 1, None, None]


def test_the_time_to_live_of_the_namespace_holds_for_rows_that_name_none() -> None:
    moments = pyarrow.array([None, datetime(2030, 1, 1, tzinfo=UTC)], MICROSECONDS)
    encoded = encode(timedelta(seconds=10), key=[b"a", b"b"], value=[b"1", b"2"], _expires_at=moments)
    assert [record.expires_at for _, record in encoded] == [1_700_000_011, 1_893_456_000]
    assert encode(timedelta(seconds=10), key=[b"a"], value=[b"1"])[0][1].expires_at == 1_700_000_011
    deleted = encode(timedelta(seconds=10), key=[b"a"], value=[b"1"], _change_type=["delete"])
    assert deleted[0][1] == Record(b"", deleted=True)


def test_a_change_of_a_feed_keeps_its_stamp_and_its_expiry_and_no_time_to_live() -> None:
    encoded = encode(
        timedelta(seconds=10),
        key=[b"a", b"b", b"c"],
        value=[b"1", None, b"3"],
        _change_type=["upsert", "delete", "upsert"],
        _expires_at=pyarrow.array([None, None, datetime(2030, 1, 1, tzinfo=UTC)], MICROSECONDS),
        _origin_site=pyarrow.array([7, 8, 255], pyarrow.int32()),
        _origin_version=[11, 12, 1 << 62],
    )
    assert [record for _, record in encoded] == [
        Record(b"1", origin=Stamp(11, 7)),
        Record(b"", deleted=True, origin=Stamp(12, 8)),
        Record(b"3", expires_at=1_893_456_000, origin=Stamp(1 << 62, 255)),
    ]


def test_columns_without_underscore_are_the_fields_of_a_json_value() -> None:
    encoded = encode(
        json=True,
        key=["ada", "bob"],
        name=["Ada", None],
        born=[date(1815, 12, 10), None],
        score=[Decimal("1.50"), None],
        tags=[["x", "y"], []],
        extra=pyarrow.array([[("k", 1)], None], pyarrow.map_(pyarrow.string(), pyarrow.int32())),
        seen=pyarrow.array([datetime(2026, 1, 2, tzinfo=UTC), None], MICROSECONDS),
        value=[1, 2],
        _change_type=["upsert", "upsert"],
    )
    assert [json.loads(record.value) for _, record in encoded] == [
        {
            "name": "Ada",
            "born": "1815-12-10",
            "score": 1.5,
            "tags": ["x", "y"],
            "extra": {"k": 1},
            "seen": "2026-01-02T00:00:00Z",
            "value": 1,
        },
        {"tags": [], "value": 2},
    ]
    assert b'"score":1.50' in encoded[0][1].value


def test_what_cannot_be_stored_is_refused_with_column_and_key() -> None:
    refused(InvalidKey, "'key' holds a null", key=pyarrow.array([None], pyarrow.binary()), value=[b""])
    refused(InvalidKey, "'key' holds a key without bytes", key=[b"a", b""], value=[b"", b""])
    large_key = b"k" * (KEY_BYTES_MAX + 1)
    refused(InvalidKey, r"'key' .*b'kkk.* has 4,097 bytes", key=[b"a", large_key], value=[b"", b""])
    values = [b"", b"v" * (VALUE_BYTES_MAX + 1)]
    refused(InvalidValue, "'value' .*key b'b' has 1,048,577 bytes", key=[b"a", b"b"], value=values)
    refused(InvalidValue, "'value' .*key b'b' is null", key=[b"a", b"b"], value=[b"", None])
    refused(
        InvalidValue,
        "'_change_type' .*key b'b' is 'remove'; it is one of upsert, delete",
        key=[b"a", b"b"],
        value=[b"", b""],
        _change_type=["upsert", "remove"],
    )
    refused(InvalidValue, "'_change_type' .*key b'a' is None", key=[b"a"], value=[b""], _change_type=[None])
    refused(
        InvalidTimeToLive,
        "'_expires_at' .*key b'b' lies before",
        key=[b"a", b"b"],
        value=[b"", b""],
        _expires_at=pyarrow.array([None, datetime(1960, 1, 1, tzinfo=UTC)], MICROSECONDS),
    )
    refused(
        InvalidValue,
        "'_origin_site' .*key b'b' is not the origin",
        key=[b"a", b"b"],
        value=[b"", b""],
        _origin_site=[7, 256],
        _origin_version=[1, 1],
    )
    refused(
        InvalidValue,
        "'_origin_version' .*key b'a' is not the origin",
        key=[b"a", b"b"],
        value=[b"", b""],
        _origin_site=[7, 7],
        _origin_version=[None, 1],
    )


def test_the_largest_key_and_value_are_stored() -> None:
    ((key, record),) = encode(key=[b"k" * KEY_BYTES_MAX], value=[b"v" * VALUE_BYTES_MAX])
    assert (len(key), len(record.value)) == (KEY_BYTES_MAX + 3, VALUE_BYTES_MAX)


def test_a_record_of_fields_may_be_larger_than_what_one_site_writes() -> None:
    """Sites write up to the limit each, so its backup must be restored."""
    large = "x" * (VALUE_BYTES_MAX * 2 // 3)
    states = [stamp_state(update_fields({name: large}), None, 1, site) for site, name in enumerate("ab", 1)]
    merged = decode_value(merge_states(*states))
    origin: dict[str, Any] = {"_origin_site": [7], "_origin_version": [1]}
    ((_, record),) = encode(key=[b"a"], value=[merged.value], **origin, _stamps=[merged.stamps])
    assert (record.value, record.stamps) == (merged.value, merged.stamps)
    refused(InvalidValue, r"'value' .*has 1,398,\d+ bytes", key=[b"a"], value=[merged.value], **origin)


def test_the_columns_of_a_feed_are_all_taken() -> None:
    feed = StructType(
        [
            KEY,
            VALUE,
            CHANGE_TYPE,
            StructField("_commit_version", LongType()),
            StructField("_commit_timestamp", TimestampType()),
            *ORIGIN,
            StructField("_site_partition", LongType()),
            EXPIRES_AT,
        ]
    )
    assert check_columns(feed, json=False).has_origin
    assert not check_columns(StructType([VALUE, KEY]), json=False).has_origin


@pytest.mark.parametrize(
    ("fields", "column", "message"),
    [
        ([VALUE], "key", "there is no column 'key'; the columns are: value"),
        ([KEY], "value", "there is no column 'value'"),
        ([KEY, VALUE, StructField("name", StringType())], "name", "'name' cannot be written"),
        ([KEY, VALUE, StructField("_when", LongType())], "_when", "'_when' cannot be written"),
        ([StructField("key", LongType()), VALUE], "key", "'key' is bigint; it must be binary or string"),
        ([KEY, StructField("value", BooleanType())], "value", "'value' is boolean"),
        ([KEY, VALUE, StructField("_expires_at", LongType())], "_expires_at", "must be timestamp"),
        ([KEY, VALUE, StructField("_change_type", LongType())], "_change_type", "must be string"),
        ([KEY, VALUE, ORIGIN[0]], "_origin_version", "both of _origin_site and _origin_version"),
        ([KEY, VALUE, VALUE], "value", "two columns 'value'"),
        ([KEY, VALUE, *ORIGIN, StructField("digest", LongType())], "digest", "'digest' cannot be written"),
    ],
)
def test_columns_that_do_not_fit_are_named(fields: list[StructField], column: str, message: str) -> None:
    with pytest.raises(SchemaMismatch, match=message) as caught:
        check_columns(StructType(fields), json=False)
    assert caught.value.details["column"] == column


def test_columns_that_json_has_no_form_for_are_named() -> None:
    nested = StructType([StructField("photo", BinaryType())])
    with pytest.raises(SchemaMismatch, match=r"'person\.photo' is binary") as caught:
        check_columns(StructType([KEY, StructField("person", nested)]), json=True)
    assert caught.value.details["column"] == "person.photo"
    with pytest.raises(SchemaMismatch, match="no column besides the key"):
        check_columns(StructType([KEY, CHANGE_TYPE]), json=True)
    with pytest.raises(SchemaMismatch, match="'_when' cannot be written"):
        check_columns(StructType([KEY, ORIGIN[0], StructField("_when", LongType())]), json=True)
