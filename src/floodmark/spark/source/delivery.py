"""Sends batches of records to a site, several at a time, and repeats those that were not acknowledged.

A task's writes are idempotent: the site stores a record only if its stamp wins, or if the key was not
changed since a version.  So a missing answer is retried.  Of two batches with the same key the first must
be stored first, and a repeated batch comes late, so a batch waits until those that share a key with it are
acknowledged.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from threading import Event
from typing import Final

from floodmark.model.errors import FloodmarkError, OutcomeUnknown, Retryable, StorageFull
from floodmark.model.partition import WriteStream
from floodmark.spark.runtime.patience import PAUSES

BATCHES_IN_FLIGHT_MAX: Final = 4


class BatchSender:
    """Sends batches of encoded values under qualified keys.  For one thread.

    `sent` and `stored` count records; `stored` only for a stream with `unchanged_since`.  With `in_order`,
    batches that share a key are stored in the order in which they were sent, also after a retry.
    """

    def __init__(
        self,
        stream: WriteStream,
        *,
        in_order: bool,
        pauses: Sequence[float] = PAUSES,
        wait: Callable[[float], object] | None = None,
    ) -> None:
        self.sent = 0
        self.stored = 0
        self._stream = stream
        self._in_order = in_order
        self._pauses = pauses
        self._wait = wait or Event().wait
        self._under_way: deque[tuple[Mapping[bytes, bytes], Future[int] | FloodmarkError]] = deque()
        self._keys: set[bytes] = set()

    def send(self, rows: Mapping[bytes, bytes]) -> None:
        """Send a batch.  Waits while too many are unacknowledged."""
        if not rows:
            return
        if self._in_order:
            if not self._keys.isdisjoint(rows):
                self.finish()
            self._keys.update(rows)
        self._under_way.append((rows, self._start(rows)))
        while len(self._under_way) >= BATCHES_IN_FLIGHT_MAX:
            self._settle()

    def finish(self) -> None:
        """Return when every batch is acknowledged."""
        while self._under_way:
            self._settle()

    def _start(self, rows: Mapping[bytes, bytes]) -> "Future[int] | FloodmarkError":
        try:
            return self._stream.send(rows)
        except FloodmarkError as error:
            # Raised or retried after the batches before it.
            return error

    def _settle(self) -> None:
        rows, answer = self._under_way.popleft()
        self.stored += self._result(rows, answer)
        self.sent += len(rows)
        if self._in_order:
            self._keys.difference_update(rows)

    def _result(self, rows: Mapping[bytes, bytes], answer: "Future[int] | FloodmarkError") -> int:
        pauses = iter(self._pauses)
        while True:
            try:
                if isinstance(answer, FloodmarkError):
                    raise answer
                return answer.result()
            except StorageFull:
                # An operator has to make room: a retry does not help.
                raise
            except (Retryable, OutcomeUnknown) as error:
                pause = next(pauses, None)
                if pause is None:
                    raise self._given_up(error) from error
                self._wait(pause)
            answer = self._start(rows)

    def _given_up(self, error: FloodmarkError) -> FloodmarkError:
        return type(error)(
            f"the site did not take a batch of records, sent {len(self._pauses) + 1} times over "
            f"{sum(self._pauses):.0f} s: {error}. Earlier rows are stored; it is safe to write the same "
            "rows again",
            **error.details,
        )
