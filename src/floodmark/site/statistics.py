"""What a site says about itself.  The command line and the metrics only render these."""

from dataclasses import dataclass
from datetime import datetime

from floodmark.feed import ChangeStatistics
from floodmark.model.ranges import KeyRange
from floodmark.model.version import Version
from floodmark.partition import HeatSample


@dataclass(frozen=True, kw_only=True)
class PartitionStatistics:
    """One partition and what it has done since it was opened.

    The range is in qualified keys: three bytes of namespace, then the user's key.
    """

    id: int
    range: KeyRange
    writes: int
    reads: int
    bytes_written: int


@dataclass(frozen=True, kw_only=True)
class PartitionHeat:
    """How busy a partition was, interval by interval, oldest first."""

    id: int
    range: KeyRange
    samples: list[HeatSample]


@dataclass(frozen=True, kw_only=True)
class NamespaceStatistics:
    """One namespace, and how far back it can be read."""

    name: str
    id: int
    merge: str
    oldest_version: Version
    collected_horizon: Version


@dataclass(frozen=True, kw_only=True)
class GarbageReport:
    """What garbage collection has done, in one run or in all since the site was opened."""

    runs: int = 0
    versions_read: int = 0
    versions_removed: int = 0
    keys_removed: int = 0
    namespaces_removed: int = 0
    log_trimmed_version: Version = 0


@dataclass(frozen=True, kw_only=True)
class SiteStatistics:
    """A site at one moment."""

    site: str
    site_id: int
    format: int
    version: Version
    resolved_version: Version
    clock_ahead_ms: int
    commits: int
    changes: int
    bytes_written: int
    rounds: int
    recoveries: int
    data_bytes: int
    log_bytes: int
    last_heartbeat: datetime | None
    background_error: str | None
    namespaces: list[NamespaceStatistics]
    partitions: list[PartitionStatistics]
    garbage: GarbageReport
    readers: ChangeStatistics
