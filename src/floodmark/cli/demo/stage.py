"""The account of the demo: its steps, their claims, and whether they held."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

# Text, or text with a style.
Part: TypeAlias = str | tuple[str, str]


@dataclass
class DemoStep:
    """One step as it went, and the shape of its account for `--json`."""

    step: str
    title: str
    passed: bool = False
    result: str = ""
    checks: list[dict[str, object]] = field(default_factory=list)
    figures: dict[str, object] = field(default_factory=dict)

    @property
    def outcome(self) -> str:
        """The result, or the claims that did not hold."""
        broken = "; ".join(str(check["claim"]) for check in self.checks if not check["passed"])
        return self.result if self.passed else f"{self.title}: {broken or 'nothing was checked'}"


class Stage:
    """The output of the steps, and their results.  With `live`, a spinner turns while a step works."""

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

    def heading(self, *parts: Part) -> None:
        """Print a title after an empty line."""
        self._console.print()
        self._console.print(Text.assemble(*parts))

    def begin(self, name: str, title: str) -> None:
        """Begin a step."""
        self.steps.append(DemoStep(name, title))
        self.heading((f"{len(self.steps):>2}  ", "dim"), (title, "bold"))

    def say(self, *parts: Part) -> None:
        """Print a line of the step.  On a terminal, a long line is wrapped with the same indent."""
        line = Padding(Text.assemble(*parts), (0, 0, 0, 4), expand=False)
        if self._console.is_terminal:
            self._console.print(line, soft_wrap=False)
        else:
            self._console.print(Text.assemble("    ", *parts))

    def command(self, *words: str) -> None:
        """Print the command for the next action."""
        self.say(("$ ", "dim"), (" ".join(words), "cyan"))

    def check(self, claim: str, passed: bool) -> None:
        """Record a claim, and print whether it holds."""
        step = self.steps[-1]
        step.passed = passed and (step.passed or not step.checks)
        step.checks.append({"claim": claim, "passed": passed})
        self.say(self.mark(passed), f" {claim}")

    def sum_up(self, result: str, **figures: object) -> None:
        """Set the result of the step."""
        self.steps[-1].result, self.steps[-1].figures = result, figures

    def mark(self, passed: bool) -> tuple[str, str]:
        """A check mark or a cross, with its style."""
        return self._marks[passed], "green" if passed else "bold red"

    def working(self, what: str) -> AbstractContextManager[Any]:
        """Show a spinner with a text within the block."""
        return self._console.status(what, spinner=self._spinner) if self._is_live else nullcontext()
