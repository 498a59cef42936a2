"""Leased readers: the common part of named feeds and subscriptions.

A leased reader is a stored row with a name, a namespace, a position, a lease and a safe point.  One process
at a time holds the lease, and renews it as long as it works.  The safe point keeps the changes that the
reader has not delivered.  It is set *before* the row that needs it is stored, and moved only *after* the row
that allows it, so that a crash never leaves a row without its changes.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from threading import Lock, RLock
from typing import Any, Final, Generic, Protocol, Self, TypeVar

import msgspec
from msgspec.structs import replace

from floodmark.engine import Engine, WriteRow
from floodmark.feed.safepoints import LIFETIME, SafePoints
from floodmark.model.actions import SITE_OWNER
from floodmark.model.errors import (
    FloodmarkError,
    InvalidArgument,
    InvalidVersion,
    LeaseHeld,
    LimitExceeded,
    NamespaceNotFound,
    OutcomeUnknown,
    Retryable,
    SafePointNotFound,
    VersionInFuture,
)
from floodmark.model.names import require_name
from floodmark.model.version import VERSION_MAX, Version, compose, moment_of, physical_ms
from floodmark.partition import META

# A safe point moves with its reader, but not more often than this.
HOLD_EVERY_MS: Final = 60_000
LEASE_SECONDS_MAX: Final = 3_600
_NAMES_SHOWN: Final = 20


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """The holder of a reader, and the time at which the lease expires unless it is renewed.

    `holder` is the public name of the process; `owner` identifies the caller that acquired the lease, or is
    None if an earlier release, without owners, stored the lease.
    """

    holder: str
    expires_at_ms: int
    lifetime_ms: int
    owner: str | None = None

    def is_of(self, holder: str, owner: str) -> bool:
        """Whether the lease is held by this holder and owner."""
        return self.holder == holder and self.belongs_to(owner)

    def belongs_to(self, owner: str) -> bool:
        """Whether the caller `owner` acquired the lease, or is the site itself, which may use every lease."""
        return owner == SITE_OWNER or self.owner in (None, owner)

    def renewed(self, now_ms: int) -> "Lease":
        return replace(self, expires_at_ms=now_ms + self.lifetime_ms)


def require_lease_seconds(seconds: object) -> timedelta:
    """The duration of a lease.  Raises InvalidArgument for an impossible one."""
    if not isinstance(seconds, int | float) or not 0 < seconds <= LEASE_SECONDS_MAX:
        raise InvalidArgument(
            f"a lease lasts more than 0 and at most {LEASE_SECONDS_MAX:,} seconds, not {seconds!r:.60}"
        )
    return timedelta(seconds=seconds)


class ReaderSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The specification of a leased reader."""

    name: str
    namespace: str


class LeasedRow(msgspec.Struct, frozen=True, kw_only=True):
    """A leased reader as it is stored and shown.  Its lease may have expired.

    `namespace_id` is the id that the namespace had when the reader was created.
    """

    spec: ReaderSpec
    namespace_id: int
    lease: Lease | None = None

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def namespace(self) -> str:
        return self.spec.namespace

    @property
    def needed_version(self) -> Version:
        """The version above which every change may still be needed."""
        raise NotImplementedError

    def holder_at(self, now_ms: int) -> str | None:
        """The holder of the lease, unless that has expired."""
        lease = self.lease
        return lease.holder if lease is not None and lease.expires_at_ms > now_ms else None


@dataclass(frozen=True, kw_only=True)
class ReaderKind:
    """The limits of a kind of readers, and the words for it in error messages.

    `used` is what a holder does with a reader ("run", "consumed").  `free` is the advice how to end that,
    `again` how to take the lease, and `anew` how to replace a reader whose namespace was dropped.  `noun` is
    the name under which the details of errors carry the reader's name.
    """

    noun: str
    used: str
    free: str
    again: str
    anew: str
    prefix: bytes
    rows_max: int
    not_found: type[FloodmarkError]

    def key(self, name: str) -> bytes:
        return self.prefix + name.encode()

    def lease_held(self, row: LeasedRow) -> LeaseHeld:
        """The error for using a reader without its lease, which another process may hold."""
        lease = row.lease
        if lease is None:
            return LeaseHeld(
                f"the lease of {self.noun} {row.name!r} was given back; {self.again} to go on",
                **{self.noun: row.name},
                holder=None,
            )
        until = moment_of(compose(lease.expires_at_ms, 0))
        return LeaseHeld(
            f"{self.noun} {row.name!r} is {self.used} by {lease.holder} until {until.isoformat()} at least; "
            f"wait for it, or {self.free}",
            **{self.noun: row.name},
            holder=lease.holder,
            expires_at_ms=lease.expires_at_ms,
        )


Row = TypeVar("Row", bound=LeasedRow)


class ResolveSite(Protocol):
    """Returns the resolved version of a site, at or above `wanted` if any node has announced such a one."""

    def __call__(self, wanted: Version = 0, /) -> Version: ...


class RowState(Generic[Row]):
    """A row in memory.  Only the thread that holds the write turn changes it, with the lock held.

    The lock is taken after the write turn, never before it.
    """

    def __init__(self, kind: ReaderKind, row: Row) -> None:
        self.lock = RLock()
        self.kind = kind
        self.row = row

    def show(self) -> Row:
        return self.row

    def store(self, row: Row) -> tuple[Row, list[WriteRow]]:
        """The row as it is stored, and the writes that store it.  The first write alone would be enough."""
        return row, [(META, self.kind.key(row.name), msgspec.json.encode(row))]

    def take_over(self, stored: Row) -> None:
        """Replace the row by one that was stored."""
        self.row = stored

    def adopt(self, other: Self) -> None:
        """Copy the content of a loaded state into this object."""
        with self.lock:
            vars(self).update({**vars(other), "lock": self.lock})

    def remove(self) -> list[WriteRow]:
        """The writes that delete the row and all that belongs to it.  The last one deletes the row."""
        return [(META, self.kind.key(self.row.name), None)]


State = TypeVar("State", bound=RowState[Any])


class LeasedReaders(Generic[Row, State]):
    """The readers of one kind at a site, in the metadata of an engine of this process.

    `resolve_namespace` returns a namespace's id and the version at which it was created; `load` reads all
    rows.  `lock` makes each call atomic for other calls; it is taken before the write turn.
    """

    def __init__(
        self,
        kind: ReaderKind,
        safe_points: SafePoints,
        *,
        resolve_namespace: Callable[[str], tuple[int, Version]],
        resolved_version: ResolveSite,
        load: Callable[[Engine], Iterable[State]],
    ) -> None:
        self.kind = kind
        self.lock = Lock()
        self.storage = safe_points.storage
        self.now_ms = safe_points.time_source
        self.resolve_namespace = resolve_namespace
        self.resolved_version = resolved_version
        self._safe_points = safe_points
        self._load_states = load
        self.states: dict[str, State] = {}
        self._held_at_ms: dict[str, int] = {}
        self._load()
        self.storage.on_recovery.append(self._load)

    def _load(self) -> None:
        """Load all rows from the engine.  A state that other threads use stays the same object."""
        found = list(self._load_states(self.storage.engine))
        for state in found:
            self.reload(state)
        for name in self.states.keys() - {state.row.name for state in found}:
            del self.states[name]

    def reload(self, loaded: State) -> None:
        """Replace the state of a reader by one that was loaded."""
        known = self.states.setdefault(loaded.row.name, loaded)
        if known is not loaded:
            known.adopt(loaded)

    # Rows

    def state(self, name: str) -> State:
        """The state of a reader; the kind's error if there is none."""
        state = self.states.get(name)
        if state is None:
            known = ", ".join(sorted(self.states)[:_NAMES_SHOWN]) or "none yet"
            noun = self.kind.noun
            raise self.kind.not_found(f"no {noun} {name!r:.200}; there are: {known}", **{noun: name})
        return state

    def find(self, name: str) -> Row:
        row: Row = self.state(name).show()
        return row

    def settled(self, name: str) -> Row | None:
        """The reader as it is on disk, or None.  Takes the write turn, so that no change is in progress."""
        with self.storage.settled():
            state = self.states.get(name)
            return None if state is None else state.show()

    def list(self) -> list[Row]:
        return [state.show() for _, state in sorted(self.states.items())]

    def enter(self, state: State) -> Row:
        """Store a new reader, whose safe point the caller has set; release that if the row is not stored."""
        row: Row = state.row
        _, rows = state.store(row)
        try:
            with self.storage.settled():
                self.storage.require_wanted()
                self.storage.store(rows)
                self.states[row.name] = state
        except OutcomeUnknown:
            # The row may be stored, and then it needs its safe point.
            raise
        except FloodmarkError:
            self.let_go(row.name)
            raise
        shown: Row = state.show()
        return shown

    def update(self, name: str, change: Callable[[Row], Row], *, wanted: bool = False) -> Row:
        """Store the row that `change` returns; `change` may raise.

        A `wanted` change, one that a user asked for, is refused on a nearly full disk.
        """
        with self.storage.settled():
            if wanted:
                self.storage.require_wanted()
            state = self.state(name)
            with state.lock:
                row = change(state.show())
                stored, rows = state.store(row)
                self.storage.store_in_portions(rows)
                state.take_over(stored)
        return row

    def remove(self, name: str) -> None:
        """Delete a reader, then release its safe point."""
        state = self.state(name)
        with self.storage.settled():
            self.storage.store_in_portions(state.remove())
            self.states.pop(name, None)
        self.let_go(name)

    # Safe points

    def hold(self, row: Row, version: Version) -> None:
        """Set the safe point that keeps the changes above a version.  Raises `VersionCollected`."""
        self._safe_points.hold(self._safe_point(row.name), version, LIFETIME, row.namespace_id)
        self._held_at_ms[row.name] = self.now_ms()

    def is_held_lately(self, name: str) -> bool:
        """Whether this process set the safe point within the last minute."""
        return 0 <= self.now_ms() - self._held_at_ms.get(name, 0) < HOLD_EVERY_MS

    def let_go(self, name: str) -> None:
        """Release a safe point.  Errors are ignored, because it also expires."""
        self._held_at_ms.pop(name, None)
        with suppress(SafePointNotFound, Retryable, OutcomeUnknown):
            self._safe_points.release(self._safe_point(name))

    def _safe_point(self, name: str) -> str:
        return f"{self.kind.noun}/{name}"

    # Leases

    def new_lease(self, holder: str, seconds: float, owner: str) -> Lease:
        lifetime_ms = require_lease_seconds(seconds) // timedelta(milliseconds=1)
        require_name(holder, "holder of a lease")
        expires_at_ms = self.now_ms() + lifetime_ms
        return Lease(holder=holder, expires_at_ms=expires_at_ms, lifetime_ms=lifetime_ms, owner=owner)

    def require_free(self, row: Row, holder: str | None = None, owner: str = SITE_OWNER) -> None:
        """Raise `LeaseHeld` if another holder or owner has a lease that has not expired."""
        lease = row.lease
        is_own = lease is not None and holder is not None and lease.is_of(holder, owner)
        if lease is not None and not is_own and lease.expires_at_ms > self.now_ms():
            raise self.kind.lease_held(row)

    # Checks

    def require_room(self) -> None:
        """Raise LimitExceeded if the site has the maximum number of readers of this kind."""
        if len(self.states) >= self.kind.rows_max:
            raise LimitExceeded(
                f"a site has at most {self.kind.rows_max:,} {self.kind.noun}s; remove some first"
            )

    def require_namespace(self, row: Row) -> Version:
        """The version at which the reader's namespace was created; refuse if it was dropped since."""
        namespace, created_at = self.resolve_namespace(row.namespace)
        if namespace != row.namespace_id:
            raise NamespaceNotFound(
                f"the namespace {row.namespace!r} of {self.kind.noun} {row.name!r} was dropped, and a later "
                f"one has its name; remove the {self.kind.noun} and {self.kind.anew} again",
                namespace=row.namespace,
            )
        return created_at

    def require_reached(self, name: str, version: Version) -> None:
        """Refuse a start in the future: the changes up to it would be skipped silently."""
        if not 0 <= version <= VERSION_MAX:
            raise InvalidVersion(f"{version!r:.60} is not a version")
        if physical_ms(version) <= self.now_ms():
            return
        resolved = self.resolved_version()
        if version > resolved:
            raise VersionInFuture(
                f"{self.kind.noun} {name!r} cannot begin at {version} ({moment_of(version).isoformat()}): "
                f"the site has only come to {resolved} ({moment_of(resolved).isoformat()})",
                version=version,
            )

    def require_resolved(self, versions: Sequence[Version]) -> None:
        """Refuse positions that no reader can have reached: changes would be skipped silently."""
        highest = max(versions, default=0)
        if highest and highest > self.resolved_version(highest):
            raise InvalidVersion(
                f"a {self.kind.noun} reports version {highest}, which this site has not resolved yet",
                version=highest,
            )
