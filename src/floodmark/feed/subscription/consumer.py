"""A subscription in the hands of its consumer.

    with site.subscribe("indexer", "users") as subscription:
        for delivery in subscription:
            index(delivery.change)
            delivery.acknowledge()

Changes are delivered in commit order.  What is not acknowledged is delivered again: to this consumer when
it asks for it, and to the next one when this one closes or dies.  So every change is dealt with at least
once, and one that was acknowledged is not seen again, save for the last moments before a crash:
acknowledgements are gathered, and told to the site a thousand at a time or after a tenth of a second.

A thread of the subscription does the latter, and keeps the lease while the consumer is busy with a change
for long.  It does not keep the subscription alive: one that is dropped without being closed ends with its
lease.

What is acknowledged in a transaction is *held*: it counts as unacknowledged and is not delivered, until the
transaction has ended.  If it was committed, that was the acknowledgement; if it was aborted, the changes are
delivered again, next of all.
"""

import logging
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from math import inf
from threading import Lock
from types import TracebackType
from typing import Final, Literal, TypeAlias

import msgspec
from msgspec.structs import replace

from floodmark.clock import monotonic_seconds
from floodmark.feed.named.feeds import require_lease_seconds
from floodmark.feed.subscription.acknowledgement import Acknowledgement, Position, commits_of
from floodmark.feed.subscription.pending import PendingAcknowledgement
from floodmark.feed.subscription.reader import Decode, SnapshotPlace, Step, SubscriptionReader
from floodmark.feed.subscription.subscriptions import (
    OpenChanges,
    SubscriptionRow,
    SubscriptionSpec,
    SubscriptionStatistics,
    SubscriptionStore,
)
from floodmark.feed.subscription.telling import SendIn, Telling
from floodmark.feed.subscription.upkeep import Upkeep
from floodmark.model.change import Change, Resolved
from floodmark.model.errors import (
    AcknowledgementConflict,
    Closed,
    FloodmarkError,
    InvalidArgument,
    VersionCollected,
)
from floodmark.model.names import require_name
from floodmark.model.version import Version

# Where to go on from: behind everything up to here.
Since: TypeAlias = Version | datetime | Literal["snapshot", "beginning", "end"]

# Finds the place that a beginning names, and does something there, again if it was collected meanwhile.
Begin: TypeAlias = Callable[[Since, Callable[[Resolved], SubscriptionRow]], SubscriptionRow]

# While something is held, its transaction is looked after so often.
LOOK_SECONDS: Final = 1.0

_log = logging.getLogger("floodmark.feed")


@dataclass(frozen=True, kw_only=True)
class SubscriptionOptions:
    """How a consumer goes about it.

    Without `follow`, iterating ends at the present.  Without `background`, keeping the lease and telling
    the site of the last acknowledgements is left to the caller and to `flush`.
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

    `position` names it for good: it is plain data, and can be acknowledged by whoever gets hold of it.
    """

    change: Change
    position: Position
    is_redelivered: bool
    subscription: "Subscription"
    moves: int

    def acknowledge(self) -> None:
        """Say that the change has been dealt with."""
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
    """Take the lease of a subscription, which begins at `start` if it is new.

    `begin` finds the place that a beginning names, and does something there.  `holder` names the consumer
    to others; a consumer with the same name takes over at once, as a process that was restarted does.
    """
    require_lease_seconds(options.lease_seconds)
    require_name(holder, "holder of a lease")

    def open_at(place: Resolved) -> SubscriptionRow:
        snapshot = place.snapshot is not None
        return store.open(spec, place.version, holder, options.lease_seconds, snapshot)

    opened = begin(start, open_at)
    pending = store.pending(spec.name)
    # What was pending, and is not, may have been acknowledged since.
    row = replace(store.find(spec.name), epoch=opened.epoch, lease=opened.lease)
    reader = SubscriptionReader(row, open_changes, decode)
    return Subscription(store, row, pending, reader, begin, options)


class Subscription(Telling):
    """Delivers changes and takes acknowledgements.  Close it, or use it in a `with` block.

    Any thread may acknowledge, and several may iterate: each change goes to one of them.

    Of the locks, one at a time reads; for the others see `Telling`.
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
        super().__init__(store, row, pending)
        self.namespace = row.spec.namespace
        self.holder = row.lease.holder
        self._reader = reader
        self._begin_at = begin
        self._options = options
        self._unacked_max = row.spec.unacked_max
        self._reading = Lock()
        self._closed = False
        # Deliveries of before the last `seek` are worth nothing any more.
        self._moves = 0
        self._looked = monotonic_seconds()
        self._stream: Generator[Step, None, None] | None = None
        self._stream_generation = 0
        self._upkeep = (
            Upkeep(
                self.name,
                self._keep_up,
                renew_seconds=row.lease.lifetime_ms / 3_000,
                flush_seconds=options.flush_seconds,
            )
            if options.background
            else None
        )
        # What the consumer before acknowledged in a transaction may come back when that has ended.
        self._look_soon()

    def __enter__(self) -> "Subscription":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except FloodmarkError as failure:
            if error is None:
                raise
            # What went wrong first is what the caller has to hear of.
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
                step = self._read()
                if step is None:
                    break
                delivery = self._deliver(step)
                if delivery is not None:
                    return delivery
            if self._closed:
                self._drop_stream()
        raise StopIteration

    def redeliver(self) -> None:
        """Deliver again, next of all, what was delivered and not acknowledged, in order."""
        self._require_usable()
        self._look()
        with self._changed:
            self._deliver_again(self._available())

    def seek(self, to: Since) -> None:
        """Go on behind a version or a moment, at the beginning or the end, or with a snapshot of every key.

        Everything up to there counts as acknowledged, and everything above it as not delivered yet.
        Acknowledging what was delivered before has no effect any more.  `AcknowledgementConflict` while a
        transaction that has not ended has acknowledged something.
        """
        self._require_usable()

        def move(place: Resolved) -> SubscriptionRow:
            # What is refused changes nothing.
            with self._noting_failure(AcknowledgementConflict, VersionCollected):
                return self._store.seek(self.name, place.version, self._epoch, place.snapshot is not None)

        with self._sending:
            row = self._begin_at(to, move)
            with self._changed:
                self._moves += 1
                self._move(row)

    def _read(self) -> Step | None:
        """The next step of the present stream; None if it has ended."""
        with self._changed:
            generation = self._generation
        if self._stream is None or self._stream_generation != generation:
            self._drop_stream()
            self._stream, self._stream_generation = self._steps(generation), generation
        try:
            step = next(self._stream, None)
        except BaseException:
            # A stream that has failed is opened again by whoever goes on.
            self._stream = None
            raise
        if step is None:
            self._stream = None
        return step

    def _deliver(self, step: Step) -> Delivery | None:
        """Hand a change out, unless there is a reason not to."""
        with self._changed:
            deliveries = self._account.deliveries
            if step.is_redelivered:
                wanted = step.position in self._due and self._is_available(step.position)
            else:
                wanted = step.change is not None and not deliveries.is_delivered(step.position)
                if wanted:
                    self._wait_for_room()
            if self._failure is not None:
                raise self._failure.again()
            if self._closed or self._stream_generation != self._generation:
                return None
            if step.mark is not None:
                self._account.note_mark(step.mark)
            if not step.is_redelivered:
                if wanted:
                    self._account.deliver(step.position)
                deliveries.complete(step.through)
            if not wanted or step.change is None:
                return None
            self._due.discard(step.position)
            return Delivery(step.change, step.position, step.is_redelivered, self, self._moves)

    def _wait_for_room(self) -> None:
        """Return when one more change may be unacknowledged, or there is another reason to look around."""
        unacked_max = self._unacked_max
        if self._account.deliveries.unacked < unacked_max:
            return
        _log.warning(
            "subscription %r waits: %d changes were delivered and not acknowledged", self.name, unacked_max
        )
        self._changed.wait_for(
            lambda: (
                self._account.deliveries.unacked < unacked_max
                or self._closed
                or self._failure is not None
                or self._stream_generation != self._generation
            )
        )

    def _drop_stream(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _steps(self, generation: int) -> Generator[Step, None, None]:
        """What is to be delivered again, as far as it is live, and then what is new."""
        with self._changed:
            due = commits_of(filter(self._is_available, self._due))
            place = self._find_place(due[0].runs[0]) if due else None
        yield from self._reader.read_again(due, place)
        with self._changed:
            if generation == self._generation:
                # What is held may be wanted back.
                self._due = {each for each in self._due if each in self._held}
            since = self._account.deliveries.through
            place = self._find_place() if self._account.is_at_snapshot else None
        yield from self._reader.read(since, follow=self._options.follow, snapshot=place)

    def _find_place(self, index: int | None = None) -> SnapshotPlace | None:
        """Where a row of the snapshot is found, or the next of them; None if there is no snapshot."""
        account = self._account
        return None if account.snapshot is None else SnapshotPlace(account.snapshot, account.find_mark(index))

    # Acknowledging

    def acknowledge(self, delivery: Delivery | Position) -> None:
        """Say that a change has been dealt with.  Doing it twice is harmless."""
        self._note(delivery, lambda position: Acknowledgement(positions=[position]))

    def acknowledge_through(self, delivery: Delivery | Position) -> None:
        """Say that a change and all that come before it have been dealt with."""
        self._note(delivery, lambda position: Acknowledgement(through=position))

    def flush(self) -> None:
        """Return when the site has everything that was acknowledged on disk."""
        self._require_usable()
        self._tell()
        self._look()

    def statistics(self) -> SubscriptionStatistics:
        """How far the subscription is, and how much is left."""
        self.flush()
        return self._store.statistics(self.name)

    def _note(
        self, delivery: Delivery | Position, acknowledging: Callable[[Position], Acknowledgement]
    ) -> None:
        position = delivery if isinstance(delivery, Position) else self._position_of(delivery)
        with self._changed:
            self._require_usable()
            if isinstance(delivery, Delivery) and delivery.moves != self._moves:
                return
            acknowledgement = acknowledging(position)
            self._require_not_held(acknowledgement)
            self._account.acknowledge(acknowledgement)
            is_due = self._account.untold >= self._options.flush_count
            self._changed.notify_all()
        if is_due:
            self._tell()
        elif self._upkeep is not None:
            self._upkeep.wake()

    def _position_of(self, delivery: object) -> Position:
        if isinstance(delivery, Delivery) and delivery.subscription is self:
            return delivery.position
        raise InvalidArgument(
            f"{delivery!r:.200} was not delivered by {self!r}; acknowledge what it delivers, or a `position`"
        )

    # Transactions

    def acknowledge_in(
        self, send: SendIn, transaction: str, deliveries: Iterable[Delivery | Position], *, through: bool
    ) -> None:
        """Say that changes, and with `through` all before them, are dealt with if a transaction is committed.

        `send` tells the site, which refuses what was acknowledged before, and what another transaction has.
        """
        named = list(deliveries)
        positions = [each if isinstance(each, Position) else self._position_of(each) for each in named]
        if not positions:
            return

        def check() -> None:
            self._require_usable()
            for each in named:
                if isinstance(each, Delivery) and each.moves != self._moves:
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
            self._acknowledge_in(send, transaction, acknowledgement, check)
        finally:
            self._look_soon()

    def settle(self, transaction: str, committed: bool | None) -> None:
        """Take note of the end of a transaction.

        What it has acknowledged is done with, or delivered again, next of all.  If nobody knows how it ended
        (None), the site is asked now and then.
        """
        if committed is not None:
            self._settle(transaction, committed=committed)
        self._look_soon()

    def _look_soon(self) -> None:
        if self._upkeep is not None and self._held:
            self._upkeep.wake()

    # The end

    def close(self) -> None:
        """Tell the site what was acknowledged, and let another consumer go on.  Closing twice is harmless."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        if self._upkeep is not None:
            self._upkeep.stop()
        # Somebody who is iterating notices by himself.
        if self._reading.acquire(blocking=False):
            try:
                self._drop_stream()
            finally:
                self._reading.release()
        try:
            if self._failure is not None:
                raise self._failure.again()
            self._tell()
        finally:
            self._release()

    def _release(self) -> None:
        try:
            self._store.release(self.name, self._epoch)
        except FloodmarkError as error:
            _log.info("the lease of subscription %r was not released and runs out: %s", self.name, error)

    def _require_usable(self) -> None:
        if self._closed:
            raise Closed(f"{self!r} was closed; subscribe again")
        if self._failure is not None:
            raise self._failure.again()

    def _keep_up(self, renew: bool) -> float | None:
        """What the subscription's own thread does now and then; in how many seconds again, or never."""
        try:
            self._tell(renew=renew)
            if monotonic_seconds() - self._looked >= LOOK_SECONDS:
                self._looked = monotonic_seconds()
                self._look()
        except FloodmarkError as error:
            _log.warning("subscription %r could not tell its site how far it is: %s", self.name, error)
        if self._failure is not None:
            return None
        return LOOK_SECONDS if self._held else inf
