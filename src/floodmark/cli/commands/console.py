"""console: a page over several sites, until a signal ends it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from threading import Event, Lock
from typing import Annotated, Any, Final
from urllib.parse import urlsplit

import typer

import floodmark
from floodmark.cli.commands.topology import read_topology
from floodmark.cli.failures import Usage
from floodmark.cli.jobs import shared_credentials
from floodmark.cli.opening import is_url
from floodmark.cli.render.output import Output
from floodmark.cli.signals import on_stop_signal
from floodmark.host.ports import Host
from floodmark.links.driver import site_addresses
from floodmark.server import ServerOptions, new_token
from floodmark.server.access import OneToken
from floodmark.server.console.opening import WatchedSite
from floodmark.server.serving import open_console
from floodmark.site.address import SiteAddress

# No call is retried for longer, so that the page shows within seconds that a site is gone.
CALL_TIMEOUT: Final = timedelta(seconds=1.5)
_LOOK_SECONDS: Final = 0.5


@dataclass(frozen=True, kw_only=True)
class ConsoleProtection:
    """The options about access to the console."""

    tls_certificate: Annotated[Path | None, "FILE", "The console's certificate chain."] = None
    tls_key: Annotated[Path | None, "FILE", "Its private key."] = None
    access: Annotated[
        Path | None,
        "FILE",
        "The access file: see floodmark token. Without it, the printed link contains a token.",
    ] = None
    insecure: Annotated[
        bool, "Allow other machines to connect without TLS and access file, in a closed network."
    ] = False


class ConsoleConnection:
    """A connection to a site, opened at its first use; if that fails, at the next one."""

    def __init__(self, address: SiteAddress) -> None:
        self._address = replace(address, timeout=CALL_TIMEOUT)
        self._site: floodmark.Site | None = None
        self._lock = Lock()

    def reach(self) -> Host:
        """The host of the site; Unreachable if there is no connection now."""
        with self._lock:
            if self._site is None:
                self._site = self._address.connect()
            return self._site.host

    def close(self) -> None:
        """Disconnect."""
        with self._lock:
            if self._site is not None:
                self._site.close()


def console(
    sites: Annotated[
        list[str],
        typer.Argument(metavar="TOPOLOGY|URL", help="A topology, in TOML, or the URLs of servers."),
    ],
    output: Output,
    protection: ConsoleProtection,
    listen: Annotated[str, "HOST:PORT", "Where to listen; port 0 takes any that is free."] = "127.0.0.1:7180",
) -> None:
    """Show several sites on one page, for browsers.

    The page is read-only, and asks the sites once a second while it is open. Options about servers,
    such as --token-file, stand before the command; their token needs the role read.

    Prints the link to open. Beyond this machine it needs --tls-certificate, --tls-key and --access,
    or --insecure.

    Examples:
      floodmark console topology.toml
      floodmark console grpc://oslo:7100 grpc://rome:7100
      floodmark --token-file token console topology.toml --listen 127.0.0.1:7180
    """
    options = ServerOptions(console_listen=listen, **vars(protection))
    token = new_token() if protection.access is None else None
    addresses = _find_addresses(sites)
    connections = [ConsoleConnection(address) for address in addresses]
    watched = [
        WatchedSite(address.name or urlsplit(address.location).netloc, address.location, connection.reach)
        for address, connection in zip(addresses, connections, strict=True)
    ]
    stopping = Event()
    access = None if token is None else OneToken("console", token)
    try:
        with on_stop_signal(stopping.set), open_console(watched, options, access) as served:
            url = served.url if token is None else f"{served.url}#token={token}"
            output.flushes = True
            output.result({"url": url, "sites": [site.url for site in watched]}, f"console on {url}")
            # Python handles signals when the main thread runs, so it must not wait for ever.
            while not stopping.wait(_LOOK_SECONDS):
                pass
    finally:
        for connection in connections:
            connection.close()


def _find_addresses(sites: Sequence[str]) -> list[SiteAddress]:
    found: list[SiteAddress] = []
    credentials: dict[str, Any] = shared_credentials()
    for each in sites:
        if is_url(each):
            found.append(SiteAddress(location=each, **credentials))
        elif Path(each).is_dir():
            raise Usage(
                f"{each} is a directory, and a console asks servers",
                f"floodmark serve {each} --console HOST:PORT",
            )
        else:
            found += site_addresses(read_topology(Path(each)), **credentials).values()
    return found
