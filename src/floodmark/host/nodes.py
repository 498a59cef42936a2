"""A site that several processes serve: this process is one of its nodes, on an engine that they share.

A node owns some partitions.  For those of other nodes its map holds remote partitions, so the router of any
node reaches the whole site.  The keeper answers calls of ports; other nodes refuse them with `NotKeeper`,
which names the keeper, and forward those of their own process.

Two threads tick once a second.  One only beats, so that nothing makes a beat late.  The other watches the
beats of other nodes, takes over, and builds a new `EmbeddedHost` when this node has a new incarnation, or
begins or ceases to keep the site.  A host loads all that it knows from the engine.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from itertools import count
from secrets import token_urlsafe
from threading import Event, Lock, Thread
from typing import Any, Final, Protocol, cast

from floodmark.clock import TimeSource
from floodmark.clock.backoff import Backoff
from floodmark.engine import Engine, Guard
from floodmark.host.administration import NodeAdministration, NodePartitions
from floodmark.host.directory import Identity
from floodmark.host.embedded import EmbeddedHost
from floodmark.host.local import LocalVersions
from floodmark.host.parts import SiteNodes, SiteParts
from floodmark.host.ports import PORTS, Host, PeerCredentials, PeerPort, PeerVersions, Port
from floodmark.host.remote import RemoteNamespaces
from floodmark.host.statistics import NodeCounters
from floodmark.model.actions import Action
from floodmark.model.errors import (
    FloodmarkError,
    InvalidConfiguration,
    NodeFenced,
    NotKeeper,
    PartitionMoved,
    Unreachable,
)
from floodmark.model.partition import (
    Fate,
    Owners,
    Partition,
    PartitionMap,
    PartitionMaps,
    StreamCommand,
    WriteStream,
)
from floodmark.model.stream import ChangeBatch, ChangesRequest
from floodmark.model.version import VERSION_MAX, Version, physical_ms
from floodmark.partition import META, Node
from floodmark.partition.families import CEILING, NODES_SECRET
from floodmark.partition.fencing import load_keeper
from floodmark.partition.layout import read_metadata
from floodmark.partition.membership import BEAT_MS, SharedNode, drained_nodes
from floodmark.routing import Router
from floodmark.wire import Connection, RemotePartition, port_methods
from floodmark.wire.address import parse_address
from floodmark.wire.cluster import ELSEWHERE, PAUSE_MS, PAUSE_MS_MAX, Connections
from floodmark.wire.messages import Method

SECRET_BYTES: Final = 32
WILDCARDS: Final = ("0.0.0.0", "::")
# How long a node waits for the versions of another, and how long it does not ask one that gave no answer.
ASK_SECONDS: Final = 0.5
SILENT_MS: Final = 1_000
# How often a node with readers that wait asks the others whether they have written.
FOLLOW_SECONDS: Final = 0.02
# A version that is read may be ahead of the clock of a partition's owner by 250 ms; clocks differ by less.
AHEAD_MS_MAX: Final = 100
# How long a call of this process waits for an owner or a keeper: a takeover takes 5 to 8 seconds.
BUDGET_MS: Final = 15_000
# How long a node waits for what a host that it has replaced still does.
RETIRE_SECONDS: Final = 5.0
# How long a node that is asked to stop gives partitions away.
LEAVE_SECONDS: Final = 5.0
LINGER_SECONDS: Final = 0.5

_PEER_METHODS: Final = port_methods(PeerPort, "peers")
PEER_VERSIONS: Final[Method[PeerVersions]] = _PEER_METHODS["peers.peer_versions"]
SYNC_PEER: Final[Method[None]] = _PEER_METHODS["peers.sync_peer"]
FATE: Final[Method[Fate]] = _PEER_METHODS["peers.fate"]
PASS_PEER_VERSION: Final[Method[None]] = _PEER_METHODS["peers.pass_peer_version"]
REFRESH_PEER: Final[Method[None]] = _PEER_METHODS["peers.refresh_peer"]

_log = logging.getLogger("floodmark.site")


def load_secret(engine: Engine) -> str:
    """The token of the site's nodes, made by the first: a process that reads the database is a node."""
    made = token_urlsafe(SECRET_BYTES).encode()
    if engine.write([(META, NODES_SECRET, made)], [Guard(META, NODES_SECRET, None)]):
        engine.sync()
    stored = engine.get(META, NODES_SECRET)
    assert stored is not None
    return stored.decode()


class Peers:
    """Connections to the other nodes.  `urls` is replaced as a whole when the beats of nodes tell others."""

    def __init__(self, token: str) -> None:
        self.urls: Mapping[int, str] = {}
        self.credentials = PeerCredentials()
        self._token = token
        self._calls = Connections(partial(self._connect, {}))
        self._asks = Connections(partial(self._connect, {"timeout_seconds": ASK_SECONDS}))

    def _connect(self, options: Mapping[str, Any], url: str) -> Connection:
        files = vars(self.credentials) if url.startswith("grpc+tls:") else {}
        connection = Connection(url, token=self._token, **files, **options)
        # Another node may answer later in place of this one.
        connection.is_alone = False
        return connection

    def at(self, node: int) -> Connection:
        """The connection to a node.  Raises Unreachable if its URL is not known."""
        return self._calls.at(self._url(node))

    def ask(self, node: int) -> PeerVersions:
        """The versions of a node, within `ASK_SECONDS`."""
        return self._asks.at(self._url(node)).call(PEER_VERSIONS)

    def _url(self, node: int) -> str:
        url = self.urls.get(node)
        if url is None:
            raise Unreachable(f"node {node} tells no URL at which it can be reached; start it with --listen")
        return url

    def note(self, urls: Mapping[int, str]) -> None:
        """Take in the URLs of the nodes, and close connections that lead to none of them."""
        if urls != self.urls:
            self.urls = urls
            self._calls.keep(set(urls.values()))
            self._asks.keep(set(urls.values()))

    def close(self) -> None:
        """Close all connections."""
        self._calls.close()
        self._asks.close()


class NodeMaps:
    """The partitions of the whole site: this node's own, and those of other nodes behind their servers."""

    def __init__(self, shared: SharedNode, peers: Peers) -> None:
        self._shared = shared
        self._peers = peers
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
                    # If it is of another node, it refuses with `PartitionMoved`.
                    partitions.append(partition)
                else:
                    connection = self._peers.at(owner)
                    partitions.append(
                        RemotePartition(connection, partition.id, partition.range, partition.limits)
                    )
            found = PartitionMap(source.starts, partitions)
        self._known = source, urls, found
        return found

    def refresh(self) -> None:
        self._shared.node.refresh()


class NodeMoves:
    """Goes on while a partition moves or is taken over, for as long as a takeover may take."""

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
        # Most often a partition has moved before it was called, and the next map is right.
        if (not is_first or not isinstance(error, PartitionMoved)) and self._stopping.wait(pause_ms / 1_000):
            raise error
        self._maps.refresh()

    def renew(self) -> None:
        self._backoff = Backoff(PAUSE_MS, longest_ms=PAUSE_MS_MAX, budget_ms=BUDGET_MS)


class _Asked:
    """The last answer of a node, and the ticket with which it was asked for."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.ticket = -1
        self.answer: PeerVersions | None = None
        self.silent_until_ms: int | None = None


class SiteVersions:
    """The resolved version and the read version of a site, asked of the owners of its partitions.

    **Promises.**  A resolved version of a partition is a promise that stays true for ever.  So an owner that
    gives no answer keeps its last one and holds the site's back, and an old map is safe: a partition that was
    replaced stands still.  One without a promise stands below the beginning of its log.
    """

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

    def resolved_version(self) -> Version:
        """Every change at or below this is durable and published at its owner, and none will be added."""
        node = self._shared.node
        rows, logs = node.rows, node.logs
        owners = {row.node for row in rows if row.node != self._shared.number}
        answers = [answer.resolved for owner in owners if (answer := self._ask(owner)) is not None]
        answers.append(self._shared.resolved_versions())
        opened = {log.id: log.opened_at for log in logs}
        with self._lock:
            told = {partition: version for answer in answers for partition, version in answer.items()}
            # Of partitions that are gone, nothing needs to be known.
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
            # An owner that answered does not know a partition: it was moved, split or merged.
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
        """The version at which a reader sees every acknowledged write.

        A node that cannot be asked has written nothing above its ceiling.
        """
        clock = self._shared.clock
        version = self._shared.node.committer.read_version()
        for key, stored in read_metadata(self._shared.engine, CEILING):
            node, ceiling = int.from_bytes(key[len(CEILING) :], "big"), int.from_bytes(stored, "big")
            if node != self._shared.number and ceiling > version:
                answer = self._ask(node)
                version = max(version, ceiling if answer is None else answer.read)
        ahead_ms = physical_ms(version) - clock.time_source()
        if ahead_ms > AHEAD_MS_MAX:
            Event().wait((ahead_ms - AHEAD_MS_MAX) / 1_000)
        return version

    def _ask(self, node: int) -> PeerVersions | None:
        """The versions of another node, asked for after this call began; None if it gives no answer.

        Of many threads that ask at once, one asks for all that wait.
        """
        asked = self._asked.setdefault(node, _Asked())
        arrived = next(self._tickets)
        if not asked.lock.acquire(timeout=2 * ASK_SECONDS):
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
                asked.answer = self._peers.ask(node)
            except FloodmarkError as error:
                _log.debug("node %d does not tell its versions: %s", node, error)
                asked.silent_until_ms = now_ms + SILENT_MS
            return asked.answer
        finally:
            asked.lock.release()


class NodeVersions(LocalVersions):
    """The port to versions of a site of several nodes."""

    def __init__(self, parts: SiteParts, versions: SiteVersions, ask_others: Callable[..., None]) -> None:
        super().__init__(parts)
        self._versions = versions
        self._ask_others = ask_others

    def read_version(self) -> Version:
        return self._versions.read_version()

    def pass_version(self, version: Version) -> None:
        super().pass_version(version)
        self._ask_others(PASS_PEER_VERSION, version)

    def sync(self) -> None:
        super().sync()
        self._ask_others(SYNC_PEER)


class OtherNodes:
    """What the keeper's work asks of the other nodes (`SiteNodes`)."""

    def __init__(self, shared: SharedNode, peers: Peers, versions: SiteVersions) -> None:
        self._shared = shared
        self._peers = peers
        self._versions = versions

    def require_keeper(self) -> None:
        self._shared.engine.require_keeper()

    def fresh_version(self) -> Version:
        committer = self._shared.node.committer
        committer.observe(self._versions.read_version())
        return committer.now()

    def held_version(self, namespace: int) -> Version:
        beats = self._shared.membership.living().values()
        held = (beat.held.get(scope) for beat in beats for scope in (0, namespace))
        return min((version for version in held if version is not None), default=VERSION_MAX)

    def fate(self, transaction: str) -> Fate:
        keeper = load_keeper(self._shared.engine)
        if keeper is None:
            raise NotKeeper("no node keeps the site yet; try again")
        return self._peers.at(keeper.node).call(FATE, transaction)


class BuildHost(Protocol):
    """Makes the host of a node: its keywords are those of `EmbeddedHost` that nodes of several need."""

    def __call__(
        self,
        node: Node,
        *,
        keeps: bool,
        router: Router,
        nodes: SiteNodes,
        make_versions: Callable[[SiteParts], LocalVersions],
    ) -> EmbeddedHost:
        """The host, without threads."""
        ...


class _PortCalls:
    """Has the methods of a port: the keeper answers each, or any node."""

    def __init__(self, host: "NodeHost", port: Port) -> None:
        for method in port_methods(port.protocol, port.prefix).values():
            setattr(self, method.call, partial(host.call, port.attribute, method))


class _RemotePeer:
    """Has the methods of `PeerPort`: another node answers."""

    def __init__(self, connection: Connection) -> None:
        for method in _PEER_METHODS.values():
            setattr(self, method.call, partial(connection.call, method))


class NodeHost(Host):
    """A node of several and everything around it.  No thread runs before `start`.

    `build` makes the host of an incarnation.
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
    ) -> None:
        self.identity = identity
        self.peer_token = load_secret(engine)
        self._engine = engine
        self._build = build
        self._lock = Lock()
        self._stopping = Event()
        self._closed = False
        # Set to watch at once.
        self._due = Event()
        self._is_started = False
        self._threads: list[Thread] = []
        # Why the node does not serve, or has not begun to keep the site; None if all is well.
        self.error: str | None = None
        self.shared = SharedNode(
            engine,
            number,
            identity.site_id,
            time_source=time_source,
            elapsed_source=elapsed_source,
            skew_ms_max=skew_ms_max,
        )
        self._peers = Peers(self.peer_token)
        self.site_versions = SiteVersions(self.shared, self._peers, elapsed_source)
        maps = NodeMaps(self.shared, self._peers)
        self.router = Router(maps, self.shared.entrance, moves=partial(NodeMoves, maps, self._stopping))
        for port in PORTS:
            setattr(self, port.attribute, _PortCalls(self, port))
        self.namespaces = RemoteNamespaces(self.namespaces)
        self._keeper = load_keeper(engine)
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
        node.resolve_site = self.site_versions.resolved_version
        host = self._build(
            node,
            keeps=self._kept_as is not None,
            router=self.router,
            nodes=OtherNodes(self.shared, self._peers, self.site_versions),
            make_versions=lambda parts: NodeVersions(parts, self.site_versions, self.ask_others),
        )

        def ask(node: int) -> PeerPort:
            is_here = node == self.shared.number
            return host.peers if is_here else cast(PeerPort, _RemotePeer(self._peers.at(node)))

        def keep() -> None:
            self.shared.take_keeper()
            self._due.set()

        host.partitions = NodePartitions(host, ask)
        host.node_port = NodeAdministration(host, self.shared, ask, host.partitions)
        host.peers.keep = keep

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
        # By the term: the lease may have been lost and got back since.
        if before.node is self.shared.node and self._kept_as == self.shared.engine.keeper:
            return
        host = self._make_host()
        host.safe_points.adopt(before.safe_points)
        self._host = host
        role = "keeps the site" if self._host.keeps else "does not keep the site"
        _log.info("node %d has a new host, and %s", self.shared.number, role)
        # What it still does may wait for a commit that fails only when its time is over.
        retiring = Thread(target=_retire, args=(before,), name="floodmark-retire", daemon=True)
        retiring.start()
        retiring.join(RETIRE_SECONDS)
        self.namespaces.list_namespaces()

    def start(self, *, background: bool, beats: bool) -> None:
        """Begin what the node does by itself: the work of its host, and beating and watching the others."""
        if background:
            self._is_started = True
            self._host.start()
        seconds = BEAT_MS / 1_000
        for waited, pause_seconds, work in (
            (self._stopping, seconds, self.beat),
            (self._due, seconds, self.watch),
            (self._stopping, FOLLOW_SECONDS, self.follow),
        ):
            name = work.__name__
            thread = Thread(
                target=_repeat,
                args=(self._stopping, waited, pause_seconds, work),
                name=f"floodmark-{name}",
                daemon=True,
            )
            if beats:
                self._threads.append(thread)
                thread.start()

    def beat(self) -> None:
        """Tell the others that this node lives."""
        try:
            self.shared.beat()
        except NodeFenced:
            self._due.set()

    def watch(self) -> None:
        """Do what the beats of other nodes ask for, and begin anew if this node was fenced."""
        with self._lock:
            if self._closed:
                return
            try:
                self.shared.watch()
                self._keeper = load_keeper(self._engine)
                self._peers.note(self.shared.membership.urls())
                self._renew()
                if not self._host.keeps:
                    self._host.refresh()
                self.error = None
            except BaseException as error:
                self.error = str(error)
                raise

    def follow(self) -> None:
        """Wake the readers that wait here for changes, if other nodes have written."""
        if self._host.node.committer.followers.is_watched and self.site_versions.has_news():
            self._host.wake_readers()

    # The keeper

    def require_here(self, action: Action) -> None:
        if not action.anywhere and not self._host.keeps:
            raise self._not_keeper()

    def _not_keeper(self) -> NotKeeper:
        keeper = self._keeper
        number = None if keeper is None or keeper.node == self.shared.number else keeper.node
        url = "" if number is None else self._peers.urls.get(number, "")
        where = "no node does yet; try again" if number is None else f"node {number} does, at {url}"
        return NotKeeper(
            f"node {self.shared.number} does not keep the site: {where}. Nothing was done",
            node=number,
            url=url,
        )

    def call(self, port: str, method: Method[Any], *args: object, **kwargs: object) -> Any:
        """Answer a call of a port of this process, or let the keeper answer it."""
        backoff = Backoff(PAUSE_MS, longest_ms=PAUSE_MS_MAX, budget_ms=BUDGET_MS)
        while True:
            try:
                if method.action.anywhere or self._host.keeps:
                    return self._answer(port, method, *args, **kwargs)
                keeper = self._keeper
                if keeper is None or keeper.node == self.shared.number:
                    raise self._not_keeper()
                return self._peers.at(keeper.node).call(method, *args, **kwargs)
            except (NotKeeper, Unreachable):
                pause_ms = backoff.next_ms()
                if pause_ms is None or self._stopping.wait(pause_ms / 1_000):
                    raise
                self._keeper = load_keeper(self._engine)

    def _answer(self, port: str, method: Method[Any], *args: object, **kwargs: object) -> Any:
        action = method.action
        if port == "namespaces":
            self._host.node.storage.entrance.catch_up()
        answer = getattr(getattr(self._host, port), method.call)(*args, **kwargs)
        if action.repeatable and not action.anywhere:
            # What this node knows may be old if another has taken the keeper's lease.
            self.shared.membership.require()
        return answer

    def ask_others(self, method: Method[None], *args: object) -> None:
        """Call all other nodes that live."""
        for node in self.shared.membership.living():
            if node in self._peers.urls:
                self._peers.at(node).call(method, *args)

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
        # Others take over what is left when this node has stopped.
        leaving = Thread(target=_leave, args=(self,), name="floodmark-leave", daemon=True)
        leaving.start()
        leaving.join(LEAVE_SECONDS)

    def node_counters(self) -> NodeCounters:
        shared = self.shared
        return NodeCounters(node=shared.number, takeovers=shared.takeovers, restarts=shared.incarnations - 1)

    def require_ready(self) -> None:
        number, node = self.shared.number, self.shared.node
        self.shared.membership.require()
        node.storage.require_wanted()
        if number in drained_nodes(self._engine) and not any(row.node == number for row in node.rows):
            raise PartitionMoved(
                f"node {number} was drained, and other nodes serve its partitions; stop it, or start it "
                "again to give it partitions",
                node=number,
            )
        super().require_ready()

    def physical_ms(self) -> int:
        return self._host.physical_ms()

    def reading(self, version: Version, namespace: int) -> AbstractContextManager[object]:
        return self._host.reading(version, namespace)

    def changes(self, request: ChangesRequest) -> Iterator[ChangeBatch]:
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
        self._peers.close()
        self._host.close()


def rebalance(host: NodeHost) -> None:
    """Move a partition if this node keeps the site, all nodes live, and their loads differ by much."""
    administration = host.current.node_port
    if host.current.keeps and isinstance(administration, NodeAdministration):
        administration.rebalance_if_quiet()


def _retire(host: EmbeddedHost) -> None:
    """Let a host go whose place another has taken.  Its writes may fail."""
    try:
        host.retire()
    except FloodmarkError as error:
        _log.info("a host that was replaced could not finish all: %s", error)


def _leave(host: NodeHost) -> None:
    """Give partitions to other nodes, and let clients find them there."""
    number = host.shared.number
    try:
        moved = host.node_port.drain(number)
        _log.info("node %d has given %d partitions to other nodes", number, len(moved))
        if moved:
            host.ask_others(REFRESH_PEER)
            # Clients that call meanwhile are told where the partitions are.
            Event().wait(LINGER_SECONDS)
    except FloodmarkError as error:
        _log.info("node %d stops with what it owns: %s", number, error)


def _repeat(stopping: Event, waited: Event, pause_seconds: float, work: Callable[[], None]) -> None:
    """Work until the node stops, with pauses that an event may cut short.  A failure is tried again."""
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
