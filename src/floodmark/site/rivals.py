"""Retries after conflicts: the transactions of one process that conflicted on a key retry one at a time.

Without this order, transactions that lost repeatedly would pause ever longer, and new ones would win.
"""

from threading import Lock
from typing import Final

from floodmark.model.errors import FloodmarkError
from floodmark.site.coordinated import Pace

# Keys share locks by their hashes.
TURNS: Final = 64
# How long a transaction waits for the lock of its key; then it retries without it.
WAIT_SECONDS: Final = 0.1
# The pauses after a conflict, with the lock held, with a new transaction or another process.
PAUSE_MS_FIRST: Final = 2
PAUSE_MS_MAX: Final = 64


class Rivals:
    """The locks for the retries of a site object's transactions.  Safe to use from many threads."""

    def __init__(self) -> None:
        self._turns = [Lock() for _ in range(TURNS)]

    def retries(self, pace: Pace) -> "Retries":
        """The retries of one transaction.  The caller must call `leave` at the end."""
        return Retries(self._turns, pace)


class Retries:
    """The retries of one transaction.  For one thread."""

    def __init__(self, turns: list[Lock], pace: Pace) -> None:
        self._turns = turns
        self._held: Lock | None = None
        self._pauses = pace.pauses(PAUSE_MS_FIRST, PAUSE_MS_MAX)

    def wait(self, error: FloodmarkError) -> None:
        """Wait before the next attempt: for the lock of the conflict's key, or for a pause."""
        key = error.details.get("key")
        turn = None if key is None else self._turns[hash(key) % TURNS]
        if turn is None or turn is self._held:
            next(self._pauses)
            return
        self.leave()
        if turn.acquire(timeout=WAIT_SECONDS):
            self._held = turn

    def leave(self) -> None:
        """Release the held lock, if any."""
        held, self._held = self._held, None
        if held is not None:
            held.release()
