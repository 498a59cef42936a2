"""What a site of this process keeps beside its data; its upkeep and its ports share it."""

from floodmark.feed import SafePoints
from floodmark.host.catalog import Catalog
from floodmark.host.directory import Identity
from floodmark.host.epochs import Epochs
from floodmark.partition import Node
from floodmark.replication.links import Links
from floodmark.replication.members import Members


class SiteParts:
    """A node and the tables of a site, loaded from the node's engine."""

    def __init__(self, identity: Identity, node: Node) -> None:
        storage, time_source = node.storage, node.clock.time_source
        self.identity = identity
        self.node = node
        self.catalog = Catalog(storage, node.clock.now)
        self.safe_points = SafePoints(storage, time_source, self.catalog.live_ids, node.retention)
        self.epochs = Epochs(storage, node.committer.now, time_source, self.catalog.is_live)
        self.members = Members(storage, time_source, identity.site, identity.site_id)
        self.links = Links(node, self.members, identity.site_id, self.catalog.name_of)
        node.watermarks = self.links.watermarks


class LocalPort:
    """The base of ports to a site of this process."""

    def __init__(self, site: SiteParts) -> None:
        self._site = site
        self._node = site.node
        self._catalog = site.catalog
        self._members = site.members
