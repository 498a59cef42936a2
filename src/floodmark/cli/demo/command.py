"""floodmark demo: the command, which loads the play and Spark with it only when it is run."""

import sys
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Final

import typer

from floodmark.cli.arguments import JSON_HELP
from floodmark.cli.demo.stage import Motion, Stage
from floodmark.cli.failures import DONE, FINDING, Usage
from floodmark.cli.jobs import EXTRA
from floodmark.cli.render.output import Output, console_on, speaks_unicode
from floodmark.model.errors import InvalidConfiguration

_PLAY: Final = "floodmark.cli.demo.play"


def demo(
    directory: Annotated[
        Path | None,
        typer.Option(
            "--directory",
            metavar="DIRECTORY",
            help="Make the sites here, and keep them; without it, in a temporary directory.",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print only a summary. " + JSON_HELP)] = False,
) -> None:
    """Show two sites that lose a change, find it and mend it.

    Two servers on this machine, messages at both, Spark between them. It takes about a minute,
    and nothing in it is staged: every claim is checked, and the exit code is 1 if one fails.

    \b
    Examples:
      floodmark demo
      floodmark demo --directory demo-sites
    """
    if directory is not None and directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise Usage(f"{directory} is there already, and not empty", "name a directory that is not there yet")
    console = console_on(sys.stdout, quiet=json)
    motion = Motion.STILL if json else Motion.LIVE if console.is_terminal else Motion.LINES
    stage = Stage(console, unicode=speaks_unicode(sys.stdout), motion=motion)
    perform = _load_play().perform
    if directory is not None:
        account = perform(stage, directory, kept=True)
    else:
        # Whoever presses Ctrl-C twice leaves while Spark's Java still has files here.
        with TemporaryDirectory(prefix="floodmark-demo-", ignore_cleanup_errors=True) as temporary:
            account = perform(stage, Path(temporary), kept=False)
    if json:
        Output(json=True).object(account)
    raise typer.Exit(DONE if stage.passed else FINDING)


def _load_play() -> Any:
    try:
        return import_module(_PLAY)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.startswith("floodmark"):
            raise
        raise InvalidConfiguration(
            f"the sites of the demo copy each other on Spark, which is not installed here ({error.name} is "
            f"missing); install it with: pip install '{EXTRA}'"
        ) from error
