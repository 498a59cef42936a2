"""Back up a namespace to Parquet files: all of it as of one version, or the changes since the last backup.

A full part holds the newest record of every key at the version, with tombstones and expired records,
because a restore must know the deletions and their stamps.  A part with changes holds every change since
the part before it, so a restore may stop at any version of it.  The backup holds every change at or below
the version of the newest part; a reader of the site's changes goes on above it.

A backup can be killed at any point and run again.  It stores its plan in TARGET/plan.json first, and a safe
point holds the plan's version, so the next run carries out the same plan.  Each attempt writes its rows into
a directory of its own, and the manifest, written last, names its files: readers ignore the files of a killed
attempt.

Only one backup may run into a directory at a time: a second one would take up the first one's plan.
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Final
from uuid import uuid4

import msgspec
import pyarrow.parquet
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from floodmark.feed import at_present
from floodmark.files.directory import Directory, directory_at
from floodmark.host.catalog import NamespaceRow
from floodmark.host.ports import published_version
from floodmark.model.change import ChangeType
from floodmark.model.errors import Corruption, InvalidArgument, Retryable, SinkFailed, VersionCollected
from floodmark.model.limits import TTL_MAX
from floodmark.model.version import Version, moment_of
from floodmark.site.address import SiteAddress
from floodmark.site.site import Site
from floodmark.spark.jobs.backups.manifest import (
    ATTEMPT,
    MANIFEST,
    Manifest,
    PartFile,
    PartKind,
    Plan,
    RowCounts,
    RowSums,
    decode_document,
    encode_document,
    read_manifest,
    read_manifests,
)
from floodmark.spark.jobs.backups.parts import columns_of, explaining, write_files
from floodmark.spark.jobs.common import changes_between, holding, read_site, release
from floodmark.spark.runtime.progress import JobProgress, watch_tasks
from floodmark.spark.session import open_session
from floodmark.spark.source.schemas import record_columns

HOLD: Final = timedelta(hours=24)
PLAN: Final = "plan.json"


class BackupSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a backup.  `note` says why an earlier plan was abandoned."""

    target: str
    part: str
    kind: str
    site: str
    namespace: str
    since: Version
    version: Version
    rows: RowCounts
    files: int
    bytes: int
    safe_point: str | None
    resumed: bool
    note: str | None


@dataclass(frozen=True, kw_only=True)
class _Job:
    """The site, the target and the session of a backup."""

    site: Site
    source: SiteAddress
    namespace: NamespaceRow
    target: Directory
    spark: SparkSession
    progress: JobProgress | None


def backup(
    source: SiteAddress,
    namespace: str,
    target: str,
    *,
    incremental: bool = False,
    hold: timedelta = HOLD,
    spark: SparkSession | None = None,
    progress: JobProgress | None = None,
) -> BackupSummary:
    """Back up a namespace into a directory; with `incremental`, the changes since its newest part.

    The site keeps the changes above the backup's version for `hold`, so that the next incremental backup
    finds them.  An unfinished backup in the directory is finished instead.  Raises Retryable if changes are
    asked for and none can be read yet, because of an open transaction or atomic batch.
    """
    source.require_url("be backed up")
    if not isinstance(hold, timedelta) or not timedelta(0) <= hold <= TTL_MAX:
        raise InvalidArgument(
            f"the time for which a backup's version is held is a timedelta of 0 to {TTL_MAX.days:,} days, "
            f"not {hold!r:.60}"
        )
    kind = PartKind.CHANGES if incremental else PartKind.FULL
    directory = directory_at(target)
    with source.connect() as site, open_session(name="floodmark backup", spark=spark) as session:
        row = site.host.namespaces.find_namespace(namespace)
        # A caller without the right to see it gets the error before any row is written.
        _collected_horizon(site, namespace)
        job = _Job(
            site=site, source=source, namespace=row, target=directory, spark=session, progress=progress
        )
        found, note = _find_plan(job, kind)
        plan = found or _begin(job, kind)
        manifest = read_manifest(directory, plan.part)
        if manifest is None:
            with holding(site, plan.safe_point, plan.held_version, namespace):
                manifest = _carry_out(job, plan)
        held = _finish(job, plan, hold)
    return BackupSummary(
        target=target,
        part=manifest.part,
        kind=manifest.kind.value,
        site=manifest.site,
        namespace=namespace,
        since=manifest.since,
        version=manifest.version,
        rows=manifest.sums.counts,
        files=len(manifest.files),
        bytes=sum(file.bytes for file in manifest.files),
        safe_point=plan.safe_point if held else None,
        resumed=found is not None,
        note=note,
    )


def list_backups(target: str) -> list[Manifest]:
    """The complete parts of a backup, oldest first."""
    return read_manifests(directory_at(target))


# The plan


def _find_plan(job: _Job, kind: PartKind) -> tuple[Plan | None, str | None]:
    """The stored plan if it can be carried out, and otherwise a note why not."""
    for manifest in read_manifests(job.target):
        _require_same(job, manifest.site, manifest.site_id, manifest.namespace)
    content = job.target.read(PLAN)
    if content is None:
        return None, None
    plan = decode_document(content, Plan, f"{job.target.location}/{PLAN}")
    _require_same(job, plan.site, plan.site_id, plan.namespace)
    if read_manifest(job.target, plan.part) is not None:
        if plan.kind is kind:
            return plan, None
        _finish(job, plan, HOLD)
        return None, None
    reason = _reason_to_abandon(job, plan, kind)
    if reason is None:
        return plan, None
    job.target.remove(plan.part)
    release(job.site, plan.safe_point)
    job.target.remove(PLAN)
    return None, f"a backup at version {plan.version} was begun here and abandoned: {reason}"


def _reason_to_abandon(job: _Job, plan: Plan, kind: PartKind) -> str | None:
    if plan.kind is not kind:
        return f"its kind is {plan.kind.value!r}, and {kind.value!r} is asked for"
    if plan.kind is PartKind.CHANGES and plan.since != _newest_version(job.target):
        return "the part before it is not the newest one any more"
    try:
        job.site.host.retention.hold_safe_point(plan.safe_point, plan.held_version, HOLD, job.namespace.name)
    except VersionCollected:
        return "its version was collected meanwhile"
    return None


def _begin(job: _Job, kind: PartKind) -> Plan:
    """Choose a version, store the plan, then hold the version, so that every safe point has a plan."""
    name, is_full = job.namespace.name, kind is PartKind.FULL
    since = 0 if is_full else _newest_version(job.target)

    def choose() -> Plan:
        # Raises Rejoining: a site that is being rebuilt lacks records, which its watermark does not show.
        job.site.host.replication.links()
        # Before the version, so that a site that is restored meanwhile counts as restored later.
        topology = job.site.topology()
        version, watermark = find_position(job.site, job.namespace)
        if not is_full and version <= since:
            raise Retryable(
                f"changes of {name!r} can be read up to version {version} ({moment_of(version).isoformat()}) "
                f"and the newest backup in {job.target.location} ends at {since}: a transaction or an atomic "
                "batch is open since then. Run the backup again when it has ended, or been settled"
            )
        plan_id = uuid4().hex
        return Plan(
            id=plan_id,
            kind=kind,
            site=job.site.name,
            site_id=job.site.id,
            namespace=job.namespace,
            since=since,
            version=version,
            watermark=watermark,
            incarnations={} if topology is None else topology.incarnations(),
            safe_point=f"spark/backup-{plan_id}",
        )

    def hold(plan: Plan) -> Plan:
        job.target.publish(PLAN, encode_document(plan))
        try:
            job.site.host.retention.hold_safe_point(plan.safe_point, plan.held_version, HOLD, name)
        except VersionCollected:
            job.target.remove(PLAN)
            raise
        return plan

    try:
        return at_present(choose, hold) if is_full else hold(choose())
    except VersionCollected as error:
        if is_full:
            raise VersionCollected(
                f"the site collects the versions of {name!r} faster than they can be held; set a retention "
                "of a minute or more with `floodmark namespace update`"
            ) from error
        raise VersionCollected(
            f"the changes of {name!r} since version {since} ({moment_of(since).isoformat()}), the newest in "
            "the backup, were collected; take a full backup, and give it a longer hold",
            version=since,
        ) from error


def find_position(site: Site, namespace: NamespaceRow) -> tuple[Version, dict[int, Version]]:
    """A resolved version, and the watermark of a namespace at it, with the site's own entry.

    Every write that was acknowledged before the call is at or below the version.
    """
    host, name = site.host, namespace.name
    return at_present(
        lambda: published_version(host.versions, name),
        lambda version: (version, host.replication.watermark(name, version) | {site.id: version}),
    )


def _newest_version(target: Directory) -> Version:
    manifests = read_manifests(target)
    if not manifests:
        raise InvalidArgument(
            f"there is no complete backup at {target.location} that changes could be added to; take a full "
            "one first"
        )
    return manifests[-1].version


def _require_same(job: _Job, site: str, site_id: int, namespace: NamespaceRow) -> None:
    """Raise InvalidArgument for a directory with another namespace, or with one that was dropped since."""
    found = site, site_id, namespace.id, namespace.created_at
    if found != (job.site.name, job.site.id, job.namespace.id, job.namespace.created_at):
        raise InvalidArgument(
            f"{job.target.location} holds a backup of namespace {namespace.name!r} of site {site!r}, made at "
            f"{moment_of(namespace.created_at).isoformat()}; give {job.namespace.name!r} of "
            f"{job.site.name!r} another directory"
        )


# The part


def _carry_out(job: _Job, plan: Plan) -> Manifest:
    part = job.target.directory(plan.part)
    attempt = f"{ATTEMPT}{uuid4().hex}"
    with watch_tasks(job.spark, job.progress, "write rows"), explaining(job.target):
        sums = write_files(_read_rows(job, plan), part.directory(attempt), plan.version)
    files = [PartFile(f"{attempt}/{name}", size) for name, size in part.directory(attempt).sizes().items()]
    _require_rows(part, files, sums)
    for name in part.names():
        if name != attempt:
            part.remove(name)
    part.sync(file.name for file in files)
    manifest = Manifest(
        **msgspec.structs.asdict(plan),
        sums=sums,
        files=files,
        columns=columns_of(record_columns(plan.namespace.merge)),
        # Read after the rows, which may lack deletions that were collected meanwhile.
        collected_horizon=_collected_horizon(job.site, plan.namespace.name),
        created_at=moment_of(job.site.now()),
    )
    part.publish(MANIFEST, encode_document(manifest))
    job.target.sync([plan.part])
    return manifest


def _read_rows(job: _Job, plan: Plan) -> DataFrame:
    options = {"rows": "all", "versionAsOf": str(plan.version)}
    if plan.kind is PartKind.CHANGES:
        options = changes_between(plan.since, plan.version)
    columns = record_columns(plan.namespace.merge)
    rows = read_site(job.spark, job.source, plan.namespace.name, options, columns)
    return rows.where(F.col("_change_type") != F.lit(ChangeType.GENERATION.value))


def _require_rows(part: Directory, files: list[PartFile], sums: RowSums) -> None:
    """Raise SinkFailed if the files hold another number of rows than were read from the site."""
    written = 0
    for file in files:
        with part.open(file.name) as stream:
            written += pyarrow.parquet.read_metadata(stream).num_rows
    if written != sums.counts.total:
        raise SinkFailed(
            f"{sums.counts.total:,} rows were read and {written:,} are in the files at {part.location}; is "
            "another backup running into the same directory? Run it again"
        )


def _collected_horizon(site: Site, namespace: str) -> Version:
    for statistics in site.statistics().namespaces:
        if statistics.name == namespace:
            return statistics.collected_horizon
    raise Corruption(f"the site's statistics do not name its namespace {namespace!r}")


def _finish(job: _Job, plan: Plan, hold: timedelta) -> bool:
    """Hold the version for the next incremental backup, and release others.  Returns whether it is held."""
    held = bool(hold)
    if held:
        try:
            job.site.host.retention.hold_safe_point(plan.safe_point, plan.version, hold, job.namespace.name)
        except VersionCollected:
            # The part was completed long ago by a run that was killed before this step.
            held = False
    if not held:
        release(job.site, plan.safe_point)
    for manifest in read_manifests(job.target):
        if manifest.safe_point != plan.safe_point and manifest.version < plan.version:
            release(job.site, manifest.safe_point)
    job.target.remove(PLAN)
    return held
