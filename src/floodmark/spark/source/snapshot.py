"""A namespace as it was at one version, as a DataFrame.

The driver fixes the version once, and every task reads at it, so all rows are of one moment, while writes
and splits go on.  Spark keeps the plan as long as the DataFrame lives, so a DataFrame that is used twice
gives the same rows twice.

No filters are pushed down.  Spark 4.3 keeps one plan of a Python source per DataFrame, with the filters that
were pushed last, and uses it for queries with other filters or none as well: they would get the rows of
another query.  `startKey`, `endKey` and `prefix` are safe.
"""

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial

import pyarrow
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from floodmark.codec.ordered import encode_namespace
from floodmark.feed import at_present
from floodmark.host.catalog import NamespaceRow
from floodmark.model.partition import Content
from floodmark.model.ranges import KeyRange
from floodmark.model.version import Version, physical_ms
from floodmark.site.address import SiteAddress
from floodmark.site.arguments import qualify_range
from floodmark.spark.runtime.patience import ask_patiently
from floodmark.spark.source.options import SNAPSHOT, Options
from floodmark.spark.source.planning import plan_ranges
from floodmark.spark.source.reading import SiteReader, open_reader, protect, require_kept
from floodmark.spark.source.rows import RowFormat, snapshot_rows
from floodmark.spark.source.schemas import AVAILABLE, HASHED, LIVE, check_schema, default_schema


@dataclass(frozen=True, kw_only=True)
class SnapshotOptions:
    """The options of a snapshot.  Without a version, it is the present."""

    address: SiteAddress
    namespace: str
    keys: KeyRange
    at: Version | None
    rows: str
    metadata: bool
    value_format: str | None
    partitions_min: int | None


@dataclass(frozen=True)
class RecordRange(InputPartition):
    """The records of a range of qualified keys at a version."""

    keys: KeyRange
    version: Version
    site_id: int


class SnapshotReader(DataSourceReader):
    """Plans the reading of a snapshot on the driver, and reads its parts in the tasks."""

    def __init__(self, options: SnapshotOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema

    def partitions(self) -> list[InputPartition]:
        options = self._options
        with closing(open_reader(options.address)) as reader:
            namespace = reader.find_namespace(options.namespace)
            version = fix_version(reader, namespace, options.at)
            ranges = plan_ranges(
                reader.partition_ranges(),
                qualify_range(encode_namespace(namespace.id), options.keys),
                options.partitions_min,
                lambda keys: reader.sample_keys(keys, version),
            )
            return [RecordRange(keys, version, reader.site_id) for keys in ranges]

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        assert isinstance(partition, RecordRange)
        options = self._options
        rows = RowFormat(self._schema, options.value_format, partition.site_id)
        with closing(ask_patiently(partial(open_reader, options.address))) as reader:
            batches = reader.scan_records(
                partition.keys,
                partition.version,
                dead=options.rows != LIVE,
                content=Content.DIGESTS if options.rows == HASHED else Content.WHOLE,
            )
            for batch in batches:
                if batch.num_rows:
                    yield snapshot_rows(batch, rows, physical_ms(partition.version))


def read_snapshot_options(given: Mapping[str, str]) -> SnapshotOptions:
    """Read the options of a snapshot."""
    options = Options(given, SNAPSHOT)
    options.exclusive("versionAsOf", "timestampAsOf")
    rows = options.choice("rows", AVAILABLE)
    return SnapshotOptions(
        address=options.address(),
        namespace=options.namespace(),
        keys=options.keys(),
        at=options.version("versionAsOf") or options.moment("timestampAsOf"),
        rows=rows,
        metadata=options.flag("metadata"),
        value_format=options.value_format(),
        partitions_min=options.number("minPartitions"),
    )


def snapshot_schema(given: Mapping[str, str]) -> StructType:
    """The columns of a snapshot without a user's schema."""
    options = read_snapshot_options(given)
    return default_schema(options.rows, metadata=options.metadata, value_format=options.value_format)


def open_snapshot_reader(given: Mapping[str, str], schema: StructType) -> DataSourceReader:
    """A reader of a snapshot.  Raises InvalidOption or SchemaMismatch."""
    options = read_snapshot_options(given)
    check_schema(schema, AVAILABLE[options.rows], options.value_format)
    return SnapshotReader(options, schema)


def fix_version(reader: SiteReader, namespace: NamespaceRow, at: Version | None) -> Version:
    """The version of a snapshot, held while a job runs."""

    def protected(version: Version) -> Version:
        protect(reader, version, namespace)
        return version

    if at is None:
        return at_present(reader.read_version, protected)
    reader.require_past(at)
    require_kept(at, reader.oldest_version(namespace), namespace)
    return protected(at)
