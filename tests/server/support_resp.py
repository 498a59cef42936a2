"""A site that is served over RESP, and clients of Redis that others wrote."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import redis
from redis._parsers import _HiredisParser, _RESP2Parser, _RESP3Parser
from tests.server.support import LOOPBACK, open_memory
from tests.waiting import HANG_SECONDS

from floodmark.merge.policies import MergePolicy
from floodmark.server import Server, ServerOptions, serve
from floodmark.site import Site

# How clients may speak: the version of the protocol, and the parser of redis-py.
DIALECTS: Final = {
    "resp2": {"protocol": 2, "parser_class": _RESP2Parser},
    "resp3": {"protocol": 3, "parser_class": _RESP3Parser},
    "hiredis2": {"protocol": 2, "parser_class": _HiredisParser},
    "hiredis3": {"protocol": 3, "parser_class": _HiredisParser},
}


@contextmanager
def serving_resp(site: Site | None = None, **options: Any) -> Iterator[tuple[Site, Server]]:
    """A site with a namespace of each kind, and its server."""
    site = open_memory() if site is None else site
    present = site.namespaces()
    kinds: dict[str, MergePolicy] = {"users": "last_write", "records": "fields", "counts": "counter"}
    for name, merge in kinds.items():
        if name not in present:
            site.create_namespace(name, merge=merge)
    settings: dict[str, Any] = {"resp_listen": LOOPBACK, "resp_namespace": "users", **options}
    with serve(site, LOOPBACK, ServerOptions(**settings)) as server:
        yield site, server


def raw(server: Server) -> socket.socket:
    """A connection without a client."""
    assert server.resp_address is not None
    return socket.create_connection(server.resp_address, HANG_SECONDS)


@contextmanager
def resp_client(server: Server, **options: Any) -> Iterator[Any]:
    """A client of redis-py."""
    assert server.resp_address is not None
    host, port = server.resp_address
    dialect = DIALECTS[options.pop("dialect", "hiredis3")]
    pool = redis.ConnectionPool(
        host=host, port=port, socket_timeout=HANG_SECONDS, **{"retry": None, **dialect, **options}
    )
    try:
        yield redis.Redis(connection_pool=pool)
    finally:
        pool.disconnect()
