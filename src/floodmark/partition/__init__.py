"""Versioned records, their commit path and change log, and how ranges of them split and merge."""

from floodmark.partition.changelog import LogLine, version_of
from floodmark.partition.collect import Collected
from floodmark.partition.families import FAMILIES, FILTERED_BYTES, IDENTITY, META, READ_FAMILIES
from floodmark.partition.following import Follower
from floodmark.partition.heat import HeatSample
from floodmark.partition.layout import load_metadata
from floodmark.partition.node import EngineBound, Node
from floodmark.partition.partition import LocalPartition
from floodmark.partition.retention import Retention
from floodmark.partition.routing import Router
from floodmark.partition.storage import Storage
from floodmark.partition.tail import TailEntry

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
    "Router",
    "Storage",
    "TailEntry",
    "load_metadata",
    "version_of",
]
