"""Commits over any keys of a node that are decided inside their round, when all earlier commits can be read.

The caller's function reads what it needs and answers what is to be written.  No other commit comes between,
so a counter that is read and written here is exact, and a condition still holds.  What lies in several
partitions is a commit in each of them, all in one atomic engine write.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from floodmark.codec.ordered import encode_prefix
from floodmark.engine import Row, WriteRow
from floodmark.merge.states import Written
from floodmark.model.partition import PartitionMap
from floodmark.model.version import Version
from floodmark.partition.commit.commit import Commit, Mint, RoundStep, Writes, encode_commit_rows
from floodmark.partition.commit.entering import WriteKind, check_fits
from floodmark.partition.commit.merging import Merge, has_states, is_state, merge_writes, write_at
from floodmark.partition.commit.tail import TailEntry
from floodmark.partition.committer import Committer, moved
from floodmark.partition.node import Node
from floodmark.partition.partition import LocalPartition, arrange
from floodmark.partition.prepared.settling import settle_writes
from floodmark.partition.prepared.steps import add_tally
from floodmark.partition.prepared.writes import OpenWrite
from floodmark.partition.read.records import find_stored

# Encoded values, or unstamped states, by their qualified keys; nothing is written if there are none.
Decision: TypeAlias = Callable[[], Mapping[bytes, bytes]]


class Decided(RoundStep):
    """A commit that is decided in its round.  Prepared writes `on` its keys are in `blocking`: then nothing
    was decided, and the caller settles them before it tries again with another step."""

    is_commit = True

    def __init__(self, node: Node, on: Sequence[bytes], decide: Decision, *, durable: bool) -> None:
        super().__init__(None)
        self.durable = durable
        self.blocking: Sequence[OpenWrite] = ()
        self._committer: Committer = node.committer
        self._serving: Callable[[], PartitionMap[LocalPartition]] = lambda: node.map
        self._on = on
        self._decision = decide
        self._parts: list[tuple[LocalPartition, Commit]] = []

    def take(self, mint: Mint) -> Sequence[WriteRow]:
        place = self._committer.place
        if place.prepared.floor is not None:
            self.blocking = place.prepared.on(self._on)
            if self.blocking:
                return ()
        written = self._decision()
        if not written:
            return ()
        keys = sorted(written)
        values = [written[key] for key in keys]
        serving = self._serving()
        place.storage.entrance.check(keys, values, WriteKind.WRITE)
        check_fits(serving.partitions[0].limits, len(keys), sum(map(len, keys)) + sum(map(len, values)))
        if place.storage.dropped:
            place.storage.require_not_dropped(keys)
        if place.storage.is_unusual:
            place.storage.require_writers()
        return self._encode(dict(zip(keys, values, strict=True)), serving, mint)

    def _encode(
        self, written: Mapping[bytes, bytes], serving: PartitionMap[LocalPartition], mint: Mint
    ) -> list[WriteRow]:
        groups: list[tuple[LocalPartition, list[bytes]]] = []
        for key in written:
            partition = serving.route(key)
            if partition.retired:
                raise moved(partition)
            if not groups or groups[-1][0] is not partition:
                groups.append((partition, []))
            groups[-1][1].append(key)
        place = self._committer.place
        rows: list[WriteRow] = []
        for partition, keys in groups:
            version = mint.another()
            writes = self._merge(partition, keys, [written[key] for key in keys], version)
            part = Commit(partition, writes, durable=self.durable)
            rows += encode_commit_rows(part, version, place.site, place.storage.log_row_bytes_max)
            self._parts.append((partition, part))
        # Each partition fits, but what they are merged into may be too much for one write.
        place.storage.require_fitting(rows)
        self.version = version
        return rows

    def _merge(
        self, partition: LocalPartition, keys: list[bytes], values: list[bytes], version: Version
    ) -> Writes:
        writes = arrange(keys, values)
        if not has_states(values):
            return writes
        place = self._committer.place
        merged = merge_writes(place.engine, writes, partition.limits, _write_any(version, place.site))
        assert merged is not None
        return merged

    def settle(self) -> None:
        """Wait for the end of the prepared writes that blocked the step, outside of the round."""
        for write in self.blocking:
            partition = self._serving().route(write.keys[0])
            settle_writes(partition, (write,), self._committer.prepared.settler)

    def is_written(self) -> bool:
        return self._committer.is_written(self._parts[-1][1])

    def finish(self) -> None:
        tail = self._committer.tail
        if tail.is_open:
            for partition, part in self._parts:
                assert part.writes is not None
                keys, changes = list(part.writes.keys), list(part.writes.changes)
                tail.insert(TailEntry(part.version, partition.id, keys, changes), {})

    def count(self, uncounted_through: Version) -> bool:
        for partition, part in self._parts:
            assert part.writes is not None
            for tally in part.tallies:
                add_tally(partition.tallies, tally)
            partition.heat.add_writes(len(part.writes.keys), part.writes.size)
        return True


def newest_version(node: Node, key: bytes) -> Version:
    """The version of the newest record of a qualified key, dead or alive; 0 if there is none."""
    found = find_stored(node.engine, encode_prefix(key), None)
    return 0 if found is None else found[0]


def _write_any(version: Version, site: int) -> Merge:
    """States are merged, and other records replace what is there."""
    write = write_at(version, site)

    def merge(key: bytes, row: Row | None, value: bytes) -> Written | None:
        return write(key, row, value) if is_state(value) else Written(value, value)

    return merge
