"""floodmark demo: the command, which loads the story and Spark with it only when it is run."""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from floodmark.cli.arguments import JSON_HELP
from floodmark.cli.demo.stage import Stage
from floodmark.cli.failures import DONE, FINDING, Usage
from floodmark.cli.jobs import load
from floodmark.cli.render.output import Output, console_on, speaks_unicode


def demo(
    directory: Annotated[
        Path | None,
        "DIRECTORY",
        "Make the sites in this directory and keep them; by default they are temporary.",
    ] = None,
    console: Annotated[bool, "Also serve a console of both sites, and print its link."] = False,
    json: Annotated[bool, "Print only a summary. " + JSON_HELP] = False,
) -> None:
    """Show two sites that lose a change, find it and repair it.

    Two servers on this machine, messages at both, Spark between them. It takes about a minute,
    and nothing in it is staged: every claim is checked, and the exit code is 1 if one fails.

    Examples:
      floodmark demo
      floodmark demo --console
      floodmark demo --directory demo-sites
    """
    if directory is not None and directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise Usage(f"{directory} exists and is not empty", "name a directory that does not exist yet")
    terminal = console_on(sys.stdout, quiet=json)
    stage = Stage(terminal, unicode=speaks_unicode(sys.stdout), live=terminal.is_terminal and not json)
    perform = load("floodmark.cli.demo.story").perform
    # A second Ctrl-C leaves while the servers still have files here.
    with TemporaryDirectory(prefix="floodmark-demo-", ignore_cleanup_errors=True) as temporary:
        home = directory or Path(temporary)
        account = perform(stage, home, kept=directory is not None, console=console)
    if json:
        Output(json=True).object(account)
    raise typer.Exit(DONE if stage.passed else FINDING)
