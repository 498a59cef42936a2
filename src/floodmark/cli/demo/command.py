"""floodmark demo: runs the steps, and sums them up."""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from shlex import quote
from tempfile import TemporaryDirectory
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.text import Text

from floodmark.cli.arguments import JSON_HELP
from floodmark.cli.demo.contention import race_for_a_counter, split_under_writes
from floodmark.cli.demo.history import expire, follow_changes, travel_in_time
from floodmark.cli.demo.serving import serve_to_others
from floodmark.cli.demo.stage import ORDERS, SITE, Stage
from floodmark.cli.demo.survival import account_for_changes, collect_garbage, kill_a_writer
from floodmark.cli.demo.writing import create_namespace, read, write_from_threads
from floodmark.cli.failures import DONE, FINDING, Usage
from floodmark.cli.opening import holds_site
from floodmark.cli.output import Output, console_on, speaks_unicode
from floodmark.cli.text import align, json_bytes
from floodmark.clock import system_time_ms

STEPS: Final[list[Callable[[Stage], None]]] = [
    create_namespace,
    write_from_threads,
    read,
    travel_in_time,
    expire,
    follow_changes,
    race_for_a_counter,
    split_under_writes,
    kill_a_writer,
    account_for_changes,
    serve_to_others,
    collect_garbage,
]


def demo(
    directory: Annotated[
        Path | None,
        typer.Option(
            "--directory",
            metavar="DIRECTORY",
            help="Make the site here, and keep it; without it, in a temporary directory.",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print only a summary. " + JSON_HELP)] = False,
) -> None:
    """See what a site does, with every claim checked.

    It takes about ten seconds, and nothing in it is staged. The exit code is 1 if a check fails.

    \b
    Examples:
      floodmark demo
      floodmark demo --directory demo-site
    """
    if directory is not None and holds_site(directory):
        raise Usage(f"{directory} holds a site already", "name a directory that is not there yet")
    if directory is not None:
        code = _play(directory, directory, json=json)
    else:
        with TemporaryDirectory(prefix="floodmark-demo-") as temporary:
            code = _play(Path(temporary) / SITE, None, json=json)
    raise typer.Exit(code)


def _play(directory: Path, kept: Path | None, *, json: bool) -> int:
    """Run the steps on a new site; 0 if all that they claimed holds."""
    console = console_on(sys.stdout, quiet=json)
    stage = Stage(directory, console, unicode=speaks_unicode(sys.stdout))
    where = "a temporary directory" if kept is None else str(kept)
    console.print(Text(f"Floodmark: one site in {where}, and {len(STEPS)} things that it does"))
    started_ms = system_time_ms()
    try:
        for step in STEPS:
            step(stage)
    finally:
        stage.close()
    seconds = (system_time_ms() - started_ms) / 1000
    passed = all(step.passed for step in stage.steps)
    if json:
        _print_json(stage, seconds, kept, passed=passed)
    else:
        _print_summary(console, stage, seconds, passed=passed)
        _print_next(console, kept)
    return DONE if passed else FINDING


def _print_json(stage: Stage, seconds: float, kept: Path | None, *, passed: bool) -> None:
    steps = [
        {
            "step": step.name,
            "title": step.title,
            "passed": step.passed,
            "checks": [{"claim": check.claim, "passed": check.passed} for check in step.checks],
            "figures": step.figures,
        }
        for step in stage.steps
    ]
    directory = json_bytes("directory", None if kept is None else os.fsencode(kept))
    Output(json=True).object({"passed": passed, "seconds": round(seconds, 1), **directory, "steps": steps})


def _print_summary(console: Console, stage: Stage, seconds: float, *, passed: bool) -> None:
    console.print(Text("\nSummary", style="bold"))
    lines = align(
        [(stage.mark(check.passed), step.name, check.claim) for step in stage.steps for check in step.checks]
    )
    for line in lines:
        console.print(Text("    " + line))
    checks = [check for step in stage.steps for check in step.checks]
    held = sum(check.passed for check in checks)
    style = "green" if passed else "bold red"
    console.print(Text(f"    {held} of {len(checks)} checks held, in {seconds:.1f} s", style=style))


def _print_next(console: Console, kept: Path | None) -> None:
    console.print(Text("\nTry next", style="bold"))
    rows: list[Sequence[str]] = []
    if kept is None:
        rows.append(("floodmark demo --directory demo-site", "the demo again, keeping its site"))
    site = "demo-site" if kept is None else quote(str(kept))
    rows += [
        (f"floodmark status {site}", "how the site is"),
        (f"floodmark scan {site} {ORDERS} --prefix order- --limit 5", "some of its keys"),
        (f"floodmark get {site} {ORDERS} order-of-ada", "one of them"),
        (f"floodmark changes {site} --namespace {ORDERS} --prefix live-", "what was written, in order"),
        (f"floodmark partition heat {site}", "where the writes went"),
        ("floodmark --help", "all commands"),
    ]
    for line in align(rows):
        console.print(Text("    " + line))
