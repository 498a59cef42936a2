"""Cuts the connections of clients that neither read nor write.

A handler that waits for its client waits inside gRPC, where Python cannot interrupt it.  So it records when
it enters gRPC and when it returns, and a watchdog shuts down the *socket* of a handler that is away for too
long.  A stream that waits for changes waits in this server's own code, and does not count as away.
"""

import logging
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Event, Lock, Thread
from typing import Final
from urllib.parse import unquote

from floodmark.clock import TimeSource

# Long enough for the largest message over a slow line, and short enough that all resources of a stalled
# client are free within half a minute: its memory returns to the system some ten seconds after the cut.
STALL_SECONDS: Final = 15.0
# The number of checks within the time that a client has.
_LOOKS_PER_STALL: Final = 4
_LOOK_SECONDS_MAX: Final = 1.0
_CLOSE_SECONDS_MAX: Final = 5.0

_log = logging.getLogger("floodmark.server")

Peer = tuple[str, int]


class Activity:
    """One request under way.  `away_since_ms` is set while it waits for its client inside gRPC."""

    __slots__ = ("_time_source", "away_since_ms", "peer")

    def __init__(self, peer: str, time_source: TimeSource) -> None:
        self.peer = peer
        self.away_since_ms: int | None = None
        self._time_source = time_source

    def leave(self) -> None:
        """Record that the request begins to wait for its client."""
        self.away_since_ms = self._time_source()

    def come_back(self) -> None:
        """Record that the request no longer waits for its client."""
        self.away_since_ms = None


class Watchdog:
    """Cuts the connections of stalled clients.  Each check also calls the functions of `on_look`."""

    def __init__(
        self,
        time_source: TimeSource,
        *,
        stall_seconds: float = STALL_SECONDS,
        on_cut: Callable[[], None] = lambda: None,
        on_look: Sequence[Callable[[], None]] = (),
    ) -> None:
        self._time_source = time_source
        self._stall_ms = stall_seconds * 1000
        self._on_cut = on_cut
        self._on_look = on_look
        self._activities: set[Activity] = set()
        self._lock = Lock()
        self._stopping = Event()
        self._pause_seconds = min(stall_seconds / _LOOKS_PER_STALL, _LOOK_SECONDS_MAX)
        self._thread = Thread(target=self._run, name="floodmark-watchdog", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def is_alive(self) -> bool:
        """Whether the watchdog's thread runs."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Stop watching."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_SECONDS_MAX)

    @contextmanager
    def watching(self, peer: str) -> Iterator[Activity]:
        """Watch a request for as long as the block lasts."""
        activity = Activity(peer, self._time_source)
        with self._lock:
            self._activities.add(activity)
        try:
            yield activity
        finally:
            with self._lock:
                self._activities.discard(activity)

    def cut_stalled(self) -> int:
        """Cut the connections of clients that have kept a request waiting too long; returns how many."""
        now_ms = self._time_source()
        return self._cut(lambda since_ms: now_ms - since_ms >= self._stall_ms)

    def cut_waiting(self) -> int:
        """Cut the connections of all clients for which a request waits now; returns how many."""
        return self._cut(lambda _since_ms: True)

    def _cut(self, is_unwanted: Callable[[int], bool]) -> int:
        with self._lock:
            activities = list(self._activities)
        peers = {
            activity.peer
            for activity in activities
            if (since_ms := activity.away_since_ms) is not None and is_unwanted(since_ms)
        }
        cut = cut_connections(peers)
        for _ in range(cut):
            self._on_cut()
        return cut

    def _run(self) -> None:
        while not self._stopping.wait(self._pause_seconds):
            try:
                cut = self.cut_stalled()
                if cut:
                    _log.warning("cut %d connections whose clients neither read nor wrote any more", cut)
                for act in self._on_look:
                    act()
            except Exception:
                # One failed check must not end the thread.
                _log.exception("the watchdog failed, and goes on")


def cut_connections(peers: set[str]) -> int:
    """Shut down this process's sockets to `peers`, which are named in gRPC's form; returns how many."""
    wanted = {_parse_peer(peer) for peer in peers} - {None}
    if not wanted:
        return 0
    return sum(_shut_down_if(descriptor, wanted) for descriptor in _descriptors())


def _shut_down_if(descriptor: int, wanted: set[Peer | None]) -> bool:
    """Shut a descriptor down if it is a socket connected to one of the peers; returns whether it was."""
    try:
        # A duplicate: the descriptor may be closed, and its number given to another file, at any time.
        duplicate = os.dup(descriptor)
    except OSError:
        return False
    try:
        connection = socket.socket(fileno=duplicate)
    except OSError:
        # Not a socket.
        os.close(duplicate)
        return False
    with connection:
        try:
            host, port = connection.getpeername()[:2]
            if (_plain_host(host), port) not in wanted:
                return False
            connection.shutdown(socket.SHUT_RDWR)
        except (OSError, ValueError):
            return False
    return True


def _descriptors() -> list[int]:
    for directory in ("/proc/self/fd", "/dev/fd"):
        with suppress(OSError, ValueError):
            return [int(name) for name in os.listdir(directory)]
    return list(range(3, os.sysconf("SC_OPEN_MAX")))


def _parse_peer(peer: str) -> Peer | None:
    """The host and port of a peer in gRPC's form; None if it has no port.

    >>> _parse_peer("ipv4:127.0.0.1:53288"), _parse_peer("ipv6:%5B::1%5D:7100"), _parse_peer("unix:")
    (('127.0.0.1', 53288), ('::1', 7100), None)
    """
    host, _, port = unquote(peer).partition(":")[2].rpartition(":")
    return (_plain_host(host.strip("[]")), int(port)) if port.isdecimal() else None


def _plain_host(host: str) -> str:
    # A server that listens on IPv6 sees clients of IPv4 under mapped addresses.
    return host.removeprefix("::ffff:")
