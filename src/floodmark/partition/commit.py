"""Group commit: the first thread that comes writes for all that come while the disk is busy.

There is no committer thread, because handing work to one costs more than a commit.  A thread that
finds nobody at work leads: it mints versions, writes the data and the change-log rows of every waiting
commit in one engine batch, syncs once, and passes the lead on.  The others sleep until they are done;
each wakes the next, so that they do not all fight for the interpreter at once.

**The slot.**  Before a round mints its first version it notes the clock's latest version, the floor.
Whatever the round writes lies above the floor, so "resolved" stays at it until the round is durable.
Asking for the resolved version mints a version *first* and looks for a floor *second*: a round that
was not seen will mint above it.

**Failure.**  If storage fails, the round recovers the engine and then looks which of its commits are
there.  Only if that fails too is an outcome unknown: the floor stays, and the next round must recover
before it does anything else.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from threading import Condition, Lock
from typing import Final, NamedTuple, Protocol

from floodmark.clock import HybridClock
from floodmark.codec.changelog import encode_commit, encode_log_key, encode_single
from floodmark.codec.digest import digest_change
from floodmark.codec.ordered import NAMESPACE_BYTES, encode_version
from floodmark.engine import Engine, WriteRow
from floodmark.model.change import Tally
from floodmark.model.errors import FloodmarkError, OutcomeUnknown, PartitionMoved, PartitionStopped
from floodmark.model.limits import COMMIT_BYTES_MAX
from floodmark.model.version import Version
from floodmark.partition.families import DATA, LOG

WAIT_SECONDS_MAX: Final = 60.0


class LogTally(NamedTuple):
    """What one commit adds to the sums of its log."""

    version: Version
    namespace: bytes
    tally: Tally


class Writer(Protocol):
    """What a commit needs to know of the partition that it belongs to."""

    id: int
    log_id: int
    retired: bool
    tallies: deque[LogTally]


class Writes(NamedTuple):
    """What a commit stores: qualified keys, their encoded prefixes, and the stored values."""

    keys: Sequence[bytes]
    prefixes: Sequence[bytes]
    values: Sequence[bytes]
    size: int


# Decides inside the commit, when all earlier commits can be read; None refuses.
Decide = Callable[[], Writes | None]


class Commit:
    """One commit on its way through a round."""

    __slots__ = (
        "abandoned",
        "decide",
        "durable",
        "error",
        "following",
        "gate",
        "leads",
        "tallies",
        "version",
        "writer",
        "writes",
    )

    def __init__(
        self,
        writer: Writer | None,
        writes: Writes | None,
        *,
        durable: bool,
        decide: Decide | None = None,
    ) -> None:
        self.writer = writer
        self.writes = writes
        self.durable = durable
        self.decide = decide
        self.version: Version = 0
        self.error: FloodmarkError | None = None
        self.tallies: list[LogTally] = []
        self.gate: Lock | None = None
        self.following: Commit | None = None
        self.leads = False
        self.abandoned = False


class CommitCounters:
    """Running totals; only the thread that leads changes them."""

    __slots__ = ("bytes", "changes", "commits", "recoveries", "rounds", "syncs")

    def __init__(self) -> None:
        self.rounds = self.commits = self.changes = self.bytes = self.syncs = self.recoveries = 0


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
        self._lock = Lock()
        self._busy = False
        self._waiting: deque[Commit] = deque()
        # Floors: of the round at work, and of the oldest commit that is written but not synced.
        self._open_floor: Version | None = None
        self._unsynced_floor: Version | None = None
        self._stopped = False
        self._watchers = 0
        self._published = Condition(Lock())

    def commit(self, commit: Commit) -> Version:
        """Run a commit; its version when it is done, 0 if it was refused by its own decision."""
        if self._take_turn(commit):
            batch = self._gather(commit)
            try:
                self._run(batch)
            except BaseException as interruption:
                self._stopped = self.lost_count = True
                for member in batch:
                    member.error = member.error or _unknown(interruption)
                raise
            finally:
                self._pass_turn()
                if len(batch) > 1:
                    _wake(_chain(batch))
        else:
            _wake(commit.following)
        if commit.error is not None:
            raise commit.error
        return commit.version

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the turn: no round is at work and none begins until the block is left."""
        turn = Commit(None, None, durable=True)
        self._take_turn(turn)
        try:
            yield
        finally:
            self._pass_turn()

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

    # The turn

    def _take_turn(self, commit: Commit) -> bool:
        """True if the caller leads; False if another thread has run its commit meanwhile."""
        with self._lock:
            if not self._busy:
                self._busy = True
                return True
            gate = commit.gate = Lock()
            gate.acquire()
            self._waiting.append(commit)
        try:
            if gate.acquire(timeout=WAIT_SECONDS_MAX):
                return commit.leads
        except BaseException:
            self._abandon(commit)
            raise
        self._abandon(commit)
        raise OutcomeUnknown(
            f"no answer from storage within {WAIT_SECONDS_MAX:.0f} s; read before you write again"
        )

    def _abandon(self, commit: Commit) -> None:
        """Stop waiting without breaking the chain of those who wait behind."""
        with self._lock:
            if commit in self._waiting:
                self._waiting.remove(commit)
                return
        # Its waker and this thread both try the gate; whoever gets through wakes the next one.
        commit.abandoned = True
        assert commit.gate is not None
        if commit.gate.acquire(blocking=False):
            if commit.leads:
                self._pass_turn()
            else:
                _wake(commit.following)

    def _pass_turn(self) -> None:
        with self._lock:
            if not self._waiting:
                self._busy = False
                return
            successor = self._waiting.popleft()
            successor.leads = True
        gate = successor.gate
        assert gate is not None
        gate.release()
        if successor.abandoned and gate.acquire(blocking=False):
            self._pass_turn()

    def _gather(self, leader: Commit) -> list[Commit]:
        """The leader's commit and all that wait behind it, up to one commit's worth of bytes."""
        batch = [leader]
        if self._waiting:
            size = leader.writes.size if leader.writes else 0
            with self._lock:
                while self._waiting and self._waiting[0].writer is not None:
                    following = self._waiting[0].writes
                    size += following.size if following else 0
                    if size > COMMIT_BYTES_MAX:
                        break
                    batch.append(self._waiting.popleft())
        return batch

    # The round

    def _run(self, batch: list[Commit]) -> None:
        try:
            if self.refusal is not None:
                raise self.refusal
            self._recover_if_stopped()
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
                self.counters.syncs += 1
        except FloodmarkError as error:
            self._settle(batch, error)
            return
        self._settle_floors(synced=durable)
        self._count(batch)

    def _write(self, batch: list[Commit]) -> bool:
        """Hand all commits to the engine; whether one of them asks for a sync."""
        rows: list[WriteRow] = []
        durable = False
        for commit in batch:
            writer = commit.writer
            assert writer is not None
            if writer.retired:
                commit.error = PartitionMoved(
                    f"partition {writer.id} was split, merged or moved; ask for the map again",
                    partition=writer.id,
                )
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
                self._encode(commit, writer, commit.writes, rows)
                durable = durable or commit.durable
        if rows:
            self._engine.write(rows)
        return durable

    def _encode(self, commit: Commit, writer: Writer, writes: Writes, rows: list[WriteRow]) -> None:
        version = commit.version = self._clock.now()
        suffix = encode_version(version)
        keys, prefixes, values, _ = writes
        site_id = self._site_id
        if len(keys) == 1:
            key, value = keys[0], values[0]
            rows.append((DATA, prefixes[0] + suffix, value))
            rows.append((LOG, encode_log_key(writer.log_id, version), encode_single(key, value)))
            digest = digest_change(version, site_id, key[NAMESPACE_BYTES:], value)
            commit.tallies.append(LogTally(version, key[:NAMESPACE_BYTES], Tally(1, digest)))
            return
        rows += [(DATA, prefix + suffix, value) for prefix, value in zip(prefixes, values, strict=True)]
        for chunk, row in enumerate(encode_commit(keys, values)):
            rows.append((LOG, encode_log_key(writer.log_id, version, chunk), row))
        commit.tallies += _tally(version, site_id, keys, values)

    def _count(self, batch: list[Commit]) -> None:
        counters = self.counters
        counters.rounds += 1
        for commit in batch:
            if commit.version and commit.error is None:
                assert commit.writer is not None
                assert commit.writes is not None
                commit.writer.tallies.extend(commit.tallies)
                counters.commits += 1
                counters.changes += len(commit.writes.keys)
                counters.bytes += commit.writes.size
        if self._watchers:
            self.wake_watchers()

    def _settle_floors(self, *, synced: bool) -> None:
        # A reader looks at the open floor first, so the other must be in place before it goes.
        if synced:
            self._unsynced_floor = None
        elif self._unsynced_floor is None:
            self._unsynced_floor = self._open_floor
        self._open_floor = None
        if synced and self._watchers:
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


def _tally(version: Version, site_id: int, keys: Sequence[bytes], values: Sequence[bytes]) -> list[LogTally]:
    """The tallies of a commit, one for each run of keys of one namespace."""
    tallies: list[LogTally] = []
    namespace = keys[0][:NAMESPACE_BYTES]
    count = digest = 0
    for key, value in zip(keys, values, strict=True):
        if not key.startswith(namespace):
            tallies.append(LogTally(version, namespace, Tally(count, digest)))
            namespace, count, digest = key[:NAMESPACE_BYTES], 0, 0
        count += 1
        digest ^= digest_change(version, site_id, key[NAMESPACE_BYTES:], value)
    tallies.append(LogTally(version, namespace, Tally(count, digest)))
    return tallies


def _chain(batch: list[Commit]) -> Commit:
    """Link those behind the leader, each to the one that it wakes; the first of them."""
    for commit, following in pairwise(batch[1:]):
        commit.following = following
    return batch[1]


def _wake(commit: Commit | None) -> None:
    while commit is not None:
        gate = commit.gate
        assert gate is not None
        gate.release()
        if not commit.abandoned or not gate.acquire(blocking=False):
            return
        commit = commit.following
