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

if TYPE_CHECKING:
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


# An embedded site does without Arrow Flight, and a site that is connected to without RocksDB.
_LAZY = {"connect": "floodmark.site.connecting", "open": "floodmark.site.opening"}


def __getattr__(name: str) -> Any:
    """Hand on what is loaded only when it is first asked for."""
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'floodmark' has no attribute {name!r}")
