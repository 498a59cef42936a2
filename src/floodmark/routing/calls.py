"""Concurrent calls of several nodes."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Semaphore
from typing import TypeVar

from floodmark.model.errors import FloodmarkError

Result = TypeVar("Result")


class CallPool:
    """Makes calls in threads of its own.  Safe to use from many threads.

    No call waits for a free thread: the calls before it might wait for its own effect, as prepares wait for a
    commit.  The caller's thread makes it instead.  A pool of 0 threads makes calls one after the other.
    """

    def __init__(self, threads_max: int = 0) -> None:
        self._free = Semaphore(threads_max)
        self._executor = ThreadPoolExecutor(max(1, threads_max), thread_name_prefix="floodmark-calls")

    def each(self, calls: Sequence[Callable[[], Result]]) -> list[Result | FloodmarkError]:
        """The result or error of each call, when all have ended; this thread makes the first call."""
        begun = [None if place == 0 else self._begin(call) for place, call in enumerate(calls)]
        own = {place: _attempt(calls[place]) for place, future in enumerate(begun) if future is None}
        return [own[place] if future is None else future.result() for place, future in enumerate(begun)]

    def all(self, calls: Sequence[Callable[[], Result]]) -> list[Result]:
        """The results of the calls; raises the first error, when all have ended."""
        results: list[Result] = []
        for answer in self.each(calls):
            if isinstance(answer, FloodmarkError):
                raise answer
            results.append(answer)
        return results

    def _begin(self, call: Callable[[], Result]) -> Future[Result | FloodmarkError] | None:
        """Begin a call; None if no thread is free, or the pool is closed."""
        if not self._free.acquire(blocking=False):
            return None
        try:
            future = self._executor.submit(_attempt, call)
        except RuntimeError:
            self._free.release()
            return None
        future.add_done_callback(lambda _: self._free.release())
        return future

    def close(self) -> None:
        """Accept no more calls; those under way continue."""
        self._executor.shutdown(wait=False)


def _attempt(call: Callable[[], Result]) -> Result | FloodmarkError:
    try:
        return call()
    except FloodmarkError as error:
        return error
