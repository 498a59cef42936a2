"""The changes of a namespace as a stream for Spark.

An offset is a version: "everything up to here was read".  A micro-batch ends at a version up to which every
commit is whole, and is read by key ranges, so that a partition that is split meanwhile does not matter.

Spark asks for the first offset again whenever it runs the first micro-batch, also when it repeats it after a
crash, and the first offset may have changed by then.  So the end of a micro-batch names its beginning as well
(`since`), which counts.

Offsets also hold the reader's id, which names the safe point that a restarted query finds again, and the
place whose versions they are.

A stream that begins with a snapshot at a version S has offsets with `snapshot` until it is read: "the rows up
to this key of the snapshot at `version` were read", with the key in hexadecimal.  A micro-batch of it names
the key after which it begins as well (`from`).

    {"version": S, "snapshot": ""}                  nothing was read
    {"version": S, "snapshot": "…", "from": ""}     rows up to a key were read
    {"version": S, "from": "…"}                     all rows were read

The rows of a swap, if the stream continues there, are a micro-batch of their own.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from threading import Event
from typing import Any, Final, TypeAlias, TypeVar
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

from floodmark.clock import TimeSource, monotonic_ms
from floodmark.codec.ordered import encode_namespace, qualify_range
from floodmark.feed.reading.cut import ChangesCut
from floodmark.feed.safepoints import begin_reading
from floodmark.host.ports import Host, published_version
from floodmark.model.change import Resolved
from floodmark.model.errors import FloodmarkError, GenerationSwapped, InvalidOption, VersionCollected
from floodmark.model.partition import Content
from floodmark.model.ranges import KeyRange, after
from floodmark.model.stream import OnGeneration
from floodmark.model.version import Version, physical_ms
from floodmark.site.address import SiteAddress
from floodmark.spark.runtime.patience import Wait, ask_patiently
from floodmark.spark.source.options import (
    COMMON,
    KEYS,
    SNAPSHOT_FIRST,
    STREAM,
    ReadOptions,
    read_options,
    reads_changes,
)
from floodmark.spark.source.planning import plan_ranges
from floodmark.spark.source.reading import READERS, ChangeInterval, read_interval
from floodmark.spark.source.schemas import CHANGES, check_schema

OPTIONS: Final = (
    COMMON
    | KEYS
    | STREAM
    | {"readChangeFeed", "valueFormat", "startingVersion", "startingTimestamp", "beforeImages"}
    | {"onGeneration"}
)

# A safe point moves at most this often; one with a short lifetime is renewed more often.
HOLD_MS: Final = 10_000
RENEWALS_PER_LIFETIME: Final = 4
# After so long without a change an offset moves, so that the safe point can follow.
IDLE_MS: Final = 60_000
# Spark asks again at once when there was nothing; the site is asked less often.
PAUSE_SECONDS: Final = 0.1
# After so many pauses without a change each is this many times longer.
QUIET_PAUSES: Final = 30
QUIET_FACTOR: Final = 5

Offset: TypeAlias = dict[str, Any]
Result = TypeVar("Result")


class Query:
    """The connection of a query's driver to its site, and the safe point that it holds.  Close it.

    The safe point keeps everything that the query may still read, also while it is stopped.  It is held
    before anything is read, follows the batches that Spark has committed, and is renewed while the query
    runs.
    """

    def __init__(
        self,
        address: SiteAddress,
        namespace: str,
        lifetime: timedelta,
        *,
        monotonic: TimeSource = monotonic_ms,
        wait: Wait | None = None,
    ) -> None:
        self._lifetime = lifetime
        self._namespace = namespace
        self._monotonic = monotonic
        self._hold_ms = min(HOLD_MS, lifetime // timedelta(milliseconds=RENEWALS_PER_LIFETIME))
        # The reader whose safe point is held, the version that it needs, and when that was last held.
        self._reader: str | None = None
        self._needed: Version = 0
        self._told: Version = 0
        self._told_at_ms = 0
        # The server may be started after the query.
        self._site = ask_patiently(address.connect, wait=wait)
        self.site_id = self._site.id
        row = self.ask(lambda host: host.namespaces.find_namespace(namespace))
        self.namespace_id, self._created_at = row.id, row.created_at
        # The place whose versions these are.  A namespace that was dropped and made again is another one.
        self.place = f"namespace {namespace} ({row.id}) of site {self._site.name} ({self.site_id})"

    def ask(self, question: Callable[[Host], Result]) -> Result:
        """Call the site, with retries while it is being restarted."""
        return ask_patiently(lambda: question(self._site.host))

    def begin(self, reader: str, start: Version | str) -> Version:
        """Hold the version that a start names, and return it."""

        def hold(place: Resolved) -> Version:
            self._hold(reader, place.version)
            return place.version

        return begin_reading(
            start,
            hold,
            present=lambda: self.ask(lambda host: host.versions.resolved_version()),
            require_past=lambda version: self.ask(lambda host: host.versions.observe(version)),
            created_at=self._created_at,
        )

    def keep(self, reader: str, version: Version) -> None:
        """Hold what a reader at a version needs, or renew what it holds already."""
        if self._reader != reader:
            self._hold(reader, version)
        elif self._monotonic() - self._told_at_ms >= self._hold_ms:
            self._hold(reader, self._needed)

    def advance(self, reader: str, version: Version) -> None:
        """Note that the reader needs nothing at or below a version."""
        if self._reader == reader:
            self._needed = max(self._needed, version)
        self.keep(reader, version)

    def release(self, reader: str) -> None:
        """Release a safe point.  If that fails, it expires."""
        if self._reader == reader:
            self._reader = None
        with suppress(FloodmarkError):
            self._site.host.retention.release_safe_point(reader)

    def cut(
        self,
        since: Version,
        changes_max: int | None,
        until: Version | None,
        on_generation: OnGeneration = OnGeneration.FAIL,
    ) -> ChangesCut:
        """The end of the next step."""
        with self._explained():
            return self.ask(
                lambda host: host.versions.cut_changes(
                    self._namespace, since, changes_max, until, False, on_generation=on_generation
                )
            )

    def cut_snapshot(self, keys: KeyRange, at: Version, rows_max: int) -> bytes | None:
        """The qualified key up to which a range has `rows_max` rows at a version; None if it has fewer."""

        def cut(host: Host) -> bytes | None:
            left = rows_max
            # Rows are counted by their digests: the site need not send values.
            for page in host.router.scan_records(keys, at, content=Content.DIGESTS):
                if page.num_rows >= left:
                    key: bytes = page.column(0)[left - 1].as_py()
                    return encode_namespace(self.namespace_id) + key
                left -= page.num_rows
            return None

        with self._explained():
            return self.ask(cut)

    def present(self) -> Version:
        """The version up to which every acknowledged write can be read."""
        with self._explained():
            return self.ask(lambda host: published_version(host.versions, self._namespace))

    def qualify(self, keys: KeyRange) -> KeyRange:
        """A range of users' keys as a range of qualified ones."""
        return qualify_range(self.namespace_id, keys)

    def intervals(
        self, keys: KeyRange, since: Version, until: Version, *, snapshot: bool = False
    ) -> list[ChangeInterval]:
        """The changes, or the snapshot, of qualified keys in a task for each partition of the site."""
        maps = self._site.host.router.maps
        ask_patiently(maps.refresh)
        now_ms = self.ask(lambda host: host.physical_ms())
        partitions = [partition.range for partition in maps.map.partitions]
        return [
            ChangeInterval(self.namespace_id, each, since, until, now_ms, self.site_id, snapshot, not number)
            for number, each in enumerate(plan_ranges(partitions, keys))
        ]

    def close(self) -> None:
        """Move the safe point to the needed version, and close the connection."""
        with suppress(FloodmarkError):
            if self._reader is not None and self._needed > self._told:
                self._hold(self._reader, self._needed)
        self._site.close()

    def _hold(self, reader: str, version: Version) -> None:
        with self._explained():
            self.ask(
                lambda host: host.retention.hold_safe_point(reader, version, self._lifetime, self._namespace)
            )
        self._reader, self._needed, self._told = reader, version, version
        self._told_at_ms = self._monotonic()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except GenerationSwapped as error:
            raise GenerationSwapped(
                f"the query has come to its end: {error}. Started again with the option onGeneration, "
                '"difference" or "snapshot", it goes on from its checkpoint directory',
                **error.details,
            ) from error
        except VersionCollected as error:
            raise VersionCollected(
                f"changes of {self._namespace!r} that the query has not read are gone: {error}. A query may "
                f"be stopped for {self._lifetime} (option safePointLifetime). Start it anew with another "
                'checkpoint directory and the option startingVersion "snapshot", which has every key',
                **error.details,
            ) from error


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans the micro-batches of a query on the driver, and reads them in its tasks."""

    idle_ms: int = IDLE_MS
    pause_seconds: float = PAUSE_SECONDS

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        # Used on the driver only: a reader is pickled for its tasks before its first call.
        self._query: Query | None = None
        self._initial: Offset | None = None
        self._until: Version | None = None
        self._cut: ChangesCut | None = None
        # Pauses since the last change.
        self._pauses = 0

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
        # The part that all offsets of a query share.
        place = {name: start[name] for name in ("reader", "place")}
        self._driver.keep(start["reader"], since)
        if "snapshot" in start:
            return place | self._next_of_snapshot(since, start["snapshot"], changes_max)
        reaction = self._options.on_generation
        cut = self._cut = self._driver.cut(since, changes_max, self._until, reaction)
        if cut.changes != 0 or self._is_idle_for_long(since, cut.version):
            self._pauses = 0 if cut.changes != 0 else self._pauses
            return place | {"version": cut.version, "since": since}
        if self._until is None:
            Event().wait(self._next_pause())
        return start

    def _next_pause(self) -> float:
        self._pauses += 1
        return self.pause_seconds * (QUIET_FACTOR if self._pauses > QUIET_PAUSES else 1)

    def _next_of_snapshot(self, at: Version, behind: str, rows_max: int | None) -> Offset:
        """The next step in the snapshot; all that is left of it, unless there is a limit."""
        end: Offset = {"version": at, "from": behind}
        keys = None if rows_max is None else self._snapshot_keys(behind, None)
        if rows_max is not None and keys is not None:
            key = self._driver.cut_snapshot(keys, at, rows_max)
            if key is not None:
                end["snapshot"] = key.hex()
        return end

    def _snapshot_keys(self, behind: str, through: str | None) -> KeyRange | None:
        """The qualified keys after one and up to another, as offsets name them; None if there are none."""
        end = None if through is None else after(bytes.fromhex(through))
        within = KeyRange(after(bytes.fromhex(behind)), end)
        return self._driver.qualify(self._options.keys).intersect(within)

    def _is_idle_for_long(self, since: Version, version: Version) -> bool:
        return version > since and physical_ms(version) - physical_ms(since) >= self.idle_ms

    def reportLatestOffset(self) -> Offset | None:
        cut = self._cut
        if cut is None:
            return None
        lag_ms = 0 if cut.changes == 0 else physical_ms(cut.resolved) - physical_ms(cut.version)
        return {"version": cut.resolved, "lag_ms": lag_ms}

    def partitions(self, start: Offset, end: Offset) -> Sequence[ChangeInterval]:
        self._require_place(end)
        query, until = self._driver, end["version"]
        if start["reader"] != end["reader"]:
            query.release(start["reader"])
        if start == end:
            return []
        if "from" in end:
            query.keep(end["reader"], until)
            keys = self._snapshot_keys(end["from"], end.get("snapshot"))
            return [] if keys is None else query.intervals(keys, until, until, snapshot=True)
        since: Version = ({"since": until} | end)["since"]
        if since >= until:
            return []
        query.keep(end["reader"], since)
        return query.intervals(query.qualify(self._options.keys), since, until)

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
        return read_interval(self._options, self._schema, partition)


def open_stream_reader(given: Mapping[str, str], schema: StructType) -> StreamReader:
    """A reader of a namespace's changes.  Raises InvalidOption or SchemaMismatch."""
    options = read_options(given, OPTIONS)
    if not reads_changes(given):
        raise InvalidOption(
            'a stream is made of changes: add .option("readChangeFeed", "true"), which gives their columns',
            option="readChangeFeed",
        )
    options.address.require_url("streamed")
    check_schema(schema, CHANGES, options.value_format)
    return StreamReader(options, schema)
