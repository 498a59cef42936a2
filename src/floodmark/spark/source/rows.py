"""Converts batches of a site to Spark's rows, whole columns at a time.

Rows are looked at one by one only to name the row in an error.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Final

import numpy
import pyarrow
import pyarrow.compute as compute
from pyspark.sql.types import StructType

from floodmark.codec.ordered import NAMESPACE_BYTES
from floodmark.codec.records import StoredColumns, has_expiring_fields, split_values
from floodmark.codec.states import live_value
from floodmark.codec.values import TOMBSTONE, decode_value
from floodmark.feed.reading.columns import moment_before
from floodmark.feed.reading.items import judged_ms
from floodmark.model.change import ChangeType
from floodmark.model.errors import SchemaMismatch
from floodmark.model.limits import KEY_BYTES_MAX
from floodmark.model.stream import ChangeBatch
from floodmark.model.version import COUNTER_BITS, MOMENT_SECONDS_MAX, Version
from floodmark.spark.source.fields import find_first, read_fields
from floodmark.spark.source.schemas import (
    BATCH,
    JSON,
    SNAPSHOT,
    STAMPS,
    STATES,
    VALUE,
    arrow_schema,
)

_BINARY: Final = pyarrow.binary()
_LONG: Final = pyarrow.int64()
_MOMENT: Final = pyarrow.timestamp("us", "UTC")

# Arrow miscounts where no end is named.
_QUALIFIED_BYTES_MAX: Final = NAMESPACE_BYTES + KEY_BYTES_MAX

_OWN: Final = frozenset({*STATES.names, "digest", SNAPSHOT.name, BATCH.name})


@dataclass(frozen=True)
class RowFormat:
    """The columns of rows, the format of their values, and the site that they come from."""

    schema: StructType
    value_format: str | None
    site_id: int

    @cached_property
    def arrow(self) -> pyarrow.Schema:
        """The columns in Arrow's types."""
        return arrow_schema(self.schema)

    @cached_property
    def whole(self) -> bool:
        """Whether records keep their stored form, so that another site can take them."""
        return STAMPS.name in self.arrow.names

    @cached_property
    def fields(self) -> pyarrow.Schema:
        """The columns that are fields of JSON values."""
        if self.value_format != JSON:
            return pyarrow.schema([])
        own = _OWN - {VALUE.name, "digest"}
        return pyarrow.schema([field for field in self.arrow if field.name not in own])


@dataclass(frozen=True, kw_only=True)
class _Columns:
    """Rows before they get their final columns."""

    keys: pyarrow.BinaryArray
    values: pyarrow.BinaryArray
    # Made only if the schema has them.
    types: Callable[[], pyarrow.StringArray]
    versions: pyarrow.UInt64Array
    partitions: pyarrow.UInt32Array
    # The origin of each; null for this site and this version.
    origin_sites: pyarrow.Int32Array
    origin_versions: pyarrow.UInt64Array
    expiries: pyarrow.Int64Array
    # The id of the atomic batch; null for other writes.
    batches: pyarrow.UInt64Array
    digests: pyarrow.Int64Array | None = None
    # The stored values.
    records: pyarrow.BinaryArray | None = None
    # Whether they belong to the snapshot that a change feed begins with.
    snapshot: bool = False

    def take(self, rows: pyarrow.Array) -> "_Columns":
        """Some of the rows, by their numbers."""
        arrays = {name: each for name, each in vars(self).items() if isinstance(each, pyarrow.Array)}
        return replace(self, **{name: each.take(rows) for name, each in arrays.items()})


def _columns_of(
    keys: pyarrow.BinaryArray,
    versions: pyarrow.UInt64Array,
    partitions: pyarrow.UInt32Array,
    records: pyarrow.BinaryArray,
    stored: StoredColumns,
    dead: pyarrow.BooleanArray,
) -> _Columns:
    return _Columns(
        keys=keys,
        values=_where_alive(stored.values, dead),
        types=partial(_simple_types, dead),
        versions=versions,
        partitions=partitions,
        origin_sites=stored.origin_site,
        origin_versions=stored.origin_version,
        expiries=stored.expires_at,
        batches=compute.if_else(stored.batched, versions, None),
        records=records,
    )


def snapshot_rows(
    batch: pyarrow.RecordBatch, rows: RowFormat, at_ms: int | None = None
) -> pyarrow.RecordBatch:
    """Records of a scan as rows; with a moment, without the fields that have expired by then."""
    keys, versions, partitions, values, *digests = batch.columns
    stored = split_values(values, None if rows.whole else at_ms)
    columns = _columns_of(keys, versions, partitions, values, stored, stored.deleted)
    if digests:
        columns = replace(columns, digests=_where_alive(digests[0], stored.deleted))
    return _finish(columns, rows)


def change_rows(batch: ChangeBatch, rows: RowFormat, now_ms: int) -> pyarrow.RecordBatch:
    """Changes of one namespace as rows; with before-images an update is two of them.

    A put whose time to live is over at `now_ms`, the site's time, becomes a delete, so that a copy does not
    bring it back.
    """
    qualified, values = pyarrow.array(batch.keys, _BINARY), pyarrow.array(batch.values, _BINARY)
    stored, dead = _split_at(values, rows, now_ms, batch.versions)
    columns = _columns_of(
        compute.binary_slice(qualified, NAMESPACE_BYTES, _QUALIFIED_BYTES_MAX),
        pyarrow.array(batch.versions, pyarrow.uint64()),
        pyarrow.array(batch.partitions, pyarrow.uint32()),
        values,
        stored,
        dead,
    )
    if batch.is_snapshot:
        columns = _as_snapshot(columns, batch.at)
    if batch.befores is not None:
        columns = _with_before_images(columns, dead, _split_befores(batch))
    if batch.is_marker:
        columns = replace(
            columns,
            values=pyarrow.nulls(1, _BINARY),
            types=lambda: pyarrow.array([ChangeType.GENERATION.value]),
        )
    return _finish(columns, rows)


def _as_snapshot(columns: _Columns, at: Version) -> _Columns:
    """Rows of a snapshot: they have its version, and the stamps that they were written with."""
    return replace(
        columns,
        versions=pyarrow.array(numpy.full(len(columns.keys), at, numpy.uint64)),
        origin_versions=compute.coalesce(columns.origin_versions, columns.versions),
        snapshot=True,
    )


def snapshot_change_rows(
    batch: pyarrow.RecordBatch, rows: RowFormat, at: Version, now_ms: int, *, before_images: bool
) -> pyarrow.RecordBatch:
    """Records of a scan as of a version, as rows of the snapshot that changes begin with."""
    keys, versions, partitions, values = batch.columns
    stored, dead = _split_at(values, rows, now_ms)
    live = ChangeType.INSERT if before_images else ChangeType.UPSERT
    columns = replace(
        _as_snapshot(_columns_of(keys, versions, partitions, values, stored, dead), at),
        types=lambda: compute.if_else(dead, ChangeType.DELETE.value, live.value),
    )
    return _finish(columns, rows)


def _split_at(
    values: pyarrow.BinaryArray, rows: RowFormat, now_ms: int, versions: Sequence[Version] | None = None
) -> tuple[StoredColumns, pyarrow.BooleanArray]:
    """Stored values in their parts, and which of them are dead at a moment; whole records do not expire."""
    if rows.whole:
        stored = split_values(values, None)
        return stored, stored.deleted
    stored = split_values(values, now_ms)
    return stored, _dead(stored, now_ms, versions)


def _split_befores(batch: ChangeBatch) -> StoredColumns:
    """The record before each change, as a reader saw it just before the change."""
    befores = compute.fill_null(pyarrow.array(batch.befores, _BINARY), TOMBSTONE)
    columns = split_values(befores)
    if not has_expiring_fields(befores):
        return columns
    moments = list(map(moment_before, batch.versions, batch.values))
    values = [
        live_value(before, moment) or b"" for before, moment in zip(befores.to_pylist(), moments, strict=True)
    ]
    return columns._replace(values=pyarrow.array(values, _BINARY))


def _with_before_images(columns: _Columns, dead: pyarrow.BooleanArray, befores: StoredColumns) -> _Columns:
    """Rows in Delta's four kinds: a delete has the removed value, an update both the old and the new one.

    Images are taken from the old values followed by the new ones: `i` is the value before change i, and
    `count + i` the one that it wrote.
    """
    count = len(columns.keys)
    is_delete = dead.to_numpy(zero_copy_only=False)
    is_insert = ~is_delete & befores.deleted.to_numpy(zero_copy_only=False)
    is_update = ~is_delete & ~is_insert
    rows = numpy.repeat(numpy.arange(count), 1 + is_update)
    is_second = numpy.concatenate([[False], rows[1:] == rows[:-1]]) if count else numpy.zeros(0, bool)
    images = pyarrow.array(rows + count * (is_insert[rows] | is_second))
    kinds = numpy.select(
        [is_delete[rows], is_insert[rows], is_second],
        [ChangeType.DELETE, ChangeType.INSERT, ChangeType.UPDATE_POSTIMAGE],
        ChangeType.UPDATE_PREIMAGE,
    )
    earlier = _where_alive(befores.values, befores.deleted)
    return replace(
        columns.take(pyarrow.array(rows)),
        values=pyarrow.concat_arrays([earlier, columns.values]).take(images),
        types=lambda: pyarrow.array(kinds, pyarrow.string()),
        expiries=pyarrow.concat_arrays([befores.expires_at, columns.expiries]).take(images),
    )


def _finish(columns: _Columns, rows: RowFormat) -> pyarrow.RecordBatch:
    """The columns of the schema."""
    read = read_fields(columns.keys, columns.values, rows.fields) if rows.fields else {}
    arrays = [
        read[field.name] if field.name in read else _own_column(columns, field, rows) for field in rows.arrow
    ]
    for field, array in zip(rows.arrow, arrays, strict=True):
        if array.null_count and not field.nullable:
            raise _null(columns.keys, field, array)
    return pyarrow.RecordBatch.from_arrays(arrays, schema=rows.arrow)


def _own_column(columns: _Columns, field: pyarrow.Field, rows: RowFormat) -> pyarrow.Array:
    """A column that is not a field of a JSON value."""
    match field.name:
        case "key":
            return _as_text(columns.keys, columns.keys, field)
        case "value":
            return _as_text(columns.keys, columns.values, field)
        case "digest":
            return columns.digests
        case "_change_type":
            return columns.types()
        case "_commit_version":
            return columns.versions.cast(_LONG)
        case "_commit_timestamp":
            milliseconds = compute.shift_right(columns.versions.cast(_LONG), COUNTER_BITS)
            return compute.multiply(milliseconds, 1000).cast(_MOMENT)
        case "_origin_site":
            return compute.fill_null(columns.origin_sites, rows.site_id)
        case "_origin_version":
            return compute.coalesce(columns.origin_versions, columns.versions).cast(_LONG)
        case "_site_partition":
            return columns.partitions.cast(_LONG)
        case "_expires_at":
            seconds = compute.min_element_wise(columns.expiries, MOMENT_SECONDS_MAX, skip_nulls=False)
            return compute.multiply(seconds, 1_000_000).cast(_MOMENT)
        case "_stamps":
            stored = [] if columns.records is None else columns.records.to_pylist()
            return pyarrow.array([decode_value(record).stamps for record in stored], _BINARY)
        case "_snapshot":
            return pyarrow.array(numpy.full(len(columns.keys), columns.snapshot))
        case "_batch":
            return columns.batches.cast(_LONG)
    raise AssertionError(field.name)


def _dead(
    stored: StoredColumns, now_ms: int, versions: Sequence[Version] | None = None
) -> pyarrow.BooleanArray:
    """Which records are deleted or have expired, now or at the versions of their changes."""
    if stored.expires_at.null_count == len(stored.expires_at):
        return stored.deleted
    second: pyarrow.Array | int = now_ms // 1000
    if versions is not None:
        second = pyarrow.array([judged_ms(version, now_ms) // 1000 for version in versions], _LONG)
    expired = compute.fill_null(compute.less_equal(stored.expires_at, second), False)
    return compute.or_(stored.deleted, expired)


def _where_alive(array: pyarrow.Array, dead: pyarrow.BooleanArray) -> pyarrow.Array:
    return compute.if_else(dead, None, array) if dead.true_count else array


def _simple_types(dead: pyarrow.BooleanArray) -> pyarrow.StringArray:
    return compute.if_else(dead, ChangeType.DELETE.value, ChangeType.UPSERT.value)


def _as_text(keys: pyarrow.BinaryArray, array: pyarrow.BinaryArray, field: pyarrow.Field) -> pyarrow.Array:
    """Bytes as they are, or as text if the column is text."""
    try:
        return array.cast(field.type)
    except pyarrow.ArrowInvalid as error:
        row = find_first(len(array), lambda rows: array.slice(0, rows).cast(field.type))
        raise SchemaMismatch(
            f"the column {field.name!r} is asked for as a string, and for the key {keys[row].as_py()!r:.60} "
            "it is not UTF-8 text; read it as binary",
            column=field.name,
            key=keys[row].as_py(),
        ) from error


def _null(keys: pyarrow.BinaryArray, field: pyarrow.Field, array: pyarrow.Array) -> SchemaMismatch:
    key = keys[compute.index(array.is_null(), True).as_py()].as_py()
    return SchemaMismatch(
        f"the schema says that the column {field.name!r} is never null, and for the key {key!r:.60} it is; "
        "make the column nullable",
        column=field.name,
        key=key,
    )
