"""What the steps of the demo share: the site that they play on, and a place to say what they found.

A step prints sentences with figures from the run, and checks what it claims.  The summary at the end is
made of these checks, so a demo that prints a claim which does not hold ends with exit code 1.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Final, TypeVar

from rich.console import Console
from rich.text import Text

import floodmark
from floodmark.cli.output import progress
from floodmark.cli.text import BARS, PLAIN_BARS
from floodmark.clock import system_time_ms

SITE: Final = "oslo"
ORDERS: Final = "orders"

_POLL_SECONDS: Final = 0.01
_PROGRESS_SECONDS: Final = 0.5

Result = TypeVar("Result")


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
    checks: list[Check] = field(default_factory=list)
    figures: dict[str, object] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether everything that the step claimed held."""
        return bool(self.checks) and all(check.passed for check in self.checks)


class Stage:
    """The site of the demo, and the account of its steps."""

    def __init__(self, directory: Path, console: Console, *, unicode: bool) -> None:
        self.directory = directory
        self.steps: list[Step] = []
        self.bars = BARS if unicode else PLAIN_BARS
        self._console = console
        self._marks = {True: "✓", False: "✗"} if unicode else {True: "ok", False: "FAILED"}
        self._site: floodmark.Site | None = None

    # The site

    @property
    def site(self) -> floodmark.Site:
        """The open site."""
        assert self._site is not None
        return self._site

    @property
    def orders(self) -> floodmark.Namespace:
        """The namespace that most steps write to."""
        return self.site.namespace(ORDERS)

    def open(self, *, background: bool = True) -> None:
        """Open the site, anew if it was open."""
        self.close()
        self._site = floodmark.open(self.directory, site=SITE, background=background)

    def close(self) -> None:
        """Close the site if it is open."""
        if self._site is not None:
            self._site.close()
            self._site = None

    # The account

    def begin(self, name: str, title: str) -> None:
        """Begin a step."""
        self.steps.append(Step(name, title))
        self._console.print(Text(f"\n{len(self.steps):>2}  {title}", style="bold"))

    def say(self, text: str, style: str = "") -> None:
        """A line of the step."""
        self._console.print(Text("    " + text, style=style))

    def check(self, claim: str, passed: bool) -> None:
        """Claim something, and say whether it holds."""
        self.steps[-1].checks.append(Check(claim, passed))
        mark = (self.mark(passed), "green" if passed else "bold red")
        self._console.print(Text.assemble("    ", mark, f" {claim}"))

    def figures(self, **figures: object) -> None:
        """Numbers of the step, for `--json`."""
        self.steps[-1].figures.update(figures)

    def mark(self, passed: bool) -> str:
        """A check mark or a cross."""
        return self._marks[passed]

    def working(self, what: str) -> AbstractContextManager[None]:
        """A sign of progress on a terminal, while a block takes its time."""
        return progress(what, seconds=_PROGRESS_SECONDS)


def run_threads(threads: int, work: Callable[[int], Result]) -> list[Result]:
    """The results of a function called with 0, 1, 2 … in as many threads at once."""
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, range(threads)))


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait until a condition holds; False if it does not within some seconds."""
    deadline_ms = system_time_ms() + round(seconds * 1000)
    while not condition():
        if system_time_ms() >= deadline_ms:
            return False
        Event().wait(_POLL_SECONDS)
    return True


def crash_key(number: int) -> bytes:
    """The key of a write of the process that is killed; its value is the number."""
    return f"crash-{number:06}".encode()


def rate(count: int, milliseconds: int) -> int:
    """How many a second."""
    return round(count * 1000 / max(1, milliseconds))


def percentile(numbers: Sequence[int], share: float) -> int:
    """The number that a share of all does not exceed."""
    ordered = sorted(numbers)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]
