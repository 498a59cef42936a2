"""Rows have exactly the columns that were asked for, and what does not fit is named by column and key."""

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from floodmark.codec.columns import RECORDS, RECORDS_WITH_DIGESTS
from floodmark.codec.values import encode_value
from floodmark.feed.reading.items import Decoder
from floodmark.feed.sinks.parquet import to_table
from floodmark.model.change import Stamp
from floodmark.model.errors import SchemaMismatch
from floodmark.model.stream import ChangeBatch
from floodmark.model.version import compose
from floodmark.spark.source.rows import RowFormat, change_rows, snapshot_rows
from floodmark.spark.source.schemas import (
    ALL,
    AVAILABLE,
    CHANGES,
    DIGESTS,
    HASHED,
    LIVE,
    PAIRS,
    PAIRS_WITH_METADATA,
    arrow_schema,
    check_schema,
    default_schema,
)
from floodmark.spark.source.schemas import RECORDS as RECORD_ROWS

SITE_ID = 7
NAMESPACE = b"\x00\x00\x01"
NOW_MS = 1_800_000_000_000
VERSION = compose(NOW_MS, 5)


def records(*rows: tuple[bytes, bytes], digests: list[int] | None = None) -> pyarrow.RecordBatch:
    """Records as a scan gives them: keys and stored values, all at one version."""
    keys, values = [key for key, _ in rows], [value for _, value in rows]
    columns: list[Any] = [keys, [VERSION] * len(rows), [3] * len(rows), values]
    schema = RECORDS if digests is None else RECORDS_WITH_DIGESTS
    if digests is not None:
        columns.append(digests)
    arrays = [pyarrow.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
    return pyarrow.RecordBatch.from_arrays(arrays, schema=schema)


def struct(**columns: DataType) -> StructType:
    return StructType([StructField(name, kind) for name, kind in columns.items()])


def objects(schema: StructType, *values: bytes) -> list[dict[str, Any]]:
    """JSON values, read as rows."""
    batch = records(*((b"key-%d" % number, encode_value(value)) for number, value in enumerate(values)))
    rows: list[dict[str, Any]] = snapshot_rows(batch, RowFormat(schema, "json", SITE_ID)).to_pylist()
    return rows


@pytest.mark.parametrize("schema", [PAIRS, PAIRS_WITH_METADATA, RECORD_ROWS, DIGESTS], ids=str)
def test_batches_match_the_schema_exactly(schema: StructType) -> None:
    batch = records((b"ada", encode_value(b"1")), digests=[9] if schema is DIGESTS else None)
    rows = snapshot_rows(batch, RowFormat(schema, None, SITE_ID))
    assert rows.schema.equals(arrow_schema(schema), check_metadata=True)
    rows.validate(full=True)


def test_record_tells_where_it_comes_from() -> None:
    batch = records(
        (b"own", encode_value(b"1", expires_at=2_000_000_000)),
        (b"copied", encode_value(b"2", origin=Stamp(compose(NOW_MS - 1, 2), 9))),
        (b"gone", encode_value(b"", deleted=True)),
    )
    own, copied, gone = snapshot_rows(batch, RowFormat(RECORD_ROWS, None, SITE_ID)).to_pylist()
    moment = datetime.fromtimestamp(NOW_MS / 1000, UTC)
    assert own == {
        "key": b"own",
        "value": b"1",
        "_change_type": "upsert",
        "_commit_version": VERSION,
        "_commit_timestamp": moment,
        "_origin_site": SITE_ID,
        "_origin_version": VERSION,
        "_site_partition": 3,
        "_expires_at": datetime.fromtimestamp(2_000_000_000, UTC),
    }
    assert (copied["_origin_site"], copied["_origin_version"]) == (9, compose(NOW_MS - 1, 2))
    assert copied["_commit_version"] == VERSION
    assert (gone["value"], gone["_change_type"], gone["_expires_at"]) == (None, "delete", None)


def test_digest_of_what_is_deleted_is_null() -> None:
    batch = records((b"a", b"\x00"), (b"b", b"\x02"), digests=[-5, 6])
    rows = snapshot_rows(batch, RowFormat(DIGESTS, None, SITE_ID))
    assert rows["digest"].to_pylist() == [-5, None]


def test_expiry_beyond_the_calendar_is_the_end_of_it() -> None:
    batch = records((b"a", encode_value(b"", expires_at=1 << 62)))
    rows = snapshot_rows(batch, RowFormat(PAIRS_WITH_METADATA, None, SITE_ID))
    assert rows["_expires_at"].to_pylist()[0].year == 9999


def test_columns_can_be_left_out_and_reordered() -> None:
    schema = struct(_commit_version=LongType(), value=StringType(), key=StringType())
    check_schema(schema, AVAILABLE[LIVE], None)
    rows = snapshot_rows(records((b"ada", encode_value(b"1815"))), RowFormat(schema, None, SITE_ID))
    assert rows.to_pylist() == [{"_commit_version": VERSION, "value": "1815", "key": "ada"}]


@pytest.mark.parametrize("column", ["key", "value"])
def test_bytes_that_are_no_text_are_named(column: str) -> None:
    good, bad = (b"good", encode_value(b"good")), (b"k\xff", encode_value(b"\xff"))
    schema = struct(**{column: StringType()})
    with pytest.raises(SchemaMismatch, match=rf"column '{column}' .* key b'k\\xff'") as caught:
        snapshot_rows(records(*[good] * 10, bad, good), RowFormat(schema, None, SITE_ID))
    assert caught.value.details == {"column": column, "key": b"k\xff"}


def test_null_where_the_schema_has_none_is_named() -> None:
    schema = StructType([StructField("value", BinaryType(), nullable=False)])
    with pytest.raises(SchemaMismatch, match="column 'value' is never null, and for the key b'gone'"):
        snapshot_rows(records((b"ada", b"\x00"), (b"gone", b"\x02")), RowFormat(schema, None, SITE_ID))


# Changes


stored_values = st.one_of(
    st.binary(max_size=3).map(encode_value),
    st.just(encode_value(b"", deleted=True)),
    st.builds(
        encode_value,
        st.binary(max_size=3),
        st.sampled_from([NOW_MS // 1000 - 1, NOW_MS // 1000, NOW_MS // 1000 + 1, None]),
        origin=st.none() | st.builds(Stamp, st.integers(1, 1 << 60), st.integers(1, 255)),
    ),
)
changes = st.lists(st.tuples(st.binary(min_size=1, max_size=4), stored_values, st.none() | stored_values))


@given(changes, st.booleans())
def test_change_rows_are_the_changes_that_a_site_gives(
    rows: list[tuple[bytes, bytes, bytes | None]], before_images: bool
) -> None:
    batch = ChangeBatch(
        through=VERSION,
        versions=[VERSION + number for number in range(len(rows))],
        partitions=[number % 4 for number in range(len(rows))],
        keys=[NAMESPACE + key for key, _, _ in rows],
        values=[value for _, value, _ in rows],
        befores=[before for _, _, before in rows] if before_images else None,
    )
    expected = Decoder(SITE_ID, lambda: {1: "users"}, lambda: NOW_MS).decode(batch)
    made = change_rows(batch, RowFormat(CHANGES, None, SITE_ID), NOW_MS)
    made.validate(full=True)
    assert made.schema.equals(arrow_schema(CHANGES))
    assert pyarrow.Table.from_batches([made]).to_pylist() == to_table(expected).to_pylist()


def test_expiry_is_a_delete_also_where_the_clock_is_a_little_behind() -> None:
    record = encode_value(b"1", expires_at=5, origin=Stamp(7, 2))
    versions = [compose(moment_ms, 0) for moment_ms in (4_000, 5_000)]
    batch = ChangeBatch(
        through=versions[-1],
        versions=versions,
        partitions=[1, 1],
        keys=[NAMESPACE + b"ada"] * 2,
        values=[record] * 2,
        befores=[None, record],
    )
    made = change_rows(batch, RowFormat(CHANGES, None, SITE_ID), 4_800).to_pylist()
    assert [(row["_change_type"], row["value"]) for row in made] == [("insert", b"1"), ("delete", b"1")]
    expected = Decoder(SITE_ID, lambda: {1: "users"}, lambda: 4_800).decode(batch)
    assert made == to_table(expected).to_pylist()


# JSON

PAIRS_OF_A_MAP = [("a", 9007199254740993), ("b", None)]


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        (BooleanType(), "true", True),
        (ShortType(), "-7", -7),
        (LongType(), "9007199254740993", 9007199254740993),
        (FloatType(), "1.5", 1.5),
        (DoubleType(), "1e3", 1000.0),
        (StringType(), '"a\\u00e9\\n"', "aé\n"),
        (DecimalType(10, 2), "1.25", Decimal("1.25")),
        (DecimalType(10, 2), '"1.25"', Decimal("1.25")),
        (DateType(), '"1815-12-10"', date(1815, 12, 10)),
        (TimestampType(), '"2026-01-01T02:00:00+02:00"', datetime(2026, 1, 1, tzinfo=UTC)),
        (ArrayType(IntegerType()), "[1, null]", [1, None]),
        (ArrayType(DateType()), '["1815-12-10"]', [date(1815, 12, 10)]),
        (struct(x=IntegerType(), born=DateType()), '{"x": 1, "more": 2}', {"x": 1, "born": None}),
        (StringType(), "null", None),
        (MapType(StringType(), LongType()), '{"a": 9007199254740993, "b": null}', PAIRS_OF_A_MAP),
        (MapType(StringType(), DecimalType(20, 10)), '{"a": 1.0000000001}', [("a", Decimal("1.0000000001"))]),
        (MapType(StringType(), DateType()), "{}", []),
        (MapType(StringType(), MapType(StringType(), DateType())), '{"a": null}', [("a", None)]),
        (ArrayType(MapType(StringType(), DoubleType())), '[{"a": 1.5}, null]', [[("a", 1.5)], None]),
        (struct(m=MapType(StringType(), ArrayType(DateType()))), '{"m": {"a": []}}', {"m": [("a", [])]}),
    ],
)
def test_fields_of_json_become_columns(kind: DataType, text: str, expected: object) -> None:
    schema = struct(key=StringType(), field=kind, other=IntegerType())
    check_schema(schema, AVAILABLE[LIVE], "json")
    value = f' {{"unknown": [{{}}], "field":\n {text} }}\n'.encode()
    assert objects(schema, value, b"{}") == [
        {"key": "key-0", "field": expected, "other": None},
        {"key": "key-1", "field": None, "other": None},
    ]


def test_fields_of_what_is_deleted_are_null() -> None:
    schema = struct(key=BinaryType(), n=IntegerType(), _change_type=StringType())
    batch = records((b"a", encode_value(b'{"n": 1}')), (b"b", encode_value(b"", deleted=True)))
    assert snapshot_rows(batch, RowFormat(schema, "json", SITE_ID)).to_pylist() == [
        {"key": b"a", "n": 1, "_change_type": "upsert"},
        {"key": b"b", "n": None, "_change_type": "delete"},
    ]


@pytest.mark.parametrize(
    "bad",
    [
        b"",
        b"  \n",
        b"null",
        b"1",
        b"[{}]",
        b'"text"',
        b"{",
        b'{"n": 1',
        b"{}{}",
        b"{} null {}",
        b"{} x}",
        b'{"s": "line\nbreak"}',
        b'{"s": "\xff"}',
        b"\x0b{}",
    ],
)
@pytest.mark.parametrize("place", [0, 3, 6])
@pytest.mark.parametrize("kind", [IntegerType(), MapType(StringType(), IntegerType())])
def test_value_that_is_not_one_object_is_named_by_its_key(kind: DataType, bad: bytes, place: int) -> None:
    values = [b'{"n": %d}' % number for number in range(7)]
    values[place] = bad
    with pytest.raises(SchemaMismatch, match=rf"key b'key-{place}' is not one JSON object"):
        objects(struct(n=IntegerType(), other=kind), *values)


def test_objects_that_make_up_for_each_other_are_not_confused() -> None:
    # Together these are as many objects as there are values, but not one in each.
    with pytest.raises(SchemaMismatch, match="key b'key-0' is not one JSON object"):
        objects(struct(n=IntegerType()), b'{"n": {}', b"}", b"{}{}{}")


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (IntegerType(), '"1"'),
        (IntegerType(), "1.5"),
        (IntegerType(), "3000000000"),
        (StringType(), "1"),
        (BooleanType(), "1"),
        (DateType(), '"yesterday"'),
        (TimestampType(), "5"),
        (DecimalType(4, 1), "1.25"),
        (ArrayType(IntegerType()), "{}"),
        (struct(x=IntegerType()), "[]"),
        (MapType(StringType(), IntegerType()), "[]"),
        (MapType(StringType(), IntegerType()), '{"a": "x"}'),
    ],
)
def test_field_that_does_not_fit_is_named_by_column_and_key(kind: DataType, text: str) -> None:
    values = [b'{"good": 1}', b'{"good": 2, "bad": %s}' % text.encode(), b'{"good": 3}']
    with pytest.raises(SchemaMismatch, match=r"key b'key-1' does not fit the column 'bad'") as caught:
        objects(struct(good=IntegerType(), bad=kind), *values)
    assert caught.value.details == {"column": "bad", "key": b"key-1"}


# Schemas


@pytest.mark.parametrize(
    ("columns", "value_format", "said"),
    [
        (struct(key=IntegerType()), None, "'key' is int; it must be binary or string"),
        (struct(value=LongType()), None, "'value' is bigint; it must be binary or string"),
        (struct(value=BinaryType()), "string", "'value' is binary; it must be string"),
        (struct(value=StringType()), "binary", "'value' is string; it must be binary"),
        (struct(_commit_version=StringType()), None, "'_commit_version' is string; it must be bigint"),
        (struct(age=IntegerType()), None, "no column 'age' here; .*valueFormat to \"json\""),
        (struct(_age=IntegerType()), "json", "no column '_age' here"),
        (struct(_change_type=StringType()), None, "no column '_change_type' here"),
        (struct(m=MapType(IntegerType(), StringType())), "json", "'m' is map<int,string>"),
        (struct(m=MapType(StringType(), BinaryType())), "json", r"'m\{\}' is binary"),
        (struct(a=ArrayType(BinaryType())), "json", r"'a\[\]' is binary"),
        (struct(s=struct(b=BinaryType())), "json", r"'s\.b' is binary"),
    ],
)
def test_schema_that_cannot_be_read_names_the_column(
    columns: StructType, value_format: str | None, said: str
) -> None:
    with pytest.raises(SchemaMismatch, match=said):
        check_schema(columns, AVAILABLE[LIVE], value_format)


def test_digests_have_no_fields() -> None:
    with pytest.raises(SchemaMismatch, match="rows of digests have no values"):
        check_schema(struct(key=BinaryType(), age=IntegerType()), AVAILABLE[HASHED], "json")


def test_json_needs_a_schema() -> None:
    with pytest.raises(SchemaMismatch, match=r"\.schema\("):
        default_schema(LIVE, metadata=False, value_format="json")


def test_values_as_text_are_in_the_schema() -> None:
    schema = default_schema(ALL, metadata=True, value_format="string")
    assert schema["value"].dataType == StringType()
    assert schema.names == RECORD_ROWS.names
