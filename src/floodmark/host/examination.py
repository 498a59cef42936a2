"""Examines a site, and gives advice on each problem.

An examination only reads, and the site stays in use.  Garbage collection stores what it will delete before it
deletes, so the examination, which reads this *after* the data, can distinguish collected data from lost data.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from enum import StrEnum
from functools import partial
from pathlib import Path
from threading import Event
from typing import Final, NamedTuple, Protocol

from floodmark.codec.changelog import CommitRow, decode_log_key, decode_row
from floodmark.codec.ordered import NAMESPACE_BYTES, decode_key, encode_prefix, encode_version
from floodmark.engine import Row
from floodmark.engine.base import RECOVERY_ROOM_BYTES, scan_pages
from floodmark.feed import SafePoints
from floodmark.feed.named.feeds import Feed, FeedState, FeedStatistics, measure
from floodmark.feed.named.store import LocalFeedStore
from floodmark.feed.subscription.store import LocalSubscriptionStore
from floodmark.feed.subscription.subscriptions import SubscriptionRow
from floodmark.host.background import CLOCK_AHEAD_MS_MAX, Background
from floodmark.host.catalog import Catalog
from floodmark.host.directory import Identity
from floodmark.host.statistics import AlarmKind, NodeStatistics, ReplicationStatistics
from floodmark.model.errors import Corruption, FloodmarkError
from floodmark.model.limits import KEY_BYTES_MAX
from floodmark.model.partition import HoldKind
from floodmark.model.version import Version, moment_of, physical_ms
from floodmark.partition import Node
from floodmark.partition.commit.merging import contains
from floodmark.partition.families import DATA, LOG
from floodmark.partition.layout import LogRow, load_logs, load_partitions
from floodmark.partition.read.records import decode_whole

HEARTBEAT_MS_MAX: Final = 10_000
FEED_LAG_MS_MAX: Final = 5 * 60_000
# How long a reader may hold back garbage collection beyond the retention before a finding is reported.
HELD_MS_MAX: Final = timedelta(hours=24) // timedelta(milliseconds=1)
# The safe point of a feed or subscription without a process expires after 24 hours; report it before that.
UNUSED_MS_MAX: Final = timedelta(hours=12) // timedelta(milliseconds=1)
DISK_RESERVES_MIN: Final = 4
EXAMPLES_MAX: Final = 5
# The pause after each page, which takes a few milliseconds, so that a server can answer other calls.
PAUSE_SECONDS: Final = 0.005

_RESTORE: Final = "restore the site from a backup"


_HOLD_ADVICE: Final = {
    HoldKind.COMMIT: "look for errors of the disk in the system's log; feeds wait until the commit has ended",
    HoldKind.UNSYNCED: "site.sync() makes it durable; a site does so each second, unless it was opened with "
    "background=False",
    HoldKind.PREPARED: "floodmark txn show {transaction} says what it waits for; floodmark txn abort "
    "{transaction} ends it, if it is open",
}


_ALARM_ADVICE: Final = {
    AlarmKind.OVERDUE: "see whether floodmark replicate runs, and reaches both sites",
    AlarmKind.FINDING: "floodmark verify SITE SITE --repair finds the keys, and gives each its winner back",
    AlarmKind.STALLED: "remove the cause that the alarm names; the link goes on by itself",
    AlarmKind.SKEW: "synchronise the clocks of both machines",
}


class Severity(StrEnum):
    """The severity of a finding."""

    OK = "ok"
    WARNING = "warning"
    """It works, but needs attention."""

    PROBLEM = "problem"
    """Something is broken, or will be soon."""

    UNKNOWN = "unknown"
    """The check could not be made."""


@dataclass(frozen=True)
class CheckResult:
    """The result of one check; the advice is empty if there is nothing to do."""

    check: str
    severity: Severity
    message: str
    advice: str = ""


class Describing(Protocol):
    """Describes the links of a site."""

    def replication(self) -> ReplicationStatistics: ...


class Examined(Protocol):
    """The parts of a site that an examination reads."""

    identity: Identity
    node: Node
    catalog: Catalog
    safe_points: SafePoints
    feeds: LocalFeedStore
    subscriptions: LocalSubscriptionStore
    background: Background

    @property
    def status(self) -> Describing: ...


# Called after each page with the name of the step, and the rows and bytes read so far.
OnPage = Callable[[str, int, int], object]


def examine(host: Examined, quick: bool, *, disk: Path | None = None) -> list[CheckResult]:
    """Examine a site that stays in use.  A quick examination does not read all of its data."""
    resting = Event()
    return Examination(host, disk=disk, on_page=lambda *_: resting.wait(PAUSE_SECONDS)).run(quick=quick)


class Examination:
    """All checks of one site.  `disk` is the directory of its data, if it has one."""

    def __init__(
        self,
        host: Examined,
        *,
        disk: Path | None = None,
        disk_reserve_bytes: int = RECOVERY_ROOM_BYTES,
        on_page: OnPage = lambda *_: None,
    ) -> None:
        self._host = host
        self._node = host.node
        self._disk = disk
        self._disk_reserve_bytes = disk_reserve_bytes
        self._on_page = on_page

    def run(self, *, quick: bool) -> list[CheckResult]:
        """The findings of all checks, in the order in which to show them."""
        checks = {
            "format": self._check_format,
            "clock": self._check_clock,
            "disk": self._check_disk,
            "storage": self._check_storage,
            "background": self._check_background,
            "heartbeat": self._check_heartbeat,
            "resolved": self._check_resolved,
            "partitions": self._check_partitions,
            "replication": self._check_replication,
            "retention": self._check_retention,
            "safe points": self._check_safe_points,
            "feeds": self._check_feeds,
            "subscriptions": self._check_subscriptions,
        }
        if not quick:
            walk = Walk(self._host, self._on_page)
            checks |= {"records": walk.check_records, "change log": walk.check_logs}
        return [finding for name, check in checks.items() for finding in _findings(name, check)]

    # The process and its surroundings

    def _check_format(self) -> Iterator[CheckResult]:
        identity = self._host.identity
        yield _ok(f"site {identity.site!r} has format {identity.format}")

    def _check_clock(self) -> Iterator[CheckResult]:
        # Raises ClockSkew if the machine's clock is refused.
        self._node.clock.time_source()
        ahead_ms = self._node.clock.ahead_ms()
        if ahead_ms > CLOCK_AHEAD_MS_MAX:
            yield _warning(
                f"versions run {ahead_ms:,} ms ahead of this machine's clock, which was set back or ran "
                "ahead before",
                "check the machine's time; versions go on growing, and match real time again when it has "
                "caught up",
            )
        else:
            yield _ok("versions keep to this machine's time")

    def _check_disk(self) -> Iterator[CheckResult]:
        # Raises StorageFull if writes are refused.
        self._node.storage.require_wanted()
        if self._disk is None:
            yield _ok("there is room, and writes are taken")
            return
        free, reserve = shutil.disk_usage(self._disk).free, self._disk_reserve_bytes
        room = f"{free:,} bytes are free, and {reserve:,} are kept free"
        if free < DISK_RESERVES_MIN * reserve:
            yield _warning(room, "make room before writes are refused")
        else:
            yield _ok(room)

    def _check_storage(self) -> Iterator[CheckResult]:
        storage = self._node.storage
        if storage.stopped:
            yield _problem(
                "a write failed, and storage has not recovered yet",
                "look for errors of the disk in the system's log; the next write tries to recover",
            )
        elif storage.recoveries:
            yield _warning(
                f"storage failed and recovered {storage.recoveries:,} times since the site was opened",
                "look for errors of the disk in the system's log",
            )
        else:
            yield _ok("no write has failed")

    def _check_background(self) -> Iterator[CheckResult]:
        error = self._host.background.error
        if error is not None:
            yield _problem(
                f"heartbeats or garbage collection fail: {error}",
                "remove the cause; they are tried again each second",
            )
        else:
            yield _ok("no background work has failed")

    def _check_heartbeat(self) -> Iterator[CheckResult]:
        last = self._node.heartbeats.last
        if last is None:
            yield _ok("none yet since the site was opened")
            return
        age_ms = max(0, self._node.clock.time_source() - last.wall_ms)
        if age_ms > HEARTBEAT_MS_MAX:
            yield _problem(
                f"the last one was {_show_age(age_ms)} ago; there should be one each second",
                "look at the other findings and at the server's log; restart the process if it hangs",
            )
        else:
            yield _ok(f"the last one was {_show_age(age_ms)} ago")

    # The site's own tables

    def _check_resolved(self) -> Iterator[CheckResult]:
        for hold in self._node.holds.long():
            yield _warning(str(hold), _HOLD_ADVICE[hold.kind].format(transaction=hold.transaction))
        yield _ok("nothing holds the resolved version back")

    def _check_partitions(self) -> Iterator[CheckResult]:
        with self._node.storage.exclusive():
            # Raises Corruption if there is a gap or an overlap between two neighbours.
            rows = load_partitions(self._node.engine)
            logs = {log.id: log for log in load_logs(self._node.engine)}
        if not rows or rows[0].start or rows[-1].end is not None:
            yield _problem("the map does not cover all keys", _RESTORE)
        for row in rows:
            log = logs.get(row.log)
            if log is None or log.sealed_at is not None or log.range != row.range:
                yield _problem(f"partition {row.id} has no log that fits it", _RESTORE)
        yield _ok(f"{len(rows):,} in the map, without holes")

    def _check_replication(self) -> Iterator[CheckResult]:
        replication = self._host.status.replication()
        if replication.rejoining:
            missing = ", ".join(map(repr, replication.missing))
            yield _problem(
                f"the site was restored and takes no writes: it lacks {missing}",
                "floodmark restore BACKUP SITE NAMESPACE --rejoin --topology FILE, or floodmark restore SITE "
                "NAMESPACE --rejoin --from-peers --topology FILE (docs/operations/restored.md)",
            )
        elif replication.epoch is None:
            yield _ok("the site shares nothing")
        else:
            kinds = {alarm.text: alarm.kind for link in replication.links for alarm in link.alarms}
            for alarm in replication.alarms:
                kind = next(kind for text, kind in kinds.items() if alarm.endswith(text))
                yield _warning(alarm, f"{_ALARM_ADVICE[kind]} (docs/operations/replication.md)")
            yield _ok(f"the site follows topology {replication.epoch}")

    def _check_retention(self) -> Iterator[CheckResult]:
        retention = self._node.retention
        gone = {
            f"namespace {row.name!r} was collected": retention.collected_version(row.id)
            for row in self._host.catalog.live()
        }
        trimmed = gone["the change log was trimmed"] = retention.trimmed_version()
        # Read last: it moves on meanwhile, and the versions above never pass it.
        resolved = self._node.resolved_version()
        for what, version in gone.items():
            if version > resolved:
                yield _problem(f"{what} up to {version}, which is not resolved yet ({resolved})", _RESTORE)
        since = moment_of(trimmed).isoformat() if trimmed else "the beginning"
        yield _ok(f"the change log goes back to {since}")

    def _check_safe_points(self) -> Iterator[CheckResult]:
        rows = self._host.catalog.live()
        points = self._host.safe_points.list()
        now_ms = self._node.clock.time_source()
        for point in points:
            retentions = [row.retention_ms for row in rows if point.namespace in (None, row.id)]
            held_ms = now_ms - physical_ms(point.version) - min(retentions, default=0)
            if retentions and held_ms > HELD_MS_MAX:
                yield _warning(
                    f"{point.name!r} has kept garbage collection back for {_show_age(held_ms)}",
                    "if no reader needs it, release it: floodmark safepoint release; a feed's goes on with "
                    "its checkpoint, or with floodmark feed remove",
                )
        yield _ok(f"{len(points):,} held")

    # Readers

    def _check_feeds(self) -> Iterator[CheckResult]:
        feeds, now_ms = self._host.feeds.list(), self._node.clock.time_source()
        resolved = self._node.resolved_version()
        for feed in feeds:
            collected = self._node.retention.collected_version(feed.namespace_id)
            yield from _judge_feed(feed, measure(feed, resolved, now_ms), collected)
        yield _ok(f"{len(feeds):,} in all")

    def _check_subscriptions(self) -> Iterator[CheckResult]:
        rows, now_ms = self._host.subscriptions.list(), self._node.clock.time_source()
        for row in rows:
            collected = self._node.retention.collected_version(row.namespace_id)
            yield from _judge_subscription(row, now_ms, collected)
        yield _ok(f"{len(rows):,} in all")


def check_nodes(nodes: Sequence[NodeStatistics]) -> list[CheckResult]:
    """Findings about the nodes of a site; none if one process serves it."""
    if not nodes:
        return []
    lost = [str(each.node) for each in nodes if not each.lives]
    drained = [str(each.node) for each in nodes if each.lives and each.drained]
    findings = [CheckResult("nodes", Severity.OK, f"{len(nodes) - len(lost)} of {len(nodes)} nodes beat")]
    if lost:
        advice = "start it again, or take it off the list with floodmark node remove"
        findings = [CheckResult("nodes", Severity.WARNING, f"does not beat: node {', '.join(lost)}", advice)]
    if drained:
        advice = "stop it, or start it again if it is to serve"
        message = f"was drained and still runs: node {', '.join(drained)}"
        findings.append(CheckResult("nodes", Severity.WARNING, message, advice))
    return findings


def _findings(name: str, check: Callable[[], Iterator[CheckResult]]) -> list[CheckResult]:
    """The results of a check: its problems, or its OK results if there are none."""
    found: list[CheckResult] = []
    try:
        # One at a time, so that problems found before an error are kept.
        for result in check():
            found.append(result)
    except FloodmarkError as error:
        found.append(_problem(str(error), _RESTORE if isinstance(error, Corruption) else ""))
    bad = [result for result in found if result.severity is not Severity.OK]
    return [replace(result, check=name) for result in bad or found]


# The results of checks, whose name `_findings` sets

_ok = partial(CheckResult, "", Severity.OK)
_warning = partial(CheckResult, "", Severity.WARNING)
_problem = partial(CheckResult, "", Severity.PROBLEM)


def _judge_feed(feed: Feed, statistics: FeedStatistics, collected: Version) -> Iterator[CheckResult]:
    name, lag_ms = feed.name, statistics.checkpoint_lag_ms
    behind = f"feed {name!r} is {_show_age(lag_ms)} behind"
    rebuild = f"copy a snapshot to the sink, and feed resume {name} --since its version; or feed remove"
    error = "" if feed.error is None else f": {feed.error.text}"
    if feed.state is FeedState.FAILED:
        yield _problem(f"feed {name!r} has failed{error}", rebuild)
    elif feed.state is not FeedState.FINISHED and feed.checkpoint < collected:
        yield _problem(f"changes that feed {name!r} has not delivered were collected", rebuild)
    elif feed.state is FeedState.ERROR:
        yield _warning(f"feed {name!r} is in trouble{error}", "see to its sink; its runner tries again")
    elif feed.state is FeedState.STOPPED and lag_ms > UNUSED_MS_MAX:
        yield _warning(
            f"{behind} and paused; after 24 hours its changes are no longer kept",
            f"floodmark feed resume {name}, or feed remove",
        )
    elif feed.state is FeedState.NORMAL and lag_ms > FEED_LAG_MS_MAX:
        if statistics.holder is None:
            advice = f"no process runs it: floodmark feed run {name}"
        else:
            advice = f"{statistics.holder} runs it; see whether its sink is slow, and give it more --ranges"
        yield _warning(behind, advice)


def _judge_subscription(row: SubscriptionRow, now_ms: int, collected: Version) -> Iterator[CheckResult]:
    age_ms = now_ms - physical_ms(row.needed_version)
    if row.needed_version < collected:
        yield _problem(
            f"changes that subscription {row.name!r} has not acknowledged were collected",
            f"rebuild its consumer from a snapshot, then floodmark subscription seek {row.name}",
        )
    elif (row.lease is None or row.lease.expires_at_ms <= now_ms) and age_ms > UNUSED_MS_MAX:
        yield _warning(
            f"subscription {row.name!r} has no consumer and is {_show_age(age_ms)} behind; after 24 hours "
            "its changes are no longer kept",
            f"start its consumer, or floodmark subscription remove {row.name}",
        )


# The walk over all stored data


@dataclass
class DamageReport:
    """The number of damaged rows, and the first few as texts."""

    count: int = 0
    examples: list[str] = field(default_factory=list)

    def add(self, example: str) -> None:
        """Count a case."""
        self.count += 1
        if len(self.examples) < EXAMPLES_MAX:
            self.examples.append(example)

    def show(self) -> str:
        """The first cases as text, with a note if there are more."""
        return "; ".join(self.examples) + ("; …" if self.count > len(self.examples) else "")


class Walk:
    """Reads all records and all rows of the change logs, a page at a time."""

    def __init__(self, host: Examined, on_page: OnPage) -> None:
        self._node = host.node
        self._catalog = host.catalog
        self._on_page = on_page

    def check_records(self) -> Iterator[CheckResult]:
        """Check that every record can be read, has a namespace, and is not from the future."""
        damage, strays, count = DamageReport(), DamageReport(), 0
        namespaces = self._names()
        for page in self._pages(DATA, "records"):
            count += len(page)
            latest = self._node.clock.latest
            for engine_key, stored in page:
                try:
                    namespace, key, version = decode_key(engine_key)
                    decode_whole(stored)
                except Corruption as error:
                    damage.add(f"{_say_key(engine_key, namespaces)}: {error}")
                    continue
                if not 0 < len(key) <= KEY_BYTES_MAX or not 0 < version <= latest:
                    damage.add(f"{_say_key(engine_key, namespaces)}: no such key can have been written")
                elif namespace not in namespaces and namespace not in (namespaces := self._names()):
                    strays.add(_say_key(engine_key, namespaces))
        if damage.count:
            yield _problem(
                f"{damage.count:,} of {count:,} records are damaged: {damage.show()}",
                "restore them from a backup or from a peer, or overwrite them with floodmark put",
            )
        if strays.count:
            yield _warning(
                f"{strays.count:,} records belong to namespaces that are gone: {strays.show()}",
                "no reader can reach them and they do no harm; please report it",
            )
        yield _ok(f"{count:,} read, and all are whole")

    def check_logs(self) -> Iterator[CheckResult]:
        """Check that every row of the change logs can be read and matches the data."""
        damage, count = DamageReport(), 0
        logs = {log.id: log for log in load_logs(self._node.engine)}
        previous = _LogPlace(0, 0, 0)
        for page in self._pages(LOG, "change-log rows"):
            count += len(page)
            for key, row in page:
                try:
                    place = _LogPlace(*decode_log_key(key))
                    decoded = decode_row(place.version, row)
                    if place.log not in logs:
                        logs = {log.id: log for log in load_logs(self._node.engine)}
                    problem = self._judge_place(place, previous, logs)
                    if problem is None and isinstance(decoded, CommitRow):
                        problem = self._compare(place.version, decoded)
                    previous = place
                except Corruption as error:
                    problem = str(error)
                if problem is not None:
                    damage.add(f"row {key.hex()}: {problem}")
        if damage.count:
            yield _problem(f"{damage.count:,} of {count:,} rows are damaged: {damage.show()}", _RESTORE)
        yield _ok(f"{count:,} rows read, and they match the data")

    def _judge_place(
        self, place: "_LogPlace", previous: "_LogPlace", logs: Mapping[int, LogRow]
    ) -> str | None:
        if place.version <= self._node.retention.trimmed_version():
            # A crash has brought back this trimmed row; it goes when the log is trimmed again.
            return None
        log = logs.get(place.log)
        if log is None:
            return f"there is no log {place.log}"
        end = self._node.clock.latest if log.sealed_at is None else log.sealed_at
        if not log.opened_at < place.version <= end:
            return f"version {place.version} lies outside log {log.id}"
        if place.chunk and previous != place._replace(chunk=place.chunk - 1):
            return f"chunk {place.chunk} of version {place.version} comes without the one before it"
        return None

    def _compare(self, version: Version, row: CommitRow) -> str | None:
        """The difference between a commit in the log and the data; None if they match."""
        suffix = encode_version(version)
        stored = self._node.engine.get_many(DATA, [encode_prefix(key) + suffix for key in row.keys])
        for key, logged, found in zip(row.keys, row.values, stored, strict=True):
            if found is None and not self._may_be_gone(key, version):
                return f"it names {key[NAMESPACE_BYTES:]!r:.60} at version {version}, and the data is gone"
            if found is not None and logged is not None and not contains(found, logged):
                return f"{key[NAMESPACE_BYTES:]!r:.60} at version {version} is not what it says"
        return None

    def _may_be_gone(self, key: bytes, version: Version) -> bool:
        namespace = int.from_bytes(key[:NAMESPACE_BYTES], "big")
        retention = self._node.retention
        collected = max(retention.collected_version(namespace), retention.trimmed_version())
        return version <= collected or not self._catalog.is_live(namespace)

    def _pages(self, family: str, what: str) -> Iterator[Sequence[Row]]:
        rows = size = 0
        for page in scan_pages(self._node.engine, family, b"", None):
            yield page
            rows += len(page)
            size += sum(len(key) + len(value) for key, value in page)
            self._on_page(what, rows, size)

    def _names(self) -> dict[int, str]:
        return {row.id: row.name for row in self._catalog.all()}


class _LogPlace(NamedTuple):
    """The position of a row of the change log."""

    log: int
    version: Version
    chunk: int


def _say_key(engine_key: bytes, namespaces: Mapping[int, str]) -> str:
    try:
        namespace, key, version = decode_key(engine_key)
    except Corruption:
        return f"row {engine_key.hex()}"
    return f"{key!r:.60} of {namespaces.get(namespace, f'namespace #{namespace}')} at version {version}"


def _show_age(milliseconds: int) -> str:
    """A duration in its largest suitable unit.

    >>> _show_age(900), _show_age(90_000), _show_age(200_000_000)
    ('900 ms', '90 s', '55 h')
    """
    for unit, size, most in (("ms", 1, 1_000), ("s", 1_000, 120_000), ("min", 60_000, 7_200_000)):
        if milliseconds < most:
            return f"{milliseconds // size:,} {unit}"
    return f"{milliseconds // 3_600_000:,} h"
