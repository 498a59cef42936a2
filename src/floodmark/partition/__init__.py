"""Versioned records, their commit path and change log, and how ranges of them split and merge."""

from floodmark.partition.changelog import LogEntry, look_up_values
from floodmark.partition.collect import Collected
from floodmark.partition.families import FAMILIES, META
from floodmark.partition.heat import HeatSample
from floodmark.partition.layout import read_metadata
from floodmark.partition.node import EngineBound, Node
from floodmark.partition.partition import LocalPartition

__all__ = [
    "FAMILIES",
    "META",
    "Collected",
    "EngineBound",
    "HeatSample",
    "LocalPartition",
    "LogEntry",
    "Node",
    "look_up_values",
    "read_metadata",
]
