"""The installed command as a process: pipes, signals, terminals and full disks."""

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.support import FLOODMARK, PROCESS_SECONDS_MAX, on_terminal, run, run_process, running
from tests.sizes import only

import floodmark

ROWS = 5_000


@pytest.fixture
def large(directory: Path) -> Path:
    """A site with more rows than a pipe holds."""
    with floodmark.open(directory, background=False) as site:
        site.namespace("users").put_many({f"row-{n:05}".encode(): bytes(50) for n in range(ROWS)})
    return directory


@pytest.mark.slow
def test_the_installed_command_does_what_the_function_does(directory: Path) -> None:
    assert run_process("get", directory, "users", "ada") == run("get", directory, "users", "ada")
    assert run_process("get", directory, "users", "bob") == run("get", directory, "users", "bob")
    assert run_process("get", directory, "bottles", "x") == run("get", directory, "bottles", "x")


@pytest.mark.parametrize(
    "arguments",
    only([["scan", "users"]], [["scan", "users"], ["scan", "users", "--json"], ["changes"]]),
    ids=" ".join,
)
def test_a_reader_that_leaves_ends_the_command_quietly(arguments: list[str], large: Path) -> None:
    with running(arguments[0], large, *arguments[1:]) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline()
        process.stdout.close()
        errors = process.stderr.read()
        assert (process.wait(PROCESS_SECONDS_MAX), errors) == (0, b"")
    assert run("status", large).code == 0


def test_following_prints_as_it_goes_and_ends_quietly_with_ctrl_c(directory: Path) -> None:
    with running("changes", directory, "--follow") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        seen = [process.stdout.readline().split(b"\t")[4] for _ in range(3)]
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=PROCESS_SECONDS_MAX)
    assert seen == [b"ada", b"alan", b"grace"]
    assert (process.returncode, output, errors) == (130, b"", b"")
    assert run("status", directory).code == 0


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_output_that_cannot_be_written_is_an_error(large: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        finished = subprocess.run(
            [FLOODMARK, "scan", large, "users"],
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=PROCESS_SECONDS_MAX,
            check=False,
        )
    assert finished.returncode == 69
    assert finished.stderr.startswith(b"error: ")
    assert finished.stderr.count(b"\n") == 1


@pytest.mark.slow
def test_streams_that_the_shell_closed_do_no_harm(directory: Path) -> None:
    command = f"{shlex.quote(FLOODMARK)} get {shlex.quote(str(directory))} users ada >&- 2>&-"
    assert subprocess.run(["bash", "-c", command], check=False).returncode == 0


@pytest.mark.slow
def test_colours_are_for_terminals_only(directory: Path) -> None:
    assert "\x1b[" in on_terminal("scan", directory, "users")
    assert "\x1b[" not in run_process("scan", directory, "users", TERM="xterm-256color").text
    assert "\x1b[" not in on_terminal("scan", directory, "users", "--json")
    piped = run_process("subscription", "list", directory).text
    assert on_terminal("subscription", "list", directory, kind="dumb").replace("\r\n", "\n") == piped


def test_a_value_cannot_reach_the_terminal_as_an_escape_sequence(directory: Path) -> None:
    run("put", directory, "users", "ada", "-", stdin=b"\x1b]0;evil\x07")
    assert on_terminal("get", directory, "users", "ada").strip() == "0x1b5d303b6576696c07"


@pytest.mark.slow
def test_keys_that_are_not_utf8_can_be_typed_in_a_shell(directory: Path) -> None:
    command = [FLOODMARK.encode(), b"put", os.fsencode(directory), b"users", b"caf\xe9", b"open"]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    assert run("get", directory, "users", "0x636166e9").text == "open\n"


def test_a_site_is_whole_after_the_command_was_killed(directory: Path) -> None:
    with running("changes", directory, "--follow") as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.kill()
    assert len(run("scan", directory, "users").lines) == 3


def test_a_command_does_not_load_what_only_others_need(shared: Path) -> None:
    script = (
        "import sys; from floodmark.cli import main; code = main(sys.argv[1:]); "
        "print(*[name for name in sys.modules if name.startswith('floodmark.') or '.' not in name]); "
        "sys.exit(code)"
    )
    loaded = {}
    for words in (["get", str(shared), "users", "ada"], ["--version"]):
        finished = subprocess.run(
            [sys.executable, "-c", script, *words], capture_output=True, text=True, check=True
        )
        loaded[words[0]] = set(finished.stdout.splitlines()[-1].split())
    assert "floodmark.site" in loaded["get"]
    assert not {"floodmark.server", "floodmark.wire", "floodmark.spark", "prometheus_client"} & loaded["get"]
    assert not {"floodmark.cli.main", "floodmark.model", "typer", "rich", "msgspec"} & loaded["--version"]
