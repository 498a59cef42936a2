"""Health and metrics over real sockets, and what a rude client can do: little, and not for long."""

import http.client
import logging
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from tests.waiting import HANG_SECONDS

from floodmark.model.errors import InvalidConfiguration
from floodmark.server.health import health_pages, serve_health
from floodmark.server.web import CONNECTIONS_MAX, WebServer, page_routes

DEADLINE_SECONDS = 0.3


class Watched:
    """What the pages tell, to be changed by a test."""

    def __init__(self) -> None:
        self.unhealthy: str | None = None
        self.unready: str | None = None
        self.alarms: list[str] = []
        self.metrics: Callable[[], bytes] = lambda: b"floodmark_site_up 1\n"

    def render(self) -> bytes:
        return self.metrics()

    def serve(self, *, request_seconds_max: float = 10 * HANG_SECONDS) -> WebServer:
        pages = health_pages(
            metrics=self.render,
            is_healthy=lambda: self.unhealthy,
            is_ready=lambda: self.unready,
            find_alarms=lambda: self.alarms,
        )
        return WebServer("127.0.0.1", 0, page_routes(pages), request_seconds_max=request_seconds_max)


@pytest.fixture
def watched() -> Watched:
    return Watched()


@pytest.fixture
def server(watched: Watched) -> Iterator[WebServer]:
    with watched.serve() as server:
        yield server


def connect(server: WebServer) -> socket.socket:
    return socket.create_connection(server.address, HANG_SECONDS)


def ask(server: WebServer, path: str, method: str = "GET") -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection(*server.address, timeout=HANG_SECONDS)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, {name.title(): value for name, value in answer.getheaders()}, answer.read()
    finally:
        connection.close()


def read_to_end(connection: socket.socket) -> bytes:
    """Everything until the server closes; a test that waits too long for that fails."""
    received = b""
    while part := connection.recv(65_536):
        received += part
    return received


def web_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "floodmark-web"}


def send_forever(connection: socket.socket) -> None:
    while True:
        connection.sendall(b"x")
        time.sleep(DEADLINE_SECONDS / 10)


def has_ipv6_loopback() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


# Pages


def test_page_for_those_who_watch_names_every_alarm(server: WebServer, watched: Watched) -> None:
    assert ask(server, "/health")[::2] == (200, b"ok\n")
    watched.alarms = ["oslo to rome: silent", "bonn to rome: stalled"]
    assert ask(server, "/health")[::2] == (503, b"oslo to rome: silent\nbonn to rome: stalled\n")
    assert ask(server, "/healthz")[0] == ask(server, "/readyz")[0] == 200


def test_healthy_and_ready_server_says_ok(server: WebServer) -> None:
    for path in ("/healthz", "/readyz", "/healthz?verbose=1"):
        status, headers, body = ask(server, path)
        assert (status, body) == (200, b"ok\n")
        assert headers["Content-Type"] == "text/plain; charset=utf-8"


def test_reason_is_told_with_503(server: WebServer, watched: Watched) -> None:
    watched.unready = "still opening the site"
    assert ask(server, "/healthz")[0] == 200
    status, _, body = ask(server, "/readyz")
    assert (status, body) == (503, b"still opening the site\n")
    watched.unready, watched.unhealthy = None, "half a pair \ud800"
    assert ask(server, "/readyz")[0] == 200
    assert ask(server, "/healthz")[::2] == (503, b"half a pair \\ud800\n")


def test_metrics_come_as_they_are_rendered(server: WebServer) -> None:
    status, headers, body = ask(server, "/metrics")
    assert (status, body) == (200, b"floodmark_site_up 1\n")
    assert headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert headers["Content-Length"] == str(len(body))


def test_head_is_answered_without_the_page(server: WebServer) -> None:
    with connect(server) as connection:
        connection.sendall(b"HEAD /metrics HTTP/1.1\r\nHost: oslo\r\n\r\n")
        answer = read_to_end(connection)
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"\r\ncontent-length: 20\r\n" in answer
    assert answer.endswith(b"\r\n\r\n")


@pytest.mark.parametrize("path", ["/", "/metrics/", "/../etc/passwd", "/%2e%2e/", "/healthz/x"])
def test_there_are_no_other_pages(server: WebServer, path: str) -> None:
    status, _, body = ask(server, path)
    assert (status, body) == (404, b"try /metrics, /healthz, /readyz or /health\n")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE", "B"])
def test_only_get_and_head_are_allowed(server: WebServer, method: str) -> None:
    status, headers, body = ask(server, "/metrics", method)
    assert (status, body) == (405, b"Method Not Allowed")
    assert {*headers["Allow"].split(", ")} == {"GET", "HEAD"}


def test_answers_tell_no_versions(server: WebServer) -> None:
    for method, path in (("GET", "/metrics"), ("GET", "/nowhere"), ("POST", "/metrics")):
        _, headers, _ = ask(server, path, method)
        assert set(headers) <= {"Allow", "Content-Type", "Content-Length", "Cache-Control", "Connection"}


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\n\r\n",
        b"<b> /healthz HTTP/1.1\r\nHost: oslo\r\n\r\n",
        b"GET /healthz HTTP/nine\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: oslo\r\n" + b"A: b\r\n" * 400_000 + b"\r\n",
        b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\n\r\n",
        bytes(range(256)) + b"\r\n\r\n",
    ],
)
def test_malformed_request_is_refused_and_the_next_one_served(
    server: WebServer, request_bytes: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    with connect(server) as connection:
        connection.sendall(request_bytes)
        try:
            answer = read_to_end(connection)
        except ConnectionResetError:
            # The server has refused without reading all of it.
            answer = b""
    assert b" 200 " not in answer
    assert ask(server, "/healthz")[0] == 200
    assert capfd.readouterr().err == ""


def test_page_that_fails_is_told_and_logged(
    server: WebServer, watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> bytes:
        raise RuntimeError("a secret of the server")

    watched.metrics = fail
    status, _, body = ask(server, "/metrics")
    assert (status, body) == (500, b"failed; the server's log says why\n")
    assert "a secret of the server" in caplog.text
    assert ask(server, "/healthz")[0] == 200


def test_one_slow_page_does_not_hold_up_the_others(server: WebServer, watched: Watched) -> None:
    entered, go_on = threading.Event(), threading.Event()

    def wait() -> bytes:
        entered.set()
        assert go_on.wait(HANG_SECONDS)
        return b"late\n"

    watched.metrics = wait
    with connect(server) as connection:
        connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: oslo\r\n\r\n")
        assert entered.wait(HANG_SECONDS)
        assert ask(server, "/healthz")[0] == 200
        go_on.set()
        assert read_to_end(connection).endswith(b"late\n")


# Rude clients


def test_silent_client_is_cut(watched: Watched) -> None:
    with watched.serve(request_seconds_max=DEADLINE_SECONDS) as server, connect(server) as connection:
        assert read_to_end(connection) == b""


def test_client_that_sends_a_byte_now_and_then_is_cut(watched: Watched) -> None:
    with watched.serve(request_seconds_max=DEADLINE_SECONDS) as server, connect(server) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\n")
        connection.settimeout(DEADLINE_SECONDS / 10)
        give_up_at = time.monotonic() + HANG_SECONDS
        while time.monotonic() < give_up_at:
            try:
                connection.sendall(b"x")
                if not connection.recv(1):
                    return
            except TimeoutError:
                continue
            except ConnectionError:
                return
        pytest.fail("the server goes on listening")


def test_client_that_does_not_read_is_cut(watched: Watched) -> None:
    page = bytes(64 << 20)
    watched.metrics = lambda: page
    with watched.serve(request_seconds_max=DEADLINE_SECONDS) as server, connect(server) as connection:
        connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: oslo\r\n\r\n")
        # Sending fails only after the other end has gone.
        with pytest.raises(ConnectionError):
            send_forever(connection)


def test_client_that_goes_away_is_no_event(
    server: WebServer, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO)
    with connect(server) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert ask(server, "/healthz")[0] == 200
    assert not caplog.records
    assert capfd.readouterr().err == ""


def test_connections_are_bounded_and_a_place_is_given_back(server: WebServer) -> None:
    with ExitStack() as stack:
        held = [stack.enter_context(connect(server)) for _ in range(CONNECTIONS_MAX)]
        # Connections are taken in the order in which they came, so this one finds no place.
        with connect(server) as surplus:
            assert read_to_end(surplus).startswith(b"HTTP/1.1 503 ")
        held[0].sendall(b"GET /healthz HTTP/1.1\r\nHost: oslo\r\n\r\n")
        assert read_to_end(held[0]).endswith(b"ok\n")
        # Its place was free before the connection ended.
        assert ask(server, "/healthz")[0] == 200


# Beginning and end


def test_closing_cuts_what_is_open(watched: Watched) -> None:
    before = web_threads()
    server = watched.serve()
    assert web_threads() > before
    with connect(server) as silent, connect(server) as halfway:
        halfway.sendall(b"GET /healthz HTTP/1.1\r\n")
        # Answered after the two were taken, so both are open.
        assert ask(server, "/healthz")[0] == 200
        server.close()
        assert read_to_end(silent) == b""
        assert read_to_end(halfway) == b""
    with pytest.raises(ConnectionRefusedError):
        connect(server)
    assert web_threads() <= before


def test_closing_at_once_and_twice_is_harmless(watched: Watched) -> None:
    server = watched.serve()
    server.close()
    server.close()


def test_port_in_use_is_refused_with_the_address(server: WebServer) -> None:
    host, port = server.address
    with pytest.raises(InvalidConfiguration, match=f"{host}:{port}.*in use"):
        serve_health(host, port, metrics=bytes, is_healthy=lambda: None, is_ready=lambda: None)


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", 70_000), ("a..b", 0), ("192.0.2.1", 0)])
def test_address_that_cannot_be_is_refused(host: str, port: int) -> None:
    with pytest.raises(InvalidConfiguration, match="choose another port or host"):
        serve_health(host, port, metrics=bytes, is_healthy=lambda: None, is_ready=lambda: None)


@pytest.mark.skipif(not has_ipv6_loopback(), reason="this machine has no IPv6")
@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_it_listens_on_ipv6_too(host: str) -> None:
    with serve_health(host, 0, metrics=bytes, is_healthy=lambda: None, is_ready=lambda: None) as server:
        assert server.address[0] == "::1"
        assert ask(server, "/healthz")[0] == 200
