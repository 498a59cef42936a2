"""Leap Frog: detects drift between sites that replicate, distinguishes it from lag, and repairs it."""

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
