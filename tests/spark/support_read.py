"""Reading as Spark does it, in this process: most of what a reader does shows without Java."""

import pickle
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow
from pyspark.sql.datasource import CaseInsensitiveDict, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from floodmark.spark.source.schemas import arrow_schema
from floodmark.spark.source.source import FloodmarkSource

Rows = list[dict[str, Any]]


def given(location: object, options: Mapping[str, object]) -> dict[str, str]:
    """Options as Spark hands them on: all of them text."""
    texts = {name: str(option) for name, option in options.items()}
    return {"path": str(location), "namespace": "users"} | texts


def open_source(location: object, **options: object) -> FloodmarkSource:
    return FloodmarkSource(CaseInsensitiveDict(given(location, options)))


def open_reader(location: object, schema: StructType | None = None, **options: object) -> DataSourceReader:
    source = open_source(location, **options)
    return source.reader(source.schema() if schema is None else schema)


def plan(location: object, schema: StructType | None = None, **options: object) -> list[InputPartition]:
    """The parts that a job would have."""
    return list(open_reader(location, schema, **options).partitions())


def read_parts(reader: DataSourceReader, schema: StructType) -> list[pyarrow.Table]:
    """What each part holds.  The reader is pickled before it plans, and read in another place."""
    shipped = pickle.dumps(reader)
    parts = [pickle.dumps(part) for part in reader.partitions()]
    columns = arrow_schema(schema)
    return [
        pyarrow.Table.from_batches(pickle.loads(shipped).read(pickle.loads(part)), columns) for part in parts
    ]


def read_part(reader: DataSourceReader, part: InputPartition) -> Rows:
    """The rows of one part."""
    batches: Iterator[pyarrow.RecordBatch] = reader.read(part)
    return [row for batch in batches for row in batch.to_pylist()]


def read_table(location: object, schema: StructType | None = None, **options: object) -> pyarrow.Table:
    source = open_source(location, **options)
    columns = source.schema() if schema is None else schema
    return pyarrow.concat_tables(read_parts(source.reader(columns), columns))


def read_rows(location: object, schema: StructType | None = None, **options: object) -> Rows:
    """All rows."""
    rows: Rows = read_table(location, schema, **options).to_pylist()
    return rows


def read_pairs(location: object, **options: object) -> dict[bytes, bytes]:
    """A snapshot's values by their keys, each of which comes once."""
    rows = read_rows(location, None, **options)
    pairs = {row["key"]: row["value"] for row in rows}
    assert len(pairs) == len(rows)
    return pairs
