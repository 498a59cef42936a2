"""Point calls go over RESP where the server offers it and the client reaches it, else over Flight."""

import logging
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
from tests.server.certificates import Certificates, make_certificates
from tests.server.support import (
    connected,
    connection_of,
    in_threads,
    intercept,
    open_memory,
    restartable,
    serving,
    token_of,
    write_access,
    write_roles,
)
from tests.waiting import HANG_SECONDS, wait_until

from floodmark.model.access import Role
from floodmark.model.errors import (
    Closed,
    NotAllowed,
    NotAuthenticated,
    OutcomeUnknown,
    Unreachable,
)
from floodmark.model.limits import LINES_MAX
from floodmark.server import Server, ServerOptions, serve
from floodmark.site import Namespace, Site
from floodmark.site.connecting import connect
from floodmark.wire.credentials import Certificates as Credentials
from floodmark.wire.lines import Lines


def lines_of(site: Site) -> Lines:
    lines: Lines = connection_of(site)._lines
    return lines


def calls_of(server: Server, name: str) -> float:
    """How many calls of a name were answered over RESP."""
    assert server._door is not None
    return sum(server._door.tallies[name].outcomes.values())


@contextmanager
def no_lines(site: Site) -> Iterator[None]:
    """Fail if a line is opened in the block."""
    yield
    assert not lines_of(site)._open


@contextmanager
def listening(answer: bytes) -> Iterator[int]:
    """A port at which some other program answers each connection with a few bytes, and no more."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def run() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(1)
                    connection.sendall(answer)

        thread = Thread(target=run, daemon=True)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join(HANG_SECONDS)


# Over RESP


def test_point_calls_go_over_resp(server: Server, remote: Site, users: Namespace) -> None:
    counts = remote.create_namespace("counts", merge="counter")
    records = remote.create_namespace("records", merge="fields")
    users.put(b"ada", b"1")
    users.put_many({b"bob": b"2", b"cyd": b"3"})
    users.delete(b"cyd")
    assert users.get(b"ada") == b"1"
    assert users.get_many([b"ada", b"bob", b"cyd"]) == [b"1", b"2", None]
    assert users.record(b"ada") is not None
    assert users.compare_and_set(b"ada", b"1", b"4")
    counts.add(b"home", 2)
    records.update(b"ada", {"city": "London"})
    expected = {"put": 3, "get": 1, "get_many": 1, "find": 1, "compare_and_set": 1, "merge": 2}
    assert {name: calls_of(server, name) for name in expected} == expected
    assert lines_of(remote)._hello is not None


def test_calls_one_after_the_other_share_a_line(remote: Site, users: Namespace) -> None:
    for _ in range(20):
        users.put(b"ada", b"1")
        users.get(b"ada")
    assert len(lines_of(remote)._open) == 1


def test_more_threads_than_lines_are_served_all_the_same(server: Server) -> None:
    with connected(server) as site:
        users = site.create_namespace("users")
        in_threads(lambda number: users.put(b"%d" % number, b"x"), LINES_MAX + 20)
        assert len(list(users.scan())) == LINES_MAX + 20
        assert len(lines_of(site)._open) <= LINES_MAX


def test_an_error_comes_with_its_details_and_the_line_goes_on(
    server: Server, remote: Site, users: Namespace
) -> None:
    users.put(b"ada", b"1")
    with closing(connect(server.url)) as other:
        other.drop_namespace("users")
        with pytest.raises(Exception, match="dropped") as refused:
            users.put(b"ada", b"2")
    assert refused.value.details["namespace"] == "users"  # type: ignore[attr-defined]
    assert len(lines_of(remote)._open) == 1


def test_large_values_travel_whole(users: Namespace) -> None:
    value = os.urandom(1_000_000)
    users.put(b"ada", value)
    assert users.get(b"ada") == value
    pairs = {b"%d" % number: os.urandom(200_000) for number in range(40)}
    users.put_many(pairs)
    assert users.get_many(pairs) == [*pairs.values()]


def test_calls_over_both_ways_are_counted_together(server: Server, users: Namespace) -> None:
    users.put(b"ada", b"1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Lines, "take", lambda *_: None)
        users.put(b"ada", b"2")

    def counted() -> list[float]:
        return [
            sample.value
            for family in server.service.metrics.families("oslo")
            for sample in family.samples
            if sample.name == "floodmark_requests_total"
            and (sample.labels["action"], sample.labels["outcome"]) == ("put", "done")
        ]

    # The server counts a call over Flight after it was answered.
    wait_until(lambda: counted() == [2], "they are not counted together")


# Where there is no RESP


def test_a_server_without_resp_is_called_over_flight() -> None:
    with serving(ServerOptions(resp_listen=None)) as (_, server), connected(server) as remote:
        users = remote.create_namespace("users")
        with no_lines(remote):
            users.put(b"ada", b"1")
            users.put_many({b"%d" % number: os.urandom(100_000) for number in range(20)})
            assert users.get(b"ada") == b"1"


@pytest.mark.parametrize(
    "answer", [b"", b"-ERR unknown command 'FM.CALL'\r\n", b"HTTP/1.1 400 Bad Request\r\n\r\n"]
)
def test_a_port_that_is_blocked_or_of_another_program_is_told_and_left(
    server: Server, answer: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with listening(answer) as port, caplog.at_level(logging.WARNING, "floodmark.wire"):
        server.service.data.resp_port = port
        with connected(server) as remote, no_lines(remote):
            users = remote.create_namespace("users")
            for _ in range(3):
                users.put(b"ada", b"1")
            assert users.get(b"ada") == b"1"
    assert [record.message.startswith(f"127.0.0.1:{port} ") for record in caplog.records] == [True]


def test_a_server_that_is_down_is_not_told_to_open_its_port(caplog: pytest.LogCaptureFixture) -> None:
    def finds_ada() -> bool:
        try:
            return users.get(b"ada") == b"1"
        except Unreachable:
            return False

    with restartable() as (start, stop), connect(start()) as client:
        users = client.create_namespace("users")
        users.put(b"ada", b"1")
        stop()
        with caplog.at_level(logging.WARNING, "floodmark.wire"):
            assert not finds_ada()
            assert lines_of(client)._shut_until > 0, "no line was tried: this proves nothing"
            start()
            wait_until(finds_ada, "the server does not come back")
    assert not [record for record in caplog.records if record.name == "floodmark.wire"]


def test_resp_is_used_again_when_the_port_is_open_again(server: Server) -> None:
    assert server.resp_address is not None
    server.service.data.resp_port = 1
    with connected(server) as remote:
        users = remote.create_namespace("users")
        users.put(b"ada", b"1")
        lines = lines_of(remote)
        assert not lines._open
        server.service.data.resp_port = server.resp_address.port
        lines._shut_until = 0.0
        users.put(b"ada", b"2")
        assert len(lines._open) == 1


def test_a_door_of_another_site_is_not_used(server: Server) -> None:
    with serve(open_memory("bergen"), "127.0.0.1:0") as other:
        assert other.resp_address is not None
        server.service.data.resp_port = other.resp_address.port
        with connected(server) as remote, no_lines(remote):
            remote.create_namespace("users").put(b"ada", b"1")


# Callers


def test_a_token_shows_the_caller_and_its_rights(tmp_path: Path) -> None:
    access = write_roles(tmp_path / "access.toml", "users")
    with serving(ServerOptions(access=access)) as (site, server):
        site.create_namespace("users")
        site.create_namespace("orders")
        with connected(server, token=token_of(Role.READ, "users")) as reader:
            assert reader.namespace("users").get(b"ada") is None
            with pytest.raises(NotAllowed) as refused:
                reader.namespace("users").put(b"ada", b"1")
            assert refused.value.details["caller"] == "read-users"
            assert len(lines_of(reader)._open) == 1
        with pytest.raises(NotAuthenticated):
            connect(server.url, token="wrong")


def test_a_token_that_was_replaced_is_read_again(tmp_path: Path) -> None:
    access, file = tmp_path / "access.toml", tmp_path / "token"
    write_access(access, {"name": "ada", "role": "admin", "token": "first"})
    file.write_text("first", "utf-8")
    with serving(ServerOptions(access=access)) as (_, server), connected(server, token_file=file) as remote:
        users = remote.create_namespace("users")
        users.put(b"ada", b"1")
        write_access(access, {"name": "ada", "role": "admin", "token": "second-one"})
        file.write_text("second-one", "utf-8")
        assert server._door is not None
        for session in server._door.sessions():
            session.renew()
        users.put(b"ada", b"2")
        assert users.get(b"ada") == b"2"
        assert calls_of(server, "put") == 2


@pytest.mark.parametrize("mutual", [False, True])
def test_lines_are_encrypted_as_flight_is(certificates: Certificates, tmp_path: Path, mutual: bool) -> None:
    client = certificates.client("indexer")
    named = {"certificate": "indexer"} if mutual else {"token": "secret"}
    options = ServerOptions(
        tls_certificate=certificates.server.certificate_path,
        tls_key=certificates.server.key_path,
        tls_client_root=certificates.root_path if mutual else None,
        access=write_access(tmp_path / "access.toml", {"name": "ada", "role": "admin", **named}),
    )
    shown: dict[str, Any] = {"token": "secret"}
    if mutual:
        shown = {"tls_certificate": client.certificate_path, "tls_key": client.key_path}
    with serving(options) as (_, server):
        with connected(server, tls_root=certificates.root_path, **shown) as remote:
            users = remote.create_namespace("users")
            users.put(b"ada", b"1")
            assert users.get(b"ada") == b"1"
            assert calls_of(server, "get") == 1
        wrong = make_certificates(tmp_path / "others")
        with pytest.raises(Unreachable):
            connect(server.url, tls_root=wrong.root_path, **shown)
        with connected(server, tls_root=certificates.root_path, **shown) as remote:
            lines_of(remote)._tls = Credentials.load(wrong.root_path, None, None).context
            with no_lines(remote):
                assert remote.namespace("users").get(b"ada") == b"1"


# Servers and lines that go


def test_a_write_is_not_the_one_to_find_out_that_the_server_was_restarted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("floodmark.wire.lines.REST_SECONDS", -1)
    with restartable() as (start, stop), connect(start()) as client:
        users = client.create_namespace("users")
        for number in range(3):
            users.put(b"%d" % number, b"x")
            stop()
            start()
            wait_until(lambda: users.get(b"0") == b"x", "the server does not come back")
        assert len(list(users.scan())) == 3


@pytest.fixture
def stuck(server: Server) -> Iterator[tuple[Event, Event]]:
    """Let every compare_and_set wait: an event for that it has begun, and one that lets it go on."""
    reached, let_go = Event(), Event()

    def answer_late(handle: Callable[[], bytes]) -> bytes:
        reached.set()
        assert let_go.wait(HANG_SECONDS)
        return handle()

    assert intercept(server, "compare_and_set", answer_late)
    yield reached, let_go
    let_go.set()


def errors_of(call: Callable[[], object]) -> tuple[Thread, list[Exception]]:
    """A thread that makes a call, and the errors that it got."""
    errors: list[Exception] = []

    def run() -> None:
        try:
            call()
        except Exception as error:
            errors.append(error)

    thread = Thread(target=run)
    thread.start()
    return thread, errors


def test_closing_ends_calls_that_wait(server: Server, stuck: tuple[Event, Event]) -> None:
    client = connect(server.url)
    users = client.create_namespace("users")
    thread, errors = errors_of(lambda: users.compare_and_set(b"ada", None, b"1"))
    assert stuck[0].wait(HANG_SECONDS)
    client.close()
    thread.join(HANG_SECONDS)
    assert [type(error) for error in errors] == [Closed]


def test_a_write_whose_line_is_cut_is_of_unknown_outcome_and_not_repeated(
    server: Server, remote: Site, users: Namespace, stuck: tuple[Event, Event]
) -> None:
    thread, errors = errors_of(lambda: users.compare_and_set(b"ada", None, b"1"))
    assert stuck[0].wait(HANG_SECONDS)
    for line in list(lines_of(remote)._open):
        line.end()
    thread.join(HANG_SECONDS)
    assert [type(error) for error in errors] == [OutcomeUnknown]
    stuck[1].set()
    wait_until(lambda: users.get(b"ada") == b"1", "the write that had begun is not there")
    assert calls_of(server, "compare_and_set") <= 1


def test_a_read_whose_line_is_cut_is_repeated(remote: Site, users: Namespace) -> None:
    users.put(b"ada", b"1")
    for line in list(lines_of(remote)._open):
        line.end()
    assert users.get(b"ada") == b"1"


def test_a_forked_process_opens_lines_of_its_own(remote: Site, users: Namespace) -> None:
    users.put(b"ada", b"1")
    lines = lines_of(remote)
    assert lines._resting
    lines.forget()
    assert not lines._resting
    assert users.get(b"ada") == b"1"


def test_an_explicit_port_that_is_taken_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        site = open_memory()
        with closing(site), pytest.raises(Exception, match="cannot listen"):
            serve(site, "127.0.0.1:0", ServerOptions(resp_listen=listen))


def test_the_next_port_may_be_taken() -> None:
    """Clients of Floodmark ask for the port."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first:
            port = first.getsockname()[1]
        try:
            taken = socket.create_server(("127.0.0.1", port + 1))
        except OSError:
            continue
        break
    with taken, serve(open_memory(), f"127.0.0.1:{port}") as server:
        assert server.resp_address is not None
        assert server.resp_address.port not in (port, port + 1)
        with connected(server) as remote:
            remote.create_namespace("users").put(b"ada", b"1")
            assert calls_of(server, "put") == 1
