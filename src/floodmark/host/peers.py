"""Connections between the nodes of a site.

Nodes authenticate to each other with a token stored in the engine: access to the database makes a node.
"""

from collections.abc import Mapping
from functools import partial
from secrets import token_urlsafe
from typing import Any, Final, cast

from floodmark.engine import Engine, Guard
from floodmark.host.ports import PeerCredentials, PeerPort, PeerVersions
from floodmark.model.errors import Unreachable
from floodmark.model.partition import Fate
from floodmark.model.version import Version
from floodmark.partition import META
from floodmark.partition.families import NODES_SECRET
from floodmark.wire import Connection, Connections, RemoteCalls, port_methods
from floodmark.wire.messages import Method

SECRET_BYTES: Final = 32
# How long a node waits for the versions of another node.
ASK_SECONDS: Final = 0.5

_METHODS: Final = port_methods(PeerPort, "peers")
PEER_VERSIONS: Final[Method[PeerVersions]] = _METHODS["peers.peer_versions"]
FATE: Final[Method[Fate]] = _METHODS["peers.fate"]
SETTLE_PEER: Final[Method[Version]] = _METHODS["peers.settle_peer"]
PASS_PEER_VERSION: Final[Method[None]] = _METHODS["peers.pass_peer_version"]
REFRESH_PEER: Final[Method[None]] = _METHODS["peers.refresh_peer"]


def load_secret(engine: Engine) -> str:
    """The token of the site's nodes, created by the first node."""
    made = token_urlsafe(SECRET_BYTES).encode()
    if engine.write([(META, NODES_SECRET, made)], [Guard(META, NODES_SECRET, None)]):
        engine.sync()
    stored = engine.get(META, NODES_SECRET)
    assert stored is not None
    return stored.decode()


class Peers:
    """Connections to the other nodes.  `urls` is replaced as a whole when beats announce other URLs."""

    def __init__(self, token: str, ask_seconds: float = ASK_SECONDS) -> None:
        self.urls: Mapping[int, str] = {}
        # How long to wait for a node whose ceiling can be used in place of an answer.
        self.ask_seconds = ask_seconds
        self.credentials = PeerCredentials()
        self._token = token
        self._calls = Connections(partial(self._connect, {}))
        self._asks = Connections(partial(self._connect, {"timeout_seconds": ask_seconds}))

    def _connect(self, options: Mapping[str, Any], url: str) -> Connection:
        files = vars(self.credentials) if url.startswith("grpc+tls:") else {}
        connection = Connection(url, token=self._token, **files, **options)
        # Another node may later answer at the same URL.
        connection.is_alone = False
        return connection

    def at(self, node: int) -> Connection:
        """The connection to a node.  Raises Unreachable if its URL is not known."""
        return self._calls.at(self._url(node))

    def quick(self, node: int) -> Connection:
        """`at`, for calls that wait for at most `ask_seconds`."""
        return self._asks.at(self._url(node))

    def port(self, node: int) -> PeerPort:
        """The port of a node for calls of other nodes.  Raises Unreachable if its URL is unknown."""
        return cast(PeerPort, RemoteCalls(self.at(node).call, _METHODS.values()))

    def versions(self, node: int) -> PeerVersions:
        """The versions of a node, within `ask_seconds`."""
        return self.quick(node).call(PEER_VERSIONS)

    def _url(self, node: int) -> str:
        url = self.urls.get(node)
        if url is None:
            raise Unreachable(f"node {node} tells no URL at which it can be reached; start it with --listen")
        return url

    def note(self, urls: Mapping[int, str]) -> None:
        """Set the URLs of the nodes, and close connections to other URLs."""
        if urls != self.urls:
            self.urls = urls
            self._calls.keep(set(urls.values()))
            self._asks.keep(set(urls.values()))

    def close(self) -> None:
        """Close all connections."""
        self._calls.close()
        self._asks.close()
