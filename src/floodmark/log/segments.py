"""The segments of a ledger in memory, and the sizes of its entries.

Nothing is stored here: a ledger asks for the effect of an append, stores it, and then tells the book.
"""

from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Iterable

from floodmark.clock import TimeSource
from floodmark.log.base import EntryId, LedgerSettings, Segment


class SegmentBook:
    """The entries of a ledger by size, and its segments.

    >>> book = SegmentBook(LedgerSettings(segment_bytes_max=10), lambda: 1_000)
    >>> for entry in (1, 2, 3):
    ...     book.add(entry, 5, book.segment_for(entry, 5))
    >>> [(segment.id, segment.first, segment.entries, segment.bytes) for segment in book.segments()]
    [(1, 1, 2, 10), (2, 3, 1, 5)]
    >>> book.emptied_by([1, 2]), book.emptied_by([3])
    ([1], [])
    """

    def __init__(self, settings: LedgerSettings, time_source: TimeSource) -> None:
        self._settings = settings
        self._time_source = time_source
        self._segments: list[Segment] = []
        # The bytes ever written into the last segment, which decide whether it is full.
        self._written = 0
        # Ordered, because a plain dict is slow to find its first key when many were removed.
        self.sizes: OrderedDict[EntryId, int] = OrderedDict()

    def segment_for(self, entry: EntryId, size: int) -> Segment | None:
        """The segment that has to be opened for an entry; None if the last one takes it."""
        now = self._time_source()
        if self._segments:
            last = self._segments[-1]
            fits = not self._written or self._written + size <= self._settings.segment_bytes_max
            if fits and now - last.opened_ms < self._settings.segment_age_ms_max:
                return None
        number = self._segments[-1].id + 1 if self._segments else 1
        return Segment(number, entry, 0, 0, now)

    def open(self, segment: Segment) -> None:
        """Begin the next segment."""
        self._segments.append(segment)
        self._written = 0

    def add(self, entry: EntryId, size: int, opened: Segment | None = None) -> None:
        """Note an entry, and the segment that was opened for it."""
        if opened is not None:
            self.open(opened)
        self._change(self._index_of(entry), 1, size)
        self.sizes[entry] = size
        self._written += size
        if opened is not None:
            self._drop_empty()

    def emptied_by(self, entries: Iterable[EntryId], opened: Segment | None = None) -> list[int]:
        """The segments that have nothing left without these entries; the last one stays all the same."""
        going = Counter(map(self._index_of, entries))
        closed = self._segments if opened is not None else self._segments[:-1]
        return [segment.id for index, segment in enumerate(closed) if segment.entries <= going.get(index, 0)]

    def remove(self, entries: Iterable[EntryId]) -> None:
        """Note that entries are gone, and the segments that they leave empty."""
        for entry in entries:
            self._change(self._index_of(entry), -1, -self.sizes.pop(entry))
        self._drop_empty()

    def segments(self) -> list[Segment]:
        """The segments as they are now."""
        return list(self._segments)

    def _drop_empty(self) -> None:
        if not all(segment.entries for segment in self._segments[:-1]):
            kept = [segment for segment in self._segments[:-1] if segment.entries]
            self._segments = [*kept, self._segments[-1]]

    def _index_of(self, entry: EntryId) -> int:
        return bisect_right(self._segments, entry, key=lambda segment: segment.first) - 1

    def _change(self, index: int, entries: int, size: int) -> None:
        segment = self._segments[index]
        self._segments[index] = segment._replace(
            entries=segment.entries + entries, bytes=segment.bytes + size
        )
