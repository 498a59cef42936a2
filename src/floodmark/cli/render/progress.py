"""Progress of work that takes longer than a moment: on stderr, if that is a terminal."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import Timer
from typing import Final, TypeVar

from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from floodmark.cli.render.output import console_on

PROGRESS_SECONDS: Final = 2.0
_COUNTED_EVERY: Final = 1_000

Item = TypeVar("Item")


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
    """Show a spinner with a count; yields a function that sets its description and its count."""
    with _display(what, "{task.completed:,.0f}", seconds) as display:
        task = display.task_ids[0]
        yield lambda now, done: display.update(task, description=now, completed=done)


@contextmanager
def _display(what: str, count: str, seconds: float) -> Iterator[Progress]:
    console = console_on(sys.stderr)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TextColumn(count), TimeElapsedColumn())
    display = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
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
