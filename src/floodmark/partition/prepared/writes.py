"""Prepared writes: stored durably where nobody sees them, until their transaction is decided.

A transaction prepares what it writes, and gets a version p.  When it is decided it commits at a version c at
or above p, the highest of all its partitions, or it aborts.  Each prepared key is one metadata row:

    "prepared/" | length 1 | transaction, UTF-8 | qualified key  ->  p: 8 bytes, big-endian | value

No partition stands in it.  What is kept in memory of such a write is which keys it has; its values are read
again when it commits.

**Nothing appears below what was announced.**  An open write is a slot at p: `floor` is the version before the
lowest p, and no resolved version passes it.
- Prepare runs in a round of the committer.  The round notes its floor before it mints p, and the write is
  entered here before that floor goes; whoever looks at the floors looks here last.  So at each moment one of
  the two holds p back, and what was announced before the round lies below its floor.
- A commit lies at c >= p.  The write leaves this table after its records are synced and in the live tail, so
  c is not resolved before it is there to be read.
- What is here is loaded when a node opens, before anybody can ask for a version, and after each recovery
  before the floor of the failed round goes: the engine's truth wins, and it has p or the commit.  A prepare
  that was lost never answered p, and nobody commits at it.

**A snapshot never changes.**  A read at S moves the clock past S, waits for the round at work and then looks
here.  A write that it does not find will get p > S.  One that it finds with p <= S on its keys it settles
first, for that may still commit at or below S (`settling.py`).

**On each key commit order is stamp order.**  Below c all stamps are lower: a record's stamp never exceeds its
version.  Records above c were written while this write was open, so they lie above what is resolved: no feed
has them, and no snapshot, which would have settled this write.  They become in the same engine batch what
they would be had the commit come first (`inserting.py`).  Two transactions never have one key here at once,
and whoever decides by what a key holds, as `compare_and_set` does, settles this write before.

**Sums are exact.**  Heartbeats count through a resolved version, so neither c nor what changes above it was
counted; both are put right in the tallies that wait.  Whoever finds that a count is missing says so.

**Garbage.**  Safe points stay at or below what is resolved, so nothing at or above p is collected or trimmed,
and a dropped namespace stays until what was prepared in it before the drop has ended.  Splits and merges
seal logs, and sealed logs are never rewritten: they settle what is prepared first (`Node._sealing`).
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from threading import Event
from typing import Final

from floodmark.codec.ordered import VERSION_BYTES
from floodmark.engine import Engine, WriteRow
from floodmark.model.errors import Corruption, InvalidArgument, Retryable
from floodmark.model.limits import MIB, PAGE_BYTES_MAX, PAGE_ROWS_MAX
from floodmark.model.partition import Decision, Fate, PreparedWrite, Settler
from floodmark.model.ranges import KeyRange, after, prefix_end
from floodmark.model.version import Version
from floodmark.partition.families import META
from floodmark.partition.prepared.lines import KeyLines

PREPARED: Final = b"prepared/"

# What a node holds at one time, of all transactions that are not decided.
PREPARED_WRITES_MAX: Final = 10_000
PREPARED_BYTES_MAX: Final = 256 * MIB
TRANSACTION_ID_BYTES_MAX: Final = 255


class OpenWrite:
    """A prepared write that has not ended.  `ended` is set when it has, or when nobody serves it any more."""

    __slots__ = ("bytes", "ended", "keys", "newer_bytes", "transaction", "version")

    def __init__(
        self, transaction: str, version: Version, keys: Sequence[bytes], size: int, newer_bytes: int | None
    ) -> None:
        self.transaction = transaction
        self.version = version
        # Qualified, in order.
        self.keys = keys
        self.bytes = size
        # What was committed above it and may have to be written anew; None if that is not known.
        self.newer_bytes = newer_bytes
        self.ended = Event()

    def overlaps(self, keys: KeyRange) -> bool:
        """Whether one of its keys lies in a range."""
        place = bisect_left(self.keys, keys.start)
        return place < len(self.keys) and keys.contains(self.keys[place])

    def describe(self) -> PreparedWrite:
        """The write as others see it."""
        return PreparedWrite(self.transaction, self.version, len(self.keys), self.bytes)


def _undecided(_: str) -> Fate:
    return Fate(Decision.UNDECIDED)


class PreparedWrites:
    """The open prepared writes of a node.  Only the thread that has the turn changes them.

    Readers take no lock: what they go through is replaced as a whole.
    """

    def __init__(self, engine: Engine) -> None:
        # The version before the lowest p, and None if nothing is prepared: all that most callers look at.
        self.floor: Version | None = None
        # Who knows how transactions end.
        self.settler: Settler = _undecided
        # Those that wait for keys which others have prepared.
        self.lines = KeyLines()
        self._engine = engine
        self._writes: Mapping[Version, OpenWrite] = {}
        self._by_key: dict[bytes, OpenWrite] = {}
        self._bytes = 0
        self.load()

    def load(self) -> None:
        """Make the table what the engine says.  Those that are still there stay the same."""
        rows: dict[tuple[Version, str], list[tuple[bytes, int]]] = {}
        for transaction, key, version, size in _read_all(self._engine):
            rows.setdefault((version, transaction), []).append((key, size))
        known = self._writes
        writes: dict[Version, OpenWrite] = {}
        for (version, transaction), parts in sorted(rows.items()):
            keys, size = [key for key, _ in parts], sum(size for _, size in parts)
            writes[version] = known.get(version) or OpenWrite(transaction, version, keys, size, None)
        self._by_key = {key: write for write in writes.values() for key in write.keys}
        self._bytes = sum(write.bytes for write in writes.values())
        self._replace(writes)
        for version, write in known.items():
            if version not in writes:
                write.ended.set()

    def add(self, write: OpenWrite) -> None:
        """Enter a write whose rows are about to be stored.  Its p is the highest."""
        self._by_key.update(dict.fromkeys(write.keys, write))
        self._bytes += write.bytes
        self._replace({**self._writes, write.version: write})

    def remove(self, write: OpenWrite) -> None:
        """Take out a write that has been committed or aborted for good."""
        if self._writes.get(write.version) is write:
            for key in write.keys:
                del self._by_key[key]
            self._bytes -= write.bytes
            self._replace({version: other for version, other in self._writes.items() if other is not write})
        write.ended.set()

    def _replace(self, writes: Mapping[Version, OpenWrite]) -> None:
        self._writes = writes
        # In order of versions: the first is the lowest.
        self.floor = next(iter(writes)) - 1 if writes else None

    def require_room(self, size: int) -> None:
        """Refuse a write while too much is prepared."""
        if len(self._writes) >= PREPARED_WRITES_MAX or self._bytes + size > PREPARED_BYTES_MAX:
            raise Retryable(
                f"{len(self._writes):,} prepared writes of {self._bytes:,} bytes wait for transactions; "
                f"at most {PREPARED_WRITES_MAX:,} of {PREPARED_BYTES_MAX:,} bytes may. Try again when some "
                "have ended"
            )

    def all(self) -> list[OpenWrite]:
        """All writes, the oldest first."""
        return list(self._writes.values())

    def versions(self) -> list[Version]:
        """The p of each write, in order."""
        return list(self._writes)

    def find(self, transaction: str, keys: KeyRange) -> OpenWrite | None:
        """What a transaction has prepared in a range; a partition holds one write of it at most."""
        for write in self._writes.values():
            if write.transaction == transaction and write.overlaps(keys):
                return write
        return None

    def on(self, keys: Iterable[bytes]) -> list[OpenWrite]:
        """The writes on some qualified keys."""
        found = (self._by_key.get(key) for key in keys)
        return list({write.version: write for write in found if write is not None}.values())

    def within(self, keys: KeyRange, until: Version | None = None) -> list[OpenWrite]:
        """The writes on keys of a range whose p is at or below a version, the oldest first."""
        return [
            write
            for version, write in self._writes.items()
            if (until is None or version <= until) and write.overlaps(keys)
        ]

    def on_crowded(self, keys: Iterable[bytes], size: int, bytes_max: int) -> list[OpenWrite]:
        """Note that something is committed above the writes on some keys that may have to be written anew.

        When one of those writes commits, all of that is rewritten in one engine batch.  Those for which that
        would be too much are given back, and nothing is noted.
        """
        writes = self.on(keys)
        crowded = [
            write for write in writes if write.newer_bytes is None or write.newer_bytes + size > bytes_max
        ]
        if not crowded:
            for write in writes:
                assert write.newer_bytes is not None
                write.newer_bytes += size
        return crowded

    def release(self) -> None:
        """Wake everyone who waits: nobody serves these writes any more."""
        for write in self._writes.values():
            write.ended.set()


def conflict(write: OpenWrite) -> Retryable:
    """What someone is told who needs a prepared write to be settled, and it is not."""
    return Retryable(
        f"transaction {write.transaction!r:.80} has prepared a write at version {write.version} and is not "
        "decided; try again when it has ended, at the latest after its deadline",
        transaction=write.transaction,
        version=write.version,
    )


# Rows


def store_rows(
    transaction: str, version: Version, keys: Sequence[bytes], values: Sequence[bytes]
) -> list[WriteRow]:
    """The writes that keep a prepared write."""
    prefix, held = _encode_prefix(transaction), version.to_bytes(VERSION_BYTES, "big")
    return [(META, prefix + key, held + value) for key, value in zip(keys, values, strict=True)]


def remove_rows(write: OpenWrite) -> list[WriteRow]:
    """The writes that forget a prepared write."""
    prefix = _encode_prefix(write.transaction)
    return [(META, prefix + key, None) for key in write.keys]


def load_values(engine: Engine, write: OpenWrite) -> list[bytes] | None:
    """The values of a prepared write, in the order of its keys; None if it has ended."""
    prefix = _encode_prefix(write.transaction)
    stored = engine.get_many(META, [prefix + key for key in write.keys])
    values = [value[VERSION_BYTES:] for value in stored if value is not None]
    return values if len(values) == len(write.keys) else None


def is_stored(engine: Engine, write: OpenWrite) -> bool:
    """Whether a prepared write is there: its rows come and go together."""
    return engine.get(META, _encode_prefix(write.transaction) + write.keys[0]) is not None


def _encode_prefix(transaction: str) -> bytes:
    encoded = transaction.encode()
    if not 0 < len(encoded) <= TRANSACTION_ID_BYTES_MAX:
        raise InvalidArgument(
            f"the id of a transaction has 1 to {TRANSACTION_ID_BYTES_MAX} bytes, and not {len(encoded):,}"
        )
    return PREPARED + bytes([len(encoded)]) + encoded


def _read_all(engine: Engine) -> Iterator[tuple[str, bytes, Version, int]]:
    """Transaction, qualified key, p and size of every prepared key, in order of transactions and keys."""
    start, end = PREPARED, prefix_end(PREPARED)
    while page := engine.scan(META, start, end, rows_max=PAGE_ROWS_MAX, bytes_max=PAGE_BYTES_MAX):
        for row_key, stored in page:
            yield _decode_row(row_key, stored)
        start = after(page[-1][0])


def _decode_row(row_key: bytes, stored: bytes) -> tuple[str, bytes, Version, int]:
    place = len(PREPARED) + 1
    end = place + row_key[place - 1] if len(row_key) > place else len(row_key)
    if end >= len(row_key) or len(stored) <= VERSION_BYTES:
        raise Corruption(f"the prepared write {row_key.hex()} is damaged. Restore the site from a backup")
    key = row_key[end:]
    version = int.from_bytes(stored[:VERSION_BYTES], "big")
    try:
        return row_key[place:end].decode(), key, version, len(key) + len(stored) - VERSION_BYTES
    except UnicodeDecodeError as error:
        raise Corruption(
            f"the prepared write {row_key.hex()} is damaged: {error}. Restore the site from a backup"
        ) from error
