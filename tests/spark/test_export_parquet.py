"""Exports as Parquet directories: each change once, whatever happens on the way."""

import os
import re
import resource
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from pyspark.sql import SparkSession
from tests.links.support import Served
from tests.spark.support_backup import address_of, fill, writing
from tests.spark.support_export import (
    current_of,
    exported,
    exported_current,
    history_of,
    newest,
    require_agreement,
    writing_pairs,
)
from tests.spark.support_garbage import collect_old
from tests.waiting import wait_until

from floodmark.accounting.checks import Checks
from floodmark.feed.sinks.parquet import SCHEMA
from floodmark.files.directory import Directory, directory_at
from floodmark.model.change import Heartbeat
from floodmark.model.errors import (
    InvalidArgument,
    InvalidOption,
    InvalidVersion,
    LeaseHeld,
    NamespaceNotFound,
    StorageFull,
    VersionCollected,
)
from floodmark.model.version import Version
from floodmark.site import Namespace, Site
from floodmark.spark.jobs import common_cut, export, read_export
from floodmark.spark.jobs.exports.frames import ExportFile, FileWriter
from floodmark.spark.jobs.exports.parquet import ParquetTarget
from floodmark.spark.jobs.exports.state import ExportIdentity, ExportView, only_writer


@pytest.fixture
def users(site: Site) -> Namespace:
    users = site.create_namespace("users")
    fill(users)
    return users


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "lake"


def export_users(served: Served, spark: SparkSession, target: Path, **options: Any) -> Any:
    return export(address_of(served.url), "users", str(target), format="parquet", spark=spark, **options)


def wait_written(namespace: Namespace, key: bytes) -> None:
    wait_until(lambda: namespace.get(key) is not None, "nothing is written")


# With Spark


def test_a_history_holds_every_change_once_and_goes_on_where_it_was(
    served: Served, spark: SparkSession, users: Namespace, target: Path
) -> None:
    first = export_users(served, spark, target)
    assert exported(target) == history_of(served.site, "users", first.through)
    fill(users, 50)
    served.site.split("users", b"00100")
    second = export_users(served, spark, target)
    assert second.since == first.through
    assert exported(target) == history_of(served.site, "users", second.through)
    assert second.rows == len(exported(target)) - first.rows > 0
    idle = export_users(served, spark, target)
    assert (idle.rows, idle.files) == (0, 0)
    assert idle.through > second.through


@pytest.mark.usefixtures("users")
def test_spark_reads_a_history_as_one_table(served: Served, spark: SparkSession, target: Path) -> None:
    export_users(served, spark, target)
    table = spark.read.parquet(str(target))
    assert table.columns == SCHEMA.names
    assert table.count() == len(exported(target))


@pytest.mark.slow
def test_a_current_view_is_what_is_live_and_keeps_what_it_was_for_one_more_step(
    served: Served, spark: SparkSession, users: Namespace, target: Path
) -> None:
    through = []
    for step in range(3):
        users.put_many((b"%05d" % number, b"step %d" % step) for number in range(0, 300, 7))
        users.delete(b"%05d" % (step + 1))
        users.put(b"mortal", b"x", ttl=timedelta(days=step + 1))
        summary = export_users(served, spark, target, view="current")
        through.append(summary.through)
        assert exported_current(target) == current_of(served.site, "users", summary.through)
    assert exported_current(target, through[1]) == current_of(served.site, "users", through[1])
    with pytest.raises(InvalidVersion, match="was never there"):
        read_export(str(target), through[0])
    assert len(list(target.glob("rows-*"))) == 2
    assert spark.read.parquet(str(target / "current")).count() == len(exported(target))


def test_a_current_view_of_nothing_is_an_empty_table(
    served: Served, spark: SparkSession, users: Namespace, target: Path
) -> None:
    users.delete_range()
    export_users(served, spark, target, view="current")
    assert spark.read.parquet(str(target / "current")).count() == 0


def test_writes_go_on_while_a_history_is_exported_and_none_is_missed(
    served: Served, spark: SparkSession, users: Namespace, target: Path
) -> None:
    with writing(users):
        for _ in range(3):
            summary = export_users(served, spark, target)
            assert exported(target) == history_of(served.site, "users", summary.through)


def test_an_export_ends_where_it_is_told_to(
    served: Served, spark: SparkSession, users: Namespace, target: Path
) -> None:
    until = served.site.now()
    fill(users, 40)
    assert export_users(served, spark, target, until=until).through == until
    assert exported(target) == history_of(served.site, "users", until)


def test_exports_of_two_namespaces_are_cut_at_a_version_that_both_hold(
    served: Served, spark: SparkSession, tmp_path: Path
) -> None:
    left, right = (served.site.create_namespace(name) for name in ("left", "right"))
    targets = [str(tmp_path / "lake" / name) for name in ("left", "right")]
    source = address_of(served.url)
    with writing_pairs(left, right):
        for name, target, number in zip(("left", "right"), targets, (100, 200), strict=True):
            wait_written(right, b"%06d" % number)
            served.site.heartbeat()
            export(source, name, target, format="parquet", at_heartbeats=True, spark=spark)
    beats = [item.through for item in served.site.changes(heartbeats=True) if isinstance(item, Heartbeat)]
    cut = common_cut(targets)
    assert cut in beats
    views = [newest(exported(Path(target), cut)) for target in targets]
    require_agreement(*views)
    uncut = [newest(exported(Path(target))) for target in targets]
    assert len(uncut[1]) > len(uncut[0]), "both ended at the same point by chance: nothing was shown"


def test_what_is_gone_from_the_site_takes_a_new_target(
    served: Served, spark: SparkSession, users: Namespace, target: Path
) -> None:
    export_users(served, spark, target)
    fill(users)
    (held,) = served.site.safe_points()
    assert held.name.startswith("spark/export-")
    # As if it had been away for longer than its safe point lives.
    served.site.host.retention.release_safe_point(held.name)
    served.site.update_namespace("users", retention=timedelta(0))
    collect_old(served.site)
    with pytest.raises(VersionCollected, match="Export to a new target"):
        export_users(served, spark, target)


def test_a_new_history_has_every_live_key_though_its_changes_are_gone(
    served: Served, spark: SparkSession, users: Namespace, target: Path
) -> None:
    served.site.update_namespace("users", retention=timedelta(0))
    collect_old(served.site)
    first = export_users(served, spark, target)
    rows = exported(target)
    assert {(row[0], row[1]) for row in rows} == set(users.scan())
    assert {row[-2] for row in rows} == {True}
    assert first.rows == len(rows)
    users.put(b"later", b"x")
    export_users(served, spark, target)
    (later,) = [row for row in exported(target) if not row[-2]]
    assert later[:3] == (b"later", b"x", "upsert")


@pytest.mark.usefixtures("users")
def test_a_target_takes_nothing_but_what_it_was_made_for(
    served: Served, spark: SparkSession, target: Path, tmp_path: Path
) -> None:
    export_users(served, spark, target)
    with pytest.raises(InvalidArgument, match="holds the history"):
        export_users(served, spark, target, view="current")
    served.site.drop_namespace("users")
    with pytest.raises(NamespaceNotFound):
        export_users(served, spark, target)
    served.site.create_namespace("users")
    with pytest.raises(InvalidArgument, match="dropped since"):
        export_users(served, spark, target)
    with pytest.raises(InvalidArgument, match="holds other files"):
        export_users(served, spark, tmp_path / "oslo")
    with pytest.raises(InvalidOption, match="mount the storage"):
        export(address_of(served.url), "users", "s3://bucket/lake", spark=spark)
    with pytest.raises(InvalidOption, match="can be read, but not exported from"):
        export(address_of(str(served.directory)), "users", str(target), spark=spark)


@pytest.mark.usefixtures("users")
def test_two_exports_to_one_target_do_not_run_at_once(
    served: Served, spark: SparkSession, target: Path
) -> None:
    with only_writer(directory_at(str(target))), pytest.raises(LeaseHeld, match="another process exports"):
        export_users(served, spark, target)


# Without Spark: every step of a commit, and a crash before each of them


def test_a_full_disk_is_named_and_the_file_that_was_begun_is_gone(tmp_path: Path) -> None:
    batch = pyarrow.RecordBatch.from_pylist(
        [make_row(ExportView.HISTORY, version, os.urandom(1000)) for version in range(1, 500)],
        schema=ExportView.HISTORY.schema,
    )
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(StorageFull, match=re.escape(str(tmp_path))):
            list(FileWriter(str(tmp_path), ExportView.HISTORY.schema, "step-")([batch]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []
    (report,) = FileWriter(str(tmp_path), ExportView.HISTORY.schema, "step-")([batch])
    (file,) = tmp_path.iterdir()
    size = file.stat().st_size
    assert report.to_pylist() == [
        {"name": file.name, "rows": 499, "bytes": size, "first": 1, "last": 499, "counted": None}
    ]


class _Crash(BaseException):
    """The machine stops here."""


class Crashing:
    """Counts the steps on disk, and stops before one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, survive: int) -> None:
        self.left = survive
        for kind, name in ((Directory, "rename"), (Directory, "point"), (Directory, "publish")):
            monkeypatch.setattr(kind, name, self._counted(getattr(kind, name)))

    def _counted(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any) -> Any:
            if not self.left:
                raise _Crash
            self.left -= 1
            return step(*arguments)

        return counted


def identify(view: ExportView) -> ExportIdentity:
    return ExportIdentity(id="x", site="oslo", site_id=1, namespace="users", namespace_id=1, view=view)


def make_row(view: ExportView, version: Version, value: bytes = b"") -> dict[str, object]:
    row = {
        "key": b"%d" % version,
        "value": value,
        "_change_type": "upsert",
        "_commit_version": version,
        "_commit_timestamp": version,
        "_origin_site": 1,
        "_origin_version": version,
        "_site_partition": 1,
        "_expires_at": None,
        "_snapshot": False,
        "_batch": None,
    }
    return {name: row[name] for name in view.schema.names}


def write_rows(place: Path, view: ExportView, versions: range) -> list[ExportFile]:
    """Files as tasks write them, a row in each."""
    files = []
    for version in versions:
        table = pyarrow.Table.from_pylist([make_row(view, version)], schema=view.schema)
        pyarrow.parquet.write_table(table, place / f"{version}.parquet")
        files.append(ExportFile(name=f"{version}.parquet", rows=1, bytes=1, first=version, last=version))
    return files


@pytest.mark.parametrize("view", ExportView)
def test_a_crash_before_any_step_of_a_commit_loses_and_doubles_nothing(
    view: ExportView, tmp_path: Path
) -> None:
    survived, is_through = 0, False
    while not is_through:
        directory = tmp_path / str(survived)
        directory.mkdir()
        ParquetTarget(directory_at(str(directory)), identify(view)).advance(1, Checks())
        with pytest.MonkeyPatch.context() as patch:
            crashing = Crashing(patch, survived)
            with suppress(_Crash):
                commit_versions(directory, view, range(2, 5))
            is_through = crashing.left > 0
        target = ParquetTarget(directory_at(str(directory)), identify(view))
        assert target.through in (1, 4)
        # What was checked moves with the rows.
        assert target.checks == Checks(checked=0 if target.through == 1 else 4)
        if target.through == 1:
            commit_versions(directory, view, range(2, 5))
        assert [row[view.schema.names.index("_commit_version")] for row in exported(directory)] == [2, 3, 4]
        survived += 1
    assert survived > 3


def commit_versions(directory: Path, view: ExportView, versions: range) -> None:
    target = ParquetTarget(directory_at(str(directory)), identify(view))
    place = target.prepare()
    added = write_rows(place.path, view, versions)
    target.commit(target.through or 0, versions[-1], added, [], Checks(checked=versions[-1]))
