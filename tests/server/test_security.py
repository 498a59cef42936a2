"""Who gets in: certificates and tokens that are right, wrong, missing, expired or replaced."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from pyarrow import flight
from tests.server.certificates import Certificates
from tests.server.support import (
    LOOPBACK,
    connected,
    open_memory,
    qualify,
    raw_client,
    raw_options,
    serving,
    token_of,
    write_access,
    write_roles,
)

from floodmark.codec.values import encode_value
from floodmark.feed.named.feeds import FeedError, FeedSpec
from floodmark.host.transaction_port import LogKind
from floodmark.model.access import Role
from floodmark.model.change import Stamp
from floodmark.model.errors import (
    CannotOpen,
    FloodmarkError,
    InvalidArgument,
    InvalidConfiguration,
    InvalidName,
    NamespaceExists,
    NotAllowed,
    NotAuthenticated,
    Unreachable,
    WireMismatch,
)
from floodmark.model.limits import REPORTED_CHARACTERS_MAX
from floodmark.model.partition import LoadStream, PutStream
from floodmark.server import Server, ServerOptions, serve
from floodmark.server.access import CHECK_EVERY_MS, require_safe_metrics
from floodmark.site import Site
from floodmark.site.connecting import connect
from floodmark.wire.errors import decode_error
from floodmark.wire.messages import WIRE_VERSION, require_version

ADMIN = token_of(Role.ADMIN)


@contextmanager
def serving_tls(
    certificates: Certificates, access: Path | None = None, *, mutual: bool = False
) -> Iterator[tuple[Site, Server]]:
    options = ServerOptions(
        tls_certificate=certificates.server.certificate_path,
        tls_key=certificates.server.key_path,
        tls_client_root=certificates.root_path if mutual else None,
        access=access,
    )
    with serving(options) as pair:
        yield pair


def is_admitted(server: Server, **options: Any) -> bool:
    """Whether a client gets in.  How it is refused is for the test to say."""
    with connected(server, timeout=timedelta(seconds=10), **options) as site:
        return site.namespaces() == []


# Tokens


def test_a_right_token_lets_in_and_no_other_does(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    access = write_roles(tmp_path / "access.toml")
    with serving(ServerOptions(access=access)) as (_, server):
        assert is_admitted(server, token=ADMIN)
        for token in (None, "wrong", ADMIN[:-1], ADMIN + "x"):
            with pytest.raises(NotAuthenticated) as refused:
                connect(server.url, token=token)
            assert token is None or token not in str(refused.value)
            assert token is None or token not in caplog.text
    assert "refused a caller from 127.0.0.1:" in caplog.text


@pytest.mark.parametrize(
    "authorization", ["", "Bearer", "Bearer ", f"Basic {ADMIN}", ADMIN, f"Bearer {ADMIN} x"]
)
def test_other_headers_let_nobody_in(tmp_path: Path, authorization: str) -> None:
    access = write_roles(tmp_path / "access.toml")
    with serving(ServerOptions(access=access)) as (_, server):
        headers = [(b"floodmark-wire", b"1"), (b"authorization", authorization.encode())]
        options = flight.FlightCallOptions(headers=headers, timeout=10)
        with pytest.raises(flight.FlightServerError) as refused:
            list(raw_client(server).do_action(flight.Action("hello", b"\x90"), options))
        assert isinstance(decode_error(refused.value.extra_info), NotAuthenticated)


def test_an_expired_token_is_refused(tmp_path: Path) -> None:
    past = datetime(2020, 1, 1, tzinfo=UTC)
    access = write_access(
        tmp_path / "access.toml", {"name": "ada", "role": "read", "token": "x" * 20, "expires_at": past}
    )
    with (
        serving(ServerOptions(access=access)) as (_, server),
        pytest.raises(NotAuthenticated, match="expired"),
    ):
        connect(server.url, token="x" * 20)


def test_a_token_is_rotated_without_a_restart(tmp_path: Path) -> None:
    access, token_file = tmp_path / "access.toml", tmp_path / "token"
    old: dict[str, object] = {"name": "ada", "role": "admin", "token": "old-token"}
    new: dict[str, object] = {"name": "ada", "role": "admin", "token": "new-token"}
    write_access(access, old)
    token_file.write_text("old-token\n", "utf-8")
    with (
        serving(ServerOptions(access=access)) as (_, server),
        connected(server, token_file=token_file) as file_client,
        connected(server, token="old-token") as text_client,
    ):
        write_access(access, old, new)
        token_file.write_text("new-token\n", "utf-8")
        assert file_client.namespaces() == text_client.namespaces() == []
        write_access(access, new)
        wait_until_refused(text_client)
        users = file_client.create_namespace("users")
        stream = file_client.host.write_stream(PutStream(True))
        assert stream.send({b"\x00\x00\x01ada": b"1\x00"}).result(10) > 0
        assert list(users.scan()) == [(b"ada", b"1")]
        stream.close()


def wait_until_refused(site: Site) -> None:
    """The server looks at its file once a second."""
    for _ in range(100):
        try:
            site.namespaces()
        except NotAuthenticated:
            return
        Event().wait(CHECK_EVERY_MS / 10_000)
    raise AssertionError("a token that was taken away still works")


def test_a_stream_ends_when_its_grant_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("floodmark.server.visits.RENEW_MS", 100)
    access = write_access(tmp_path / "access.toml", {"name": "ada", "role": "admin", "token": "old-token"})
    with serving(ServerOptions(access=access)) as (_, server), connected(server, token="old-token") as site:
        site.create_namespace("users")
        follower = site.changes("users", follow=True, resolved_markers=True)
        next(follower)
        write_access(access, {"name": "bob", "role": "admin", "token": "new-token"})
        with pytest.raises(NotAuthenticated):
            list(follower)


# TLS


def test_the_suite_over_tls_needs_the_root(certificates: Certificates) -> None:
    with serving_tls(certificates) as (_, server):
        assert server.url.startswith("grpc+tls://")
        assert is_admitted(server, tls_root=certificates.root_path)


def test_a_server_that_nobody_vouches_for_is_not_trusted(certificates: Certificates, tmp_path: Path) -> None:
    other = Certificates(tmp_path)
    with serving_tls(certificates) as (_, server):
        for root in (None, other.root_path):
            with pytest.raises(Unreachable, match="certificate"):
                connect(server.url, tls_root=root, timeout=timedelta(seconds=5))


def test_plain_text_and_tls_do_not_meet(certificates: Certificates, server: Server) -> None:
    with serving_tls(certificates) as (_, encrypted):
        plain = encrypted.url.replace("grpc+tls", "grpc")
        with pytest.raises(Unreachable):
            connect(plain, timeout=timedelta(seconds=5))
    with pytest.raises(Unreachable):
        connect(
            server.url.replace("grpc", "grpc+tls"),
            tls_root=certificates.root_path,
            timeout=timedelta(seconds=5),
        )


def test_a_certificate_of_a_client_is_its_identity(certificates: Certificates, tmp_path: Path) -> None:
    access = write_access(tmp_path / "access.toml", {"name": "ada", "role": "write", "certificate": "ada"})
    ada, eve = certificates.client("ada"), certificates.client("eve")
    with serving_tls(certificates, access, mutual=True) as (_, server):
        shown: dict[str, Any] = {"tls_root": certificates.root_path}
        assert is_admitted(server, tls_certificate=ada.certificate_path, tls_key=ada.key_path, **shown)
        with pytest.raises(NotAuthenticated, match="eve"):
            connect(server.url, tls_certificate=eve.certificate_path, tls_key=eve.key_path, **shown)


@pytest.mark.parametrize("kind", ["none", "expired", "foreign"])
def test_a_client_without_a_good_certificate_does_not_connect(
    certificates: Certificates, tmp_path: Path, kind: str
) -> None:
    access = write_access(tmp_path / "access.toml", {"name": "ada", "role": "write", "certificate": "ada"})
    options: dict[str, Any] = {"tls_root": certificates.root_path, "timeout": timedelta(seconds=5)}
    if kind != "none":
        bad = certificates.expired_client("ada") if kind == "expired" else certificates.foreign_client("ada")
        options |= {"tls_certificate": bad.certificate_path, "tls_key": bad.key_path}
    with serving_tls(certificates, access, mutual=True) as (_, server), pytest.raises(Unreachable):
        connect(server.url, **options)


def test_a_wrong_token_is_not_forgiven_for_a_good_certificate(
    certificates: Certificates, tmp_path: Path
) -> None:
    access = write_access(tmp_path / "access.toml", {"name": "ada", "role": "write", "certificate": "ada"})
    ada = certificates.client("ada")
    with serving_tls(certificates, access, mutual=True) as (_, server), pytest.raises(NotAuthenticated):
        connect(
            server.url,
            token="wrong",
            tls_root=certificates.root_path,
            tls_certificate=ada.certificate_path,
            tls_key=ada.key_path,
        )


# What a server refuses to be


def test_a_server_beyond_loopback_needs_tls_and_access(tmp_path: Path, certificates: Certificates) -> None:
    tls: dict[str, Any] = {
        "tls_certificate": certificates.server.certificate_path,
        "tls_key": certificates.server.key_path,
    }
    access = write_roles(tmp_path / "access.toml")
    with open_memory() as site:
        for options in (ServerOptions(), ServerOptions(**tls), ServerOptions(access=access)):
            with pytest.raises(InvalidConfiguration, match="--insecure"):
                serve(site, "0.0.0.0:0", options)
        with serve(site, "0.0.0.0:0", ServerOptions(access=access, **tls)) as server:
            assert server.address.port > 0
    with serve(open_memory(), "0.0.0.0:0", ServerOptions(insecure=True)) as server:
        assert server.address.port > 0


@pytest.mark.parametrize(
    "make",
    [
        lambda: ServerOptions(tls_certificate="x"),
        lambda: ServerOptions(tls_key="x"),
        lambda: ServerOptions(tls_client_root="x"),
        lambda: ServerOptions(stall_seconds=0),
        lambda: ServerOptions(streams_max=0),
    ],
)
def test_options_that_do_not_fit_are_refused(make: Callable[[], ServerOptions]) -> None:
    with pytest.raises(InvalidConfiguration):
        make()


def test_what_cannot_be_read_or_bound_is_named(tmp_path: Path, server: Server) -> None:
    absent = str(tmp_path / "absent")
    taken = f"127.0.0.1:{server.address.port}"
    cases: list[tuple[str, ServerOptions, str]] = [
        (LOOPBACK, ServerOptions(access=absent), "absent"),
        (LOOPBACK, ServerOptions(tls_certificate=absent, tls_key=absent), "absent"),
        (taken, ServerOptions(), "Choose another port"),
        (LOOPBACK, ServerOptions(metrics_listen=taken), "choose another port"),
        ("127.0.0.1", ServerOptions(), "looks like"),
        ("127.0.0.1:99999", ServerOptions(), "looks like"),
        ("::1:7100", ServerOptions(), "looks like"),
        ("nowhere.invalid:0", ServerOptions(), "nowhere.invalid"),
    ]
    with open_memory() as site:
        for listen, options, said in cases:
            with pytest.raises(CannotOpen, match=said):
                serve(site, listen, options)
        assert site.namespaces() == [], "a server that could not begin has closed its site"


def test_a_certificate_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.pem").write_text("not a certificate", "utf-8")
    options = ServerOptions(tls_certificate=tmp_path / "x.pem", tls_key=tmp_path / "x.pem")
    with open_memory() as site, pytest.raises(CannotOpen):
        serve(site, LOOPBACK, options)


# Versions of the wire, and secrets


@pytest.mark.parametrize(
    ("wire", "advice"),
    [(str(WIRE_VERSION + 1), "upgrade the server"), ("0", "upgrade the client"), (None, "Floodmark client")],
)
def test_peers_of_other_versions_are_told_what_to_do(server: Server, wire: str | None, advice: str) -> None:
    options = raw_options(wire=wire)
    with pytest.raises(flight.FlightServerError) as refused:
        list(raw_client(server).do_action(flight.Action("hello", b"\x90"), options))
    error = decode_error(refused.value.extra_info)
    assert isinstance(error, WireMismatch)
    assert advice in str(error)


def test_a_client_of_a_newer_release_falls_back(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("floodmark.wire.connection.WIRE_VERSION", WIRE_VERSION + 1)
    with connected(server) as site:
        assert site.namespaces() == []


def test_a_server_of_something_else_is_recognised() -> None:
    class Other(flight.FlightServerBase):  # type: ignore[misc]
        def do_action(self, context: object, action: object) -> object:
            raise KeyError("what is this?")

    with Other("grpc://127.0.0.1:0") as other, pytest.raises(FloodmarkError) as refused:
        connect(f"grpc://127.0.0.1:{other.port}", timeout=timedelta(seconds=5))
    assert isinstance(refused.value, WireMismatch | Unreachable)


def test_nothing_that_is_logged_or_raised_shows_a_token(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    access = write_roles(tmp_path / "access.toml")
    with serving(ServerOptions(access=access)) as (_, server):
        with connected(server, token=ADMIN) as site:
            site.create_namespace("users")
            with pytest.raises(FloodmarkError) as refused:
                site.namespace("absent")
        with pytest.raises(NotAuthenticated) as unknown:
            connect(server.url, token="wrong-token")
    shown = "\n".join([caplog.text, str(refused.value), str(unknown.value), repr(site)])
    assert "create_namespace" in caplog.text
    assert ADMIN not in shown
    assert "wrong-token" not in shown


# What others see


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_metrics_are_not_shown_to_other_machines_unasked(host: str) -> None:
    with pytest.raises(InvalidConfiguration, match="--insecure-metrics"):
        require_safe_metrics(host, insecure=False)
    require_safe_metrics(host, insecure=True)


def test_a_server_refuses_to_show_its_metrics_before_it_listens() -> None:
    with open_memory() as site, pytest.raises(InvalidConfiguration, match=r"127\.0\.0\.1"):
        serve(site, LOOPBACK, ServerOptions(metrics_listen="0.0.0.0:0"))


@pytest.mark.parametrize("header", ["9" * 4_301, "9" * 10, "²"])
def test_a_version_of_the_wire_that_is_none_is_refused(header: str) -> None:
    with pytest.raises(WireMismatch):
        require_version(header)


def test_what_callers_report_is_cut_before_it_is_kept() -> None:
    with serving() as (site, server), connected(server) as remote:
        site.create_namespace("users")
        site.host.feeds.create(FeedSpec(name="copy", namespace="users", sink="blackhole:"))
        long = "x" * 900_000
        feeds = remote.host.feeds
        feeds.acquire("copy", "me", 10.0)
        reported = feeds.report("copy", "me", [], FeedError(text=long)).error
        assert reported is not None
        assert len(reported.text) == REPORTED_CHARACTERS_MAX
        remote.host.replication.stall_link(9, ["users"], long)
        transaction = remote.host.transactions.begin(timedelta(seconds=10), 0)
        remote.host.transactions.abort(transaction, long)
        (ended,) = [remote.host.transactions.show(transaction)]
        assert len(str(ended)) < 2 * REPORTED_CHARACTERS_MAX


@pytest.mark.parametrize("limit", [-1, 1 << 62])
def test_a_number_of_records_that_is_none_is_refused(limit: int) -> None:
    with serving() as (_, server), connected(server) as remote:
        remote.host.transactions.begin(timedelta(seconds=10), 0)
        with pytest.raises(InvalidArgument):
            remote.host.transactions.log_records(LogKind.COORDINATOR, "0", limit)


@pytest.mark.parametrize("name", [".", "..", "..."])
def test_a_namespace_is_not_called_like_a_directory_above(name: str) -> None:
    with open_memory() as site, pytest.raises(InvalidName):
        site.create_namespace(name)


def test_a_load_is_audited(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "floodmark.audit")
    with serving() as (site, server), connected(server) as remote:
        key = qualify(site.create_namespace("users"), b"ada")
        copied = encode_value(b"x", origin=Stamp(1, 9))
        remote.host.router.maps.map.partitions[0].load([key], [copied], durable=True)
        stream = remote.host.write_stream(LoadStream(True))
        stream.send({key: copied}).result(10)
        stream.close()
    assert {"anonymous: load: done", "anonymous: stream.load: begun", "anonymous: stream.load: done"} <= {
        record.message for record in caplog.records
    }


def test_an_action_that_is_not_allowed_is_audited_with_its_outcome(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "floodmark.audit")
    access = write_roles(tmp_path / "access.toml")
    with (
        serving(ServerOptions(access=access)) as (_, server),
        connected(server, token=token_of(Role.WRITE)) as writer,
        connected(server, token=ADMIN) as admin,
    ):
        with pytest.raises(NotAllowed):
            writer.create_namespace("users")
        admin.create_namespace("users")
        with pytest.raises(NamespaceExists):
            admin.create_namespace("users")
    said = [record.message for record in caplog.records if record.name == "floodmark.audit"]
    assert said == [
        "write: administration.create_namespace: not_allowed",
        "admin: administration.create_namespace: done",
        "admin: administration.create_namespace: refused",
    ]
