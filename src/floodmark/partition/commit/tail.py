"""The last commits of a node, kept in memory for followers.

A follower that keeps up takes commits from here and never touches the change log.  One that falls behind
finds that the tail no longer reaches back to it, and reads the log: a slow reader costs no memory.

Only the thread that holds the turn writes, and commits come in order of versions.  Readers take no lock: they
read the list of entries first and how far back it reaches second, while a writer that drops entries moves
that mark first and replaces the list second.  The commit of a prepared write may come below others; it and
what it corrects lie above the resolved version, which readers do not pass.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import RLock
from typing import Final, NamedTuple

from floodmark.model.limits import TAIL_BYTES_MAX
from floodmark.model.version import VERSION_MAX, Version
from floodmark.partition.commit.storage import Storage

# What Python needs for an entry and each of its changes beyond the bytes themselves.
_ENTRY_BYTES: Final = 400
_CHANGE_BYTES: Final = 120


class TailEntry(NamedTuple):
    """One commit: qualified keys, and the values as stored."""

    version: Version
    partition: int
    keys: Sequence[bytes]
    values: Sequence[bytes]


class LiveTail:
    """A window over the newest commits, open while there are followers."""

    def __init__(self, storage: Storage, bytes_max: int = TAIL_BYTES_MAX) -> None:
        # Whether commits have to be added; each commit reads it.
        self.is_open = False
        self._storage = storage
        self._bytes_max = bytes_max
        self._bytes = 0
        self._followers = 0
        self._counting = RLock()
        self._is_shared = False
        # Every commit above this is in the entries, up to the last that was published.
        self._since: Version = VERSION_MAX
        self._entries: list[TailEntry] = []

    def share(self) -> None:
        """Stay closed: other nodes commit as well, and only the logs hold the commits of all."""
        self._is_shared = True

    @contextmanager
    def following(self, latest: Callable[[], Version]) -> Iterator[None]:
        """Keep the tail while a reader is at its end."""
        with self._storage.exclusive(), self._counting:
            self._followers += 1
            if not self.is_open and not self._is_shared:
                self.reset(latest())
                self.is_open = True
        try:
            yield
        finally:
            with self._counting:
                self._followers -= 1
                self.is_open = self.is_open and self._followers > 0
            self._empty_if_possible()

    def _empty_if_possible(self) -> None:
        """Drop the entries when the last follower has left; if the turn is taken, the next follower does.

        Must not wait: a reader may be garbage-collected in a thread that holds the turn.
        """
        if self.is_open:
            return
        token, turn = None, self._storage.turn
        try:
            token = turn.try_take()
            if token is not None and not self.is_open:
                self.reset(VERSION_MAX)
        finally:
            if token is not None:
                turn.pass_on(token)

    def add(self, version: Version, partition: int, keys: Sequence[bytes], values: Sequence[bytes]) -> None:
        """Add a commit that is about to be published.  The caller holds the turn."""
        self._entries.append(TailEntry(version, partition, keys, values))
        self._bytes += _size(keys, values)
        if self._bytes > self._bytes_max:
            self._forget_half()

    def insert(self, inserted: TailEntry, corrected: Mapping[Version, Mapping[bytes, bytes | None]]) -> None:
        """Add a commit below others, and correct those of its partition; a value of None removes a change.

        The caller holds the turn.  All of it lies above the resolved version, where no reader looks, so
        entries can change in place.
        """
        for version, changes in corrected.items():
            self._correct(version, inserted.partition, changes)
        # Older commits are read from the log.
        if inserted.version > self._since:
            insort(self._entries, inserted, key=_version)
            self._bytes += _size(inserted.keys, inserted.values)
        if self._bytes > self._bytes_max:
            self._forget_half()

    def _correct(self, version: Version, partition: int, changes: Mapping[bytes, bytes | None]) -> None:
        entries = self._entries
        place = bisect_left(entries, version, key=_version)
        while place < len(entries) and entries[place].version == version:
            entry = entries[place]
            if entry.partition == partition:
                corrected = _correct(entry, changes)
                self._bytes -= _size(entry.keys, entry.values)
                if not corrected.keys:
                    del entries[place]
                    continue
                self._bytes += _size(corrected.keys, corrected.values)
                entries[place] = corrected
            place += 1

    def reset(self, since: Version) -> None:
        """Drop all entries; later commits lie above `since`.  The caller holds the turn."""
        self._since = since
        self._entries = []
        self._bytes = 0

    def between(self, since: Version, until: Version) -> Sequence[TailEntry] | None:
        """The published commits in `(since, until]`; None if the tail does not reach back so far."""
        entries = self._entries
        if since < self._since:
            return None
        return entries[
            bisect_right(entries, since, key=_version) : bisect_right(entries, until, key=_version)
        ]

    def _forget_half(self) -> None:
        dropped = 0
        entries = self._entries
        while dropped < len(entries) and self._bytes > self._bytes_max // 2:
            self._bytes -= _size(entries[dropped].keys, entries[dropped].values)
            dropped += 1
        if dropped:
            self._since = entries[dropped - 1].version
            self._entries = entries[dropped:]


def _version(entry: TailEntry) -> Version:
    return entry.version


def _correct(entry: TailEntry, corrected: Mapping[bytes, bytes | None]) -> TailEntry:
    pairs = [(key, corrected.get(key, value)) for key, value in zip(entry.keys, entry.values, strict=True)]
    left = [(key, value) for key, value in pairs if value is not None]
    return entry._replace(keys=[key for key, _ in left], values=[value for _, value in left])


def _size(keys: Sequence[bytes], values: Sequence[bytes]) -> int:
    if len(keys) == 1:
        return len(keys[0]) + len(values[0]) + _ENTRY_BYTES
    return sum(map(len, keys)) + sum(map(len, values)) + _ENTRY_BYTES + _CHANGE_BYTES * len(keys)
