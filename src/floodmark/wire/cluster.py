"""Connections to the nodes of a site."""

from collections.abc import Callable, Collection
from threading import Lock

from floodmark.model.errors import Closed
from floodmark.wire.connection import Connection


class Connections:
    """Connections by URL, made when first used, and closed together.  Safe to use from many threads."""

    def __init__(self, connect: Callable[[str], Connection]) -> None:
        self._connect = connect
        self._lock = Lock()
        self._by_url: dict[str, Connection] = {}
        self._closed = False

    def at(self, url: str) -> Connection:
        """The connection to a server.  Raises Closed after `close`."""
        found = self._by_url.get(url)
        if found is not None:
            return found
        with self._lock:
            if self._closed:
                raise Closed("the connections to the site were closed; connect again")
            if url not in self._by_url:
                self._by_url[url] = self._connect(url)
            return self._by_url[url]

    def keep(self, urls: Collection[str]) -> None:
        """Close the connections to all other servers."""
        with self._lock:
            over = [self._by_url.pop(url) for url in list(self._by_url) if url not in urls]
        for connection in over:
            connection.close()

    def close(self) -> None:
        """Close all connections.  Closing twice is harmless."""
        with self._lock:
            self._closed = True
            over = list(self._by_url.values())
        for connection in over:
            connection.close()
