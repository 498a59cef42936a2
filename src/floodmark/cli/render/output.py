"""Where a command prints: plain lines for people, JSON lines for programs, and nothing else on stdout.

Colours appear only on a terminal.  Progress goes to stderr, only if that is a terminal, and only when
the work takes longer than a moment.
"""

import json as json_module
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Timer
from typing import Final, TextIO, TypeAlias, TypeVar

import msgspec
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from floodmark.cli.render.text import BARS, PLAIN_BARS, align, show_text

PROGRESS_SECONDS: Final = 2.0
_COUNTED_EVERY: Final = 1_000

Item = TypeVar("Item")
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


@contextmanager
def progress(what: str, *, seconds: float = PROGRESS_SECONDS) -> Iterator[None]:
    """A spinner with the time passed, if the block takes longer than some seconds."""
    with _display(what, "", seconds):
        yield


def counted(items: Iterable[Item], what: str, *, seconds: float = PROGRESS_SECONDS) -> Iterator[Item]:
    """The items, with a count of them so far if they take longer than some seconds.

    Where stdout is a terminal the items themselves are the progress, and nothing is added.
    """
    if sys.stdout.isatty():
        yield from items
        return
    with _display(what, "{task.completed:,.0f}", seconds) as display:
        task = display.task_ids[0]
        for number, item in enumerate(items, 1):
            yield item
            if number % _COUNTED_EVERY == 0:
                display.update(task, completed=number)


@contextmanager
def tracked(what: str, *, seconds: float = PROGRESS_SECONDS) -> Iterator[Callable[[str, int], None]]:
    """A function to call with what is being done and how much of it is done, shown if it takes time."""
    with _display(what, "{task.completed:,.0f}", seconds) as display:
        task = display.task_ids[0]
        yield lambda now, done: display.update(task, description=now, completed=done)


@contextmanager
def _display(what: str, count: str, seconds: float) -> Iterator[Progress]:
    console = console_on(sys.stderr)
    display = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TextColumn(count),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    display.add_task(what, total=None)
    timer = Timer(seconds, display.start)
    timer.daemon = True
    if console.is_terminal:
        timer.start()
    try:
        yield display
    finally:
        timer.cancel()
        if console.is_terminal:
            timer.join()
        display.stop()
