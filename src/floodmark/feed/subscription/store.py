"""Where the subscriptions of a site are kept.

The order of steps keeps what a subscription needs through crashes: a safe point is set *before* a row that
relies on it is stored, and moved on only *after* the row that allows it.

What is acknowledged in a transaction goes to a log of the subscription, and becomes a change of the
subscription when the transaction is committed: *before* the log lets go of it.  So whatever a crash brings
back of a transaction that was committed is not live any more, and ending it once more, either way, changes
nothing.

What consumers and transactions do is a change of one subscription, in a round of group commit
(`rows.py`).  To open, move or remove a subscription is rare, and writes its whole row.
"""

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from threading import Lock
from typing import Final

from msgspec.structs import replace

from floodmark.clock import TimeSource
from floodmark.feed.named.feeds import Lease, require_lease_seconds
from floodmark.feed.safepoints import LIFETIME, SafePoints
from floodmark.feed.subscription.acknowledgement import Acknowledgement, Deliveries, Position, Progress
from floodmark.feed.subscription.ledger import OpenPendingLog, PendingLedger, PendingLedgers, Writing
from floodmark.feed.subscription.pending import PendingAcknowledgement, PendingRecord
from floodmark.feed.subscription.rows import (
    Changes,
    ChangeStep,
    Judge,
    SubscriptionChange,
    SubscriptionState,
    load_subscription,
    load_subscriptions,
)
from floodmark.feed.subscription.statistics import measure
from floodmark.feed.subscription.subscriptions import (
    OpenChanges,
    SubscriptionRow,
    SubscriptionSpec,
    SubscriptionStatistics,
    lease_held,
)
from floodmark.log import OpenLog
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
    SubscriptionNotFound,
    VersionCollected,
    VersionInFuture,
)
from floodmark.model.limits import SUBSCRIPTIONS_MAX
from floodmark.model.names import require_name
from floodmark.model.partition import Decision, Fate, Settler
from floodmark.model.version import VERSION_MAX, Version, moment_of, physical_ms
from floodmark.partition import Storage
from floodmark.partition.commit.commit import Step

# A safe point moves with its subscription, but not more often than this.
HOLD_EVERY_MS: Final = 60_000
# A subscription that is moved or removed first ends so many decided transactions at most.
SETTLED_MAX: Final = 1_000

_log = logging.getLogger("floodmark.feed")


class LocalSubscriptionStore:
    """Keeps subscriptions in the metadata of an engine of this process.

    `take` takes a step in a round.  `resolve_namespace` gives a namespace's id and the version at which it
    was created; from `open_changes` a backlog is counted.  `open_log` opens the log of a subscription's
    pending acknowledgements; without it, nothing can be acknowledged in a transaction.

    Of the locks, the first is held while a subscription is opened, moved or removed, and while its safe point
    is moved; then comes the turn to write, then the lock of a subscription, and then that of its log.
    """

    def __init__(
        self,
        storage: Storage,
        safe_points: SafePoints,
        time_source: TimeSource,
        *,
        take: Callable[[Step], object],
        resolve_namespace: Callable[[str], tuple[int, Version]],
        resolved_version: Callable[[], Version],
        open_changes: OpenChanges,
        open_log: OpenPendingLog | None = None,
    ) -> None:
        self._storage = storage
        self._safe_points = safe_points
        self._time_source = time_source
        self._take = take
        self._resolve_namespace = resolve_namespace
        self._resolved_version = resolved_version
        self._open_changes = open_changes
        # The fate of a transaction: undecided, until a coordinator is named that knows more.
        self._fate: Settler = lambda _: Fate(Decision.UNDECIDED)
        self._lock = Lock()
        self._states: dict[str, SubscriptionState] = {}
        # When each safe point was last set, as far as this process knows.
        self._held_at_ms: dict[str, int] = {}
        self._load()
        storage.on_recovery.append(self._load)
        self._pending = PendingLedgers(open_log)
        epochs = {name: state.row.moved for name, state in self._states.items()}
        self._pending.load(storage.engine, epochs)

    def _load(self) -> None:
        """Make memory what the engine says."""
        found = {row.name: (row, changes) for row, changes in load_subscriptions(self._storage.engine)}
        for name, (row, changes) in found.items():
            self._load_one(name, row, changes)
        for name in self._states.keys() - found.keys():
            del self._states[name]

    def _reload(self, name: str) -> None:
        found = load_subscription(self._storage.engine, name)
        if found is not None:
            self._load_one(name, *found)

    def _load_one(self, name: str, row: SubscriptionRow, changes: Changes) -> None:
        state = self._states.get(name)
        if state is None:
            self._states[name] = SubscriptionState(row, changes)
        else:
            state.load(row, changes)

    # What consumers do

    def open(
        self,
        spec: SubscriptionSpec,
        start: Version,
        holder: str,
        lease_seconds: float,
        snapshot: bool = False,
        owner: str = SITE_OWNER,
    ) -> SubscriptionRow:
        lifetime_ms = require_lease_seconds(lease_seconds) // timedelta(milliseconds=1)
        require_name(holder, "holder of a lease")
        with self._lock:
            known = self._look(spec.name)
            row = known or self._make(spec, start, snapshot=snapshot)
            self._require_same(row, spec)
            self._require_free(row, holder, owner)
            # First the safe point, which fails if something is gone already; from then on nothing goes.
            self._hold(row, row.needed_version)
            expires_at_ms = self._time_source() + lifetime_ms
            lease = Lease(holder=holder, expires_at_ms=expires_at_ms, lifetime_ms=lifetime_ms, owner=owner)
            if known is None:
                return self._enter(replace(row, epoch=row.epoch + 1, lease=lease))

            def open_now(row: SubscriptionRow) -> SubscriptionRow:
                self._require_free(row, holder, owner)
                return replace(row, spec=spec, epoch=row.epoch + 1, lease=lease)

            return self._store(spec.name, open_now)

    def acknowledge(
        self, name: str, epoch: int, progress: Progress, owner: str = SITE_OWNER
    ) -> list[Position]:
        progress.require_sound()
        self._require_resolved(name, progress.through)
        acknowledged: list[Position] = []

        def judge(state: SubscriptionState) -> SubscriptionChange:
            lease = self._require_lease(state.row, epoch, owner)
            acknowledged.extend(self._learn(state, progress))
            return SubscriptionChange(progress, self._time_source() + lease.lifetime_ms)

        self._change(name, judge)
        self._move_on_if_due(name, epoch)
        return acknowledged

    def _learn(self, state: SubscriptionState, progress: Progress) -> list[Position]:
        """Judge what a consumer tells, without changing anything; what of it was acknowledged before."""
        row, deliveries = state.row, state.deliveries
        if not progress.is_news(deliveries.through):
            return []
        unacked_max = max(deliveries.unacked, row.spec.unacked_max)
        learned = deliveries.copy()
        learned.learn(progress)
        learned.require_delivered(progress.acknowledgement)
        with self._pending.looking(row.name) as pending:
            pending.require_none(progress.acknowledgement, learned)
        acknowledged = learned.find_acknowledged(progress.acknowledgement)
        learned.acknowledge(progress.acknowledgement)
        if learned.unacked > unacked_max:
            raise LimitExceeded(
                f"subscription {row.name!r} keeps at most {unacked_max:,} changes that were delivered and "
                "not acknowledged; acknowledge some first",
                subscription=row.name,
            )
        return acknowledged

    def renew(self, name: str, epoch: int, owner: str = SITE_OWNER) -> None:
        def judge(state: SubscriptionState) -> SubscriptionChange:
            lease = self._require_lease(state.row, epoch, owner)
            nothing = Progress(through=state.deliveries.through)
            return SubscriptionChange(nothing, self._time_source() + lease.lifetime_ms)

        self._change(name, judge)
        self._move_on_if_due(name, epoch)

    def release(self, name: str, epoch: int, owner: str = SITE_OWNER) -> None:
        with self._lock:
            row = self._look(name)
            lease = None if row is None or row.epoch != epoch else row.lease
            if lease is not None and lease.belongs_to(owner):
                self._store(name, lambda row: replace(row, lease=None))

    def seek(
        self,
        name: str,
        version: Version,
        epoch: int | None = None,
        snapshot: bool = False,
        owner: str = SITE_OWNER,
    ) -> SubscriptionRow:
        self._end_decided(name)
        with self._lock:
            row = self._require_movable(self._look(name) or self.find(name), epoch, owner)
            version = max(version, self._require_namespace(row))
            self._require_reached(version)
            try:
                # If the row cannot be stored, it still needs what it needs now.
                self._hold(row, min(version, row.needed_version))
            except VersionCollected:
                self._hold(row, version)

            def move(row: SubscriptionRow) -> SubscriptionRow:
                row = self._require_movable(row, epoch, owner)
                next_epoch = row.epoch + 1
                moved = replace(row, live=[], mark=None, epoch=next_epoch, moved=next_epoch)
                return _begin_at(moved, version, snapshot=snapshot)

            moved = self._store(name, move)
            self._move_on(moved)
            return moved

    def _require_movable(
        self, row: SubscriptionRow, epoch: int | None, owner: str = SITE_OWNER
    ) -> SubscriptionRow:
        """A subscription as it may be moved or removed: nothing of it is pending.

        Without the epoch of its consumer, it must not have one, and a lease that ran out goes.
        """
        if epoch is not None:
            self._require_lease(row, epoch, owner)
        else:
            self._require_free(row, None, owner)
            row = replace(row, lease=None)
        self._pending.require_none(row.name)
        return row

    # What transactions do

    def acknowledge_in(
        self,
        transaction: str,
        name: str,
        epoch: int,
        progress: Progress,
        acknowledgement: Acknowledgement,
        owner: str = SITE_OWNER,
    ) -> None:
        """Store what a consumer got, and what it acknowledges if a transaction is committed.

        `AcknowledgementConflict`, and nothing has changed, if that was acknowledged before or is pending in
        another transaction.  The same again changes nothing either.  The caller sees to it that the
        transaction is not ended meanwhile.
        """
        state = self._find(name)
        if progress.is_news(state.deliveries.through) or self._is_lease_old(state.row):
            self.acknowledge(name, epoch, progress, owner)
        self._require_lease(state.row, epoch, owner)
        # Nothing was pending when a log was closed that is opened here: what is in it has ended.
        ledger = self._pending.open(name, epoch + 1)
        with Writing(ledger) as writing:
            while not self._begin(writing, ledger, transaction, name, epoch, acknowledgement):
                ledger.wait_written(transaction)
            writing.write()

    def _begin(
        self,
        writing: Writing,
        ledger: PendingLedger,
        transaction: str,
        name: str,
        epoch: int,
        acknowledgement: Acknowledgement,
    ) -> bool:
        """Enter what of an acknowledgement is new; False if the transaction has something on its way."""
        state = self._find(name)
        with state.lock, ledger.lock:
            if ledger.is_writing(transaction):
                return False
            # Its owner was asked for before.
            self._require_lease(state.row, epoch, SITE_OWNER)
            deliveries = state.deliveries
            deliveries.require_delivered(acknowledgement)
            part = ledger.pending.find_new(transaction, acknowledgement, deliveries)
            if part is not None:
                writing.begin(PendingRecord(transaction, epoch, part))
            return True

    def commit_pending(self, name: str, transaction: str) -> None:
        """Acknowledge what a transaction has acknowledged.  Doing it again is harmless."""
        ledger = self._pending.find(name)
        if ledger is None:
            return
        ledger.wait_written(transaction)
        with ledger.lock:
            acknowledgement = ledger.pending.of(transaction)

        def judge(state: SubscriptionState) -> SubscriptionChange | None:
            deliveries = state.deliveries
            if not deliveries.has_any_live(acknowledgement):
                return None
            return SubscriptionChange(Progress(through=deliveries.through, acknowledgement=acknowledgement))

        if acknowledgement != Acknowledgement():
            with suppress(SubscriptionNotFound):
                self._change(name, judge)
        ledger.let_go(transaction)

    def abort_pending(self, name: str, transaction: str) -> None:
        """Make available again what a transaction has acknowledged.  Doing it again is harmless."""
        ledger = self._pending.find(name)
        if ledger is not None:
            ledger.wait_written(transaction)
            ledger.let_go(transaction)

    def settle_by(self, fate: Settler) -> None:
        """Set the function that knows the fates of transactions."""
        self._fate = fate

    def settle_pending(self, fate: Settler) -> None:
        """End what is pending in transactions that have ended, as a restart may find it."""
        found = self._pending.transactions()
        for name, transaction in found:
            self._end_if_decided(name, transaction, fate)

    def _end_decided(self, name: str) -> None:
        """End what is pending on a subscription in transactions that are decided, up to one that is not.

        Their coordinator does so too, in its own time; a caller should not have to wait for that, and least
        of all be told to abort a transaction that is committed.
        """
        found = self._pending.transactions_of(name)
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
        return self._find(name).show()

    def pending(self, name: str) -> list[PendingAcknowledgement]:
        self._find(name)
        with self._pending.looking(name) as pending:
            return pending.acknowledgements()

    def remove(self, name: str) -> None:
        self._end_decided(name)
        with self._lock:
            state = self._find(name)
            with self._storage.settled(), state.lock:
                # Without a lease, no consumer can enter anything any more.
                row, state.row = state.row, self._require_movable(state.row, None)
            try:
                self._pending.delete(name)
                with self._storage.settled():
                    self._storage.store(state.remove())
                    self._states.pop(name, None)
            except BaseException:
                with state.lock:
                    state.row = row
                raise
            self._let_go(name)

    def statistics(self, name: str) -> SubscriptionStatistics:
        row = self.find(name)
        deliveries = Deliveries(row.through, row.live)
        with self._pending.looking(name) as pending:
            count = pending.count(deliveries)
        return measure(row, deliveries.unacked, count, self._open_changes, self._time_source())

    # Safe points

    def _hold(self, row: SubscriptionRow, version: Version) -> None:
        """Keep what comes after a version; `VersionCollected` if some of it is gone already."""
        try:
            self._safe_points.hold(_safe_point(row.name), version, LIFETIME, row.namespace_id)
        except VersionCollected as error:
            raise VersionCollected(
                f"subscription {row.name!r} cannot go on behind version {version}: changes after it were "
                f"collected, as happens to one that nobody consumes for {LIFETIME // timedelta(hours=1)} "
                "hours. Seek the subscription to a snapshot, which has every key",
                **{**error.details, "subscription": row.name},
            ) from error
        self._held_at_ms[row.name] = self._time_source()

    def _let_go(self, name: str) -> None:
        self._held_at_ms.pop(name, None)
        # If this fails, the safe point goes by itself when its lifetime is over.
        with suppress(SafePointNotFound, Retryable, OutcomeUnknown):
            self._safe_points.release(_safe_point(name))

    def _move_on_if_due(self, name: str, epoch: int) -> None:
        """Let the safe point of a subscription follow, now and then."""
        if self._is_held_lately(name):
            return
        with self._lock:
            try:
                row = self._look(name)
            except FloodmarkError:
                # The next call brings another chance.
                return
            if row is not None and row.epoch == epoch and not self._is_held_lately(name):
                self._move_on(row)

    def _is_held_lately(self, name: str) -> bool:
        return 0 <= self._time_source() - self._held_at_ms.get(name, 0) < HOLD_EVERY_MS

    def _move_on(self, row: SubscriptionRow) -> None:
        """Move the safe point to where a row that is stored allows it to be."""
        try:
            self._hold(row, row.needed_version)
        except FloodmarkError as error:
            # The old one keeps more than it has to, for hours; the next call brings another chance.
            _log.warning("the safe point of subscription %r could not be moved: %s", row.name, error)

    # Checks and storage

    def _find(self, name: str) -> SubscriptionState:
        state = self._states.get(name)
        if state is None:
            known = ", ".join(sorted(self._states)[:20]) or "none yet"
            raise SubscriptionNotFound(
                f"no subscription {name!r:.200}; there are: {known}", subscription=name
            )
        return state

    def _look(self, name: str) -> SubscriptionRow | None:
        """A subscription, if it is there, as it is on disk: in the turn, no change is under way."""
        with self._storage.settled():
            state = self._states.get(name)
            return None if state is None else state.show()

    def _change(self, name: str, judge: Judge) -> None:
        """Change a subscription in a round, and compact its changes when that is due."""
        step = ChangeStep(self._storage.engine, lambda: self._find(name), judge, lambda: self._reload(name))
        self._take(step)
        if step.is_compaction_due:
            try:
                self._store(name, lambda row: row)
            except FloodmarkError as error:
                # The change is stored, and compaction will be due again.
                _log.warning("the changes of subscription %r could not be compacted: %s", name, error)

    def _make(self, spec: SubscriptionSpec, start: Version, *, snapshot: bool) -> SubscriptionRow:
        if len(self._states) >= SUBSCRIPTIONS_MAX:
            raise LimitExceeded(f"a site has at most {SUBSCRIPTIONS_MAX:,} subscriptions; remove some first")
        namespace, created_at = self._resolve_namespace(spec.namespace)
        self._require_reached(start)
        # Above every epoch of a subscription that had this name before.
        epoch = self._resolved_version()
        row = SubscriptionRow(spec=spec, namespace_id=namespace, through=0, epoch=epoch, moved=epoch)
        return _begin_at(row, max(start, created_at), snapshot=snapshot)

    def _enter(self, row: SubscriptionRow) -> SubscriptionRow:
        """Store a new row; if that fails, its safe point is released."""
        state = SubscriptionState(row)
        _, rows = state.store(row)
        try:
            with self._storage.settled():
                self._storage.require_wanted()
                self._storage.store(rows)
                self._states[row.name] = state
        except OutcomeUnknown:
            raise
        except FloodmarkError:
            self._let_go(row.name)
            raise
        return row

    def _store(self, name: str, change: Callable[[SubscriptionRow], SubscriptionRow]) -> SubscriptionRow:
        """Write a whole row anew, without its changes; what `change` refuses is not stored."""
        with self._storage.settled():
            state = self._find(name)
            with state.lock:
                row = change(state.show())
                stored, rows = state.store(row)
                self._storage.store(rows)
                state.load(stored)
        return row

    def _require_same(self, row: SubscriptionRow, spec: SubscriptionSpec) -> None:
        if (row.spec.namespace, row.spec.keys) != (spec.namespace, spec.keys):
            # A consumer need not know which other namespaces there are, nor what their keys are like.
            reads = f"{row.spec.keys}" if row.spec.namespace == spec.namespace else "another namespace"
            raise InvalidArgument(
                f"subscription {row.name!r} reads {reads}; it cannot be opened on {spec.namespace!r}, "
                f"{spec.keys}. Choose another name, or remove it first",
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

    def _require_lease(self, row: SubscriptionRow, epoch: int, owner: str) -> Lease:
        """The lease of a consumer; refuse one that has lost it, or that is not its owner's."""
        if row.lease is None:
            raise LeaseHeld(
                f"the lease of subscription {row.name!r} was given back; subscribe again to go on",
                subscription=row.name,
                holder=None,
            )
        if row.epoch != epoch or not row.lease.belongs_to(owner):
            raise lease_held(row, row.lease)
        return row.lease

    def _require_free(self, row: SubscriptionRow, holder: str | None, owner: str) -> None:
        lease = row.lease
        is_own = lease is None or (holder is not None and lease.is_of(holder, owner))
        if lease is not None and not is_own and lease.expires_at_ms > self._time_source():
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

    def _require_resolved(self, name: str, through: Version) -> None:
        """Refuse a consumer that cannot have got what it tells."""
        if through > self._find(name).deliveries.through and through > self._resolved_version():
            raise InvalidVersion(
                f"a consumer tells that it got everything through {through}, which this site has not "
                "resolved yet",
                version=through,
            )

    def list(self) -> list[SubscriptionRow]:
        return [state.show() for _, state in sorted(self._states.items())]


def _begin_at(row: SubscriptionRow, version: Version, *, snapshot: bool) -> SubscriptionRow:
    """The row of a subscription that has nothing yet, and begins behind a version or with its snapshot."""
    if snapshot:
        return replace(row, through=version - 1, snapshot=version)
    return replace(row, through=version, snapshot=None)


def _safe_point(name: str) -> str:
    return f"subscription/{name}"
