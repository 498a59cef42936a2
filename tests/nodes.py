"""Several nodes of a site in one process: one engine in memory, a real server each, and simulated time."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Final

import pytest

from floodmark.engine import MemoryEngine
from floodmark.host.nodes import NodeHost, make_node
from floodmark.model.limits import NODES_MAX
from floodmark.partition import FAMILIES
from floodmark.partition.membership import BEAT_MS, DEAD_MS
from floodmark.server import Server, ServerOptions, serve
from floodmark.site import Site
from floodmark.site.connecting import connect
from floodmark.site.embedding import open_engine
from floodmark.testing.clock import SimulatedTime

LOOPBACK: Final = "127.0.0.1:0"
# Under load a node may need longer than usual to answer.  Its ceiling would do for others, but it lies in the
# future, and simulated time does not come to it by itself.
ANSWER_SECONDS: Final = 10.0
PLAIN: Final = ServerOptions(metrics_listen=LOOPBACK, resp_listen=LOOPBACK, resp_namespace="users")


class SharedEngine(MemoryEngine):
    """An engine that outlives the nodes that close it."""

    def close(self) -> None:
        pass


class NodeCluster:
    """Nodes that beat together, under one time.  A killed node neither beats nor answers."""

    def __init__(
        self,
        nodes: int = 3,
        options: Mapping[int, ServerOptions] | None = None,
        *,
        name: str = "oslo",
        time: SimulatedTime | None = None,
    ) -> None:
        self._options = options or {}
        self._name = name
        self.time = time or SimulatedTime()
        self.engine = SharedEngine(FAMILIES)
        self.offsets = dict.fromkeys(range(1, NODES_MAX), 0)
        self.sites: dict[int, Site] = {}
        self.servers: dict[int, Server] = {}
        for number in range(1, nodes + 1):
            self.start(number)
        self.tick()

    def start(self, number: int, *, listens: bool = True) -> Site:
        """Start a node, with a server if it `listens`."""
        site = open_engine(
            self.engine,
            site=self._name,
            time_source=lambda: self.time() + self.offsets[number],
            elapsed_source=self.time,
            make_host=partial(
                make_node, node=number, beat_source=self.time, beats=False, ask_seconds=ANSWER_SECONDS
            ),
        )
        self.sites[number] = site
        if listens:
            self.servers[number] = serve(site, LOOPBACK, self._options.get(number, PLAIN))
        return site

    def host(self, number: int) -> NodeHost:
        """The host of a node."""
        host = self.sites[number].host
        assert isinstance(host, NodeHost)
        return host

    def tick(self, times: int = 1) -> None:
        """Let all nodes that live beat, and watch each other."""
        for _ in range(times):
            self.time.advance(BEAT_MS)
            self.beat()

    def beat(self) -> None:
        """Let all nodes that live beat once."""
        for number in self.sites:
            self.host(number).beat()
        for number in self.sites:
            self.host(number).watch()

    def silence(self, number: int) -> Site:
        """Let a node beat no more, as if it were suspended; its server goes on."""
        return self.sites.pop(number)

    def kill(self, number: int) -> None:
        """End a node without a word."""
        self.silence(number)
        # Closing the server would close the site as well, which says farewell.
        self.servers.pop(number)._stop_service(0.5)

    def take_over(self) -> None:
        """Let the living nodes take over what the others have left."""
        self.tick(DEAD_MS // BEAT_MS + 2)

    @property
    def url(self) -> str:
        """All nodes in one URL."""
        return "grpc://" + ",".join(server.url.removeprefix("grpc://") for server in self.servers.values())

    def spread(self) -> None:
        """Make the namespace `users`, cut its keys in up to three parts, and give each node one."""
        first = self.sites[1]
        first.create_namespace("users")
        for _, cut in zip([*self.sites][1:], (b"h", b"p"), strict=False):
            first.split("users", cut)
        for number, partition in zip((1, 2, 3), first.partitions(), strict=False):
            if number != 1:
                self.host(1).shared.node.reshaping.move(partition.id, number)
        self.tick()

    def owner_of(self, namespace: str, key: bytes) -> int:
        """The number of the node that owns a key."""
        host = next(map(self.host, self.sites))
        prefix = host.current.catalog.get(namespace).id.to_bytes(3, "big")
        return next(row.node for row in host.shared.node.rows if row.range.contains(prefix + key))

    def connect(self, number: int) -> Site:
        """A client that knows one node."""
        return connect(self.servers[number].url)

    def close(self) -> None:
        """End all nodes; none is left to give partitions to."""
        for site in self.sites.values():
            site.host.leave = lambda: None  # type: ignore[method-assign]
        for server in self.servers.values():
            server.close(timeout_seconds=0.5)
        for site in self.sites.values():
            site.close()


@contextmanager
def node_cluster(
    nodes: int = 3,
    options: Mapping[int, ServerOptions] | None = None,
    *,
    name: str = "oslo",
    time: SimulatedTime | None = None,
) -> Iterator[NodeCluster]:
    """Nodes that are ended behind the block; `options` are those of the servers of some."""
    cluster = NodeCluster(nodes, options, name=name, time=time)
    try:
        yield cluster
    finally:
        cluster.close()


@pytest.fixture
def cluster() -> Iterator[NodeCluster]:
    """Three nodes, each with a third of the keys of `users`."""
    with node_cluster() as nodes:
        nodes.spread()
        yield nodes
