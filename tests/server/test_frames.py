"""What a client sends is read along: the sizes of messages, however they are cut, and what is refused."""

from contextlib import suppress

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st

from floodmark.server.frames import PREFACE, STREAMS_OPEN_MAX, Messages, Refused

LIMIT = 1_000


def frame(kind: int, stream: int, payload: bytes, flags: int = 0) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def varint(number: int, size: int = 1) -> bytes:
    """A number in at least so many bytes."""
    groups = [number >> shift & 0x7F for shift in range(0, max(7 * size, number.bit_length()), 7)]
    return bytes([*(group | 0x80 for group in groups[:-1]), groups[-1]])


def field(number: int, content: bytes, *, length_bytes: int = 1) -> bytes:
    return varint(number << 3 | 2) + varint(len(content), length_bytes) + content


def columns(compression: str | None) -> tuple[bytes, bytes]:
    """The header and the columns of a batch."""
    batch = pyarrow.record_batch({"key": [b"a" * 100], "value": [b"b" * 100]})
    written = batch.serialize()
    if compression is not None:
        sink = pyarrow.BufferOutputStream()
        options = pyarrow.ipc.IpcWriteOptions(compression=compression)
        with pyarrow.ipc.new_stream(sink, batch.schema, options=options) as stream:
            stream.write_batch(batch)
        found = list(pyarrow.ipc.MessageReader.open_stream(sink.getvalue()))[1]
    else:
        found = pyarrow.ipc.read_message(written)
    return bytes(found.metadata), bytes(found.body)


def send(content: bytes, pieces: int) -> None:
    """Let one message come, in pieces of some size."""
    wire = PREFACE + frame(0, 1, b"\0" + len(content).to_bytes(4, "big") + content)
    messages = Messages(100_000)
    for start in range(0, len(wire), pieces):
        messages.feed(wire[start : start + pieces])
    assert messages._streams == {1: b""}


def message(size: int, *, compressed: bool = False) -> bytes:
    # If there is room for a field, it holds bytes that would be refused if they were taken for a header.
    content = b"\x1a\x80\x00"[:size] if size < 4 else field(3, b"\xff" * (size - 4), length_bytes=3)
    return bytes([compressed]) + size.to_bytes(4, "big") + content


@given(
    sizes=st.lists(st.tuples(st.integers(1, 3), st.integers(0, LIMIT)), max_size=20),
    cuts=st.lists(st.integers(1, 400), min_size=1, max_size=10),
    pieces=st.lists(st.integers(1, 50), min_size=1, max_size=10),
    excess=st.booleans(),
)
def test_messages_are_followed_however_frames_and_reads_are_cut(
    sizes: list[tuple[int, int]], cuts: list[int], pieces: list[int], excess: bool
) -> None:
    """Streams take turns, a message spans frames, a frame holds several messages, a read ends anywhere."""
    data = {
        stream: b"".join(message(size) for which, size in sizes if which == stream) for stream in (1, 2, 3)
    }
    if excess:
        data[2] += message(LIMIT + 1)
    wire = bytearray(PREFACE + frame(4, 0, b"\xff" * 12))
    turn = 0
    while any(data.values()):
        for stream, left in data.items():
            cut = cuts[turn % len(cuts)]
            turn += 1
            if left:
                wire += frame(0, stream, left[:cut]) + frame(1, stream, b"\xff" * 3)
                data[stream] = left[cut:]

    def feed() -> None:
        messages, position, turn = Messages(LIMIT), 0, 0
        while position < len(wire):
            step = pieces[turn % len(pieces)]
            messages.feed(bytes(wire[position : position + step]))
            position, turn = position + step, turn + 1

    if excess:
        with pytest.raises(Refused, match="1,001 bytes; at most 1,000"):
            feed()
    else:
        feed()


@pytest.mark.parametrize(
    ("wire", "reason"),
    [
        (b"GET / HTTP/1.1\r\n", "HTTP/2"),
        (PREFACE + frame(0, 1, message(5, compressed=True)), "compressed"),
        (PREFACE + frame(0, 1, b"\x03" + message(1), flags=0x8), "padded"),
        (PREFACE + frame(0, 1, (0).to_bytes(1, "big") + b"\xff\xff\xff\xff"), "4,294,967,295 bytes"),
    ],
)
def test_what_no_client_of_ours_sends_is_refused(wire: bytes, reason: str) -> None:
    with pytest.raises(Refused, match=reason):
        Messages(LIMIT).feed(wire)


@pytest.mark.parametrize(
    "ending", [frame(3, 1, b"\0\0\0\x08"), frame(0, 1, b"", flags=1), frame(1, 1, b"x", flags=1)]
)
def test_a_stream_that_has_ended_is_forgotten(ending: bytes) -> None:
    messages = Messages(LIMIT)
    messages.feed(PREFACE + frame(0, 1, message(10)[:7]) + ending)
    assert messages._streams == {}


def test_streams_are_limited() -> None:
    messages = Messages(LIMIT)
    messages.feed(PREFACE + b"".join(frame(0, stream, b"\0") for stream in range(1, STREAMS_OPEN_MAX + 1)))
    with pytest.raises(Refused, match="streams"):
        messages.feed(frame(0, STREAMS_OPEN_MAX + 1, b"\0"))


@pytest.mark.parametrize("pieces", [1, 7, 100_000])
def test_columns_pass_if_they_are_not_compressed(pieces: int) -> None:
    header, body = columns(None)
    send(field(1, b"descriptor") + field(2, header) + field(3, b"note") + field(1000, body), pieces)
    # An action may hold whatever it likes, as none has columns.
    send(field(1, b"type") + field(2, columns("zstd")[0]), pieces)
    send(field(1, b"type") + field(2, b"x" * 90_000), pieces)


@pytest.mark.parametrize("pieces", [1, 7, 100_000])
@pytest.mark.parametrize("compression", ["zstd", "lz4"])
def test_compressed_columns_are_refused_before_their_message_is_whole(compression: str, pieces: int) -> None:
    header, body = columns(compression)
    plain = columns(None)[0]
    for content in (
        field(2, header) + field(1000, body),
        field(2, plain) + field(2, header) + field(1000, body),
        field(1000, body),
        field(2, bytes(10)) + field(1000, body),
        field(2, plain + bytes(80_000)) + field(1000, body),
    ):
        with pytest.raises(Refused, match="compressed columns"):
            send(content, pieces)
    with pytest.raises(Refused, match="behind its columns"):
        send(field(2, plain) + field(1000, body) + field(2, header), pieces)


@pytest.mark.parametrize("content", [bytes(20), b"\x08\x01" * 100, b"\x1a\x7f", b"\xff" * 20, b"\x0b\x01"])
def test_fields_that_flight_does_not_write_are_refused(content: bytes) -> None:
    with pytest.raises(Refused, match="sends a message"):
        send(content, 100_000)


def test_header_of_columns_need_not_be_sound() -> None:
    header, body = columns(None)
    for place in range(len(header)):
        with suppress(Refused):
            send(field(2, header[:place] + b"\xff" + header[place + 1 :]) + field(1000, body), 100_000)
