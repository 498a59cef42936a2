"""Load features from a Delta table into a site with Spark, and export each change to a Delta table once."""

from pathlib import Path
from tempfile import TemporaryDirectory

import deltalake
import pyarrow
from pyspark.sql import SparkSession

import floodmark
from floodmark.server import serve
from floodmark.spark import SiteAddress, open_session
from floodmark.spark.jobs import export


def make_features(table: Path) -> None:
    """Write the Delta table that a nightly job would make."""
    features = {"user": ["ada", "alan", "grace"], "clicks": [3, 1, 2], "premium": [True, False, True]}
    deltalake.write_deltalake(table, pyarrow.table(features))


def load_features(spark: SparkSession, table: Path, url: str) -> None:
    """Each row becomes a record: the user is its key, and the other columns are a JSON object."""
    # deltalake lists the files of the table and Spark reads them, so that Spark needs no jars for Delta.
    rows = spark.read.parquet(*deltalake.DeltaTable(table).file_uris())
    writer = rows.withColumnRenamed("user", "key").write.format("floodmark").mode("append")
    writer.option("namespace", "features").option("valueFormat", "json").save(url)


with (
    TemporaryDirectory() as directory,
    floodmark.open(Path(directory, "oslo"), site="oslo") as site,
    serve(site, "127.0.0.1:0") as server,  # Spark's workers reach a site by its URL
    open_session() as spark,  # a Spark on this machine, or the one that is active
):
    features = site.create_namespace("features")
    make_features(Path(directory, "features"))
    load_features(spark, Path(directory, "features"), server.url)
    print(features.get(b"ada"))

    features.put(b"ada", b'{"clicks":4,"premium":true}')  # what happens online
    table = Path(directory, "history")
    exported = [export(SiteAddress(location=server.url), "features", str(table), spark=spark)]
    features.delete(b"alan")
    for _ in range(2):  # the second run finds nothing that the table does not have
        exported.append(export(SiteAddress(location=server.url), "features", str(table), spark=spark))
    print("changes exported:", [each.rows for each in exported])

    for row in deltalake.DeltaTable(table).to_pyarrow_table().sort_by("_commit_version").to_pylist():
        print(row["_change_type"], row["key"], row["value"])
