"""Commands on a URL: the same as on a directory, with tokens and TLS, and clear when it does not work."""

import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.cli.conftest import make_site
from tests.cli.support import PROCESS_SECONDS_MAX, Server, run, run_process, running, serving
from tests.cli.test_serving import free_port
from tests.server.certificates import Certificates

# One after the other they change the same site in the same way, wherever it is.
COMMANDS = [
    ["get", "SITE", "users", "ada"],
    ["get", "SITE", "users", "nobody"],
    ["get", "SITE", "bottles", "x"],
    ["scan", "SITE", "users", "--json"],
    ["scan", "SITE", "users", "--prefix", "a", "--reverse", "--limit", "1"],
    ["delete", "SITE", "users", "alan"],
    ["put", "SITE", "users", "0x00ff", "0x01", "--ttl", "1h"],
    ["scan", "SITE", "users"],
    ["changes", "SITE"],
    ["changes", "SITE", "--namespace", "users", "--before-images", "--prefix", "a"],
    ["changes", "SITE", "--since", "now"],
    ["changes", "SITE", "--prefix", "a"],
    ["namespace", "create", "SITE", "orders", "--ttl", "30m", "--json"],
    ["namespace", "create", "SITE", "orders"],
    ["namespace", "list", "SITE"],
    ["namespace", "update", "SITE", "orders", "--retention", "0s", "--json"],
    ["partition", "split", "SITE", "users", "b", "--json"],
    ["partition", "list", "SITE", "--json"],
    ["partition", "merge", "SITE", "1", "2"],
    ["safepoint", "hold", "SITE", "audit"],
    ["safepoint", "list", "SITE"],
    ["safepoint", "release", "SITE", "audit"],
    ["safepoint", "release", "SITE", "audit"],
    ["feed", "create", "SITE", "lake", "users", "--sink", "blackhole:"],
    ["feed", "run", "SITE", "lake", "--once"],
    ["feed", "pause", "SITE", "lake"],
    ["feed", "remove", "SITE", "lake"],
    ["gc", "SITE", "--json"],
    ["namespace", "drop", "SITE", "orders", "--yes"],
    ["get", "SITE", "users", "ada", "--at", "9"],
    ["get", "SITE", "users", ""],
]


def test_every_command_does_the_same_on_a_url(tmp_path: Path) -> None:
    directory = make_site(tmp_path / "here" / "oslo")
    with serving(make_site(tmp_path / "there" / "oslo")) as server:
        for command in COMMANDS:
            here, there = (
                run(*[place if word == "SITE" else word for word in command])
                for place in (str(directory), server.url)
            )
            assert there.code == here.code, (command, there.errors)
            assert shape(there.text) == shape(here.text), command
            assert shape(there.errors) == shape(here.errors), command


def shape(text: str) -> str:
    """A text without what differs from run to run: versions, moments, lags, and heartbeats that came."""
    return (
        "\n".join(
            " ".join("N" if any(map(str.isdigit, word)) else word for word in line.replace("\t", " ").split())
            for line in text.splitlines()
            if not line.startswith("checked ")
        )
        .replace("N ms", "N")
        .replace("N s", "N")
    )


def test_raw_values_come_back_as_they_are(server: Server) -> None:
    content = bytes(range(256)) * 100
    assert run("put", server.url, "users", "portrait", "-", stdin=content).code == 0
    assert run("get", server.url, "users", "portrait", "--raw").output == content
    run("delete", server.url, "users", "portrait")


@pytest.mark.slow
def test_following_a_server_leaves_it_to_others(server: Server) -> None:
    with running("changes", server.url, "--since", "now", "--follow", "--resolved") as process:
        assert process.stdout is not None
        # A first marker says that it is there.
        assert b"resolved" in process.stdout.readline()
        assert run("put", server.url, "users", "edsger", "professor").code == 0
        while b"edsger" not in process.stdout.readline():
            pass
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=PROCESS_SECONDS_MAX)
    assert (process.returncode, errors) == (130, b"")


def test_nobody_there_is_unreachable_and_says_what_to_check() -> None:
    url = f"grpc://127.0.0.1:{free_port()}"
    for command in (["get", url, "users", "ada"], ["status", url], ["doctor", url]):
        outcome = run(*command)
        assert (outcome.code, outcome.output) == (69, b"")
        assert outcome.errors.startswith(f"error: no answer from {url}")
        assert "floodmark serve" in outcome.errors


@pytest.mark.slow
def test_something_else_there_is_unreachable(directory: Path) -> None:
    with serving(directory, "--metrics", "127.0.0.1:0") as server:
        outcome = run("--timeout", "2s", "get", f"grpc://{server.ready['metrics']}", "users", "ada")
    assert outcome.code == 69
    assert outcome.errors.startswith("error: ")


# Tokens


@dataclass(frozen=True)
class Guarded:
    """A server with an access file, and the files of some tokens."""

    server: Server
    tokens: Path

    def run(self, token: str, *arguments: str) -> tuple[int, str, str]:
        outcome = run("--token-file", self.tokens / token, *arguments)
        return outcome.code, outcome.text, outcome.errors


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    place = tmp_path_factory.mktemp("guarded")
    entries = [
        run("token", "--name", name, "--role", role, *options, "--output", place / name).text
        for name, role, options in (
            ("reader", "read", ["--namespace", "users"]),
            ("writer", "write", ["--namespace", "users"]),
            ("admin", "admin", []),
        )
    ]
    run("token", "--output", place / "stranger")
    (place / "access.toml").write_text("\n".join(entries), "utf-8")
    with serving(make_site(place / "oslo"), "--access", place / "access.toml") as server:
        yield Guarded(server, place)


def test_roles_open_what_they_should(guarded: Guarded) -> None:
    url = guarded.server.url
    assert guarded.run("reader", "get", url, "users", "ada")[:2] == (0, "countess\n")
    assert guarded.run("writer", "put", url, "users", "bob", "builder")[0] == 0
    assert guarded.run("admin", "namespace", "create", url, "orders")[0] == 0
    assert guarded.run("reader", "changes", url, "--namespace", "users")[0] == 0


@pytest.mark.parametrize(
    ("token", "command"),
    [
        ("reader", ["put", "URL", "users", "ada", "x"]),
        ("reader", ["get", "URL", "secrets", "ada"]),
        ("reader", ["changes", "URL"]),
        ("reader", ["status", "URL"]),
        ("writer", ["namespace", "create", "URL", "mine"]),
        ("writer", ["gc", "URL"]),
        ("writer", ["doctor", "URL"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_what_a_role_does_not_allow_is_not_allowed(guarded: Guarded, token: str, command: list[str]) -> None:
    guarded.run("admin", "namespace", "create", guarded.server.url, "secrets", "--if-missing")
    words = [guarded.server.url if word == "URL" else word for word in command]
    code, output, errors = guarded.run(token, *words)
    assert (code, output) == (77, "")
    assert errors.startswith(f"error: '{token}' has role ")


def test_no_token_and_a_wrong_token_are_not_allowed(guarded: Guarded) -> None:
    nobody = run("get", guarded.server.url, "users", "ada")
    assert (nobody.code, nobody.output) == (77, b"")
    assert "try: floodmark --token-file FILE" in nobody.errors
    assert guarded.run("stranger", "get", guarded.server.url, "users", "ada")[0] == 77


@pytest.mark.slow
def test_the_environment_names_the_file_too(guarded: Guarded) -> None:
    command = ["get", guarded.server.url, "users", "ada"]
    allowed = run_process(*command, FLOODMARK_TOKEN_FILE=str(guarded.tokens / "reader"))
    assert (allowed.code, allowed.text) == (0, "countess\n")
    assert run_process(*command, FLOODMARK_TOKEN_FILE=str(guarded.tokens / "stranger")).code == 77


def test_tokens_are_never_shown_and_administration_is_logged_by_name(guarded: Guarded) -> None:
    guarded.run("admin", "namespace", "create", guarded.server.url, "audited")
    log = guarded.server.log_path.read_text("utf-8")
    for name in ("reader", "writer", "admin", "stranger"):
        assert (guarded.tokens / name).read_text("ascii").strip() not in log
    assert any(
        line.get("caller") == "admin" and line.get("action") == "administration.create_namespace"
        for line in guarded.server.log
    )


# TLS


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.mark.slow
def test_tls_needs_the_root_that_vouches_for_the_server(directory: Path, certificates: Certificates) -> None:
    own = certificates.server
    options = ["--tls-certificate", str(own.certificate_path), "--tls-key", str(own.key_path)]
    with serving(directory, *options) as server:
        command = ["get", server.url, "users", "ada"]
        assert server.url.startswith("grpc+tls://")
        assert run("--tls-root", certificates.root_path, *command).text == "countess\n"
        stranger = run("--timeout", "5s", *command)
        assert stranger.code == 69
        assert "--tls-root" in stranger.errors
        plain = run("--timeout", "5s", "get", server.url.replace("+tls", ""), "users", "ada")
        assert plain.code == 69


@pytest.mark.slow
def test_a_client_certificate_is_a_credential(
    directory: Path, certificates: Certificates, tmp_path: Path
) -> None:
    own, client = certificates.server, certificates.client("ingest.example")
    access = tmp_path / "access.toml"
    access.write_text(
        '[[access]]\nname = "ingest"\nrole = "write"\ncertificate = "ingest.example"\n', "utf-8"
    )
    options = ["--tls-certificate", str(own.certificate_path), "--tls-key", str(own.key_path)]
    with serving(
        directory, *options, "--tls-client-root", certificates.root_path, "--access", access
    ) as server:
        command = ["put", server.url, "users", "ada", "programmer"]
        shown = ["--tls-certificate", str(client.certificate_path), "--tls-key", str(client.key_path)]
        assert run("--tls-root", certificates.root_path, *shown, *command).code == 0
        assert run("--tls-root", certificates.root_path, "--timeout", "5s", *command).code == 69
