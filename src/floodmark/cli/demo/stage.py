"""The account of the demo: what is shown, what is claimed, and whether it held.

On a terminal some of it moves: a spinner where one has to wait, and a board of figures while messages flow.
Elsewhere a line now and then says how it goes, and `--json` leaves only the account.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import Enum, auto
from threading import Event
from typing import Final

from rich.console import Console, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from floodmark.cli.render.output import Part
from floodmark.cli.render.text import BARS, PLAIN_BARS, align
from floodmark.clock import monotonic_ms

INDENT: Final = 4
POLL_SECONDS: Final = 0.05
LINE_SECONDS: Final = 5.0


class Motion(Enum):
    """How something is shown that changes while one looks.

    LIVE draws it anew in its place, LINES tells it in a line now and then, STILL shows only how it ended.
    """

    LIVE = auto()
    LINES = auto()
    STILL = auto()


@dataclass(frozen=True)
class Check:
    """A claim, and whether it held."""

    claim: str
    passed: bool


@dataclass
class Step:
    """One step as it went."""

    name: str
    title: str
    result: str = ""
    checks: list[Check] = field(default_factory=list)
    figures: dict[str, object] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether everything that the step claimed held."""
        return bool(self.checks) and all(check.passed for check in self.checks)

    @property
    def outcome(self) -> str:
        """The step in a few words: what came out of it, or what did not hold."""
        broken = [check.claim for check in self.checks if not check.passed]
        return self.result if self.passed else f"{self.title}: {'; '.join(broken) or 'nothing was checked'}"

    def account(self) -> dict[str, object]:
        """The step for `--json`."""
        return {
            "step": self.name,
            "title": self.title,
            "passed": self.passed,
            "checks": [{"claim": check.claim, "passed": check.passed} for check in self.checks],
            "figures": self.figures,
        }


class Stage:
    """Where the steps of the demo show what they do."""

    def __init__(self, console: Console, *, unicode: bool, motion: Motion) -> None:
        self.steps: list[Step] = []
        self.bars = BARS if unicode else PLAIN_BARS
        self.arrow = "→" if unicode else "to"
        self._console = console
        self._motion = motion
        self._marks = {True: "✓", False: "✗"} if unicode else {True: "ok", False: "FAILED"}
        self._spinner = "dots" if unicode else "line"

    @property
    def passed(self) -> bool:
        """Whether all that was claimed held, and every step claimed something."""
        return bool(self.steps) and all(step.passed for step in self.steps)

    def open(self, title: str, subtitle: str) -> None:
        """Say what comes."""
        self._console.print(Text.assemble((title, "bold cyan"), f"  {subtitle}"))

    def begin(self, name: str, title: str) -> None:
        """Begin a step."""
        self.steps.append(Step(name, title))
        self._console.print()
        self._console.print(Text.assemble((f"{len(self.steps):>2}  ", "dim"), (title, "bold")))

    def gap(self) -> None:
        """An empty line."""
        self._console.print()

    def say(self, *parts: Part, mark: Part = "") -> None:
        """A line of the step, behind a mark if it has one."""
        if self._console.is_terminal:
            # What is longer than a line goes on below its beginning.
            line = Table.grid(padding=(0, 1, 0, 0) if mark else 0)
            line.add_row(*([Text.assemble(mark)] if mark else []), Text.assemble(*parts))
            self._console.print(_indented(line), soft_wrap=False)
        else:
            self._console.print(Text.assemble(" " * INDENT, mark, " " if mark else "", *parts))

    def command(self, *words: str) -> None:
        """The command that does what comes next."""
        self.say((" ".join(words), "cyan"), mark=("$", "dim"))

    def check(self, claim: str, passed: bool) -> None:
        """Claim something, and say whether it holds."""
        self.steps[-1].checks.append(Check(claim, passed))
        self.say(claim, mark=self.mark(passed))

    def sum_up(self, result: str, **figures: object) -> None:
        """What came out of the step, in a few words for the summary, and in numbers for `--json`."""
        self.steps[-1].result = result
        self.steps[-1].figures.update(figures)

    def mark(self, passed: bool) -> tuple[str, str]:
        """A check mark or a cross, with its style."""
        return self._marks[passed], "green" if passed else "bold red"

    def show(self, what: RenderableType) -> None:
        """Something larger than a line."""
        if self._console.is_terminal:
            self._console.print(_indented(what))
            return
        for segments in self._console.render_lines(_indented(what), pad=False):
            self._console.print("".join(segment.text for segment in segments).rstrip())

    def table(self, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """Rows under a header, whose names of several words stand in several lines where it is narrow."""
        if not self._console.is_terminal:
            for line in align([header, *rows]):
                self.say(line)
            return
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
        for name in header:
            table.add_column(name, no_wrap=" " not in name)
        for row in rows:
            table.add_row(*row)
        self.show(table)

    def heading(self, text: str) -> None:
        """The title of what comes after the steps."""
        self._console.print()
        self._console.print(Text(text, style="bold"))

    def working(self, what: str) -> AbstractContextManager[object]:
        """A sign of life on a terminal, while a block takes its time."""
        if self._motion is not Motion.LIVE:
            return nullcontext()
        spinner = Spinner(self._spinner, Text(what, style="dim"), style="cyan")
        return Live(_indented(spinner), console=self._console, transient=True, refresh_per_second=10)

    def moving(self) -> "Moving":
        """A place whose content changes, and which is gone at the end."""
        return Moving(self._console, self._motion)


class Moving:
    """Something that changes while one looks."""

    def __init__(self, console: Console, motion: Motion) -> None:
        self._console = console
        self._motion = motion
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._told_at_ms = monotonic_ms()

    def __enter__(self) -> "Moving":
        if self._motion is Motion.LIVE:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, what: RenderableType, line: str) -> None:
        """Replace what is shown; where nothing can be replaced, the line says it from time to time."""
        if self._motion is Motion.LIVE:
            self._live.update(_indented(what), refresh=True)
        elif self._motion is Motion.LINES and monotonic_ms() - self._told_at_ms >= LINE_SECONDS * 1000:
            self._told_at_ms = monotonic_ms()
            self._console.print(" " * INDENT + line)


def _indented(what: RenderableType) -> Padding:
    return Padding(what, (0, 0, 0, INDENT), expand=False)


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait until a condition holds; False if it does not within some seconds."""
    deadline_ms = monotonic_ms() + round(seconds * 1000)
    while not condition():
        if monotonic_ms() >= deadline_ms:
            return False
        Event().wait(POLL_SECONDS)
    return True


def rate(count: int, milliseconds: int) -> int:
    """How many a second.

    >>> rate(30, 1500)
    20
    """
    return round(count * 1000 / max(1, milliseconds))
