"""The words of Floodmark as types: versions, stamps, changes, records, ranges, errors and limits.

Nothing in this package reads a clock, a file or a network.
"""

from floodmark.model.change import Change, ChangeType, Heartbeat, Resolved, Stamp, Sums, Tally
from floodmark.model.ranges import KeyRange
from floodmark.model.record import Record, Versioned
from floodmark.model.version import Version

__all__ = [
    "Change",
    "ChangeType",
    "Heartbeat",
    "KeyRange",
    "Record",
    "Resolved",
    "Stamp",
    "Sums",
    "Tally",
    "Version",
    "Versioned",
]
