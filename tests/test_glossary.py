"""`docs/glossary.md` explains the design's words, and the code uses each of them for one thing."""

import ast
import re
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "floodmark"
PAGE = ROOT / "docs" / "glossary.md"

# The words that the design fixes, in its order.
WORDS = (
    "site", "node", "partition", "namespace", "generation", "version", "change", "commit version", "stamp",
    "origin", "commit order", "resolved version", "watermark", "heartbeat", "feed", "checkpoint",
    "safe point", "atomic batch", "transaction", "ledger",
)  # fmt: skip

ROW = re.compile(r"^\| \*\*(?P<word>[^*]+)\*\* \| (?P<meaning>[^|]+) \| (?P<place>[^|]+) \|$", re.MULTILINE)
PLACE = re.compile(r"`(?P<path>[\w/]+\.py)` `(?P<name>\w+)`")
CLASS = re.compile(r"^ *class (\w+)", re.MULTILINE)
TO_COME = "to come"


class Meaning(NamedTuple):
    """One row of the page: the file and the name that stand for a word, if it is built."""

    path: str
    name: str


def read_page(text: str) -> dict[str, Meaning | None]:
    """The words of a page; a word that stands there twice is a mistake."""
    found: dict[str, Meaning | None] = {}
    for row in ROW.finditer(text):
        assert row["word"] not in found, f"{row['word']} is explained twice"
        place = PLACE.fullmatch(row["place"].strip())
        assert place or row["place"].strip() == TO_COME, f"{row['word']}: name a file and a name in it"
        found[row["word"]] = Meaning(place["path"], place["name"]) if place else None
    return found


def names_in(source: str) -> set[str]:
    """The classes, functions, fields and type aliases that a module defines."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                found.add(name)
            case ast.AnnAssign(target=ast.Name(id=name)):
                found.add(name)
    return found


def classes() -> dict[str, set[str]]:
    """The files that define a class, by its name."""
    found: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        for name in CLASS.findall(path.read_text("utf-8")):
            found.setdefault(name, set()).add(path.relative_to(PACKAGE).as_posix())
    return found


def misused(words: dict[str, Meaning | None], classes: dict[str, set[str]]) -> list[str]:
    """The classes that have the name of a word and are not what the glossary says."""
    return [
        f"{path}: class {name} is not the glossary's {word}"
        for word, meaning in words.items()
        for name in ["".join(map(str.capitalize, word.split()))]
        for path in sorted(classes.get(name, set()) - ({meaning.path} if meaning else set()))
    ]


def test_the_page_explains_the_words_of_the_design_in_their_order() -> None:
    assert tuple(read_page(PAGE.read_text("utf-8"))) == WORDS


def test_every_word_names_something_that_exists() -> None:
    for word, meaning in read_page(PAGE.read_text("utf-8")).items():
        if meaning is not None:
            assert meaning.name in names_in((PACKAGE / meaning.path).read_text("utf-8")), word


def test_a_class_with_the_name_of_a_word_is_the_thing_itself() -> None:
    found = classes()
    assert found["SafePoint"]
    assert misused(read_page(PAGE.read_text("utf-8")), found) == []


def test_a_class_that_takes_a_word_in_another_sense_is_found() -> None:
    words = read_page("| **safe point** | Kept. | `feed/safepoints.py` `SafePoint` |\n")
    assert misused(words, {"SafePoint": {"feed/safepoints.py"}}) == []
    assert misused(words, {"SafePoint": {"feed/safepoints.py", "spark/x.py"}})


@pytest.mark.parametrize("place", ["nowhere", "`x` `Y`"])
def test_a_word_without_a_place_is_found(place: str) -> None:
    with pytest.raises(AssertionError, match="name a file"):
        read_page(f"| **feed** | Read. | {place} |\n")
