"""The messages in what a client sends, looked at before gRPC takes them in.

Flight lets gRPC receive messages of any size, and lets it undo their compression, before it is known who
sends them.  So what comes in is read along here.  A connection of HTTP/2 begins with a fixed text; then come
frames, of which only those with data matter:

    frame      length: 3 bytes | type: 1 | flags: 1 | stream: 4 | payload
    message    compressed: 1 byte | length: 4 bytes | message         in the data of one stream, across frames

Nothing is kept but how much is missing of each message.  What is not as our own clients write it (padding,
compressed messages, compressed columns) is refused.
"""

from typing import Final

from floodmark.server.bodies import Fields, Refused

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
STREAMS_OPEN_MAX: Final = 10_000

_FRAME_HEADER_BYTES: Final = 9
_MESSAGE_HEADER_BYTES: Final = 5
_DATA, _HEADERS, _RESET = 0x0, 0x1, 0x3
_END_STREAM, _PADDED = 0x1, 0x8


class Messages:
    """Follows the bytes of one connection from a client."""

    __slots__ = (
        "_frame_left",
        "_header",
        "_is_ending",
        "_message_bytes_max",
        "_preface_left",
        "_stream",
        "_streams",
    )

    def __init__(self, message_bytes_max: int) -> None:
        self._message_bytes_max = message_bytes_max
        self._preface_left = PREFACE
        # The beginning of a frame whose header is not complete yet.
        self._header = b""
        # Of the frame at hand: what is missing, and the stream whose data it holds, if it does.
        self._frame_left = 0
        self._stream = 0
        self._is_ending = False
        # The message of each stream, or the beginning of the header of its next one.
        self._streams: dict[int, Fields | bytes] = {}

    def feed(self, data: bytes) -> None:
        """Take note of bytes that came; `Refused` before they may be passed on."""
        position = self._check_preface(data) if self._preface_left else 0
        end = len(data)
        while position < end:
            if not self._frame_left:
                taken = min(_FRAME_HEADER_BYTES - len(self._header), end - position)
                self._header += data[position : position + taken]
                position += taken
                if len(self._header) == _FRAME_HEADER_BYTES:
                    self._begin_frame(self._header)
                    self._header = b""
                continue
            taken = min(self._frame_left, end - position)
            if self._stream:
                self._read_data(data, position, position + taken)
            position += taken
            self._frame_left -= taken
            if not self._frame_left and self._is_ending:
                self._streams.pop(self._stream, None)

    def _check_preface(self, data: bytes) -> int:
        part = data[: len(self._preface_left)]
        if not self._preface_left.startswith(part):
            raise Refused("it does not speak HTTP/2")
        self._preface_left = self._preface_left[len(part) :]
        return len(part)

    def _begin_frame(self, header: bytes) -> None:
        kind, flags = header[3], header[4]
        stream = int.from_bytes(header[5:], "big") & 0x7FFF_FFFF
        self._frame_left = int.from_bytes(header[:3], "big")
        self._stream = stream if kind == _DATA else 0
        self._is_ending = kind == _DATA and bool(flags & _END_STREAM)
        if kind == _DATA:
            if flags & _PADDED:
                raise Refused("its data is padded, which no client of ours does")
            if stream not in self._streams:
                if len(self._streams) >= STREAMS_OPEN_MAX:
                    raise Refused(f"it has more than {STREAMS_OPEN_MAX:,} streams with data")
                self._streams[stream] = b""
            if not self._frame_left and self._is_ending:
                del self._streams[stream]
        elif kind == _RESET or (kind == _HEADERS and flags & _END_STREAM):
            self._streams.pop(stream, None)

    def _read_data(self, data: bytes, position: int, end: int) -> None:
        state = self._streams[self._stream]
        while position < end:
            if isinstance(state, Fields):
                position = state.feed(data, position, end)
                if not state.left:
                    state = b""
                continue
            taken = min(_MESSAGE_HEADER_BYTES - len(state), end - position)
            state += data[position : position + taken]
            position += taken
            if len(state) == _MESSAGE_HEADER_BYTES:
                message = self._begin_message(state)
                state = message if message.left else b""
        self._streams[self._stream] = state

    def _begin_message(self, header: bytes) -> Fields:
        length = int.from_bytes(header[1:], "big")
        if header[0]:
            raise Refused("it sends a compressed message; messages must not be compressed")
        if length > self._message_bytes_max:
            raise Refused(
                f"it sends a message of {length:,} bytes; at most {self._message_bytes_max:,} are allowed"
            )
        return Fields(length)
