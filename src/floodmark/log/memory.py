"""A ledger in memory, which is lost with the process."""

from collections.abc import Mapping
from itertools import islice
from threading import Lock

from floodmark.clock import TimeSource, system_time_ms
from floodmark.log.base import DEFAULT_SETTINGS, NO_MARKS, EntryId, LedgerSettings, Marks, Segment
from floodmark.log.segments import SegmentBook
from floodmark.model.errors import Closed


class MemoryLedger:
    """Entries in a dict.

    >>> ledger = MemoryLedger()
    >>> ledger.append(b"one"), ledger.append(b"two")
    (1, 2)
    >>> ledger.mark({1: None})
    >>> ledger.read(entries_max=10, bytes_max=1000)
    [(2, b'two')]
    """

    def __init__(
        self, settings: LedgerSettings = DEFAULT_SETTINGS, *, time_source: TimeSource = system_time_ms
    ) -> None:
        self._lock = Lock()
        self._entries: dict[EntryId, bytes] = {}
        self._marks: dict[EntryId, bytes] = {}
        self._book = SegmentBook(settings, time_source)
        self._next: EntryId = 1
        self._deleted = False

    def append(self, entry: bytes, marks: Marks = NO_MARKS) -> EntryId:
        with self._lock:
            self._require_there()
            number, self._next = self._next, self._next + 1
            self._book.add(number, len(entry), self._book.segment_for(number, len(entry)))
            self._entries[number] = entry
            self._apply(marks)
            return number

    def mark(self, marks: Marks) -> None:
        with self._lock:
            self._require_there()
            self._apply(marks)

    def marks(self) -> Mapping[EntryId, bytes]:
        with self._lock:
            self._require_there()
            return dict(self._marks)

    def read(self, start: EntryId = 0, *, entries_max: int, bytes_max: int) -> list[tuple[EntryId, bytes]]:
        with self._lock:
            self._require_there()
            wanted = ((number, entry) for number, entry in self._entries.items() if number >= start)
            page: list[tuple[EntryId, bytes]] = []
            size = 0
            for number, entry in islice(wanted, entries_max):
                page.append((number, entry))
                size += len(entry)
                if size >= bytes_max:
                    break
            return page

    def trim(self, before: EntryId) -> None:
        with self._lock:
            self._require_there()
            self._apply({number: None for number in self._entries if number < before})

    def segments(self) -> list[Segment]:
        with self._lock:
            self._require_there()
            return self._book.segments()

    def delete(self) -> None:
        with self._lock:
            self._entries, self._marks = {}, {}
            self._deleted = True

    def _apply(self, marks: Marks) -> None:
        known = {number: bits for number, bits in marks.items() if number in self._entries}
        for number, bits in known.items():
            if bits is None:
                del self._entries[number]
                self._marks.pop(number, None)
            else:
                self._marks[number] = bits
        self._book.remove(number for number, bits in known.items() if bits is None)

    def _require_there(self) -> None:
        if self._deleted:
            raise Closed("the ledger was deleted; open a new one")
