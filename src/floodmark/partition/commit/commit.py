"""A commit on its way through a round, and the rows that it becomes."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, compress, repeat
from operator import add
from typing import Final, NamedTuple, Protocol, TypeAlias

from floodmark.codec.changelog import encode_commit, encode_log_key, encode_single, pack_log_key
from floodmark.codec.digest import digest_change, digest_changes
from floodmark.codec.ordered import NAMESPACE_BYTES, encode_prefixes, encode_version
from floodmark.codec.records import Copies
from floodmark.codec.stamps import digest_copies
from floodmark.codec.values import HAS_EXPIRY
from floodmark.columns.column import Column
from floodmark.columns.packed import pack
from floodmark.engine import Guard, WriteRow
from floodmark.model.errors import FloodmarkError
from floodmark.model.partition import ReadSet
from floodmark.model.version import Version
from floodmark.partition.commit.expiry_index import index_row, index_rows, may_expire
from floodmark.partition.commit.turn import Waiter
from floodmark.partition.families import DATA, LOG
from floodmark.partition.heat import Heat

# A commit's part of the sums: version, namespace, number of changes, their digest, and whether they were
# first written at this site.
CommitTally: TypeAlias = tuple[Version, bytes, int, int, bool]

# A change is a record, a part of the log and perhaps a row by expiry; its key grows when encoded.
ROWS_PER_CHANGE: Final = 3
BYTES_PER_BYTE: Final = 4


class CommittingPartition(Protocol):
    """The partition of a commit, as far as the commit needs it."""

    id: int
    log_id: int
    retired: bool
    tallies: deque[CommitTally]
    heat: Heat


class Writes:
    """The rows of a commit: qualified keys in order, their encoded prefixes, and the stored values.

    `own` is False for changes that come from another site and carry their origin.  Where records are merged,
    `logged` holds the written states and `values` the merged records.  `loaded` rows are not changes and do
    not enter the change log.  `copies` holds the same rows in columns, if all are plain copies.  The
    commit is written only under its `guards`.
    """

    __slots__ = ("copies", "guards", "keys", "loaded", "logged", "own", "prefixes", "size", "values")

    def __init__(
        self,
        keys: Sequence[bytes],
        prefixes: Sequence[bytes],
        values: Sequence[bytes],
        size: int,
        *,
        own: bool = True,
        loaded: bool = False,
        logged: Sequence[bytes] | None = None,
        copies: Copies | None = None,
    ) -> None:
        self.guards: Sequence[Guard] = ()
        self.own = own
        self.loaded = loaded
        self.logged = logged
        self.copies = copies
        self.keys = keys
        self.prefixes = prefixes
        self.values = values
        self.size = size

    @property
    def changes(self) -> Sequence[bytes]:
        """The values that the change log holds and the sums count."""
        return self.values if self.logged is None else self.logged

    def only(self, wanted: Sequence[bool]) -> "Writes | None":
        """The writes at the places where `wanted` is true; None if there are none."""
        if all(wanted):
            return self if wanted else None
        keys, values = list(compress(self.keys, wanted)), list(compress(self.values, wanted))
        if not keys:
            return None
        size = sum(map(len, keys)) + sum(map(len, values))
        prefixes = list(compress(self.prefixes, wanted))
        return Writes(keys, prefixes, values, size, own=self.own, loaded=self.loaded)


def arrange(
    keys: Sequence[bytes], values: Sequence[bytes], *, own: bool = True, loaded: bool = False
) -> Writes:
    """The rows of a commit, sorted by key, which is the order in which readers get the changes."""
    if isinstance(keys, Column) and keys.is_ascending:
        size = len(pack(keys).data) + len(pack(values).data)
        return Writes(keys, encode_prefixes(keys), values, size, own=own, loaded=loaded)
    ordered = sorted(keys)
    if ordered != keys:
        by_key = dict(zip(keys, values, strict=True))
        values = [by_key[key] for key in ordered]
    size = sum(map(len, ordered)) + sum(map(len, values))
    return Writes(ordered, encode_prefixes(ordered), values, size, own=own, loaded=loaded)


class Mint:
    """Mints the version of a commit at the first call, so that a refused commit needs none."""

    __slots__ = ("_now", "_version")

    def __init__(self, now: Callable[[], Version]) -> None:
        self._now = now
        self._version: Version = 0

    def __call__(self) -> Version:
        if not self._version:
            self._version = self._now()
        return self._version

    def another(self) -> Version:
        """A further version, for a step that writes a commit in each of several partitions."""
        self._version = self._now()
        return self._version


# Decides inside the commit, when all earlier commits can be read; None writes nothing.
Decide: TypeAlias = Callable[[Mint], Writes | None]


class ValidatesReads(Protocol):
    """The reads that a commit depends on."""

    reads: ReadSet

    def require_unchanged(self, now: Version) -> None:
        """Raise Conflict if any has changed.  `now` is a fresh version; the caller holds the turn."""


class RemembersOutcome(Protocol):
    """The outcome of a commit that has an id, stored with the commit."""

    def earlier(self, now: Version) -> Version:
        """The version at which it is committed already, or 0; raises TransactionEnded if it is refused."""

    def row(self, version: Version) -> WriteRow:
        """The row that records its commit."""


class Commit(Waiter):
    """One commit on its way through a round.  Without a writer it only takes the turn, or is a step."""

    # Whether it is written even if the disk is nearly full, because it lets space be freed.
    frees = False
    version: Version = 0
    error: FloodmarkError | None = None
    tallies: Sequence[CommitTally] = ()

    def __init__(
        self,
        writer: CommittingPartition | None,
        writes: Writes | None,
        *,
        durable: bool,
        decide: Decide | None = None,
        validation: ValidatesReads | None = None,
        named: RemembersOutcome | None = None,
    ) -> None:
        self.validation = validation
        self.named = named
        self.writer = writer
        self.writes = writes
        self.durable = durable
        self.decide = decide


class RoundStep(Commit):
    """An operation other than a plain commit that shares the sync of a round, and asks for one.

    It gets a version when it has something to write.  A step that writes no records has no writer.
    """

    # Whether it makes changes.
    is_commit = False
    # Its rows are written only under these.
    guards: Sequence[Guard] = ()

    @property
    def touches(self) -> Sequence[bytes] | None:
        """The keys and ids of which it reads or changes rows, asked before and after `take`; None: any.

        Earlier commits of the round that touch none of these need not be in the engine yet.
        """
        return None

    def __init__(self, writer: CommittingPartition | None) -> None:
        super().__init__(writer, None, durable=True, decide=lambda _: None)

    def take(self, mint: Mint) -> Sequence[WriteRow]:
        """The rows to write, decided when all earlier commits can be read."""
        raise NotImplementedError

    def is_written(self) -> bool:
        """Whether the engine holds it, after a failure."""
        raise NotImplementedError

    def undo(self) -> None:
        """Make memory agree with the recovered engine."""

    def finish(self) -> None:
        """Publish the step, which is synced.  Called before the round's floor is removed."""

    def count(self, uncounted_through: Version) -> bool:
        """Correct the sums, after all other commits; False if a tally that it needs is missing."""
        return True


class EncodedWrites(NamedTuple):
    """The data and change-log rows of writes, to be iterated once, and their tallies."""

    rows: Iterable[WriteRow]
    tallies: Sequence[CommitTally]


def encode_writes(
    writer: CommittingPartition, writes: Writes, version: Version, site_id: int, log_row_bytes_max: int
) -> EncodedWrites:
    """Encode the writes of a commit to one partition at a version."""
    suffix = encode_version(version)
    keys, changes = writes.keys, writes.changes
    if len(keys) == 1 and writes.own:
        key, change = keys[0], changes[0]
        row = DATA, writes.prefixes[0] + suffix, writes.values[0]
        log_row = LOG, pack_log_key(writer.log_id, version, 0), encode_single(key, change)
        expires = row[2][-1] & HAS_EXPIRY
        rows = (row, log_row, index_row(row[1], row[2])) if expires else (row, log_row)
        return EncodedWrites(rows, (tally_one(version, site_id, key, change),))
    if writes.loaded:
        return EncodedWrites(chain(_data_rows(writes, suffix), _index_rows(writes, suffix)), ())
    if writes.copies is not None:
        copies = writes.copies
        log_rows = _log_rows(writer, version, copies.encode_rows(log_row_bytes_max))
        tally = version, keys[0][:NAMESPACE_BYTES], len(keys), copies.digest(), False
        return EncodedWrites(chain(_data_rows(writes, suffix), log_rows), (tally,))
    tallies = [
        (version, namespace, count, digest, own)
        for namespace, count, digest, own in _digests(writes, version, site_id)
    ]
    is_one = len(keys) == 1
    packed = (
        [encode_single(keys[0], changes[0])] if is_one else encode_commit(keys, changes, log_row_bytes_max)
    )
    log_rows = _log_rows(writer, version, packed)
    return EncodedWrites(chain(_data_rows(writes, suffix), log_rows, _index_rows(writes, suffix)), tallies)


def _digests(writes: Writes, version: Version, site_id: int) -> Iterable[tuple[bytes, int, int, bool]]:
    if not writes.own:
        return digest_copies(writes.keys, writes.changes, site_id)
    digests = digest_changes(version, site_id, writes.keys, writes.changes)
    return ((namespace, count, digest, True) for namespace, count, digest in digests)


def _data_rows(writes: Writes, suffix: bytes) -> Iterator[WriteRow]:
    engine_keys = map(add, writes.prefixes, repeat(suffix))
    return zip(repeat(DATA, len(writes.prefixes)), engine_keys, writes.values, strict=True)


def _index_rows(writes: Writes, suffix: bytes) -> Sequence[WriteRow]:
    if writes.copies is not None or not may_expire(writes.values):
        return ()
    return index_rows(map(add, writes.prefixes, repeat(suffix)), writes.values)


def _log_rows(writer: CommittingPartition, version: Version, rows: Sequence[bytes]) -> list[WriteRow]:
    return [(LOG, encode_log_key(writer.log_id, version, chunk), row) for chunk, row in enumerate(rows)]


def tally_one(version: Version, site_id: int, key: bytes, value: bytes) -> CommitTally:
    """The tally of a commit of one qualified key."""
    namespace, user_key = key[:NAMESPACE_BYTES], key[NAMESPACE_BYTES:]
    return version, namespace, 1, digest_change(version, site_id, user_key, value), True
