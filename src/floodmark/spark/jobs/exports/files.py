"""Rows into Parquet files, written by Spark's tasks under names of their own and published by the driver.

A task writes under a name that was never used before, and reports the file when it is on disk.  A task that
is killed or repeated leaves a file that no report names: it counts for nothing, and the next step removes it.
The rows stream: a task holds one row group, however large the file is.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final
from uuid import uuid4

import msgspec
import pyarrow
import pyarrow.compute
import pyarrow.parquet
from pyspark import TaskContext
from pyspark.sql import DataFrame
from pyspark.sql.pandas.types import from_arrow_schema

from floodmark.accounting.counting import Counted
from floodmark.feed.sinks.parquet import SCHEMA
from floodmark.files.directory import Directory, directory_at
from floodmark.model.limits import MIB
from floodmark.model.version import Version
from floodmark.spark.source.special import CountedRows, add_counted

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
    return _write(frame, FileWriter(directory.location, schema, prefix))[0]


def write_changes(
    changes: DataFrame, directory: Directory, schema: pyarrow.Schema, prefix: str
) -> tuple[list[ExportFile], Counted]:
    """Write changes with heartbeats between them; the files, and what was counted for the heartbeats."""
    return _write(changes, FileWriter(directory.location, schema, prefix, counts=True))


def _write(frame: DataFrame, writer: "FileWriter") -> tuple[list[ExportFile], Counted]:
    reports = frame.mapInArrow(writer, from_arrow_schema(_REPORT)).collect()
    directory_at(writer.directory).sync(["."])
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
