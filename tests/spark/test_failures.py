"""Whatever Spark wraps it in, a Floodmark error comes out as the class and the message that went in."""

import traceback
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from tests.sizes import only
from tests.spark.failing import MESSAGE, FailingSource
from tests.spark.processes import SparkProcess

from floodmark.model.errors import Corruption, FloodmarkError, Unreachable
from floodmark.spark.runtime.failures import find_error, raising_floodmark_errors

ON_THE_DRIVER = ("schema", "partitions")
ON_A_WORKER = ("read",)
WRITING = ("writer", "write", "commit")
STREAMING = ("initialOffset", "stream read", "stream write")


def read(spark: SparkSession, where: str) -> None:
    spark.dataSource.register(FailingSource)
    spark.read.format("failing").option("where", where).load().collect()


def write(spark: SparkSession, where: str) -> None:
    spark.dataSource.register(FailingSource)
    spark.range(1).write.format("failing").mode("append").option("where", where).save()


def stream(spark: SparkSession, where: str, checkpoint: str) -> None:
    spark.dataSource.register(FailingSource)
    changes = spark.readStream.format("failing").option("where", where).load()
    sink = changes.writeStream.format("failing").option("where", where)
    query = sink.option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
    query.awaitTermination()


def catch_reading(spark: SparkSession, where: str) -> FloodmarkError | None:
    """For another process: what is found in what Spark raises there."""
    try:
        read(spark, where)
    except PySparkException as error:
        return find_error(error)
    return None


def catch_streaming(spark: SparkSession, where: str, checkpoint: str) -> FloodmarkError | None:
    try:
        stream(spark, where, checkpoint)
    except PySparkException as error:
        return find_error(error)
    return None


@pytest.mark.parametrize("where", ON_THE_DRIVER + ON_A_WORKER)
def test_error_of_a_read_is_raised_as_it_was(spark: SparkSession, where: str) -> None:
    with pytest.raises(Unreachable) as caught, raising_floodmark_errors():
        read(spark, where)
    assert str(caught.value) == MESSAGE


@pytest.mark.parametrize("where", WRITING)
def test_error_of_a_write_is_raised_as_it_was(spark: SparkSession, where: str) -> None:
    with pytest.raises(Unreachable) as caught, raising_floodmark_errors():
        write(spark, where)
    assert str(caught.value) == MESSAGE


@pytest.mark.parametrize("where", only(["stream read"], STREAMING))
def test_error_of_a_stream_is_raised_as_it_was(spark: SparkSession, tmp_path: Path, where: str) -> None:
    with pytest.raises(Unreachable) as caught, raising_floodmark_errors():
        stream(spark, where, str(tmp_path))
    assert str(caught.value) == MESSAGE


def test_error_of_a_function_for_each_batch_is_raised_as_it_was(spark: SparkSession, tmp_path: Path) -> None:
    def fail(batch: DataFrame, number: int) -> None:
        raise Corruption(f"batch {number} is not what it was: {batch.columns}")

    spark.dataSource.register(FailingSource)
    writer = spark.readStream.format("failing").load().writeStream.foreachBatch(fail)
    query = writer.option("checkpointLocation", str(tmp_path)).trigger(availableNow=True).start()
    with (
        pytest.raises(Corruption, match=r"^batch 0 is not what it was: \['id'\]$"),
        raising_floodmark_errors(),
    ):
        query.awaitTermination()


@pytest.mark.parametrize("where", ["schema", "read"])
@pytest.mark.soak
def test_error_is_found_through_spark_connect(connect: SparkProcess, where: str) -> None:
    found = connect.run(catch_reading, where)
    assert (type(found), str(found)) == (Unreachable, MESSAGE)


@pytest.mark.soak
def test_error_of_a_stream_is_found_through_spark_connect(connect: SparkProcess, tmp_path: Path) -> None:
    found = connect.run(catch_streaming, "stream read", str(tmp_path))
    assert (type(found), str(found)) == (Unreachable, MESSAGE)


@pytest.mark.soak
def test_error_is_found_after_a_cluster_has_tried_again(local_cluster: SparkProcess) -> None:
    found = local_cluster.run(catch_reading, "read")
    assert (type(found), str(found)) == (Unreachable, MESSAGE)


def test_error_is_shown_without_what_spark_wraps_it_in(spark: SparkSession) -> None:
    with pytest.raises(Unreachable) as caught, raising_floodmark_errors():
        read(spark, "partitions")
    shown = "".join(traceback.format_exception(caught.value))
    assert "PYTHON_DATA_SOURCE_ERROR" not in shown
    assert "Py4J" not in shown


def test_errors_that_are_not_ours_pass(spark: SparkSession) -> None:
    with pytest.raises(PySparkException, match="UNRESOLVED_COLUMN"), raising_floodmark_errors():
        spark.range(1).select("nothing").collect()


def test_our_own_errors_pass_with_their_details() -> None:
    with pytest.raises(Unreachable) as caught, raising_floodmark_errors():
        raise Unreachable("no answer", url="grpc://127.0.0.1:1")
    assert caught.value.details == {"url": "grpc://127.0.0.1:1"}


def test_cause_is_found_and_mere_context_is_not() -> None:
    ours = Unreachable("no answer")
    caused = RuntimeError("a job failed")
    caused.__cause__ = ours
    beside = RuntimeError("something else failed")
    beside.__context__ = ours
    assert find_error(caused) is ours
    assert find_error(beside) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("floodmark.model.errors.Corruption: one line", "one line"),
        ("floodmark.model.errors.Corruption: one: two\n SQLSTATE: 38000", "one: two"),
        (
            "floodmark.model.errors.Corruption: one\n\n\ttwo\n\tat org.apache.spark.X(X.scala:1)",
            "one\n\n\ttwo",
        ),
        ("floodmark.model.errors.Corruption: one\n\nDriver stacktrace:\nelse", "one"),
        ("floodmark.model.errors.Corruption", ""),
        (
            "floodmark.model.errors.Corruption: first\n\nDuring handling of the above exception, another "
            "exception occurred:\n\nTraceback (most recent call last):\nRuntimeError: last",
            "first",
        ),
        (
            "floodmark.model.errors.Closed: first\n\nThe above exception was the direct cause of the "
            "following exception:\n\nTraceback (most recent call last):\n"
            "floodmark.model.errors.Corruption: last\n SQLSTATE: 38000 SQLSTATE: XXKST\n=== Streaming Query",
            "last",
        ),
    ],
)
def test_message_ends_where_spark_goes_on(text: str, message: str) -> None:
    found = find_error(RuntimeError(f"Job aborted: Traceback (most recent call last):\n  File\n{text}"))
    assert (type(found), str(found)) == (Corruption, message)


@pytest.mark.parametrize(
    "text",
    [
        "the text floodmark.model.errors.Corruption: in the middle",
        "floodmark.model.errors.NoSuchError: unknown",
        "floodmark.model.errors.Mapping: not an error",
        "someone.model.errors.Corruption: of another library",
    ],
)
def test_what_only_looks_like_an_error_is_none(text: str) -> None:
    assert find_error(RuntimeError(f"Traceback (most recent call last):\n{text}")) is None
