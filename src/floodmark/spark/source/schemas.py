"""The columns that Spark sees, and what of them a user's schema may change.

Arrow batches must match these exactly, in order, type and nullability: Spark looks at the first batch only,
and a later one that differs is read as garbage.
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

# Live records; with where they come from; with those that are deleted or expired; with hashes for values.
PAIRS: Final = StructType([KEY, StructField("value", BinaryType(), nullable=False)])
PAIRS_WITH_METADATA: Final = StructType([*PAIRS, *METADATA])
RECORDS: Final = StructType([KEY, VALUE, CHANGE_TYPE, *METADATA])
# What makes records of fields and counters whole, for those who copy them; only for those who ask for it.
STAMPS: Final = StructField("_stamps", BinaryType())
STATES: Final = StructType([*RECORDS, STAMPS])
# Whether a row is of the snapshot that changes begin with.
SNAPSHOT: Final = StructField("_snapshot", BooleanType(), nullable=False)
CHANGES: Final = StructType([*RECORDS, SNAPSHOT])
# What heartbeats sum up of a change, for those who check that they have them all.
CHANGE_DIGEST: Final = StructField("_digest", LongType())
COUNTED: Final = StructType([*CHANGES, CHANGE_DIGEST])
DIGESTS: Final = StructType([KEY, DIGEST, CHANGE_TYPE, *METADATA])

# The columns that can be asked for by the rows that are read.
LIVE: Final = "live"
ALL: Final = "all"
HASHED: Final = "digests"
AVAILABLE: Final = {LIVE: PAIRS_WITH_METADATA, ALL: RECORDS, HASHED: DIGESTS}
# The rows of a change feed.
CHANGED: Final = "changes"

# What a value is read as.
BINARY: Final = "binary"
STRING: Final = "string"
JSON: Final = "json"

_BYTES: Final = (BinaryType(), StringType())
# What a field of a JSON object can be, besides arrays, structs and maps of these.
_FIELDS: Final = (
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


def arrow_schema(schema: StructType) -> Any:
    """The Arrow schema of batches for Spark."""
    return to_arrow_schema(schema, timezone="UTC")


def is_counted(schema: StructType) -> bool:
    """Whether a job asks for changes to count them: only then are there heartbeats among the rows."""
    return CHANGE_DIGEST.name in schema.names


def record_columns(merge: str) -> StructType:
    """The columns in which records of a namespace with a merge policy are whole."""
    return RECORDS if merge == LAST_WRITE else STATES


def default_schema(rows: str, *, metadata: bool, value_format: str | None) -> StructType:
    """The columns of rows whose schema the user leaves to us."""
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
    """Refuse a user's schema that asks for columns or types that are not there.

    It may leave out columns and order them as it likes.  `key` and `value` may be text; in JSON every other
    name that does not begin with an underscore is a field of the value.
    """
    known = {field.name: field for field in available}
    if available in (RECORDS, CHANGES):
        known |= {STAMPS.name: STAMPS, CHANGE_DIGEST.name: CHANGE_DIGEST}
    for field in schema:
        if field.name == KEY.name:
            require_column(field, _BYTES)
        elif value_format == JSON and not field.name.startswith("_"):
            _require_field(field.name, field.dataType)
        elif field.name == VALUE.name and VALUE.name in known:
            require_column(field, _value_types(value_format))
        elif field.name in known:
            require_column(field, (known[field.name].dataType,))
        else:
            raise _unknown_column(field.name, list(known), value_format)
    if value_format == JSON and VALUE.name not in known:
        raise SchemaMismatch("rows of digests have no values; leave out the option valueFormat")


def require_column(field: StructField, types: tuple[DataType, ...]) -> None:
    """Refuse a column whose type is none of those that it may have."""
    if not any(field.dataType == allowed for allowed in types):
        names = " or ".join(allowed.simpleString() for allowed in types)
        raise SchemaMismatch(
            f"the column {field.name!r} is {field.dataType.simpleString()}; it must be {names}",
            column=field.name,
        )


def _value_types(value_format: str | None) -> tuple[DataType, ...]:
    if value_format is None:
        return _BYTES
    return (StringType(),) if value_format == STRING else (BinaryType(),)


def _require_field(path: str, kind: DataType) -> None:
    """Refuse what no part of a JSON object is read as."""
    if isinstance(kind, ArrayType):
        _require_field(f"{path}[]", kind.elementType)
    elif isinstance(kind, MapType) and isinstance(kind.keyType, StringType):
        _require_field(f"{path}{{}}", kind.valueType)
    elif isinstance(kind, StructType):
        for field in kind:
            _require_field(f"{path}.{field.name}", field.dataType)
    elif not isinstance(kind, _FIELDS):
        raise SchemaMismatch(
            f"the column {path!r} is {kind.simpleString()}, and nothing in JSON is read as that; use "
            "numbers, boolean, string, date, timestamp, and arrays, structs and maps (by string) of these",
            column=path,
        )


def _unknown_column(name: str, known: Sequence[str], value_format: str | None) -> SchemaMismatch:
    hint = "" if value_format is not None else '; for the fields of JSON values, set valueFormat to "json"'
    return SchemaMismatch(
        f"there is no column {name!r} here; there are: {', '.join(known)}{hint}", column=name
    )
