"""Links on Spark: the contract of a runner, and a change that a task loses is named."""

from functools import partial

import pyarrow
import pytest
from pyspark.sql import SparkSession
from tests.links.contract import RunnerContract
from tests.links.support import Replication, Run, ServeSite, share, wait_checked
from tests.waiting import wait_until

from floodmark.spark.jobs import replicate_topology


@pytest.mark.slow
class TestSparkRunner(RunnerContract):
    """The contract, in a Spark query."""

    @pytest.fixture(name="run_links")
    def fixture_run_links(self, spark: SparkSession) -> Run:
        return partial(replicate_topology, spark=spark)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["lost", "doubled"])
def test_a_change_that_goes_wrong_in_a_task_is_named(
    serve_site: ServeSite, spark: SparkSession, fault: str
) -> None:
    served, topology = share(serve_site, ("oslo", "rome"))
    oslo, rome = (each.site for each in served.values())
    with Replication(partial(replicate_topology, spark=spark), topology):
        wait_checked(rome, 1)
    oslo.namespace("users").put_many({b"%d" % number: b"x" for number in range(10)})

    def harm(rows: pyarrow.RecordBatch) -> pyarrow.RecordBatch:
        marked = [key == b"7" for key in rows["key"].to_pylist()]
        copies = [int(not mark) if fault == "lost" else 1 + mark for mark in marked]
        return rows.take([row for row, count in enumerate(copies) for _ in range(count)])

    with Replication(partial(replicate_topology, spark=spark, transform=harm), topology):
        wait_until(
            lambda: any(each.findings for each in rome.replication().links),
            lambda: f"{rome.replication()}",
        )
    (found,) = [each for each in rome.replication().links if each.findings]
    assert (found.source, found.namespace, found.intervals_wrong) == ("oslo", "users", 1)
    expected = "1 of 10 changes" if fault == "lost" else "1 more changes"
    assert found.findings[0].startswith(expected), found.findings
    assert any("oslo to rome, users" in alarm for alarm in rome.replication().alarms)
