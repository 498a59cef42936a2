"""A relay in front of gRPC, for a server that other machines can reach.

gRPC, as Flight sets it up, receives messages before the sender is authenticated.  So the relay listens in its
place, terminates TLS, checks what clients send (`frames.py`), and passes it on to gRPC, which listens on this
machine only.  The server identifies a connection by the port from which the relay connects, and refuses all
others.

A connection is *admitted* once one of its requests has shown a valid token or certificate.  Until then the
number of connections, their bytes and their time are limited: unauthenticated clients together can make this
process hold at most `NEWCOMERS_MAX * NEWCOMER_BYTES_MAX`.
"""

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Thread
from typing import Any, Final, NamedTuple

from floodmark.model.limits import NEWCOMER_BYTES_MAX, NEWCOMER_TIME_MAX, NEWCOMERS_MAX
from floodmark.server.frames import Messages, Refused

# Bytes that the relay buffers for a side that does not read, before it stops reading from the other side.
_BUFFER_BYTES_MAX: Final = 256 * 1024
# How long the last bytes of a connection may take to reach the other side.
_PARTING_SECONDS: Final = 5.0
_CLOSE_SECONDS: Final = 5.0
_CUT_SECONDS: Final = 2.0
_REPORT_SECONDS: Final = 1.0
_BACKLOG: Final = 1_024

_LOCAL: Final = "127.0.0.1"

_log = logging.getLogger("floodmark.server")


class Visitor(NamedTuple):
    """A client of the relay: its address, and the name in its certificate."""

    address: str
    certificate: str | None


class Relay:
    """Forwards connections to a port of this machine.  The socket listens already; `start` accepts."""

    def __init__(
        self,
        listening: socket.socket,
        *,
        message_bytes_max: int,
        tls: ssl.SSLContext | None = None,
        on_cut: Callable[[], None] = lambda: None,
        newcomers_max: int = NEWCOMERS_MAX,
        newcomer_bytes_max: int = NEWCOMER_BYTES_MAX,
        newcomer_seconds: float = NEWCOMER_TIME_MAX.total_seconds(),
    ) -> None:
        listening.setblocking(False)
        self._listening = listening
        self.port: int = listening.getsockname()[1]
        self._tls = tls
        self.on_cut = on_cut
        self.newcomer_bytes_max = newcomer_bytes_max
        self.newcomer_seconds = newcomer_seconds
        self.message_bytes_max = message_bytes_max
        self._target = self._cut = 0
        self._loop = asyncio.new_event_loop()
        self._places = asyncio.Semaphore(newcomers_max)
        self._connections: dict[int, _Connection] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        # Clients that are not connected to gRPC yet, and the transports that are not closed yet.
        self._clients: set[socket.socket] = set()
        self.transports: set[Any] = set()
        self._thread = Thread(target=self._run, name="floodmark-relay", daemon=True)

    def start(self, target: int) -> None:
        """Begin to accept connections, and to forward them to a port of this machine."""
        self._target = target
        self._thread.start()

    def is_alive(self) -> bool:
        """Whether the relay's thread runs."""
        return self._thread.is_alive()

    def find(self, peer: str) -> Visitor | None:
        """The client of a connection to gRPC, by its peer in gRPC's form; None if it is not the relay's."""
        connection = self._connections.get(_port_of(peer))
        return None if connection is None else connection.visitor

    def admit(self, peer: str) -> None:
        """Admit a connection, one of whose requests has been authenticated."""
        connection = self._connections.get(_port_of(peer))
        if connection is not None and not connection.is_admitted:
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(connection.admit)

    def close(self) -> None:
        """Cut all connections, and stop listening.  Closing twice is harmless."""
        if self._thread.is_alive():
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_CLOSE_SECONDS)
        self._listening.close()

    # In the thread of the relay

    def report_cut(self, visitor: Visitor, reason: str) -> None:
        """Count a connection that was cut.  Logs one a second and the number of others, to bound the log."""
        self.on_cut()
        self._cut += 1
        if self._cut == 1:
            _log.warning("cut the connection from %s: %s", visitor.address, reason)
            self._loop.call_later(_REPORT_SECONDS, self._report_others)

    def _report_others(self) -> None:
        others, self._cut = self._cut - 1, 0
        if others:
            _log.warning("cut %d other connections for this or another reason", others)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        accepting = self._loop.create_task(self._accept())
        try:
            self._loop.run_forever()
        finally:
            tasks = {accepting, *self._tasks}
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self._loop.run_until_complete(self._cut_all())
            self._loop.close()

    async def _cut_all(self) -> None:
        """Close every socket, and wait: a transport closes its own only some turns of the loop later."""
        for transport in [*self.transports]:
            transport.abort()
        with suppress(TimeoutError):
            async with asyncio.timeout(_CUT_SECONDS):
                # One more round than needed: a handshake that was cut off has a transport of its own.
                await asyncio.sleep(0.01)
                while self.transports:
                    await asyncio.sleep(0.01)
        for client in self._clients:
            client.close()

    async def _accept(self) -> None:
        while True:
            # While there are too many newcomers, further connections wait in the system's queue.
            await self._places.acquire()
            try:
                # Not `sock_accept`, which loses the client if it is cancelled.
                await self._wait_for_client()
                client, address = self._listening.accept()
            except BlockingIOError:
                self._places.release()
                continue
            except OSError as error:
                # For example too many open files: some connections must end first.
                self._places.release()
                _log.warning("cannot take in a connection: %s", error.strerror)
                await asyncio.sleep(1)
                continue
            client.setblocking(False)
            self._clients.add(client)
            task = self._loop.create_task(self._connect(client, Visitor("{}:{}".format(*address), None)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _wait_for_client(self) -> None:
        arrived = asyncio.Event()
        self._loop.add_reader(self._listening, arrived.set)
        try:
            await arrived.wait()
        finally:
            self._loop.remove_reader(self._listening)

    async def _connect(self, client: socket.socket, visitor: Visitor) -> None:
        connection = _Connection(self, visitor, self._places.release)
        try:
            async with asyncio.timeout(self.newcomer_seconds):
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                await self._loop.connect_accepted_socket(
                    lambda: connection.front,
                    client,
                    ssl=self._tls,
                    ssl_handshake_timeout=None if self._tls is None else self.newcomer_seconds,
                )
                await self._loop.create_connection(lambda: connection.back, _LOCAL, self._target)
        except (OSError, TimeoutError) as error:
            connection.report_tls(error)
            connection.abort()
            client.close()
            self._clients.discard(client)
            return
        self._clients.discard(client)
        port = connection.back.port()
        self._connections[port] = connection
        connection.begin(lambda: self._connections.pop(port, None))


class _Side(asyncio.Protocol):
    """One end of a connection."""

    def __init__(self, take: Callable[[bytes], None], connection: "_Connection") -> None:
        self.transport: Any = None
        self._take = take
        self._connection = connection
        self._early = b""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self._connection.transports.add(transport)
        transport.set_write_buffer_limits(high=_BUFFER_BYTES_MAX)

    def data_received(self, data: bytes) -> None:
        if self._connection.is_begun:
            self._take(data)
        else:
            # Not in `connection_made`: some releases of Python begin to read after it all the same.
            self._early += data
            self.transport.pause_reading()

    def take_early(self) -> None:
        """Pass on the bytes that arrived before both ends were connected."""
        early, self._early = self._early, b""
        if early:
            self._take(early)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self._connection.transports.discard(self.transport)
        self._connection.report_tls(error)
        self._connection.part()

    def pause_writing(self) -> None:
        self._connection.set_full(self, is_full=True)

    def resume_writing(self) -> None:
        self._connection.set_full(self, is_full=False)

    def port(self) -> int:
        port: int = self.transport.get_extra_info("sockname")[1]
        return port


class _Connection:
    """A relayed connection: `front` is the side of the client, `back` that of gRPC."""

    def __init__(self, relay: Relay, visitor: Visitor, give_place_back: Callable[[], None]) -> None:
        self.front = _Side(self._from_client, self)
        self.back = _Side(self._from_server, self)
        self.visitor = visitor
        # Whether both ends are connected, and whether the client is authenticated.
        self.is_begun = self.is_admitted = False
        self.transports = relay.transports
        self._relay = relay
        self._give_place_back = give_place_back
        self._forget: Callable[[], object] = lambda: None
        self._messages = Messages(relay.message_bytes_max)
        self._received_bytes = 0
        self._is_over = False
        self._timer: asyncio.TimerHandle | None = None
        # The sides whose write buffers are full.
        self._full: set[_Side] = set()

    def begin(self, forget: Callable[[], object]) -> None:
        """Begin to pass bytes on, now that both ends are connected."""
        self._forget = forget
        transport = self.front.transport
        self.visitor = self.visitor._replace(certificate=name_in(transport.get_extra_info("peercert")))
        if self._is_over or transport.is_closing():
            self.abort()
            return
        self._timer = asyncio.get_running_loop().call_later(self._relay.newcomer_seconds, self._time_is_up)
        self.is_begun = True
        self.front.take_early()
        self.back.take_early()
        self._go_on()

    def admit(self) -> None:
        """Lift the limits for newcomers; those for all clients remain."""
        if not self.is_admitted and not self._is_over:
            self.is_admitted = True
            self._stop_waiting()
            self._go_on()

    def set_full(self, side: _Side, *, is_full: bool) -> None:
        """Record whether a side's write buffer is full; while it is, the other side is not read."""
        (self._full.add if is_full else self._full.discard)(side)
        self._go_on()

    def part(self) -> None:
        """Close both sides after one has closed; the other receives its buffered bytes first."""
        if not self._is_over:
            self._end()
            for side in (self.front, self.back):
                if side.transport is not None and not side.transport.is_closing():
                    side.transport.close()
                    asyncio.get_running_loop().call_later(_PARTING_SECONDS, side.transport.abort)

    def report_tls(self, error: BaseException | None) -> None:
        """Report an error of TLS, such as a client that does not trust this server; ignore other errors."""
        if isinstance(error, ssl.SSLError):
            self._relay.report_cut(self.visitor, f"TLS failed: {error.reason or error}")

    def abort(self) -> None:
        """Cut both ends."""
        self._end()
        for side in (self.front, self.back):
            if side.transport is not None:
                side.transport.abort()

    def _end(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._forget()
            if not self.is_admitted:
                self._stop_waiting()

    def _stop_waiting(self) -> None:
        self._give_place_back()
        if self._timer is not None:
            self._timer.cancel()

    def _time_is_up(self) -> None:
        self._cut(f"it has not shown who it is within {self._relay.newcomer_seconds:g} s")

    def _from_client(self, data: bytes) -> None:
        try:
            self._messages.feed(data)
        except Refused as refusal:
            self._cut(str(refusal))
            return
        self.back.transport.write(data)
        if not self.is_admitted:
            self._received_bytes += len(data)
            self._go_on()

    def _from_server(self, data: bytes) -> None:
        self.front.transport.write(data)

    def _go_on(self) -> None:
        """Read from each side whose bytes can be passed on, and pause the other."""
        if self._is_over:
            return
        is_held = not self.is_admitted and self._received_bytes > self._relay.newcomer_bytes_max
        _let_read(self.front, wanted=self.back not in self._full and not is_held)
        _let_read(self.back, wanted=self.front not in self._full)

    def _cut(self, reason: str) -> None:
        self._relay.report_cut(self.visitor, reason)
        self.abort()


def make_tls(
    certificate: Any, key: Any, client_root: bytes | None, protocols: Sequence[str] = ("h2",)
) -> ssl.SSLContext:
    """A server's TLS context; with `client_root`, clients need a certificate.  OSError for unusable files."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    if protocols:
        context.set_alpn_protocols(protocols)
    if client_root is not None:
        context.load_verify_locations(cadata=client_root.decode("ascii"))
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def listen_on(host: str, port: int) -> socket.socket:
    """A socket that listens on a host and a port; an empty host stands for all addresses of the machine."""
    found = socket.getaddrinfo(
        host.strip("[]") or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    family, _, _, _, address = found[0]
    dual = family == socket.AF_INET6 and socket.has_dualstack_ipv6() and address[0] == "::"
    return socket.create_server(address[:2], family=family, backlog=_BACKLOG, dualstack_ipv6=dual)


def _let_read(side: _Side, *, wanted: bool) -> None:
    transport = side.transport
    if transport.is_closing() or wanted == transport.is_reading():
        return
    if wanted:
        transport.resume_reading()
    else:
        transport.pause_reading()


def name_in(certificate: Any) -> str | None:
    """The name of a client's certificate: its first alternative name, or else its common name."""
    if not certificate:
        return None
    for _, name in certificate.get("subjectAltName", ()):
        return str(name)
    for field in certificate.get("subject", ()):
        for kind, name in field:
            if kind == "commonName":
                return str(name)
    return None


def _port_of(peer: str) -> int:
    """The port of a peer in gRPC's form; 0 if it has none.

    >>> _port_of("ipv4:127.0.0.1:53288"), _port_of("unix:")
    (53288, 0)
    """
    port = peer.rpartition(":")[2]
    return int(port) if port.isdecimal() else 0
