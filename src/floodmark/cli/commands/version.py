"""version: which Floodmark this is."""

import platform
from importlib.metadata import version as installed_version

from floodmark.cli.arguments import Json
from floodmark.cli.render.output import Output
from floodmark.model.format import FORMAT


def version(json: Json = False) -> None:
    """Print the versions of Floodmark, its format and Python.

    \b
    Example:
      floodmark version
    """
    own, python = installed_version("floodmark"), platform.python_version()
    Output(json=json).result(
        {"floodmark": own, "format": FORMAT, "python": python},
        f"floodmark {own} (format {FORMAT}, Python {python})",
    )
