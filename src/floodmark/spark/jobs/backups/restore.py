"""Restore a backup into a namespace, as it was at any version that the backup leads to.

The newest record of each key at or below the version is written by its stamp, so deletions and expiries are
restored too, and a row that is written twice changes nothing.

A namespace with other records is refused, because both sets of records would be merged.  A killed restore
finds its own rows there.  To tell them apart, a restore first draws a version at the target, the same one in
each run, and commits all its rows above it: records below it are others.

The backup is read and checked before the site is touched: nothing of a damaged backup is written.

A site of a topology is rebuilt from a backup in the same way: a new site that joins, or one that has lost its
data.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from floodmark.files.directory import Directory, directory_at
from floodmark.host.catalog import NamespaceRow
from floodmark.host.ports import NamespaceUpdate
from floodmark.layers.ports import LAYER
from floodmark.links.returning import (
    BackupFacts,
    Portion,
    finish_return,
    join_namespace,
    require_own,
    return_namespace,
    returning,
)
from floodmark.model.errors import (
    BackupDamaged,
    Corruption,
    InvalidArgument,
    InvalidConfiguration,
    NamespaceExists,
    NamespaceNotFound,
    WrongPolicy,
)
from floodmark.model.ranges import KeyRange
from floodmark.model.version import Version
from floodmark.replication.topology import Topology
from floodmark.site.address import SiteAddress
from floodmark.site.site import Site
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
    find_damage,
    is_deleted,
    observe_rows,
    read_parts,
    sum_columns,
    to_sums,
)
from floodmark.spark.jobs.common import holding, read_site, release
from floodmark.spark.runtime.failures import find_error
from floodmark.spark.runtime.progress import SILENT, JobProgress, watch_tasks
from floodmark.spark.session import open_session
from floodmark.spark.source.schemas import record_columns
from floodmark.spark.source.source import FORMAT
from floodmark.spark.source.writing import KEEP_STAMPS, PORTION

EVERYTHING: Final = KeyRange()

# The columns that a restore does not change.
_CONTENT: Final = (
    "key",
    "value",
    "_change_type",
    "_origin_site",
    "_origin_version",
    "_expires_at",
    "_stamps",
)
_OTHERS: Final = "others"
_CHECK: Final = "check backup"
_DAMAGE_SHOWN: Final = 5


class RebuildSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The result of writing a backup into a namespace.

    A reader of the backed-up site's changes goes on from `version`.  `verified` means that the namespace was
    read again and holds exactly the restored records; otherwise `note` says why not.
    """

    backup: str
    site: str
    namespace: str
    version: Version
    rows: RowCounts
    resumed: bool
    verified: bool
    note: str | None


class RestoreSummary(RebuildSummary, frozen=True, kw_only=True):
    """The result of a restore, and whether it created the namespace."""

    created: bool


class ReturnSummary(RebuildSummary, frozen=True, kw_only=True):
    """The result of rebuilding a site.

    `returned` counts the records that other sites gave back.  A site takes no writes while namespaces are
    `missing`.
    """

    returned: int = 0
    missing: list[str] = []


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
    """Restore a range of keys as of a version, by default the newest, into a new or empty namespace.

    InvalidConfiguration is raised for a namespace that other sites share.
    """
    with restoring(
        backup, target, namespace, at=at, keys=keys, spark=spark, progress=progress
    ) as restoration:
        written = restoration.write()
        return RestoreSummary(**restoration.verified(written), created=restoration.created)


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
    rebuilds: bool = False,
) -> Iterator["Restoration"]:
    """A restore into a namespace that is new, empty, or holds rows of the same restore.

    A namespace that other sites share is refused, unless the call `rebuilds` a site that joins or returns.
    """
    target.require_url("be restored into")
    place = directory_at(backup)
    chain, version = choose_chain(read_manifests(place), at, backup)
    identity = _identify(chain, version, keys)
    with target.connect() as site, open_session(name="floodmark restore", spark=spark) as session:
        if not rebuilds:
            _require_unshared(site, namespace)
        _require_sound(session, place, chain, progress or SILENT)
        if keys != EVERYTHING:
            _require_plain(session, place, chain)
        row, created = _open_namespace(site, namespace, chain)
        begun = site.host.versions.open_epoch(namespace, f"restore/{identity}", 0)
        resumed = require_own(site.host, row, begun)
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
                observed, sums = observe_rows(self._rows(), self.version)
                options = {**self.target.options(), **KEEP_STAMPS, "distinctKeys": "true"}
                if portion is not None:
                    options[PORTION] = msgspec.json.encode(portion).decode()
                writer = observed.write.format(FORMAT).mode("append").options(**options)
                writer.option("namespace", self.namespace.name).save(self.target.location)
            except (PySparkException, Py4JJavaError) as error:
                self._require_still_sound(error)
                raise
            return sums()

    def _rows(self) -> DataFrame:
        """The newest row of each key at the version."""
        rows = read_parts(self.session, self.place, self.chain.parts)
        if self.keys.start:
            rows = rows.where(F.col("key") >= F.lit(self.keys.start))
        if self.keys.end is not None:
            rows = rows.where(F.col("key") < F.lit(self.keys.end))
        if len(self.chain.parts) > 1:
            rows = rows.where(F.col("_commit_version") <= F.lit(self.version))
            others = [name for name in rows.columns if name != "key"]
            newest = F.max_by(F.struct(*others), F.col("_commit_version")).alias("newest")
            # Sorted by key within each of Spark's partitions.
            rows = rows.repartitionByRange("key").groupBy("key").agg(newest).select("key", "newest.*")
        return _to_content(rows)

    def _require_still_sound(self, failure: Exception) -> None:
        """Raise BackupDamaged if the files were damaged since the check."""
        if find_error(failure) is None and (found := _find_damage(self.session, self.place, self.chain)):
            raise BackupDamaged(
                f"the backup was damaged while it was restored: {found}. Drop the namespace "
                f"{self.namespace.name!r}, which holds a part of it, and restore from another copy"
            ) from None

    def verify(self, written: RowSums) -> str | None:
        """Compare the namespace with the written rows.  Returns None, or why they cannot be compared."""
        namespace = self.namespace
        with watch_tasks(self.session, self.progress, "verify"), explaining(self.place):
            options = {"rows": "all", "versionAsOf": str(self.site.host.versions.read_version())}
            columns = record_columns(namespace.merge)
            rows = _to_content(read_site(self.session, self.target, namespace.name, options, columns))
            # Stamps in the backup are at or below its version, so higher ones are of other writers.
            others = F.count_if(F.col("_origin_version") > F.lit(self.version)).alias(_OTHERS)
            found = rows.agg(*sum_columns(rows.columns, self.version), others).collect()[0].asDict()
        if to_sums(found) == written:
            return None
        if found[_OTHERS]:
            return f"not verified: {found[_OTHERS]:,} records are newer than the backup"
        raise Corruption(
            f"namespace {namespace.name!r} of site {self.site.name!r} does not hold the restored records: "
            f"{to_sums(found)} instead of {written}. Check the backup, drop the namespace and restore again"
        )

    def verified(self, written: RowSums) -> dict[str, Any]:
        """The fields of a `RebuildSummary`, after the namespace was compared with the written rows."""
        note = self.verify(written)
        return {
            "backup": self.place.location,
            "site": self.site.name,
            "namespace": self.namespace.name,
            "version": self.version,
            "rows": written.counts,
            "resumed": self.resumed,
            "verified": note is None,
            "note": note,
        }


def _require_sound(spark: SparkSession, place: Directory, chain: Chain, progress: JobProgress) -> None:
    """Raise BackupDamaged if a part does not match its manifest."""
    found = _find_damage(spark, place, chain, progress)
    if found is not None:
        raise BackupDamaged(
            f"the backup is damaged, and nothing was restored: {found}. Restore from another copy; "
            f"`floodmark backup --check {place.location}` lists all damage"
        )


def _require_plain(spark: SparkSession, place: Directory, chain: Chain) -> None:
    """Refuse to restore a range of keys of a layer, whose stored keys are not those of its users."""
    with explaining(place):
        layers = read_parts(spark, place, chain.parts).where(F.col("key") == F.lit(LAYER)).select("value")
        layer = layers.where(F.col("value").isNotNull()).first()
    if layer is not None:
        raise WrongPolicy(
            f"the backup is of a namespace that holds {bytes(layer[0]).decode(errors='replace')}, in which a "
            "range of keys means nothing; restore all of it into a new namespace, and read the range there",
            namespace=chain.newest.namespace.name,
        )


def _find_damage(
    spark: SparkSession, place: Directory, chain: Chain, progress: JobProgress = SILENT
) -> str | None:
    """The damage of the first part that does not match its manifest; None if all are sound."""
    for done, part in enumerate(chain.parts):
        progress.report(_CHECK, done, len(chain.parts))
        damage = find_damage(spark, place, part)
        if damage:
            # The parts before it are sound.
            earlier = (
                f" (up to version {part.since} it is sound: --at)" if part.kind is PartKind.CHANGES else ""
            )
            return f"{place.location}/{part.part}: {'; '.join(damage[:_DAMAGE_SHOWN])}{earlier}"
    progress.report(_CHECK, len(chain.parts), len(chain.parts))
    return None


def _to_content(rows: DataFrame) -> DataFrame:
    """The columns that a restore does not change.  Deleted rows have neither value nor expiry."""
    return rows.select(
        *(
            F.when(~is_deleted(), F.col(name)).alias(name)
            if name in ("value", "_expires_at")
            else F.col(name)
            for name in _CONTENT
            if name in rows.columns
        )
    )


def _identify(chain: Chain, version: Version, keys: KeyRange) -> str:
    """A name of the restored rows: a hash of parts, version and keys."""
    parts = [part.id for part in chain.parts]
    return hashlib.sha256(msgspec.json.encode([parts, version, keys])).hexdigest()[:32]


def _require_unshared(site: Site, namespace: str) -> None:
    """Refuse a namespace that other sites share: links copy only records that were first written here."""
    topology = site.topology()
    others = [] if topology is None else sorted(topology.active_members(namespace).keys() - {site.name})
    if topology is not None and others and namespace in topology.shared_by(site.name):
        raise InvalidConfiguration(
            f"namespace {namespace!r} is shared with {', '.join(others)}, which would not get the records "
            "that other sites have written. Restore with --join at a new site, with --rejoin at one that has "
            "lost its data, and else into a namespace of another name (docs/operations/backup.md)",
            site=site.name,
            namespace=namespace,
        )


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


# Sites that join or return


def join(
    backup: str,
    target: SiteAddress,
    namespace: str,
    *,
    spark: SparkSession | None = None,
    progress: JobProgress | None = None,
) -> ReturnSummary:
    """Build a namespace of a new site from a backup of another site of its topology."""
    with target.connect() as site:
        topology = site.topology()
        if topology is None or namespace not in topology.shared_by(site.name):
            raise InvalidConfiguration(
                f"site {site.name!r} does not share {namespace!r}; enter it in the topology, and set that at "
                "all sites, the new one last",
                site=site.name,
            )
    with restoring(backup, target, namespace, spark=spark, progress=progress, rebuilds=True) as restoration:
        facts, write, written = _rebuild(restoration)
        join_namespace(restoration.site.host, namespace, facts, write)
        return ReturnSummary(**restoration.verified(written[-1]))


def rejoin(
    backup: str,
    target: SiteAddress,
    namespace: str,
    *,
    topology: Topology,
    addresses: Mapping[str, SiteAddress],
    spark: SparkSession | None = None,
    progress: JobProgress | None = None,
) -> ReturnSummary:
    """Rebuild a namespace of a site that has lost its data, from a backup of it or of another site.

    `addresses` lead to the other sites.
    """
    with (
        returning(target, namespace, topology, addresses) as (site, others),
        restoring(backup, target, namespace, spark=spark, progress=progress, rebuilds=True) as restoration,
    ):
        facts, write, written = _rebuild(restoration)
        peers = {name: others[name] for name in topology.active_members(namespace) if name in others}
        rebuilt: dict[str, Any] = {}
        copied = return_namespace(
            site.host,
            peers,
            namespace,
            facts,
            write,
            lambda: rebuilt.update(restoration.verified(written[-1])),
        )
        missing = finish_return(site.host, others, topology)
        return ReturnSummary(**rebuilt, returned=copied.records, missing=missing)


def _rebuild(restoration: Restoration) -> tuple[BackupFacts, Callable[[Portion], None], list[RowSums]]:
    """The facts of a backup, a function that writes a portion of it, and the sums of what it wrote.

    Most rows are written without rows in the change log, because the other sites have them already
    (`floodmark.links.returning` holds the rules).
    """
    newest, written = restoration.chain.newest, list[RowSums]()
    settings = newest.namespace.settings
    restoration.site.host.namespaces.update_namespace(
        restoration.namespace.name, NamespaceUpdate(ttl=settings.ttl, retention=settings.retention)
    )
    facts = BackupFacts(newest.watermark, newest.collected_horizon, newest.incarnations)
    return facts, lambda portion: written.append(restoration.write(portion)), written
