"""Restore a backup into a namespace, as it was at any version that the backup leads to.

Of each key the newest record at or below the version is written by its stamp, so what was deleted stays
deleted, what expires does so when it would have, and a row that is written twice changes nothing.

A namespace that holds anything else is refused: two sets of records would be merged into one that never was.
A restore that was killed finds its own rows there.  To tell the two apart, it first draws a version at the
target that is the same whenever it asks again, and everything it writes is committed above that version.
What is there and was committed below it was there before the restore.

The backup is read and checked before the site is touched: of a damaged one nothing is written.
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
from floodmark.replication.returning import Portion
from floodmark.site.arguments import qualify_range
from floodmark.site.site import Site
from floodmark.spark.jobs.backups.check import find_damage
from floodmark.spark.jobs.backups.manifest import (
    Chain,
    Kind,
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
from floodmark.spark.runtime.progress import SILENT, Progress, watch_tasks
from floodmark.spark.session import use_session
from floodmark.spark.source.address import SiteAddress
from floodmark.spark.source.schemas import record_columns

EVERYTHING: Final = KeyRange()

_OTHERS: Final = "others"
_CHECK: Final = "check backup"
_DAMAGE_SHOWN: Final = 5


class RestoreSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What a restore has done.

    `version` is where a reader of the backed-up site's changes goes on.  `verified` says that the namespace
    was read again and holds what was to be restored, and nothing else; if not, `note` says why.
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
    progress: Progress | None = None,
) -> RestoreSummary:
    """Restore a range of keys as of a version, the newest if none is named, into a new or empty namespace."""
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
    progress: Progress | None = None,
) -> Iterator["Restoration"]:
    """A backup and the namespace that it is restored into, which is new, empty, or was begun before."""
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
        # Deletions that are restored must not be collected before they were counted.
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
    progress: Progress | None

    def write(self, portion: Portion | None = None) -> RowSums:
        """Write the rows, or a portion of each; the sums of all of them."""
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
        """Raise BackupDamaged if files that were sound can no longer be read."""
        if find_error(failure) is None and (found := _find_damage(self.session, self.place, self.chain)):
            raise BackupDamaged(
                f"the backup was damaged while it was restored: {found}. Drop the namespace "
                f"{self.namespace.name!r}, which holds a part of it, and restore from another copy"
            ) from None

    def verify(self, written: RowSums) -> str | None:
        """Read again what was written, and compare; None if it is the same, or why that cannot be told."""
        with watch_tasks(self.session, self.progress, "verify"), explaining(self.place):
            return _verify(self.session, self.site, self.target, self.namespace, self.version, written)


def _require_sound(spark: SparkSession, place: Directory, chain: Chain, progress: Progress) -> None:
    """Refuse a backup of which a part is not what its manifest says, before anything is written."""
    found = _find_damage(spark, place, chain, progress)
    if found is not None:
        raise BackupDamaged(
            f"the backup is damaged, and nothing was restored: {found}. Restore from another copy; "
            f"`floodmark backup --check {place.location}` lists all that is wrong"
        )


def _find_damage(
    spark: SparkSession, place: Directory, chain: Chain, progress: Progress = SILENT
) -> str | None:
    """What is wrong with the first part that is not what its manifest says; None if all are sound."""
    parts = [chain.full, *chain.changes]
    for done, part in enumerate(parts):
        progress.report(_CHECK, done, len(parts))
        damage = find_damage(spark, place, part)
        if damage:
            # The parts before it are sound.
            earlier = f" (up to version {part.since} it is sound: --at)" if part.kind is Kind.CHANGES else ""
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
    """A name for what is restored: the same rows give the same name, others another."""
    parts = [part.id for part in (chain.full, *chain.changes)]
    return hashlib.sha256(msgspec.json.encode([parts, version, keys])).hexdigest()[:32]


def _open_namespace(site: Site, name: str, chain: Chain) -> tuple[NamespaceRow, bool]:
    """The namespace to restore into, made with the settings that it had if it is not there."""
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
    """Refuse a namespace with records from before this restore; whether there are some of it already."""
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


def _verify(
    spark: SparkSession,
    site: Site,
    target: SiteAddress,
    namespace: NamespaceRow,
    version: Version,
    written: RowSums,
) -> str | None:
    """Read again what was restored, and compare; None if it is the same, or why that cannot be told."""
    at = site.host.versions.read_version()
    options = {"namespace": namespace.name, "rows": "all", "versionAsOf": str(at)}
    # Stamps in the backup are at or below its version: whatever is above was written by someone else.
    others = F.count_if(F.col("_origin_version") > F.lit(version)).alias(_OTHERS)
    rows = to_content(read_site(spark, target, options, record_columns(namespace.merge)))
    found = rows.agg(*sum_columns(rows.columns, version), others).collect()[0].asDict()
    if to_sums(found) == written:
        return None
    if found[_OTHERS]:
        return f"not verified: {found[_OTHERS]:,} records were written by others meanwhile"
    raise Corruption(
        f"namespace {namespace.name!r} of site {site.name!r} does not hold what was restored: "
        f"{to_sums(found)} instead of {written}. Check the backup, drop the namespace and restore again"
    )
