"""A streaming aggregation over a feed: visits by user and minute, kept up to date in the site itself."""

from pathlib import Path
from tempfile import TemporaryDirectory

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import floodmark
from floodmark.server import serve
from floodmark.spark import open_session

# The fields to read from the JSON values, and the type of each change.
VISITS = "user string, at timestamp, _change_type string"


def count_visits(spark: SparkSession, url: str, checkpoint: Path) -> None:
    """Process the changes since the last run, and store the counts that they changed."""
    changes = (
        spark.readStream.format("floodmark")
        .schema(VISITS)
        .option("namespace", "visits")
        .option("readChangeFeed", "true")
        .option("valueFormat", "json")
        .load(url)
    )
    counts = (
        changes.where("_change_type = 'upsert'")
        .withWatermark("at", "10 minutes")  # Spark drops its state of a minute 10 minutes later
        .groupBy("user", F.window("at", "1 minute").alias("minute"))
        .count()
    )

    def store(batch: DataFrame, _: int) -> None:
        # A batch may be repeated after a crash.  That does no harm: it holds whole counts, not additions.
        key = F.concat_ws(" ", F.date_format("minute.start", "HH:mm"), "user")
        rows = batch.select(key.alias("key"), F.col("count").cast("string").alias("value"))
        rows.write.format("floodmark").option("namespace", "counts").mode("append").save(url)

    query = (
        counts.writeStream.outputMode("update")
        .foreachBatch(store)
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)  # without this line, the query runs until it is stopped
        .start()
    )
    query.awaitTermination()


with (
    TemporaryDirectory() as directory,
    floodmark.open(Path(directory, "oslo"), site="oslo") as site,
    serve(site, "127.0.0.1:0") as server,  # Spark's workers reach a site by its URL
    open_session() as spark,  # a Spark on this machine, or the one that is active
):
    visits, counts = site.create_namespace("visits"), site.create_namespace("counts")
    days = [
        [("ada", "09:00:05"), ("alan", "09:00:20"), ("ada", "09:00:55"), ("ada", "09:01:10")],
        [("ada", "09:01:40"), ("grace", "09:02:00")],
    ]
    for number, day in enumerate(days):
        for user, at in day:
            visits.put(
                f"{number}/{user}/{at}".encode(), f'{{"user":"{user}","at":"2026-03-01T{at}Z"}}'.encode()
            )
        count_visits(spark, server.url, Path(directory, "checkpoint"))
        print({key.decode(): int(value) for key, value in counts.scan()})
