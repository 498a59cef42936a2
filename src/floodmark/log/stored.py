"""A ledger in an engine, beside the data of a site.

Its rows are in one family, under the ledger's name:

    name | 00 | 'e' | entry id: 8 bytes      the entry
    name | 00 | 'm' | entry id: 8 bytes      its marks, if some of its records are gone and some are not
    name | 00 | 's' | segment id: 8 bytes    first entry: 8 bytes, opened: 8 bytes, unix milliseconds
    name | 00 | 'h'                          all entries below this id were removed: 8 bytes (big-endian)
    name | 00 | 'n'                          all ids below this id were used: 8 bytes

An entry is one row and one sync.  Removed entries leave tombstones in the engine, which a scan from the first
key would have to skip; with the head row it starts near the oldest entry.  The head row may lag, so it is
stored rarely.

The next write removes an entry whose append had an unknown outcome.
"""

from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from struct import Struct
from struct import error as StructError
from threading import Lock
from typing import Final, Protocol

from floodmark.clock import TimeSource, system_time_ms
from floodmark.engine import Engine, Row, WriteRow
from floodmark.engine.base import scan_pages
from floodmark.log.base import DEFAULT_SETTINGS, NO_MARKS, EntryId, LedgerSettings, Marks, Segment
from floodmark.model.errors import Closed, Corruption, InvalidName, InvalidValue, OutcomeUnknown
from floodmark.model.limits import PAGE_ROWS_MAX
from floodmark.model.ranges import after

FAMILY: Final = "ledger"
# The head row is stored when it lags by this many entries.
HEAD_LAG_MAX: Final = 256
# The marks of an entry change its row, its row of marks and perhaps the row of its segment.
ROWS_PER_MARK: Final = 3
_ENTRY, _MARK, _SEGMENT, _HEAD, _NEXT = b"e", b"m", b"s", b"h", b"n"
_END: Final = b"\x00"
_BEYOND: Final = b"\x01"
_NUMBER: Final = Struct(">Q")
_SEGMENT_ROW: Final = Struct(">QQ")
_ID_MAX: Final = (1 << 64) - 1


class SegmentBook:
    """The entries of a ledger by size, and its segments, in memory only.

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
        """The segment that must be opened for an entry; None if the entry fits into the last one."""
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
        """Add an entry, and the segment that was opened for it."""
        if opened is not None:
            self.open(opened)
        self._change(entry, 1, size)
        self.sizes[entry] = size
        self._written += size
        if opened is not None:
            self._drop_empty()

    def emptied_by(self, entries: Iterable[EntryId], opened: Segment | None = None) -> list[int]:
        """The segments that are empty without these entries, except for the last one, which stays."""
        going = Counter(map(self._index_of, entries))
        closed = self._segments if opened is not None else self._segments[:-1]
        return [segment.id for index, segment in enumerate(closed) if segment.entries <= going.get(index, 0)]

    def remove(self, entries: Iterable[EntryId]) -> None:
        """Remove entries, and the segments that they leave empty."""
        for entry in entries:
            self._change(entry, -1, -self.sizes.pop(entry))
        self._drop_empty()

    def segments(self) -> list[Segment]:
        return list(self._segments)

    def _drop_empty(self) -> None:
        if not all(segment.entries for segment in self._segments[:-1]):
            kept = [segment for segment in self._segments[:-1] if segment.entries]
            self._segments = [*kept, self._segments[-1]]

    def _index_of(self, entry: EntryId) -> int:
        return bisect_right(self._segments, entry, key=lambda segment: segment.first) - 1

    def _change(self, entry: EntryId, count: int, size: int) -> None:
        index = self._index_of(entry)
        segment = self._segments[index]
        self._segments[index] = segment._replace(entries=segment.entries + count, bytes=segment.bytes + size)


class Store(Protocol):
    """The storage of ledgers: an engine to read from, and the calls that write to it.

    Writes happen within `settled()`, one thread at a time, over an engine that has recovered from earlier
    failures.  `recoveries` counts these recoveries: rows that were not durable before one may be lost.
    """

    engine: Engine

    @property
    def recoveries(self) -> int: ...

    def settled(self) -> AbstractContextManager[None]:
        """Exclude other writers."""

    def store(self, rows: Sequence[WriteRow]) -> None:
        """Write rows atomically and durably; raises `OutcomeUnknown` only if the engine cannot tell."""

    def store_later(self, rows: Sequence[WriteRow]) -> None:
        """Write rows atomically; they are durable with the next `store`."""


def list_ledgers(engine: Engine) -> list[str]:
    """The names of the ledgers in an engine, in order."""
    names: list[str] = []
    start = b""
    while (row := engine.ceiling(FAMILY, start)) is not None:
        name, _, _ = row[0].partition(_END)
        names.append(name.decode("utf-8"))
        start = name + _BEYOND
    return names


class StoredLedger:
    """A ledger in an engine.  The first append creates it.

    >>> from floodmark.engine import MemoryEngine
    >>> from floodmark.testing.ledgers import EngineStore
    >>> store = EngineStore(MemoryEngine((FAMILY,)))
    >>> StoredLedger(store, "coordinator/1").append(b"begin")
    1
    >>> StoredLedger(store, "coordinator/1").read(entries_max=10, bytes_max=1000)
    [(1, b'begin')]
    >>> list_ledgers(store.engine)
    ['coordinator/1']
    """

    def __init__(
        self,
        store: Store,
        name: str,
        settings: LedgerSettings = DEFAULT_SETTINGS,
        *,
        time_source: TimeSource = system_time_ms,
    ) -> None:
        if not name or not name.isprintable():
            raise InvalidName(f"{name!r:.200} cannot name a ledger: use one or more printable characters")
        self.name = name
        self._prefix = name.encode("utf-8") + _END
        self._store = store
        self._engine = store.engine
        self.entry_bytes_max = store.engine.limits.value_bytes_max
        self._lock = Lock()
        self._book = SegmentBook(settings, time_source)
        self._marked: dict[EntryId, bytes] = {}
        # Appends of unknown outcome, which the next write removes.
        self._doubtful: set[EntryId] = set()
        # Marks that are not durable yet, and how often the engine had recovered when they were written.
        self._fresh: dict[EntryId, bytes | None] = {}
        self._fresh_since = store.recoveries
        self._deleted = False
        self._head: EntryId = self._read_number(_HEAD)
        self._load()

    # Writing

    def append(self, entry: bytes, marks: Marks = NO_MARKS) -> EntryId:
        with self._writing():
            number = self._next
            opened = self._book.segment_for(number, len(entry))
            if len(entry) > self.entry_bytes_max:
                raise InvalidValue(
                    f"an entry of {len(entry):,} bytes does not fit into the ledger {self.name!r}; the "
                    f"database of this site takes {self.entry_bytes_max:,}. Write smaller records",
                    size=len(entry),
                )
            rows: list[WriteRow] = [(FAMILY, self._key(_ENTRY, number), entry)]
            if opened is not None:
                row = _SEGMENT_ROW.pack(opened.first, opened.opened_ms)
                rows.append((FAMILY, self._key(_SEGMENT, opened.id), row))
            known = self._shorten(self._known(marks))
            # An id is never used twice, even if this append fails.
            self._next += 1
            try:
                self._store.store([*rows, *self._rows(known, opened)])
            except OutcomeUnknown:
                self._doubtful.add(number)
                raise
            self._doubtful.clear()
            self._fresh.clear()
            self._book.add(number, len(entry), opened)
            self._apply(known)
            return number

    def mark(self, marks: Marks) -> None:
        with self._writing():
            self._remove(self._shorten(self._known(marks)))

    @contextmanager
    def _writing(self) -> Iterator[None]:
        with self._lock:
            self._require_there()
            with self._store.settled():
                yield

    def _remove(self, marks: Marks) -> None:
        if marks:
            self._store.store_later(self._rows(marks))
            self._fresh_since = self._store.recoveries
            self._fresh |= marks
            self._apply(marks)

    def _shorten(self, marks: Marks) -> Marks:
        """Store the marks of the first entries, if one write of the engine cannot take all; returns the rest.

        A crash may keep only the first ones.  That is harmless: a transaction loses its first record first,
        and without it the others have no effect.
        """
        entries = sorted(marks)
        marks_max = max(1, (self._engine.limits.batch_rows_max - len(self._doubtful)) // ROWS_PER_MARK - 2)
        while len(entries) > marks_max:
            first, entries = entries[:marks_max], entries[marks_max:]
            self._remove({number: marks[number] for number in first})
        return {number: marks[number] for number in entries}

    def delete(self) -> None:
        with self._lock, self._store.settled():
            self._deleted = True
            for page in self._pages(self._prefix, self.name.encode("utf-8") + _BEYOND):
                self._store.store([(FAMILY, key, None) for key, _ in page])

    # Reading

    def marks(self) -> Mapping[EntryId, bytes]:
        with self._lock:
            self._require_there()
            return dict(self._marked)

    def read(self, start: EntryId = 0, *, entries_max: int, bytes_max: int) -> list[tuple[EntryId, bytes]]:
        with self._lock:
            self._require_there()
            first, end = max(start, self._head), self._key(_ENTRY, self._next)
            while True:
                rows = self._engine.scan(
                    FAMILY, self._key(_ENTRY, first), end, rows_max=entries_max, bytes_max=bytes_max
                )
                numbered = [(self._number_of(key), value) for key, value in rows]
                page = [(number, entry) for number, entry in numbered if number in self._book.sizes]
                if page or not rows:
                    return page
                first = numbered[-1][0] + 1

    def segments(self) -> list[Segment]:
        with self._lock:
            self._require_there()
            return self._book.segments()

    # Rows

    def _known(self, marks: Marks) -> dict[EntryId, bytes | None]:
        """The marks of entries that exist, and earlier ones that a recovery may have undone."""
        known = {number: bits for number, bits in marks.items() if number in self._book.sizes}
        return {**self._fresh, **known} if self._store.recoveries != self._fresh_since else known

    def _rows(self, marks: Marks, opened: Segment | None = None) -> list[WriteRow]:
        """The writes for marks, and those that remove entries whose appends had an unknown outcome."""
        gone = {number for number, bits in marks.items() if bits is None}
        rows: list[WriteRow] = [(FAMILY, self._key(_ENTRY, number), None) for number in self._doubtful]
        for number, bits in marks.items():
            if bits is not None:
                rows.append((FAMILY, self._key(_MARK, number), bits))
                continue
            rows.append((FAMILY, self._key(_ENTRY, number), None))
            if number in self._marked or number in self._fresh:
                rows.append((FAMILY, self._key(_MARK, number), None))
        emptied = self._book.emptied_by((number for number in gone if number in self._book.sizes), opened)
        rows += [(FAMILY, self._key(_SEGMENT, segment), None) for segment in emptied]
        if gone and max(gone) >= next(reversed(self._book.sizes), 0):
            # Without its last entry, the ledger could not derive the next id.
            rows.append((FAMILY, self._prefix + _NEXT, _NUMBER.pack(self._next)))
        oldest = next(iter(self._book.sizes), self._next)
        if oldest - self._head >= HEAD_LAG_MAX:
            self._head = oldest
            rows.append((FAMILY, self._prefix + _HEAD, _NUMBER.pack(oldest)))
        return rows

    def _apply(self, marks: Marks) -> None:
        for number, bits in marks.items():
            if bits is None:
                self._marked.pop(number, None)
            else:
                self._marked[number] = bits
        gone = [number for number, bits in marks.items() if bits is None]
        self._book.remove(number for number in gone if number in self._book.sizes)

    def _key(self, kind: bytes, number: int) -> bytes:
        return self._prefix + kind + _NUMBER.pack(number)

    # Loading

    def _load(self) -> None:
        last = 0
        for number, row in self._numbered(_SEGMENT):
            try:
                first, opened_ms = _SEGMENT_ROW.unpack(row)
            except StructError as error:
                raise Corruption(f"segment {number} of the ledger {self.name!r} is damaged") from error
            self._book.open(Segment(number, first, 0, 0, opened_ms))
            last = max(last, first - 1)
        for number, entry in self._numbered(_ENTRY, self._head):
            self._book.add(number, len(entry))
            last = number
        for number, bits in self._numbered(_MARK, self._head):
            if number in self._book.sizes:
                self._marked[number] = bits
        self._next: EntryId = max(last + 1, self._head, self._read_number(_NEXT), 1)

    def _numbered(self, kind: bytes, first: int = 0) -> Iterator[tuple[int, bytes]]:
        for page in self._pages(self._key(kind, first), after(self._key(kind, _ID_MAX))):
            for key, value in page:
                yield self._number_of(key), value

    def _pages(self, start: bytes, end: bytes) -> Iterator[list[Row]]:
        # A page is also removed in one write.
        rows_max = min(PAGE_ROWS_MAX, self._engine.limits.batch_rows_max)
        return scan_pages(self._engine, FAMILY, start, end, rows_max=rows_max)

    def _number_of(self, key: bytes) -> int:
        try:
            (number,) = _NUMBER.unpack_from(key, len(self._prefix) + 1)
        except StructError as error:
            raise Corruption(f"the ledger {self.name!r} has a key {key.hex()} that is too short") from error
        return int(number)

    def _read_number(self, kind: bytes) -> int:
        row = self._engine.get(FAMILY, self._prefix + kind)
        return 0 if row is None else int.from_bytes(row, "big")

    def _require_there(self) -> None:
        if self._deleted:
            raise Closed(f"the ledger {self.name!r} was deleted; open a new one")
