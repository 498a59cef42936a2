"""A connection to a server: calls with deadlines, and streams.

Point calls go over RESP (`wire/lines.py`) if the server offers it, all others over Arrow Flight.  There,
calls and streams have separate connections (`grpc.use_local_subchannel_pool`): the server closes the
connection of a stream that is not read, and that must not interrupt a write.  Repeatable calls are retried
when the server cannot be reached; others never are, since the first attempt may have happened.  If the site
has several nodes, the caller leaves one that cannot be reached, and calls another (`wire/cluster.py`).
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from ssl import SSLContext
from threading import Event, Lock
from typing import Any, Final
from weakref import WeakSet

import pyarrow
from pyarrow import flight

from floodmark.clock.backoff import Backoff
from floodmark.model.errors import (
    Closed,
    FloodmarkError,
    InvalidArgument,
    NotAuthenticated,
    Unreachable,
    WireMismatch,
)
from floodmark.model.limits import NEWCOMER_BYTES_MAX
from floodmark.wire.address import parse_address
from floodmark.wire.credentials import Certificates, PathLike, Token
from floodmark.wire.errors import TRANSPORT_ERRORS, translate
from floodmark.wire.lines import LINE_ERRORS, Line, Lines
from floodmark.wire.messages import (
    HELLO,
    TOKEN_HEADER,
    TOKEN_SCHEME,
    WIRE_HEADER,
    WIRE_VERSION,
    Hello,
    Method,
    Reply,
    common_version,
)
from floodmark.wire.resp import encode_call

TIMEOUT_SECONDS: Final = 30.0
# For calls that may take minutes, such as garbage collection.
LENGTHY_SECONDS: Final = 600.0
# Pauses before a read is tried again, a second in all: a server that takes longer to restart takes longer
# than the caller of a single read wants to wait.
READ_PAUSES: Final = tuple(Backoff(50, budget_ms=1_000).pauses())
# How long a quick call waits for one node before it asks another.
ATTEMPT_SECONDS: Final = 5.0

# While a call is open, a server that vanished without closing is noticed after these two together.
KEEPALIVE_SECONDS: Final = 10.0
KEEPALIVE_TIMEOUT_SECONDS: Final = 10.0
RECONNECT_MS_MIN: Final = 50
RECONNECT_MS_MAX: Final = 1_000

_HELLO_BODY: Final = HELLO.encode_request(HELLO.request())


class Connection:
    """Speaks with one server.  Safe to use from many threads."""

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        token_file: PathLike | None = None,
        tls_root: PathLike | None = None,
        tls_certificate: PathLike | None = None,
        tls_key: PathLike | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        address = parse_address(url)
        self.url = address.url
        self.host = address.host
        self._token = Token(token, token_file)
        self._certificates = Certificates.load(tls_root, tls_certificate, tls_key)
        if not address.tls and self._certificates != Certificates():
            raise InvalidArgument(f"certificates need an encrypted connection: grpc+tls://, not {self.url}")
        if not timeout_seconds > 0:
            raise InvalidArgument(f"a timeout must be positive, not {timeout_seconds!r}")
        self.timeout_seconds = timeout_seconds
        # Whether no other node can answer in place of this server.
        self.is_alone = True
        self._wire_version = WIRE_VERSION
        self._closing = Event()
        self._lock = Lock()
        self._calls = self._client()
        self._streams = self._client()
        # Streams that are being read; their readers remove them.
        self._readers: WeakSet[RowStream] = WeakSet()
        self._tls = address.tls
        self._lines = Lines(address.host, self.hello, self._certificates.context if address.tls else None)

    def __repr__(self) -> str:
        return f"Connection({self.url!r})"

    # Calls

    def hello(self) -> Hello:
        """Ask the server for its identity, and agree on a version of the wire."""
        try:
            hello = self.call(HELLO)
        except WireMismatch as refusal:
            common = common_version(refusal)
            if common is None:
                raise
            self._wire_version = common
            hello = self.call(HELLO)
        self._lines.learn(hello)
        return hello

    def call(self, method: Method[Reply], *args: object, **kwargs: object) -> Reply:
        """Call a method of the server, and wait for the answer."""
        return self.invoke(method, method.request(*args, **kwargs))

    def invoke(self, method: Method[Reply], request: object) -> Reply:
        """Send a request, and wait for the answer."""
        action = method.action
        patience = max(self.timeout_seconds, LENGTHY_SECONDS if action.lengthy else 0)
        if not self.is_alone and action.repeatable and not action.lengthy:
            is_quick = action.anywhere and not action.large
            patience = min(patience, ATTEMPT_SECONDS) if is_quick else patience / 2
        body = method.encode_request(request)
        pauses = iter(READ_PAUSES if self.is_alone and not method.writes else ())
        while True:
            shown = self._token.text
            try:
                return method.decode_reply(self._ask(method, body, patience))
            except Unreachable as error:
                self.pause(next(pauses, None), error)
            except NotAuthenticated:
                if not self._has_other_token(shown):
                    raise

    def _ask(self, method: Method[Any], body: bytes, patience: float) -> bytes:
        self.require_open()
        if method.frequent:
            line = self._take_line(patience)
            if line is not None:
                return self._ask_over(line, method, body, patience)
        if len(body) > NEWCOMER_BYTES_MAX // 2:
            # A server limits the bytes of a connection on which no caller has authenticated.
            self._call(flight.Action(HELLO.name, _HELLO_BODY), patience, writes=False)
        return self._call(flight.Action(method.name, body), patience, writes=method.writes)

    def _take_line(self, patience: float) -> Line | None:
        if not self.is_alone:
            patience = min(patience, ATTEMPT_SECONDS)
        try:
            return self._lines.take(self._token.text, patience)
        except TimeoutError as error:
            raise self.translate(error, writes=False, patience=patience) from None

    def _ask_over(self, line: Line, method: Method[Any], body: bytes, patience: float) -> bytes:
        lines = self._lines
        try:
            answer = line.ask(encode_call(method.head, body), patience)
        except (NotAuthenticated, Unreachable):
            # The token is not valid any more, or the server stops.
            lines.discard(line)
            lines.close_resting()
            raise
        except FloodmarkError:
            lines.give_back(line)
            raise
        except LINE_ERRORS as error:
            lines.discard(line)
            lines.close_resting()
            self.require_open()
            raise self.translate(error, writes=method.writes, patience=patience) from None
        except BaseException:
            lines.discard(line)
            raise
        lines.give_back(line)
        return answer

    def _call(self, action: Any, patience: float, *, writes: bool) -> bytes:
        with self.translated(writes=writes, patience=patience), self._lines.judged():
            for result in self._calls.do_action(action, self._options(self._token.text, patience)):
                return result.body.to_pybytes()  # type: ignore[no-any-return]
        raise WireMismatch(f"{self.url} gave no answer to {action.type!r}")

    # For lines on an event loop

    @property
    def token(self) -> str | None:
        """The token that is sent to the server."""
        return self._token.text

    def tls_context(self) -> SSLContext | None:
        """The TLS settings of a line; None without encryption."""
        return self._certificates.context() if self._tls else None

    def offered(self) -> Hello | None:
        """The server's `Hello` with its port for lines; None if it is unknown, or lines are refused now."""
        return self._lines.offered()

    def refuse_lines(self, hello: Hello, error: Exception) -> None:
        """Open no lines for a while."""
        self._lines.shut(hello, error)

    # Streams

    def open_reader(self, ticket: bytes) -> "RowStream":
        """Begin a stream of rows from the server."""
        while True:
            shown = self._token.text
            self.require_open()
            try:
                with self.translated(writes=False):
                    reader = self._streams.do_get(flight.Ticket(ticket), self._options(shown, None))
                    stream = RowStream(self, reader)
                    self._readers.add(stream)
                    return stream
            except NotAuthenticated:
                if not self._has_other_token(shown):
                    raise

    def open_writer(self, command: bytes, schema: pyarrow.Schema) -> tuple[Any, Any]:
        """Begin a stream of rows over a connection of its own; returns its writer and its reader."""
        self.require_open()
        descriptor = flight.FlightDescriptor.for_command(command)
        with self.translated(writes=False):
            writer, reader = self._client().do_put(descriptor, schema, self._options(self._token.text, None))
            return writer, reader

    # Failure

    @contextmanager
    def translated(self, *, writes: bool, patience: float | None = None) -> Iterator[None]:
        """Translate errors of the transport in the block to Floodmark's."""
        try:
            yield
        except TRANSPORT_ERRORS as error:
            raise self.translate(error, writes=writes, patience=patience) from None

    def translate(
        self, error: BaseException, *, writes: bool, patience: float | None = None
    ) -> FloodmarkError:
        """The error of a failed call for its caller."""
        return translate(error, writes=writes, server=self.url, patience=patience)

    def pause(self, seconds: float | None, error: FloodmarkError) -> None:
        """Wait before another attempt; raise the error if `seconds` is None, or the call has timed out."""
        if seconds is None or error.details.get("timed_out"):
            raise error
        if self._closing.wait(seconds):
            raise self._closed()

    def require_open(self) -> None:
        """Raise Closed after `close`."""
        if self._closing.is_set():
            raise self._closed()

    def close(self) -> None:
        """Close the connection.  Closing twice is harmless."""
        self._closing.set()
        self._lines.close()
        for reader in list(self._readers):
            reader.close()
        for client in (self._calls, self._streams):
            with suppress(*TRANSPORT_ERRORS):
                client.close()

    def _closed(self) -> Closed:
        return Closed(f"the connection to {self.url} was closed; connect again")

    def _has_other_token(self, refused: str | None) -> bool:
        with self._lock:
            return self._token.reload() != refused

    def _client(self) -> Any:
        with self.translated(writes=False):
            return flight.FlightClient(
                self.url,
                tls_root_certs=self._certificates.root,
                cert_chain=self._certificates.certificate,
                private_key=self._certificates.key,
                generic_options=[
                    ("grpc.use_local_subchannel_pool", 1),
                    ("grpc.keepalive_time_ms", int(KEEPALIVE_SECONDS * 1000)),
                    ("grpc.keepalive_timeout_ms", int(KEEPALIVE_TIMEOUT_SECONDS * 1000)),
                    ("grpc.initial_reconnect_backoff_ms", RECONNECT_MS_MIN),
                    ("grpc.max_reconnect_backoff_ms", RECONNECT_MS_MAX),
                ],
            )

    def _options(self, token: str | None, timeout_seconds: float | None) -> Any:
        headers = [(WIRE_HEADER.encode(), str(self._wire_version).encode())]
        if token is not None:
            headers.append((TOKEN_HEADER.encode(), (TOKEN_SCHEME + token).encode()))
        return flight.FlightCallOptions(timeout=timeout_seconds, headers=headers)


class RowStream:
    """Batches of rows as they arrive.  Close it to end the stream at the server."""

    def __init__(self, connection: Connection, reader: Any) -> None:
        self._connection = connection
        self._reader = reader

    def __iter__(self) -> Iterator[tuple[pyarrow.RecordBatch, bytes]]:
        """Batches with their metadata.  Raises errors of the transport as Floodmark's."""
        while True:
            try:
                chunk = self._reader.read_chunk()
            except StopIteration:
                return
            except TRANSPORT_ERRORS as error:
                self._connection.require_open()
                raise self._connection.translate(error, writes=False) from None
            self._connection.require_open()
            yield chunk.data, b"" if chunk.app_metadata is None else chunk.app_metadata.to_pybytes()

    def close(self) -> None:
        """End the stream at the server."""
        with suppress(*TRANSPORT_ERRORS):
            self._reader.cancel()
