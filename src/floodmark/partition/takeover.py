"""Takes over the partitions of a dead node.

The successor has raised the dead node's fence, so that node writes nothing more.  The successor moves its
clock past the dead node's ceiling, which bounds all that was stamped or announced there, seals the logs and
opens new ones that name their parents.  The guard is the fence as the successor has raised it: if the dead
node restarts meanwhile, or another node takes over, the write fails.

A partition with prepared writes keeps its log: they may commit below the seal.  The successor takes it
itself, so that the prepared writes hold its resolved version back at once, and seals the log when they have
ended (`Node.heartbeat`).

A log ends with a heartbeat for the account of the dead node, which has counted it so far.  The successor
counts from the log the changes that the dead node's heartbeats lack.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import cycle
from typing import Final

import msgspec

from floodmark.clock import HybridClock
from floodmark.codec.changelog import encode_heartbeat, encode_log_key
from floodmark.engine import Engine, WriteRow
from floodmark.model.change import Heartbeat
from floodmark.model.version import Version
from floodmark.partition.families import CEILING, LOG
from floodmark.partition.fencing import fence_guard, load_number, numbered
from floodmark.partition.layout import (
    PartitionRow,
    id_step,
    load_logs,
    load_next_id,
    load_partitions,
    open_partition,
    remove_partition,
    store_log,
    store_next_id,
    store_partition,
)
from floodmark.partition.node import Node
from floodmark.partition.prepared.writes import read_prepared
from floodmark.partition.recounting import count_log, end_log, recount

# Partitions that get new owners in one write, and the rows of each.
BATCH_MAX: Final = 100
ROWS_PER_PARTITION: Final = 5


def take_over(node: Node, dead: int, incarnation: int, heirs: Sequence[int] = ()) -> int:
    """Distribute the partitions of a dead node; returns how many have a new owner.

    Its fence was raised to `incarnation`.  The partitions go to this node and to `heirs` in turn.
    """
    guard, owners = fence_guard(dead, incarnation), cycle((node.number, *heirs))
    taken = 0
    batch_max = min(BATCH_MAX, (node.engine.limits.batch_rows_max - 1) // ROWS_PER_PARTITION)
    with node.storage.settled():
        estate = _Estate(node, dead)
        for first in range(0, len(estate.rows), batch_max):
            batch = estate.rows[first : first + batch_max]
            build = partial(estate.pass_on, [(row, next(owners)) for row in batch])
            node.committer.sync_in_turn()
            if not node.committer.store_in_turn(build, (guard,)):
                break
            taken += len(batch)
        if taken:
            node.load()
    return taken


def pass_ceiling(clock: HybridClock, engine: Engine, node: int) -> None:
    """Move a clock past every version that another node has stamped or announced."""
    clock.pass_version(load_number(engine, numbered(CEILING, node)))


class _Estate:
    """The partitions and logs of a dead node, read after its fence was raised; the clock is past them."""

    def __init__(self, node: Node, dead: int) -> None:
        engine = node.engine
        self._node = node
        self._dead = dead
        pass_ceiling(node.clock, engine, dead)
        self.rows = [row for row in load_partitions(engine) if row.node == dead]
        logs = load_logs(engine)
        self._logs = {log.id: log for log in logs}
        # The dead node may not have served all of its partitions yet: its ceiling may be below their logs.
        node.clock.pass_version(max((self._logs[row.log].opened_at for row in self.rows), default=0))
        self._prepared = [key for _, key, _, _ in read_prepared(engine)]
        self._trimmed = node.retention.trimmed_version()
        open_logs = {row.log for row in self.rows if row.counted is None}
        self._counted = recount(engine, logs, dead, open_logs, node.site_id, self._trimmed)

    def pass_on(self, entries: Sequence[tuple[PartitionRow, int]], version: Version) -> list[WriteRow]:
        """The rows by which partitions get a new owner at a version."""
        return list(self._pass_on(entries, version))

    def _pass_on(self, entries: Sequence[tuple[PartitionRow, int]], version: Version) -> Iterator[WriteRow]:
        number = self._node.number
        next_id, step = load_next_id(self._node.engine, number), id_step(number)
        for row, owner in entries:
            partition_id, log_id = next_id, next_id + step
            next_id += 2 * step
            yield remove_partition(row.id)
            log = self._logs[row.log]
            if any(row.range.contains(key) for key in self._prepared):
                counted = self._counted_before(row)
                kept = msgspec.structs.replace(row, id=partition_id, node=number, counted=counted)
                yield store_log(msgspec.structs.replace(log, partition=partition_id))
                yield store_partition(kept)
                continue
            yield store_log(msgspec.structs.replace(log, sealed_at=version))
            yield LOG, encode_log_key(log.id, version), encode_heartbeat(self._end(row, version))
            yield from open_partition(partition_id, log_id, row.range, version, [log.id], node=owner)
        yield store_next_id(number, next_id)

    def _end(self, row: PartitionRow, version: Version) -> Heartbeat:
        """The heartbeat that ends a log, for the account of the node that has counted it so far."""
        log = self._logs[row.log]
        if row.counted is None:
            tallies = None if self._counted is None else self._counted.tallies[log.id]
        else:
            tallies = count_log(self._node.engine, log, row.counted[1], self._node.site_id, self._trimmed)
        wall_ms = self._node.clock.time_source()
        last = end_log(log, self._counted_before(row), tallies)
        return msgspec.structs.replace(last, version=version, through=version, wall_ms=wall_ms)

    def _counted_before(self, row: PartitionRow) -> tuple[int, Version]:
        """The node that has counted the log of a partition, and the version up to which it did."""
        return row.counted or (self._dead, 0 if self._counted is None else self._counted.through)
