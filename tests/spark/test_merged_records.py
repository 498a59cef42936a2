"""Records of fields and counters in Spark: read as users see them, written by field, backed up whole."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import (
    BinaryType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
)
from tests.links.support import Served, ServeSite
from tests.spark.support_backup import address_of
from tests.spark.support_read import read_pairs, read_rows
from tests.spark.support_write import batches_of

from floodmark.codec.ordered import encode_namespace
from floodmark.codec.states import State, decode_state, encode_state
from floodmark.codec.values import decode_value
from floodmark.merge.fields import update_fields
from floodmark.merge.states import stamp_state
from floodmark.model.change import Stamp
from floodmark.model.errors import InvalidValue, SchemaMismatch, WrongPolicy
from floodmark.model.ranges import KeyRange
from floodmark.model.version import Version
from floodmark.site import CounterNamespace, Namespace, Site
from floodmark.spark.jobs.backups.backup import backup
from floodmark.spark.jobs.backups.parts import check_backup
from floodmark.spark.jobs.backups.restore import restore
from floodmark.spark.source.schemas import PAIRS, RECORDS, STATES
from floodmark.spark.source.writing import KEEP_STAMPS, FrameWriter, TaskResult, open_writer

PAIR_COLUMNS = StructType([StructField("key", BinaryType()), StructField("value", BinaryType())])
FEED_COLUMNS = StructType(
    [*PAIR_COLUMNS, StructField("_origin_site", IntegerType()), StructField("_origin_version", LongType())]
)
PERSON_COLUMNS = StructType(
    [
        StructField("key", BinaryType()),
        StructField("city", StringType()),
        StructField("born", LongType()),
        StructField("_change_type", StringType()),
    ]
)


@pytest.fixture
def people(site: Site) -> Namespace:
    return site.create_namespace("users", merge="fields")


@pytest.fixture
def visits(site: Site) -> CounterNamespace:
    return site.create_namespace("visits", merge="counter")


def make_writer(
    url: str, schema: StructType = PAIR_COLUMNS, namespace: str = "users", **options: str
) -> FrameWriter:
    return open_writer({"path": url, "namespace": namespace, **options}, schema)


def persons(*rows: tuple[bytes, str | None, int | None, str]) -> Iterator[pyarrow.RecordBatch]:
    keys, cities, births, kinds = zip(*rows, strict=True)
    yield pyarrow.record_batch(
        [
            pyarrow.array(keys, pyarrow.binary()),
            pyarrow.array(cities, pyarrow.string()),
            pyarrow.array(births, pyarrow.int64()),
            pyarrow.array(kinds, pyarrow.string()),
        ],
        names=PERSON_COLUMNS.names,
    )


# Reading


def test_snapshot_has_what_users_see(people: Namespace, visits: CounterNamespace, url: str) -> None:
    people.put(b"ada", {"name": "Ada", "city": "Paris"})
    people.update(b"ada", {"city": "London"})
    people.put(b"bob", {"name": "Bob"})
    people.delete(b"bob")
    visits.add(b"home", 40)
    visits.add(b"home", 2)
    assert read_pairs(url) == {b"ada": b'{"city":"London","name":"Ada"}'}
    assert read_pairs(url, namespace="visits") == {b"home": b"42"}
    columns = StructType([StructField("key", StringType()), StructField("city", StringType())])
    assert read_rows(url, columns, valueFormat="json") == [{"key": "ada", "city": "London"}]


def test_changes_have_whole_records(people: Namespace, url: str) -> None:
    people.put(b"ada", {"name": "Ada"})
    people.update(b"ada", {"city": "London"})
    rows = read_rows(url, readChangeFeed="true", beforeImages="true", startingVersion="earliest")
    assert [(row["_change_type"], row["value"]) for row in rows] == [
        ("insert", b'{"name":"Ada"}'),
        ("update_preimage", b'{"name":"Ada"}'),
        ("update_postimage", b'{"city":"London","name":"Ada"}'),
    ]


def test_field_that_has_expired_is_not_read(site: Site, people: Namespace, url: str) -> None:
    """A field expired long ago where it comes from."""
    people.put(b"ada", {"name": "Ada"})
    version = site.now()
    state = decode_state(stamp_state(update_fields(b'{"session":"x"}', 1), None, version, 9))
    key = encode_namespace(people.id) + b"ada"
    site.host.router.apply({key: encode_state(state, Stamp(version, 9))}, durable=True)
    people.update(b"ada", {"city": "London"})
    assert read_pairs(url) == {b"ada": b'{"city":"London","name":"Ada"}'}
    rows = read_rows(url, readChangeFeed="true", beforeImages="true", startingVersion="earliest")
    assert [row["value"] for row in rows if row["_change_type"] != "update_preimage"][-1] == (
        b'{"city":"London","name":"Ada"}'
    )
    assert [row["value"] for row in rows if row["_change_type"] == "update_preimage"] == [
        b'{"name":"Ada"}'
    ] * 2
    (whole,) = read_rows(url, STATES, rows="all")
    assert whole["value"] == b'{"city":"London","name":"Ada","session":"x"}'
    assert whole["_stamps"]


def test_stamps_are_for_those_who_ask(people: Namespace, url: str) -> None:
    people.put(b"ada", {"name": "Ada"})
    (row,) = read_rows(url, RECORDS, rows="all")
    assert "_stamps" not in row
    with pytest.raises(SchemaMismatch):
        read_rows(url, StructType([*PAIRS, StructField("_stamps", BinaryType())]))


# Writing


def test_row_updates_the_fields_that_it_has(people: Namespace, url: str) -> None:
    people.put(b"ada", {"name": "Ada", "city": "Paris", "born": 1815})
    people.put(b"eve", {"name": "Eve"})
    writer = make_writer(url, PERSON_COLUMNS, valueFormat="json")
    written = writer.write(
        persons(
            (b"ada", "London", None, "upsert"), (b"bob", None, 1820, "upsert"), (b"eve", "x", 1, "delete")
        )
    )
    assert dict(people.scan()) == {b"ada": b'{"city":"London","name":"Ada"}', b"bob": b'{"born":1820}'}
    assert written == TaskResult(records=3, stored=3)


def test_rows_of_one_key_are_joined_by_field(people: Namespace, url: str) -> None:
    first = [(b"ada", b'{"a":1,"b":1}'), (b"bob", b'{"a":1}'), (b"ada", b'{"b":2,"c":null}')]
    second = [(b"bob", b'{"b":2}'), (b"ada", b'{"c":3}')]
    people.put(b"ada", {"c": 0, "d": 0})
    make_writer(url).write(batches_of(first, second))
    assert dict(people.scan()) == {b"ada": b'{"a":1,"b":2,"c":3,"d":0}', b"bob": b'{"a":1,"b":2}'}


def test_write_that_is_done_again_leaves_later_fields_alone(people: Namespace, url: str) -> None:
    writer, rows = make_writer(url), [(b"ada", b'{"a":1,"b":1}'), (b"bob", b'{"a":1}')]
    writer.write(batches_of(rows))
    people.update(b"ada", {"a": 9})
    people.delete(b"bob")
    assert writer.write(batches_of(rows)) == TaskResult(records=2, stored=0)
    assert dict(people.scan()) == {b"ada": b'{"a":9,"b":1}'}


def test_value_must_be_a_json_object(people: Namespace, url: str) -> None:
    with pytest.raises(InvalidValue, match="ada"):
        make_writer(url).write(batches_of([(b"ada", b"[]")]))
    assert list(people.scan()) == []


@pytest.mark.usefixtures("people", "visits")
def test_rows_that_a_policy_has_no_use_for_are_refused_before_a_job_begins(site: Site, url: str) -> None:
    site.create_namespace("plain")
    refused = [
        (PAIR_COLUMNS, "visits", "counts twice"),
        (FEED_COLUMNS, "visits", "counts twice"),
        (FEED_COLUMNS, "users", "floodmark replicate"),
        (STATES, "plain", "_stamps"),
    ]
    for columns, namespace, said in refused:
        with pytest.raises(WrongPolicy, match=said):
            make_writer(url, columns, namespace, **({} if columns is PAIR_COLUMNS else KEEP_STAMPS))
    with pytest.raises(SchemaMismatch):
        make_writer(url, StructType([*PAIR_COLUMNS, StructField("_stamps", BinaryType())]))


# Copies


def states(site: Site, namespace: str, at: Version | None = None) -> dict[bytes, State]:
    """What a namespace holds, dead or alive."""
    row = site.host.namespaces.find_namespace(namespace)
    keys = KeyRange(encode_namespace(row.id), encode_namespace(row.id + 1))
    version = site.host.versions.read_version() if at is None else at
    found: dict[bytes, State] = {}
    for batch in site.host.router.scan_records(keys, version, dead=True):
        for key, value in zip(batch["key"].to_pylist(), batch["value"].to_pylist(), strict=True):
            found[key] = decode_state(value)
            assert decode_value(value).stamps
    return found


def fill(people: Namespace, visits: CounterNamespace, number: int) -> None:
    people.put_many({b"%03d" % key: {"number": key, "round": number} for key in range(50)})
    people.update(b"001", {"city": f"round {number}", "number": None})
    people.update(b"002", {"session": "x"}, ttl=timedelta(days=1))
    people.update(b"003", {"gone": "x"}, ttl=0.001)
    people.delete(b"004")
    people.delete_field(b"005", "number", "round")
    visits.add(b"home", 7)
    visits.add(b"away", number)
    visits.delete(b"away")


@pytest.mark.slow
def test_merged_records_come_back_whole_from_a_backup(
    spark: SparkSession,
    serve_site: ServeSite,
    served: Served,
    people: Namespace,
    visits: CounterNamespace,
    tmp_path: Path,
) -> None:
    rome, source = serve_site("rome"), address_of(served.url)
    versions: dict[str, Version] = {}
    for number, incremental in enumerate((False, True)):
        fill(people, visits, number)
        for name in ("users", "visits"):
            summary = backup(source, name, str(tmp_path / name), incremental=incremental, spark=spark)
            versions[name] = summary.version
    for name in ("users", "visits"):
        assert check_backup(str(tmp_path / name), spark=spark).findings == []
        restored = restore(str(tmp_path / name), address_of(rome.url), name, spark=spark)
        assert restored.verified
        assert states(rome.site, name) == states(served.site, name, versions[name])
        assert dict(rome.site.namespace(name).scan()) == dict(served.site.namespace(name).scan())
        assert rome.site.namespace(name).settings == served.site.namespace(name).settings
    rome.site.namespace("visits").add(b"home", 1)
    assert rome.site.namespace("visits").get(b"home") == 15


def test_stream_of_states_is_idempotent(site: Site, people: Namespace, url: str) -> None:
    people.put(b"ada", {"name": "Ada"})
    people.update(b"ada", {"city": "London"})
    people.put(b"bob", {"name": "Bob"})
    people.delete(b"bob")
    copy = site.create_namespace("copy", merge="fields")
    rows: list[dict[str, Any]] = read_rows(url, STATES, rows="all")
    batch = pyarrow.RecordBatch.from_pylist(rows)
    for _ in range(2):
        make_writer(url, STATES, "copy", **KEEP_STAMPS).write(iter([batch]))
    assert dict(copy.scan()) == dict(people.scan())
    assert states(site, "copy") == states(site, "users")
    assert len(list(site.changes("copy"))) == 2
