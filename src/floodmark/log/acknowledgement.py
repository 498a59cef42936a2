"""Batch-index acknowledgement: which records of each entry are live.

The records of one entry belong to many transactions, which end at different times.  So each entry has a bit
per record, 1 for live; acknowledging a record clears its bit, and an entry without live records is removed.
Memory and disk hold only entries with live records, and only a partly acknowledged one has a row of marks.

Acknowledging costs no sync: the next append stores the bits.  A crash can therefore bring back acknowledged
records, always all or none of those of one call; the reader acknowledges them again.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from threading import Lock

from floodmark.codec.entries import decode_entry, is_batched
from floodmark.log.base import EntryId, Ledger, Marks, Position
from floodmark.model.errors import Corruption, InvalidArgument
from floodmark.model.limits import PAGE_BYTES_MAX, PAGE_ROWS_MAX


class Acknowledgements:
    """The live records of a ledger.  Safe to use from many threads.

    The writer of the ledger takes the marks to store them, and gives them back if that fails.

    >>> from floodmark.testing.ledgers import MemoryLedger
    >>> ledger = MemoryLedger()
    >>> acknowledgements = Acknowledgements(ledger)
    >>> acknowledgements.opened(ledger.append(b"..."), 2)
    >>> acknowledgements.acknowledge([Position(1, 2, 0)])
    >>> acknowledgements.take()
    {1: b'\\x02'}
    >>> acknowledgements.acknowledge([Position(1, 2, 1)])
    >>> acknowledgements.take()
    {1: None}
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._lock = Lock()
        # For each entry its number of records and the bits of the live ones.
        self._live: OrderedDict[EntryId, tuple[int, int]] = OrderedDict()
        self._changed: set[EntryId] = set()

    def recover(self) -> Iterator[tuple[Position, bytes]]:
        """Iterate over the live records of the ledger, in order, and load its entries.

        Iterate to the end before writing: an entry that was not read counts as removed.
        """
        marks = self._ledger.marks()
        start: EntryId = 0
        while page := self._ledger.read(start, entries_max=PAGE_ROWS_MAX, bytes_max=PAGE_BYTES_MAX):
            for entry, content in page:
                records = decode_entry(content)
                bits = _decode_bits(entry, len(records), marks.get(entry))
                with self._lock:
                    self._live[entry] = len(records), bits
                for index, record in enumerate(records):
                    if bits >> index & 1:
                        yield Position(entry, len(records), index), record
            start = page[-1][0] + 1

    def opened(self, entry: EntryId, records: int) -> None:
        """Add an entry that was appended, with all its records live."""
        with self._lock:
            self._live[entry] = records, (1 << records) - 1

    def acknowledge(self, positions: Iterable[Position]) -> None:
        """Clear the bits of records.  Repeating it, also for an entry that is removed, is harmless."""
        with self._lock:
            for entry, size, index in positions:
                held = self._live.get(entry)
                if held is None:
                    continue
                count, bits = held
                if size != count or not 0 <= index < count:
                    raise InvalidArgument(
                        f"record {index} of {size} in entry {entry} is none of its {count} records; "
                        "acknowledge the positions that the writer gave"
                    )
                left = bits & ~(1 << index)
                if left == bits:
                    continue
                self._changed.add(entry)
                if not left:
                    del self._live[entry]
                else:
                    self._live[entry] = count, left

    @property
    def has_changes(self) -> bool:
        return bool(self._changed)

    def take(self) -> Marks:
        """Take the marks that have to be stored."""
        if not self._changed:
            return {}
        with self._lock:
            changed, self._changed = self._changed, set()
            return {entry: self._encode(entry) for entry in sorted(changed)}

    def give_back(self, marks: Marks) -> None:
        """Return marks that could not be stored, for the next `take`."""
        with self._lock:
            self._changed.update(marks)

    @property
    def oldest(self) -> EntryId | None:
        """The oldest entry with a live record."""
        with self._lock:
            return next(iter(self._live), None)

    def count_live(self) -> tuple[int, int]:
        """The number of entries with live records, and of live records."""
        with self._lock:
            return len(self._live), sum(bits.bit_count() for _, bits in self._live.values())

    def _encode(self, entry: EntryId) -> bytes | None:
        count, bits = self._live.get(entry, (0, 0))
        return bits.to_bytes(_bytes_of(count), "little") if bits else None


def holds_batches(ledger: Ledger) -> bool:
    """Whether the ledger has an entry that a release without batching could not read.

    >>> from floodmark.codec.entries import encode_batch
    >>> from floodmark.testing.ledgers import MemoryLedger
    >>> ledger = MemoryLedger()
    >>> ledger.append(b"bare"), ledger.append(encode_batch([b"one"])), holds_batches(ledger)
    (1, 2, True)
    >>> ledger.mark({2: None})
    >>> holds_batches(ledger)
    False
    """
    start: EntryId = 0
    while page := ledger.read(start, entries_max=PAGE_ROWS_MAX, bytes_max=PAGE_BYTES_MAX):
        if any(is_batched(content) for _, content in page):
            return True
        start = page[-1][0] + 1
    return False


def _bytes_of(records: int) -> int:
    return (records + 7) // 8


def _decode_bits(entry: EntryId, records: int, mark: bytes | None) -> int:
    if mark is None:
        return (1 << records) - 1
    bits = int.from_bytes(mark, "little")
    if len(mark) != _bytes_of(records) or not 0 < bits < 1 << records:
        raise Corruption(
            f"the marks {mark.hex()} of ledger entry {entry} do not fit its {records} records; "
            "restore the site from a backup or from a peer"
        )
    return bits
