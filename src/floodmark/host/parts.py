"""The tables of a site in this process, shared by its background work and its ports.

**Nodes that share an engine.**  One of them keeps the site: it changes the tables below and answers calls
about them.  The other nodes have copies, whose permitted age depends on the table:

| table               | what the other nodes need it for            | how old their copy may be            |
|---------------------|---------------------------------------------|--------------------------------------|
| catalog, topology   | what may be written where; reads of dropped | writes: no age, the epoch guards     |
|                     | namespaces; sites that are rejoining        | them; reads: a second, see `refresh` |
| generations         | where records are read and written          | no age as of a version (`learn`)     |
| positions of links  | admission of copied changes                 | no age: the row guards the round     |
|                     | watermarks of heartbeats                    | any age: an old one claims less      |
| collected, horizons | which reads and copies are refused          | no age: read from the engine         |
| safe points, epochs | nothing: garbage collection alone           |                                      |

A new keeper loads its tables from the engine, after it has acquired the lease.
"""

from collections.abc import Sequence
from typing import Protocol

from floodmark.engine import Guard
from floodmark.feed import SafePoints
from floodmark.host.catalog import Catalog
from floodmark.host.directory import Identity
from floodmark.host.epochs import Epochs
from floodmark.model.partition import Fate
from floodmark.model.version import VERSION_MAX, Version
from floodmark.partition import Node
from floodmark.replication.links import Links
from floodmark.replication.members import Members


class SiteNodes(Protocol):
    """Calls about a whole site that need all of its nodes."""

    def require_keeper(self) -> None:
        """Raise `NotKeeper` unless this node is the keeper in the engine at this moment."""

    def fresh_version(self) -> Version:
        """Mint a version above all versions that any node has minted before the call."""

    def settled_version(self) -> Version:
        """A version above all writes made before the call; they are published once it is resolved.

        On return, all nodes that answer reads have loaded the catalog that was stored before the call.
        """

    def pass_ceilings(self) -> Sequence[Guard]:
        """Move the clock past all versions that other nodes may have minted or announced.

        Returns guards that fail once a node may have gone beyond that.  The caller holds the write turn.
        """

    def renew_publication(self, namespace: str, generation: int) -> None:
        """Make the keeper renew its hold on the changes that a publication at this node needs."""

    def held_version(self, namespace: int) -> Version:
        """The lowest version that readers at other nodes hold; `VERSION_MAX` if there is none."""

    def fate(self, transaction: str) -> Fate:
        """The keeper's decision about a transaction; raises if the keeper does not answer."""

    def batch_fate(self, batch: str, siblings: Sequence[bytes]) -> Fate:
        """The outcome of a batch (`ask_fate`); raises if one of its partitions does not answer."""


class OneNode:
    """The nodes of a site whose engine is not shared."""

    def __init__(self, node: Node) -> None:
        self.fresh_version = node.committer.now
        self._committer = node.committer

    def require_keeper(self) -> None:
        pass

    def settled_version(self) -> Version:
        self._committer.sync()
        return self._committer.now()

    def pass_ceilings(self) -> Sequence[Guard]:
        return ()

    def renew_publication(self, namespace: str, generation: int) -> None:
        raise AssertionError("a site of one process keeps itself")

    def held_version(self, namespace: int) -> Version:
        return VERSION_MAX

    def fate(self, transaction: str) -> Fate:
        raise AssertionError("a site of one process asks its own coordinators")

    def batch_fate(self, batch: str, siblings: Sequence[bytes]) -> Fate:
        raise AssertionError("in a site of one process a batch is one commit, and is never prepared")


class SiteParts:
    """A node and the tables of a site, loaded from the node's engine."""

    def __init__(self, identity: Identity, node: Node, nodes: SiteNodes | None = None) -> None:
        storage, time_source = node.storage, node.clock.time_source
        self.identity = identity
        self.node = node
        self.nodes: SiteNodes = OneNode(node) if nodes is None else nodes
        self.catalog = Catalog(storage, node.clock.now)
        self.safe_points = SafePoints(storage, time_source, self.catalog.live_ids, node.retention)
        self.epochs = Epochs(storage, self.nodes.fresh_version, time_source, self.catalog.is_live)
        self.members = Members(storage, time_source, identity.site, identity.site_id)
        self.links = Links(
            node, self.members, identity.site_id, self.catalog.name_of, self.nodes.fresh_version
        )
        node.heartbeats.watermarks = self.links.watermarks
        storage.entrance.admit = self.links.admit

    def load_catalog(self) -> None:
        """Load the namespaces and the topology, which the catalog's epoch covers.

        Later writes are above the loaded swaps.  The caller holds the write turn.
        """
        self.catalog.load()
        self.node.clock.pass_version(self.catalog.swapped_version())
        self.members.load()

    def refresh(self) -> None:
        """Load the keeper's changes, at a node that does not keep the site."""
        self.node.storage.entrance.catch_up()
        self.links.load()


class LocalPort:
    """The base of ports to a site of this process."""

    def __init__(self, site: SiteParts) -> None:
        self._site = site
        self._node = site.node
        self._catalog = site.catalog
        self._members = site.members
