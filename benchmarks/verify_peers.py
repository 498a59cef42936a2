"""The ways in which users of Spark compare two tables, each at its best on the snapshots of two sites.

    datacompy    `SparkSQLCompare`: joins on the key; counts rows only left, only right, or different
    exceptAll    the rows that only one table has, in both directions
    outer join   on the key, by hand: rows in which the hashes differ or one is missing

All of them compare keys and 64-bit hashes, the least input that they need: from a site by Floodmark's reader
(`rows=digests`: the server hashes, and sends no values), or from Parquet files by Spark's own reader, hashed
by Spark.  datacompy gets the hashes as text: it cannot compare bytes, and it subtracts numbers, which
overflows.  The ways that read a table more than once cache it in memory.
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

# Counts the keys in which two tables of keys and hashes differ.
Compare: TypeAlias = Callable[[DataFrame, DataFrame], int]
Table: TypeAlias = Callable[[], DataFrame]

_HASHES: Final = "key binary not null, digest bigint"


def read_hashes(spark: SparkSession, url: str, namespace: str) -> DataFrame:
    """The keys and hashes of the live records of a namespace."""
    reader = spark.read.format("floodmark").options(namespace=namespace, rows="digests", minPartitions=TASKS)
    return reader.schema(_HASHES).load(url).where("digest is not null")


def hash_values(records: DataFrame) -> DataFrame:
    """The keys and hashes of records that have their values."""
    return records.select("key", F.xxhash64("value").alias("digest"))


def installed_peers() -> Mapping[str, Compare]:
    """The installed ways; if datacompy is missing, prints how to install it."""
    ways: dict[str, Compare] = {EXCEPT_ALL: compare_by_except, OUTER_JOIN: compare_by_join}
    if find_spec("datacompy") is not None:
        ways[DATACOMPY] = compare_by_datacompy
    else:
        text = f"SKIPPED {DATACOMPY}: not installed. To compare with it: {INSTALL_CLIENTS}"
        print(text, file=sys.stderr, flush=True)
    return ways


def compare_by_join(left: DataFrame, right: DataFrame) -> int:
    """Count the keys whose hashes differ or that one table lacks, in one pass."""
    others = right.withColumnsRenamed({"key": "other_key", "digest": "other_digest"})
    joined = left.join(others, left["key"] == others["other_key"], "full_outer")
    return joined.where(~F.col("digest").eqNullSafe(F.col("other_digest"))).count()


def compare_by_except(left: DataFrame, right: DataFrame) -> int:
    """Count the keys of rows that only one table has; a key with two hashes counts once."""
    with _keeping(left, right):
        only = left.exceptAll(right).select("key").union(right.exceptAll(left).select("key"))
        return only.distinct().count()


def compare_by_datacompy(left: DataFrame, right: DataFrame) -> int:
    """Count as datacompy's report does: the rows that only one table has, and those that differ."""
    texts = [frame.select("key", F.col("digest").cast("string")) for frame in (left, right)]
    with _keeping(*texts):
        comparison = datacompy.SparkSQLCompare(left.sparkSession, *texts, join_columns="key")
        if comparison.matches():
            return 0
        [differing] = [each["unequal_cnt"] for each in comparison.column_stats if each["column"] == "digest"]
        return int(differing + comparison.df1_unq_rows.count() + comparison.df2_unq_rows.count())


@contextmanager
def _keeping(*frames: DataFrame) -> Iterator[None]:
    """Cache tables in memory; at the end, clear Spark's whole cache."""
    for frame in frames:
        frame.persist()
    try:
        yield
    finally:
        frames[0].sparkSession.catalog.clearCache()
