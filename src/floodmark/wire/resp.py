r"""RESP, the protocol of Redis, without I/O: bytes that arrived become requests, and values become bytes.

    request   *2\r\n $3\r\nGET\r\n $3\r\nada\r\n          an array of bulk strings
    reply     +OK  -ERR …  :7  $3\r\nada  *2 …             and in RESP3 also _  %  ,  #  =  >

hiredis allocates as many elements as a message announces.  So it parses only replies, which come from a
server that the client trusts, and requests that arrive whole and announce few elements.  The parser of this
module takes all other requests: it allocates nothing before it has arrived, and refuses lengths beyond its
limits.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

import hiredis

RESP2: Final = 2
RESP3: Final = 3
# The digits of a length, with its sign and type.
HEADER_BYTES_MAX: Final = 32
# hiredis parses chunks up to this size, in which no header has so many digits.
SHORT_BYTES_MAX: Final = 64 * 1024
_LONG_COUNT: Final = re.compile(rb"[*~>%|]\d{5}")
_COUNT_MAX: Final = 9_999
_EMPTY: Final = b"*0\r\n"
_GET_KEY_BYTES_MAX: Final = 1_024


def _get_headers() -> dict[int, tuple[bytes, bytes]]:
    lengths = range(1, _GET_KEY_BYTES_MAX + 1)
    headers = {length: b"*2\r\n$3\r\nGET\r\n$%d\r\n" % length for length in lengths}
    return {len(head) + length + 2: (head, head.lower()) for length, head in headers.items()}


# By the size of a GET request, the bytes before its key.
_GET_HEADERS: Final = _get_headers()

Request: TypeAlias = list[bytes]


class Simple(str):
    """A short status, such as OK."""

    __slots__ = ()


class Encoded(bytes):
    """A reply that is encoded already."""

    __slots__ = ()


class ErrorReply(str):
    """An error reply: a code in capitals, then a text."""

    __slots__ = ()


FM_CALL: Final = b"FM.CALL"
OK: Final = Simple("OK")
QUEUED: Final = Simple("QUEUED")
PONG: Final = Simple("PONG")


class ProtocolError(Exception):
    """Raised for bytes that are no request, or no reply.  The connection is unusable afterwards."""


class RequestParser:
    r"""Cuts received bytes into requests.

    >>> parser = RequestParser()
    >>> parser.feed(b"*2\r\n$3\r\nGET\r\n$3\r\na")
    []
    >>> parser.feed(b"da\r\n*1\r\n$4\r\nPING\r\n")
    [[b'GET', b'ada'], [b'PING']]
    """

    def __init__(
        self, *, arguments_max: int = 1_024, bulk_bytes_max: int = 1 << 20, request_bytes_max: int = 1 << 20
    ) -> None:
        # The reason why no more requests can be read from the connection, if there is one.
        self.error: str | None = None
        self.set_limits(arguments_max, bulk_bytes_max, request_bytes_max)
        self._reader = hiredis.Reader()
        self._chunks: list[bytes] = []
        self._arrived = 0
        # Nothing more can be parsed before this many bytes have arrived.
        self._wanted = 0
        self._arguments: Request = []
        self._missing = 0
        self._size = 0

    def set_limits(self, arguments_max: int, bulk_bytes_max: int, request_bytes_max: int) -> None:
        """Limit the requests that are parsed from now on."""
        self._arguments_max = arguments_max
        self._bulk_bytes_max = bulk_bytes_max
        self._request_bytes_max = request_bytes_max
        # Whether each request of a short chunk is within the limits.
        bytes_max = min(bulk_bytes_max, request_bytes_max)
        self._is_wide = arguments_max >= _COUNT_MAX and bytes_max >= SHORT_BYTES_MAX

    @property
    def is_between(self) -> bool:
        """Whether the next byte to arrive begins a request."""
        return not (self._chunks or self._missing or self.error)

    def feed(self, data: bytes) -> list[Request]:
        """The requests that these bytes complete.  If `error` is set afterwards, there will be no more."""
        if self._is_wide and len(data) <= SHORT_BYTES_MAX and self.is_between:
            whole = self._read_whole(data)
            if whole is not None:
                return whole
        requests: list[Request] = []
        if self.error is None:
            try:
                self._feed(data, requests)
            except ProtocolError as error:
                self.error = str(error)
                self._chunks = []
        return requests

    def _read_whole(self, data: bytes) -> list[Request] | None:
        """The requests of a chunk of whole requests, by hiredis; None if the other parser must take it."""
        if _LONG_COUNT.search(data):
            return None
        reader = self._reader
        requests: list[Request] = []
        try:
            # An empty request is returned after whole ones, but becomes a part of one that is incomplete.
            reader.feed(data + _EMPTY)
            while type(request := reader.gets()) is list and request:
                # Raises TypeError unless all arguments are bytes; a simple string passes for one.
                b"".join(request)
                requests.append(request)
            if request == [] and not reader.has_data():
                return requests
        except (TypeError, hiredis.HiredisError):
            pass
        self._reader = hiredis.Reader()
        return None

    def _feed(self, data: bytes, requests: list[Request]) -> None:
        if self._chunks:
            self._chunks.append(data)
            self._arrived += len(data)
            if self._arrived < self._wanted:
                return
            data = b"".join(self._chunks)
            self._chunks = []
        position = 0
        while True:
            position = self._parse_request(data, position)
            if self._missing or not self._arguments:
                break
            requests.append(self._arguments)
            self._arguments = []
        if position < len(data):
            rest = data[position:]
            self._chunks, self._arrived = [rest], len(rest)
            self._wanted -= position

    def _parse_request(self, data: bytes, position: int) -> int:
        """Parse as much of one request as has arrived; returns the position at which the rest begins."""
        missing, arguments = self._missing, self._arguments
        while not missing:
            end = self._find_end(data, position)
            if end < 0:
                return position
            if data[position] != 42:
                raise ProtocolError("Protocol error: expected '*', as in an array of bulk strings")
            missing = _number(data[position + 1 : end], "multibulk")
            if missing > self._arguments_max:
                raise ProtocolError("Protocol error: invalid multibulk length")
            # An empty request gets no answer.
            missing = max(missing, 0)
            position = end + 2
            self._size = 0
        length_max = self._bulk_bytes_max
        while missing:
            end = self._find_end(data, position)
            if end < 0:
                break
            if data[position] != 36:
                raise ProtocolError(f"Protocol error: expected '$', got {chr(data[position])!r:.8}")
            length = _number(data[position + 1 : end], "bulk")
            if not 0 <= length <= length_max:
                raise ProtocolError("Protocol error: invalid bulk length")
            start = end + 2
            stop = start + length
            if len(data) < stop + 2:
                if self._size + length > self._request_bytes_max:
                    raise ProtocolError("Protocol error: too big mbulk count or request")
                self._wanted = stop + 2
                break
            arguments.append(data[start:stop])
            self._size += length
            position = stop + 2
            missing -= 1
        if self._size > self._request_bytes_max:
            raise ProtocolError("Protocol error: the request is too large")
        self._missing = missing
        return position

    def _find_end(self, data: bytes, position: int) -> int:
        end = data.find(b"\r\n", position, position + HEADER_BYTES_MAX)
        if end < 0:
            if len(data) - position >= HEADER_BYTES_MAX:
                raise ProtocolError("Protocol error: too big count string")
            self._wanted = len(data) + 1
        return end


def match_get(data: bytes) -> bytes | None:
    r"""The key, if the data is exactly one GET, as it is for most reads of a server's sockets; else None.

    >>> match_get(b"*2\r\n$3\r\nGET\r\n$3\r\nada\r\n"), match_get(b"*1\r\n$4\r\nPING\r\n")
    (b'ada', None)
    """
    headers = _GET_HEADERS.get(len(data))
    if headers is None or not data.startswith(headers):
        return None
    return data[len(headers[0]) : -2]


def _number(digits: bytes, what: str) -> int:
    try:
        return int(digits)
    except ValueError:
        raise ProtocolError(f"Protocol error: invalid {what} length") from None


def encode_request(arguments: Sequence[bytes]) -> bytes:
    r"""A request as a client sends it.

    >>> encode_request([b"GET", b"ada"])
    b'*2\r\n$3\r\nGET\r\n$3\r\nada\r\n'
    """
    parts = [b"*%d\r\n" % len(arguments)]
    parts += [b"$%d\r\n%b\r\n" % (len(argument), argument) for argument in arguments]
    return b"".join(parts)


def call_head(name: str) -> bytes:
    """The beginning of a call of a method with FM.CALL, up to its body."""
    return b"*3" + encode_request([FM_CALL, name.encode()])[2:]


def encode_call(head: bytes, body: bytes) -> bytes:
    r"""A call of a method with FM.CALL.

    >>> encode_call(call_head("get"), b"...")
    b'*3\r\n$7\r\nFM.CALL\r\n$3\r\nget\r\n$3\r\n...\r\n'
    """
    return b"%b$%d\r\n%b\r\n" % (head, len(body), body)


def encode_reply(value: object, protocol: int = RESP2) -> bytes:
    r"""A reply as a server sends it.

    >>> encode_reply([b"a", None, 7, OK]), encode_reply({b"a": 1.5}, RESP3)
    (b'*4\r\n$1\r\na\r\n$-1\r\n:7\r\n+OK\r\n', b'%1\r\n$1\r\na\r\n,1.5\r\n')
    """
    if type(value) is bytes:
        return b"$%d\r\n%b\r\n" % (len(value), value)
    parts: list[bytes] = []
    _encode(value, protocol, parts)
    return b"".join(parts)


def _encode(value: object, protocol: int, parts: list[bytes]) -> None:
    match value:
        case Encoded():
            parts.append(value)
        case bytes():
            parts.append(b"$%d\r\n%b\r\n" % (len(value), value))
        case None:
            parts.append(b"_\r\n" if protocol == RESP3 else b"$-1\r\n")
        case bool():
            parts.append((b"#t\r\n" if value else b"#f\r\n") if protocol == RESP3 else b":%d\r\n" % value)
        case int():
            parts.append(b":%d\r\n" % value)
        case Simple():
            parts.append(b"+%b\r\n" % _line(value))
        case ErrorReply():
            parts.append(b"-%b\r\n" % _line(value))
        case str():
            _encode(value.encode("utf-8", "surrogateescape"), protocol, parts)
        case float():
            text = repr(value).encode()
            parts.append(b",%b\r\n" % text if protocol == RESP3 else b"$%d\r\n%b\r\n" % (len(text), text))
        case Mapping():
            parts.append(b"%%%d\r\n" % len(value) if protocol == RESP3 else b"*%d\r\n" % (2 * len(value)))
            for key, item in value.items():
                _encode(key, protocol, parts)
                _encode(item, protocol, parts)
        case list() | tuple():
            parts.append(b"*%d\r\n" % len(value))
            for item in value:
                _encode(item, protocol, parts)
        case _:
            raise TypeError(f"{type(value).__name__} has no form in RESP")


def _line(text: str) -> bytes:
    return text.encode("utf-8", "backslashreplace").replace(b"\r", b" ").replace(b"\n", b" ")


class ReplyReader:
    r"""Cuts bytes from a server into replies; an error reply is an `ErrorReply`.

    >>> reader = ReplyReader()
    >>> reader.feed(b"+OK\r\n-ERR no\r\n:7")
    >>> reader.next(), reader.next(), reader.next() is INCOMPLETE
    (b'OK', 'ERR no', True)
    """

    def __init__(self) -> None:
        # hiredis asks for an exception class; any callable will do.
        reply_error: Any = ErrorReply
        reader = hiredis.Reader(protocolError=ProtocolError, replyError=reply_error, notEnoughData=INCOMPLETE)
        self.feed: Any = reader.feed
        # The next reply, or INCOMPLETE.
        self.next: Any = reader.gets


INCOMPLETE: Final = object()
