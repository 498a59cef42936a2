"""Exports as plain Parquet directories, which any reader takes as one table.

A history:

    _floodmark.json                          the export's identity and state
    _new-<token>/…                           being written; readers skip it
    changes-<since>-<through>-<n>.parquet    the changes in (since, through]

The tasks of a step write into a directory of their own.  Then the state names the files and their final
names: from there on the step is decided, and the next run finishes it if this one is killed.  The files are
renamed, and the state moves on.  A reader that filters by `_commit_version` at or below the state's `through`
sees whole steps only; any other reader sees each change once.

A current view:

    _floodmark.json                          the state, with the directory that is current
    current -> rows-<through>-<token>        the link to read
    rows-<through>-<token>/…                 one row per live key

Each step writes a directory of its own, and the state makes it current.  The directory before it stays until
the next step, for readers that have it open.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final
from uuid import uuid4

import msgspec
import pyarrow
import pyarrow.dataset
import pyarrow.parquet
from msgspec.structs import replace

from floodmark.accounting.checks import Checks
from floodmark.files.directory import Directory
from floodmark.model.errors import InvalidArgument, StorageFailed
from floodmark.model.version import Version
from floodmark.spark.jobs.exports.frames import ExportFile
from floodmark.spark.jobs.exports.state import LOCK, Exported, ExportIdentity, ExportView

STATE: Final = "_floodmark.json"
POINTER: Final = "current"
CUTS_MAX: Final = 100

_NEW: Final = "_new-"
_ROWS: Final = "rows-"
_EMPTY: Final = "empty.parquet"


class Renaming(msgspec.Struct, frozen=True):
    """A step that is decided: its files, and the names that they get."""

    through: Version
    names: dict[str, str]
    checks: Checks = Checks()


class Rows(msgspec.Struct, frozen=True):
    """A directory with the current view at a version."""

    through: Version
    directory: str


class State(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the state file."""

    identity: ExportIdentity
    through: Version | None = None
    renaming: Renaming | None = None
    checks: Checks = Checks()
    # The newest last.
    rows: list[Rows] = []


class ParquetTarget:
    """A directory of Parquet files that this process writes.

    It holds everything at or below `through`; None if it holds nothing yet.  `checks` are those against
    heartbeats up to there, and move in the same step.
    """

    # A merge writes all rows again, and not only the files that it touches.
    rewrites_whole: Final = True

    def __init__(self, directory: Directory, asked: ExportIdentity) -> None:
        self._directory = directory
        state = load_state(directory)
        if state is None:
            self._require_empty()
            state = State(identity=asked, through=asked.start)
            self._store(state)
        state.identity.require_same(asked, directory.location)
        self._state = state
        # Where the files of the step under way are.
        self._place = directory
        self._place_name = ""
        self._finish_renaming()

    @property
    def identity(self) -> ExportIdentity:
        return self._state.identity

    @property
    def through(self) -> Version | None:
        return self._state.through

    @property
    def checks(self) -> Checks:
        return self._state.checks

    def prepare(self) -> Directory:
        """Remove the files of uncommitted steps.  Returns the directory for the files of the next step."""
        if self.identity.view is ExportView.HISTORY:
            prefix = _NEW
            self._remove_all(prefix, kept=())
        else:
            prefix = _ROWS
            self._remove_all(prefix, kept=[each.directory for each in self._state.rows])
            self._point()
        self._place_name = f"{prefix}{uuid4().hex}"
        self._place = self._directory.directory(self._place_name)
        self._place.make()
        return self._place

    def files(self) -> list[Path]:
        """The files of a current view."""
        rows = self._state.rows[-1:]
        return sorted(
            file for each in rows for file in (self._directory.path / each.directory).glob("*.parquet")
        )

    def commit(
        self,
        since: Version,
        through: Version,
        added: Sequence[ExportFile],
        removed: Sequence[Path],
        checks: Checks,
    ) -> None:
        """Add and remove files and move on to `through`, in one durable step."""
        if self.identity.view is ExportView.HISTORY:
            names = {
                f"{self._place_name}/{file.name}": f"changes-{since:020}-{through:020}-{number:05}.parquet"
                for number, file in enumerate(added)
            }
            self._store(replace(self._state, renaming=Renaming(through, names, checks)))
            self._finish_renaming()
            self._remove_all(_NEW, kept=())
            return
        if not added:
            # A directory without files is no table to most readers.
            with self._place.writing(_EMPTY) as stream:
                pyarrow.parquet.write_table(self.identity.view.schema.empty_table(), stream)
        rows = _remembered([*self._state.rows, Rows(through, self._place_name)])
        self._directory.sync([self._place_name])
        self._store(replace(self._state, through=through, rows=rows, checks=checks))
        self._point()
        self._remove_all(_ROWS, kept=[each.directory for each in rows])

    def advance(self, through: Version, checks: Checks) -> None:
        """Move on to `through` without new rows."""
        rows = self._state.rows
        if rows:
            rows = _remembered([*rows, Rows(through, rows[-1].directory)])
        self._store(replace(self._state, through=through, rows=rows, checks=checks))

    def _finish_renaming(self) -> None:
        renaming = self._state.renaming
        if renaming is None:
            return
        for name, final in renaming.names.items():
            # A file that is not there any more has its final name already.
            if (self._directory.path / name).exists():
                self._directory.rename(name, final)
        self._directory.sync(["."])
        self._store(replace(self._state, through=renaming.through, renaming=None, checks=renaming.checks))

    def _remove_all(self, prefix: str, kept: Iterable[str]) -> None:
        for name in self._directory.names():
            if name.startswith(prefix) and name not in kept:
                # A task of a killed run may still be writing there; the next step tries again.
                with suppress(StorageFailed):
                    self._directory.remove(name)

    def _point(self) -> None:
        """Point the link to the directory that the state names."""
        if self._state.rows:
            self._directory.point(POINTER, self._state.rows[-1].directory)

    def _store(self, state: State) -> None:
        self._directory.publish_document(STATE, state)
        self._state = state

    def _require_empty(self) -> None:
        # An export that was killed while it wrote its first state has left only a staged one.
        if any(name != LOCK and not name.startswith(".") for name in self._directory.names()):
            raise InvalidArgument(
                f"{self._directory.location} holds other files and no export; choose an empty or a new "
                "directory"
            )


def _remembered(rows: Sequence[Rows]) -> list[Rows]:
    """The newest entries for the last two directories, at most `CUTS_MAX`."""
    kept = list(dict.fromkeys(each.directory for each in reversed(rows)))[:2]
    return [each for each in rows if each.directory in kept][-CUTS_MAX:]


def load_state(directory: Directory) -> State | None:
    """The state of a target; None if the directory is not one."""
    return directory.read_document(STATE, State, "export to another directory")


def open_exported(directory: Directory) -> Exported | None:
    """The export in a directory; None if there is none."""
    state = load_state(directory)
    if state is None or state.through is None:
        return None
    identity, rows, place = state.identity, state.rows, directory.path
    schema = identity.view.schema

    def read(at: Version) -> pyarrow.dataset.Dataset:
        if identity.view is ExportView.HISTORY:
            files = [str(file) for file in sorted(place.glob("changes-*.parquet"))]
            changes = pyarrow.dataset.dataset(files, schema=schema, format="parquet")
            return changes.filter(pyarrow.dataset.field("_commit_version") <= at)
        current = next(each.directory for each in rows if each.through == at)
        return pyarrow.dataset.dataset(str(place / current), schema=schema, format="parquet")

    only = None if identity.view is ExportView.HISTORY else frozenset(each.through for each in rows)
    return Exported(identity, identity.since, state.through, only, read)
