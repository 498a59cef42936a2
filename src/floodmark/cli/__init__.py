"""The `floodmark` command."""

from floodmark.cli.start import main

__all__ = ["main"]
