"""The port to a ledger: an append-only list of entries, which are removed when they are not needed any more.

A ledger stores bytes and does not interpret them: `codec/entries.py` defines the content of an entry, and
`log/writer.py` decides how many records go into one.

The contract (`tests/contracts/ledger.py` runs it over every ledger):

- `append` returns when the entry is durable.  Ids only grow, over restarts too, and may leave gaps.
- If `append` fails, the entry is not there, unless the failure is `OutcomeUnknown`: then it may be found
  after a restart, but not once a later append has succeeded, which removes it in the same write.
- `mark` stores which records of an entry are live.  It is visible at once, in order, and durable with the
  next append: a crash may bring back records that were removed, but never lose a live one.
- Marks that are passed to `append` are stored with the entry atomically.
- Entries are grouped into *segments*, which are closed by size or age and removed with their last entry.

A ledger has one writer at a time; it may be read meanwhile.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

import msgspec

from floodmark.model.errors import Corruption, InvalidArgument
from floodmark.model.limits import MIB

EntryId: TypeAlias = int

# For each entry a bit per record, the first one lowest; 1 is live.  None removes the entry.
Marks: TypeAlias = Mapping[EntryId, bytes | None]

NO_MARKS: Final[Marks] = MappingProxyType({})


Record = TypeVar("Record")


class RecordFormat(Generic[Record]):
    """The records of a log as messagepack arrays; none begins like a batched entry."""

    def __init__(self, kind: Any, log: str) -> None:
        self.encode: Callable[[Record], bytes] = msgspec.msgpack.Encoder().encode
        self._decoder: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(kind)
        self._log = log

    def decode(self, stored: bytes) -> Record:
        """Decode a stored record; raises Corruption if it is damaged."""
        try:
            return self._decoder.decode(stored)
        except msgspec.MsgspecError as error:
            raise Corruption(
                f"a record of {self._log} cannot be read ({error}); restore the site from a backup"
            ) from error


class Position(NamedTuple):
    """The position of a record: its entry, the number of records in that, and its index from 0."""

    entry: EntryId
    batch_size: int
    batch_index: int


class Segment(NamedTuple):
    """A run of entries: the id of the first that it had, and the number and size of those that are left."""

    id: int
    first: EntryId
    entries: int
    bytes: int
    opened_ms: int


@dataclass(frozen=True, kw_only=True)
class LedgerSettings:
    """When a segment is closed."""

    segment_bytes_max: int = 64 * MIB
    segment_age_ms_max: int = 4 * 3_600_000

    def __post_init__(self) -> None:
        if self.segment_bytes_max < 1 or self.segment_age_ms_max < 1:
            raise InvalidArgument("a segment needs at least one byte and one millisecond")


DEFAULT_SETTINGS: Final = LedgerSettings()


class Ledger(Protocol):
    """An append-only list of entries."""

    def append(self, entry: bytes, marks: Marks = NO_MARKS) -> EntryId:
        """Store an entry and the marks of earlier ones; returns its id once they are durable."""

    def mark(self, marks: Marks) -> None:
        """Store marks, and remove the entries that have no live record."""

    def marks(self) -> Mapping[EntryId, bytes]:
        """The marks of the entries of which some records were removed."""

    def read(self, start: EntryId = 0, *, entries_max: int, bytes_max: int) -> list[tuple[EntryId, bytes]]:
        """A page of the entries at or after `start`, which ends soon after `bytes_max` bytes.

        Only an empty page means that no entry is left; otherwise continue after its last entry.
        """

    def segments(self) -> list[Segment]:
        """The segments in order.  The next entry goes into the last one, unless that is full or too old."""

    def delete(self) -> None:
        """Remove the ledger and its entries.  It cannot be used afterwards."""
