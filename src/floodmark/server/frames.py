"""Checks the messages that a client sends, before gRPC receives them.

Flight lets gRPC receive messages of any size and decompress them before the sender is authenticated.  So the
relay parses what it passes on.  A connection of HTTP/2 begins with a fixed text; frames follow, of which only
those with data matter:

    frame      length: 3 bytes | type: 1 | flags: 1 | stream: 4 | payload
    message    compressed: 1 byte | length: 4 bytes | message         in the data of one stream, across frames
    field      number and kind: varint | length: varint | content     in a message, as Protocol Buffers
    2          the header of columns: a `Message` of Arrow's IPC, as a flatbuffer
    1000       the columns, last in a message: a header after them would take effect without a check

Arrow decompresses columns when it receives a message, and kilobytes of zstd can become gigabytes.  So
compressed columns are refused while their message is still arriving, and so are padding and compressed
messages, which Floodmark's own clients never send.  Of a message, only the header of its columns and the
number of missing bytes are kept.
"""

from struct import Struct
from struct import error as StructError
from typing import Final

from floodmark.model.limits import COLUMN_HEADER_BYTES_MAX, MESSAGE_FIELDS_MAX

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
STREAMS_OPEN_MAX: Final = 10_000

_FRAME_HEADER_BYTES: Final = 9
_MESSAGE_HEADER_BYTES: Final = 5
_DATA, _HEADERS, _RESET = 0x0, 0x1, 0x3
_END_STREAM, _PADDED = 0x1, 0x8

_HEADER, _COLUMNS = 2, 1000
_VARINT, _FIXED_64, _BYTES, _FIXED_32 = 0, 1, 2, 5
_VARINT_BYTES_MAX: Final = 10

# Arrow's flatbuffers: the numbers of entries in tables, and the types of a message's header.
_MESSAGE_TYPE, _MESSAGE_HEADER = 1, 2
_DICTIONARY_DATA, _BATCH_COMPRESSION = 1, 3
_DICTIONARY, _BATCH = 2, 3
_U16: Final = Struct("<H")
_U32: Final = Struct("<I")
_I32: Final = Struct("<i")


class Refused(Exception):
    """The client sent something that is not allowed; its connection must be cut."""


class Fields:
    """Parses the fields of one message as its bytes arrive; `left` bytes are missing."""

    __slots__ = ("_content_left", "_count", "_head", "_header", "_is_header", "left")

    def __init__(self, length: int) -> None:
        self.left = length
        # The bytes of a field before its content, and the number of missing bytes of the content.
        self._head = b""
        self._content_left = self._count = 0
        self._is_header = False
        self._header = b""

    def feed(self, data: bytes, position: int, end: int) -> int:
        """Parse bytes that arrived; returns the position after them, or after the end of the message."""
        end = min(end, position + self.left)
        self.left -= end - position
        while position < end:
            if self._content_left:
                taken = min(self._content_left, end - position)
                if self._is_header:
                    self._header += data[position : position + taken]
                self._content_left -= taken
                position += taken
                continue
            self._head += data[position : position + 1]
            position += 1
            self._begin_content(self.left + end - position)
        return end

    def _begin_content(self, behind: int) -> None:
        """Parse the beginning of a field, if it is complete; `behind` bytes of the message follow it."""
        tag = _read_varint(self._head, 0)
        if tag is None:
            return
        (number, kind), start = divmod(tag[0], 8), tag[1]
        if kind in (_FIXED_64, _FIXED_32):
            self._pass_over(8 if kind == _FIXED_64 else 4, behind)
            return
        value = _read_varint(self._head, start)
        if value is None:
            return
        if not number or kind not in (_VARINT, _BYTES):
            raise Refused("it sends a message that is not one of Flight's")
        self._pass_over(value[0] if kind == _BYTES else 0, behind)
        if kind == _BYTES and number == _HEADER:
            self._is_header = self._content_left <= COLUMN_HEADER_BYTES_MAX
            self._header = b""
        elif kind == _BYTES and number == _COLUMNS:
            if self._content_left != behind:
                raise Refused("it sends a message with something behind its columns")
            if behind and may_be_compressed(self._header):
                raise Refused("it sends compressed columns; send them as they are")

    def _pass_over(self, size: int, behind: int) -> None:
        if size > behind:
            raise Refused("it sends a message that is shorter than its fields")
        self._count += 1
        if self._count > MESSAGE_FIELDS_MAX:
            raise Refused(f"it sends a message with more than {MESSAGE_FIELDS_MAX} fields")
        self._head, self._content_left, self._is_header = b"", size, False


def _read_varint(data: bytes, position: int) -> tuple[int, int] | None:
    """A number in groups of 7 bits, and where it ends; None if more bytes of it are to come."""
    value = 0
    for index, byte in enumerate(data[position:]):
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value, position + index + 1
        if index == _VARINT_BYTES_MAX:
            raise Refused("it sends a message that is not one of Flight's")
    return None


def may_be_compressed(header: bytes) -> bool:
    """Whether the columns after a header are compressed; True also for a header that cannot be read.

    >>> import pyarrow
    >>> message = pyarrow.ipc.read_message(pyarrow.record_batch({"n": [1, 2]}).serialize())
    >>> may_be_compressed(bytes(message.metadata))
    False
    """
    try:
        message = _U32.unpack_from(header, 0)[0]
        kind_at, place = _entry(header, message, _MESSAGE_TYPE), _entry(header, message, _MESSAGE_HEADER)
        kind = header[kind_at] if kind_at else 0
        if kind not in (_DICTIONARY, _BATCH):
            return True
        batch = _follow(header, place)
        if kind == _DICTIONARY:
            batch = _follow(header, _entry(header, batch, _DICTIONARY_DATA))
        return _entry(header, batch, _BATCH_COMPRESSION) != 0
    except (StructError, IndexError):
        return True


def _entry(data: bytes, table: int, index: int) -> int:
    """The position of an entry of a flatbuffer's table; 0 if the table lacks it."""
    slots = table - _I32.unpack_from(data, table)[0]
    place = 4 + 2 * index
    if slots < 0 or place >= _U16.unpack_from(data, slots)[0]:
        return 0
    offset: int = _U16.unpack_from(data, slots + place)[0]
    return table + offset if offset else 0


def _follow(data: bytes, place: int) -> int:
    """The table that an entry points to."""
    if not place:
        raise IndexError
    target: int = place + _U32.unpack_from(data, place)[0]
    return target


class Messages:
    """Parses the bytes of one connection from a client as they arrive."""

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
        # Of the present frame: the number of missing bytes, and the stream of its data, 0 if it has none.
        self._frame_left = 0
        self._stream = 0
        self._is_ending = False
        # The message of each stream, or the beginning of the header of its next one.
        self._streams: dict[int, Fields | bytes] = {}

    def feed(self, data: bytes) -> None:
        """Parse bytes that arrived, before they are passed on; raises `Refused` if they must not be."""
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
