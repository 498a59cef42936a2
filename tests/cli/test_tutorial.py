"""The tutorial and its like: every block runs, in order, and prints what the page says that it prints."""

import doctest
import io
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.cli.support import FLOODMARK, PROCESS_SECONDS_MAX, ROOT
from tests.sizes import only

PAGES = [
    ROOT / "docs" / f"{name}.md"
    for name in ("tutorial", "merging", "transactions", "atomic", "layers", "publishing", "upgrade")
]
MARKER = "=== end of a command ==="


class Block(NamedTuple):
    """A fenced block: its language, its text, and the line that it starts in."""

    language: str
    text: str
    line: int


class Command(NamedTuple):
    """A shell command and what it prints."""

    command: str
    output: str


def find_blocks(page: str) -> list[Block]:
    fences = re.finditer(r"^```(\w*)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return [Block(fence[1], fence[2], page.count("\n", 0, fence.start()) + 2) for fence in fences]


def find_commands(console: str) -> Iterator[Command]:
    for part in re.split(r"^\$ ", console, flags=re.MULTILINE)[1:]:
        command, _, output = part.partition("\n")
        yield Command(command, output)


def run_shell(commands: list[Command], directory: Path) -> list[str]:
    """The output of each command, all in one shell, so that variables and `$?` carry over."""
    after = f'status=$?; printf "%s\\n" "{MARKER}"; (exit $status)'
    script = "exec 2>&1\n" + "".join(f"{command.command}\n{after}\n" for command in commands)
    path = os.pathsep.join([str(Path(FLOODMARK).parent), os.environ["PATH"]])
    finished = subprocess.run(
        ["bash", "-c", script],
        cwd=directory,
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        timeout=PROCESS_SECONDS_MAX,
        check=False,
    )
    return finished.stdout.split(f"{MARKER}\n")[:-1]


def run_python(code: str, names: dict[str, object]) -> str:
    output = io.StringIO()
    with redirect_stdout(output):
        exec(compile(code, "page", "exec"), names)
    return output.getvalue()


def is_as_shown(shown: str, printed: str) -> bool:
    return doctest.OutputChecker().check_output(shown, printed, doctest.ELLIPSIS)


def check_block(block: Block, following: Block | None, directory: Path, names: dict[str, object]) -> None:
    where = f"line {block.line}"
    if block.language == "console":
        commands = list(find_commands(block.text))
        printed = run_shell(commands, directory)
        assert len(printed) == len(commands), where
        for command, output in zip(commands, printed, strict=True):
            assert is_as_shown(command.output, output), f"{where}: $ {command.command}\n{output}"
    elif block.language == "python":
        output = run_python(block.text, names)
        shown = following.text if following and following.language == "text" else ""
        assert is_as_shown(shown, output), f"{where}:\n{output}"
    else:
        assert block.language == "text", f"{where}: a block must be console, python or text"


@pytest.mark.parametrize("page", only(PAGES[2:4], PAGES), ids=lambda page: page.name)
def test_every_block_of_a_page_prints_what_it_says(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = find_blocks(page.read_text("utf-8"))
    assert {block.language for block in blocks} >= {"console", "python"}
    names: dict[str, object] = {"__name__": "tutorial"}
    for block, following in zip(blocks, [*blocks[1:], None], strict=True):
        check_block(block, following, tmp_path, names)


@pytest.mark.parametrize(
    "page",
    [
        "```console\n$ echo one\ntwo\n```\n",
        "```console\n$ (exit 3)\n$ echo $?\n4\n```\n",
        "```python\nprint(1)\n```\n\n```text\n2\n```\n",
        "```python\nprint(1)\n```\n",
        "```sh\necho not run\n```\n",
    ],
)
def test_the_check_notices_a_page_that_is_wrong(page: str, tmp_path: Path) -> None:
    blocks = find_blocks(page)
    with pytest.raises(AssertionError):
        check_block(blocks[0], blocks[1] if len(blocks) > 1 else None, tmp_path, {})
