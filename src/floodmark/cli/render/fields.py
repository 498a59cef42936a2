"""Statistics and other structures as JSON fields, whatever their shape.

Names tell what numbers are: a version becomes text, because it needs 64 bits and many JSON readers round
numbers above 2**53.
"""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from datetime import datetime
from enum import Enum
from typing import Final

import msgspec

from floodmark.cli.render.text import json_bytes, show_moment

_VERSIONS: Final = ("version", "horizon", "position", "checkpoint", "resolved", "through", "since", "until")


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
    if isinstance(value, int) and not isinstance(value, bool) and name.endswith(_VERSIONS):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain_value(each, name) for key, each in value.items()}
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return [_plain_value(each, name) for each in value]
    if is_dataclass(value) or isinstance(value, msgspec.Struct):
        return plain(value)
    return value
