"""The console of some sites, on a port of its own."""

from collections.abc import Callable, Sequence
from ssl import SSLContext

from floodmark.host.ports import Host
from floodmark.server.access import Access, is_loopback
from floodmark.server.console.routes import Console
from floodmark.server.console.watching import SiteWatch, Watching
from floodmark.server.web import WebServer


class ServedConsole:
    """Serves the page of some sites from construction until it is closed.

    Each of `sites` has the fields of `WatchedSite`.
    """

    def __init__(
        self,
        sites: Sequence[tuple[str, str, Callable[[], Host]]],
        host: str,
        port: int,
        access: Access,
        *,
        tls: SSLContext | None,
        metrics: Callable[[], bytes] | None,
    ) -> None:
        self._watching = Watching([SiteWatch(*site) for site in sites])
        console = Console(self._watching, access, loopback=is_loopback(host), metrics=metrics)
        self._server = WebServer(host, port, console.routes(), tls=tls)
        name, bound = self._server.address
        shown = f"[{name}]" if ":" in name else name
        self.url = f"http{'' if tls is None else 's'}://{shown}:{bound}/"

    def __enter__(self) -> "ServedConsole":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop serving and polling.  Closing twice is harmless."""
        self._watching.stop()
        self._server.close()
