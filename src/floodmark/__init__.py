"""Floodmark: a key-value store for data that lives in more than one place.

Every write is captured, and one hybrid clock stamps every change.

>>> import floodmark, tempfile
>>> with floodmark.open(tempfile.mkdtemp(), site="oslo") as site:
...     users = site.create_namespace("users")
...     version = users.put(b"ada", b"countess")
...     [change.key for change in site.changes("users")]
[b'ada']
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from floodmark.feed.named.feeds import Feed, FeedState, FeedStatistics, SinkOptions
    from floodmark.feed.reading.capture import CaptureState, ChangeCapture
    from floodmark.feed.subscription.consumer import Delivery, Subscription, SubscriptionOptions
    from floodmark.model import Change, ChangeType, Heartbeat, KeyRange, Resolved, Stamp, Version, Versioned
    from floodmark.model.errors import FloodmarkError, OutcomeUnknown, Retryable, Terminal
    from floodmark.site import (
        GarbageReport,
        Namespace,
        NamespaceSettings,
        SafePoint,
        Site,
        SiteStatistics,
        Transaction,
        View,
        Writer,
    )
    from floodmark.site.connecting import connect
    from floodmark.site.opening import open

__all__ = [
    "CaptureState",
    "Change",
    "ChangeCapture",
    "ChangeType",
    "Delivery",
    "Feed",
    "FeedState",
    "FeedStatistics",
    "FloodmarkError",
    "GarbageReport",
    "Heartbeat",
    "KeyRange",
    "Namespace",
    "NamespaceSettings",
    "OutcomeUnknown",
    "Resolved",
    "Retryable",
    "SafePoint",
    "SinkOptions",
    "Site",
    "SiteStatistics",
    "Stamp",
    "Subscription",
    "SubscriptionOptions",
    "Terminal",
    "Transaction",
    "Version",
    "Versioned",
    "View",
    "Writer",
    "connect",
    "open",
]


# What is handed on is loaded when it is first asked for: the command starts fast, an embedded site does
# without Arrow Flight, and a site behind a URL without RocksDB.
_LAZY = {
    "floodmark.feed.named.feeds": ("Feed", "FeedState", "FeedStatistics", "SinkOptions"),
    "floodmark.feed.reading.capture": ("CaptureState", "ChangeCapture"),
    "floodmark.feed.subscription.consumer": ("Delivery", "Subscription", "SubscriptionOptions"),
    "floodmark.model": (
        *("Change", "ChangeType", "Heartbeat", "KeyRange", "Resolved", "Stamp", "Version", "Versioned"),
    ),
    "floodmark.model.errors": ("FloodmarkError", "OutcomeUnknown", "Retryable", "Terminal"),
    "floodmark.site": (
        *("GarbageReport", "Namespace", "NamespaceSettings", "SafePoint", "Site", "SiteStatistics"),
        *("Transaction", "View", "Writer"),
    ),
    "floodmark.site.connecting": ("connect",),
    "floodmark.site.opening": ("open",),
}


def __getattr__(name: str) -> Any:
    """Import a public name from its module."""
    for module, names in _LAZY.items():
        if name in names:
            globals()[name] = found = getattr(import_module(module), name)
            return found
    raise AttributeError(f"module 'floodmark' has no attribute {name!r}")
