"""Connects to the server of a site."""

from datetime import timedelta
from functools import partial
from typing import Final

from floodmark.host.remote import RemoteHost
from floodmark.site.arguments import Durability, check_durability, check_duration
from floodmark.site.read_versions import SLOW_ANSWER, ReadVersion
from floodmark.site.site import Site
from floodmark.wire import Connection, Connections, Nodes
from floodmark.wire.address import parse_addresses
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
    read_version_cache: bool = False,
    slow_read_version: timedelta = SLOW_ANSWER,
) -> Site:
    """Connect to the server at `grpc://host:port` or `grpc+tls://host:port`.

    Returns a `Site` like that of `open`.  For a site with several nodes, name one or more of them:
    `grpc://oslo-1:7100,oslo-2:7100`.  The client finds the others, and if a node does not answer, it asks the
    others until `timeout` has passed.

    The token file is read again when the server refuses the token.  `tls_root` verifies the server;
    `tls_certificate` and `tls_key` identify this client.  A call that gets no answer within `timeout` raises
    `Unreachable` if it changed nothing, and `OutcomeUnknown` if it may have changed something.

    With `read_version_cache` transactions begin at the highest version that this client has seen, without a
    call.  They may miss writes of other clients of the last second, and a write based on such a read
    conflicts.  While the last read version took longer than `slow_read_version`, because an overloaded server
    delays them, each transaction asks for one.
    """
    durable = check_durability(durability)
    timeout_seconds = check_duration(timeout, "timeout") / timedelta(seconds=1)
    slow_answer = check_duration(slow_read_version, "slow_read_version")
    urls = [address.url for address in parse_addresses(url)]
    connections = Connections(
        partial(
            Connection,
            token=token,
            token_file=token_file,
            tls_root=tls_root,
            tls_certificate=tls_certificate,
            tls_key=tls_key,
            timeout_seconds=timeout_seconds,
        )
    )
    nodes = Nodes(connections, urls, timeout_seconds=timeout_seconds)
    try:
        read_version: ReadVersion = "cached" if read_version_cache else "fresh"
        return Site(RemoteHost(nodes), durable=durable, read_version=read_version, slow_answer=slow_answer)
    except BaseException:
        nodes.close()
        raise
