"""The changes of a namespace between two versions, as a DataFrame.

The driver fixes both ends, and the moment by which a put counts as expired, so that every task, and every
attempt of it, finds the same.  The rows of a batch have no order, so more tasks than there are partitions
(`minPartitions`) share the versions, and not the keys: a change log is read by version.

A change feed that begins with a snapshot and ends at a version is the snapshot at that version.
"""

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial

import pyarrow
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from floodmark.codec.ordered import encode_namespace
from floodmark.feed.safepoints import begin_reading
from floodmark.host.catalog import NamespaceRow
from floodmark.model.change import Resolved
from floodmark.model.errors import InvalidOption
from floodmark.model.ranges import KeyRange
from floodmark.model.stream import ChangesRequest, Way
from floodmark.model.version import Version
from floodmark.site.address import SiteAddress
from floodmark.site.arguments import qualify_range
from floodmark.spark.runtime.patience import ask_patiently
from floodmark.spark.source.options import (
    CHANGES,
    HEARTBEATS,
    SNAPSHOT_FIRST,
    STREAM,
    Options,
)
from floodmark.spark.source.planning import plan_ranges, plan_versions
from floodmark.spark.source.reading import SiteReader, open_reader, protect, require_kept
from floodmark.spark.source.rows import RowFormat, change_rows, snapshot_change_rows
from floodmark.spark.source.schemas import CHANGED, check_schema, default_schema, is_counted
from floodmark.spark.source.schemas import CHANGES as CHANGES_COLUMNS
from floodmark.spark.source.special import beat_rows, scanned_row


@dataclass(frozen=True, kw_only=True)
class ChangesOptions:
    """Which changes are read, and as what: those after `start`, up to `end` or the present."""

    address: SiteAddress
    namespace: str
    keys: KeyRange
    start: Version | str
    end: Version | None
    before_images: bool
    value_format: str | None
    partitions_min: int | None
    heartbeats: bool = False


@dataclass(frozen=True)
class ChangeInterval(InputPartition):
    """The changes of qualified keys in `(since, until]`, as they look at a moment.

    With `snapshot`, the records that live at `until` instead.
    """

    namespace: int
    keys: KeyRange
    since: Version
    until: Version
    now_ms: int
    site_id: int
    snapshot: bool = False


class ChangesReader(DataSourceReader):
    """Plans the reading of changes on the driver, and reads its parts in the tasks."""

    def __init__(self, options: ChangesOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema

    def partitions(self) -> list[InputPartition]:
        options = self._options
        with closing(open_reader(options.address)) as reader:
            namespace = reader.find_namespace(options.namespace)
            since, until = fix_versions(reader, namespace, options)
            keys = qualify_range(encode_namespace(namespace.id), options.keys)
            now_ms = reader.physical_ms()
            if options.start == SNAPSHOT_FIRST:
                ranges = plan_ranges(
                    reader.partition_ranges(),
                    keys,
                    options.partitions_min,
                    lambda within: reader.sample_keys(within, until),
                )
                return [
                    ChangeInterval(namespace.id, each, until, until, now_ms, reader.site_id, snapshot=True)
                    for each in ranges
                ]
            ranges = plan_ranges(reader.partition_ranges(), keys)
            count = -((options.partitions_min or 1) // -len(ranges))
            return [
                ChangeInterval(namespace.id, each, start, end, now_ms, reader.site_id)
                for each in ranges
                for start, end in plan_versions(since, until, count)
            ]

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        assert isinstance(partition, ChangeInterval)
        options = self._options
        rows = RowFormat(self._schema, options.value_format, partition.site_id)
        return read_interval(
            options.address,
            partition,
            rows,
            before_images=options.before_images,
            heartbeats=options.heartbeats,
        )


def read_interval(
    address: SiteAddress,
    interval: ChangeInterval,
    rows: RowFormat,
    *,
    before_images: bool,
    heartbeats: bool = False,
) -> Iterator[pyarrow.RecordBatch]:
    """The rows of an interval, in a task; heartbeats come behind the changes that they tell of."""
    request = ChangesRequest(
        keys=interval.keys,
        namespace=interval.namespace,
        since=interval.since,
        until=interval.until,
        before_images=before_images,
        heartbeats=heartbeats,
    )
    scanned = False
    with closing(ask_patiently(partial(open_reader, address))) as reader:
        if interval.snapshot:
            yield from _read_snapshot(reader, interval, rows, before_images=before_images)
            return
        for batch in ask_patiently(lambda: reader.changes(request)):
            scanned = scanned or batch.way is Way.SCAN
            if batch.keys:
                yield change_rows(batch, rows, interval.now_ms)
            if batch.heartbeats:
                yield beat_rows(batch.heartbeats, rows, interval.namespace)
    if heartbeats and scanned:
        yield scanned_row(interval.until, rows)


def _read_snapshot(
    reader: SiteReader, interval: ChangeInterval, rows: RowFormat, *, before_images: bool
) -> Iterator[pyarrow.RecordBatch]:
    """The rows of a part of a snapshot."""
    at = interval.until
    for page in ask_patiently(lambda: reader.scan_records(interval.keys, at)):
        if page.num_rows:
            yield snapshot_change_rows(page, rows, at, interval.now_ms, before_images=before_images)


def read_changes_options(
    given: Mapping[str, str], *, streaming: bool = False, counted: bool = False
) -> ChangesOptions:
    """The options of a change feed; with `streaming`, options of streams are allowed and ignored."""
    allowed = CHANGES | STREAM if streaming else CHANGES
    options = Options(given, allowed | {HEARTBEATS} if counted else allowed)
    return ChangesOptions(
        address=options.address(),
        namespace=options.namespace(),
        keys=options.keys(),
        start=options.start(),
        end=options.end(),
        before_images=options.flag("beforeImages"),
        value_format=options.value_format(),
        partitions_min=options.number("minPartitions"),
        heartbeats=options.flag(HEARTBEATS),
    )


def changes_schema(given: Mapping[str, str]) -> StructType:
    """The columns of changes, if the user names none."""
    options = read_changes_options(given, streaming=True)
    return default_schema(CHANGED, metadata=True, value_format=options.value_format)


def open_changes_reader(given: Mapping[str, str], schema: StructType) -> DataSourceReader:
    """A reader of changes.  What cannot be read is refused here."""
    options = read_changes_options(given, counted=is_counted(schema))
    check_schema(schema, CHANGES_COLUMNS, options.value_format)
    return ChangesReader(options, schema)


def fix_versions(
    reader: SiteReader, namespace: NamespaceRow, options: ChangesOptions
) -> tuple[Version, Version]:
    """The versions that changes lie between: behind the first, up to and with the second."""
    since = hold_start(reader, namespace, options)
    resolved = reader.resolved_version(namespace)
    if options.start == SNAPSHOT_FIRST:
        return since, since
    if options.end is None:
        return since, max(since, resolved)
    if isinstance(options.start, int) and options.end <= options.start:
        raise InvalidOption(
            f"the changes end at version {options.end}, before they begin at {options.start + 1}; swap "
            "start and end",
            option="endingVersion",
        )
    reader.require_past(options.end)
    return since, max(since, min(options.end, resolved))


def hold_start(reader: SiteReader, namespace: NamespaceRow, options: ChangesOptions) -> Version:
    """The version that changes begin behind, which is kept while a job runs."""

    def hold(place: Resolved) -> Version:
        if place.snapshot is None:
            require_kept(place.version, reader.oldest_changes_version(namespace), namespace)
        protect(reader, place.version, namespace)
        return place.version

    if options.start == SNAPSHOT_FIRST and options.end is not None:
        reader.require_past(options.end)
    return begin_reading(
        options.start,
        hold,
        present=lambda: reader.resolved_version(namespace),
        require_past=reader.require_past,
        until=options.end,
        created_at=namespace.created_at,
    )
