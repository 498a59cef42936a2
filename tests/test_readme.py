"""What the README shows is what happens."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from tests.cli.support import on_terminal, run, serving

import floodmark
from floodmark import Change
from floodmark.server import serve

ROOT = Path(__file__).parent.parent
PICTURE = ROOT / "docs" / "demo.svg"
URL = "grpc://127.0.0.1:7100"
# Of each language so many blocks are run, here or in tests/spark/test_readme.py.
RUN = {"sh": 4, "python": 3, "text": 1, "toml": 1}


def blocks(language: str) -> list[str]:
    text = (ROOT / "README.md").read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def commands(number: int) -> list[list[str]]:
    """The words of the commands in a block of shell, without their program and what is said beside them."""
    found = [shlex.split(line, comments=True) for line in blocks("sh")[number].splitlines()]
    assert {program for program, *_ in found} == {"floodmark"}
    return [words[1:] for words in found]


def test_no_block_is_left_out() -> None:
    assert {language: len(blocks(language)) for language in RUN} == RUN
    assert len(blocks(r"\w*")) == sum(RUN.values())


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


def test_a_site_becomes_a_server_and_its_changes_are_followed(tmp_path: Path) -> None:
    serve_words, create, follow = commands(1)
    assert serve_words.pop() == "&"
    options = serve_words[serve_words.index("data/oslo") + 1 : serve_words.index("--listen")]
    with serving(tmp_path / "oslo", *options) as server:
        there = [word.replace(URL, server.url) for word in create]
        assert run(*there).code == 0
        floodmark.connect(server.url).namespace("users").put(b"ada", b"countess")
        shown = on_terminal(
            *[word.replace(URL, server.url) for word in follow], until=lambda text: "ada" in text
        )
        assert "countess" in shown


def test_second_look_runs_against_a_server(tmp_path: Path) -> None:
    seen: list[Change] = []

    def index(change: Change) -> None:
        seen.append(change)
        raise Enough

    site = floodmark.open(tmp_path / "oslo", site="oslo")
    site.create_namespace("users")
    with serve(site, "127.0.0.1:0") as server:
        code = blocks("python")[1].replace(URL, server.url)
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


def shown_on_the_picture() -> str:
    """The text of the recorded demo."""
    texts = ElementTree.parse(PICTURE).iter("{http://www.w3.org/2000/svg}text")
    return " ".join("".join(each.itertext()) for each in texts).replace("\xa0", " ")


def test_the_picture_is_of_a_demo_that_held_and_tells_nothing_of_the_machine() -> None:
    assert f"({PICTURE.relative_to(ROOT)})" in (ROOT / "README.md").read_text()
    shown = shown_on_the_picture()
    assert "the sites agree again" in shown
    (held, checks) = re.findall(r"(\d+) of (\d+) checks held", shown)[0]
    assert int(held) == int(checks) > 0
    assert set(re.findall(r"grpc://([^:]+)", shown)) == {"127.0.0.1"}
    assert not re.findall(r"(?<=\s)/\w+", shown)


def test_the_picture_needs_nothing_from_elsewhere() -> None:
    assert "http" not in re.sub(r'xmlns="[^"]*"', "", PICTURE.read_text())
