"""Group commit: the first thread that comes writes for all that come while the disk is busy.

A thread that finds nobody at work leads a round: it mints versions, writes the data and the change-log
rows of every commit in line in one engine batch, syncs once, and passes the turn on.  There is no
committer thread, because handing work to one costs more than a commit.

**The slot.**  Before a round mints its first version it notes the clock's latest version, the floor.
Whatever the round writes lies above the floor, so "resolved" stays at it until the round is durable.
Asking for the resolved version mints a version *first* and looks for a floor *second*: a round that
was not seen will mint above it.

**Failure.**  If storage fails, the round recovers the engine and then looks which of its commits are
there.  Only if that fails too is an outcome unknown: the floor stays, and the next round must recover
before it does anything else.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Condition, Lock

from floodmark.clock import HybridClock
from floodmark.codec.changelog import encode_log_key, encode_single
from floodmark.codec.ordered import encode_version
from floodmark.engine import Engine, WriteRow
from floodmark.model.errors import FloodmarkError, OutcomeUnknown, PartitionMoved, PartitionStopped
from floodmark.model.limits import COMMIT_BYTES_MAX
from floodmark.model.version import Version
from floodmark.partition.commit import (
    Commit,
    CommitTally,
    Writer,
    Writes,
    encode_commit_rows,
    tally_one,
)
from floodmark.partition.families import DATA, LOG
from floodmark.partition.turn import Turn, chain, wake


class CommitCounters:
    """Running totals; only the thread that has the turn changes them."""

    __slots__ = ("commits", "recoveries", "rounds")

    def __init__(self) -> None:
        self.rounds = self.commits = self.recoveries = 0


class Committer:
    """Puts the commits of all partitions on one engine into rounds."""

    def __init__(
        self, engine: Engine, clock: HybridClock, site_id: int, on_recovery: Callable[[], None]
    ) -> None:
        self.counters = CommitCounters()
        # Whether commits went by uncounted, so that the next heartbeat cannot vouch for them.
        self.lost_count = False
        # Set while commits are not wanted at all, as on a disk that is nearly full.
        self.refusal: FloodmarkError | None = None
        self._engine = engine
        self._clock = clock
        self._site_id = site_id
        self._on_recovery = on_recovery
        self._turn: Turn[Commit] = Turn()
        # Floors: of the round at work, and of the oldest commit that is written but not synced.
        self._open_floor: Version | None = None
        self._unsynced_floor: Version | None = None
        self._stopped = False
        self._watchers = 0
        self._published = Condition(Lock())

    def commit(self, commit: Commit) -> Version:
        """Run a commit; its version when it is done, 0 if it was refused by its own decision."""
        turn = self._turn
        if turn.try_take() or turn.wait(commit):
            batch = [commit]
            try:
                if turn.line:
                    self._gather(batch)
                self._run(batch)
            except BaseException as interruption:
                self._stopped = self.lost_count = True
                for member in batch:
                    member.error = member.error or _unknown(interruption)
                raise
            finally:
                turn.pass_on()
                if len(batch) > 1:
                    wake(chain(batch[1:]))
        else:
            wake(commit.following)
        if commit.error is not None:
            raise commit.error
        return commit.version

    def commit_one(
        self, writer: Writer, key: bytes, prefix: bytes, value: bytes, *, durable: bool
    ) -> Version:
        """`commit` of one key, in the same steps but without lists, while nobody is in line."""
        turn, clock, engine = self._turn, self._clock, self._engine
        if turn.line or self._stopped or self.refusal is not None or not turn.try_take():
            writes = Writes((key,), (prefix,), (value,), len(key) + len(value))
            return self.commit(Commit(writer, writes, durable=durable))
        tally: CommitTally = (0, b"", 0, 0)
        try:
            if writer.retired:
                raise _moved(writer)
            if self._open_floor is None:
                self._open_floor = clock.latest
            version = clock.now()
            tally = tally_one(version, self._site_id, key, value)
            log_key = encode_log_key(writer.log_id, version)
            row = encode_single(key, value)
            engine.write(((DATA, prefix + encode_version(version), value), (LOG, log_key, row)))
            if durable:
                engine.sync()
            self._settle_floors(synced=durable)
            writer.tallies.append(tally)
            writer.heat.add_writes(1, len(key) + len(value))
            self.counters.commits += 1
            self.counters.rounds += 1
            return version
        except FloodmarkError as failure:
            writes = Writes((key,), (prefix,), (value,), len(key) + len(value))
            commit = Commit(writer, writes, durable=durable)
            commit.version, commit.tallies = tally[0], (tally,)
            return self._settle_alone(commit, failure)
        except BaseException:
            self._stopped = self.lost_count = True
            raise
        finally:
            turn.pass_on()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the turn: no round is at work and none begins until the block is left."""
        if not self._turn.try_take():
            self._turn.wait(Commit(None, None, durable=True))
        try:
            yield
        finally:
            self._turn.pass_on()

    def resolved_version(self) -> Version:
        """Every change at or below this is durable and published, and none will be added."""
        version = self._clock.now()
        for floor in (self._open_floor, self._unsynced_floor):
            if floor is not None and floor < version:
                version = floor
        return version

    def wait_applied(self, version: Version) -> None:
        """Return when every commit at or below `version`, which the clock has passed, can be read."""
        floor = self._open_floor
        if floor is not None and floor < version:
            with self.exclusive():
                pass

    def sync(self) -> None:
        """Make durable, and so publish, what was written without waiting for the disk."""
        if self._unsynced_floor is not None or self._stopped:
            with self.exclusive():
                self.sync_in_turn()

    def sync_in_turn(self) -> None:
        """`sync`, for a caller that holds the turn."""
        self._recover_if_stopped()
        if self._unsynced_floor is None and self._open_floor is None:
            return
        try:
            self._engine.sync()
        except FloodmarkError:
            self._stopped = True
            raise
        self._settle_floors(synced=True)

    def write_in_turn(self, build: Callable[[Version], Sequence[WriteRow]]) -> Version:
        """Write and sync rows that are not a commit but have a version, for a holder of the turn.

        After a failure of any kind the committer recovers before it does anything else.
        """
        self._recover_if_stopped()
        if self._open_floor is None:
            self._open_floor = self._clock.latest
        try:
            version = self._clock.now()
            self._engine.write(build(version))
            self._engine.sync()
        except FloodmarkError:
            self._stopped = True
            raise
        self._settle_floors(synced=True)
        return version

    def wait_published(self, timeout: float) -> None:
        """Sleep until something is published or the time is over."""
        with self._published:
            self._watchers += 1
            try:
                self._published.wait(timeout)
            finally:
                self._watchers -= 1

    def wake_watchers(self) -> None:
        """Let everyone in `wait_published` look again."""
        if self._watchers:
            with self._published:
                self._published.notify_all()

    # The round

    def _gather(self, batch: list[Commit]) -> None:
        """Add those in line to the leader's commit, up to one commit's worth of bytes."""
        line = self._turn.line
        writes = batch[0].writes
        size = writes.size if writes else 0
        while line:
            # Only the holder of the turn takes anyone out of line, but the first may leave.
            try:
                first = line[0]
            except IndexError:
                return
            size += first.writes.size if first.writes else 0
            if first.writer is None or size > COMMIT_BYTES_MAX:
                return
            taken = self._turn.next_in_line()
            if taken is None:
                return
            batch.append(taken)

    def _run(self, batch: list[Commit]) -> None:
        if self.refusal is not None or self._stopped:
            try:
                self._require_wanted()
            except FloodmarkError as error:
                for commit in batch:
                    commit.error = error
                return
        if self._open_floor is None:
            self._open_floor = self._clock.latest
        try:
            durable = self._write(batch)
            if durable:
                self._engine.sync()
        except FloodmarkError as error:
            self._settle(batch, error)
            return
        self._settle_floors(synced=durable)
        self._count(batch)

    def _require_wanted(self) -> None:
        if self.refusal is not None:
            raise self.refusal
        self._recover_if_stopped()

    def _write(self, batch: list[Commit]) -> bool:
        """Hand all commits to the engine; whether one of them asks for a sync."""
        rows: list[WriteRow] = []
        durable = False
        for commit in batch:
            writer = commit.writer
            assert writer is not None
            if writer.retired:
                commit.error = _moved(writer)
                continue
            if commit.decide is not None:
                if rows:
                    self._engine.write(rows)
                    rows = []
                try:
                    commit.writes = commit.decide()
                except FloodmarkError as error:
                    commit.error = error
                    continue
            if commit.writes is not None:
                rows += encode_commit_rows(commit, self._clock.now(), self._site_id)
                durable = durable or commit.durable
        if rows:
            self._engine.write(rows)
        return durable

    def _count(self, batch: list[Commit]) -> None:
        counters = self.counters
        counters.rounds += 1
        for commit in batch:
            if commit.version and commit.error is None:
                assert commit.writer is not None
                assert commit.writes is not None
                commit.writer.tallies.extend(commit.tallies)
                commit.writer.heat.add_writes(len(commit.writes.keys), commit.writes.size)
                counters.commits += 1

    def _settle_floors(self, *, synced: bool) -> None:
        # A reader looks at the open floor first, so the other must be in place before it goes.
        if synced:
            self._unsynced_floor = None
        elif self._unsynced_floor is None:
            self._unsynced_floor = self._open_floor
        self._open_floor = None
        if self._watchers and synced:
            self.wake_watchers()

    # Failure

    def _settle(self, batch: list[Commit], failure: FloodmarkError) -> None:
        """Find out which commits of a failed round happened."""
        try:
            if isinstance(failure, OutcomeUnknown):
                self._stopped = True
                self._recover_if_stopped()
            self._engine.sync()
            for commit in batch:
                if commit.version and not self._is_written(commit):
                    commit.version = 0
                    commit.error = _refused(failure)
                elif not commit.version and commit.error is None:
                    commit.error = failure
        except FloodmarkError:
            self._stopped = self.lost_count = True
            for commit in batch:
                if commit.version:
                    commit.error = _unknown(failure)
                elif commit.error is None:
                    commit.error = failure
            return
        self._settle_floors(synced=True)
        self._count(batch)

    def _settle_alone(self, commit: Commit, failure: FloodmarkError) -> Version:
        if isinstance(failure, PartitionMoved):
            raise failure
        self._settle([commit], failure)
        if commit.error is not None:
            raise commit.error
        return commit.version

    def _is_written(self, commit: Commit) -> bool:
        assert commit.writer is not None
        key = encode_log_key(commit.writer.log_id, commit.version)
        return self._engine.get(LOG, key) is not None

    def _recover_if_stopped(self) -> None:
        if not self._stopped:
            return
        try:
            self._engine.recover()
            self._engine.sync()
            self._on_recovery()
        except OutcomeUnknown as error:
            raise PartitionStopped(
                f"storage has not recovered from a failed write yet ({error}); try again"
            ) from error
        self.counters.recoveries += 1
        self._stopped = False


def _moved(writer: Writer) -> PartitionMoved:
    return PartitionMoved(
        f"partition {writer.id} was split, merged or moved; ask for the map again",
        partition=writer.id,
    )


def _refused(failure: FloodmarkError) -> FloodmarkError:
    """What a commit that certainly did not happen is told of a failure of unknown outcome."""
    if isinstance(failure, OutcomeUnknown):
        return PartitionStopped(f"storage failed and the write did not happen ({failure}); try again")
    return failure


def _unknown(failure: BaseException) -> OutcomeUnknown:
    return OutcomeUnknown(
        f"the write was interrupted ({failure!r}) and storage has not recovered; whether it happened is "
        "not known. Read the key once the site answers again, before you repeat the write"
    )
