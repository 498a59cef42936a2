"""Named feeds: their specification, their progress, and the operations that each state allows.

                     pause                  resume
      normal, error ───────▶ stopped ─────────────────▶ normal
      normal  ◀──── the sink fails, and recovers ────▶  error
      normal, error ───▶ finished   the target was reached             resume, with another target
      normal, error ───▶ failed     its changes were collected         resume, from where there are some

A feed is divided into ranges along the partitions, each with its own checkpoint; the feed's checkpoint is the
lowest of them.  Dividing it again never moves that: a new range begins at the lowest checkpoint of the old
ranges that it overlaps.

A feed that begins with a snapshot at a version S has the checkpoint S from the start.  Until the snapshot is
complete, each range stores the key up to which its sink has it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Final

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from floodmark.accounting.account import Doubt
from floodmark.accounting.checks import Checks, CheckStatistics
from floodmark.accounting.counting import Counted, CountedRun
from floodmark.clock.backoff import LONGEST_MS
from floodmark.feed.leased import LeasedRow, ReaderSpec
from floodmark.feed.reading.items import OnCorrupt, SkippedChange
from floodmark.feed.sinks.base import parse_sink
from floodmark.model.errors import (
    FeedStateConflict,
    InvalidArgument,
    InvalidRange,
    InvalidVersion,
)
from floodmark.model.limits import FEED_RANGES_MAX, KEY_BYTES_MAX, MIB, REPORTED_CHARACTERS_MAX
from floodmark.model.names import require_name
from floodmark.model.ranges import KeyRange, prefix_end
from floodmark.model.stream import OnGeneration, order_places
from floodmark.model.version import VERSION_MAX, Version, physical_ms

DESCRIPTION_CHARACTERS_MAX: Final = 1_000


class FeedState(StrEnum):
    """The state of a feed."""

    # It is running, or waiting for a runner.
    NORMAL = "normal"
    # It was paused.
    STOPPED = "stopped"
    # The sink or the site failed, and its runner retries or has given up.
    ERROR = "error"
    # It cannot continue: undelivered changes were collected.  It holds no safe point.
    FAILED = "failed"
    # It has reached its target.
    FINISHED = "finished"
    # It was removed.  Only its runner sees this state.
    REMOVED = "removed"


class SinkOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of every kind of sink, which can also be given in its URI.

    concurrency      how many ranges write at the same time
    batch_records    after how many changes a batch ends; commits are not divided
    backoff_ms       the pause before the first retry; each further one is twice as long
    rate_bytes_max   bytes written per second at most; None for no limit
    linger_ms        how long a batch that is not full waits for more
    """

    concurrency: int = 2
    batch_records: int = 1_000
    backoff_ms: int = 100
    rate_bytes_max: int | None = None
    linger_ms: int = 0

    def __post_init__(self) -> None:
        _require_fields(self)


class FeedSpec(ReaderSpec, frozen=True, kw_only=True):
    """The specification of a feed: deliver the changes of some keys in `(since, until]` to a sink.

    `since` 0 means from the beginning of the namespace.  With `snapshot` the records that are live at `since`
    are delivered first.  Without `until` a feed never ends.
    """

    sink: str
    since: Version = 0
    until: Version | None = None
    start_key: bytes = b""
    end_key: bytes | None = None
    prefix: bytes | None = None
    description: str = ""
    ranges: int = 2
    options: SinkOptions = msgspec.field(default_factory=SinkOptions)
    on_corrupt: OnCorrupt = OnCorrupt.FAIL
    snapshot: bool = False
    on_generation: OnGeneration = OnGeneration.FAIL

    def __post_init__(self) -> None:
        require_name(self.name, "feed")
        _require_fields(self)
        self.require_target(self.since)
        self.keys()

    def require_target(self, since: Version) -> None:
        """Raise an error unless the target is above the start, or equal to it for a snapshot alone."""
        until = self.until
        if until is not None and (until < since if self.snapshot else until <= since):
            raise InvalidVersion(
                f"the target {until} of feed {self.name!r} does not lie behind its start {since}"
            )

    def keys(self) -> KeyRange:
        """The user keys whose changes are delivered."""
        within = KeyRange() if self.prefix is None else KeyRange(self.prefix, prefix_end(self.prefix))
        keys = within.intersect(KeyRange(self.start_key, self.end_key))
        if keys is None:
            raise InvalidRange(
                f"no key lies in the range of feed {self.name!r}: start {self.start_key!r:.60}, "
                f"end {self.end_key!r:.60}, prefix {self.prefix!r:.60}"
            )
        return keys

    @property
    def is_whole(self) -> bool:
        """Whether the feed delivers its whole namespace, so that it can be checked against heartbeats."""
        return self.keys() == KeyRange()

    def normalized(self) -> "FeedSpec":
        """The same specification with the options in the URI moved to `options`.

        >>> spec = FeedSpec(name="f", namespace="users", sink="blackhole:?concurrency=4").normalized()
        >>> spec.sink, spec.options.concurrency
        ('blackhole:', 4)
        """
        address = parse_sink(self.sink)
        others = dict(address.parameters)
        named = {
            name: _read_number(name, others.pop(name))
            for name in SinkOptions.__struct_fields__
            if name in others
        }
        if not named:
            return self
        options = replace(self.options, **named)
        return replace(self, sink=str(address._replace(parameters=others)), options=options)


class FeedUpdate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Changes to a feed's specification; unset fields are kept.

    The keys of a feed never change, because its checkpoint holds for those keys only.
    """

    sink: str | UnsetType = UNSET
    until: Version | UnsetType | None = UNSET
    description: str | UnsetType = UNSET
    ranges: int | UnsetType = UNSET
    options: SinkOptions | UnsetType = UNSET
    on_corrupt: OnCorrupt | UnsetType = UNSET
    on_generation: OnGeneration | UnsetType = UNSET

    def __post_init__(self) -> None:
        _require_fields(self)

    def apply(self, spec: FeedSpec) -> FeedSpec:
        changed = {name: value for name, value in msgspec.structs.asdict(self).items() if value is not UNSET}
        return replace(spec, **changed).normalized()


class RangeProgress(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of one range of a feed.  Its id is never reused in the feed.

    `keys` are qualified.  The sink has every change at or below `checkpoint`; the runner has read every
    change at or below `resolved`.  A runner reports its counts at least since the stored checkpoint; counts
    that no heartbeat has checked are stored with the checkpoint.

    If `snapshot`, a qualified key, is set, the sink has the snapshot at `checkpoint` only up to that key.
    """

    id: int
    keys: KeyRange
    checkpoint: Version
    resolved: Version = 0
    counted: Counted | None = None
    snapshot: bytes | None = None
    # Damaged changes that a runner has skipped.  The site moves them to the feed.
    skipped: tuple[SkippedChange, ...] = ()

    @property
    def order(self) -> tuple[Version, int, bytes]:
        """The sort key of reports about one range: later ones are greater."""
        return order_places(self.checkpoint, self.snapshot)


class FeedError(msgspec.Struct, frozen=True, kw_only=True):
    """An error and its time.  `collected` means that undelivered changes were collected."""

    text: str
    at_ms: int = 0
    collected: bool = False

    @classmethod
    def of(cls, error: BaseException, *, collected: bool = False) -> "FeedError":
        """The stored form of an error, with the present time."""
        text = str(error) or type(error).__name__
        return cls(text=text[:REPORTED_CHARACTERS_MAX], collected=collected)


class Feed(LeasedRow, frozen=True, kw_only=True):
    """A feed as it is stored and shown."""

    spec: FeedSpec
    state: FeedState
    ranges: list[RangeProgress]
    created_at_ms: int
    changed_at_ms: int
    # The id of the next range, and when the safe point was last moved.
    next_range: int
    held_at_ms: int
    error: FeedError | None = None
    # None for a feed of some keys, and for one that an early release stored.
    checks: Checks | None = None
    # The last damaged changes that were skipped, and the number of all skipped ones.
    skipped: list[SkippedChange] = msgspec.field(default_factory=list)
    skipped_count: int = 0

    @property
    def needed_version(self) -> Version:
        return self.checkpoint

    @property
    def checkpoint(self) -> Version:
        """The version up to which the sink has every change, once it has the snapshot."""
        return min(progress.checkpoint for progress in self.ranges)

    @property
    def resolved(self) -> Version:
        """The version up to which the runner has read every change."""
        return min(max(progress.resolved, progress.checkpoint) for progress in self.ranges)

    @property
    def is_at_snapshot(self) -> bool:
        """Whether the snapshot with which the feed begins is not delivered completely."""
        return any(progress.snapshot is not None for progress in self.ranges)

    @property
    def checked(self) -> CheckStatistics:
        return CheckStatistics.of((self.checks or Checks()) if self.spec.is_whole else None)

    def has_reached(self, target: Version | None) -> bool:
        """Whether everything up to a target is delivered; False without a target."""
        return target is not None and self.checkpoint >= target and not self.is_at_snapshot


class FeedStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of a feed compared with its site.

    The checkpoint lag is the recovery point: if the site were lost now, the writes of this period would be
    missing downstream.  The resolved lag is the part of it that the site causes.  A feed that has reached its
    target has no lag.  `alarm` is the text of a recent finding.
    """

    name: str
    state: FeedState
    checkpoint: Version
    resolved_version: Version
    checkpoint_lag_ms: int
    resolved_lag_ms: int
    ranges: int
    holder: str | None
    checks: CheckStatistics = CheckStatistics()
    alarm: str | None = None


def measure(feed: Feed, resolved_version: Version, now_ms: int) -> FeedStatistics:
    lag_ms = max(0, now_ms - physical_ms(feed.checkpoint))
    checks = feed.checked
    return FeedStatistics(
        name=feed.name,
        state=feed.state,
        checkpoint=feed.checkpoint,
        resolved_version=resolved_version,
        checkpoint_lag_ms=0 if feed.has_reached(feed.spec.until) else lag_ms,
        resolved_lag_ms=max(0, now_ms - physical_ms(resolved_version)),
        ranges=len(feed.ranges),
        holder=feed.holder_at(now_ms),
        checks=checks,
        alarm=checks.alarm(now_ms),
    )


# The operations that each state allows


class FeedOperation(StrEnum):
    """An operation that some states refuse."""

    PAUSE = "paused"
    RESUME = "resumed"
    UPDATE = "updated"
    REBALANCE = "rebalanced"
    ACQUIRE = "run"


_FINISHED_ADVICE: Final = "give it a target further on, or none, with an update, and resume it"
_FAILED_ADVICE: Final = "resume it from a version whose changes are still there, or remove it"

# For each operation, the states that refuse it, each with advice for the error message.
REFUSALS: Final[Mapping[FeedOperation, Mapping[FeedState, str]]] = {
    FeedOperation.PAUSE: {
        FeedState.STOPPED: "it already is; resume it when it is to go on",
        FeedState.FAILED: f"it does not run; {_FAILED_ADVICE}",
        FeedState.FINISHED: "it does not run; there is nothing to do",
    },
    FeedOperation.RESUME: {
        FeedState.NORMAL: "it is not paused; if nothing happens, start a runner for it",
    },
    FeedOperation.UPDATE: {
        FeedState.NORMAL: "pause it first",
        FeedState.ERROR: "pause it first",
    },
    FeedOperation.REBALANCE: {
        FeedState.FAILED: f"it has no work to share out; {_FAILED_ADVICE}",
        FeedState.FINISHED: "it has no work to share out",
    },
    FeedOperation.ACQUIRE: {
        FeedState.STOPPED: "resume it first",
        FeedState.FAILED: _FAILED_ADVICE,
        FeedState.FINISHED: _FINISHED_ADVICE,
    },
}


def require_possible(feed: Feed, operation: FeedOperation) -> None:
    """Raise `FeedStateConflict` if the feed's state refuses an operation."""
    advice = REFUSALS[operation].get(feed.state)
    if advice is not None:
        raise state_conflict(feed, operation, advice)


def require_work_left(feed: Feed) -> None:
    """Raise `FeedStateConflict` if the feed has reached its target."""
    until = feed.spec.until
    if feed.has_reached(until):
        raise state_conflict(
            feed,
            FeedOperation.RESUME,
            f"its target {until} is reached at {feed.checkpoint}; {_FINISHED_ADVICE}",
        )


def state_conflict(feed: Feed, operation: FeedOperation, advice: str) -> FeedStateConflict:
    """The error for an operation that the feed's state refuses."""
    return FeedStateConflict(
        f"feed {feed.name!r} is {feed.state} and cannot be {operation}: {advice}",
        feed=feed.name,
        state=str(feed.state),
    )


# Ranges


def cut_ranges(keys: KeyRange, partitions: Iterable[KeyRange], count: int) -> list[KeyRange]:
    """Divide a range along partitions into at most `count` parts with about equally many partitions.

    >>> cut_ranges(KeyRange(b"b", None), [KeyRange(b"", b"c"), KeyRange(b"c", b"f"), KeyRange(b"f", None)], 2)
    [KeyRange(start=b'b', end=b'f'), KeyRange(start=b'f', end=None)]
    """
    starts = sorted(
        within.start for partition in partitions if (within := partition.intersect(keys)) is not None
    )
    parts = min(count, len(starts))
    if parts < 2:
        return [keys]
    # The first parts get one partition more if the division leaves a remainder.
    cuts = [starts[-(-index * len(starts) // parts)] for index in range(1, parts)]
    return [KeyRange(start, end) for start, end in zip([keys.start, *cuts], [*cuts, keys.end], strict=True)]


def recut(olds: Sequence[RangeProgress], keys: Sequence[KeyRange], next_id: int) -> list[RangeProgress]:
    """The new ranges of a feed that is divided again.  An unchanged range keeps its id and its progress.

    Any other range begins at the progress of the least advanced old range that it overlaps.  If that one is
    within a snapshot, the new range resumes at the same key, up to which the sink has the snapshot.
    """
    unchanged = {progress.keys: progress for progress in olds}
    news: list[RangeProgress] = []
    for part in keys:
        if part in unchanged:
            news.append(unchanged[part])
            continue
        overlapping = [progress for progress in olds if progress.keys.intersect(part) is not None]
        least = min(overlapping, key=lambda progress: progress.order)
        news.append(
            RangeProgress(
                id=next_id,
                keys=part,
                checkpoint=least.checkpoint,
                resolved=min(progress.resolved for progress in overlapping),
                snapshot=least.snapshot,
            )
        )
        next_id += 1
    return news


def advance(ranges: Sequence[RangeProgress], reports: Iterable[RangeProgress]) -> list[RangeProgress]:
    """The ranges with the reports of a runner applied.  No range goes back; unknown ranges are ignored."""
    reported = {progress.id: progress for progress in reports}
    return [_further(progress, reported.get(progress.id, progress)) for progress in ranges]


def _further(progress: RangeProgress, report: RangeProgress) -> RangeProgress:
    furthest = max(progress, report, key=lambda each: each.order)
    resolved = max(progress.resolved, report.resolved)
    return replace(progress, checkpoint=furthest.checkpoint, snapshot=furthest.snapshot, resolved=resolved)


def check(feed: Feed, reports: Sequence[RangeProgress], now_ms: int) -> Feed:
    """The feed with a runner's reports applied, and with the heartbeats checked that all ranges have passed.

    The other heartbeats are stored with the counts of the ranges, until they can be checked.
    """
    moved = advance(feed.ranges, reports)
    if not feed.spec.is_whole:
        return replace(feed, ranges=moved)
    reported = {progress.id: progress for progress in reports}
    checks = feed.checks or Checks()
    parts: list[list[CountedRun]] = []
    for before, after in zip(feed.ranges, moved, strict=True):
        entries = [] if before.counted is None else before.counted.entries
        if after.checkpoint > before.checkpoint:
            counted = reported[after.id].counted
            if counted is None:
                checks = checks.doubt_through(after.checkpoint, Doubt.UNCOUNTED)
            else:
                fresh = counted.behind(before.checkpoint)
                checks, entries = checks.hear(fresh), [*entries, *fresh.entries]
        parts.append(entries)
    checkpoint = min(progress.checkpoint for progress in moved)
    settled, left = checks.settle(parts, checkpoint, now_ms)
    ranges = [
        replace(progress, counted=Counted(entries=entries) if entries else None)
        for progress, entries in zip(moved, left, strict=True)
    ]
    return replace(feed, ranges=ranges, checks=settled)


# Arguments


def _between(low: int, high: int) -> Callable[[object, str], None]:
    def require(number: object, name: str) -> None:
        if type(number) is not int or not low <= number <= high:
            raise InvalidArgument(f"{name} is a number from {low:,} to {high:,}, not {number!r:.60}")

    return require


def _require_version(version: object, name: str) -> None:
    if type(version) is not int or not 0 <= version <= VERSION_MAX:
        raise InvalidVersion(f"{name} is a version, not {version!r:.60}")


def _require_description(description: object, _name: str) -> None:
    if not isinstance(description, str) or len(description) > DESCRIPTION_CHARACTERS_MAX:
        raise InvalidArgument(f"a description is a text of at most {DESCRIPTION_CHARACTERS_MAX:,} characters")


def _require_options(options: object, _name: str) -> None:
    if not isinstance(options, SinkOptions):
        raise InvalidArgument(f"options are SinkOptions, not {type(options).__name__}")


def _require_bound(bound: object, name: str) -> None:
    if type(bound) is not bytes or len(bound) > KEY_BYTES_MAX:
        raise InvalidRange(f"{name} is bytes of at most {KEY_BYTES_MAX:,}, not {bound!r:.60}")


# The check of each field of a specification, an update or sink options, by field name.
_CHECKS: Final[Mapping[str, Callable[[Any, str], object]]] = {
    "sink": lambda sink, _: parse_sink(sink),
    "since": _require_version,
    "until": _require_version,
    "description": _require_description,
    "ranges": _between(1, FEED_RANGES_MAX),
    "start_key": _require_bound,
    "end_key": _require_bound,
    "prefix": _require_bound,
    "options": _require_options,
    "concurrency": _between(1, 64),
    "batch_records": _between(1, 1_000_000),
    "backoff_ms": _between(1, LONGEST_MS),
    "rate_bytes_max": _between(1, 1024 * 1024 * MIB),
    "linger_ms": _between(0, 3_600_000),
}
_OPTIONAL: Final = frozenset({"until", "end_key", "prefix", "rate_bytes_max"})


def _require_fields(struct: msgspec.Struct) -> None:
    for name, check in _CHECKS.items():
        value = getattr(struct, name, UNSET)
        if value is not UNSET and not (value is None and name in _OPTIONAL):
            check(value, name)


def _read_number(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise InvalidArgument(f"the parameter {name} in the sink's URI is not a number")
    return int(text)
