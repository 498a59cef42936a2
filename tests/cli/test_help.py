"""The help: every command teaches with an example, and every example can be typed."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from tests.cli.support import run
from typer.core import TyperGroup
from typer.main import get_command

from floodmark.cli.main import COMMANDS as PLACES
from floodmark.cli.main import app, main


def find_commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words of every command that does something."""
    if not isinstance(command, TyperGroup):
        yield path
        return
    context: Any = None
    for name in command.list_commands(context):
        yield from find_commands(command.get_command(context, name), (*path, name))


COMMANDS = sorted(find_commands(get_command(app)))


def parse(words: list[str]) -> str:
    """Parse a command line without running it; the name of its command."""
    command: Any = get_command(app)
    context = command.make_context("floodmark", words, obj=None)
    while isinstance(command, TyperGroup):
        rest = [*context._protected_args, *context.args]
        name, command, rest = command.resolve_command(context, rest)
        context = command.make_context(name, rest, parent=context)
    return " ".join(context.command_path.split()[1:])


def test_all_commands_are_there() -> None:
    assert {" ".join(path) for path in COMMANDS} == {
        "add",
        "backup",
        "changes",
        "console",
        "delete",
        "demo",
        "doctor",
        "export",
        "feed create",
        "feed list",
        "feed pause",
        "feed rebalance",
        "feed remove",
        "feed resume",
        "feed run",
        "feed show",
        "feed statistics",
        "feed update",
        "gc",
        "generation drop",
        "generation list",
        "generation rollback",
        "generation show",
        "get",
        "init",
        "namespace create",
        "namespace drop",
        "namespace list",
        "namespace rewrite",
        "namespace show",
        "namespace sweep",
        "namespace update",
        "node drain",
        "node list",
        "node remove",
        "partition heat",
        "partition list",
        "partition merge",
        "partition move",
        "partition rebalance",
        "partition split",
        "publish",
        "put",
        "replicate",
        "restore",
        "safepoint hold",
        "safepoint list",
        "safepoint release",
        "scan",
        "serve",
        "status",
        "subscription list",
        "subscription remove",
        "subscription seek",
        "subscription show",
        "token",
        "topology remove",
        "topology set",
        "topology show",
        "txn abort",
        "txn batch-log",
        "txn list",
        "txn log list",
        "txn log show",
        "txn show",
        "update",
        "verify",
        "version",
    }


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_help_of_every_command_has_examples_that_can_be_typed(path: tuple[str, ...]) -> None:
    outcome = run(*path, "--help")
    assert (outcome.code, outcome.errors) == (0, "")
    assert "--json" in outcome.text
    examples = re.findall(r"^ +floodmark (.*)$", outcome.text, re.MULTILINE)
    assert re.search(r"^  Examples?:$", outcome.text, re.MULTILINE)
    assert examples
    for example in examples:
        words = shlex.split(re.sub(r"[<>]+ \S+$", "", example))
        assert parse(words) == " ".join(path)


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_first_line_of_help_is_short_enough_for_the_list(path: tuple[str, ...]) -> None:
    overview = run(*path[:-1], "--help").text
    (line,) = re.findall(rf"^  {path[-1]} .*$", overview, re.MULTILINE)
    assert not line.endswith("...")


@pytest.mark.parametrize("name", PLACES)
def test_line_in_the_overview_is_what_the_command_says_of_itself(name: str) -> None:
    command: Any = get_command(app)
    assert command.get_command(None, name).get_short_help_str(limit=200) == PLACES[name][1]


def test_overview_imports_no_command() -> None:
    script = (
        "import sys; from floodmark.cli import main; main(['--help']); "
        "sys.exit(any(name.startswith(('floodmark.cli.commands', 'floodmark.site')) for name in sys.modules))"
    )
    subprocess.run([sys.executable, "-c", script], stdout=subprocess.DEVNULL, check=True)


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_overview_explains_the_rules(arguments: list[str]) -> None:
    outcome = run(*arguments)
    assert outcome.code == 0
    for words in (
        "Example",
        "0x00ff",
        "24h",
        "--json",
        "Exit codes",
        "69 unreachable",
        "FLOODMARK_DEBUG",
        "grpc+tls://",
    ):
        assert words in outcome.text


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_help_shows_names_of_arguments_and_no_types(path: tuple[str, ...]) -> None:
    text = run(*path, "--help").text
    usage, arguments = text.splitlines()[0], text.partition("Arguments:")[2].partition("Options:")[0]
    assert not re.search("[{}<>]", usage + arguments), text


def test_help_is_a_command_too() -> None:
    assert run("help").text == run("--help").text
    assert run("help", "feed", "run").text == run("feed", "run", "--help").text


def complete(line: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What the shell offers behind a line."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("_FLOODMARK_COMPLETE", "complete_zsh")
        patch.setenv("_TYPER_COMPLETE_ARGS", line)
        with pytest.raises(SystemExit):
            main([])
    return re.findall(r'"([^":]+)', capsys.readouterr().out)


def test_the_shell_completes_commands_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert {"namespace", "node"} == set(complete("floodmark n", capsys)) & set(PLACES)
    assert "--since" in complete("floodmark changes --si", capsys)
    assert "create" in complete("floodmark namespace cr", capsys)
    assert "--version" in complete("floodmark --ver", capsys)


def test_the_installed_command_offers_the_names_of_commands_without_importing_them() -> None:
    script = (
        "import sys; from floodmark.cli import main\n"
        "try: main([])\n"
        "finally: print([name for name in sys.modules if name.startswith('floodmark.cli.commands')])"
    )
    environment = {"_FLOODMARK_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": "floodmark "}
    finished = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env=os.environ | environment,
        check=False,
    )
    *offered, imported = finished.stdout.splitlines()
    assert set(re.findall(r'"([a-z]+)":', " ".join(offered))) == PLACES.keys()
    assert imported == "[]"


@pytest.mark.parametrize("path", ["get", "scan", "changes"])
def test_help_explains_how_bytes_are_written_in_json(path: str) -> None:
    text = " ".join(run(path, "--help").text.split())
    assert "`key_base64`" in text
    assert "Versions are strings" in text
