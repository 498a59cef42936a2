"""Statistics of a site.  The command line and the metrics only render these."""

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from floodmark.feed import ChangeStatistics
from floodmark.model.partition import Hold
from floodmark.model.ranges import KeyRange
from floodmark.model.version import Version
from floodmark.partition import HeatSample


@dataclass(frozen=True, kw_only=True)
class PartitionStatistics:
    """One partition since it was opened; its range is in qualified keys."""

    id: int
    range: KeyRange
    writes: int
    reads: int
    bytes_written: int
    # Reads and writes per second, over the last minutes.
    rate: float = 0.0
    # The node that owns it; 0 if one process serves the site.
    node: int = 0


@dataclass(frozen=True, kw_only=True)
class NodeStatistics:
    """One node of a site: the figures of its last beat, and its partitions."""

    node: int
    url: str
    keeps: bool
    lives: bool
    drained: bool
    since_ms: int
    beat_ms: int
    # Changes written between the last two beats.
    load: int
    incarnation: int
    ceiling: Version
    partitions: list[int]


@dataclass(frozen=True, kw_only=True)
class NodeCounters:
    """Counters of one process as a node, since it started."""

    node: int
    # The number of nodes that this one declared dead and replaced.
    takeovers: int
    # How often this node was fenced, and restarted itself.
    restarts: int


@dataclass(frozen=True, kw_only=True)
class PartitionHeat:
    """The load of a partition by interval, oldest first."""

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
    """Totals of garbage collection, of one run or of all since the site was opened."""

    runs: int = 0
    versions_read: int = 0
    versions_removed: int = 0
    keys_removed: int = 0
    namespaces_removed: int = 0
    log_trimmed_version: Version = 0


@dataclass(frozen=True, kw_only=True)
class SiteStatistics:
    """A site at one moment.  `held_back_by` lists holds of more than two seconds, the longest first."""

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
    held_back_by: list[Hold] = field(default_factory=list)


class AlarmKind(StrEnum):
    """The kind of an alarm."""

    OVERDUE = "overdue"
    FINDING = "finding"
    STALLED = "stalled"
    SKEW = "skew"


@dataclass(frozen=True, kw_only=True)
class LinkAlarm:
    """An alarm of a link: its kind and its text."""

    kind: AlarmKind
    text: str


@dataclass(frozen=True, kw_only=True)
class LinkStatistics:
    """The link of one namespace from one other site.

    Changes up to `through`, a version of the source, are in.  The age of the last heartbeat is None if none
    has ever arrived, the lag None if no change arrived in the last minutes.  `changes` counts the last
    minutes, and `changes_ever` the time since the site was opened.  Intervals are those between heartbeats.
    """

    source: str
    source_id: int
    namespace: str
    incarnation: int
    through: Version
    heartbeat_age_ms: int | None
    backlog_ms: int
    changes: int
    changes_ever: int
    lag_ms_p50: int | None
    lag_ms_p99: int | None
    intervals_checked: int
    intervals_unchecked: int
    intervals_wrong: int
    findings: list[str]
    stalled: str | None
    alarms: list[LinkAlarm]


@dataclass(frozen=True, kw_only=True)
class ReplicationStatistics:
    """The links of a site by source and namespace.

    A site that is `rejoining` was restored, and takes no writes while namespaces are `missing`, for which one
    of its `peers` or a backup is needed.
    """

    site: str
    site_id: int
    epoch: int | None
    links: list[LinkStatistics]
    rejoining: bool = False
    missing: list[str] = field(default_factory=list)
    peers: list[str] = field(default_factory=list)

    @property
    def returning(self) -> str | None:
        """The state of a site that is rejoining, and the commands that it needs; else None."""
        if not self.rejoining:
            return None
        names, peers = ", ".join(map(repr, self.missing)), ", ".join(map(repr, self.peers))
        return (
            f"{self.site} was restored and takes no writes: it lacks {names}. For each namespace "
            "run `floodmark restore BACKUP SITE NAMESPACE --rejoin --topology FILE`, with a backup of any "
            f"site, or `floodmark restore SITE NAMESPACE --rejoin --from-peers --topology FILE`, which "
            f"takes the present state of one of {peers or 'no other site'} (docs/operations/restored.md)"
        )

    @property
    def alarms(self) -> list[str]:
        """The texts of all alarms; once for all namespaces of a source."""
        if self.returning is not None:
            return [self.returning]
        namespaces: dict[tuple[str, str], list[str]] = {}
        for link in self.links:
            for alarm in link.alarms:
                namespaces.setdefault((link.source, alarm.text), []).append(link.namespace)
        return [
            f"{source} to {self.site}, {', '.join(names)}: {text}"
            for (source, text), names in namespaces.items()
        ]
