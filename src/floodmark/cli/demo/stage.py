"""The account of the demo: its steps, their claims, and whether they held."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from floodmark.cli.render.output import Part


@dataclass(frozen=True)
class Check:
    """A claim, and whether it held."""

    claim: str
    passed: bool


@dataclass
class DemoStep:
    """One step as it went: its result in a few words, and in figures for `--json`."""

    name: str
    title: str
    result: str = ""
    checks: list[Check] = field(default_factory=list)
    figures: dict[str, object] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether the step claimed something, and all of it held."""
        return bool(self.checks) and all(check.passed for check in self.checks)

    @property
    def outcome(self) -> str:
        """The result, or the claims that did not hold."""
        broken = [check.claim for check in self.checks if not check.passed]
        return self.result if self.passed else f"{self.title}: {'; '.join(broken) or 'nothing was checked'}"

    def account(self) -> dict[str, object]:
        """The step for `--json`."""
        checks = [asdict(check) for check in self.checks]
        return {
            "step": self.name,
            "title": self.title,
            "passed": self.passed,
            "checks": checks,
            "figures": self.figures,
        }


class Stage:
    """Where the steps show what they do.  With `live`, a spinner turns while a step works."""

    def __init__(self, console: Console, *, unicode: bool, live: bool) -> None:
        self.steps: list[DemoStep] = []
        self._console = console
        self._is_live = live
        self._marks = {True: "✓", False: "✗"} if unicode else {True: "ok", False: "FAILED"}
        self._spinner = "dots" if unicode else "line"

    @property
    def passed(self) -> bool:
        """Whether every step claimed something, and all of it held."""
        return bool(self.steps) and all(step.passed for step in self.steps)

    def heading(self, text: str, *more: Part, before: Part = "") -> None:
        """A title, behind an empty line."""
        self._console.print()
        self._console.print(Text.assemble(before, (text, "bold"), *more))

    def begin(self, name: str, title: str) -> None:
        """Begin a step."""
        self.steps.append(DemoStep(name, title))
        self.heading(title, before=(f"{len(self.steps):>2}  ", "dim"))

    def say(self, *parts: Part, mark: Part = "") -> None:
        """A line of the step, behind a mark if it has one."""
        if not self._console.is_terminal:
            self._console.print(Text.assemble("    ", mark, " " if mark else "", *parts))
            return
        # A long line goes on below its beginning.
        line = Table.grid(padding=(0, 1, 0, 0) if mark else 0)
        line.add_row(*([Text.assemble(mark)] if mark else []), Text.assemble(*parts))
        self._console.print(Padding(line, (0, 0, 0, 4), expand=False), soft_wrap=False)

    def command(self, *words: str) -> None:
        """The command that does what comes next."""
        self.say((" ".join(words), "cyan"), mark=("$", "dim"))

    def check(self, claim: str, passed: bool) -> None:
        """Claim something, and say whether it holds."""
        self.steps[-1].checks.append(Check(claim, passed))
        self.say(claim, mark=self.mark(passed))

    def sum_up(self, result: str, **figures: object) -> None:
        """The result of the step."""
        self.steps[-1].result = result
        self.steps[-1].figures.update(figures)

    def mark(self, passed: bool) -> tuple[str, str]:
        """A check mark or a cross, with its style."""
        return self._marks[passed], "green" if passed else "bold red"

    def working(self, what: str) -> AbstractContextManager[Any]:
        """A spinner with a text, which `update` replaces."""
        if not self._is_live:
            return nullcontext()
        return self._console.status(Text(what, style="dim"), spinner=self._spinner)
