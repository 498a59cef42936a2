"""The parts that export targets of all formats share: an identity, a state, and a lock.

A target stores the version that it holds everything up to, in the same step as the rows.  So there is no
second checkpoint that could differ, and a job that was killed anywhere is simply run again: it skips what was
committed and does the rest anew.
"""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import unquote, urlsplit

import msgspec
import pyarrow
import pyarrow.dataset

from floodmark.files.directory import Directory, directory_at
from floodmark.model.errors import InvalidArgument, InvalidOption, LeaseHeld
from floodmark.model.version import Version
from floodmark.spark.jobs.exports.frames import CURRENT, HISTORY

LOCK: Final = "_floodmark.lock"


class ExportView(StrEnum):
    """The rows of an export."""

    HISTORY = "history"
    """Every change is a row."""

    CURRENT = "current"
    """Every live key is a row, with its newest value."""

    @property
    def schema(self) -> pyarrow.Schema:
        """The columns."""
        return HISTORY if self is ExportView.HISTORY else CURRENT


class Format(StrEnum):
    """The format of an export."""

    DELTA = "delta"
    PARQUET = "parquet"


class ExportIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """The namespace of a target, and its view.

    A history holds the changes above `since`, and with `snapshot` the records that lived at `since`.
    """

    id: str
    site: str
    site_id: int
    namespace: str
    namespace_id: int
    view: ExportView
    since: Version = 0
    snapshot: bool = False

    @property
    def start(self) -> Version | None:
        """The `through` of an empty target; None if a snapshot comes first."""
        return self.since if self.view is ExportView.HISTORY and not self.snapshot else None

    @property
    def safe_point(self) -> str:
        """The name of the safe point that keeps the changes above `through`."""
        return f"spark/export-{self.id}"

    def require_same(self, asked: "ExportIdentity", location: str) -> None:
        """Raise InvalidArgument for a target with other rows than those asked for."""
        names = ("site", "site_id", "namespace", "view")
        if any(getattr(self, name) != getattr(asked, name) for name in names):
            raise InvalidArgument(
                f"{location} holds the {self.view} of {self.namespace!r} of site {self.site!r} (id "
                f"{self.site_id}), not the {asked.view} of {asked.namespace!r} of site {asked.site!r} (id "
                f"{asked.site_id}); choose another target"
            )
        if self.namespace_id != asked.namespace_id:
            raise InvalidArgument(
                f"{location} holds a namespace {self.namespace!r} that was dropped since, and one that came "
                "later has its name; export that to another target"
            )


class Exported(NamedTuple):
    """An export that can be read: `read` gives its rows at a version.

    A history can be read at any version from `since` to `through`; a current view only at those of `only`.
    """

    identity: ExportIdentity
    since: Version
    through: Version
    only: frozenset[Version] | None
    read: Callable[[Version], pyarrow.dataset.Dataset]


def step_prefix(since: Version) -> str:
    """The first part of the names that tasks give to the files of a step that begins at a version."""
    return f"step-{since:020}-"


def local_directory(location: str) -> Directory:
    """The directory of a target, which every machine that takes part must see under this name."""
    parts = urlsplit(location)
    if parts.scheme == "file" and not parts.netloc:
        return directory_at(unquote(parts.path))
    if "://" in location or not location:
        raise InvalidOption(
            f"an export is written to a directory that all workers see, not to {location!r:.200}; mount the "
            "storage, and name the directory",
            option="target",
        )
    return directory_at(str(Path(location).absolute()))


@contextmanager
def only_writer(directory: Directory) -> Iterator[None]:
    """Lock the directory against other exports until the block or the process ends."""
    directory.make()
    with directory.failing("written"):
        descriptor = os.open(directory.path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            location = directory.location
            raise LeaseHeld(f"another process exports to {location}; wait for it, or stop it") from error
        yield
    finally:
        os.close(descriptor)
