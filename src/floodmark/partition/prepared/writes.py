"""Prepared writes: stored durably, but invisible until their transaction or atomic batch is decided.

A transaction prepares its writes and gets a version p.  It then commits at a version c at or above p, the
highest of all its partitions, or it aborts.  So does a batch, whose row has more (`outcomes.py`).  Each
prepared key is one metadata row:

    "prepared/" | length 1 | transaction, UTF-8 | qualified key  ->  p: 8 bytes, big-endian | value

The row names no partition.  Memory has the keys of a write, and its values if they are small; a commit reads
larger ones again.

**Nothing appears at or below an announced version.**  An open write is a slot at p: `floor` is the version
before the lowest p, and no resolved version of its partition passes it.
- A round of the committer prepares.  It sets its own floor before it mints p, and removes that floor after
  the write is in this table; readers of the floors read this one last.  So one of the two holds p back.
- A commit has a version c >= p.  The write leaves this table when its records are synced and in the live
  tail, so c is not resolved before it can be read.
- The table is loaded when a node opens, before it returns any version, and after each recovery, before the
  floor of the failed round is removed.  A prepare that was lost never returned p, so no transaction commits
  at it.

**A snapshot never changes.**  A read at S moves the clock past S, waits for the running round and then reads
this table.  A later write gets p > S.  A write on its keys with p <= S may still commit at or below S, so the
read settles it first (`settling.py`).

**On each key commit order is stamp order.**  Below c all stamps are lower: a record's stamp never exceeds its
version.  Records above c were written while this write was open, so they are not resolved: no feed and no
snapshot has them.  The engine batch of the commit rewrites them as if the commit had come first
(`inserting.py`), also those of other batches on the key.  At most one transaction has a key prepared at a
time, and a conditional write, such as `compare_and_set`, settles this write first.

**Sums are exact.**  Heartbeats count up to a resolved version, so neither c nor a change above it was
counted; the commit corrects the tallies that wait for the next heartbeat, or reports that one is missing.

**Garbage.**  Safe points stay at or below the resolved version, so nothing at or above p is collected or
trimmed, and a dropped namespace is kept until its prepared writes have ended.  Splits and merges settle
prepared writes first, since they seal logs (`reshaping.py`).
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from threading import Event
from typing import Final, TypeVar

from floodmark.codec.ordered import VERSION_BYTES, encode_prefix
from floodmark.engine import Engine, WriteRow
from floodmark.model.batch import is_batch
from floodmark.model.errors import Corruption, InvalidArgument, InvalidKey, Retryable
from floodmark.model.limits import (
    KIB,
    PREPARED_BYTES_MAX,
    PREPARED_WRITES_MAX,
)
from floodmark.model.partition import BatchSettler, CommitLimits, Decision, Fate, Settler
from floodmark.model.ranges import KeyRange
from floodmark.model.version import Version
from floodmark.partition.commit.commit import BYTES_PER_BYTE, Writes
from floodmark.partition.commit.merging import is_state
from floodmark.partition.families import META
from floodmark.partition.layout import read_metadata
from floodmark.partition.prepared.lines import KeyLines
from floodmark.partition.prepared.outcomes import load_outcome

_version: Final = attrgetter("version")
Indexed = TypeVar("Indexed", str, bytes)

PREPARED: Final = b"prepared/"

TRANSACTION_ID_BYTES_MAX: Final = 255
# The values of a larger write are not kept in memory.
KEPT_BYTES_MAX: Final = 8 * KIB


class OpenWrite:
    """A prepared write.  `ended` is set when it has ended, or when the node no longer serves it."""

    __slots__ = (
        "bytes",
        "ended",
        "held_bytes",
        "is_ending",
        "keys",
        "members",
        "newer_bytes",
        "newer_changes",
        "siblings",
        "transaction",
        "values",
        "version",
    )

    def __init__(
        self,
        transaction: str,
        version: Version,
        keys: Sequence[bytes],
        size: int,
        newer_bytes: int | None,
        *,
        siblings: Sequence[bytes] = (),
        members: Sequence[bytes] = (),
        values: Sequence[bytes] | None = None,
    ) -> None:
        # The id of a transaction; or of an atomic batch, and the first keys of its partitions.
        self.transaction = transaction
        self.siblings = tuple(siblings)
        # All keys of the batch; empty after a restart, since they are not stored.
        self.members = frozenset(members)
        self.version = version
        # Qualified, in order.
        self.keys = keys
        self.bytes = size
        # In the order of keys; None if they must be read from the engine.
        self.values = values if size <= KEPT_BYTES_MAX else None
        self.held_bytes = size + sum(map(len, siblings)) + sum(map(len, members))
        # The size of the commits above it that its own commit may have to rewrite; None if unknown.
        self.newer_bytes = newer_bytes
        self.newer_changes = 0
        # Whether a step of the running round ends it.
        self.is_ending = False
        self.ended = Event()

    def overlaps(self, keys: KeyRange) -> bool:
        """Whether one of its keys lies in a range."""
        place = bisect_left(self.keys, keys.start)
        return place < len(self.keys) and keys.contains(self.keys[place])

    def leave_room(self, size: int, changes: int) -> None:
        """Count a commit that its own commit may have to rewrite."""
        assert self.newer_bytes is not None
        self.newer_bytes += size
        self.newer_changes += changes


def _undecided(_: str, __: Sequence[bytes] = ()) -> Fate:
    return Fate(Decision.UNDECIDED)


class _Index:
    """Prepared writes in order of p, by id and by key.

    Readers take no lock: a list is copied before they go through it, and tuples are replaced.
    """

    __slots__ = ("by_id", "by_key", "bytes", "ordered")

    def __init__(self) -> None:
        self.ordered: list[OpenWrite] = []
        self.by_id: dict[str, tuple[OpenWrite, ...]] = {}
        self.by_key: dict[bytes, tuple[OpenWrite, ...]] = {}
        self.bytes = 0

    def add(self, write: OpenWrite) -> None:
        """Add a write whose p is the highest."""
        _add(self.by_id, write.transaction, write)
        for key in write.keys:
            _add(self.by_key, key, write)
        self.bytes += write.held_bytes
        self.ordered.append(write)

    def remove(self, write: OpenWrite) -> None:
        """Remove a write, if it is there."""
        place = bisect_left(self.ordered, write.version, key=_version)
        if self.ordered[place : place + 1] != [write]:
            return
        _remove(self.by_id, write.transaction, write)
        for key in write.keys:
            _remove(self.by_key, key, write)
        self.bytes -= write.held_bytes
        del self.ordered[place]

    @property
    def floor(self) -> Version | None:
        """The version before the lowest p."""
        return self.ordered[0].version - 1 if self.ordered else None


class PreparedWrites:
    """The open prepared writes of a node.  Only the thread that holds the turn changes them.

    A key has any number of writes of batches, and at most one of a transaction.  Readers take no lock; a
    write that they find may have ended meanwhile.
    """

    def __init__(self, engine: Engine) -> None:
        # The version before the lowest p; None if nothing is prepared.
        self.floor: Version | None = None
        # Return the decision on a transaction, and on a batch.
        self.settler: Settler = _undecided
        self.batch_settler: BatchSettler = _undecided
        # Transactions that wait for keys which another one has prepared.
        self.lines = KeyLines()
        # Whether this node serves a qualified key; other nodes may share the engine.
        self.serves: Callable[[bytes], bool] = lambda _: True
        self._engine = engine
        self._index = _Index()
        self.load()

    def load(self) -> None:
        """Load the table from the engine.  Writes that are still there keep their objects."""
        rows: dict[tuple[Version, str], list[tuple[bytes, int]]] = {}
        for transaction, key, version, size in filter(self._is_mine, read_prepared(self._engine)):
            rows.setdefault((version, transaction), []).append((key, size))
        known = {write.version: write for write in self._index.ordered}
        # Built apart: a reader that found only some of the writes would announce too high a version.
        index = _Index()
        for (version, transaction), parts in sorted(rows.items()):
            write = known.pop(version, None) or self._load_write(version, transaction, parts)
            write.is_ending = False
            index.add(write)
        self._index = index
        self.floor = index.floor
        for write in known.values():
            write.ended.set()

    def _load_write(
        self, version: Version, transaction: str, parts: Sequence[tuple[bytes, int]]
    ) -> OpenWrite:
        keys, size = [key for key, _ in parts], sum(size for _, size in parts)
        siblings: Sequence[bytes] = ()
        if is_batch(transaction):
            outcome = load_outcome(self._engine, transaction, keys[0])
            if outcome is None:
                raise Corruption(
                    f"the atomic batch {transaction} is prepared, and the row is missing that names its "
                    "partitions. Restore the site from a backup"
                )
            siblings = outcome.siblings
        return OpenWrite(transaction, version, keys, size, None, siblings=siblings)

    def _is_mine(self, row: tuple[str, bytes, Version, int]) -> bool:
        return self.serves(row[1])

    def add(self, write: OpenWrite) -> None:
        """Add a write whose rows are about to be stored.  Its p is the highest."""
        self._index.add(write)
        self.floor = self._index.floor

    def remove(self, write: OpenWrite) -> None:
        """Remove a write that is durably committed or aborted."""
        self._index.remove(write)
        self.floor = self._index.floor
        write.ended.set()

    def require_room(self, write: OpenWrite) -> None:
        """Raise `Retryable` while too many writes, or too many bytes, are prepared."""
        count, size = len(self._index.ordered), self._index.bytes
        if count >= PREPARED_WRITES_MAX or size + write.held_bytes > PREPARED_BYTES_MAX:
            raise Retryable(
                f"{count:,} prepared writes of {size:,} bytes are not decided; at "
                f"most {PREPARED_WRITES_MAX:,} of {PREPARED_BYTES_MAX:,} bytes may. Try again when some have "
                "ended"
            )

    def all(self) -> list[OpenWrite]:
        """All writes, the oldest first."""
        return self._index.ordered[:]

    def versions(self) -> list[Version]:
        """The p of each write, in order."""
        return list(map(_version, self.all()))

    def floor_of(self, keys: KeyRange) -> Version | None:
        """The version before the lowest p of a write on keys of a range; None if there is none."""
        return next((write.version - 1 for write in self.all() if write.overlaps(keys)), None)

    def find(self, transaction: str, keys: KeyRange) -> OpenWrite | None:
        """The write of a transaction or batch in a range; each partition holds at most one."""
        found = self._index.by_id.get(transaction, ())
        return next((write for write in found if write.overlaps(keys)), None)

    def find_first(self, batch: str, key: bytes) -> OpenWrite | None:
        """The write of a batch with this first key; a merged partition may have several of one batch."""
        return next((write for write in self._index.by_id.get(batch, ()) if write.keys[0] == key), None)

    def on(self, keys: Iterable[bytes]) -> list[OpenWrite]:
        """The writes on some qualified keys."""
        by_key = self._index.by_key
        found = {write.version: write for key in keys if key in by_key for write in by_key.get(key, ())}
        return list(found.values())

    def within(self, keys: KeyRange, until: Version | None = None) -> list[OpenWrite]:
        """The writes on keys of a range whose p is at or below a version, the oldest first."""
        writes = self.all()
        if until is not None:
            del writes[bisect_right(writes, until, key=_version) :]
        return [write for write in writes if write.overlaps(keys)]

    def ask(self, write: OpenWrite) -> Fate:
        """The decision on a write; may call other nodes, so the caller must not hold the turn or a lock."""
        if write.siblings:
            return self.batch_settler(write.transaction, write.siblings)
        return self.settler(write.transaction)

    def on_crowded(self, commit: Writes, limits: CommitLimits) -> list[OpenWrite]:
        """Count a commit, which the commit of a prepared write below it may have to rewrite.

        Returns the writes for which that would exceed one engine batch, or for which a merged state would
        exceed one value; then nothing is counted.
        """
        writes, changes = self.on(commit.keys), len(commit.keys)
        largest = max((len(value) for value in commit.values if is_state(value)), default=0) if writes else 0
        # All of them may be merged into one record.
        merged = largest and largest + BYTES_PER_BYTE * sum(write.bytes for write in writes)
        crowded = [
            write
            for write in writes
            if write.newer_bytes is None
            or write.newer_bytes + commit.size > limits.bytes_max // 2
            # Its keys, at most half of `changes_max`, take four rows each: this leaves room for a third.
            or write.newer_changes + changes > limits.changes_max // 3
            or merged > self._engine.limits.value_bytes_max
        ]
        if not crowded:
            for write in writes:
                write.leave_room(commit.size, changes)
        return crowded

    def release(self) -> None:
        """Wake all threads that wait for a write, since the node stops."""
        for write in self.all():
            write.ended.set()


def _add(index: dict[Indexed, tuple[OpenWrite, ...]], at: Indexed, write: OpenWrite) -> None:
    index[at] = (*index.get(at, ()), write)


def _remove(index: dict[Indexed, tuple[OpenWrite, ...]], at: Indexed, write: OpenWrite) -> None:
    left = tuple(each for each in index[at] if each is not write)
    if left:
        index[at] = left
    else:
        del index[at]


def conflict(write: OpenWrite) -> Retryable:
    """The error for a caller that needs a prepared write to be settled."""
    kind = "atomic batch" if write.siblings else "transaction"
    return Retryable(
        f"{kind} {write.transaction!r:.80} has prepared a write at version {write.version} and is not "
        "decided; try again when it has ended",
        transaction=write.transaction,
        version=write.version,
    )


# Rows


def store_rows(
    transaction: str, version: Version, keys: Sequence[bytes], values: Sequence[bytes]
) -> list[WriteRow]:
    """The rows of a prepared write."""
    prefix, held = _encode_prefix(transaction), version.to_bytes(VERSION_BYTES, "big")
    return [(META, prefix + key, held + value) for key, value in zip(keys, values, strict=True)]


def remove_rows(write: OpenWrite) -> list[WriteRow]:
    """The rows that remove a prepared write."""
    prefix = _encode_prefix(write.transaction)
    return [(META, prefix + key, None) for key in write.keys]


def load_values(engine: Engine, write: OpenWrite) -> Sequence[bytes] | None:
    """The values of a prepared write, in the order of its keys; None if it has ended."""
    if write.values is not None:
        return write.values
    prefix = _encode_prefix(write.transaction)
    stored = engine.get_many(META, [prefix + key for key in write.keys])
    values = [value[VERSION_BYTES:] for value in stored if value is not None]
    return values if len(values) == len(write.keys) else None


def require_key_fits(transaction: str, keys: Sequence[bytes], key_bytes_max: int) -> None:
    """Refuse qualified keys whose rows would have longer keys than the engine takes."""
    size = len(_encode_prefix(transaction)) + max(map(len, keys))
    if size > key_bytes_max:
        raise InvalidKey(
            f"a key of transaction {transaction!r:.80} would have {size:,} bytes while it is prepared; the "
            f"database of this site takes {key_bytes_max:,}. Shorten the key, or the id of the transaction",
            size=size,
        )


def is_stored(engine: Engine, write: OpenWrite) -> bool:
    """Whether a prepared write is stored; its rows are written and removed together."""
    return engine.get(META, _encode_prefix(write.transaction) + write.keys[0]) is not None


def _encode_prefix(transaction: str) -> bytes:
    encoded = transaction.encode()
    if not 0 < len(encoded) <= TRANSACTION_ID_BYTES_MAX:
        raise InvalidArgument(
            f"the id of a transaction has 1 to {TRANSACTION_ID_BYTES_MAX} bytes, and not {len(encoded):,}"
        )
    return PREPARED + bytes([len(encoded)]) + encoded


def read_prepared(engine: Engine) -> Iterator[tuple[str, bytes, Version, int]]:
    """Transaction, qualified key, p and size of every prepared key, in order of transactions and keys."""
    for row_key, stored in read_metadata(engine, PREPARED):
        yield _decode_row(row_key, stored)


def prepared_prefixes(engine: Engine, namespace: bytes) -> set[bytes]:
    """The encoded keys of a namespace that have prepared writes."""
    return {encode_prefix(key) for _, key, _, _ in read_prepared(engine) if key.startswith(namespace)}


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
