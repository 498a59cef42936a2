"""serve: ready, useful, and gone without a trace when a signal says so."""

import signal
import socket
import ssl
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

import pytest
from tests.cli.support import PROCESS_SECONDS_MAX, Server, run, run_process, running, serving
from tests.server.certificates import make_certificates
from tests.sizes import only

from floodmark.model.format import FORMAT

SIGNALS = [signal.SIGTERM, signal.SIGINT]

# Says what it does, and goes on for ever after it was asked to stop.
STUBBORN = """
import os
from threading import Event
from floodmark.cli.signals import on_stop_signal
# Not by print, which the signal may have interrupted.
with on_stop_signal(lambda: os.write(1, b"asked\\n")):
    print("ready", flush=True)
    while True:
        Event().wait()
"""

# Is interrupted where it is about to wait for just that.
CAUGHT_WAITING = """
import signal
from threading import Event
from floodmark.cli.signals import on_stop_signal
stop = Event()
with on_stop_signal(stop.set):
    with stop._cond:
        signal.raise_signal(signal.SIGINT)
    assert stop.wait(60)
"""


def test_the_ready_line_says_where_it_is(directory: Path) -> None:
    with serving(directory, "--metrics", "127.0.0.1:0") as server:
        ready = server.ready
        assert (ready["site"], ready["site_id"]) == ("oslo", 88)
        assert ready["url"] == f"grpc://{ready['address']}"
        with urlopen(f"http://{ready['metrics']}/readyz", timeout=PROCESS_SECONDS_MAX) as page:
            assert page.read() == b"ok\n"
        with urlopen(f"http://{ready['metrics']}/metrics", timeout=PROCESS_SECONDS_MAX) as page:
            told = f'floodmark_site_info{{format="{FORMAT}",site="oslo"'
            assert told in page.read().decode()


@pytest.mark.slow
def test_the_ready_line_for_people(directory: Path) -> None:
    with running("serve", directory, "--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0") as process:
        assert process.stdout is not None
        line = process.stdout.readline().decode()
        process.terminate()
        output, _ = process.communicate(timeout=PROCESS_SECONDS_MAX)
    assert line.startswith("serving site oslo on grpc://127.0.0.1:")
    assert ", metrics on http://127.0.0.1:" in line
    assert (process.returncode, output) == (0, b"")


@pytest.mark.parametrize("number", only([signal.SIGTERM], SIGNALS))
def test_a_signal_ends_it_cleanly(directory: Path, number: signal.Signals) -> None:
    with serving(directory) as server:
        put = run("put", server.url, "users", "edsger", "professor")
        assert put.code == 0
        assert server.stop(number) == 0
        messages = [line["message"] for line in server.log]
    assert messages[0] == f"serving site oslo on {server.url}"
    assert messages[-2:] == ["stopping, as a signal has asked", "stopped"]
    assert {line["site"] for line in server.log} == {"oslo"}
    assert run("get", directory, "users", "edsger", "--json").json["version"] == put.text.strip()
    assert run("doctor", directory).code == 0


@pytest.mark.slow
def test_an_open_follower_does_not_keep_the_server_from_stopping(directory: Path) -> None:
    with (
        serving(directory) as server,
        running("--timeout", "2s", "changes", server.url, "--follow") as follower,
    ):
        assert follower.stdout is not None
        for _ in range(3):
            assert follower.stdout.readline()
        assert server.stop() == 0
        follower.send_signal(signal.SIGINT)
        follower.wait(PROCESS_SECONDS_MAX)


@pytest.mark.parametrize("number", only([signal.SIGTERM], SIGNALS))
def test_a_second_signal_ends_at_once(number: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(number)
        assert process.stdout.readline() == b"asked\n"
        process.send_signal(number)
        assert process.wait(PROCESS_SECONDS_MAX) == -number


@pytest.mark.slow
def test_after_kill_9_every_acknowledged_write_is_there(directory: Path) -> None:
    with serving(directory) as server:
        put = run("put", server.url, "users", "edsger", "professor").text.strip()
        server.process.kill()
        server.process.wait(PROCESS_SECONDS_MAX)
        assert run("get", server.url, "users", "edsger").code == 69
    assert run("get", directory, "users", "edsger", "--json").json["version"] == put
    assert run("doctor", directory).code == 0


@pytest.mark.slow
def test_a_site_is_made_only_if_it_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "data" / "bergen"
    refused = run_process("serve", missing)
    assert (refused.code, refused.output) == (66, b"")
    assert "there is no site in" in refused.errors
    assert not missing.exists()
    made = tmp_path / "made"
    with serving(made, "--site", "oslo") as server:
        assert run("namespace", "create", server.url, "users").code == 0
    assert run("status", made, "--json").json["site"] == "oslo"


def test_a_directory_that_is_served_cannot_be_opened_and_says_why(server: Server) -> None:
    directory = server.log_path.with_suffix("")
    outcome = run("get", directory, "users", "ada")
    assert outcome.code == 69
    assert f"process {server.process.pid} " in outcome.errors
    assert "use its URL in the directory's place" in outcome.errors


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
        return port


def test_a_port_that_is_taken_is_unreachable(directory: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        outcome = run_process("serve", directory, "--listen", f"127.0.0.1:{taken.getsockname()[1]}")
    assert outcome.code == 69
    assert "cannot listen on 127.0.0.1:" in outcome.errors
    assert run("status", directory).code == 0, "the site was let go"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--listen", "nowhere"], "looks like 127.0.0.1:7100"),
        (["--listen", "0.0.0.0:0"], "can be reached from other machines"),
        (["--listen", "127.0.0.1:0", "--log-level", "loud"], "is no level of logs"),
        (["--listen", "127.0.0.1:0", "--durability", "hope"], "'fsync' or 'async'"),
        (["--listen", "127.0.0.1:0", "--tls-key", "key.pem"], "belong together"),
        (["--listen", "127.0.0.1:0", "--tls-client-root", "ca.pem"], "need TLS"),
        (["--listen", "127.0.0.1:0", "--access", "none.toml"], "cannot read the access file"),
        (["--listen", "127.0.0.1:0", "--metrics", "here"], "looks like 127.0.0.1:7100"),
        (["--log-retention", "long"], "is not a duration"),
        (["--site", "bergen"], "is site 'oslo'"),
        (["--node", "1"], "one process serves the site of a directory"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_options_that_cannot_be_right_are_refused_and_the_site_is_let_go(
    options: list[str], words: str, directory: Path
) -> None:
    outcome = run("serve", directory, *options)
    assert (outcome.code, outcome.output) == (64, b"")
    assert words in outcome.errors
    assert run("status", directory).code == 0


def test_signal_that_comes_where_the_event_is_locked_is_heard_all_the_same() -> None:
    command = [sys.executable, "-c", CAUGHT_WAITING]
    assert subprocess.run(command, timeout=PROCESS_SECONDS_MAX, check=True).returncode == 0


def ping(address: str, context: ssl.SSLContext | None = None) -> bytes:
    """The answer to a PING over RESP, with TLS if there is a context; none if the connection fails."""
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)), PROCESS_SECONDS_MAX)
    try:
        if context is not None:
            connection = context.wrap_socket(connection, server_hostname="localhost")
        connection.sendall(b"*1\r\n$4\r\nPING\r\n")
        return connection.recv(100)
    except (ssl.SSLError, ConnectionError):
        return b""
    finally:
        connection.close()


@pytest.mark.slow
@pytest.mark.parametrize("relay", ["--relay", "--no-relay"])
def test_logs_stay_json_where_tls_fails(directory: Path, tmp_path: Path, relay: str) -> None:
    made = make_certificates(tmp_path / "certificates")
    own, eve, ada = made.server, made.expired_client("eve"), made.client("ada")
    distrustful = ssl.create_default_context(cafile=made.foreign_root_path)
    expired, known = (ssl.create_default_context(cafile=made.root_path) for _ in range(2))
    expired.load_cert_chain(eve.certificate_path, eve.key_path)
    known.load_cert_chain(ada.certificate_path, ada.key_path)
    tls = ("--tls-certificate", own.certificate_path, "--tls-key", own.key_path)
    with serving(directory, *tls, "--tls-client-root", made.root_path, relay) as server:
        for address in (server.ready["address"], server.ready["resp"]):
            assert [ping(address, each) for each in (None, distrustful, expired)] == [b""] * 3
        assert ping(server.ready["resp"], known) == b"+PONG\r\n"
        server.process.terminate()
        server.process.wait(PROCESS_SECONDS_MAX)
        messages = [line["message"] for line in server.log]
    assert messages[-1] == "stopped"
    assert any("TLS failed" in message for message in messages) == (relay == "--relay")
