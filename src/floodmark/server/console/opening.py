"""Opens a console.  Like all pages, it is imported when it is first served (`server/health.py`)."""

from collections.abc import Callable, Sequence
from importlib import import_module
from ssl import SSLContext
from typing import TYPE_CHECKING, Final, NamedTuple

from floodmark.host.ports import Host
from floodmark.server.access import Access

if TYPE_CHECKING:
    from floodmark.server.console.served import ServedConsole

_SERVED: Final = "floodmark.server.console.served"


class WatchedSite(NamedTuple):
    """A site that a console shows: its name (or what is known of it), its URL; `reach` returns its host."""

    name: str
    url: str
    reach: Callable[[], Host]


def serve_console(
    sites: Sequence[WatchedSite],
    host: str,
    port: int,
    access: Access,
    *,
    tls: SSLContext | None = None,
    metrics: Callable[[], bytes] | None = None,
) -> "ServedConsole":
    """Serve the console of some sites until the result is closed."""
    served: ServedConsole = import_module(_SERVED).ServedConsole(
        sites, host, port, access, tls=tls, metrics=metrics
    )
    return served
