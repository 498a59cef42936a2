"""What was read of a range and is not written yet.

A reader fills it while the sink is busy, so that a slow sink gets large batches and a fast one gets changes
at once.  It holds a bounded number of bytes: when it is full the reader waits, and the changes stay where
they are, in the site.

Batches end where commits end.  Only there does "everything up to here" make sense, and only so can a sink
tell what it is given twice.
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
    """All changes of a range in `(since, through]`; there may be none."""

    since: Version
    changes: Sequence[Change]
    through: Version


class RangeBuffer:
    """Hands changes from the thread that reads a range to the one that writes it."""

    def __init__(self, since: Version, *, bytes_max: int = FEED_BUFFER_BYTES_MAX) -> None:
        # Every change at or below it was put in.
        self.through = since
        self.bytes = 0
        self._since = since
        self._bytes_max = bytes_max
        # In commit order.  The last of them may lie above `through`, if their commit is not complete yet.
        self._changes: list[Change] = []
        self._changed = Condition()
        self._finished = self._closed = False

    def put(self, changes: Sequence[Change], through: Version) -> bool:
        """Wait for room, and add what was read; False if nobody wants it any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not self._is_full())
            if self._closed:
                return False
            self._changes += changes
            self.bytes += weigh(changes)
            self.through = max(self.through, through)
            self._changed.notify_all()
            return True

    def take(self, records_max: int, linger_seconds: float = 0) -> Batch | None:
        """Wait for something to write; None if there will be nothing more.

        A batch ends with the commit in which it reaches `records_max`.  A smaller one waits for more, but
        not longer than it may linger.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_over() or self.through > self._since)
            if linger_seconds and self._complete():
                self._changed.wait_for(
                    lambda: self._is_over() or self._is_full() or self._complete() >= records_max,
                    linger_seconds,
                )
            if self._closed or self.through == self._since:
                return None
            end, through = self._complete(), self.through
            if end > records_max:
                last = self._changes[records_max - 1].version
                cut = bisect_right(self._changes, last, key=_version)
                if cut < end:
                    end, through = cut, last
            batch = Batch(self._since, self._changes[:end], through)
            del self._changes[:end]
            self.bytes -= weigh(batch.changes)
            self._since = through
            self._changed.notify_all()
            return batch

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
