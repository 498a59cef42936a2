"""The partitions of a site, as a site offers them."""

from dataclasses import dataclass

from floodmark.codec.ordered import encode_namespace
from floodmark.host.ports import Host
from floodmark.host.statistics import PartitionHeat, PartitionStatistics
from floodmark.model.errors import PartitionNotFound
from floodmark.model.names import require_name
from floodmark.partition.commit.entering import check_key


@dataclass(frozen=True, kw_only=True)
class KeyLocation:
    """Where a key is served: a partition, its node, 0 if one process serves the site, and the node's URL.

    The URL is empty if the partition is served in this process.
    """

    partition: int
    node: int
    url: str


class PartitionCalls:
    """Shows, splits and merges partitions."""

    @property
    def host(self) -> Host:
        """The host of an open site; Closed after `close`."""
        raise NotImplementedError

    def partitions(self) -> list[PartitionStatistics]:
        """The partitions in order of keys."""
        return self.host.partitions.partitions()

    def split(self, namespace: str, key: bytes) -> tuple[int, int]:
        """Cut the partition that holds a key in two, before that key; the ids of the halves."""
        check_key(key)
        require_name(namespace, "namespace")
        return self.host.partitions.split(namespace, key)

    def merge(self, left: int, right: int) -> int:
        """Join two neighbouring partitions; the id of the new one."""
        for partition in (left, right):
            if type(partition) is not int or not 0 <= partition < 1 << 32:
                raise PartitionNotFound(
                    f"no partition {partition}; the site lists its partitions", partition=partition
                )
        return self.host.partitions.merge(left, right)

    def heat(self) -> list[PartitionHeat]:
        """How busy each partition was over the last minutes."""
        return self.host.partitions.heat()

    def locate(self, namespace: str, key: bytes) -> KeyLocation:
        """Where a key is served now.  It may move at any time.

        >>> import floodmark, tempfile
        >>> with floodmark.open(tempfile.mkdtemp(), site="oslo") as site:
        ...     _ = site.create_namespace("users")
        ...     _, right = site.split("users", b"m")
        ...     site.locate("users", b"zoe").partition == right
        True
        """
        check_key(key)
        require_name(namespace, "namespace")
        host = self.host
        host.router.maps.refresh()
        number = encode_namespace(host.namespaces.find_namespace(namespace).id)
        found = host.router.maps.map.route(number + key)
        owners = {each.id: each.node for each in self.partitions()}
        return KeyLocation(partition=found.id, node=owners.get(found.id, 0), url=found.place)
