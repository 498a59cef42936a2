"""`docs/limits.md` says what `model/limits.py` says, and names errors that exist."""

import re
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple, TypeAlias

import pytest

from floodmark.model import errors, limits
from floodmark.model.errors import FloodmarkError

PAGE = Path(__file__).resolve().parent.parent / "docs" / "limits.md"
UNITS: dict[str, int | timedelta] = {
    "": 1,
    "KiB": limits.KIB,
    "MiB": limits.MIB,
    "days": timedelta(days=1),
    "seconds": timedelta(seconds=1),
    "ms": 1,
}
Value: TypeAlias = int | timedelta

NO_ERROR = "none"

ROW = re.compile(
    r"^\| `(?P<name>\w+)` \| (?P<value>[^|]+) \| (?P<meaning>[^|]+) \| (?P<error>[^|]+) \|$", re.MULTILINE
)


class Limit(NamedTuple):
    """One row of the page."""

    value: Value
    meaning: str
    error: str


def read_page(text: str) -> dict[str, Limit]:
    """The limits on a page; a limit that stands there twice is a mistake."""
    found: dict[str, Limit] = {}
    for row in ROW.finditer(text):
        assert row["name"] not in found, f"{row['name']} stands there twice"
        found[row["name"]] = Limit(read_value(row["value"]), row["meaning"], row["error"].strip("`"))
    return found


def read_value(text: str) -> Value:
    number, _, unit = text.partition(" ")
    return int(number.replace(",", "")) * UNITS[unit]


def limits_in_code() -> dict[str, Value]:
    names = {
        name: value for name, value in vars(limits).items() if name.isupper() and isinstance(value, Value)
    }
    return {name: value for name, value in names.items() if name not in ("KIB", "MIB")}


def test_page_lists_every_limit_with_its_value() -> None:
    page = {name: limit.value for name, limit in read_page(PAGE.read_text("utf-8")).items()}
    assert page == limits_in_code()


def test_page_names_errors_that_exist() -> None:
    for name, limit in read_page(PAGE.read_text("utf-8")).items():
        if limit.error != NO_ERROR:
            kind = getattr(errors, limit.error)
            assert issubclass(kind, FloodmarkError), name
        assert limit.meaning.strip(), name


def test_every_limit_is_a_maximum_that_says_its_unit() -> None:
    assert all(re.fullmatch(r"[A-Z_]+_MAX", name) for name in limits_in_code())


def test_limits_fit_the_bytes_that_hold_them() -> None:
    assert limits.KEY_BYTES_MAX + 3 < 1 << 16, "a change-log row has two bytes for a key's length"
    assert limits.NAMESPACES_MAX <= 1 << 24, "a key has three bytes for its namespace"
    assert limits.SITE_IDS_MAX < 1 << 8, "a stamp has one byte for its site"
    assert limits.NODES_MAX <= 64, "versions of several nodes differ modulo 64"
    # Beside the value stand nine bytes of origin, eight of expiry and the flags.
    largest_pair = limits.KEY_BYTES_MAX + 3 + limits.VALUE_BYTES_MAX + 18
    assert largest_pair <= limits.COMMIT_BYTES_MAX, "one pair fits into one commit"
    assert limits.VALUE_BYTES_MAX <= limits.PAGE_BYTES_MAX


@pytest.mark.parametrize(
    ("text", "value"),
    [("4 KiB", 4096), ("1 MiB", 1 << 20), ("10,000", 10_000), ("255", 255), ("2 days", timedelta(2))],
)
def test_values_are_read_as_written(text: str, value: Value) -> None:
    assert read_value(text) == value


def test_reader_of_the_page_sees_a_wrong_value_and_a_missing_row() -> None:
    text = PAGE.read_text("utf-8")
    wrong = text.replace("| 10,000 |", "| 10,001 |", 1)
    missing = text.replace("| `KEY_BYTES_MAX` |", "| KEY_BYTES_MAX |")
    for page in (wrong, missing):
        assert {name: limit.value for name, limit in read_page(page).items()} != limits_in_code()
