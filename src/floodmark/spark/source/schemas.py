"""The columns that Spark sees, and the schemas that a user may ask for.

Arrow batches must match the schema exactly, in order, type and nullability: Spark checks only the first
batch, and reads a later one that differs as garbage.
"""

from collections.abc import Sequence
from typing import Any, Final

from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
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
    TimestampNTZType,
    TimestampType,
)

from floodmark.merge.policies import LAST_WRITE
from floodmark.model.errors import SchemaMismatch

KEY: Final = StructField("key", BinaryType(), nullable=False)
VALUE: Final = StructField("value", BinaryType())
DIGEST: Final = StructField("digest", LongType())
CHANGE_TYPE: Final = StructField("_change_type", StringType(), nullable=False)
METADATA: Final = (
    StructField("_commit_version", LongType(), nullable=False),
    StructField("_commit_timestamp", TimestampType(), nullable=False),
    StructField("_origin_site", IntegerType(), nullable=False),
    StructField("_origin_version", LongType(), nullable=False),
    StructField("_site_partition", LongType(), nullable=False),
    StructField("_expires_at", TimestampType()),
)

# Live records; with metadata; with deleted and expired records; with digests in the place of values.
PAIRS: Final = StructType([KEY, StructField("value", BinaryType(), nullable=False)])
PAIRS_WITH_METADATA: Final = StructType([*PAIRS, *METADATA])
RECORDS: Final = StructType([KEY, VALUE, CHANGE_TYPE, *METADATA])
# The stamps inside records of fields and counters, which a copy needs; only if a schema names the column.
STAMPS: Final = StructField("_stamps", BinaryType())
STATES: Final = StructType([*RECORDS, STAMPS])
# Whether a row belongs to the snapshot that a change feed begins with.
SNAPSHOT: Final = StructField("_snapshot", BooleanType(), nullable=False)
# The id of the atomic batch that wrote a row.
BATCH: Final = StructField("_batch", LongType())
CHANGES: Final = StructType([*RECORDS, SNAPSHOT, BATCH])
DIGESTS: Final = StructType([KEY, DIGEST, CHANGE_TYPE, *METADATA])

# The columns by the option `rows`.
LIVE: Final = "live"
ALL: Final = "all"
HASHED: Final = "digests"
AVAILABLE: Final = {LIVE: PAIRS_WITH_METADATA, ALL: RECORDS, HASHED: DIGESTS}
# The rows of a change feed.
CHANGED: Final = "changes"

# The option `valueFormat`.
STRING: Final = "string"
JSON: Final = "json"

BYTES: Final = (BinaryType(), StringType())
# The types of JSON fields, besides arrays, structs and maps of these.
_JSON_READ: Final = (
    BooleanType,
    ByteType,
    ShortType,
    IntegerType,
    LongType,
    FloatType,
    DoubleType,
    DecimalType,
    StringType,
    DateType,
    TimestampType,
)
_JSON_WRITTEN: Final = (*_JSON_READ, TimestampNTZType)


def arrow_schema(schema: StructType) -> Any:
    """The Arrow schema of batches for Spark."""
    return to_arrow_schema(schema, timezone="UTC")


def record_columns(merge: str) -> StructType:
    """The columns that hold everything of a record with this merge policy."""
    return RECORDS if merge == LAST_WRITE else STATES


def default_schema(rows: str, *, metadata: bool, value_format: str | None) -> StructType:
    """The columns of rows without a user's schema."""
    if value_format == JSON:
        raise SchemaMismatch(
            "values in JSON become columns only by a schema; name the fields with .schema(...), for example "
            '.schema("key string, name string, age int")'
        )
    columns = CHANGES if rows == CHANGED else AVAILABLE[rows]
    if rows == LIVE and not metadata:
        columns = PAIRS
    if value_format != STRING:
        return columns
    return StructType(
        [
            StructField(field.name, StringType(), field.nullable) if field.name == VALUE.name else field
            for field in columns
        ]
    )


def check_schema(schema: StructType, available: StructType, value_format: str | None) -> None:
    """Raise SchemaMismatch for a user's schema with unknown columns or types.

    The schema may leave out and reorder columns.  `key` and `value` may be text; in JSON every other name
    without a leading underscore is a field of the value.
    """
    known = {field.name: field for field in available}
    if available in (RECORDS, CHANGES):
        known |= {STAMPS.name: STAMPS}
    for field in schema:
        if field.name == KEY.name:
            require_column(field, BYTES)
        elif value_format == JSON and not field.name.startswith("_"):
            require_json(field.name, field.dataType, reading=True)
        elif field.name == VALUE.name and VALUE.name in known:
            require_column(field, _value_types(value_format))
        elif field.name in known:
            require_column(field, (known[field.name].dataType,))
        else:
            raise _unknown_column(field.name, list(known), value_format)
    if value_format == JSON and VALUE.name not in known:
        raise SchemaMismatch("rows of digests have no values; leave out the option valueFormat")


def require_column(field: StructField, types: tuple[DataType, ...]) -> None:
    """Raise SchemaMismatch for a column of another type."""
    if not any(field.dataType == allowed for allowed in types):
        names = " or ".join(allowed.simpleString() for allowed in types)
        raise SchemaMismatch(
            f"the column {field.name!r} is {field.dataType.simpleString()}; it must be {names}",
            column=field.name,
        )


def _value_types(value_format: str | None) -> tuple[DataType, ...]:
    if value_format is None:
        return BYTES
    return (StringType(),) if value_format == STRING else (BinaryType(),)


def require_json(path: str, kind: DataType, *, reading: bool) -> None:
    """Raise SchemaMismatch for a type that JSON is not read as, or not written from."""
    if isinstance(kind, ArrayType):
        require_json(f"{path}[]", kind.elementType, reading=reading)
    elif isinstance(kind, MapType) and isinstance(kind.keyType, StringType):
        require_json(f"{path}{{}}", kind.valueType, reading=reading)
    elif isinstance(kind, StructType):
        for field in kind:
            require_json(f"{path}.{field.name}", field.dataType, reading=reading)
    elif not isinstance(kind, _JSON_READ if reading else _JSON_WRITTEN):
        verb = "read as" if reading else "written from"
        raise SchemaMismatch(
            f"the column {path!r} is {kind.simpleString()}, and JSON is not {verb} that; use numbers, "
            "boolean, string, date, timestamp, and arrays, structs and maps (by string) of these",
            column=path,
        )


def _unknown_column(name: str, known: Sequence[str], value_format: str | None) -> SchemaMismatch:
    hint = "" if value_format is not None else '; for the fields of JSON values, set valueFormat to "json"'
    return SchemaMismatch(
        f"there is no column {name!r} here; there are: {', '.join(known)}{hint}", column=name
    )
