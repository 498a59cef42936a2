"""Links on Spark: the contract of a runner, and a change that a stage of the query loses is named."""

from functools import partial
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from tests.links.contract import RunnerContract
from tests.links.support import Replication, Run, ServeSite, share, wait_checked
from tests.waiting import wait_until

from floodmark.links.planning import LinkOptions
from floodmark.spark.jobs import replicate_topology, site_addresses
from floodmark.spark.links.steps import FORMAT, OPTION, LinksSource, encode_links


@pytest.mark.slow
class TestSparkRunner(RunnerContract):
    """The contract, in a Spark query."""

    @pytest.fixture(name="run_links")
    def fixture_run_links(self, spark: SparkSession) -> Run:
        return partial(replicate_topology, spark=spark)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["lost", "doubled"])
def test_a_change_that_goes_wrong_in_the_query_is_named(
    serve_site: ServeSite, spark: SparkSession, tmp_path: Path, fault: str
) -> None:
    served, topology = share(serve_site, ("oslo", "rome"))
    oslo, rome = (each.site for each in served.values())
    with Replication(partial(replicate_topology, spark=spark), topology):
        wait_checked(rome, 1)
    oslo.namespace("users").put_many({b"%d" % number: b"x" for number in range(10)})
    addresses = site_addresses(topology)
    link = LinkOptions(
        source_id=oslo.id, source=addresses["oslo"], target=addresses["rome"], namespaces=("users",)
    )
    spark.dataSource.register(LinksSource)
    rows = spark.readStream.format(FORMAT).option(OPTION, encode_links([link])).load()
    harmed = (
        rows.where("NOT (kind = 0 AND key = X'37')")
        if fault == "lost"
        else rows.selectExpr("*", "explode(sequence(1, IF(kind = 0 AND key = X'37', 2, 1))) AS turn").drop(
            "turn"
        )
    )
    query = (
        harmed.writeStream.format(FORMAT)
        .option(OPTION, encode_links([link]))
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .start()
    )
    try:
        wait_until(
            lambda: any(each.findings for each in rome.replication().links) or query.exception() is not None,
            lambda: f"{rome.replication()}",
        )
    finally:
        query.stop()
    (found,) = [each for each in rome.replication().links if each.findings]
    assert (found.source, found.namespace, found.intervals_wrong) == ("oslo", "users", 1)
    expected = "1 of 10 changes" if fault == "lost" else "1 more changes"
    assert found.findings[0].startswith(expected), found.findings
    assert any("oslo to rome, users" in alarm for alarm in rome.replication().alarms)
