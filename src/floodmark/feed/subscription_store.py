"""Where the subscriptions of a site are kept.

The order of steps keeps what a subscription needs through crashes: a safe point is set *before* a row that
relies on it is stored, and moved on only *after* the row that allows it.

What is acknowledged in a transaction goes to a log of the subscription, and into the row, in one step, when
the transaction is committed: *before* the log lets go of it.  So whatever a crash brings back of a
transaction that was committed is not live any more, and ending it once more, either way, changes nothing.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from threading import Lock
from typing import Final

import msgspec
from msgspec.structs import replace

from floodmark.clock import TimeSource
from floodmark.feed.acknowledgement import Acknowledgement, Deliveries, Position, Progress
from floodmark.feed.feeds import Lease, require_lease_seconds
from floodmark.feed.pending import PendingAcknowledgement, PendingRecord
from floodmark.feed.pending_ledger import OpenPendingLog, PendingLedgers
from floodmark.feed.safepoints import LIFETIME, SafePoints
from floodmark.feed.subscription_statistics import measure
from floodmark.feed.subscriptions import (
    OpenChanges,
    SubscriptionRow,
    SubscriptionSpec,
    SubscriptionStatistics,
    lease_held,
)
from floodmark.log import OpenLog
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
    SubscriptionNotFound,
    VersionCollected,
    VersionInFuture,
)
from floodmark.model.limits import SUBSCRIPTIONS_MAX
from floodmark.model.names import require_name
from floodmark.model.partition import Decision, Fate, Settler
from floodmark.model.version import VERSION_MAX, Version, moment_of, physical_ms
from floodmark.partition import META, Storage, load_metadata

# A safe point moves with its subscription, but not more often than this.
HOLD_EVERY_MS: Final = 60_000
# Whoever moves or removes a subscription waits for the end of so many transactions at most.
SETTLED_MAX: Final = 1_000

_SUBSCRIPTIONS: Final = b"subscriptions/"

_log = logging.getLogger("floodmark.feed")


class LocalSubscriptionStore:
    """Keeps subscriptions in the metadata of an engine of this process.

    `resolve_namespace` gives a namespace's id and the version at which it was created; from
    `open_changes` a backlog is counted.  `open_log` opens the log of a subscription's pending
    acknowledgements; without it, nothing can be acknowledged in a transaction.

    What is kept in memory changes only in the turn to write; the lock makes the steps of one call one
    step for the others, and is taken before the turn.  The deliveries of a row are kept beside it, because
    to make them of a row takes time for each change that is not acknowledged.
    """

    def __init__(
        self,
        storage: Storage,
        safe_points: SafePoints,
        time_source: TimeSource,
        *,
        resolve_namespace: Callable[[str], tuple[int, Version]],
        resolved_version: Callable[[], Version],
        open_changes: OpenChanges,
        open_log: OpenPendingLog | None = None,
    ) -> None:
        self._storage = storage
        self._safe_points = safe_points
        self._time_source = time_source
        self._resolve_namespace = resolve_namespace
        self._resolved_version = resolved_version
        self._open_changes = open_changes
        # What became of a transaction, as far as anybody here knows.
        self._fate: Settler = lambda _: Fate(Decision.UNDECIDED)
        self._lock = Lock()
        self._rows: dict[str, SubscriptionRow] = {}
        # By subscription, the row of which they were made, and its deliveries.
        self._deliveries: dict[str, tuple[SubscriptionRow, Deliveries]] = {}
        # When each safe point was last set, as far as this process knows.
        self._held_at_ms: dict[str, int] = {}
        self._load()
        storage.on_recovery.append(self._load)
        self._pending = PendingLedgers(self._lock, open_log)
        self._pending.load(storage.engine, {row.name: row.moved for row in self._rows.values()})

    def _load(self) -> None:
        rows = load_metadata(self._storage.engine, _SUBSCRIPTIONS, SubscriptionRow)
        self._rows = {row.name: row for row in rows}

    # What consumers do

    def open(
        self, spec: SubscriptionSpec, start: Version, holder: str, lease_seconds: float
    ) -> SubscriptionRow:
        lifetime_ms = require_lease_seconds(lease_seconds) // timedelta(milliseconds=1)
        require_name(holder, "holder of a lease")
        with self._settled():
            known = self._rows.get(spec.name)
            row = known or self._make(spec, start)
            self._require_same(row, spec)
            self._require_free(row, holder)
            # First the safe point, which fails if something is gone already; from then on nothing goes.
            self._hold(row, row.needed_version)
            lease = Lease(
                holder=holder, expires_at_ms=self._time_source() + lifetime_ms, lifetime_ms=lifetime_ms
            )
            opened = replace(row, spec=spec, epoch=row.epoch + 1, lease=lease)
            return self._store(opened) if known else self._enter(opened)

    def acknowledge(self, name: str, epoch: int, progress: Progress) -> list[Position]:
        progress.require_sound()
        with self._settled():
            row = self._require_holder(name, epoch)
            deliveries, acknowledged = self._learn(row, progress)
            self._keep(row, deliveries)
            return acknowledged

    def _learn(self, row: SubscriptionRow, progress: Progress) -> tuple[Deliveries, list[Position]]:
        """The deliveries of a row with what a consumer tells, and what of it was acknowledged before."""
        known = self._deliveries_of(row)
        if progress == Progress(through=row.through):
            return known, []
        if progress.through > row.through:
            self._require_resolved(progress.through)
        deliveries = known.copy()
        unacked_max = max(deliveries.unacked, row.spec.unacked_max)
        deliveries.learn(progress)
        deliveries.require_delivered(progress.acknowledgement)
        self._pending.of(row.name).require_none(progress.acknowledgement, deliveries)
        acknowledged = deliveries.find_acknowledged(progress.acknowledgement)
        deliveries.acknowledge(progress.acknowledgement)
        if deliveries.unacked > unacked_max:
            raise LimitExceeded(
                f"subscription {row.name!r} keeps at most {unacked_max:,} changes that were delivered and "
                "not acknowledged; acknowledge some first",
                subscription=row.name,
            )
        return deliveries, acknowledged

    def renew(self, name: str, epoch: int) -> None:
        with self._settled():
            row = self._require_holder(name, epoch)
            self._keep(row, self._deliveries_of(row))

    def release(self, name: str, epoch: int) -> None:
        with self._settled():
            row = self._rows.get(name)
            if row is not None and row.epoch == epoch and row.lease is not None:
                self._store(replace(row, lease=None))

    def seek(self, name: str, version: Version, epoch: int | None = None) -> SubscriptionRow:
        self._end_decided(name)
        with self._settled():
            row = self._require_unused(name) if epoch is None else self._require_holder(name, epoch)
            self._pending.require_none(name)
            version = max(version, self._require_namespace(row))
            self._require_reached(version)
            try:
                # If the row cannot be stored, it still needs what it needs now.
                self._hold(row, min(version, row.needed_version))
            except VersionCollected:
                self._hold(row, version)
            next_epoch = row.epoch + 1
            moved = self._store(replace(row, through=version, live=[], epoch=next_epoch, moved=next_epoch))
            self._move_on(moved)
            return moved

    # What transactions do

    def acknowledge_in(
        self,
        transaction: str,
        name: str,
        epoch: int,
        progress: Progress,
        acknowledgement: Acknowledgement,
    ) -> None:
        """Store what a consumer got, and what it acknowledges if a transaction is committed.

        `AcknowledgementConflict`, and nothing has changed, if that was acknowledged before or is pending in
        another transaction.  The same again changes nothing either.  The caller sees to it that the
        transaction is not ended meanwhile.
        """
        progress.require_sound()
        with self._pending.writing() as writing:
            with self._settled():
                self._pending.wait_written(name, transaction)
                row = self._require_holder(name, epoch)
                ledger = self._pending.open(name, row.moved)
                deliveries, _ = self._learn(row, progress)
                deliveries.require_delivered(acknowledgement)
                part = ledger.pending.find_new(transaction, acknowledgement, deliveries)
                if deliveries is not self._deliveries_of(row) or self._is_lease_old(row):
                    self._keep(row, deliveries)
                if part is not None:
                    writing.begin(ledger, PendingRecord(transaction, epoch, part))
            writing.write()

    def commit_pending(self, name: str, transaction: str) -> None:
        """Acknowledge what a transaction has acknowledged.  Doing it again is harmless."""
        with self._settled():
            self._pending.wait_written(name, transaction)
            ledger, row = self._pending.find(name), self._rows.get(name)
            if ledger is None:
                return
            if row is not None:
                deliveries = self._deliveries_of(row).copy()
                if deliveries.acknowledge(ledger.pending.of(transaction)):
                    self._store_delivered(row, deliveries)
            ledger.let_go(transaction)

    def abort_pending(self, name: str, transaction: str) -> None:
        """Make available again what a transaction has acknowledged.  Doing it again is harmless."""
        with self._settled():
            self._pending.wait_written(name, transaction)
            ledger = self._pending.find(name)
            if ledger is not None:
                ledger.let_go(transaction)

    def settle_by(self, fate: Settler) -> None:
        """Name who knows what became of a transaction."""
        self._fate = fate

    def settle_pending(self, fate: Settler) -> None:
        """End what is pending in transactions that have ended, as a restart may find it."""
        with self._lock:
            found = self._pending.transactions()
        for name, transaction in found:
            self._end_if_decided(name, transaction, fate)

    def _end_decided(self, name: str) -> None:
        """End what is pending on a subscription in transactions that are decided, up to one that is not.

        Their coordinator does so too, in its own time; nobody else should have to wait for that, and least
        of all be told to abort what is committed.
        """
        with self._lock:
            found = self._pending.of(name).transactions
        for transaction in found[:SETTLED_MAX]:
            if not self._end_if_decided(name, transaction, self._fate):
                return
        if len(found) > SETTLED_MAX:
            raise Retryable(
                f"{len(found):,} transactions have acknowledged changes of subscription {name!r}, and "
                f"{SETTLED_MAX:,} of them were ended just now; try again to go on",
                subscription=name,
            )

    def _end_if_decided(self, name: str, transaction: str, fate: Settler) -> bool:
        decision = fate(transaction).decision
        if decision is Decision.COMMIT:
            self.commit_pending(name, transaction)
        elif decision is Decision.ABORT:
            self.abort_pending(name, transaction)
        return decision is not Decision.UNDECIDED

    def pending_logs(self) -> Mapping[str, OpenLog[PendingRecord]]:
        """The logs of pending acknowledgements, by subscription."""
        with self._lock:
            return self._pending.logs()

    def close(self) -> None:
        """Write what is on its way to the logs, then refuse."""
        for log in self.pending_logs().values():
            log.writer.close()

    def _is_lease_old(self, row: SubscriptionRow) -> bool:
        lease = row.lease
        return lease is not None and 3 * (lease.expires_at_ms - self._time_source()) < 2 * lease.lifetime_ms

    # What people do

    def find(self, name: str) -> SubscriptionRow:
        row = self._rows.get(name)
        if row is None:
            known = ", ".join(sorted(self._rows)[:20]) or "none yet"
            raise SubscriptionNotFound(
                f"no subscription {name!r:.200}; there are: {known}", subscription=name
            )
        return row

    def pending(self, name: str) -> list[PendingAcknowledgement]:
        self.find(name)
        with self._lock:
            return self._pending.of(name).acknowledgements()

    def remove(self, name: str) -> None:
        self._end_decided(name)
        with self._settled():
            self._require_unused(name)
            self._pending.require_none(name)
            self._pending.delete(name)
            with self._storage.settled():
                self._storage.store([(META, _key(name), None)])
                self._rows.pop(name, None)
                self._deliveries.pop(name, None)
            self._let_go(name)

    def statistics(self, name: str) -> SubscriptionStatistics:
        row = self.find(name)
        deliveries = Deliveries(row.through, row.live)
        with self._lock:
            pending = self._pending.of(name).count(deliveries)
        return measure(row, deliveries.unacked, pending, self._open_changes, self._time_source())

    # Safe points

    def _hold(self, row: SubscriptionRow, version: Version) -> None:
        """Keep what comes after a version; `VersionCollected` if some of it is gone already."""
        try:
            self._safe_points.hold(_safe_point(row.name), version, LIFETIME, row.namespace_id)
        except VersionCollected as error:
            raise VersionCollected(
                f"subscription {row.name!r} cannot go on behind version {version}: changes after it were "
                f"collected, as happens to one that nobody consumes for {LIFETIME // timedelta(hours=1)} "
                "hours. Read a snapshot with scan(at=...), and seek the subscription to its version",
                **{**error.details, "subscription": row.name},
            ) from error
        self._held_at_ms[row.name] = self._time_source()

    def _let_go(self, name: str) -> None:
        self._held_at_ms.pop(name, None)
        # If this fails, the safe point goes by itself when its lifetime is over.
        with suppress(SafePointNotFound, Retryable, OutcomeUnknown):
            self._safe_points.release(_safe_point(name))

    def _keep(self, row: SubscriptionRow, deliveries: Deliveries) -> None:
        """Store a row with its deliveries and its lease renewed; now and then let its safe point follow."""
        now_ms, lease = self._time_source(), row.lease
        assert lease is not None
        renewed = replace(row, lease=replace(lease, expires_at_ms=now_ms + lease.lifetime_ms))
        stored = self._store_delivered(renewed, deliveries)
        if not 0 <= now_ms - self._held_at_ms.get(row.name, 0) < HOLD_EVERY_MS:
            self._move_on(stored)

    def _move_on(self, row: SubscriptionRow) -> None:
        """Move the safe point to where a row that is stored allows it to be."""
        try:
            self._hold(row, row.needed_version)
        except FloodmarkError as error:
            # The old one keeps more than it has to, for hours; the next call brings another chance.
            _log.warning("the safe point of subscription %r could not be moved: %s", row.name, error)

    # Checks and storage

    @contextmanager
    def _settled(self) -> Iterator[None]:
        """Be the only one, with rows that are what the engine holds."""
        with self._lock:
            if self._storage.stopped:
                with self._storage.settled():
                    pass
            yield

    def _make(self, spec: SubscriptionSpec, start: Version) -> SubscriptionRow:
        if len(self._rows) >= SUBSCRIPTIONS_MAX:
            raise LimitExceeded(f"a site has at most {SUBSCRIPTIONS_MAX:,} subscriptions; remove some first")
        namespace, created_at = self._resolve_namespace(spec.namespace)
        self._require_reached(start)
        return SubscriptionRow(
            spec=spec,
            namespace_id=namespace,
            through=max(start, created_at),
            # Above every epoch of a subscription that had this name before.
            epoch=self._resolved_version(),
        )

    def _enter(self, row: SubscriptionRow) -> SubscriptionRow:
        """Store a new row; without it, nobody needs the safe point."""
        try:
            return self._store(row, wanted=True)
        except OutcomeUnknown:
            raise
        except FloodmarkError:
            self._let_go(row.name)
            raise

    def _store(self, row: SubscriptionRow, *, wanted: bool = False) -> SubscriptionRow:
        """Enter a row.  `wanted` for what is refused while the disk is nearly full."""
        encoded = msgspec.json.encode(row)
        with self._storage.settled():
            if wanted:
                self._storage.require_wanted()
            self._storage.store([(META, _key(row.name), encoded)])
            self._rows[row.name] = row
        return row

    def _store_delivered(self, row: SubscriptionRow, deliveries: Deliveries) -> SubscriptionRow:
        """Enter a row with its deliveries, which nobody changes from then on."""
        stored = self._store(replace(row, through=deliveries.through, live=deliveries.live()))
        self._deliveries[row.name] = stored, deliveries
        return stored

    def _deliveries_of(self, row: SubscriptionRow) -> Deliveries:
        """The deliveries of a row that is stored; not to be changed.  Those of another row are forgotten."""
        made_of, deliveries = self._deliveries.get(row.name, (None, None))
        if deliveries is None or made_of is not row:
            deliveries = Deliveries(row.through, row.live)
            self._deliveries[row.name] = row, deliveries
        return deliveries

    def _require_same(self, row: SubscriptionRow, spec: SubscriptionSpec) -> None:
        if (row.spec.namespace, row.spec.keys) != (spec.namespace, spec.keys):
            raise InvalidArgument(
                f"subscription {row.name!r} reads {row.spec.namespace!r}, {row.spec.keys}; it cannot be "
                f"opened on {spec.namespace!r}, {spec.keys}. Choose another name, or remove it first",
                subscription=row.name,
            )
        self._require_namespace(row)

    def _require_namespace(self, row: SubscriptionRow) -> Version:
        """The version at which the namespace was created; refuse if it was dropped since."""
        namespace, created_at = self._resolve_namespace(row.spec.namespace)
        if namespace != row.namespace_id:
            raise NamespaceNotFound(
                f"the namespace {row.spec.namespace!r} of subscription {row.name!r} was dropped, and one "
                "that came later has its name; remove the subscription and subscribe again",
                namespace=row.spec.namespace,
            )
        return created_at

    def _require_holder(self, name: str, epoch: int) -> SubscriptionRow:
        row = self.find(name)
        if row.lease is None:
            raise LeaseHeld(
                f"nobody holds the lease of subscription {name!r} any more; subscribe again to go on",
                subscription=name,
                holder=None,
            )
        if row.epoch != epoch:
            raise lease_held(row, row.lease)
        return row

    def _require_unused(self, name: str) -> SubscriptionRow:
        row = self.find(name)
        self._require_free(row, None)
        return replace(row, lease=None)

    def _require_free(self, row: SubscriptionRow, holder: str | None) -> None:
        lease = row.lease
        if lease is not None and lease.holder != holder and lease.expires_at_ms > self._time_source():
            raise lease_held(row, lease)

    def _require_reached(self, version: Version) -> None:
        """Refuse a version in the future: the changes up to it would be skipped in silence."""
        if not 0 <= version <= VERSION_MAX:
            raise InvalidVersion(f"{version!r:.60} is not a version")
        if physical_ms(version) > self._time_source() and version > self._resolved_version():
            raise VersionInFuture(
                f"a subscription cannot begin at {version} ({moment_of(version).isoformat()}): the site has "
                "not come that far",
                version=version,
            )

    def _require_resolved(self, through: Version) -> None:
        if through > self._resolved_version():
            raise InvalidVersion(
                f"a consumer tells that it got everything through {through}, which this site has not "
                "resolved yet",
                version=through,
            )

    def list(self) -> list[SubscriptionRow]:
        return sorted(self._rows.values(), key=lambda row: row.name)


def _safe_point(name: str) -> str:
    return f"subscription/{name}"


def _key(name: str) -> bytes:
    return _SUBSCRIPTIONS + name.encode()
