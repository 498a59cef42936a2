"""Mutated, cut and nested frames at a live server, and a slow or failing disk under it."""

import logging
import socket
from collections.abc import Iterator
from random import Random
from threading import Event
from typing import Any, Final

import pytest
import redis
from tests.server.support_resp import raw, resp_client, serving_resp
from tests.site.support import HookedEngine
from tests.waiting import HANG_SECONDS, wait_until

from floodmark.model.errors import StorageFailed
from floodmark.server import Server
from floodmark.server.resp.commands import COMMANDS
from floodmark.site import Site, open_engine
from floodmark.wire.resp import INCOMPLETE, ReplyReader, encode_request

# Arguments that commands look at, and some that none expects.
WORDS: Final = (
    b"a", b"b", b"", b"1", b"-1", b"0", b"9223372036854775808", b"\x00\xff", b"x" * 3_000, b"EX", b"PX",
    b"NX", b"GET", b"AT", b"COUNT", b"MATCH", b"BLOCK", b"STREAMS", b"changes:users", b"changes:none", b"$",
    b">", b"-", b"+", b"0-0", b"GROUP", b"g", b"CREATE", b"STREAM", b"IDLE", b"JUSTID", b"users", b"records",
    b"counts", b"LIST", b"INFO", b"ID", b"*", b"[", b"h[b-a", b"\\", b"2026-01-01T00:00:00Z", b"async", b"3",
)  # fmt: skip
NAMES: Final = sorted(command.name.encode() for command in COMMANDS)
BYTES: Final = b"*$:+-_%~>(,#!=|\r\n0123456789\x00\xff "


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Site, Server]]:
    with serving_resp() as pair:
        yield pair


def replies_to(server: Server, data: bytes) -> list[Any]:
    """Send bytes and no more on a connection of its own; all replies until the server closes it.

    AssertionError if what comes is not RESP, or ends within a reply.
    """
    reader, replies = ReplyReader(), list[Any]()
    with raw(server) as connection:
        try:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(1 << 20):
                reader.feed(part)
        except ConnectionError:
            # The server has closed the connection with bytes unread: its last reply may be lost on the way.
            pass
    while (reply := reader.next()) is not INCOMPLETE:
        replies.append(reply)
    return replies


def pipeline(chance: Random) -> bytes:
    """One to four requests, most of them of commands that there are."""
    requests = []
    for _ in range(chance.randint(1, 4)):
        name = chance.choice([*NAMES, b"NOSUCH"])
        requests.append([name, *chance.choices(WORDS, k=chance.randint(0, 6))])
    return b"".join(map(encode_request, requests))


def mutate(chance: Random, data: bytes) -> bytes:
    """Change, insert, remove, repeat or cut bytes, up to three times; now and then nothing."""
    for _ in range(chance.randint(0, 3)):
        place = chance.randrange(len(data) + 1)
        other = place + chance.randint(0, 8)
        match chance.randrange(5):
            case 0:
                data = data[:place] + bytes([chance.choice(BYTES)]) + data[place + 1 :]
            case 1:
                data = data[:place] + bytes(chance.choices(BYTES, k=chance.randint(1, 4))) + data[place:]
            case 2:
                data = data[:place] + data[other:]
            case 3:
                data = data[:other] + data[place:]
            case 4:
                data = data[:place]
    return data


@pytest.mark.parametrize(
    ("seed", "frames"), [(1, 400), pytest.param(2, 10_000, marks=pytest.mark.slow)], ids=["some", "10000"]
)
def test_mutated_frames(
    served: tuple[Site, Server], caplog: pytest.LogCaptureFixture, seed: int, frames: int
) -> None:
    """Each is answered in RESP, then the connection closed; nothing fails unexpectedly, and others go on."""
    chance, server = Random(seed), served[1]
    with caplog.at_level(logging.ERROR), resp_client(server) as other:
        for number in range(frames):
            data = mutate(chance, pipeline(chance))
            for reply in replies_to(server, data):
                assert "unexpectedly" not in str(reply), data
            if number % 100 == 0:
                assert other.set("other", number) is True
                assert other.get("other") == b"%d" % number
        assert not caplog.records, caplog.records[0].getMessage()
        wait_until(lambda: len(other.client_list()) == 1, "the server has forgotten all other clients")


def test_frames_cut_at_every_byte(served: tuple[Site, Server]) -> None:
    """What has arrived whole is answered, and no more."""
    requests = [
        [b"SET", b"cut", b"1\r\n"],
        [b"GET", b"cut"],
        [b"MGET", b"cut", b"none"],
        [b"ECHO", b"$1\r\n"],
    ]
    expected: list[Any] = [b"OK", b"1\r\n", [b"1\r\n", None], b"$1\r\n"]
    ends = [len(b"".join(map(encode_request, requests[:count]))) for count in range(len(requests) + 1)]
    data = b"".join(map(encode_request, requests))
    for cut in range(len(data) + 1):
        whole = sum(end <= cut for end in ends) - 1
        assert replies_to(served[1], data[:cut]) == expected[:whole], cut
    with raw(served[1]) as connection:
        # Byte by byte, the same requests come whole.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for place in range(len(data)):
            connection.sendall(data[place : place + 1])
        connection.shutdown(socket.SHUT_WR)
        reader = ReplyReader()
        while part := connection.recv(65_536):
            reader.feed(part)
        assert [reader.next() for _ in expected] == expected


@pytest.mark.parametrize(
    "data",
    [
        b"*1\r\n*1\r\n$4\r\nPING\r\n",
        b"*2\r\n$4\r\nECHO\r\n*1\r\n$1\r\na\r\n",
        b"*1\r\n" * 10_000 + b"$4\r\nPING\r\n",
        b"*1\r\n$4\r\nPING\r\n*1\r\n%1\r\n+a\r\n+b\r\n",
        b"*1\r\n:1\r\n",
        b"*2\r\n$3\r\nGET\r\n$-1\r\n",
        b"*2\r\n$3\r\nGET\r\n$1000000000\r\nabc",
    ],
)
def test_nested_and_foreign_frames_are_refused(served: tuple[Site, Server], data: bytes) -> None:
    *answers, last = replies_to(served[1], data)
    assert "Protocol error" in last
    assert all("Protocol error" not in str(answer) for answer in answers)
    with resp_client(served[1]) as client:
        assert client.ping() is True


# The disk


def test_slow_disk_holds_back_durable_writes_only() -> None:
    """While a sync waits, reads are answered; then one sync covers all writes that have come meanwhile."""
    engine, sync, reached = HookedEngine(), Event(), Event()

    def wait(operation: str) -> None:
        if operation == "sync":
            reached.set()
            assert sync.wait(HANG_SECONDS)

    sync.set()
    with serving_resp(open_engine(engine, site="oslo", site_id=7)) as (site, server):
        site.namespace("users").put(b"a", b"0")
        with raw(server) as first, raw(server) as second, resp_client(server) as reader:
            reader.ping()
            engine.before = wait
            sync.clear()
            first.sendall(encode_request([b"SET", b"a", b"1"]))
            assert reached.wait(HANG_SECONDS)
            counters = site.host.node.committer.counting  # type: ignore[attr-defined]
            rounds = counters.rounds
            second.sendall(b"".join(encode_request([b"INCR", b"n%d" % number]) for number in range(50)))
            for _ in range(20):
                assert reader.get("none") is None
                assert reader.mget("none", "none") == [None, None]
            for connection in (first, second):
                connection.setblocking(False)
                with pytest.raises(BlockingIOError):
                    connection.recv(1)
                connection.settimeout(HANG_SECONDS)
            sync.set()
            assert first.recv(100) == b"+OK\r\n"
            got = b""
            while len(got) < 200:
                got += second.recv(1_000)
            assert got == b":1\r\n" * 50
            assert counters.rounds - rounds <= 3
            assert reader.get("a") == b"1"


def test_disk_that_fails_is_told_and_the_server_goes_on() -> None:
    engine, broken = HookedEngine(), Event()

    def fail(operation: str) -> None:
        if broken.is_set() and operation in ("write", "sync"):
            raise StorageFailed("planned: the disk failed")

    engine.before = fail
    with (
        serving_resp(open_engine(engine, site="oslo", site_id=7)) as (site, server),
        resp_client(server) as client,
    ):
        client.set("a", "0")
        broken.set()
        with pytest.raises(redis.ResponseError, match=r"the disk failed|stopped"):
            client.set("a", "1")
        with pytest.raises(redis.ResponseError, match=r"the disk failed|stopped"):
            client.incr("n")
        assert client.get("a") in (b"0", b"1")
        broken.clear()
        wait_until(lambda: _sets(client), "the site has recovered")
        assert client.get("a") == site.namespace("users").get(b"a") == b"2"


def _sets(client: Any) -> bool:
    try:
        return bool(client.set("a", "2"))
    except redis.ResponseError:
        return False
