"""A site that several processes serve: this process is one of its nodes, on an engine that they share.

A node owns some partitions.  For those of other nodes its map has remote partitions, so the router of any
node reaches the whole site.  The keeper answers port calls.  Other nodes refuse them with `NotKeeper`, which
names the keeper, and forward the calls of their own process.

Two threads tick once a second.  One only writes beats, so that nothing delays them.  The other watches the
beats of other nodes, takes over partitions, and builds a new `EmbeddedHost` when this node has a new
incarnation, or begins or ceases to keep the site.  A host loads its whole state from the engine.

Importing this module loads Flight, over which nodes call each other.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from threading import Event, Lock, Thread
from typing import Any, Final

from floodmark.clock import GuardedTime, TimeSource, elapsed_ms
from floodmark.clock.backoff import Backoff
from floodmark.engine import Engine
from floodmark.host.administration import NodeAdministration, NodePartitions
from floodmark.host.asking import NodeVersions, OtherNodes
from floodmark.host.catalog import generations_of, load_namespaces
from floodmark.host.directory import Identity
from floodmark.host.embedded import BuildHost, EmbeddedHost
from floodmark.host.maps import NodeMaps, NodeMoves, takeover_backoff
from floodmark.host.overview import ServingFacts
from floodmark.host.peers import ASK_SECONDS, REFRESH_PEER, Peers, load_secret
from floodmark.host.ports import PORTS, Host, PeerCommands, PeerCredentials, PeerPort, PeerReply
from floodmark.host.remote import RemoteNamespaces
from floodmark.host.statistics import NodeCounters
from floodmark.model.actions import Action
from floodmark.model.batch import mint_batch
from floodmark.model.errors import (
    FloodmarkError,
    InvalidConfiguration,
    NodeFenced,
    NotKeeper,
    PartitionMoved,
    Unreachable,
)
from floodmark.model.partition import Owners, PartitionMaps, StreamCommand, WriteStream
from floodmark.model.stream import ChangeBatch, ChangesRequest
from floodmark.model.version import Version, physical_ms
from floodmark.partition.fencing import Keeper, highest_ceiling, load_keeper
from floodmark.partition.membership import BEAT_MS, SharedNode, claim, drained_nodes
from floodmark.routing import BatchWriter, CallPool, Router
from floodmark.wire import RemoteCalls, port_methods
from floodmark.wire.address import parse_address
from floodmark.wire.changes import resume_changes
from floodmark.wire.messages import Method

WILDCARDS: Final = ("0.0.0.0", "::")
# Interval at which a node with waiting readers asks the other nodes for new writes.
FOLLOW_SECONDS: Final = 0.02
# How long a node waits for calls in progress at a host that it has replaced.
RETIRE_SECONDS: Final = 5.0
# How long a stopping node hands its partitions over to other nodes.
LEAVE_SECONDS: Final = 5.0
LINGER_SECONDS: Final = 0.5
# Threads that call other nodes for the atomic batches and transactions of this node.
CALLS_MAX: Final = 32

_log = logging.getLogger("floodmark.site")


def make_node(
    engine: Engine,
    identity: Identity,
    time_source: GuardedTime,
    skew_ms_max: int,
    build: BuildHost,
    *,
    node: int | None = None,
    beat_source: TimeSource = elapsed_ms,
    beats: bool = True,
    ask_seconds: float = ASK_SECONDS,
) -> "NodeHost":
    """The host of a site whose engine other processes may share: this process is one of its nodes.

    The number `node` is by default the lowest free one.  `beat_source` measures the time between beats;
    `beats=False` leaves `NodeHost.beat` and `watch` to the caller.  If another node does not answer within
    `ask_seconds`, its ceiling is used in place of its versions.
    """
    time_source.start(physical_ms(highest_ceiling(engine)))
    return NodeHost(
        identity,
        engine,
        claim(engine, node, Event().wait),
        build=build,
        time_source=time_source,
        elapsed_source=beat_source,
        skew_ms_max=skew_ms_max,
        beats=beats,
        ask_seconds=ask_seconds,
    )


class NodeHost(Host):
    """The host of one of several nodes.  No thread runs before `start`.

    `build` makes the `EmbeddedHost` of an incarnation.  With `beats`, `start` starts the threads that beat
    and watch.
    """

    def __init__(
        self,
        identity: Identity,
        engine: Engine,
        number: int,
        *,
        build: BuildHost,
        time_source: TimeSource,
        elapsed_source: TimeSource,
        skew_ms_max: int,
        beats: bool,
        ask_seconds: float,
    ) -> None:
        self.identity = identity
        self.peer_token = load_secret(engine)
        self._engine = engine
        self._build = build
        self._beats = beats
        self._lock = Lock()
        self._stopping = Event()
        self._closed = False
        # Set to make the watching thread run at once.
        self._due = Event()
        self._is_started = False
        self._threads: list[Thread] = []
        # The error because of which the node does not serve, or does not keep the site; None if there is
        # none.
        self.error: str | None = None
        self.facts = ServingFacts()
        self.shared = SharedNode(
            engine,
            number,
            identity.site_id,
            time_source=time_source,
            elapsed_source=elapsed_source,
            skew_ms_max=skew_ms_max,
            load_generations=lambda engine: generations_of(load_namespaces(engine)),
        )
        self._peers = Peers(self.peer_token, ask_seconds)
        self.others = OtherNodes(self.shared, self._peers, elapsed_source)
        maps = NodeMaps(self.shared, self._peers)
        self._calls = CallPool(CALLS_MAX)

        def mint() -> str:
            return mint_batch(self.version_ms())

        self.router = Router(
            maps,
            self.shared.entrance,
            moves=partial(NodeMoves, maps, self._stopping),
            batches=BatchWriter(mint, self._calls),
            mint=mint,
        )
        for port in PORTS:
            methods = port_methods(port.protocol, port.prefix).values()
            setattr(self, port.attribute, RemoteCalls(partial(self.call, port.attribute), methods))
        self.namespaces = RemoteNamespaces(self.namespaces)
        self._keeper = load_keeper(engine)
        self._is_drained = False
        self._run_commands: Callable[[PeerCommands], PeerReply] | None = None
        self._host = self._make_host()
        # The first node has nothing to wait for.
        self.watch()

    # Incarnations

    @property
    def current(self) -> EmbeddedHost:
        """The host of the present incarnation."""
        return self._host

    def _make_host(self) -> EmbeddedHost:
        node, engine = self.shared.node, self.shared.engine
        self._kept_as = engine.keeper
        node.resolve_site = self.others.resolved_version
        host = self._build(
            node,
            keeps=self._kept_as is not None,
            router=self.router,
            nodes=self.others,
            make_versions=partial(NodeVersions, others=self.others),
        )

        def ask(node: int) -> PeerPort:
            return host.peers if node == self.shared.number else self._peers.port(node)

        def keep() -> None:
            self.shared.take_keeper()
            self._due.set()

        host.partitions = NodePartitions(host, ask)
        host.node_port = NodeAdministration(host, self.shared, ask, host.partitions)
        host.peers.keep = keep
        host.peers.run = self._run_commands
        host.facts = self.facts
        self.peer = ask

        self.shared.held = host.safe_points.held_by_readers
        engine.load_catalog = host.load_catalog
        # Another node may have changed the catalog since the epoch was loaded.
        engine.reload_catalog()
        if self._is_started:
            host.start()
        return host

    def _renew(self) -> None:
        """Replace the host if its incarnation is over, or this node begins or ceases to keep the site."""
        before = self._host
        # Compare terms: the lease may have been lost and acquired again since.
        if before.node is self.shared.node and self._kept_as == self.shared.engine.keeper:
            return
        host = self._make_host()
        host.safe_points.adopt(before.safe_points)
        self._host = host
        role = "keeps the site" if self._host.keeps else "does not keep the site"
        _log.info("node %d has a new host, and %s", self.shared.number, role)
        # Its calls in progress may wait for a commit that fails only at its timeout.
        retiring = Thread(target=_retire, args=(before,), name="floodmark-retire", daemon=True)
        retiring.start()
        retiring.join(RETIRE_SECONDS)
        self.namespaces.list_namespaces()

    def start(self) -> None:
        """Start the background threads: those of the host, and those that beat and watch other nodes."""
        self._is_started = True
        self._host.start()
        seconds = BEAT_MS / 1_000
        for waited, pause_seconds, work in (
            (self._stopping, seconds, self.beat),
            (self._due, seconds, self.watch),
            (self._stopping, FOLLOW_SECONDS, self.follow),
            (self._stopping, seconds, self.others.forget),
        ):
            thread = Thread(
                target=_repeat,
                args=(self._stopping, waited, pause_seconds, work),
                name=f"floodmark-{work.__name__}",
                daemon=True,
            )
            if self._beats:
                self._threads.append(thread)
                thread.start()

    def serve_commands(self, run: Callable[[PeerCommands], PeerReply]) -> None:
        """Set the function that runs the RESP commands that other nodes forward to this one."""
        with self._lock:
            self._run_commands = self._host.peers.run = run

    def beat(self) -> None:
        """Write a beat, by which other nodes see that this node is alive."""
        try:
            self.shared.beat()
        except NodeFenced:
            self._due.set()

    def watch(self) -> None:
        """React to the beats of other nodes, and restart with a new incarnation if this node was fenced."""
        with self._lock:
            if self._closed:
                return
            try:
                self.shared.watch()
                self._keeper = load_keeper(self._engine)
                self._is_drained = self.shared.number in drained_nodes(self._engine)
                self._peers.note(self.shared.membership.urls())
                self._renew()
                if not self._host.keeps:
                    self._host.refresh()
                self.error = None
            except BaseException as error:
                self.error = str(error)
                raise

    def follow(self) -> None:
        """Wake the readers that wait for changes at this node, if other nodes have written."""
        if self._host.node.committer.followers.is_watched and self.others.has_news():
            self._host.wake_readers()

    # The keeper

    @property
    def keeps(self) -> bool:  # type: ignore[override]
        return self._host.keeps

    def require_here(self, action: Action) -> None:
        if not action.anywhere and not self._host.keeps:
            raise _not_keeper(self.shared.number, self._keeper, self._peers.urls)

    def call(self, port: str, method: Method[Any], *args: object, **kwargs: object) -> Any:
        """Answer a port call of this process, or forward it to the keeper."""
        backoff = takeover_backoff()
        while True:
            try:
                if method.action.anywhere or self._host.keeps:
                    answer = _answer(self._host, port, method, *args, **kwargs)
                    if method.action.repeatable and not method.action.anywhere:
                        # This node's tables may be outdated if another node has acquired the keeper's lease.
                        self.shared.membership.require()
                    return answer
                keeper = self._keeper
                if keeper is None or keeper.node == self.shared.number:
                    raise _not_keeper(self.shared.number, self._keeper, self._peers.urls)
                return self._peers.at(keeper.node).call(method, *args, **kwargs)
            except (NotKeeper, Unreachable) as error:
                _pause(self._stopping, backoff, error)
                self._keeper = load_keeper(self._engine)

    # The host

    @property
    def served(self) -> PartitionMaps:
        return self._host.node

    def owners(self) -> Owners:
        living = {self.shared.number, *self.shared.membership.living()}
        return Owners(
            nodes={node: url for node, url in self._peers.urls.items() if node in living},
            keeper=0 if self._keeper is None else self._keeper.node,
            partitions={row.id: row.node for row in self.shared.node.rows},
        )

    def advertise(self, url: str, credentials: PeerCredentials) -> None:
        address = parse_address(url)
        if address.host in WILDCARDS:
            raise InvalidConfiguration(
                f"clients and other nodes cannot reach {address.host}; listen on a host that they know, or "
                "name one: --advertise grpc://HOST:PORT",
                host=address.host,
            )
        self._peers.credentials = credentials
        self.shared.advertise(url)
        self._peers.note(self.shared.membership.urls())

    def leave(self) -> None:
        # Other nodes take over the remaining partitions after this node has stopped.
        leaving = Thread(target=_leave, args=(self,), name="floodmark-leave", daemon=True)
        leaving.start()
        leaving.join(LEAVE_SECONDS)

    def node_counters(self) -> NodeCounters:
        shared = self.shared
        return NodeCounters(node=shared.number, takeovers=shared.takeovers, restarts=shared.incarnations - 1)

    def require_ready(self) -> None:
        """Raise the error because of which this node does not serve, if any.  Calls no other node."""
        number, node = self.shared.number, self.shared.node
        self.shared.membership.require()
        node.storage.require_wanted()
        node.require_open()
        if self._is_drained and not any(row.node == number for row in node.rows):
            raise PartitionMoved(
                f"node {number} was drained, and other nodes serve its partitions; stop it, or start it "
                "again to give it partitions",
                node=number,
            )

    def physical_ms(self) -> int:
        return self._host.physical_ms()

    def version_ms(self) -> int:
        return self._host.version_ms()

    def reading(self, version: Version, namespace: int) -> AbstractContextManager[object]:
        return self._host.reading(version, namespace)

    def changes(self, request: ChangesRequest) -> Iterator[ChangeBatch]:
        """The requested changes.  The stream survives a fencing and restart of this node."""
        backoff = takeover_backoff()

        def pause(error: FloodmarkError) -> None:
            if not isinstance(error, NodeFenced):
                raise error
            _pause(self._stopping, backoff, error)

        def open_stream(request: ChangesRequest) -> Iterator[ChangeBatch]:
            batches = self._host.changes(request)
            yield ChangeBatch(through=request.since, snapshot=request.snapshot)
            yield from batches

        batches = resume_changes(request, open_stream, backoff.reset, pause)
        next(batches)
        return batches

    def serve_changes(self, request: ChangesRequest) -> Iterator[ChangeBatch]:
        return self._host.changes(request)

    def wake_readers(self) -> None:
        self._host.wake_readers()

    def write_stream(self, command: StreamCommand) -> WriteStream:
        return self._host.write_stream(command)

    def close(self) -> None:
        self._stopping.set()
        self._due.set()
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for thread in self._threads:
            thread.join(RETIRE_SECONDS)
        self._calls.close()
        self._peers.close()
        self._host.close()


def rebalance(host: NodeHost) -> None:
    """Move a partition if this node keeps the site, all nodes are alive and their loads differ widely."""
    administration = host.current.node_port
    if host.current.keeps and isinstance(administration, NodeAdministration):
        administration.rebalance_if_quiet()


def _not_keeper(node: int, keeper: Keeper | None, urls: Mapping[int, str]) -> NotKeeper:
    """The error of a node that does not keep the site.  It names the keeper."""
    number = None if keeper is None or keeper.node == node else keeper.node
    url = "" if number is None else urls.get(number, "")
    where = "no node does yet; try again" if number is None else f"node {number} does, at {url}"
    return NotKeeper(
        f"node {node} does not keep the site: {where}. Nothing was done",
        node=number,
        url=url,
    )


def _answer(host: EmbeddedHost, port: str, method: Method[Any], *args: object, **kwargs: object) -> Any:
    if port == "namespaces":
        host.node.storage.entrance.catch_up()
    return getattr(getattr(host, port), method.call)(*args, **kwargs)


def _pause(stopping: Event, backoff: Backoff, error: FloodmarkError) -> None:
    """Wait before the next attempt.  Raises the error if no time is left or the node is stopping."""
    pause_ms = backoff.next_ms()
    if pause_ms is None or stopping.wait(pause_ms / 1_000):
        raise error


def _retire(host: EmbeddedHost) -> None:
    """Close a host that was replaced.  Its writes may fail."""
    try:
        host.retire()
    except FloodmarkError as error:
        _log.info("a host that was replaced could not finish all: %s", error)


def _leave(host: NodeHost) -> None:
    """Move partitions to other nodes, and give clients time to find them there."""
    number = host.shared.number
    try:
        moved = host.node_port.drain(number)
        _log.info("node %d has given %d partitions to other nodes", number, len(moved))
        if moved:
            host.others.call_all(REFRESH_PEER)
            # Clients that call meanwhile get the new locations of the partitions.
            Event().wait(LINGER_SECONDS)
    except FloodmarkError as error:
        _log.info("node %d stops with what it owns: %s", number, error)


def _repeat(stopping: Event, waited: Event, pause_seconds: float, work: Callable[[], None]) -> None:
    """Call `work` until the node stops, with pauses that `waited` can end early.  Failures are retried."""
    while True:
        waited.wait(pause_seconds)
        if stopping.is_set():
            return
        if waited is not stopping:
            waited.clear()
        try:
            work()
        except FloodmarkError as error:
            _log.warning("the node could not %s, and tries again: %s", work.__name__, error)
        except Exception:
            _log.exception("the node could not %s for an unexpected reason", work.__name__)
