"""token: shown once, never stored, and good for the access file as it is printed."""

import os
from pathlib import Path

import pytest
from tests.cli.support import run

from floodmark.model.access import Role
from floodmark.server import AccessFile, hash_token


def authenticate(tmp_path: Path, entry: str, token: str) -> tuple[str, Role, frozenset[str] | None]:
    file = tmp_path / "access.toml"
    file.write_text(entry, "utf-8")
    caller = AccessFile(file).authenticate(token, None)
    return caller.name, caller.role, caller.namespaces


def test_the_printed_entry_lets_the_printed_token_in(tmp_path: Path) -> None:
    outcome = run("token", "--name", "indexer", "--role", "write", "--namespace", "a", "--namespace", "b")
    token, empty, *entry = outcome.lines
    assert (outcome.code, empty) == (0, "")
    assert token not in "\n".join(entry)
    known = authenticate(tmp_path, "\n".join(entry), token)
    assert known == ("indexer", Role.WRITE, frozenset({"a", "b"}))
    assert "not shown again" in outcome.errors


def test_without_options_it_may_read_everything(tmp_path: Path) -> None:
    made = run("token", "--json").json
    assert made["token_sha256"] == hash_token(made["token"])
    assert authenticate(tmp_path, made["entry"], made["token"]) == ("unnamed", Role.READ, None)


def test_no_two_tokens_are_the_same() -> None:
    assert run("token").lines[0] != run("token").lines[0]


@pytest.mark.parametrize("name", ['quo"ted', "back\\slash", "blåbær 名前", "# comment", "😀"])
def test_odd_names_stay_what_they_are(tmp_path: Path, name: str) -> None:
    made = run("token", "--name", name, "--namespace", name, "--json").json
    assert authenticate(tmp_path, made["entry"], made["token"]) == (name, Role.READ, frozenset({name}))


def test_a_token_in_a_file_is_for_its_owner_only_and_not_printed(tmp_path: Path) -> None:
    file = tmp_path / "ada.token"
    before = os.umask(0)
    try:
        outcome = run("token", "--name", "ada", "--role", "admin", "--output", file)
    finally:
        os.umask(before)
    token = file.read_text("ascii").strip()
    assert token not in outcome.text + outcome.errors
    assert outcome.lines[0] == "[[access]]"
    assert file.stat().st_mode & 0o777 == 0o600
    assert authenticate(tmp_path, outcome.text, token) == ("ada", Role.ADMIN, None)


def test_a_file_that_is_there_is_not_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "ada.token"
    file.write_text("precious", "ascii")
    outcome = run("token", "--output", file)
    assert (outcome.code, outcome.output) == (64, b"")
    assert file.read_text("ascii") == "precious"
