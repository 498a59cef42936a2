"""Rebuild a site of a topology from a backup: a new site that joins, or one that has lost its data.

The rows are written as by a restore, but most of them without rows in the change log, because the other sites
have them already.  `floodmark.links.returning` holds the rules; here Spark writes the rows.
"""

from collections.abc import Mapping
from contextlib import ExitStack

import msgspec
from pyspark.sql import SparkSession

from floodmark.host.ports import NamespaceUpdate
from floodmark.links.returning import BackupFacts, Portion, join_namespace, return_namespace
from floodmark.model.errors import InvalidArgument, InvalidConfiguration
from floodmark.model.version import Version
from floodmark.replication.topology import Topology
from floodmark.site.address import SiteAddress
from floodmark.site.site import Site
from floodmark.spark.jobs.backups.manifest import RowCounts, RowSums
from floodmark.spark.jobs.backups.restore import Restoration, restoring
from floodmark.spark.runtime.progress import JobProgress


class ReturnSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a rebuild.

    `returned` counts the records that other sites gave back.  A site takes no writes while namespaces are
    `missing`.  `verified` is as for a restore.
    """

    backup: str
    site: str
    namespace: str
    version: Version
    rows: RowCounts
    resumed: bool
    returned: int
    missing: list[str]
    verified: bool
    note: str | None


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
    with restoring(backup, target, namespace, spark=spark, progress=progress) as restoration:
        writing = _Writing(restoration)
        join_namespace(restoration.site.host, namespace, _facts_of(restoration), writing.write)
        return writing.summarize(backup)


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

    First the topology, with the site's incremented incarnation, is set at all sites, so that changes of the
    earlier incarnation are refused.  `addresses` lead to the other sites.
    """
    with ExitStack() as stack:
        with target.connect() as site:
            name = site.name
            if namespace not in topology.shared_by(name):
                raise InvalidConfiguration(f"site {name!r} does not share {namespace!r}", site=name)
        others = topology.active_members(namespace).keys() - {name}
        peers = {other: stack.enter_context(addresses[other].connect()).host for other in sorted(others)}
        for other in sorted(addresses.keys() - {name}):
            with addresses[other].connect() as peer:
                peer.set_topology(topology)
        with target.connect() as site:
            site.set_topology(topology)
            _require_rejoining(site)
        restoration = stack.enter_context(
            restoring(backup, target, namespace, spark=spark, progress=progress)
        )
        writing = _Writing(restoration)
        host = restoration.site.host
        copied = return_namespace(host, peers, namespace, _facts_of(restoration), writing.write)
        missing = host.membership.finish_rejoining()
        return writing.summarize(backup, returned=copied.records, missing=missing)


def _require_rejoining(site: Site) -> None:
    if not site.replication().rejoining:
        raise InvalidArgument(
            f"site {site.name!r} has the incarnation of the topology, and takes part; if it has lost its "
            "data, increment its `incarnation` in the topology first"
        )


def _facts_of(restoration: Restoration) -> BackupFacts:
    newest = restoration.chain.newest
    return BackupFacts(newest.watermark, newest.collected_horizon)


class _Writing:
    """Writes portions of a backup, and keeps the sums of the whole."""

    def __init__(self, restoration: Restoration) -> None:
        self._restoration = restoration
        self._written: RowSums | None = None
        settings = restoration.chain.newest.namespace.settings
        restoration.site.host.namespaces.update_namespace(
            restoration.namespace.name, NamespaceUpdate(ttl=settings.ttl, retention=settings.retention)
        )

    def write(self, portion: Portion) -> None:
        self._written = self._restoration.write(portion)

    def summarize(self, backup: str, *, returned: int = 0, missing: list[str] | None = None) -> ReturnSummary:
        restoration, written = self._restoration, self._written
        assert written is not None
        note = restoration.verify(written)
        return ReturnSummary(
            backup=backup,
            site=restoration.site.name,
            namespace=restoration.namespace.name,
            version=restoration.version,
            rows=written.counts,
            resumed=restoration.resumed,
            returned=returned,
            missing=missing or [],
            verified=note is None,
            note=note,
        )
