"""namespace create, list, show, update and drop."""

import os
import pty
import subprocess
from pathlib import Path

import pytest
from tests.cli.support import FLOODMARK, PROCESS_SECONDS_MAX, run

DAY = 86_400.0


def test_create_shows_the_settings(directory: Path) -> None:
    outcome = run("namespace", "create", directory, "sessions", "--ttl", "30m", "--retention", "7d")
    assert outcome.code == 0
    assert [line.split(maxsplit=1) for line in outcome.lines[:5]] == [
        ["name", "sessions"],
        ["id", "2"],
        ["merge", "last_write"],
        ["ttl", "30m"],
        ["retention", "7d"],
    ]


def test_settings_as_json_are_numbers_of_seconds(directory: Path) -> None:
    created = run("namespace", "create", directory, "sessions", "--ttl", "90s", "--json").json
    assert created == run("namespace", "show", directory, "sessions", "--json").json
    assert (created["ttl_seconds"], created["retention_seconds"]) == (90.0, DAY)
    assert (created["oldest_version"], created["collected_horizon"]) == ("0", "0")


def test_a_namespace_that_is_there_is_a_finding_unless_that_is_fine(directory: Path) -> None:
    outcome = run("namespace", "create", directory, "users")
    assert outcome.code == 1
    assert outcome.errors.startswith("error: namespace 'users' is already there\n")
    assert run("namespace", "create", directory, "users", "--if-missing").code == 0


def test_an_unknown_merge_policy_is_a_usage_error_that_names_the_known(directory: Path) -> None:
    outcome = run("namespace", "create", directory, "counts", "--merge", "hope")
    assert outcome.code == 64
    assert "last_write" in outcome.errors
    assert [row["name"] for row in run("namespace", "list", directory, "--json").json_lines] == ["users"]


def test_list_has_a_line_a_namespace(directory: Path) -> None:
    run("namespace", "create", directory, "sessions", "--ttl", "30m")
    header, *rows = (line.split() for line in run("namespace", "list", directory).lines)
    assert header[:5] == ["name", "id", "merge", "ttl", "retention"]
    assert [row[:5] for row in rows] == [
        ["sessions", "2", "last_write", "30m", "1d"],
        ["users", "1", "last_write", "none", "1d"],
    ]


def test_list_of_nothing_is_a_header_or_no_line(tmp_path: Path) -> None:
    run("init", tmp_path / "oslo")
    assert run("namespace", "list", tmp_path / "oslo").text.startswith("name  id")
    assert run("namespace", "list", tmp_path / "oslo", "--json").output == b""


def test_update_changes_what_is_named_and_nothing_else(directory: Path) -> None:
    def settings(*options: str) -> tuple[float | None, float]:
        shown = run("namespace", "update", directory, "users", *options, "--json").json
        return shown["ttl_seconds"], shown["retention_seconds"]

    assert settings("--ttl", "1h") == (3600.0, DAY)
    assert settings("--retention", "2d") == (3600.0, 2 * DAY)
    assert settings("--no-ttl") == (None, 2 * DAY)
    assert settings("--ttl", "5s", "--retention", "0s") == (5.0, 0.0)


def test_update_of_nothing_or_of_both_is_a_usage_error(directory: Path) -> None:
    assert run("namespace", "update", directory, "users").code == 64
    assert run("namespace", "update", directory, "users", "--ttl", "1h", "--no-ttl").code == 64


def test_drop_needs_a_yes_where_nobody_can_be_asked(directory: Path) -> None:
    outcome = run("namespace", "drop", directory, "users")
    assert (outcome.code, outcome.output) == (64, b"")
    assert "--yes" in outcome.errors
    assert run("get", directory, "users", "ada").code == 0
    assert run("namespace", "drop", directory, "users", "--yes", "--json").json == {
        "name": "users",
        "dropped": True,
    }
    assert run("get", directory, "users", "ada").code == 1


def answer(directory: Path, typed: bytes) -> int:
    """Drop the namespace on a terminal, where someone types."""
    master, slave = pty.openpty()
    try:
        os.write(master, typed)
        finished = subprocess.run(
            [FLOODMARK, "namespace", "drop", directory, "users"],
            stdin=slave,
            capture_output=True,
            timeout=PROCESS_SECONDS_MAX,
            check=False,
        )
    finally:
        os.close(master)
        os.close(slave)
    assert b"Drop 'users' with all its keys?" in finished.stderr
    return finished.returncode


@pytest.mark.slow
def test_drop_asks_on_a_terminal(directory: Path) -> None:
    assert answer(directory, b"n\n") == 1
    assert run("namespace", "list", directory, "--json").json["name"] == "users"
    assert answer(directory, b"y\n") == 0
    assert run("namespace", "list", directory, "--json").output == b""


def test_what_is_not_there_is_a_finding(directory: Path) -> None:
    for arguments in (["show"], ["update", "--no-ttl"], ["drop", "--yes"]):
        outcome = run("namespace", arguments[0], directory, "nobody", *arguments[1:])
        assert outcome.code == 1
        assert outcome.errors.startswith("error: no namespace 'nobody'\n  try: floodmark namespace list")
