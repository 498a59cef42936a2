"""The methods of a site for its partitions."""

from dataclasses import dataclass

from floodmark.codec.ordered import encode_namespace
from floodmark.host.ports import Host
from floodmark.host.statistics import PartitionHeat, PartitionStatistics
from floodmark.model.errors import PartitionNotFound
from floodmark.model.names import require_name
from floodmark.partition.commit.entering import check_key


@dataclass(frozen=True, kw_only=True)
class KeyLocation:
    """The partition that holds a key, the number of its node, and the node's URL.

    The number is 0 if one process serves the whole site.  The URL is empty if that is this process.
    """

    partition: int
    node: int
    url: str


class PartitionCalls:
    """Shows, splits and merges partitions."""

    @property
    def host(self) -> Host:
        """The host of this site.  Raises Closed after `close`."""
        raise NotImplementedError

    def partitions(self) -> list[PartitionStatistics]:
        """The partitions of the site, in key order."""
        return self.host.partitions.partitions()

    def split(self, namespace: str, key: bytes) -> tuple[int, int]:
        """Split the partition that holds a key before that key; return the ids of the two halves."""
        check_key(key)
        require_name(namespace, "namespace")
        return self.host.partitions.split(namespace, key)

    def merge(self, left: int, right: int) -> int:
        """Merge two adjacent partitions; return the id of the new one."""
        for partition in (left, right):
            if type(partition) is not int or not 0 <= partition < 1 << 32:
                raise PartitionNotFound(
                    f"no partition {partition}; the site lists its partitions", partition=partition
                )
        return self.host.partitions.merge(left, right)

    def heat(self) -> list[PartitionHeat]:
        """The recent load of each partition."""
        return self.host.partitions.heat()

    def locate(self, namespace: str, key: bytes) -> KeyLocation:
        """The current location of a key, which may move at any time.

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
