"""The routes of the console: the page, its stream of events, and a key.

The page itself holds no data, and a browser gets it without a token: it has the form that asks for one.  All
other routes need the role `read`: on the whole site for its state, on the namespace for a key.  The token is
sent in the header Authorization.  Unlike a cookie, it cannot be sent on behalf of another page, and does not
reach another server on the machine.
"""

import asyncio
import ipaddress
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from http import HTTPStatus
from importlib.resources import files
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from floodmark.model.access import Role
from floodmark.model.errors import FloodmarkError, NotAllowed, NotAuthenticated
from floodmark.model.text import read_bytes
from floodmark.server.access import OPEN_ACCESS, Access, Caller
from floodmark.server.console.keys import look_up
from floodmark.server.console.watching import Frame, Point, Watching
from floodmark.server.logs import RefusedCallers
from floodmark.server.web import CERTIFICATE, METRICS, RENEW, in_thread

FRAME_SECONDS: Final = 1.0
# Streams of events keep their connections: some must remain free, to look up keys.
READERS_MAX: Final = 16

_STATIC: Final = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/console.css": ("console.css", "text/css; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
    **{
        f"/{name}.js": (f"{name}.js", "text/javascript; charset=utf-8")
        for name in ("console", "dom", "draw", "key", "panels", "stream")
    },
}
_HEADERS: Final = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-store",
}
_JSON: Final = "application/json"


class Console:
    """The routes over some sites.  `access` authenticates callers; `metrics` renders the page of metrics."""

    def __init__(
        self,
        watching: Watching,
        access: Access,
        *,
        loopback: bool,
        metrics: Callable[[], bytes] | None = None,
    ) -> None:
        self._watching = watching
        self._access = access
        self._metrics = metrics
        # A page from elsewhere could have its host name resolved to this machine, and the browser would let
        # it read everything that needs no token.
        self._requires_own_name = loopback and access is OPEN_ACCESS
        self._refused = RefusedCallers()
        self._readers = 0

    def routes(self) -> list[Route]:
        """The routes, for a web server."""
        pages = files("floodmark.server.console").joinpath("static")
        routes = [
            Route(path, partial(_show_file, pages.joinpath(name).read_bytes(), content_type))
            for path, (name, content_type) in _STATIC.items()
        ]
        routes += [
            Route("/api/events", self._guarded(self._show_events)),
            Route("/api/key", self._guarded(self._show_key)),
        ]
        if self._metrics is not None:
            routes.append(Route("/metrics", self._guarded(self._show_metrics)))
        return routes

    def _guarded(self, answer: Callable[[Request, Caller], Any]) -> Callable[[Request], Any]:
        async def guard(request: Request) -> Response:
            try:
                found: Response = await answer(request, self._authenticate(request))
            except NotAuthenticated as error:
                client = "?" if request.client is None else f"{request.client.host}:{request.client.port}"
                self._refused.note(client, request.url.path, error)
                return _refuse(HTTPStatus.UNAUTHORIZED, error, {"www-authenticate": "Bearer"})
            except NotAllowed as error:
                return _refuse(HTTPStatus.FORBIDDEN, error)
            except (FloodmarkError, ValueError) as error:
                return _refuse(HTTPStatus.BAD_REQUEST, error)
            return found

        return guard

    def _authenticate(self, request: Request) -> Caller:
        host = request.headers.get("host", "").rpartition(":")
        if self._requires_own_name and not _is_own_name(host[0] if host[1] else host[2]):
            raise NotAllowed(
                "without an access file, this console is shown under a name of this machine only; open it as "
                "http://127.0.0.1"
            )
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        return self._access.authenticate(
            token.strip() if scheme.lower() == "bearer" else None, getattr(request.state, CERTIFICATE)
        )

    # What is shown

    async def _show_events(self, request: Request, caller: Caller) -> Response:
        caller.require(Role.READ, None)
        if self._readers >= READERS_MAX:
            raise NotAllowed(f"{READERS_MAX} browsers look at this console already; close one of them")
        return StreamingResponse(self._events(request), media_type="text/event-stream", headers=_HEADERS)

    async def _events(self, request: Request) -> AsyncIterator[bytes]:
        loop, changed = asyncio.get_running_loop(), asyncio.Event()
        self._readers += 1
        try:
            with self._watching.watched(partial(_call_in, loop, changed.set)):
                watching, added = self._watching, self._watching.points_added
                yield _event("history", list(watching.points))
                while True:
                    # Ends the stream when the token was revoked or has expired.
                    self._authenticate(request).require(Role.READ, None)
                    frame = watching.frame()
                    if added < watching.points_added:
                        added = watching.points_added
                        yield _event("point", watching.points[-1])
                    yield _event("snapshot", frame)
                    getattr(request.state, RENEW)()
                    changed.clear()
                    await _wait(changed, FRAME_SECONDS)
        except (NotAuthenticated, NotAllowed):
            return
        finally:
            self._readers -= 1

    async def _show_key(self, request: Request, caller: Caller) -> Response:
        asked = request.query_params
        namespace, key = asked.get("namespace", ""), read_bytes(asked.get("key", ""))
        caller.require(Role.READ, namespace)
        found = await in_thread(
            "/api/key", partial(look_up, self._watching.sites, namespace, key), lambda: None
        )
        if found is None:
            status = HTTPStatus.INTERNAL_SERVER_ERROR
            return _refuse(status, RuntimeError("the look-up failed; the server's log says why"))
        return Response(msgspec.json.encode(found), media_type=_JSON, headers=_HEADERS)

    async def _show_metrics(self, _: Request, caller: Caller) -> Response:
        caller.require(Role.READ, None)
        assert self._metrics is not None
        page = await in_thread("/metrics", self._metrics, lambda: None)
        if page is None:
            return Response(b"failed; the server's log says why\n", HTTPStatus.INTERNAL_SERVER_ERROR)
        return Response(page, headers={**_HEADERS, "content-type": METRICS})


async def _show_file(content: bytes, content_type: str, _: Request) -> Response:
    return Response(content, headers={**_HEADERS, "content-type": content_type})


def _refuse(status: HTTPStatus, error: Exception, more: dict[str, str] | None = None) -> Response:
    told = msgspec.json.encode({"error": str(error)})
    return Response(told, status, {**_HEADERS, **(more or {})}, _JSON)


def _event(name: str, told: Frame | Sequence[Point] | Point) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), msgspec.json.encode(told))


def _call_in(loop: asyncio.AbstractEventLoop, function: Callable[[], object]) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(function)


async def _wait(changed: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await changed.wait()
    except TimeoutError:
        pass


def _is_own_name(name: str) -> bool:
    """Whether a name stands for this machine without asking a name server."""
    try:
        return name == "localhost" or ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False
