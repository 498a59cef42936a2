"""The port to an ordered storage engine.  Small on purpose.

Keys contain the versions, so no engine needs snapshots or transactions of its own: an ordered map with
atomic batches is enough, and a distributed database can implement the same port.

The contract (`floodmark.testing.EngineContract` runs it over every engine):

- Rows live in named families; keys are compared byte by byte.
- `write` applies all rows or none, and is visible when it returns; it is durable after the next
  `sync`.  Writes become durable in order: a crash loses only a suffix of them.
- With guards, a write happens only if each guarded key still has the expected value.  The check and the
  write are atomic: no other write comes in between.
- `write` and `sync` raise `StorageFailed` if it is certain that nothing happened, and `OutcomeUnknown` if
  something may have happened.  Then `recover` settles it: when it returns, each earlier write has happened
  for good or never will.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol, TypeAlias, runtime_checkable

from floodmark.model.limits import KIB, MIB, PAGE_BYTES_MAX, PAGE_ROWS_MAX
from floodmark.model.ranges import after

# The free space that an engine on this machine's disk needs to recover; with less, it only serves reads.
RECOVERY_ROOM_BYTES: Final = 64 * MIB

Row: TypeAlias = tuple[bytes, bytes]

# Family, key, and the new value; None deletes the key.
WriteRow: TypeAlias = tuple[str, bytes, bytes | None]


class Guard(NamedTuple):
    """Apply a write only if `key` still has the value `expected`; None means "is absent"."""

    family: str
    key: bytes
    expected: bytes | None


def guards_hold(get: Callable[[str, bytes], bytes | None], guards: Iterable[Guard]) -> bool:
    """Whether every guarded key has its expected value; `get` is called under the lock of the write."""
    return all(get(each.family, each.key) == each.expected for each in guards)


@dataclass(frozen=True, kw_only=True)
class EngineLimits:
    """The limits of an engine, from which those of a commit derive."""

    value_bytes_max: int
    batch_bytes_max: int
    batch_rows_max: int
    key_bytes_max: int = 64 * KIB
    # The rows that one `delete_range` may remove; None for any number.
    range_rows_max: int | None = None
    # Whether a read goes over a network, so that it must not run on an event loop.
    reads_wait: bool = False


class Engine(Protocol):
    """An ordered, durable map of bytes to bytes.  Safe to use from many threads."""

    limits: EngineLimits

    def get(self, family: str, key: bytes) -> bytes | None:
        """The value of a key."""
        ...

    def get_many(self, family: str, keys: Sequence[bytes]) -> list[bytes | None]:
        """The values of several keys, in their order."""
        ...

    def ceiling(self, family: str, key: bytes, prefix: bytes = b"") -> Row | None:
        """The first row at or after a key, if it starts with `prefix`; `key` itself must start with it.

        The prefix lets an engine use its filters.
        """
        ...

    def ceilings(
        self, family: str, prefixes: Sequence[bytes], starts: Sequence[bytes] | None = None
    ) -> list[Row | None]:
        """`ceiling` of many keys, for less: for each prefix, its first row at or after the start.

        Each start begins with its prefix; without `starts`, the prefixes are the starts.
        """
        ...

    def scan(
        self,
        family: str,
        start: bytes,
        end: bytes | None,
        *,
        rows_max: int,
        bytes_max: int,
        reverse: bool = False,
    ) -> list[Row]:
        """A page of the rows in `[start, end)`, in order of keys or against it.

        It holds at most `rows_max` rows and ends soon after `bytes_max` bytes.  Only an empty page
        means that no row is left; until then, continue after the last row.
        """
        ...

    def write(self, rows: Iterable[WriteRow], guards: Sequence[Guard] = ()) -> bool:
        """Apply all rows as one.  False if a guard did not hold, and then nothing was written."""
        ...

    def delete_range(self, family: str, start: bytes, end: bytes, guards: Sequence[Guard] = ()) -> bool:
        """Remove all rows in `[start, end)`, as one write.  False if a guard did not hold."""
        ...

    def sync(self) -> None:
        """Return when all earlier writes are on stable storage."""
        ...

    def recover(self) -> None:
        """Settle writes of unknown outcome and make the engine usable again."""
        ...

    def sizes(self) -> Mapping[str, int]:
        """The bytes that the engine uses for each family, as far as it knows."""
        ...

    def close(self) -> None:
        """Sync and release all resources.  Closing twice is harmless."""
        ...


class EngineMeasures(NamedTuple):
    """Measurements of an engine: numbers by name, of the whole and of each family."""

    whole: Mapping[str, int]
    families: Mapping[str, Mapping[str, int]]


@runtime_checkable
class Measured(Protocol):
    """An optional capability: an engine in this process that measures its files and memory."""

    def measures(self) -> EngineMeasures:
        """The current numbers."""
        ...


@runtime_checkable
class DurableWrites(Protocol):
    """An optional capability: a durable write that costs less than `write` and `sync`."""

    def write_durably(self, rows: Iterable[WriteRow], guards: Sequence[Guard] = ()) -> bool:
        """`write`, which returns when its rows and all earlier ones are on stable storage."""
        ...


@runtime_checkable
class BulkLoads(Protocol):
    """An optional capability: rows written to a file of their own, not to the log and memory of writes."""

    def load(self, family: str, keys: Sequence[bytes], values: Sequence[bytes]) -> None:
        """Store rows in ascending order of keys, all or none; they are on stable storage on return.

        Raises as `write` does.  Other threads may write meanwhile.
        """
        ...


class Write(Protocol):
    """A call that writes rows as one, if guards hold."""

    def __call__(self, rows: Iterable[WriteRow], guards: Sequence[Guard] = ()) -> bool: ...


def durable_writes(engine: Engine) -> Write:
    """The call that writes durably to an engine: its own, or `write` followed by `sync`."""
    if isinstance(engine, DurableWrites):
        return engine.write_durably

    def write_and_sync(rows: Iterable[WriteRow], guards: Sequence[Guard] = ()) -> bool:
        if not engine.write(rows, guards):
            return False
        engine.sync()
        return True

    return write_and_sync


def scan_pages(
    engine: Engine, family: str, start: bytes, end: bytes | None, *, rows_max: int = PAGE_ROWS_MAX
) -> Iterator[list[Row]]:
    """The rows in `[start, end)` in order, page by page; each page is read when it is asked for."""
    while page := engine.scan(family, start, end, rows_max=rows_max, bytes_max=PAGE_BYTES_MAX):
        yield page
        start = after(page[-1][0])


def scan_rows(engine: Engine, family: str, start: bytes, end: bytes | None) -> Iterator[Row]:
    """The rows in `[start, end)` in order, read page by page."""
    for page in scan_pages(engine, family, start, end):
        yield from page
