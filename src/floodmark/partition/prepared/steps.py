"""The steps of a prepared write: prepare it, and commit or abort it.  Each takes part in a round.

Each may be repeated.  A prepare that is there already answers the version that it has, and there is nothing
left to commit or to abort once that was done.  So a caller who does not know whether a step has happened
takes it again.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from floodmark.codec.changelog import encode_log_key
from floodmark.codec.digest import digest_changes
from floodmark.codec.ordered import encode_prefixes
from floodmark.engine import Engine, WriteRow
from floodmark.model.errors import CommitTooLarge, InvalidArgument, Retryable
from floodmark.model.partition import CommitLimits
from floodmark.model.ranges import KeyRange
from floodmark.model.version import Version
from floodmark.partition.commit.commit import CommitTally, CommittingPartition, Mint, RoundStep, Writes
from floodmark.partition.commit.inserting import Insertion
from floodmark.partition.commit.merging import is_state, merge_writes, write_at
from floodmark.partition.commit.storage import Storage
from floodmark.partition.commit.tail import LiveTail, TailEntry
from floodmark.partition.families import LOG
from floodmark.partition.prepared.writes import (
    OpenWrite,
    PreparedWrites,
    is_stored,
    load_values,
    remove_rows,
    require_key_fits,
    store_rows,
)


class PreparingWriter(CommittingPartition, Protocol):
    """What the steps need to know of the partition that they belong to."""

    range: KeyRange
    limits: CommitLimits
    # Whether a split or merge is under way; then nothing is prepared.
    sealing: bool


class Place(NamedTuple):
    """The parts of a node that its steps work on."""

    prepared: PreparedWrites
    storage: Storage
    tail: LiveTail
    site: int

    @property
    def engine(self) -> Engine:
        """The engine of the node."""
        return self.storage.engine


class Prepare(RoundStep):
    """Store an invisible write.  Its version is p.

    If writes of other transactions conflict with it, they are in `blocking`, and nothing is stored.
    """

    def __init__(self, place: Place, writer: PreparingWriter, transaction: str, writes: Writes) -> None:
        super().__init__(writer)
        self.blocking: Sequence[OpenWrite] = ()
        self._place = place
        self._partition = writer
        self._transaction = transaction
        self._prepared = writes
        self._write: OpenWrite | None = None

    def take(self, mint: Mint) -> Sequence[WriteRow]:
        place, writes, transaction = self._place, self._prepared, self._transaction
        standing = place.prepared.find(transaction, self._partition.range)
        if standing is not None:
            self._require_same(standing)
            self._write, self.version = standing, standing.version
            return ()
        self._require_wanted()
        self.blocking = place.prepared.on(writes.keys)
        if self.blocking:
            return ()
        place.prepared.require_room(writes.size)
        require_key_fits(transaction, writes.keys, place.engine.limits.key_bytes_max)
        version = mint()
        states = writes.only(list(map(is_state, writes.values)))
        if states is not None:
            # A write that cannot be merged fails now: after the decision nothing is refused.
            merge_writes(place.engine, states, self._partition.limits, write_at(version, place.site))
        rows = store_rows(transaction, version, writes.keys, writes.values)
        self._write = OpenWrite(transaction, version, writes.keys, writes.size, 0)
        place.prepared.add(self._write)
        self.version = version
        return rows

    def _require_wanted(self) -> None:
        storage = self._place.storage
        if storage.dropped:
            storage.require_not_dropped(self._prepared.keys)
        if storage.is_unusual:
            storage.require_writers()
        if self._partition.sealing:
            raise Retryable(
                f"partition {self._partition.id} is about to be split or merged, and prepares nothing "
                "meanwhile; try again",
                partition=self._partition.id,
            )

    def _require_same(self, standing: OpenWrite) -> None:
        writes = self._prepared
        if standing.keys != writes.keys or load_values(self._place.engine, standing) != writes.values:
            raise InvalidArgument(
                f"transaction {self._transaction!r:.80} has prepared other writes in partition "
                f"{self._partition.id}; all that it writes there is prepared at once",
                transaction=self._transaction,
                partition=self._partition.id,
            )

    def is_written(self) -> bool:
        assert self._write is not None
        return is_stored(self._place.engine, self._write)


class CommitPrepared(RoundStep):
    """Make a prepared write a commit at a version, which the clock has passed."""

    is_commit = True

    def __init__(self, place: Place, writer: PreparingWriter, transaction: str, version: Version) -> None:
        super().__init__(writer)
        self._place = place
        self._partition = writer
        self._transaction = transaction
        self._at = version
        self._write: OpenWrite | None = None
        self._insertion: Insertion | None = None

    def take(self, mint: Mint) -> Sequence[WriteRow]:
        place, partition = self._place, self._partition
        write = place.prepared.find(self._transaction, partition.range)
        values = None if write is None else load_values(place.engine, write)
        if write is None or values is None:
            return ()
        self._require_free(write)
        if place.storage.is_unusual:
            place.storage.require_writers()
        insertion = Insertion(
            place.engine, partition.log_id, self._at, place.site, place.storage.log_row_bytes_max
        )
        for key, prefix, value in zip(write.keys, encode_prefixes(write.keys), values, strict=True):
            insertion.add(key, prefix, value)
        self._write, self._insertion, self.version = write, insertion, self._at
        return [*remove_rows(write), *insertion.rows(write.keys)]

    def _require_free(self, write: OpenWrite) -> None:
        if self._at < write.version:
            raise InvalidArgument(
                f"transaction {self._transaction!r:.80} holds version {write.version} in partition "
                f"{self._partition.id} and cannot commit at {self._at}; commit at the highest version that a "
                "partition answered",
                transaction=self._transaction,
                version=write.version,
            )
        if self._place.engine.get(LOG, encode_log_key(self._partition.log_id, self._at)) is not None:
            raise InvalidArgument(
                f"version {self._at} is that of another commit in partition {self._partition.id}; commit at "
                "a version that a partition answered to this transaction",
                version=self._at,
            )

    def is_written(self) -> bool:
        key = encode_log_key(self._partition.log_id, self._at)
        return self._place.engine.get(LOG, key) is not None

    def finish(self) -> None:
        write, insertion, place = self._write, self._insertion, self._place
        assert write is not None
        assert insertion is not None
        if place.tail.is_open:
            corrected: dict[Version, dict[bytes, bytes | None]] = {}
            for version, key, _, after in insertion.corrections:
                corrected.setdefault(version, {})[key] = after
            entry = TailEntry(self._at, self._partition.id, write.keys, insertion.logged)
            place.tail.insert(entry, corrected)
        place.prepared.remove(write)

    def count(self, uncounted_through: Version) -> bool:
        write, insertion, site = self._write, self._insertion, self._place.site
        assert write is not None
        assert insertion is not None
        tallies = self._partition.tallies
        is_counted = True
        for correction in insertion.corrections:
            if correction.version <= uncounted_through:
                is_counted = False
                continue
            for tally in correction.tallies(site):
                is_counted &= _correct(tallies, tally)
        for namespace, changes, digest in digest_changes(self._at, site, write.keys, insertion.logged):
            add_tally(tallies, (self._at, namespace, changes, digest, True))
        self._partition.heat.add_writes(len(write.keys), write.bytes)
        return is_counted


class AbortPrepared(RoundStep):
    """Forget a prepared write."""

    def __init__(self, place: Place, writer: PreparingWriter, transaction: str) -> None:
        super().__init__(writer)
        self._place = place
        self._partition = writer
        self._transaction = transaction
        self._write: OpenWrite | None = None

    def take(self, mint: Mint) -> Sequence[WriteRow]:
        place = self._place
        write = place.prepared.find(self._transaction, self._partition.range)
        if write is None or not is_stored(place.engine, write):
            return ()
        self._write, self.version = write, write.version
        return remove_rows(write)

    def is_written(self) -> bool:
        assert self._write is not None
        return not is_stored(self._place.engine, self._write)

    def finish(self) -> None:
        assert self._write is not None
        self._place.prepared.remove(self._write)


def require_preparable(partition: PreparingWriter, writes: Writes) -> None:
    """Refuse what can never be committed here: too much, or elsewhere."""
    limits = partition.limits
    if not writes.keys:
        raise InvalidArgument("nothing is to be prepared; name at least one key")
    if not (partition.range.contains(writes.keys[0]) and partition.range.contains(writes.keys[-1])):
        raise InvalidArgument(
            f"partition {partition.id} does not hold all keys that are to be prepared; prepare at each "
            "partition what is its own",
            partition=partition.id,
        )
    if writes.size > limits.bytes_max // 2 or len(writes.keys) > limits.changes_max // 2:
        raise CommitTooLarge(
            f"{len(writes.keys):,} pairs of a transaction make {writes.size:,} bytes; it writes at most "
            f"{limits.bytes_max // 2:,} bytes and {limits.changes_max // 2:,} pairs to a partition. Write "
            "them in several transactions",
            size=writes.size,
        )


def add_tally(tallies: deque[CommitTally], tally: CommitTally) -> None:
    """Add a tally behind those of its version and of earlier ones."""
    if not tallies or tallies[-1][0] <= tally[0]:
        tallies.append(tally)
    else:
        tallies.insert(_place_of(tallies, tally[0] + 1), tally)


def _place_of(tallies: deque[CommitTally], version: Version) -> int:
    """Where the tallies of a version begin, or would."""
    return bisect_left(tallies, version, key=lambda tally: tally[0])


def _correct(tallies: deque[CommitTally], tally: CommitTally) -> bool:
    """Add to the tally of the same commit and kind, which may have been put together with later ones.

    False if there is none.
    """
    version, namespace, changes, digest, own = tally
    for place in range(_place_of(tallies, version), len(tallies)):
        at, found, counted, standing, kind = tallies[place]
        if (found, kind) == (namespace, own):
            tallies[place] = at, found, counted + changes, standing ^ digest, kind
            return True
    return False
