"""The partitions of a site of this process."""

from floodmark.codec.ordered import encode_namespace
from floodmark.host.catalog import Catalog
from floodmark.host.statistics import PartitionHeat, PartitionStatistics
from floodmark.partition import Node


class LocalPartitions:
    """The port to partitions, over a node."""

    def __init__(self, node: Node, catalog: Catalog) -> None:
        self._node = node
        self._catalog = catalog

    def partitions(self) -> list[PartitionStatistics]:
        return [
            PartitionStatistics(
                id=partition.id,
                range=partition.range,
                writes=partition.heat.writes,
                reads=partition.heat.reads,
                bytes_written=partition.heat.bytes_written,
            )
            for partition in self._node.map.partitions
        ]

    def split(self, namespace: str, key: bytes) -> tuple[int, int]:
        row = self._catalog.get(namespace)
        return self._node.split(encode_namespace(row.id) + key)

    def merge(self, left: int, right: int) -> int:
        return self._node.merge(left, right)

    def heat(self) -> list[PartitionHeat]:
        now_ms = self._node.clock.time_source()
        return [
            PartitionHeat(id=partition.id, range=partition.range, samples=partition.heat.history(now_ms))
            for partition in self._node.map.partitions
        ]
