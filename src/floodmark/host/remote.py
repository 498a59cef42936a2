"""The host of a site behind a server: its ports are remote calls."""

from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from threading import Condition, Lock, Thread
from typing import Final

from floodmark.clock import TimeSource, elapsed_ms
from floodmark.host.catalog import NamespaceRow, NamespaceSettings
from floodmark.host.directory import Identity
from floodmark.host.ports import PORTS, Host, NamespacePort, NamespaceUpdate
from floodmark.model.actions import declared
from floodmark.model.batch import mint_batch
from floodmark.model.errors import FloodmarkError
from floodmark.model.partition import StreamCommand, WriteStream
from floodmark.model.stream import ChangeBatch, ChangesRequest
from floodmark.model.version import Version
from floodmark.routing import Router
from floodmark.wire import (
    Connection,
    Nodes,
    RemoteCalls,
    RemotePartition,
    RemotePartitionMaps,
    RemoteWriteStream,
    RepeatingWriteStream,
    port_methods,
    read_changes,
)
from floodmark.wire.messages import HOLD, RELEASE, Hello

# The interval at which the server's clock is read again; in between, this machine's clock measures.
CLOCK_MS_MAX: Final = 60_000

# A reader that is open for longer than this holds its version at the server.  The hold expires after a minute
# unless it is renewed.
HOLD_SECONDS: Final = 5.0
LOOKS_PER_RENEWAL: Final = 4


class RemoteHost(Host):
    """A host behind one server or several nodes: its ports are remote calls."""

    def __init__(self, nodes: Nodes, *, elapsed_source: TimeSource = elapsed_ms) -> None:
        self._nodes = nodes
        self._clock = ServerClock(nodes, elapsed_source)
        hello = self._clock.hello()
        self.identity = Identity(site=hello.site, site_id=hello.site_id, format=hello.format)
        for port in PORTS:
            methods = port_methods(port.protocol, port.prefix).values()
            setattr(self, port.attribute, RemoteCalls(nodes.call, methods))
        self.namespaces = RemoteNamespaces(self.namespaces)
        maps = RemotePartitionMaps(nodes)
        self.router = Router(maps, moves=maps.moves, mint=lambda: mint_batch(self.version_ms()))
        self._holds = ReaderHolds(nodes)

    def physical_ms(self) -> int:
        return self._clock.physical_ms()

    def version_ms(self) -> int:
        return self._clock.version_ms()

    def reading(self, version: Version, namespace: int) -> AbstractContextManager[object]:
        # A stream holds its version itself, but nothing holds it between the streams of several partitions.
        return self._holds.holding(version, namespace, at_once=True)

    def changes(self, request: ChangesRequest) -> Iterator[ChangeBatch]:
        batches = self._changes(request)
        next(batches)
        return batches

    def _changes(self, request: ChangesRequest) -> Generator[ChangeBatch, None, None]:
        batches = read_changes(self._nodes, request, self._owner_of(request))
        if request.namespace is None:
            yield ChangeBatch(through=request.since)
            yield from batches
            return
        with self._holds.holding(request.since, request.namespace, at_once=False) as hold:
            yield ChangeBatch(through=request.since)
            for batch in batches:
                yield batch
                hold.version = max(hold.version, batch.through)

    def wake_readers(self) -> None:
        # No reader of the site waits in this process.
        pass

    def _owner_of(self, request: ChangesRequest) -> str | None:
        """The node that owns the first requested key.  Any node has the changes; this spreads the readers."""
        if request.namespace is None or not self._nodes.are_several:
            return None
        partition = self.router.maps.map.route(request.keys.start)
        return partition.place if isinstance(partition, RemotePartition) else None

    def write_stream(self, command: StreamCommand) -> WriteStream:
        stream = RemoteWriteStream(self._nodes, command)
        return RepeatingWriteStream(self._nodes, stream) if declared(type(command)).repeatable else stream

    def close(self) -> None:
        self._holds.close()
        self._nodes.close()


class RemoteNamespaces:
    """The calls of a namespace port.  Each namespace has one row object, so that its holders see changes."""

    def __init__(self, calls: NamespacePort) -> None:
        self._calls = calls
        self._rows: dict[int, NamespaceRow] = {}

    def create_namespace(self, namespace: str, settings: NamespaceSettings) -> NamespaceRow:
        return self._shared(self._calls.create_namespace(namespace, settings))

    def find_namespace(self, namespace: str) -> NamespaceRow:
        return self._shared(self._calls.find_namespace(namespace))

    def list_namespaces(self) -> list[NamespaceRow]:
        return [self._shared(row) for row in self._calls.list_namespaces()]

    def update_namespace(self, namespace: str, update: NamespaceUpdate) -> NamespaceRow:
        return self._shared(self._calls.update_namespace(namespace, update))

    def drop_namespace(self, namespace: str) -> None:
        self._calls.drop_namespace(namespace)
        self.list_namespaces()

    def _shared(self, row: NamespaceRow) -> NamespaceRow:
        held = self._rows.setdefault(row.id, row)
        held.adopt(row)
        return held


class ServerClock:
    """A server's time, measured with this machine's clock; never behind it, which would cut times to live."""

    def __init__(self, nodes: Nodes, elapsed_source: TimeSource) -> None:
        self._nodes = nodes
        self._elapsed_source = elapsed_source
        self._offset_ms = 0
        self._version_ms = 0
        self._asked_at_ms = 0
        self._lock = Lock()

    def hello(self) -> Hello:
        """Ask a server for its identity and time."""

        def ask(connection: Connection) -> tuple[int, Hello]:
            return self._elapsed_source(), connection.hello()

        with self._lock:
            asked_at_ms, hello = self._nodes.run(ask)
            self._offset_ms = hello.physical_ms - asked_at_ms
            self._version_ms = hello.version_ms
            self._asked_at_ms = asked_at_ms
            return hello

    def physical_ms(self) -> int:
        """The site's time in unix milliseconds."""
        now_ms = self._elapsed_source()
        if now_ms - self._asked_at_ms > CLOCK_MS_MAX:
            self.hello()
        return self._elapsed_source() + self._offset_ms

    def version_ms(self) -> int:
        """The time of the site's next version, which does not go back when the site's clock does."""
        now_ms = self.physical_ms()
        return max(now_ms, self._version_ms)


class ReaderHold:
    """A version that a reader of this process needs, and the server's lease on it, if there is one."""

    def __init__(self, version: Version, namespace: int) -> None:
        self.version = version
        self.namespace = namespace
        self.lease: int | None = None
        # The server that gave the lease.
        self.url = ""
        # The number of passes of the renewing thread over this hold.
        self.looks = 0


class ReaderHolds:
    """Holds the versions of open readers at the server.  A thread renews them while there are any."""

    def __init__(self, nodes: Nodes, *, hold_seconds: float = HOLD_SECONDS) -> None:
        self._nodes = nodes
        self._hold_seconds = hold_seconds
        self._open: set[ReaderHold] = set()
        self._changed = Condition()
        self._renewer: Thread | None = None
        self._closed = False

    @contextmanager
    def holding(self, version: Version, namespace: int, *, at_once: bool) -> Iterator[ReaderHold]:
        """Hold a version in the block; the reader may move it on."""
        hold = ReaderHold(version, namespace)
        if at_once:
            self._renew(hold)
        with self._changed:
            self._open.add(hold)
            if self._renewer is None and not self._closed:
                self._renewer = Thread(target=self._keep, name="floodmark-holds", daemon=True)
                self._renewer.start()
        try:
            yield hold
        finally:
            with self._changed:
                self._open.discard(hold)
            self._release(hold)

    def close(self) -> None:
        """Stop holding."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _keep(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed, self._hold_seconds)
                if self._closed or not self._open:
                    self._renewer = None
                    return
                holds = list(self._open)
            for hold in holds:
                hold.looks += 1
                is_lost = hold.lease is None or hold.url != self._nodes.near
                if is_lost or hold.looks % LOOKS_PER_RENEWAL == 0:
                    # If the version was collected, or the server does not answer, the reader itself gets the
                    # error.
                    with suppress(FloodmarkError):
                        self._renew(hold)

    def _renew(self, hold: ReaderHold) -> None:
        hold.lease = self._nodes.call(HOLD, hold.version, hold.namespace, hold.lease)
        hold.url = self._nodes.near

    def _release(self, hold: ReaderHold) -> None:
        if hold.lease is not None and not self._closed:
            # A lease that is not released expires.
            with suppress(FloodmarkError):
                self._nodes.call(RELEASE, hold.lease)
