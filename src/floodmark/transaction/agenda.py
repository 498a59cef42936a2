"""Which transaction is to be looked after next, and when.

A heap of times.  A transaction is noted with a time that is never later than its due; what has changed
since is found out when its turn comes.  So a step of a transaction costs next to nothing here, whoever
sweeps sleeps until there is something to do, and neither depends on how many transactions are open.
"""

from collections.abc import Mapping
from heapq import heapify, heappop, heappush
from typing import Final

from floodmark.transaction.held import Held

NEVER_MS: Final = 1 << 62

# So many notes of transactions that have ended are kept, beside one of each that has not.
_STALE_MAX: Final = 1_000


class Agenda:
    """The times at which transactions are due.  Whoever uses it holds the coordinator's lock.

    >>> held = {"a": Held("a", 0, expires_ms=100)}
    >>> agenda = Agenda(held)
    >>> agenda.note(held["a"])
    100
    >>> agenda.take(99, 10), [each.id for each in agenda.take(100, 10)], agenda.take(100, 10)
    ([], ['a'], [])
    """

    def __init__(self, held: Mapping[str, Held]) -> None:
        self._held = held
        self._notes: list[tuple[int, str]] = []

    def note(self, held: Held) -> int:
        """See to it that a transaction is looked after when it is due; the time of that.

        To be called when its due may have become earlier, and when nobody works on it any more.
        """
        due_ms = held.due_ms
        if held.due_noted_ms is None or due_ms < held.due_noted_ms:
            held.due_noted_ms = due_ms
            heappush(self._notes, (due_ms, held.id))
            if len(self._notes) > 2 * len(self._held) + _STALE_MAX:
                self._forget_stale()
        return due_ms

    def take(self, now_ms: int, count: int) -> list[Held]:
        """Some that are due.  One that somebody works on is noted again by whoever does."""
        taken: list[Held] = []
        while len(taken) < count and (held := self._first()) is not None and held.due_ms <= now_ms:
            heappop(self._notes)
            held.due_noted_ms = None
            if held.is_quiet:
                taken.append(held)
        return taken

    def first_ms(self) -> int:
        """When the next one is due."""
        held = self._first()
        return NEVER_MS if held is None else held.due_ms

    def _first(self) -> Held | None:
        """The next one, without notes that hold no more."""
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
