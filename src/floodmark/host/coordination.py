"""The transactions of a site: its coordinators and participants.

When a site is opened, decided transactions are carried out, and those that no caller can still commit are
aborted (`transaction/book.py`), so that the resolved version waits for no deadline.

**With several nodes** the keeper runs the coordinators.  It prepares, commits and aborts in a partition of
another node by calls to its owner, and an owner that finds a prepared write asks the keeper for its outcome.
All logs are guarded by the keeper's key, so a former keeper decides nothing.  The next keeper recovers the
logs after it has acquired the lease, as after a restart: a commit in the log is carried out, other
transactions are aborted.

A keeper that does not know a transaction answers ABORT only if it still holds the lease *after* the lookup:
otherwise the next keeper may have begun that transaction, and may commit it.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import partial
from threading import Lock, Thread
from typing import Any, Final
from uuid import uuid4

from floodmark.codec.appends import any_append, set_after
from floodmark.codec.ordered import encode_namespace
from floodmark.codec.stamps import STAMP_BYTES
from floodmark.feed.subscription.acknowledgement import Acknowledgement, Progress
from floodmark.feed.subscription.store import LocalSubscriptionStore
from floodmark.host.parts import SiteParts
from floodmark.host.transaction_logs import TransactionLogs, read_log
from floodmark.host.transaction_port import (
    OWN_MARK,
    BatchUpdate,
    LogKind,
    LogRecord,
    LogReport,
    NamespaceWrites,
    TransactionCounts,
)
from floodmark.log import BatchedWriter, BatchSettings
from floodmark.model.actions import SITE_OWNER
from floodmark.model.errors import (
    Closed,
    Conflict,
    FloodmarkError,
    InvalidArgument,
    NamespaceNotFound,
    OutcomeUnknown,
    PartlyDone,
    Retryable,
    Terminal,
    TransactionEnded,
    TransactionNotFound,
)
from floodmark.model.limits import COORDINATORS_MAX, REPORTED_CHARACTERS_MAX, TRANSACTIONS_OF_CALLER_MAX
from floodmark.model.partition import Decision, Fate, Partition, ReadSet
from floodmark.model.ranges import KeyRange
from floodmark.model.transaction import (
    ABORTED,
    UNKNOWN,
    Participant,
    ParticipantKind,
    TransactionOutcome,
    TransactionState,
    TransactionStatistics,
)
from floodmark.model.version import VERSION_MAX, Version
from floodmark.partition.commit.entering import check_fits
from floodmark.partition.conflicts import reserved_until
from floodmark.routing import Router
from floodmark.routing.router import each_part
from floodmark.transaction import TransactionCoordinator
from floodmark.transaction.book import NOT_NOW
from floodmark.transaction.coordinator import start_sweeping

# The number of random hexadecimal digits in the id of a transaction, which make it hard to guess.
_SECRET_DIGITS: Final = 12


class SiteParticipants:
    """Calls participants of transactions: partitions of all nodes, and subscriptions."""

    def __init__(self, router: Router, subscriptions: LocalSubscriptionStore) -> None:
        self._router = router
        self._subscriptions = subscriptions

    def commit(self, participant: Participant, transaction: str, version: Version) -> None:
        if participant.kind is ParticipantKind.SUBSCRIPTION:
            self._subscriptions.commit_pending(participant.name, transaction)
        else:
            self._router.call(
                bytes.fromhex(participant.name),
                lambda partition: partition.commit_prepared(transaction, version),
            )

    def abort(self, participant: Participant, transaction: str) -> None:
        if participant.kind is ParticipantKind.SUBSCRIPTION:
            self._subscriptions.abort_pending(participant.name, transaction)
        else:
            self._router.call(
                bytes.fromhex(participant.name), lambda partition: partition.abort_prepared(transaction)
            )


class LocalTransactions:
    """The port to transactions, with the coordinators of a site.  Safe to use from many threads.

    A node that does not keep the site has no coordinators: it only asks the keeper for outcomes.
    """

    def __init__(
        self,
        site: SiteParts,
        router: Router,
        subscriptions: LocalSubscriptionStore,
        logs: TransactionLogs,
        *,
        sweeps: bool,
        keeps: bool,
    ) -> None:
        node = site.node
        self._keeps = keeps
        self._logs = logs
        self._node = node
        self._nodes = site.nodes
        self._catalog = site.catalog
        self._subscriptions = subscriptions
        self._router = router
        self._participants = SiteParticipants(router, subscriptions)
        # Whether each coordinator has a thread that sweeps.
        self._is_started = False
        # Held while a coordinator is opened.  The dict of open ones is replaced, never changed, so that
        # lookups need no lock.
        self._lock = Lock()
        self._closed = False
        self.coordinators: Mapping[int, TransactionCoordinator] = {}
        self._threads: list[Thread] = []
        node.settle_by(self._settle, self._settle_batch)
        subscriptions.settle_by(self._settle)
        if not keeps:
            return
        for number in logs.coordinators():
            self._open(number)
        node.forget_prepared(
            {each.id for each in self.list(timedelta(0)) if each.state is TransactionState.ABORTING}
        )
        subscriptions.settle_pending(self._fate_at_opening if sweeps else self._settle)
        if not sweeps:
            self.sweep()

    def start(self) -> None:
        """Start the sweeping threads of the coordinators, those of coordinators opened later included."""
        with self._lock:
            self._is_started = True
            for coordinator in self.coordinators.values():
                self._threads.append(start_sweeping(coordinator))

    # Calls of transactions

    def begin(self, timeout: timedelta, coordinator: int, owner: str = "") -> str:
        if not 0 <= coordinator < COORDINATORS_MAX:
            raise InvalidArgument(f"coordinators have numbers from 0 to {COORDINATORS_MAX - 1}")
        if coordinator not in self.coordinators:
            with self._lock:
                if coordinator not in self.coordinators:
                    self._open(coordinator)
        if not owner:
            return self.coordinators[coordinator].begin(timeout, OWN_MARK)
        return self.coordinators[coordinator].begin(timeout, owner, owned_max=TRANSACTIONS_OF_CALLER_MAX)

    def acknowledge(
        self,
        transaction: str,
        name: str,
        epoch: int,
        progress: Progress,
        acknowledgement: Acknowledgement,
        owner: str = SITE_OWNER,
    ) -> None:
        participant = Participant(ParticipantKind.SUBSCRIPTION, name)
        with self._coordinator_of(transaction).taking_part(transaction, participant):
            self._subscriptions.acknowledge_in(transaction, name, epoch, progress, acknowledgement, owner)

    def commit(
        self, transaction: str, writes: list[NamespaceWrites], reads: ReadSet | None = None
    ) -> Version:
        coordinator = self._coordinator_of(transaction)
        rows = self._qualify(writes)
        if coordinator.fate(transaction).decision is not Decision.UNDECIDED:
            return coordinator.commit(transaction, self._node.committer.now(), wrote=bool(rows))
        try:
            if is_batch := len(rows) > 1:
                _require_one_commit(self._router, rows)
            # First prepare the writes, which locks their keys; then get a version above; then validate the
            # reads.
            first, last = _split_appends(self._router, rows)
            since = 0 if reads is None else reads.since
            version = self._prepare(coordinator, transaction, first, since, batch=is_batch)
            if reads is not None:
                version = _reserve(self._router, transaction, reads.writes, version)
            if last:
                last = {key: set_after(value, version) for key, value in last.items()}
                version = self._prepare(coordinator, transaction, last, version, batch=is_batch)
            if reads is not None:
                self._router.validate(transaction, reads, version)
        except TransactionEnded:
            # Perhaps by an earlier request for the same commit, whose answer was lost.
            return coordinator.commit(transaction, self._node.committer.now(), wrote=bool(rows))
        except FloodmarkError as error:
            # The reason is stored for a caller that does not get this error and commits again.
            why = "it cannot commit: " if isinstance(error, Terminal) else NOT_NOW
            with suppress(FloodmarkError):
                coordinator.abort(transaction, f"{why}{error}")
            _tell_reserved(self._router, transaction, reads, 0)
            raise
        version = coordinator.commit(transaction, version, wrote=bool(rows))
        _tell_reserved(self._router, transaction, reads, version)
        return version

    def _prepare(
        self,
        coordinator: TransactionCoordinator,
        transaction: str,
        rows: Mapping[bytes, bytes],
        since: Version,
        *,
        batch: bool,
    ) -> Version:
        """Prepare writes at their partitions; return a version above `since` at which they can be committed.

        A partition with prepared writes is not split or merged until these have ended.
        """
        keys, appends = sorted(rows), any_append([*rows.values()])
        groups = [place for _, place in self._router.maps.map.group(keys)]

        def prepare(place: slice, *, waits: bool = True) -> Version:
            """Prepare the writes to a slice of the keys, whose partitions may have been split or merged."""
            done, highest = place.start, 0
            while done < place.stop:
                first = keys[done]
                with coordinator.taking_part(transaction, _participant(first)):
                    version, done = self._router.call(
                        first,
                        lambda partition: _prepare(
                            partition, transaction, keys, rows, waits=waits, batch=batch
                        ),
                    )
                if done < place.stop and appends:
                    raise Conflict("a partition that a transaction appends to was split; try again")
                highest = max(highest, version)
            return highest

        if len(groups) < 2:
            versions = [prepare(place) for place in groups]
        else:
            try:
                versions = self._router.calls.all([partial(prepare, place, waits=False) for place in groups])
            except Retryable:
                # Transactions wait for locks only while they take them in key order, so there is no deadlock.
                parts = [_participant(keys[place.start]) for place in groups]
                self._router.calls.all(
                    [partial(self._participants.abort, part, transaction) for part in parts]
                )
                versions = [prepare(place) for place in groups]
        if (version := max(versions, default=0)) > since:
            return version
        self._node.committer.observe(since)
        return self._node.committer.now()

    def abort(self, transaction: str, reason: str) -> None:
        self._coordinator_of(transaction).abort(transaction, reason[:REPORTED_CHARACTERS_MAX])

    def outcome(self, transaction: str) -> TransactionOutcome:
        try:
            coordinator = self._coordinator_of(transaction)
            if coordinator.show(transaction).state is TransactionState.OPEN:
                # The transaction may have been decided meanwhile.
                with suppress(TransactionEnded, PartlyDone):
                    coordinator.abort(transaction, "its outcome was asked for")
            shown = coordinator.show(transaction)
        except TransactionNotFound:
            return UNKNOWN
        if shown.state is TransactionState.OPEN:
            raise Retryable(f"transaction {transaction} is being decided; ask again", transaction=transaction)
        if shown.state in (TransactionState.COMMITTING, TransactionState.COMMITTED):
            return TransactionOutcome("committed", shown.version)
        return ABORTED

    def fate(self, transaction: str) -> Fate:
        """The decision about the writes and acknowledgements of a transaction.

        Raises `NotKeeper` if another node keeps the site and must be asked.
        """
        try:
            fate = self._coordinator_of(transaction).fate(transaction)
        except TransactionNotFound:
            fate = Fate(Decision.ABORT)
        if fate.decision is Decision.ABORT:
            # Checked last: another keeper may have begun the transaction before the lookup above, but not
            # after.
            self._nodes.require_keeper()
        return fate

    def _settle(self, transaction: str) -> Fate:
        """The outcome from this node's coordinators or the keeper's; undecided while neither answers."""
        try:
            return self.fate(transaction) if self._keeps else self._nodes.fate(transaction)
        except Retryable:
            return Fate(Decision.UNDECIDED)

    def _settle_batch(self, batch: str, siblings: Sequence[bytes]) -> Fate:
        """The outcome of an atomic batch; undecided while one of its partitions does not answer."""
        try:
            return self._nodes.batch_fate(batch, siblings)
        except (Retryable, OutcomeUnknown):
            # Asking again is harmless: it finds a refusal that may have been stored.
            return Fate(Decision.UNDECIDED)

    def _fate_at_opening(self, transaction: str) -> Fate:
        """The outcome for an acknowledgement found pending at opening; undecided ones end later."""
        try:
            is_held = self._coordinator_of(transaction).holds(transaction)
        except TransactionNotFound:
            is_held = False
        return Fate(Decision.UNDECIDED if is_held else Decision.ABORT)

    # Calls of operators

    def show(self, transaction: str) -> TransactionStatistics:
        return self._coordinator_of(transaction).show(transaction)

    def sweep(self) -> None:
        """Sweep all coordinators once, as their threads do unless the site has `background=False`."""
        for coordinator in self.coordinators.values():
            coordinator.sweep()

    def count(self) -> TransactionCounts:
        counts = [coordinator.count() for coordinator in self.coordinators.values()]
        states = sum((states for states, _ in counts), Counter[TransactionState]())
        return TransactionCounts(
            states=states, oldest_age_ms=max((age_ms for _, age_ms in counts), default=0)
        )

    def close(self) -> None:
        """Write pending records and close all coordinators, even if closing one of them fails."""
        with self._lock:
            self._closed = True
        with ExitStack() as closing:
            for thread in self._threads:
                closing.callback(thread.join)
            for coordinator in self.coordinators.values():
                closing.callback(coordinator.close)

    # The logs

    def logs(self) -> list[LogReport]:
        return [self._logs.report(log, owner, writer) for (log, owner), writer in self._writers().items()]

    def log_records(self, log: LogKind, owner: str, limit: int) -> list[LogRecord]:
        writer = self._writers().get((log, owner))
        if writer is None:
            raise InvalidArgument(f"there is no {log} log of {owner!r:.80}; floodmark txn log list names all")
        return read_log(log, writer, limit)

    def batching(self, log: LogKind) -> BatchSettings:
        return self._logs.settings.of(log)

    def set_batching(self, log: LogKind, update: BatchUpdate) -> BatchSettings:
        return self._logs.change(log, update)

    def _writers(self) -> dict[tuple[LogKind, str], BatchedWriter[Any]]:
        coordinators = sorted(self.coordinators.items())
        pending = sorted(self._subscriptions.pending_logs().items())
        return {
            **{(LogKind.COORDINATOR, str(number)): each.log for number, each in coordinators},
            **{(LogKind.PENDING_ACK, name): each.writer for name, each in pending},
        }

    # Helpers

    def _qualify(self, writes: list[NamespaceWrites]) -> dict[bytes, bytes]:
        rows: dict[bytes, bytes] = {}
        for each in writes:
            row = self._catalog.get(each.namespace)
            if row.id != each.id:
                raise NamespaceNotFound(
                    f"the namespace {each.namespace!r} was dropped, and one that came later has its name; "
                    "open it again",
                    namespace=each.namespace,
                )
            prefix = encode_namespace(row.id)
            rows.update({prefix + key: value for key, value in each.rows.items()})
        return rows

    def _open(self, number: int) -> None:
        if self._closed:
            raise Closed("the site was closed; open it again")
        coordinator = TransactionCoordinator(
            number,
            self._logs.store,
            self._participants,
            settings=self._logs.settings.coordinator,
            mint=self._mint,
            time_source=self._node.clock.time_source,
            is_abandoned=_is_own,
            at_once=self._router.calls.all,
        )
        self._logs.opened(LogKind.COORDINATOR, coordinator.log)
        self.coordinators = {**self.coordinators, number: coordinator}
        if self._is_started:
            self._threads.append(start_sweeping(coordinator))

    def _mint(self) -> str:
        return f"{self._node.committer.now()}-{uuid4().hex[:_SECRET_DIGITS]}"

    def _coordinator_of(self, transaction: str) -> TransactionCoordinator:
        number, _, rest = transaction.partition("-")
        found = (
            self.coordinators.get(int(number)) if number.isdecimal() and len(number) < 8 and rest else None
        )
        if found is None:
            raise TransactionNotFound(
                f"there is no transaction {transaction!r:.80}; it has ended, or never was",
                transaction=transaction[:80],
            )
        return found

    def list(self, older_than: timedelta) -> list[TransactionStatistics]:
        found = [
            each
            for coordinator in self.coordinators.values()
            for each in coordinator.transactions(older_than=older_than)
        ]
        return sorted(found, key=lambda each: -each.age_ms)


def _is_own(transaction: str) -> bool:
    """Whether a transaction was begun by a process that has the site open itself, not by a client."""
    return transaction.endswith(f"-{OWN_MARK}")


def _require_one_commit(router: Router, rows: Mapping[bytes, bytes]) -> None:
    """Refuse writes that would not fit into one commit at another site, where values carry their origin."""
    size = sum(len(key) + len(value) + STAMP_BYTES for key, value in rows.items())
    check_fits(router.maps.map.route(min(rows)).limits, len(rows), size)


def _split_appends(
    router: Router, rows: Mapping[bytes, bytes]
) -> tuple[dict[bytes, bytes], dict[bytes, bytes]]:
    """The writes to prepare first, and those of the partition with appends, whose p is the commit version."""
    keys, first, last = sorted(rows), {}, []
    for _, place in router.maps.map.group(keys):
        group = {key: rows[key] for key in keys[place]}
        if any_append([*group.values()]):
            last.append(group)
        else:
            first.update(group)
    if len(last) > 1:
        raise InvalidArgument(
            "a transaction over several nodes appends to logs in several partitions; append to one log, "
            "or begin a transaction for each"
        )
    return first, last[0] if last else {}


def _participant(key: bytes) -> Participant:
    """The partition of a qualified key, as a participant."""
    return Participant(ParticipantKind.PARTITION, key.hex())


def _prepare(
    partition: Partition,
    transaction: str,
    keys: Sequence[bytes],
    rows: Mapping[bytes, bytes],
    *,
    waits: bool,
    batch: bool,
) -> tuple[Version, int]:
    """Prepare the leading keys that are in a partition; return p, and the index after the last of them."""
    start, last = bisect_left(keys, partition.range.start), partition.range.end
    end = len(keys) if last is None else bisect_left(keys, last)
    own = keys[start:end]
    values = [rows[key] for key in own]
    return partition.prepare(transaction, own, values, waits=waits, batch=batch), end


def _reserve(router: Router, transaction: str, ranges: Sequence[KeyRange], version: Version) -> Version:
    """Declare ranges as written, after all prepares; return the version at which they can be committed."""
    versions = [version]
    for keys in ranges:
        each_part(
            router, keys, lambda partition, within: versions.append(partition.reserve(transaction, within))
        )
    if max(versions) > min(map(reserved_until, versions[1:]), default=VERSION_MAX):
        raise Conflict("the keys that a transaction declares as written took too long to reserve; try again")
    return max(versions)


def _tell_reserved(router: Router, transaction: str, reads: ReadSet | None, version: Version) -> None:
    """Tell nodes the commit version, 0 for an abort, of a reservation.  It expires soon at other nodes."""
    for keys in () if reads is None else reads.writes:
        with suppress(FloodmarkError):
            each_part(router, keys, lambda partition, within: partition.reserve(transaction, within, version))
