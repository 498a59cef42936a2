"""From what a user types to values; a value that cannot be read is an error of usage."""

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import typer

from floodmark.model import Resolved
from floodmark.model.text import read_at

if TYPE_CHECKING:
    from floodmark.site.arguments import Since

Result = TypeVar("Result")


def parse(read: Callable[[str], Result]) -> Callable[[str], Result]:
    """A parser for Typer: a ValueError of `read` becomes an error of usage."""

    def parser(text: str) -> Result:
        try:
            return read(text)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error

    # Typer shows the name where there is no metavar.
    parser.__name__ = read.__name__
    return parser


def read_since(text: str) -> "Since":
    """A beginning: a word for it, a version, a time, or a place within a snapshot.

    `snapshot` stands for every key as it is now, `beginning` for the first change of all, `now` for only what
    is to come.

    >>> read_since("now"), read_since("411225436913926252"), read_since("411225436913926252@0x000001616461")
    ('now', 411225436913926252, Resolved(version=411225436913926252, snapshot=b'\\x00\\x00\\x01ada'))
    """
    match text:
        case "snapshot" | "beginning" | "now":
            return text
    version, mark, key = text.partition("@0x")
    try:
        return Resolved(read_at(version), bytes.fromhex(key)) if mark else read_at(text)
    except ValueError as error:
        raise ValueError(f"{error}, snapshot, beginning or now") from error
