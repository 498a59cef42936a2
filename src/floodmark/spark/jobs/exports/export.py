"""Export a namespace to a lakehouse table: every change, or the current state, exactly once.

The changes of `(through, next]` are a step.  Spark's tasks write its rows into files; then the target adds
the files and moves `through`, in one step.  An export that is killed before repeats the step; one that is
killed after it goes on.  Steps end at the ends of commits, and by choice at heartbeats, which are the same
for all namespaces of a site, so that exports of several namespaces can be read as of one version.

The export holds a safe point at `through`, so that the site keeps later changes, also while no export runs,
for the safe point's lifetime.
"""

from collections.abc import Iterable
from pathlib import Path
from threading import Event
from typing import Final, Literal, TypeAlias
from uuid import uuid4

import msgspec
import pyarrow.dataset
from msgspec.structs import replace
from pyspark.sql import SparkSession

from floodmark.accounting.checks import Checks, CheckStatistics, check_step, report_findings
from floodmark.accounting.counting import Counted
from floodmark.clock import monotonic_ms
from floodmark.feed.reading.cut import ChangesCut
from floodmark.feed.reading.items import snapshot_ms
from floodmark.files.directory import Directory
from floodmark.model.errors import InvalidArgument, InvalidVersion, VersionCollected
from floodmark.model.stream import OnGeneration
from floodmark.model.version import Version, moment_of
from floodmark.site.address import SiteAddress
from floodmark.site.site import Site
from floodmark.spark.jobs.common import LIFETIME, pass_heartbeats
from floodmark.spark.jobs.exports import delta, parquet
from floodmark.spark.jobs.exports.frames import (
    VIEW_FILE_BYTES,
    ChangesTask,
    ExportFile,
    merge_rows,
    newest_changes,
    read_changes,
    read_snapshot,
    read_view,
    take_counted,
    touched_names,
    write_changes,
    write_files,
)
from floodmark.spark.jobs.exports.state import (
    Exported,
    ExportIdentity,
    ExportView,
    Format,
    local_directory,
    only_writer,
    step_prefix,
)
from floodmark.spark.runtime.failures import raising_floodmark_errors
from floodmark.spark.runtime.progress import JobProgress, watch_tasks
from floodmark.spark.session import open_session

# The changes of a step: enough for Spark, and little enough to repeat.
CHANGES_MAX: Final = 1_000_000
# Poll interval while there are no changes, and how soon an idle target advances without any.
IDLE_SECONDS: Final = 0.5
ADVANCE_MS: Final = 30_000
# How soon it advances while counted changes wait for their heartbeat, and how often the safe point moves.
SETTLE_MS: Final = 2_500
HOLD_MS: Final = 10_000

ExportTarget: TypeAlias = delta.DeltaTarget | parquet.ParquetTarget


class ExportSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The result of an export.  The target held everything up to `since` before, and up to `through` now.

    `rows` counts written changes, or rows of a current view, including rewritten ones.  `wrong` counts the
    intervals between heartbeats of this run in which changes were lost or doubled; `checks` are those since
    the target was created.
    """

    target: str
    namespace: str
    format: Format
    view: ExportView
    since: Version | None
    through: Version | None
    steps: int
    rows: int
    files: int
    bytes: int
    elapsed_ms: int
    wrong: int
    checks: CheckStatistics


def export(
    source: SiteAddress,
    namespace: str,
    target: str,
    *,
    format: Literal["delta", "parquet"] = "delta",
    view: Literal["history", "current"] = "history",
    once: bool = True,
    until: Version | None = None,
    at_heartbeats: bool = False,
    spark: SparkSession | None = None,
    progress: JobProgress | None = None,
    stop: Event | None = None,
) -> ExportSummary:
    """Bring a target up to date with a namespace; without `once`, until `stop` is set.

    `target` is a directory, created if it does not exist.  The export ends at `until`, or with `once` at the
    version that is resolved when it begins; with `at_heartbeats`, at the last heartbeat before that.

    Raises VersionCollected if the site has collected changes that the target lacks, which may happen after
    the safe point's lifetime.  Then a new target is needed.
    """
    source.require_url("exported from")
    directory, kind = local_directory(target), Format(format)
    with (
        source.connect() as site,
        only_writer(directory),
        open_session(name="floodmark export", spark=spark) as session,
    ):
        asked = _identify(site, namespace, ExportView(view), until)
        exported = (delta.DeltaTarget if kind is Format.DELTA else parquet.ParquetTarget)(directory, asked)
        work = _Export(session, source, site, exported, at_heartbeats=at_heartbeats, progress=progress)
        since, before, began_ms = exported.through, exported.checks, monotonic_ms()
        work.run(once=once, until=until, stop=stop or Event())
        return ExportSummary(
            target=str(directory.path),
            namespace=namespace,
            format=kind,
            view=asked.view,
            since=since,
            through=exported.through,
            steps=work.steps,
            rows=sum(file.rows for file in work.written),
            files=len(work.written),
            bytes=sum(file.bytes for file in work.written),
            elapsed_ms=monotonic_ms() - began_ms,
            wrong=exported.checks.wrong - before.wrong,
            checks=CheckStatistics.of(exported.checks),
        )


def _identify(site: Site, namespace: str, view: ExportView, until: Version | None) -> ExportIdentity:
    """The identity of a new export.

    A history has every change; if the first ones are collected, a snapshot and every change above it.
    """
    host = site.host
    row = host.namespaces.find_namespace(namespace)
    since, snapshot = row.created_at, False
    if host.retention.oldest_version(namespace) > row.created_at:
        resolved = host.versions.resolved_version()
        since, snapshot = resolved if until is None else min(resolved, until), True
    return ExportIdentity(
        id=uuid4().hex,
        site=site.name,
        site_id=site.id,
        namespace=namespace,
        namespace_id=row.id,
        view=view,
        since=since if view is ExportView.HISTORY else 0,
        snapshot=snapshot and view is ExportView.HISTORY,
    )


class _Export:
    """One run of an export."""

    def __init__(
        self,
        spark: SparkSession,
        source: SiteAddress,
        site: Site,
        target: ExportTarget,
        *,
        at_heartbeats: bool,
        progress: JobProgress | None,
    ) -> None:
        self.steps = 0
        self.written: list[ExportFile] = []
        self._spark = spark
        self._source = source
        self._host = site.host
        self._namespace = target.identity.namespace
        self._target = target
        self._at_heartbeats = at_heartbeats
        self._progress = progress
        self._held_ms = self._moved_ms = monotonic_ms()

    def run(self, *, once: bool, until: Version | None, stop: Event) -> None:
        """Take steps until the end."""
        try:
            with raising_floodmark_errors():
                self._run(once=once, until=until, stop=stop)
        except VersionCollected as error:
            raise VersionCollected(
                f"the target holds the changes up to {self._target.through}, and the site has collected some "
                f"of the later ones: {error}. Export to a new target, which begins with a snapshot",
                **error.details,
            ) from error

    def _run(self, *, once: bool, until: Version | None, stop: Event) -> None:
        if until is not None:
            # Raises VersionInFuture; otherwise the version is resolved soon.
            self._host.versions.observe(until)
        end = self._host.versions.resolved_version() if once and until is None else until
        through = self._target.through
        if through is None:
            through = self._begin_view(end)
        self._hold(through)
        while not stop.is_set():
            cut = self._cut(through, end)
            if cut.version > through and cut.changes != 0:
                through = self._step(through, cut)
            elif cut.version > through and (end is not None or self._is_idle_for_long()):
                namespace = self._target.identity.namespace_id
                counted = pass_heartbeats(self._host, namespace, through, cut.version)
                self._target.advance(cut.version, self._check(counted, cut.version))
                through = self._moved(cut.version)
            elif end is not None and cut.resolved >= end:
                break
            else:
                stop.wait(IDLE_SECONDS)
        self._hold(through)

    def _cut(self, since: Version, end: Version | None) -> ChangesCut:
        """The next step; it ends at `since` if there is none yet."""
        cut = self._host.versions.cut_changes(
            self._namespace,
            since,
            CHANGES_MAX,
            end,
            self._at_heartbeats,
            on_generation=OnGeneration.DIFFERENCE,
        )
        limit = cut.resolved if end is None else min(cut.resolved, end)
        if self._at_heartbeats and cut.version >= limit:
            # There was no heartbeat yet, which would have lowered it.
            return replace(cut, version=since)
        return cut

    def _step(self, since: Version, cut: ChangesCut) -> Version:
        """Write and commit the changes up to a cut."""
        target, view = self._target, self._target.identity.view
        changes = read_changes(self._source, self._namespace, since, cut.version, cut.changes)
        place = target.prepare()
        with watch_tasks(self._spark, self._progress, f"changes up to {moment_of(cut.version).isoformat()}"):
            if view is ExportView.CURRENT:
                added, removed, counted = self._merge(changes, place, since, cut.version)
            else:
                added, counted = write_changes(self._spark, changes, place, view.schema, step_prefix(since))
                removed = []
        target.commit(since, cut.version, added, removed, self._check(counted, cut.version))
        self.written += added
        return self._moved(cut.version)

    # The snapshot

    def _begin_view(self, end: Version | None) -> Version:
        """Write the first rows, as of a version, and return that version."""
        target, host = self._target, self._host
        is_history = target.identity.view is ExportView.HISTORY
        at = host.versions.resolved_version() if end is None else end
        if is_history:
            at = target.identity.since
        elif self._at_heartbeats:
            oldest = host.retention.oldest_version(self._namespace)
            at = host.versions.cut_changes(self._namespace, oldest, None, at, True).version
        self._hold(at)
        place = target.prepare()
        with watch_tasks(self._spark, self._progress, f"snapshot of {moment_of(at).isoformat()}"):
            rows = read_snapshot(self._spark, self._source, self._namespace, at, history=is_history)
            added = write_files(rows, place, target.identity.view.schema, step_prefix(0))
        target.commit(0, at, added, [], Checks())
        self.written += added
        return self._moved(at)

    # The current view

    def _merge(
        self, changes: ChangesTask, place: Directory, since: Version, through: Version
    ) -> tuple[list[ExportFile], list[Path], Counted]:
        """Rewrite the files that changes touch.  Returns the new files, the old ones, and the count."""
        files, at_ms = self._target.files(), snapshot_ms(through, self._host.physical_ms())
        gathered = newest_changes(self._spark, changes).persist()
        try:
            newest, counted = take_counted(gathered)
            removed = files
            if files and not self._target.rewrites_whole:
                touched = touched_names(read_view(self._spark, files), newest, at_ms)
                removed = [file for file in files if file.name in touched]
            view = read_view(self._spark, removed) if removed else None
            size = sum(file.stat().st_size for file in removed)
            rows = merge_rows(view, newest, at_ms, 1 + size // VIEW_FILE_BYTES)
            added = write_files(rows, place, self._target.identity.view.schema, step_prefix(since))
            return added, removed, counted
        finally:
            gathered.unpersist()

    # Heartbeats

    def _check(self, counted: Counted, through: Version) -> Checks:
        """Compare the count of a step with its heartbeats."""
        before = self._target.checks
        checks = check_step(before, counted, through, self._host.physical_ms())
        report_findings(f"export of {self._namespace}", before, checks, namespace=self._namespace)
        return checks

    # The safe point

    def _moved(self, through: Version) -> Version:
        """Count a committed step, and move the safe point if that is due."""
        self.steps += 1
        self._moved_ms = monotonic_ms()
        if self._moved_ms - self._held_ms >= HOLD_MS:
            self._hold(through)
        return through

    def _hold(self, version: Version) -> None:
        self._host.retention.hold_safe_point(
            self._target.identity.safe_point, version, LIFETIME, self._namespace
        )
        self._held_ms = monotonic_ms()

    def _is_idle_for_long(self) -> bool:
        idle_ms = SETTLE_MS if self._target.checks.rest else ADVANCE_MS
        return monotonic_ms() - self._moved_ms >= idle_ms


# Reading


def common_cut(targets: Iterable[str]) -> Version:
    """The highest version that all of several exports of a site hold completely, and can be read at.

    A history can be read at every version that it holds, a current view only at the versions at which its
    steps ended.  Histories always have a common version; current views have one if they are exported
    `at_heartbeats` or `until` the same version.
    """
    exports = {target: _open(target) for target in targets}
    if not exports:
        raise InvalidArgument("name the exports that are to be read together")
    sites = {(each.identity.site, each.identity.site_id) for each in exports.values()}
    if len(sites) > 1:
        names = " and ".join(sorted(site for site, _ in sites))
        raise InvalidArgument(f"these are exports of {names}: a version of one site means nothing at another")
    low = max(each.since for each in exports.values())
    high = min(each.through for each in exports.values())
    only = [each.only for each in exports.values() if each.only is not None]
    possible = frozenset.intersection(*only) if only else {high}
    common = max((version for version in possible if low <= version <= high), default=None)
    if common is None:
        raise InvalidVersion(
            f"there is no version at which {', '.join(exports)} can all be read; "
            "export each of them until the same version"
        )
    return common


def read_export(target: str, at: Version | None = None) -> pyarrow.dataset.Dataset:
    """The rows of an export, as it is or as it was at a version at which it can be read."""
    exported = _open(target)
    since, through, only = exported.since, exported.through, exported.only
    version = through if at is None else at
    if not since <= version <= through or (only is not None and version not in only):
        has = "was never there" if only else f"holds the changes in ({since}, {through}]"
        raise InvalidVersion(
            f"{target} cannot be read at {version}: it {has}; common_cut tells at which version several "
            "exports can be read"
        )
    return exported.read(version)


def _open(target: str) -> Exported:
    directory = local_directory(target)
    exported = delta.open_exported(directory) or parquet.open_exported(directory)
    if exported is None:
        raise InvalidArgument(f"{target} holds no export; name the directory that was exported to")
    return exported
