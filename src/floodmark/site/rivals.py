"""Retries after conflicts: transactions of one process that lost on a key try again one after the other.

Without an order, those that lost often would pause ever longer, and newcomers would win.
"""

from threading import Lock
from typing import Final

from floodmark.model.errors import FloodmarkError
from floodmark.site.coordinated import Pace

# Keys share turns by their hashes.
TURNS: Final = 64
# How long a transaction waits for the turn of its key; then it tries without.
WAIT_SECONDS: Final = 0.1
# The pauses of one that loses though it has the turn, to a newcomer or another process.
PAUSE_MS_FIRST: Final = 2
PAUSE_MS_MAX: Final = 64


class Rivals:
    """The turns of the transactions of a site object.  Safe to use from many threads."""

    def __init__(self) -> None:
        self._turns = [Lock() for _ in range(TURNS)]

    def retries(self, pace: Pace) -> "Retries":
        """The retries of one transaction; the caller leaves them at its end."""
        return Retries(self._turns, pace)


class Retries:
    """The retries of one transaction.  For one thread."""

    def __init__(self, turns: list[Lock], pace: Pace) -> None:
        self._turns = turns
        self._held: Lock | None = None
        self._pauses = pace.pauses(PAUSE_MS_FIRST, PAUSE_MS_MAX)

    def wait(self, error: FloodmarkError) -> None:
        """Wait before the next attempt: for the turn of the key of a conflict, or for a pause."""
        key = error.details.get("key")
        turn = None if key is None else self._turns[hash(key) % TURNS]
        if turn is None or turn is self._held:
            next(self._pauses)
            return
        self.leave()
        if turn.acquire(timeout=WAIT_SECONDS):
            self._held = turn

    def leave(self) -> None:
        """Let the next one try."""
        held, self._held = self._held, None
        if held is not None:
            held.release()
