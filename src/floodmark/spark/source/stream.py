"""The changes of a namespace as a stream for Spark.

An offset is a version: "everything up to here was read".  A micro-batch ends at a version up to which every
commit is whole, and is read by key ranges, so that a partition that is split meanwhile does not matter.

Spark asks for the first offset again whenever it runs the first micro-batch, also when it repeats it after a
crash, and the first offset may have changed by then.  So the end of a micro-batch names its beginning as well
(`since`), which counts.

Offsets also hold the reader's id, which names the safe point that a restarted query finds again (`query.py`),
and the place whose versions they are.

A stream that begins with a snapshot at a version S has offsets with `snapshot` until it is read: "the rows up
to this key of the snapshot at `version` were read", with the key in hexadecimal.  A micro-batch of it names
the key that it begins behind as well (`from`).

    {"version": S, "snapshot": ""}                  nothing was read
    {"version": S, "snapshot": "…", "from": ""}     rows up to a key were read
    {"version": S, "from": "…"}                     all rows were read
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from threading import Event
from typing import Any, Final, TypeAlias
from uuid import uuid4

import pyarrow
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from floodmark.feed import LIFETIME
from floodmark.feed.reading.cut import ChangesCut
from floodmark.model.errors import InvalidOption
from floodmark.model.ranges import KeyRange, after
from floodmark.model.version import Version, physical_ms
from floodmark.site.address import SiteAddress
from floodmark.spark.source.changes import ChangeInterval, read_interval
from floodmark.spark.source.options import (
    COMMON,
    HEARTBEATS,
    KEYS,
    SNAPSHOT_FIRST,
    STREAM,
    Options,
)
from floodmark.spark.source.query import Query
from floodmark.spark.source.reading import READERS
from floodmark.spark.source.rows import RowFormat
from floodmark.spark.source.schemas import CHANGES, check_schema, is_counted

OPTIONS: Final = (
    COMMON
    | KEYS
    | STREAM
    | {"readChangeFeed", "valueFormat", "startingVersion", "startingTimestamp", "beforeImages"}
)

# After so long without a change an offset moves, so that the safe point can follow.
IDLE_MS: Final = 60_000
# A query that counts moves on soon after changes, past the heartbeats that sum them up.
SETTLE_MS: Final = 2_500
# Spark asks again at once when there was nothing; the site is asked less often.
PAUSE_SECONDS: Final = 0.1
# After so many pauses without a change each is this many times longer.
QUIET_PAUSES: Final = 30
QUIET_FACTOR: Final = 5

Offset: TypeAlias = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class StreamOptions:
    """The options of a stream."""

    address: SiteAddress
    namespace: str
    keys: KeyRange
    start: Version | str
    before_images: bool
    value_format: str | None
    changes_max: int | None
    lifetime: timedelta
    heartbeats: bool = False


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans the micro-batches of a query on the driver, and reads them in its tasks."""

    idle_ms: int = IDLE_MS
    pause_seconds: float = PAUSE_SECONDS

    def __init__(self, options: StreamOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        # Used on the driver only: a reader is pickled for its tasks before its first call.
        self._query: Query | None = None
        self._initial: Offset | None = None
        self._until: Version | None = None
        self._cut: ChangesCut | None = None
        # Pauses since the last change.
        self._pauses = 0
        # Whether there may be counted changes that no heartbeat has checked.
        self._is_counting = options.heartbeats

    # On the driver

    def initialOffset(self) -> Offset:
        if self._initial is None:
            reader = READERS + str(uuid4())
            start = self._driver.begin(reader, self._options.start)
            self._initial = {"version": start, "reader": reader, "place": self._driver.place}
            if self._options.start == SNAPSHOT_FIRST:
                self._initial["snapshot"] = ""
        return self._initial

    def getDefaultReadLimit(self) -> ReadLimit:
        changes_max = self._options.changes_max
        return ReadAllAvailable() if changes_max is None else ReadMaxRows(changes_max)

    def prepareForTriggerAvailableNow(self) -> None:
        self._until = self._driver.present()

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:
        self._require_place(start)
        since: Version = start["version"]
        changes_max = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        self._driver.keep(start["reader"], since)
        if "snapshot" in start:
            return self._next_of_snapshot(start, changes_max)
        cut = self._cut = self._driver.cut(since, changes_max, self._until)
        if cut.changes != 0 or self._is_idle_for_long(since, cut.version):
            self._is_counting = self._options.heartbeats and cut.changes != 0
            self._pauses = 0 if cut.changes != 0 else self._pauses
            return _place_of(start) | {"version": cut.version, "since": since}
        if self._until is None:
            Event().wait(self._next_pause())
        return start

    def _next_pause(self) -> float:
        self._pauses += 1
        return self.pause_seconds * (QUIET_FACTOR if self._pauses > QUIET_PAUSES else 1)

    def _next_of_snapshot(self, start: Offset, rows_max: int | None) -> Offset:
        """The next step in the snapshot; all that is left of it, unless there is a limit."""
        end = _place_of(start) | {"version": start["version"], "from": start["snapshot"]}
        if rows_max is not None:
            keys = self._snapshot_keys(start["snapshot"], None)
            key = None if keys is None else self._driver.cut_snapshot(keys, start["version"], rows_max)
            if key is not None:
                end["snapshot"] = key.hex()
        return end

    def _snapshot_keys(self, behind: str, through: str | None) -> KeyRange | None:
        """The qualified keys behind one and up to another, as offsets name them; None if there are none."""
        end = None if through is None else after(bytes.fromhex(through))
        within = KeyRange(after(bytes.fromhex(behind)), end)
        return self._driver.qualify(self._options.keys).intersect(within)

    def _is_idle_for_long(self, since: Version, version: Version) -> bool:
        idle_ms = self.idle_ms
        if self._is_counting:
            idle_ms = SETTLE_MS if self._until is None else 0
        return version > since and physical_ms(version) - physical_ms(since) >= idle_ms

    def reportLatestOffset(self) -> Offset | None:
        cut = self._cut
        if cut is None:
            return None
        lag_ms = 0 if cut.changes == 0 else physical_ms(cut.resolved) - physical_ms(cut.version)
        return {"version": cut.resolved, "lag_ms": lag_ms}

    def partitions(self, start: Offset, end: Offset) -> Sequence[ChangeInterval]:
        self._require_place(end)
        if start["reader"] != end["reader"]:
            self._driver.release(start["reader"])
        query = self._driver
        if "from" in end and start != end:
            return self._snapshot_intervals(end)
        since: Version = end["since"] if "since" in end else end["version"]
        if since >= end["version"] or start == end:
            return []
        query.keep(end["reader"], since)
        now_ms = query.physical_ms()
        return [
            ChangeInterval(query.namespace_id, keys, since, end["version"], now_ms, query.site_id)
            for keys in query.ranges(query.qualify(self._options.keys))
        ]

    def _snapshot_intervals(self, end: Offset) -> list[ChangeInterval]:
        query, at = self._driver, end["version"]
        query.keep(end["reader"], at)
        keys, now_ms = self._snapshot_keys(end["from"], end.get("snapshot")), query.physical_ms()
        return [
            ChangeInterval(query.namespace_id, each, at, at, now_ms, query.site_id, snapshot=True)
            for each in ([] if keys is None else query.ranges(keys))
        ]

    def commit(self, end: Offset) -> None:
        self._driver.advance(end["reader"], end["version"])

    def stop(self) -> None:
        if self._query is not None:
            self._query.close()

    @property
    def _driver(self) -> Query:
        if self._query is None:
            options = self._options
            self._query = Query(options.address, options.namespace, options.lifetime)
        return self._query

    def _require_place(self, offset: Offset) -> None:
        """Refuse a checkpoint of another site or namespace: its versions mean nothing here."""
        if offset["place"] != self._driver.place:
            raise InvalidOption(
                f"the query's checkpoint directory belongs to {offset['place']}, and this is "
                f"{self._driver.place}; a version of one site means nothing at another. Use a new checkpoint "
                "directory",
                option="path",
            )

    # In the tasks

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


def open_stream_reader(options: Mapping[str, str], schema: StructType) -> StreamReader:
    """A reader of a namespace's changes.  What cannot be read is refused here."""
    read = read_stream_options(options, counted=is_counted(schema))
    check_schema(schema, CHANGES, read.value_format)
    return StreamReader(read, schema)


def read_stream_options(given: Mapping[str, str], *, counted: bool) -> StreamOptions:
    """The options of a stream."""
    options = Options(given, OPTIONS | {HEARTBEATS} if counted else OPTIONS)
    if not options.flag("readChangeFeed"):
        raise InvalidOption(
            'a stream is made of changes: add .option("readChangeFeed", "true"), which gives their columns',
            option="readChangeFeed",
        )
    address = options.address()
    address.require_url("streamed")
    return StreamOptions(
        address=address,
        namespace=options.namespace(),
        keys=options.keys(),
        start=options.start(),
        before_images=options.flag("beforeImages"),
        value_format=options.value_format(),
        changes_max=options.number("maxChangesPerTrigger"),
        lifetime=options.duration("safePointLifetime") or LIFETIME,
        heartbeats=options.flag(HEARTBEATS),
    )


def _place_of(offset: Offset) -> Offset:
    """The part that all offsets of a query share."""
    return {"reader": offset["reader"], "place": offset["place"]}
