"""Several nodes of one site in one process, on one engine and under one time."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial

from floodmark.codec.values import encode_value
from floodmark.engine import Guard, MemoryEngine
from floodmark.host.background import Background
from floodmark.host.catalog import generations_of, load_namespaces
from floodmark.host.directory import new_identity
from floodmark.host.embedded import EmbeddedHost
from floodmark.model.batch import mint_batch
from floodmark.model.errors import NodeFenced, NotKeeper
from floodmark.model.limits import NODES_MAX
from floodmark.model.partition import Fate, PartitionMap
from floodmark.model.version import VERSION_MAX, Version
from floodmark.partition import FAMILIES, LocalPartition
from floodmark.partition.families import CEILING
from floodmark.partition.fencing import load_number, numbered
from floodmark.partition.layout import load_partitions
from floodmark.partition.membership import BEAT_MS, DEAD_MS, SharedNode
from floodmark.routing import Router
from floodmark.routing.batches import BatchWriter, ask_fate
from floodmark.routing.calls import CallPool
from floodmark.site import Site
from floodmark.testing.clock import SimulatedTime
from floodmark.testing.simulation.nodes import tick

KEY = b"\x00\x00\x01ada"
LATER = b"\x00\x00\x01zoe"


class Cluster:
    """Nodes that tick together."""

    def __init__(
        self,
        nodes: int = 2,
        site_id: int = 1,
        time: SimulatedTime | None = None,
        engine: MemoryEngine | None = None,
    ) -> None:
        self.time = time or SimulatedTime()
        self.site_id = site_id
        self.engine = engine or MemoryEngine(FAMILIES)
        self.offsets = dict.fromkeys(range(1, NODES_MAX), 0)
        self.nodes = [self.start(number + 1) for number in range(nodes)]
        self.tick(*self.nodes)

    def start(self, number: int) -> SharedNode:
        return SharedNode(
            self.engine,
            number,
            self.site_id,
            time_source=lambda: self.time() + self.offsets[number],
            elapsed_source=self.time,
            url=f"grpc://oslo-{number}:7100",
            load_generations=lambda engine: generations_of(load_namespaces(engine)),
        )

    def tick(self, *nodes: SharedNode, times: int = 1) -> None:
        for _ in range(times):
            self.time.advance(BEAT_MS)
            for node in nodes:
                tick(node)

    def bury(self, dead: SharedNode) -> None:
        """Let the others beat until they have declared a node dead."""
        self.tick(*(node for node in self.nodes if node is not dead), times=DEAD_MS // BEAT_MS + 2)


def serving(node: SharedNode, key: bytes = KEY) -> LocalPartition:
    return node.node.map.route(key)


def put(node: SharedNode, value: bytes, key: bytes = KEY) -> int:
    return serving(node, key).put([key], [encode_value(value)], durable=True)


class ClusterNodes:
    """What the host of a node asks of the others, by calls in this process."""

    def __init__(self, sites: "SiteCluster", shared: SharedNode) -> None:
        self._sites = sites
        self._shared = shared
        self.held = VERSION_MAX

    def require_keeper(self) -> None:
        self._shared.engine.require_keeper()

    @property
    def map(self) -> PartitionMap[LocalPartition]:
        rows = load_partitions(self._sites.cluster.engine)
        owners = [self._sites.cluster.nodes[row.node - 1] for row in rows]
        served = [serving(owner, row.start) for owner, row in zip(owners, rows, strict=True)]
        for owner, partition in zip(owners, served, strict=True):
            # Only those of one node commit together, though all are of this process.
            partition.place = f"node {owner.number}"
        return PartitionMap([row.start for row in rows], served)

    def refresh(self) -> None:
        for shared in self._sites.cluster.nodes:
            shared.node.refresh()

    def resolved_version(self) -> Version:
        if any(shared.clock._lock.locked() for shared in self._sites.cluster.nodes):
            return 0
        return min(partition.resolved_version() for partition in self.map.partitions)

    def fresh_version(self) -> Version:
        for shared in self._sites.cluster.nodes:
            # A node that was fenced has written nothing above the clock of its successor.
            with suppress(NodeFenced):
                latest = shared.clock.now() if self._sites.is_free(shared) else self._ceiling(shared)
                self._shared.node.clock.pass_version(latest)
        return self._shared.clock.now()

    def settled_version(self) -> Version:
        version = self._shared.node.committer.now()
        for shared, host in zip(self._sites.cluster.nodes, self._sites.hosts, strict=True):
            if shared is not self._shared:
                version = max(version, self._settle(shared, host))
        self._shared.node.committer.swaps.learn(version)
        for shared in filter(self._sites.is_free, self._sites.cluster.nodes):
            shared.clock.pass_version(version)
        return version

    def _settle(self, shared: SharedNode, host: EmbeddedHost) -> Version:
        # One that is at work does not answer.
        if self._sites.is_free(shared) and not self._sites.is_lost():
            with suppress(NodeFenced):
                return host.peers.settle_peer()
        return self._ceiling(shared)

    def _ceiling(self, shared: SharedNode) -> Version:
        return load_number(self._sites.cluster.engine, numbered(CEILING, shared.number))

    def pass_ceilings(self) -> Sequence[Guard]:
        return self._shared.pass_ceilings()

    def renew_publication(self, namespace: str, generation: int) -> None:
        keeper = self._sites.keeper
        assert keeper is not None
        keeper.generations.rewind_generation(namespace, generation)

    def held_version(self, namespace: int) -> Version:
        return self.held

    def fate(self, transaction: str) -> Fate:
        keeper = self._sites.keeper
        if keeper is None:
            raise NotKeeper("no node keeps the site")
        return keeper.transactions.fate(transaction)

    def batch_fate(self, batch: str, siblings: Sequence[bytes]) -> Fate:
        return ask_fate(lambda key, operation: operation(self.map.route(key)), batch, siblings)


class SiteCluster:
    """A cluster with a host over each node.  The first node keeps, and owns all partitions."""

    def __init__(
        self,
        nodes: int = 2,
        name: str = "oslo",
        site_id: int = 1,
        time: SimulatedTime | None = None,
        calls: CallPool | None = None,
        engine: MemoryEngine | None = None,
    ) -> None:
        self.cluster = Cluster(nodes, site_id, time, engine)
        # Whether a call to another node gets lost.
        self.is_lost: Callable[[], bool] = lambda: False
        self.name = name
        self._calls = calls
        self.nodes: list[ClusterNodes] = []
        self.hosts = [self.open(shared) for shared in self.cluster.nodes]
        self.sites = [Site(host, durable=True) for host in self.hosts]

    def open(self, shared: SharedNode) -> EmbeddedHost:
        """A host over the present incarnation of a node, as after a start or when it has become keeper."""
        nodes = ClusterNodes(self, shared)
        self.nodes.append(nodes)
        shared.node.resolve_site = nodes.resolved_version
        host = EmbeddedHost(
            new_identity(self.name, self.cluster.site_id),
            shared.node,
            make_background=partial(
                Background, collect_every=timedelta(days=1), disk=None, disk_reserve_bytes=0
            ),
            background=False,
            release=lambda: None,
            abandon=lambda _: None,
            log_retention=None,
            keeps=shared.engine.keeper is not None,
            router=Router(
                nodes,
                shared.node.storage.entrance,
                batches=BatchWriter(lambda: mint_batch(self.cluster.time()), self._calls),
            ),
            nodes=nodes,
        )
        shared.engine.load_catalog = host.load_catalog
        return host

    def is_free(self, shared: SharedNode) -> bool:
        """Whether a node answers calls: no thread holds its turn, or its clock."""
        return bool(shared.node.storage.turn._free) and not shared.clock._lock.locked()

    def renew(self) -> None:
        """Open hosts again over nodes that have begun anew, or begun or ceased to keep the site."""
        for index, (shared, host) in enumerate(zip(self.cluster.nodes, self.hosts, strict=True)):
            if host.node is not shared.node or host.keeps != (shared.engine.keeper is not None):
                self.hosts[index] = self.open(shared)
                self.sites[index] = Site(self.hosts[index], durable=True)

    @property
    def keeper(self) -> EmbeddedHost | None:
        """The host of the node that holds the keeper's lease."""
        hosts = zip(self.cluster.nodes, self.hosts, strict=True)
        return next((host for shared, host in hosts if shared.engine.keeper is not None), None)

    def give(self, number: int, key: bytes = KEY) -> None:
        """Move the partition of a key from the first node to another."""
        first = self.cluster.nodes[0].node
        first.reshaping.move(first.map.route(key).id, number)
        self.cluster.nodes[number - 1].node.refresh()
