"""Exports as plain Parquet directories, which any reader takes as one table.

A history:

    _floodmark.json                          whose changes these are, and how far it is
    _new-<token>/…                           being written; readers pass over it
    changes-<since>-<through>-<n>.parquet    the changes in (since, through]

The files of a step are written aside.  Then the state says which names they are to get: from there on the
step will happen, whoever finishes it.  They are renamed, and the state moves on.  A reader that keeps to
`_commit_version` at or below the state's `through` sees whole steps only; one that does not sees each
change once all the same.

A current view:

    _floodmark.json                          how far it is, and which directory that is
    current -> rows-<through>-<token>        what to read
    rows-<through>-<token>/…                 one row per live key

Each step writes a directory of its own, and the state says that it is the one.  The directory before it
stays until the next step, for those who are reading it.
"""

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final
from uuid import uuid4

import msgspec
import pyarrow.dataset
import pyarrow.parquet
from msgspec.structs import replace

from floodmark.accounting.checks import Checks
from floodmark.model.errors import Corruption, InvalidArgument
from floodmark.model.version import Version
from floodmark.spark.jobs.exports.files import DataFile, storage_failure
from floodmark.spark.jobs.exports.state import LOCK, Cuts, ExportIdentity, View
from floodmark.spark.jobs.files import Directory, directory_at

STATE: Final = "_floodmark.json"
POINTER: Final = "current"
CUTS_MAX: Final = 100

_NEW: Final = "_new-"
_ROWS: Final = "rows-"


class Renaming(msgspec.Struct, frozen=True):
    """A step that will happen: its files, and the names that they get."""

    through: Version
    names: dict[str, str]
    checks: Checks = Checks()


class Rows(msgspec.Struct, frozen=True):
    """A directory with the current view at a version."""

    through: Version
    directory: str


class State(msgspec.Struct, frozen=True, kw_only=True):
    """What the state file says."""

    identity: ExportIdentity
    through: Version | None = None
    renaming: Renaming | None = None
    checks: Checks = Checks()
    # The newest last.
    rows: list[Rows] = []


class ParquetTarget:
    """A directory of Parquet files that this process writes."""

    def __init__(self, directory: Path, asked: ExportIdentity) -> None:
        self._path = directory
        self._directory = directory_at(str(directory))
        state = load_state(self._directory)
        if state is None:
            self._require_empty()
            state = State(identity=asked, through=asked.start)
            self._store(state)
        state.identity.require_same(asked, str(directory))
        self._state = state
        # Where the files of the step under way are.
        self._place = directory / _NEW
        with _failing(directory):
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

    @property
    def rewrites_whole(self) -> bool:
        return True

    def prepare(self) -> Path:
        with _failing(self._path):
            if self.identity.view is View.HISTORY:
                for left_over in self._path.glob(f"{_NEW}*"):
                    self._remove(left_over)
                self._place = self._path / f"{_NEW}{uuid4().hex}"
            else:
                self._keep_rows(self._state.rows)
                self._point()
                self._place = self._path / f"{_ROWS}{uuid4().hex}"
            self._place.mkdir()
        return self._place

    def files(self) -> list[Path]:
        rows = self._state.rows[-1:]
        return sorted(file for each in rows for file in (self._path / each.directory).glob("*.parquet"))

    def commit(
        self,
        since: Version,
        through: Version,
        added: Sequence[DataFile],
        removed: Sequence[Path],
        checks: Checks,
    ) -> None:
        with _failing(self._path):
            if self.identity.view is View.HISTORY:
                self._commit_history(since, through, added, checks)
            else:
                if not added:
                    # A directory without files is no table to most readers.
                    empty = self.identity.view.schema.empty_table()
                    pyarrow.parquet.write_table(empty, self._place / "empty.parquet")
                self._commit_current(through, checks)

    def advance(self, through: Version, checks: Checks) -> None:
        rows = self._state.rows
        if rows:
            rows = _remembered([*rows, Rows(through, rows[-1].directory)])
        self._store(replace(self._state, through=through, rows=rows, checks=checks))

    # A history

    def _commit_history(
        self, since: Version, through: Version, added: Sequence[DataFile], checks: Checks
    ) -> None:
        names = {
            f"{self._place.name}/{file.name}": f"changes-{since:020}-{through:020}-{number:05}.parquet"
            for number, file in enumerate(added)
        }
        self._store(replace(self._state, renaming=Renaming(through, names, checks)))
        self._finish_renaming()
        self._remove(self._place)

    def _finish_renaming(self) -> None:
        renaming = self._state.renaming
        if renaming is None:
            return
        for name, final in renaming.names.items():
            fresh = self._path / name
            # One that is not there any more has its name already.
            if fresh.exists():
                fresh.rename(self._path / final)
        self._directory.sync(["."])
        self._store(replace(self._state, through=renaming.through, renaming=None, checks=renaming.checks))

    # A current view

    def _commit_current(self, through: Version, checks: Checks) -> None:
        rows = _remembered([*self._state.rows, Rows(through, self._place.name)])
        self._directory.sync([self._place.name])
        self._store(replace(self._state, through=through, rows=rows, checks=checks))
        self._point()
        self._keep_rows(rows)

    def _keep_rows(self, rows: Sequence[Rows]) -> None:
        kept = {each.directory for each in rows}
        for path in self._path.glob(f"{_ROWS}*"):
            if path.name not in kept:
                self._remove(path)

    def _remove(self, directory: Path) -> None:
        # A task of a run that was killed may still be writing there; the next step removes it then.
        shutil.rmtree(directory, ignore_errors=True)

    def _point(self) -> None:
        """Let the pointer follow the state."""
        if self._state.rows:
            fresh = self._path / f".{POINTER}.new"
            fresh.unlink(missing_ok=True)
            fresh.symlink_to(self._state.rows[-1].directory)
            fresh.rename(self._path / POINTER)
            self._directory.sync(["."])

    # The state

    def _store(self, state: State) -> None:
        self._directory.publish(STATE, msgspec.json.format(msgspec.json.encode(state)))
        self._state = state

    def _require_empty(self) -> None:
        # An export that was killed while it wrote its first state has left only that.
        names = set(os.listdir(self._path)) - {LOCK, f".{STATE}.new"}
        if names:
            raise InvalidArgument(
                f"{self._path} holds other files and no export; choose an empty or a new directory"
            )


def _remembered(rows: Sequence[Rows]) -> list[Rows]:
    """Of all that the view ever was: what lies in the last two directories, and not too much of it."""
    kept: list[str] = []
    for each in reversed(rows):
        if each.directory not in kept:
            kept.append(each.directory)
    return [each for each in rows if each.directory in kept[:2]][-CUTS_MAX:]


def load_state(directory: Directory) -> State | None:
    """What a target says of itself; None if it is none."""
    content = directory.read(STATE)
    if content is None:
        return None
    try:
        return msgspec.json.decode(content, type=State)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Corruption(
            f"{directory.location}/{STATE} is damaged ({error}); export to another directory"
        ) from error


def cuts_of(state: State) -> Cuts:
    """The versions at which a target can be read."""
    if state.identity.view is View.HISTORY:
        return Cuts(since=state.identity.since, through=state.through or 0)
    return Cuts(through=state.through or 0, only=frozenset(each.through for each in state.rows))


def read_at(directory: Path, state: State, at: Version) -> pyarrow.dataset.Dataset:
    """The rows of a target at one of its cuts."""
    if state.identity.view is View.HISTORY:
        files = [str(file) for file in sorted(directory.glob("changes-*.parquet"))]
        rows = pyarrow.dataset.dataset(files, schema=state.identity.view.schema, format="parquet")
        return rows.filter(pyarrow.dataset.field("_commit_version") <= at)
    place = next(each.directory for each in state.rows if each.through == at)
    return pyarrow.dataset.dataset(
        str(directory / place), schema=state.identity.view.schema, format="parquet"
    )


@contextmanager
def _failing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise storage_failure(str(path), error) from error
