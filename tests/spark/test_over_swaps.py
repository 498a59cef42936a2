"""Reading changes with Spark where a data set was published."""

import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.datasource import ReadMaxRows
from tests.links.support import Served
from tests.sizes import only
from tests.spark.support_backup import address_of
from tests.waiting import HANG_SECONDS

from floodmark.model.errors import GenerationSwapped, InvalidOption
from floodmark.site import Namespace, Site
from floodmark.spark.jobs import backup, check_backup, export, read_export, restore
from floodmark.spark.source.reading import open_changes_reader
from floodmark.spark.source.schemas import CHANGES
from floodmark.spark.source.stream import StreamReader, open_stream_reader


@pytest.fixture
def users(site: Site) -> Namespace:
    """Two partitions, and two data sets with changes before, between and behind them."""
    users = site.create_namespace("users")
    site.split("users", b"05")
    users.put_many({b"%02d" % number: b"1" for number in range(8)})
    users.put(b"03", b"2")
    site.generations.publish("users", {b"%02d" % number: b"3" for number in range(3, 12)})
    users.delete(b"05")
    site.generations.rollback("users")
    users.put(b"last", b"4")
    return users


def state_of(rows: list[dict[str, Any]]) -> dict[bytes, bytes]:
    state: dict[bytes, bytes] = {}
    for row in sorted(rows, key=lambda row: (row["_commit_version"], bytes(row["key"]))):
        if row["_change_type"] == "generation":
            state = {} if row["_snapshot"] else state
        elif row["_change_type"] == "delete":
            state.pop(bytes(row["key"]), None)
        elif row["_change_type"] != "update_preimage":
            state[bytes(row["key"])] = bytes(row["value"])
    return state


def markers(rows: list[dict[str, Any]]) -> int:
    return len([row for row in rows if row["_change_type"] == "generation"])


@pytest.mark.parametrize("way", ["difference", "snapshot"])
@pytest.mark.parametrize("images", only(["true"], ["false", "true"]))
def test_a_stream_goes_on_over_swaps_with_a_restart_at_every_batch(
    site: Site, users: Namespace, url: str, way: str, images: str
) -> None:
    given = {"path": url, "namespace": "users", "readChangeFeed": "true"}
    given |= {"onGeneration": way, "beforeImages": images}
    rows: list[dict[str, Any]] = []
    offset = None
    while True:
        reader = open_stream_reader(given, CHANGES)
        reader.pause_seconds = 0
        try:
            offset = offset or reader.initialOffset()
            end = json.loads(json.dumps(reader.latestOffset(offset, ReadMaxRows(2))))
            if end == offset:
                break
            for partition in reader.partitions(offset, end):
                for batch in StreamReader(reader._options, reader._schema).read(partition):
                    rows += batch.to_pylist()
            reader.commit(end)
            offset = end
        finally:
            reader.stop()
    assert state_of(rows) == dict(users.scan())
    assert markers(rows) == 2
    swap = site.generations.list("users")[1].since
    assert swap is not None
    before = [row for row in rows if row["_commit_version"] <= swap]
    assert state_of(before) == dict(users.scan(at=swap))


@pytest.mark.parametrize("way", only(["difference"], ["difference", "snapshot"]))
def test_a_query_and_a_data_frame_go_on_over_swaps(
    spark: SparkSession, users: Namespace, url: str, tmp_path: Path, way: str
) -> None:
    options = {"namespace": "users", "readChangeFeed": "true", "onGeneration": way}
    found = spark.read.format("floodmark").options(**options, minPartitions="8").load(url)
    rows = [row.asDict() for row in found.collect()]
    assert (state_of(rows), markers(rows)) == (dict(users.scan()), 2)
    batches: list[dict[str, Any]] = []

    def take(frame: DataFrame, _number: int) -> None:
        batches.extend(row.asDict() for row in frame.collect())

    stream = spark.readStream.format("floodmark").options(**options).load(url)
    writer = stream.writeStream.option("checkpointLocation", str(tmp_path)).trigger(availableNow=True)
    assert writer.foreachBatch(take).start().awaitTermination(HANG_SECONDS)
    assert (state_of(batches), markers(batches)) == (dict(users.scan()), 2)


@pytest.mark.usefixtures("users")
def test_without_the_option_a_stream_ends_at_a_swap(url: str) -> None:
    reader = open_stream_reader({"path": url, "namespace": "users", "readChangeFeed": "true"}, CHANGES)
    try:
        start = reader.initialOffset()
        end = reader.latestOffset(start, reader.getDefaultReadLimit())
        with pytest.raises(GenerationSwapped, match="onGeneration"):
            reader.latestOffset(end, reader.getDefaultReadLimit())
    finally:
        reader.stop()


@pytest.mark.parametrize("way", ["difference", "snapshot"])
def test_a_directory_is_read_over_swaps_as_its_server_is(
    users: Namespace, location: Callable[[], str], way: str
) -> None:
    given = {"namespace": "users", "minPartitions": "8", "beforeImages": "true"}
    given |= {"path": location(), "onGeneration": way}
    reader = open_changes_reader(given, CHANGES)
    rows = [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]
    assert (state_of(rows), markers(rows)) == (dict(users.scan()), 2)
    found = open_changes_reader(given | {"onGeneration": "fail"}, CHANGES)
    with pytest.raises(GenerationSwapped):
        [batch for part in found.partitions() for batch in found.read(part)]
    with pytest.raises(InvalidOption, match="onGeneration is one of"):
        open_changes_reader(given | {"onGeneration": "ignore"}, CHANGES)


def publish_more(site: Site, users: Namespace) -> None:
    """A data set, with changes before and behind it."""
    users.put_many({b"00": b"5", b"20": b"5"})
    site.generations.publish("users", {b"%02d" % number: b"6" for number in range(6, 16)})
    users.delete(b"07")
    users.put(b"21", b"7", ttl=timedelta(days=1))


@pytest.mark.slow
def test_a_backup_holds_the_present_generation_and_its_changes_a_difference(
    spark: SparkSession, served: Served, users: Namespace, tmp_path: Path
) -> None:
    site, address = served.site, address_of(served.url)
    full = backup(address, "users", str(tmp_path), spark=spark)
    early = dict(users.scan())
    publish_more(site, users)
    later = backup(address, "users", str(tmp_path), incremental=True, spark=spark)
    publish_more(site, users)
    last = backup(address, "users", str(tmp_path), incremental=True, spark=spark)
    assert check_backup(str(tmp_path), spark=spark).findings == []
    for name, at, wanted in (
        ("early", full.version, early),
        ("later", later.version, dict(users.scan(at=later.version))),
        ("last", last.version, dict(users.scan())),
    ):
        restored = restore(str(tmp_path), address, name, at=at, spark=spark)
        assert restored.verified, restored.note
        assert dict(site.namespace(name).scan()) == wanted


@pytest.mark.slow
@pytest.mark.parametrize("form", ["parquet", "delta"])
@pytest.mark.parametrize("view", ["history", "current"])
def test_an_export_goes_on_over_swaps(
    spark: SparkSession, served: Served, users: Namespace, tmp_path: Path, form: Any, view: Any
) -> None:
    site, address = served.site, address_of(served.url)

    def export_users() -> dict[bytes, bytes]:
        site.host.versions.heartbeat()
        summary = export(address, "users", str(tmp_path / "lake"), format=form, view=view, spark=spark)
        assert summary.wrong == 0
        rows = pyarrow.table(read_export(str(tmp_path / "lake")).to_table()).to_pylist()
        if view == "current":
            return {row["key"]: row["value"] for row in rows}
        return state_of(rows)

    assert export_users() == dict(users.scan())
    publish_more(site, users)
    assert export_users() == dict(users.scan())
