"""Checks of the names of sites, namespaces, feeds and subscriptions, and of paths."""

import os
from pathlib import Path
from typing import cast

from floodmark.model.errors import InvalidArgument, InvalidName
from floodmark.model.limits import NAMESPACE_NAME_CHARACTERS_MAX


def require_name(name: object, what: str) -> None:
    """Raise InvalidName unless a name fits into file names, URLs and metrics: short, printable, no blanks."""
    if (
        not isinstance(name, str)
        or not 0 < len(name) <= NAMESPACE_NAME_CHARACTERS_MAX
        or not name.isprintable()
        or any(character.isspace() or character == "/" for character in name)
    ):
        raise InvalidName(
            f"{name!r:.200} cannot name a {what}: use 1 to {NAMESPACE_NAME_CHARACTERS_MAX} printable "
            "characters without blanks or slashes"
        )


def require_path(path: object, what: str) -> Path:
    """The path that a user has given; raises InvalidArgument if it is empty, or no path."""
    try:
        text = os.fspath(cast("str | os.PathLike[str]", path))
    except TypeError:
        text = ""
    if type(text) is not str or not text or "\0" in text:
        raise InvalidArgument(f"{what} is named by a path that is not empty, not by {path!r:.60}")
    return Path(text)
