"""The parts that export targets of all formats share: an identity, a state, and a lock.

A target stores the version that it holds everything up to, in the same step as the rows.  So there is no
second checkpoint that could differ, and a job that was killed anywhere is simply run again: it skips what was
committed and does the rest anew.
"""

import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Final, NamedTuple, Protocol
from urllib.parse import unquote, urlsplit

import msgspec
import pyarrow
import pyarrow.dataset

from floodmark.accounting.checks import Checks
from floodmark.files.directory import Directory, directory_at
from floodmark.model.errors import InvalidArgument, InvalidOption, LeaseHeld
from floodmark.model.version import Version
from floodmark.spark.jobs.exports.files import CURRENT, HISTORY, ExportFile

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
        if (self.site, self.site_id, self.namespace, self.view) != (
            asked.site,
            asked.site_id,
            asked.namespace,
            asked.view,
        ):
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


class Cuts(msgspec.Struct, frozen=True, kw_only=True):
    """The versions at which a target can be read.

    A history can be read at any version from `since` to `through`; a current view at single ones.
    """

    through: Version
    since: Version = 0
    only: frozenset[Version] | None = None


class Exported(NamedTuple):
    """An export that can be read: at one of its cuts, `read` gives the rows."""

    identity: ExportIdentity
    cuts: Cuts
    read: Callable[[Version], pyarrow.dataset.Dataset]


class ExportTarget(Protocol):
    """A table that rows are exported to."""

    @property
    def identity(self) -> ExportIdentity:
        """The namespace and the view."""
        ...

    @property
    def through(self) -> Version | None:
        """It holds everything at or below this; None if it holds nothing yet."""
        ...

    @property
    def checks(self) -> Checks:
        """The checks against heartbeats up to there.  They move in the same step."""
        ...

    @property
    def rewrites_whole(self) -> bool:
        """Whether a merge must write all rows again, or only the files that it touches."""
        ...

    def prepare(self) -> Directory:
        """Remove the files of uncommitted steps.  Returns the directory for the files of the next step."""
        ...

    def files(self) -> list[Path]:
        """The files of a current view."""
        ...

    def commit(
        self,
        since: Version,
        through: Version,
        added: Sequence[ExportFile],
        removed: Sequence[Path],
        checks: Checks,
    ) -> None:
        """Add and remove files and move on to `through`, in one durable step."""
        ...

    def advance(self, through: Version, checks: Checks) -> None:
        """Move on to `through` without new rows."""
        ...


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
