"""A node: the partitions that one process serves from one engine, under one clock."""

import logging
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from floodmark.clock import HybridClock
from floodmark.codec.ordered import qualify_range
from floodmark.engine import Engine, Guard
from floodmark.model.batch import batches_from
from floodmark.model.change import Heartbeat
from floodmark.model.errors import (
    ClockSkew,
    Closed,
    FloodmarkError,
    PartitionMoved,
    Unreachable,
)
from floodmark.model.limits import COMMIT_BYTES_MAX, PAGE_BYTES_MAX
from floodmark.model.partition import BatchSettler, CommitLimits, Decision, PartitionMap, Settler
from floodmark.model.ranges import KeyRange
from floodmark.model.version import COUNTER_BITS, VERSION_MAX, Version, physical_ms
from floodmark.partition.beating import NODE, Heartbeats
from floodmark.partition.commit.commit import BYTES_PER_BYTE, ROWS_PER_CHANGE, RoundStep
from floodmark.partition.commit.entering import Entrance
from floodmark.partition.commit.storage import Storage
from floodmark.partition.committer import Committer
from floodmark.partition.expiring import Expiries
from floodmark.partition.families import CLOCK_BOUND, EXPIRING_INDEXED, META
from floodmark.partition.fencing import highest_ceiling
from floodmark.partition.holds import Holds
from floodmark.partition.layout import (
    LogRow,
    PartitionRow,
    id_step,
    load_logs,
    load_next_id,
    load_partitions,
    load_version,
    open_partition,
    remove_log,
    store_log,
    store_next_id,
    store_version,
)
from floodmark.partition.partition import LocalPartition, observe_version
from floodmark.partition.prepared.outcomes import BATCHES, BatchOutcome, read_outcomes, store_outcome
from floodmark.partition.prepared.writes import remove_rows
from floodmark.partition.read.changelog import LogLine, look_up_value, read_logs
from floodmark.partition.read.records import VersionsPage, find_before, scan_versions
from floodmark.partition.reshaping import Reshaping
from floodmark.partition.retention.retention import Retention

# A transaction carries its decision out at once; after this time the node does it instead.
STALE_MS: Final = 1_000

_log = logging.getLogger("floodmark.partition")


class EngineBound:
    """Keeps the clock's upper bound in the engine, synced.

    `sync` may also store a copy elsewhere, which is passed as `floor` when the engine is opened again: an
    engine that has lost its last writes must not mint their versions again.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        sync: Callable[[Version], None] | None = None,
        floor: Version = 0,
        key: bytes = CLOCK_BOUND,
    ) -> None:
        self._engine = engine
        self._key = key
        self._sync = sync or (lambda _: engine.sync())
        self._floor = floor

    def load(self) -> Version:
        return max(self._floor, load_version(self._engine, self._key))

    def store(self, bound: Version) -> None:
        self._engine.write([store_version(self._key, bound)])
        self._sync(bound)


@dataclass(frozen=True)
class ClosedMap(PartitionMap[LocalPartition]):
    """The map of a closed node."""

    starts: Sequence[bytes] = ()
    partitions: Sequence[LocalPartition] = ()
    refusal: FloodmarkError = field(default_factory=lambda: Closed("the site was closed; open it again"))

    def route(self, key: bytes) -> LocalPartition:
        raise self.refusal.again()

    def overlapping(self, keys: KeyRange) -> list[LocalPartition]:
        raise self.refusal.again()


class Node:
    """Opens, serves and reshapes all partitions of an engine, or its own on an engine that is shared.

    A node that shares its engine has a number from 1, an engine that its fence guards, and `reads`: the same
    engine for partitions, which checks the lease after each read.  `entrance` outlives its incarnations.
    """

    def __init__(
        self,
        engine: Engine,
        clock: HybridClock,
        site_id: int,
        *,
        number: int = NODE,
        reads: Engine | None = None,
        entrance: Entrance | None = None,
    ) -> None:
        self.engine = engine
        self.number = number
        self._reads = engine if reads is None else reads
        self.clock = clock
        self._limits = _commit_limits(engine)
        self.storage = Storage(engine, entrance)
        self.committer = Committer(self.storage, clock, site_id, round_bytes_max=self._limits.bytes_max)
        self.site_id = site_id
        # The resolved version of the site, which other nodes may hold back.
        self.resolve_site: Callable[[], Version] = self.committer.resolved_version
        self.holds = Holds(self.committer, clock)
        self.retention = Retention(self.storage)
        if number:
            self.committer.swaps.known = 0
            self.retention.share()
            self.committer.tail.share()
        self.expiries = Expiries(self.committer, clock, lambda: self.map, is_shared=bool(number))
        self.heartbeats = Heartbeats(self, self.committer, clock, self.retention)
        self.reshaping = Reshaping(self)
        self._retired_writes = self._retired_bytes = 0
        self.map: PartitionMap[LocalPartition] = PartitionMap((), ())
        self.logs: Sequence[LogRow] = ()
        # The map as stored, with the owners.
        self.rows: Sequence[PartitionRow] = ()
        if number or not load_partitions(engine):
            self._bootstrap()
        self.load()
        self.heartbeats.recount()
        self.storage.on_recovery.append(self.load)

    # The map

    def _bootstrap(self) -> None:
        """Open the log of this node's heartbeats.

        If no node has done so yet, also open the first partition and the log of the site's heartbeats.
        """
        version, number, step = self.clock.now(), self.number, id_step(self.number)
        heartbeats, of_site = (
            store_log(LogRow(id=log, partition=None, start=b"", end=None, parents=[], opened_at=version))
            for log in (number, NODE)
        )
        is_first = False
        if not load_partitions(self.engine):
            log_id = load_next_id(self.engine, number)
            is_first = self.engine.write(
                [
                    heartbeats,
                    of_site,
                    *open_partition(log_id + step, log_id, KeyRange(), version, (), node=number),
                    store_next_id(number, log_id + 2 * step),
                    (META, EXPIRING_INDEXED, b""),
                ],
                [Guard(META, EXPIRING_INDEXED, None)],
            )
        if not is_first and all(log.id != number for log in load_logs(self.engine)):
            self.engine.write([heartbeats])
        self.engine.sync()

    def load(self) -> None:
        """Load the map from the engine.  Partitions that are no longer in it retire."""
        self.show(load_partitions(self.engine), load_logs(self.engine))

    def show(self, stored: Sequence[PartitionRow], logs: Sequence[LogRow]) -> None:
        """Serve the partitions of a map."""
        serving = {partition.id: partition for partition in self.map.partitions}
        partitions = [serving.pop(row.id) if row.id in serving else self._serve(row) for row in stored]
        self.logs = logs
        self.rows = stored
        if self.number:
            _share(self, stored, partitions, self.logs)
        self.map = PartitionMap([row.start for row in stored], partitions)
        for partition in serving.values():
            partition.retired = True
            self._retired_writes += partition.heat.writes
            self._retired_bytes += partition.heat.bytes_written

    def refresh(self) -> None:
        """Load the map again, if other nodes may have changed it."""
        if self.number:
            with self.storage.settled():
                self.load()

    def written(self) -> tuple[int, int]:
        """The number of changes and bytes that were written since the node was opened."""
        heats = [partition.heat for partition in self.map.partitions]
        return (
            self._retired_writes + sum(heat.writes for heat in heats),
            self._retired_bytes + sum(heat.bytes_written for heat in heats),
        )

    def _serve(self, row: PartitionRow) -> LocalPartition:
        return LocalPartition(
            row.id,
            row.range,
            row.log,
            engine=self._reads,
            clock=self.clock,
            committer=self.committer,
            site_id=self.site_id,
            limits=self._limits,
            collected=self.retention.collected,
            entrance=self.storage.entrance,
            serving=lambda: self.map,
            is_alone=not self.number,
        )

    # Heartbeats

    def heartbeat(self) -> Heartbeat:
        """Write a heartbeat, which also syncs earlier asynchronous writes.

        If several nodes serve the site, the owner of the first partition also writes the site's heartbeat,
        and returns that one.
        """
        self._settle_stale()
        if (old := self.committer.conflicts.old_rows(self.clock.physical_ms())) is not None:
            self.storage.remove_range(META, *old)
        return self.heartbeats.write()

    def settle_by(self, settler: Settler, batch_settler: BatchSettler | None = None) -> None:
        """Set the functions that return the decisions on transactions and atomic batches."""
        prepared = self.committer.prepared
        prepared.settler, prepared.batch_settler = settler, batch_settler or prepared.batch_settler

    def forget_prepared(self, aborted: Set[str]) -> None:
        """Remove the prepared writes of aborted transactions, without a sync for each.

        A power cut may undo it; then recovery aborts the transactions again.  A failure is only logged, since
        the coordinator ends each of these writes as well.
        """
        prepared = self.committer.prepared
        writes = [write for write in prepared.all() if write.transaction in aborted]
        try:
            for write in writes:
                self.storage.remove(remove_rows(write))
            if writes:
                with self.storage.settled():
                    prepared.load()
        except FloodmarkError as failure:
            _log.warning("writes that aborted transactions had prepared are not removed yet: %s", failure)

    def _settle_stale(self) -> None:
        """Carry out decisions on prepared writes that are older than `STALE_MS`."""
        until = max(0, self.clock.time_source() - STALE_MS) << COUNTER_BITS
        if self.committer.prepared.floor is not None:
            for partition in self.map.partitions:
                partition.settle_decided(until)
        for inherited in self.heartbeats.inherited():
            self.reshaping.renew(inherited, until)

    # Changes

    def born_version(self) -> Version:
        """The version at which the site began: nothing was written at or below it."""
        return min(log.opened_at for log in self.logs if log.partition is None)

    def resolved_version(self, wanted: Version = 0) -> Version:
        """The resolved version of the site, at or above `wanted` if any node has announced that.

        If the owner of a partition does not answer, this node may know a lower version than others have
        announced; then it raises Unreachable.  No node has announced a version above all ceilings.
        """
        resolved = self.resolve_site()
        self.committer.swaps.learn(resolved)
        if self.number and wanted > resolved and wanted <= highest_ceiling(self.engine):
            raise Unreachable(
                f"node {self.number} knows all changes up to version {resolved}, and is asked for those to "
                f"{wanted}: the owner of a partition does not answer. Ask another node, or again later",
                version=wanted,
                resolved=resolved,
            )
        return resolved

    def read_log(
        self, since: Version, until: Version, keys: KeyRange, *, heartbeats: bool = False
    ) -> Iterator[list[LogLine]]:
        """The change-log lines in `(since, until]` of the logs that may hold keys of the range."""
        logs = [
            log
            for log in (load_logs(self.engine) if self.number else self.logs)
            if (
                heartbeats and log.id == NODE
                if log.partition is None
                else log.range.intersect(keys) is not None
            )
        ]
        return read_logs(self.engine, logs, since, until, self.retention.trimmed_version)

    def scan_versions(self, keys: KeyRange, since: Version, until: Version) -> Iterator[VersionsPage]:
        """All stored versions in `(since, until]` of the qualified keys of a range, in order of keys."""
        return scan_versions(self.engine, keys, since, until)

    def is_unwritten(self, namespace: int) -> bool:
        """Whether nothing is stored in a namespace, and no key was ever removed from it entirely."""
        versions = scan_versions(self.engine, qualify_range(namespace), 0, VERSION_MAX)
        return not any(versions) and not self.retention.collected_horizon(namespace)

    def find_before(self, wanted: Sequence[tuple[bytes, Version, int]]) -> list[bytes | None]:
        """The stored record of each qualified key just before a version, if it is alive at a time."""
        return find_before(self.engine, wanted)

    def look_up_value(self, key: bytes, version: Version) -> bytes:
        """The stored value of a change whose row in the change log has only the key, because it is large."""
        return look_up_value(self.engine, key, version)

    def trim_logs(self, through: Version) -> None:
        """Forget change-log rows at or below a version, and sealed logs that end there."""
        logs = load_logs(self.engine) if self.number else self.logs
        if not self.retention.trim((log.id for log in logs), through):
            return
        gone = [log.id for log in logs if log.sealed_at is not None and log.sealed_at <= through]
        if gone:
            with self.storage.settled():
                self.storage.store_in_portions([remove_log(log_id) for log_id in gone])
                self.load()

    def observe(self, version: Version) -> None:
        """Move the clock past a version, which must not be in the future."""
        observe_version(self.committer, version)

    def require_open(self) -> None:
        """Raise if the node was closed or retired."""
        if isinstance(self.map, ClosedMap):
            raise self.map.refusal.again()

    def take(self, step: RoundStep) -> None:
        """Take a step that writes no records in the next round; returns when it is durable."""
        self.require_open()
        self.committer.commit(step)

    def sample_heat(self) -> None:
        """Close an interval of every partition's heat."""
        now_ms = self.clock.time_source()
        for partition in self.map.partitions:
            partition.heat.sample(now_ms)

    def abandon(self, refusal: Closed) -> None:
        """Serve nothing in a process that was forked: the engine belongs to the process that opened it.

        Other threads may have held any lock when the process was forked, and none of them is here.
        """
        self.map = ClosedMap(refusal=refusal)
        self.storage.turn.reset()
        self.storage.refuse(refusal)
        self.clock.abandon(refusal)

    def close(self) -> None:
        """Finish the commits under way, make everything durable and release the engine."""
        try:
            with self.storage.exclusive():
                serving = self.map.partitions
                self.map = ClosedMap()
                for partition in serving:
                    partition.retired = True
                self.committer.prepared.release()
                self.storage.on_recovery.clear()
                self.storage.recover_if_stopped()
                # A clock that refuses to mint raises only after the sync.
                with suppress(ClockSkew):
                    self.committer.sync_in_turn()
                self.clock.close()
        finally:
            self.engine.close()
            self.committer.followers.wake_all()


def resolved_versions(node: Node) -> dict[int, Version]:
    """The resolved versions of a node's own partitions, by id."""
    resolved: dict[int, Version] = {}
    for partition in node.map.partitions:
        # The new owner reports a partition that has moved meanwhile.
        with suppress(PartitionMoved):
            resolved[partition.id] = partition.resolved_version()
    return resolved


def ended_batches(node: Node, age_ms: int) -> Iterator[tuple[str, bytes, BatchOutcome]]:
    """Id, key and outcome of the atomic batches that have ended at a node, with ids older than `age_ms`.

    The age is measured to the last version of the clock, which never goes back: a batch stays too old.
    """
    serves = node.committer.prepared.serves
    for batch, key, outcome in read_outcomes(node.engine, physical_ms(node.clock.latest) - age_ms):
        if outcome.decision is not Decision.UNDECIDED and serves(key):
            yield batch, key, outcome


def forget_commits(node: Node, age_ms: int) -> None:
    """Remove the outcomes of commits with ids older than `age_ms`, at once: no batch spans nodes here."""
    end = BATCHES + batches_from(physical_ms(node.clock.latest) - age_ms).encode()
    if node.engine.scan(META, BATCHES, end, rows_max=1, bytes_max=PAGE_BYTES_MAX):
        node.storage.remove_range(META, BATCHES, end)


def forget_batches(node: Node, ended: Iterable[tuple[str, bytes]]) -> None:
    """Remove the outcomes of batches that are prepared at no sibling any more; a power cut may undo it."""
    node.storage.remove([store_outcome(batch, key, None) for batch, key in ended])


def _share(
    node: Node, rows: Sequence[PartitionRow], partitions: Sequence[LocalPartition], logs: Sequence[LogRow]
) -> None:
    """Prepare to serve a node's own partitions; those of other nodes refuse with `PartitionMoved`."""
    for row, partition in zip(rows, partitions, strict=True):
        partition.retired = row.node != node.number
    own = {row.log for row in rows if row.node == node.number}
    # Before anything is served: the last owners may have written and announced versions up to there.
    node.clock.pass_version(max((log.opened_at for log in logs if log.id in own), default=0))
    starts = [row.start for row in rows]
    prepared = node.committer.prepared
    prepared.serves = lambda key: not partitions[bisect_right(starts, key) - 1].retired
    prepared.load()
    node.committer.conflicts.load()


def _commit_limits(engine: Engine) -> CommitLimits:
    limits = engine.limits
    return CommitLimits(
        bytes_max=min(COMMIT_BYTES_MAX, limits.batch_bytes_max // BYTES_PER_BYTE),
        changes_max=limits.batch_rows_max // ROWS_PER_CHANGE,
    )
