"""The partition map and the list of change logs, as stored in the engine.

A split, a merge or a move seals logs at a version and opens new ones that name their parents.  Sealed
logs are never rewritten; they are removed once they are trimmed up to the version of their seal.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from operator import attrgetter
from typing import Final, TypeVar

import msgspec

from floodmark.engine import Engine, WriteRow
from floodmark.engine.base import scan_rows
from floodmark.model.errors import Corruption
from floodmark.model.limits import NODES_MAX
from floodmark.model.ranges import KeyRange, prefix_end
from floodmark.model.version import Version
from floodmark.partition.families import LOGS, META, NEXT_ID, PARTITIONS

# A node's heartbeats have a log of their own, named by the node's number.
FIRST_ID: Final = NODES_MAX


class PartitionRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """One partition of the map."""

    id: int
    start: bytes
    end: bytes | None
    log: int
    # The node that owns it; 0 on an engine that is not shared.
    node: int = 0
    # Of a partition that was taken over with its log: the node whose heartbeats counted the log before, and
    # the version up to which they did (0 if unknown).
    counted: tuple[int, Version] | None = None

    @property
    def range(self) -> KeyRange:
        """The qualified keys of the partition."""
        return KeyRange(self.start, self.end)


class LogRow(msgspec.Struct, frozen=True):
    """One change log.  Its changes are in `(opened_at, sealed_at]`."""

    id: int
    partition: int | None
    start: bytes
    end: bytes | None
    parents: list[int]
    opened_at: Version
    sealed_at: Version | None = None

    @property
    def range(self) -> KeyRange:
        """The qualified keys whose changes may be in the log."""
        return KeyRange(self.start, self.end)


Stored = TypeVar("Stored")


def load_partitions(engine: Engine) -> list[PartitionRow]:
    """The partition map, in order of keys, without holes or overlaps.

    It is read page by page, and read again if another node has changed it meanwhile.
    """
    before: list[PartitionRow] = []
    while True:
        rows = sorted(load_metadata(engine, PARTITIONS, PartitionRow), key=lambda row: row.start)
        apart = next(((left, right) for left, right in pairwise(rows) if left.end != right.start), None)
        if apart is None:
            return rows
        if rows == before:
            left, right = apart
            raise Corruption(
                f"partitions {left.id} and {right.id} do not meet: one ends at {left.end!r}, the "
                f"other starts at {right.start!r}. Restore the site from a backup"
            )
        before = rows


def load_logs(engine: Engine) -> list[LogRow]:
    """All change logs that are not fully trimmed, in order of their ids."""
    return list(load_metadata(engine, LOGS, LogRow))


def load_next_id(engine: Engine, node: int) -> int:
    """The next id that a node may give to a partition or a log; the following ones lie `id_step` apart.

    Node n of several gives only ids that are n modulo 64, so nodes need not agree on them.
    """
    stored = engine.get(META, _next_id_key(node))
    return FIRST_ID + node if stored is None else int.from_bytes(stored, "big")


def id_step(node: int) -> int:
    """The distance between two consecutive ids that a node gives."""
    return NODES_MAX if node else 1


def load_version(engine: Engine, key: bytes) -> Version:
    """The version stored under a metadata key; 0 if there is none."""
    stored = engine.get(META, key)
    return 0 if stored is None else int.from_bytes(stored, "big")


def store_version(key: bytes, version: Version) -> WriteRow:
    """The write that stores a version under a metadata key."""
    return META, key, version.to_bytes(8, "big")


def store_partition(row: PartitionRow) -> WriteRow:
    """The write that enters a partition into the map."""
    return META, _key(PARTITIONS, row.id), msgspec.json.encode(row)


def remove_partition(partition_id: int) -> WriteRow:
    """The write that takes a partition out of the map."""
    return META, _key(PARTITIONS, partition_id), None


def store_log(row: LogRow) -> WriteRow:
    """The write that enters or changes a log."""
    return META, _key(LOGS, row.id), msgspec.json.encode(row)


def remove_log(log_id: int) -> WriteRow:
    """The write that forgets a log whose rows are gone."""
    return META, _key(LOGS, log_id), None


def store_next_id(node: int, next_id: int) -> WriteRow:
    """The write that stores the next id of a node, so that no id is used twice."""
    return META, _next_id_key(node), next_id.to_bytes(4, "big")


def _next_id_key(node: int) -> bytes:
    return NEXT_ID + b"/" + node.to_bytes(1, "big") if node else NEXT_ID


def open_partition(
    partition_id: int, log_id: int, keys: KeyRange, opened_at: Version, parents: Sequence[int], *, node: int
) -> list[WriteRow]:
    """The writes that add a partition of a node with a fresh log."""
    log = LogRow(
        id=log_id,
        partition=partition_id,
        start=keys.start,
        end=keys.end,
        parents=list(parents),
        opened_at=opened_at,
    )
    partition = PartitionRow(id=partition_id, start=keys.start, end=keys.end, log=log_id, node=node)
    return [store_log(log), store_partition(partition)]


def read_metadata(engine: Engine, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
    """All metadata rows whose keys start with `prefix`, page by page."""
    return scan_rows(engine, META, prefix, prefix_end(prefix))


def load_metadata(engine: Engine, prefix: bytes, kind: type[Stored]) -> Iterator[Stored]:
    """All metadata rows whose keys start with `prefix`, decoded."""
    for key, stored in read_metadata(engine, prefix):
        try:
            yield msgspec.json.decode(stored, type=kind)
        except msgspec.MsgspecError as error:
            raise Corruption(
                f"the metadata row {key!r} is damaged: {error}. Restore the site from a backup"
            ) from error


def update_layout(
    rows: Iterable[PartitionRow], logs: Iterable[LogRow], written: Iterable[WriteRow]
) -> tuple[list[PartitionRow], list[LogRow]]:
    """Apply the rows that this node has written to the map and the logs, without loading them again."""
    partitions, present = {row.id: row for row in rows}, {log.id: log for log in logs}
    for family, key, value in written:
        if family == META and key.startswith(PARTITIONS):
            partitions.pop(int.from_bytes(key[len(PARTITIONS) :], "big"), None)
            if value is not None:
                row = msgspec.json.decode(value, type=PartitionRow)
                partitions[row.id] = row
        elif family == META and key.startswith(LOGS) and value is not None:
            log = msgspec.json.decode(value, type=LogRow)
            present[log.id] = log
    return sorted(partitions.values(), key=attrgetter("start")), sorted(
        present.values(), key=attrgetter("id")
    )


def _key(prefix: bytes, identity: int) -> bytes:
    return prefix + identity.to_bytes(4, "big")
