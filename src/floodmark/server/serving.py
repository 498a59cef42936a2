"""A site as a server.

Stopping has a fixed order: a node of several moves its partitions to other nodes; the server reports that it
is not ready, refuses new requests, ends streams and finishes calls, cuts clients that do not read, then
closes the port and the site.  A write is either finished and acknowledged or was never begun.
"""

import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from ssl import SSLContext
from threading import Lock, Thread
from typing import TYPE_CHECKING, Final, NamedTuple

from floodmark import __version__
from floodmark.clock import system_time_ms
from floodmark.host.nodes import WILDCARDS
from floodmark.host.ports import PeerCredentials
from floodmark.model.errors import CannotOpen, FloodmarkError, InvalidConfiguration
from floodmark.model.limits import MIB, STREAMS_MAX, STREAMS_PER_CALLER_MAX
from floodmark.server.access import (
    OPEN_ACCESS,
    Access,
    AccessFile,
    PeerAccess,
    is_loopback,
    require_safe_listening,
    require_safe_metrics,
)
from floodmark.server.certificates import first_expiry
from floodmark.server.console.opening import WatchedSite, serve_console
from floodmark.server.data import WRITE_BYTES_MAX
from floodmark.server.health import serve_health
from floodmark.server.page import MetricsPage, feed_statistics
from floodmark.server.relay import Relay, listen_on, make_tls
from floodmark.server.resp.door import RespDoor
from floodmark.server.resp.records import Spaces
from floodmark.server.service import Service
from floodmark.server.stalled import STALL_SECONDS
from floodmark.site.site import Site
from floodmark.wire.address import Address
from floodmark.wire.credentials import PathLike, read_file
from floodmark.wire.errors import TRANSPORT_ERRORS

if TYPE_CHECKING:
    from floodmark.server.console.served import ServedConsole
    from floodmark.server.web import WebServer

CLOSE_SECONDS: Final = 30.0
# As the address of RESP: the port after Flight's.
NEXT_PORT: Final = "next"
# The largest message of a client: the largest request, and what Arrow and protobuf add to it.
MESSAGE_BYTES_MAX: Final = WRITE_BYTES_MAX + MIB
# The part of the closing time that streams and calls have to end, before connections are cut.
_GRACE_PART: Final = 0.5


class Listen(NamedTuple):
    """A host and a port to listen on; port 0 takes any that is free."""

    host: str
    port: int


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """How a site is served.

    tls_certificate, tls_key   files that prove the server's name; without them nothing is encrypted
    tls_client_root            root certificates for clients; every client then needs a certificate
    access                     the access file; without it every client may do everything
    metrics_listen             the address of /metrics, /health, /healthz and /readyz; not served if None
    console_listen             the address of the console, which uses the TLS and the tokens of the server;
                               not served if None
    insecure                   whether it may be reached from other machines without TLS and access file
    insecure_metrics           whether the pages at `metrics_listen` may be reached from other machines
    relay                      whether a relay checks what clients send before gRPC receives it; if None, it
                               does where other machines can reach the server, or callers need a token
    resp_listen                the address of RESP, the protocol of Redis, for point calls of Floodmark's
                               clients and for Redis clients; not served if None.  "next" is the port after
                               Flight's, or any port if that is taken
    resp_namespace             the namespace of RESP clients that have selected none
    resp_prefix                whether keys over RESP begin with the name of their namespace, as in users:ada
    stall_seconds              after how long a client that neither reads nor writes is cut off
    advertise                  the URL at which clients and other nodes reach this one; if None, its own
    tls_root                   verifies the other nodes of the site; if None, the certificate of this one does
    """

    tls_certificate: PathLike | None = None
    tls_key: PathLike | None = None
    tls_client_root: PathLike | None = None
    access: PathLike | None = None
    metrics_listen: str | None = None
    console_listen: str | None = None
    insecure: bool = False
    insecure_metrics: bool = False
    relay: bool | None = None
    resp_listen: str | None = NEXT_PORT
    resp_namespace: str | None = None
    resp_prefix: bool = False
    stall_seconds: float = STALL_SECONDS
    streams_max: int = STREAMS_MAX
    streams_per_caller_max: int = STREAMS_PER_CALLER_MAX
    advertise: str | None = None
    tls_root: PathLike | None = None

    def __post_init__(self) -> None:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise InvalidConfiguration("a TLS certificate and its key belong together; give both or neither")
        if self.tls_client_root is not None and self.tls_certificate is None:
            raise InvalidConfiguration(
                "clients' certificates need TLS; give the server's certificate as well"
            )
        if self.stall_seconds <= 0 or self.streams_max < 1 or self.streams_per_caller_max < 1:
            raise InvalidConfiguration(
                "the time for a stalled client and the numbers of streams are positive"
            )


def serve(site: Site, listen: str, options: ServerOptions | None = None) -> "Server":
    """Serve a site from now on.  Closing the server closes the site, which stays open if serving fails."""
    return Server(site, parse_listen(listen), options or ServerOptions())


class Server:
    """A site that is being served.  Close it, or use it in a `with` block."""

    def __init__(self, site: Site, listen: Listen, options: ServerOptions) -> None:
        _require_safe(listen, options)
        if options.metrics_listen is not None:
            shown = parse_listen(options.metrics_listen)
            require_safe_metrics(shown.host, insecure=options.insecure or options.insecure_metrics)
        access: Access = OPEN_ACCESS if options.access is None else AccessFile(options.access, system_time_ms)
        if site.host.peer_token is not None:
            access = PeerAccess(access, site.host.peer_token)
        for other in (options.resp_listen, options.console_listen):
            if other not in (None, NEXT_PORT):
                _require_safe(parse_listen(other), options)
        self._site = site
        self._lock = Lock()
        self._closed = False
        self._relay = _open_relay(listen, options)
        self.service = _listen(site, listen, access, options, self._relay)
        port = self.service.port if self._relay is None else self._relay.port
        self.address = Listen(listen.host, port)
        self.url = Address(listen.host, port, options.tls_certificate is not None).url
        self._health: WebServer | None = None
        self._console: ServedConsole | None = None
        self._door: RespDoor | None = None
        try:
            site.host.advertise(options.advertise or self.url, _peer_credentials(options))
            self._serve_pages(options, access)
            if options.resp_listen is not None:
                self._door = _open_door(site, access, options, self.service, self.address)
                self.service.admission.queues.append(self._door.queued)
                if self._door.address[0] in (listen.host, "", *WILDCARDS):
                    self.service.data.resp_port = self._door.port
        except BaseException:
            self._stop_service(CLOSE_SECONDS)
            self._close_pages()
            raise

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Server({self.url!r})"

    @property
    def metrics_address(self) -> Listen | None:
        """The address of the pages of health and metrics; None if they are not served."""
        return None if self._health is None else Listen(*self._health.address)

    @property
    def console_url(self) -> str | None:
        """The URL of the console; None if it is not served."""
        return None if self._console is None else self._console.url

    @property
    def resp_address(self) -> Listen | None:
        """The address of RESP; None if it is not served."""
        return None if self._door is None else Listen(*self._door.address)

    def close(self, timeout_seconds: float = CLOSE_SECONDS) -> None:
        """Finish the requests under way, then close the site.  Closing twice is harmless."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            try:
                # While the server still answers, so that no write has to wait for a takeover.
                self._site.host.leave()
                self._stop_service(timeout_seconds)
            finally:
                self._site.close()
                self._close_pages()

    def _stop_service(self, timeout_seconds: float) -> None:
        service = self.service
        service.gate.stop()
        self._site.host.wake_readers()
        if self._door is not None:
            self._door.close(timeout_seconds * _GRACE_PART)
        if not service.gate.wait_empty(timeout_seconds * _GRACE_PART):
            service.watchdog.cut_waiting()
            service.gate.wait_empty(timeout_seconds * (1 - _GRACE_PART))
        # It waits for every request; in a thread, so that one which hangs does not block the process.
        shutdown = Thread(target=service.shutdown, name="floodmark-shutdown", daemon=True)
        shutdown.start()
        shutdown.join(timeout_seconds)
        if self._relay is not None:
            self._relay.close()
        service.watchdog.close()
        service.leases.close()

    # Pages

    def _serve_pages(self, options: ServerOptions, access: Access) -> None:
        facts, expiries = self._site.host.facts, _read_expiries(options)
        facts.release, facts.certificates = __version__, expiries
        facts.transaction_commits = self.service.metrics.transaction_commits
        page = MetricsPage(self._site, self.service.metrics, expiries)
        if options.metrics_listen is not None:
            self._health = self._serve_health(parse_listen(options.metrics_listen), page)
        if options.console_listen is not None:
            site = WatchedSite(self._site.name, options.advertise or self.url, lambda: self._site.host)
            self._console = open_console([site], options, access, page.render)

    def _close_pages(self) -> None:
        for pages in (self._health, self._console):
            if pages is not None:
                pages.close()

    def _serve_health(self, listen: Listen, page: MetricsPage) -> "WebServer":
        return serve_health(
            listen.host,
            listen.port,
            metrics=page.render,
            is_healthy=self._why_unhealthy,
            is_ready=self._why_not_ready,
            find_alarms=self._find_alarms,
        )

    def _why_unhealthy(self) -> str | None:
        if not self.service.watchdog.is_alive():
            return "the watchdog has died; restart the server"
        if self._relay is not None and not self._relay.is_alive():
            return "the relay has died, and no client can connect; restart the server"
        if self._door is not None and not self._door.is_alive():
            return "the thread that serves RESP has died; restart the server"
        return None

    def _why_not_ready(self) -> str | None:
        if self.service.gate.stopping.is_set():
            return "the server is stopping"
        try:
            self._site.host.require_ready()
        except FloodmarkError as error:
            return str(error)
        return None

    def _find_alarms(self) -> list[str]:
        problems = [self._why_unhealthy(), self._why_not_ready()]
        found = [problem for problem in problems if problem is not None]
        try:
            if not self._site.host.keeps:
                # The keeper reports the alarms of the site.
                return found
            feeds = [
                f"feed {feed.name}: {feed.alarm}"
                for feed in feed_statistics(self._site.host.feeds)
                if feed.alarm is not None
            ]
            return [*found, *self._site.host.status.replication().alarms, *feeds]
        except FloodmarkError as error:
            return found or [str(error)]


def open_console(
    sites: Sequence[WatchedSite],
    options: ServerOptions,
    access: Access | None = None,
    metrics: Callable[[], bytes] | None = None,
) -> "ServedConsole":
    """Serve a console with these options.  Without `access`, the options' access file authenticates."""
    listen = parse_listen(options.console_listen or "")
    _require_safe(listen, options)
    if access is None:
        access = OPEN_ACCESS if options.access is None else AccessFile(options.access, system_time_ms)
    return serve_console(sites, *listen, access, tls=_make_tls(options, ("http/1.1",)), metrics=metrics)


def _require_safe(listen: Listen, options: ServerOptions) -> None:
    """Refuse to listen beyond this machine without TLS and access file, unless the options allow it."""
    require_safe_listening(
        listen.host,
        tls=options.tls_certificate is not None,
        access=options.access is not None,
        insecure=options.insecure,
    )


def parse_listen(listen: str) -> Listen:
    """Parse `host:port`; raises InvalidConfiguration.

    >>> parse_listen("127.0.0.1:7100"), parse_listen("[::1]:0")
    (Listen(host='127.0.0.1', port=7100), Listen(host='::1', port=0))
    """
    host, colon, port = listen.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65_535 or (":" in host and host[:1] != "["):
        raise InvalidConfiguration(f"an address to listen on looks like 127.0.0.1:7100, not {listen!r:.100}")
    return Listen(host.removeprefix("[").removesuffix("]"), int(port))


def _peer_credentials(options: ServerOptions) -> PeerCredentials:
    """The files with which this node shows itself to other nodes."""
    return PeerCredentials(
        tls_root=options.tls_root or options.tls_certificate,
        tls_certificate=options.tls_certificate,
        tls_key=options.tls_key,
    )


def _open_relay(listen: Listen, options: ServerOptions) -> Relay | None:
    """The relay in front of gRPC, listening but not started; None if the server needs none."""
    has_strangers = options.access is not None or not is_loopback(listen.host)
    if not (has_strangers if options.relay is None else options.relay):
        return None
    tls = _make_tls(options)
    try:
        return Relay(listen_on(*listen), tls=tls, message_bytes_max=MESSAGE_BYTES_MAX)
    except OSError as error:
        raise _cannot_listen(listen, os.strerror(error.errno or 0)) from error


def _open_door(
    site: Site, access: Access, options: ServerOptions, service: Service, flight: Listen
) -> RespDoor:
    """Serve RESP, with the protection that Flight has."""
    assert options.resp_listen is not None
    tls = _make_tls(options, protocols=())
    spaces = Spaces(site, default=options.resp_namespace, by_prefix=options.resp_prefix)
    is_next = options.resp_listen == NEXT_PORT
    listen = Listen(flight.host, flight.port + 1) if is_next else parse_listen(options.resp_listen)
    try:
        listening = listen_on(*listen)
    except (OSError, OverflowError) as error:
        if not is_next:
            raise _cannot_listen(listen, os.strerror(getattr(error, "errno", None) or 0)) from error
        # Floodmark's clients learn the port from the server's answer to `hello`.
        listening = listen_on(listen.host, 0)
    return RespDoor(
        listen.host,
        listening,
        spaces,
        access,
        service.metrics,
        service.handlers.values(),
        service.admission,
        refused=service.refused,
        tls=tls,
        stall_seconds=options.stall_seconds,
    )


def _make_tls(options: ServerOptions, protocols: Sequence[str] = ("h2",)) -> SSLContext | None:
    # Read first: Python's error would not name the file that cannot be read.
    pairs, root = _read_certificates(options)
    certificate, key = options.tls_certificate, options.tls_key
    if pairs is None:
        return None
    try:
        return make_tls(certificate, key, root, protocols)
    except (OSError, ValueError) as error:
        raise InvalidConfiguration(
            f"the certificate {certificate}, its key or the clients' root cannot be used: {error}"
        ) from error


def _read_certificates(options: ServerOptions) -> tuple[list[tuple[bytes, bytes]] | None, bytes | None]:
    """The server's certificates with their keys, and the root of its clients'; None if not given."""
    certificate, key, root = options.tls_certificate, options.tls_key, options.tls_client_root
    if certificate is None or key is None:
        return None, None
    pairs = [(read_file(certificate, "certificate"), read_file(key, "key"))]
    return pairs, None if root is None else read_file(root, "certificate")


def _read_expiries(options: ServerOptions) -> dict[str, float]:
    """The unix time at which each file of certificates expires, by its purpose."""
    pairs, root = _read_certificates(options)
    files = {"server": pairs[0][0]} if pairs else {}
    if root is not None:
        files["client_root"] = root
    return {purpose: first_expiry(file) for purpose, file in files.items()}


def _listen(
    site: Site, listen: Listen, access: Access, options: ServerOptions, relay: Relay | None
) -> Service:
    """Start gRPC; with a relay, which terminates TLS, it listens on a free port of this machine only."""
    certificates, root = (None, None) if relay is not None else _read_certificates(options)
    if relay is None:
        _require_free(listen)
    address = listen if relay is None else Listen("127.0.0.1", 0)
    try:
        service = Service(
            Address(address.host, address.port, certificates is not None).url,
            site.host,
            access,
            tls_certificates=certificates,
            client_root=root,
            relay=relay,
            stall_seconds=options.stall_seconds,
            streams_max=options.streams_max,
            streams_per_caller_max=options.streams_per_caller_max,
        )
    except BaseException as error:
        if relay is not None:
            relay.close()
        if isinstance(error, TRANSPORT_ERRORS):
            raise _cannot_listen(address, str(error).partition("\n")[0]) from None
        raise
    if relay is not None:
        relay.on_cut = service.metrics.connection_cut
        relay.start(service.port)
    return service


def _require_free(listen: Listen) -> None:
    """Refuse a port that another process has: gRPC would share it, and each get some of the clients."""
    try:
        found = socket.getaddrinfo(listen.host, listen.port, type=socket.SOCK_STREAM)
        for family, kind, protocol, _, address in found[:1]:
            with socket.socket(family, kind, protocol) as trial:
                trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                trial.bind(address)
    except OSError as error:
        raise _cannot_listen(listen, os.strerror(error.errno or 0)) from error


def _cannot_listen(listen: Listen, reason: str) -> CannotOpen:
    return CannotOpen(
        f"cannot listen on {listen.host}:{listen.port}: {reason}. Choose another port or host, or stop "
        "the process that has it",
        host=listen.host,
        port=listen.port,
    )
