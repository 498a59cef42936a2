"""serve: a site as a server, until a signal ends it."""

import logging
from datetime import timedelta
from pathlib import Path
from threading import Event
from typing import Annotated, Final, cast

import typer

import floodmark
from floodmark.cli.arguments import Directory, InsecureMetrics, Json, duration_option, text_option
from floodmark.cli.opening import require_directory, require_site
from floodmark.cli.render.output import Output
from floodmark.cli.signals import on_stop_signal
from floodmark.server import Listen, Server, ServerOptions, configure_logging
from floodmark.server import serve as serve_site
from floodmark.site.arguments import Durability

LISTEN: Final = "127.0.0.1:7100"

_LOOK_SECONDS: Final = 0.5

_log = logging.getLogger("floodmark.server")


SiteName = Annotated[
    str | None, text_option("--site", "NAME", "The site's name; it is made if the directory is empty.")
]
ListenOn = Annotated[
    str, text_option("--listen", "HOST:PORT", "Where to listen; port 0 takes any that is free.")
]
Metrics = Annotated[
    str | None,
    text_option("--metrics", "HOST:PORT", "Where to serve /metrics, /healthz and /readyz over HTTP."),
]
TlsCertificate = Annotated[
    Path | None, text_option("--tls-certificate", "FILE", "The server's certificate chain.")
]
TlsKey = Annotated[Path | None, text_option("--tls-key", "FILE", "Its private key.")]
TlsClientRoot = Annotated[
    Path | None,
    text_option(
        "--tls-client-root", "FILE", "Ask every client for a certificate that one of these has signed."
    ),
]
AccessFile = Annotated[Path | None, text_option("--access", "FILE", "Who may do what: see floodmark token.")]
Insecure = Annotated[
    bool,
    typer.Option(
        "--insecure", help="Listen beyond this machine without TLS and access file, in a closed network."
    ),
]
Relay = Annotated[
    bool | None,
    typer.Option(
        "--relay/--no-relay",
        help="Check what clients send before gRPC takes it in. On beyond this machine, and with --access.",
    ),
]
LogLevel = Annotated[str, text_option("--log-level", "LEVEL", "debug, info, warning or error.")]
DurabilityOption = Annotated[str, text_option("--durability", "fsync|async", "For writes that name none.")]
LogRetention = Annotated[
    timedelta | None,
    duration_option(
        "--log-retention",
        "Keep the change log only so long; later readers scan. Without it, as long as the versions.",
    ),
]


def serve(
    directory: Directory,
    site: SiteName = None,
    listen: ListenOn = LISTEN,
    metrics: Metrics = None,
    tls_certificate: TlsCertificate = None,
    tls_key: TlsKey = None,
    tls_client_root: TlsClientRoot = None,
    access: AccessFile = None,
    insecure: Insecure = False,
    insecure_metrics: InsecureMetrics = False,
    relay: Relay = None,
    log_level: LogLevel = "info",
    durability: DurabilityOption = "fsync",
    log_retention: LogRetention = None,
    json: Json = False,
) -> None:
    """Serve a site to other processes and machines.

    Prints one line when it is ready; logs are JSON lines on stderr. Ctrl-C and SIGTERM end it
    cleanly: calls in flight are finished, and no acknowledged write is lost. A second signal ends
    it at once.

    Beyond this machine it needs --tls-certificate, --tls-key and --access, or --insecure.

    \b
    Examples:
      floodmark serve data/oslo --site oslo --listen 127.0.0.1:7100
      floodmark serve data/oslo --listen 127.0.0.1:0 --metrics 127.0.0.1:0 --json
      floodmark serve data/oslo --tls-certificate cert.pem --tls-key key.pem --access access.toml
    """
    options = ServerOptions(
        tls_certificate=tls_certificate,
        tls_key=tls_key,
        tls_client_root=tls_client_root,
        access=access,
        metrics_listen=metrics,
        insecure=insecure,
        insecure_metrics=insecure_metrics,
        relay=relay,
    )
    path = require_directory(directory) if site is not None else require_site(directory)
    stopping = Event()
    undo_logging = configure_logging(level=log_level)
    try:
        with (
            on_stop_signal(stopping.set),
            floodmark.open(
                path, site=site, durability=cast(Durability, durability), log_retention=log_retention
            ) as opened,
        ):
            undo_logging()
            undo_logging = configure_logging(site=opened.name, level=log_level)
            with serve_site(opened, listen, options) as server:
                _announce(Output(json=json, flush=True), opened, server)
                # Python handles signals when the main thread runs, so it must not wait for ever.
                while not stopping.wait(_LOOK_SECONDS):
                    pass
                _log.info("stopping, as a signal has asked")
        _log.info("stopped")
    finally:
        undo_logging()


def _announce(output: Output, site: floodmark.Site, server: Server) -> None:
    metrics = server.metrics_address
    _log.info("serving site %s on %s", site.name, server.url)
    pages = "" if metrics is None else f", metrics on http://{_show(metrics)}/metrics"
    output.result(
        {
            "site": site.name,
            "site_id": site.id,
            "address": _show(server.address),
            "url": server.url,
            "metrics": None if metrics is None else _show(metrics),
        },
        f"serving site {site.name} on {server.url}{pages}",
    )


def _show(listen: Listen) -> str:
    return f"[{listen.host}]:{listen.port}" if ":" in listen.host else f"{listen.host}:{listen.port}"
