"""Group commit: the first thread writes for all threads that arrive while the disk is busy.

A thread that finds the turn free leads a round: it mints versions, writes the data and the change-log rows of
every waiting commit in one engine batch, syncs once, and passes the turn on.  There is no committer thread,
because a hand-over costs more than a commit.

**The slot.**  Before a round mints its first version it records the clock's latest version, the floor.  All
that the round writes lies above the floor, and the resolved version stays at it until the round is durable.
`resolved_version` mints a version *first* and reads the floor *second*: a round that it misses mints above.

**The catalog** may be changed by another node that shares the engine.  The engine then refuses the whole
round and loads the catalog, and the round is run again; no caller sees an error.

**Failure.**  If storage fails, the round recovers the engine and reads which of its commits are there.  Only
if that fails too are outcomes unknown; the floor then stays (`storage.py`).
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain as chain_rows
from typing import Final, TypeAlias

from floodmark.clock import HybridClock
from floodmark.codec.changelog import encode_log_key, encode_single, pack_log_key
from floodmark.codec.ordered import encode_version
from floodmark.codec.values import HAS_EXPIRY
from floodmark.engine import Guard, WriteRow
from floodmark.model.errors import (
    CatalogChanged,
    ClockSkew,
    Conflict,
    FloodmarkError,
    NamespaceNotFound,
    OutcomeUnknown,
    PartitionMoved,
    StaleLink,
)
from floodmark.model.ranges import KeyRange
from floodmark.model.version import Version, compose, physical_ms
from floodmark.partition.commit.batches import BatchCache
from floodmark.partition.commit.commit import (
    BYTES_PER_BYTE,
    ROWS_PER_CHANGE,
    Commit,
    CommitTally,
    CommittingPartition,
    Mint,
    RoundStep,
    ValidatesReads,
    Writes,
    encode_writes,
    tally_one,
)
from floodmark.partition.commit.expiry_index import index_row
from floodmark.partition.commit.storage import Storage, refused, unknown
from floodmark.partition.commit.tail import LiveTail
from floodmark.partition.commit.turn import chain, wake
from floodmark.partition.conflicts import WriteConflicts
from floodmark.partition.counting import CommitCounting
from floodmark.partition.families import DATA, LOG
from floodmark.partition.floors import Announced, Floors
from floodmark.partition.following import Followers
from floodmark.partition.learning import KnownSwaps
from floodmark.partition.prepared.steps import Place
from floodmark.partition.prepared.writes import PreparedWrites

# The partition, the key with its prefix in the engine, and the value of a commit at a version.
Complete: TypeAlias = Callable[[Version], tuple[CommittingPartition, bytes, bytes, bytes]]

# How often a round is run again because another node changes the catalog.
CATALOG_CHANGES_MAX: Final = 10
# A round does not record the keys of a commit that has more.
SHOWN_KEYS_MAX: Final = 32
# The age up to which readers read at the floor of a round.
FLOOR_AGE_MAX: Final = compose(100, 0)


class EngineBatch:
    """Rows on their way to the engine, in batches within its limits."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._engine = storage.engine
        self._rows: list[Iterable[WriteRow]] = []
        self._count = self._bytes = 0
        # The keys of the rows; None if many or unknown.  A commit of other keys need not see the rows.
        self._keys: set[bytes] | None = set()

    def add(self, rows: Iterable[WriteRow], count: int, size: int, keys: Sequence[bytes] | None) -> None:
        """Add rows that belong together, at most `count` of them with `size` bytes."""
        if keys is None or len(keys) > SHOWN_KEYS_MAX:
            self._keys = None
        elif self._keys is not None:
            self._keys.update(keys)
        self._count += count
        self._bytes += size
        limits = self._engine.limits
        if self._count > limits.batch_rows_max or self._bytes > limits.batch_bytes_max:
            self.write(durable=False)
            self._count, self._bytes = count, size
        self._rows.append(rows)

    def write(self, *, durable: bool) -> None:
        """Write what was added; if `durable`, return when it and all earlier rows are on disk."""
        if self._rows:
            write = self._storage.write_durably if durable else self._engine.write
            write(chain_rows.from_iterable(self._rows))
            self._rows = []
        elif durable:
            self._engine.sync()
        self._count = self._bytes = 0
        self._keys = set()

    def show(self, keys: Sequence[bytes], ranges: Sequence[KeyRange] = ()) -> None:
        """Write what was added, if the next commit may have to see it."""
        if ranges or self._keys is None or not self._keys.isdisjoint(keys):
            self.write(durable=False)


class Committer:
    """Commits the writes of all partitions on one engine, in rounds."""

    def __init__(self, storage: Storage, clock: HybridClock, site_id: int, *, round_bytes_max: int) -> None:
        self._storage = storage
        self._engine = storage.engine
        self._turn = storage.turn
        self._clock = clock
        self._site_id = site_id
        self._round_bytes_max = round_bytes_max
        # Loaded before anything is announced.
        self.prepared = PreparedWrites(storage.engine)
        self.conflicts = WriteConflicts(storage.engine)
        self.tail = LiveTail(storage)
        self.floors = Floors(self.prepared)
        self.counting = CommitCounting(self.prepared, clock)
        self.place = Place(self.prepared, storage, self.tail, site_id, BatchCache())
        self._announced = Announced()
        self.swaps = KnownSwaps(storage, clock)
        self.followers = Followers(self.tail, self.resolved_version, self.sync)
        storage.on_recovery.append(self._begin_anew)

    def commit(self, commit: Commit) -> Version:
        """Run a commit; its version, or 0 if it decided to write nothing."""
        token, turn = None, self._turn
        try:
            token = turn.try_take() or turn.wait(commit)
            if token is not None:
                self.lead(commit)
        finally:
            if token is not None:
                turn.give_back(token)
                if turn.line:
                    turn.lead_next()
        if commit.error is not None:
            raise commit.error
        return commit.version

    def commit_one(
        self,
        writer: CommittingPartition,
        key: bytes,
        prefix: bytes,
        value: bytes,
        *,
        durable: bool,
        validation: ValidatesReads | None = None,
        complete: Complete | None = None,
    ) -> Version:
        """`commit` of one key, in the same steps but without lists, while no thread waits.

        `complete` builds a key that contains its version, once that is minted; 0 if it must take a round.
        """
        turn, clock, storage = self._turn, self._clock, self._storage
        tally: CommitTally = (0, b"", 0, 0, True)
        token = None
        try:
            token = turn.try_take()
            if token is None or turn.line or storage.is_unusual or self.floors.round is not None:
                if complete is not None:
                    return 0
                commit = _commit_of_one(writer, key, prefix, value, validation, durable=durable)
                if token is None:
                    return self.commit(commit)
                self.lead(commit)
                if commit.error is not None:
                    raise commit.error
                return commit.version
            if validation is not None:
                validation.require_unchanged(clock.now())
            try:
                if writer.retired:
                    raise moved(writer)
                if storage.dropped:
                    storage.require_not_dropped((key,))
                self.floors.round = clock.latest
                version = clock.now()
                if complete is not None:
                    writer, key, prefix, value = complete(version)
                tally = tally_one(version, self._site_id, key, value)
                log_key, row = pack_log_key(writer.log_id, version, 0), encode_single(key, value)
                engine_key = prefix + encode_version(version)
                write = storage.write_durably if durable else self._engine.write
                if value[-1] & HAS_EXPIRY:
                    write(((DATA, engine_key, value), (LOG, log_key, row), index_row(engine_key, value)))
                else:
                    write(((DATA, engine_key, value), (LOG, log_key, row)))
                if self.tail.is_open:
                    self.tail.add(version, writer.id, (key,), (value,))
                self._settle_floors(synced=durable)
                self._count_one(writer, tally, len(key) + len(value))
                return version
            except FloodmarkError as failure:
                if complete is not None and isinstance(failure, CatalogChanged | Conflict):
                    self.floors.round = None  # Nothing was written.
                    return 0
                commit = _commit_of_one(writer, key, prefix, value, validation, durable=durable)
                commit.version, commit.tallies = tally[0], (tally,)
                return self._settle_alone(commit, failure)
            except BaseException:
                storage.stop(failed=False)
                self.counting.lose()
                raise
        finally:
            if token is not None:
                turn.give_back(token)
                if turn.line:
                    turn.lead_next()

    def _count_one(self, writer: CommittingPartition, tally: CommitTally, size: int) -> None:
        """Count a round of one commit of one key."""
        writer.tallies.append(tally)
        counting, heat = self.counting, writer.heat
        counting.fold_many(writer)
        counting.commits += 1
        counting.rounds += 1
        heat.writes += 1
        heat.bytes_written += size

    def resolved_version(self) -> Version:
        """The resolved version: all changes at or below it are durable and published, none will be added."""
        # It never goes back, also when a round has begun below it meanwhile.
        return self._announced.advance(self.resolve())

    def resolve(self, keys: KeyRange | None = None) -> Version:
        """A resolved version, of a range of keys or of all.

        It may lie below earlier ones, as when a round has begun meanwhile.
        """
        try:
            return self.floors.below(self.now(), keys)
        except ClockSkew:
            # Nothing is minted while the clock is refused, so all that was minted can be announced.
            return self.floors.below(self._clock.latest, keys)

    def announced_version(self) -> Version:
        """The last resolved version that was returned.  Mints no version, so it never fails."""
        return self._announced.version

    def passed_version(self) -> Version:
        """A version at or below which nothing more will be written.  Mints no version."""
        return self.floors.below(self._clock.latest)

    def now(self) -> Version:
        """A fresh version of the clock."""
        return self._storage.retry_recovered(self._clock.now)

    def read_version(self) -> Version:
        """The version at which a reader sees every acknowledged write.

        While a round is running it is the round's floor, so that no reader waits for a sync: the commits of
        the round are not acknowledged yet.  After an idle time that floor is too old to judge expiry by.

        Reads go on while nothing can be written: then no version is minted, and the writes of a failed round
        are left out.
        """
        version = self._clock.latest
        try:
            # A version of this millisecond is enough; if every reader minted, they would queue at the clock.
            if physical_ms(version) < self._clock.time_source():
                version = self._clock.now()
        except ClockSkew:
            pass
        except FloodmarkError:
            self._storage.stop()
        # Read after the version: a round that is missed here mints above it.
        floor = self.floors.round
        if floor is not None and (self._storage.stopped or version - floor < FLOOR_AGE_MAX):
            return min(version, floor)
        return version

    def observe(self, version: Version, *, skew_ms_max: int | None = None) -> None:
        """Move the clock past a version."""
        if version > self._clock.latest:
            self._storage.retry_recovered(lambda: self._clock.observe(version, skew_ms_max=skew_ms_max))

    def wait_applied(self, version: Version) -> None:
        """Return when all commits at or below `version`, which the clock has passed, can be read."""
        floor = self.floors.round
        if floor is not None and floor < version:
            with self._storage.settled():
                pass

    def sync(self) -> None:
        """Sync, and so publish, commits that did not wait for the disk."""
        if self.floors.unsynced is not None or self._storage.stopped:
            with self._storage.settled():
                self.sync_in_turn()

    def sync_in_turn(self) -> Version:
        """`sync` for a caller that holds the turn; the resolved version afterwards."""
        if self.floors.unsynced is not None or self.floors.round is not None:
            try:
                self._engine.sync()
            except BaseException as failure:
                self._storage.stop(failed=isinstance(failure, FloodmarkError))
                raise
            self._settle_floors(synced=True)
        return self.floors.below(self._clock.now())

    def store_in_turn(
        self,
        build: Callable[[Version], Sequence[WriteRow]],
        guards: Sequence[Guard] = (),
        stored: Callable[[Version], object] = lambda _: None,
    ) -> Version:
        """Store rows that have a version but are no commit; 0 if a guard did not hold.

        The caller holds the turn.  `stored` is called before a reader can be at or above the version.
        """
        if self.floors.round is None:
            self.floors.round = self._clock.latest
        try:
            version = self._clock.now()
            if self._storage.store_guarded(build(version), guards):
                stored(version)
            else:
                version = 0
        except BaseException as failure:
            self.counting.lose()
            if not isinstance(failure, FloodmarkError) or isinstance(failure, OutcomeUnknown):
                self._storage.stop(failed=isinstance(failure, OutcomeUnknown))
            raise
        finally:
            if not self._storage.stopped:
                self._settle_floors(synced=True)
        return version

    # The round

    def lead(self, *commits: Commit) -> None:
        """Run a round for these commits and the waiting ones.  The caller holds the turn."""
        batch = [*commits]
        try:
            if self._turn.line:
                self._gather(batch)
            self._run(batch)
            for _ in range(CATALOG_CHANGES_MAX):
                if not (changed := [each for each in batch if isinstance(each.error, CatalogChanged)]):
                    break
                for commit in changed:
                    commit.error, commit.version, commit.tallies = None, 0, ()
                self._run(changed)
        except BaseException as interruption:
            self._storage.stop(failed=False)
            self.counting.lose()
            for member in batch:
                member.error = member.error or unknown(interruption)
            raise
        finally:
            if waiting := batch[len(commits) :]:
                try:
                    wake(chain(waiting))
                except BaseException:
                    # Interrupted: wake the others all the same.  Doing it twice is harmless.
                    wake(chain(waiting))
                    raise

    def _gather(self, batch: list[Commit]) -> None:
        """Add waiting commits to the leader's, up to the size of a round."""
        size = sum(commit.writes.size for commit in batch if commit.writes)

        def fits(commit: Commit) -> bool:
            nonlocal size
            size += commit.writes.size if commit.writes else 0
            has_work = commit.writer is not None or isinstance(commit, RoundStep)
            return has_work and size <= self._round_bytes_max

        batch += self._turn.take_line(fits)

    def _run(self, batch: list[Commit]) -> None:
        if self._storage.is_unusual:
            batch = self._admit(batch)
            if not batch:
                return
        if self.floors.round is None:
            self.floors.round = self._clock.latest
        try:
            durable = self._write(batch)
        except FloodmarkError as error:
            self._settle(batch, error)
            return
        if any(commit.version for commit in batch):
            if self.tail.is_open:
                self._enter_tail(batch)
            for commit in batch:
                if isinstance(commit, RoundStep) and commit.version:
                    commit.finish()
            self._settle_floors(synced=durable)
        else:
            self.floors.round = None
        self.counting.count(batch)

    def _admit(self, batch: list[Commit]) -> list[Commit]:
        """The commits that may be written now.  Sets the error of the others."""
        admitted = batch
        try:
            try:
                self._storage.require_wanted()
            except FloodmarkError as refusal:
                admitted = [commit for commit in batch if commit.frees]
                for commit in batch:
                    commit.error = None if commit.frees else refusal.again()
            if admitted:
                self._storage.recover_if_stopped()
        except FloodmarkError as failure:
            for commit in admitted:
                commit.error = failure.again()
            return []
        return admitted

    def _write(self, batch: list[Commit]) -> bool:
        """Write all commits to the engine, durably if one of them asks for it; whether one did."""
        rows = EngineBatch(self._storage)
        durable = False
        for commit in batch:
            writer = commit.writer
            if writer is not None and writer.retired:
                commit.error = moved(writer)
                continue
            if isinstance(commit, RoundStep) and (touched := commit.touches) is not None:
                rows.show(touched)
            elif commit.decide is not None:
                # It sees the commits before it.
                rows.write(durable=False)
            mint = Mint(self._clock.now)
            try:
                if isinstance(commit, RoundStep):
                    if (taken := commit.take(mint)) and commit.guards:
                        if not self._engine.write(taken, commit.guards):
                            commit.version, commit.error = 0, late()
                            commit.undo()
                            continue
                    elif taken:
                        rows.add(taken, len(taken), _size(taken), commit.touches)
                    durable = durable or (commit.durable and commit.version != 0)
                    continue
                if commit.named is not None and commit.writes is not None:
                    # The same commit may have been sent twice.
                    rows.show(commit.writes.keys)
                    if earlier := commit.named.earlier(mint()):
                        commit.version, commit.writes = earlier, None
                        durable = durable or commit.durable
                        continue
                if commit.validation is not None:
                    rows.show(commit.validation.reads.keys, commit.validation.reads.ranges)
                    commit.validation.require_unchanged(mint())
                if commit.decide is not None:
                    commit.writes = commit.decide(mint)
                if commit.writes is not None and self._storage.dropped:
                    self._storage.require_not_dropped(commit.writes.keys)
                if self._storage.is_unusual and commit.writes is not None and commit.writes.own:
                    self._storage.require_writers()
            except FloodmarkError as error:
                commit.error = error
                continue
            if (writes := commit.writes) is not None:
                assert writer is not None
                commit.version = mint()
                encoded, commit.tallies = encode_writes(
                    writer, writes, commit.version, self._site_id, self._storage.log_row_bytes_max
                )
                if writes.guards and not self._engine.write(encoded, writes.guards):
                    commit.version, commit.error = 0, late()
                    continue
                if not writes.guards:
                    count, size = ROWS_PER_CHANGE * len(writes.keys), BYTES_PER_BYTE * writes.size
                    if commit.named is not None:
                        outcome = commit.named.row(commit.version)
                        encoded, count, size = (*encoded, outcome), count + 1, size + _size((outcome,))
                    rows.add(encoded, count, size, writes.keys)
                durable = durable or commit.durable
        rows.write(durable=durable)
        return durable

    def _enter_tail(self, batch: list[Commit]) -> None:
        """Add commits to the tail, before they are published: a reader may look at once."""
        for commit in batch:
            if commit.version and commit.error is None and commit.writes is not None:
                assert commit.writer is not None
                if not commit.writes.loaded:
                    # Not as columns, which would keep their whole message alive.
                    keys, changes = list(commit.writes.keys), list(commit.writes.changes)
                    self.tail.add(commit.version, commit.writer.id, keys, changes)

    def _settle_floors(self, *, synced: bool) -> None:
        self.floors.settle(synced=synced)
        if synced and self.followers.is_watched:
            self.followers.tell()

    # Failure

    def _settle(self, batch: list[Commit], failure: FloodmarkError) -> None:
        """Find out which commits of a failed round happened."""
        try:
            if isinstance(failure, OutcomeUnknown):
                self._storage.stop()
                self._storage.recover_if_stopped()
            self._engine.sync()
            for commit in batch:
                if commit.version and not self.is_written(commit):
                    commit.version = 0
                    commit.error = refused(failure)
                elif not commit.version and commit.error is None:
                    commit.error = refused(failure)
            for commit in batch:
                if isinstance(commit, RoundStep):
                    commit.undo()
            # Before the prepared writes are loaded: those that ended are published from then on.
            _forget(self.tail, self._clock)
            self.prepared.load()
        except FloodmarkError:
            self._storage.stop()
            self.counting.lose()
            for commit in batch:
                if commit.version:
                    commit.error = unknown(failure)
                elif commit.error is None:
                    commit.error = refused(failure)
            return
        self._settle_floors(synced=True)
        self.counting.count(batch)

    def _settle_alone(self, commit: Commit, failure: FloodmarkError) -> Version:
        if isinstance(failure, PartitionMoved | NamespaceNotFound):
            raise failure
        if isinstance(failure, CatalogChanged):
            commit.version, commit.tallies = 0, ()
            self.lead(commit)
        else:
            self._settle([commit], failure)
        if commit.error is not None:
            raise commit.error
        return commit.version

    def is_written(self, commit: Commit) -> bool:
        """Whether the engine holds a commit, after a failure."""
        if isinstance(commit, RoundStep):
            return commit.is_written()
        if commit.writes is None:
            # The same commit has written before, perhaps in this round.
            return commit.named is not None and commit.named.earlier(commit.version) != 0
        assert commit.writer is not None
        if commit.writes.loaded:
            record = commit.writes.prefixes[0] + encode_version(commit.version)
            return self._engine.get(DATA, record) is not None
        key = encode_log_key(commit.writer.log_id, commit.version)
        return self._engine.get(LOG, key) is not None

    def _begin_anew(self) -> None:
        """Start again after a recovery: all that is stored is durable, and counted commits may be lost."""
        self.counting.lose()
        _forget(self.tail, self._clock)
        # Before the floor is removed that holds back what a failed round may have prepared.
        self.prepared.load()
        self._settle_floors(synced=True)


def _commit_of_one(
    writer: CommittingPartition,
    key: bytes,
    prefix: bytes,
    value: bytes,
    validation: ValidatesReads | None,
    *,
    durable: bool,
) -> Commit:
    writes = Writes((key,), (prefix,), (value,), len(key) + len(value))
    return Commit(writer, writes, durable=durable, validation=validation)


def commit_together(committer: Committer, commits: Sequence[Commit]) -> None:
    """Run commits in one round.  Each has its version or its error afterwards."""
    with committer.place.storage.exclusive():
        committer.lead(*commits)


def _size(rows: Sequence[WriteRow]) -> int:
    """The bytes of rows."""
    _, keys, values = zip(*rows, strict=True)
    return sum(map(len, keys)) + sum(map(len, filter(None, values)))


def _forget(tail: LiveTail, clock: HybridClock) -> None:
    """Reset the tail: after a failure only the log knows what happened."""
    if tail.is_open:
        tail.reset(clock.latest)


def late() -> StaleLink:
    """The error for changes of a link that moved on while they were being written."""
    return StaleLink(
        "the link moved on, or garbage collection passed it, while its changes were written. Plan the step "
        "again"
    )


def moved(writer: CommittingPartition) -> PartitionMoved:
    """The error for a partition that no longer exists."""
    return PartitionMoved(
        f"partition {writer.id} was split, merged or moved; ask for the map again",
        partition=writer.id,
    )
