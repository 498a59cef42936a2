"""Safe points: versions that readers still need, and that garbage collection respects.

A safe point has a version and a lifetime.  Garbage collection keeps everything that a reader at or above the
lowest safe point can see.  A safe point ends when it is released or expires, so a dead reader cannot fill the
disk.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import count
from threading import RLock
from typing import Final, TypeVar

import msgspec

from floodmark.clock import TimeSource
from floodmark.model.actions import SITE_OWNER
from floodmark.model.change import Resolved
from floodmark.model.errors import (
    InvalidArgument,
    InvalidVersion,
    LimitExceeded,
    NotAllowed,
    SafePointNotFound,
    VersionCollected,
)
from floodmark.model.limits import SAFE_POINTS_MAX, SAFE_POINTS_PER_CALLER_MAX, TTL_MAX
from floodmark.model.names import require_name
from floodmark.model.version import VERSION_MAX, Version, moment_of
from floodmark.partition import META, Retention, Storage, load_metadata

LIFETIME: Final = timedelta(hours=24)
# The longest lifetime of a safe point that a reader sets for itself.
READERS_LIFETIME_MAX: Final = timedelta(days=30)
# The kinds of safe points that the site itself sets.
SITE_KINDS: Final = frozenset({"feed", "generation", "publish", "subscription"})

# The words for positions at which reading begins, in the API and in Spark's options.
FIRST_STARTS: Final = frozenset({"beginning", "earliest"})
PRESENT_STARTS: Final = frozenset({"now", "end", "latest"})
SNAPSHOT_START: Final = "snapshot"

_SAFE_POINTS: Final = b"safe-points/"
_PRESENT_TRIES: Final = 10

Result = TypeVar("Result")
# The present, as a version or as a place in a stream of changes.
Present = TypeVar("Present")


class SafePoint(msgspec.Struct, frozen=True):
    """A promise to keep what a reader at `version` sees, until `expires_at_ms`."""

    name: str
    version: Version
    expires_at_ms: int
    namespace: int | None = None
    # Identifies the caller that set it.  None if an earlier release, without owners, set it.
    owner: str | None = None


class SafePoints:
    """The safe points of a site: named ones, which are stored, and those of this process's readers.

    Garbage collection holds `lock` while it raises the collected version, so a safe point is either respected
    or refused.  The lock is taken after the write turn, never before.
    """

    def __init__(
        self,
        storage: Storage,
        time_source: TimeSource,
        live_namespaces: Callable[[], Iterable[int]],
        retention: Retention,
    ) -> None:
        self.lock = RLock()
        self.storage = storage
        self.time_source = time_source
        self.live_namespaces = live_namespaces
        self._retention = retention
        self._named: dict[str, SafePoint] = {}
        self._readers: dict[int, tuple[Version, int | None]] = {}
        self._tokens = count()
        self._load()
        storage.on_recovery.append(self._load)

    def _load(self) -> None:
        points = list(load_metadata(self.storage.engine, _SAFE_POINTS, SafePoint))
        with self.lock:
            self._named = {point.name: point for point in points}

    def hold(
        self,
        name: str,
        version: Version,
        lifetime: timedelta,
        namespace: int | None = None,
        owner: str = SITE_OWNER,
    ) -> SafePoint:
        """Set or move a named safe point.  Holding again renews the lifetime.

        Raises NotAllowed if another owner holds one of this name.
        """
        require_lifetime(name, lifetime)
        expires_at_ms = self.time_source() + lifetime // timedelta(milliseconds=1)
        point = SafePoint(name, version, expires_at_ms, namespace, owner)
        with self.storage.settled(), self.lock:
            self._require_own(point)
            is_new = name not in self._named
            if is_new:
                # Moving an existing one is allowed on a full disk, because it lets garbage collection free
                # space.
                self.storage.require_wanted()
            self._require_kept(version, namespace)
            if is_new and len(self._named) >= SAFE_POINTS_MAX:
                raise LimitExceeded(f"a site holds at most {SAFE_POINTS_MAX:,} safe points")
            self.storage.store([(META, _key(name), msgspec.json.encode(point))])
            self._named[name] = point
        return point

    def _require_own(self, point: SafePoint) -> None:
        """Refuse to move the safe point of another owner, and to exceed the owner's maximum number."""
        if point.owner == SITE_OWNER:
            return
        live = self.list()
        known = next((each for each in live if each.name == point.name), None)
        if known is None:
            if sum(each.owner == point.owner for each in live) >= SAFE_POINTS_PER_CALLER_MAX:
                raise LimitExceeded(
                    f"one caller holds at most {SAFE_POINTS_PER_CALLER_MAX:,} safe points; release some, or "
                    "wait until their lifetimes are over"
                )
            return
        adopts = known.owner is None and known.namespace == point.namespace
        if known.owner != point.owner and not adopts:
            raise NotAllowed(
                f"safe point {point.name!r} was set by another caller; choose another name, or ask an "
                "administrator of the whole site to release it",
                name=point.name,
            )

    def release(self, name: str, owner: str = SITE_OWNER) -> None:
        """Release a named safe point.  Raises `SafePointNotFound`, also for one of another owner."""
        with self.storage.settled(), self.lock:
            known = [point.name for point in self.list() if owner in (SITE_OWNER, point.owner)]
            if name not in known:
                listed = ", ".join(known) or "none"
                raise SafePointNotFound(f"no safe point {name!r}; there are: {listed}", name=name)
            self.storage.store([(META, _key(name), None)])
            self._named.pop(name, None)

    @contextmanager
    def reading(self, version: Version, namespace: int | None) -> Iterator[Callable[[Version], None]]:
        """Hold a version for a reader of this process during the block.  Yields a function that moves it."""
        token = next(self._tokens)
        with self.lock:
            self._require_kept(version, namespace)
            self._readers[token] = version, namespace

        def advance(to: Version) -> None:
            self._readers[token] = to, namespace

        try:
            yield advance
        finally:
            self._readers.pop(token, None)

    def adopt(self, before: "SafePoints") -> None:
        """Take over the holds of this process's readers from the host that this one replaces."""
        self._readers, self._tokens = before._readers, before._tokens

    def list(self) -> list[SafePoint]:
        """The named safe points that have not expired, by name."""
        now_ms = self.time_source()
        with self.lock:
            points = sorted(self._named.values(), key=lambda point: point.name)
            return [point for point in points if point.expires_at_ms > now_ms]

    def lowest(self, namespace: int, version: Version) -> Version:
        """The minimum of a version and of all held versions of a namespace.  The caller holds the lock."""
        held = [point.version for point in self.list() if point.namespace in (None, namespace)]
        held += [at for at, scope in list(self._readers.values()) if scope in (None, namespace)]
        return min([version, *held])

    def held_by_readers(self) -> dict[int, Version]:
        """The lowest version that readers of this process hold, by namespace; 0 stands for all of them."""
        held: dict[int, Version] = {}
        for version, namespace in list(self._readers.values()):
            held[namespace or 0] = min(version, held.get(namespace or 0, version))
        return held

    def forget_expired(self) -> None:
        """Delete expired safe points."""
        now_ms = self.time_source()
        with self.storage.settled(), self.lock:
            expired = [point for point in self._named.values() if point.expires_at_ms <= now_ms]
            if expired:
                self.storage.store_in_portions([(META, _key(point.name), None) for point in expired])
                for point in expired:
                    self._named.pop(point.name, None)

    def oldest_version(self, namespace: int | None) -> Version:
        """The oldest version at which one namespace, or every one, can still be read."""
        if namespace is not None:
            return self._retention.collected_version(namespace)
        return max(map(self._retention.collected_version, self.live_namespaces()), default=0)

    def _require_kept(self, version: Version, namespace: int | None) -> None:
        oldest = self.oldest_version(namespace)
        if version < oldest:
            raise VersionCollected(
                f"version {version} was collected; the oldest that can still be read is {oldest} "
                f'({moment_of(oldest).isoformat()}). Begin with a snapshot (since="snapshot"), which '
                "has every key, and go on with the changes behind it",
                version=version,
                oldest=oldest,
            )


def begin_reading(
    start: Resolved | Version | str,
    begin: Callable[[Resolved], Result],
    *,
    present: Callable[[], Version],
    require_past: Callable[[Version], object],
    until: Version | None = None,
    created_at: Version = 0,
) -> Result:
    """Resolve a start to a position, and return the result of `begin`, which must hold that position.

    A start at the present is retried if it was collected meanwhile.  A snapshot is taken at `until` if that
    is below the present.  Other starts must not be in the future (`require_past`), and are raised to
    `created_at`.
    """
    if start == SNAPSHOT_START:
        end = VERSION_MAX if until is None else until
        return at_present(lambda: Resolved(min(present(), end), b""), begin)
    if start in PRESENT_STARTS:
        return at_present(lambda: Resolved(present()), begin)
    first = 0 if start in FIRST_STARTS else start
    if isinstance(first, str):
        raise InvalidVersion(
            f"reading begins at a version, a moment or a word such as 'now', not {first!r:.60}"
        )
    place = first if isinstance(first, Resolved) else Resolved(first)
    if place.version:
        require_past(place.version)
    return begin(Resolved(max(place.version, created_at), place.snapshot))


def at_present(read_version: Callable[[], Present], hold: Callable[[Present], Result]) -> Result:
    """Read the present version and return the result of `hold` for it.

    Without retention, garbage collection may collect the version between the two calls.  Then this retries
    with the next one.
    """
    for _ in range(_PRESENT_TRIES - 1):
        with suppress(VersionCollected):
            return hold(read_version())
    return hold(read_version())


def is_readers_name(name: str) -> bool:
    """Whether a name is that of a reader's own safe point: it begins with a kind, but none of the site's.

    >>> [is_readers_name(name) for name in ("spark/5f2b9c7d", "nightly", "feed/indexer")]
    [True, False, False]
    """
    kind, slash, _ = name.partition("/")
    return bool(slash) and kind not in SITE_KINDS


def require_safe_point_name(name: str) -> None:
    """Refuse a safe point's name unless it has the form NAME, or KIND/NAME for that of a reader."""
    for part in name.split("/", 1) if is_readers_name(name) else [name]:
        require_name(part, "safe point")


def require_lifetime(name: str, lifetime: object) -> None:
    """Raise `InvalidArgument` unless this is a possible lifetime of a safe point."""
    if not isinstance(lifetime, timedelta) or not timedelta(0) < lifetime <= TTL_MAX:
        raise InvalidArgument(
            f"the lifetime of safe point {name!r} is a positive timedelta of at most "
            f"{TTL_MAX.days:,} days, not {lifetime!r:.60}"
        )


def _key(name: str) -> bytes:
    return _SAFE_POINTS + name.encode()
