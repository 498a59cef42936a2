"""Calls of a node to the other nodes of its site: for their versions, and for tasks of the whole site.

**Promises.**  A partition's resolved version is a promise that stays true for ever.  So if an owner does not
answer, its last promise is used, which holds back the site's resolved version.  An old map is safe, too: the
promise of a replaced partition does not move any more.  A partition without a promise counts as resolved to
just below the beginning of its log.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from threading import Event, Lock
from typing import Any, Final, TypeVar

from floodmark.clock import TimeSource
from floodmark.clock.hybrid import BOUND_LEAD_MS
from floodmark.engine import Guard
from floodmark.host.catalog import Rewound
from floodmark.host.local import LocalVersions
from floodmark.host.maps import NodeMaps, takeover_backoff
from floodmark.host.parts import SiteParts
from floodmark.host.peers import FATE, PASS_PEER_VERSION, SETTLE_PEER, Peers
from floodmark.host.ports import GenerationPort, PeerVersions
from floodmark.model.errors import FloodmarkError, NotKeeper, PartitionMoved, PartitionStopped, Unreachable
from floodmark.model.partition import Fate, Partition
from floodmark.model.version import VERSION_MAX, Version, physical_ms
from floodmark.partition.families import CEILING
from floodmark.partition.fencing import highest_ceiling, load_keeper, load_number, numbered
from floodmark.partition.layout import read_metadata
from floodmark.partition.membership import SharedNode
from floodmark.routing.batches import ask_fate, forget_ended
from floodmark.wire import port_methods
from floodmark.wire.messages import Method

REWIND_GENERATION: Final[Method[Rewound]] = port_methods(GenerationPort, "administration")[
    "administration.rewind_generation"
]
# How long a node that did not answer is not called again.
SILENT_MS: Final = 1_000
# A read version may be ahead of the clock of a partition's owner by 250 ms; clocks differ by less.
AHEAD_MS_MAX: Final = 100

_log = logging.getLogger("floodmark.site")

Result = TypeVar("Result")


class _Asked:
    """The last answer of a node, and the ticket of its request."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.ticket = -1
        self.answer: PeerVersions | None = None
        self.silent_until_ms: int | None = None


class OtherNodes:
    """The other nodes of a site, as one of its nodes asks them.  Safe to use from many threads."""

    def __init__(self, shared: SharedNode, peers: Peers, elapsed_source: TimeSource) -> None:
        self._shared = shared
        self._peers = peers
        self._elapsed_source = elapsed_source
        self._asked: dict[int, _Asked] = {}
        self._tickets = count()
        self._lock = Lock()
        self._promises: dict[int, Version] = {}
        self._announced: Version = 0
        self._changes: dict[int, int] = {}
        self._maps = NodeMaps(shared, peers, quick=True)
        # By place, the time until which it is not asked for the outcome of a batch, after it did not answer.
        self._silent_until_ms: dict[str, int] = {}

    def resolved_version(self) -> Version:
        """The resolved version of the site: the minimum over all partitions, as their owners report it."""
        node = self._shared.node
        rows, logs = node.rows, node.logs
        owners = {row.node for row in rows if row.node != self._shared.number}
        answers = [answer.resolved for owner in owners if (answer := self._ask(owner)) is not None]
        answers.append(self._shared.resolved_versions())
        opened = {log.id: log.opened_at for log in logs}
        with self._lock:
            told = {partition: version for answer in answers for partition, version in answer.items()}
            # Drop the versions of partitions that no longer exist.
            self._promises = {
                row.id: max(
                    told.get(row.id, 0), self._promises.get(row.id, max(0, opened.get(row.log, 0) - 1))
                )
                for row in rows
            }
            self._announced = max(self._announced, min(self._promises.values(), default=0))
            is_stale = len(answers) == len(owners) + 1 and any(row.id not in told for row in rows)
            resolved = self._announced
        if is_stale:
            # An owner that answered does not have a partition: it was moved, split or merged.
            node.refresh()
        return resolved

    def has_news(self) -> bool:
        """Whether other nodes have written since the last call."""
        owners = {row.node for row in self._shared.node.rows if row.node != self._shared.number}
        before = self._changes
        answers = {owner: answer.changes for owner in owners if (answer := self._ask(owner)) is not None}
        self._changes = before | answers
        return self._changes != before

    def read_version(self) -> Version:
        """A version at which a reader sees every acknowledged write.

        For a node that does not answer, its ceiling is used: it has written nothing above that.
        """
        version = self._shared.node.committer.read_version()
        for key, stored in read_metadata(self._shared.engine, CEILING):
            node, ceiling = int.from_bytes(key[len(CEILING) :], "big"), int.from_bytes(stored, "big")
            if node != self._shared.number and ceiling > version:
                answer = self._ask(node)
                version = max(version, ceiling if answer is None else answer.read)
        self._let_time_pass(physical_ms(version) - AHEAD_MS_MAX)
        return version

    def _let_time_pass(self, until_ms: int) -> None:
        """Wait until a time."""
        left_ms = until_ms - self._shared.clock.time_source()
        if left_ms > 0:
            Event().wait(left_ms / 1_000)

    def call_all(self, method: Method[Any], *args: object) -> None:
        """Call a method at all other nodes that are alive."""
        for node in self._shared.membership.living():
            if node in self._peers.urls:
                self._peers.at(node).call(method, *args)

    def _ask(self, node: int) -> PeerVersions | None:
        """The versions of another node, requested after this call began; None if it does not answer.

        If several threads ask at once, one request serves all that wait.
        """
        asked = self._asked.setdefault(node, _Asked())
        arrived = next(self._tickets)
        if not asked.lock.acquire(timeout=2 * self._peers.ask_seconds):
            return None
        try:
            if asked.ticket > arrived:
                return asked.answer
            now_ms = self._elapsed_source()
            if asked.silent_until_ms is not None and now_ms < asked.silent_until_ms:
                return None
            asked.ticket = next(self._tickets)
            asked.answer = asked.silent_until_ms = None
            try:
                asked.answer = self._peers.versions(node)
            except FloodmarkError as error:
                _log.debug("node %d does not tell its versions: %s", node, error)
                asked.silent_until_ms = now_ms + SILENT_MS
            return asked.answer
        finally:
            asked.lock.release()

    # Tasks of the whole site (`SiteNodes`)

    def require_keeper(self) -> None:
        self._shared.engine.require_keeper()

    def fresh_version(self) -> Version:
        committer = self._shared.node.committer
        committer.observe(self.read_version())
        return committer.now()

    def settled_version(self) -> Version:
        shared, committer = self._shared, self._shared.node.committer
        committer.sync()
        version = committer.now()
        for key, _ in read_metadata(shared.engine, CEILING):
            node = int.from_bytes(key[len(CEILING) :], "big")
            if node != shared.number:
                version = max(version, self._settle(node))
        committer.swaps.learn(version)
        # So that all nodes resolve it soon.  A node that cannot be reached does so later, by its clock.
        with suppress(FloodmarkError):
            self.call_all(PASS_PEER_VERSION, version)
        self._let_time_pass(physical_ms(highest_ceiling(shared.engine)) - BOUND_LEAD_MS)
        return version

    def _settle(self, node: int) -> Version:
        """A version above all writes of another node; its ceiling, if the node answers no reads any more."""
        backoff = takeover_backoff()
        while node in self._shared.membership.living():
            try:
                return self._peers.at(node).call(SETTLE_PEER)
            except FloodmarkError as error:
                pause_ms = backoff.next_ms()
                if pause_ms is None:
                    raise PartitionStopped(
                        f"node {node} beats, and does not answer ({error}); try again", node=node
                    ) from error
                Event().wait(pause_ms / 1_000)
        return load_number(self._shared.engine, numbered(CEILING, node))

    def pass_ceilings(self) -> Sequence[Guard]:
        return self._shared.pass_ceilings()

    def renew_publication(self, namespace: str, generation: int) -> None:
        keeper = self._peers.at(self._require_keeper_node())
        # The keeper then keeps the changes that the publication needs, and has less left to copy at the end.
        keeper.call(REWIND_GENERATION, namespace, generation)

    def held_version(self, namespace: int) -> Version:
        beats = self._shared.membership.living().values()
        held = (beat.held.get(scope) for beat in beats for scope in (0, namespace))
        return min((version for version in held if version is not None), default=VERSION_MAX)

    def fate(self, transaction: str) -> Fate:
        return self._peers.at(self._require_keeper_node()).call(FATE, transaction)

    def _require_keeper_node(self) -> int:
        keeper = load_keeper(self._shared.engine)
        if keeper is None:
            raise NotKeeper("no node keeps the site yet; try again")
        return keeper.node

    def batch_fate(self, batch: str, siblings: Sequence[bytes]) -> Fate:
        return ask_fate(self._call_quickly, batch, siblings)

    def forget(self) -> None:
        """Delete the outcomes of old batches at this node."""
        forget_ended(self._shared.node, self._maps, self._call_quickly)

    def _call_quickly(self, key: bytes, operation: Callable[[Partition], Result]) -> Result:
        """Call the partition of a key, without retries."""
        partition, now_ms = self._maps.map.route(key), self._elapsed_source()
        if now_ms < self._silent_until_ms.get(partition.place, now_ms):
            raise Unreachable(f"{partition.place} gave no answer a moment ago; try again")
        try:
            return operation(partition)
        except PartitionMoved:
            self._maps.refresh()
            raise
        except Unreachable:
            self._silent_until_ms[partition.place] = now_ms + SILENT_MS
            raise


class NodeVersions(LocalVersions):
    """The port to versions of a site with several nodes."""

    def __init__(self, parts: SiteParts, others: OtherNodes) -> None:
        super().__init__(parts)
        self._others = others

    def read_version(self) -> Version:
        return self._others.read_version()

    def pass_version(self, version: Version) -> None:
        super().pass_version(version)
        self._others.call_all(PASS_PEER_VERSION, version)

    def sync(self) -> None:
        super().sync()
        self._others.call_all(SETTLE_PEER)
