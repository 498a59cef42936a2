"""Changing the partitions of a node: split, merge, move.

The caller's thread first settles the prepared writes of the partitions, and then holds the turn.  One write
seals their logs and opens the new partitions, so that no version below the seal is still to come.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Protocol

from msgspec.structs import replace

from floodmark.codec.changelog import encode_heartbeat, encode_log_key
from floodmark.engine import WriteRow
from floodmark.model.errors import FloodmarkError, LimitExceeded, PartitionNotFound, Retryable
from floodmark.model.limits import PARTITIONS_MAX
from floodmark.model.partition import PartitionMap
from floodmark.model.ranges import KeyRange
from floodmark.model.version import Version
from floodmark.partition.beating import BeatingNode, Heartbeats
from floodmark.partition.commit.storage import unknown
from floodmark.partition.committer import Committer, moved
from floodmark.partition.families import LOG
from floodmark.partition.layout import (
    LogRow,
    PartitionRow,
    id_step,
    load_next_id,
    open_partition,
    remove_partition,
    store_log,
    store_next_id,
    update_layout,
)
from floodmark.partition.partition import LocalPartition
from floodmark.partition.prepared.writes import conflict

_log = logging.getLogger("floodmark.partition")


class ReshapedNode(BeatingNode, Protocol):
    """A node, as far as a change of its partitions needs it."""

    committer: Committer
    heartbeats: Heartbeats

    def show(self, stored: Sequence[PartitionRow], logs: Sequence[LogRow]) -> None:
        """Serve the partitions of a map."""


class Reshaping:
    """Replaces partitions of a node by others."""

    def __init__(self, node: ReshapedNode) -> None:
        self._node = node

    def split(self, key: bytes) -> tuple[int, int]:
        """Split the partition of a qualified key before that key; returns the two new ids."""
        with self._sealing(lambda: [self._node.map.route(key)]):
            partition = self._node.map.route(key)
            if key == partition.range.start:
                raise PartitionNotFound(
                    f"partition {partition.id} already starts at {key!r}; choose a key inside it",
                    partition=partition.id,
                )
            if len(self._node.map.partitions) >= PARTITIONS_MAX:
                raise LimitExceeded(f"a site has at most {PARTITIONS_MAX:,} partitions; merge some first")
            left = KeyRange(partition.range.start, key)
            right = KeyRange(key, partition.range.end)
            left_id, right_id = self._reshape([partition], [left, right])
            return left_id, right_id

    def merge(self, left_id: int, right_id: int) -> int:
        """Merge two neighbouring partitions; returns the id of the new one."""
        with self._sealing(lambda: [_find(self._node.map, left_id), _find(self._node.map, right_id)]):
            left, right = _find(self._node.map, left_id), _find(self._node.map, right_id)
            if left.range.end is None or left.range.end != right.range.start:
                raise PartitionNotFound(
                    f"partition {right_id} does not follow partition {left_id}; only neighbours merge",
                    partition=right_id,
                )
            joined = KeyRange(left.range.start, right.range.end)
            return self._reshape([left, right], [joined])[0]

    @contextmanager
    def _sealing(self, find: Callable[[], Sequence[LocalPartition]]) -> Iterator[None]:
        """Settle the prepared writes of some partitions and hold the turn, to seal their logs."""
        partitions = find()
        for partition in partitions:
            partition.sealing = True
        try:
            for partition in partitions:
                partition.settle_prepared()
            with self._node.storage.settled():
                self._node.storage.require_wanted()
                for partition in find():
                    if partition.retired:
                        raise moved(partition)
                yield
        finally:
            for partition in partitions:
                partition.sealing = False

    def move(self, partition_id: int, owner: int) -> int:
        """Give a partition to another node, which serves it after it loads the map; returns the new id."""
        with self._sealing(lambda: [_find(self._node.map, partition_id)]):
            partition = _find(self._node.map, partition_id)
            # From here on no version is announced for it: the new owner only moves its clock past the seal.
            partition.retired = True
            try:
                return self._reshape([partition], [partition.range], owner=owner)[0]
            except BaseException:
                # The map shows whether it moved; until storage has recovered, it stays retired.
                partition.retired = self._node.storage.stopped or partition not in self._node.map.partitions
                raise

    def _reshape(
        self, olds: Sequence[LocalPartition], ranges: Sequence[KeyRange], *, owner: int | None = None
    ) -> tuple[int, ...]:
        """Seal the logs of some partitions and replace the partitions, in one write; returns the new ids.

        The caller holds the turn, so every version below the seal is settled.
        """
        number = self._node.number if owner is None else owner
        for old in olds:
            if writes := self._node.committer.prepared.within(old.range):
                raise conflict(writes[0])
        first_id, step = load_next_id(self._node.engine, self._node.number), id_step(self._node.number)
        ids = range(first_id, first_id + 2 * step * len(ranges), 2 * step)
        logs = {log.id: log for log in self._node.logs}
        parents = [partition.log_id for partition in olds]

        rows: list[WriteRow] = []

        def build(version: Version) -> list[WriteRow]:
            rows.append(store_next_id(self._node.number, ids.stop))
            for old in olds:
                rows.append(remove_partition(old.id))
                rows.append(store_log(replace(logs[old.log_id], sealed_at=version)))
                last = self._node.heartbeats.end_log(logs[old.log_id], old, version)
                rows.append((LOG, encode_log_key(old.log_id, version), encode_heartbeat(last)))
            for partition_id, keys in zip(ids, ranges, strict=True):
                rows.extend(
                    open_partition(partition_id, partition_id + step, keys, version, parents, node=number)
                )
            return rows

        self._node.committer.sync_in_turn()
        self._node.committer.store_in_turn(build)
        try:
            self._node.show(*update_layout(self._node.rows, self._node.logs, rows))
        except BaseException as error:
            self._node.storage.stop()
            if isinstance(error, FloodmarkError):
                raise unknown(error) from error
            raise
        became = ", ".join(map(str, ids))
        for old in olds:
            _log.info("partition %d became %s", old.id, became, extra={"partition": old.id})
        return tuple(ids)

    def renew(self, partition_id: int, until: Version) -> None:
        """Replace a partition that was taken over with its log, once its prepared writes have ended."""
        with suppress(Retryable, PartitionNotFound):
            if not self._node.committer.prepared.within(_find(self._node.map, partition_id).range, until):
                with self._sealing(lambda: [_find(self._node.map, partition_id)]):
                    partition = _find(self._node.map, partition_id)
                    self._reshape([partition], [partition.range])


def _find(served: PartitionMap[LocalPartition], partition_id: int) -> LocalPartition:
    for partition in served.partitions:
        if partition.id == partition_id:
            return partition
    raise PartitionNotFound(
        f"no partition {partition_id}; the site lists its partitions", partition=partition_id
    )
