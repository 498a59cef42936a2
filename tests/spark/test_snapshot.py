"""A snapshot is one version of everything: complete, unchanged by what comes later, and refused in time."""

import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from socket import socket

import pyarrow
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.types import StringType, StructField, StructType
from tests.links.support import Served, ServeSite
from tests.server.support import token_of, write_access
from tests.sizes import only
from tests.spark.processes import SparkProcess
from tests.spark.support_garbage import collect_old
from tests.spark.support_read import open_reader, plan, read_pairs, read_part, read_parts, read_rows

from floodmark.codec.digest import SEED, hash_bytes
from floodmark.codec.ordered import encode_namespace
from floodmark.codec.values import encode_value
from floodmark.model.access import Role
from floodmark.model.change import Stamp
from floodmark.model.errors import (
    FloodmarkError,
    InvalidVersion,
    NamespaceNotFound,
    NotAllowed,
    NotASite,
    NotAuthenticated,
    Unreachable,
    VersionCollected,
    VersionInFuture,
)
from floodmark.model.version import Version, compose, moment_of, physical_ms
from floodmark.server import ServerOptions
from floodmark.site import Namespace, Site
from floodmark.spark.runtime.failures import find_error
from floodmark.spark.source.reading import RecordRange
from floodmark.spark.source.schemas import PAIRS

HOUR = timedelta(hours=1)


@pytest.fixture
def users(site: Site) -> Namespace:
    return site.create_namespace("users")


def test_live_records_are_read_through_spark(spark: SparkSession, served: Served, users: Namespace) -> None:
    users.put_many({b"%03d" % number: b"value %d" % number for number in range(300)})
    users.delete(b"007")
    served.site.heartbeat()
    for place in (served.url, str(served.directory)):
        frame = spark.read.format("floodmark").option("namespace", "users").load(place)
        assert frame.schema == PAIRS
        found = {bytes(row.key): bytes(row.value) for row in frame.collect()}
        assert found == dict(users.scan())


def test_rows_through_spark_keep_their_types(spark: SparkSession, url: str, users: Namespace) -> None:
    version = users.put(b"ada", b'{"born": "1815-12-10", "tags": ["x"]}')
    reader = spark.read.format("floodmark").options(namespace="users", valueFormat="json")
    schema = "key string, born date, tags array<string>, _commit_version bigint, _expires_at timestamp"
    (row,) = reader.schema(schema).load(url).selectExpr("*", "year(born) AS year").collect()
    assert (row.key, row.year, row.tags, row._commit_version) == ("ada", 1815, ["x"], version)
    assert row._expires_at is None


def read_elsewhere(spark: SparkSession, url: str) -> tuple[dict[bytes, bytes], list[str], int]:
    """For another process: a snapshot, the changes, and a filter."""
    reader = spark.read.format("floodmark").option("namespace", "users")
    rows = reader.option("minPartitions", "3").load(url).collect()
    changes = reader.option("readChangeFeed", "true").load(url).orderBy("_commit_version").collect()
    return (
        {bytes(row.key): bytes(row.value) for row in rows},
        [row._change_type for row in changes],
        reader.load(url).where("key < X'62'").count(),
    )


@pytest.mark.parametrize(
    "session",
    [pytest.param("local_cluster", marks=pytest.mark.soak), pytest.param("connect", marks=pytest.mark.slow)],
)
def test_site_is_read_on_a_cluster_and_over_connect(
    request: pytest.FixtureRequest, session: str, url: str, users: Namespace
) -> None:
    for key in (b"a", b"b", b"c"):
        users.put(key, b"x" + key)
    users.delete(b"c")
    process: SparkProcess = request.getfixturevalue(session)
    expected = {b"a": b"xa", b"b": b"xb"}, ["upsert", "upsert", "upsert", "delete"], 1
    assert process.run(read_elsewhere, url) == expected


@pytest.mark.slow
def test_dataframe_that_is_used_with_several_filters_gets_the_rows_of_each(
    spark: SparkSession, url: str, users: Namespace
) -> None:
    users.put_many({b"a": b"1", b"b": b"2"})
    pushdown = "spark.sql.python.filterPushdown.enabled"
    spark.conf.set(pushdown, "true")
    try:
        frame = spark.read.format("floodmark").option("namespace", "users").load(url)
        first, second = frame.where("key = X'61'"), frame.where("key = X'62'")
        assert [each.count() for each in (first, second, frame, first)] == [1, 1, 2, 1]
        assert [bytes(row.key) for row in first.union(second).collect()] == [b"a", b"b"]
    finally:
        spark.conf.unset(pushdown)


@pytest.mark.slow
def test_digests_equal_those_of_spark(spark: SparkSession, url: str, users: Namespace) -> None:
    users.put_many({b"%d" % number: b"x" * number for number in range(40)})
    reader = spark.read.format("floodmark").option("namespace", "users")
    hashed = reader.load(url).selectExpr("key", "xxhash64(value) AS digest")
    sent = reader.option("rows", "digests").load(url).select("key", "digest")
    assert hashed.exceptAll(sent).count() == 0
    assert sent.count() == 40


@pytest.mark.slow
def test_dataframe_shows_the_same_whenever_it_is_used(
    spark: SparkSession, url: str, users: Namespace
) -> None:
    users.put(b"a", b"1")
    frame = spark.read.format("floodmark").option("namespace", "users").load(url)
    assert frame.count() == 1
    users.put(b"b", b"2")
    assert frame.count() == 1
    assert frame.join(frame, "key").count() == 1


def test_parts_agree_on_a_version_while_writes_go_on(
    location: Callable[[], str], site: Site, users: Namespace
) -> None:
    users.put_many({b"%02d" % number: b"old" for number in range(100)})
    site.split("users", b"50")
    reader = open_reader(location(), PAIRS, minPartitions=4)
    parts = reader.partitions()
    assert len(parts) == 4
    # What is written now, and where it is kept then, does not matter to anybody who reads at the version.
    users.put_many({b"%02d" % number: b"new" for number in range(150)})
    users.delete(b"07")
    site.split("users", b"25")
    site.heartbeat()
    rows = [row for part in parts for row in read_part(reader, part)]
    assert sorted((row["key"], row["value"]) for row in rows) == [(b"%02d" % n, b"old") for n in range(100)]


def test_past_is_read_by_version_and_by_time(
    location: Callable[[], str], site: Site, users: Namespace
) -> None:
    first = users.put(b"ada", b"countess")
    while physical_ms(site.now()) <= physical_ms(first):
        pass
    users.put(b"ada", b"programmer")
    place = location()
    assert read_pairs(place, versionAsOf=first) == {b"ada": b"countess"}
    assert read_pairs(place, versionAsOf=first - 1) == {}
    assert read_pairs(place, timestampAsOf=moment_of(first).isoformat()) == {b"ada": b"countess"}
    assert read_pairs(place) == {b"ada": b"programmer"}


def test_a_version_from_before_the_namespace_was_made_is_refused(
    location: Callable[[], str], site: Site
) -> None:
    before = site.now()
    while physical_ms(site.now()) <= physical_ms(before):
        pass
    created = site.create_namespace("users").put(b"a", b"1")
    place = location()
    for options in ({"versionAsOf": before}, {"timestampAsOf": moment_of(before).isoformat()}):
        with pytest.raises(InvalidVersion, match="is older than namespace 'users', which was made at"):
            plan(place, **options)
    assert read_pairs(place, versionAsOf=created) == {b"a": b"1"}


def test_keys_are_limited_by_options(location: Callable[[], str], users: Namespace) -> None:
    users.put_many({b"a": b"1", b"ab": b"2", b"b": b"3", b"\xff\x00": b"4"})
    place = location()
    assert read_pairs(place, startKey="ab") == {b"ab": b"2", b"b": b"3", b"\xff\x00": b"4"}
    assert read_pairs(place, endKey="b") == {b"a": b"1", b"ab": b"2"}
    assert read_pairs(place, prefix="a") == {b"a": b"1", b"ab": b"2"}
    assert read_pairs(place, prefix="0xff") == {b"\xff\x00": b"4"}
    assert read_pairs(place, prefix="nothing") == {}


def test_all_rows_have_what_is_deleted_and_expired(
    location: Callable[[], str], site: Site, users: Namespace
) -> None:
    users.put_many({b"live": b"1", b"gone": b"2"})
    gone = users.delete(b"gone")
    past = encode_value(b"3", expires_at=1000)
    site.host.router.put_one(encode_namespace(users.id) + b"expired", past, durable=True)
    place = location()
    rows = {row["key"]: row for row in read_rows(place, rows="all")}
    assert {key: (row["_change_type"], row["value"]) for key, row in rows.items()} == {
        b"live": ("upsert", b"1"),
        b"gone": ("delete", None),
        b"expired": ("upsert", b"3"),
    }
    assert rows[b"gone"]["_commit_version"] == gone
    assert rows[b"expired"]["_expires_at"] == datetime.fromtimestamp(1000, UTC)
    assert read_pairs(place) == {b"live": b"1"}
    digests = {row["key"]: row["digest"] for row in read_rows(place, rows="digests")}
    assert digests[b"gone"] is None
    assert digests[b"live"] == _signed(hash_bytes(b"1", SEED))


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number


def test_after_a_clock_was_set_back_a_snapshot_has_what_a_read_of_the_site_shows(set_back: Served) -> None:
    profiles = set_back.site.namespace("profiles")
    assert isinstance(profiles, Namespace)
    set_back.site.namespace("users").put(b"ada", b"1", ttl=timedelta(minutes=30))
    profiles.put(b"ada", b'{"name":"Ada"}')
    profiles.update(b"ada", {"session": "x1"}, ttl=timedelta(minutes=30))
    set_back.site.heartbeat()
    for place in (set_back.url, str(set_back.directory)):
        assert read_pairs(place) == {b"ada": b"1"}
        assert read_pairs(place, namespace="profiles") == {b"ada": profiles.get(b"ada")}


def test_metadata_names_the_origin_and_the_partition(
    location: Callable[[], str], site: Site, users: Namespace
) -> None:
    stamp = Stamp(compose(1_000, 3), 99)
    key = encode_namespace(users.id) + b"copied"
    site.host.router.apply({key: encode_value(b"2", origin=stamp)}, durable=True)
    own = users.put(b"own", b"1")
    partition = site.partitions()[0].id
    place = location()
    rows = {row["key"]: row for row in read_rows(place, metadata="true")}
    assert (rows[b"copied"]["_origin_site"], rows[b"copied"]["_origin_version"]) == (99, stamp.version)
    assert (rows[b"own"]["_origin_site"], rows[b"own"]["_origin_version"]) == (site.id, own)
    assert rows[b"own"]["_site_partition"] == partition
    assert rows[b"own"]["_commit_timestamp"] == moment_of(own)


@pytest.mark.parametrize("seed", only([0], range(4)))
def test_snapshots_of_a_random_history_equal_a_model(served: Served, users: Namespace, seed: int) -> None:
    random, site = Random(seed), served.site
    model: dict[bytes, bytes] = {}
    history: list[tuple[Version, dict[bytes, bytes]]] = []
    keys = [random.randbytes(random.randint(1, 12)) for _ in range(40)]
    for step in range(60):
        written = {key: random.randbytes(random.randint(0, 30)) for key in random.choices(keys, k=5)}
        users.put_many(written)
        model |= written
        for key in random.choices(keys, k=2):
            users.delete(key)
            model.pop(key, None)
        if step % 20 == 10:
            site.split("users", random.choice(keys))
        history.append((site.now(), dict(model)))
    site.heartbeat()
    for place in (served.url, served.directory):
        for version, expected in random.sample(history, 4):
            count = random.choice([1, 3, 10])
            assert read_pairs(place, versionAsOf=version, minPartitions=count) == expected
        assert read_pairs(place) == model


@pytest.mark.slow
def test_memory_does_not_grow_with_the_rows(url: str, users: Namespace) -> None:
    with users.writer(durability="async") as writer:
        for number in range(30_000):
            writer.put(b"%08d" % number, bytes(1_000))
    reader = open_reader(url, PAIRS)
    (part,) = reader.partitions()
    before = pyarrow.total_allocated_bytes()
    highest = rows = 0
    for batch in reader.read(part):
        assert isinstance(batch, pyarrow.RecordBatch)
        rows += batch.num_rows
        highest = max(highest, pyarrow.total_allocated_bytes() - before)
    assert rows == 30_000
    # Of thirty million bytes, a few batches are there at a time.
    assert highest < 16_000_000


# Refusals


def test_missing_namespace_is_refused(location: Callable[[], str]) -> None:
    with pytest.raises(NamespaceNotFound, match="no namespace 'users'"):
        plan(location())


def test_version_in_the_future_is_refused(location: Callable[[], str], site: Site, users: Namespace) -> None:
    users.put(b"a", b"1")
    place, later = location(), site.now() + compose(3_600_000, 0)
    with pytest.raises(VersionInFuture):
        plan(place, versionAsOf=later)


def test_collected_version_is_refused(location: Callable[[], str], site: Site) -> None:
    users = site.create_namespace("users", retention=timedelta(0))
    first = users.put(b"a", b"1")
    users.put(b"a", b"2")
    collect_old(site)
    place = location()
    with pytest.raises(VersionCollected, match=f"version {first} of 'users' was collected; the oldest"):
        plan(place, versionAsOf=first)
    assert read_pairs(place) == {b"a": b"2"}


def test_version_that_is_collected_before_a_task_reads_it_is_refused_there(
    served: Served, users: Namespace
) -> None:
    users.put(b"a", b"1")
    reader = open_reader(served.url, PAIRS)
    (part,) = reader.partitions()
    served.site.update_namespace("users", retention=timedelta(0))
    users.put(b"a", b"2")
    collect_old(served.site)
    with pytest.raises(VersionCollected):
        list(reader.read(part))


def test_server_that_is_not_there_is_unreachable() -> None:
    with socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    with pytest.raises(Unreachable):
        plan(f"grpc://127.0.0.1:{port}")


def test_directory_that_is_not_a_site_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotASite):
        plan(tmp_path)


def test_role_on_the_namespace_is_enough_and_needed(guarded: Served, token_file: Callable[..., Path]) -> None:
    guarded.site.create_namespace("users", retention=HOUR / 2).put(b"a", b"1")
    guarded.site.create_namespace("orders")
    reading = token_file(Role.READ, "users")
    assert read_pairs(guarded.url, tokenFile=reading, minPartitions=3) == {b"a": b"1"}
    with pytest.raises(NotAllowed, match="orders"):
        plan(guarded.url, tokenFile=reading, namespace="orders")
    with pytest.raises(NotAuthenticated):
        plan(guarded.url)


def test_expired_token_is_refused(serve_site: ServeSite, tmp_path: Path) -> None:
    entry = {
        "name": "late",
        "role": "read",
        "token": "tok-en",
        "expires_at": datetime(2020, 1, 1, tzinfo=UTC),
    }
    served = serve_site("expired", ServerOptions(access=write_access(tmp_path / "late.toml", entry)))
    token = tmp_path / "token"
    token.write_text("tok-en", "utf-8")
    with pytest.raises(NotAuthenticated, match="expired at"):
        plan(served.url, tokenFile=token)


def test_errors_come_before_a_job_starts(
    spark: SparkSession, served: Served, guarded: Served, token_file: Callable[..., Path]
) -> None:
    guarded.site.create_namespace("users")
    wrong = token_file(Role.READ)
    wrong.write_text("not-" + token_of(Role.READ), "utf-8")
    attempts: list[tuple[type[FloodmarkError], str, dict[str, str]]] = [
        (NamespaceNotFound, served.url, {}),
        (NotAuthenticated, guarded.url, {"tokenFile": str(wrong)}),
    ]
    spark.sparkContext.setJobGroup("refused", "reads that are refused")
    schema = StructType([StructField("key", StringType())])
    for kind, url, options in attempts:
        reader = spark.read.format("floodmark").option("namespace", "users").options(**options)
        for frame in (reader.load(url), reader.schema(schema).load(url)):
            with pytest.raises(PySparkException) as caught:
                frame.collect()
            assert isinstance(find_error(caught.value), kind)
    assert spark.sparkContext.statusTracker().getJobIdsForGroup("refused") == []


# Safe points


def test_version_within_its_retention_needs_no_safe_point(served: Served, users: Namespace) -> None:
    users.put(b"a", b"1")
    assert read_pairs(served.url) == {b"a": b"1"}
    assert served.site.safe_points() == []


def test_version_about_to_be_collected_is_held_for_an_hour(served: Served, users: Namespace) -> None:
    users.put(b"a", b"1")
    served.site.update_namespace("users", retention=HOUR / 2)
    reader = open_reader(served.url, PAIRS)
    (part,) = reader.partitions()
    assert isinstance(part, RecordRange)
    (point,) = served.site.safe_points()
    assert point.name.startswith("spark/")
    assert (point.version, point.namespace) == (part.version, users.id)
    assert 0 <= point.expires_at_ms - physical_ms(part.version) - HOUR // timedelta(milliseconds=1) < 60_000
    served.site.update_namespace("users", retention=timedelta(0))
    users.put(b"a", b"2")
    collect_old(served.site)
    assert read_part(reader, part) == [{"key": b"a", "value": b"1"}]


# Workers


def test_workers_need_no_database_to_read_from_a_server(url: str, users: Namespace) -> None:
    users.put(b"a", b"1")
    program = """
import sys
sys.modules["rocksdict"] = None  # an import fails
from tests.spark.support_read import read_pairs
print(read_pairs(sys.argv[1], minPartitions=2))
try:
    read_pairs("some/directory")
except Exception as error:
    print(type(error).__name__, error)
"""
    answer = subprocess.run(
        [sys.executable, "-c", program, url], capture_output=True, text=True, check=True, timeout=60
    ).stdout.splitlines()
    assert answer[0] == "{b'a': b'1'}"
    assert answer[1].startswith("InvalidConfiguration a directory is read with RocksDB, and rocksdict")


def test_parts_are_read_alike_wherever_they_are_unpickled(url: str, users: Namespace) -> None:
    users.put_many({b"%02d" % number: b"x" for number in range(60)})
    tables = read_parts(open_reader(url, PAIRS, minPartitions=3), PAIRS)
    assert [table.num_rows for table in tables] == [20, 20, 20]
