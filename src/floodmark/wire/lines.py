"""Lines: connections over RESP for point calls.  Over Arrow Flight, each call has a setup cost of its own.

A server names the port in its `Hello`.  A line sends the token and asks for a `Hello` before its first call,
so that no call reaches another site, or another program.  It carries one call at a time.  A line that was
idle for `REST_SECONDS` is tested with a PING first, so that a write does not fail because the server was
restarted.

Where no line can be opened, calls go over Flight, and lines are tried again after a pause.
"""

import logging
import os
import socket
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ssl import SSLContext
from threading import Lock
from typing import Final
from weakref import WeakSet, finalize

from floodmark.clock import monotonic_seconds
from floodmark.clock.backoff import NO_BUDGET_MS, Backoff
from floodmark.model.errors import FloodmarkError
from floodmark.model.limits import KIB, LINES_MAX
from floodmark.wire.calling import PING, encode_greeting, is_pong, require_greeting, take_answer
from floodmark.wire.messages import Hello
from floodmark.wire.resp import INCOMPLETE, ProtocolError, ReplyReader

REST_SECONDS: Final = 0.5
# How long a line may take to open; after that the call goes over Flight, with its own timeout.
OPEN_SECONDS: Final = 2.0
PAUSE_MS: Final = 1_000
PAUSE_MS_MAX: Final = 60_000
# The errors of a broken line, those of TLS included.
LINE_ERRORS: Final = (OSError, ProtocolError)

_READ_BYTES: Final = 64 * KIB

_log = logging.getLogger("floodmark.wire")


class Line:
    """One connection.  For one thread at a time."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        # Without this, Python would warn of the socket if its client was not closed.
        finalize(self, connection.close)
        self._send, self._receive = connection.sendall, connection.recv
        self._timeout_seconds: float | None = None
        reader = ReplyReader()
        self._feed, self._next = reader.feed, reader.next
        self.rested_since = 0.0

    def ask(self, request: bytes, timeout_seconds: float) -> bytes:
        """Send a call, and wait for its answer.  Raises the server's error, or one of `LINE_ERRORS`."""
        reply = self.exchange(request, timeout_seconds)
        return reply if type(reply) is bytes else take_answer(reply)

    def exchange(self, request: bytes, timeout_seconds: float) -> object:
        """Send a request, and wait for the next reply."""
        if timeout_seconds != self._timeout_seconds:
            self._socket.settimeout(timeout_seconds)
            self._timeout_seconds = timeout_seconds
        self._send(request)
        reply = self._read_some()
        return reply if reply is not INCOMPLETE else self.read(timeout_seconds)

    def read(self, timeout_seconds: float) -> object:
        """Wait for the next reply, or for the rest of it."""
        ends = monotonic_seconds() + timeout_seconds
        reply = self._next()
        while reply is INCOMPLETE:
            left = ends - monotonic_seconds()
            if left <= 0:
                raise TimeoutError("timed out")
            self._socket.settimeout(left)
            self._timeout_seconds = left
            reply = self._read_some()
        return reply

    def _read_some(self) -> object:
        data = self._receive(_READ_BYTES)
        if not data:
            raise ConnectionResetError("the server has closed the connection")
        self._feed(data)
        return self._next()

    def is_alive(self, timeout_seconds: float) -> bool:
        """Whether the server answers a PING; False if the line is broken.  Raises TimeoutError."""
        try:
            return is_pong(self.exchange(PING, timeout_seconds))
        except TimeoutError:
            raise
        except LINE_ERRORS:
            return False

    def end(self) -> None:
        """Interrupt a call that waits on the line, from any thread."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            # The server has closed it already.
            return

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


class Lines:
    """The lines to one server.  Safe to use from many threads.

    `find` asks the server for its `Hello`; `tls` makes the context of an encrypted line.
    """

    def __init__(
        self,
        host: str,
        find: Callable[[], Hello],
        tls: Callable[[], SSLContext] | None,
        seconds: Callable[[], float] = monotonic_seconds,
    ) -> None:
        self._host = host
        self._find = find
        self._tls = tls
        self._seconds = seconds
        self._lock = Lock()
        # The line that was used last is taken first, so that lines which are not needed stay idle.
        self._resting: deque[Line] = deque()
        self._open: set[Line] = set()
        self._opening = 0
        self._is_closed = False
        # The last `Hello` of the server; None if it must be asked again.
        self._hello: Hello | None = None
        self._backoff = Backoff(PAUSE_MS, longest_ms=PAUSE_MS_MAX, budget_ms=NO_BUDGET_MS)
        self._shut_until = 0.0
        # The warning of a port that refused a line, until a call over Flight shows whether the server runs.
        self._warning: str | None = None
        _forked.add(self)

    def learn(self, hello: Hello) -> None:
        """Store the server's `Hello`."""
        self._hello = hello

    def offered(self) -> Hello | None:
        """The server's last `Hello`, if it takes calls over RESP now."""
        hello = self._hello
        is_open = hello is not None and hello.resp_port and self._seconds() >= self._shut_until
        return hello if is_open else None

    def take(self, token: str | None, timeout_seconds: float) -> Line | None:
        """A line that works, to be given back; None if there is none, and the call must go over Flight.

        Raises TimeoutError, before the call is sent, if the PING of an idle line gets no answer.
        """
        while True:
            try:
                line = self._resting.pop()
            except IndexError:
                return self._open_line(token, timeout_seconds)
            if self._seconds() - line.rested_since < REST_SECONDS:
                return line
            try:
                if line.is_alive(timeout_seconds):
                    return line
            except TimeoutError:
                # A new line would not be answered either.
                self.discard(line)
                raise
            self.discard(line)

    def give_back(self, line: Line) -> None:
        """Return a line after a call, for other threads."""
        line.rested_since = self._seconds()
        self._resting.append(line)
        if self._is_closed:
            self.close_resting()

    def discard(self, line: Line) -> None:
        """Close a line that does not work any more."""
        with self._lock:
            self._open.discard(line)
        line.close()

    def close_resting(self) -> None:
        """Close the lines that are not in use: their server has gone, or their token is not valid now."""
        resting, self._resting = self._resting, deque()
        for line in resting:
            self.discard(line)

    def close(self) -> None:
        """End all calls, and close all lines."""
        with self._lock:
            self._is_closed = True
        self.close_resting()
        with self._lock:
            lines = list(self._open)
        for line in lines:
            line.end()

    def forget(self) -> None:
        """Begin without lines in a forked process: they belong to its parent."""
        self._lock = Lock()
        self._resting, self._open, self._opening = deque(), set(), 0

    def _open_line(self, token: str | None, timeout_seconds: float) -> Line | None:
        hello = self._hello
        if self._seconds() < self._shut_until or (hello is not None and not hello.resp_port):
            return None
        if hello is None:
            hello = self._hello = self._find()
            if not hello.resp_port:
                return None
        with self._lock:
            if self._is_closed or len(self._open) + self._opening >= LINES_MAX:
                return None
            self._opening += 1
        try:
            line = self._greet(hello, token, min(timeout_seconds, OPEN_SECONDS))
        except (*LINE_ERRORS, FloodmarkError) as error:
            self.shut(hello, error)
            return None
        finally:
            with self._lock:
                self._opening -= 1
        self._backoff.reset()
        with self._lock:
            self._open.add(line)
            if not self._is_closed:
                return line
        self.discard(line)
        return None

    def _greet(self, hello: Hello, token: str | None, timeout_seconds: float) -> Line:
        connection = socket.create_connection((self._host, hello.resp_port), timeout_seconds)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                connection = self._tls().wrap_socket(connection, server_hostname=self._host)
            line = Line(connection)
            request, count = encode_greeting(token)
            replies = [line.exchange(request, timeout_seconds)]
            replies += [line.read(timeout_seconds) for _ in range(count - 1)]
            require_greeting(replies, hello)
        except BaseException:
            connection.close()
            raise
        return line

    def shut(self, hello: Hello, error: Exception) -> None:
        """Use no lines for a while, and ask the server again afterwards: it may have another port then."""
        pause_ms = self._backoff.next_ms() or PAUSE_MS_MAX
        self._shut_until = self._seconds() + pause_ms / 1_000
        self._hello = None
        self._warning = (
            f"{self._host}:{hello.resp_port} does not take point calls over RESP ({error}); they go over "
            f"Flight, more slowly, and RESP is tried again in {pause_ms // 1_000} s. Open the port, or serve "
            "with --no-resp"
        )

    @contextmanager
    def judged(self) -> Iterator[None]:
        """Warn of a port that refused a line once the block, a call over Flight, has succeeded."""
        with self._lock:
            warning, self._warning = self._warning, None
        yield
        if warning is not None:
            _log.warning(warning)


_forked: Final[WeakSet[Lines]] = WeakSet()


def _forget_lines() -> None:
    for lines in list(_forked):
        lines.forget()


# Two processes on one connection would read each other's answers.
os.register_at_fork(after_in_child=_forget_lines)
