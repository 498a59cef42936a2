"""Writes the heartbeats of a node, and those of its site if several nodes serve it.

Where several nodes share an engine, they end their heartbeats at the same versions, so that the sums can be
added (`summing.py`).  A partition that was taken over with its log is counted apart: its log ends with a
heartbeat for the account of the node that counted it before.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

from msgspec.structs import replace

from floodmark.clock import HybridClock
from floodmark.codec.changelog import encode_heartbeat, encode_log_key
from floodmark.engine import Engine, WriteRow
from floodmark.model.change import Heartbeat
from floodmark.model.partition import PartitionMap
from floodmark.model.version import Version
from floodmark.partition.commit.storage import Storage
from floodmark.partition.committer import Committer
from floodmark.partition.families import LOG
from floodmark.partition.heartbeat import align, drain_sums, fold_tallies
from floodmark.partition.layout import LogRow, PartitionRow
from floodmark.partition.partition import LocalPartition
from floodmark.partition.recounting import count_log, end_log, last_beat, recount
from floodmark.partition.retention.retention import Retention
from floodmark.partition.summing import sum_up

# The number of the node of an engine that is not shared; nodes of several have numbers from 1.
NODE: Final = 0


class BeatingNode(Protocol):
    """A node, as far as its heartbeats need it; the map and the logs are those loaded last."""

    number: int
    site_id: int
    engine: Engine
    storage: Storage
    map: PartitionMap[LocalPartition]
    rows: Sequence[PartitionRow]
    logs: Sequence[LogRow]


class Heartbeats:
    """Counts the changes of a node's partitions, and writes the sums into heartbeats."""

    def __init__(
        self, node: BeatingNode, committer: Committer, clock: HybridClock, retention: Retention
    ) -> None:
        self.last: Heartbeat | None = None
        # The watermarks of namespaces, which heartbeats carry.
        self.watermarks: Callable[[], Mapping[int, Mapping[int, Version]]] = dict
        self._node = node
        self._committer = committer
        self._clock = clock
        self._retention = retention
        # The version up to which heartbeats have counted; 0 if unknown.
        self._counted_through: Version = 0

    def write(self) -> Heartbeat:
        """Write a heartbeat, which also syncs earlier asynchronous writes.

        If several nodes serve the site, the owner of the first partition also writes the site's heartbeat,
        and returns that one.
        """
        node, committer = self._node, self._committer
        with node.storage.settled():
            through = self._find_end(committer.sync_in_turn())
            beats: list[Heartbeat] = []

            def build(version: Version) -> list[WriteRow]:
                beats.append(self._account(self._counted(), version, through=through, log=None))
                return [(LOG, encode_log_key(node.number, version), encode_heartbeat(beats[0]))]

            committer.store_in_turn(build)
            self._counted_through = through
            if committer.prepared.floor is not None:
                fold_tallies(node.map.partitions, committer.prepared.versions())
            self.last = beats[0]
        return (self._write_for_site() if node.number else None) or beats[0]

    def _find_end(self, resolved: Version) -> Version:
        """The version through which the next heartbeat counts; the heartbeats of other nodes end there too.

        On an engine that is not shared, readers see the heartbeat itself: it does not end below the seal of a
        log, whose heartbeat has counted all changes up to there.  While a prepared write holds the resolved
        version below a seal, the end does not advance.  `LogAccount.may_end` has this rule for several nodes.
        """
        node = self._node
        if not node.number and any(log.sealed_at and log.sealed_at > resolved for log in node.logs):
            return self._counted_through
        is_alone = all(row.node == node.number for row in node.rows)
        # A partition taken over with prepared writes holds the resolved version back, and is counted apart.
        return max(resolved if is_alone else align(resolved), self._counted_through)

    def _write_for_site(self) -> Heartbeat | None:
        """Write the heartbeat of the site, if this node owns the first partition, and return it.

        The resolved version of that partition, and so of the site, reaches the heartbeat only once it is
        stored.
        """
        node = self._node
        if not self._owns_first():
            return None
        before = last_beat(node.engine, NODE)
        summed = sum_up(node.engine, node.logs, before, self._retention.trimmed_version)
        if summed is None:
            return None
        beats: list[Heartbeat] = []

        def build(version: Version) -> list[WriteRow]:
            wall_ms, watermark = self._clock.time_source(), self.watermarks()
            beats.append(replace(summed, version=version, wall_ms=wall_ms, watermark=watermark))
            return [(LOG, encode_log_key(NODE, version), encode_heartbeat(beats[0]))]

        with node.storage.settled():
            # Another thread may have written one meanwhile, but no other node.
            if not self._owns_first() or last_beat(node.engine, NODE) != before:
                return None
            self._committer.store_in_turn(build)
        return beats[0]

    def _owns_first(self) -> bool:
        return any(not partition.retired for partition in self._node.map.partitions[:1])

    def _counted(self) -> list[LocalPartition]:
        """The partitions whose changes this node's heartbeats count."""
        inherited = self.inherited()
        return [each for each in self._node.map.partitions if not each.retired and each.id not in inherited]

    def inherited(self) -> Mapping[int, tuple[int, Version]]:
        """By id of each partition taken over with its log: the node that counted it before, and how far."""
        return {
            row.id: row.counted
            for row in self._node.rows
            if row.counted is not None and row.node == self._node.number
        }

    def end_log(self, log: LogRow, partition: LocalPartition, version: Version) -> Heartbeat:
        """The heartbeat that seals the log of a partition.  The caller holds the turn."""
        counted = self.inherited().get(partition.id)
        if counted is None:
            return self._account([partition], version, through=version, log=log.id)
        trimmed = self._retention.trimmed_version()
        tallies = count_log(self._node.engine, log, counted[1], self._node.site_id, trimmed)
        wall_ms = self._clock.time_source()
        return replace(end_log(log, counted, tallies), version=version, through=version, wall_ms=wall_ms)

    def recount(self) -> None:
        """Continue the count of the last heartbeat before the restart, if the logs reach back to it."""
        node, owned = self._node, {each.log_id: each for each in self._counted()}
        trimmed = self._retention.trimmed_version()
        counted = recount(node.engine, node.logs, node.number, owned.keys(), node.site_id, trimmed)
        if counted is not None:
            self._counted_through = self._committer.counting.uncounted_through = counted.through
            for partition in owned.values():
                partition.tallies.extend(counted.tallies[partition.log_id])

    def _account(
        self, partitions: Sequence[LocalPartition], version: Version, *, through: Version, log: int | None
    ) -> Heartbeat:
        counted = self._counted_through >= self._committer.counting.uncounted_through
        return Heartbeat(
            version=version,
            node=self._node.number,
            wall_ms=self._clock.time_source(),
            # While something is prepared, `through` may lie below what is uncounted.
            since=self._counted_through if counted else 0,
            through=through,
            watermark=self.watermarks(),
            sums=drain_sums(partitions, through),
            log=log,
        )
