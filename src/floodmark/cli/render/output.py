"""The output of commands: lines and tables for people, JSON lines for programs, and nothing else on stdout.

Every result has a shape: one object (`result`, `report`, `details`) or many (`rows`).  `--json` prints its
fields; for people, values are rendered by the types and names of fields: `_version` is a version, `_ms` a
length of time, `_bytes` a size.  A version becomes a string in JSON, because many readers round numbers above
2**53.  Text of other users never reaches the terminal as control characters.
"""

import json as json_module
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields as dataclass_fields
from dataclasses import is_dataclass
from datetime import datetime, timedelta
from enum import Enum
from functools import partial
from typing import Any, Final, TextIO, TypeAlias, TypeVar

import msgspec
from rich.console import Console
from rich.table import Column as TableColumn
from rich.table import Table
from rich.text import Text

from floodmark.cli.render.text import (
    BARS,
    PLAIN_BARS,
    align,
    show_duration,
    show_lag,
    show_moment,
    show_size,
    show_text,
    show_time,
    show_version,
)
from floodmark.model.text import json_bytes, show_bytes

Item = TypeVar("Item")
# Text, or text with a style that only a terminal shows.
Part: TypeAlias = str | tuple[str, str]
# Names and values for people: None is left out, and a list takes a line for each item.
Pairs: TypeAlias = Sequence[tuple[str, object]]
# A column of a table or a line of details: a function, or the name of an attribute or a field.
Column: TypeAlias = str | Callable[[Item], object]
Fields: TypeAlias = Callable[[Item], Mapping[str, object]]

_VERSIONS: Final = (
    *("version", "horizon", "position", "checkpoint", "resolved", "through", "since", "until"),
    # Of a data set: the moment of its data, and from when on it is read at other sites.
    *("base", "others"),
)


# Values by their shape


def plain(value: object) -> dict[str, object]:
    """A dataclass or structure as JSON fields: versions become strings, moments ISO 8601."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, msgspec.Struct):
        names = value.__struct_fields__
    else:
        assert is_dataclass(value)
        names = tuple(field.name for field in dataclass_fields(value))
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


def show_value(name: str, value: object, *, version: Callable[[int], str] = show_version) -> str:
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
        case str() if value.isdigit() and name.endswith(_VERSIONS):
            return version(int(value))
        case int() | float() if "_ms" in name:
            return show_lag(round(value))
        case int() | float() if name.endswith("_seconds"):
            return show_duration(timedelta(seconds=value))
        case int() if name.endswith("_bytes"):
            return show_size(value)
        case int():
            return f"{value:,}"
        case float():
            return f"{value:,.1f}"
        case Mapping():
            of_versions = name.endswith(_VERSIONS)
            return show_value(
                "",
                [
                    f"{_words(key)}: {show_value(name if of_versions else key, each)}"
                    for key, each in value.items()
                    if each is not None
                ],
            )
        case list():
            return ", ".join(show_value(name, each) for each in value) or "none"
    return str(value)


def _show_moment(version: int) -> str:
    return show_time(version) if version else "the beginning"


def _cell(item: Any, column: Column[Any], version: Callable[[int], str] = show_version) -> object:
    """The result of a function for an item, or the text of an attribute or field that is not None."""
    if not isinstance(column, str):
        return column(item)
    value = item[column] if isinstance(item, Mapping) else getattr(item, column)
    if value is None:
        return None
    return show_value(column, str(value) if _is_version(column, value) else value, version=version)


def _words(name: object) -> str:
    return str(name).replace("_ms", "").replace("_", " ")


def _pairs(fields: Mapping[str, object]) -> Pairs:
    """Names and values of JSON fields; of a list of structures, a line for each."""

    def show(name: str, value: object) -> object:
        if isinstance(value, list) and value and isinstance(value[0], Mapping):
            return [show_value("", each) for each in value]
        return None if value is None else show_value(name, value)

    return [(_words(name), show(name, value)) for name, value in fields.items()]


# Printing


def console_on(stream: TextIO, *, quiet: bool = False) -> Console:
    """A console that prints text as it is, without interpreting markup.

    A terminal that cannot draw over earlier output (`TERM=dumb`) gets the same output as a pipe.
    """
    make = partial(
        Console, file=stream, highlight=False, markup=False, emoji=False, soft_wrap=True, quiet=quiet
    )
    console = make()
    return make(force_terminal=False) if console.is_dumb_terminal else console


def speaks_unicode(stream: TextIO) -> bool:
    """Whether bars and check marks can be written to a stream."""
    return (stream.encoding or "").lower().replace("-", "") in ("utf8", "utf16", "utf32")


class Output:
    """The output of one command: on stdout, unless a sink uses that.

    Set `flushes` where a reader waits for every line.
    """

    def __init__(self, *, json: bool, stream: TextIO | None = None) -> None:
        self.json = json
        self.flushes = False
        self._stream = sys.stdout if stream is None else stream
        self._console = console_on(self._stream)
        self._unicode = speaks_unicode(self._stream)
        self.is_terminal = self._console.is_terminal
        self.bars = BARS if self._unicode else PLAIN_BARS

    def result(self, fields: Mapping[str, object], shown: str | Pairs) -> None:
        """Print one object: its fields for programs; a line, or names and values, for people."""
        if self.json:
            self.object(fields)
        elif isinstance(shown, str):
            self.line(shown)
        else:
            self.fields(shown)

    def report(self, item: object) -> None:
        """Print a structure or dataclass, with all its fields."""
        fields = plain(item)
        self.result(fields, _pairs(fields))

    def details(self, item: Item, columns: Mapping[str, Column[Item]], fields: Fields[Item] = plain) -> None:
        """Print one object: all its fields for programs, the given columns for people."""
        self.result(fields(item), [(name, _cell(item, column)) for name, column in columns.items()])

    def rows(
        self,
        items: Iterable[Item],
        columns: Mapping[str, Column[Item]],
        fields: Fields[Item] = plain,
    ) -> None:
        """Print many objects: one JSON object a line, or a table, which shows versions by their times."""
        if self.json:
            for item in items:
                self.object(fields(item))
            return
        rows = [
            [show_value("", _cell(item, column, _show_moment)) for column in columns.values()]
            for item in items
        ]
        self.table(list(columns), rows)

    def object(self, fields: Mapping[str, object]) -> None:
        """Print one JSON object on a line of its own."""
        self._write(msgspec.json.encode(fields).decode() if self._unicode else json_module.dumps(fields))

    def line(self, *parts: Part) -> None:
        """Print one line for people."""
        shown = [
            _show_lines(part) if isinstance(part, str) else (_show_lines(part[0]), part[1]) for part in parts
        ]
        if self.is_terminal:
            self._console.print(Text.assemble(*shown))
        else:
            self._write("".join(part if isinstance(part, str) else part[0] for part in shown))

    def fields(self, pairs: Pairs) -> None:
        """Print names and values, one pair a line."""
        several = [(name, value if isinstance(value, list) else [value]) for name, value in pairs]
        shown = [(name, each) for name, values in several for each in values if each is not None]
        width = max(len(name) for name, _ in shown)
        for name, value in shown:
            self.line((name.ljust(width + 2), "dim"), show_text(show_value("", value)))

    def table(self, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """Print rows under a header.  On a terminal that is too narrow, cells are wrapped."""
        shown = [[show_text(cell) for cell in row] for row in rows]
        if self.is_terminal:
            columns = [TableColumn(name, overflow="fold") for name in header]
            table = Table(*columns, box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
            for row in shown:
                table.add_row(*map(Text, row))
            self._console.print(table, soft_wrap=False)
            return
        for line in align([header, *shown]):
            self.line(line)

    def raw(self, data: bytes) -> None:
        """Write bytes unchanged."""
        self._stream.flush()
        left = memoryview(data)
        while left:
            # An unbuffered stream may write only a part of it.
            left = left[self._stream.buffer.write(left) :]
        self._stream.buffer.flush()

    def _write(self, line: str) -> None:
        self._stream.write(line + "\n")
        if self.flushes:
            self._stream.flush()


def _show_lines(text: str) -> str:
    """Text with its lines and tabs, but without other control characters."""
    if text.isprintable():
        return text
    return "\n".join("\t".join(map(show_text, line.split("\t"))) for line in text.split("\n"))


def note(text: str) -> None:
    """Print a remark about the result on stderr."""
    console_on(sys.stderr).print(Text(_show_lines(text), style="dim"))
