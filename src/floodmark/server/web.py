"""Pages over HTTP, on a port of their own: Starlette's routes, served by uvicorn's protocol in one thread.

A connection serves one request, and has a deadline, so a client that is slow or silent is cut.  A page that
streams renews the deadline with each event that its client has taken.  Pages are rendered in threads: one
that waits for a lock of the site does not delay the others.

uvicorn's own `Server` is not used: it wakes ten times a second, counts connections only when they send a
request, and has no deadline for silent ones.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from ssl import SSLContext
from threading import Thread
from typing import Any, Final, TypeAlias

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, Router
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from floodmark.links.connections import begin
from floodmark.model.errors import InvalidConfiguration
from floodmark.server.relay import listen_on, name_in

CONNECTIONS_MAX: Final = 32
REQUEST_SECONDS_MAX: Final = 5.0
CLOSE_SECONDS_MAX: Final = 1.0
REQUEST_HEAD_BYTES_MAX: Final = 16 * 1024

_TEXT: Final = "text/plain; charset=utf-8"
_FULL: Final = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
# The attribute of a request's state by which a page that streams renews the deadline of its connection.
RENEW: Final = "renew_deadline"
# The attribute with the name in the client's certificate, or None.
CERTIFICATE: Final = "certificate"
METRICS: Final = "text/plain; version=0.0.4; charset=utf-8"

Answer: TypeAlias = tuple[HTTPStatus, str, bytes]
Page: TypeAlias = Callable[[], Answer]

_log = logging.getLogger("floodmark.server.web")


class WebServer:
    """Serves routes from construction until it is closed.

    With port 0 the system chooses a free port, which `address` has.  Closing cuts open connections.
    """

    def __init__(
        self,
        host: str,
        port: int,
        routes: Sequence[BaseRoute],
        *,
        tls: SSLContext | None = None,
        request_seconds_max: float = REQUEST_SECONDS_MAX,
    ) -> None:
        try:
            # getaddrinfo() would cut the port to 16 bits instead of refusing it.
            self._listening = listen_on(host, port if 0 <= port < 1 << 16 else -1)
        except (OSError, OverflowError, ValueError) as error:
            raise InvalidConfiguration(
                f"cannot serve pages on {host}:{port}: {error}; choose another port or host",
                host=host,
                port=port,
            ) from error
        found, listening_port, *_ = self._listening.getsockname()
        self.address: tuple[str, int] = str(found), int(listening_port)
        self._config = Config(
            _answer_elsewhere(routes),
            interface="asgi3",
            lifespan="off",
            ws="none",
            proxy_headers=False,
            server_header=False,
            date_header=False,
            access_log=False,
            log_config=None,
            # uvicorn's own messages are about misbehaving clients; errors of pages are logged here.
            log_level="critical",
            headers=[("connection", "close")],
            h11_max_incomplete_event_size=REQUEST_HEAD_BYTES_MAX,
        )
        self._tls = tls
        self._request_seconds_max = request_seconds_max
        self._loop, self._closing = asyncio.new_event_loop(), asyncio.Event()
        self._thread = Thread(target=self._run, name="floodmark-web", daemon=True)
        self._thread.start()

    def __enter__(self) -> "WebServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening and cut the connections that are open.  Closing twice is harmless."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(CLOSE_SECONDS_MAX)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        self._config.load()
        state = ServerState()
        state.default_headers = self._config.encoded_headers
        server = await self._loop.create_server(
            lambda: WebConnection(self._config, state, self._request_seconds_max),
            sock=self._listening,
            ssl=self._tls,
            ssl_handshake_timeout=None if self._tls is None else self._request_seconds_max,
        )
        await self._closing.wait()
        server.close()
        for connection in [*state.connections]:
            connection.transport.abort()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class WebConnection(H11Protocol):
    """A connection with a deadline.  Beyond CONNECTIONS_MAX open connections, it answers 503 and closes."""

    def __init__(self, config: Config, state: ServerState, request_seconds_max: float) -> None:
        super().__init__(config, state, {RENEW: self._renew})
        self._request_seconds_max = request_seconds_max
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.app_state[CERTIFICATE] = name_in(transport.get_extra_info("peercert"))
        # For the request as a whole.  A timeout on each read would not do: a client that sends a byte now
        # and then would stay for ever.
        self._renew()
        if len(self.connections) > CONNECTIONS_MAX:
            transport.write(_FULL)
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

    def _renew(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self.loop.call_later(self._request_seconds_max, self.transport.abort)


# Routes


def _answer_elsewhere(routes: Sequence[BaseRoute]) -> Router:
    """A router over some routes, which answers 404 with the list of their paths for any other path."""
    paths = [route.path for route in routes if isinstance(route, Route)]
    others = f"try {', '.join(paths[:-1])} or {paths[-1]}\n"

    async def refuse(scope: Any, receive: Any, send: Any) -> None:
        answer = Response(
            others, HTTPStatus.NOT_FOUND, media_type=_TEXT, headers={"cache-control": "no-store"}
        )
        await answer(scope, receive, send)

    return Router(routes, redirect_slashes=False, default=refuse)


def page_routes(pages: dict[str, Page]) -> list[Route]:
    """A route for each page, by its path."""
    return [Route(path, partial(_show, path, page)) for path, page in pages.items()]


async def _show(path: str, page: Page, _: Request) -> Response:
    status, content_type, body = await in_thread(path, page, _failed)
    return Response(body, status, {"content-type": content_type, "cache-control": "no-store"})


def _failed() -> Answer:
    return HTTPStatus.INTERNAL_SERVER_ERROR, _TEXT, b"failed; the server's log says why\n"


async def in_thread(path: str, make: Callable[[], Any], failed: Callable[[], Any]) -> Any:
    """The result of `make`, run in a thread; if it raises, the error is logged, and `failed` answers."""
    try:
        return await asyncio.wrap_future(begin(make, "floodmark-page"))
    except Exception:
        _log.exception("the page %s failed", path)
        return failed()
