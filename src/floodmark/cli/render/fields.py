"""Structures and dataclasses as JSON fields and as text, by their shape.

A field's name tells what its number is: `_version` a version, `_ms` a length of time, `_bytes` a size.
A version becomes a string in JSON, because many readers round numbers above 2**53.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from datetime import datetime, timedelta
from enum import Enum
from typing import Any, Final

import msgspec

from floodmark.cli.render.text import (
    json_bytes,
    show_bytes,
    show_duration,
    show_lag,
    show_moment,
    show_size,
    show_time,
    show_version,
)

_VERSIONS: Final = ("version", "horizon", "position", "checkpoint", "resolved", "through", "since", "until")


# For programs


def plain(value: object) -> dict[str, object]:
    """A dataclass or structure as JSON fields: versions become strings, moments ISO 8601."""
    if isinstance(value, msgspec.Struct):
        names = value.__struct_fields__
    else:
        assert is_dataclass(value)
        names = tuple(field.name for field in fields(value))
    shown: dict[str, object] = {}
    for name in names:
        each = getattr(value, name)
        shown.update(json_bytes(name, each) if isinstance(each, bytes) else {name: _plain_value(each, name)})
    return shown


def _plain_value(value: object, name: str) -> object:
    if isinstance(value, datetime):
        return show_moment(value)
    if isinstance(value, Enum):
        return value.value
    if _is_version(name, value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain_value(each, name) for key, each in value.items()}
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return [_plain_value(each, name) for each in value]
    if is_dataclass(value) or isinstance(value, msgspec.Struct):
        return plain(value)
    return value


def _is_version(name: str, value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and name.endswith(_VERSIONS)


# For people


def show_cell(item: Any, column: str | Callable[[Any], str]) -> str:
    """A cell of a table: what a function makes of an item, or an attribute by its name and type."""
    if not isinstance(column, str):
        return column(item)
    value = getattr(item, column)
    if _is_version(column, value):
        return show_time(value) if value else "the beginning"
    return show_value(column, value)


def show_pairs(shown: Mapping[str, object]) -> list[tuple[str, str]]:
    """JSON fields as names and values; a list of structures takes a line for each."""
    return [(_words(name), line) for name, value in shown.items() for line in _lines(name, value)]


def show_value(name: str, value: object) -> str:
    """A value by its type and the name of its field.

    >>> show_value("lag_ms", 12_345), show_value("keys", 2000), show_value("retention", timedelta(days=7))
    ('12.3 s', '2,000', '7d')
    """
    match value:
        case None:
            return ""
        case bool():
            return "yes" if value else "no"
        case Enum():
            return str(value.value)
        case bytes():
            return show_bytes(value)
        case timedelta():
            return show_duration(value)
        case str() if value.isdigit() and len(value) > 12:
            return show_version(int(value))
        case int() | float() if "_ms" in name:
            return show_lag(round(value))
        case int() if name.endswith("_bytes"):
            return show_size(value)
        case int():
            return f"{value:,}"
        case float():
            return f"{value:,.1f}"
        case Mapping():
            shown = [
                f"{_words(key)}: {show_value(key, each)}" for key, each in value.items() if each is not None
            ]
            return ", ".join(shown) or "none"
        case list():
            return ", ".join(show_value("", each) for each in value) or "none"
    return str(value)


def _lines(name: str, value: object) -> list[str]:
    if value is None:
        return []
    if isinstance(value, list) and value and isinstance(value[0], Mapping):
        return [show_value("", each) for each in value]
    return [show_value(name, value)]


def _words(name: object) -> str:
    return str(name).replace("_ms", "").replace("_", " ")
