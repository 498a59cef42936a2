"""A batch of changes holds every change between two versions once, as the site itself tells them."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import IntegerType, StringType, StructField, StructType
from tests.links.support import Served
from tests.sizes import only
from tests.spark.support_garbage import collect_old
from tests.spark.support_read import open_reader, plan, read_part, read_rows

from floodmark.codec.ordered import encode_namespace
from floodmark.codec.values import encode_value
from floodmark.feed.sinks.parquet import to_table
from floodmark.model.access import Role
from floodmark.model.change import Change, Stamp
from floodmark.model.errors import InvalidOption, NamespaceNotFound, VersionCollected, VersionInFuture
from floodmark.model.version import Version, compose, moment_of, physical_ms
from floodmark.site import Namespace, Site
from floodmark.spark.source.reading import ChangeInterval
from floodmark.spark.source.schemas import CHANGES

Rows = list[dict[str, Any]]


@pytest.fixture
def users(site: Site) -> Namespace:
    return site.create_namespace("users")


def read_changes(location: object, **options: object) -> Rows:
    """Changes in the order of their versions: a batch has none."""
    rows = read_rows(location, None, readChangeFeed="true", **options)
    return sorted(rows, key=lambda row: (row["_commit_version"], row["key"], row["_change_type"] != PRE))


PRE = "update_preimage"


def as_rows(changes: list[Change]) -> Rows:
    rows: Rows = to_table(changes).to_pylist()
    return rows


def keys_of(rows: Rows) -> list[bytes]:
    return [row["key"] for row in rows]


def put_spaced(site: Site, users: Namespace, *keys: bytes) -> list[Version]:
    """Write keys, each in a millisecond of its own."""
    versions: list[Version] = []
    for key in keys:
        while versions and physical_ms(site.now()) <= physical_ms(versions[-1]):
            pass
        versions.append(users.put(key, b"x"))
    return versions


def test_changes_are_read_through_spark(spark: SparkSession, served: Served, users: Namespace) -> None:
    users.put(b"ada", b"1")
    users.put(b"ada", b"2")
    users.delete(b"ada")
    reader = spark.read.format("floodmark").options(namespace="users", readChangeFeed="true")
    frame = reader.option("beforeImages", "true").load(served.url)
    assert frame.schema == CHANGES
    rows = frame.orderBy("_commit_version", "value").collect()
    assert [(row._change_type, bytes(row.value)) for row in rows] == [
        ("insert", b"1"),
        ("update_preimage", b"1"),
        ("update_postimage", b"2"),
        ("delete", b"2"),
    ]


@pytest.mark.parametrize("before_images", [False, True])
@pytest.mark.parametrize("seed", only([0], range(3)))
def test_changes_of_a_random_history_are_those_of_the_site(
    served: Served, users: Namespace, seed: int, before_images: bool
) -> None:
    random, site = Random(seed), served.site
    keys = [random.randbytes(random.randint(1, 12)) for _ in range(30)]
    prefix = encode_namespace(users.id)
    versions: list[Version] = []
    for step in range(40):
        versions.append(users.put_many({key: random.randbytes(8) for key in random.choices(keys, k=4)}))
        with site.atomic() as batch:
            batch.put(users, random.choice(keys), b"of a batch")
        users.put(random.choice(keys), b"for a while", ttl=3600)
        users.delete(random.choice(keys))
        copied = encode_value(b"copied", origin=Stamp(random.randint(1, versions[-1]), 99))
        site.host.router.apply({prefix + random.choice(keys): copied}, durable=True)
        if step % 15 == 5:
            site.split("users", random.choice(keys))
    site.heartbeat()
    some = [sorted(random.sample(versions, 2)) for _ in range(3)]
    intervals: list[tuple[Version, Version | None]] = [(0, None), *((since, until) for since, until in some)]
    for place in (served.url, served.directory):
        for since, until in intervals:
            expected = list(site.changes("users", since=since, until=until, before_images=before_images))
            bounds = {"startingVersion": since + 1} | ({} if until is None else {"endingVersion": until})
            count = random.choice([1, 4, 9])
            found = read_changes(place, beforeImages=before_images, minPartitions=count, **bounds)
            assert found == as_rows(expected)


def test_start_and_end_are_inclusive(location: Callable[[], str], site: Site, users: Namespace) -> None:
    versions = put_spaced(site, users, b"a", b"b", b"c", b"d")
    place = location()
    middle = read_changes(place, startingVersion=versions[1], endingVersion=versions[2])
    assert keys_of(middle) == [b"b", b"c"]
    times = {
        "startingTimestamp": moment_of(versions[1]).isoformat(),
        "endingTimestamp": moment_of(versions[2]).isoformat(),
    }
    assert keys_of(read_changes(place, **times)) == [b"b", b"c"]
    assert keys_of(read_changes(place, startingVersion=versions[3])) == [b"d"]
    assert keys_of(read_changes(place, endingVersion=versions[0])) == [b"a"]


def test_a_snapshot_is_every_key_at_the_end(
    location: Callable[[], str], site: Site, users: Namespace
) -> None:
    site.split("users", b"b")
    until = users.put_many({b"a": b"1", b"b": b"2"})
    end = max(change.version for change in site.changes("users"))
    users.delete(b"a")
    users.put(b"c", b"3")
    place = location()
    assert keys_of(read_changes(place, startingVersion="snapshot")) == [b"b", b"c"]
    rows = read_changes(place, startingVersion="snapshot", endingVersion=end, minPartitions=4)
    assert keys_of(rows) == [b"a", b"b"]
    assert {(row["_snapshot"], row["_commit_version"]) for row in rows} == {(True, end)}
    assert {row["_origin_version"] for row in rows} == {
        change.version for change in site.changes("users", until=max(until, end))
    }


def test_earliest_is_the_first_of_all_and_latest_is_nothing_yet(
    location: Callable[[], str], users: Namespace
) -> None:
    users.put(b"a", b"1")
    place = location()
    assert keys_of(read_changes(place, startingVersion="earliest")) == [b"a"]
    assert read_changes(place, startingVersion="latest") == []


def test_changes_before_the_namespace_was_made_are_none(url: str, site: Site) -> None:
    before = site.now()
    site.create_namespace("users").put(b"a", b"1")
    assert keys_of(read_changes(url, startingVersion=before)) == [b"a"]
    assert read_changes(url, startingVersion=before, endingVersion=before) == []


def test_keys_are_limited_by_options(location: Callable[[], str], users: Namespace) -> None:
    users.put_many({b"a": b"1", b"ab": b"2", b"b": b"3"})
    assert keys_of(read_changes(location(), prefix="a")) == [b"a", b"ab"]


def test_write_that_did_not_wait_for_the_disk_is_there(url: str, users: Namespace) -> None:
    users.put(b"a", b"1", durability="async")
    assert keys_of(read_changes(url)) == [b"a"]


def test_end_is_fixed_when_the_reading_is_planned(
    location: Callable[[], str], site: Site, users: Namespace
) -> None:
    users.put(b"a", b"1")
    reader = open_reader(location(), CHANGES, readChangeFeed="true")
    parts = reader.partitions()
    users.put(b"b", b"2")
    site.heartbeat()
    assert keys_of([row for part in parts for row in read_part(reader, part)]) == [b"a"]


def test_put_that_has_expired_is_a_delete(location: Callable[[], str], site: Site, users: Namespace) -> None:
    past = encode_value(b"1", expires_at=1000)
    site.host.router.put_one(encode_namespace(users.id) + b"a", past, durable=True)
    (row,) = read_changes(location())
    assert (row["_change_type"], row["value"], row["_expires_at"].year) == ("delete", None, 1970)


def test_fields_of_json_values_are_columns_of_changes(url: str, users: Namespace) -> None:
    users.put(b"ada", b'{"age": 36}')
    users.delete(b"ada")
    columns = [("key", StringType()), ("age", IntegerType()), ("_change_type", StringType())]
    schema = StructType([StructField(name, kind) for name, kind in columns])
    rows = read_rows(url, schema, readChangeFeed="true", valueFormat="json")
    assert rows == [
        {"key": "ada", "age": 36, "_change_type": "upsert"},
        {"key": "ada", "age": None, "_change_type": "delete"},
    ]


def test_parts_share_partitions_and_versions(url: str, site: Site, users: Namespace) -> None:
    users.put_many({b"a": b"1", b"z": b"2"})
    site.split("users", b"m")
    parts = plan(url, CHANGES, readChangeFeed="true", minPartitions=5)
    assert all(isinstance(part, ChangeInterval) for part in parts)
    assert len(parts) == 6
    assert len({part.keys for part in parts}) == 2  # type: ignore[attr-defined]


# Refusals


def test_missing_namespace_is_refused(location: Callable[[], str]) -> None:
    with pytest.raises(NamespaceNotFound):
        plan(location(), readChangeFeed="true")


def test_end_before_the_start_is_refused(url: str, users: Namespace) -> None:
    version = users.put(b"a", b"1")
    with pytest.raises(InvalidOption, match="before they begin"):
        plan(url, readChangeFeed="true", startingVersion=version, endingVersion=version - 1)


@pytest.mark.parametrize("option", ["startingVersion", "endingVersion"])
def test_version_in_the_future_is_refused(
    location: Callable[[], str], site: Site, users: Namespace, option: str
) -> None:
    users.put(b"a", b"1")
    later = site.now() + compose(3_600_000, 0)
    with pytest.raises(VersionInFuture):
        plan(location(), None, readChangeFeed="true", **{option: later})


def test_changes_that_were_collected_are_refused(location: Callable[[], str], site: Site) -> None:
    users = site.create_namespace("users", retention=timedelta(0))
    first = users.put(b"a", b"1")
    users.put(b"a", b"2")
    collect_old(site)
    last = users.put(b"a", b"3")
    place = location()
    with pytest.raises(VersionCollected, match=r"of 'users' was collected; the oldest that can be read"):
        plan(place, readChangeFeed="true", startingVersion=first)
    with pytest.raises(VersionCollected, match='startingVersion "snapshot"'):
        read_changes(place)
    assert [row["_origin_version"] for row in read_changes(place, startingVersion="snapshot")] == [last]


def test_what_is_kept_is_held_while_a_job_runs(guarded: Served, token_file: Callable[..., Path]) -> None:
    site = guarded.site
    users = site.create_namespace("users", retention=timedelta(minutes=30))
    users.put(b"a", b"1")
    users.put(b"a", b"2")
    options = {"readChangeFeed": "true", "tokenFile": token_file(Role.READ, "users")}
    reader = open_reader(guarded.url, CHANGES, **options)
    (part,) = reader.partitions()
    assert isinstance(part, ChangeInterval)
    (point,) = site.safe_points()
    assert (point.version, point.namespace) == (part.since, users.id)
    site.update_namespace("users", retention=timedelta(0))
    collect_old(site)
    assert [row["value"] for row in read_part(reader, part)] == [b"1", b"2"]
