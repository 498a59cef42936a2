"""Transactions that wait for keys, in order of arrival.

A transaction that needs a key which another has prepared waits for a short time.  Without an order, the end
of a prepared write would wake all waiting transactions, and a newcomer would get the key as likely as the
first: on a hot key some would starve.  So they queue, in one line for each key, and only a transaction that
is the first in all of its lines tries to prepare.

A transaction joins all its lines in one step.  So all lines have the same order, and the first transaction
in it waits for no other: there is no deadlock.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Event, Lock

from floodmark.model.errors import Retryable


class _Ticket:
    __slots__ = ("is_first", "keys")

    def __init__(self, keys: Sequence[bytes]) -> None:
        self.keys = keys
        self.is_first = Event()


class KeyLines:
    """The lines of a node's keys.  Safe to use from many threads.

    >>> lines = KeyLines()
    >>> with lines.standing([b"a", b"b"], seconds_max=1.0):
    ...     lines.is_free([b"b"]), lines.is_free([b"c"])
    (False, True)
    >>> lines.is_free([b"a", b"b"])
    True
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._lines: dict[bytes, deque[_Ticket]] = {}

    def is_free(self, keys: Sequence[bytes]) -> bool:
        """Whether no transaction waits for one of these keys."""
        if not self._lines:
            return True
        with self._lock:
            return self._lines.keys().isdisjoint(keys)

    @contextmanager
    def standing(self, keys: Sequence[bytes], seconds_max: float) -> Iterator[None]:
        """Run a block as the first in line for some keys; `Retryable` if that takes too long."""
        ticket = _Ticket(keys)
        try:
            with self._lock:
                for key in keys:
                    self._lines.setdefault(key, deque()).append(ticket)
                self._call(ticket)
            if not ticket.is_first.wait(seconds_max):
                raise Retryable(
                    f"other transactions are in line for keys of this one, and it has waited for "
                    f"{seconds_max:g} s; try again"
                )
            yield
        finally:
            self._leave(ticket)

    def _leave(self, ticket: _Ticket) -> None:
        with self._lock:
            for key in ticket.keys:
                line = self._lines.get(key)
                if line is None or ticket not in line:
                    # It was interrupted while it joined its lines.
                    continue
                line.remove(ticket)
                if line:
                    self._call(line[0])
                else:
                    del self._lines[key]

    def _call(self, ticket: _Ticket) -> None:
        """Wake a transaction if it is the first in all of its lines."""
        if all(self._lines.get(key, (None,))[0] is ticket for key in ticket.keys):
            ticket.is_first.set()
