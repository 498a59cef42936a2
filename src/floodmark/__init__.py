"""Floodmark: a key-value store for data that lives in more than one place.

Every write is captured, and one hybrid clock stamps every change.  `open` opens a site in a directory or a
database, `connect` one behind a server; every error is a `FloodmarkError`.

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
    from floodmark.model.errors import (
        AcknowledgementConflict,
        BackupDamaged,
        CannotOpen,
        CatalogChanged,
        ClockSkew,
        Closed,
        CommitTooLarge,
        CommitUnknown,
        Conflict,
        Corruption,
        FeedExists,
        FeedNotFound,
        FeedStateConflict,
        Fenced,
        FloodmarkError,
        FormatTooNew,
        InvalidArgument,
        InvalidConfiguration,
        InvalidKey,
        InvalidName,
        InvalidOption,
        InvalidRange,
        InvalidTimeToLive,
        InvalidValue,
        InvalidVersion,
        KeyNotFound,
        LeaseHeld,
        LimitExceeded,
        LinkStalled,
        NamespaceExists,
        NamespaceNotFound,
        NodeFenced,
        NotAllowed,
        NotASite,
        NotAuthenticated,
        NotKeeper,
        OutcomeUnknown,
        PartitionMoved,
        PartitionNotFound,
        PartitionStopped,
        PartlyDone,
        Rejoining,
        Retryable,
        SafePointNotFound,
        SchemaMismatch,
        SinkFailed,
        SiteLocked,
        SiteMismatch,
        StaleLink,
        StorageFailed,
        StorageFull,
        SubscriptionNotFound,
        Terminal,
        TransactionEnded,
        TransactionNotFound,
        TransactionTooOld,
        Unreachable,
        VersionCollected,
        VersionInFuture,
        WireMismatch,
        WrongPolicy,
    )
    from floodmark.model.transaction import TransactionOutcome
    from floodmark.site import (
        Batch,
        Codec,
        CodedNamespace,
        CodedView,
        CounterNamespace,
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
    from floodmark.site.asynchronous import AsyncNamespace, AsyncSite, connect_async
    from floodmark.site.connecting import connect
    from floodmark.site.opening import open
    from floodmark.site.transaction import transactional

__all__ = [
    "AcknowledgementConflict",
    "AsyncNamespace",
    "AsyncSite",
    "BackupDamaged",
    "Batch",
    "CannotOpen",
    "CaptureState",
    "CatalogChanged",
    "Change",
    "ChangeCapture",
    "ChangeType",
    "ClockSkew",
    "Closed",
    "Codec",
    "CodedNamespace",
    "CodedView",
    "CommitTooLarge",
    "CommitUnknown",
    "Conflict",
    "Corruption",
    "CounterNamespace",
    "Delivery",
    "Feed",
    "FeedExists",
    "FeedNotFound",
    "FeedState",
    "FeedStateConflict",
    "FeedStatistics",
    "Fenced",
    "FloodmarkError",
    "FormatTooNew",
    "GarbageReport",
    "Heartbeat",
    "InvalidArgument",
    "InvalidConfiguration",
    "InvalidKey",
    "InvalidName",
    "InvalidOption",
    "InvalidRange",
    "InvalidTimeToLive",
    "InvalidValue",
    "InvalidVersion",
    "KeyNotFound",
    "KeyRange",
    "LeaseHeld",
    "LimitExceeded",
    "LinkStalled",
    "Namespace",
    "NamespaceExists",
    "NamespaceNotFound",
    "NamespaceSettings",
    "NodeFenced",
    "NotASite",
    "NotAllowed",
    "NotAuthenticated",
    "NotKeeper",
    "OutcomeUnknown",
    "PartitionMoved",
    "PartitionNotFound",
    "PartitionStopped",
    "PartlyDone",
    "Rejoining",
    "Resolved",
    "Retryable",
    "SafePoint",
    "SafePointNotFound",
    "SchemaMismatch",
    "SinkFailed",
    "SinkOptions",
    "Site",
    "SiteLocked",
    "SiteMismatch",
    "SiteStatistics",
    "StaleLink",
    "Stamp",
    "StorageFailed",
    "StorageFull",
    "Subscription",
    "SubscriptionNotFound",
    "SubscriptionOptions",
    "Terminal",
    "Transaction",
    "TransactionEnded",
    "TransactionNotFound",
    "TransactionOutcome",
    "TransactionTooOld",
    "Unreachable",
    "Version",
    "VersionCollected",
    "VersionInFuture",
    "Versioned",
    "View",
    "WireMismatch",
    "Writer",
    "WrongPolicy",
    "connect",
    "connect_async",
    "open",
    "transactional",
]


__version__ = "0.1.0"

# Public names are loaded when they are first used: the command starts fast, an embedded site does without
# Arrow Flight, and a client of a server without RocksDB.  Public names not listed here are error classes.
_LAZY = {
    "floodmark.feed.named.feeds": ("Feed", "FeedState", "FeedStatistics", "SinkOptions"),
    "floodmark.feed.reading.capture": ("CaptureState", "ChangeCapture"),
    "floodmark.feed.subscription.consumer": ("Delivery", "Subscription", "SubscriptionOptions"),
    "floodmark.model": (
        *("Change", "ChangeType", "Heartbeat", "KeyRange", "Resolved", "Stamp", "Version", "Versioned"),
    ),
    "floodmark.model.transaction": ("TransactionOutcome",),
    "floodmark.site": (
        *("Batch", "Codec", "CodedNamespace", "CodedView", "CounterNamespace", "GarbageReport", "Namespace"),
        "NamespaceSettings",
        *("SafePoint", "Site", "SiteStatistics", "Transaction", "View", "Writer"),
    ),
    "floodmark.site.asynchronous": ("AsyncNamespace", "AsyncSite", "connect_async"),
    "floodmark.site.connecting": ("connect",),
    "floodmark.site.opening": ("open",),
    "floodmark.site.transaction": ("transactional",),
}


def __getattr__(name: str) -> Any:
    """Import a public name from its module."""
    if name not in __all__:
        raise AttributeError(f"module 'floodmark' has no attribute {name!r}")
    module = next((module for module, names in _LAZY.items() if name in names), "floodmark.model.errors")
    globals()[name] = found = getattr(import_module(module), name)
    return found


def __dir__() -> list[str]:
    """The public names, whether they are loaded or not, for `dir` and `help`."""
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
