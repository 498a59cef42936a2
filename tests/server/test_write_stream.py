"""Streams of writes: order, back-pressure, errors of one batch, and lost connections."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from threading import Event

import pyarrow
import pytest
from pyarrow import flight
from tests.server.support import (
    LOOPBACK,
    connected,
    cut_everything,
    nodes_at,
    qualify,
    raw_client,
    raw_options,
    stored,
)
from tests.site.support import HookedEngine
from tests.waiting import HANG_SECONDS

from floodmark.codec.values import TOMBSTONE, encode_value
from floodmark.columns.pairs import PAIRS
from floodmark.model.change import Stamp
from floodmark.model.errors import (
    Closed,
    CommitTooLarge,
    FloodmarkError,
    InvalidArgument,
    InvalidKey,
    InvalidValue,
    NamespaceNotFound,
    OutcomeUnknown,
    Unreachable,
)
from floodmark.model.partition import PutStream
from floodmark.model.version import Version
from floodmark.server import Server, serve
from floodmark.site import Namespace, Site, open_engine
from floodmark.wire import Nodes, RemoteWriteStream
from floodmark.wire.errors import decode_error
from floodmark.wire.messages import COMMAND


@pytest.fixture
def nodes(server: Server) -> Iterator[Nodes]:
    with closing(nodes_at(server.url)) as nodes:
        yield nodes


@pytest.fixture
def stream(nodes: Nodes) -> Iterator[RemoteWriteStream]:
    with closing(RemoteWriteStream(nodes, PutStream(True))) as stream:
        yield stream


def test_batches_are_committed_in_the_order_of_the_calls(stream: RemoteWriteStream, users: Namespace) -> None:
    key = qualify(users, b"key")
    futures = [stream.send({key: stored(b"%d" % number)}) for number in range(300)]
    versions = [future.result(HANG_SECONDS) for future in futures]
    assert versions == sorted(set(versions))
    assert users.get(b"key") == b"299"
    assert [users.get(b"key", at=version) for version in versions[:3]] == [b"0", b"1", b"2"]


def test_a_batch_is_one_commit(stream: RemoteWriteStream, users: Namespace, remote: Site) -> None:
    rows = {qualify(users, b"%03d" % number): stored(b"x") for number in range(500)}
    version = stream.send(rows).result(HANG_SECONDS)
    assert {change.version for change in remote.changes("users")} == {version}


def test_no_rows_need_no_commit(stream: RemoteWriteStream) -> None:
    assert stream.send({}).result(0) == 0


def test_many_threads_may_send(stream: RemoteWriteStream, users: Namespace) -> None:
    def send(number: int) -> Version:
        return stream.send({qualify(users, b"%d" % number): stored(b"x")}).result(HANG_SECONDS)

    with ThreadPoolExecutor(16) as pool:
        assert len(set(pool.map(send, range(400)))) == 400
    assert len(list(users.scan())) == 400


BAD_BATCHES: list[tuple[dict[bytes, bytes], type[FloodmarkError]]] = [
    ({b"\x00\x00\x01": stored(b"x")}, InvalidKey),
    ({b"\x00\x00\x01" + b"k" * 5_000: stored(b"x")}, InvalidKey),
    ({b"\x00\x00\x01key": b""}, InvalidValue),
    ({b"\x00\x00\x01key": b"value with unknown flags\xff"}, InvalidValue),
    ({b"\x00\x00\x01key": b"x" * (1024 * 1024 + 1) + b"\x00"}, InvalidValue),
    ({b"\x00\x00\x01key": encode_value(b"x", origin=Stamp(1, 1))}, InvalidValue),
    ({b"\x00\x00\x01key": b"x" + TOMBSTONE}, InvalidValue),
    ({b"\x00\x00\x63key": stored(b"x")}, NamespaceNotFound),
    ({b"\x00\x00\x01%d" % number: bytes(1024 * 1024) for number in range(65)}, CommitTooLarge),
]


@pytest.mark.parametrize(("rows", "error"), BAD_BATCHES)
def test_a_bad_batch_fails_alone(
    stream: RemoteWriteStream, users: Namespace, rows: dict[bytes, bytes], error: type[FloodmarkError]
) -> None:
    good = {qualify(users, b"good"): stored(b"x")}
    before, bad, after = stream.send(good), stream.send(rows), stream.send(good)
    assert before.result(HANG_SECONDS) < after.result(HANG_SECONDS)
    assert isinstance(bad.exception(HANG_SECONDS), error)
    assert [key for key, _ in users.scan()] == [b"good"]


def test_deletions_and_expiries_travel(stream: RemoteWriteStream, users: Namespace) -> None:
    key = qualify(users, b"key")
    stream.send({key: encode_value(b"x", expires_at=2**32)}).result(HANG_SECONDS)
    record = users.record(b"key")
    assert record is not None
    assert record.expires_at == 2**32
    stream.send({key: TOMBSTONE}).result(HANG_SECONDS)
    assert users.get(b"key") is None


# A server whose storage can be held


class HeldSite:
    """A site over the wire whose engine waits before each write until it is let go."""

    def __init__(self, server: Server, remote: Site, engine: HookedEngine) -> None:
        self.server = server
        self.users = remote.namespace("users")
        self.reached = Event()
        self._go = Event()
        engine.before = self._hold

    def _hold(self, operation: str) -> None:
        if operation == "write":
            self.reached.set()
            assert self._go.wait(HANG_SECONDS)

    def let_go(self) -> None:
        """Let all writes pass from now on."""
        self._go.set()

    def row(self, number: int) -> dict[bytes, bytes]:
        """A batch of one row."""
        return {qualify(self.users, b"%d" % number): stored(b"%d" % number)}


@contextmanager
def held_site() -> Iterator[HeldSite]:
    engine = HookedEngine()
    with serve(open_engine(engine, site="oslo", site_id=7), LOOPBACK) as server, connected(server) as remote:
        remote.create_namespace("users")
        held = HeldSite(server, remote, engine)
        try:
            yield held
        finally:
            held.let_go()


def test_send_waits_while_too_many_batches_are_on_their_way() -> None:
    with (
        held_site() as held,
        closing(nodes_at(held.server.url)) as nodes,
        closing(RemoteWriteStream(nodes, PutStream(True), batches_max=3)) as stream,
        ThreadPoolExecutor(1) as pool,
    ):
        sent = [stream.send(held.row(number)) for number in range(3)]
        assert not stream._has_room(1)
        fourth = pool.submit(stream.send, held.row(3))
        assert held.reached.wait(HANG_SECONDS)
        assert not fourth.done()
        held.let_go()
        assert fourth.result(HANG_SECONDS).result(HANG_SECONDS) > max(
            future.result(HANG_SECONDS) for future in sent
        )


def test_send_waits_while_too_many_bytes_are_on_their_way() -> None:
    with (
        held_site() as held,
        closing(nodes_at(held.server.url)) as nodes,
        closing(RemoteWriteStream(nodes, PutStream(True), bytes_max=1_000)) as stream,
    ):
        large = {qualify(held.users, b"large"): stored(b"x" * 5_000)}
        first = stream.send(large)
        assert not stream._has_room(1), "a batch larger than the limit goes alone"
        held.let_go()
        assert first.result(HANG_SECONDS) > 0
        assert stream.send(large).result(HANG_SECONDS) > 0


def test_a_lost_connection_leaves_unknown_outcomes_and_the_stream_goes_on() -> None:
    with (
        held_site() as held,
        closing(nodes_at(held.server.url)) as nodes,
        closing(RemoteWriteStream(nodes, PutStream(True))) as stream,
    ):
        lost = [stream.send(held.row(number)) for number in range(3)]
        assert held.reached.wait(HANG_SECONDS)
        assert cut_everything(held.server) >= 1
        errors = [future.exception(HANG_SECONDS) for future in lost]
        assert [type(error) for error in errors] == [OutcomeUnknown] * 3
        held.let_go()
        assert stream.send(held.row(9)).result(HANG_SECONDS) > 0
        assert held.users.get(b"9") == b"9"


def test_closing_gives_up_after_a_while() -> None:
    with held_site() as held, closing(nodes_at(held.server.url, timeout_seconds=0.5)) as nodes:
        stream = RemoteWriteStream(nodes, PutStream(True))
        waiting = stream.send(held.row(1))
        stream.close()
        assert isinstance(waiting.exception(HANG_SECONDS), OutcomeUnknown)
        held.let_go()


# Connections that come and go


def test_an_idle_stream_lets_its_connection_go_and_takes_another(nodes: Nodes, users: Namespace) -> None:
    with closing(RemoteWriteStream(nodes, PutStream(True), idle_seconds=0.05)) as stream:
        for number in range(3):
            assert stream.send({qualify(users, b"%d" % number): stored(b"x")}).result(HANG_SECONDS) > 0
            with stream._changed:
                assert stream._changed.wait_for(lambda: stream._line is None, HANG_SECONDS)
    assert len(list(users.scan())) == 3


def test_closing_returns_when_everything_was_answered(nodes: Nodes, users: Namespace) -> None:
    stream = RemoteWriteStream(nodes, PutStream(True))
    futures: list[Future[Version]] = [
        stream.send({qualify(users, b"%d" % number): stored(b"x")}) for number in range(50)
    ]
    stream.close()
    stream.close()
    assert all(future.done() for future in futures)
    with pytest.raises(Closed):
        stream.send({qualify(users, b"late"): stored(b"x")})


def test_a_server_that_is_gone_was_not_written_to(server: Server, users: Namespace) -> None:
    with closing(nodes_at(server.url)) as nodes:
        stream = RemoteWriteStream(nodes, PutStream(True))
        rows = {qualify(users, b"key"): stored(b"x")}
        server.close()
        with pytest.raises(Unreachable):
            stream.send(rows)


def test_other_streams_to_the_server_are_refused(server: Server) -> None:
    command = COMMAND.encode_request(PutStream(True))
    other = pyarrow.schema([("key", pyarrow.string())])
    for descriptor, schema in (
        (flight.FlightDescriptor.for_command(command), other),
        (flight.FlightDescriptor.for_command(b"?"), PAIRS),
        (flight.FlightDescriptor.for_path("users"), PAIRS),
    ):
        writer, reader = raw_client(server).do_put(descriptor, schema, raw_options())
        assert reader.read() is None
        with pytest.raises(flight.FlightServerError) as refused:
            writer.close()
        assert isinstance(decode_error(refused.value.extra_info), InvalidArgument)
