"""The steps of a prepared write: prepare it, and commit or abort it.  Each takes part in a round.

Each may be repeated: a prepare that has happened returns its version again, and a commit or abort that has
happened does nothing.  So a caller that does not know whether a step has happened repeats it.

The steps of an atomic batch also set its row (`outcomes.py`), in the same engine write.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from floodmark.codec.appends import any_append, complete, late_append
from floodmark.codec.changelog import encode_log_key
from floodmark.codec.values import mark_batch, unmark_batch
from floodmark.engine import Engine, WriteRow
from floodmark.model.batch import is_batch
from floodmark.model.errors import CommitTooLarge, InvalidArgument, LimitExceeded, Retryable
from floodmark.model.limits import BATCH_PARTITIONS_MAX, NODES_MAX
from floodmark.model.partition import CommitLimits, Decision, Fate, LinkGuard
from floodmark.model.ranges import KeyRange
from floodmark.model.version import Version
from floodmark.partition.commit.batches import BatchCache
from floodmark.partition.commit.commit import (
    CommitTally,
    CommittingPartition,
    Mint,
    RoundStep,
    Writes,
    arrange,
)
from floodmark.partition.commit.inserting import Insertion
from floodmark.partition.commit.merging import (
    apply_at,
    has_origins,
    has_states,
    is_state,
    merge_writes,
    write_at,
)
from floodmark.partition.commit.storage import Storage
from floodmark.partition.commit.tail import LiveTail, TailEntry
from floodmark.partition.families import LOG
from floodmark.partition.prepared.outcomes import (
    REFUSED,
    BatchOutcome,
    is_too_old,
    load_outcome,
    refused,
    store_outcome,
)
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
    """The partition of a step, as far as the steps need it."""

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
    batches: BatchCache

    @property
    def engine(self) -> Engine:
        """The engine of the node."""
        return self.storage.engine


class Prepare(RoundStep):
    """Store an invisible write.  Its version is p; or the commit version of a batch that is committed.

    If writes of other transactions conflict with it, they are in `blocking`, and nothing is stored.  A batch
    conflicts with no other write, unless their states would not fit together.
    """

    def __init__(
        self,
        place: Place,
        writer: PreparingWriter,
        transaction: str,
        writes: Writes,
        siblings: Sequence[bytes],
        members: Sequence[bytes],
        link: LinkGuard | None = None,
    ) -> None:
        super().__init__(writer)
        self._link = link
        self._siblings = siblings
        self._members = members
        self.blocking: Sequence[OpenWrite] = ()
        self._place = place
        self._partition = writer
        self._transaction = transaction
        self._prepared = writes
        self._write: OpenWrite | None = None
        # The writes as requested, if some of their keys are to contain the version.
        self._appends = writes if any_append(writes.values) else None

    @property
    def touches(self) -> Sequence[bytes] | None:
        if self._link is not None or self._appends is not None:
            return None
        # Records are read only to merge a state into them; the first key also names the outcome.
        keys, values = self._prepared.keys, self._prepared.values
        return (self._transaction.encode(), *(keys if has_states(values) else keys[:1]))

    def take(self, mint: Mint) -> Sequence[WriteRow]:
        place, transaction = self._place, self._transaction
        if self._is_known():
            return ()
        if self._appends is not None:
            # It commits at this version: the coordinator has prepared all other writes before.
            self._prepared = self._complete(mint())
        writes = self._prepared
        self._require_wanted()
        if self._link is not None:
            self.guards = place.storage.entrance.admit(self._link)
        others = place.prepared.on(writes.keys)
        if not self._siblings:
            self.blocking = [write for write in others if not write.siblings]
        if self.blocking:
            return ()
        require_key_fits(transaction, writes.keys, place.engine.limits.key_bytes_max)
        version = mint()
        if self._siblings and is_too_old(transaction, version):
            raise refused(transaction)
        write = OpenWrite(
            transaction,
            version,
            writes.keys,
            writes.size,
            0,
            siblings=self._siblings,
            members=self._members,
            values=writes.values,
        )
        place.prepared.require_room(write)
        if self._is_crowding(version, others):
            return ()
        # Each of the others may commit above this one, or below.
        for other in others:
            write.leave_room(other.bytes, len(other.keys))
        rows = store_rows(transaction, version, writes.keys, writes.values)
        if self._siblings:
            prepared = BatchOutcome(Decision.UNDECIDED, version, write.siblings)
            rows.append(store_outcome(transaction, writes.keys[0], prepared))
            place.storage.require_fitting(rows)
        place.prepared.add(write)
        self._write, self.version = write, version
        return rows

    def _is_known(self) -> bool:
        """Whether it is prepared or committed already, at its version.  Raises if a batch is refused."""
        standing = self._place.prepared.find(self._transaction, self._partition.range)
        if self._siblings:
            outcome = self._load_outcome()
            if outcome is not None and outcome.decision is Decision.COMMIT:
                self.version = outcome.version
                return True
            # Without a row of this part, the write found is another part: two of its partitions were merged.
            is_prepared = outcome is not None and outcome.decision is Decision.UNDECIDED
            if (standing is not None) != is_prepared or (outcome is not None and not is_prepared):
                raise refused(self._transaction)
        if standing is None:
            return False
        self._require_same(standing)
        self._write, self.version = standing, standing.version
        return True

    def _complete(self, version: Version) -> Writes:
        """The writes, with the keys that they have at a version."""
        writes = self._appends
        if writes is None:
            return self._prepared
        rows = complete(dict(zip(writes.keys, writes.values, strict=True)), version)
        if not all(map(self._partition.range.contains, rows)):
            raise late_append(version)
        return arrange([*rows], [*rows.values()])

    def _load_outcome(self) -> BatchOutcome | None:
        return load_outcome(self._place.engine, self._transaction, self._prepared.keys[0])

    def _is_crowding(self, version: Version, others: Sequence[OpenWrite]) -> bool:
        """Whether other writes could not be committed below this one: then they are blocking.

        Raises for states that cannot be merged: after the decision nothing is refused.
        """
        place, writes, limits = self._place, self._prepared, self._partition.limits
        merge = (write_at if writes.own else apply_at)(version, place.site)
        states = writes.only(list(map(is_state, writes.values)))
        merged = None if states is None else merge_writes(place.engine, states, limits, merge)
        if others and not (writes.own and states is None):
            self.blocking = place.prepared.on_crowded(merged or writes, limits)
        return bool(self.blocking)

    def _require_wanted(self) -> None:
        storage = self._place.storage
        if storage.dropped:
            storage.require_not_dropped(self._prepared.keys)
        if storage.is_unusual and self._prepared.own:
            storage.require_writers()
        if self._partition.sealing:
            raise Retryable(
                f"partition {self._partition.id} is about to be split or merged, and prepares nothing "
                "meanwhile; try again",
                partition=self._partition.id,
            )

    def _require_same(self, standing: OpenWrite) -> None:
        writes = self._complete(standing.version)
        is_same = standing.keys == writes.keys and standing.siblings == tuple(self._siblings)
        stored = load_values(self._place.engine, standing) or ()
        # A node of an earlier release did not mark the values of a transaction.
        if not is_same or [*map(unmark_batch, stored)] != [*map(unmark_batch, writes.values)]:
            raise InvalidArgument(
                f"transaction {self._transaction!r:.80} has prepared other writes in partition "
                f"{self._partition.id}; all that it writes there is prepared at once",
                transaction=self._transaction,
                partition=self._partition.id,
            )

    def undo(self) -> None:
        if self._write is not None and not self.version:
            self._place.prepared.remove(self._write)

    def is_written(self) -> bool:
        if self._write is not None:
            return is_stored(self._place.engine, self._write)
        # A batch that was committed before, perhaps in the round that failed.
        outcome = self._load_outcome()
        return outcome is not None and outcome.decision is Decision.COMMIT


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

    @property
    def touches(self) -> Sequence[bytes] | None:
        if self._insertion is not None and self._insertion.corrections:
            # It has rewritten rows of other commits.
            return None
        write = self._write or self._place.prepared.find(self._transaction, self._partition.range)
        return (self._transaction.encode(), *(write.keys if write is not None else ()))

    def take(self, mint: Mint) -> Sequence[WriteRow]:
        place, partition = self._place, self._partition
        write = place.prepared.find(self._transaction, partition.range)
        if write is None or write.is_ending or (values := load_values(place.engine, write)) is None:
            return ()
        self._require_free(write)
        if place.storage.is_unusual and not has_origins(values):
            place.storage.require_writers()
        insertion = Insertion(
            place.engine, partition.log_id, self._at, place.site, place.storage.log_row_bytes_max
        )
        insertion.add(write.keys, [*map(mark_batch, values)] if write.siblings else values)
        self._write, self._insertion, self.version = write, insertion, self._at
        rows = [*remove_rows(write), *insertion.rows()]
        if write.members:
            place.batches.remember(self._at, write.members)
        if write.siblings:
            committed = BatchOutcome(Decision.COMMIT, self._at, write.siblings)
            rows.append(store_outcome(write.transaction, write.keys[0], committed))
        write.is_ending = True
        return rows

    def _require_free(self, write: OpenWrite) -> None:
        if self._at < write.version:
            raise InvalidArgument(
                f"transaction {self._transaction!r:.80} holds version {write.version} in partition "
                f"{self._partition.id} and cannot commit at {self._at}; commit at the highest version that a "
                "partition answered",
                transaction=self._transaction,
                version=write.version,
            )
        distance = self._at - write.version
        if not distance or (write.siblings and distance % NODES_MAX):
            # The version of this write, or of the same batch at another node: no other commit has it.
            return
        if self._place.engine.get(LOG, encode_log_key(self._partition.log_id, self._at)) is not None:
            raise InvalidArgument(
                f"version {self._at} is that of another commit in partition {self._partition.id}; commit at "
                "a version that a partition answered to this transaction",
                version=self._at,
            )

    def is_written(self) -> bool:
        assert self._write is not None
        return not is_stored(self._place.engine, self._write)

    def finish(self) -> None:
        write, insertion, place = self._write, self._insertion, self._place
        assert write is not None
        assert insertion is not None
        if place.tail.is_open and insertion.keys:
            corrected: dict[Version, dict[bytes, bytes | None]] = {}
            for version, key, _, after in insertion.corrections:
                corrected.setdefault(version, {})[key] = after
            entry = TailEntry(self._at, self._partition.id, insertion.keys, insertion.logged)
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
        for tally in insertion.tallies():
            add_tally(tallies, tally)
        self._partition.heat.add_writes(len(write.keys), write.bytes)
        return is_counted


class AbortPrepared(RoundStep):
    """Abort a prepared write.  A batch is refused from then on; with its `key`, also if it is not prepared.

    With `asks`, the step leaves a prepared batch as it is, and refuses one that is not prepared.  `fate` is
    the outcome.
    """

    def __init__(
        self,
        place: Place,
        writer: PreparingWriter,
        transaction: str,
        key: bytes | None = None,
        *,
        asks: bool = False,
    ) -> None:
        super().__init__(writer)
        self.fate = Fate(Decision.ABORT)
        self._place = place
        self._partition = writer
        self._transaction = transaction
        self._key = key
        self._asks = asks
        self._write: OpenWrite | None = None
        self._rows: Sequence[WriteRow] = ()

    @property
    def touches(self) -> Sequence[bytes]:
        # A commit of one key, which may have the same id, touches only its key.
        return (self._transaction.encode(), *(() if self._key is None else (self._key,)))

    def take(self, mint: Mint) -> Sequence[WriteRow]:
        place, transaction, key = self._place, self._transaction, self._key
        write = (
            place.prepared.find(transaction, self._partition.range)
            if key is None
            else place.prepared.find_first(transaction, key)
        )
        if write is None or write.is_ending:
            self._rows = self._refuse()
            self.version = mint() if self._rows else 0
        elif self._asks:
            self.fate = Fate(Decision.UNDECIDED, write.version)
        else:
            self._write, self.version, self._rows = write, write.version, remove_rows(write)
            if write.siblings:
                self._rows = [*self._rows, store_outcome(transaction, write.keys[0], REFUSED)]
            write.is_ending = True
        return self._rows

    def _refuse(self) -> Sequence[WriteRow]:
        """Refuse a batch that is not prepared, unless it has ended."""
        if self._key is None or not is_batch(self._transaction):
            return ()
        outcome = load_outcome(self._place.engine, self._transaction, self._key)
        if outcome is None:
            return [store_outcome(self._transaction, self._key, REFUSED)]
        self.fate = Fate(outcome.decision, outcome.version)
        return ()

    def is_written(self) -> bool:
        family, key, value = self._rows[-1]
        return self._place.engine.get(family, key) == value

    def finish(self) -> None:
        if self._write is not None:
            self._place.prepared.remove(self._write)


def require_preparable(
    partition: PreparingWriter,
    transaction: str,
    writes: Writes,
    siblings: Sequence[bytes],
    members: Sequence[bytes],
) -> None:
    """Raise if the writes can never be committed here: too large, or outside of the partition."""
    limits = partition.limits
    if not writes.keys:
        raise InvalidArgument("nothing is to be prepared; name at least one key")
    if is_batch(transaction) != bool(siblings) or (siblings and writes.keys[0] not in siblings):
        raise InvalidArgument(
            f"{transaction!r:.80} came with {len(siblings):,} siblings; an atomic batch, and only a batch, "
            "names the first key of each of its partitions",
            transaction=transaction,
        )
    if len(siblings) > BATCH_PARTITIONS_MAX:
        raise LimitExceeded(
            f"the atomic batch {transaction} writes to {len(siblings):,} partitions; over several nodes it "
            f"may write to {BATCH_PARTITIONS_MAX:,}. Write it in smaller batches",
            transaction=transaction,
        )
    if not (partition.range.contains(writes.keys[0]) and partition.range.contains(writes.keys[-1])):
        raise InvalidArgument(
            f"partition {partition.id} does not hold all keys that are to be prepared; prepare at each "
            "partition what is its own",
            partition=partition.id,
        )
    if siblings and any_append(writes.values):
        raise InvalidArgument(
            "an atomic batch over several nodes cannot append, since its parts do not know its version; "
            "append in a transaction",
            transaction=transaction,
        )
    size = writes.size + sum(map(len, siblings)) + sum(map(len, members))
    if size > limits.bytes_max // 2 or len(writes.keys) > limits.changes_max // 2:
        raise CommitTooLarge(
            f"{len(writes.keys):,} pairs of a transaction or batch make {size:,} bytes; it writes at most "
            f"{limits.bytes_max // 2:,} bytes and {limits.changes_max // 2:,} pairs to a partition. Write "
            "them in several portions",
            size=size,
        )


def add_tally(tallies: deque[CommitTally], tally: CommitTally) -> None:
    """Insert a tally after those of its version and of lower ones."""
    if not tallies or tallies[-1][0] <= tally[0]:
        tallies.append(tally)
    else:
        tallies.insert(_place_of(tallies, tally[0] + 1), tally)


def _place_of(tallies: deque[CommitTally], version: Version) -> int:
    """The index at which tallies of a version begin, or would begin."""
    return bisect_left(tallies, version, key=lambda tally: tally[0])


def _correct(tallies: deque[CommitTally], tally: CommitTally) -> bool:
    """Add to the tally of the same commit and kind, which may have been folded with later ones.

    False if there is none.
    """
    version, namespace, changes, digest, own = tally
    for place in range(_place_of(tallies, version), len(tallies)):
        at, found, counted, standing, kind = tallies[place]
        if (found, kind) == (namespace, own):
            tallies[place] = at, found, counted + changes, standing ^ digest, kind
            return True
    return False
