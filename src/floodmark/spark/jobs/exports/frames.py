"""The rows of an export: Spark frames of changes, of a snapshot, of a merged view; and their Parquet files.

A task writes under a name that was never used before, and reports the file when it is on disk; the driver
publishes it.  A task that is killed or repeated leaves a file that no report names: it counts for nothing,
and the next step removes it.  The rows stream: a task holds one row group, however large the file is.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
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

from floodmark.accounting.counting import Counted
from floodmark.feed.sinks.parquet import SCHEMA
from floodmark.files.directory import Directory, directory_at
from floodmark.model.change import ChangeType
from floodmark.model.limits import MIB
from floodmark.model.version import Version, moment_of
from floodmark.site.address import SiteAddress
from floodmark.spark.jobs.common import changes_between, read_site
from floodmark.spark.source.options import HEARTBEATS
from floodmark.spark.source.rows import COUNTED as COUNTED_KIND
from floodmark.spark.source.rows import CountedRows, add_counted, pass_counted
from floodmark.spark.source.schemas import COUNTED

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


def read_changes(
    spark: SparkSession,
    source: SiteAddress,
    namespace: str,
    since: Version,
    through: Version,
    changes: int | None,
) -> DataFrame:
    """The changes in `(since, through]` with their heartbeats; `changes` is their estimated number."""
    tasks = TASKS_MAX if changes is None else min(TASKS_MAX, 1 + changes // TASK_CHANGES)
    options = changes_between(since, through) | {"minPartitions": str(tasks), HEARTBEATS: "true"}
    return read_site(spark, source, namespace, options, COUNTED)


def read_snapshot(
    spark: SparkSession, source: SiteAddress, namespace: str, at: Version, *, history: bool
) -> DataFrame:
    """The live records at a version; with `history`, as the changes that a history begins with."""
    options = {"versionAsOf": str(at), "metadata": "true"}
    if history:
        options = changes_between(at, at) | {"startingVersion": "snapshot"}
    return read_site(spark, source, namespace, options | {"minPartitions": str(TASKS_MAX)})


def newest_changes(changes: DataFrame) -> DataFrame:
    """The last change of each key, and the count under the empty key, which no change has."""
    rows = changes.mapInArrow(pass_counted, COUNTED)
    columns = [name for name in rows.columns if name != "key"]
    last = F.max_by(F.struct(*columns), "_commit_version").alias("change")
    counted = F.collect_list(F.when(F.col("_change_type") == COUNTED_KIND, F.col("value"))).alias("counted")
    return rows.groupBy("key").agg(last, counted).select("key", "change.*", "counted")


def take_counted(newest: DataFrame) -> tuple[DataFrame, Counted]:
    """The changes alone, and their count."""
    is_change = F.length("key") > 0
    parts = newest.where(~is_change).select("counted").collect()
    return newest.where(is_change), add_counted(part for row in parts for part in row.counted)


def read_view(spark: SparkSession, files: Sequence[Path]) -> DataFrame:
    """The rows of a current view."""
    return spark.read.parquet(*(file.as_uri() for file in files))


def touched_names(view: DataFrame, newest: DataFrame, at: Version) -> set[str]:
    """The names of a view's files in which a key has changed or a record has expired."""
    marks = newest.select("key", F.lit(True).alias("changed"))
    rows = view.select("key", "_expires_at", F.col("_metadata.file_name").alias("file"))
    stale = rows.join(marks, "key", "left").where(F.col("changed") | _is_expired(at))
    return {row.file for row in stale.select("file").distinct().collect()}


def merge_rows(view: DataFrame | None, newest: DataFrame, at: Version, files: int) -> DataFrame:
    """A view with changes merged into it, in about `files` files."""
    columns = CURRENT.names
    put = newest.where(F.col("_change_type") != ChangeType.DELETE.value).select(*columns)
    if view is not None:
        kept = view.select(*columns).join(newest.select("key"), "key", "left_anti")
        put = kept.unionByName(put)
    return put.where(~_is_expired(at)).coalesce(files)


def _is_expired(at: Version) -> Column:
    return F.coalesce(F.col("_expires_at") <= F.lit(moment_of(at)), F.lit(False))


# Files


class ExportFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file of rows, and the lowest and the highest version among them."""

    name: str
    rows: int
    bytes: int
    first: Version
    last: Version


def write_files(
    frame: DataFrame, directory: Directory, schema: pyarrow.Schema, prefix: str, *, counts: bool = False
) -> tuple[list[ExportFile], Counted]:
    """Write the rows of a frame into new files whose names begin with a prefix.

    With `counts`, the rows are changes with heartbeats, and the second result is what was counted for these.
    """
    writer = FileWriter(directory.location, schema, prefix, counts)
    reports = frame.mapInArrow(writer, from_arrow_schema(_REPORT)).collect()
    directory.sync(["."])
    names = ExportFile.__struct_fields__
    files = [ExportFile(**{name: report[name] for name in names}) for report in reports if report.name]
    return files, add_counted(report.counted for report in reports if report.counted is not None)


@dataclass(frozen=True)
class FileWriter:
    """Writes the rows of a task into one file after another, and gives a report row for each.

    With `counts`, the last row holds what was counted.
    """

    directory: str
    schema: pyarrow.Schema
    prefix: str
    counts: bool = False

    def __call__(self, batches: Iterable[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
        context = TaskContext.get()
        task = 0 if context is None else context.partitionId()
        counted = CountedRows(batches) if self.counts else None
        groups = _group(self._conform(batch) for batch in counted or batches if batch.num_rows)
        group = next(groups, None)
        while group is not None:
            name = f"{self.prefix}{task:05}-{uuid4().hex}.parquet"
            file, group = self._write(name, group, groups)
            yield pyarrow.RecordBatch.from_pylist([msgspec.structs.asdict(file)], schema=_REPORT)
        if counted is not None:
            yield pyarrow.RecordBatch.from_pylist([{"counted": counted.finish()}], schema=_REPORT)

    def _conform(self, batch: pyarrow.RecordBatch) -> pyarrow.RecordBatch:
        # Spark writes its own time zone and nullability into the batches.
        columns = [batch.column(field.name).cast(field.type) for field in self.schema]
        return pyarrow.RecordBatch.from_arrays(columns, schema=self.schema)

    def _write(
        self, name: str, group: pyarrow.Table | None, more: Iterator[pyarrow.Table]
    ) -> tuple[ExportFile, pyarrow.Table | None]:
        """Write a file until it is full; the file, and the group that did not go into it."""
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
