"""serve: a site as a server, until a signal ends it."""

import logging
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from threading import Event, Thread
from typing import Annotated, Any, Final, cast

import floodmark
from floodmark.cli.arguments import InsecureMetrics, ServedSite, SiteId
from floodmark.cli.failures import Usage
from floodmark.cli.opening import require_directory, require_site
from floodmark.cli.render.output import Output
from floodmark.cli.signals import on_stop_signal
from floodmark.host.nodes import NodeHost, rebalance
from floodmark.model.errors import FloodmarkError
from floodmark.server import Listen, Server, ServerOptions, configure_logging
from floodmark.server import serve as serve_site
from floodmark.server.serving import NEXT_PORT
from floodmark.site.arguments import DATABASES, Durability

# Poll interval for the signal that stops the server.
_LOOK_SECONDS: Final = 0.5
# Long enough to measure the effect of one move before the next.
_REBALANCE_SECONDS: Final = 60.0

_log = logging.getLogger("floodmark.server")


@dataclass(frozen=True, kw_only=True)
class ProtectionOptions:
    """The options about who may connect, and how."""

    tls_certificate: Annotated[Path | None, "FILE", "The server's certificate chain."] = None
    tls_key: Annotated[Path | None, "FILE", "Its private key."] = None
    tls_client_root: Annotated[
        Path | None, "FILE", "Require a client certificate signed by one of these."
    ] = None
    access: Annotated[
        Path | None, "FILE", "The access file, which lists tokens and their roles: see floodmark token."
    ] = None
    insecure: Annotated[
        bool, "Allow other machines to connect without TLS and access file, in a closed network."
    ] = False
    insecure_metrics: InsecureMetrics = False
    relay: Annotated[
        bool | None,
        "Check clients' messages before gRPC reads them. On if other machines can connect, or with --access.",
        {"name": "--relay/--no-relay"},
    ] = None


@dataclass(frozen=True, kw_only=True)
class NodeOptions:
    """The options of a node of several: a process that serves a site in a database."""

    node: Annotated[
        int | None, "NUMBER", "The number of this node, from 1 to 63; the lowest free one by default."
    ] = None
    advertise: Annotated[
        str | None,
        "URL",
        "The URL at which clients and other nodes reach this node, if it is not the one of --listen.",
    ] = None
    rebalance: Annotated[
        bool,
        "Move up to one partition a minute while this node is the keeper and loads differ much.",
    ] = False
    tls_root: Annotated[
        Path | None, "FILE", "The certificates to verify other nodes with; this node's own by default."
    ] = None

    def given(self) -> dict[str, Any]:
        """The options of a server."""
        return {"advertise": self.advertise, "tls_root": self.tls_root}


@dataclass(frozen=True, kw_only=True)
class RespOptions:
    """The options about RESP, the protocol of Redis (docs/resp.md)."""

    resp: Annotated[
        str,
        "HOST:PORT|next",
        "Where to serve point reads and writes over RESP, the protocol of Redis, to clients of Floodmark and "
        "of Redis; next: the port after --listen, or any if that is taken.",
    ] = NEXT_PORT
    no_resp: Annotated[bool, "Do not serve RESP; clients then use slower calls."] = False
    resp_namespace: Annotated[str | None, "NAME", "The namespace of RESP clients that do not SELECT one."] = (
        None
    )
    resp_prefix: Annotated[bool, "Prefix RESP keys with the name of their namespace, as in users:ada."] = (
        False
    )

    def given(self) -> dict[str, Any]:
        """The options of a server."""
        return {
            "resp_listen": None if self.no_resp else self.resp,
            "resp_namespace": self.resp_namespace,
            "resp_prefix": self.resp_prefix,
        }


@dataclass(frozen=True, kw_only=True)
class PageOptions:
    """The pages over HTTP."""

    metrics: Annotated[
        str | None, "HOST:PORT", "Where to serve /metrics, /health, /healthz and /readyz over HTTP."
    ] = None
    console: Annotated[
        str | None,
        "HOST:PORT",
        "Where to serve the console, a page for browsers; it uses the same TLS and tokens.",
    ] = None


def serve(
    directory: ServedSite,
    output: Output,
    protection: ProtectionOptions,
    nodes: NodeOptions,
    resp: RespOptions,
    pages: PageOptions,
    site: Annotated[str | None, "NAME", "The site's name; it is made in an empty directory."] = None,
    id: SiteId = None,
    listen: Annotated[str, "HOST:PORT", "Where to listen; port 0 takes any that is free."] = "127.0.0.1:7100",
    log_level: Annotated[str, "LEVEL", "debug, info, warning or error."] = "info",
    durability: Annotated[str, "fsync|async", "The durability of writes that do not choose one."] = "fsync",
    log_retention: Annotated[
        timedelta | None,
        "DURATION",
        "How long to keep the change log; by default as long as the versions, which later readers scan.",
    ] = None,
) -> None:
    """Serve a site to other processes and machines.

    Prints one line when it is ready; logs are JSON lines on stderr. Ctrl-C and SIGTERM end it
    cleanly: calls in flight are finished, and no acknowledged write is lost. A second signal ends
    it at once.

    Beyond this machine it needs --tls-certificate, --tls-key and --access, or --insecure.

    Any number of processes serve a site in a database, each as a node with a number of its own.

    Examples:
      floodmark serve data/oslo --site oslo --listen 127.0.0.1:7100
      floodmark serve data/oslo --listen 127.0.0.1:0 --metrics 127.0.0.1:0 --json
      floodmark serve data/oslo --console 127.0.0.1:7180
      floodmark serve data/oslo --listen 127.0.0.1:7100 --resp-namespace users
      floodmark serve data/oslo --tls-certificate cert.pem --tls-key key.pem --access access.toml
      floodmark serve postgresql://db/floodmark --site oslo --node 1 --listen oslo-1:7100
    """
    options = ServerOptions(
        metrics_listen=pages.metrics,
        console_listen=pages.console,
        **resp.given(),
        **nodes.given(),
        **vars(protection),
    )
    path = _find_site(directory, site, nodes)
    stopping = Event()
    undo_logging = configure_logging(level=log_level)
    try:
        with (
            on_stop_signal(stopping.set),
            floodmark.open(
                path,
                site=site,
                site_id=id,
                durability=cast(Durability, durability),
                log_retention=log_retention,
                node=nodes.node,
            ) as opened,
        ):
            undo_logging()
            undo_logging = configure_logging(site=opened.name, level=log_level)
            with serve_site(opened, listen, options) as server:
                _announce(output, opened, server)
                _start_rebalancing(opened, nodes, stopping)
                # Python handles signals when the main thread runs, so it must not wait for ever.
                while not stopping.wait(_LOOK_SECONDS):
                    pass
                _log.info("stopping, as a signal has asked")
        _log.info("stopped")
    finally:
        undo_logging()


def _find_site(location: str, site: str | None, nodes: NodeOptions) -> str | Path:
    """The URL of a database, or the directory of a site, which is made if it is named."""
    if location.startswith(DATABASES):
        if site is None:
            raise Usage("a database may hold several sites", "--site NAME")
        return location
    if nodes != NodeOptions():
        raise Usage(
            "one process serves the site of a directory; --node, --advertise, --rebalance and --tls-root are "
            "for sites in a database",
            "floodmark serve postgresql://HOST/DATABASE --site NAME",
        )
    return require_directory(location) if site is not None else require_site(location)


def _start_rebalancing(site: floodmark.Site, nodes: NodeOptions, stopping: Event) -> None:
    if nodes.rebalance:
        Thread(target=_rebalance, args=(site, stopping), daemon=True).start()


def _rebalance(site: floodmark.Site, stopping: Event) -> None:
    """Even out the nodes, one move at a time, until the server stops."""
    while not stopping.wait(_REBALANCE_SECONDS):
        try:
            if isinstance(site.host, NodeHost):
                rebalance(site.host)
        except FloodmarkError as error:
            _log.warning("nodes could not be rebalanced, which is tried again: %s", error)


def _announce(output: Output, site: floodmark.Site, server: Server) -> None:
    output.flushes = True
    metrics = server.metrics_address
    _log.info("serving site %s on %s", site.name, server.url)
    resp = server.resp_address
    # A script may take the URL as the fifth word.
    doors = "" if resp is None else f" (RESP on {_show(resp)})"
    pages = "" if metrics is None else f", metrics on http://{_show(metrics)}/metrics"
    pages += "" if server.console_url is None else f", console on {server.console_url}"
    output.result(
        {
            "site": site.name,
            "site_id": site.id,
            "address": _show(server.address),
            "url": server.url,
            "resp": None if resp is None else _show(resp),
            "metrics": None if metrics is None else _show(metrics),
            "console": server.console_url,
        },
        f"serving site {site.name} on {server.url}{doors}{pages}",
    )


def _show(listen: Listen) -> str:
    return f"[{listen.host}]:{listen.port}" if ":" in listen.host else f"{listen.host}:{listen.port}"
