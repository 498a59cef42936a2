"""Exports as Delta tables: one transaction a step, each of them once."""

from datetime import timedelta
from pathlib import Path
from threading import Event, Thread
from typing import Any

import deltalake
import msgspec
import pyarrow
import pytest
from pyspark.sql import SparkSession
from tests.links.support import Served
from tests.spark.support_backup import address_of, fill, writing
from tests.spark.support_export import (
    current_of,
    exported,
    exported_current,
    history_of,
    require_agreement,
    writing_pairs,
)
from tests.waiting import wait_until

from floodmark.accounting.checks import Checks
from floodmark.feed.sinks.parquet import SCHEMA
from floodmark.files.directory import directory_at
from floodmark.model.errors import InvalidArgument, InvalidVersion, LeaseHeld
from floodmark.site import Namespace, Site
from floodmark.spark.jobs import ExportSummary, common_cut, export
from floodmark.spark.jobs.exports.delta import DeltaTarget
from floodmark.spark.jobs.exports.state import ExportIdentity, ExportView


@pytest.fixture
def users(site: Site) -> Namespace:
    users = site.create_namespace("users")
    fill(users)
    return users


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "lake"


def export_users(served: Served, spark: SparkSession, target: Path, **options: Any) -> ExportSummary:
    return export(address_of(served.url), "users", str(target), spark=spark, **options)


def test_a_history_holds_every_change_once_and_its_log_says_how_far_it_is(
    served: Served, spark: SparkSession, users: Namespace, target: Path
) -> None:
    first = export_users(served, spark, target)
    fill(users, 50)
    with served.site.atomic() as batch:
        batch.put(users, b"00001", b"of a batch")
        batch.put(users, b"00002", b"of a batch")
    second = export_users(served, spark, target)
    assert second.since == first.through
    assert [row[-1] for row in exported(target) if row[-1] is not None] == [batch.version] * 2
    assert second.through is not None
    assert exported(target) == history_of(served.site, "users", second.through)
    table = deltalake.DeltaTable(target)
    assert pyarrow.schema(table.schema().to_arrow()).names == SCHEMA.names
    assert table.history(1)[0]["floodmark.through"] == str(second.through)
    # Readers skip files by these.
    actions = pyarrow.table(table.get_add_actions(flatten=True)).to_pylist()
    assert sum(action["num_records"] for action in actions) == first.rows + second.rows
    assert max(action["max._commit_version"] for action in actions) <= second.through


def test_a_step_that_was_committed_is_not_committed_again(tmp_path: Path) -> None:
    identity = ExportIdentity(
        id="x", site="oslo", site_id=1, namespace="users", namespace_id=1, view=ExportView.HISTORY, since=1
    )
    target = directory_at(str(tmp_path))
    one, other = DeltaTarget(target, identity), DeltaTarget(target, identity)
    one.advance(5, Checks())
    with pytest.raises(LeaseHeld, match="run the export again"):
        other.advance(5, Checks())
    assert DeltaTarget(target, identity).through == 5


def test_a_history_of_an_earlier_release_gets_the_column_of_batches(tmp_path: Path) -> None:
    identity = ExportIdentity(
        id="x", site="oslo", site_id=1, namespace="users", namespace_id=1, view=ExportView.HISTORY, since=1
    )
    schema = ExportView.HISTORY.schema
    earlier = pyarrow.schema([field for field in schema if field.name != "_batch"])
    earlier = pyarrow.schema([field.with_nullable(True) for field in earlier])
    configuration = {"floodmark.export": msgspec.json.encode(identity).decode()}
    deltalake.DeltaTable.create(tmp_path, earlier, configuration=configuration, raise_if_key_not_exists=False)
    row = {"key": b"ada", "_commit_version": 5}
    deltalake.write_deltalake(tmp_path, pyarrow.Table.from_pylist([row], schema=earlier), mode="append")
    DeltaTarget(directory_at(str(tmp_path)), identity)
    DeltaTarget(directory_at(str(tmp_path)), identity)
    found = deltalake.DeltaTable(tmp_path)
    assert {field.name for field in found.schema().fields} == set(schema.names)
    assert found.to_pyarrow_table().select(["key", "_batch"]).to_pylist() == [{"key": b"ada", "_batch": None}]
    assert found.version() == 2


@pytest.mark.slow
def test_a_merge_writes_only_the_files_again_in_which_something_changed(
    served: Served, spark: SparkSession, users: Namespace, target: Path
) -> None:
    for key in (b"00100", b"00200"):
        served.site.split("users", key)
    export_users(served, spark, target, view="current")
    before = set(deltalake.DeltaTable(target).file_uris())
    assert len(before) > 2
    users.put(b"00101", b"changed")
    users.delete(b"00102")
    users.put(b"00103a", b"inserted")
    summary = export_users(served, spark, target, view="current")
    assert summary.through is not None
    after = set(deltalake.DeltaTable(target).file_uris())
    assert len(before - after) == 1
    assert exported_current(target) == current_of(served.site, "users", summary.through)
    assert exported_current(target)[b"00103a"] == b"inserted"


@pytest.mark.slow
def test_a_current_view_follows_writes_that_go_on(
    served: Served, spark: SparkSession, users: Namespace, target: Path
) -> None:
    through = []
    with writing(users):
        for _ in range(3):
            summary = export_users(served, spark, target, view="current")
            assert summary.through is not None
            through.append(summary.through)
    for version in through:
        assert exported_current(target, version) == current_of(served.site, "users", version)


@pytest.mark.slow
def test_what_has_expired_leaves_the_view(
    served: Served, spark: SparkSession, users: Namespace, target: Path
) -> None:
    users.put(b"mortal", b"x", ttl=timedelta(seconds=2))
    users.put(b"durable", b"y", ttl=timedelta(days=2))
    export_users(served, spark, target, view="current")
    assert exported_current(target)[b"mortal"] == b"x"
    wait_until(lambda: users.get(b"mortal") is None, "it does not expire")
    users.put(b"other", b"z")
    export_users(served, spark, target, view="current")
    view = exported_current(target)
    assert b"mortal" not in view
    assert view[b"durable"] == b"y"


@pytest.mark.slow
def test_what_has_not_expired_stays_in_the_view_after_a_clock_was_set_back(
    set_back: Served, spark: SparkSession, target: Path
) -> None:
    users = set_back.site.namespace("users")
    users.put(b"before", b"x", ttl=timedelta(minutes=30))
    export_users(set_back, spark, target, view="current")
    users.put(b"after", b"y", ttl=timedelta(minutes=30))
    export_users(set_back, spark, target, view="current")
    assert exported_current(target) == {b"before": b"x", b"after": b"y"} == dict(users.scan())


@pytest.mark.soak
def test_exports_until_the_same_version_can_be_read_together(
    served: Served, spark: SparkSession, tmp_path: Path
) -> None:
    left, right = (served.site.create_namespace(name) for name in ("left", "right"))
    targets = {name: str(tmp_path / "lake" / name) for name in ("left", "right")}

    def export_view(name: str, until: int | None = None) -> ExportSummary:
        return export(address_of(served.url), name, targets[name], view="current", until=until, spark=spark)

    with writing_pairs(left, right):
        wait_until(lambda: right.get(b"000050") is not None, "nothing is written")
        export_view("left")
        export_view("right")
        with pytest.raises(InvalidVersion, match="until the same version"):
            common_cut(targets.values())
        until = served.site.now()
        for name in targets:
            export_view(name, until)
            export_view(name)
    assert common_cut(targets.values()) == until
    require_agreement(*(exported_current(Path(target), until) for target in targets.values()))


@pytest.mark.slow
def test_an_export_goes_on_until_it_is_stopped(
    served: Served, spark: SparkSession, users: Namespace, target: Path
) -> None:
    stop, summaries = Event(), []

    def run() -> None:
        summaries.append(export_users(served, spark, target, once=False, stop=stop))

    running = Thread(target=run)
    running.start()
    try:
        wait_until(lambda: _rows(target) > 0, "nothing is exported")
        before = _rows(target)
        users.put(b"late", b"x")
        wait_until(lambda: _rows(target) > before, "what came later is not exported")
    finally:
        stop.set()
        running.join()
    (summary,) = summaries
    assert summary.through is not None
    assert exported(target) == history_of(served.site, "users", summary.through)


def _rows(target: Path) -> int:
    return deltalake.DeltaTable(target).count() if (target / "_delta_log").exists() else 0


@pytest.mark.usefixtures("users")
def test_a_table_that_somebody_else_made_is_left_alone(
    served: Served, spark: SparkSession, target: Path
) -> None:
    deltalake.DeltaTable.create(target, SCHEMA)
    with pytest.raises(InvalidArgument, match="no export made"):
        export_users(served, spark, target)
