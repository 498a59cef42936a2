"""Writing a DataFrame: what is stored, what stays when it is done again, and what is refused before it."""

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from multiprocessing import get_context
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from pyspark import TaskContext
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import BinaryType, IntegerType, LongType, StringType, StructField, StructType
from tests.links.support import Served
from tests.server.support import cut_everything, in_threads
from tests.spark.processes import SparkProcess
from tests.spark.support_stream import write_files
from tests.spark.support_write import Pairs, batches_of, write_in_process

from floodmark.codec.records import join_values, qualify_keys
from floodmark.columns import pairs
from floodmark.model.access import Role
from floodmark.model.change import Stamp
from floodmark.model.errors import (
    FloodmarkError,
    InvalidKey,
    InvalidOption,
    NamespaceNotFound,
    NotAllowed,
    SchemaMismatch,
)
from floodmark.model.partition import PutUnchangedStream, WriteStream
from floodmark.server import Server
from floodmark.site import Namespace, Site
from floodmark.site.connecting import connect
from floodmark.spark.runtime.failures import find_error
from floodmark.spark.source.writing import (
    KEEP_STAMPS,
    BatchSender,
    FrameWriter,
    TaskResult,
    cut_batch,
    open_stream_writer,
    open_writer,
    read_target,
    reverse,
    send_rows,
)

PAIRS = StructType([StructField("key", BinaryType()), StructField("value", BinaryType())])
FEED = StructType(
    [
        *PAIRS,
        StructField("_change_type", StringType()),
        StructField("_origin_site", IntegerType()),
        StructField("_origin_version", LongType()),
    ]
)


@pytest.fixture
def users(site: Site) -> Namespace:
    return site.create_namespace("users")


def make_writer(url: str, schema: StructType = PAIRS, **options: str) -> FrameWriter:
    return open_writer({"path": url, "namespace": "users", **options}, schema)


def contents(namespace: Namespace) -> dict[bytes, bytes]:
    return dict(namespace.scan())


# Tasks, without Spark


def test_the_last_row_of_a_key_counts_in_a_batch_and_over_batches(users: Namespace, url: str) -> None:
    first = [(b"a", b"1"), (b"b", b"1"), (b"a", b"2")]
    second = [(b"b", b"2"), (b"c", b"1"), (b"b", b"3")]
    written = make_writer(url).write(batches_of(first, second))
    assert contents(users) == {b"a": b"2", b"b": b"3", b"c": b"1"}
    assert written == TaskResult(records=4, stored=3)


def test_a_write_that_is_done_again_changes_nothing_and_leaves_later_writes_alone(
    users: Namespace, site: Site, url: str
) -> None:
    writer = make_writer(url)
    rows = [(b"a", b"1"), (b"b", b"1"), (b"c", b"1")]
    writer.write(batches_of(rows))
    users.put(b"a", b"somebody's")
    users.delete(b"b")
    before = site.resolved_version()
    assert writer.write(batches_of(rows)) == TaskResult(records=3, stored=0)
    assert contents(users) == {b"a": b"somebody's", b"c": b"1"}
    assert list(site.changes("users", since=before)) == []


def test_rows_overwrite_what_was_there_before_the_write_began(users: Namespace, url: str) -> None:
    users.put(b"a", b"old")
    users.delete(b"b")
    make_writer(url).write(batches_of([(b"a", b"new"), (b"b", b"new")]))
    assert contents(users) == {b"a": b"new", b"b": b"new"}


def test_a_task_without_rows_writes_nothing_and_asks_nobody() -> None:
    nobody = {"path": "grpc://127.0.0.1:1", "namespace": "users"}
    writer = FrameWriter(read_target(nobody, PAIRS), 1)
    empty = pyarrow.record_batch([pyarrow.array([], pyarrow.binary())] * 2, names=["key", "value"])
    assert writer.write(iter([empty, empty])) == TaskResult(stored=0)
    assert writer.write(iter([])) == TaskResult(stored=0)


class Killed(BaseException):
    """What a task that is killed dies of, for those who watch it."""


class DyingStream:
    """A stream of writes whose task is killed after some batches were acknowledged."""

    def __init__(self, stream: WriteStream, batches: int) -> None:
        self._stream = stream
        self._left = batches

    def send(self, rows: Mapping[bytes, bytes]) -> "Future[int]":
        if not self._left:
            raise Killed
        self._left -= 1
        answer = self._stream.send(rows)
        answer.result()
        return answer

    def close(self) -> None:
        self._stream.close()


@pytest.mark.parametrize("memory_bytes_max", [1, 1 << 20])
@pytest.mark.parametrize("acknowledged", range(6))
def test_a_task_that_is_killed_between_any_two_rows_and_run_again_leaves_the_last_rows(
    users: Namespace, site: Site, acknowledged: int, memory_bytes_max: int
) -> None:
    since = site.now()
    rows = [(b"a", b"1"), (b"b", b"1"), (b"a", b"2"), (b"a", b"3"), (b"b", b"2")]

    def attempt(batches_max: int) -> None:
        stream = DyingStream(site.host.write_stream(PutUnchangedStream(True, since)), batches_max)
        batches = reverse(encode_one_by_one(users, rows), memory_bytes_max=memory_bytes_max)
        send_rows(BatchSender(stream, in_order=True), batches)

    with suppress(Killed):
        attempt(acknowledged)
    assert contents(users).items() <= {b"a": b"3", b"b": b"2"}.items()
    users.put(b"a", b"somebody's")
    attempt(len(rows))
    assert contents(users) == {b"a": b"somebody's", b"b": b"2"}


def test_attempts_that_run_at_the_same_time_leave_the_last_rows(users: Namespace, url: str) -> None:
    writer = make_writer(url)
    batches = [[(b"%02d" % key, b"%03d" % number) for key in range(50)] for number in range(60)]
    written = in_threads(lambda _: writer.write(batches_of(*batches)), 3)
    assert sum(each.stored or 0 for each in written) == 50
    assert set(contents(users).values()) == {b"059"}


def encode_one_by_one(namespace: Namespace, rows: Pairs) -> Iterator[pyarrow.RecordBatch]:
    for key, value in rows:
        key_column = qualify_keys(namespace.id, pyarrow.array([key]))
        value_column = join_values(pyarrow.array([value]))
        yield pyarrow.RecordBatch.from_arrays([key_column, value_column], schema=pairs.PAIRS)


@pytest.mark.slow
def test_a_task_that_is_killed_with_9_while_it_writes_and_run_again_leaves_the_last_rows(
    users: Namespace, url: str
) -> None:
    writer, batches = make_writer(url), 2_000
    process = get_context("spawn").Process(target=write_in_process, args=(writer, batches))
    process.start()
    while process.is_alive() and not contents(users):
        process.join(0.01)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    last = b"%06d" % (batches - 1)
    assert set(contents(users).values()) == {last}
    users.put(b"000", b"somebody's")
    write_in_process(writer, batches)
    assert contents(users) == {b"%03d" % key: last for key in range(100)} | {b"000": b"somebody's"}


def test_changes_of_a_feed_keep_their_stamps_and_all_of_them_are_changes_here(
    users: Namespace, site: Site, url: str
) -> None:
    version = site.now()
    rows = pyarrow.record_batch(
        {
            "key": [b"a", b"b", b"a", b"b"],
            "value": [b"1", b"1", b"2", None],
            "_change_type": ["upsert", "upsert", "upsert", "delete"],
            "_origin_site": pyarrow.array([9, 9, 9, 9], pyarrow.int32()),
            "_origin_version": [version - 4, version - 3, version - 2, version - 1],
        }
    )
    writer = make_writer(url, FEED, **KEEP_STAMPS)
    assert writer.write(iter([rows])) == TaskResult(records=4)
    assert contents(users) == {b"a": b"2"}
    arrived = list(site.changes("users"))
    assert [change.stamp for change in arrived] == [Stamp(version - 4 + number, 9) for number in range(4)]
    users.put(b"b", b"later")
    assert writer.write(iter([rows])) == TaskResult(records=4)
    assert contents(users) == {b"a": b"2", b"b": b"later"}
    assert len(list(site.changes("users"))) == 5


def test_the_time_to_live_of_the_namespace_holds(site: Site, url: str) -> None:
    users = site.create_namespace("users", ttl=timedelta(hours=1))
    make_writer(url).write(batches_of([(b"a", b"1")]))
    record = users.record(b"a")
    assert record is not None
    assert record.expires_at is not None
    assert 3_500 < record.expires_at - datetime.now(UTC).timestamp() < 3_700


@pytest.mark.slow
def test_a_write_whose_connections_are_cut_goes_on(users: Namespace, server: Server, url: str) -> None:
    # What was on its way then has no answer.
    writer = make_writer(url, distinctKeys="true")

    def rows() -> Iterator[pyarrow.RecordBatch]:
        for number in range(40):
            if number % 10 == 5:
                cut_everything(server)
            yield from batches_of([(b"%02d-%03d" % (number, row), b"x" * 1_000) for row in range(1_000)])

    assert writer.write(rows()).records == 40_000
    assert sum(1 for _ in users.scan()) == 40_000


def test_batches_are_cut_by_their_bytes() -> None:
    rows = pyarrow.RecordBatch.from_arrays(
        [pyarrow.array([b"k"] * 6), pyarrow.array([b"x" * size for size in (9, 9, 50, 1, 1, 1)])],
        schema=pairs.PAIRS,
    )
    pieces = list(cut_batch(rows, 20))
    assert [piece.num_rows for piece in pieces] == [2, 1, 3]
    assert pyarrow.Table.from_batches(pieces).equals(pyarrow.Table.from_batches([rows]))
    assert list(cut_batch(rows.slice(0, 0), 20)) == []


# What is refused before a job


def refused(
    kind: type[FloodmarkError], match: str, options: dict[str, str], schema: StructType = PAIRS
) -> None:
    with pytest.raises(kind, match=match):
        open_writer(options, schema)
    with pytest.raises(kind, match=match):
        open_stream_writer(options, schema, False)


@pytest.mark.usefixtures("users")
def test_what_cannot_be_written_is_refused_on_the_driver(url: str, tmp_path: Path) -> None:
    options = {"path": url, "namespace": "users"}
    refused(NamespaceNotFound, "nobody", {**options, "namespace": "nobody"})
    refused(InvalidOption, "no namespace is named", {"path": url})
    refused(InvalidOption, "can be read, but not written", {**options, "path": str(tmp_path)})
    refused(InvalidOption, "put it into a file", {**options, "token": "secret"})
    refused(InvalidOption, "did you mean distinctKeys", {**options, "distinctKey": "true"})
    refused(InvalidOption, "valueFormat is one of", {**options, "valueFormat": "avro"})
    refused(SchemaMismatch, "no column 'value'", options, StructType([StructField("key", BinaryType())]))


@pytest.mark.usefixtures("users")
def test_a_stream_does_not_overwrite_and_the_error_says_what_does(url: str) -> None:
    with pytest.raises(InvalidOption, match=r'DataFrame with mode\("overwrite"\)'):
        open_stream_writer({"path": url, "namespace": "users"}, PAIRS, True)


def test_who_may_only_read_is_refused_on_the_driver(guarded: Served, token_file: Callable[..., Path]) -> None:
    for name in ("users", "others"):
        guarded.site.create_namespace(name)
    options = {"path": guarded.url, "namespace": "users"}
    refused(NotAllowed, "role read", {**options, "tokenFile": str(token_file(Role.READ, "users"))})
    for_users = str(token_file(Role.WRITE, "users"))
    refused(NotAllowed, "others", {**options, "namespace": "others", "tokenFile": for_users})
    writer = open_writer({**options, "tokenFile": for_users}, PAIRS)
    assert writer.write(batches_of([(b"a", b"1")])).stored == 1


def test_copies_under_the_stamps_of_others_need_the_role_replicate(
    guarded: Served, token_file: Callable[..., Path]
) -> None:
    guarded.site.create_namespace("users")
    row = {"key": [b"a"], "value": [b"1"], "_change_type": ["upsert"], "_origin_version": [1]}
    rows = pyarrow.record_batch({**row, "_origin_site": pyarrow.array([9], pyarrow.int32())})
    options = {"path": guarded.url, "namespace": "users", **KEEP_STAMPS}
    schema = StructType([FEED[name] for name in rows.schema.names])

    def copy(role: Role) -> TaskResult:
        writer = open_writer({**options, "tokenFile": str(token_file(role, "users"))}, schema)
        return writer.write(iter([rows]))

    with pytest.raises(NotAllowed, match="role replicate"):
        copy(Role.WRITE)
    assert copy(Role.REPLICATE) == TaskResult(records=1)


# With Spark


def test_a_frame_upserts_deletes_and_expires(users: Namespace, spark: SparkSession, url: str) -> None:
    users.put_many({b"a": b"old", b"b": b"old", b"c": b"old"})
    rows = [
        ("a", "new", "upsert", None),
        ("b", None, "delete", None),
        ("d", "brief", "insert", datetime(2100, 1, 1, tzinfo=UTC)),
        ("c", "not this", "update_preimage", None),
    ]
    frame = spark.createDataFrame(
        rows, "key string, value string, _change_type string, _expires_at timestamp"
    )
    frame.write.format("floodmark").mode("append").option("namespace", "users").save(url)
    assert contents(users) == {b"a": b"new", b"c": b"old", b"d": b"brief"}
    record = users.record(b"d")
    assert record is not None
    assert record.expires_at == 4_102_444_800


def test_a_frame_becomes_json_values(users: Namespace, spark: SparkSession, url: str) -> None:
    frame = spark.sql("SELECT 'ada' AS key, 'Ada' AS name, named_struct('born', 1815) AS life, null AS gone")
    frame = frame.withColumn("gone", frame.gone.cast("string"))
    writer = frame.write.format("floodmark").mode("append").option("namespace", "users")
    writer.option("valueFormat", "json").save(url)
    assert contents(users) == {b"ada": b'{"name":"Ada","life":{"born":1815}}'}


@pytest.mark.slow
def test_a_frame_and_a_stream_are_written_from_a_thread_that_has_not_made_the_session(
    users: Namespace, spark: SparkSession, url: str, tmp_path: Path
) -> None:
    frame = spark.createDataFrame([(b"a", b"1")], PAIRS)
    pyarrow.parquet.write_table(pyarrow.table({"key": [b"b"], "value": [b"2"]}), tmp_path / "b.parquet")
    writer = frame.write.mode("append").option("namespace", "users")
    with ThreadPoolExecutor(1) as pool:
        pool.submit(writer.save, url, format="floodmark").result()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(write_files, spark, url, tmp_path, tmp_path / "state").result()
    assert contents(users) == {b"a": b"1", b"b": b"2"}


def test_a_value_that_is_read_with_metadata_and_changed_is_refused_and_not_dropped(
    users: Namespace, spark: SparkSession, url: str
) -> None:
    users.put(b"a", b"old")
    frame = spark.read.format("floodmark").options(namespace="users", metadata="true").load(url)
    changed = frame.withColumn("value", F.lit(b"new"))

    def write(rows: DataFrame, **options: str) -> None:
        rows.write.format("floodmark").mode("append").options(namespace="users", **options).save(url)

    with pytest.raises(PySparkException) as caught:
        write(changed)
    error = find_error(caught.value)
    assert isinstance(error, SchemaMismatch)
    assert "Drop the columns _origin_site, _origin_version" in str(error)
    assert contents(users) == {b"a": b"old"}
    write(changed.drop("_origin_site", "_origin_version"))
    assert contents(users) == {b"a": b"new"}
    # A copy says that it is one.
    written = users.record(b"a")
    write(frame, stamps="keep")
    assert users.record(b"a") == written


@pytest.mark.usefixtures("users")
def test_a_stream_of_changes_is_copied_only_when_it_is_told_to_keep_stamps(url: str) -> None:
    options = {"path": url, "namespace": "users"}
    with pytest.raises(SchemaMismatch, match="carry the stamps"):
        open_stream_writer(options, FEED, False)
    assert open_stream_writer({**options, **KEEP_STAMPS}, FEED, False)
    with pytest.raises(SchemaMismatch, match="the rows have none"):
        open_stream_writer({**options, **KEEP_STAMPS}, PAIRS, False)
    with pytest.raises(InvalidOption, match="stamps is one of refuse, keep"):
        open_stream_writer({**options, "stamps": "drop"}, FEED, False)


@pytest.mark.usefixtures("users")
def test_errors_of_tasks_and_of_the_driver_are_ours(spark: SparkSession, url: str) -> None:
    def error_of(write: Callable[[], None]) -> FloodmarkError | None:
        with pytest.raises(PySparkException) as caught:
            write()
        return find_error(caught.value)

    frame = spark.createDataFrame([(b"a", b"1"), (b"", b"2")], "key binary, value binary")
    writer = frame.write.format("floodmark").option("namespace", "users")
    assert isinstance(error_of(lambda: writer.mode("append").save(url)), InvalidKey)
    assert isinstance(error_of(lambda: writer.mode("overwrite").save(url)), InvalidKey)
    other = frame.withColumnRenamed("value", "price").write.format("floodmark").option("namespace", "users")
    error = error_of(lambda: other.mode("append").save(url))
    assert isinstance(error, SchemaMismatch)
    assert "there is no column 'value'; the columns are: key, price" in str(error)


ROWS = 40_000


def die_in_the_middle(url: str) -> Callable[[Iterator[pyarrow.RecordBatch]], Iterator[pyarrow.RecordBatch]]:
    """A step before the write, whose first attempt is killed when the site has some of the rows.

    Before that, somebody else writes a key that was written already and one that was not.
    """

    def work(rows: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
        table = pyarrow.Table.from_batches(rows)
        yield from table.slice(0, ROWS // 2).to_batches()
        context = TaskContext.get()
        if context is not None and context.attemptNumber() == 0:
            with connect(url) as site:
                next(iter(site.changes("users", follow=True)))
                site.namespace("users").put_many({b"00000": b"somebody's", b"39999": b"somebody's"})
            os.kill(os.getpid(), signal.SIGKILL)
        yield from table.slice(ROWS // 2).to_batches()

    return work


def write_with_a_death(spark: SparkSession, url: str) -> None:
    # Rows go from one step to the next when there are so many of them.
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", 1_000)
    frame = spark.range(ROWS).repartition(1).sortWithinPartitions("id")
    pairs = frame.selectExpr("format_string('%05d', id) AS key", "string(id) AS value")
    dying = pairs.mapInArrow(die_in_the_middle(url), "key string, value string")
    writer = dying.write.format("floodmark").mode("append").option("namespace", "users")
    writer.option("distinctKeys", "true").save(url)


@pytest.mark.soak
def test_a_task_that_spark_runs_again_neither_loses_rows_nor_overwrites_later_writes(
    users: Namespace, local_cluster: SparkProcess, url: str
) -> None:
    local_cluster.run(write_with_a_death, url)
    expected = {b"%05d" % number: b"%d" % number for number in range(ROWS)}
    assert contents(users) == expected | {b"00000": b"somebody's", b"39999": b"somebody's"}
