"""Safe points: who still needs old versions, and how far back.

A holder names a version and a lifetime.  Garbage collection keeps everything a reader at or above the
lowest held version can see, until the holder lets go or its lifetime is over, so that a reader that
died cannot fill the disk.
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
from floodmark.model.errors import (
    InvalidArgument,
    LimitExceeded,
    NotAllowed,
    SafePointNotFound,
    VersionCollected,
)
from floodmark.model.limits import SAFE_POINTS_MAX, SAFE_POINTS_PER_CALLER_MAX, TTL_MAX
from floodmark.model.names import require_name
from floodmark.model.version import Version, moment_of
from floodmark.partition import META, Retention, Storage, load_metadata

LIFETIME: Final = timedelta(hours=24)
# For how long a reader may hold a safe point of its own.
READERS_LIFETIME_MAX: Final = timedelta(days=30)
# The kinds of the safe points that the site itself holds.
SITE_KINDS: Final = frozenset({"feed", "subscription"})

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
    # The mark of the caller that set it.  None if it was set by a release that knew of no owners.
    owner: str | None = None


class SafePoints:
    """The holders of a site: named ones, which are stored, and readers of this process, which are not.

    `lock` is held by whoever raises the collected version, so that a safe point is either seen by the
    collection or told that it came too late.  It is taken after the turn to write, never before.
    """

    def __init__(
        self,
        storage: Storage,
        time_source: TimeSource,
        live_namespaces: Callable[[], Iterable[int]],
        retention: Retention,
    ) -> None:
        self.lock = RLock()
        self._storage = storage
        self._time_source = time_source
        self.live_namespaces = live_namespaces
        self._retention = retention
        self._named: dict[str, SafePoint] = {}
        self._readers: dict[int, tuple[Version, int | None]] = {}
        self._tokens = count()
        self._load()
        storage.on_recovery.append(self._load)

    def _load(self) -> None:
        points = list(load_metadata(self._storage.engine, _SAFE_POINTS, SafePoint))
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
        expires_at_ms = self._time_source() + lifetime // timedelta(milliseconds=1)
        point = SafePoint(name, version, expires_at_ms, namespace, owner)
        with self._storage.settled(), self.lock:
            self._require_own(point)
            is_new = name not in self._named
            if is_new:
                # One that moves on lets garbage collection free something, also on a full disk.
                self._storage.require_wanted()
            self._require_kept(version, namespace)
            if is_new and len(self._named) >= SAFE_POINTS_MAX:
                raise LimitExceeded(f"a site holds at most {SAFE_POINTS_MAX:,} safe points")
            self._storage.store([(META, _key(name), msgspec.json.encode(point))])
            self._named[name] = point
        return point

    def _require_own(self, point: SafePoint) -> None:
        """Refuse to move the safe point of another, or to set more than one owner may have."""
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
        """Let go of a named safe point.  That of another owner is not found."""
        with self._storage.settled(), self.lock:
            known = [point.name for point in self.list() if owner in (SITE_OWNER, point.owner)]
            if name not in known:
                listed = ", ".join(known) or "none"
                raise SafePointNotFound(f"no safe point {name!r}; there are: {listed}", name=name)
            self._storage.store([(META, _key(name), None)])
            self._named.pop(name, None)

    @contextmanager
    def reading(self, version: Version, namespace: int | None) -> Iterator[Callable[[Version], None]]:
        """Keep a version while a reader of this process is at it; the reader may move it on."""
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

    def list(self) -> list[SafePoint]:
        """The named safe points whose lifetime is not over, by name."""
        now_ms = self._time_source()
        with self.lock:
            points = sorted(self._named.values(), key=lambda point: point.name)
            return [point for point in points if point.expires_at_ms > now_ms]

    def lowest(self, namespace: int, version: Version) -> Version:
        """The lower of a version and all that is held for a namespace.  Call with the lock held."""
        held = [point.version for point in self.list() if point.namespace in (None, namespace)]
        held += [at for at, scope in list(self._readers.values()) if scope in (None, namespace)]
        return min([version, *held])

    def forget_expired(self) -> None:
        """Drop stored safe points whose lifetime is over."""
        now_ms = self._time_source()
        with self._storage.settled(), self.lock:
            expired = [point for point in self._named.values() if point.expires_at_ms <= now_ms]
            if expired:
                self._storage.store([(META, _key(point.name), None) for point in expired])
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


def at_present(read_version: Callable[[], Present], hold: Callable[[Present], Result]) -> Result:
    """Hold the present version in some way; what `hold` answers.

    Where nothing of the past is kept, garbage collection may fall between the two.  A reader that named no
    version has asked for none that is gone: it takes the next one.
    """
    for _ in range(_PRESENT_TRIES - 1):
        with suppress(VersionCollected):
            return hold(read_version())
    return hold(read_version())


def is_readers_name(name: str) -> bool:
    """Whether a name is one of a reader's safe point: it says what kind of reader it is.

    >>> [is_readers_name(name) for name in ("spark/5f2b9c7d", "nightly", "feed/indexer")]
    [True, False, False]
    """
    kind, slash, _ = name.partition("/")
    return bool(slash) and kind not in SITE_KINDS


def require_safe_point_name(name: str) -> None:
    """Refuse a name that a caller cannot give a safe point: it is NAME, or KIND/NAME for a reader's."""
    for part in name.split("/", 1) if is_readers_name(name) else [name]:
        require_name(part, "safe point")


def require_lifetime(name: str, lifetime: object) -> None:
    """Refuse what is no lifetime of a safe point."""
    if not isinstance(lifetime, timedelta) or not timedelta(0) < lifetime <= TTL_MAX:
        raise InvalidArgument(
            f"the lifetime of safe point {name!r} is a positive timedelta of at most "
            f"{TTL_MAX.days:,} days, not {lifetime!r:.60}"
        )


def _key(name: str) -> bytes:
    return _SAFE_POINTS + name.encode()
