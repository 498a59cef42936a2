"""Changes as ordered, resumable streams: catch-up, named feeds, subscriptions and safe points."""

from floodmark.feed.items import Decoder, Item
from floodmark.feed.reader import ChangeReader
from floodmark.feed.safepoints import LIFETIME, SafePoint, SafePoints, at_present
from floodmark.feed.statistics import ChangeStatistics, ReaderStatistics

__all__ = [
    "LIFETIME",
    "ChangeReader",
    "ChangeStatistics",
    "Decoder",
    "Item",
    "ReaderStatistics",
    "SafePoint",
    "SafePoints",
    "at_present",
]
