"""A site as a server process: the Flight service, identity and roles, metrics and health."""

from floodmark.server.access import AccessFile, Caller, hash_token, new_token
from floodmark.server.logs import configure_logging
from floodmark.server.serving import Listen, Server, ServerOptions, serve

__all__ = [
    "AccessFile",
    "Caller",
    "Listen",
    "Server",
    "ServerOptions",
    "configure_logging",
    "hash_token",
    "new_token",
    "serve",
]
