"""Waiting for a server that does not answer just now: it may be restarted, and Spark should outlive that."""

import logging
from collections.abc import Callable, Sequence
from threading import Event
from typing import Final, TypeAlias, TypeVar

from floodmark.clock.backoff import Backoff
from floodmark.model.errors import OutcomeUnknown, Unreachable

# A minute in all.
PAUSES: Final = tuple(Backoff(50, longest_ms=4_000, budget_ms=60_000).pauses())
# A server that is only slow is not worth a message.
_QUIET_PAUSES: Final = 4

_log = logging.getLogger("floodmark.spark")

Result = TypeVar("Result")
Wait: TypeAlias = Callable[[float], object]


def ask_patiently(
    ask: Callable[[], Result], *, pauses: Sequence[float] = PAUSES, wait: Wait | None = None
) -> Result:
    """Ask, and ask again while the server cannot be reached.  For what may be asked twice without harm.

    A warning says that it waits, and for how long; the error at the end, how often it has asked.
    """
    pause_for = wait or Event().wait
    for number, pause in enumerate(pauses):
        try:
            return ask()
        except (Unreachable, OutcomeUnknown) as error:
            if number == _QUIET_PAUSES:
                _log.warning("asked again for %.0f s: %s", sum(pauses[number:]), error)
            pause_for(pause)
    try:
        return ask()
    except (Unreachable, OutcomeUnknown) as error:
        if not pauses:
            raise
        asked = f"asked {len(pauses) + 1} times over {sum(pauses):.0f} s"
        raise type(error)(f"{error} ({asked})", **error.details) from error
