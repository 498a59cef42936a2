"""Where a command prints: plain lines for people, JSON lines for programs, and nothing else on stdout.

Colours appear only on a terminal.  Progress goes to stderr, only if that is a terminal, and only when
the work takes longer than a moment.
"""

import json as json_module
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TextIO, TypeAlias

import msgspec
from rich.console import Console
from rich.text import Text

from floodmark.cli.render.text import BARS, PLAIN_BARS, align, show_text

# Text, or text with a style that only a terminal shows.
Part: TypeAlias = str | tuple[str, str]


def console_on(stream: TextIO, *, quiet: bool = False) -> Console:
    """A console that prints what it is given: nothing in the text is taken for markup."""
    return Console(file=stream, highlight=False, markup=False, emoji=False, soft_wrap=True, quiet=quiet)


def speaks_unicode(stream: TextIO) -> bool:
    """Whether bars and check marks can be written to a stream."""
    return (stream.encoding or "").lower().replace("-", "") in ("utf8", "utf16", "utf32")


class Output:
    """What one command prints: on stdout, unless somebody else has that."""

    def __init__(self, *, json: bool, flush: bool = False, stream: TextIO | None = None) -> None:
        self.json = json
        self._flush = flush
        self._stream = sys.stdout if stream is None else stream
        self._console = console_on(self._stream)
        self._unicode = speaks_unicode(self._stream)
        self.is_terminal = self._console.is_terminal
        self.bars = BARS if self._unicode else PLAIN_BARS

    def object(self, fields: Mapping[str, object]) -> None:
        """One JSON object on a line of its own."""
        if self._unicode:
            self._write(msgspec.json.encode(fields).decode())
        else:
            self._write(json_module.dumps(fields))

    def line(self, *parts: Part) -> None:
        """One line for people."""
        shown = [
            _show_lines(part) if isinstance(part, str) else (_show_lines(part[0]), part[1]) for part in parts
        ]
        if self.is_terminal:
            self._console.print(Text.assemble(*shown))
        else:
            self._write("".join(part if isinstance(part, str) else part[0] for part in shown))

    def fields(self, pairs: Sequence[tuple[str, str]]) -> None:
        """Names and values, one pair a line."""
        width = max(len(name) for name, _ in pairs)
        for name, value in pairs:
            self.line((name.ljust(width + 2), "dim"), show_text(value))

    def table(self, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """Rows under a header."""
        head, *lines = align([header, *([show_text(cell) for cell in row] for row in rows)])
        self.line((head, "dim"))
        for line in lines:
            self.line(line)

    def raw(self, data: bytes) -> None:
        """Bytes exactly as they are."""
        self._stream.flush()
        left = memoryview(data)
        while left:
            # Python that was told not to buffer writes as much as the pipe takes.
            left = left[self._stream.buffer.write(left) :]
        self._stream.buffer.flush()

    def _write(self, line: str) -> None:
        self._stream.write(line + "\n")
        if self._flush:
            self._stream.flush()


def _show_lines(text: str) -> str:
    """A text of our own, which may have lines and columns; what it quotes of others steers no terminal."""
    if text.isprintable():
        return text
    return "\n".join("\t".join(map(show_text, line.split("\t"))) for line in text.split("\n"))


def note(text: str) -> None:
    """A remark beside the result, on stderr."""
    console_on(sys.stderr).print(Text(_show_lines(text), style="dim"))
