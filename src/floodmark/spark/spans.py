"""The spans of an object history as rows of a DataFrame, computed with Spark's own functions."""

from typing import Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

# As in layers/object_history.py: a key ends with the inverted start of a span, a value begins with its end.
_TIME_BYTES: Final = 8
_STILL: Final = "FF" * _TIME_BYTES
_OFFSET: Final = 1 << 63


def object_spans(rows: DataFrame) -> DataFrame:
    """The spans in the rows of an object history, as `name`, `valid_from`, `valid_to` and `state`.

    `rows` has `key` and `value` as bytes, as the format `floodmark` reads them.  A state holds from
    `valid_from` up to `valid_to`, exclusive; that is null while the state still holds.  `state` is text.
    Give it all rows of an object: Spark brings them together, to end each span where the next one begins.
    """
    key, value = F.col("key"), F.col("value")
    start, end = F.substring(key, -_TIME_BYTES, _TIME_BYTES), F.substring(value, 1, _TIME_BYTES)
    # The row that names the layer is shorter than the key of any span.
    name_bytes = F.length(key) - _TIME_BYTES - 1
    spans = rows.where(name_bytes > 0).select(
        F.substring(key, F.lit(1), name_bytes).cast("string").alias("name"),
        _moment(_decimal(F.lit(str(_OFFSET - 1))) - _number(start)).alias("valid_from"),
        F.when(F.hex(end) != _STILL, _moment(_number(end) - _decimal(F.lit(str(_OFFSET))))).alias("valid_to"),
        F.substring(value, F.lit(1 + _TIME_BYTES), F.length(value)).cast("string").alias("state"),
    )
    # Rows that two sites have written may overlap: a span ends where the next one begins.
    behind = F.lead("valid_from").over(Window.partitionBy("name").orderBy("valid_from"))
    return spans.withColumn("valid_to", F.least("valid_to", behind))


def _number(eight_bytes: Column) -> Column:
    return _decimal(F.conv(F.hex(eight_bytes), 16, 10))


def _decimal(column: Column) -> Column:
    return column.cast("decimal(20,0)")


def _moment(microseconds: Column) -> Column:
    return F.timestamp_micros(microseconds.cast("bigint"))
