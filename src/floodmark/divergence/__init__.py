"""Leap Frog: whether sites that replicate to each other hold the same, told apart from lag; and repair."""

from floodmark.divergence.bounds import BoundedSide, heartbeat_bounds, high_watermark, verdict_bounded
from floodmark.divergence.histories import History, HistoryChange, walk_histories
from floodmark.divergence.rules import Evidence, Side, covers, verdict

__all__ = [
    "BoundedSide",
    "Evidence",
    "History",
    "HistoryChange",
    "Side",
    "covers",
    "heartbeat_bounds",
    "high_watermark",
    "verdict",
    "verdict_bounded",
    "walk_histories",
]
