"""What was read of a range and is not written yet.

A reader fills it while the sink is busy, so that a slow sink gets large batches and a fast one gets changes
at once.  It holds a bounded number of bytes: when it is full the reader waits, and the changes stay where
they are, in the site.

Batches end where commits end.  Only there does "everything up to here" make sense, and only so can a sink
tell what it is given twice.  A snapshot may be cut behind every key.
"""

from bisect import bisect_right
from collections.abc import Sequence
from threading import Condition
from typing import Final, NamedTuple

from floodmark.model.change import Change
from floodmark.model.limits import FEED_BUFFER_BYTES_MAX
from floodmark.model.version import Version

# What Python needs for a change beyond the bytes of its key and value.
CHANGE_BYTES: Final = 400


class Batch(NamedTuple):
    """All changes of a range in `(since, through]`; there may be none.

    With `snapshot`, rows of the snapshot at `through`: with them, the range has it up to that qualified key.
    """

    since: Version
    changes: Sequence[Change]
    through: Version
    snapshot: bytes | None = None


class RangeBuffer:
    """Hands changes from the thread that reads a range to the one that writes it.

    It begins behind `since`, or with the snapshot at `since` behind a qualified key; `prefix` is what the
    keys of its namespace begin with.
    """

    def __init__(
        self,
        since: Version,
        snapshot: bytes | None = None,
        *,
        prefix: bytes = b"",
        bytes_max: int = FEED_BUFFER_BYTES_MAX,
    ) -> None:
        # Every change at or below it was put in; of a snapshot, every row up to the key.
        self.through, self.snapshot = since, snapshot
        self.bytes = 0
        # What was taken out, likewise.
        self._since, self._taken = since, snapshot
        self._prefix = prefix
        self._bytes_max = bytes_max
        # In commit order.  The last of them may lie above `through`, if their commit is not complete yet.
        self._changes: list[Change] = []
        self._changed = Condition()
        self._finished = self._closed = False

    def put(self, changes: Sequence[Change], through: Version, snapshot: bytes | None = None) -> bool:
        """Wait for room, and add what was read; False if nobody wants it any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not self._is_full())
            if self._closed:
                return False
            self._changes += changes
            self.bytes += weigh(changes)
            self.through, self.snapshot = max(self.through, through), snapshot
            self._changed.notify_all()
            return True

    def take(self, records_max: int, linger_seconds: float = 0) -> Batch | None:
        """Wait for something to write; None if there will be nothing more.

        A batch ends with the commit in which it reaches `records_max`.  A smaller one waits for more, but
        not longer than it may linger.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_over() or self.has_more)
            if linger_seconds and self._complete():
                self._changed.wait_for(
                    lambda: self._is_over() or self._is_full() or self._complete() >= records_max,
                    linger_seconds,
                )
            if self._closed or not self.has_more:
                return None
            batch = self._next_of_snapshot(records_max) or self._next_commits(records_max)
            del self._changes[: len(batch.changes)]
            self.bytes -= weigh(batch.changes)
            self._since, self._taken = batch.through, batch.snapshot
            self._changed.notify_all()
            return batch

    def _next_of_snapshot(self, records_max: int) -> Batch | None:
        """Rows of a snapshot, or only the place that it has come to; None if it was all taken."""
        since = self._since
        # Its rows have the version that the range begins at, and all changes have higher ones.
        rows = 0 if self._taken is None else bisect_right(self._changes, since, key=_version)
        if rows:
            end = min(rows, records_max)
            return Batch(since, self._changes[:end], since, self._prefix + self._changes[end - 1].key)
        return None if self.snapshot is None else Batch(since, [], since, self.snapshot)

    def _next_commits(self, records_max: int) -> Batch:
        end, through = self._complete(), self.through
        if end > records_max:
            last = self._changes[records_max - 1].version
            cut = bisect_right(self._changes, last, key=_version)
            if cut < end:
                end, through = cut, last
        return Batch(self._since, self._changes[:end], through)

    def forget_incomplete(self) -> None:
        """Drop the beginning of a commit whose rest did not come: it will be read again from its start."""
        with self._changed:
            end = self._complete()
            self.bytes -= weigh(self._changes[end:])
            del self._changes[end:]

    def finish(self) -> None:
        """Nothing more will be put in."""
        with self._changed:
            self._finished = True
            self._changed.notify_all()

    def close(self) -> None:
        """Let go of everything, and of everyone who waits."""
        with self._changed:
            self._closed = True
            self._changes.clear()
            self.bytes = 0
            self._changed.notify_all()

    def _is_over(self) -> bool:
        return self._closed or self._finished

    @property
    def has_more(self) -> bool:
        """Whether there is something to take, be it only that nothing came up to some version."""
        return (self.through, self.snapshot) != (self._since, self._taken)

    def _complete(self) -> int:
        """How many changes belong to commits that are here as a whole."""
        return bisect_right(self._changes, self.through, key=_version)

    def _is_full(self) -> bool:
        # A commit that alone is larger must come in whole, or it could never be written.
        return self.bytes >= self._bytes_max and self._complete() > 0


def weigh(changes: Sequence[Change]) -> int:
    """About how much memory changes take."""
    return len(changes) * CHANGE_BYTES + measure_bytes(changes)


def measure_bytes(changes: Sequence[Change]) -> int:
    """The bytes of keys and values."""
    return sum(len(change.key) + len(change.value or b"") for change in changes)


def _version(change: Change) -> Version:
    return change.version
