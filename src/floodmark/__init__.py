"""Floodmark: a key-value store for data that lives in more than one place.

Every write is captured, and one hybrid clock stamps every change.

>>> import floodmark, tempfile
>>> with floodmark.open(tempfile.mkdtemp(), site="oslo") as site:
...     users = site.create_namespace("users")
...     version = users.put(b"ada", b"countess")
...     [change.key for change in site.changes("users")]
[b'ada']
"""

from floodmark.model import Change, ChangeType, Heartbeat, KeyRange, Stamp, Version, Versioned
from floodmark.model.errors import FloodmarkError, OutcomeUnknown, Retryable, Terminal
from floodmark.site import (
    GarbageReport,
    Namespace,
    NamespaceSettings,
    SafePoint,
    Site,
    SiteStatistics,
    View,
    open,
)

__all__ = [
    "Change",
    "ChangeType",
    "FloodmarkError",
    "GarbageReport",
    "Heartbeat",
    "KeyRange",
    "Namespace",
    "NamespaceSettings",
    "OutcomeUnknown",
    "Retryable",
    "SafePoint",
    "Site",
    "SiteStatistics",
    "Stamp",
    "Terminal",
    "Version",
    "Versioned",
    "View",
    "open",
]
