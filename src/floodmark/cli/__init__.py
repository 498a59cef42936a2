"""The `floodmark` command."""

from floodmark.cli.main import main

__all__ = ["main"]
