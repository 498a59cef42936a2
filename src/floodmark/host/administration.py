"""The keeper's administration of nodes: lists and removes them, and moves partitions between them.

Only the owner of a partition splits, merges or moves it, so the keeper calls the owner.  A move changes the
owner in one write and moves no data.  The new owner is notified at once; if it cannot be reached, it finds
the partition when it next reads the map, within a second.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, Protocol

from floodmark.engine import WriteRow
from floodmark.host.balancing import Move, plan_moves
from floodmark.host.local import LocalPartitions
from floodmark.host.parts import LocalPort, SiteParts
from floodmark.host.ports import Balance, PeerPort
from floodmark.host.statistics import NodeStatistics, PartitionHeat, PartitionStatistics
from floodmark.model.errors import FloodmarkError, InvalidOption, PartitionNotFound
from floodmark.partition import META
from floodmark.partition.families import BEAT, CEILING, DRAINED, FENCE
from floodmark.partition.fencing import encode_number, load_keeper, load_number, numbered
from floodmark.partition.layout import PartitionRow
from floodmark.partition.membership import SharedNode, drained_nodes, load_beats

# Automatic rebalancing tolerates a difference of this many times the mean.  It moves one partition at a time,
# so that the effect of each move is measured before the next one.
TOLERATED: Final = 0.5

_log = logging.getLogger("floodmark.site")


class AskPeer(Protocol):
    """Returns the port of a node for calls of other nodes.  Raises Unreachable if its URL is unknown."""

    def __call__(self, node: int) -> PeerPort: ...


class OneProcess(LocalPort):
    """The port to nodes of a site that one process serves: it has none."""

    def nodes(self) -> list[NodeStatistics]:
        return []

    def move(self, partition: int, node: int) -> int:
        raise _one_process()

    def rebalance(self, by: Balance, moves_max: int | None = None) -> list[Move]:
        raise _one_process()

    def drain(self, node: int) -> list[Move]:
        raise _one_process()

    def remove_node(self, node: int) -> None:
        raise _one_process()


def _one_process() -> InvalidOption:
    return InvalidOption(
        "one process serves this site, so it has no nodes; keep its data in a shared database to start "
        "several (docs/operations/nodes.md)"
    )


class NodePartitions(LocalPartitions):
    """The port to partitions of a site with several nodes.  It calls the owners of the partitions."""

    def __init__(self, site: SiteParts, ask: AskPeer) -> None:
        super().__init__(site)
        self._ask = ask

    def partitions(self) -> list[PartitionStatistics]:
        return self._of_owners(lambda port: port.peer_partitions(), super().partitions())

    def heat(self) -> list[PartitionHeat]:
        return self._of_owners(lambda port: port.peer_heat(), super().heat())

    def _of_owners(self, ask: Callable[[PeerPort], Sequence[Any]], known: Sequence[Any]) -> list[Any]:
        """The counters of all partitions, as their owners report them."""
        told: dict[int, Any] = {}
        for owner in {row.node for row in self._node.rows}:
            with suppress(FloodmarkError):
                told.update({each.id: each for each in ask(self._ask(owner))})
        return [told.get(each.id, each) for each in known]

    def split_at(self, key: bytes) -> tuple[int, int]:
        row = next(row for row in self._node.rows if row.range.contains(key))
        halves = self._ask(row.node).split_peer(key)
        self._node.refresh()
        return halves

    def merge(self, left: int, right: int) -> int:
        rows = {row.id: row for row in self._node.rows}
        if left not in rows or right not in rows:
            return super().merge(left, right)
        if rows[left].range.end != rows[right].range.start:
            raise PartitionNotFound(
                f"partition {right} does not follow partition {left}; only neighbours merge", partition=right
            )
        owner = rows[left].node
        if rows[right].node != owner:
            right = self._ask(rows[right].node).move_peer(right, owner)
            self._ask(owner).refresh_peer()
        joined = self._ask(owner).merge_peer(left, right)
        self._node.refresh()
        return joined


class NodeAdministration(LocalPort):
    """The port to the nodes of a site."""

    def __init__(
        self, site: SiteParts, shared: SharedNode, ask: AskPeer, partitions: LocalPartitions
    ) -> None:
        super().__init__(site)
        self._partitions = partitions
        self._shared = shared
        self._ask = ask

    def nodes(self) -> list[NodeStatistics]:
        self._node.refresh()
        engine, keeper = self._shared.engine, load_keeper(self._shared.engine)
        seen = self._shared.membership.living()
        living, drained = {self._shared.number, *seen}, drained_nodes(engine)
        # Beats that this node has seen take precedence, because it plans moves by them.
        beats = {**load_beats(engine), **seen}
        return [
            NodeStatistics(
                node=node,
                url=beat.url,
                keeps=keeper is not None and keeper.node == node,
                lives=node in living,
                drained=node in drained,
                since_ms=beat.since_ms,
                beat_ms=beat.wall_ms,
                load=beat.load,
                incarnation=load_number(engine, numbered(FENCE, node)),
                ceiling=load_number(engine, numbered(CEILING, node)),
                partitions=[row.id for row in self._node.rows if row.node == node],
            )
            for node, beat in sorted(beats.items())
        ]

    def move(self, partition: int, node: int) -> int:
        self._require_target(node)
        return self._move(self._row(partition), node)

    def rebalance(self, by: Balance, moves_max: int | None = None, tolerated: float = 0.0) -> list[Move]:
        """Balance the nodes and return the moves.  Moves made before an error are not undone."""
        targets = self._targets()
        owners = {row.id: row.node for row in self._node.rows}
        loads = dict.fromkeys(owners, 1.0)
        if by is Balance.LOAD:
            loads = {each.id: each.rate for each in self._partitions.partitions()}
        moves = plan_moves(owners, loads, targets, tolerated=tolerated, moves_max=moves_max)
        return [self._moved(move) for move in moves]

    def rebalance_if_quiet(self) -> list[Move]:
        """Make at most one move, by load, if all nodes are alive and their loads differ widely."""
        living = {self._shared.number, *self._shared.membership.living()}
        if not {row.node for row in self._node.rows} <= living:
            return []
        return self.rebalance(Balance.LOAD, moves_max=1, tolerated=TOLERATED)

    def drain(self, node: int) -> list[Move]:
        """Mark the node as drained, so that no takeover or `rebalance` gives it partitions, then empty it."""
        if node not in load_beats(self._shared.engine):
            raise _unknown(node)
        targets = [each for each in self._targets() if each != node]
        if not targets:
            raise InvalidOption(f"node {node} is the only one that can serve; start another node first")
        incarnation = load_number(self._shared.engine, numbered(FENCE, node))
        self._store([(META, numbered(DRAINED, node), encode_number(incarnation))])
        owners = {row.id: row.node for row in self._node.rows}
        kept = {each: owner for each, owner in owners.items() if owner in (node, *targets)}
        moves = [move for move in plan_moves(kept, dict.fromkeys(kept, 1.0), targets) if move.source == node]
        done = [self._moved(move) for move in moves]
        keeper = load_keeper(self._shared.engine)
        if keeper is not None and keeper.node == node:
            self._ask(targets[0]).keep_peer()
        return done

    def remove_node(self, node: int) -> None:
        if node not in load_beats(self._shared.engine):
            raise _unknown(node)
        if node == self._shared.number or node in self._shared.membership.living():
            raise InvalidOption(f"node {node} beats; drain it and stop it first")
        if any(row.node == node for row in self._node.rows):
            raise InvalidOption(f"node {node} still owns partitions; other nodes take them over in seconds")
        # Its fence and its ceiling are kept, because they must never go back.
        self._store([(META, numbered(BEAT, node), None), (META, numbered(DRAINED, node), None)])

    def _store(self, rows: Sequence[WriteRow]) -> None:
        with self._node.storage.settled():
            self._node.storage.store(rows)

    def _targets(self) -> list[int]:
        """The nodes that are alive, reachable and not drained."""
        membership, drained = self._shared.membership, drained_nodes(self._shared.engine)
        urls = {node: beat.url for node, beat in membership.living().items()}
        urls[self._shared.number] = self._shared.url
        return sorted(node for node, url in urls.items() if url and node not in drained)

    def _require_target(self, node: int) -> None:
        if node not in self._targets():
            names = ", ".join(map(str, self._targets())) or "none"
            raise InvalidOption(
                f"node {node} does not beat, is drained, or has no URL; partitions can move to: {names}"
            )

    def _row(self, partition: int) -> PartitionRow:
        self._node.refresh()
        for row in self._node.rows:
            if row.id == partition:
                return row
        raise PartitionNotFound(
            f"no partition {partition}; `floodmark partition list` shows them", partition=partition
        )

    def _moved(self, move: Move) -> Move:
        return replace(move, partition=self._move(self._row(move.partition), move.target))

    def _move(self, row: PartitionRow, target: int) -> int:
        if row.node == target:
            return row.id
        moved = self._ask(row.node).move_peer(row.id, target)
        for node in {target, self._shared.number}:
            with suppress(FloodmarkError):
                self._ask(node).refresh_peer()
        _log.info("partition %d went from node %d to node %d as %d", row.id, row.node, target, moved)
        return moved


def _unknown(node: int) -> InvalidOption:
    return InvalidOption(f"no node {node} has a beat; `floodmark node list` shows the nodes")
