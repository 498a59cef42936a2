"""What users of Spark compare two tables with, each as it does best on the snapshots of two sites.

    datacompy    `SparkSQLCompare`: joins on the key, and counts what is only left, only right, or differs
    exceptAll    the rows of one that the other has not, both ways
    outer join   on the key, by hand: rows in which the hashes differ or one is missing

All of them get keys and 64-bit hashes, which is the least that they can be given: from a site by our reader
(`rows=digests`: the server hashes, and values do not travel), or from Parquet files by Spark's own reader,
with hashes made by Spark.  Hashes go to datacompy as text: it has no way to compare bytes, and subtracts
numbers, which overflows.  What reads a table more than once keeps it in memory from the first time on.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import Final, TypeAlias

from benchmarks.peers.base import INSTALL_CLIENTS
from benchmarks.spark_data import TASKS
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

with suppress(ImportError):
    import datacompy

DATACOMPY, EXCEPT_ALL, OUTER_JOIN = "datacompy", "exceptAll both ways", "outer join by hand"

# From two tables of keys and hashes to the number of rows in which they differ.
Compare: TypeAlias = Callable[[DataFrame, DataFrame], int]
Table: TypeAlias = Callable[[], DataFrame]

_HASHES: Final = "key binary not null, digest bigint"


def read_hashes(spark: SparkSession, url: str, namespace: str) -> DataFrame:
    """The keys and hashes of the live records of a namespace."""
    reader = spark.read.format("floodmark").options(namespace=namespace, rows="digests", minPartitions=TASKS)
    return reader.schema(_HASHES).load(url).where("digest is not null")


def hash_values(records: DataFrame) -> DataFrame:
    """The same of records that come with their values."""
    return records.select("key", F.xxhash64("value").alias("digest"))


def installed_peers() -> Mapping[str, Compare]:
    """The ways that are here; datacompy may be missing."""
    ways: dict[str, Compare] = {EXCEPT_ALL: compare_by_except, OUTER_JOIN: compare_by_join}
    if find_spec("datacompy") is not None:
        ways[DATACOMPY] = compare_by_datacompy
    else:
        text = f"SKIPPED {DATACOMPY}: not installed. To compare with it: {INSTALL_CLIENTS}"
        print(text, file=sys.stderr, flush=True)
    return ways


def compare_by_join(left: DataFrame, right: DataFrame) -> int:
    """Everything in one pass."""
    others = right.withColumnsRenamed({"key": "other_key", "digest": "other_digest"})
    joined = left.join(others, left["key"] == others["other_key"], "full_outer")
    return joined.where(~F.col("digest").eqNullSafe(F.col("other_digest"))).count()


def compare_by_except(left: DataFrame, right: DataFrame) -> int:
    """A key with another hash counts on both sides, and is one difference."""
    with _keeping(left, right):
        only = left.exceptAll(right).select("key").union(right.exceptAll(left).select("key"))
        return only.distinct().count()


def compare_by_datacompy(left: DataFrame, right: DataFrame) -> int:
    """What its report counts: rows that only one side has, and those that differ."""
    texts = [frame.select("key", F.col("digest").cast("string")) for frame in (left, right)]
    with _keeping(*texts):
        comparison = datacompy.SparkSQLCompare(left.sparkSession, *texts, join_columns="key")
        if comparison.matches():
            return 0
        [differing] = [each["unequal_cnt"] for each in comparison.column_stats if each["column"] == "digest"]
        return int(differing + comparison.df1_unq_rows.count() + comparison.df2_unq_rows.count())


@contextmanager
def _keeping(*frames: DataFrame) -> Iterator[None]:
    """Hold tables in memory, and let go of them at the end, with whatever else was kept meanwhile."""
    for frame in frames:
        frame.persist()
    try:
        yield
    finally:
        frames[0].sparkSession.catalog.clearCache()
