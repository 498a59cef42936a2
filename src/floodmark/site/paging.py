"""Rows from pages, with what the pages need held from the start."""

from collections.abc import Generator, Iterator
from contextlib import closing
from typing import TypeVar

Row = TypeVar("Row")

Pages = Generator[list[Row], None, None]


def rows_of(pages: Pages[Row]) -> Iterator[Row]:
    """The rows of all pages but the first, which is taken at once and must be empty.

    A generator does nothing before its first item is asked for, and cleans up only what it has begun.  By
    taking an empty first page, a reader holds its safe point from the call on, is refused at once if it
    comes too late, and lets go of the safe point even if it never reads a row.

    >>> def pages():
    ...     print("held")
    ...     yield []
    ...     yield [1, 2]
    >>> rows = rows_of(pages())
    held
    >>> list(rows)
    [1, 2]
    """
    next(pages)
    return _flatten(pages)


def _flatten(pages: Pages[Row]) -> Iterator[Row]:
    with closing(pages):
        for page in pages:
            yield from page
