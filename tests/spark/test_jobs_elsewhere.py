"""The same jobs where the workers are other processes, and where Spark itself is behind a connection."""

from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from tests.links.support import Served, ServeSite
from tests.spark.processes import SparkProcess
from tests.spark.support_backup import address_of, contents, fill
from tests.spark.support_export import current_of, exported, exported_current, history_of

from floodmark.spark.jobs import ExportSummary, FeedRunSummary, TopologySummary, export, replicate, run_feed

Summaries = tuple[ExportSummary, ExportSummary, TopologySummary, FeedRunSummary]


def run_all(spark: SparkSession, source: str, target: str, directory: str) -> Summaries:
    """What the process with the session does."""
    oslo, bergen = address_of(source), address_of(target)
    return (
        export(oslo, "users", f"{directory}/history", format="parquet", spark=spark),
        export(oslo, "users", f"{directory}/current", view="current", spark=spark),
        replicate(oslo, bergen, ["users"], once=True, spark=spark),
        run_feed(oslo, "copy", sinks=["parquet:"], once=True, spark=spark),
    )


@pytest.mark.soak
@pytest.mark.parametrize("place", ["local_cluster", "connect"])
def test_jobs_do_the_same_wherever_spark_runs(
    served: Served, serve_site: ServeSite, tmp_path: Path, place: str, request: pytest.FixtureRequest
) -> None:
    bergen = serve_site("bergen")
    fill(served.site.create_namespace("users"))
    served.site.split("users", b"00150")
    files = tmp_path / "files"
    served.site.feeds.create("copy", "users", f"parquet:{files}", since="beginning")
    process: SparkProcess = request.getfixturevalue(place)
    history, current, copied, fed = process.run(run_all, served.url, bergen.url, str(tmp_path))
    assert history.through is not None
    assert exported(tmp_path / "history") == history_of(served.site, "users", history.through)
    assert current.through is not None
    assert exported_current(tmp_path / "current") == current_of(served.site, "users", current.through)
    assert (copied.wrong, fed.changes) == (0, history.rows)
    assert contents(bergen.site, "users") == contents(served.site, "users")
    assert list(files.rglob("*.parquet"))
