"""RESP without I/O: requests come out as they went in, however they are cut, and nothing else does."""

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from floodmark.wire.resp import (
    INCOMPLETE,
    OK,
    RESP2,
    RESP3,
    ErrorReply,
    ReplyReader,
    RequestParser,
    encode_reply,
    encode_request,
    match_get,
)

# hiredis parses requests that arrive whole, within wide limits.
WIDE = {"arguments_max": 100_000, "bulk_bytes_max": 1 << 20, "request_bytes_max": 1 << 20}
NARROW = {"arguments_max": 100, "bulk_bytes_max": 1 << 20, "request_bytes_max": 1 << 20}
LIMITS = pytest.mark.parametrize("limits", [WIDE, NARROW], ids=["wide", "narrow"])

arguments = st.binary(max_size=40) | st.sampled_from([b"", b"\r\n", b"$3\r\n", b"*1\r\n", b"x" * 5_000])
requests = st.lists(st.lists(arguments, min_size=1, max_size=5), max_size=6)


@LIMITS
@given(sent=requests, cuts=st.lists(st.integers(0, 12_000), max_size=8))
def test_requests_survive_any_cut(limits: dict[str, int], sent: list[list[bytes]], cuts: list[int]) -> None:
    data = b"".join(map(encode_request, sent))
    places = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    parser = RequestParser(**limits)
    got = [request for start, end in pairwise(places) for request in parser.feed(data[start:end])]
    assert got == sent


@LIMITS
@given(sent=requests)
def test_requests_survive_single_bytes(limits: dict[str, int], sent: list[list[bytes]]) -> None:
    data = b"".join(map(encode_request, sent))
    parser = RequestParser(**limits)
    assert [request for byte in data for request in parser.feed(bytes([byte]))] == sent


@pytest.mark.parametrize(
    "data",
    [
        b"*1000000000\r\n",
        b"*99999999999999999999\r\n",
        b"*1\r\n$1073741824\r\n",
        b"*1\r\n$-1\r\n",
        b"*x\r\n",
        b"*1\r\n:1\r\n",
        b"*1\r\n$x\r\n",
        b"GET ada\r\n",
        b"*" + b"1" * 100,
        b"\x00" * 64,
        b"*3\r\n" + b"$600\r\n" + b"x" * 600 + b"\r\n$600\r\n" + b"x" * 600 + b"\r\n$600\r\n",
    ],
)
def test_frames_beyond_the_limits_are_refused_before_they_arrive(data: bytes) -> None:
    parser = RequestParser(arguments_max=10, bulk_bytes_max=1_000, request_bytes_max=1_500)
    assert parser.feed(encode_request([b"PING"]) + data) == [[b"PING"]]
    assert parser.error is not None
    assert parser.error.startswith("Protocol error")
    assert parser.feed(encode_request([b"PING"])) == []


@pytest.mark.parametrize(
    "data",
    [
        b"*1000000000\r\n",
        b"*1\r\n*1000000000\r\n",
        b"%1000000000\r\n",
        b"~1000000000\r\n",
        b">1000000000\r\n",
        b"*1\r\n$1073741824\r\n",
        b"*1\r\n:1\r\n",
        b"*1\r\n*1\r\n$1\r\na\r\n",
        b"*-1\r\n-ERR no\r\n",
        b"$0\r\n\r\n",
        b"%1\r\n$1\r\na\r\n$1\r\nb\r\n",
        b"#f\r\n",
        b"GET ada\r\n",
    ],
)
def test_frames_that_are_no_requests_are_refused_whole_or_cut(data: bytes) -> None:
    for cut in range(len(data)):
        parser = RequestParser(**WIDE)
        assert parser.feed(encode_request([b"PING"]) + data[:cut]) == [[b"PING"]]
        assert parser.feed(data[cut:]) == []
        assert (parser.error or "").startswith("Protocol error")


def test_empty_request_asks_for_nothing() -> None:
    parser = RequestParser(**WIDE)
    assert parser.feed(b"*0\r\n" + encode_request([b"PING"]) + b"*-1\r\n") == [[b"PING"]]
    assert parser.is_between


def test_large_request_in_many_chunks_is_joined_once() -> None:
    """Half a megabyte in chunks of a hundred bytes: joined anew with each, it would take minutes."""
    request = [b"SET", b"ada", b"x" * (1 << 19)]
    data = encode_request(request)
    parser = RequestParser()
    got = [each for start in range(0, len(data), 100) for each in parser.feed(data[start : start + 100])]
    assert got == [request]


@LIMITS
def test_mutated_frames_never_fail_otherwise(limits: dict[str, int]) -> None:
    rng = random.Random(21)
    frames = [encode_request([b"SET", b"ada", b"x" * size]) for size in (0, 3, 5_000)]
    frames.append(encode_request([b"MGET", *[b"key"] * 20]))
    for _ in range(10 * settings().max_examples):
        data = bytearray(b"".join(rng.choices(frames, k=3)))
        for _ in range(rng.randrange(1, 6)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        parser = RequestParser(**limits)
        for start in range(0, len(data), 1_000):
            for request in parser.feed(bytes(data[start : start + 1_000])):
                assert request
                assert all(type(argument) is bytes for argument in request)


replies = st.recursive(
    st.none() | st.binary(max_size=20) | st.integers(-(1 << 63), (1 << 63) - 1),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.binary(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def flat(value: object) -> object:
    """A reply as RESP2 has it, where a map is a list."""
    if isinstance(value, dict):
        return [flat(each) for pair in value.items() for each in pair]
    return [flat(each) for each in value] if isinstance(value, list) else value


@given(replies)
def test_replies_are_read_as_they_were_written(value: object) -> None:
    for protocol, expected in ((RESP2, flat(value)), (RESP3, value)):
        reader = ReplyReader()
        reader.feed(encode_reply(value, protocol))
        assert reader.next() == expected
        assert reader.next() is INCOMPLETE


def test_errors_and_states_are_one_line() -> None:
    reader = ReplyReader()
    reader.feed(
        encode_reply(ErrorReply("ERR two\r\nlines")) + encode_reply(OK) + encode_reply([True, 1.5], RESP3)
    )
    failure = reader.next()
    assert (type(failure), failure) == (ErrorReply, "ERR two  lines")
    assert reader.next() == b"OK"
    assert reader.next() == [True, 1.5]


@given(arguments, st.binary(max_size=4), st.sampled_from([b"GET", b"get", b"SET", b"Get"]))
def test_one_get_is_known_at_once_and_nothing_else_is(key: bytes, more: bytes, name: bytes) -> None:
    data = encode_request([name, key])
    is_short = 0 < len(key) <= 1_024
    assert match_get(data) == (key if is_short and name in (b"GET", b"get") else None)
    assert not more or match_get(data + more) is None
