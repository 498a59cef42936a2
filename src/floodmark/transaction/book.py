"""The transactions of a coordinator in memory, and the threads that wait for them, under one lock."""

from collections import Counter, OrderedDict
from collections.abc import Callable
from threading import Condition, Lock
from typing import Final

from floodmark.clock import TimeSource
from floodmark.model.errors import Closed, FloodmarkError, TransactionEnded, TransactionNotFound
from floodmark.transaction.agenda import NEVER_MS, Agenda
from floodmark.transaction.held import Ended, HeldTransaction
from floodmark.transaction.recovery import RESTARTED

# How many ended transactions are remembered, for callers that ask again.
ENDED_REMEMBERED: Final = 10_000


class OverTime(Exception):
    """A transaction is past its deadline.  Internal: callers learn it when its abort is in the log."""


class TransactionBook:
    """What a coordinator knows.  Callers hold the lock, except where a method says that it takes it."""

    def __init__(self, held: dict[str, HeldTransaction], growing_ms: TimeSource) -> None:
        self.lock = Lock()
        self.growing_ms = growing_ms
        self.held = held
        # The number of transactions whose beginning is on its way to the log.
        self.beginning = 0
        # The number of each owner's transactions that have not ended, with those on their way.
        self.owned: dict[str, int] = Counter(each.owner for each in held.values())
        self.is_closed = False
        # Wakes threads that wait for a step to end; their number.
        self._changed = Condition(self.lock)
        self._waiting = 0
        self._ended: OrderedDict[str, Ended] = OrderedDict()
        # The sweeping thread sleeps on this, until a time by the monotonic clock.
        self._work = Condition(self.lock)
        self._asleep_until_ms = 0
        self._agenda = Agenda(held)
        for each in held.values():
            self._agenda.note(each)

    # Transactions

    def find(self, transaction: str) -> HeldTransaction | Ended | None:
        """A transaction, also one that ended recently."""
        return self.held.get(transaction) or self._ended.get(transaction)

    def require_running(self) -> None:
        if self.is_closed:
            raise Closed("the site was closed; open it again")

    def require_open(self, transaction: str, *, late: bool = False) -> HeldTransaction:
        """An open transaction.  Raises `OverTime` for one past its deadline, unless `late`."""
        self.require_running()
        held = self.held.get(transaction)
        if held is None or not held.is_open:
            raise self._ended_error(transaction)
        if not late and self.is_late(held):
            raise OverTime
        return held

    def is_late(self, held: HeldTransaction) -> bool:
        """Whether a transaction is open past its deadline."""
        return held.is_open and held.expires_ms <= self.growing_ms()

    def release(self, held: HeldTransaction) -> None:
        """Wake threads that wait for a transaction of which a step has ended, and note when it is due."""
        if self._waiting:
            self._changed.notify_all()
        if held.is_quiet and self._agenda.note(held) < self._asleep_until_ms:
            self._work.notify_all()

    def wait_for(
        self, transaction: str, is_met: Callable[[HeldTransaction], bool], seconds_max: float
    ) -> None:
        """Wait until a condition holds of a transaction, the book is closed, or the time is over."""
        held = self.held.get(transaction)
        if held is not None and not is_met(held):
            self._waiting += 1
            try:
                self._changed.wait_for(lambda: is_met(held) or self.is_closed, seconds_max)
            finally:
                self._waiting -= 1

    def all(self) -> list[HeldTransaction]:
        """The transactions that have not ended.  Takes the lock."""
        with self.lock:
            return list(self.held.values())

    def end(self, held: HeldTransaction) -> bool:
        """Move a transaction to those that have ended; False if it is there."""
        if held.id not in self.held:
            return False
        self._ended[held.id] = held.end()
        owner = held.owner
        del self.held[held.id]
        self.owned[owner] -= 1
        self.forget_owner(owner)
        if len(self._ended) > ENDED_REMEMBERED:
            self._ended.popitem(last=False)
        return True

    def forget_owner(self, owner: str) -> None:
        """Forget an owner that has no transaction left."""
        if not self.owned.get(owner):
            self.owned.pop(owner, None)

    def _ended_error(self, transaction: str) -> FloodmarkError:
        known = self.find(transaction)
        if known is None:
            return not_found(transaction)
        why = f" ({known.reason})" if known.reason else ""
        return TransactionEnded(
            f"transaction {transaction} is {known.state}{why}; begin another one",
            transaction=transaction,
            state=str(known.state),
            # The same work in another transaction may succeed.
            **({"restarted": True} if known.reason == RESTARTED else {}),
        )

    # The sweeping thread

    def take_due(self, now_ms: int, count: int) -> list[HeldTransaction]:
        """Up to `count` transactions that are due and have no step under way.  Takes the lock."""
        with self.lock:
            return [] if self.is_closed else self._agenda.take(now_ms, count)

    def wait_due(self) -> bool:
        """Sleep until a transaction is due; False once the book is closed.  Takes the lock."""
        with self.lock:
            while not self.is_closed:
                now_ms, due_ms = self.growing_ms(), self._agenda.first_ms()
                if due_ms <= now_ms:
                    return True
                self._asleep_until_ms = due_ms
                self._work.wait(None if due_ms == NEVER_MS else (due_ms - now_ms) / 1000)
                self._asleep_until_ms = 0
            return False

    def close(self) -> None:
        """Refuse from now on, and wake all waiting threads.  Takes the lock."""
        with self.lock:
            self.is_closed = True
            self._changed.notify_all()
            self._work.notify_all()
            for held in self.held.values():
                if held.ended is not None:
                    held.ended.set()


def not_found(transaction: str) -> TransactionNotFound:
    """The error for an unknown transaction."""
    return TransactionNotFound(
        f"there is no transaction {transaction!r:.80}; it has ended, or never was",
        transaction=transaction[:80],
    )
