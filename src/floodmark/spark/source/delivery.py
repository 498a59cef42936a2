"""Batches of records on their way to a site, several at a time, and again where no good answer came.

What a Spark task writes may be sent twice without harm: a site that stores only where a stamp wins, or where
nothing was changed since a version, finds on the second time that it has it.  So an answer that did not come
is no reason to fail.  But of two batches with the same key the one that is sent first must be stored first,
and a batch that is repeated comes late.  So a batch waits until those that share a key with it are
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


class Delivery:
    """Sends batches of encoded values under qualified keys.  For one thread.

    `sent` and `stored` count records; how many were stored is only known of a stream that puts what is
    unchanged.  With `in_order` batches that share a key are stored in the order in which they were sent,
    also where one of them had to be repeated.
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
        """Send a batch.  Waits while too many are on their way."""
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
            # Its turn comes when those before it are settled.
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
                # Somebody has to make room; to wait for that is not for a task.
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
            f"{sum(self._pauses):.0f} s: {error}. What was written before stays; it does no harm to write "
            "the same rows again",
            **error.details,
        )
