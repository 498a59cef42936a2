"""A heap of the times at which transactions are due: past their deadline, or to be told again.

A note is never later than the due time of its transaction; if that has moved since, the transaction is noted
again when its turn comes.  So a step costs O(log n), and the sweeping thread sleeps until the first note.
"""

from collections.abc import Mapping
from heapq import heapify, heappop, heappush
from typing import Final

from floodmark.transaction.held import HeldTransaction

NEVER_MS: Final = 1 << 62

# How many stale notes are kept beside two for each transaction.
_STALE_MAX: Final = 1_000


class Agenda:
    """The times at which transactions are due.  The caller holds the coordinator's lock.

    >>> held = {"a": HeldTransaction("a", 0, expires_ms=100)}
    >>> agenda = Agenda(held)
    >>> agenda.note(held["a"])
    100
    >>> agenda.take(99, 10), [each.id for each in agenda.take(100, 10)], agenda.take(100, 10)
    ([], ['a'], [])
    """

    def __init__(self, held: Mapping[str, HeldTransaction]) -> None:
        self._held = held
        self._notes: list[tuple[int, str]] = []

    def note(self, held: HeldTransaction) -> int:
        """Note when a transaction is due, and return that time.

        Call it when the due time may have become earlier, and when the last step under way has ended.
        """
        due_ms = held.due_ms
        if held.due_noted_ms is None or due_ms < held.due_noted_ms:
            held.due_noted_ms = due_ms
            heappush(self._notes, (due_ms, held.id))
            if len(self._notes) > 2 * len(self._held) + _STALE_MAX:
                self._forget_stale()
        return due_ms

    def take(self, now_ms: int, count: int) -> list[HeldTransaction]:
        """Up to `count` transactions that are due.  Skips one with a step under way, which notes it again."""
        taken: list[HeldTransaction] = []
        while len(taken) < count and (held := self._first()) is not None and held.due_ms <= now_ms:
            heappop(self._notes)
            held.due_noted_ms = None
            if held.is_quiet:
                taken.append(held)
        return taken

    def first_ms(self) -> int:
        """The due time of the next transaction."""
        held = self._first()
        return NEVER_MS if held is None else held.due_ms

    def _first(self) -> HeldTransaction | None:
        """The next transaction.  Drops stale notes."""
        while self._notes:
            noted_ms, transaction = self._notes[0]
            held = self._held.get(transaction)
            holds = held is not None and held.due_noted_ms == noted_ms
            if held is not None and holds and held.due_ms <= noted_ms:
                return held
            heappop(self._notes)
            if held is not None and holds:
                held.due_noted_ms = None
                self.note(held)
        return None

    def _forget_stale(self) -> None:
        noted = ((held.due_noted_ms, held.id) for held in self._held.values())
        self._notes = [(noted_ms, transaction) for noted_ms, transaction in noted if noted_ms is not None]
        heapify(self._notes)
