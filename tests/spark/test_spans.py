"""Object histories in Spark: their spans are rows with the times of their users."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import floodmark
from floodmark.layers import ObjectHistory
from floodmark.layers.object_history import _from, _micros
from floodmark.spark import object_spans

EARLY = datetime(1961, 1, 31, 12, 0, 0, 123_456, tzinfo=UTC)
LATE = datetime(2061, 1, 31, tzinfo=UTC)
BEFORE = LATE - timedelta(hours=1)


@pytest.mark.slow
def test_spans_of_an_object_history_are_rows_that_a_join_by_time_finds(
    spark: SparkSession, tmp_path: Path
) -> None:
    with floodmark.open(tmp_path, site="oslo") as site:
        devices: ObjectHistory[dict[str, int]] = ObjectHistory(site, "devices")
        devices.set("é", {"port": 1}, at=EARLY)
        devices.set("é", {"port": 2}, at=LATE)
        devices.set("router", {"port": 3}, at=LATE)
        devices.end("router", at=LATE + timedelta(hours=1))
        # As another site writes it that has not heard of the last one: the rows overlap.
        router = devices.stored.get(b"router\x00" + _from(_micros(LATE)))
        assert router is not None
        site.namespace("devices").put(b"router\x00" + _from(_micros(BEFORE)), b"\xff" * 8 + router[8:])
        expected = {
            (name, span.valid_from, span.valid_to, span.state["port"])
            for name in ("é", "router")
            for span in devices.history(name)
        }
    spans = object_spans(spark.read.format("floodmark").option("namespace", "devices").load(str(tmp_path)))
    found = spans.selectExpr(
        "name", "unix_micros(valid_from)", "unix_micros(valid_to)", "int(get_json_object(state, '$.port'))"
    )
    assert {tuple(row) for row in found.collect()} == {
        (name, micros(start), end and micros(end), port) for name, start, end, port in expected
    }
    spans.createOrReplaceTempView("spans")
    moment = "timestamp '2000-01-01 00:00:00'"
    joined = (
        f"SELECT state FROM spans WHERE {moment} >= valid_from AND ({moment} < valid_to OR valid_to IS NULL)"
    )
    assert [row.state for row in spark.sql(joined).collect()] == ['{"port":1}']


def micros(moment: datetime) -> int:
    """Microseconds since 1970."""
    return (moment - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
