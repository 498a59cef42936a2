"""Floodmark on Spark: the data source `floodmark`, sessions to use it in, and jobs."""

from floodmark.site.address import SiteAddress
from floodmark.spark.session import SparkOptions, open_session, register
from floodmark.spark.source.publishing import publish
from floodmark.spark.source.source import FloodmarkSource
from floodmark.spark.spans import object_spans

__all__ = [
    "FloodmarkSource",
    "SiteAddress",
    "SparkOptions",
    "object_spans",
    "open_session",
    "publish",
    "register",
]
