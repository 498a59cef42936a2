"""The demo: it passes, shows every step, is quick and leaves nothing behind; and it can fail."""

import shlex
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from tests.cli.support import run, run_process

from floodmark.cli.demo import command
from floodmark.cli.demo.stage import Stage
from floodmark.cli.demo.survival import account_for_changes
from floodmark.cli.demo.writing import create_namespace, write_from_threads
from floodmark.model import Change
from floodmark.site import Namespace, Site

SECONDS_MAX = 30.0
STEPS = [
    "namespace",
    "writes",
    "reads",
    "history",
    "ttl",
    "changes",
    "counter",
    "split",
    "crash",
    "heartbeat",
    "server",
    "garbage",
]


def test_demo_passes_in_time_and_leaves_nothing_behind(tmp_path: Path) -> None:
    outcome = run_process("demo", "--json", TMPDIR=str(tmp_path))
    summary = outcome.json
    assert (outcome.code, outcome.errors) == (0, "")
    assert summary["passed"] is True
    assert summary["directory"] is None
    assert summary["seconds"] < SECONDS_MAX
    assert [step["step"] for step in summary["steps"]] == STEPS
    assert all(check["passed"] for step in summary["steps"] for check in step["checks"])
    figures: dict[str, dict[str, Any]] = {step["step"]: step["figures"] for step in summary["steps"]}
    assert figures["writes"]["commits_per_round"] >= 1
    assert figures["counter"]["total"] == 200
    assert figures["crash"]["kept"] == figures["crash"]["acknowledged"] >= 200
    assert not list(tmp_path.iterdir())


def test_demo_tells_each_step_and_what_to_try_next(tmp_path: Path) -> None:
    site = tmp_path / "demo site"
    outcome = run_process("demo", "--directory", site)
    assert (outcome.code, outcome.errors) == (0, "")
    assert "\x1b" not in outcome.text
    assert "✗" not in outcome.text
    shown, _, summary = outcome.text.partition("\nSummary\n")
    for number, step in enumerate(STEPS, 1):
        assert f"\n{number:>2}  " in shown
        assert f"    ✓  {step} " in summary
    assert shown.count("✓") == summary.count("✓") > len(STEPS)
    tries = [line.strip() for line in summary.partition("\nTry next\n")[2].splitlines()]
    assert len(tries) > 4
    for line in tries:
        words = shlex.split(line.partition("   ")[0].partition("  ")[0])
        assert words[0] == "floodmark"
        assert run(*words[1:]).output, line


def test_demo_keeps_away_from_a_site_that_is_there(directory: Path) -> None:
    outcome = run("demo", "--directory", directory)
    assert outcome.code == 64
    assert len(run("scan", directory, "users").lines) == 3


def test_demo_that_fails_a_check_says_so_and_ends_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def claim(stage: Stage) -> None:
        stage.begin("claim", "Something that is not so")
        stage.check("water flows up", False)

    monkeypatch.setattr(command, "STEPS", [create_namespace, claim])
    outcome = run("demo")
    assert outcome.code == 1
    assert "    ✗ water flows up\n" in outcome.text
    assert "    ✗  claim " in outcome.text
    assert "1 of 2 checks held" in outcome.text
    summary = run("demo", "--json").json
    assert (summary["passed"], summary["steps"][1]["passed"]) == (False, False)


def test_a_step_without_a_check_does_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "STEPS", [lambda stage: stage.begin("empty", "Nothing at all")])
    assert run("demo", "--json").code == 1


def test_demo_notices_a_lost_write(monkeypatch: pytest.MonkeyPatch) -> None:
    written, put = count(), Namespace.put

    def lose_the_third(namespace: Namespace, key: bytes, value: bytes) -> int:
        return 1 if next(written) == 2 else put(namespace, key, value)

    monkeypatch.setattr(Namespace, "put", lose_the_third)
    monkeypatch.setattr(command, "STEPS", [create_namespace, write_from_threads])
    monkeypatch.setattr("floodmark.cli.demo.writing.WRITE_MS", 0)
    steps = run("demo", "--json").json["steps"]
    assert [check["passed"] for check in steps[1]["checks"]] == [False, False]


def test_demo_notices_a_change_that_does_not_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    changes = Site.changes

    def skip_the_first(site: Site, *arguments: Any, **options: Any) -> list[Change]:
        return list(changes(site, *arguments, **options))[1:]

    def close_and_open(stage: Stage) -> None:
        stage.open(background=False)
        account_for_changes(stage)

    monkeypatch.setattr(Site, "changes", skip_the_first)
    monkeypatch.setattr(command, "STEPS", [create_namespace, close_and_open])
    steps = run("demo", "--json").json["steps"]
    assert steps[1]["checks"][0]["passed"] is False


def test_demo_is_plain_where_nothing_else_can_be_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "STEPS", [create_namespace])
    outcome = run("demo", encoding="ascii")
    assert (outcome.code, outcome.output.isascii()) == (0, True)
    assert "    ok the site lists its namespace\n" in outcome.text
