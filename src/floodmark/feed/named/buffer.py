"""The buffer between the reader and the writer of a range.

The reader fills it while the sink is busy: a slow sink gets large batches, and a fast one gets changes at
once.  Its bytes are bounded; when it is full the reader waits.

Batches end where commits end: only there can "everything up to here" be a checkpoint.  A snapshot may be cut
behind every key.
"""

from bisect import bisect_right
from collections.abc import Sequence
from threading import Condition
from typing import Final, NamedTuple

from floodmark.model.change import Change
from floodmark.model.limits import FEED_BUFFER_BYTES_MAX
from floodmark.model.version import Version

# The memory of a change beyond the bytes of its key and value.
CHANGE_BYTES: Final = 400


class RangeBatch(NamedTuple):
    """All changes of a range in `(since, through]`; there may be none.

    With `snapshot`, rows of the snapshot at `through`, up to that qualified key.
    """

    since: Version
    changes: Sequence[Change]
    through: Version
    snapshot: bytes | None = None


class RangeBuffer:
    """Hands changes from the thread that reads a range to the thread that writes it.

    It begins behind `since`, or with the snapshot at `since` behind a qualified key; `prefix` is the prefix
    of the namespace's keys.
    """

    def __init__(
        self,
        since: Version,
        snapshot: bytes | None = None,
        *,
        prefix: bytes = b"",
        bytes_max: int = FEED_BUFFER_BYTES_MAX,
    ) -> None:
        # The version through which changes were put in; of a snapshot, the key.
        self.through, self.snapshot = since, snapshot
        self.bytes = 0
        # The same for changes taken out.
        self._since, self._taken = since, snapshot
        self._prefix = prefix
        self._bytes_max = bytes_max
        # In commit order.  The last may lie above `through`, if their commit is incomplete.
        self._changes: list[Change] = []
        self._changed = Condition()
        self._finished = self._closed = False

    def put(self, changes: Sequence[Change], through: Version, snapshot: bytes | None = None) -> bool:
        """Wait for room, and add changes; False if the buffer was closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not self._is_full())
            if self._closed:
                return False
            self._changes += changes
            self.bytes += weigh(changes)
            self.through, self.snapshot = max(self.through, through), snapshot
            self._changed.notify_all()
            return True

    def take(self, records_max: int, linger_seconds: float = 0) -> RangeBatch | None:
        """Wait for a batch; None at the end.

        A batch ends with the commit in which it reaches `records_max`.  A smaller one waits for more for
        `linger_seconds` at most.
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

    def _next_of_snapshot(self, records_max: int) -> RangeBatch | None:
        """Rows of a snapshot, or only the key that it has reached; None if all of it was taken."""
        since = self._since
        # Its rows have the version at which the range begins, and all changes have higher ones.
        rows = 0 if self._taken is None else bisect_right(self._changes, since, key=_version)
        if rows:
            end = min(rows, records_max)
            return RangeBatch(since, self._changes[:end], since, self._prefix + self._changes[end - 1].key)
        return None if self.snapshot is None else RangeBatch(since, [], since, self.snapshot)

    def _next_commits(self, records_max: int) -> RangeBatch:
        end, through = self._complete(), self.through
        if end > records_max:
            last = self._changes[records_max - 1].version
            cut = bisect_right(self._changes, last, key=_version)
            if cut < end:
                end, through = cut, last
        return RangeBatch(self._since, self._changes[:end], through)

    def forget_incomplete(self) -> None:
        """Drop the part of an incomplete commit, which will be read again from its start."""
        with self._changed:
            end = self._complete()
            self.bytes -= weigh(self._changes[end:])
            del self._changes[end:]

    def finish(self) -> None:
        """Note that no more changes come."""
        with self._changed:
            self._finished = True
            self._changed.notify_all()

    def close(self) -> None:
        """Drop all changes and end all waits."""
        with self._changed:
            self._closed = True
            self._changes.clear()
            self.bytes = 0
            self._changed.notify_all()

    def _is_over(self) -> bool:
        return self._closed or self._finished

    @property
    def has_more(self) -> bool:
        """Whether there is a batch to take, which may be an empty one."""
        return (self.through, self.snapshot) != (self._since, self._taken)

    def _complete(self) -> int:
        """How many changes belong to complete commits."""
        return bisect_right(self._changes, self.through, key=_version)

    def _is_full(self) -> bool:
        # A commit that is larger than the buffer must come in whole, or it could never be written.
        return self.bytes >= self._bytes_max and self._complete() > 0


def weigh(changes: Sequence[Change]) -> int:
    """The approximate memory of changes."""
    return len(changes) * CHANGE_BYTES + measure_bytes(changes)


def measure_bytes(changes: Sequence[Change]) -> int:
    """The bytes of keys and values."""
    return sum(len(change.key) + len(change.value or b"") for change in changes)


def _version(change: Change) -> Version:
    return change.version
