"""Versioned records, their commit path and change log, and how ranges of them split and merge."""

from floodmark.partition.changelog import LogEntry, look_up_value, require_untrimmed
from floodmark.partition.collect import Collected
from floodmark.partition.families import FAMILIES, FILTERED_BYTES, META
from floodmark.partition.heat import HeatSample
from floodmark.partition.layout import load_metadata
from floodmark.partition.node import EngineBound, Node
from floodmark.partition.partition import LocalPartition
from floodmark.partition.records import decode_change
from floodmark.partition.retention import Retention
from floodmark.partition.storage import Storage

__all__ = [
    "FAMILIES",
    "FILTERED_BYTES",
    "META",
    "Collected",
    "EngineBound",
    "HeatSample",
    "LocalPartition",
    "LogEntry",
    "Node",
    "Retention",
    "Storage",
    "decode_change",
    "load_metadata",
    "look_up_value",
    "require_untrimmed",
]
