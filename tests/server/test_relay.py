"""The relay in front of gRPC: clients notice nothing, and strangers can make the server hold little."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import flight
from tests.server.certificates import Certificates
from tests.server.support import (
    connected,
    in_threads,
    raw_options,
    serving,
    token_of,
    write_access,
    write_roles,
)
from tests.server.test_frames import frame, varint
from tests.waiting import HANG_SECONDS

from floodmark.columns.pairs import PAIRS
from floodmark.model.access import Role
from floodmark.model.errors import InvalidArgument, NotAuthenticated, Unreachable
from floodmark.model.limits import NEWCOMER_BYTES_MAX
from floodmark.model.partition import PutStream
from floodmark.server import Server, ServerOptions
from floodmark.server.frames import PREFACE
from floodmark.server.relay import Relay
from floodmark.site.connecting import connect
from floodmark.wire.connection import Connection
from floodmark.wire.errors import decode_error
from floodmark.wire.messages import COMMAND, RESOLVED

ADMIN = token_of(Role.ADMIN)
MIB = 1024 * 1024


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    options = ServerOptions(relay=True, access=write_roles(tmp_path / "access.toml"))
    with serving(options) as (_, server):
        yield server


def client_of(server: Server, *options: tuple[str, int]) -> Any:
    return flight.FlightClient(server.url, generic_options=[("grpc.use_local_subchannel_pool", 1), *options])


def count_cuts(server: Server) -> list[None]:
    """One entry for each connection that is cut from now on."""
    assert server._relay is not None
    cuts: list[None] = []
    server._relay.on_cut = lambda: cuts.append(None)
    return cuts


# Clients


def test_clients_notice_nothing(server: Server) -> None:
    with connected(server, token=ADMIN) as site:
        users = site.create_namespace("users")
        follower = site.changes("users", since="now", follow=True)
        version = users.put(b"ada", b"1")
        assert next(follower).version == version
        pairs = {b"%05d" % number: b"x" * 300 for number in range(20_000)}
        users.put_many(pairs)
        with users.writer() as writer:
            for key in pairs:
                writer.put(key, b"y" * 300)
        assert sum(1 for _ in users.scan()) == 20_001
        assert in_threads(lambda _: users.get(b"ada"), 16) == [b"1"] * 16


def test_a_large_request_comes_after_the_caller_is_known(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over Flight a small call goes first: the relay cuts a stranger that sends much."""
    connection = Connection(server.url, token=ADMIN)
    with closing(connection):
        calls: list[str] = []
        call = connection._call

        def note(action: Any, *args: Any, **options: Any) -> bytes:
            calls.append(action.type)
            return call(action, *args, **options)

        monkeypatch.setattr(connection, "_call", note)
        with pytest.raises(InvalidArgument):
            connection._ask(RESOLVED, bytes(NEWCOMER_BYTES_MAX * 2), HANG_SECONDS)
        assert calls == ["hello", "resolved"]


@pytest.mark.parametrize("mutual", [False, True])
def test_tls_ends_at_the_relay(certificates: Certificates, tmp_path: Path, mutual: bool) -> None:
    client = certificates.client("indexer")
    options = ServerOptions(
        relay=True,
        tls_certificate=certificates.server.certificate_path,
        tls_key=certificates.server.key_path,
        tls_client_root=certificates.root_path if mutual else None,
        access=write_access(
            tmp_path / "access.toml",
            {"name": "ada", "role": "admin", **({"certificate": "indexer"} if mutual else {"token": ADMIN})},
        ),
    )
    shown: dict[str, Any] = {"token": ADMIN}
    if mutual:
        shown = {"tls_certificate": client.certificate_path, "tls_key": client.key_path}
    with serving(options) as (_, server):
        with connected(server, tls_root=certificates.root_path, **shown) as site:
            assert site.create_namespace("users").put(b"ada", b"1")
        with pytest.raises((NotAuthenticated, Unreachable)):
            connect(server.url, tls_root=certificates.root_path)


# Strangers


@pytest.mark.parametrize("token", [None, ADMIN])
def test_a_message_that_is_too_large_is_refused_at_its_first_bytes(server: Server, token: str | None) -> None:
    cuts = count_cuts(server)
    with closing(client_of(server)) as client, pytest.raises(flight.FlightUnavailableError):
        list(client.do_action(flight.Action("hello", bytes(100 * MIB)), raw_options(token=token)))
    assert cuts
    with connected(server, token=ADMIN) as site:
        assert site.namespaces() == []


@pytest.mark.parametrize("token", [None, ADMIN])
def test_a_compressed_message_is_refused(server: Server, token: str | None) -> None:
    cuts = count_cuts(server)
    gzip = ("grpc.default_compression_algorithm", 2)
    with closing(client_of(server, gzip)) as client, pytest.raises(flight.FlightUnavailableError):
        list(client.do_action(flight.Action("hello", bytes(100_000)), raw_options(token=token)))
    assert cuts


def test_compressed_columns_are_refused_before_arrow_takes_them_in(server: Server) -> None:
    cuts = count_cuts(server)
    batch = pyarrow.record_batch([[b"key"], [bytes(MIB)]], schema=PAIRS)
    descriptor = flight.FlightDescriptor.for_command(COMMAND.encode_request(PutStream(durable=True)))
    compressed = pyarrow.ipc.IpcWriteOptions(compression="zstd")
    with closing(client_of(server)) as client:
        options = raw_options(token=ADMIN, write_options=compressed)
        writer, reader = client.do_put(descriptor, PAIRS, options)
        with suppress(flight.FlightError):
            writer.write_batch(batch)
        assert reader.read() is None
        with pytest.raises(flight.FlightUnavailableError):
            writer.close()
    assert cuts


def test_the_port_behind_the_relay_serves_nobody(server: Server) -> None:
    client = flight.FlightClient(f"grpc://127.0.0.1:{server.service.port}")
    with closing(client), pytest.raises(flight.FlightServerError) as refused:
        list(client.do_action(flight.Action("hello", b"\x90"), raw_options(token=ADMIN)))
    assert isinstance(decode_error(refused.value.extra_info), NotAuthenticated)


# Newcomers: the relay alone, before a server that is a socket


@contextmanager
def relaying(**options: Any) -> Iterator[tuple[Relay, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as target:
        target.settimeout(HANG_SECONDS)
        relay = Relay(socket.create_server(("127.0.0.1", 0)), message_bytes_max=100 * MIB, **options)
        relay.start(target.getsockname()[1])
        try:
            yield relay, target
        finally:
            relay.close()


def newcomer(relay: Relay) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", relay.port), HANG_SECONDS)
    client.sendall(PREFACE)
    return client


def accept(target: socket.socket) -> tuple[socket.socket, str]:
    """The next connection from the relay, and what gRPC would call it."""
    inner, (host, port) = target.accept()
    inner.settimeout(HANG_SECONDS)
    return inner, f"ipv4:{host}:{port}"


def receive(inner: socket.socket, count: int) -> bytes:
    received = b""
    while len(received) < count:
        part = inner.recv(min(MIB, count - len(received)))
        assert part, "the connection has ended"
        received += part
    return received


def test_a_newcomer_is_cut_when_its_time_is_up_and_others_are_not() -> None:
    with relaying(newcomer_seconds=0.3) as (relay, target), ExitStack() as stack:
        admitted = stack.enter_context(newcomer(relay))
        inner, peer = accept(target)
        stack.enter_context(inner)
        assert receive(inner, len(PREFACE)) == PREFACE
        relay.admit(peer)
        stranger = stack.enter_context(newcomer(relay))
        stack.enter_context(accept(target)[0])
        assert stranger.recv(1) == b""
        inner.sendall(b"answer")
        assert receive(admitted, 6) == b"answer"


def test_newcomers_have_few_places() -> None:
    with relaying(newcomers_max=2) as (relay, target), ExitStack() as stack:
        first, second = (stack.enter_context(newcomer(relay)) for _ in range(2))
        inner, peer = accept(target)
        others = [stack.enter_context(each) for each in (inner, accept(target)[0])]
        assert [receive(each, len(PREFACE)) for each in others] == [PREFACE] * 2
        assert relay._places.locked()
        third = stack.enter_context(newcomer(relay))
        relay.admit(peer)
        assert receive(stack.enter_context(accept(target)[0]), len(PREFACE)) == PREFACE
        assert relay._places.locked()
        second.close()
        first.close()
        fourth = stack.enter_context(newcomer(relay))
        assert receive(stack.enter_context(accept(target)[0]), len(PREFACE)) == PREFACE
        assert third.fileno() != fourth.fileno()


def test_a_newcomer_may_send_little_until_it_is_known() -> None:
    body = bytes(16_000)
    size = len(body) * 300 - 5
    # A message of one field, whose number and length are five bytes.
    content = b"\x1a" + varint(size - 5, 4) + body[10:]
    wire = frame(0, 1, b"\0" + size.to_bytes(4, "big") + content) + frame(0, 1, body) * 299
    with relaying(newcomer_bytes_max=1_000) as (relay, target), newcomer(relay) as client:
        inner, peer = accept(target)
        with inner:
            assert receive(inner, len(PREFACE)) == PREFACE

            def send(_: int) -> int:
                client.sendall(wire)
                return 0

            def take(_: int) -> int:
                connection = next(iter(relay._connections.values()))
                while connection.front.transport.is_reading():
                    pass
                held = connection._received_bytes
                relay.admit(peer)
                assert receive(inner, len(wire)) == wire
                return held

            held = max(in_threads(lambda number: (send, take)[number](number), 2))
            assert held <= 1_000 + 256 * 1024


def test_what_a_client_does_not_read_waits_at_the_server() -> None:
    """The relay holds little for a side that does not take it."""
    with relaying() as (relay, target), newcomer(relay) as client:
        inner, _ = accept(target)
        with inner:
            assert receive(inner, len(PREFACE)) == PREFACE
            inner.setblocking(False)
            sent = 0
            connection = next(iter(relay._connections.values()))
            while connection.back.transport.is_reading():
                try:
                    sent += inner.send(bytes(MIB))
                except BlockingIOError:
                    continue
            assert connection.front.transport.get_write_buffer_size() <= 2 * MIB
            assert len(receive(client, sent)) == sent
