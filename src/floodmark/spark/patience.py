"""Waiting for a server that does not answer just now: it may be restarted, and Spark should outlive that."""

from collections.abc import Callable, Sequence
from threading import Event
from typing import Final, TypeVar

from floodmark.model.errors import Unreachable

# A minute in all.
PAUSES: Final = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, *[4.0] * 14)

Result = TypeVar("Result")


def ask_patiently(ask: Callable[[], Result], *, pauses: Sequence[float] = PAUSES) -> Result:
    """Ask, and ask again while the server cannot be reached.  For what may be asked twice without harm."""
    waiting = Event()
    for pause in pauses:
        try:
            return ask()
        except Unreachable:
            waiting.wait(pause)
    return ask()
