"""Checks a request's arguments, and its caller's rights to the namespaces and partitions that it names.

A client checks its users' arguments too, but any program may speak the protocol.  Partitions themselves check
the rows that they store (`partition/commit/entering.py`).  A key begins with the id of its namespace, and
rights are granted by name: names are cached here by id, and listed again when an id is not known.
"""

from collections.abc import Sequence

from floodmark.codec.ordered import NAMESPACE_BYTES, encode_namespace
from floodmark.host.catalog import NamespaceRow
from floodmark.host.ports import Host
from floodmark.model.access import Role
from floodmark.model.errors import (
    InvalidKey,
    InvalidRange,
    InvalidVersion,
    LimitExceeded,
    NamespaceNotFound,
    PartitionMoved,
)
from floodmark.model.limits import TRANSACTION_KEYS_MAX
from floodmark.model.partition import Partition, PartitionMap, ReadSet
from floodmark.model.ranges import KeyRange, prefix_end
from floodmark.model.stream import SWAP_PLACE_BYTES
from floodmark.model.version import VERSION_MAX, Version
from floodmark.partition.commit.entering import QUALIFIED_BYTES_MAX, check_keys, namespaces_of
from floodmark.partition.conflicts import check_write_conflicts
from floodmark.server.access import Caller

# A range may begin directly after the longest key.
_BOUND_BYTES_MAX = QUALIFIED_BYTES_MAX + 1


class AccessGuard:
    """Checks a caller's rights to a site's data.  Safe to use from many threads."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._namespaces: dict[bytes, NamespaceRow] = {}
        self._map: PartitionMap[Partition] | None = None
        self._partitions: dict[int, Partition] = {}

    def require_keys(self, caller: Caller, role: Role, keys: Sequence[bytes]) -> None:
        """Refuse a caller who may not touch the namespaces of some qualified keys."""
        for namespace in namespaces_of(keys):
            caller.require(role, self._row(namespace).name)

    def require_namespace(self, caller: Caller, role: Role, namespace: int | None) -> None:
        """Refuse a caller without a role in a namespace, given by its id; None stands for the whole site."""
        caller.require(role, None if namespace is None else self.name_of(namespace))

    def check_reads(self, caller: Caller, reads: ReadSet) -> None:
        """Refuse a read set of keys to which the caller has no right: a conflict would reveal changes."""
        check_version(reads.since)
        if len(reads.keys) + len(reads.ranges) > TRANSACTION_KEYS_MAX:
            raise LimitExceeded(f"a transaction may read {TRANSACTION_KEYS_MAX:,} keys and ranges")
        if reads.keys:
            check_keys(reads.keys)
        for keys in (*reads.ranges, *reads.writes):
            check_namespace_range(keys.start[:NAMESPACE_BYTES], keys)
        check_write_conflicts(len(reads.writes))
        read = [*reads.keys, *(keys.start for keys in reads.ranges)]
        for role, named in ((Role.READ, read), (Role.WRITE, [keys.start for keys in reads.writes])):
            if named:
                self.require_keys(caller, role, named)

    def readable(self, caller: Caller) -> list[bytes]:
        """The key prefixes of the namespaces that a caller may read."""
        rows = self._host.namespaces.list_namespaces()
        return [
            encode_namespace(row.id)
            for row in rows
            if row.dropped_at is None and caller.may(Role.READ, row.name)
        ]

    def name_of(self, namespace: int) -> str:
        """The name of a namespace, given by its id; NamespaceNotFound if there is none."""
        if not 0 <= namespace < 1 << 8 * NAMESPACE_BYTES:
            raise _not_found(namespace)
        return self.name(encode_namespace(namespace))

    def name(self, namespace: bytes) -> str:
        """The name of a namespace, given by the prefix of its keys."""
        return self._row(namespace).name

    def _row(self, namespace: bytes) -> NamespaceRow:
        row = self._namespaces.get(namespace)
        if row is None:
            rows = self._host.namespaces.list_namespaces()
            self._namespaces = {encode_namespace(row.id): row for row in rows}
            row = self._namespaces.get(namespace)
        if row is None:
            raise _not_found(int.from_bytes(namespace, "big"))
        if row.dropped_at is not None:
            raise NamespaceNotFound(
                f"namespace {row.name!r} was dropped; create it again with "
                f"site.create_namespace({row.name!r})",
                namespace=row.name,
            )
        return row

    def partition(self, partition_id: int) -> Partition:
        """The partition with an id; PartitionMoved if there is none any more."""
        present = self._host.served.map
        if self._map is not present:
            partitions = {partition.id: partition for partition in present.partitions}
            self._partitions, self._map = partitions, present
        partition = self._partitions.get(partition_id)
        if partition is None:
            raise PartitionMoved(
                f"there is no partition {partition_id} any more; ask for the map again",
                partition=partition_id,
            )
        return partition


def _not_found(namespace: int) -> NamespaceNotFound:
    return NamespaceNotFound(
        f"there is no namespace with id {namespace}, or it was dropped; look it up by its name again"
    )


def check_size(what: str, size: int, size_max: int) -> None:
    """Raise LimitExceeded if `size` is above `size_max`."""
    if size > size_max:
        raise LimitExceeded(
            f"{what} has {size:,} bytes; at most {size_max:,} are allowed. Ask for less at a time",
            size=size,
        )


def check_inside(partition: Partition, keys: Sequence[bytes]) -> None:
    """Raise PartitionMoved if another partition has some of the keys: the client's map is out of date."""
    if not (partition.range.contains(min(keys)) and partition.range.contains(max(keys))):
        raise PartitionMoved(
            f"partition {partition.id} does not hold all of the keys; ask for the map again",
            partition=partition.id,
        )


def check_namespace_range(namespace: bytes, keys: KeyRange) -> None:
    """Raise InvalidRange unless a range of qualified keys begins and ends within one namespace."""
    end = prefix_end(namespace)
    if (
        len(namespace) != NAMESPACE_BYTES
        or not keys.start.startswith(namespace)
        or keys.end is None
        or end is None
        or not keys.start <= keys.end <= end
        or max(len(keys.start), len(keys.end)) > _BOUND_BYTES_MAX
    ):
        raise InvalidRange("a range of keys must lie within one namespace, and begin before it ends")


def check_version(version: Version | None) -> None:
    """Raise InvalidVersion unless a reader may ask for `version`; None stands for the present."""
    if version is not None and not 0 < version <= VERSION_MAX:
        raise InvalidVersion(f"{version} is not a version; versions are positive and have 64 bits")


def check_position(version: Version | None) -> None:
    """Raise InvalidVersion unless `version` is valid, or 0 for the position before every change."""
    if version:
        check_version(version)


def check_snapshot(place: bytes | None) -> None:
    """Raise InvalidKey if a place in a snapshot is too long.

    It is a qualified key, or empty for the beginning; a prefix marks a swap.
    """
    if place is not None and len(place) > QUALIFIED_BYTES_MAX + SWAP_PLACE_BYTES:
        raise InvalidKey(f"a place in a snapshot is a key, and this one has {len(place):,} bytes")
