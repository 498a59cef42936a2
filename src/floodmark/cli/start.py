"""The entry point of `floodmark`: `--version` is answered before anything large is imported."""

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Final

from floodmark import __version__

COMMANDS: Final = "floodmark.cli.main"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    if list(sys.argv[1:] if arguments is None else arguments) == ["--version"]:
        print(f"floodmark {__version__}")
        return 0
    code: int = import_module(COMMANDS).main(arguments)
    return code
