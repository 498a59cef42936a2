"""Versioned records, their commit path and change log, and how ranges of them split and merge."""

from floodmark.partition.commit.storage import Storage
from floodmark.partition.commit.tail import TailEntry
from floodmark.partition.families import FAMILIES, FILTERED_BYTES, IDENTITY, META, READ_FAMILIES
from floodmark.partition.following import Follower
from floodmark.partition.heat import HeatSample
from floodmark.partition.layout import load_metadata
from floodmark.partition.node import EngineBound, Node
from floodmark.partition.partition import LocalPartition
from floodmark.partition.read.changelog import LogLine, version_of
from floodmark.partition.retention.collect import Collected
from floodmark.partition.retention.retention import Retention

__all__ = [
    "FAMILIES",
    "FILTERED_BYTES",
    "IDENTITY",
    "META",
    "READ_FAMILIES",
    "Collected",
    "EngineBound",
    "Follower",
    "HeatSample",
    "LocalPartition",
    "LogLine",
    "Node",
    "Retention",
    "Storage",
    "TailEntry",
    "load_metadata",
    "version_of",
]
