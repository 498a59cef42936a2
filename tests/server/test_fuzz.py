"""Malformed, huge, truncated and random requests: each gets an error, and the server goes on serving."""

import socket
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from random import Random
from typing import Any

import msgspec
import pyarrow
import pytest
from pyarrow import flight
from tests.server.support import connected, raw_client, raw_options, serving
from tests.sizes import only
from tests.waiting import HANG_SECONDS

from floodmark.columns.pairs import PAIRS
from floodmark.model.errors import FloodmarkError, InvalidArgument, LimitExceeded, WireMismatch
from floodmark.model.limits import COMMIT_BYTES_MAX, MIB
from floodmark.model.partition import PutStream
from floodmark.model.ranges import KeyRange
from floodmark.model.stream import ChangesRequest
from floodmark.server import Server
from floodmark.wire import messages
from floodmark.wire.columns import encode_rows
from floodmark.wire.errors import decode_error
from floodmark.wire.lines import Line
from floodmark.wire.resp import call_head, encode_call

KEY = b"\x00\x00\x01ada"
# What a fuzzer would have to be lucky to find: values at the edges of what is meant.
EDGES: list[object] = [
    None, True, -1, 0, 1, 2**31, 2**63, 2**64 - 1, -(2**63), 1.5, float("nan"), "", "users", "\x00",
    "ü" * 500, b"", b"\x00", KEY, KEY[:3], b"\xff" * 5_000, [], [KEY], [KEY, KEY], [[]], {},
    {"namespace": "users"}, {"name": "x", "version": 0}, [b"", None], [1] * 1_000,
]  # fmt: skip
TRANSPORT = (flight.FlightError, pyarrow.ArrowException, OSError)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as (site, server):
        site.create_namespace("users").put(b"ada", b"1")
        yield server


@pytest.fixture(autouse=True)
def serving_afterwards(server: Server) -> Iterator[None]:
    yield
    with connected(server) as site:
        names = site.namespaces()
        assert server.service.watchdog.is_alive()
        if "users" in names:
            assert site.namespace("users").get(b"ada") in (b"1", None)


def answer(call: Callable[[], object]) -> FloodmarkError | None:
    """What a call is told: nothing, or an error of ours.  Anything else would be a leak."""
    failure: Any = None
    try:
        call()
    except flight.FlightServerError as error:
        failure = error
    if failure is None:
        return None
    own = decode_error(failure.extra_info)
    assert own is not None, f"an error that is not ours: {failure}"
    assert "Traceback" not in str(failure)
    assert type(own) is not FloodmarkError, f"a bug: {failure}"
    return own


def act(client: Any, name: str, body: bytes) -> FloodmarkError | None:
    action = flight.Action(name, body)
    return answer(lambda: list(client.do_action(action, raw_options())))


def bodies(chance: Random, rounds: int) -> Iterator[bytes]:
    """Requests of every kind of wrongness, and now and then a right one."""
    for _ in range(rounds):
        yield chance.randbytes(chance.randrange(200))
        yield msgspec.msgpack.encode(chance.choice(EDGES))
        yield msgspec.msgpack.encode([chance.choice(EDGES) for _ in range(chance.randrange(6))])
        names = chance.sample(["namespace", "settings", "name", "version", "key", "left", "spec"], 3)
        yield msgspec.msgpack.encode({name: chance.choice(EDGES) for name in names})
        right = msgspec.msgpack.encode([1, [KEY], [b"1\x00"], True])
        yield right[: chance.randrange(len(right))]


def actions(server: Server) -> list[str]:
    # Those that end the test, cut the partition of other tests, or take long.
    spared = {"administration.drop_namespace", "administration.collect_garbage", "peers.split_peer"}
    return sorted(server.service.handlers.keys() - spared)


@pytest.mark.parametrize("rounds", only([2], [2, 8]))
def test_every_action_survives_every_body(server: Server, rounds: int) -> None:
    chance, client = Random(1), raw_client(server)
    for name in actions(server):
        for body in bodies(chance, rounds=rounds):
            act(client, name, body)


def test_every_call_over_resp_survives_every_body(server: Server) -> None:
    chance = Random(2)
    assert server.resp_address is not None
    with closing(Line(socket.create_connection(server.resp_address))) as line:
        for name in (*actions(server), "", "nothing", "get\x00", "\u00fc" * 1_000):
            for body in bodies(chance, rounds=2):
                try:
                    line.ask(encode_call(call_head(name), body), HANG_SECONDS)
                except FloodmarkError as error:
                    if type(error) is FloodmarkError:
                        raise


@pytest.mark.parametrize("name", ["", "nothing", "get\x00", "administration", "_refuse", "ü" * 1_000])
def test_actions_that_do_not_exist_are_named(server: Server, name: str) -> None:
    assert isinstance(act(raw_client(server), name, b"\x90"), WireMismatch)


@pytest.mark.parametrize(
    ("name", "size"), [("get", 2 * MIB), ("hello", 2 * MIB), ("put", COMMIT_BYTES_MAX + 9 * MIB)]
)
def test_huge_requests_are_refused(server: Server, name: str, size: int) -> None:
    assert isinstance(act(raw_client(server), name, bytes(size)), LimitExceeded)


def test_requests_that_are_right_but_for_one_thing_are_refused(server: Server) -> None:
    client = raw_client(server)
    partition = server._site.host.router.maps.map.partitions[0].id
    value, at = b"1\x00", server._site.now()
    wrong: list[tuple[str, list[object]]] = [
        ("get", [partition, b"", None]),
        ("get", [partition, KEY[:3], None]),
        ("get", [partition, KEY, 0]),
        ("get", [partition, KEY, -1]),
        ("get", [partition + 1, KEY, None]),
        ("get", [-1, KEY, None]),
        ("get", [partition, b"\x00\x00\x00key", None]),
        ("get", [partition, b"\xff\xff\xffkey", None]),
        ("get_many", [partition, [], None]),
        ("get_many", [partition, [KEY] * 10_001, None]),
        ("read_batches", [partition, [], [KEY], None]),
        ("read_batches", [partition, [KEY], [KEY], None]),
        ("read_batches", [partition, [KEY], [b"\xff\xff\xffkey"], None]),
        ("read_batches", [partition, [KEY], [KEY + b"%d" % number for number in range(1_000)], None]),
        ("read_batches", [partition, [KEY], [], 0]),
        ("put", [partition, [], [], True]),
        ("put", [partition, [KEY], [], True]),
        ("put", [partition, [KEY, KEY], [value, value], True]),
        ("put", [partition, [KEY], [b""], True]),
        ("put", [partition, [KEY], [b"\xff"], True]),
        ("put", [partition, [KEY], [b"\x01"], True]),
        ("put", [partition, [KEY], [b"x\x02"], True]),
        ("put", [partition, [KEY], [value], 1]),
        ("apply", [partition, [KEY], [value], True]),
        ("apply", [partition, [], [], True]),
        ("compare_and_set", [partition, KEY, None, b"", True]),
        ("delete_unchanged", [partition, [], at, True]),
        ("delete_unchanged", [partition, [KEY], -1, True]),
        ("hold", [0, 1, None]),
        ("hold", [at, 0, None]),
        ("hold", [at, 2**24, None]),
        ("hold", [at, -1, None]),
    ]
    for name, fields in wrong:
        assert act(client, name, msgspec.msgpack.encode(fields)) is not None, (name, fields)
    right = msgspec.msgpack.encode([partition, KEY, None])
    assert act(client, "get", right) is None, "nothing is right: the test proves nothing"


# Streams


def test_random_tickets_are_refused(server: Server) -> None:
    chance, client = Random(3), raw_client(server)
    for body in bodies(chance, rounds=30):
        refused = answer(lambda body=body: client.do_get(flight.Ticket(body), raw_options()).read_all())  # type: ignore[misc]
        assert isinstance(refused, InvalidArgument)


def test_tickets_that_are_right_but_for_one_thing_are_refused(server: Server) -> None:
    client = raw_client(server)
    partition, at = server._site.host.router.maps.map.partitions[0].id, server._site.now()
    users = KeyRange(b"\x00\x00\x01", b"\x00\x00\x02")
    wrong: list[object] = [
        messages.ScanTicket(partition, KeyRange(b"", None), at),
        messages.ScanTicket(partition, KeyRange(b"\x00\x00", b"\x00\x00\x02"), at),
        messages.ScanTicket(partition, KeyRange(b"\x00\x00\x01", None), at),
        messages.ScanTicket(partition, KeyRange(b"\x00\x00\x01", b"\x00\x00\x03"), at),
        messages.ScanTicket(partition, KeyRange(b"\x00\x00\x01b", b"\x00\x00\x01a"), at),
        messages.ScanTicket(partition, KeyRange(b"\x00\x00\x01" + bytes(5_000), users.end), at),
        messages.ScanTicket(partition + 1, users, at),
        messages.ScanTicket(partition, users, 0),
        messages.ScanTicket(partition, users, at + 2**50),
        messages.ScanTicket(partition, users, at, -1),
        messages.ScanTicket(partition, KeyRange(b"\x00\x00\x09", b"\x00\x00\x0a"), at),
        messages.ChangesTicket(ChangesRequest(keys=KeyRange(b"\x00\x00\x01"), namespace=1)),
        messages.ChangesTicket(ChangesRequest(keys=users, namespace=2)),
        messages.ChangesTicket(ChangesRequest(keys=users, namespace=-1)),
        messages.ChangesTicket(ChangesRequest(keys=users)),
        messages.ChangesTicket(ChangesRequest(keys=users, namespace=1, since=-1)),
    ]
    for ticket in wrong:
        body = messages.TICKET.encode_request(ticket)
        said = answer(lambda body=body: client.do_get(flight.Ticket(body), raw_options()).read_all())  # type: ignore[misc]
        assert said is not None, ticket
    body = messages.TICKET.encode_request(messages.ScanTicket(partition, users, at))
    assert client.do_get(flight.Ticket(body), raw_options()).read_all().num_rows == 1


def test_batches_that_are_not_what_they_say_are_refused_one_by_one(server: Server) -> None:
    command = messages.COMMAND.encode_request(PutStream(True))
    descriptor = flight.FlightDescriptor.for_command(command)
    writer, reader = raw_client(server).do_put(descriptor, PAIRS, raw_options(timeout=60))
    offsets = pyarrow.py_buffer(b"".join(offset.to_bytes(4, "little") for offset in (0, 1 << 30, 3)))
    wild = pyarrow.Array.from_buffers(pyarrow.binary(), 2, [None, offsets, pyarrow.py_buffer(b"abc")])
    batches = [
        pyarrow.RecordBatch.from_arrays([wild, wild], schema=PAIRS),
        pyarrow.RecordBatch.from_arrays([pyarrow.array([KEY, KEY])] * 2, schema=PAIRS),
        encode_rows({}),
        encode_rows({KEY: b"\xff"}),
    ]
    for batch in batches:
        writer.write_batch(batch)
        version, error = msgspec.msgpack.decode(reader.read())
        assert version == 0
        assert error["kinds"][-1] == "FloodmarkError"
    writer.write_batch(encode_rows({KEY: b"1\x00"}))
    assert msgspec.msgpack.decode(reader.read())[0] > 0
    writer.close()


def test_other_rpcs_are_refused(server: Server) -> None:
    client, descriptor = raw_client(server), flight.FlightDescriptor.for_command(b"?")
    calls: list[Callable[[], object]] = [
        lambda: list(client.list_flights(b"", raw_options())),
        lambda: list(client.list_actions(raw_options())),
        lambda: client.get_flight_info(descriptor, raw_options()),
    ]
    for call in calls:
        assert isinstance(answer(call), WireMismatch)
    assert client.get_schema(descriptor, raw_options()).schema == pyarrow.schema([])
    with pytest.raises(TRANSPORT):
        client.authenticate_basic_token(b"ada", b"x", raw_options())
    writer, _ = client.do_exchange(descriptor, raw_options())
    with pytest.raises(flight.FlightServerError):
        writer.close()


# Bytes that are no gRPC at all


@pytest.mark.parametrize("seed", range(5))
def test_garbage_on_the_port_harms_nobody(server: Server, seed: int) -> None:
    chance = Random(seed)
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    heads = [b"", b"GET / HTTP/1.1\r\n\r\n", preface, preface + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"]
    for head in heads:
        with socket.create_connection(server.address, timeout=10) as connection, suppress(OSError):
            connection.sendall(head + chance.randbytes(chance.randrange(20_000)))
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(65_536):
                pass
