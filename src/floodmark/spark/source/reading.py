"""A namespace at one version, or its changes between two versions, as a DataFrame.

The driver fixes the versions, and the moment by which a put counts as expired.  Every task, and every attempt
of it, reads at them, so all rows are of one moment, while writes and splits go on.  Spark keeps the plan as
long as the DataFrame lives, so a DataFrame that is used twice gives the same rows twice.

No filters are pushed down.  Spark 4.3 keeps one plan of a Python source per DataFrame, with the filters that
were pushed last, and uses it for queries with other filters or none as well: they would get the rows of
another query.  `startKey`, `endKey` and `prefix` are safe.

The rows of a batch have no order, so more tasks than there are partitions (`minPartitions`) share the
versions of changes, and not the keys: a change log is read by version.  A change feed that begins with a
snapshot and ends at a version is the snapshot at that version.

A site is read through its server or from its directory: both readers offer the same calls.  A directory may
be read while another process has it open, which needs RocksDB.  RocksDB is imported only then: workers that
reach a site by its URL do not need it.
"""

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Final, TypeAlias
from uuid import uuid4

import pyarrow
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from floodmark.clock import system_time_ms
from floodmark.codec.ordered import NAMESPACE_BYTES, qualify_range
from floodmark.feed import at_present
from floodmark.feed.reading.items import snapshot_ms
from floodmark.feed.safepoints import begin_reading
from floodmark.host.catalog import NamespaceRow
from floodmark.host.ports import published_version
from floodmark.model.change import Resolved
from floodmark.model.errors import (
    InvalidConfiguration,
    InvalidOption,
    InvalidVersion,
    VersionCollected,
    VersionInFuture,
)
from floodmark.model.partition import Content
from floodmark.model.ranges import KeyRange
from floodmark.model.stream import ChangeBatch, ChangesRequest, OnGeneration
from floodmark.model.version import Version, moment_of, physical_ms
from floodmark.site.address import SiteAddress
from floodmark.site.site import Site
from floodmark.spark.runtime.patience import ask_patiently
from floodmark.spark.source.options import (
    CHANGES,
    SNAPSHOT,
    SNAPSHOT_FIRST,
    STREAM,
    ReadOptions,
    read_options,
)
from floodmark.spark.source.planning import plan_ranges, plan_versions
from floodmark.spark.source.rows import (
    RowFormat,
    change_rows,
    snapshot_change_rows,
    snapshot_rows,
)
from floodmark.spark.source.schemas import (
    AVAILABLE,
    CHANGED,
    HASHED,
    LIVE,
    check_schema,
    default_schema,
)
from floodmark.spark.source.schemas import CHANGES as CHANGES_COLUMNS

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
    """Reads a site through its server.  Keys and ranges are qualified."""

    def __init__(self, site: Site) -> None:
        host = self._host = site.host
        # The origin of the changes that were first written there.
        self.site_id = site.id
        self.find_namespace = host.namespaces.find_namespace
        # The version at which a snapshot holds every acknowledged write.
        self.read_version = host.versions.read_version
        # Raises VersionInFuture for a version that the site has not reached.
        self.require_past = host.versions.observe
        self.physical_ms = host.physical_ms
        self.scan_records = host.router.scan_records
        self.changes = host.changes
        self.close = site.close

    def partition_ranges(self) -> list[KeyRange]:
        """The ranges of the site's partitions, in order."""
        # Callers with the role "read" may see the map, but not the site's statistics.
        return [partition.range for partition in self._host.router.maps.map.partitions]

    def resolved_version(self, namespace: NamespaceRow) -> Version:
        """The version up to which the changes of a namespace can be read."""
        return published_version(self._host.versions, namespace.name)

    def oldest_version(self, namespace: NamespaceRow) -> Version:
        """The oldest version at which a namespace can be read."""
        return self._host.retention.oldest_version(namespace.name)

    # The version above which every change can be read: where the log was trimmed, a server scans.
    oldest_changes_version = oldest_version

    def hold(self, name: str, version: Version, lifetime: timedelta, namespace: NamespaceRow) -> None:
        """Hold a version against garbage collection; the reader of a directory cannot."""
        self._host.retention.hold_safe_point(name, version, lifetime, namespace.name)

    def sample_keys(self, keys: KeyRange, at: Version) -> list[bytes]:
        """A few keys from both ends of a range."""
        namespace, router = keys.start[:NAMESPACE_BYTES], self._host.router
        pages = [
            page for reverse in (False, True) for page in router.scan(keys, at, SAMPLE_KEYS, reverse=reverse)
        ]
        return [namespace + key for page in pages for key, _ in page]


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


def plan_records(reader: SiteReader, keys: KeyRange, at: Version, count_min: int | None) -> list[KeyRange]:
    """A range of qualified keys cut along partitions, and further, by a sample, for `count_min` ranges."""
    return plan_ranges(
        reader.partition_ranges(), keys, count_min, lambda within: reader.sample_keys(within, at)
    )


def protect(reader: SiteReader, version: Version, namespace: NamespaceRow) -> Version:
    """Hold a version that garbage collection may reach before the last task begins; returns the version."""
    age_ms = reader.physical_ms() - physical_ms(version)
    if timedelta(milliseconds=age_ms) + JOB_TIME >= namespace.settings.retention:
        reader.hold(f"{READERS}{uuid4()}", version, JOB_TIME, namespace)
    return version


def open_reader(address: SiteAddress) -> SiteReader:
    """The site at an address, to read from; close it."""
    if address.is_url:
        return ServedReader(address.connect())
    try:
        secondary = import_module(_SECONDARY)
    except ModuleNotFoundError as error:
        raise InvalidConfiguration(
            f"a directory is read with RocksDB, and {error.name} is not installed here; install floodmark "
            "with it, or start a server with `floodmark serve` and use its URL"
        ) from error
    return LocalReader(secondary.open_directory(address.location))


# Snapshots


@dataclass(frozen=True)
class RecordRange(InputPartition):
    """The records of a range of qualified keys at a version, as they look at a moment."""

    keys: KeyRange
    version: Version
    judged_ms: int
    site_id: int


class SnapshotReader(DataSourceReader):
    """Plans the reading of a snapshot on the driver, and reads its parts in the tasks."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema

    def partitions(self) -> list[InputPartition]:
        options = self._options
        with closing(open_reader(options.address)) as reader:
            namespace = reader.find_namespace(options.namespace)
            version = _fix_version(reader, namespace, options.at)
            keys = qualify_range(namespace.id, options.keys)
            ranges = plan_records(reader, keys, version, options.partitions_min)
            judged_ms = snapshot_ms(version, reader.physical_ms())
            return [RecordRange(each, version, judged_ms, reader.site_id) for each in ranges]

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        assert isinstance(partition, RecordRange)
        options = self._options
        rows = RowFormat(self._schema, options.value_format, partition.site_id)
        with closing(ask_patiently(partial(open_reader, options.address))) as reader:
            content = Content.DIGESTS if options.rows == HASHED else Content.WHOLE
            dead = options.rows != LIVE
            for batch in reader.scan_records(partition.keys, partition.version, dead=dead, content=content):
                if batch.num_rows:
                    yield snapshot_rows(batch, rows, partition.judged_ms)


def snapshot_schema(given: Mapping[str, str]) -> StructType:
    """The columns of a snapshot without a user's schema."""
    options = read_options(given, SNAPSHOT)
    return default_schema(options.rows, metadata=options.metadata, value_format=options.value_format)


def open_snapshot_reader(given: Mapping[str, str], schema: StructType) -> DataSourceReader:
    """A reader of a snapshot.  Raises InvalidOption or SchemaMismatch."""
    options = read_options(given, SNAPSHOT)
    check_schema(schema, AVAILABLE[options.rows], options.value_format)
    return SnapshotReader(options, schema)


def _fix_version(reader: SiteReader, namespace: NamespaceRow, at: Version | None) -> Version:
    """The version of a snapshot, held while a job runs."""
    if at is None:
        return at_present(reader.read_version, lambda version: protect(reader, version, namespace))
    reader.require_past(at)
    require_kept(at, reader.oldest_version(namespace), namespace)
    return protect(reader, at, namespace)


# Changes


@dataclass(frozen=True)
class ChangeInterval(InputPartition):
    """The changes of qualified keys in `(since, until]`, as they look at a moment.

    With `snapshot`, the records that live at `until` instead.  The marker of a swap comes with the `first`
    range of keys.
    """

    namespace: int
    keys: KeyRange
    since: Version
    until: Version
    now_ms: int
    site_id: int
    snapshot: bool = False
    first: bool = False


class ChangesReader(DataSourceReader):
    """Plans the reading of changes on the driver, and reads its parts in the tasks."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema

    def partitions(self) -> list[InputPartition]:
        options, count_min = self._options, self._options.partitions_min
        with closing(open_reader(options.address)) as reader:
            namespace = reader.find_namespace(options.namespace)
            since, until = _fix_versions(reader, namespace, options)
            keys = qualify_range(namespace.id, options.keys)
            now_ms, site_id = reader.physical_ms(), reader.site_id
            if options.start == SNAPSHOT_FIRST:
                return [
                    ChangeInterval(namespace.id, each, until, until, now_ms, site_id, snapshot=True)
                    for each in plan_records(reader, keys, until, count_min)
                ]
            ranges = plan_ranges(reader.partition_ranges(), keys)
            return [
                ChangeInterval(namespace.id, each, start, end, now_ms, site_id, first=each == ranges[0])
                for each in ranges
                for start, end in plan_versions(since, until, -((count_min or 1) // -len(ranges)))
            ]

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        return read_interval(self._options, self._schema, partition)


def read_interval(
    options: ReadOptions, schema: StructType, interval: InputPartition
) -> Iterator[pyarrow.RecordBatch]:
    """The rows of a `ChangeInterval`, in a task."""
    assert isinstance(interval, ChangeInterval)
    rows = RowFormat(schema, options.value_format, interval.site_id)
    images, at, now_ms = options.before_images, interval.until, interval.now_ms
    if not interval.snapshot:
        reaction = options.on_generation
        for batch in read_batches(options.address, interval, before_images=images, on_generation=reaction):
            if batch.keys and (interval.first or not batch.is_marker):
                yield change_rows(batch, rows, now_ms)
        return
    with closing(ask_patiently(partial(open_reader, options.address))) as reader:
        for page in ask_patiently(lambda: reader.scan_records(interval.keys, at)):
            if page.num_rows:
                yield snapshot_change_rows(page, rows, at, now_ms, before_images=images)


def read_batches(
    address: SiteAddress,
    interval: ChangeInterval,
    *,
    before_images: bool = False,
    heartbeats: bool = False,
    on_generation: OnGeneration = OnGeneration.FAIL,
) -> Iterator[ChangeBatch]:
    """The changes of an interval, in a task."""
    request = ChangesRequest(
        keys=interval.keys,
        namespace=interval.namespace,
        since=interval.since,
        until=interval.until,
        before_images=before_images,
        heartbeats=heartbeats,
        on_generation=on_generation,
    )
    with closing(ask_patiently(partial(open_reader, address))) as reader:
        yield from ask_patiently(lambda: reader.changes(request))


def changes_schema(given: Mapping[str, str]) -> StructType:
    """The columns of changes without a user's schema, also for a stream."""
    options = read_options(given, CHANGES | STREAM)
    return default_schema(CHANGED, metadata=True, value_format=options.value_format)


def open_changes_reader(given: Mapping[str, str], schema: StructType) -> ChangesReader:
    """A reader of changes.  Raises InvalidOption or SchemaMismatch."""
    options = read_options(given, CHANGES)
    check_schema(schema, CHANGES_COLUMNS, options.value_format)
    return ChangesReader(options, schema)


def _fix_versions(
    reader: SiteReader, namespace: NamespaceRow, options: ReadOptions
) -> tuple[Version, Version]:
    """The versions that changes lie between, `(since, until]`; `since` is held while a job runs."""

    def hold(place: Resolved) -> Version:
        if place.snapshot is None:
            require_kept(place.version, reader.oldest_changes_version(namespace), namespace)
        return protect(reader, place.version, namespace)

    start, end = options.start, options.end
    if start == SNAPSHOT_FIRST and end is not None:
        reader.require_past(end)
    since = begin_reading(
        start,
        hold,
        present=lambda: reader.resolved_version(namespace),
        require_past=reader.require_past,
        until=end,
        created_at=namespace.created_at,
    )
    resolved = reader.resolved_version(namespace)
    if start == SNAPSHOT_FIRST:
        return since, since
    if end is None:
        return since, max(since, resolved)
    if isinstance(start, int) and end <= start:
        raise InvalidOption(
            f"the changes end at version {end}, before they begin at {start + 1}; swap start and end",
            option="endingVersion",
        )
    reader.require_past(end)
    return since, max(since, min(end, resolved))
