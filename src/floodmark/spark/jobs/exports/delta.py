"""Exports as Delta tables, by the `deltalake` package: Spark needs no jars for them.

Spark's tasks write the data files into the table's directory, where readers ignore files that the table's log
does not name.  The driver then commits them in one transaction of the log, which carries an application
transaction: the export's id, and as its number the version that the table now goes through.  That number is
the export's only checkpoint.  A commit that is tried twice conflicts with itself, and so does one of
another process that exports to the same table.

A merge into the current view replaces the files in which a key has changed by their other rows and the new
ones.  Spark joins them; the package's `merge` would do so in the driver's memory.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

import msgspec
import pyarrow
import pyarrow.dataset

from floodmark.accounting.checks import Checks
from floodmark.clock import TimeSource, system_time_ms
from floodmark.files.directory import Directory, Document
from floodmark.model.errors import Corruption, InvalidArgument, InvalidConfiguration, LeaseHeld
from floodmark.model.version import Version, moment_of
from floodmark.spark.jobs.exports.frames import ExportFile
from floodmark.spark.jobs.exports.state import LOCK, Exported, ExportIdentity, ExportView, step_prefix

try:
    import deltalake
    import deltalake.exceptions
    import deltalake.transaction
except ImportError:
    deltalake = None  # type: ignore[assignment]

IDENTITY: Final = "floodmark.export"
THROUGH: Final = "floodmark.through"
CHECKS: Final = "floodmark.checks"
LOG: Final = "_delta_log"

# Commits to search for the last one of an export: other engines may have optimized the table since.
_ENTRIES_MAX: Final = 100


class DeltaTarget:
    """A Delta table that this process writes.  The calls are those of `ParquetTarget`."""

    rewrites_whole: Final = False

    def __init__(
        self, directory: Directory, asked: ExportIdentity, *, time_source: TimeSource = system_time_ms
    ) -> None:
        require_package()
        self._directory = directory
        self._time_source = time_source
        if not deltalake.DeltaTable.is_deltatable(str(directory.path)):
            _create(directory, asked)
        self._table = deltalake.DeltaTable(directory.path)
        self.identity = _identity_of(self._table, directory)
        self.identity.require_same(asked, directory.location)
        _add_columns(self._table, self.identity.view.schema)
        self.checks = checks_of(self._table, self.through)

    @property
    def through(self) -> Version | None:
        return through_of(self._table, self.identity)

    def prepare(self) -> Directory:
        # The files of a step are named by where it began, and no committed step began where the table is now.
        self._table.update_incremental()
        for name in self._directory.names():
            if name.startswith(step_prefix(self.through or 0)):
                self._directory.remove(name)
        return self._directory

    def files(self) -> list[Path]:
        # A merge would bring back rows that another engine has marked as deleted within a file.
        if self._table.protocol().min_reader_version > 1:
            raise InvalidArgument(
                f"{self._directory.location} has features that plain Parquet files do not show, such as "
                "deletion vectors, and an export cannot merge into it; export to another target"
            )
        return [self._directory.path / unquote(path) for path in _paths(self._table)]

    def commit(
        self,
        since: Version,
        through: Version,
        added: Sequence[ExportFile],
        removed: Sequence[Path],
        checks: Checks,
    ) -> None:
        now_ms = self._time_source()
        actions: list[Any] = [
            deltalake.transaction.AddAction(file.name, file.bytes, {}, now_ms, True, _statistics(file))
            for file in added
        ]
        gone = {path.name for path in removed}
        actions += [
            deltalake.transaction.RemoveAction(path, True, now_ms, size, {})
            for path, size in _paths(self._table).items()
            if unquote(path) in gone
        ]
        properties = deltalake.CommitProperties(
            app_transactions=[deltalake.Transaction(self.identity.id, through, now_ms)],
            custom_metadata={THROUGH: str(through), CHECKS: msgspec.json.encode(checks).decode()},
        )
        try:
            self._table.create_write_transaction(
                actions, "append", self._table.schema(), commit_properties=properties
            )
        except deltalake.exceptions.CommitFailedError as error:
            raise LeaseHeld(
                f"another writer has changed {self._directory.location} ({error}); run the export again"
            ) from error
        self._table.update_incremental()
        self.checks = checks

    def advance(self, through: Version, checks: Checks) -> None:
        self.commit(through, through, (), (), checks)


def require_package() -> None:
    """Raise InvalidConfiguration without the package."""
    if deltalake is None:
        raise InvalidConfiguration(
            "Delta tables are written by the package deltalake, which is not installed; install "
            "floodmark[spark], which brings it, or export as Parquet"
        )


def _identity_of(table: Any, directory: Directory) -> ExportIdentity:
    """The identity of the export that made a table."""
    text = table.metadata().configuration.get(IDENTITY)
    if text is None:
        raise InvalidArgument(
            f"{directory.location} is a Delta table that no export made; choose another target"
        )
    return _decode(text, ExportIdentity, f"the property {IDENTITY} of {directory.location}")


def through_of(table: Any, identity: ExportIdentity) -> Version | None:
    """The version that a table holds everything up to; None if it holds nothing yet."""
    committed = table.transaction_version(identity.id)
    return identity.start if committed is None else int(committed)


def checks_of(table: Any, through: Version | None) -> Checks:
    """The checks that were committed with `through`; empty ones if the log no longer has that commit."""
    entries = (entry for entry in table.history(_ENTRIES_MAX) if entry.get(THROUGH) == str(through))
    found = next((entry.get(CHECKS) for entry in entries), None)
    return Checks() if found is None else _decode(found, Checks, f"{CHECKS} in the log of {table.table_uri}")


def _decode(text: str, kind: type[Document], place: str) -> Document:
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.MsgspecError as error:
        raise Corruption(f"{place} is damaged ({error}); export to another target") from error


def open_exported(directory: Directory) -> Exported | None:
    """The export in a directory; None if it is no Delta table."""
    if not (directory.path / LOG).exists():
        return None
    require_package()
    table = deltalake.DeltaTable(directory.path)
    identity = _identity_of(table, directory)
    is_current = identity.view is ExportView.CURRENT

    def read(at: Version) -> pyarrow.dataset.Dataset:
        if is_current:
            table.load_as_version(_steps(table)[at])
            return table.to_pyarrow_dataset()
        return table.to_pyarrow_dataset().filter(pyarrow.dataset.field("_commit_version") <= at)

    only = frozenset(_steps(table)) if is_current else None
    return Exported(identity, identity.since, through_of(table, identity) or 0, only, read)


def _steps(table: Any) -> dict[Version, int]:
    """The versions of the site at which steps ended, with the table's own version for each."""
    entries = [entry for entry in table.history() if THROUGH in entry]
    return {int(entry[THROUGH]): entry["version"] for entry in reversed(entries)}


def _paths(table: Any) -> dict[str, int]:
    """The files of a table as its log writes them, and their sizes."""
    actions = pyarrow.table(table.get_add_actions())
    return dict(zip(actions["path"].to_pylist(), actions["size_bytes"].to_pylist(), strict=True))


def _create(directory: Directory, asked: ExportIdentity) -> None:
    # An export that was killed while it created its table has left only an empty log.
    if any(name not in (LOCK, LOG) for name in directory.names()):
        raise InvalidArgument(
            f"{directory.location} holds other files and no Delta table; choose an empty directory"
        )
    deltalake.DeltaTable.create(
        directory.path,
        asked.view.schema,
        name=asked.namespace,
        description=f"the {asked.view} of {asked.namespace} at {asked.site}",
        configuration={IDENTITY: msgspec.json.encode(asked).decode()},
        raise_if_key_not_exists=False,
    )


def _add_columns(table: Any, schema: pyarrow.Schema) -> None:
    """Give a table of an earlier release the columns that it lacks, which are null in its rows."""
    there = {field.name for field in table.schema().fields}
    missing = pyarrow.schema([field.with_nullable(True) for field in schema if field.name not in there])
    if missing.names:
        table.alter.add_columns(list(deltalake.Schema.from_arrow(missing).fields))
        table.update_incremental()


def _statistics(file: ExportFile) -> str:
    """Delta's statistics of a file, which readers use to skip it."""
    bounds = {
        which: {"_commit_version": version, "_commit_timestamp": _moment(version)}
        for which, version in (("minValues", file.first), ("maxValues", file.last))
    }
    return json.dumps({"numRecords": file.rows, **bounds})


def _moment(version: Version) -> str:
    return moment_of(version).isoformat(timespec="milliseconds").replace("+00:00", "Z")
