"""Where the feeds of a site are kept: their state, their checkpoints, and who runs them.

A feed holds a safe point at its checkpoint, so that garbage collection leaves what it has not delivered.
The order of steps is what keeps that true through crashes: the safe point is set *before* a feed is
entered, and moved on only *after* the checkpoint that allows it is stored.

One runner at a time has a feed's lease.  It renews the lease with each report, and learns from the answer
what became of the feed meanwhile; a runner that lost its lease is told so and must stop writing.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from threading import Lock
from typing import Final, Protocol

import msgspec
from msgspec.structs import replace

from floodmark.accounting.account import Doubt
from floodmark.accounting.checks import Checks, report_findings
from floodmark.clock import TimeSource
from floodmark.codec.ordered import encode_namespace
from floodmark.feed.named.checks import check
from floodmark.feed.named.feeds import (
    Feed,
    FeedError,
    FeedOperation,
    FeedSpec,
    FeedState,
    FeedStatistics,
    FeedUpdate,
    Lease,
    RangeProgress,
    cut_ranges,
    measure,
    recut,
    require_lease_seconds,
    require_possible,
    require_work_left,
)
from floodmark.feed.reading.damage import SKIPPED_KEPT, join_skipped
from floodmark.feed.safepoints import LIFETIME, SafePoints
from floodmark.model.access import Role
from floodmark.model.actions import SITE_OWNER, Action, Owned, Scope
from floodmark.model.errors import (
    FeedExists,
    FeedNotFound,
    FloodmarkError,
    InvalidVersion,
    LeaseHeld,
    LimitExceeded,
    NamespaceNotFound,
    OutcomeUnknown,
    Retryable,
    SafePointNotFound,
    VersionCollected,
    VersionInFuture,
)
from floodmark.model.limits import FEEDS_MAX, REPORTED_CHARACTERS_MAX
from floodmark.model.names import require_name
from floodmark.model.ranges import KeyRange, prefix_end
from floodmark.model.version import Version, compose, moment_of, physical_ms
from floodmark.partition import META, Storage, load_metadata

# A safe point moves with its feed's checkpoint, but not more often than this.
HOLD_EVERY_MS: Final = 60_000

_FEEDS: Final = b"feeds/"

_log = logging.getLogger("floodmark.feed")


class FeedStore(Protocol):
    """The feeds of a site.  Arguments and results are plain data: these calls cross process borders."""

    @Action(
        Role.ADMIN, Scope.NAMESPACE, audited=True, namespaces=lambda arguments: (arguments["spec"].namespace,)
    )
    def create(self, spec: FeedSpec) -> Feed:
        """Add a feed.  If its first changes were collected, `VersionCollected` is raised at once."""
        ...

    @Action(Role.READ, Scope.FEED, repeatable=True)
    def find(self, name: str) -> Feed:
        """The feed of a name."""
        ...

    @Action(Role.ADMIN, Scope.FEED, audited=True)
    def pause(self, name: str) -> Feed:
        """Stop a feed; its runner notices within about a second."""
        ...

    @Action(Role.ADMIN, Scope.FEED, audited=True)
    def resume(self, name: str, since: Version | None = None, snapshot: bool = False) -> Feed:
        """Let a feed go on from its checkpoint, or from another version, or with a snapshot at that.

        Its next changes must still be there.  `snapshot` is for a feed that failed.  Without it, a `since`
        ahead of the checkpoint skips changes, and one behind it delivers them again.
        """
        ...

    @Action(Role.ADMIN, Scope.FEED, audited=True)
    def update(self, name: str, update: FeedUpdate) -> Feed:
        """Change a feed that does not run."""
        ...

    @Action(Role.ADMIN, Scope.FEED, audited=True)
    def remove(self, name: str) -> None:
        """Forget a feed, and let garbage collection go on."""
        ...

    @Action(Role.ADMIN, Scope.FEED, audited=True)
    def rebalance(self, name: str) -> Feed:
        """Cut a feed into ranges anew, along the present partitions.  Its checkpoint stays where it is."""
        ...

    @Action(Role.READ, Scope.FEED, repeatable=True)
    def statistics(self, name: str) -> FeedStatistics:
        """How far a feed lags behind its site."""
        ...

    @Action(Role.WRITE, Scope.FEED, audited=True, owned=Owned.LEASE)
    def acquire(self, name: str, holder: str, seconds: float, owner: str = SITE_OWNER) -> Feed:
        """Take the lease of a feed; `LeaseHeld` if there is one already.  It belongs to its owner."""
        ...

    @Action(Role.WRITE, Scope.FEED, audited=True, unsaid=("progress",), repeatable=True, owned=Owned.LEASE)
    def report(
        self,
        name: str,
        holder: str,
        progress: list[RangeProgress],
        error: FeedError | None,
        owner: str = SITE_OWNER,
    ) -> Feed:
        """Renew the lease, and store how far the runner is and what troubles it.

        `LeaseHeld` if the lease is not the holder's and the owner's any more.

        The answer is the feed as it is now: paused, cut anew, or finished by what was reported.
        """
        ...

    @Action(Role.WRITE, Scope.FEED, audited=True, may_be_gone=True, repeatable=True, owned=Owned.LEASE)
    def release(self, name: str, holder: str, owner: str = SITE_OWNER) -> None:
        """Give the lease back, if it is still the holder's."""
        ...

    @Action(Role.READ, shown_by=lambda feed: feed.spec.namespace, repeatable=True)
    def list(self) -> list[Feed]:
        """All feeds by name."""
        ...


class LocalFeedStore:
    """Keeps feeds in the metadata of an engine of this process.

    `resolve_namespace` gives a namespace's id and the version at which it was created.  What is kept in
    memory changes only in the turn to write; the lock makes the steps of one call one step for the others,
    and is taken before the turn.
    """

    def __init__(
        self,
        storage: Storage,
        safe_points: SafePoints,
        time_source: TimeSource,
        *,
        resolve_namespace: Callable[[str], tuple[int, Version]],
        partition_ranges: Callable[[], Sequence[KeyRange]],
        resolved_version: Callable[[], Version],
    ) -> None:
        self._storage = storage
        self._safe_points = safe_points
        self._time_source = time_source
        self._resolve_namespace = resolve_namespace
        self._partition_ranges = partition_ranges
        self._resolved_version = resolved_version
        self._lock = Lock()
        self._feeds: dict[str, Feed] = {}
        self._load()
        storage.on_recovery.append(self._load)

    def _load(self) -> None:
        self._feeds = {feed.name: feed for feed in load_metadata(self._storage.engine, _FEEDS, Feed)}

    # What people do

    def create(self, spec: FeedSpec) -> Feed:
        spec = spec.normalized()
        with self._lock:
            if spec.name in self._feeds:
                raise FeedExists(
                    f"feed {spec.name!r} is already there; remove it, or choose another name", feed=spec.name
                )
            if len(self._feeds) >= FEEDS_MAX:
                raise LimitExceeded(f"a site has at most {FEEDS_MAX:,} feeds; remove some first")
            feed = self._new_feed(spec)
            self._hold(feed, feed.checkpoint)
            try:
                self._store(feed, wanted=True)
            except OutcomeUnknown:
                # The feed may be there, and then it needs its safe point.
                raise
            except FloodmarkError:
                self._let_go(feed)
                raise
            return feed

    def find(self, name: str) -> Feed:
        feed = self._feeds.get(name)
        if feed is None:
            known = ", ".join(sorted(self._feeds)[:20]) or "none yet"
            raise FeedNotFound(f"no feed {name!r:.200}; there are: {known}", feed=name)
        return feed

    def pause(self, name: str) -> Feed:
        with self._lock:
            feed = self.find(name)
            require_possible(feed, FeedOperation.PAUSE)
            return self._store(replace(feed, state=FeedState.STOPPED, changed_at_ms=self._time_source()))

    def resume(self, name: str, since: Version | None = None, snapshot: bool = False) -> Feed:
        with self._lock:
            feed = self.find(name)
            require_possible(feed, FeedOperation.RESUME)
            created_at = self._require_namespace(feed)
            if since is not None:
                feed = self._restart(feed, max(since, created_at), snapshot=snapshot)
            require_work_left(feed)
            try:
                self._hold(feed, feed.checkpoint)
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
        with self._lock:
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
        with self._lock:
            feed = self.find(name)
            with self._storage.settled():
                self._storage.store([(META, _key(name), None)])
                self._feeds.pop(name, None)
            self._let_go(feed)

    def rebalance(self, name: str) -> Feed:
        with self._lock:
            feed = self.find(name)
            require_possible(feed, FeedOperation.REBALANCE)
            changed = self._cut(feed)
            if changed.ranges == feed.ranges:
                return feed
            return self._store(replace(changed, changed_at_ms=self._time_source()), wanted=True)

    def statistics(self, name: str) -> FeedStatistics:
        return measure(self.find(name), self._resolved_version(), self._time_source())

    # What runners do

    def acquire(self, name: str, holder: str, seconds: float, owner: str = SITE_OWNER) -> Feed:
        lifetime_ms = require_lease_seconds(seconds) // timedelta(milliseconds=1)
        require_name(holder, "holder of a lease")
        with self._lock:
            feed = self.find(name)
            require_possible(feed, FeedOperation.ACQUIRE)
            self._require_namespace(feed)
            now_ms = self._time_source()
            lease = feed.lease
            # Also if it has the same name: two runners that call themselves the same are still two.
            if lease is not None and lease.expires_at_ms > now_ms:
                raise _lease_held(feed, lease)
            try:
                self._hold(feed, feed.checkpoint)
            except VersionCollected as error:
                self._fail(feed, error)
                raise
            lease = Lease(
                holder=holder, expires_at_ms=now_ms + lifetime_ms, lifetime_ms=lifetime_ms, owner=owner
            )
            return self._store(replace(feed, lease=lease, held_at_ms=now_ms))

    def report(
        self,
        name: str,
        holder: str,
        progress: list[RangeProgress],
        error: FeedError | None,
        owner: str = SITE_OWNER,
    ) -> Feed:
        self._require_resolved(progress)
        with self._lock:
            feed = self.find(name)
            lease = feed.lease
            if lease is None or not lease.is_of(holder, owner):
                raise _lease_lost(feed, holder)
            self._require_namespace(feed)
            now_ms = self._time_source()
            is_due = now_ms - feed.held_at_ms >= HOLD_EVERY_MS
            feed, progress = _take_skipped(feed, progress)
            reported = _settle(
                replace(
                    check(feed, progress, now_ms),
                    lease=replace(lease, expires_at_ms=now_ms + lease.lifetime_ms),
                    held_at_ms=now_ms if is_due else feed.held_at_ms,
                ),
                error,
                now_ms,
            )
            self._store(reported)
            report_findings(f"feed {name}", feed.checks, reported.checks, feed=name)
            if reported.state is FeedState.FAILED:
                self._let_go(reported)
            elif is_due:
                return self._move_on(reported)
            return reported

    def release(self, name: str, holder: str, owner: str = SITE_OWNER) -> None:
        with self._lock:
            feed = self._feeds.get(name)
            if feed is not None and feed.lease is not None and feed.lease.is_of(holder, owner):
                self._store(replace(feed, lease=None))

    # Safe points

    def _hold(self, feed: Feed, version: Version) -> None:
        """Keep what comes after a version; `VersionCollected` if some of it is gone already.

        Setting the safe point and looking whether the version is still there are one step for garbage
        collection, which waits for both or comes before both.
        """
        self._safe_points.hold(_safe_point(feed), version, LIFETIME, feed.namespace_id)

    def _let_go(self, feed: Feed) -> None:
        # If this fails, the safe point goes by itself when its lifetime is over.
        with suppress(SafePointNotFound, Retryable, OutcomeUnknown):
            self._safe_points.release(_safe_point(feed))

    def _move_on(self, feed: Feed) -> Feed:
        """Move the safe point to a checkpoint that is stored."""
        try:
            self._hold(feed, feed.checkpoint)
        except VersionCollected as error:
            return self._fail(feed, error)
        except (Retryable, OutcomeUnknown):
            # The old safe point holds for hours; the next minute brings another chance.
            return feed
        return feed

    def _fail(self, feed: Feed, error: VersionCollected) -> Feed:
        failed = _settle(feed, FeedError.of(error, collected=True), self._time_source())
        self._store(failed)
        self._let_go(failed)
        return failed

    # Ranges

    def _new_feed(self, spec: FeedSpec) -> Feed:
        namespace, created_at = self._resolve_namespace(spec.namespace)
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
        """The feed with fresh ranges that begin at a version.  What was reported of others is void."""
        resolved = self._resolved_version()
        if physical_ms(since) > max(self._time_source(), physical_ms(resolved)):
            raise VersionInFuture(
                f"feed {feed.name!r} cannot begin at {since} ({moment_of(since).isoformat()}): the site has "
                f"only come to {resolved} ({moment_of(resolved).isoformat()})",
                version=since,
            )
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
            # What was counted of ranges that are gone went with them; a new one counts from its beginning.
            new = [part.checkpoint for part in ranges if part not in feed.ranges]
            checks = checks.doubt_through(max(new, default=0), Doubt.RECUT)
        next_range = max(feed.next_range, *[part.id + 1 for part in ranges])
        return replace(feed, ranges=ranges, next_range=next_range, checks=checks)

    # Checks and storage

    def _require_namespace(self, feed: Feed) -> Version:
        """The version at which the feed's namespace was created; refuse if it was dropped since."""
        namespace, created_at = self._resolve_namespace(feed.spec.namespace)
        if namespace != feed.namespace_id:
            raise NamespaceNotFound(
                f"the namespace {feed.spec.namespace!r} of feed {feed.name!r} was dropped, and one that came "
                "later has its name; remove the feed and create it again",
                namespace=feed.spec.namespace,
            )
        return created_at

    def _require_resolved(self, progress: Sequence[RangeProgress]) -> None:
        """Refuse a checkpoint that no reader can have reached: it would skip changes in silence."""
        highest = max((part.checkpoint for part in progress), default=0)
        if highest and highest > self._resolved_version():
            raise InvalidVersion(
                f"a runner reports checkpoint {highest}, which this site has not resolved yet",
                version=highest,
            )

    def _store(self, feed: Feed, *, wanted: bool = False) -> Feed:
        """Enter a feed or its new state.  `wanted` for what is refused while the disk is nearly full."""
        with self._storage.settled():
            if wanted:
                self._storage.require_wanted()
            self._storage.store([(META, _key(feed.name), msgspec.json.encode(feed))])
            before = self._feeds.get(feed.name)
            self._feeds[feed.name] = feed
        if before is None or before.state is not feed.state:
            _log_state(feed)
        return feed

    def list(self) -> list[Feed]:
        return sorted(self._feeds.values(), key=lambda feed: feed.name)


def _take_skipped(feed: Feed, progress: list[RangeProgress]) -> tuple[Feed, list[RangeProgress]]:
    """The feed with what a runner has left out since; the ranges themselves do not keep it."""
    told = [change for part in progress for change in part.skipped]
    if not told:
        return feed, progress
    joined = join_skipped(feed.skipped, told)
    count = feed.skipped_count + len(joined) - len(feed.skipped)
    kept = replace(feed, skipped=joined[-SKIPPED_KEPT:], skipped_count=count)
    return kept, [replace(part, skipped=()) for part in progress]


def _settle(feed: Feed, error: FeedError | None, now_ms: int) -> Feed:
    """The feed in the state that its progress and an error put it into."""
    if error is not None and error.collected:
        state = FeedState.FAILED
    elif feed.has_reached(feed.spec.until):
        state, error = FeedState.FINISHED, None
    elif feed.state is FeedState.STOPPED:
        state = FeedState.STOPPED
    else:
        state = FeedState.NORMAL if error is None else FeedState.ERROR
    if error is not None:
        error = replace(error, text=error.text[:REPORTED_CHARACTERS_MAX])
        known = feed.error
        lasts = known is not None and known.text == error.text
        error = replace(error, at_ms=known.at_ms if known is not None and lasts else now_ms)
    return replace(
        feed,
        state=state,
        error=error,
        lease=None if state in (FeedState.FAILED, FeedState.FINISHED) else feed.lease,
        changed_at_ms=feed.changed_at_ms if state is feed.state else now_ms,
    )


def _qualified(feed: Feed) -> KeyRange:
    namespace, keys = encode_namespace(feed.namespace_id), feed.spec.keys()
    return KeyRange(
        namespace + keys.start, prefix_end(namespace) if keys.end is None else namespace + keys.end
    )


def _lease_held(feed: Feed, lease: Lease) -> LeaseHeld:
    until = moment_of(compose(lease.expires_at_ms, 0))
    return LeaseHeld(
        f"feed {feed.name!r} is run by {lease.holder} until {until.isoformat()} at least; wait for it, or "
        "stop that runner",
        feed=feed.name,
        holder=lease.holder,
        expires_at_ms=lease.expires_at_ms,
    )


def _lease_lost(feed: Feed, holder: str) -> LeaseHeld:
    if feed.lease is not None:
        return _lease_held(feed, feed.lease)
    return LeaseHeld(
        f"{holder} does not hold the lease of feed {feed.name!r} any more; nobody does. Acquire it again",
        feed=feed.name,
        holder=None,
    )


def _log_state(feed: Feed) -> None:
    # What is tried again is no alarm; what cannot go on is.
    level = logging.WARNING if feed.state is FeedState.FAILED else logging.INFO
    reason = "" if feed.error is None else f": {feed.error.text}"
    _log.log(level, "feed %s is %s%s", feed.name, feed.state, reason, extra={"feed": feed.name})


def _safe_point(feed: Feed) -> str:
    return f"feed/{feed.name}"


def _key(name: str) -> bytes:
    return _FEEDS + name.encode()
