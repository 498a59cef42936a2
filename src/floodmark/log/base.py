"""The port to a ledger: an append-only list of entries that are removed once nobody needs them.

A ledger keeps bytes and knows nothing of records; `codec/entries.py` says what is in an entry, and
`log/writer.py` decides how many records go into one.

The contract (`tests/contracts/ledger.py` runs it over every ledger):

- `append` returns when the entry is durable.  Ids only grow, over restarts too, and may leave gaps.
- If `append` fails, the entry is not there, unless the failure is `OutcomeUnknown`: then it may be found
  after a restart, but not once a later append has succeeded, which takes it back in the same step.
- `mark` notes which records of an entry are still live.  It is visible at once, in order, and durable with
  the next append: a crash may bring records back that were done with, never lose one that was not.
- Marks that are given to `append` are stored with the entry, in one step; if it fails, they are not.
- Entries stand in *segments*, which are closed by size or age and go when their last entry has gone.

A ledger has one writer at a time; it may be read meanwhile.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol, TypeAlias

from floodmark.model.errors import InvalidArgument
from floodmark.model.limits import MIB

EntryId: TypeAlias = int

# For each entry, a bit for each of its records, the first one lowest; 1 is live.  None: the entry is gone.
Marks: TypeAlias = Mapping[EntryId, bytes | None]

NO_MARKS: Final[Marks] = MappingProxyType({})


class Position(NamedTuple):
    """Where a record stands: its entry, how many records that has, and which of them it is, from 0."""

    entry: EntryId
    batch_size: int
    batch_index: int


class Segment(NamedTuple):
    """A run of entries: the id of the first ever, and what is still there of them."""

    id: int
    first: EntryId
    entries: int
    bytes: int
    opened_ms: int


@dataclass(frozen=True, kw_only=True)
class LedgerSettings:
    """When a segment is closed and the next one begun."""

    segment_bytes_max: int = 64 * MIB
    segment_age_ms_max: int = 4 * 3_600_000

    def __post_init__(self) -> None:
        if self.segment_bytes_max < 1 or self.segment_age_ms_max < 1:
            raise InvalidArgument("a segment needs at least one byte and one millisecond")


DEFAULT_SETTINGS: Final = LedgerSettings()


class Ledger(Protocol):
    """An append-only list of entries."""

    def append(self, entry: bytes, marks: Marks = NO_MARKS) -> EntryId:
        """Store an entry and the marks of earlier ones, and return when they are durable."""
        ...

    def mark(self, marks: Marks) -> None:
        """Store which records of some entries are live, and remove the entries that have none."""
        ...

    def marks(self) -> Mapping[EntryId, bytes]:
        """The marks of the entries that are there and have some."""
        ...

    def read(self, start: EntryId = 0, *, entries_max: int, bytes_max: int) -> list[tuple[EntryId, bytes]]:
        """A page of the entries at or after `start`, which ends soon after `bytes_max` bytes.

        Only an empty page means that no entry is left; go on behind the last one until then.
        """
        ...

    def trim(self, before: EntryId) -> None:
        """Remove all entries below one, whatever is in them."""
        ...

    def segments(self) -> list[Segment]:
        """The segments in order.  The last one takes the next entry, unless it is full or too old."""
        ...

    def delete(self) -> None:
        """Remove the ledger with all that is in it.  It cannot be used afterwards."""
        ...
