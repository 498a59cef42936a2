"""The rows of an export as Spark frames: changes, a snapshot, a view with changes merged into it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from floodmark.accounting.counting import Counted
from floodmark.model.change import ChangeType
from floodmark.model.limits import MIB
from floodmark.model.version import Version, moment_of
from floodmark.site.address import SiteAddress
from floodmark.spark.jobs.backups.parts import read_site
from floodmark.spark.jobs.exports.files import CURRENT
from floodmark.spark.source.options import HEARTBEATS
from floodmark.spark.source.schemas import COUNTED
from floodmark.spark.source.special import COUNTED as COUNTED_KIND
from floodmark.spark.source.special import add_counted, pass_counted

# The changes of one task, and the most tasks that read a site at once.
TASK_CHANGES: Final = 50_000
TASKS_MAX: Final = 8
# The approximate size of a file of a current view.
VIEW_FILE_BYTES: Final = 32 * MIB


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
    options = {
        "namespace": namespace,
        "readChangeFeed": "true",
        "startingVersion": str(since + 1),
        "endingVersion": str(through),
        "minPartitions": str(tasks),
        HEARTBEATS: "true",
    }
    return read_site(spark, source, options, COUNTED)


def read_snapshot(spark: SparkSession, source: SiteAddress, namespace: str, at: Version) -> DataFrame:
    """The live records at a version."""
    options = {
        "namespace": namespace,
        "versionAsOf": str(at),
        "metadata": "true",
        "minPartitions": str(TASKS_MAX),
    }
    return read_site(spark, source, options)


def read_snapshot_changes(spark: SparkSession, source: SiteAddress, namespace: str, at: Version) -> DataFrame:
    """The live records at a version, as the changes that a history begins with."""
    options = {
        "namespace": namespace,
        "readChangeFeed": "true",
        "startingVersion": "snapshot",
        "endingVersion": str(at),
        "minPartitions": str(TASKS_MAX),
    }
    return read_site(spark, source, options)


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
