"""Readers that wait for changes of some keys, and how they are woken.

A commit must not pay for the readers of other keys.  So one of the waiting readers is the *lookout*, and a
commit notifies it alone, which costs the same however many readers wait.  The lookout searches the tail for
what was published since the last search and wakes the readers whose keys are in it; then it lets commits
gather for a moment before it searches again.  A lookout that leaves, because its own keys were written or its
time is up, appoints another waiting reader.

Waking a reader without need costs a little time; not waking one delays its changes.  In doubt it is woken.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Lock, RLock
from typing import Final

from floodmark.clock import monotonic_seconds
from floodmark.codec.ordered import NAMESPACE_BYTES
from floodmark.model.ranges import KeyRange, prefix_end
from floodmark.model.version import Version
from floodmark.partition.commit.tail import LiveTail, TailEntry

# Up to this number, readers poll as often as they ask to; more poll less often, for the same total cost.
_IMPATIENT_MAX: Final = 50
# Asynchronous writes are published after this time, if no sync has published them before.
SYNC_SECONDS: Final = 0.2
# Bisections that one search may take; beyond, all readers of the namespaces that were written are woken.
_BISECTIONS_MAX: Final = 10_000


class Bell:
    """Wakes one thread that waits.

    A single call releases its only lock to ring, and a single call takes it, so Ctrl-C in a wait does no
    harm.  In an `Event`, Ctrl-C may leave the inner lock taken, and the next thread to set it hangs.
    """

    __slots__ = ("_silence",)

    def __init__(self) -> None:
        self._silence = Lock()
        self._silence.acquire()

    @property
    def has_rung(self) -> bool:
        """Whether it has rung and no thread has heard it yet."""
        return not self._silence.locked()

    def ring(self) -> None:
        """Wake the thread that waits, or the next that will."""
        # It may have rung before, at the same moment.
        with suppress(RuntimeError):
            self._silence.release()

    def hear(self, timeout_seconds: float) -> bool:
        """Wait until it rings, and silence it; False if it has not rung."""
        return self._silence.acquire(timeout=max(0.0, timeout_seconds))


class Follower:
    """One reader.  Its thread calls `expect`, reads what there is, and waits."""

    __slots__ = ("_bell", "_is_woken", "heartbeats", "keys", "namespace")

    def __init__(self, keys: KeyRange, *, heartbeats: bool) -> None:
        self.keys = keys
        self.heartbeats = heartbeats
        prefix = keys.start[:NAMESPACE_BYTES]
        is_inside = (
            len(prefix) == NAMESPACE_BYTES and KeyRange(prefix, prefix_end(prefix)).intersect(keys) == keys
        )
        # The prefix of the one namespace that the keys are in; None if they may be in several.
        self.namespace = prefix if is_inside else None
        self._is_woken = False
        self._bell = Bell()

    def expect(self) -> None:
        """Wake for changes that are published from now on."""
        self._is_woken = False

    def is_woken(self) -> bool:
        """Whether some of its keys may have been written since `expect`."""
        return self._is_woken

    def wake(self) -> None:
        """Wake the reader."""
        self._is_woken = True
        self._bell.ring()

    def prod(self) -> None:
        """Interrupt `rest`, so that the reader finds that it is the lookout."""
        self._bell.ring()

    def rest(self, timeout_seconds: float) -> None:
        """Sleep until `wake` or `prod` is called."""
        self._bell.hear(timeout_seconds)

    def wants(self, entries: Sequence[TailEntry]) -> bool:
        """Whether one of its keys is among those of commits."""
        start, end = self.keys
        for entry in entries:
            index = bisect_left(entry.keys, start)
            if index < len(entry.keys) and (end is None or entry.keys[index] < end):
                return True
        return False


class Followers:
    """All readers that wait for changes of a node."""

    def __init__(
        self, tail: LiveTail, resolved_version: Callable[[], Version], sync: Callable[[], None]
    ) -> None:
        # Whether there is a lookout to notify; each publication checks it.
        self.is_watched = False
        self._tail = tail
        self._resolved_version = resolved_version
        self._sync = sync
        # A stream may be collected, and so leave, in a thread that is here already.
        self._lock = RLock()
        self._count = 0
        self._joined: dict[bytes | None, set[Follower]] = {}
        self._waiting: dict[Follower, None] = {}
        self._lookout: Follower | None = None
        self._published = Bell()
        # The end of the last search, and of the last one whose readers are all woken.
        self._searched_through: Version = 0
        self._passed: Version = 0
        self._searched_at = 0.0

    @contextmanager
    def joining(self, keys: KeyRange, *, heartbeats: bool = False) -> Iterator[Follower]:
        """Register a reader of some keys within the block."""
        follower = Follower(keys, heartbeats=heartbeats)
        with self._lock:
            self._count += 1
            self._joined.setdefault(follower.namespace, set()).add(follower)
        try:
            yield follower
        finally:
            with self._lock:
                self._count -= 1
                group = self._joined[follower.namespace]
                group.discard(follower)
                if not group:
                    del self._joined[follower.namespace]

    def tell(self) -> None:
        """Notify the lookout that something was published.  The caller checks `is_watched` first."""
        if not self._published.has_rung:
            self._published.ring()

    def wake_all(self) -> None:
        """Wake all readers."""
        for follower in self._find(None):
            follower.wake()
        self._published.ring()

    def wait(self, follower: Follower, timeout_seconds: float, gather_seconds: float) -> Version:
        """Return soon after a key of the reader was written, or after the timeout.

        Returns the version up to which none of its keys were written since `expect`, or 0 if the reader was
        woken.  The lookout also syncs asynchronous writes, which are not published otherwise.
        """
        timeout_seconds *= max(1.0, self._count / _IMPATIENT_MAX)
        deadline = monotonic_seconds() + timeout_seconds
        with self._lock:
            self._waiting[follower] = None
            if self._lookout is None:
                self._appoint(follower)
        try:
            while not follower.is_woken():
                left = deadline - monotonic_seconds()
                if self._lookout is follower:
                    self._look_out(follower, min(left, timeout_seconds), gather_seconds)
                elif left > 0:
                    follower.rest(left)
                if left <= 0:
                    break
            # Before `is_woken` is read: a search wakes the readers of a commit, and then passes it.
            passed = self._passed
            return 0 if follower.is_woken() else passed
        finally:
            with self._lock:
                del self._waiting[follower]
                if self._lookout is follower:
                    self._appoint(next(iter(self._waiting), None))

    def _appoint(self, follower: Follower | None) -> None:
        self._lookout = follower
        self.is_watched = follower is not None
        if follower is not None:
            # Without a lookout, nothing was notified.
            self._published.ring()
            follower.prod()

    def _look_out(self, follower: Follower, left_seconds: float, gather_seconds: float) -> None:
        """Let commits gather, or wait for one and search."""
        pause_seconds = self._searched_at + gather_seconds - monotonic_seconds()
        if pause_seconds > 0 and left_seconds > 0:
            follower.rest(min(pause_seconds, left_seconds))
            return
        is_published = self._published.hear(min(left_seconds, SYNC_SECONDS))
        if follower.is_woken():
            if is_published:
                # For the next lookout.
                self._published.ring()
            return
        if is_published:
            self._search()
        if not is_published or left_seconds <= 0:
            self._sync()

    def _search(self) -> None:
        """Wake the readers of the commits that were published since the last search."""
        resolved = self._resolved_version()
        entries = self._tail.between(self._searched_through, resolved)
        self._searched_through, self._searched_at = resolved, monotonic_seconds()
        for follower in self._find(entries):
            follower.wake()
        if entries is not None:
            # Otherwise other nodes, whose commits are not in the tail, may have written below.
            self._passed = resolved

    def _find(self, entries: Sequence[TailEntry] | None) -> list[Follower]:
        """The readers of some commits; all readers for None."""
        written = _namespaces_of(entries) if entries else None
        with self._lock:
            groups = [
                [*group]
                for namespace, group in [*self._joined.items()]
                if written is None or namespace is None or namespace in written
            ]
        followers = [follower for group in groups for follower in group]
        if entries is None or len(followers) * len(entries) > _BISECTIONS_MAX:
            return followers
        if not entries:
            # A heartbeat was published, which the tail does not hold.
            return [follower for follower in followers if follower.heartbeats]
        return [follower for follower in followers if follower.wants(entries)]


def _namespaces_of(entries: Sequence[TailEntry]) -> set[bytes]:
    """The prefixes of the namespaces of some commits, whose keys are in order."""
    written: set[bytes] = set()
    for entry in entries:
        first, last = entry.keys[0][:NAMESPACE_BYTES], entry.keys[-1][:NAMESPACE_BYTES]
        written |= {first} if first == last else {key[:NAMESPACE_BYTES] for key in entry.keys}
    return written
