"""The rows of an export: Spark frames of changes, of a snapshot, of a merged view; and their Parquet files.

A task writes under a name that was never used before, and reports the file when it is on disk; the driver
publishes it.  A task that is killed or repeated leaves a file that no report names: it counts for nothing,
and the next step removes it.  The rows stream: a task holds one row group, however large the file is.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import msgspec
import pyarrow
import pyarrow.compute
import pyarrow.parquet
from pyspark import TaskContext
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema

from floodmark.accounting.counting import Counted, Counting
from floodmark.feed.sinks.parquet import SCHEMA
from floodmark.files.directory import Directory, directory_at
from floodmark.model.change import ChangeType
from floodmark.model.limits import MIB
from floodmark.model.stream import OnGeneration
from floodmark.model.version import Version
from floodmark.site.address import SiteAddress
from floodmark.spark.jobs.common import changes_between, read_site
from floodmark.spark.source.reading import ChangeInterval, open_changes_reader, read_batches
from floodmark.spark.source.rows import RowFormat, change_rows
from floodmark.spark.source.schemas import CHANGES, arrow_schema

# The changes of one task, and the most tasks that read a site at once.
TASK_CHANGES: Final = 50_000
TASKS_MAX: Final = 8
# The approximate size of a file of a current view.
VIEW_FILE_BYTES: Final = 32 * MIB

# One row for each change.
HISTORY: Final = SCHEMA
# One row for each live key, without change type and partition.
CURRENT: Final = pyarrow.schema(
    [
        pyarrow.field("key", pyarrow.binary(), nullable=False),
        pyarrow.field("value", pyarrow.binary(), nullable=False),
        *(
            SCHEMA.field(name)
            for name in ("_commit_version", "_commit_timestamp", "_origin_site", "_origin_version")
        ),
        SCHEMA.field("_expires_at"),
    ]
)

ROW_GROUP_BYTES_MAX: Final = 16 * MIB
FILE_BYTES_MAX: Final = 256 * MIB

_REPORT: Final = pyarrow.schema(
    [
        ("name", pyarrow.string()),
        *((name, pyarrow.int64()) for name in ("rows", "bytes", "first", "last")),
        ("counted", pyarrow.binary()),
    ]
)
# Changes, and the count of a task under the empty key.
_COUNTED: Final = pyarrow.schema(
    [
        *(field.with_nullable(True) for field in arrow_schema(CHANGES)),
        pyarrow.field("counted", pyarrow.binary()),
    ]
)

_encode: Final = msgspec.msgpack.Encoder().encode
_decode_counted: Final = msgspec.msgpack.Decoder(Counted).decode


class CountedChanges:
    """The changes of an interval as rows, counted as they are taken, for the check against heartbeats."""

    def __init__(self, address: SiteAddress, interval: ChangeInterval) -> None:
        self._address = address
        self._interval = interval
        self._counting = Counting(interval.since, site_id=interval.site_id, namespace=interval.namespace)

    def __iter__(self) -> Iterator[pyarrow.RecordBatch]:
        interval = self._interval
        form = RowFormat(CHANGES, None, interval.site_id)
        reaction = OnGeneration.DIFFERENCE
        for batch in read_batches(self._address, interval, heartbeats=True, on_generation=reaction):
            if batch.snapshot is not None:
                # Heartbeats sum up commits, not the rows of a swap.
                if batch.keys and not batch.is_marker:
                    yield change_rows(batch, form, interval.now_ms)
                continue
            self._counting.read(batch)
            rows = change_rows(batch, form, interval.now_ms) if batch.keys else None
            if rows is not None:
                yield rows
            taken = () if rows is None else rows.column("_commit_version").to_numpy()
            self._counting.deliver(taken, batch.through)
        self._counting.deliver((), interval.until)

    def finish(self) -> bytes:
        """The count of the rows that were taken, for `add_counted`."""
        return _encode(self._counting.report()[1])


@dataclass(frozen=True, kw_only=True)
class ChangesTask:
    """Reads, in Spark's tasks, the intervals whose numbers arrive as rows, and counts their changes.

    Yields rows of `_COUNTED`, or with `writer` its reports.  The last row of an interval holds the count.
    """

    address: SiteAddress
    intervals: Sequence[ChangeInterval]
    writer: "FileWriter | None" = None

    def __call__(self, batches: Iterable[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                changes = CountedChanges(self.address, self.intervals[number])
                if self.writer is not None:
                    yield from self.writer(changes)
                    yield pyarrow.RecordBatch.from_pylist([{"counted": changes.finish()}], schema=_REPORT)
                    continue
                for rows in changes:
                    columns = [*rows.columns, pyarrow.nulls(rows.num_rows, pyarrow.binary())]
                    yield pyarrow.RecordBatch.from_arrays(columns, schema=_COUNTED)
                yield pyarrow.RecordBatch.from_pylist(
                    [{"key": b"", "counted": changes.finish()}], schema=_COUNTED
                )

    def run(self, spark: SparkSession, schema: pyarrow.Schema) -> DataFrame:
        """The rows of the tasks, as a DataFrame."""
        count = len(self.intervals)
        return spark.range(0, count, 1, count).mapInArrow(self, from_arrow_schema(schema))


def read_changes(
    source: SiteAddress, namespace: str, since: Version, through: Version, changes: int | None
) -> ChangesTask:
    """The changes in `(since, through]`, planned; `changes` is their estimated number."""
    tasks = TASKS_MAX if changes is None else min(TASKS_MAX, 1 + changes // TASK_CHANGES)
    options = {**source.options(), **changes_between(since, through), "minPartitions": str(tasks)}
    options |= {"path": source.location, "namespace": namespace}
    intervals = open_changes_reader(options, CHANGES).partitions()
    return ChangesTask(
        address=source, intervals=[each for each in intervals if isinstance(each, ChangeInterval)]
    )


def read_snapshot(
    spark: SparkSession, source: SiteAddress, namespace: str, at: Version, *, history: bool
) -> DataFrame:
    """The live records at a version; with `history`, as the changes that a history begins with."""
    options = {"versionAsOf": str(at), "metadata": "true"}
    if history:
        options = changes_between(at, at) | {"startingVersion": "snapshot"}
    return read_site(spark, source, namespace, options | {"minPartitions": str(TASKS_MAX)})


def newest_changes(spark: SparkSession, changes: ChangesTask) -> DataFrame:
    """The last change of each key, and the counts under the empty key, which no change has."""
    rows = changes.run(spark, _COUNTED)
    others = [name for name in CHANGES.names if name != "key"]
    last = F.max_by(F.struct(*others), "_commit_version").alias("change")
    counted = F.collect_list("counted").alias("counted")
    return rows.groupBy("key").agg(last, counted).select("key", "change.*", "counted")


def take_counted(newest: DataFrame) -> tuple[DataFrame, Counted]:
    """The changes alone, and their count."""
    is_change = F.length("key") > 0
    parts = newest.where(~is_change).select("counted").collect()
    return newest.where(is_change), add_counted(part for row in parts for part in row.counted)


def add_counted(parts: Iterable[bytes]) -> Counted:
    """The sum of the counts of tasks."""
    return reduce(Counted.plus, map(_decode_counted, parts), Counted())


def read_view(spark: SparkSession, files: Sequence[Path]) -> DataFrame:
    """The rows of a current view."""
    return spark.read.parquet(*(file.as_uri() for file in files))


def touched_names(view: DataFrame, newest: DataFrame, at_ms: int) -> set[str]:
    """The names of a view's files in which a key has changed or a record has expired."""
    marks = newest.select("key", F.lit(True).alias("changed"))
    rows = view.select("key", "_expires_at", F.col("_metadata.file_name").alias("file"))
    stale = rows.join(marks, "key", "left").where(F.col("changed") | _is_expired(at_ms))
    return {row.file for row in stale.select("file").distinct().collect()}


def merge_rows(view: DataFrame | None, newest: DataFrame, at_ms: int, files: int) -> DataFrame:
    """A view with changes merged into it, as it looks at a moment, in about `files` files."""
    columns = CURRENT.names
    put = newest.where(F.col("_change_type") != ChangeType.DELETE.value).select(*columns)
    if view is not None:
        kept = view.select(*columns).join(newest.select("key"), "key", "left_anti")
        put = kept.unionByName(put)
    return put.where(~_is_expired(at_ms)).coalesce(files)


def _is_expired(at_ms: int) -> Column:
    return F.coalesce(F.col("_expires_at") <= F.timestamp_millis(F.lit(at_ms)), F.lit(False))


# Files


class ExportFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file of rows, and the lowest and the highest version among them."""

    name: str
    rows: int
    bytes: int
    first: Version
    last: Version


def write_files(
    frame: DataFrame, directory: Directory, schema: pyarrow.Schema, prefix: str
) -> list[ExportFile]:
    """Write the rows of a frame into new files whose names begin with a prefix."""
    writer = FileWriter(directory.location, schema, prefix)
    return _collect(frame.mapInArrow(writer, from_arrow_schema(_REPORT)), directory)[0]


def write_changes(
    spark: SparkSession, changes: ChangesTask, directory: Directory, schema: pyarrow.Schema, prefix: str
) -> tuple[list[ExportFile], Counted]:
    """Write changes into new files; returns the files, and the count of the changes."""
    writer = FileWriter(directory.location, schema, prefix)
    return _collect(replace(changes, writer=writer).run(spark, _REPORT), directory)


def _collect(reports: DataFrame, directory: Directory) -> tuple[list[ExportFile], Counted]:
    told = reports.collect()
    directory.sync(["."])
    names = ExportFile.__struct_fields__
    files = [ExportFile(**{name: report[name] for name in names}) for report in told if report.name]
    return files, add_counted(report.counted for report in told if report.counted is not None)


@dataclass(frozen=True)
class FileWriter:
    """Writes the rows of a task into one file after another, and gives a report row for each."""

    directory: str
    schema: pyarrow.Schema
    prefix: str

    def __call__(self, batches: Iterable[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
        context = TaskContext.get()
        task = 0 if context is None else context.partitionId()
        groups = _group(self._conform(batch) for batch in batches if batch.num_rows)
        group = next(groups, None)
        while group is not None:
            name = f"{self.prefix}{task:05}-{uuid4().hex}.parquet"
            file, group = self._write(name, group, groups)
            yield pyarrow.RecordBatch.from_pylist([msgspec.structs.asdict(file)], schema=_REPORT)

    def _conform(self, batch: pyarrow.RecordBatch) -> pyarrow.RecordBatch:
        # Spark writes its own time zone and nullability into the batches.
        columns = [batch.column(field.name).cast(field.type) for field in self.schema]
        return pyarrow.RecordBatch.from_arrays(columns, schema=self.schema)

    def _write(
        self, name: str, group: pyarrow.Table | None, more: Iterator[pyarrow.Table]
    ) -> tuple[ExportFile, pyarrow.Table | None]:
        """Write a file until it is full; returns it, and the next row group, which is not in it."""
        rows, bounds = 0, []
        with directory_at(self.directory).writing(name) as stream:
            with pyarrow.parquet.ParquetWriter(stream, self.schema, compression="zstd") as writer:
                while group is not None and stream.tell() < FILE_BYTES_MAX:
                    writer.write_table(group)
                    rows += group.num_rows
                    bounds.append(pyarrow.compute.min_max(group["_commit_version"]).as_py())
                    group = next(more, None)
            size = stream.tell()
        return ExportFile(
            name=name,
            rows=rows,
            bytes=size,
            first=min(bound["min"] for bound in bounds),
            last=max(bound["max"] for bound in bounds),
        ), group


def _group(batches: Iterable[pyarrow.RecordBatch]) -> Iterator[pyarrow.Table]:
    """Batches joined into row groups."""
    held: list[Any] = []
    size = 0
    for batch in batches:
        held.append(batch)
        size += batch.nbytes
        if size >= ROW_GROUP_BYTES_MAX:
            yield pyarrow.Table.from_batches(held)
            held, size = [], 0
    if held:
        yield pyarrow.Table.from_batches(held)
