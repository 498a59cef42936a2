"""Copies of whole sites, like backups, and access to sites for restoring, joining and removing them.

A copy of a site has, for every namespace, all records as of one version, deleted ones included, with their
stamps, the watermark at that version, and the collected horizon.  The other sites keep the changes that a
copy lacks for as long as the copy is used; in production, the retention of a namespace does this.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from random import Random
from typing import Final, NamedTuple, TypeVar

from floodmark.codec.ordered import qualify_range
from floodmark.codec.records import add_origins
from floodmark.host.ports import NamespaceUpdate
from floodmark.links.returning import BackupFacts, Portion
from floodmark.model.partition import ApplyStream, LoadStream
from floodmark.model.ranges import KeyRange
from floodmark.model.version import Version
from floodmark.testing.simulation.chronicle import NAMESPACES
from floodmark.testing.simulation.drivers import DistantSite
from floodmark.testing.simulation.network import Carrier
from floodmark.testing.simulation.sites import RETENTION, SimulatedSite

Result = TypeVar("Result")

BATCH_ROWS_MAX: Final = 6


class Nearby:
    """A carrier for callers beside the site: no call is lost."""

    def call(self, _: str, __: str, action: Callable[[], Result]) -> Result:
        """Run the action."""
        return action()


class DistantMember(DistantSite):
    """A site as reached by the operators and jobs that change the topology."""

    def __init__(self, network: Carrier, place: str, site: SimulatedSite) -> None:
        super().__init__(network, place, site)
        self.site = site

    def reading(self, version: Version, namespace: int) -> AbstractContextManager[object]:
        """Hold nothing, because nothing is collected between two successive calls."""
        return nullcontext()

    def shorten_retention(self) -> None:
        """Set the retention of the site's namespaces to the same as at all other sites."""
        for name in NAMESPACES:
            self.namespaces.update_namespace(name, NamespaceUpdate(retention=RETENTION))

    def is_rejoining(self) -> bool:
        """Whether the site still lacks some of its earlier writes."""
        return self.status.replication().rejoining


class SiteCopy(NamedTuple):
    """The records of each namespace with their origins, by user key, and the other facts of a backup."""

    of: str
    records: Mapping[str, Mapping[bytes, bytes]]
    facts: Mapping[str, BackupFacts]


def keep_for(name: str, holder: DistantMember, others: Sequence[DistantMember]) -> None:
    """Keep the changes that a site lacks at all other sites, for the use of a copy of that site."""
    marks = {namespace: holder.replication.watermark(namespace, None) for namespace in NAMESPACES}
    for other in others:
        known = {namespace: mark.get(other.identity.site_id, 0) for namespace, mark in marks.items()}
        other.hold_safe_points(name, known)


def take_copy(holder: DistantMember) -> SiteCopy:
    """Copy a site as of now."""
    topology = holder.membership.topology()
    incarnations = {} if topology is None else topology.incarnations()
    version = holder.versions.read_version()
    site_id = holder.identity.site_id
    records = {namespace: _read(holder, namespace, version) for namespace in NAMESPACES}
    watermarks = {namespace: holder.replication.watermark(namespace, version) for namespace in NAMESPACES}
    # Read last: deletions collected while the records were read are missing in them.
    horizons = {each.name: each.collected_horizon for each in holder.status.statistics().namespaces}
    facts = {
        namespace: BackupFacts({**watermark, site_id: version}, horizons[namespace], incarnations)
        for namespace, watermark in watermarks.items()
    }
    return SiteCopy(holder.identity.site, records, facts)


def keys_of(namespace: str) -> KeyRange:
    """The qualified keys of a namespace; it has the same number at all sites."""
    return qualify_range(NAMESPACES.index(namespace) + 1)


def _read(holder: DistantMember, namespace: str, at: Version) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = {}
    for batch in holder.scan_records(keys_of(namespace), at, dead=True):
        versions = batch.column("version").to_numpy()
        stored = add_origins(batch.column("value"), versions, holder.identity.site_id)
        found |= zip(batch.column("key").to_pylist(), stored.to_pylist(), strict=True)
    return found


def writer_of(
    site: SimulatedSite, namespace: str, copy: SiteCopy, random: Random
) -> Callable[[Portion], None]:
    """A function that writes portions of a copy into a site, in batches, as the tasks of a restore do."""
    prefix = keys_of(namespace).start

    def write(portion: Portion) -> None:
        parts = {prefix + key: portion.take(record) for key, record in copy.records[namespace].items()}
        rows = [(key, part) for key, part in parts.items() if part is not None]
        while rows:
            size = random.randint(1, BATCH_ROWS_MAX)
            batch, rows = dict(rows[:size]), rows[size:]
            site.call_host(
                lambda host, batch=batch: (  # type: ignore[misc]
                    host.write_stream(LoadStream(True) if portion.load else ApplyStream(True))
                    .send(batch)
                    .result()
                )
            )

    return write
