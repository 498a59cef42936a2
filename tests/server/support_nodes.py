"""Nodes that refuse and die on purpose: several servers of one site in memory, of which each owns a part.

They share one host, so what a client does is seen apart from what nodes do.  A node answers for its own
partitions only, and for the whole site only if it is the keeper.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Final

from tests.postgres import CuttingProxy
from tests.server.support import LOOPBACK, open_memory

from floodmark.host.ports import PORTS
from floodmark.model.actions import declared
from floodmark.model.errors import NotKeeper, PartitionMoved
from floodmark.model.partition import Owners, PartitionMap
from floodmark.routing import Router
from floodmark.server import Server, ServerOptions, serve
from floodmark.site import Site
from floodmark.wire.address import parse_address

_PORTS: Final = {port.attribute: port.protocol for port in PORTS}
# What nodes look up in the engine that they share.
_CATALOG: Final = ("find_namespace", "list_namespaces")

CALLS_BEFORE_TAKEOVER: Final = 3
# Of HTTP/2: DATA and HEADERS.
CALL_FRAMES: Final = (0, 1)
FRAME_HEADER_BYTES: Final = 9
# The proxy leads to one port, which carries all calls.
FLIGHT: Final = ServerOptions(resp_listen=None)


class MovedPartition:
    """A partition of another node: every call is refused."""

    def __init__(self, partition: Any) -> None:
        self.id, self.range, self.limits = partition.id, partition.range, partition.limits

    def __getattr__(self, name: str) -> Any:
        def refuse(*_: object, **__: object) -> Any:
            raise PartitionMoved(f"partition {self.id} is another node's", partition=self.id)

        return refuse


class NodePort:
    """A port of a node: refused unless the node keeps the site."""

    def __init__(self, view: "NodeView", attribute: str) -> None:
        self._view = view
        self._attribute = attribute

    def __getattr__(self, name: str) -> Any:
        nodes, number = self._view.nodes, self._view.number
        nodes.asked.append((number, name))
        nodes.count()
        anywhere = name in _CATALOG or declared(getattr(_PORTS[self._attribute], name)).anywhere
        if nodes.keeper != number and not anywhere:
            known = {"node": nodes.keeper, "url": nodes.urls[nodes.keeper]} if nodes.tells_keeper else {}
            raise NotKeeper(f"node {number} does not keep the site", **known)
        return getattr(getattr(nodes.site.host, self._attribute), name)


class NodeView:
    """The host of one node."""

    def __init__(self, nodes: "TestNodes", number: int) -> None:
        self.nodes = nodes
        self.number = number
        self.router = Router(self)
        self._map: Any = None
        self._made_of: object = None

    def __getattr__(self, name: str) -> Any:
        return NodePort(self, name) if name in _PORTS else getattr(self.nodes.site.host, name)

    @property
    def map(self) -> Any:
        """The partitions, of which those of other nodes refuse."""
        present = self.nodes.site.host.router.maps.map
        made_of = present, self.nodes.default_owner, dict(self.nodes.owners)
        if made_of != self._made_of:
            partitions = [
                each if self.nodes.owner(each.id) == self.number else MovedPartition(each)
                for each in present.partitions
            ]
            self._map, self._made_of = PartitionMap(present.starts, partitions), made_of
        return self._map

    def refresh(self) -> None:
        """Nothing to do: the map is always the present one."""

    @property
    def maps(self) -> Any:
        return self

    def owners(self) -> Owners:
        nodes = self.nodes
        nodes.count()
        ids = [each.id for each in nodes.site.host.router.maps.map.partitions]
        return Owners(nodes.urls, nodes.keeper, {number: nodes.owner(number) for number in ids})

    def close(self) -> None:
        """The site is closed with the last node."""


class DyingProxy(CuttingProxy):
    """The way to a node, which can be cut for good at any message."""

    def __init__(self, port: int, on_cut: Callable[[], None]) -> None:
        super().__init__(port)
        self._on_cut = on_cut

    def counts(self, message: bytes) -> bool:
        """Not what HTTP/2 says of itself, such as pings: it comes at any time."""
        at = 0
        while at + FRAME_HEADER_BYTES <= len(message):
            if message[at + 3] in CALL_FRAMES:
                return True
            at += FRAME_HEADER_BYTES + int.from_bytes(message[at : at + 3], "big")
        return at != len(message)

    def _cut(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(2)
        self._listener.close()
        super()._cut()
        self._on_cut()


class TestNodes:
    """A site of two nodes.  The first owns everything and keeps, until it dies; a proxy leads to it."""

    __test__ = False

    def __init__(self, site: Site) -> None:
        self.site = site
        self.urls: dict[int, str] = {}
        self.keeper = 1
        self.owners: dict[int, int] = {}
        self.default_owner = 1
        self.tells_keeper = True
        # Port calls by node, and how many calls and maps are left before the second node takes over.
        self.asked: list[tuple[int, str]] = []
        self.left: int | None = None
        self.servers: dict[int, Server] = {}
        self.proxy: Any = None

    @property
    def url(self) -> str:
        """All nodes in one URL."""
        return "grpc://" + ",".join(url.removeprefix("grpc://") for url in self.urls.values())

    def owner(self, partition: int) -> int:
        """The node that owns a partition."""
        return self.owners.get(partition, self.default_owner)

    def take_over(self) -> None:
        """Give everything to the second node."""
        self.keeper = self.default_owner = 2
        self.owners.clear()

    def count(self) -> None:
        """Note that a node was asked: a takeover takes its time."""
        if self.left is not None:
            self.left -= 1
            if self.left == 0:
                self.take_over()

    def die(self) -> None:
        """Let the second node take over after some more calls."""
        self.left = CALLS_BEFORE_TAKEOVER


@contextmanager
def two_nodes() -> Iterator[TestNodes]:
    """Two nodes of a site with one partition, in this process."""
    with ExitStack() as stack:
        site = stack.enter_context(open_memory())
        nodes = TestNodes(site)
        for number in (1, 2):
            view: Any = NodeView(nodes, number)
            nodes.servers[number] = stack.enter_context(serve(Site(view, durable=True), LOOPBACK, FLIGHT))
            nodes.urls[number] = nodes.servers[number].url
        nodes.proxy = DyingProxy(nodes.servers[1].address.port, on_cut=nodes.die)
        stack.callback(nodes.proxy.close)
        nodes.urls[1] = parse_address(f"grpc://127.0.0.1:{nodes.proxy.port}").url
        yield nodes
