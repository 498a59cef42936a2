"""A site as a reader sees it, behind a server or in a directory.

Both kinds offer the same few calls, so that snapshots and changes are planned and read in one way.  A
directory is read beside whoever has it open, which needs RocksDB; it is loaded only then, because workers
that reach a site by its URL do without it.
"""

from collections.abc import Iterator
from datetime import timedelta
from importlib import import_module
from typing import TYPE_CHECKING, Final, Protocol
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
from floodmark.site.arguments import qualify_range
from floodmark.site.site import Site

if TYPE_CHECKING:
    from floodmark.host.secondary import DirectoryReader

# How many keys are looked at, from each end of a range, to guess how its keys are spread.
SAMPLE_KEYS: Final = 16
# How long the version of a batch job is kept at least.
JOB_TIME: Final = timedelta(hours=1)
# What the names of readers' safe points begin with; for these it is enough to have the role "read".
READERS: Final = "spark/"

# Loads RocksDB, which a worker that reads from a server does without.
_SECONDARY: Final = "floodmark.host.secondary"


class SiteReader(Protocol):
    """What it takes to read a site.  Keys and ranges are qualified."""

    @property
    def site_id(self) -> int:
        """The id of the site, which is the origin of what was first written there."""
        ...

    def find_namespace(self, name: str) -> NamespaceRow:
        """The namespace of a name."""
        ...

    def partition_ranges(self) -> list[KeyRange]:
        """The ranges of the site's partitions, in order."""
        ...

    def read_version(self) -> Version:
        """The version at which a snapshot holds everything that was acknowledged."""
        ...

    def resolved_version(self, namespace: NamespaceRow) -> Version:
        """Up to where the changes of a namespace can be read."""
        ...

    def oldest_version(self, namespace: NamespaceRow) -> Version:
        """The oldest version at which a namespace can be read."""
        ...

    def oldest_changes_version(self, namespace: NamespaceRow) -> Version:
        """The version after which every change of a namespace is still there."""
        ...

    def require_past(self, version: Version) -> None:
        """Refuse a version that the site has not reached."""
        ...

    def physical_ms(self) -> int:
        """The site's time in unix milliseconds."""
        ...

    def hold(self, name: str, version: Version, lifetime: timedelta, namespace: NamespaceRow) -> None:
        """Keep what a reader at a version sees, if the site can be asked to."""
        ...

    def sample_keys(self, keys: KeyRange, at: Version) -> list[bytes]:
        """A few of the keys at both ends of a range."""
        ...

    def scan_records(
        self, keys: KeyRange, at: Version, *, dead: bool = False, content: Content = Content.WHOLE
    ) -> Iterator[pyarrow.RecordBatch]:
        """The newest record at or below `at` of each key, as in `Partition.scan_records`."""
        ...

    def changes(self, request: ChangesRequest) -> Iterator[ChangeBatch]:
        """The changes that were asked for."""
        ...

    def close(self) -> None:
        """Let go."""
        ...


class ServedReader:
    """Reads a site behind a server."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._host = site.host

    @property
    def site_id(self) -> int:
        return self._site.id

    def find_namespace(self, name: str) -> NamespaceRow:
        return self._host.namespaces.find_namespace(name)

    def partition_ranges(self) -> list[KeyRange]:
        # The map is told to everybody who may read; the site's statistics are not.
        return [partition.range for partition in self._host.router.maps.map.partitions]

    def read_version(self) -> Version:
        return self._host.versions.read_version()

    def resolved_version(self, namespace: NamespaceRow) -> Version:
        # A stream of changes first makes durable what was written without waiting for the disk, and ends
        # at the version up to which that has been published.
        present = self._host.versions.resolved_version()
        keys = qualify_range(encode_namespace(namespace.id), KeyRange())
        for batch in self._host.changes(ChangesRequest(keys=keys, namespace=namespace.id, since=present)):
            present = max(present, batch.through)
        return present

    def oldest_version(self, namespace: NamespaceRow) -> Version:
        return self._host.retention.oldest_version(namespace.name)

    def oldest_changes_version(self, namespace: NamespaceRow) -> Version:
        # Where the change log was trimmed, a server finds changes by scanning.
        return self.oldest_version(namespace)

    def require_past(self, version: Version) -> None:
        self._host.versions.observe(version)

    def physical_ms(self) -> int:
        return self._host.physical_ms()

    def hold(self, name: str, version: Version, lifetime: timedelta, namespace: NamespaceRow) -> None:
        self._host.retention.hold_safe_point(name, version, lifetime, namespace.name)

    def sample_keys(self, keys: KeyRange, at: Version) -> list[bytes]:
        namespace, router = keys.start[:NAMESPACE_BYTES], self._host.router
        pages = [
            page for reverse in (False, True) for page in router.scan(keys, at, SAMPLE_KEYS, reverse=reverse)
        ]
        return [namespace + key for page in pages for key, _ in page]

    def scan_records(
        self, keys: KeyRange, at: Version, *, dead: bool = False, content: Content = Content.WHOLE
    ) -> Iterator[pyarrow.RecordBatch]:
        return self._host.router.scan_records(keys, at, dead=dead, content=content)

    def changes(self, request: ChangesRequest) -> Iterator[ChangeBatch]:
        return self._host.changes(request)

    def close(self) -> None:
        self._site.close()


class LocalReader:
    """Reads a site's directory, also while another process has it open."""

    def __init__(self, directory: "DirectoryReader") -> None:
        self._directory = directory

    @property
    def site_id(self) -> int:
        return self._directory.identity.site_id

    def find_namespace(self, name: str) -> NamespaceRow:
        return self._directory.find_namespace(name)

    def partition_ranges(self) -> list[KeyRange]:
        return [keys for _, keys in self._directory.partitions()]

    def read_version(self) -> Version:
        return self._directory.complete_version()

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

    def physical_ms(self) -> int:
        return system_time_ms()

    def hold(self, name: str, version: Version, lifetime: timedelta, namespace: NamespaceRow) -> None:
        # Whoever only looks into a directory cannot ask its owner for anything.  What is collected while it
        # is read is noticed, and is an error then.
        pass

    def sample_keys(self, keys: KeyRange, at: Version) -> list[bytes]:
        return self._directory.sample_keys(keys, SAMPLE_KEYS)

    def scan_records(
        self, keys: KeyRange, at: Version, *, dead: bool = False, content: Content = Content.WHOLE
    ) -> Iterator[pyarrow.RecordBatch]:
        return self._directory.scan_records(keys, at, dead=dead, content=content)

    def changes(self, request: ChangesRequest) -> Iterator[ChangeBatch]:
        return self._directory.changes(request)

    def close(self) -> None:
        self._directory.close()


def require_kept(version: Version, oldest: Version, namespace: NamespaceRow) -> None:
    """Refuse a version from before the namespace was made, and one that garbage collection has passed."""
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
    """Keep a version for as long as a job takes, if it is about to be collected.

    Each task holds what it reads, but the last ones may begin late.
    """
    age_ms = reader.physical_ms() - physical_ms(version)
    if timedelta(milliseconds=age_ms) + JOB_TIME >= namespace.settings.retention:
        reader.hold(f"{READERS}{uuid4()}", version, JOB_TIME, namespace)


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
