"""The logs of pending acknowledgements, and their contents in memory.

An acknowledgement is checked and entered first, so that no other transaction can take the same changes; then
it is written without a lock, so that many become one entry; if that fails, it is taken out again.  A promise
of the log does all this, so that it is completed even if Ctrl-C ends the wait.  Until a record is durable its
transaction counts as being *written*, and is not ended.

Letting go of records is durable only with the next append (`log/acknowledgement.py`).  A crash may bring back
those of ended transactions; their coordinator is asked for their fates when the log is opened.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from threading import Condition, Lock
from types import TracebackType
from typing import Final, Self, TypeAlias

from floodmark.engine import Engine
from floodmark.feed.subscription.pending import PENDING_LEDGERS, Pending, PendingRecord
from floodmark.log import OpenLog, Promise, list_ledgers
from floodmark.log import Position as LogPosition
from floodmark.model.errors import AcknowledgementConflict, Closed, InvalidArgument, Retryable

# How long the end of a transaction waits for its records that are on their way to the log.
WRITE_SECONDS_MAX: Final = 60.0

# Opens the log of a subscription.
OpenPendingLog: TypeAlias = Callable[[str], OpenLog[PendingRecord]]


class PendingLedger:
    """One subscription's.  Its lock is taken last of all, for a moment, and never while the log is written.

    Records from before `epoch`, in which the subscription was last moved, are let go.
    """

    def __init__(self, name: str, log: OpenLog[PendingRecord], epoch: int) -> None:
        self.log = log
        self.lock = Lock()
        # Used with the lock held, as are the methods that do not take it.
        self.pending = Pending(name)
        self._name = name
        self._written = Condition(self.lock)
        self._positions: dict[str, list[LogPosition]] = {}
        # By transaction, the records that are on their way to the log.  Those of two calls may be equal.
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
        """Whether an acknowledgement of a transaction is on its way to the log."""
        return transaction in self._writing

    def wait_written(self, transaction: str) -> None:
        """Wait until no record of a transaction is on its way to the log.  Takes the lock."""
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
        """Enter what is written next.  A caller that is interrupted gives it up."""
        self._writing.setdefault(record.transaction, {})[id(record)] = record
        self.pending.add(record.transaction, record.acknowledgement)

    def finish(self, record: PendingRecord, position: LogPosition) -> None:
        """Note that it is written.  May be called again.  Takes the lock."""
        with self.lock:
            if id(record) in self._writing.get(record.transaction, ()):
                self._positions.setdefault(record.transaction, []).append(position)
                self._end_writing(record)

    def give_up(self, record: PendingRecord) -> None:
        """Note that it is not written.  May be called again.  Takes the lock."""
        with self.lock:
            if id(record) in self._writing.get(record.transaction, ()):
                self.pending.take_back(record.transaction, record.acknowledgement)
                self._end_writing(record)

    def let_go(self, transaction: str) -> None:
        """Drop an ended transaction and its records.  Takes the lock."""
        with self.lock:
            self.pending.remove(transaction)
            positions = self._positions.pop(transaction, ())
        # A closed log keeps the records: they are found again, and the transaction is ended once more.
        with suppress(Closed):
            self.log.writer.acknowledge(positions)

    def _end_writing(self, record: PendingRecord) -> None:
        writing = self._writing[record.transaction]
        del writing[id(record)]
        if not writing:
            del self._writing[record.transaction]
        self._written.notify_all()


class Writing(Promise[None]):
    """The way of one record into a log.  Its outcome is noted in the ledger, also if its caller has left.

    It is made before the record is entered, and the block in which that happens undoes it, unless the log has
    taken the record.
    """

    def __init__(self, ledger: PendingLedger) -> None:
        super().__init__()
        self._ledger = ledger
        self._record: PendingRecord | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.cancel():
            self._give_up()

    def begin(self, record: PendingRecord) -> None:
        """Enter a record; the lock of the ledger is held."""
        self._record = record
        self._ledger.begin(record)

    def write(self) -> None:
        """Write what was entered, if anything was, without the lock, so that many become one entry."""
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
    """Those of all subscriptions.  They are opened when they are there, or needed; one writer each."""

    def __init__(self, open_log: OpenPendingLog | None) -> None:
        self._open_log = open_log
        # Held by a thread that opens one.
        self._opening = Lock()
        self._ledgers: dict[str, PendingLedger] = {}

    def load(self, engine: Engine, epochs: Mapping[str, int]) -> None:
        """Open those that are there, with the epoch in which each subscription was last moved."""
        if self._open_log is None:
            return
        for ledger in list_ledgers(engine):
            if ledger.startswith(PENDING_LEDGERS):
                name = ledger.removeprefix(PENDING_LEDGERS)
                self.open(name, epochs.get(name, 0))

    def open(self, name: str, epoch: int) -> PendingLedger:
        """The one of a subscription."""
        with self._opening:
            found = self._ledgers.get(name)
            if found is None:
                if self._open_log is None:
                    raise InvalidArgument(
                        "there is no log for acknowledgements in transactions here; acknowledge without one"
                    )
                found = self._ledgers[name] = PendingLedger(name, self._open_log(name), epoch)
            return found

    def find(self, name: str) -> PendingLedger | None:
        """The one of a subscription, if it is open."""
        return self._ledgers.get(name)

    @contextmanager
    def looking(self, name: str) -> Iterator[Pending]:
        """The pending acknowledgements of a subscription, which do not change meanwhile."""
        found = self._ledgers.get(name)
        if found is None:
            yield Pending(name)
        else:
            with found.lock:
                yield found.pending

    def transactions(self) -> list[tuple[str, str]]:
        """All transactions with pending acknowledgements, each with the subscription."""
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
