"""Publishing a DataFrame: what is read afterwards, and what is left when tasks repeat, come late or fail."""

import csv
import os
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.types import BinaryType, StructField, StructType
from tests.links.support import NAMES, Served, ServeSite, describe, share
from tests.spark import support_publish_kill
from tests.spark.support_write import batches_of
from tests.waiting import wait_until

import floodmark
from floodmark.model.errors import (
    InvalidArgument,
    InvalidConfiguration,
    InvalidOption,
    PublicationConflict,
    SchemaMismatch,
    WrongPolicy,
)
from floodmark.site import Namespace, Site
from floodmark.spark import publish
from floodmark.spark.source.publishing import PublishingWriter, open_publisher

PAIRS = StructType([StructField("key", BinaryType()), StructField("value", BinaryType())])


@pytest.fixture
def users(site: Site) -> Namespace:
    return site.create_namespace("users")


def publisher(url: str, **options: str) -> PublishingWriter:
    return open_publisher({"path": url, "namespace": "users", **options}, PAIRS)


def test_mode_overwrite_publishes_and_keeps_changes_since_the_base(
    spark: SparkSession, site: Site, users: Namespace, url: str
) -> None:
    base = users.put(b"old", b"1")
    users.put(b"changed", b"mine")
    frame = spark.range(1_000).selectExpr(
        "cast(cast(id as string) as binary) as key", "cast('new' as binary) as value"
    )
    rows = frame.union(spark.createDataFrame([(b"changed", b"theirs")], PAIRS)).repartition(3)
    writer = rows.write.format("floodmark").option("namespace", "users").option("base", str(base))
    writer.mode("overwrite").save(url)
    assert (len(dict(users.scan())), users.get(b"999"), users.get(b"changed")) == (1_001, b"new", b"mine")
    assert users.get(b"old") is None
    assert [each.state.value for each in site.generations.list("users")] == ["kept", "current"]


def test_a_job_that_fails_leaves_the_namespace_as_it_was(
    spark: SparkSession, site: Site, users: Namespace, url: str
) -> None:
    users.put(b"a", b"1")
    frame = spark.createDataFrame([(b"b", b"2"), (b"", b"3")], PAIRS)
    with pytest.raises(PySparkException):
        frame.write.format("floodmark").option("namespace", "users").mode("overwrite").save(url)
    assert dict(users.scan()) == {b"a": b"1"}
    assert [each.number for each in site.generations.list("users")] == [1]


def test_repeated_tasks_change_nothing_and_late_ones_are_refused(users: Namespace, url: str) -> None:
    writer = publisher(url)
    rows = [(b"a", b"1"), (b"b", b"2")]
    first = writer.write(batches_of(rows))
    assert writer.write(batches_of(rows[:1])).records == 1
    writer.commit([first])
    users.delete(b"a")
    with pytest.raises(PublicationConflict):
        writer.write(batches_of(rows))
    assert dict(users.scan()) == {b"b": b"2"}


def test_what_cannot_be_published_is_refused_before_a_job(users: Namespace, url: str) -> None:
    assert users.name == "users"
    with pytest.raises(InvalidOption, match="neither a version nor a time"):
        publisher(url, base="yesterday")
    with pytest.raises(InvalidOption, match="distinctKeys"):
        publisher(url, distinctKeys="true")
    with pytest.raises(SchemaMismatch):
        open_publisher({"path": url, "namespace": "users"}, StructType(PAIRS.fields[:1]))
    empty = pyarrow.RecordBatch.from_pylist([], pyarrow.schema([("key", "binary"), ("value", "binary")]))
    writer = publisher(url)
    with pytest.raises(PublicationConflict):
        publisher(url)
    writer.commit([writer.write(iter([empty]))])
    assert dict(users.scan()) == {}


def test_publish_sorts_rows_and_finds_keys_that_come_twice(
    spark: SparkSession, site: Site, users: Namespace, url: str
) -> None:
    users.put(b"old", b"1")
    rows = spark.range(2_000, numPartitions=4).selectExpr(
        "cast(concat('user-', id % 1000) as binary) as key", "cast(cast(id as string) as binary) as value"
    )
    with pytest.raises(PySparkException, match="stands in several rows"):
        publish(rows, url, "users")
    assert dict(users.scan()) == {b"old": b"1"}
    publish(rows, url, "users", duplicates="last", options={"keep": "2"})
    assert dict(users.scan()) == {b"user-%d" % number: b"%d" % (1_000 + number) for number in range(1_000)}
    assert [each.state.value for each in site.generations.list("users")] == ["kept", "current"]


def test_plain_overwrite_finds_a_key_in_rows_of_several_tasks(
    spark: SparkSession, users: Namespace, url: str
) -> None:
    users.put(b"old", b"1")
    # The two rows of key 0 are in two tasks.
    rows = spark.range(1_000, numPartitions=2).selectExpr(
        "cast(cast(id % 999 as string) as binary) as key", "cast(cast(id as string) as binary) as value"
    )
    writer = rows.write.format("floodmark").option("namespace", "users")
    with pytest.raises(PySparkException, match=r"1,000 rows .* have 999 keys"):
        writer.mode("overwrite").save(url)
    assert dict(users.scan()) == {b"old": b"1"}
    writer.option("duplicates", "last").mode("overwrite").save(url)
    assert len(dict(users.scan())) == 999


def test_rows_that_are_not_in_the_order_that_was_promised_are_refused(users: Namespace, url: str) -> None:
    assert users.name == "users"
    writer = publisher(url, inOrder="true")
    with pytest.raises(InvalidArgument, match="sort them first"):
        writer.write(batches_of([(b"b", b"1"), (b"a", b"2")]))
    writer.abort([])


def test_refused_rows_go_to_a_file_of_the_driver_up_to_a_limit(
    spark: SparkSession, users: Namespace, url: str, tmp_path: Path
) -> None:
    users.put(b"old", b"1")
    rows = spark.range(1_000, numPartitions=2).selectExpr(
        "if(id % 400 = 7, null, cast(cast(id as string) as binary)) as key",
        "if(id = 5, null, cast('new' as binary)) as value",
    )
    refused = tmp_path / "refused.csv"
    with pytest.raises(PySparkException, match="refused"):
        publish(rows, url, "users", options={"refused": str(refused), "refusedMax": "2"})
    assert dict(users.scan()) == {b"old": b"1"}
    publish(rows, url, "users", options={"refused": str(refused)})
    assert len(dict(users.scan())) == 996
    with refused.open(newline="") as file:
        assert sorted(row["key"] for row in csv.DictReader(file)) == ["5", "None", "None", "None"]


def test_a_namespace_of_fields_or_counters_or_a_layer_takes_no_data_set(site: Site, url: str) -> None:
    site.create_namespace("files", large_values=True)
    with pytest.raises(WrongPolicy, match="holds large values 1"):
        open_publisher({"path": url, "namespace": "files"}, PAIRS)
    for merge in ("fields", "counter"):
        site.create_namespace(merge, merge=merge)
        with pytest.raises(WrongPolicy, match="merges by 'last_write'"):
            open_publisher({"path": url, "namespace": merge}, PAIRS)


def test_a_job_with_a_name_goes_on_after_a_failure(
    spark: SparkSession, site: Site, users: Namespace, url: str
) -> None:
    users.put(b"old", b"1")
    frame = spark.createDataFrame([(b"b", b"2"), (b"", b"3")], PAIRS)
    named = {"publisher": "nightly"}
    with pytest.raises(PySparkException):
        publish(frame, url, "users", options=named)
    assert [each.state.value for each in site.generations.list("users")] == ["current", "loading"]
    with pytest.raises(PublicationConflict, match="nightly"):
        publisher(url)
    publish(frame.where("key != X''"), url, "users", options=named)
    assert dict(users.scan()) == {b"b": b"2"}
    assert [each.number for each in site.generations.list("users")] == [1, 3]


@pytest.fixture
def shared(serve_site: ServeSite, tmp_path: Path) -> dict[str, Served]:
    """Sites of a topology; the id of the namespace `users` is another at each."""
    for number, name in enumerate(NAMES):
        with floodmark.open(tmp_path / name, site=name) as site:
            for other in range(number):
                site.create_namespace(f"other-{other}")
    return share(serve_site)[0]


@pytest.fixture
def topology(shared: dict[str, Served], tmp_path: Path) -> str:
    file = tmp_path / "topology.toml"
    urls = {name: each.url for name, each in shared.items()}
    file.write_text(describe(urls, {name: each.site.id for name, each in shared.items()}))
    return str(file)


def contents(shared: dict[str, Served]) -> list[dict[bytes, bytes]]:
    return [dict(each.site.namespace("users").scan()) for each in shared.values()]


def test_a_dataframe_is_published_at_all_sites_of_a_topology(
    spark: SparkSession, shared: dict[str, Served], topology: str
) -> None:
    oslo, rome, bonn = shared.values()
    base = oslo.site.namespace("users").put(b"old", b"1")
    # A read moves the clock past its version.
    rome.site.namespace("users").get(b"old", at=base)
    rome.site.namespace("users").put(b"changed", b"mine")
    rows = spark.range(1_000, numPartitions=2).selectExpr(
        "cast(cast(id as string) as binary) as key", "cast('new' as binary) as value"
    )
    publish(rows, oslo.url, "users", options={"topology": topology, "base": str(base)})
    new = {b"%d" % number: b"new" for number in range(1_000)}
    assert contents(shared) == [new, new | {b"changed": b"mine"}, new]
    stamps = {each.site.host.namespaces.find_namespace("users").present.stamp for each in shared.values()}
    assert len(stamps) == 1
    # A site that is away is left out by name.
    bonn.server.close()
    del shared["bonn"]
    with pytest.raises(PySparkException, match="Unreachable"):
        publish(rows.limit(1), oslo.url, "users", options={"topology": topology})
    publish(rows.limit(1), oslo.url, "users", options={"topology": topology, "without": "bonn, nobody"})
    assert [len(each) for each in contents(shared)] == [1, 1]


def test_a_shared_namespace_is_published_nowhere_if_it_cannot_be_everywhere(
    spark: SparkSession, shared: dict[str, Served], topology: str, tmp_path: Path
) -> None:
    oslo, rome, _ = shared.values()
    with pytest.raises(InvalidConfiguration, match="shared with bonn, rome; publish at all"):
        publisher(oslo.url)
    with pytest.raises(InvalidOption, match="cannot be read"):
        publisher(oslo.url, topology=str(tmp_path / "nowhere.toml"))
    begun = publisher(rome.url, topology=topology)
    with pytest.raises(PublicationConflict):
        publisher(oslo.url, topology=topology)
    begun.abort([])
    frame = spark.createDataFrame([(b"b", b"2"), (b"", b"3")], PAIRS)
    with pytest.raises(PySparkException):
        publish(frame, oslo.url, "users", options={"topology": topology})
    assert contents(shared) == [{}, {}, {}]
    for each in shared.values():
        assert [row.state.value for row in each.site.generations.list("users")] == ["current"]


@pytest.mark.slow
def test_a_driver_that_is_killed_leaves_the_namespace_as_it_was(
    site: Site, users: Namespace, url: str, tmp_path: Path
) -> None:
    users.put(b"old", b"1")
    begun = tmp_path / "begun"
    kill_in_the_middle(url, "users", begun)
    assert dict(users.scan()) == {b"old": b"1"}
    (_, left) = site.generations.list("users")
    assert left.state == "loading"
    with pytest.raises(PublicationConflict, match="being published by 'spark/"):
        site.generations.publish("users", {b"new": b"2"})
    site.generations.drop("users", left.number)
    assert site.generations.publish("users", {b"new": b"2"}).rows == 1
    assert dict(users.scan()) == {b"new": b"2"}


@pytest.mark.slow
def test_a_killed_driver_leaves_all_sites_as_they_were_and_its_job_goes_on(
    spark: SparkSession, shared: dict[str, Served], topology: str, tmp_path: Path
) -> None:
    oslo, rome, _ = shared.values()
    rome.site.namespace("users").put(b"old", b"1")
    named = {"topology": topology, "publisher": "nightly"}
    kill_in_the_middle(oslo.url, "users", tmp_path / "begun", **named)
    assert contents(shared) == [{}, {b"old": b"1"}, {}]
    for each in shared.values():
        assert [row.state.value for row in each.site.generations.list("users")] == ["current", "loading"]
    with pytest.raises(PublicationConflict, match="being published by 'nightly'"):
        publisher(rome.url, topology=topology)
    keys = spark.range(1_000).selectExpr("cast(cast(id as string) as binary) as key")
    publish(keys.selectExpr("key", "key as value"), oslo.url, "users", options=named)
    expected = {b"%d" % number: b"%d" % number for number in range(1_000)}
    assert contents(shared) == [expected, expected, expected]


def kill_in_the_middle(url: str, namespace: str, begun: Path, **options: str) -> None:
    """Kill a driver while one of its tasks has loaded its rows, and another does not end."""
    given = [f"{name}={value}" for name, value in options.items()]
    command = [sys.executable, support_publish_kill.__file__, url, namespace, str(begun), *given]
    with subprocess.Popen(
        command,
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    ) as driver:
        try:
            wait_until(begun.exists, "the driver's task has not begun")
        finally:
            # With Spark's Java, which is in the same group.
            os.killpg(driver.pid, signal.SIGKILL)
