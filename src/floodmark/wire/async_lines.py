"""Lines for asyncio: the point calls of `wire/lines.py`, awaited on an event loop.

The event loop notices at once that a server has closed a line, so no PING is needed before a call.  If there
is no line, or the call had no effect, it raises `NothingDone`, and the caller uses the blocking client.
"""

import asyncio
from typing import Any, Final

from floodmark.model.errors import FloodmarkError, NotAuthenticated, Retryable
from floodmark.model.limits import LINES_MAX
from floodmark.wire.calling import encode_greeting, require_greeting, take_answer
from floodmark.wire.connection import Connection
from floodmark.wire.lines import LINE_ERRORS, OPEN_SECONDS
from floodmark.wire.messages import Hello, Method, Reply
from floodmark.wire.resp import INCOMPLETE, ReplyReader, encode_call

# After these errors nothing was done.
_UNDONE: Final = (NotAuthenticated, Retryable)


class NothingDone(Exception):
    """The call had no effect here; the blocking client has to make it."""


class AsyncLine(asyncio.Protocol):
    """One connection, with one call at a time."""

    transport: Any

    def __init__(self) -> None:
        self._reader = ReplyReader()
        self._waiter: asyncio.Future[object] | None = None
        self.is_lost = False

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        self._answer()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_lost = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error or ConnectionResetError("the server has closed the connection"))

    async def exchange(self, request: bytes, timeout_seconds: float) -> object:
        """Send a request, and wait for the next reply."""
        if self.is_lost:
            raise ConnectionResetError("the server has closed the connection")
        self.transport.write(request)
        return await self.read(timeout_seconds)

    async def read(self, timeout_seconds: float) -> object:
        """Wait for the next reply."""
        self._waiter = asyncio.get_running_loop().create_future()
        self._answer()
        async with asyncio.timeout(timeout_seconds):
            return await self._waiter

    def _answer(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            try:
                reply = self._reader.next()
            except LINE_ERRORS as error:
                self._waiter.set_exception(error)
                return
            if reply is not INCOMPLETE:
                self._waiter.set_result(reply)


class AsyncLines:
    """The lines to one server, for the tasks of one event loop."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._resting: list[AsyncLine] = []
        self._open: set[AsyncLine] = set()
        self._places = asyncio.Semaphore(LINES_MAX)

    async def call(self, method: Method[Reply], *args: object) -> Reply:
        """Call a method of the server.  Raises `NothingDone` if the blocking client has to make the call."""
        request = encode_call(method.head, method.encode_request(method.request(*args)))
        async with self._places:
            line = await self._take()
            patience = self._connection.timeout_seconds
            try:
                answer = take_answer(await line.exchange(request, patience))
            except _UNDONE as error:
                self._discard(line)
                raise NothingDone from error
            except FloodmarkError:
                self._resting.append(line)
                raise
            except LINE_ERRORS as error:
                self._discard(line)
                if method.writes:
                    raise self._connection.translate(error, writes=True, patience=patience) from None
                raise NothingDone from error
            except BaseException:
                # The task was cancelled, and the answer will still arrive on the line.
                self._discard(line)
                raise
            self._resting.append(line)
        return method.decode_reply(answer)

    def close(self) -> None:
        """Close all lines."""
        for line in self._open:
            line.transport.abort()

    async def _take(self) -> AsyncLine:
        while self._resting:
            line = self._resting.pop()
            if not line.is_lost:
                return line
            self._open.discard(line)
        hello = self._connection.offered()
        if hello is None:
            raise NothingDone
        try:
            line = await self._greet(hello)
        except (*LINE_ERRORS, FloodmarkError) as error:
            self._connection.refuse_lines(hello, error)
            raise NothingDone from error
        self._open.add(line)
        return line

    async def _greet(self, hello: Hello) -> AsyncLine:
        connection = self._connection
        host, tls = connection.host, connection.tls_context()
        async with asyncio.timeout(OPEN_SECONDS):
            _, line = await asyncio.get_running_loop().create_connection(
                AsyncLine, host, hello.resp_port, ssl=tls, server_hostname=host if tls else None
            )
        try:
            request, count = encode_greeting(connection.token)
            replies = [await line.exchange(request, OPEN_SECONDS)]
            replies += [await line.read(OPEN_SECONDS) for _ in range(count - 1)]
            require_greeting(replies, hello)
        except BaseException:
            line.transport.abort()
            raise
        return line

    def _discard(self, line: AsyncLine) -> None:
        self._open.discard(line)
        line.transport.abort()
