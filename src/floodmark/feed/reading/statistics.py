"""The statistics of streams of changes."""

from collections.abc import Mapping
from dataclasses import dataclass

from floodmark.model.stream import Way
from floodmark.model.version import Version


@dataclass(frozen=True, kw_only=True)
class ReaderStatistics:
    """One open stream of changes.

    `namespace` is an id, None for all; `changes` counts deliveries by the way they were read.
    """

    namespace: int | None
    follow: bool
    position: Version
    lag_ms: int
    way: Way
    changes: Mapping[Way, int]


@dataclass(frozen=True, kw_only=True)
class ChangeStatistics:
    """The open streams of changes, and the deliveries of all since the site was opened."""

    open: list[ReaderStatistics]
    changes: Mapping[Way, int]
