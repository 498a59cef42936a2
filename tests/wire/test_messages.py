"""Requests and answers: round trips, peers of other versions, and bytes that are neither."""

from contextlib import suppress
from random import Random
from typing import Any

import msgspec
import pytest

from floodmark.model.change import Stamp
from floodmark.model.errors import InvalidArgument, WireMismatch
from floodmark.model.partition import CommitLimits, PutStream
from floodmark.model.ranges import KeyRange
from floodmark.model.record import FreshValue, Versioned
from floodmark.model.stream import ChangesRequest
from floodmark.wire import messages
from floodmark.wire.messages import Method, common_version, require_version

VERSION = (1 << 64) - 1
KEY = b"\x00\x00\x01ada"

REQUESTS: list[tuple[Method[Any], object]] = [
    (messages.HELLO, messages.HELLO.request()),
    (messages.MAP, messages.MAP.request()),
    (messages.GET, messages.GET.request(7, KEY, VERSION)),
    (messages.GET, messages.GET.request(7, KEY)),
    (messages.GET_FRESH, messages.GET_FRESH.request(7, KEY, VERSION)),
    (messages.FIND, messages.FIND.request(7, b"\xff" * 4096, None)),
    (messages.GET_MANY, messages.GET_MANY.request(7, [KEY, b""], VERSION)),
    (messages.PUT, messages.PUT.request(7, [KEY], [b"value\x00"], True)),
    (messages.APPLY, messages.APPLY.request(7, [KEY], [b"value\x00"], False)),
    (messages.COMPARE_AND_SET, messages.COMPARE_AND_SET.request(7, KEY, None, b"\x02", True)),
    (messages.DELETE_UNCHANGED, messages.DELETE_UNCHANGED.request(7, [KEY], VERSION, True)),
    (messages.RESOLVED, messages.RESOLVED.request(7)),
    (messages.HOLD, messages.HOLD.request(VERSION, 1, None)),
    (messages.RELEASE, messages.RELEASE.request(1 << 61)),
    (messages.TICKET, messages.ScanTicket(7, KeyRange(b"a", b"b"), VERSION, 10, True)),
    (messages.TICKET, messages.ChangesTicket(ChangesRequest(keys=KeyRange(KEY), namespace=1, since=VERSION))),
    (messages.COMMAND, PutStream(True)),
]

REPLIES: list[tuple[Method[Any], object]] = [
    (messages.HELLO, messages.Hello("oslo", 7, 1, 1_700_000_000_000)),
    (
        messages.MAP,
        messages.MapReply(
            [messages.PartitionEntry(1, KeyRange(b"", KEY)), messages.PartitionEntry(2, KeyRange(KEY))],
            CommitLimits(1 << 26, 1_000),
        ),
    ),
    (
        messages.MAP,
        messages.MapReply(
            [messages.PartitionEntry(2, KeyRange(), 1)],
            CommitLimits(1, 1),
            nodes={1: "grpc://oslo-1:7100"},
            keeper=1,
        ),
    ),
    (messages.GET, None),
    (messages.GET, b""),
    (messages.GET_FRESH, FreshValue(VERSION, None)),
    (messages.FIND, Versioned(b"ada", b"x", VERSION, Stamp(VERSION, 7), 2_000_000_000)),
    (messages.GET_MANY, [b"x", None]),
    (messages.PUT, VERSION),
    (messages.RELEASE, None),
]


def names(cases: list[tuple[Method[Any], object]]) -> list[str]:
    return [f"{method.name}-{type(message).__name__}" for method, message in cases]


@pytest.mark.parametrize(("method", "request_"), REQUESTS, ids=names(REQUESTS))
def test_requests_come_as_they_were_sent(method: Method[Any], request_: object) -> None:
    assert method.decode_request(method.encode_request(request_)) == request_


@pytest.mark.parametrize(("method", "reply"), REPLIES, ids=names(REPLIES))
def test_answers_come_as_they_were_sent(method: Method[Any], reply: object) -> None:
    assert method.decode_reply(method.encode_reply(reply)) == reply


def test_a_request_with_fields_that_are_not_known_yet_can_be_read() -> None:
    newer = msgspec.msgpack.encode([7, KEY, None, "a field that comes later"])
    assert messages.GET.decode_request(newer) == messages.GET.request(7, KEY)


def test_a_map_of_an_earlier_release_names_no_nodes() -> None:
    earlier = msgspec.msgpack.encode({"partitions": [[1, [b"", None]]], "limits": [5, 6]})
    assert messages.MAP.decode_reply(earlier) == messages.MapReply(
        [messages.PartitionEntry(1, KeyRange())], CommitLimits(5, 6)
    )


@pytest.mark.parametrize(("method", "request_"), REQUESTS, ids=names(REQUESTS))
def test_damaged_requests_are_refused_or_read_but_never_fail_otherwise(
    method: Method[Any], request_: object
) -> None:
    chance, encoded = Random(1), method.encode_request(request_)
    for _ in range(300):
        damaged = bytearray(encoded[: chance.randrange(len(encoded) + 1)])
        for _ in range(chance.randrange(4) if damaged else 0):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        with suppress(InvalidArgument):
            method.decode_request(bytes(damaged))


def test_an_endless_nesting_is_refused() -> None:
    with pytest.raises(InvalidArgument):
        messages.GET.decode_request(b"\x91" * 100_000)


def test_an_answer_that_cannot_be_read_says_which_release_to_use() -> None:
    with pytest.raises(WireMismatch, match="same release"):
        messages.PUT.decode_reply(b"\xa3abc")


# Versions of the wire


def test_the_present_version_is_spoken() -> None:
    require_version(str(messages.WIRE_VERSION))


@pytest.mark.parametrize(
    ("shown", "advice"),
    [
        (str(messages.WIRE_VERSION + 1), "upgrade the server"),
        (str(messages.WIRE_VERSION_MIN - 1), "upgrade the client"),
        (None, "is it a Floodmark client?"),
        ("one", "is it a Floodmark client?"),
        ("", "is it a Floodmark client?"),
    ],
)
def test_a_peer_of_another_version_is_told_who_must_upgrade(shown: str | None, advice: str) -> None:
    with pytest.raises(WireMismatch) as refused:
        require_version(shown)
    assert advice in str(refused.value)
    assert f"this server speaks {messages.WIRE_VERSION_MIN} to {messages.WIRE_VERSION}" in str(refused.value)


@pytest.mark.parametrize(
    ("own", "server", "common"),
    [
        ((1, 1), (1, 1), 1),
        ((1, 3), (2, 5), 3),
        ((2, 5), (1, 3), 3),
        ((1, 1), (2, 3), None),
        ((4, 5), (1, 3), None),
    ],
)
def test_peers_agree_on_the_highest_version_that_both_speak(
    monkeypatch: pytest.MonkeyPatch, own: tuple[int, int], server: tuple[int, int], common: int | None
) -> None:
    monkeypatch.setattr(messages, "WIRE_VERSION_MIN", own[0])
    monkeypatch.setattr(messages, "WIRE_VERSION", own[1])
    assert common_version(WireMismatch("x", minimum=server[0], maximum=server[1])) == common
    assert common_version(WireMismatch("x")) is None
