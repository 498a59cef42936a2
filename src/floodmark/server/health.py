"""Liveness, readiness, alarms and metrics: four pages over plain HTTP, on a port of their own.

A monitor asks while the server is busy, and without a credential.  A connection serves one request, and the
number of connections and the time of each are bounded.
"""

import logging
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from threading import Lock, Thread, Timer
from typing import Any, Final, TypeAlias

from floodmark.model.errors import InvalidConfiguration

CONNECTIONS_MAX: Final = 32
REQUEST_SECONDS_MAX: Final = 5.0
CLOSE_SECONDS_MAX: Final = 1.0

_TEXT: Final = "text/plain; charset=utf-8"
_METRICS: Final = "text/plain; version=0.0.4; charset=utf-8"

_log = logging.getLogger("floodmark.server.health")

# None says that all is well; a text says what is not.
Check: TypeAlias = Callable[[], str | None]
_Answer: TypeAlias = tuple[HTTPStatus, str, bytes]
_Page: TypeAlias = Callable[[], _Answer]


class HealthServer:
    """Serves GET /metrics, /healthz, /readyz and /health from construction until it is closed.

    /health names everything that an operator should look at, such as a link that has fallen silent, which a
    restart would not cure.  Port 0 takes any that is free: `address` says which.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        metrics: Callable[[], bytes],
        is_healthy: Check,
        is_ready: Check,
        find_alarms: Callable[[], Sequence[str]] = tuple,
        request_seconds_max: float = REQUEST_SECONDS_MAX,
    ) -> None:
        pages: dict[str, _Page] = {
            "/metrics": lambda: (HTTPStatus.OK, _METRICS, metrics()),
            "/healthz": lambda: _say(is_healthy()),
            "/readyz": lambda: _say(is_ready()),
            "/health": lambda: _say("\n".join(find_alarms()) or None),
        }
        try:
            self._server = _Server(host, port, pages, request_seconds_max)
        except (OSError, OverflowError, ValueError) as error:
            raise InvalidConfiguration(
                f"cannot serve health and metrics on {host}:{port}: {error}; choose another port or host",
                host=host,
                port=port,
            ) from error
        self._thread = Thread(target=self._server.serve_forever, name="floodmark-health", daemon=True)
        self._thread.start()

    def __enter__(self) -> "HealthServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens: host and port."""
        host, port, *_ = self._server.server_address
        return str(host), int(port)

    def close(self) -> None:
        """Stop listening and cut the connections that are open.  Closing twice is harmless."""
        # Wakes the listening thread where the system allows it; elsewhere it looks up twice a second.
        with suppress(OSError):
            self._server.socket.shutdown(socket.SHUT_RDWR)
        self._server.shutdown()
        self._server.server_close()
        self._server.cut_connections()
        self._thread.join(CLOSE_SECONDS_MAX)


def _say(problem: str | None) -> _Answer:
    if problem is None:
        return HTTPStatus.OK, _TEXT, b"ok\n"
    return HTTPStatus.SERVICE_UNAVAILABLE, _TEXT, f"{problem}\n".encode(errors="backslashreplace")


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str, port: int, pages: dict[str, _Page], request_seconds_max: float) -> None:
        self.pages = pages
        self._request_seconds_max = request_seconds_max
        # The connections that are open, each with the timer that will cut it.
        self._deadlines: dict[socket.socket, Timer] = {}
        self._lock = Lock()
        name = host.removeprefix("[").removesuffix("]") or None
        # Without the port, which getaddrinfo() would cut to 16 bits instead of refusing.
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, _, _, _, address = found[0]
        super().__init__((str(address[0]), port), _Handler)

    def server_bind(self) -> None:
        # Not HTTPServer's, which asks the name service for a name that is used nowhere.
        TCPServer.server_bind(self)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Give a connection a thread of its own, if there is a place for it."""
        if self._enter(request):
            super().process_request(request, client_address)
            return
        with suppress(OSError):
            request.sendall(b"HTTP/1.0 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n")
        self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        """End a connection, and give its place to another."""
        # Under the lock, so that no thread cuts a socket that was closed already.
        with self._lock:
            deadline = self._deadlines.pop(request, None)
            super().shutdown_request(request)
        if deadline is not None:
            deadline.cancel()

    def cut_connections(self) -> None:
        """Make every thread that waits for its client come back."""
        with self._lock:
            connections = list(self._deadlines)
        for connection in connections:
            self._cut(connection)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is no event; the standard library would print a traceback."""
        _log.debug("a request for health or metrics broke off", exc_info=True)

    def _enter(self, connection: socket.socket) -> bool:
        # The request as a whole has a deadline.  A timeout on each read would not do: a client that sends
        # a byte now and then would hold its thread for ever.
        deadline = Timer(self._request_seconds_max, self._cut, (connection,))
        deadline.daemon = True
        with self._lock:
            if len(self._deadlines) >= CONNECTIONS_MAX:
                return False
            self._deadlines[connection] = deadline
        deadline.start()
        return True

    def _cut(self, connection: socket.socket) -> None:
        with self._lock, suppress(OSError):
            if connection in self._deadlines:
                connection.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        """Answer with one of the pages."""
        path = self.path.partition("?")[0]
        page = self.server.pages.get(path)
        if page is None:
            self._answer(HTTPStatus.NOT_FOUND, _TEXT, b"try /metrics, /healthz, /readyz or /health\n")
            return
        try:
            answer = page()
        except Exception:
            _log.exception("the page %s failed", path)
            answer = HTTPStatus.INTERNAL_SERVER_ERROR, _TEXT, b"failed; the server's log says why\n"
        self._answer(*answer)

    def do_HEAD(self) -> None:
        """The same, without the page."""
        self.do_GET()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the standard library refuses, without repeating what the client sent."""
        status = HTTPStatus.METHOD_NOT_ALLOWED if code == HTTPStatus.NOT_IMPLEMENTED else HTTPStatus(code)
        self._answer(status, _TEXT, f"{status.phrase}\n".encode())

    def log_message(self, format: str, *args: object) -> None:
        """Probes come every few seconds and are not worth a line each."""

    def _answer(self, status: HTTPStatus, content_type: str, body: bytes) -> None:
        # Without send_response(), which would tell the versions of Python and of this server.
        self.send_response_only(status)
        if status == HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET, HEAD")
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
