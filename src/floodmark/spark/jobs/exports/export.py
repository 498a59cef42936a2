"""Export a namespace to a lakehouse table: every change, or the current state, exactly once.

The changes of `(through, next]` are a step.  Spark's tasks write its rows into files; then the target takes
the files in and moves its `through` on, both at once.  Killed before that, the step is done again; killed
after it, it is over.  Steps end where commits end, so a commit is never cut in two, and by choice where
heartbeats are: those are the same points for every namespace of a site, so that exports of several
namespaces, made at different times by different processes, can be read at one point in time.

The export holds a safe point at what it has, so that a site keeps what it has not, also while it does not
run, for as long as the safe point's lifetime.
"""

from pathlib import Path
from threading import Event
from typing import Final, Literal
from uuid import uuid4

import msgspec
from msgspec.structs import replace
from pyspark.sql import DataFrame, SparkSession

from floodmark.accounting.checks import Checks, CheckStatistics, check_step, report_findings
from floodmark.accounting.counting import Counted, count_idle
from floodmark.clock import monotonic_ms
from floodmark.codec.ordered import encode_namespace
from floodmark.feed.reading.cut import ChangesCut
from floodmark.files.directory import Directory
from floodmark.model.errors import VersionCollected
from floodmark.model.ranges import KeyRange, prefix_end
from floodmark.model.stream import ChangesRequest
from floodmark.model.version import Version, moment_of
from floodmark.site.site import Site
from floodmark.spark.jobs.exports.delta import DeltaTarget
from floodmark.spark.jobs.exports.files import DataFile, write_changes, write_files
from floodmark.spark.jobs.exports.frames import (
    VIEW_FILE_BYTES,
    merge_rows,
    newest_changes,
    read_changes,
    read_snapshot,
    read_snapshot_changes,
    read_view,
    take_counted,
    touched_names,
)
from floodmark.spark.jobs.exports.parquet import ParquetTarget
from floodmark.spark.jobs.exports.state import (
    ExportIdentity,
    ExportTarget,
    Format,
    View,
    local_directory,
    only_writer,
    step_prefix,
)
from floodmark.spark.jobs.safepoints import LIFETIME
from floodmark.spark.runtime.failures import raising_floodmark_errors
from floodmark.spark.runtime.progress import Progress, watch_tasks
from floodmark.spark.session import use_session
from floodmark.spark.source.address import SiteAddress

# A step of this many changes is worth Spark's while, and not too much to do again.
CHANGES_MAX: Final = 1_000_000
# How long to wait for changes when there are none, and how soon to move on where none come.
IDLE_SECONDS: Final = 0.5
ADVANCE_MS: Final = 30_000
# The same while changes were counted that no heartbeat was held against yet.
SETTLE_MS: Final = 2_500
HOLD_MS: Final = 10_000


class ExportSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What an export did.  The target now holds everything at or below `through`; before, at `since`.

    `rows` is what was written: changes, or rows of a current view, those that were written again included.
    `wrong` counts the intervals between heartbeats in which changes went astray in this run, and `checks`
    tells what was checked since the target was begun.
    """

    target: str
    namespace: str
    format: Format
    view: View
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
    progress: Progress | None = None,
    stop: Event | None = None,
) -> ExportSummary:
    """Bring a target up to date with a namespace; without `once`, until it is told to stop.

    `target` is a directory, which is made if it is not there.  The export ends at `until`, or with `once`
    at what is resolved when it begins.  With `at_heartbeats` it ends at the last heartbeat before that.

    A target that was left for longer than the safe point lives may miss changes that are gone from the
    site; that is a `VersionCollected`, and it takes a new target to begin anew.
    """
    source.require_url("exported from")
    directory, kind = local_directory(target), Format(format)
    with source.connect() as site, only_writer(directory), use_session(spark, "floodmark export") as session:
        asked = _identify(site, namespace, View(view), until)
        exported = (DeltaTarget if kind is Format.DELTA else ParquetTarget)(directory, asked)
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


def _identify(site: Site, namespace: str, view: View, until: Version | None) -> ExportIdentity:
    """A new export as it is asked for.

    A history has every change, or where the first ones are gone, a snapshot and every change above it.
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
        since=since if view is View.HISTORY else 0,
        snapshot=snapshot and view is View.HISTORY,
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
        progress: Progress | None,
    ) -> None:
        self.steps = 0
        self.written: list[DataFile] = []
        self._spark = spark
        self._source = source
        self._host = site.host
        self._host = site.host
        self._namespace = target.identity.namespace
        self._target = target
        self._at_heartbeats = at_heartbeats
        self._progress = progress
        self._held_ms = self._moved_ms = monotonic_ms()

    def run(self, *, once: bool, until: Version | None, stop: Event) -> None:
        """Step after step, until the end is reached."""
        try:
            with raising_floodmark_errors():
                self._run(once=once, until=until, stop=stop)
        except VersionCollected as error:
            raise VersionCollected(
                f"the export has what was written up to {self._target.through}, and not all that came "
                f"after it is still there: {error}. Export to a new target, which begins with what there is",
                **error.details,
            ) from error

    def _run(self, *, once: bool, until: Version | None, stop: Event) -> None:
        if until is not None:
            # One that lies in the future is refused.  After this it is resolved before long.
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
                self._target.advance(
                    cut.version, self._check(self._pass_over(through, cut.version), cut.version)
                )
                through = self._moved(cut.version)
            elif end is not None and cut.resolved >= end:
                break
            else:
                stop.wait(IDLE_SECONDS)
        self._hold(through)

    def _cut(self, since: Version, end: Version | None) -> ChangesCut:
        """The next step; one to `since` itself if there is none yet."""
        cut = self._host.versions.cut_changes(self._namespace, since, CHANGES_MAX, end, self._at_heartbeats)
        limit = cut.resolved if end is None else min(cut.resolved, end)
        if self._at_heartbeats and cut.version >= limit:
            # No heartbeat has lowered it: there was none yet.
            return replace(cut, version=since)
        return cut

    def _step(self, since: Version, cut: ChangesCut) -> Version:
        """Write what lies between two versions, and commit it."""
        target, view = self._target, self._target.identity.view
        changes = read_changes(self._spark, self._source, self._namespace, since, cut.version, cut.changes)
        place = target.prepare()
        with watch_tasks(self._spark, self._progress, f"changes up to {moment_of(cut.version).isoformat()}"):
            if view is View.CURRENT:
                added, removed, counted = self._merge(changes, place, since, cut.version)
            else:
                added, counted = write_changes(changes, place, view.schema, step_prefix(since))
                removed = []
        target.commit(since, cut.version, added, removed, self._check(counted, cut.version))
        self.written += added
        return self._moved(cut.version)

    # What begins with a snapshot

    def _begin_view(self, end: Version | None) -> Version:
        """Write a snapshot, which changes are then merged into or put beside; its version."""
        target, host = self._target, self._host
        is_history = target.identity.view is View.HISTORY
        at = host.versions.resolved_version() if end is None else end
        if is_history:
            at = target.identity.since
        elif self._at_heartbeats:
            oldest = host.retention.oldest_version(self._namespace)
            at = host.versions.cut_changes(self._namespace, oldest, None, at, True).version
        self._hold(at)
        place = target.prepare()
        with watch_tasks(self._spark, self._progress, f"snapshot of {moment_of(at).isoformat()}"):
            read = read_snapshot_changes if is_history else read_snapshot
            rows = read(self._spark, self._source, self._namespace, at)
            added = write_files(rows, place, target.identity.view.schema, step_prefix(0))
        target.commit(0, at, added, [], Checks())
        self.written += added
        return self._moved(at)

    # The current view

    def _merge(
        self, changes: DataFrame, place: Directory, since: Version, through: Version
    ) -> tuple[list[DataFile], list[Path], Counted]:
        """Write what takes the place of the files that changes touch; the new files and the old ones."""
        files = self._target.files()
        gathered = newest_changes(changes).persist()
        try:
            newest, counted = take_counted(gathered)
            removed = files
            if files and not self._target.rewrites_whole:
                touched = touched_names(read_view(self._spark, files), newest, through)
                removed = [file for file in files if file.name in touched]
            view = read_view(self._spark, removed) if removed else None
            size = sum(file.stat().st_size for file in removed)
            rows = merge_rows(view, newest, through, 1 + size // VIEW_FILE_BYTES)
            added = write_files(rows, place, self._target.identity.view.schema, step_prefix(since))
            return added, removed, counted
        finally:
            gathered.unpersist()

    # Heartbeats

    def _check(self, counted: Counted, through: Version) -> Checks:
        """Hold what was counted of a step against the heartbeats in it."""
        before = self._target.checks
        checks = check_step(before, counted, through, self._host.physical_ms())
        report_findings(f"export of {self._namespace}", before, checks, namespace=self._namespace)
        return checks

    def _pass_over(self, since: Version, through: Version) -> Counted:
        """The heartbeats of a stretch without changes."""
        identity = self._target.identity
        prefix = encode_namespace(identity.namespace_id)
        request = ChangesRequest(
            keys=KeyRange(prefix, prefix_end(prefix)),
            namespace=identity.namespace_id,
            since=since,
            until=through,
            heartbeats=True,
        )
        return count_idle(
            self._host.changes(request),
            since,
            through,
            site_id=identity.site_id,
            namespace=identity.namespace_id,
        )

    # The safe point

    def _moved(self, through: Version) -> Version:
        """Note a committed step; the safe point follows, but not with each of many."""
        self.steps += 1
        self._moved_ms = monotonic_ms()
        if self._is_due(self._held_ms, HOLD_MS):
            self._hold(through)
        return through

    def _hold(self, version: Version) -> None:
        self._host.retention.hold_safe_point(
            self._target.identity.safe_point, version, LIFETIME, self._namespace
        )
        self._held_ms = monotonic_ms()

    def _is_idle_for_long(self) -> bool:
        return self._is_due(self._moved_ms, SETTLE_MS if self._target.checks.rest else ADVANCE_MS)

    def _is_due(self, since_ms: int, every_ms: int) -> bool:
        return monotonic_ms() - since_ms >= every_ms
