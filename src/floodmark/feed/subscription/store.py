"""The store of subscriptions.

An acknowledgement in a transaction is written to a log of the subscription.  When the transaction commits, it
becomes a change of the subscription *before* its record is dropped from the log.  So changes in a record of a
committed transaction that a crash brings back are not live any more, and ending the transaction again, either
way, has no effect.

Calls of consumers and transactions change one subscription in a round of group commit (`rows.py`).  Opening,
moving and removing a subscription are rare, and write its whole row.
"""

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Final

from msgspec.structs import replace

from floodmark.feed.leased import Lease, LeasedReaders, ResolveSite
from floodmark.feed.safepoints import LIFETIME, SafePoints
from floodmark.feed.subscription.acknowledgement import Acknowledgement, Deliveries, Progress
from floodmark.feed.subscription.pending import (
    OpenPendingLog,
    PendingAcknowledgement,
    PendingLedgers,
    PendingRecord,
    Writing,
)
from floodmark.feed.subscription.rows import (
    SUBSCRIPTIONS,
    ChangeStep,
    Judge,
    SubscriptionChange,
    SubscriptionState,
    load_subscription,
    load_subscriptions,
)
from floodmark.feed.subscription.subscriptions import (
    OpenChanges,
    SubscriptionRow,
    SubscriptionSpec,
    SubscriptionStatistics,
    measure,
)
from floodmark.log import OpenLog
from floodmark.model.actions import SITE_OWNER
from floodmark.model.errors import (
    FloodmarkError,
    InvalidArgument,
    LimitExceeded,
    Retryable,
    SubscriptionNotFound,
    VersionCollected,
)
from floodmark.model.partition import Decision, Fate, Settler
from floodmark.model.stream import OnGeneration
from floodmark.model.version import Version
from floodmark.partition.commit.commit import RoundStep

# The maximum number of decided transactions that are ended before a subscription is moved or removed.
SETTLED_MAX: Final = 1_000

_log = logging.getLogger("floodmark.feed")


class LocalSubscriptionStore:
    """Keeps subscriptions in the metadata of an engine of this process.

    `take` runs a step in a commit round; backlogs are counted with `open_changes`.  `open_log` opens the log
    of a subscription's pending acknowledgements.

    Order of locks: the store's, held to open, move or remove a subscription and to move its safe point; the
    write turn; the subscription's; its log's.
    """

    def __init__(
        self,
        safe_points: SafePoints,
        *,
        take: Callable[[RoundStep], object],
        resolve_namespace: Callable[[str], tuple[int, Version]],
        resolved_version: ResolveSite,
        open_changes: OpenChanges,
        open_log: OpenPendingLog,
    ) -> None:
        self._storage = safe_points.storage
        self._time_source = safe_points.time_source
        self._take = take
        self._open_changes = open_changes
        # Returns the fate of a transaction: undecided, until `settle_by` sets a coordinator's function.
        self._fate: Settler = lambda _: Fate(Decision.UNDECIDED)
        self._readers: LeasedReaders[SubscriptionRow, SubscriptionState] = LeasedReaders(
            SUBSCRIPTIONS,
            safe_points,
            resolve_namespace=resolve_namespace,
            resolved_version=resolved_version,
            load=load_subscriptions,
        )
        self._lock = self._readers.lock
        self._pending = PendingLedgers(open_log)
        epochs = {name: state.row.moved for name, state in self._readers.states.items()}
        self._pending.load(self._storage.engine, epochs)

    # Consumers

    def open(
        self,
        spec: SubscriptionSpec,
        start: Version,
        holder: str,
        lease_seconds: float,
        snapshot: bool = False,
        owner: str = SITE_OWNER,
    ) -> SubscriptionRow:
        lease = self._readers.new_lease(holder, lease_seconds, owner)
        with self._lock:
            known = self._readers.settled(spec.name)
            row = known or _new_row(self._readers, spec, start, snapshot=snapshot)
            _require_same_keys(row, spec)
            _require_same_order(row, spec)
            self._readers.require_namespace(row)
            self._readers.require_free(row, holder, owner)
            # Setting the safe point fails if changes were collected; once it is set, none are.
            self._hold(row, row.needed_version)
            lease = lease.renewed(self._time_source())
            if known is None:
                return self._readers.enter(SubscriptionState(replace(row, epoch=row.epoch + 1, lease=lease)))

            def open_now(row: SubscriptionRow) -> SubscriptionRow:
                self._readers.require_free(row, holder, owner)
                return replace(row, spec=spec, epoch=row.epoch + 1, lease=lease)

            return self._readers.update(spec.name, open_now)

    def acknowledge(self, name: str, epoch: int, progress: Progress, owner: str = SITE_OWNER) -> None:
        progress.require_sound()
        if progress.through > self._readers.state(name).deliveries.through:
            self._readers.require_resolved([progress.through])

        def judge(state: SubscriptionState) -> SubscriptionChange:
            lease = _require_lease(state.row, epoch, owner)
            _require_acceptable(state, progress, self._pending)
            return SubscriptionChange(progress, lease.renewed(self._time_source()).expires_at_ms)

        self._change(name, judge)
        self._move_on_if_due(name, epoch)

    def release(self, name: str, epoch: int, owner: str = SITE_OWNER) -> None:
        with self._lock:
            row = self._readers.settled(name)
            lease = None if row is None or row.epoch != epoch else row.lease
            if lease is not None and lease.belongs_to(owner):
                self._readers.update(name, lambda row: replace(row, lease=None))

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
            row = self._require_movable(self._readers.settled(name) or self.find(name), epoch, owner)
            version = max(version, self._readers.require_namespace(row))
            self._readers.require_reached(name, version)
            try:
                # If the row cannot be stored, the old one still needs its changes.
                self._hold(row, min(version, row.needed_version))
            except VersionCollected:
                self._hold(row, version)

            def move(row: SubscriptionRow) -> SubscriptionRow:
                row = self._require_movable(row, epoch, owner)
                next_epoch = row.epoch + 1
                moved = replace(row, live=[], mark=None, epoch=next_epoch, moved=next_epoch)
                return _begin_at(moved, version, snapshot=snapshot)

            moved = self._readers.update(name, move)
            self._move_on(moved)
            return moved

    def _require_movable(
        self, row: SubscriptionRow, epoch: int | None, owner: str = SITE_OWNER
    ) -> SubscriptionRow:
        """The subscription, if it may be moved or removed: no acknowledgement is pending.

        Without an epoch it must have no consumer, and an expired lease is dropped.
        """
        if epoch is not None:
            _require_lease(row, epoch, owner)
        else:
            self._readers.require_free(row, None, owner)
            row = replace(row, lease=None)
        self._pending.require_none(row.name)
        return row

    # Transactions

    def acknowledge_in(
        self,
        transaction: str,
        name: str,
        epoch: int,
        progress: Progress,
        acknowledgement: Acknowledgement,
        owner: str = SITE_OWNER,
    ) -> None:
        """Store a consumer's progress, and an acknowledgement that takes effect if a transaction commits.

        Raises `AcknowledgementConflict`, and changes nothing, if one of the changes was acknowledged before
        or is pending in another transaction.  Repeating the call is harmless.  The caller must ensure that
        the transaction does not end meanwhile.
        """
        state = self._readers.state(name)
        if progress.is_news(state.deliveries.through) or _is_lease_old(state.row, self._time_source()):
            self.acknowledge(name, epoch, progress, owner)
        _require_lease(state.row, epoch, owner)
        # Nothing was pending when this log was closed, so the transactions in it have ended.
        ledger = self._pending.open(name, epoch + 1)

        def begin(writing: Writing) -> bool:
            """Enter the new part of an acknowledgement; False while the transaction writes another one."""
            state = self._readers.state(name)
            with state.lock, ledger.lock:
                if ledger.is_writing(transaction):
                    return False
                _require_lease(state.row, epoch, owner)
                state.deliveries.require_delivered(acknowledgement)
                part = ledger.pending.find_new(transaction, acknowledgement, state.deliveries)
                if part is not None:
                    writing.begin(PendingRecord(transaction, epoch, part))
                return True

        with Writing(ledger) as writing:
            while not begin(writing):
                ledger.wait_written(transaction)
            writing.write()

    def commit_pending(self, name: str, transaction: str) -> None:
        """Apply the acknowledgements of a committed transaction.  Repeating it is harmless."""
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
        """Drop the acknowledgements of a transaction.  Repeating it is harmless."""
        ledger = self._pending.find(name)
        if ledger is not None:
            ledger.wait_written(transaction)
            ledger.let_go(transaction)

    def settle_by(self, fate: Settler) -> None:
        """Set the function that returns the fates of transactions."""
        self._fate = fate

    def settle_pending(self, fate: Settler) -> None:
        """End the pending acknowledgements of ended transactions that a restart has brought back."""
        for name, transaction in self._pending.transactions():
            self._end_if_decided(name, transaction, fate)

    def _end_decided(self, name: str) -> None:
        """End the pending acknowledgements of decided transactions, up to the first undecided one.

        Their coordinator does so later, too, but an error should not advise the caller to abort a committed
        one.
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
        """Flush and close the logs."""
        for log in self.pending_logs().values():
            log.writer.close()

    # Administration

    def find(self, name: str) -> SubscriptionRow:
        return self._readers.find(name)

    def pending(self, name: str) -> list[PendingAcknowledgement]:
        self._readers.state(name)
        with self._pending.looking(name) as pending:
            return pending.acknowledgements()

    def remove(self, name: str) -> None:
        self._end_decided(name)
        with self._lock:
            state = self._readers.state(name)
            with self._storage.settled(), state.lock:
                # Without a lease, no consumer can enter anything any more.
                row, state.row = state.row, self._require_movable(state.row, None)
            try:
                self._pending.delete(name)
                self._readers.remove(name)
            except BaseException:
                with state.lock:
                    state.row = row
                raise

    def statistics(self, name: str) -> SubscriptionStatistics:
        row = self.find(name)
        deliveries = Deliveries(row.through, row.live)
        with self._pending.looking(name) as pending:
            count = pending.count(deliveries)
        return measure(row, deliveries.unacked, count, self._open_changes, self._time_source())

    # Safe points

    def _hold(self, row: SubscriptionRow, version: Version) -> None:
        """Keep the changes above a version; `VersionCollected` if some are gone."""
        try:
            self._readers.hold(row, version)
        except VersionCollected as error:
            raise VersionCollected(
                f"subscription {row.name!r} cannot go on behind version {version}: changes after it were "
                f"collected, as happens after {LIFETIME // timedelta(hours=1)} hours without a consumer. "
                "Seek the subscription to a snapshot, which has every key",
                **{**error.details, "subscription": row.name},
            ) from error

    def _move_on_if_due(self, name: str, epoch: int) -> None:
        """Move the safe point, but not too often."""
        if self._readers.is_held_lately(name):
            return
        with self._lock:
            try:
                row = self._readers.settled(name)
            except FloodmarkError:
                # The next call tries again.
                return
            if row is not None and row.epoch == epoch and not self._readers.is_held_lately(name):
                self._move_on(row)

    def _move_on(self, row: SubscriptionRow) -> None:
        """Move the safe point to the version that a stored row needs."""
        try:
            self._hold(row, row.needed_version)
        except FloodmarkError as error:
            # The old one keeps more than needed, for hours; the next call tries again.
            _log.warning("the safe point of subscription %r could not be moved: %s", row.name, error)

    # Checks and storage

    def _change(self, name: str, judge: Judge) -> None:
        """Change a subscription in a round, and compact its changes when that is due."""

        def reload() -> None:
            found = load_subscription(self._storage.engine, name)
            if found is not None:
                self._readers.reload(found)

        step = ChangeStep(self._storage.engine, lambda: self._readers.state(name), judge, reload)
        self._take(step)
        if step.is_compaction_due:
            try:
                self._readers.update(name, lambda row: row)
            except FloodmarkError as error:
                # The change is stored, and compaction is due again later.
                _log.warning("the changes of subscription %r could not be compacted: %s", name, error)

    def list(self) -> list[SubscriptionRow]:
        return self._readers.list()


def _require_acceptable(state: SubscriptionState, progress: Progress, pending: PendingLedgers) -> None:
    """Raise an error for a report that the subscription cannot take."""
    row, deliveries = state.row, state.deliveries
    if not progress.is_news(deliveries.through):
        return
    unacked_max = max(deliveries.unacked, row.spec.unacked_max)
    learned = deliveries.copy()
    learned.learn(progress)
    learned.require_delivered(progress.acknowledgement)
    with pending.looking(row.name) as acknowledgements:
        acknowledgements.require_none(progress.acknowledgement, learned)
    learned.acknowledge(progress.acknowledgement)
    if learned.unacked > unacked_max:
        raise LimitExceeded(
            f"subscription {row.name!r} keeps at most {unacked_max:,} changes that were delivered and "
            "not acknowledged; acknowledge some first",
            subscription=row.name,
        )


def _require_lease(row: SubscriptionRow, epoch: int, owner: str) -> Lease:
    """The lease of a consumer; `LeaseHeld` if it lost the lease or is not its owner."""
    if row.lease is None or row.epoch != epoch or not row.lease.belongs_to(owner):
        raise SUBSCRIPTIONS.lease_held(row)
    return row.lease


def _is_lease_old(row: SubscriptionRow, now_ms: int) -> bool:
    lease = row.lease
    return lease is not None and 3 * (lease.expires_at_ms - now_ms) < 2 * lease.lifetime_ms


def _require_same_keys(row: SubscriptionRow, spec: SubscriptionSpec) -> None:
    if (row.spec.namespace, row.spec.keys) != (spec.namespace, spec.keys):
        # The error must not reveal anything about other namespaces and their keys.
        reads = f"{row.spec.keys}" if row.spec.namespace == spec.namespace else "another namespace"
        raise InvalidArgument(
            f"subscription {row.name!r} reads {reads}; it cannot be opened on {spec.namespace!r}, "
            f"{spec.keys}. Choose another name, or remove it first",
            subscription=row.name,
        )


def _require_same_order(row: SubscriptionRow, spec: SubscriptionSpec) -> None:
    """Refuse to change `on_generation`, because some rows of a swap may already be delivered."""
    known = row.spec.on_generation
    if row.live and known not in (OnGeneration.FAIL, spec.on_generation):
        raise InvalidArgument(
            f"subscription {row.name!r} goes on over a swap with on_generation={known.value!r}, and has "
            "deliveries that are not acknowledged; acknowledge them, or seek, before you change that",
            subscription=row.name,
        )


def _new_row(
    readers: LeasedReaders[SubscriptionRow, SubscriptionState],
    spec: SubscriptionSpec,
    start: Version,
    *,
    snapshot: bool,
) -> SubscriptionRow:
    readers.require_room()
    namespace, created_at = readers.resolve_namespace(spec.namespace)
    readers.require_reached(spec.name, start)
    # Above every epoch of an earlier subscription of this name, and above any stored changes of it.
    epoch = readers.resolved_version()
    row = SubscriptionRow(
        spec=spec, namespace_id=namespace, through=0, epoch=epoch, moved=epoch, changed=epoch
    )
    return _begin_at(row, max(start, created_at), snapshot=snapshot)


def _begin_at(row: SubscriptionRow, version: Version, *, snapshot: bool) -> SubscriptionRow:
    """The row of a subscription that begins behind a version, or with the snapshot at it."""
    if snapshot:
        return replace(row, through=version - 1, snapshot=version)
    return replace(row, through=version, snapshot=None)
