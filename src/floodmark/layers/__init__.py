"""Layers on a site: large values, and objects with a history.

Each keeps its rows in a namespace of its own, and uses only public calls of the site.
"""

from floodmark.layers.large_values import LargeValues
from floodmark.layers.object_history import (
    HistoryView,
    ObjectHistory,
    StateChange,
    StateDifference,
    StateSpan,
)
from floodmark.layers.ordered_log import AppendCounts, LogPosition, OrderedLog

__all__ = [
    "HistoryView",
    "LargeValues",
    "LogPosition",
    "AppendCounts",
    "ObjectHistory",
    "OrderedLog",
    "StateChange",
    "StateDifference",
    "StateSpan",
]
