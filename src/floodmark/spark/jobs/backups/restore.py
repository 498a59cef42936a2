"""Restore a backup into a namespace, as it was at any version that the backup leads to.

The newest record of each key at or below the version is written by its stamp, so deletions and expiries are
restored too, and a row that is written twice changes nothing.

A namespace with other records is refused, because both sets of records would be merged.  A killed restore
finds its own rows there.  To tell them apart, a restore first draws a version at the target, the same one in
each run, and commits all its rows above it: records below it are others.

The backup is read and checked before the site is touched: nothing of a damaged backup is written.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final

import msgspec
import pyarrow.compute
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from floodmark.codec.ordered import encode_namespace
from floodmark.files.directory import Directory, directory_at
from floodmark.host.catalog import NamespaceRow
from floodmark.links.returning import Portion
from floodmark.model.errors import (
    BackupDamaged,
    Corruption,
    InvalidArgument,
    NamespaceExists,
    NamespaceNotFound,
)
from floodmark.model.partition import Content
from floodmark.model.ranges import KeyRange
from floodmark.model.version import Version
from floodmark.site.address import SiteAddress
from floodmark.site.arguments import qualify_range
from floodmark.site.site import Site
from floodmark.spark.jobs.backups.check import find_damage
from floodmark.spark.jobs.backups.manifest import (
    Chain,
    PartKind,
    RowCounts,
    RowSums,
    choose_chain,
    read_manifests,
)
from floodmark.spark.jobs.backups.parts import (
    explaining,
    in_range,
    newest_rows,
    observe_rows,
    read_parts,
    read_site,
    sum_columns,
    to_content,
    to_sums,
    write_site,
)
from floodmark.spark.jobs.safepoints import holding, release
from floodmark.spark.runtime.failures import find_error
from floodmark.spark.runtime.progress import SILENT, JobProgress, watch_tasks
from floodmark.spark.session import use_session
from floodmark.spark.source.schemas import record_columns

EVERYTHING: Final = KeyRange()

_OTHERS: Final = "others"
_CHECK: Final = "check backup"
_DAMAGE_SHOWN: Final = 5


class RestoreSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a restore.

    A reader of the backed-up site's changes goes on from `version`.  `verified` means that the namespace was
    read again and holds exactly the restored records; otherwise `note` says why not.
    """

    backup: str
    site: str
    namespace: str
    version: Version
    rows: RowCounts
    created: bool
    resumed: bool
    verified: bool
    note: str | None


def restore(
    backup: str,
    target: SiteAddress,
    namespace: str,
    *,
    at: Version | None = None,
    keys: KeyRange = EVERYTHING,
    spark: SparkSession | None = None,
    progress: JobProgress | None = None,
) -> RestoreSummary:
    """Restore a range of keys as of a version, by default the newest, into a new or empty namespace."""
    with restoring(
        backup, target, namespace, at=at, keys=keys, spark=spark, progress=progress
    ) as restoration:
        written = restoration.write()
        note = restoration.verify(written)
        return RestoreSummary(
            backup=backup,
            site=restoration.site.name,
            namespace=namespace,
            version=restoration.version,
            rows=written.counts,
            created=restoration.created,
            resumed=restoration.resumed,
            verified=note is None,
            note=note,
        )


@contextmanager
def restoring(
    backup: str,
    target: SiteAddress,
    namespace: str,
    *,
    at: Version | None = None,
    keys: KeyRange = EVERYTHING,
    spark: SparkSession | None = None,
    progress: JobProgress | None = None,
) -> Iterator["Restoration"]:
    """A restore into a namespace that is new, empty, or holds rows of the same restore."""
    target.require_url("be restored into")
    place = directory_at(backup)
    chain, version = choose_chain(read_manifests(place), at, backup)
    identity = _identify(chain, version, keys)
    with target.connect() as site, use_session(spark, "floodmark restore") as session:
        _require_sound(session, place, chain, progress or SILENT)
        row, created = _open_namespace(site, namespace, chain)
        begun = site.host.versions.open_epoch(namespace, f"restore/{identity}", 0)
        resumed = _require_own(site, row, begun)
        safe_point = f"spark/restore-{identity}"
        kept = max(begun, site.host.retention.oldest_version(namespace))
        # Restored deletions must not be collected before `verify` has counted them.
        with holding(site, safe_point, kept, namespace):
            yield Restoration(
                site=site,
                target=target,
                namespace=row,
                place=place,
                chain=chain,
                version=version,
                keys=keys,
                created=created,
                resumed=resumed,
                session=session,
                progress=progress,
            )
        release(site, safe_point)


@dataclass(frozen=True, kw_only=True)
class Restoration:
    """A restore under way."""

    site: Site
    target: SiteAddress
    namespace: NamespaceRow
    place: Directory
    chain: Chain
    version: Version
    keys: KeyRange
    created: bool
    resumed: bool
    session: SparkSession
    progress: JobProgress | None

    def write(self, portion: Portion | None = None) -> RowSums:
        """Write the rows, or a portion of each.  Returns the sums of all rows."""
        with watch_tasks(self.session, self.progress, "restore rows"), explaining(self.place):
            try:
                rows = _rows_at(self.session, self.place, self.chain, self.version, self.keys)
                observed, sums = observe_rows(rows, self.version)
                write_site(observed, self.target, self.namespace.name, portion)
            except (PySparkException, Py4JJavaError) as error:
                self._require_still_sound(error)
                raise
            return sums()

    def _require_still_sound(self, failure: Exception) -> None:
        """Raise BackupDamaged if the files were damaged since the check."""
        if find_error(failure) is None and (found := _find_damage(self.session, self.place, self.chain)):
            raise BackupDamaged(
                f"the backup was damaged while it was restored: {found}. Drop the namespace "
                f"{self.namespace.name!r}, which holds a part of it, and restore from another copy"
            ) from None

    def verify(self, written: RowSums) -> str | None:
        """Compare the namespace with the written rows.  Returns None, or why they cannot be compared."""
        with watch_tasks(self.session, self.progress, "verify"), explaining(self.place):
            namespace, target = self.namespace, self.target
            at = self.site.host.versions.read_version()
            options = {"namespace": namespace.name, "rows": "all", "versionAsOf": str(at)}
            # Stamps in the backup are at or below its version, so higher ones are of other writers.
            others = F.count_if(F.col("_origin_version") > F.lit(self.version)).alias(_OTHERS)
            rows = to_content(read_site(self.session, target, options, record_columns(namespace.merge)))
            found = rows.agg(*sum_columns(rows.columns, self.version), others).collect()[0].asDict()
        if to_sums(found) == written:
            return None
        if found[_OTHERS]:
            return f"not verified: {found[_OTHERS]:,} records were written by others meanwhile"
        raise Corruption(
            f"namespace {namespace.name!r} of site {self.site.name!r} does not hold the restored records: "
            f"{to_sums(found)} instead of {written}. Check the backup, drop the namespace and restore again"
        )


def _require_sound(spark: SparkSession, place: Directory, chain: Chain, progress: JobProgress) -> None:
    """Raise BackupDamaged if a part does not match its manifest."""
    found = _find_damage(spark, place, chain, progress)
    if found is not None:
        raise BackupDamaged(
            f"the backup is damaged, and nothing was restored: {found}. Restore from another copy; "
            f"`floodmark backup --check {place.location}` lists all damage"
        )


def _find_damage(
    spark: SparkSession, place: Directory, chain: Chain, progress: JobProgress = SILENT
) -> str | None:
    """The damage of the first part that does not match its manifest; None if all are sound."""
    parts = [chain.full, *chain.changes]
    for done, part in enumerate(parts):
        progress.report(_CHECK, done, len(parts))
        damage = find_damage(spark, place, part)
        if damage:
            # The parts before it are sound.
            earlier = (
                f" (up to version {part.since} it is sound: --at)" if part.kind is PartKind.CHANGES else ""
            )
            return f"{place.location}/{part.part}: {'; '.join(damage[:_DAMAGE_SHOWN])}{earlier}"
    progress.report(_CHECK, len(parts), len(parts))
    return None


def _rows_at(
    spark: SparkSession, place: Directory, chain: Chain, version: Version, keys: KeyRange
) -> DataFrame:
    """The state of a range of keys at a version."""
    rows = read_parts(spark, place, [chain.full, *chain.changes])
    if keys != EVERYTHING:
        rows = rows.where(in_range(keys))
    if chain.changes:
        rows = newest_rows(rows.where(F.col("_commit_version") <= F.lit(version)))
    return to_content(rows)


def _identify(chain: Chain, version: Version, keys: KeyRange) -> str:
    """A name of the restored rows: a hash of parts, version and keys."""
    parts = [part.id for part in (chain.full, *chain.changes)]
    return hashlib.sha256(msgspec.json.encode([parts, version, keys])).hexdigest()[:32]


def _open_namespace(site: Site, name: str, chain: Chain) -> tuple[NamespaceRow, bool]:
    """The namespace to restore into, and whether it was created, with the settings in the backup."""
    host = site.host
    settings = chain.newest.namespace.settings
    with suppress(NamespaceNotFound):
        row = host.namespaces.find_namespace(name)
        if row.merge != settings.merge:
            raise InvalidArgument(
                f"namespace {name!r} merges by {row.merge!r}, and the backup is of one that merges by "
                f"{settings.merge!r}; restore into a new namespace"
            )
        return row, False
    with suppress(NamespaceExists):
        return host.namespaces.create_namespace(name, settings), True
    return host.namespaces.find_namespace(name), False


def _require_own(site: Site, namespace: NamespaceRow, begun: Version) -> bool:
    """Raise InvalidArgument for records from before this restore.  Returns whether it finds its own."""
    at = site.host.versions.read_version()
    keys = qualify_range(encode_namespace(namespace.id), EVERYTHING)
    found = False
    for batch in site.host.router.scan_records(keys, at, dead=True, content=Content.DIGESTS):
        if not batch.num_rows:
            continue
        found = True
        if pyarrow.compute.min(batch.column("version")).as_py() <= begun:
            raise InvalidArgument(
                f"namespace {namespace.name!r} of site {site.name!r} holds other records; restore into a new "
                "namespace, or into one that is empty"
            )
    return found
