"""Acknowledgements that wait for a transaction.

A change that is acknowledged in a transaction is *pending*: still live, and not delivered again.  When the
transaction commits, it is acknowledged; when it aborts, it is available again.  Meanwhile no other caller may
acknowledge it:

- a change is pending in one transaction at most, and an acknowledged change cannot become pending;
- one transaction at most has acknowledged everything up to a position, and all changes at or below that are
  pending in it;
- an acknowledgement without a transaction is refused where it covers a pending one, because it would take
  effect even if the transaction aborted.

All this is checked and entered in memory before the record is written, so that the log holds only records
that can be committed.  The log is written without a lock, so that many records become one entry; if that
fails, the record is taken out again.  A promise of the log does all this, also if Ctrl-C ends the wait.
Until a record is durable its transaction counts as being *written*, and is not ended.

Dropping records from the log is durable only with the next append (`log/acknowledgement.py`).  So a crash may
bring back records of ended transactions; when the log is opened, their coordinator is asked for their
outcomes.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from threading import Condition, Lock
from typing import Final, NamedTuple, Self, TypeAlias

import msgspec

from floodmark.engine import Engine
from floodmark.feed.subscription.acknowledgement import Acknowledgement, ChangePosition, Deliveries
from floodmark.log import OpenLog, Promise, RecordFormat, list_ledgers
from floodmark.log import Position as LogPosition
from floodmark.model.errors import AcknowledgementConflict, Closed, Retryable

# How long the end of a transaction waits for its records that are being written to the log.
WRITE_SECONDS_MAX: Final = 60.0

# The prefix of the names of ledgers of pending acknowledgements, before the subscription's name.
PENDING_LEDGERS: Final = "pending-ack/"


class PendingAcknowledgement(msgspec.Struct, frozen=True):
    """The acknowledgements of an open transaction."""

    transaction: str
    acknowledgement: Acknowledgement


class PendingRecord(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """An acknowledgement in a transaction, as stored in the log.

    `epoch` is that of the consumer: a record from before the subscription's last move is void.
    """

    transaction: str
    epoch: int
    acknowledgement: Acknowledgement


_FORMAT: Final = RecordFormat[PendingRecord](PendingRecord, "pending acknowledgements")
encode_pending, decode_pending = _FORMAT.encode, _FORMAT.decode


class _Through(NamedTuple):
    """The position up to which a transaction has acknowledged everything."""

    transaction: str
    position: ChangePosition


class Pending:
    """The pending acknowledgements of one subscription.

    >>> pending = Pending("indexer")
    >>> pending.add("0-7", Acknowledgement(positions=[ChangePosition(5, 1)]))
    >>> pending.owner(ChangePosition(5, 1)), pending.owner(ChangePosition(5, 0))
    ('0-7', None)
    >>> pending.remove("0-7")
    >>> pending.transactions
    []
    """

    def __init__(self, subscription: str) -> None:
        self._subscription = subscription
        # The acknowledgements of each transaction, call by call.
        self._parts: dict[str, list[Acknowledgement]] = {}
        self._owners: dict[ChangePosition, str] = {}
        self._through: _Through | None = None

    @property
    def transactions(self) -> list[str]:
        """The transactions with acknowledgements."""
        return list(self._parts)

    def acknowledgements(self) -> list[PendingAcknowledgement]:
        """The acknowledgements by transaction."""
        return [PendingAcknowledgement(each, self.of(each)) for each in self._parts]

    def of(self, transaction: str) -> Acknowledgement:
        """All acknowledgements of a transaction as one."""
        parts = self._parts.get(transaction, ())
        return Acknowledgement(
            positions=[position for part in parts for position in part.positions],
            through=max((part.through for part in parts if part.through is not None), default=None),
        )

    def owner(self, position: ChangePosition) -> str | None:
        """The transaction in which a live change is pending, or None."""
        if self._through is not None and position <= self._through.position:
            return self._through.transaction
        return self._owners.get(position)

    def count(self, deliveries: Deliveries) -> int:
        """How many of the live changes are pending."""
        left = deliveries.copy()
        return sum(left.acknowledge(part) for parts in self._parts.values() for part in parts)

    # Checks

    def find_new(
        self, transaction: str, acknowledgement: Acknowledgement, deliveries: Deliveries
    ) -> Acknowledgement | None:
        """The part of an acknowledgement that is not pending in the transaction yet; None if all of it is.

        Raises `AcknowledgementConflict` if one of the changes cannot become pending.
        """
        positions = [
            position
            for position in dict.fromkeys(acknowledgement.positions)
            if not (deliveries.is_live(position) and self.owner(position) == transaction)
        ]
        for position in positions:
            if not deliveries.is_live(position):
                raise self._conflict(position, "was acknowledged before", None)
            self._require_free(position)
        through = acknowledgement.through
        if through is not None and not self._is_new(transaction, through, deliveries):
            through = None
        if not positions and through is None:
            return None
        return Acknowledgement(positions=positions, through=through)

    def require_none(self, acknowledgement: Acknowledgement, deliveries: Deliveries) -> None:
        """Raise `AcknowledgementConflict` if one of the acknowledged changes is pending."""
        if not self._parts:
            return
        for position in acknowledgement.positions:
            if deliveries.is_live(position):
                self._require_free(position)
        if acknowledgement.through is not None:
            self._require_none_below(acknowledgement.through, deliveries)

    def _require_free(self, position: ChangePosition) -> None:
        owner = self.owner(position)
        if owner is not None:
            raise self._conflict(position, f"is pending in transaction {owner}", owner)

    def _is_new(self, transaction: str, through: ChangePosition, deliveries: Deliveries) -> bool:
        """Whether acknowledging all up to a position adds to the acknowledgements of a transaction."""
        held = self._through
        if held is not None and held.transaction != transaction:
            raise self._conflict(
                through,
                f"cannot be acknowledged with all before it: transaction {held.transaction} has acknowledged "
                f"all up to {held.position}",
                held.transaction,
            )
        self._require_none_below(through, deliveries, but=transaction)
        left = deliveries
        if held is not None:
            left = deliveries.copy()
            left.acknowledge(Acknowledgement(through=held.position))
        if left.has_live(through):
            return True
        if held is None:
            raise self._conflict(through, "was acknowledged before, with all before it", None)
        return False

    def _require_none_below(
        self, through: ChangePosition, deliveries: Deliveries, *, but: str | None = None
    ) -> None:
        """Raise `AcknowledgementConflict` if a change up to a position is pending, except in `but`."""
        owners = ((position, owner) for position, owner in self._owners.items() if position <= through)
        taken = next(((position, owner) for position, owner in owners if owner != but), None)
        held = self._through
        if taken is None and held is not None and held.transaction != but:
            position = min(held.position, through)
            taken = (position, held.transaction) if deliveries.has_live(position) else None
        if taken is not None:
            position, owner = taken
            raise self._conflict(
                through,
                f"cannot be acknowledged with all before it: {position} is pending in transaction {owner}",
                owner,
            )

    def _conflict(self, position: ChangePosition, what: str, owner: str | None) -> AcknowledgementConflict:
        return conflict(self._subscription, position, what, owner)

    # Changes

    def add(self, transaction: str, part: Acknowledgement) -> None:
        """Make the new part of an acknowledgement pending."""
        self._parts.setdefault(transaction, []).append(part)
        self._owners.update(dict.fromkeys(part.positions, transaction))
        if part.through is not None and (self._through is None or part.through > self._through.position):
            self._through = _Through(transaction, part.through)

    def take_back(self, transaction: str, part: Acknowledgement) -> None:
        """Remove a part of an acknowledgement that `add` has entered, because its record was not written."""
        parts = self._parts.get(transaction, [])
        self.remove(transaction)
        for other in parts:
            if other is not part:
                self.add(transaction, other)

    def remove(self, transaction: str) -> None:
        """Drop the acknowledgements of a transaction."""
        for part in self._parts.pop(transaction, ()):
            for position in part.positions:
                self._owners.pop(position, None)
        if self._through is not None and self._through.transaction == transaction:
            self._through = None


def conflict(
    subscription: str, position: ChangePosition, what: str, owner: str | None
) -> AcknowledgementConflict:
    """The error for acknowledging a change that a transaction holds, or that was acknowledged before."""
    advice = (
        "it needs no further acknowledgement"
        if owner is None
        else f"commit or abort that one first, or floodmark txn abort {owner}"
    )
    return AcknowledgementConflict(
        f"{position} of subscription {subscription!r} {what}; {advice}",
        subscription=subscription,
        version=position.version,
        index=position.index,
        transaction=owner,
    )


# Opens the log of a subscription.
OpenPendingLog: TypeAlias = Callable[[str], OpenLog[PendingRecord]]


class PendingLedger:
    """The pending acknowledgements of one subscription, with their log.

    Its lock is taken after all others, briefly, and never while the log is written.  Records from before
    `epoch`, in which the subscription was last moved, are dropped.
    """

    def __init__(self, name: str, log: OpenLog[PendingRecord], epoch: int) -> None:
        self.log = log
        self.lock = Lock()
        # Guarded by the lock.  The methods that do not take the lock are called with it held.
        self.pending = Pending(name)
        self._name = name
        self._written = Condition(self.lock)
        self._positions: dict[str, list[LogPosition]] = {}
        # By transaction, the records being written to the log, by `id`: records of two calls may be equal.
        self._writing: dict[str, dict[int, PendingRecord]] = {}
        stale = []
        for position, record in log.live:
            if record.epoch < epoch:
                stale.append(position)
            else:
                self.pending.add(record.transaction, record.acknowledgement)
                self._positions.setdefault(record.transaction, []).append(position)
        log.writer.acknowledge(stale)

    def is_writing(self, transaction: str) -> bool:
        """Whether a record of the transaction is being written to the log."""
        return transaction in self._writing

    def wait_written(self, transaction: str) -> None:
        """Wait until no record of the transaction is being written.  Takes the lock; raises Retryable."""
        with self.lock:
            if self._written.wait_for(lambda: transaction not in self._writing, WRITE_SECONDS_MAX):
                return
        raise Retryable(
            f"an acknowledgement of subscription {self._name!r} in transaction {transaction} has been on its "
            f"way to the log for more than {WRITE_SECONDS_MAX:g} s; look after the disk, then try again",
            subscription=self._name,
            transaction=transaction,
        )

    def begin(self, record: PendingRecord) -> None:
        """Enter a record before it is written.  A caller that is interrupted must call `give_up`."""
        self._writing.setdefault(record.transaction, {})[id(record)] = record
        self.pending.add(record.transaction, record.acknowledgement)

    def finish(self, record: PendingRecord, position: LogPosition) -> None:
        """Note that a record is written.  Repeating it is harmless.  Takes the lock."""
        with self.lock:
            if id(record) in self._writing.get(record.transaction, ()):
                self._positions.setdefault(record.transaction, []).append(position)
                self._end_writing(record)

    def give_up(self, record: PendingRecord) -> None:
        """Note that a record was not written, and remove it.  Repeating it is harmless.  Takes the lock."""
        with self.lock:
            if id(record) in self._writing.get(record.transaction, ()):
                self.pending.take_back(record.transaction, record.acknowledgement)
                self._end_writing(record)

    def let_go(self, transaction: str) -> None:
        """Drop an ended transaction and its records.  Takes the lock."""
        with self.lock:
            self.pending.remove(transaction)
            positions = self._positions.pop(transaction, ())
        # A closed log keeps the records: they are loaded again, and the transaction is ended once more.
        with suppress(Closed):
            self.log.writer.acknowledge(positions)

    def _end_writing(self, record: PendingRecord) -> None:
        writing = self._writing[record.transaction]
        del writing[id(record)]
        if not writing:
            del self._writing[record.transaction]
        self._written.notify_all()


class Writing(Promise[None]):
    """The write of one record to a log, noted in the ledger even if its caller was interrupted.

    It is made before the record is entered.  Its `with` block removes the record again, unless the log has
    accepted it.
    """

    def __init__(self, ledger: PendingLedger) -> None:
        super().__init__()
        self._ledger = ledger
        self._record: PendingRecord | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.cancel():
            self._give_up()

    def begin(self, record: PendingRecord) -> None:
        """Enter a record.  The caller holds the lock of the ledger."""
        self._record = record
        self._ledger.begin(record)

    def write(self) -> None:
        """Write the record, if one was entered, without the lock, so that many records become one entry."""
        if self._record is not None:
            self._ledger.log.writer.hand_over(self._record, self)
            self.result()

    def complete(self, position: LogPosition) -> None:
        if self._record is not None:
            self._ledger.finish(self._record, position)
        self.set_result(None)

    def fail(self, failure: BaseException) -> None:
        self._give_up()
        self.set_exception(failure)

    def _give_up(self) -> None:
        if self._record is not None:
            self._ledger.give_up(self._record)


class PendingLedgers:
    """The ledgers of pending acknowledgements of all subscriptions, each with one writer.

    Existing ones are opened by `load`, others at first use.
    """

    def __init__(self, open_log: OpenPendingLog) -> None:
        self._open_log = open_log
        # Held by a thread that opens a ledger.
        self._opening = Lock()
        self._ledgers: dict[str, PendingLedger] = {}

    def load(self, engine: Engine, epochs: Mapping[str, int]) -> None:
        """Open the existing ledgers.  `epochs` has the epoch in which each subscription was last moved."""
        for ledger in list_ledgers(engine):
            if ledger.startswith(PENDING_LEDGERS):
                name = ledger.removeprefix(PENDING_LEDGERS)
                self.open(name, epochs.get(name, 0))

    def open(self, name: str, epoch: int) -> PendingLedger:
        """The ledger of a subscription, opened if necessary."""
        with self._opening:
            if name not in self._ledgers:
                self._ledgers[name] = PendingLedger(name, self._open_log(name), epoch)
            return self._ledgers[name]

    def find(self, name: str) -> PendingLedger | None:
        """The ledger of a subscription, if it is open; otherwise None."""
        return self._ledgers.get(name)

    @contextmanager
    def looking(self, name: str) -> Iterator[Pending]:
        """The pending acknowledgements of a subscription, locked for the block."""
        found = self._ledgers.get(name)
        if found is None:
            yield Pending(name)
        else:
            with found.lock:
                yield found.pending

    def transactions(self) -> list[tuple[str, str]]:
        """All pairs of a subscription and a transaction with pending acknowledgements on it."""
        return [(name, each) for name in list(self._ledgers) for each in self.transactions_of(name)]

    def transactions_of(self, name: str) -> list[str]:
        """The transactions with pending acknowledgements of a subscription."""
        with self.looking(name) as pending:
            return pending.transactions

    def logs(self) -> dict[str, OpenLog[PendingRecord]]:
        """The logs, by the names of their subscriptions."""
        return {name: found.log for name, found in list(self._ledgers.items())}

    def delete(self, name: str) -> None:
        """Delete the log of a subscription, which must be empty and closed to new records."""
        found = self._ledgers.pop(name, None)
        if found is not None:
            found.log.writer.close()
            found.log.ledger.delete()

    def require_none(self, name: str) -> None:
        """Raise `AcknowledgementConflict` while an acknowledgement is pending on a subscription."""
        first = next(iter(self.transactions_of(name)), None)
        if first is not None:
            raise AcknowledgementConflict(
                f"changes of subscription {name!r} are acknowledged in transactions that have not ended, "
                f"such as {first}; commit or abort them first, or floodmark txn abort {first}",
                subscription=name,
                transaction=first,
            )
