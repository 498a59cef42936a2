"""The versions of a site of this process."""

from floodmark.feed import SafePoints
from floodmark.feed.reading.cut import ChangesCut, CutRequest, cut_changes
from floodmark.host.catalog import Catalog
from floodmark.host.epochs import Epochs
from floodmark.model.actions import SITE_OWNER
from floodmark.model.change import Heartbeat
from floodmark.model.version import Version
from floodmark.partition import Node
from floodmark.replication.members import Members


class LocalVersions:
    """The port to versions, over a node."""

    def __init__(
        self, node: Node, catalog: Catalog, epochs: Epochs, safe_points: SafePoints, members: Members
    ) -> None:
        self._node = node
        self._catalog = catalog
        self._epochs = epochs
        self._safe_points = safe_points
        self._members = members

    def read_version(self) -> Version:
        return self._node.committer.read_version()

    def resolved_version(self) -> Version:
        return self._node.resolved_version()

    def now(self) -> Version:
        return self._node.committer.now()

    def observe(self, version: Version) -> None:
        self._node.observe(version)

    def pass_version(self, version: Version) -> None:
        self._node.committer.observe(version)

    def sync(self) -> None:
        self._node.committer.sync()

    def heartbeat(self) -> Heartbeat:
        return self._node.heartbeat()

    def open_epoch(self, namespace: str, stream: str, epoch: int, owner: str = SITE_OWNER) -> Version:
        return self._epochs.open(self._catalog.get(namespace).id, stream, epoch, owner)

    def cut_changes(
        self,
        namespace: str,
        since: Version,
        changes_max: int | None,
        until: Version | None,
        at_heartbeat: bool,
        own: bool = False,
    ) -> ChangesCut:
        if own:
            self._members.require_rejoined()
        request = CutRequest(
            namespace=self._catalog.get(namespace).id,
            since=since,
            until=until,
            changes_max=changes_max,
            at_heartbeat=at_heartbeat,
            own=own,
        )
        return cut_changes(self._node, self._safe_points, request)
