"""What a client sends is read along: the sizes of messages, however they are cut, and what is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from floodmark.server.frames import PREFACE, STREAMS_OPEN_MAX, Messages, Refused

LIMIT = 1_000


def frame(kind: int, stream: int, payload: bytes, flags: int = 0) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def message(size: int, *, compressed: bool = False) -> bytes:
    # Bytes that would be refused if they were taken for a header.
    return bytes([compressed]) + size.to_bytes(4, "big") + b"\xff" * size


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
