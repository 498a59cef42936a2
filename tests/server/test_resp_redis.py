"""The answers of the server beside those of Redis: random sessions, by seed, that both are sent.

What docs/resp.md says of a difference is left out of the sessions, or compared with a tolerance.
"""

import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from random import Random
from time import monotonic
from typing import Any, Final

import pytest
from tests.server.support_resp import serving_resp
from tests.waiting import HANG_SECONDS, wait_until

from floodmark.server import Server
from floodmark.site import Site
from floodmark.wire.resp import INCOMPLETE, ReplyReader, encode_request

INSTALL = "apt-get install --no-install-recommends redis-server"
KEYS: Final = (b"a", b"b", b"c", b"d:\x00\r\n")
VALUES: Final = (
    b"", b"1", b"-7", b"text", b"\x00\xff\r\n", b"x" * 300, b"9223372036854775807",
    b"-9223372036854775808", b" 1", b"01", b"1.5", b"+1", b"-0",
)  # fmt: skip
NUMBERS: Final = (
    b"1", b"0", b"-1", b"5", b"9223372036854775807", b"-9223372036854775808", b"9223372036854775808",
    b"ten", b"", b"1.0", b" 1", b"+1",
)  # fmt: skip
# Nothing expires while a session runs, or it has expired at once.
SECONDS: Final = (b"1000", b"2000", b"0", b"-1", b"-9223372036854775808", b"9223372036854775807", b"soon")
MILLISECONDS: Final = (b"1000000", b"2000000", b"0", b"-1", b"9223372036854775807", b"soon")
MOMENTS: Final = (b"2000000000", b"2100000000", b"1", b"0", b"-1", b"9223372036854775807", b"soon")
MOMENTS_MS: Final = (b"2000000000000", b"2100000000000", b"1", b"0", b"-1", b"soon")
FIELDS: Final = (b"f", b"g", b"h\r\n", "ö".encode())
TEXTS: Final = (b"", b"1", b"-7", b"text", b"01", b"9223372036854775807")
# Replies that depend on the moment, and by how much they may differ for each second between the two.
TOLERANCES: Final = {b"TTL": 1, b"EXPIRETIME": 1, b"PTTL": 2_000}

Request = list[bytes]


def some(chance: Random, *choices: Sequence[bytes]) -> Request:
    """One to three groups of arguments, each with one of each of the choices."""
    return [chance.choice(each) for _ in range(chance.randint(1, 3)) for each in choices]


def expiry(chance: Random) -> Request:
    numbers = {b"EX": SECONDS, b"PX": MILLISECONDS, b"EXAT": MOMENTS, b"PXAT": MOMENTS_MS}
    option = chance.choice([*numbers])
    return [option, chance.choice(numbers[option])]


def set_options(chance: Random) -> Request:
    options = [[b"NX"], [b"XX"], [b"GET"], [b"KEEPTTL"], expiry(chance), [b"SOON"]]
    chosen = chance.choices(options, [3, 3, 3, 3, 6, 1], k=chance.choice([0, 1, 1, 2, 3]))
    return [part for option in chosen for part in option]


def conditions(chance: Random, *others: bytes) -> Request:
    options = [b"NX", b"XX", b"NX", b"XX", b"SOON", *others]
    return chance.choices(options, k=chance.choice([0, 0, 1, 2]))


# What stands for a word in small letters of a template.
WORDS: Final[dict[str, Callable[[Random], Request]]] = {
    "key": lambda chance: [chance.choice(KEYS)],
    "keys": lambda chance: some(chance, KEYS),
    "value": lambda chance: [chance.choice(VALUES)],
    "values": lambda chance: some(chance, VALUES),
    "pairs": lambda chance: some(chance, KEYS, VALUES),
    "number": lambda chance: [chance.choice(NUMBERS)],
    "seconds": lambda chance: [chance.choice(SECONDS)],
    "milliseconds": lambda chance: [chance.choice(MILLISECONDS)],
    "moment": lambda chance: [chance.choice(MOMENTS)],
    "moment_ms": lambda chance: [chance.choice(MOMENTS_MS)],
    "options": set_options,
    # Which of two periods ends first depends on the moment; of two moments it is known.
    "conditions": conditions,
    "comparisons": lambda chance: conditions(chance, b"GT", b"GT", b"LT", b"LT"),
    "getex": lambda chance: chance.choice([[], [b"PERSIST"], expiry(chance), [b"PERSIST", *expiry(chance)]]),
    "field": lambda chance: [chance.choice(FIELDS)],
    "fields": lambda chance: some(chance, FIELDS),
    "items": lambda chance: some(chance, FIELDS, TEXTS),
}
STRINGS: Final = (
    "GET key", "STRLEN key", "TTL key", "PTTL key", "EXPIRETIME key", "TYPE key", "PERSIST key", "INCR key",
    "DECR key", "GETDEL key", "MGET keys", "EXISTS keys", "DEL keys", "UNLINK keys", "APPEND key value",
    "SETNX key value", "GETSET key value", "INCRBY key number", "DECRBY key number", "MSET pairs",
    "MSETNX pairs", *["SET key value options"] * 4, "GETEX key getex", "SETEX key seconds value",
    "PSETEX key milliseconds value", "EXPIRE key seconds conditions", "PEXPIRE key milliseconds conditions",
    "EXPIREAT key moment comparisons", "PEXPIREAT key moment_ms comparisons",
    "PING", "PING value", "ECHO value", "NOSUCH values",
)  # fmt: skip
TRANSACTIONS: Final = ("MULTI", "EXEC", "EXEC", "DISCARD", "UNWATCH", "WATCH keys")
HASHES: Final = (
    "HSET key items", "HGET key field", "HEXISTS key field", "HMGET key fields", "HDEL key fields",
    "HINCRBY key field number", "HLEN key", "HGETALL key", "TYPE key", "EXISTS keys", "DEL keys",
    "UNLINK keys",
)  # fmt: skip


def make(chance: Random, template: str) -> Request:
    """A request by a template."""
    parts = (WORDS[word](chance) if word in WORDS else [word.encode()] for word in template.split())
    return [part for group in parts for part in group]


def spoil(chance: Random, request: Request) -> Request:
    """Now and then, write the name in another way, or leave an argument out, or add one."""
    match chance.randrange(12):
        case 0:
            return [bytes(chance.choice([byte, byte ^ 32]) for byte in request[0]), *request[1:]]
        case 1:
            return request[:-1] if len(request) > 1 else request
        case 2:
            return [*request, chance.choice([b"x", b"1"])]
        case 3:
            return [part.lower() if part.isalpha() else part for part in request]
    return request


class Peer:
    """A connection to a server that speaks RESP."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._reader = ReplyReader()

    def ask(self, requests: Sequence[Request]) -> list[Any]:
        """The replies to a pipeline."""
        self._connection.sendall(b"".join(map(encode_request, requests)))
        replies: list[Any] = []
        while len(replies) < len(requests):
            while (reply := self._reader.next()) is not INCOMPLETE:
                replies.append(reply)
            if len(replies) < len(requests):
                self._reader.feed(self._connection.recv(65_536))
        return replies

    def close(self) -> None:
        self._connection.close()


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The socket of a Redis of this test."""
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip(f"redis-server is not installed, so this is NOT TESTED; install it: {INSTALL}")
    told = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    if " v=7." not in told:
        pytest.skip(f"error texts are those of Redis 7, so this is NOT TESTED with {told}")
    home = tmp_path_factory.mktemp("redis")
    path = home / "socket"
    process = subprocess.Popen(
        [program, "--port", "0", "--unixsocket", path, "--save", "", "--dir", home], stdout=subprocess.DEVNULL
    )
    try:
        wait_until(path.exists, "Redis listens")
        yield path
    finally:
        process.terminate()
        process.wait(HANG_SECONDS)


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Site, Server]]:
    with serving_resp() as pair:
        yield pair


class Pair:
    """A session at the server and one at Redis."""

    def __init__(self, server: Server, original: Path) -> None:
        assert server.resp_address is not None
        theirs = socket.socket(socket.AF_UNIX)
        theirs.settimeout(HANG_SECONDS)
        theirs.connect(str(original))
        self.ours = Peer(socket.create_connection(server.resp_address, HANG_SECONDS))
        self.theirs = Peer(theirs)
        self._queued: list[Request] | None = None
        # By how much the moments of the two may differ.
        self._seconds = 0.0

    def speak(self, protocol: int) -> None:
        """Choose the version of the protocol."""
        for peer in (self.ours, self.theirs):
            peer.ask([[b"HELLO", b"%d" % protocol]])

    def compare(self, requests: Sequence[Request]) -> None:
        """Send a pipeline to both; AssertionError if they answer differently."""
        started = monotonic()
        pairs = zip(requests, self.ours.ask(requests), self.theirs.ask(requests), strict=True)
        self._seconds += monotonic() - started
        for place, (request, ours, theirs) in enumerate(pairs):
            assert self._are_alike(request, ours, theirs), (
                f"{request}: {ours!r}, and Redis answers {theirs!r}, after {requests[:place][-5:]}"
            )

    def _are_alike(self, request: Request, ours: Any, theirs: Any) -> bool:
        name = request[0].upper()
        queued = self._queued
        if theirs == b"QUEUED" and queued is not None:
            queued.append(request)
        elif name == b"MULTI" and theirs == b"OK":
            self._queued = []
        elif name in (b"EXEC", b"DISCARD") and not str(theirs).startswith("ERR"):
            self._queued = None
        if name == b"EXEC" and isinstance(ours, list) and isinstance(theirs, list):
            assert queued is not None
            return len(ours) == len(theirs) and all(map(self._answers_alike, queued, ours, theirs))
        return self._answers_alike(request, ours, theirs)

    def _answers_alike(self, request: Request, ours: Any, theirs: Any) -> bool:
        tolerance = TOLERANCES.get(request[0].upper())
        if tolerance is not None and type(ours) is type(theirs) is int and min(ours, theirs) > 0:
            return abs(ours - theirs) <= tolerance * (1 + self._seconds)
        return _are_alike(request, ours, theirs)

    def close(self) -> None:
        self.ours.close()
        self.theirs.close()


def _are_alike(request: Request, ours: Any, theirs: Any) -> bool:
    if request[0].upper() == b"XPENDING" and isinstance(ours, list) and len(request) > 4:
        # Without the time since the delivery.
        ours, theirs = ([[*row[:2], *row[3:]] for row in reply] for reply in (ours, theirs))
    if request[0].upper() == b"HGETALL" and isinstance(ours, list):
        ours, theirs = (dict(zip(reply[::2], reply[1::2], strict=True)) for reply in (ours, theirs))
    return type(ours) is type(theirs) and bool(ours == theirs)


@pytest.fixture
def pair(served: tuple[Site, Server], original: Path) -> Iterator[Pair]:
    for name in ("users", "records"):
        served[0].namespace(name).delete_range()
    pair = Pair(served[1], original)
    pair.theirs.ask([[b"FLUSHALL"]])
    yield pair
    pair.close()


def session(templates: Sequence[str], seed: int, length: int) -> list[Request]:
    """Requests by templates, some of them spoilt."""
    chance = Random(seed)
    return [spoil(chance, make(chance, chance.choice(templates))) for _ in range(length)]


def test_difference_is_found(pair: Pair) -> None:
    with pytest.raises(AssertionError, match="Redis answers"):
        pair.compare([[b"PING"], [b"SELECT", b"nowhere"]])


@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize("seed", range(3))
def test_sessions_of_values(pair: Pair, protocol: int, seed: int) -> None:
    pair.speak(protocol)
    pair.compare(session(STRINGS, seed, 1_000))


@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize("seed", range(3))
def test_sessions_with_transactions(pair: Pair, protocol: int, seed: int) -> None:
    pair.speak(protocol)
    pair.compare(session([*STRINGS, *TRANSACTIONS * 4], seed, 1_000))


@pytest.mark.parametrize("protocol", [2, 3])
def test_sessions_of_fields(pair: Pair, protocol: int) -> None:
    pair.speak(protocol)
    pair.ours.ask([[b"SELECT", b"records"]])
    pair.compare(session(HASHES, 1, 1_000))


def test_scans_find_the_same_keys(pair: Pair) -> None:
    keys = [b"user:%d" % number for number in range(30)] + [b"h*llo", b"hello", b"h[e]llo", b"\\", b"a\nb"]
    for peer in (pair.ours, pair.theirs):
        peer.ask([[b"SET", key, b"1"] for key in keys])
    patterns = [
        b"*", b"user:1?", b"user:[1-3]*", b"user:[^1]", b"h?llo", b"h\\*llo", b"h[*]llo", b"h[a-f]llo",
        b"h[f-a]llo", b"[", b"h\\[e\\]llo", b"\\\\", b"a*b", b"nothing", b"USER*", b"[\\]]*", b"h[^]llo",
    ]  # fmt: skip
    for pattern in patterns:
        assert scan(pair.ours, pattern) == scan(pair.theirs, pattern), pattern
    pair.compare([[b"DBSIZE"], [b"SCAN", b"x"], [b"SCAN", b"0", b"COUNT", b"0"], [b"SCAN", b"0", b"MATCH"]])


def scan(peer: Peer, pattern: bytes) -> list[bytes]:
    """The keys that match a pattern, in order."""
    found: list[bytes] = []
    cursor = b"0"
    while True:
        [(cursor, keys)] = peer.ask([[b"SCAN", cursor, b"MATCH", pattern, b"COUNT", b"7"]])
        found += keys
        if cursor == b"0":
            return sorted(found)


# Changes


STREAM: Final = b"changes:users"


def copy_stream(pair: Pair) -> list[bytes]:
    """Write some keys, and give Redis a stream with the entries that are then in ours; their ids."""
    [start] = pair.ours.ask([[b"FM.RESOLVED"]])
    pair.ours.ask(
        [*([b"INCR", key] for key in KEYS), [b"MSET", b"a", b"1", b"b", b"2"], [b"DEL", b"a", b"b"]]
    )
    [entries] = pair.ours.ask([[b"XRANGE", STREAM, b"(%d-0" % start, b"+"]])
    pair.theirs.ask([[b"XADD", STREAM, number, *fields] for number, fields in entries])
    return [number for number, _ in entries]


def stream_session(chance: Random, ids: Sequence[bytes], group: bytes) -> Iterator[Request]:
    """Requests about a stream that begins with the first id."""
    before = b"%d" % (int(ids[0].partition(b"-")[0]) - 1)
    others = [ids[-1].partition(b"-")[0], b"%d-7" % int(ids[3].partition(b"-")[0])]
    while True:
        number, other = chance.choice([*ids, *others]), chance.choice([*ids, *others])
        consumer = chance.choice([b"ada", b"bob"])
        count = chance.choice([[], [b"COUNT", b"1"], [b"COUNT", b"3"], [b"COUNT", b"x"]])
        yield chance.choice([
            [b"XRANGE", STREAM, chance.choice([before, number, b"(" + number, b"x"]), chance.choice(
                [b"+", other, b"(" + other]), *count],
            [b"XREAD", *count, b"STREAMS", STREAM, chance.choice([before, number, b"$", b"x"])],
            [b"XREADGROUP", b"GROUP", group, consumer, *count, b"STREAMS", STREAM, b">"],
            [b"XREADGROUP", b"GROUP", group, consumer, b"COUNT", b"1", b"NOACK", b"STREAMS", STREAM, b">"],
            [b"XREADGROUP", b"GROUP", group, consumer, *count, b"STREAMS", STREAM, b"0"],
            [b"XREADGROUP", b"GROUP", group, consumer, b"STREAMS", STREAM, number],
            [b"XACK", STREAM, group, number],
            [b"XACK", STREAM, group, number, other],
            [b"XPENDING", STREAM, group],
            [b"XPENDING", STREAM, group, b"-", chance.choice([b"+", other]), b"2"],
            [b"XPENDING", STREAM, group, b"IDLE", b"0", number, b"+", b"9", consumer],
            [b"XPENDING", STREAM, group, b"IDLE", b"100000000", b"-", b"+", b"9"],
            [b"XAUTOCLAIM", STREAM, group, consumer, b"0", chance.choice([b"0", number]), *count],
            [b"XAUTOCLAIM", STREAM, group, consumer, b"0", b"0", b"COUNT", b"2", b"JUSTID"],
            [b"XAUTOCLAIM", STREAM, group, consumer, b"100000000", b"0"],
            [b"XGROUP", b"CREATE", STREAM, group, b"0"],
        ])  # fmt: skip


@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_sessions_of_streams(pair: Pair, protocol: int, seed: int) -> None:
    pair.speak(protocol)
    ids = copy_stream(pair)
    group = b"group%d-%d" % (protocol, seed)
    pair.compare([[b"XGROUP", b"CREATE", STREAM, group, b"%d" % (int(ids[0].partition(b"-")[0]) - 1)]])
    pair.compare([*islice(stream_session(Random(seed), ids, group), 100)])
