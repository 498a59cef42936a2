"""The README runs from top to bottom, in an empty directory."""

import shlex
import tomllib
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import pytest
from tests.cli.support import ROOT, run, running
from tests.cli.test_tutorial import find_blocks, is_as_shown, run_python
from tests.spark.test_operations import free_addresses

ADDRESSES = ("127.0.0.1:7100", "127.0.0.1:7200")


def run_line(line: str, stack: ExitStack) -> str:
    """Run a line of shell, behind `&` until the stack ends; what it printed."""
    program, *words = shlex.split(line, comments=True)
    if program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert words == ["install", ".[spark]"]
        assert "spark" in extras
        return ""
    assert program == "floodmark", line
    if words[-1] == "&":
        process = stack.enter_context(running(*words[:-1]))
        # A server prints a line when it is ready, for which the page tells to wait.
        return process.stdout.readline().decode() if words[0] == "serve" and process.stdout else ""
    outcome = run(*words)
    assert outcome.code == 0, f"{line}\n{outcome.errors}"
    return outcome.text


@pytest.mark.slow
@pytest.mark.usefixtures("spark")
def test_the_readme_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "README.md").read_text()
    for shown, free in zip(ADDRESSES, free_addresses(len(ADDRESSES)), strict=True):
        assert shown in page
        page = page.replace(shown, free)
    # The shared session was started in another directory.
    for place in ("state", "lake/changes"):
        page = page.replace(f'"{place}"', repr(str(tmp_path / place)))
    names: dict[str, object] = {"__name__": "readme"}
    printed: dict[str, str] = {}
    with ExitStack() as stack:
        for block, following in pairwise([*find_blocks(page), None]):
            assert block is not None
            match block.language:
                case "sh":
                    printed |= {line: run_line(line, stack) for line in block.text.splitlines()}
                case "python":
                    shown = following.text if following and following.language == "text" else ""
                    output = run_python(block.text, names)
                    assert is_as_shown(shown, output), f"line {block.line}:\n{output}"
                case "toml":
                    Path("topology.toml").write_text(block.text, "utf-8")
                case language:
                    assert language == "text", f"line {block.line}: nothing runs a block of {language!r}"
        run_python("site.close()", names)
    (counted,) = (text for line, text in printed.items() if " get " in line)
    assert counted == "5\n"
    assert [text.splitlines()[-1] for line, text in printed.items() if " verify " in line] == [
        "the sites agree",
        "the sites agree",
    ]
    assert {path.name for path in tmp_path.iterdir()} == {
        *("backups", "data", "exports", "lake", "state", "topology.toml"),
    }
