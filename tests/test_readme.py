"""What the README shows is what happens."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import floodmark
from floodmark import Change
from floodmark.server import serve

ROOT = Path(__file__).parent.parent


def blocks(language: str) -> list[str]:
    text = (ROOT / "README.md").read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def test_first_look_is_the_example_and_prints_what_is_shown() -> None:
    example = ROOT / "examples" / "first_look.py"
    shown = blocks("python")[0]
    assert example.read_text().endswith(shown)
    printed = subprocess.run(
        [sys.executable, "-W", "error", example], capture_output=True, text=True, check=True
    ).stdout
    assert printed == blocks("text")[0]


class Enough(Exception):
    """Ends the loop of the README that would go on for ever."""


def test_second_look_runs_against_a_server(tmp_path: Path) -> None:
    seen: list[Change] = []

    def index(change: Change) -> None:
        seen.append(change)
        raise Enough

    site = floodmark.open(tmp_path / "oslo", site="oslo")
    site.create_namespace("users")
    with serve(site, "127.0.0.1:0") as server:
        code = blocks("python")[1].replace("grpc://127.0.0.1:7100", server.url)
        names = {"floodmark": floodmark, "index": index}
        loop, _, rest = code.replace("parquet:", f"parquet:{tmp_path}/").partition("site.feeds")
        with pytest.raises(Enough):
            exec(loop, names)
        exec("site.feeds" + rest, names)
        assert [(change.key, change.value) for change in seen] == [(b"ada", b"countess")]
        assert [feed.name for feed in site.feeds.list()] == ["export"]
        exec("site.close()", names)


def test_every_page_that_the_readme_names_is_there() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", (ROOT / "README.md").read_text())
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_both_commands_are_targets_of_the_makefile() -> None:
    targets = re.findall(r"^([a-z]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = re.findall(r"^make ([a-z]+)", "\n".join(blocks("sh")), re.MULTILINE)
    assert {"demo", "test"} <= set(named) <= set(targets)
