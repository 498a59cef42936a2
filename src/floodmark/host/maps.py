"""The partition map by which the router of one of several nodes reaches the whole site."""

from threading import Event
from typing import Final

from floodmark.clock.backoff import Backoff
from floodmark.host.peers import Peers
from floodmark.model.errors import FloodmarkError, PartitionMoved
from floodmark.model.partition import Partition, PartitionMap
from floodmark.partition.membership import SharedNode
from floodmark.wire import RemotePartition
from floodmark.wire.cluster import ELSEWHERE, PAUSE_MS, PAUSE_MS_MAX

# How long a call of this process waits for an owner or a keeper: a takeover takes 5 to 8 seconds.
BUDGET_MS: Final = 15_000


def takeover_backoff() -> Backoff:
    """The pauses between retries of a call, with a budget that is longer than a takeover."""
    return Backoff(PAUSE_MS, longest_ms=PAUSE_MS_MAX, budget_ms=BUDGET_MS)


class NodeMaps:
    """The partitions of the whole site: this node's own, and remote partitions at the servers of other nodes.

    With `quick`, a call to another node waits for at most `Peers.ask_seconds`.
    """

    def __init__(self, shared: SharedNode, peers: Peers, *, quick: bool = False) -> None:
        self._shared = shared
        self._peers = peers
        self._connection = peers.quick if quick else peers.at
        self._known: tuple[object, object, PartitionMap[Partition]] = (None, None, PartitionMap((), ()))

    @property
    def map(self) -> PartitionMap[Partition]:
        source, urls = self._shared.node.map, self._peers.urls
        known_source, known_urls, known = self._known
        if known_source is source and known_urls is urls:
            return known
        owners = {row.id: row.node for row in self._shared.node.rows}
        found: PartitionMap[Partition] = source
        if any(owner != self._shared.number for owner in owners.values()) and source.partitions:
            partitions: list[Partition] = []
            for partition in source.partitions:
                owner = owners.get(partition.id, self._shared.number)
                if owner == self._shared.number or owner not in urls:
                    # The partition refuses calls with `PartitionMoved` if another node owns it.
                    partitions.append(partition)
                else:
                    connection = self._connection(owner)
                    partitions.append(
                        RemotePartition(connection, partition.id, partition.range, partition.limits)
                    )
            found = PartitionMap(source.starts, partitions)
        self._known = source, urls, found
        return found

    def refresh(self) -> None:
        self._shared.node.refresh()


class NodeMoves:
    """Retries calls while a partition moves or is taken over, for as long as a takeover may take."""

    def __init__(self, maps: NodeMaps, stopping: Event, *, stream: bool = False) -> None:
        self._maps = maps
        self._stopping = stopping
        self.renew()

    def follows(self, error: FloodmarkError) -> bool:
        return isinstance(error, ELSEWHERE)

    def follow(self, error: FloodmarkError, partition: Partition | None) -> None:
        is_first = self._backoff.failures == 0
        pause_ms = self._backoff.next_ms()
        if not self.follows(error) or pause_ms is None:
            raise error
        # Usually the partition moved before the call, and the next map is correct.
        if (not is_first or not isinstance(error, PartitionMoved)) and self._stopping.wait(pause_ms / 1_000):
            raise error
        self._maps.refresh()

    def renew(self) -> None:
        self._backoff = takeover_backoff()
