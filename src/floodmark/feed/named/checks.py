"""The checks of named feeds against heartbeats.

The ranges of a feed are not equally far, and each counts its deliveries.  A heartbeat can be checked when all
ranges have passed it; until then it is stored with the counts, in the row of the checkpoints.
"""

from collections.abc import Sequence

from msgspec.structs import replace

from floodmark.accounting.account import Doubt
from floodmark.accounting.checks import Checks
from floodmark.accounting.counting import Counted, Entry
from floodmark.feed.named.feeds import Feed, RangeProgress, advance


def check(feed: Feed, reports: Sequence[RangeProgress], now_ms: int) -> Feed:
    """The feed with its ranges as a runner reports them, and with its checks."""
    moved = advance(feed.ranges, reports)
    if not feed.spec.is_whole:
        return replace(feed, ranges=moved)
    reported = {progress.id: progress for progress in reports}
    checks = feed.checks or Checks()
    parts: list[list[Entry]] = []
    for before, after in zip(feed.ranges, moved, strict=True):
        entries = [] if before.counted is None else before.counted.entries
        if after.checkpoint > before.checkpoint:
            counted = reported[after.id].counted
            if counted is None:
                checks = checks.doubt_through(after.checkpoint, Doubt.UNCOUNTED)
            else:
                fresh = counted.behind(before.checkpoint)
                checks, entries = checks.hear(fresh), [*entries, *fresh.entries]
        parts.append(entries)
    checkpoint = min(progress.checkpoint for progress in moved)
    settled, left = checks.settle(parts, checkpoint, now_ms)
    ranges = [
        replace(progress, counted=Counted(entries=entries) if entries else None)
        for progress, entries in zip(moved, left, strict=True)
    ]
    return replace(feed, ranges=ranges, checks=settled)
