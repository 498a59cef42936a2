"""Which namespaces and partitions a request is about, and whether its caller may touch them.

A key begins with the id of its namespace, and rights are given by name.  Names are kept here by id and
asked for again when an id is not known; the rows are the site's own, so a drop shows at once.
"""

from collections.abc import Sequence

from floodmark.codec.ordered import NAMESPACE_BYTES, encode_namespace
from floodmark.host.catalog import NamespaceRow
from floodmark.host.ports import Host
from floodmark.model.access import Role
from floodmark.model.errors import NamespaceNotFound, PartitionMoved
from floodmark.model.partition import Partition, PartitionMap
from floodmark.partition.commit.entering import namespaces_of
from floodmark.server.access import Caller


class AccessGuard:
    """Stands before a site's data.  Safe to use from many threads."""

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
        """The same by the id of a namespace; None stands for all of them."""
        caller.require(role, None if namespace is None else self.name_of(namespace))

    def readable(self, caller: Caller) -> list[bytes]:
        """What the keys begin with of the namespaces that a caller may read."""
        rows = self._host.namespaces.list_namespaces()
        return [
            encode_namespace(row.id)
            for row in rows
            if row.dropped_at is None and caller.may(Role.READ, row.name)
        ]

    def name_of(self, namespace: int) -> str:
        """The name of a namespace."""
        if not 0 <= namespace < 1 << 8 * NAMESPACE_BYTES:
            raise _not_found(namespace)
        return self.name(encode_namespace(namespace))

    def name(self, namespace: bytes) -> str:
        """The name of a namespace by the bytes that its keys begin with."""
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
        """The partition of an id, if it is still there."""
        present = self._host.router.maps.map
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
