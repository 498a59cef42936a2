"""Chooses the read versions of a client's transactions: fresh or cached.

A fresh version costs a call, and shows a transaction every write that was acknowledged before.  The cached
version is the highest at which the client has read or committed, and costs nothing.  A transaction that reads
there is never older than the client's previous one, but may miss newer writes of other clients.  A write that
depends on such a read conflicts, and is retried at a fresh version.

**Admission control.**  An overloaded site slows its clients down by delaying its answers to calls for
versions.  Clients must not escape this through the cache, so cached versions are used only while the last
answer was quick.
"""

from bisect import insort
from collections.abc import Callable
from datetime import timedelta
from itertools import count
from typing import Final, Literal, TypeAlias

import msgspec

from floodmark.clock import monotonic_seconds
from floodmark.model.version import Version

ReadVersion: TypeAlias = Literal["fresh", "cached"]
# Does the first read at a version at or above the given one and returns the version; 0 to ask separately.
AskFresh: TypeAlias = Callable[[Version], Version]

# The default limits for the age of a cached version, and for the duration of the last call.
STALENESS_MAX: Final = timedelta(seconds=1)
SLOW_ANSWER: Final = timedelta(milliseconds=10)


class ReadVersionCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Counts how the transactions of a client got their read versions."""

    asked: int
    """Calls to the site."""

    slow: int
    """Those of them whose answer was slow: the site is overloaded, or far away."""

    cached: int
    """Transactions that began at a cached version, without a call."""


class ReadVersions:
    """The versions that a client has seen.  Safe to use from many threads.

    There is no lock, for which all transactions would queue: each change is one step of the interpreter.

    >>> seconds = iter([0.0, 0.001, 0.5, 2.0, 2.5, 3.0])
    >>> versions = ReadVersions(iter([7, 9]).__next__, time_seconds=lambda: next(seconds))
    >>> versions.fresh(), versions.cached()
    (7, 7)
    >>> versions.cached(), versions.counts
    (9, ReadVersionCounts(asked=2, slow=1, cached=1))
    """

    def __init__(
        self,
        ask: Callable[[], Version],
        *,
        slow_answer: timedelta = SLOW_ANSWER,
        time_seconds: Callable[[], float] = monotonic_seconds,
    ) -> None:
        self._ask = ask
        self._slow_seconds = slow_answer.total_seconds()
        self._time_seconds = time_seconds
        # The last item is the highest version seen, with the time from which its age counts.
        self._seen: list[tuple[Version, float]] = [(0, 0.0)]
        self._was_slow = False
        self._asks, self._delays, self._savings = count(1), count(1), count(1)
        self._asked = self._slow = self._cached = 0

    @property
    def counts(self) -> ReadVersionCounts:
        """The numbers of calls made and of calls saved."""
        return ReadVersionCounts(asked=self._asked, slow=self._slow, cached=self._cached)

    def fresh(self, ask: AskFresh | None = None) -> Version:
        """A version that covers every write acknowledged before the call."""
        began = self._time_seconds()
        version = (0 if ask is None else ask(self._highest())) or self._ask()
        took = self._time_seconds() - began
        self._asked = next(self._asks)
        self._was_slow = took > self._slow_seconds
        if self._was_slow:
            self._slow = next(self._delays)
        self._note(version, began)
        # A node may not have observed the client's last commit at another node.
        return self._highest()

    def cached(self, staleness_max: timedelta = STALENESS_MAX, ask: AskFresh | None = None) -> Version:
        """The highest version seen, if it is recent and the last answer was quick; otherwise a fresh one."""
        now = self._time_seconds()
        highest, seen_seconds = self._seen[-1]
        is_recent = highest and now - seen_seconds <= staleness_max.total_seconds()
        if is_recent and not self._was_slow:
            self._cached = next(self._savings)
            return highest
        return self.fresh(ask)

    def expected(self) -> Version:
        """A version below that of the next commit, and close to it if this client writes often."""
        return self._highest() or self.fresh()

    def saw(self, version: Version) -> None:
        """Record the version of a commit as seen."""
        self._note(version, self._time_seconds())

    def _highest(self) -> Version:
        return self._seen[-1][0]

    def _note(self, version: Version, seconds: float) -> None:
        if version > self._highest():
            insort(self._seen, (version, seconds))
            del self._seen[:-1]
