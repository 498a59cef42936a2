"""A subscription as its consumer uses it.

    with site.subscribe("indexer", "users") as subscription:
        for delivery in subscription:
            index(delivery.change)
            delivery.acknowledge()

Changes are delivered in commit order.  Unacknowledged changes are delivered again: to this consumer on
request, and to the next one when this one closes or dies.  An acknowledged change is not delivered again,
save for the last moments before a crash: acknowledgements are reported to the site a thousand at a time or
after a tenth of a second.

A thread of the subscription reports them, and renews the lease while the consumer works on a change.  The
thread does not keep the object alive: the lease of a subscription that is freed without `close` expires.

A change that is acknowledged in a transaction is *held*, neither acknowledged nor delivered, until the
transaction ends.  If that aborts, the change is delivered again, before all others.
"""

import logging
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from math import inf
from threading import Event, Lock, Thread
from typing import Final, Literal, NamedTuple, TypeAlias
from weakref import WeakMethod

import msgspec
from msgspec.structs import replace

from floodmark.clock import monotonic_seconds
from floodmark.feed.leased import require_lease_seconds
from floodmark.feed.subscription.acknowledgement import (
    Acknowledgement,
    ChangePosition,
    LiveCommit,
    SnapshotMark,
    commits_of,
)
from floodmark.feed.subscription.bookkeeping import Bookkeeping, SendIn
from floodmark.feed.subscription.pending import PendingAcknowledgement
from floodmark.feed.subscription.subscriptions import (
    OpenChanges,
    SubscriptionRow,
    SubscriptionSpec,
    SubscriptionStatistics,
    SubscriptionStore,
)
from floodmark.model.change import Change, Resolved
from floodmark.model.errors import (
    AcknowledgementConflict,
    Closed,
    Corruption,
    FloodmarkError,
    InvalidArgument,
    VersionCollected,
)
from floodmark.model.names import require_name
from floodmark.model.stream import ChangeBatch, ChangesRequest, SwapPlace
from floodmark.model.version import Version, physical_ms

# Where a subscription begins: after a version or moment, or at one of these places.
Since: TypeAlias = Version | datetime | Literal["snapshot", "beginning", "end"]
# Resolves a start and calls the function with it; again, if that version was collected meanwhile.
Begin: TypeAlias = Callable[[Since, Callable[[Resolved], SubscriptionRow]], SubscriptionRow]
# Interval for asking the site about transactions that hold changes.
LOOK_SECONDS: Final = 1.0
_log = logging.getLogger("floodmark.feed")
# Reports, and renews the lease if the argument is true; returns the seconds until the next call, or None.
KeepUp: TypeAlias = Callable[[bool], float | None]

Decode: TypeAlias = Callable[[ChangeBatch], list[Change]]

# Live commits closer to each other than this are read again in one stream, with all commits between them.
NEARBY_MS: Final = 100


class ReadStep(NamedTuple):
    """A change that was read, or None.  After it, the reader has every change at or below `through`.

    A row of a snapshot may have a `mark`, from which it can be read again.
    """

    change: Change | None
    position: ChangePosition
    through: Version
    is_redelivered: bool = False
    mark: SnapshotMark | None = None


# A mark in the snapshot at a version.
SnapshotPlace: TypeAlias = tuple[Version, SnapshotMark]


class SubscriptionReader:
    """Reads the changes of a subscription, each with its position.

    A following stream must yield empty batches on an idle site, so that a thread that waits for a change
    notices that the subscription was closed, moved or lost.
    """

    def __init__(self, row: SubscriptionRow, open_changes: OpenChanges, decode: Decode) -> None:
        self._row = row
        self._open_changes = open_changes
        self._decode = decode

    def read(self, since: Version, *, follow: bool, snapshot: SnapshotPlace | None) -> Iterator[ReadStep]:
        """The changes after a version; with `snapshot`, first the rows of that snapshot from its mark on."""
        version, key = (since, None) if snapshot is None else (snapshot[0], snapshot[1].key)
        return self._steps(self._row.request(version, follow=follow, snapshot=key), snapshot)

    def read_again(self, commits: list[LiveCommit], snapshot: SnapshotPlace | None) -> Iterator[ReadStep]:
        """The live changes of the commits, in order.  The first may be a snapshot, read from its mark on."""
        if snapshot is not None and commits and commits[0].version == snapshot[0]:
            version, mark = snapshot
            request = self._row.request(version, version, snapshot=mark.key)
            yield from self._find_live(commits[:1], self._steps(request, snapshot))
            commits = commits[1:]
        for group in _nearby(commits):
            request = self._row.request(group[0].version - 1, group[-1].version)
            yield from self._find_live(group, self._steps(request))

    def _find_live(self, commits: list[LiveCommit], steps: Iterator[ReadStep]) -> Iterator[ReadStep]:
        by_version = {commit.version: commit for commit in commits}
        missing = sum(commit.unacked for commit in commits)
        for step in steps:
            commit = by_version.get(step.position.version)
            if step.change is not None and commit is not None and commit.is_live(step.position.index):
                missing -= 1
                yield step._replace(is_redelivered=True)
            if not missing:
                return
        raise Corruption(
            f"{missing} changes that subscription {self._row.name!r} delivered between versions "
            f"{commits[0].version} and {commits[-1].version} cannot be read again. Seek the subscription to "
            "a snapshot, which has every key",
            subscription=self._row.name,
        )

    def _steps(self, request: ChangesRequest, snapshot: SnapshotPlace | None = None) -> Iterator[ReadStep]:
        """Read changes and number them within each commit.

        A snapshot is one commit, whose rows are numbered from its mark on.  So are the rows of a swap, which
        are always read from the first one.
        """
        version, index, mark = 0, 0, None
        if snapshot is not None:
            version, index = snapshot[0], snapshot[1].index - 1
        for batch in self._open_changes(request):
            changes = self._decode(batch)
            # Within a snapshot, no version is complete.
            through = batch.through if batch.snapshot is None else 0
            for left, change in zip(reversed(range(len(changes))), changes, strict=True):
                version, index = change.version, index + 1 if change.version == version else 0
                yield ReadStep(change, ChangePosition(version, index), 0 if left else through, mark=mark)
                mark = None
            if not changes:
                yield ReadStep(None, ChangePosition(batch.through, 0), through)
            if batch.snapshot is not None and SwapPlace.decode(batch.snapshot) is None:
                mark = SnapshotMark(index + 1, batch.snapshot)


def _nearby(commits: Iterable[LiveCommit]) -> Iterator[list[LiveCommit]]:
    """The commits in groups of commits that are close to each other."""
    group: list[LiveCommit] = []
    for commit in commits:
        if group and physical_ms(commit.version) - physical_ms(group[-1].version) > NEARBY_MS:
            yield group
            group = []
        group.append(commit)
    if group:
        yield group


class DeliveryStream:
    """The stream of a consumer's next deliveries.  For one thread at a time.

    The stream is opened again when the generation of the bookkeeping changes.
    """

    def __init__(self, reader: SubscriptionReader, book: Bookkeeping, *, follow: bool) -> None:
        self._reader = reader
        self._book = book
        self._follow = follow
        self._steps: Generator[ReadStep, None, None] | None = None
        self._generation = 0

    @property
    def is_current(self) -> bool:
        """Whether the last step is still valid.  The caller holds the lock of the bookkeeping."""
        return self._generation == self._book.generation

    def next(self) -> ReadStep | None:
        """The next step; None at the end."""
        with self._book.changed:
            generation = self._book.generation
        if self._steps is None or self._generation != generation:
            self.close()
            self._steps = _read_due(self._reader, self._book, generation, follow=self._follow)
            self._generation = generation
        step = None
        try:
            step = next(self._steps, None)
        finally:
            if step is None:
                # The next call opens the stream again, also after an error.
                self._steps = None
        return step

    def close(self) -> None:
        """Close the stream.  Closing twice is harmless."""
        if self._steps is not None:
            self._steps.close()
            self._steps = None


def _read_due(
    reader: SubscriptionReader, book: Bookkeeping, generation: int, *, follow: bool
) -> Generator[ReadStep, None, None]:
    """The changes to deliver again, then new ones.

    The generator holds no reference to its stream, so that both are freed with a subscription that was not
    closed.
    """
    with book.changed:
        due = commits_of(filter(book.is_available, book.due))
        place = book.account.find_place(due[0].runs[0]) if due else None
    yield from reader.read_again(due, place)
    with book.changed:
        if generation == book.generation:
            # Held changes may have to be delivered again.
            book.due = {each for each in book.due if each in book.held}
        since = book.account.deliveries.through
        place = book.account.find_place() if book.account.is_at_snapshot else None
    yield from reader.read(since, follow=follow, snapshot=place)


@dataclass(frozen=True, kw_only=True)
class SubscriptionOptions:
    """Options of a consumer.

    Without `follow`, iterating ends at the present.  Without `background` there is no thread: the caller
    reports acknowledgements and renews the lease with `flush`.
    """

    follow: bool = True
    lease_seconds: float = 30.0
    flush_count: int = 1_000
    flush_seconds: float = 0.1
    background: bool = True

    def __post_init__(self) -> None:
        if self.flush_count < 1 or not 0 <= self.flush_seconds <= 3_600:
            raise InvalidArgument(
                "a subscription is flushed after 1 or more acknowledgements and 0 to 3,600 seconds, not "
                f"{self.flush_count} and {self.flush_seconds}"
            )


class Delivery(msgspec.Struct, frozen=True, eq=False):
    """A change that awaits its acknowledgement.

    `position` is plain data, by which the change can also be acknowledged elsewhere.
    """

    change: Change
    position: ChangePosition
    is_redelivered: bool
    subscription: "Subscription"
    # The generation of the bookkeeping: deliveries from before the last `seek` are void.
    epoch: int

    def acknowledge(self) -> None:
        self.subscription.acknowledge(self)

    def __repr__(self) -> str:
        again = ", redelivered" if self.is_redelivered else ""
        return f"Delivery({self.change!r} at {self.position!r}{again})"


def open_subscription(
    store: SubscriptionStore,
    spec: SubscriptionSpec,
    *,
    start: Since,
    holder: str,
    options: SubscriptionOptions,
    open_changes: OpenChanges,
    decode: Decode,
    begin: Begin,
) -> "Subscription":
    """Acquire the lease of a subscription, and create it at `start` if it does not exist.

    A consumer with the same `holder` name as the current one, such as a restarted process, takes over at
    once.
    """
    require_lease_seconds(options.lease_seconds)
    require_name(holder, "holder of a lease")

    def open_at(place: Resolved) -> SubscriptionRow:
        snapshot = place.snapshot is not None
        return store.open(spec, place.version, holder, options.lease_seconds, snapshot)

    opened = begin(start, open_at)
    pending = store.pending(spec.name)
    # A change that was pending may have been acknowledged since the row was read.
    row = replace(store.find(spec.name), epoch=opened.epoch, lease=opened.lease)
    reader = SubscriptionReader(row, open_changes, decode)
    return Subscription(store, row, pending, reader, begin, options)


class Subscription:
    """Delivers changes and takes acknowledgements.  Close it, or use it in a `with` block.

    Any thread may acknowledge, and several may iterate: each change goes to one of them.
    """

    def __init__(
        self,
        store: SubscriptionStore,
        row: SubscriptionRow,
        pending: Iterable[PendingAcknowledgement],
        reader: SubscriptionReader,
        begin: Begin,
        options: SubscriptionOptions,
    ) -> None:
        assert row.lease is not None
        self.name = row.name
        self.namespace = row.namespace
        self.holder = row.lease.holder
        self._book = Bookkeeping(store, row, pending)
        self._stream = DeliveryStream(reader, self._book, follow=options.follow)
        self._begin_at = begin
        self._options = options
        self._unacked_max = row.spec.unacked_max
        # Held by the thread that reads.  It is taken before the locks of the bookkeeping.
        self._reading = Lock()
        self._closed = False
        self._looked = monotonic_seconds()
        renew_seconds = row.lease.lifetime_ms / 3_000
        self._upkeep = (
            _Upkeep(self.name, WeakMethod(self._keep_up), renew_seconds, options.flush_seconds)
            if options.background
            else None
        )
        # Changes that the last consumer acknowledged in a transaction are delivered again if that aborts.
        self._look_soon()

    def __enter__(self) -> "Subscription":
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        try:
            self.close()
        except FloodmarkError as failure:
            if error is None:
                raise
            # The caller gets the first error.
            _log.warning("subscription %r could not be closed in order: %s", self.name, failure)

    def __repr__(self) -> str:
        return f"Subscription({self.name!r}, namespace={self.namespace!r})"

    # Delivering

    def __iter__(self) -> Iterator[Delivery]:
        return self

    def __next__(self) -> Delivery:
        self._require_usable()
        with self._reading:
            while not self._closed:
                step = self._stream.next()
                if step is None:
                    break
                delivery = self._deliver(step)
                if delivery is not None:
                    return delivery
            if self._closed:
                self._stream.close()
        raise StopIteration

    def redeliver(self) -> None:
        """Deliver unacknowledged changes again, in order, before all others."""
        self._require_usable()
        book = self._book
        book.look()
        with book.changed:
            book.deliver_again(book.available())

    def seek(self, to: Since) -> None:
        """Continue after a version or a moment, at the beginning or the end, or with a snapshot of every key.

        All changes up to there count as acknowledged, and all above as not delivered.  Earlier deliveries
        cannot be acknowledged any more.  Raises `AcknowledgementConflict` while an open transaction holds
        changes.
        """
        self._require_usable()
        book = self._book

        def move(place: Resolved) -> SubscriptionRow:
            # A refused `seek` changes nothing.
            with book.noting_failure(AcknowledgementConflict, VersionCollected):
                return book.store.seek(self.name, place.version, book.epoch, place.snapshot is not None)

        with book.sending:
            row = self._begin_at(to, move)
            with book.changed:
                book.move(row)

    def _deliver(self, step: ReadStep) -> Delivery | None:
        """The delivery of a step; None if its change must not be delivered now."""
        book = self._book
        with book.changed:
            deliveries = book.account.deliveries
            if step.is_redelivered:
                wanted = step.position in book.due and book.is_available(step.position)
            else:
                wanted = step.change is not None and not deliveries.is_delivered(step.position)
                if wanted:
                    self._wait_for_room()
            if book.failure is not None:
                raise book.failure.again()
            if self._closed or not self._stream.is_current:
                return None
            if step.mark is not None:
                book.account.note_mark(step.mark)
            if not step.is_redelivered:
                if wanted:
                    book.account.deliver(step.position)
                deliveries.complete(step.through)
            if not wanted or step.change is None:
                return None
            book.due.discard(step.position)
            return Delivery(step.change, step.position, step.is_redelivered, self, book.epoch)

    def _wait_for_room(self) -> None:
        """Wait until one more change may be unacknowledged, or there is nothing to deliver any more."""
        book, unacked_max = self._book, self._unacked_max
        if book.account.deliveries.unacked < unacked_max:
            return
        _log.warning(
            "subscription %r waits: %d changes were delivered and not acknowledged", self.name, unacked_max
        )
        book.changed.wait_for(
            lambda: (
                book.account.deliveries.unacked < unacked_max
                or self._closed
                or book.failure is not None
                or not self._stream.is_current
            )
        )

    # Acknowledging

    def acknowledge(self, delivery: Delivery | ChangePosition) -> None:
        """Acknowledge a change.  Repeating it is harmless."""
        self._note(delivery, Acknowledgement(positions=[self._position_of(delivery)]))

    def acknowledge_through(self, delivery: Delivery | ChangePosition) -> None:
        """Acknowledge a change and all changes delivered before it."""
        self._note(delivery, Acknowledgement(through=self._position_of(delivery)))

    def flush(self) -> None:
        """Report all acknowledgements, and return when the site has them on disk."""
        self._require_usable()
        self._book.report()
        self._book.look()

    def statistics(self) -> SubscriptionStatistics:
        """The progress of the subscription, and its backlog."""
        self.flush()
        return self._book.store.statistics(self.name)

    def _note(self, delivery: Delivery | ChangePosition, acknowledgement: Acknowledgement) -> None:
        book = self._book
        with book.changed:
            self._require_usable()
            if isinstance(delivery, Delivery) and delivery.epoch != book.epoch:
                return
            book.require_not_held(acknowledgement)
            book.account.acknowledge(acknowledgement)
            is_due = book.account.untold >= self._options.flush_count
            book.changed.notify_all()
        if is_due:
            book.report()
        elif self._upkeep is not None:
            self._upkeep.wake()

    def _position_of(self, delivery: object) -> ChangePosition:
        if isinstance(delivery, ChangePosition):
            return delivery
        if isinstance(delivery, Delivery) and delivery.subscription is self:
            return delivery.position
        raise InvalidArgument(
            f"{delivery!r:.200} was not delivered by {self!r}; acknowledge what it delivers, or a `position`"
        )

    # Transactions

    def acknowledge_in(
        self,
        send: SendIn,
        transaction: str,
        deliveries: Iterable[Delivery | ChangePosition],
        *,
        through: bool,
    ) -> None:
        """Acknowledge changes, and with `through` all before them, if a transaction commits.

        `send` reports to the site, which refuses changes that were acknowledged before or that another
        transaction holds.
        """
        named = list(deliveries)
        positions = [self._position_of(each) for each in named]
        if not positions:
            return

        def check() -> None:
            self._require_usable()
            for each in named:
                if isinstance(each, Delivery) and each.epoch != self._book.epoch:
                    raise AcknowledgementConflict(
                        f"{each!r:.200} was delivered before {self!r} was moved; abort transaction "
                        f"{transaction}, and go on with what is delivered now",
                        subscription=self.name,
                        transaction=transaction,
                    )

        acknowledgement = (
            Acknowledgement(through=max(positions)) if through else Acknowledgement(positions=positions)
        )
        try:
            self._book.acknowledge_in(send, transaction, acknowledgement, check)
        finally:
            self._look_soon()

    def settle(self, transaction: str, committed: bool | None) -> None:
        """Apply the end of a transaction: its changes are acknowledged, or delivered again before all others.

        If `committed` is None, the outcome is unknown, and the site is asked until it is known.
        """
        if committed is not None:
            self._book.settle(transaction, committed=committed)
        self._look_soon()

    def _look_soon(self) -> None:
        if self._upkeep is not None and self._book.held:
            self._upkeep.wake()

    # The end

    def close(self) -> None:
        """Report all acknowledgements and release the lease.  Closing twice is harmless."""
        with self._book.changed:
            if self._closed:
                return
            self._closed = True
            self._book.changed.notify_all()
        if self._upkeep is not None:
            self._upkeep.stop()
        # A thread that iterates notices the close at its next batch.
        if self._reading.acquire(blocking=False):
            try:
                self._stream.close()
            finally:
                self._reading.release()
        try:
            if self._book.failure is not None:
                raise self._book.failure.again()
            self._book.report()
        finally:
            self._release()

    def _release(self) -> None:
        try:
            self._book.store.release(self.name, self._book.epoch)
        except FloodmarkError as error:
            _log.info("the lease of subscription %r was not released and expires: %s", self.name, error)

    def _require_usable(self) -> None:
        if self._closed:
            raise Closed(f"{self!r} was closed; subscribe again")
        if self._book.failure is not None:
            raise self._book.failure.again()

    def _keep_up(self, renew: bool) -> float | None:
        """Report and ask about open transactions; return the seconds until the next call, None for never."""
        try:
            self._book.report(renew=renew)
            if monotonic_seconds() - self._looked >= LOOK_SECONDS:
                self._looked = monotonic_seconds()
                self._book.look()
        except FloodmarkError as error:
            _log.warning("subscription %r could not report to its site: %s", self.name, error)
        if self._book.failure is not None:
            return None
        return LOOK_SECONDS if self._book.held else inf


class _Upkeep:
    """The background thread of a subscription.  It calls a method soon after `wake`, and at intervals.

    It references the subscription only during a call, so that an unused one can be freed.
    """

    def __init__(
        self, name: str, keep_up: "WeakMethod[KeepUp]", renew_seconds: float, flush_seconds: float
    ) -> None:
        self._keep_up = keep_up
        self._renew_seconds = renew_seconds
        self._flush_seconds = flush_seconds
        self._wanted = Event()
        self._stopping = Event()
        self._thread = Thread(target=self._run, name=f"floodmark-subscription-{name}", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Request a call of the method."""
        if not self._wanted.is_set():
            self._wanted.set()

    def stop(self) -> None:
        """End the thread and wait for it."""
        self._stopping.set()
        self._wanted.set()
        self._thread.join()

    def _run(self) -> None:
        renewed = monotonic_seconds()
        pause: float | None = inf
        while pause is not None:
            rest = renewed + self._renew_seconds - monotonic_seconds()
            is_wanted = self._wanted.wait(max(0.0, min(rest, pause)))
            if self._stopping.wait(self._flush_seconds if is_wanted else 0):
                return
            self._wanted.clear()
            now = monotonic_seconds()
            is_due = now - renewed >= self._renew_seconds
            if is_due:
                renewed = now
            pause = self._call(renew=is_due)

    def _call(self, *, renew: bool) -> float | None:
        """Call the method if its subscription still exists; return the next pause, or None for the end."""
        keep_up = self._keep_up()
        return None if keep_up is None else keep_up(renew)
