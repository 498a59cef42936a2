"""The transactions of a coordinator as they are in memory, and who waits for what, under one lock."""

from collections import Counter, OrderedDict
from collections.abc import Callable
from threading import Condition, Lock
from typing import Final

from floodmark.clock import TimeSource
from floodmark.model.errors import Closed, FloodmarkError, TransactionEnded, TransactionNotFound
from floodmark.transaction.agenda import NEVER_MS, Agenda
from floodmark.transaction.held import Ended, Held
from floodmark.transaction.recovery import RESTARTED

# How many ended transactions are remembered, for those who ask once more how it went.
ENDED_REMEMBERED: Final = 10_000


class OverTime(Exception):
    """A transaction is over its time, which is for nobody to hear before its abort is in the log."""


class TransactionBook:
    """What a coordinator knows.  Whoever calls a method holds the lock, unless it says otherwise."""

    def __init__(self, held: dict[str, Held], growing_ms: TimeSource) -> None:
        self.lock = Lock()
        self.growing_ms = growing_ms
        self.held = held
        # How many are on their way into the log.
        self.beginning = 0
        # How many each owner has that have not ended, with those on their way.
        self.owned: dict[str, int] = Counter(each.owner for each in held.values())
        self.is_closed = False
        # For those who wait until a step of some transaction has come to its end, and how many they are.
        self._changed = Condition(self.lock)
        self._waiting = 0
        self._ended: OrderedDict[str, Ended] = OrderedDict()
        # Whoever sweeps sleeps on this, until a time by the clock that only grows.
        self._work = Condition(self.lock)
        self._asleep_until_ms = 0
        self._agenda = Agenda(held)
        for each in held.values():
            self._agenda.note(each)

    # Transactions

    def find(self, transaction: str) -> Held | Ended | None:
        """A transaction that is known."""
        return self.held.get(transaction) or self._ended.get(transaction)

    def require_running(self) -> None:
        if self.is_closed:
            raise Closed("the site was closed; open it again")

    def require_open(self, transaction: str, *, late: bool = False) -> Held:
        """A transaction that can still be decided.

        `OverTime` for one that can only be aborted, unless `late`.
        """
        self.require_running()
        held = self.held.get(transaction)
        if held is None or not held.is_open:
            raise self._ended_error(transaction)
        if not late and self.is_late(held):
            raise OverTime
        return held

    def is_late(self, held: Held) -> bool:
        """Whether it is over its time."""
        return held.is_open and held.expires_ms <= self.growing_ms()

    def release(self, held: Held, *, is_told: bool = False) -> None:
        """Somebody has ended a step of a transaction, one way or the other.

        If `is_told`, the same thread tells the participants next, and nobody has to be called.
        """
        if self._waiting:
            self._changed.notify_all()
        if held.is_quiet and not is_told:
            self._call(held)

    def wait(self, is_met: Callable[[], bool], seconds_max: float) -> None:
        """Wait for others who work on a transaction."""
        self._waiting += 1
        try:
            self._changed.wait_for(is_met, seconds_max)
        finally:
            self._waiting -= 1

    def wait_for(self, transaction: str, is_met: Callable[[Held], bool], seconds_max: float) -> None:
        """The same until something holds of a transaction, if it is known and the book stays open."""
        held = self.held.get(transaction)
        if held is not None and not is_met(held):
            self.wait(lambda: is_met(held) or self.is_closed, seconds_max)

    def all(self) -> list[Held]:
        """Those that have not ended, for whoever looks without holding anybody up.  Takes the lock."""
        with self.lock:
            return list(self.held.values())

    def end(self, held: Held) -> bool:
        """A transaction has ended; False if it had before."""
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

    # Those who sweep

    def _call(self, held: Held) -> None:
        """See to it that somebody looks after a transaction when it is due."""
        if self._agenda.note(held) < self._asleep_until_ms:
            self._work.notify_all()

    def take_due(self, now_ms: int, count: int) -> list[Held]:
        """Some that are due, and that nobody works on.  Takes the lock."""
        with self.lock:
            return [] if self.is_closed else self._agenda.take(now_ms, count)

    def wait_due(self) -> bool:
        """Sleep until one is due; False once the book was closed.  Takes the lock."""
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
        """Refuse from now on, and wake everybody who waits.  Takes the lock."""
        with self.lock:
            self.is_closed = True
            self._changed.notify_all()
            self._work.notify_all()
            for held in self.held.values():
                if held.ended is not None:
                    held.ended.set()


def not_found(transaction: str) -> TransactionNotFound:
    """The error for those who name a transaction that is not known."""
    return TransactionNotFound(
        f"there is no transaction {transaction!r:.80}; it has ended, or never was",
        transaction=transaction[:80],
    )
