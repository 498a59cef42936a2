"""What the readers of a site's changes say about themselves."""

from collections.abc import Mapping
from dataclasses import dataclass

from floodmark.model.stream import Way
from floodmark.model.version import Version


@dataclass(frozen=True, kw_only=True)
class ReaderStatistics:
    """One open stream of changes: how far it is, and by which way it got there.

    `namespace` is an id, None for all; `changes` counts what was delivered by each way.
    """

    namespace: int | None
    follow: bool
    position: Version
    lag_ms: int
    way: Way
    changes: Mapping[Way, int]


@dataclass(frozen=True, kw_only=True)
class ChangeStatistics:
    """All streams of changes: those that are open, and what was delivered since the site was opened."""

    open: list[ReaderStatistics]
    changes: Mapping[Way, int]
