"""The format `floodmark` without registration: Spark imports `DefaultSource` of modules named `pyspark_*`."""

from floodmark.spark.source.source import FloodmarkSource as DefaultSource

__all__ = ["DefaultSource"]
