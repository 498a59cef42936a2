"""kill -9 in the middle of an export, a replication or a feed: the next run ends as if nothing had been."""

from pathlib import Path
from typing import Any

import pyarrow.dataset
import pytest
from pyspark.sql import SparkSession
from tests.links.support import Served, ServeSite
from tests.spark.support_backup import address_of, contents, fill, writing
from tests.spark.support_export import current_of, exported, exported_current, history_of
from tests.spark.support_jobs_kill import Arguments, Point, run_job
from tests.waiting import wait_until

from floodmark.feed.named.feeds import SinkOptions
from floodmark.model.errors import LeaseHeld
from floodmark.site import Namespace, Site
from floodmark.spark.jobs import export, replicate, run_feed

KEYS = 4_000


@pytest.fixture
def users(site: Site) -> Namespace:
    """Records in several partitions, so that Spark has several tasks."""
    users = site.create_namespace("users")
    fill(users, KEYS)
    for number in range(0, KEYS, KEYS // 4):
        site.split("users", b"%05d" % (number + 1))
    return users


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "lake"


@pytest.mark.parametrize(
    ("format", "points"),
    [
        pytest.param("parquet", ["renaming"], marks=pytest.mark.slow),
        pytest.param("parquet", ["writing", "renaming"], marks=pytest.mark.soak),
        pytest.param("delta", ["written", "committed"], marks=pytest.mark.soak),
    ],
)
def test_a_history_that_is_killed_holds_every_change_once(
    served: Served, spark: SparkSession, users: Namespace, target: Path, format: Any, points: list[Point]
) -> None:
    with writing(users, KEYS):
        for point in points:
            outcome = run_job(
                Arguments(job="export", url=served.url, target=str(target), point=point, format=format)
            )
            assert outcome.killed, outcome.said
        summary = export(address_of(served.url), "users", str(target), format=format, spark=spark)
    assert summary.through is not None
    assert exported(target) == history_of(served.site, "users", summary.through)
    # One safe point for all of the runs, and nothing left over of those that were killed.
    assert len(served.site.safe_points()) == 1
    assert not list(target.glob("_new-*"))
    files = pyarrow.dataset.dataset(exported_files(target), format="parquet")
    assert files.count_rows() == len(exported(target))


def exported_files(target: Path) -> list[str]:
    """All files of rows in a directory, whether or not somebody says that they count."""
    return [str(file) for file in target.rglob("*.parquet") if "_delta_log" not in file.parts]


@pytest.mark.soak
@pytest.mark.parametrize(("format", "point"), [("parquet", "written"), ("delta", "committed")])
def test_a_current_view_that_is_killed_in_a_merge_is_what_is_live_in_the_end(
    served: Served, spark: SparkSession, users: Namespace, target: Path, format: Any, point: Point
) -> None:
    source = address_of(served.url)
    export(source, "users", str(target), spark=spark, format=format, view="current")
    with writing(users, KEYS):
        arguments = Arguments(
            job="export", url=served.url, target=str(target), point=point, format=format, view="current"
        )
        outcome = run_job(arguments)
        assert outcome.killed, outcome.said
        summary = export(source, "users", str(target), spark=spark, format=format, view="current")
    assert summary.through is not None
    assert exported_current(target) == current_of(served.site, "users", summary.through)


@pytest.mark.soak
def test_a_replication_that_is_killed_loses_nothing(
    served: Served, serve_site: ServeSite, spark: SparkSession, users: Namespace
) -> None:
    bergen = serve_site("bergen")
    arguments = Arguments(job="replicate", url=served.url, target=bergen.url, point="writing")
    with writing(users, KEYS):
        outcome = run_job(arguments)
        assert outcome.killed, outcome.said
    summary = replicate(address_of(served.url), address_of(bergen.url), ["users"], once=True, spark=spark)
    assert contents(bergen.site, "users") == contents(served.site, "users")
    assert summary.wrong == 0


@pytest.mark.soak
@pytest.mark.usefixtures("users")
def test_a_feed_whose_runner_is_killed_is_taken_over(
    served: Served, spark: SparkSession, tmp_path: Path
) -> None:
    files = tmp_path / "files"
    options = SinkOptions(batch_records=100)
    served.site.feeds.create("copy", "users", f"parquet:{files}", since="beginning", options=options)
    arguments = Arguments(job="feed", url=served.url, target=str(files), feed="copy", point="writing")
    outcome = run_job(arguments)
    assert outcome.killed, outcome.said
    lease = served.site.feeds.show("copy").lease
    assert lease is not None
    checkpoints = []

    def take_over() -> bool:
        try:
            checkpoints.append(
                run_feed(
                    address_of(served.url), "copy", sinks=["parquet:"], once=True, spark=spark
                ).checkpoint
            )
        except LeaseHeld:
            return False
        return True

    wait_until(take_over, "the lease does not end")
    table = pyarrow.dataset.dataset(files, format="parquet").to_table()
    found = sorted(zip(table["_commit_version"].to_pylist(), table["key"].to_pylist(), strict=True))
    assert found == [
        (change.version, change.key) for change in served.site.changes("users", until=checkpoints[0])
    ]
