"""What the README shows is there.  tests/spark/test_readme.py runs it."""

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parent.parent
PICTURE = ROOT / "docs" / "demo.svg"


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


def test_every_page_that_the_readme_names_is_there() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", (ROOT / "README.md").read_text())
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_both_commands_are_targets_of_the_makefile() -> None:
    targets = re.findall(r"^([a-z]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = re.findall(r"`make ([a-z]+)`", (ROOT / "README.md").read_text())
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
