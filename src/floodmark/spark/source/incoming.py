"""Encodes the rows of a DataFrame as stored records, whole columns at a time.

A row is a key and a value, or a deletion, and perhaps a moment at which it expires.  A row that names its
origin is a change of a Floodmark feed, and keeps the stamp that it was first written with: that is right only
for a copy, so a write must ask for it.  Before-images are left out.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import msgspec
import pyarrow
import pyarrow.compute as compute
from pyspark.sql.types import (
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructType,
    TimestampType,
)

from floodmark.codec.records import join_values, qualify_keys
from floodmark.codec.values import encode_value
from floodmark.columns.pairs import PAIRS
from floodmark.host.catalog import NamespaceRow
from floodmark.merge.policies import COUNTER, FIELDS, LAST_WRITE
from floodmark.model.change import ChangeType, Stamp
from floodmark.model.errors import (
    FloodmarkError,
    InvalidKey,
    InvalidTimeToLive,
    InvalidValue,
    SchemaMismatch,
    WrongPolicy,
)
from floodmark.model.limits import KEY_BYTES_MAX, SITE_IDS_MAX, VALUE_BYTES_MAX
from floodmark.model.version import VERSION_MAX
from floodmark.site.arguments import to_expiry
from floodmark.site.policies import FieldsPolicy
from floodmark.spark.source.schemas import BYTES, CHANGES, require_column, require_json

_BINARY: Final = pyarrow.binary()
_MICROSECONDS: Final = 1_000_000

_ORIGIN: Final = ("_origin_site", "_origin_version")
# The columns that rows may have besides keys and values, and their types.
_TYPES: Final[dict[str, tuple[DataType, ...]]] = {
    "_change_type": (StringType(),),
    "_expires_at": (TimestampType(),),
    "_origin_site": (IntegerType(), LongType()),
    "_origin_version": (LongType(),),
    "_stamps": (BinaryType(),),
}
# Columns of a feed that a record does not hold: where and when the change was committed there.
_IGNORED: Final = frozenset(name for name in CHANGES.names if name.startswith("_") and name not in _TYPES)

# Not an Arrow array: making one imports pandas, which the driver does not need.
_KINDS: Final = [kind.value for kind in ChangeType if kind is not ChangeType.GENERATION]

_encode_json: Final = msgspec.json.Encoder(decimal_format="number").encode


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The columns of the rows.  `fields` are those of a JSON value; None if values are plain."""

    names: frozenset[str]
    fields: tuple[str, ...] | None = None

    @property
    def has_origin(self) -> bool:
        """Whether the rows are changes of a Floodmark feed."""
        return _ORIGIN[0] in self.names

    @property
    def has_stamps(self) -> bool:
        """Whether the rows are whole records of fields or counters of another site."""
        return "_stamps" in self.names


def check_columns(schema: StructType, *, json: bool) -> Layout:
    """The layout of rows to write.  Raises SchemaMismatch, which names the column that does not fit."""
    names = schema.fieldNames()
    known = {"key", *_TYPES, *_IGNORED}
    if not json:
        known.add("value")
    fields = tuple(name for name in names if name != "key" and not name.startswith("_"))
    for name in ("key",) if json else ("key", "value"):
        if name not in names:
            raise _mismatch(f"there is no column {name!r}; the columns are: {', '.join(names)}", name)
    for number, field in enumerate(schema.fields):
        if field.name in names[:number]:
            raise _mismatch(f"there are two columns {field.name!r}; drop one of them", field.name)
        if field.name in ("key", "value") and field.name in known:
            require_column(field, BYTES)
        elif field.name in _TYPES:
            require_column(field, _TYPES[field.name])
        elif json and field.name in fields:
            require_json(field.name, field.dataType, reading=False)
        elif field.name not in known:
            raise _mismatch(
                f"the column {field.name!r} cannot be written; the columns are: {', '.join(sorted(known))}. "
                "Drop it, or write the columns without an underscore as fields of a JSON object with "
                'option("valueFormat", "json")',
                field.name,
            )
    if json and not fields:
        raise _mismatch("there is no column besides the key that could be a field of a JSON value", "value")
    if len(missing := [name for name in _ORIGIN if name not in names]) == 1:
        raise _mismatch(f"a change of a feed has both of {' and '.join(_ORIGIN)}", missing[0])
    if "_stamps" in names and (json or missing):
        raise _mismatch(
            "records with their stamps have the columns value, _origin_site and _origin_version as well",
            "_stamps",
        )
    return Layout(names=frozenset(names), fields=fields if json else None)


def check_stamps(layout: Layout, *, keep: bool) -> None:
    """Raise SchemaMismatch for rows with stamps that the write is not told to keep, and the reverse.

    A value that was read, changed and written back under its old stamp would lose silently to the record
    that it was read from.
    """
    if layout.has_origin and not keep:
        stamps = ", ".join(name for name in (*_ORIGIN, "_stamps") if name in layout.names)
        raise _mismatch(
            f"these rows carry the stamps of the records that they were read from ({stamps}), and a changed "
            "value with an old stamp would lose to the record that is there. Drop the columns "
            f"{stamps} to write the rows as new values; or, to copy records unchanged, add "
            '.option("stamps", "keep")',
            _ORIGIN[0],
        )
    if keep and not layout.has_origin:
        raise _mismatch(
            f'option("stamps", "keep") needs the columns {" and ".join(_ORIGIN)}, and the rows have none; '
            "leave the option out, or read the rows with metadata or from a change feed",
            _ORIGIN[0],
        )


def _mismatch(message: str, column: str) -> SchemaMismatch:
    return SchemaMismatch(message, column=column)


def check_policy(layout: Layout, namespace: NamespaceRow) -> None:
    """Raise WrongPolicy for rows that do not fit the merge policy of a namespace."""
    merge, problem = namespace.merge, ""
    if layout.has_stamps:
        if merge == LAST_WRITE:
            problem = "its records have no stamps inside: drop the column _stamps"
    elif merge == COUNTER:
        problem = (
            "Spark may write a row twice, and what is added twice counts twice: write the numbers to a "
            "namespace that merges by last_write"
        )
    elif merge == FIELDS and layout.has_origin:
        problem = (
            "a change of a feed is a whole record, and does not tell when each field was written: drop "
            f"{' and '.join(_ORIGIN)} to write its fields anew, or copy it with floodmark replicate"
        )
    if problem:
        raise WrongPolicy(
            f"these rows cannot be written into namespace {namespace.name!r}, which merges by {merge}: "
            f"{problem}",
            namespace=namespace.name,
        )


@dataclass(frozen=True)
class Encoder:
    """Encodes rows as stored records.  A time to live begins at `physical_ms`, the site's time.

    In a namespace of fields a row is an update: it writes its fields, deletes those that are null, and
    leaves other fields alone.
    """

    layout: Layout
    namespace: int
    ttl: timedelta | None
    physical_ms: Callable[[], int]
    merge: str = LAST_WRITE

    def encode(self, rows: pyarrow.RecordBatch) -> pyarrow.RecordBatch:
        """Qualified keys and stored values, in the order of the rows; a key may repeat."""
        layout = self.layout
        keys = _check_keys(_to_binary(rows["key"]))
        deleted: pyarrow.BooleanArray | None = None
        if "_change_type" in layout.names:
            kinds = rows["_change_type"].cast(pyarrow.string())
            _check_kinds(keys, kinds)
            kept = compute.not_equal(kinds, ChangeType.UPDATE_PREIMAGE.value)
            if kept.false_count:
                rows, keys, kinds = rows.filter(kept), keys.filter(kept), kinds.filter(kept)
            marked = compute.equal(kinds, ChangeType.DELETE.value)
            deleted = marked if marked.true_count else None
        updates = self.merge == FIELDS and not layout.has_stamps
        values = self._values(keys, rows, deleted, with_nulls=updates)
        expiries = self._expiries(keys, rows, deleted)
        if updates:
            stored = _to_updates(keys, values, deleted, expiries)
        elif layout.has_stamps:
            stored = _to_states(values, deleted, expiries, rows)
        else:
            stored = join_values(values, deleted=deleted, expires_at=expiries, **self._origins(keys, rows))
        return pyarrow.RecordBatch.from_arrays([qualify_keys(self.namespace, keys), stored], schema=PAIRS)

    def _values(
        self,
        keys: pyarrow.Array,
        rows: pyarrow.RecordBatch,
        deleted: pyarrow.Array | None,
        *,
        with_nulls: bool,
    ) -> pyarrow.BinaryArray:
        if self.layout.fields is not None:
            values = _to_json(rows.select(self.layout.fields), with_nulls=with_nulls)
        else:
            values = _to_binary(rows["value"])
        if deleted is not None:
            values = compute.if_else(deleted, pyarrow.scalar(b"", _BINARY), values)
        _refuse(
            InvalidValue,
            "value",
            keys,
            values.is_null(),
            lambda _: "is null; a row that deletes has _change_type delete",
        )
        # What sites have written to the fields of a record may be more together.
        if not self.layout.has_stamps:
            _check_sizes(InvalidValue, "value", keys, values, VALUE_BYTES_MAX, "Cut it into several keys")
        return values

    def _expiries(
        self, keys: pyarrow.Array, rows: pyarrow.RecordBatch, deleted: pyarrow.Array | None
    ) -> pyarrow.Int64Array | None:
        expiries = pyarrow.nulls(len(keys), pyarrow.int64())
        if "_expires_at" in self.layout.names:
            expiries = _to_seconds(keys, rows["_expires_at"])
        # A change of a feed expires when it does where it was written, or never.
        if self.ttl is not None and not self.layout.has_origin:
            expiries = expiries.fill_null(to_expiry(self.ttl, self.physical_ms()))
        if deleted is not None:
            expiries = compute.if_else(deleted, pyarrow.scalar(None, pyarrow.int64()), expiries)
        return expiries if expiries.null_count < len(expiries) else None

    def _origins(self, keys: pyarrow.Array, rows: pyarrow.RecordBatch) -> dict[str, pyarrow.Array]:
        if not self.layout.has_origin:
            return {}
        for name, highest in zip(_ORIGIN, (SITE_IDS_MAX, VERSION_MAX >> 1), strict=True):
            known = compute.and_(compute.greater(rows[name], 0), compute.less_equal(rows[name], highest))
            wrong = compute.invert(known.fill_null(False))
            _refuse(InvalidValue, name, keys, wrong, lambda _: "is not the origin of a change of a feed")
        return {"origin_site": rows[_ORIGIN[0]], "origin_version": rows[_ORIGIN[1]]}


def _to_binary(column: pyarrow.Array) -> pyarrow.BinaryArray:
    """A column of bytes or text as bytes."""
    if pyarrow.types.is_large_string(column.type):
        column = column.cast(pyarrow.large_binary())
    return column if column.type == _BINARY else column.cast(_BINARY)


def _to_json(rows: pyarrow.RecordBatch, *, with_nulls: bool) -> pyarrow.BinaryArray:
    """Each row as a JSON object, with or without its null fields; without, as Spark's to_json makes it."""
    objects = [
        {name: value for name, value in each.items() if with_nulls or value is not None}
        for each in rows.to_pylist(maps_as_pydicts="strict")
    ]
    return pyarrow.array(map(_encode_json, objects), _BINARY)


def _to_updates(
    keys: pyarrow.Array,
    values: pyarrow.BinaryArray,
    deleted: pyarrow.BooleanArray | None,
    expiries: pyarrow.Int64Array | None,
) -> pyarrow.BinaryArray:
    """Each row as an unstamped write of the fields of a JSON object, or of a deletion."""
    policy = FieldsPolicy("")
    return pyarrow.array(
        [
            policy.delete() if is_deleted else policy.update(key, value, expires_at)
            for key, value, is_deleted, expires_at in _rows_of(keys, values, deleted, expiries)
        ],
        _BINARY,
    )


def _to_states(
    values: pyarrow.BinaryArray,
    deleted: pyarrow.BooleanArray | None,
    expiries: pyarrow.Int64Array | None,
    rows: pyarrow.RecordBatch,
) -> pyarrow.BinaryArray:
    """Each row as the record that its own site holds."""
    site, version = (rows[name] for name in _ORIGIN)
    return pyarrow.array(
        [
            encode_value(value, expires_at, bool(is_deleted), origin=Stamp(*origin), stamps=stamps)
            for value, is_deleted, expires_at, stamps, *origin in _rows_of(
                values, deleted, expiries, rows["_stamps"], version, site
            )
        ],
        _BINARY,
    )


def _rows_of(first: pyarrow.Array, *others: pyarrow.Array | None) -> Iterator[tuple[Any, ...]]:
    """The rows of columns; one that is None holds only nulls."""
    columns = [[None] * len(first) if column is None else column.to_pylist() for column in (first, *others)]
    return zip(*columns, strict=True)


def _to_seconds(keys: pyarrow.Array, moments: pyarrow.Array) -> pyarrow.Int64Array:
    """Moments in unix seconds, rounded up, so that no record expires early."""
    microseconds = moments.cast(pyarrow.int64())
    numbers = microseconds.fill_null(0).to_numpy(zero_copy_only=False)
    _refuse(
        InvalidTimeToLive,
        "_expires_at",
        keys,
        pyarrow.array(numbers < 0),
        lambda _: "lies before the year 1970",
    )
    missing = microseconds.is_null().to_numpy(zero_copy_only=False)
    return pyarrow.array(-(-numbers // _MICROSECONDS), pyarrow.int64(), mask=missing)


def _check_keys(keys: pyarrow.BinaryArray) -> pyarrow.BinaryArray:
    if keys.null_count:
        raise InvalidKey("the column 'key' holds a null; every row needs a key", column="key")
    if compute.equal(compute.binary_length(keys), 0).true_count:
        raise InvalidKey("the column 'key' holds a key without bytes; every row needs a key", column="key")
    _check_sizes(InvalidKey, "key", keys, keys, KEY_BYTES_MAX, "Hash it, or keep the rest in the value")
    return keys


def _check_kinds(keys: pyarrow.Array, kinds: pyarrow.Array) -> None:
    known = compute.is_in(kinds, value_set=pyarrow.array(_KINDS, pyarrow.string()))
    _refuse(
        InvalidValue,
        "_change_type",
        keys,
        compute.invert(known),
        lambda row: f"is {kinds[row].as_py()!r:.60}; it is one of {', '.join(_KINDS)}",
    )


def _check_sizes(
    kind: type[FloodmarkError],
    column: str,
    keys: pyarrow.Array,
    data: pyarrow.BinaryArray,
    bytes_max: int,
    remedy: str,
) -> None:
    sizes = compute.binary_length(data)
    _refuse(
        kind,
        column,
        keys,
        compute.greater(sizes, bytes_max),
        lambda row: f"has {sizes[row].as_py():,} bytes; at most {bytes_max:,} are allowed. {remedy}",
    )


def _refuse(
    kind: type[FloodmarkError],
    column: str,
    keys: pyarrow.Array,
    wrong: pyarrow.BooleanArray,
    what: Callable[[int], str],
) -> None:
    """Raise an error for the first row that a mask marks, if it marks one."""
    if wrong.true_count:
        row = wrong.index(True).as_py()
        key = keys[row].as_py()
        raise kind(
            f"the column {column!r} of the row with the key {key[:40]!r} {what(row)}", column=column, key=key
        )
