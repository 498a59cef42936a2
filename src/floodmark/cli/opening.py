"""Opening a site for a command.  Only `init` and `demo` make one: a typo must not leave an empty site."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import floodmark
from floodmark.model.errors import NotASite

SITE_FILE: Final = "floodmark.json"


def holds_site(directory: Path) -> bool:
    """Whether a directory is a site."""
    return (directory / SITE_FILE).is_file()


@contextmanager
def open_site(directory: Path, *, background: bool = False) -> Iterator[floodmark.Site]:
    """A site that is there.  Short commands leave heartbeats and garbage collection to others."""
    if not holds_site(directory):
        raise NotASite(f"there is no site in {directory}", path=str(directory), missing=True)
    with floodmark.open(directory, background=background) as site:
        yield site
