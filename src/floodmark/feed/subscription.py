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
"""

import logging
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from threading import Condition, Event, Lock, Thread
from types import TracebackType
from typing import Literal, TypeAlias
from weakref import ref

import msgspec

from floodmark.feed.acknowledgement import Account, Acknowledgement, Position, Progress
from floodmark.feed.feeds import require_lease_seconds
from floodmark.feed.subscription_reader import Decode, Step, SubscriptionReader
from floodmark.feed.subscriptions import (
    OpenChanges,
    SubscriptionRow,
    SubscriptionSpec,
    SubscriptionStatistics,
    SubscriptionStore,
)
from floodmark.model.change import Change
from floodmark.model.errors import Closed, FloodmarkError, InvalidArgument, LeaseHeld, Terminal
from floodmark.model.names import require_name
from floodmark.model.version import Version

# Where to go on from: behind everything up to here.
Since: TypeAlias = Version | datetime | Literal["beginning", "end"]

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
    to_version: Callable[[Since], Version],
) -> "Subscription":
    """Take the lease of a subscription, which begins at `start` if it is new.

    `holder` names the consumer to others.  Whoever comes with the same name takes over at once, as a
    process that was restarted does.
    """
    require_lease_seconds(options.lease_seconds)
    require_name(holder, "holder of a lease")
    row = store.open(spec, to_version(start), holder, options.lease_seconds)
    reader = SubscriptionReader(row, open_changes, decode)
    return Subscription(store, row, reader, to_version, options)


class Subscription:
    """Delivers changes and takes acknowledgements.  Close it, or use it in a `with` block.

    Any thread may acknowledge, and several may iterate: each change goes to one of them.

    Of the locks, one at a time reads, one at a time tells the site; the bookkeeping is locked last and
    never while anybody waits for the site.
    """

    def __init__(
        self,
        store: SubscriptionStore,
        row: SubscriptionRow,
        reader: SubscriptionReader,
        to_version: Callable[[Since], Version],
        options: SubscriptionOptions,
    ) -> None:
        assert row.lease is not None
        self.name = row.name
        self.namespace = row.spec.namespace
        self.holder = row.lease.holder
        self._store = store
        self._reader = reader
        self._to_version = to_version
        self._options = options
        self._epoch = row.epoch
        self._unacked_max = row.spec.unacked_max
        self._reading = Lock()
        self._sending = Lock()
        self._changed = Condition(Lock())
        self._account = Account(row.through, row.live)
        # What was told without an answer.  It is told again before anything else is.
        self._unanswered: Progress | None = None
        self._closed = False
        self._failure: FloodmarkError | None = None
        # Deliveries of before the last `seek` are worth nothing any more.
        self._moves = 0
        # Whether to begin with what is live, and what a stream that was opened earlier must know.
        self._again = True
        self._generation = 0
        self._stream: Generator[Step, None, None] | None = None
        self._stream_generation = 0
        self._upkeep = _Upkeep(self, row.lease.lifetime_ms / 3_000, options) if options.background else None

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
        with self._changed:
            self._again = True
            self._generation += 1
            self._changed.notify_all()

    def seek(self, to: Since) -> None:
        """Go on behind a version or a moment, at the beginning or at the end.

        Everything up to there counts as acknowledged, and everything above it as not delivered yet.
        Acknowledging what was delivered before has no effect any more.
        """
        self._require_usable()
        version = self._to_version(to)
        with self._sending:
            with self._noting_failure():
                row = self._store.seek(self.name, version, self._epoch)
            with self._changed:
                self._epoch, self._account = row.epoch, Account(row.through, row.live)
                self._unanswered = None
                self._moves += 1
                self._generation += 1
                self._changed.notify_all()

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
                wanted = deliveries.is_live(step.position)
            else:
                wanted = step.change is not None and not deliveries.is_delivered(step.position)
                if wanted:
                    self._wait_for_room()
            if self._failure is not None:
                raise self._failure.again()
            if self._closed or self._stream_generation != self._generation:
                return None
            if not step.is_redelivered:
                if wanted:
                    self._account.deliver(step.position)
                deliveries.complete(step.through)
            if not wanted or step.change is None:
                return None
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
        """What is live, if it is due, and then what is new."""
        with self._changed:
            live = self._account.deliveries.live() if self._again else []
        yield from self._reader.read_again(live)
        with self._changed:
            if generation == self._generation:
                self._again = False
            since = self._account.deliveries.through
        yield from self._reader.read(since, follow=self._options.follow)

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
            self._account.acknowledge(acknowledging(position))
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

    def _tell(self, *, renew: bool = False) -> None:
        """Tell the site what is new; if nothing is, at least that there is somebody, if that is due."""
        with self._sending:
            if self._unanswered is not None:
                self._send()
            with self._changed:
                self._unanswered = self._account.take()
            if self._unanswered is not None:
                self._send()
            elif renew:
                with self._noting_failure():
                    self._store.renew(self.name, self._epoch)

    def _send(self) -> None:
        assert self._unanswered is not None
        with self._noting_failure():
            self._store.acknowledge(self.name, self._epoch, self._unanswered)
        self._unanswered = None

    @contextmanager
    def _noting_failure(self) -> Iterator[None]:
        """Remember an error after which there is no going on, for everyone who comes later."""
        try:
            yield
        except (LeaseHeld, Terminal) as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()
            raise

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

    def _keep_up(self, *, renew: bool) -> bool:
        """What the subscription's own thread does now and then; whether there is a next time."""
        try:
            self._tell(renew=renew)
        except FloodmarkError as error:
            _log.warning("subscription %r could not tell its site how far it is: %s", self.name, error)
        return self._failure is None


class _Upkeep:
    """A thread that wakes its subscription soon after it is asked to, and now and then by itself."""

    def __init__(
        self, subscription: Subscription, renew_seconds: float, options: SubscriptionOptions
    ) -> None:
        self._wanted = Event()
        self._stopping = Event()
        self._thread = Thread(
            target=_keep_up,
            args=(ref(subscription), self._wanted, self._stopping, renew_seconds, options.flush_seconds),
            name=f"floodmark-subscription-{subscription.name}",
            daemon=True,
        )
        self._thread.start()

    def wake(self) -> None:
        """Ask for it."""
        if not self._wanted.is_set():
            self._wanted.set()

    def stop(self) -> None:
        """End the thread and wait for it."""
        self._stopping.set()
        self._wanted.set()
        self._thread.join()


def _keep_up(
    subscription: "ref[Subscription]",
    wanted: Event,
    stopping: Event,
    renew_seconds: float,
    flush_seconds: float,
) -> None:
    while True:
        is_wanted = wanted.wait(renew_seconds)
        if stopping.wait(flush_seconds if is_wanted else 0):
            return
        wanted.clear()
        # Held for a moment only, so that a subscription that nobody has any more can go.
        alive = subscription()
        if alive is None or not alive._keep_up(renew=not is_wanted):
            return
        del alive
