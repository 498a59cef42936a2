"""The `floodmark` command: its groups put together, and one place where everything ends."""

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import TextIOWrapper
from typing import Annotated, Final

import typer
from typer.main import get_command

from floodmark.cli import namespaces, partitions, safepoints
from floodmark.cli.changes import changes
from floodmark.cli.data import delete, get, put, scan
from floodmark.cli.demo import demo
from floodmark.cli.failures import DONE, INTERRUPTED, report
from floodmark.cli.sites import gc, init, status, version

HELP: Final = """Floodmark: a key-value store that remembers every change.

Commands work on a site in a directory, which one process at a time may open.

\b
Example:
  floodmark demo
  floodmark init data/oslo --site oslo
  floodmark namespace create data/oslo users
  floodmark put data/oslo users ada countess
  floodmark get data/oslo users ada
  floodmark changes data/oslo

Keys and values are UTF-8 text, or hexadecimal behind 0x: 0x00ff. What is shown can be typed.
Durations are 90s, 30m, 24h, 7d. Every command has --json, and --help with examples.

Exit codes: 0 done; 1 not found, or a check failed; 2 could not tell; 64 usage; 69 unreachable, try
again; 70 a bug in Floodmark; 77 not allowed; 130 interrupted.
"""


@dataclass
class Session:
    """What the options before the command have set."""

    debug: bool


app = typer.Typer(
    help=HELP,
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)


@app.callback(invoke_without_command=True, help=HELP)
def root(
    context: typer.Context,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show where an error came from. Also FLOODMARK_DEBUG=1.")
    ] = False,
) -> None:
    if debug:
        context.obj.debug = True
    if context.invoked_subcommand is None:
        print(context.get_help())


for command in (demo, init, put, get, delete, scan, changes, status, gc, version):
    app.command()(command)
app.add_typer(namespaces.commands, name="namespace")
app.add_typer(partitions.commands, name="partition")
app.add_typer(safepoints.commands, name="safepoint")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit code."""
    _replace_closed_streams()
    session = Session(debug=os.environ.get("FLOODMARK_DEBUG", "") not in ("", "0"))
    try:
        code = _run(sys.argv[1:] if arguments is None else arguments, session)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has what it wanted, as in `| head`.
        _discard_stdout()
        return DONE
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except Exception as error:
        code = report(error, debug=session.debug)
        _flush_or_discard()
    return code


def _run(arguments: Sequence[str], session: Session) -> int:
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    command = get_command(app)
    try:
        with command.make_context("floodmark", list(arguments), obj=session) as context:
            command.invoke(context)
    except typer.Exit as finished:
        return finished.exit_code
    return DONE


def _replace_closed_streams() -> None:
    """Python has None for a stream that the shell closed, as in `>&-`: what is printed goes nowhere."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8"))


def _flush_or_discard() -> None:
    """Bring out what was printed before an error, unless printing was the error."""
    try:
        sys.stdout.flush()
    except OSError:
        _discard_stdout()


def _discard_stdout() -> None:
    """Let what is still buffered go nowhere, so that the interpreter's last flush does not complain."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
