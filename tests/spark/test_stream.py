"""Reading changes as a stream: every change once, commits whole, restarts anywhere, and nothing collected."""

import json
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import IntegerType, StringType, StructField, StructType
from tests.links.support import Served
from tests.spark.support_garbage import collect_old
from tests.waiting import HANG_SECONDS

from floodmark.model.access import Role
from floodmark.model.errors import (
    InvalidOption,
    NamespaceNotFound,
    NotAllowed,
    SchemaMismatch,
    VersionCollected,
    VersionInFuture,
)
from floodmark.model.version import Version, moment_of
from floodmark.site import Namespace, Site
from floodmark.spark.runtime.failures import find_error
from floodmark.spark.source.reading import ChangeInterval
from floodmark.spark.source.schemas import CHANGES
from floodmark.spark.source.stream import QUIET_FACTOR, QUIET_PAUSES, Query, StreamReader, open_stream_reader

Offset = dict[str, Any]
EVERYTHING = ReadAllAvailable()


@pytest.fixture
def users(site: Site) -> Namespace:
    return site.create_namespace("users")


@pytest.fixture
def make_reader(url: str) -> Iterator[Callable[..., StreamReader]]:
    """Makes readers as Spark does: one for each run of a query."""
    made: list[StreamReader] = []

    def make(**options: str) -> StreamReader:
        given = {"path": url, "namespace": "users", "readChangeFeed": "true", **options}
        made.append(open_stream_reader(given, CHANGES))
        made[-1].pause_seconds = 0.0
        return made[-1]

    yield make
    for reader in made:
        reader.stop()


def read(reader: StreamReader, start: Offset, end: Offset) -> list[dict[str, Any]]:
    """The rows of a micro-batch; each task reads with a reader of its own."""
    rows: list[dict[str, Any]] = []
    for partition in reader.partitions(start, end):
        for batch in StreamReader(reader._options, reader._schema).read(partition):
            rows += batch.to_pylist()
    return rows


def step(reader: StreamReader, start: Offset, limit: int | None = None) -> Offset:
    found = reader.latestOffset(start, EVERYTHING if limit is None else ReadMaxRows(limit))
    # Spark keeps offsets as text.
    again: Offset = json.loads(json.dumps(found))
    return again


def safe_point(site: Site) -> Version:
    (point,) = site.safe_points()
    return point.version


# The driver, without Spark


def test_a_query_that_finds_nothing_for_seconds_asks_less_often_until_something_changes(
    make_reader: Callable[..., StreamReader], users: Namespace
) -> None:
    reader = make_reader()
    start = reader.initialOffset()
    assert [reader._next_pause() for _ in range(QUIET_PAUSES)] == [0.0] * QUIET_PAUSES
    reader.pause_seconds = 0.1
    assert reader._next_pause() == 0.1 * QUIET_FACTOR
    users.put(b"a", b"1")
    assert step(reader, start) != start
    assert reader._next_pause() == 0.1


def test_every_change_comes_once_with_a_restart_at_every_batch(
    users: Namespace, site: Site, make_reader: Callable[..., StreamReader]
) -> None:
    for number in range(40):
        users.put(b"%02d" % (number % 7), b"%d" % number)
        if number == 20:
            site.split("users", b"03")
    offset = make_reader().initialOffset()
    values: list[bytes] = []
    batches = 0
    while (end := step(make_reader(), offset, limit=3)) != offset:
        rows = read(make_reader(), offset, end)
        # What a crash would repeat is the same.
        assert read(make_reader(), offset, end) == rows
        values += [row["value"] for row in sorted(rows, key=lambda row: row["_commit_version"])]
        offset = end
        batches += 1
    assert values == [b"%d" % number for number in range(40)]
    assert batches == 14


def test_a_limit_smaller_than_an_atomic_batch_takes_it_whole(
    users: Namespace, site: Site, make_reader: Callable[..., StreamReader]
) -> None:
    site.split("users", b"b")
    expected = []
    for number in range(3):
        users.put(b"%d" % number, b"alone")
        with site.atomic() as batch:
            for key in (b"a", b"b", b"c"):
                batch.put(users, key, b"%d" % number)
        expected += [[None], [batch.version] * 3]
    offset, found = make_reader().initialOffset(), []
    while (end := step(make_reader(), offset, limit=1)) != offset:
        found.append([row["_batch"] for row in read(make_reader(), offset, end)])
        offset = end
    assert found == expected


def test_a_snapshot_comes_first_with_a_restart_at_every_batch(
    users: Namespace, site: Site, make_reader: Callable[..., StreamReader]
) -> None:
    rows = {b"%02d" % number: b"%d" % number for number in range(40)}
    users.put_many(rows)
    site.split("users", b"13")
    offset = make_reader(startingVersion="snapshot").initialOffset()
    at = offset["version"]
    found: list[dict[str, Any]] = []
    batches = 0
    while (end := step(make_reader(startingVersion="snapshot"), offset, limit=7)) != offset:
        batch = read(make_reader(startingVersion="snapshot"), offset, end)
        # What a crash would repeat is the same.
        assert read(make_reader(startingVersion="snapshot"), offset, end) == batch
        assert len(batch) <= 7
        found += batch
        offset = end
        batches += 1
        if batches == 2:
            users.put(b"00", b"new")
            users.delete(b"39")
    snapshot = [row for row in found if row["_snapshot"]]
    assert {row["key"]: row["value"] for row in snapshot} == rows
    assert (len(snapshot), {row["_commit_version"] for row in snapshot}) == (len(rows), {at})
    changes = [(row["key"], row["_change_type"]) for row in found if not row["_snapshot"]]
    assert changes == [(b"00", "upsert"), (b"39", "delete")]
    assert {row["_change_type"] for row in snapshot} == {"upsert"}


def test_a_snapshot_without_a_limit_is_one_batch_of_the_keys_that_are_asked_for(
    users: Namespace, site: Site, make_reader: Callable[..., StreamReader]
) -> None:
    users.put_many({b"a1": b"1", b"a2": b"2", b"b1": b"3"})
    reader = make_reader(startingVersion="snapshot", prefix="a", beforeImages="true")
    start = reader.initialOffset()
    assert safe_point(site) == start["version"]
    end = step(reader, start)
    rows = sorted((row["key"], row["_change_type"]) for row in read(reader, start, end))
    assert rows == [(b"a1", "insert"), (b"a2", "insert")]
    assert step(reader, end) == end
    reader.commit(end)
    assert safe_point(site) == start["version"]


def test_the_earliest_change_is_refused_where_it_is_gone(
    users: Namespace, site: Site, make_reader: Callable[..., StreamReader]
) -> None:
    users.put(b"a", b"1")
    site.update_namespace("users", retention=timedelta(0))
    collect_old(site)
    with pytest.raises(VersionCollected, match='startingVersion "snapshot"'):
        make_reader().initialOffset()
    reader = make_reader(startingVersion="snapshot")
    start = reader.initialOffset()
    assert [row["key"] for row in read(reader, start, step(reader, start))] == [b"a"]


@pytest.mark.slow
def test_batches_never_cut_a_commit_in_two(
    users: Namespace, site: Site, make_reader: Callable[..., StreamReader]
) -> None:
    for border in (b"20", b"40"):
        site.split("users", border)
    commits: dict[Version, int] = {}
    for number in range(10):
        users.put_many({b"%02d" % key: b"%d" % number for key in range(10, 50, 2)})
    for change in site.changes("users"):
        commits[change.version] = commits.get(change.version, 0) + 1
    assert [*commits.values()] == [20] * 10
    reader = make_reader()
    offset = reader.initialOffset()
    found: dict[Version, int] = {}
    while (end := step(reader, offset, limit=15)) != offset:
        rows = read(reader, offset, end)
        assert 0 < len(rows) <= 20
        batch: dict[Version, int] = {}
        for row in rows:
            batch[row["_commit_version"]] = batch.get(row["_commit_version"], 0) + 1
        assert not batch.keys() & found.keys()
        found |= batch
        offset = end
    assert found == commits


def test_each_partition_of_the_site_is_a_task_and_a_split_between_plan_and_read_does_not_matter(
    users: Namespace, site: Site, make_reader: Callable[..., StreamReader]
) -> None:
    site.split("users", b"50")
    users.put_many({b"%02d" % key: b"x" for key in range(100)})
    reader = make_reader()
    start = reader.initialOffset()
    partitions = reader.partitions(start, step(reader, start))
    assert len([each for each in partitions if isinstance(each, ChangeInterval)]) == 2
    site.split("users", b"25")
    site.merge(*[each.id for each in site.partitions()][-2:])
    rows = [row for each in partitions for batch in reader.read(each) for row in batch.to_pylist()]
    assert sorted(row["key"] for row in rows) == [b"%02d" % key for key in range(100)]


def test_a_query_over_some_keys_reads_only_these(
    users: Namespace, make_reader: Callable[..., StreamReader]
) -> None:
    users.put_many({b"%02d" % key: b"x" for key in range(100)})
    reader = make_reader(startKey="10", endKey="12")
    start = reader.initialOffset()
    assert [row["key"] for row in read(reader, start, step(reader, start))] == [b"10", b"11"]


def test_the_first_batch_that_is_repeated_begins_where_it_began(
    users: Namespace, site: Site, make_reader: Callable[..., StreamReader]
) -> None:
    # Spark asks for the first offset anew, and "latest" is another one by then.
    reader = make_reader(startingVersion="latest")
    start = reader.initialOffset()
    users.put(b"a", b"1")
    end = step(reader, start)
    users.put(b"a", b"2")
    assert reader.initialOffset() == start
    again = make_reader(startingVersion="latest")
    later = again.initialOffset()
    assert later["version"] > end["version"]
    assert len(site.safe_points()) == 2
    assert [row["value"] for row in read(again, later, end)] == [b"1"]
    assert [point.name for point in site.safe_points()] == [end["reader"]]


def test_an_idle_query_runs_no_batches_but_its_offset_and_safe_point_move_on(
    users: Namespace, site: Site, make_reader: Callable[..., StreamReader]
) -> None:
    users.put(b"a", b"1")
    reader = make_reader()
    first = step(reader, reader.initialOffset())
    site.create_namespace("others").put(b"a", b"1")
    for _ in range(5):
        assert step(reader, first) == first
    reader.idle_ms = 0
    second = step(reader, first)
    assert second["version"] > first["version"]
    assert read(reader, first, second) == []
    reader.commit(second)
    reader.stop()
    assert safe_point(site) == second["version"]


def test_the_safe_point_is_held_before_the_first_read_and_follows_what_was_committed(
    users: Namespace, site: Site, make_reader: Callable[..., StreamReader]
) -> None:
    now_ms = [0]
    reader = make_reader()
    reader._query = Query(reader._options.address, "users", timedelta(hours=24), monotonic=lambda: now_ms[0])
    offsets = [reader.initialOffset()]
    assert safe_point(site) == offsets[0]["version"]
    for number in range(3):
        users.put(b"a", b"%d" % number)
        offsets.append(step(reader, offsets[-1]))
        reader.commit(offsets[-1])
    # Not for every batch, for each time the site writes it down.
    assert safe_point(site) == offsets[0]["version"]
    now_ms[0] = 10_000
    assert step(reader, offsets[-1]) == offsets[-1]
    assert safe_point(site) == offsets[3]["version"]
    (before,) = site.safe_points()
    now_ms[0] = 20_000
    step(reader, offsets[-1])
    (renewed,) = site.safe_points()
    assert renewed.expires_at_ms >= before.expires_at_ms


def test_garbage_collection_does_not_overtake_a_stopped_query(
    serve_site: Callable[..., Served],
) -> None:
    served = serve_site()
    users = served.site.create_namespace("users", retention=timedelta(milliseconds=1))
    users.put(b"a", b"1")
    given = {"path": served.url, "namespace": "users", "readChangeFeed": "true"}
    reader = open_stream_reader(given, CHANGES)
    start = reader.initialOffset()
    reader.stop()
    users.put(b"a", b"2")
    users.put(b"a", b"3")
    collect_old(served.site)
    reader = open_stream_reader(given, CHANGES)
    end = step(reader, start)
    assert [row["value"] for row in read(reader, start, end)] == [b"1", b"2", b"3"]
    # Without its safe point it is told what happened, and what to do.
    reader.stop()
    served.site.host.retention.release_safe_point(start["reader"])
    collect_old(served.site)
    reader = open_stream_reader(given, CHANGES)
    with pytest.raises(VersionCollected, match=r"not read are gone.*safePointLifetime.*another checkpoint"):
        reader.latestOffset(start, EVERYTHING)
    with pytest.raises(VersionCollected, match="another checkpoint"):
        reader.partitions(start, end)
    reader.stop()


def test_a_checkpoint_of_another_place_is_refused(
    users: Namespace, serve_site: Callable[..., Served], make_reader: Callable[..., StreamReader]
) -> None:
    users.put(b"a", b"1")
    rome = serve_site("rome")
    rome.site.create_namespace("users").put(b"a", b"1")
    start = make_reader().initialOffset()
    end = step(make_reader(), start)
    elsewhere = make_reader(path=rome.url)
    with pytest.raises(InvalidOption, match=r"site oslo .* this is .* site rome"):
        elsewhere.latestOffset(start, EVERYTHING)
    with pytest.raises(InvalidOption, match="new checkpoint"):
        elsewhere.partitions(start, end)


def test_a_query_begins_where_it_is_told_to(
    users: Namespace, site: Site, make_reader: Callable[..., StreamReader]
) -> None:
    versions = [users.put(b"a", b"%d" % number) for number in range(3)]

    def values(**options: str) -> list[bytes]:
        reader = make_reader(**options)
        start = reader.initialOffset()
        return [row["value"] for row in read(reader, start, step(reader, start))]

    assert values() == values(startingVersion="earliest") == [b"0", b"1", b"2"]
    assert values(startingVersion=str(versions[1])) == [b"1", b"2"]
    assert values(startingVersion="latest") == []
    assert values(startingTimestamp=moment_of(versions[0]).isoformat()) == [b"0", b"1", b"2"]
    with pytest.raises(VersionInFuture):
        make_reader(startingVersion=str(site.now() * 2)).initialOffset()


def test_available_now_ends_at_what_was_there_when_it_began(
    users: Namespace, make_reader: Callable[..., StreamReader]
) -> None:
    users.put_many({b"a": b"1", b"b": b"1"})
    users.put(b"a", b"2", durability="async")
    reader = make_reader()
    reader.prepareForTriggerAvailableNow()
    start = offset = reader.initialOffset()
    users.put(b"a", b"3")
    values: list[bytes] = []
    while (end := step(reader, offset, limit=2)) != offset:
        values += [row["value"] for row in read(reader, offset, end)]
        offset = end
    assert values == [b"1", b"1", b"2"]
    # Those who run it now and then move on, also if nothing was changed.
    again = make_reader()
    again.idle_ms = 0
    again.prepareForTriggerAvailableNow()
    moved = step(again, offset)
    assert moved["version"] > offset["version"] > start["version"]


def test_the_lag_is_told_until_nothing_is_left(
    users: Namespace, make_reader: Callable[..., StreamReader]
) -> None:
    reader = make_reader()
    assert reader.reportLatestOffset() is None
    offset = reader.initialOffset()
    first = users.put(b"a", b"1")
    second = users.put(b"a", b"2")
    offset = step(reader, offset, limit=1)
    latest = reader.reportLatestOffset()
    assert latest is not None
    assert offset["version"] < second <= latest["version"]
    assert latest["lag_ms"] >= 0
    assert first <= offset["version"]
    offset = step(reader, offset, limit=1)
    assert step(reader, offset, limit=1) == offset
    latest = reader.reportLatestOffset()
    assert latest is not None
    assert latest["lag_ms"] == 0


def test_before_images_and_json_work_as_in_a_batch(users: Namespace, url: str) -> None:
    users.put(b"a", b'{"age": 1}')
    users.put(b"a", b'{"age": 2}')
    given = {"path": url, "namespace": "users", "readChangeFeed": "true", "beforeImages": "true"}
    fields = {"key": StringType(), "age": IntegerType(), "_change_type": StringType()}
    schema = StructType([StructField(name, kind) for name, kind in fields.items()])
    reader = open_stream_reader({**given, "valueFormat": "json"}, schema)
    start = reader.initialOffset()
    assert [tuple(row.values()) for row in read(reader, start, step(reader, start))] == [
        ("a", 1, "insert"),
        ("a", 1, "update_preimage"),
        ("a", 2, "update_postimage"),
    ]
    reader.stop()


def test_what_cannot_be_streamed_is_refused(url: str, tmp_path: Path) -> None:
    given = {"path": url, "namespace": "users", "readChangeFeed": "true"}
    for options, match in (
        ({"path": url, "namespace": "users"}, "readChangeFeed"),
        ({**given, "path": str(tmp_path)}, "can be read, but not streamed"),
        ({**given, "endingVersion": "7"}, "no option 'endingVersion'"),
        ({**given, "maxChangesPerTrigger": "0"}, "maxChangesPerTrigger cannot be read"),
        ({**given, "safePointLifetime": "soon"}, "safePointLifetime cannot be read"),
        (
            {**given, "startingVersion": "1", "startingTimestamp": "2026-01-01T00:00:00Z"},
            "exclude each other",
        ),
    ):
        with pytest.raises(InvalidOption, match=match):
            open_stream_reader(options, CHANGES)
    with pytest.raises(SchemaMismatch, match="'age'"):
        open_stream_reader(given, StructType([StructField("age", IntegerType())]))
    with pytest.raises(NamespaceNotFound):
        open_stream_reader(given, CHANGES).initialOffset()


def test_the_role_to_read_the_namespace_is_enough_and_needed(
    guarded: Served, token_file: Callable[..., Path]
) -> None:
    for name in ("users", "others"):
        guarded.site.create_namespace(name).put(b"a", b"1")
    given = {"path": guarded.url, "readChangeFeed": "true", "tokenFile": str(token_file(Role.READ, "users"))}
    reader = open_stream_reader({**given, "namespace": "users"}, CHANGES)
    start = reader.initialOffset()
    end = step(reader, start)
    assert [row["value"] for row in read(reader, start, end)] == [b"1"]
    reader.commit(end)
    reader.stop()
    with pytest.raises(NotAllowed):
        open_stream_reader({**given, "namespace": "others"}, CHANGES).initialOffset()


# With Spark


def stream(spark: SparkSession, url: str, **options: str) -> DataFrame:
    reader = (
        spark.readStream.format("floodmark").option("namespace", "users").option("readChangeFeed", "true")
    )
    return reader.options(**options).load(url)


@pytest.mark.slow
def test_a_stream_into_parquet_has_every_change_once_over_restarts(
    users: Namespace, site: Site, spark: SparkSession, url: str, tmp_path: Path
) -> None:
    changes = stream(spark, url, maxChangesPerTrigger="50")
    writer = changes.writeStream.format("parquet").option("checkpointLocation", str(tmp_path / "checkpoint"))
    for run in range(2):
        for number in range(5):
            users.put_many({b"%02d" % key: b"%d-%d" % (run, number) for key in range(20)})
        site.split("users", b"%02d" % (5 * (run + 1)))
        query = writer.trigger(availableNow=True).start(str(tmp_path / "table"))
        assert query.awaitTermination(HANG_SECONDS)
        assert query.exception() is None
    rows = pyarrow.parquet.read_table(tmp_path / "table").to_pylist()
    expected = [(change.key, change.value, change.version) for change in site.changes("users")]
    found = [(row["key"], row["value"], row["_commit_version"]) for row in rows]
    assert sorted(found) == sorted(expected)


@pytest.mark.slow
def test_a_running_query_follows_and_tells_its_lag(
    users: Namespace, site: Site, spark: SparkSession, url: str, tmp_path: Path
) -> None:
    writer = stream(spark, url).writeStream.format("memory").queryName("followed")
    query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    for number in range(3):
        users.put(b"a", b"%d" % number)
        query.processAllAvailable()
    values = [row.value for row in spark.table("followed").orderBy("_commit_version").collect()]
    assert values == [b"0", b"1", b"2"]
    (source,) = query.recentProgress[-1].sources
    latest = json.loads(source.latestOffset)
    assert latest["lag_ms"] >= 0
    assert latest["version"] > 0
    query.stop()
    assert len(site.safe_points()) == 1


@pytest.mark.slow
def test_a_query_whose_changes_are_gone_says_so(
    serve_site: Callable[..., Served], spark: SparkSession, tmp_path: Path
) -> None:
    served = serve_site()
    users = served.site.create_namespace("users", retention=timedelta(milliseconds=1))
    users.put(b"a", b"1")
    checkpoint = str(tmp_path / "checkpoint")

    def run() -> StreamingQuery:
        writer = stream(spark, served.url).writeStream.format("noop").option("checkpointLocation", checkpoint)
        return writer.trigger(availableNow=True).start()

    assert run().awaitTermination(HANG_SECONDS)
    (point,) = served.site.safe_points()
    served.site.host.retention.release_safe_point(point.name)
    for number in range(3):
        users.put(b"a", b"%d" % number)
    collect_old(served.site)
    with pytest.raises(StreamingQueryException) as caught:
        run().awaitTermination(HANG_SECONDS)
    assert isinstance(find_error(caught.value), VersionCollected)
