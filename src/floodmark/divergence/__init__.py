"""Leap Frog: whether sites that copy each other hold the same, told apart from lag; and repair if not."""

from floodmark.divergence.bounds import (
    BoundedSide,
    BoundedVector,
    heartbeat_bounds,
    high_watermark,
    verdict_bounded,
)
from floodmark.divergence.comparing import (
    ComparedTally,
    Comparison,
    Drift,
    DriftSide,
    Lag,
    Pair,
    Vantage,
    compare,
)
from floodmark.divergence.evidence import Evidence, evidence_of
from floodmark.divergence.histories import (
    Difference,
    DifferenceKind,
    History,
    HistoryChange,
    walk_histories,
)
from floodmark.divergence.looking import compare_keys, read_horizon, take_vantage
from floodmark.divergence.repairing import Choice, Copy, RepairSummary, choose_repair, repair
from floodmark.divergence.rules import Judgement, Side, Verdict, covers, judge, verdict

__all__ = [
    "BoundedSide",
    "BoundedVector",
    "Choice",
    "Comparison",
    "Copy",
    "Difference",
    "DifferenceKind",
    "Drift",
    "DriftSide",
    "Evidence",
    "History",
    "HistoryChange",
    "Judgement",
    "Lag",
    "Pair",
    "RepairSummary",
    "Side",
    "ComparedTally",
    "Vantage",
    "Verdict",
    "choose_repair",
    "compare",
    "compare_keys",
    "covers",
    "evidence_of",
    "heartbeat_bounds",
    "high_watermark",
    "judge",
    "read_horizon",
    "repair",
    "take_vantage",
    "verdict",
    "verdict_bounded",
    "walk_histories",
]
