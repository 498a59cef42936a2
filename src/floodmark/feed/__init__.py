"""Ordered, resumable streams of changes: catch-up, named feeds, subscriptions and safe points."""

from floodmark.feed.reading.items import Decoder, Item
from floodmark.feed.reading.reader import ChangeReader, ChangeStatistics, ReaderStatistics
from floodmark.feed.safepoints import LIFETIME, SafePoint, SafePoints, at_present

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
