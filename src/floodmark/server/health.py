"""Liveness, readiness, alarms and metrics: four pages over plain HTTP, on a port of their own.

A monitor can read them while the server is busy, and without a credential.  A connection serves one request,
and the number of connections and the time of each are bounded (`web.py`).
"""

from collections.abc import Callable, Sequence
from http import HTTPStatus
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, TypeAlias

if TYPE_CHECKING:
    from floodmark.server.web import Page, WebServer

_WEB: Final = "floodmark.server.web"
_TEXT: Final = "text/plain; charset=utf-8"
_METRICS: Final = "text/plain; version=0.0.4; charset=utf-8"

# Returns None if all is well, and otherwise a text about the problem.
Check: TypeAlias = Callable[[], str | None]


def serve_health(host: str, port: int, **more: Any) -> "WebServer":
    """Serve the four pages until the result is closed; `more` is what `health_pages` takes."""
    web = load_web()
    served: WebServer = web.WebServer(host, port, web.page_routes(health_pages(**more)))
    return served


def health_pages(
    *,
    metrics: Callable[[], bytes],
    is_healthy: Check,
    is_ready: Check,
    find_alarms: Callable[[], Sequence[str]] = tuple,
) -> "dict[str, Page]":
    """The four pages by their paths.

    /health lists everything that an operator should look at, also what a restart would not cure, such as a
    link that has fallen silent.
    """
    return {
        "/metrics": lambda: (HTTPStatus.OK, _METRICS, metrics()),
        "/healthz": lambda: _say(is_healthy()),
        "/readyz": lambda: _say(is_ready()),
        "/health": lambda: _say("\n".join(find_alarms()) or None),
    }


def load_web() -> Any:
    """Import the module that serves pages: some 40 ms and 2 MB, which a server without pages saves."""
    return import_module(_WEB)


def _say(problem: str | None) -> tuple[HTTPStatus, str, bytes]:
    if problem is None:
        return HTTPStatus.OK, _TEXT, b"ok\n"
    return HTTPStatus.SERVICE_UNAVAILABLE, _TEXT, f"{problem}\n".encode(errors="backslashreplace")
