"""A site to read from, behind a server or in a directory.

Both kinds offer the same calls, so snapshots and changes are planned and read in one way.  A directory is
read while another process may have it open, which needs RocksDB.  RocksDB is imported only then: workers
that reach a site by its URL do without it.
"""

from collections.abc import Iterator
from datetime import timedelta
from importlib import import_module
from typing import TYPE_CHECKING, Final, TypeAlias
from uuid import uuid4

import pyarrow

from floodmark.clock import system_time_ms
from floodmark.codec.ordered import NAMESPACE_BYTES, encode_namespace
from floodmark.host.catalog import NamespaceRow
from floodmark.model.errors import InvalidConfiguration, InvalidVersion, VersionCollected, VersionInFuture
from floodmark.model.partition import Content
from floodmark.model.ranges import KeyRange
from floodmark.model.stream import ChangeBatch, ChangesRequest
from floodmark.model.version import Version, moment_of, physical_ms
from floodmark.site.address import SiteAddress
from floodmark.site.arguments import qualify_range
from floodmark.site.site import Site

if TYPE_CHECKING:
    from floodmark.host.secondary import DirectoryReader

# The keys to sample at each end of a range, to estimate how its keys are spread.
SAMPLE_KEYS: Final = 16
# How long the version of a batch job is kept at least.
JOB_TIME: Final = timedelta(hours=1)
# The prefix of readers' safe points, which need only the role "read".
READERS: Final = "spark/"

_SECONDARY: Final = "floodmark.host.secondary"


class ServedReader:
    """Reads a site behind a server.  Keys and ranges are qualified."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._host = site.host

    @property
    def site_id(self) -> int:
        """The id of the site, which is the origin of the changes that were first written there."""
        return self._site.id

    def find_namespace(self, name: str) -> NamespaceRow:
        """The namespace of a name."""
        return self._host.namespaces.find_namespace(name)

    def partition_ranges(self) -> list[KeyRange]:
        """The ranges of the site's partitions, in order."""
        # Callers with the role "read" may see the map, but not the site's statistics.
        return [partition.range for partition in self._host.router.maps.map.partitions]

    def read_version(self) -> Version:
        """The version at which a snapshot holds every acknowledged write."""
        return self._host.versions.read_version()

    def resolved_version(self, namespace: NamespaceRow) -> Version:
        """The version up to which the changes of a namespace can be read."""
        # A stream of changes first syncs writes that did not wait for the disk, and ends at the version up
        # to which they are published.
        present = self._host.versions.resolved_version()
        keys = qualify_range(encode_namespace(namespace.id), KeyRange())
        for batch in self._host.changes(ChangesRequest(keys=keys, namespace=namespace.id, since=present)):
            present = max(present, batch.through)
        return present

    def oldest_version(self, namespace: NamespaceRow) -> Version:
        """The oldest version at which a namespace can be read."""
        return self._host.retention.oldest_version(namespace.name)

    def oldest_changes_version(self, namespace: NamespaceRow) -> Version:
        """The version above which every change of a namespace can be read."""
        # Where the change log was trimmed, a server finds changes by a scan.
        return self.oldest_version(namespace)

    def require_past(self, version: Version) -> None:
        """Raise VersionInFuture for a version that the site has not reached."""
        self._host.versions.observe(version)

    def physical_ms(self) -> int:
        """The site's time in unix milliseconds."""
        return self._host.physical_ms()

    def hold(self, name: str, version: Version, lifetime: timedelta, namespace: NamespaceRow) -> None:
        """Keep a version readable; a directory cannot be asked for that."""
        self._host.retention.hold_safe_point(name, version, lifetime, namespace.name)

    def sample_keys(self, keys: KeyRange, at: Version) -> list[bytes]:
        """A few keys from both ends of a range."""
        namespace, router = keys.start[:NAMESPACE_BYTES], self._host.router
        pages = [
            page for reverse in (False, True) for page in router.scan(keys, at, SAMPLE_KEYS, reverse=reverse)
        ]
        return [namespace + key for page in pages for key, _ in page]

    def scan_records(
        self, keys: KeyRange, at: Version, *, dead: bool = False, content: Content = Content.WHOLE
    ) -> Iterator[pyarrow.RecordBatch]:
        """The newest record at or below `at` of each key, as in `Partition.scan_records`."""
        return self._host.router.scan_records(keys, at, dead=dead, content=content)

    def changes(self, request: ChangesRequest) -> Iterator[ChangeBatch]:
        """The changes of a request."""
        return self._host.changes(request)

    def close(self) -> None:
        """Close the connection."""
        self._site.close()


class LocalReader:
    """Reads a site's directory, also while another process has it open.  The calls are `ServedReader`'s."""

    def __init__(self, directory: "DirectoryReader") -> None:
        self._directory = directory
        self.site_id = directory.identity.site_id
        self.find_namespace = directory.find_namespace
        self.read_version = directory.complete_version
        self.physical_ms = system_time_ms
        self.scan_records = directory.scan_records
        self.changes = directory.changes
        self.close = directory.close

    def partition_ranges(self) -> list[KeyRange]:
        return [keys for _, keys in self._directory.partitions()]

    def resolved_version(self, namespace: NamespaceRow) -> Version:
        return self._directory.complete_version()

    def oldest_version(self, namespace: NamespaceRow) -> Version:
        return self._directory.oldest_version(namespace.id)

    def oldest_changes_version(self, namespace: NamespaceRow) -> Version:
        return self._directory.oldest_changes_version(namespace.id)

    def require_past(self, version: Version) -> None:
        complete = self._directory.complete_version()
        if version > complete:
            raise VersionInFuture(
                f"version {version} ({moment_of(version).isoformat()}) is not complete in this directory, "
                f"which can be read up to {complete} ({moment_of(complete).isoformat()}); read at that, or "
                "leave out the version",
                version=version,
                complete=complete,
            )

    def hold(self, name: str, version: Version, lifetime: timedelta, namespace: NamespaceRow) -> None:
        # A read raises VersionCollected if garbage collection passes it.
        pass

    def sample_keys(self, keys: KeyRange, at: Version) -> list[bytes]:
        return self._directory.sample_keys(keys, SAMPLE_KEYS)


SiteReader: TypeAlias = ServedReader | LocalReader


def require_kept(version: Version, oldest: Version, namespace: NamespaceRow) -> None:
    """Raise an error for a version from before the namespace, or that was collected."""
    if version < namespace.created_at:
        raise InvalidVersion(
            f"version {version} ({moment_of(version).isoformat()}) is older than namespace "
            f"{namespace.name!r}, which was made at version {namespace.created_at} "
            f"({moment_of(namespace.created_at).isoformat()}); read at that or later",
            version=version,
        )
    if version < oldest:
        raise VersionCollected(
            f"version {version} of {namespace.name!r} was collected; the oldest that can be read is {oldest} "
            f"({moment_of(oldest).isoformat()}). Keep history longer with the namespace's `retention` or a "
            'safe point; for changes, begin with the option startingVersion "snapshot", which has every key',
            version=version,
            oldest=oldest,
        )


def protect(reader: SiteReader, version: Version, namespace: NamespaceRow) -> None:
    """Hold a version that garbage collection may reach before the last task begins."""
    age_ms = reader.physical_ms() - physical_ms(version)
    if timedelta(milliseconds=age_ms) + JOB_TIME >= namespace.settings.retention:
        reader.hold(f"{READERS}{uuid4()}", version, JOB_TIME, namespace)


def open_reader(address: SiteAddress) -> SiteReader:
    """The site at an address, to read from; close it."""
    return ServedReader(address.connect()) if address.is_url else open_directory(address.location)


def open_directory(path: str) -> SiteReader:
    """Open a site's directory to read it."""
    try:
        secondary = import_module(_SECONDARY)
    except ModuleNotFoundError as error:
        raise InvalidConfiguration(
            f"a directory is read with RocksDB, and {error.name} is not installed here; install floodmark "
            "with it, or start a server with `floodmark serve` and use its URL"
        ) from error
    return LocalReader(secondary.open_directory(path))
