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

    A token is given as text or by a file, which is read again when the server does not accept it any more.
    `tls_root` names the certificate that vouches for the server's; `tls_certificate` and `tls_key` are for
    a server that wants to see its clients'.  A call that gets no answer within `timeout` fails:
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
