"""Ledgers for tests: one in memory, and a store for those that are kept in an engine."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from threading import Lock

from floodmark.clock import TimeSource, system_time_ms
from floodmark.engine import Engine, WriteRow
from floodmark.log.base import DEFAULT_SETTINGS, NO_MARKS, EntryId, LedgerSettings, Marks, Segment
from floodmark.log.stored import SegmentBook
from floodmark.model.errors import Closed, FloodmarkError, OutcomeUnknown, StorageFailed


class EngineStore:
    """A store over an engine without another writer.  A site has `partition/commit/storage.py`."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.recoveries = 0
        self._turn = Lock()
        self._stopped = False

    @contextmanager
    def settled(self) -> Iterator[None]:
        with self._turn:
            self._recover()
            yield

    def store(self, rows: Sequence[WriteRow]) -> None:
        try:
            self.engine.write(rows)
            self.engine.sync()
        except Closed:
            raise
        except FloodmarkError as failure:
            self._settle(rows, failure)

    def store_later(self, rows: Sequence[WriteRow]) -> None:
        try:
            self.engine.write(rows)
        except FloodmarkError:
            self._stopped = True
            raise

    def _settle(self, rows: Sequence[WriteRow], failure: FloodmarkError) -> None:
        """Find out from the recovered engine whether a write happened."""
        self._stopped = True
        try:
            self._recover()
            written = all(self.engine.get(family, key) == value for family, key, value in rows)
        except FloodmarkError:
            raise OutcomeUnknown(
                f"storage failed ({failure}) and has not recovered; whether the entry is there is not known"
            ) from failure
        if not written:
            raise StorageFailed(f"storage failed and nothing was written ({failure}); try again") from failure

    def _recover(self) -> None:
        if self._stopped:
            self.engine.recover()
            self.engine.sync()
            self.recoveries += 1
            self._stopped = False


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
