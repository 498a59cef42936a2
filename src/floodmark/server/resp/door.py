"""The server of RESP: a listener, an event loop in a thread, and the connections of clients.

The event loop answers reads, one thread commits writes (`committing.py`), and a few worker threads run
commands that may wait.  uvloop runs the loop where it is installed.
"""

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from ssl import SSLContext
from threading import Event, Thread
from typing import Any, Final

try:
    from uvloop import new_event_loop
except ModuleNotFoundError:
    # It has no wheel for this machine.
    from asyncio import new_event_loop  # type: ignore[assignment]

from floodmark.clock import monotonic_ms, monotonic_seconds
from floodmark.host.nodes import NodeHost
from floodmark.model.limits import NEWCOMERS_MAX, RESP_CONNECTIONS_MAX
from floodmark.server.access import Access
from floodmark.server.admission import Admission
from floodmark.server.counters import OTHER, RequestTally, ServerMetrics
from floodmark.server.data import Handler
from floodmark.server.logs import RefusedCallers
from floodmark.server.relay import name_in
from floodmark.server.resp.calls import CallFailure, find_calls
from floodmark.server.resp.commands import COMMANDS
from floodmark.server.resp.committing import RoundLeader
from floodmark.server.resp.connection import RespConnection
from floodmark.server.resp.forwarding import Forwarding
from floodmark.server.resp.groups import Groups
from floodmark.server.resp.records import Spaces
from floodmark.server.resp.session import Session, UseGroup
from floodmark.server.resp.table import attempt
from floodmark.server.visits import RENEW_MS
from floodmark.wire.resp import ErrorReply

WORKERS: Final = 16
# How long a client of a closing server has to read its last answers.
FLUSH_SECONDS: Final = 2.0
LOOK_SECONDS: Final = 0.2
# How long a closing server refuses calls before it closes connections.
REFUSE_SECONDS: Final = 0.05
# GETs that one look-up answers: their values are in memory together.
GETS_MAX: Final = 64
_BACKLOG: Final = 1_024
_OUTCOMES: Final = {
    "NOAUTH": "not_allowed",
    "NOPERM": "not_allowed",
    "WRONGPASS": "not_allowed",
    "TRYAGAIN": "retryable",
    "UNKNOWN": "unknown",
}

_log = logging.getLogger("floodmark.server")


class RespDoor:
    """Serves a site over RESP, from now on and until it is closed."""

    def __init__(
        self,
        host: str,
        listening: socket.socket,
        spaces: Spaces,
        access: Access,
        metrics: ServerMetrics,
        handlers: Iterable[Handler],
        admission: Admission,
        *,
        refused: RefusedCallers,
        tls: SSLContext | None,
        stall_seconds: float,
    ) -> None:
        self.spaces = spaces
        self.refused = refused
        self.groups: UseGroup = (groups := Groups(spaces.site, spaces.host.node.number))
        self._close_groups = groups.close
        self.access = access
        self.metrics = metrics
        self.stall_seconds = stall_seconds
        self.port: int = listening.getsockname()[1]
        self.address = host, self.port
        self.is_stopping = False
        # The time, which `_look` updates, and the bytes received and sent since then.
        self.now_ms = self._looked_at_ms = monotonic_ms()
        self.received_bytes = self.sent_bytes = 0
        self.calls = find_calls(handlers, admission)
        self.tallies: Mapping[str, RequestTally] = {
            name: metrics.tally(f"resp.{name.lower()}")
            for name in (OTHER, *(command.name for command in COMMANDS))
        } | {call.command.name: metrics.tally(call.command.name) for call in self.calls.values()}
        self._tls = tls
        self._listening = listening
        # For the end of the present turn of the event loop: GETs, and connections with answers to send.
        self._gets: list[tuple[RespConnection, bytes]] = []
        self._gets_at = 0.0
        self._unflushed: list[RespConnection] = []
        self._is_ending = False
        self._connections: dict[Session, RespConnection] = {}
        self._numbers = 0
        self._loop = new_event_loop()
        self._tasks: set[object] = set()
        self._workers = ThreadPoolExecutor(WORKERS, thread_name_prefix="floodmark-resp-worker")
        self.committing = RoundLeader(lambda: spaces.host.node, self._loop, self.work)
        if isinstance(spaces.site.host, NodeHost):
            self.committing.forward = Forwarding(spaces.site).forward
        self._started = Event()
        self._thread = Thread(target=self._run, name="floodmark-resp", daemon=True)
        self._thread.start()
        self._started.wait()

    def is_alive(self) -> bool:
        """Whether clients can still connect."""
        return self._thread.is_alive()

    def close(self, timeout_seconds: float) -> None:
        """Run no more requests, finish the writes that were begun, and close all connections."""
        if self._thread.is_alive():
            future = asyncio.run_coroutine_threadsafe(self._stop(timeout_seconds), self._loop)
            future.result(timeout_seconds + FLUSH_SECONDS)
            self.committing.close()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout_seconds)
        self._workers.shutdown(wait=False, cancel_futures=True)
        self._close_groups()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._server = self._loop.run_until_complete(self._listen())
            self._look()
            self._started.set()
            self._loop.run_forever()
        finally:
            self._started.set()
            self._loop.close()

    def _listen(self) -> Coroutine[Any, Any, asyncio.AbstractServer]:
        return self._loop.create_server(
            lambda: RespConnection(self, name_in),
            sock=self._listening,
            ssl=self._tls,
            # An idle client does not answer the closing message of TLS.
            ssl_shutdown_timeout=None if self._tls is None else FLUSH_SECONDS,
            backlog=_BACKLOG,
        )

    async def _stop(self, timeout_seconds: float) -> None:
        self.is_stopping = True
        self._server.close()
        if self._connections:
            # Calls that are on their way are refused, rather than lost with their connection.
            await asyncio.sleep(REFUSE_SECONDS)
        for connection in [*self._connections.values()]:
            connection.leave()
        deadline = self._loop.time() + timeout_seconds
        while self._connections and self._loop.time() < deadline:
            await asyncio.sleep(0.01)
        for connection in [*self._connections.values()]:
            connection.transport.abort()

    # For connections

    def new_session(self, address: str, certificate: str | None) -> Session:
        """A session of a client that has connected."""
        self._numbers += 1
        return Session(self._numbers, address, certificate, self)

    def admit(self, connection: RespConnection) -> str | None:
        """Register a connection, or return the error for its client."""
        session = connection.session
        if self.is_stopping:
            return "ERR the server is stopping"
        if len(self._connections) >= RESP_CONNECTIONS_MAX:
            return "ERR max number of clients reached"
        if session.caller is None:
            newcomers = sum(each.caller is None for each in self._connections)
            if newcomers >= NEWCOMERS_MAX:
                return "ERR max number of clients reached that have not authenticated yet"
        self._connections[session] = connection
        return None

    def forget(self, connection: RespConnection) -> None:
        """Remove a connection that has closed."""
        self._connections.pop(connection.session, None)

    def work(self, function: Callable[..., object], *arguments: object) -> None:
        """Run something in a worker thread."""
        task = object()
        # Counted before it runs.
        self._tasks.add(task)
        self._workers.submit(function, *arguments).add_done_callback(lambda _: self._tasks.discard(task))

    def queued(self) -> int:
        """The number of writes, and of requests in worker threads, that are on their way."""
        return self.committing.queued() + len(self._tasks)

    def call(self, function: Callable[..., object], *arguments: object) -> None:
        """Run something on the event loop, from another thread."""
        self._loop.call_soon_threadsafe(function, *arguments)

    def call_later(self, seconds: float, function: Callable[..., object]) -> asyncio.TimerHandle:
        """Run something on the event loop after a time."""
        return self._loop.call_later(seconds, function)

    def get_later(self, connection: RespConnection, qualified: bytes) -> None:
        """Answer a GET at the end of this turn of the event loop, in one look-up with those of others."""
        if not self._gets:
            self._gets_at = monotonic_seconds()
            self._end_turn_later()
        self._gets.append((connection, qualified))
        if len(self._gets) >= GETS_MAX:
            self.answer_gets()

    def answer_gets(self) -> None:
        """Answer the GETs of this turn now."""
        gets, self._gets = self._gets, []
        keys = [key for _, key in gets]
        replies: Sequence[object]
        try:
            replies = self._get_many(keys)
        except Exception:
            # Each alone: the error may be that of one.
            replies = [attempt("GET", partial(self.spaces.host.router.get, key, None)) for key in keys]
        failures = [reply for reply in replies if isinstance(reply, ErrorReply)]
        seconds = monotonic_seconds() - self._gets_at
        for failure in failures:
            self.count("GET", seconds, failure)
        self.tallies["GET"].add(seconds, number=len(gets) - len(failures))
        now_ms = self.now_ms
        for (connection, _), reply in zip(gets, replies, strict=True):
            connection.has_gets = False
            connection.session.active_at_ms = now_ms
            connection.session.last_command = "GET"
            connection.say(reply)

    def _get_many(self, keys: Sequence[bytes]) -> Sequence[bytes | None]:
        router = self.spaces.host.router
        partitions = router.maps.map.partitions
        return partitions[0].get_many(keys) if len(partitions) == 1 else router.get_many(keys, None)

    def flush_later(self, connection: RespConnection) -> None:
        """Send a connection's answers at the end of this turn, after all ready connections were read."""
        self._end_turn_later()
        self._unflushed.append(connection)

    def _end_turn_later(self) -> None:
        if not self._is_ending:
            self._is_ending = True
            self._loop.call_soon(self._end_turn)

    def _end_turn(self) -> None:
        try:
            if self._gets:
                self.answer_gets()
            connections, self._unflushed = self._unflushed, []
            for connection in connections:
                connection.flush()
        finally:
            self._is_ending = False

    def count(self, name: str, seconds: float, reply: object) -> None:
        """Count a command that has ended."""
        if isinstance(reply, CallFailure):
            self.tallies[name].add(seconds, reply.outcome)
        elif isinstance(reply, ErrorReply):
            self.tallies[name].add(seconds, _OUTCOMES.get(reply.partition(" ")[0], "refused"))
        else:
            self.tallies[name].add(seconds)

    def _look(self) -> None:
        """Update, every LOOK_SECONDS, what need not be exact at each request."""
        self.now_ms = monotonic_ms()
        if self.now_ms - self._looked_at_ms >= RENEW_MS:
            self._looked_at_ms = self.now_ms
            for connection in self._connections.values():
                # The next request checks the rights of the caller once more.
                connection.qualify = None
        self.metrics.received(self.received_bytes)
        self.metrics.sent(self.sent_bytes)
        self.received_bytes = self.sent_bytes = 0
        self._loop.call_later(LOOK_SECONDS, self._look)

    # For commands of sessions

    def sessions(self) -> Sequence[Session]:
        """The clients that are connected."""
        return [*self._connections]

    def end(self, session: Session) -> None:
        """Close a client's connection, after its present answer."""
        connection = self._connections.get(session)
        if connection is not None:
            self._loop.call_soon(connection.leave)
