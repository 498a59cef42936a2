"""Writing streams: each epoch counts once, however often it is run, and later writes stay."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pyarrow.parquet
import pytest
from pyspark import TaskContext
from pyspark.sql import SparkSession
from pyspark.sql.types import BinaryType, StructField, StructType
from tests.cli.support import ROOT
from tests.links.support import ServeSite
from tests.spark import support_stream
from tests.spark.processes import SparkProcess
from tests.spark.support_stream import copy_changes, write_files
from tests.spark.support_write import Pairs, batches_of
from tests.waiting import HANG_SECONDS

from floodmark.model.errors import InvalidConfiguration
from floodmark.site import Namespace, Site
from floodmark.spark.source.writing import StreamWriter, TaskResult, open_stream_writer

PAIRS = StructType([StructField("key", BinaryType()), StructField("value", BinaryType())])


@pytest.fixture
def users(site: Site) -> Namespace:
    return site.create_namespace("users")


@pytest.fixture
def run_epoch(url: str) -> Iterator[Callable[..., TaskResult]]:
    """Runs a task of a query's micro-batch, as Spark would."""

    def run(epoch: int, *batches: Pairs, query: str = "q") -> TaskResult:
        context = TaskContext._getOrCreate()
        context._localProperties = {"sql.streaming.queryId": query, "streaming.sql.batchId": str(epoch)}
        return make_writer(url).write(batches_of(*batches))

    yield run
    TaskContext._setTaskContext(None)


def make_writer(url: str) -> StreamWriter:
    return open_stream_writer({"path": url, "namespace": "users", "checkpointLocation": "c"}, PAIRS, False)


def contents(namespace: Namespace) -> dict[bytes, bytes]:
    return dict(namespace.scan())


# Tasks, without Spark


def test_an_epoch_that_is_run_again_changes_nothing_and_the_next_one_overwrites(
    users: Namespace, site: Site, run_epoch: Callable[..., TaskResult]
) -> None:
    assert run_epoch(0, [(b"a", b"1"), (b"b", b"1")]).stored == 2
    users.put(b"a", b"somebody's")
    before = site.resolved_version()
    assert run_epoch(0, [(b"a", b"1"), (b"b", b"1")]).stored == 0
    assert list(site.changes("users", since=before)) == []
    assert contents(users) == {b"a": b"somebody's", b"b": b"1"}
    assert run_epoch(1, [(b"a", b"2"), (b"b", b"2")]).stored == 2
    assert contents(users) == {b"a": b"2", b"b": b"2"}


def test_an_epoch_is_drawn_for_each_query(users: Namespace, run_epoch: Callable[..., TaskResult]) -> None:
    assert run_epoch(0, [(b"a", b"1")]).stored == 1
    assert run_epoch(0, [(b"a", b"2")], query="another").stored == 1
    assert run_epoch(0, [(b"a", b"3")]).stored == 0
    assert contents(users) == {b"a": b"2"}


@pytest.mark.usefixtures("users")
def test_a_task_that_does_not_know_its_query_is_refused(url: str) -> None:
    with pytest.raises(InvalidConfiguration, match="which query and micro-batch"):
        make_writer(url).write(batches_of([(b"a", b"1")]))


# With Spark


def test_a_micro_batch_that_was_written_but_not_noted_is_written_again_without_effect(
    users: Namespace, site: Site, spark: SparkSession, url: str, tmp_path: Path
) -> None:
    files, checkpoint = tmp_path / "files", tmp_path / "checkpoint"
    put_file(files / "1.parquet", [(b"a", b"1"), (b"b", b"1")])
    write_files(spark, url, files, checkpoint)
    put_file(files / "2.parquet", [(b"a", b"2"), (b"c", b"2")])
    write_files(spark, url, files, checkpoint)
    assert contents(users) == {b"a": b"2", b"b": b"1", b"c": b"2"}
    users.put(b"c", b"somebody's")
    before = site.resolved_version()
    # As after a crash between the sink and the note that the batch is done.
    for note in (checkpoint / "commits").glob("*1*"):
        note.unlink()
    put_file(files / "3.parquet", [(b"d", b"3")])
    write_files(spark, url, files, checkpoint)
    assert contents(users) == {b"a": b"2", b"b": b"1", b"c": b"somebody's", b"d": b"3"}
    assert [change.key for change in site.changes("users", since=before)] == [b"d"]


@pytest.mark.slow
def test_changes_that_spark_copies_are_the_same_at_the_other_site(
    serve_site: ServeSite, spark: SparkSession, tmp_path: Path
) -> None:
    check_copy(
        serve_site, lambda source, target: copy_changes(spark, source, target, tmp_path / "checkpoint")
    )


@pytest.mark.soak
def test_changes_are_copied_over_spark_connect(
    serve_site: ServeSite, connect: SparkProcess, tmp_path: Path
) -> None:
    check_copy(
        serve_site, lambda source, target: connect.run(copy_changes, source, target, tmp_path / "checkpoint")
    )


@pytest.mark.slow
def test_rows_from_elsewhere_are_written_over_spark_connect(
    users: Namespace, connect: SparkProcess, url: str, tmp_path: Path
) -> None:
    put_file(tmp_path / "files" / "1.parquet", [(b"a", b"1")])
    connect.run(write_files, url, tmp_path / "files", tmp_path / "checkpoint")
    assert contents(users) == {b"a": b"1"}


def check_copy(serve_site: ServeSite, copy: Callable[[str, str], None]) -> None:
    oslo, rome = serve_site("oslo"), serve_site("rome")
    source, target = oslo.site.create_namespace("users"), rome.site.create_namespace("users")
    for number in range(10):
        source.put_many({b"%d" % key: b"%d" % number for key in range(5)})
    source.delete(b"0")
    # Within a millisecond, two sites do not know which of them writes later.
    rome.site.host.versions.observe(oslo.site.now())
    target.put(b"1", b"later, at the other site")
    copy(oslo.url, rome.url)
    assert contents(target) == contents(source) | {b"1": b"later, at the other site"}
    sent = {(change.key, change.value, change.stamp) for change in oslo.site.changes("users")}
    came = {(change.key, change.value, change.stamp) for change in rome.site.changes("users")}
    assert {change for change in sent if change[0] != b"1"} <= came
    # Spark delivers again what it is not sure of.
    before = rome.site.resolved_version()
    source.put(b"9", b"new")
    copy(oslo.url, rome.url)
    assert [change.key for change in rome.site.changes("users", since=before)] == [b"9"]


@pytest.mark.soak
def test_a_driver_that_is_killed_with_9_goes_on_from_its_checkpoint(
    serve_site: ServeSite, tmp_path: Path
) -> None:
    oslo, rome = serve_site("oslo"), serve_site("rome")
    source, target = oslo.site.create_namespace("users"), rome.site.create_namespace("users")
    for number in range(200):
        source.put_many({b"%02d" % key: b"%d" % number for key in range(10)})
    checkpoint = str(tmp_path / "checkpoint")
    command = [sys.executable, "-m", support_stream.__name__, oslo.url, rome.url, checkpoint]
    driver = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    while driver.poll() is None and not contents(target):
        with_patience(driver)
    # Python, its Java and their workers are one group of processes.
    os.killpg(driver.pid, signal.SIGKILL)
    assert driver.wait(HANG_SECONDS) == -signal.SIGKILL
    assert b"199" not in contents(target).values()
    source.put(b"new", b"new")
    assert subprocess.run(command, cwd=ROOT, timeout=HANG_SECONDS, check=False).returncode == 0
    assert contents(target) == contents(source)
    came = [(change.key, change.stamp) for change in rome.site.changes("users")]
    assert len(came) == len(set(came)) == 2_001


def with_patience(process: "subprocess.Popen[bytes]") -> None:
    """Let a process go on for a moment."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(0.05)


def put_file(path: Path, pairs: Pairs) -> None:
    path.parent.mkdir(exist_ok=True)
    (batch,) = batches_of(pairs)
    pyarrow.parquet.write_table(pyarrow.Table.from_batches([batch]), path)
