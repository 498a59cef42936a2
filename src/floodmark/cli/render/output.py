"""Where a command prints: lines and tables for people, JSON lines for programs, and nothing else on stdout.

Every result has a shape: one object (`result`, `report`) or many (`rows`).  Its fields go to `--json`, its
names and values to people.  Text of other users never reaches the terminal as control characters.
"""

import json as json_module
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TextIO, TypeAlias, TypeVar

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from floodmark.cli.render.fields import plain, show_cell, show_pairs
from floodmark.cli.render.text import BARS, PLAIN_BARS, align, show_text

Item = TypeVar("Item")
# Text, or text with a style that only a terminal shows.
Part: TypeAlias = str | tuple[str, str]
Pairs: TypeAlias = Sequence[tuple[str, str]]
# A column of a table: a function, or the name of an attribute, which is shown by its name and type.
Column: TypeAlias = str | Callable[[Item], str]


def console_on(stream: TextIO, *, quiet: bool = False) -> Console:
    """A console that prints what it is given: nothing in the text is taken for markup."""
    return Console(file=stream, highlight=False, markup=False, emoji=False, soft_wrap=True, quiet=quiet)


def speaks_unicode(stream: TextIO) -> bool:
    """Whether bars and check marks can be written to a stream."""
    return (stream.encoding or "").lower().replace("-", "") in ("utf8", "utf16", "utf32")


class Output:
    """What one command prints: on stdout, unless a sink has that for itself."""

    def __init__(self, *, json: bool, flush: bool = False, stream: TextIO | None = None) -> None:
        self.json = json
        self._flush = flush
        self._stream = sys.stdout if stream is None else stream
        self._console = console_on(self._stream)
        self._unicode = speaks_unicode(self._stream)
        self.is_terminal = self._console.is_terminal
        self.bars = BARS if self._unicode else PLAIN_BARS

    def result(self, fields: Mapping[str, object], shown: str | Pairs) -> None:
        """One object: its fields for programs; a line, or names and values, for people."""
        if self.json:
            self.object(fields)
        elif isinstance(shown, str):
            self.line(shown)
        else:
            self.fields(shown)

    def report(self, item: object) -> None:
        """A structure or dataclass, with all its fields."""
        fields = plain(item)
        self.result(fields, show_pairs(fields))

    def rows(
        self,
        items: Iterable[Item],
        columns: Mapping[str, Column[Item]],
        fields: Callable[[Item], Mapping[str, object]] = plain,
    ) -> None:
        """Many objects: one JSON object a line, or a table."""
        if self.json:
            for item in items:
                self.object(fields(item))
        else:
            self.table(
                list(columns), [[show_cell(item, column) for column in columns.values()] for item in items]
            )

    def object(self, fields: Mapping[str, object]) -> None:
        """One JSON object on a line of its own."""
        self._write(msgspec.json.encode(fields).decode() if self._unicode else json_module.dumps(fields))

    def line(self, *parts: Part) -> None:
        """One line for people."""
        shown = [
            _show_lines(part) if isinstance(part, str) else (_show_lines(part[0]), part[1]) for part in parts
        ]
        if self.is_terminal:
            self._console.print(Text.assemble(*shown))
        else:
            self._write("".join(part if isinstance(part, str) else part[0] for part in shown))

    def fields(self, pairs: Pairs) -> None:
        """Names and values, one pair a line."""
        width = max(len(name) for name, _ in pairs)
        for name, value in pairs:
            self.line((name.ljust(width + 2), "dim"), show_text(value))

    def table(self, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """Rows under a header.  On a terminal that is too narrow, cells are wrapped."""
        shown = [[show_text(cell) for cell in row] for row in rows]
        if self.is_terminal:
            table = Table(*header, box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
            for row in shown:
                table.add_row(*map(Text, row))
            self._console.print(table, soft_wrap=False)
            return
        for line in align([header, *shown]):
            self.line(line)

    def raw(self, data: bytes) -> None:
        """Bytes exactly as they are."""
        self._stream.flush()
        left = memoryview(data)
        while left:
            # An unbuffered stream writes as much as the pipe takes.
            left = left[self._stream.buffer.write(left) :]
        self._stream.buffer.flush()

    def _write(self, line: str) -> None:
        self._stream.write(line + "\n")
        if self._flush:
            self._stream.flush()


def _show_lines(text: str) -> str:
    """Text with its lines and tabs, but without other control characters."""
    if text.isprintable():
        return text
    return "\n".join("\t".join(map(show_text, line.split("\t"))) for line in text.split("\n"))


def note(text: str) -> None:
    """A remark beside the result, on stderr."""
    console_on(sys.stderr).print(Text(_show_lines(text), style="dim"))
