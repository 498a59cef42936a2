"""Streaming queries that tests run in several places: here, in other processes, and in one that is killed."""

import sys
from pathlib import Path

from pyspark.sql import SparkSession
from tests.waiting import HANG_SECONDS

from floodmark.spark.session import SparkOptions, open_session


def copy_changes(
    spark: SparkSession, source: str, target: str, checkpoint: Path, changes_max: int | None = None
) -> None:
    """Copy the changes that there are from one site to another."""
    reader = (
        spark.readStream.format("floodmark").option("namespace", "users").option("readChangeFeed", "true")
    )
    if changes_max is not None:
        reader = reader.option("maxChangesPerTrigger", changes_max)
    writer = reader.load(source).writeStream.format("floodmark").options(namespace="users", stamps="keep")
    writer = writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True)
    assert writer.start(target).awaitTermination(HANG_SECONDS)


def write_files(spark: SparkSession, url: str, files: Path, checkpoint: Path) -> None:
    """Write the rows of new files into a site, a file at a time."""
    reader = spark.readStream.format("parquet").schema("key binary, value binary")
    rows = reader.option("maxFilesPerTrigger", 1).load(str(files))
    writer = rows.writeStream.format("floodmark").option("namespace", "users")
    writer = writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True)
    assert writer.start(url).awaitTermination(HANG_SECONDS)


if __name__ == "__main__":
    with open_session(SparkOptions(master="local[2]")) as session:
        copy_changes(session, sys.argv[1], sys.argv[2], Path(sys.argv[3]), changes_max=300)
