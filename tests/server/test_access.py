"""Who gets in, who may do what, and that a changed access file neither opens the door nor locks it."""

import hmac
import logging
import os
import re
import socket
import ssl
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from threading import Event
from typing import cast

import pytest
from tests.server.certificates import Certificate, Certificates, make_certificates

from floodmark.model.access import Role
from floodmark.model.errors import InvalidConfiguration, NotAllowed, NotAuthenticated
from floodmark.server.access import (
    OPEN_ACCESS,
    AccessFile,
    Caller,
    hash_token,
    new_token,
    require_safe_listening,
)
from floodmark.testing.clock import SimulatedTime

PAGE = Path(__file__).resolve().parents[2] / "docs" / "operations" / "access.md"
TOKEN = "a-token-of-the-indexer"
OTHER_TOKEN = "another-token-altogether"


def entry(name: str = "indexer", token: str = TOKEN, role: str = "read", more: str = "") -> str:
    return f'[[access]]\nname = "{name}"\ntoken_sha256 = "{hash_token(token)}"\nrole = "{role}"\n{more}\n'


@pytest.fixture
def time() -> SimulatedTime:
    return SimulatedTime()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "access.toml"
    path.write_text(entry())
    return path


@pytest.fixture
def file(path: Path, time: SimulatedTime) -> AccessFile:
    return AccessFile(path, time)


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


def replace(path: Path, text: str) -> None:
    """Put a new file in the place of the old one, as editors do."""
    fresh = path.with_name("access.toml.new")
    fresh.write_text(text)
    fresh.rename(path)


def write_in_place(path: Path, text: str) -> None:
    path.write_text(text)


# Rights


def test_each_role_includes_the_ones_before() -> None:
    for mine in Role:
        for needed in Role:
            assert Caller("ada", mine).may(needed, "users") == (mine >= needed)


def test_caller_of_some_namespaces_has_no_part_in_the_others_or_in_the_whole_site() -> None:
    caller = Caller("ada", Role.ADMIN, frozenset({"users"}))
    assert caller.may(Role.ADMIN, "users")
    assert not caller.may(Role.READ, "orders")
    assert not caller.may(Role.READ, None)


def test_refusal_says_who_what_where_and_what_to_do() -> None:
    with pytest.raises(NotAllowed) as refusal:
        Caller("indexer", Role.READ, frozenset({"users", "orders"})).require(Role.WRITE, "carts")
    message = str(refusal.value)
    for part in ("'indexer'", "role read in 'orders', 'users'", "role write in 'carts'", "access file"):
        assert part in message
    assert refusal.value.details == {"caller": "indexer", "role": "write", "namespace": "carts"}


def test_allowed_act_passes() -> None:
    Caller("indexer", Role.WRITE, frozenset({"users"})).require(Role.READ, "users")


def test_open_access_makes_everybody_an_administrator() -> None:
    caller = OPEN_ACCESS.authenticate(None, None)
    assert caller == Caller("anonymous", Role.ADMIN)
    caller.require(Role.ADMIN, None)


# Who gets in


def test_token_and_certificate_lead_to_their_entries(path: Path, time: SimulatedTime) -> None:
    path.write_text(
        entry(more='namespaces = ["users"]\nexpires_at = 2027-01-01T00:00:00Z')
        + '[[access]]\nname = "ingest"\ncertificate = "ingest.example"\nrole = "write"\n'
    )
    file = AccessFile(path, time)
    expires_at = datetime(2027, 1, 1, tzinfo=UTC)
    indexer = Caller("indexer", Role.READ, frozenset({"users"}), expires_at)
    assert file.authenticate(TOKEN, None) == indexer
    assert file.authenticate(None, "ingest.example") == Caller("ingest", Role.WRITE)
    assert file.authenticate(TOKEN, "ingest.example") == indexer


@pytest.mark.parametrize(
    ("token", "certificate"),
    [
        (None, None),
        ("", None),
        (OTHER_TOKEN, None),
        (TOKEN + "\n", None),
        (hash_token(TOKEN), None),
        ("not text: \udc80", None),
        (None, ""),
        (None, "stranger.example"),
    ],
)
def test_nobody_else_gets_in(file: AccessFile, token: str | None, certificate: str | None) -> None:
    with pytest.raises(NotAuthenticated):
        file.authenticate(token, certificate)


def test_wrong_token_is_refused_even_beside_a_good_certificate(path: Path, time: SimulatedTime) -> None:
    path.write_text('[[access]]\nname = "ingest"\ncertificate = "ingest.example"\nrole = "write"\n')
    file = AccessFile(path, time)
    assert file.authenticate(None, "ingest.example").name == "ingest"
    with pytest.raises(NotAuthenticated, match="token"):
        file.authenticate(OTHER_TOKEN, "ingest.example")


def test_entry_is_refused_from_the_moment_of_its_expiry(path: Path) -> None:
    path.write_text(entry(more="expires_at = 2027-01-01T01:00:00+01:00"))
    midnight_ms = int(datetime(2027, 1, 1, tzinfo=UTC).timestamp() * 1000)
    time = SimulatedTime(midnight_ms - 1)
    file = AccessFile(path, time)
    assert file.authenticate(TOKEN, None).name == "indexer"
    time.advance(1)
    with pytest.raises(NotAuthenticated, match="'indexer' expired at 2027-01-01"):
        file.authenticate(TOKEN, None)


def test_one_name_may_have_two_tokens_with_their_own_rights(path: Path, time: SimulatedTime) -> None:
    path.write_text(entry(token="old") + entry(token="new", role="write"))
    file = AccessFile(path, time)
    assert file.authenticate("old", None) == Caller("indexer", Role.READ)
    assert file.authenticate("new", None) == Caller("indexer", Role.WRITE)


@pytest.mark.parametrize("token", ["token-0", "token-9", OTHER_TOKEN])
def test_token_is_compared_with_every_entry(
    path: Path, time: SimulatedTime, monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    path.write_text("".join(entry(token=f"token-{number}") for number in range(10)))
    file = AccessFile(path, time)
    compared = []

    def counting(left: bytes, right: bytes) -> bool:
        compared.append(left)
        return compare_digest(left, right)

    compare_digest = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", counting)
    if token == OTHER_TOKEN:
        with pytest.raises(NotAuthenticated):
            file.authenticate(token, None)
    else:
        file.authenticate(token, None)
    assert len(compared) == 10


def test_tokens_and_hashes_show_up_nowhere(
    file: AccessFile, path: Path, time: SimulatedTime, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    shown = [repr(file), repr(file.authenticate(TOKEN, None))]
    # Somebody has put the token where its hash belongs.
    replace(path, entry().replace(hash_token(TOKEN), OTHER_TOKEN))
    time.advance(2_000)
    shown.append(repr(file.authenticate(TOKEN, None)))
    shown.append(str(file.error))
    for presented in (OTHER_TOKEN, TOKEN + OTHER_TOKEN):
        with pytest.raises(NotAuthenticated) as refusal:
            file.authenticate(presented, None)
        shown.append(f"{refusal.value!r} {refusal.value.details}")
    with pytest.raises(InvalidConfiguration) as broken:
        AccessFile(path, time)
    shown += [repr(broken.value), caplog.text]
    assert len(caplog.records) == 1
    for text in shown:
        assert TOKEN not in text
        assert OTHER_TOKEN not in text
        assert hash_token(TOKEN) not in text


def test_tokens_are_long_and_never_the_same() -> None:
    tokens = {new_token() for _ in range(100)}
    assert len(tokens) == 100
    assert all(len(token) == 43 for token in tokens)


def test_examples_of_the_page_about_access_can_be_used(path: Path, time: SimulatedTime) -> None:
    examples = re.findall(r"^```toml\n(.*?)^```", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert examples
    for example in examples:
        path.write_text(example)
        file = AccessFile(path, time)
        assert file.authenticate("open sesame", None).name == "indexer"
        assert file.authenticate(None, "ingest.example").role is Role.WRITE


# Files that cannot be used


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "no [[access]] entry"),
        ("access = []", "no [[access]] entry"),
        ("access = 3", "no [[access]] entry"),
        ("[[access", "no TOML"),
        (entry() + "[[acess]]\n", "unknown key 'acess'"),
        ("access = [3]", "entry 1: Expected `object`"),
        (entry() + entry("b", "b", more="rol = 1"), "entry 2 ('b'): Object contains unknown field `rol`"),
        (entry(role="Read"), "entry 1 ('indexer'): role must be one of read, write, replicate, admin"),
        (entry(more="namespaces = []"), "namespaces must name one or more"),
        (entry(more='namespaces = [""]'), "namespaces must name one or more"),
        (entry(more='namespaces = "users"'), "namespaces"),
        (entry(more="expires_at = 2027-01-01T00:00:00"), "timezone component - at `$.expires_at`"),
        (entry(more='certificate = "a.example"'), "either token_sha256 or certificate"),
        ('[[access]]\nname = "a"\nrole = "read"\n', "entry 1 ('a'): give either token_sha256 or certificate"),
        ('[[access]]\nname = "a"\nrole = "read"\ncertificate = " "\n', "certificate must be the name"),
        (f'[[access]]\nrole = "read"\ntoken_sha256 = "{"0" * 64}"\n', "entry 1: Object missing required"),
        (entry(name=" "), "name must have 1 to 128"),
        (entry(name="a\\u0007"), "name must have 1 to 128"),
        (entry().replace(hash_token(TOKEN), "ab" * 31), "token_sha256 must be the 64"),
        (entry().replace(hash_token(TOKEN), "z" * 64), "token_sha256 must be the 64"),
        (entry(token=""), "token_sha256 is the hash of an empty token"),
        (entry() + entry("b"), "entry 2 ('b'): token_sha256 stands in an earlier entry"),
        (
            entry() + entry("b").replace(hash_token(TOKEN), hash_token(TOKEN).upper()),
            "entry 2 ('b'): token_sha256 stands in an earlier entry",
        ),
        (
            '[[access]]\nname = "a"\nrole = "read"\ncertificate = "a.example"\n' * 2,
            "entry 2 ('a'): certificate stands in an earlier entry",
        ),
    ],
)
def test_unusable_file_is_refused_by_file_entry_and_field(
    path: Path, time: SimulatedTime, text: str, problem: str
) -> None:
    path.write_text(text)
    with pytest.raises(InvalidConfiguration) as refusal:
        AccessFile(path, time)
    assert str(path) in str(refusal.value)
    assert problem in str(refusal.value)


def test_file_that_is_no_text_is_refused(path: Path, time: SimulatedTime) -> None:
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidConfiguration, match="no TOML"):
        AccessFile(path, time)


def test_missing_file_is_refused_at_start(tmp_path: Path, time: SimulatedTime) -> None:
    with pytest.raises(InvalidConfiguration, match="No such file"):
        AccessFile(tmp_path / "nowhere.toml", time)


# Changes while the server runs


@pytest.mark.parametrize("write", [replace, write_in_place])
def test_changed_file_is_taken_in_a_second_later(
    file: AccessFile, path: Path, time: SimulatedTime, write: object
) -> None:
    assert callable(write)
    write(path, entry("successor", OTHER_TOKEN, "admin"))
    time.advance(999)
    assert file.authenticate(TOKEN, None).name == "indexer"
    time.advance(1)
    assert file.authenticate(OTHER_TOKEN, None) == Caller("successor", Role.ADMIN)
    with pytest.raises(NotAuthenticated):
        file.authenticate(TOKEN, None)


def test_replacement_of_the_same_size_and_time_is_noticed(
    file: AccessFile, path: Path, time: SimulatedTime
) -> None:
    before = path.stat()
    fresh = path.with_name("fresh")
    fresh.write_text(entry(token=OTHER_TOKEN))
    os.utime(fresh, ns=(before.st_atime_ns, before.st_mtime_ns))
    fresh.rename(path)
    assert path.stat().st_size == before.st_size
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    time.advance(1_000)
    assert file.authenticate(OTHER_TOKEN, None).name == "indexer"


def test_clock_that_was_set_back_does_not_stop_the_checks(
    file: AccessFile, path: Path, time: SimulatedTime
) -> None:
    replace(path, entry(token=OTHER_TOKEN))
    time.advance(-3_600_000)
    assert file.authenticate(OTHER_TOKEN, None).name == "indexer"


@pytest.mark.parametrize("text", ["", "[[access", entry(role="king"), entry() + entry()])
def test_broken_change_leaves_everything_as_it_was_and_is_reported_once(
    file: AccessFile, path: Path, time: SimulatedTime, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    replace(path, text)
    for _ in range(3):
        time.advance(1_000)
        assert file.authenticate(TOKEN, None).name == "indexer"
        with pytest.raises(NotAuthenticated):
            file.authenticate(OTHER_TOKEN, None)
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "stay in force" in caplog.text
    assert str(path) in str(file.error)

    replace(path, entry(token=OTHER_TOKEN))
    time.advance(1_000)
    assert file.authenticate(OTHER_TOKEN, None).name == "indexer"
    assert file.error is None


def test_removed_file_leaves_everything_as_it_was_until_it_comes_back(
    file: AccessFile, path: Path, time: SimulatedTime, caplog: pytest.LogCaptureFixture
) -> None:
    aside = path.with_name("aside")
    path.rename(aside)
    for _ in range(3):
        time.advance(1_000)
        assert file.authenticate(TOKEN, None).name == "indexer"
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "No such file" in str(file.error)
    aside.rename(path)
    time.advance(1_000)
    assert file.authenticate(TOKEN, None).name == "indexer"
    assert file.error is None


def test_file_that_cannot_be_read_is_tried_again_although_it_does_not_change(
    file: AccessFile, path: Path, time: SimulatedTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace(path, entry(token=OTHER_TOKEN))
    time.advance(1_000)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", _too_many_open_files)
        assert file.authenticate(TOKEN, None).name == "indexer"
    assert "Too many open files" in str(file.error)
    time.advance(1_000)
    assert file.authenticate(OTHER_TOKEN, None).name == "indexer"
    assert file.error is None


def _too_many_open_files(path: Path) -> bytes:
    raise OSError(24, "Too many open files", str(path))


def test_callers_get_in_while_the_file_is_replaced_under_them(path: Path, time: SimulatedTime) -> None:
    file = AccessFile(path, time)
    done = Event()

    def call() -> int:
        calls = 0
        while not done.is_set() or not calls:
            assert file.authenticate(TOKEN, None).name == "indexer"
            calls += 1
        return calls

    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(call) for _ in range(2)]
        try:
            for number in range(30):
                replace(path, entry(token=f"token-{number}") + entry() if number % 3 else "[[access")
                time.advance(1_000)
        finally:
            done.set()
        assert all(call.result() for call in calls)
    replace(path, entry(token=OTHER_TOKEN))
    time.advance(1_000)
    assert file.authenticate(OTHER_TOKEN, None).name == "indexer"


# Where a server may listen


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.10", "localhost", "::1", "[::1]"])
def test_loopback_needs_no_protection(host: str) -> None:
    require_safe_listening(host, tls=False, access=False, insecure=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "0", "::", "[::]", "", "192.0.2.1", "2001:db8::1"])
@pytest.mark.parametrize(
    ("tls", "access", "missing"),
    [
        (False, False, "there is no TLS certificate and no access file;"),
        (True, False, "there is no access file;"),
        (False, True, "there is no TLS certificate;"),
    ],
)
def test_other_hosts_need_both_protections(host: str, tls: bool, access: bool, missing: str) -> None:
    with pytest.raises(InvalidConfiguration) as refusal:
        require_safe_listening(host, tls=tls, access=access, insecure=False)
    assert missing in str(refusal.value)
    assert "--insecure" in str(refusal.value)
    require_safe_listening(host, tls=True, access=True, insecure=False)
    require_safe_listening(host, tls=tls, access=access, insecure=True)


@pytest.mark.parametrize("addresses", [["192.0.2.1"], ["127.0.0.1", "192.0.2.1"], ["::1", "2001:db8::1"]])
def test_name_is_judged_by_every_address_that_it_resolves_to(
    monkeypatch: pytest.MonkeyPatch, addresses: list[str]
) -> None:
    def resolve(name: str, port: int, **options: object) -> list[object]:
        assert (name, port, "type" in options) == ("localhost", 0, True)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with pytest.raises(InvalidConfiguration):
        require_safe_listening("localhost", tls=False, access=False, insecure=False)


@pytest.mark.parametrize("host", ["a..b", "no\0host"])
def test_host_that_cannot_be_resolved_is_refused(host: str) -> None:
    with pytest.raises(InvalidConfiguration, match="name an address"):
        require_safe_listening(host, tls=False, access=False, insecure=False)


# Certificates, and the names in them


def shake_hands(certificates: Certificates, client: Certificate) -> str:
    """Connect by mutual TLS without a network; the name that the server reads from the certificate."""
    for_server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=certificates.root_path)
    for_server.verify_mode = ssl.CERT_REQUIRED
    for_server.load_cert_chain(certificates.server.certificate_path, certificates.server.key_path)
    for_client = ssl.create_default_context(cafile=certificates.root_path)
    for_client.load_cert_chain(client.certificate_path, client.key_path)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server_end = for_server.wrap_bio(to_server, to_client, server_side=True)
    client_end = for_client.wrap_bio(to_client, to_server, server_hostname="localhost")
    waiting = [client_end, server_end]
    for _ in range(10):
        for end in list(waiting):
            try:
                end.do_handshake()
                waiting.remove(end)
            except ssl.SSLWantReadError:
                continue
    assert not waiting
    peer = server_end.getpeercert()
    assert peer is not None
    ((kind, name),) = cast("tuple[tuple[str, str], ...]", peer["subjectAltName"])
    assert kind == "DNS"
    return name


def test_name_in_a_certificate_leads_to_its_entry(
    certificates: Certificates, path: Path, time: SimulatedTime
) -> None:
    path.write_text('[[access]]\nname = "ingest"\ncertificate = "ingest.example"\nrole = "write"\n')
    file = AccessFile(path, time)
    name = shake_hands(certificates, certificates.client("ingest.example"))
    assert file.authenticate(None, name) == Caller("ingest", Role.WRITE)
    stranger = shake_hands(certificates, certificates.client("stranger.example"))
    with pytest.raises(NotAuthenticated, match="stranger"):
        file.authenticate(None, stranger)


def test_expired_and_foreign_certificates_are_refused_before_anybody_asks_for_a_name(
    certificates: Certificates,
) -> None:
    with pytest.raises(ssl.SSLCertVerificationError, match="expired"):
        shake_hands(certificates, certificates.expired_client("ingest.example"))
    with pytest.raises(ssl.SSLCertVerificationError, match="issuer"):
        shake_hands(certificates, certificates.foreign_client("ingest.example"))
