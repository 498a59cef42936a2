"""Retries while a server is unreachable, so that Spark survives its restart."""

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
    """Retry an idempotent call while the server is unreachable.

    Logs a warning with the time that is left; the last error says how often it was tried.
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
