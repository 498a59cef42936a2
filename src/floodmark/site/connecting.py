"""Connecting to a site that a server serves."""

from datetime import timedelta
from typing import Final

from floodmark.host.remote import RemoteHost
from floodmark.site.arguments import Durability, check_durability, check_duration
from floodmark.site.site import Site
from floodmark.wire import Connection
from floodmark.wire.credentials import PathLike

TIMEOUT: Final = timedelta(seconds=30)


def connect(
    url: str,
    *,
    token: str | None = None,
    token_file: PathLike | None = None,
    tls_root: PathLike | None = None,
    tls_certificate: PathLike | None = None,
    tls_key: PathLike | None = None,
    durability: Durability = "fsync",
    timeout: timedelta = TIMEOUT,
) -> Site:
    """Connect to the server at `grpc://host:port`, or `grpc+tls://host:port`; the same `Site` as `open`.

    A token file is read again when the server refuses the token.  `tls_root` verifies the server;
    `tls_certificate` and `tls_key` identify this client.  A call without an answer within `timeout` raises
    `Unreachable` if it changed nothing, `OutcomeUnknown` if it may have.
    """
    durable = check_durability(durability)
    connection = Connection(
        url,
        token=token,
        token_file=token_file,
        tls_root=tls_root,
        tls_certificate=tls_certificate,
        tls_key=tls_key,
        timeout_seconds=check_duration(timeout, "timeout") / timedelta(seconds=1),
    )
    try:
        return Site(RemoteHost(connection), durable=durable)
    except BaseException:
        connection.close()
        raise
