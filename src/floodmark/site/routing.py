"""From keys to partitions, through splits and merges.

A partition that was split, merged or moved refuses with `PartitionMoved`, and the router looks at the
map again.  Groups of keys and their partition are always taken from one and the same map: a newer one
may give a key to somebody else.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeVar

from floodmark.codec.ordered import NAMESPACE_BYTES
from floodmark.model.errors import CommitTooLarge, FloodmarkError, PartitionMoved, PartlyDone
from floodmark.model.limits import PAGE_ROWS_MAX
from floodmark.model.partition import Partition
from floodmark.model.ranges import KeyRange, after
from floodmark.model.version import Version
from floodmark.partition import LocalPartition, Node

# A key may change hands this often under one call; more means that something is wrong.
ROUTES_MAX: Final = 100

Result = TypeVar("Result")
Rows = dict[bytes, bytes]


class Router:
    """Finds the partition of a key and goes on where it has moved."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def call(self, key: bytes, operation: Callable[[Partition], Result]) -> Result:
        """Call the partition of a qualified key."""
        moved: PartitionMoved | None = None
        for _ in range(ROUTES_MAX):
            try:
                return operation(self._node.map.route(key))
            except PartitionMoved as error:
                moved = error
        assert moved is not None
        raise moved

    def get(self, key: bytes, at: Version | None) -> bytes | None:
        """The value of a qualified key."""
        try:
            return self._node.map.route(key).get(key, at)
        except PartitionMoved:
            return self.call(key, lambda partition: partition.get(key, at))

    def put_one(self, key: bytes, stored: bytes, *, durable: bool) -> Version:
        """Commit one qualified key."""
        try:
            return self._node.map.route(key).put((key,), (stored,), durable=durable)
        except PartitionMoved:
            return self.call(key, lambda partition: partition.put((key,), (stored,), durable=durable))

    def put(self, rows: Rows, *, durable: bool) -> Version:
        """Commit qualified keys, once per partition; the highest version, 0 for no rows.

        Rows that do not fit into one commit per partition are refused before anything is written.
        """
        highest = 0
        groups = self._groups(rows)
        for partition, group in groups:
            if not _fits(group, partition):
                raise _too_large(group, partition)

        def put_group(partition: Partition, group: Rows) -> None:
            nonlocal highest
            version = partition.put(list(group), list(group.values()), durable=durable)
            highest = max(highest, version)

        self._each_group(groups, put_group)
        return highest

    def delete_unchanged(self, keys: Sequence[bytes], since: Version, *, durable: bool) -> int:
        """Delete qualified keys that were not written after `since`; how many."""
        deleted = 0

        def delete_group(partition: Partition, group: Rows) -> None:
            nonlocal deleted
            deleted += partition.delete_unchanged(list(group), since, durable=durable)

        self._each_group(self._groups(dict.fromkeys(keys, b"")), delete_group)
        return deleted

    def scan(
        self, keys: KeyRange, at: Version, limit: int | None, *, reverse: bool
    ) -> Iterator[list[tuple[bytes, bytes]]]:
        """The live (user key, value) pairs of a range of one namespace, as of a version, page by page."""
        namespace = keys.start[:NAMESPACE_BYTES]
        left: KeyRange | None = keys
        while left is not None and limit != 0:
            partition = self._first_partition(left, reverse=reverse)
            within = partition.range.intersect(left)
            if within is None:
                return
            last: bytes | None = None
            resume: bytes | None = None
            finished = False
            while not finished and limit != 0:
                rows_max = PAGE_ROWS_MAX if limit is None else min(limit + 16, PAGE_ROWS_MAX)
                try:
                    rows, resume = partition.scan(
                        within, at, rows_max=rows_max, reverse=reverse, resume=resume
                    )
                except PartitionMoved:
                    break
                finished = resume is None
                if limit is not None:
                    rows = rows[:limit]
                    limit -= len(rows)
                if rows:
                    last = namespace + rows[-1][0]
                yield rows
            left = _behind(left, within if finished else None, last, reverse=reverse)

    def _first_partition(self, keys: KeyRange, *, reverse: bool) -> LocalPartition:
        if not reverse:
            return self._node.map.route(keys.start)
        overlapping = self._node.map.overlapping(keys)
        return overlapping[-1] if overlapping else self._node.map.route(keys.start)

    def _each_group(
        self, groups: Sequence[tuple[Partition, Rows]], commit: Callable[[Partition, Rows], None]
    ) -> None:
        done = 0
        failure: FloodmarkError | None = None
        for _ in range(ROUTES_MAX):
            moved: Rows = {}
            for partition, group in groups:
                try:
                    commit(partition, group)
                    done += len(group)
                except PartitionMoved as error:
                    moved |= group
                    failure = error
                except FloodmarkError as error:
                    raise _partly_done(done, error) from error
            if not moved:
                return
            groups = self._groups(moved)
            if any(not _fits(group, partition) for partition, group in groups):
                break
        assert failure is not None
        raise _partly_done(done, failure) from failure

    def _groups(self, rows: Rows) -> list[tuple[Partition, Rows]]:
        """Rows by the partition that has their keys, in one map."""
        partition_map = self._node.map
        if len(partition_map.partitions) == 1:
            return [(partition_map.partitions[0], rows)] if rows else []
        groups: dict[int, tuple[Partition, Rows]] = {}
        for key, value in rows.items():
            partition = partition_map.route(key)
            groups.setdefault(partition.id, (partition, {}))[1][key] = value
        return list(groups.values())


def _size(rows: Rows) -> int:
    return sum(map(len, rows)) + sum(map(len, rows.values()))


def _fits(rows: Rows, partition: Partition) -> bool:
    return _size(rows) <= partition.limits.bytes_max and len(rows) <= partition.limits.changes_max


def _too_large(rows: Rows, partition: Partition) -> CommitTooLarge:
    limits, size = partition.limits, _size(rows)
    return CommitTooLarge(
        f"{len(rows):,} pairs for partition {partition.id} make {size:,} bytes; one commit holds at most "
        f"{limits.bytes_max:,} bytes and {limits.changes_max:,} pairs. Write them in smaller portions",
        partition=partition.id,
        size=size,
    )


def _partly_done(done: int, failure: FloodmarkError) -> FloodmarkError:
    """Between partitions there is no atomicity here; at least it is said."""
    if not done:
        return failure.again()
    return PartlyDone(
        f"{done:,} keys were written before a partition failed ({failure}); read before you repeat",
        done=done,
    )


def _behind(
    keys: KeyRange, finished: KeyRange | None, last: bytes | None, *, reverse: bool
) -> KeyRange | None:
    """What is left of a range after a partition was read to its end, or up to `last`."""
    if finished is not None:
        start, end = (keys.start, finished.start) if reverse else (finished.end, keys.end)
    elif last is not None:
        start, end = (keys.start, last) if reverse else (after(last), keys.end)
    else:
        return keys
    return KeyRange(start, end) if start is not None and (end is None or start < end) else None
