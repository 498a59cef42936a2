"""The store of named feeds: their states, their checkpoints, and the leases of their runners.

One runner at a time holds a feed's lease.  It renews the lease with each report, and the answer is the
current feed.  A runner that has lost its lease gets `LeaseHeld` and must stop writing.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from msgspec.structs import replace

from floodmark.accounting.account import Doubt
from floodmark.accounting.checks import Checks, report_findings
from floodmark.codec.ordered import qualify_range
from floodmark.feed.leased import HOLD_EVERY_MS, LeasedReaders, ReaderKind, ResolveSite, RowState
from floodmark.feed.named.feeds import (
    Feed,
    FeedError,
    FeedOperation,
    FeedSpec,
    FeedState,
    FeedStatistics,
    FeedUpdate,
    RangeProgress,
    check,
    cut_ranges,
    measure,
    recut,
    require_possible,
    require_work_left,
)
from floodmark.feed.reading.items import SKIPPED_KEPT, join_skipped
from floodmark.feed.safepoints import SafePoints
from floodmark.model.access import Role
from floodmark.model.actions import SITE_OWNER, Action, Owned, Scope
from floodmark.model.errors import (
    FeedExists,
    FeedNotFound,
    InvalidVersion,
    OutcomeUnknown,
    Retryable,
    VersionCollected,
)
from floodmark.model.limits import FEEDS_MAX, REPORTED_CHARACTERS_MAX
from floodmark.model.ranges import KeyRange
from floodmark.model.version import Version
from floodmark.partition import load_metadata

FEEDS: Final = ReaderKind(
    noun="feed",
    used="run",
    free="stop that runner",
    again="acquire it again",
    anew="create it",
    prefix=b"feeds/",
    rows_max=FEEDS_MAX,
    not_found=FeedNotFound,
)

_log = logging.getLogger("floodmark.feed")


class FeedStore(Protocol):
    """The feeds of a site.  Arguments and results are plain data, because calls cross processes."""

    @Action(
        Role.ADMIN, Scope.NAMESPACE, audited=True, namespaces=lambda arguments: (arguments["spec"].namespace,)
    )
    def create(self, spec: FeedSpec) -> Feed:
        """Add a feed.  Raises `VersionCollected` if its first changes were collected."""

    @Action(Role.READ, Scope.FEED, repeatable=True)
    def find(self, name: str) -> Feed:
        """The feed with this name.  Raises FeedNotFound."""

    @Action(Role.ADMIN, Scope.FEED, audited=True)
    def pause(self, name: str) -> Feed:
        """Pause a feed.  Its runner stops within about a second."""

    @Action(Role.ADMIN, Scope.FEED, audited=True)
    def resume(self, name: str, since: Version | None = None, snapshot: bool = False) -> Feed:
        """Resume a feed from its checkpoint or from `since`; with `snapshot`, from the snapshot at `since`.

        Raises `VersionCollected` if its next changes were collected; `snapshot` is for a feed that failed
        because of that.  Without `snapshot`, a `since` above the checkpoint skips changes, and one below it
        delivers changes again.
        """

    @Action(Role.ADMIN, Scope.FEED, audited=True)
    def update(self, name: str, update: FeedUpdate) -> Feed:
        """Change a feed that is not running."""

    @Action(Role.ADMIN, Scope.FEED, audited=True)
    def remove(self, name: str) -> None:
        """Delete a feed and its safe point."""

    @Action(Role.ADMIN, Scope.FEED, audited=True)
    def rebalance(self, name: str) -> Feed:
        """Divide a feed into ranges again, along the current partitions.  Its checkpoint does not change."""

    @Action(Role.READ, Scope.FEED, repeatable=True)
    def statistics(self, name: str) -> FeedStatistics:
        """The progress and lag of a feed."""

    @Action(Role.WRITE, Scope.FEED, audited=True, owned=Owned.LEASE)
    def acquire(self, name: str, holder: str, seconds: float, owner: str = SITE_OWNER) -> Feed:
        """Acquire the lease of a feed for an owner.  Raises `LeaseHeld` if a runner has it."""

    @Action(Role.WRITE, Scope.FEED, audited=True, unsaid=("progress",), repeatable=True, owned=Owned.LEASE)
    def report(
        self,
        name: str,
        holder: str,
        progress: list[RangeProgress],
        error: FeedError | None,
        owner: str = SITE_OWNER,
    ) -> Feed:
        """Renew the lease, and store the runner's progress and its error.

        Returns the current feed, which may have been paused, divided again, or finished by this report.
        Raises `LeaseHeld` if the holder and owner no longer have the lease.
        """

    @Action(Role.WRITE, Scope.FEED, audited=True, may_be_gone=True, repeatable=True, owned=Owned.LEASE)
    def release(self, name: str, holder: str, owner: str = SITE_OWNER) -> None:
        """Release the lease, if the holder still has it."""

    @Action(Role.READ, shown_by=lambda feed: feed.spec.namespace, repeatable=True)
    def list(self) -> list[Feed]:
        """All feeds, in order of their names."""


class LocalFeedStore:
    """Keeps feeds in the metadata of an engine of this process."""

    def __init__(
        self,
        safe_points: SafePoints,
        *,
        resolve_namespace: Callable[[str], tuple[int, Version]],
        partition_ranges: Callable[[], Sequence[KeyRange]],
        resolved_version: ResolveSite,
    ) -> None:
        self._time_source = safe_points.time_source
        self._partition_ranges = partition_ranges
        self._readers: LeasedReaders[Feed, RowState[Feed]] = LeasedReaders(
            FEEDS,
            safe_points,
            resolve_namespace=resolve_namespace,
            resolved_version=resolved_version,
            load=lambda engine: (RowState(FEEDS, feed) for feed in load_metadata(engine, FEEDS.prefix, Feed)),
        )

    # Administration

    def create(self, spec: FeedSpec) -> Feed:
        spec = spec.normalized()
        with self._readers.lock:
            if spec.name in self._readers.states:
                raise FeedExists(
                    f"feed {spec.name!r} is already there; remove it, or choose another name", feed=spec.name
                )
            self._readers.require_room()
            feed = self._new_feed(spec)
            self._readers.hold(feed, feed.checkpoint)
            self._readers.enter(RowState(FEEDS, feed))
            _log_state(feed)
            return feed

    def find(self, name: str) -> Feed:
        return self._readers.find(name)

    def pause(self, name: str) -> Feed:
        with self._readers.lock:
            feed = self.find(name)
            require_possible(feed, FeedOperation.PAUSE)
            return self._store(replace(feed, state=FeedState.STOPPED, changed_at_ms=self._time_source()))

    def resume(self, name: str, since: Version | None = None, snapshot: bool = False) -> Feed:
        with self._readers.lock:
            feed = self.find(name)
            require_possible(feed, FeedOperation.RESUME)
            created_at = self._readers.require_namespace(feed)
            if since is not None:
                feed = self._restart(feed, max(since, created_at), snapshot=snapshot)
            require_work_left(feed)
            try:
                self._readers.hold(feed, feed.checkpoint)
            except VersionCollected as error:
                if since is None:
                    self._fail(feed, error)
                raise
            now_ms = self._time_source()
            return self._store(
                replace(feed, state=FeedState.NORMAL, error=None, changed_at_ms=now_ms, held_at_ms=now_ms),
                wanted=True,
            )

    def update(self, name: str, update: FeedUpdate) -> Feed:
        with self._readers.lock:
            feed = self.find(name)
            require_possible(feed, FeedOperation.UPDATE)
            spec = update.apply(feed.spec)
            if spec.until != feed.spec.until and feed.has_reached(spec.until):
                raise InvalidVersion(
                    f"the target {spec.until} of feed {name!r} lies at or behind its checkpoint "
                    f"{feed.checkpoint}; give one further on, or none"
                )
            changed = replace(feed, spec=spec, changed_at_ms=self._time_source())
            if spec.ranges != feed.spec.ranges:
                changed = self._cut(changed)
            return self._store(changed, wanted=True)

    def remove(self, name: str) -> None:
        with self._readers.lock:
            self._readers.remove(name)

    def rebalance(self, name: str) -> Feed:
        with self._readers.lock:
            feed = self.find(name)
            require_possible(feed, FeedOperation.REBALANCE)
            changed = self._cut(feed)
            if changed.ranges == feed.ranges:
                return feed
            return self._store(replace(changed, changed_at_ms=self._time_source()), wanted=True)

    def statistics(self, name: str) -> FeedStatistics:
        return measure(self.find(name), self._readers.resolved_version(), self._time_source())

    # Runners

    def acquire(self, name: str, holder: str, seconds: float, owner: str = SITE_OWNER) -> Feed:
        lease = self._readers.new_lease(holder, seconds, owner)
        with self._readers.lock:
            feed = self.find(name)
            require_possible(feed, FeedOperation.ACQUIRE)
            self._readers.require_namespace(feed)
            # A lease with the same holder name is refused, too: it may belong to another runner of that name.
            self._readers.require_free(feed)
            now_ms = self._time_source()
            try:
                self._readers.hold(feed, feed.checkpoint)
            except VersionCollected as error:
                self._fail(feed, error)
                raise
            return self._store(replace(feed, lease=lease.renewed(now_ms), held_at_ms=now_ms))

    def report(
        self,
        name: str,
        holder: str,
        progress: list[RangeProgress],
        error: FeedError | None,
        owner: str = SITE_OWNER,
    ) -> Feed:
        self._readers.require_resolved([part.checkpoint for part in progress])
        with self._readers.lock:
            feed = self.find(name)
            lease = feed.lease
            if lease is None or not lease.is_of(holder, owner):
                raise FEEDS.lease_held(feed)
            self._readers.require_namespace(feed)
            now_ms = self._time_source()
            is_due = now_ms - feed.held_at_ms >= HOLD_EVERY_MS
            feed, progress = _take_skipped(feed, progress)
            held_at_ms = now_ms if is_due else feed.held_at_ms
            checked = replace(
                check(feed, progress, now_ms), lease=lease.renewed(now_ms), held_at_ms=held_at_ms
            )
            reported = self._store(_settle(checked, error, now_ms))
            report_findings(f"feed {name}", feed.checks, reported.checks, feed=name)
            if reported.state is FeedState.FAILED:
                self._readers.let_go(name)
            elif is_due:
                return self._move_on(reported)
            return reported

    def release(self, name: str, holder: str, owner: str = SITE_OWNER) -> None:
        with self._readers.lock:
            state = self._readers.states.get(name)
            lease = None if state is None else state.row.lease
            if state is not None and lease is not None and lease.is_of(holder, owner):
                self._store(replace(state.row, lease=None))

    def list(self) -> list[Feed]:
        return self._readers.list()

    def _move_on(self, feed: Feed) -> Feed:
        """Move the safe point to the stored checkpoint."""
        try:
            self._readers.hold(feed, feed.checkpoint)
        except VersionCollected as error:
            return self._fail(feed, error)
        except (Retryable, OutcomeUnknown):
            # The old safe point lasts for hours, and the next attempt to move it is in a minute.
            pass
        return feed

    def _fail(self, feed: Feed, error: VersionCollected) -> Feed:
        failed = self._store(_settle(feed, FeedError.of(error, collected=True), self._time_source()))
        self._readers.let_go(feed.name)
        return failed

    def _store(self, feed: Feed, *, wanted: bool = False) -> Feed:
        before = self.find(feed.name)
        self._readers.update(feed.name, lambda _: feed, wanted=wanted)
        if before.state is not feed.state:
            _log_state(feed)
        return feed

    # Ranges

    def _new_feed(self, spec: FeedSpec) -> Feed:
        namespace, created_at = self._readers.resolve_namespace(spec.namespace)
        now_ms = self._time_source()
        feed = Feed(
            spec=spec,
            namespace_id=namespace,
            state=FeedState.NORMAL,
            ranges=[],
            created_at_ms=now_ms,
            changed_at_ms=now_ms,
            next_range=1,
            held_at_ms=now_ms,
            checks=Checks() if spec.is_whole else None,
        )
        since = max(spec.since, created_at)
        spec.require_target(since)
        return self._restart(feed, since, snapshot=spec.snapshot)

    def _restart(self, feed: Feed, since: Version, *, snapshot: bool) -> Feed:
        """The feed with new ranges that begin at a version.  Reports about its old ranges are ignored."""
        self._readers.require_reached(feed.name, since)
        start = b"" if snapshot else None
        whole = RangeProgress(id=0, keys=_qualified(feed), checkpoint=since, snapshot=start)
        cut = cut_ranges(whole.keys, self._partition_ranges(), feed.spec.ranges)
        ranges = [replace(whole, id=feed.next_range + index, keys=keys) for index, keys in enumerate(cut)]
        checks = None if feed.checks is None else feed.checks.begin_anew()
        if checks is not None and snapshot:
            checks = checks.doubt_through(since, Doubt.SNAPSHOT)
        return replace(feed, ranges=ranges, next_range=feed.next_range + len(ranges), checks=checks)

    def _cut(self, feed: Feed) -> Feed:
        cut = cut_ranges(_qualified(feed), self._partition_ranges(), feed.spec.ranges)
        ranges = recut(feed.ranges, cut, feed.next_range)
        checks = feed.checks
        if checks is not None and ranges != feed.ranges:
            # The counts of removed ranges are lost, and a new range counts from its beginning.
            new = [part.checkpoint for part in ranges if part not in feed.ranges]
            checks = checks.doubt_through(max(new, default=0), Doubt.RECUT)
        next_range = max(feed.next_range, *[part.id + 1 for part in ranges])
        return replace(feed, ranges=ranges, next_range=next_range, checks=checks)


def _take_skipped(feed: Feed, progress: list[RangeProgress]) -> tuple[Feed, list[RangeProgress]]:
    """Move the skipped changes from a report to the feed."""
    told = [change for part in progress for change in part.skipped]
    if not told:
        return feed, progress
    joined = join_skipped(feed.skipped, told)
    count = feed.skipped_count + len(joined) - len(feed.skipped)
    kept = replace(feed, skipped=joined[-SKIPPED_KEPT:], skipped_count=count)
    return kept, [replace(part, skipped=()) for part in progress]


def _settle(feed: Feed, error: FeedError | None, now_ms: int) -> Feed:
    """The feed in the state that follows from its progress and an error."""
    if error is not None and error.collected:
        state = FeedState.FAILED
    elif feed.has_reached(feed.spec.until):
        state, error = FeedState.FINISHED, None
    elif feed.state is FeedState.STOPPED:
        state = FeedState.STOPPED
    else:
        state = FeedState.NORMAL if error is None else FeedState.ERROR
    if error is not None:
        text, known = error.text[:REPORTED_CHARACTERS_MAX], feed.error
        lasts_from = known.at_ms if known is not None and known.text == text else now_ms
        error = replace(error, text=text, at_ms=lasts_from)
    return replace(
        feed,
        state=state,
        error=error,
        lease=None if state in (FeedState.FAILED, FeedState.FINISHED) else feed.lease,
        changed_at_ms=feed.changed_at_ms if state is feed.state else now_ms,
    )


def _qualified(feed: Feed) -> KeyRange:
    return qualify_range(feed.namespace_id, feed.spec.keys())


def _log_state(feed: Feed) -> None:
    # An error that is retried raises no alarm.
    level = logging.WARNING if feed.state is FeedState.FAILED else logging.INFO
    reason = "" if feed.error is None else f": {feed.error.text}"
    _log.log(level, "feed %s is %s%s", feed.name, feed.state, reason, extra={"feed": feed.name})
