"""Admission control: a server with many writes on their way delays the read versions of new transactions.

A transaction begins with a read version.  A delay there slows clients down before they have done any work,
and leaves the server time to finish the writes that it has accepted.  Clients use cached read versions only
while answers are quick (`site/read_versions.py`), so the delay reaches them too.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Lock
from typing import Final

from floodmark.clock.backoff import Backoff
from floodmark.model.errors import Retryable
from floodmark.model.limits import READ_VERSIONS_DELAYED_MAX, WRITES_QUEUED_MAX
from floodmark.server.counters import ServerMetrics

# Read versions are delayed while more writes than this are on their way, for at most this long.
WRITES_UNDELAYED: Final = 1_000
DELAY_MS_MAX: Final = 1_000
# The first and the longest pause between two checks of the queue.
PAUSE_MS_FIRST: Final = 10
PAUSE_MS_MAX: Final = 250
_sleep: Final = Event().wait


class Admission:
    """Counts the writes that a server has accepted and not answered.  Safe to use from many threads.

    Each function in `queues` returns the length of a further queue of writes.
    """

    def __init__(
        self,
        metrics: ServerMetrics,
        *,
        undelayed: int = WRITES_UNDELAYED,
        sleep: Callable[[float], object] = _sleep,
    ) -> None:
        self.queues: list[Callable[[], int]] = []
        self._metrics = metrics
        self._undelayed = undelayed
        self._sleep = sleep
        self._lock = Lock()
        # `_delayed` callers wait for a read version; one of the queues counts `_queued` of them as well.
        self._writing = self._delayed = self._queued = 0
        metrics.show_queue(self.queued)

    def queued(self) -> int:
        """The number of writes on their way."""
        return self._writing + sum(queue() for queue in self.queues) - self._queued

    @property
    def delays(self) -> bool:
        """Whether so many writes are on their way that read versions are delayed."""
        return self.queued() > self._undelayed

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Count a write as on its way within the block; Retryable if there are too many."""
        with self._lock:
            if self._writing >= WRITES_QUEUED_MAX:
                raise Retryable(
                    f"the server is overloaded: {WRITES_QUEUED_MAX:,} writes wait for their commit; nothing "
                    "was written, try again later"
                )
            self._writing += 1
        try:
            yield
        finally:
            with self._lock:
                self._writing -= 1

    def delay_read_version(self, *, queued: bool = False) -> None:
        """Wait until few writes are on their way, at most a second; Retryable if too many callers wait.

        With `queued`, one of the queues counts the call itself.
        """
        if not self.delays:
            return
        with self._lock:
            if self._delayed >= READ_VERSIONS_DELAYED_MAX:
                self._metrics.read_version("refused")
                raise Retryable(
                    f"the server is overloaded: {READ_VERSIONS_DELAYED_MAX:,} transactions wait to begin; "
                    "try again later"
                )
            self._delayed += 1
            self._queued += queued
        self._metrics.read_version("delayed")
        try:
            pauses = Backoff(PAUSE_MS_FIRST, longest_ms=PAUSE_MS_MAX, budget_ms=DELAY_MS_MAX).pauses()
            for seconds in pauses:
                self._sleep(seconds)
                if not self.delays:
                    return
        finally:
            with self._lock:
                self._delayed -= 1
                self._queued -= queued
