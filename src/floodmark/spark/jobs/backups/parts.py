"""The rows of a backup in Spark: from a site to files, from files to a site, and counted.

The rows of a part are counted and hashed in the pass that writes them, and again in each pass that reads
them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import msgspec
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, Observation, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from floodmark.files.directory import Directory, find_full_disk
from floodmark.links.returning import Portion
from floodmark.model.change import ChangeType
from floodmark.model.errors import FormatTooNew
from floodmark.model.ranges import KeyRange
from floodmark.model.version import Version, physical_ms
from floodmark.site.address import SiteAddress
from floodmark.spark.jobs.backups.manifest import ColumnType, Manifest, RowCounts, RowSums
from floodmark.spark.runtime.failures import raising_floodmark_errors
from floodmark.spark.source.schemas import RECORDS, record_columns
from floodmark.spark.source.writing import KEEP_STAMPS, PORTION

# Makes Spark verify the checksums of Parquet pages.
_CHECKED: Final = {"parquet.page.verify-checksum.enabled": "true"}

# The columns that a restore does not change.
CONTENT: Final = ("key", "value", "_change_type", "_origin_site", "_origin_version", "_expires_at", "_stamps")

_FORMAT: Final = "floodmark"


@contextmanager
def explaining(directory: Directory) -> Iterator[None]:
    """Raise errors of Spark as Floodmark's, also StorageFull for a directory."""
    try:
        with raising_floodmark_errors():
            yield
    except (PySparkException, Py4JJavaError) as error:
        full = find_full_disk(directory.location, str(error))
        if full is None:
            raise
        raise full from None


def read_site(
    spark: SparkSession,
    address: SiteAddress,
    options: Mapping[str, str],
    columns: StructType | None = None,
) -> DataFrame:
    """Rows of a site; without `columns`, with the default ones."""
    reader = spark.read.format(_FORMAT).options(**address.options(), **options)
    return (reader if columns is None else reader.schema(columns)).load(address.location)


def write_site(rows: DataFrame, address: SiteAddress, namespace: str, portion: Portion | None = None) -> None:
    """Apply rows, or a portion of each, by their stamps; at most one row for each key."""
    writer = rows.write.format(_FORMAT).mode("append").options(**address.options(), **KEEP_STAMPS)
    if portion is not None:
        writer = writer.option(PORTION, msgspec.json.encode(portion).decode())
    writer.options(namespace=namespace, distinctKeys="true").save(address.location)


def write_files(rows: DataFrame, directory: Directory, at: Version) -> RowSums:
    """Write rows to a new directory; their sums."""
    observed, sums = observe_rows(rows, at)
    observed.write.mode("error").option("compression", "zstd").parquet(directory.url)
    return sums()


def read_files(
    spark: SparkSession, part: Directory, names: Iterable[str], columns: StructType = RECORDS
) -> DataFrame:
    """The rows of some files of a part."""
    urls = [f"{part.url}/{name}" for name in names]
    return spark.read.schema(columns).options(**_CHECKED).parquet(*urls)


def read_parts(spark: SparkSession, target: Directory, parts: Iterable[Manifest]) -> DataFrame:
    """The rows of several parts of one backup."""
    urls = []
    columns = RECORDS
    for manifest in parts:
        columns = require_columns(manifest)
        part = target.directory(manifest.part)
        urls += [f"{part.url}/{file.name}" for file in manifest.files]
    return spark.read.schema(columns).options(**_CHECKED).parquet(*urls)


def columns_of(schema: StructType) -> list[ColumnType]:
    """The columns of rows, for a manifest."""
    return [ColumnType(field.name, field.dataType.simpleString()) for field in schema.fields]


def require_columns(manifest: Manifest) -> StructType:
    """The columns of a part's rows.  Raises FormatTooNew for unknown ones."""
    columns = record_columns(manifest.namespace.merge)
    if manifest.columns != columns_of(columns):
        named = ", ".join(f"{column.name} {column.type}" for column in manifest.columns)
        raise FormatTooNew(f"the rows of {manifest.part} have columns that are not known here: {named}")
    return columns


def newest_rows(rows: DataFrame) -> DataFrame:
    """The row of each key's newest commit, sorted by key within each of Spark's partitions."""
    others = [name for name in rows.columns if name != "key"]
    newest = F.max_by(F.struct(*others), F.col("_commit_version")).alias("newest")
    return rows.repartitionByRange("key").groupBy("key").agg(newest).select("key", "newest.*")


def in_range(keys: KeyRange) -> Column:
    """Whether the key of a row is in a range."""
    inside = F.col("key") >= F.lit(keys.start)
    return inside if keys.end is None else inside & (F.col("key") < F.lit(keys.end))


def content_columns(rows: DataFrame) -> list[str]:
    """The columns of rows that a restore does not change."""
    return [name for name in CONTENT if name in rows.columns]


def to_content(rows: DataFrame) -> DataFrame:
    """Rows for a restore.  Deleted ones have neither value nor expiry."""
    kept = {
        name: F.when(~_is_deleted(), F.col(name)).alias(name)
        if name in ("value", "_expires_at")
        else F.col(name)
        for name in content_columns(rows)
    }
    return rows.select(*kept.values())


def sum_columns(columns: Iterable[str], at: Version) -> list[Column]:
    """Expressions for `to_sums`, over rows as of a version."""
    expired = ~_is_deleted() & (F.unix_millis("_expires_at") <= F.lit(physical_ms(at)))
    return [
        F.count(F.lit(1)).alias("total"),
        F.count_if(_is_deleted()).alias("tombstones"),
        F.count_if(expired).alias("expired"),
        F.bit_xor(F.xxhash64(*columns)).alias("digest"),
    ]


def to_sums(found: Mapping[str, Any]) -> RowSums:
    """The sums from the values of `sum_columns`."""
    total, tombstones, expired = found["total"], found["tombstones"], found["expired"]
    live = total - tombstones - expired
    counts = RowCounts(live=live, tombstones=tombstones, expired=expired, total=total)
    # Without rows, Spark's XOR is null.
    return RowSums(counts=counts, digest=found["digest"] or 0)


def observe_rows(rows: DataFrame, at: Version) -> tuple[DataFrame, Callable[[], RowSums]]:
    """Rows that are counted as they pass, and a function for their sums afterwards."""
    observation = Observation()
    observed = rows.observe(observation, *sum_columns(rows.columns, at))
    return observed, lambda: to_sums(observation.get)


def sum_rows(rows: DataFrame, at: Version) -> RowSums:
    """The sums of rows, by reading them all."""
    return to_sums(rows.agg(*sum_columns(rows.columns, at)).collect()[0].asDict())


def _is_deleted() -> Column:
    return F.col("_change_type") == F.lit(ChangeType.DELETE.value)
