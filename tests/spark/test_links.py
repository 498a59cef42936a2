"""Sites that copy each other in all directions, on Spark, end with the same bytes; what is lost is named."""

from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from tests.server.processes import wait_until
from tests.sizes import only
from tests.spark.conftest import ServeSite
from tests.spark.support_links import (
    HANG_SECONDS,
    Replication,
    require_equal,
    share,
    wait_checked,
    write_everywhere,
)

from floodmark.model.errors import InvalidConfiguration
from floodmark.replication.topology import Topology, parse_topology
from floodmark.spark.jobs import replicate_topology, site_addresses
from floodmark.spark.links.planning import LinkOptions
from floodmark.spark.links.steps import FORMAT, OPTION, LinksSource, encode_links

ROUNDS = 30


def test_three_sites_with_writes_everywhere_hold_the_same_bytes(
    serve_site: ServeSite, spark: SparkSession
) -> None:
    served, topology = share(serve_site)
    sites = [each.site for each in served.values()]
    for turn in range(2):
        write_everywhere(sites, ROUNDS, turn * ROUNDS)
        summary = replicate_topology(topology, site_addresses(topology), once=True, spark=spark)
        require_equal(sites)
        assert sum(link.findings for link in summary.links) == 0
        assert {(link.source, link.target) for link in summary.links} == {
            (source, target) for source in served for target in served if source != target
        }
    for site in sites:
        assert site.namespace("counts").get(b"all") == b"%d" % (2 * ROUNDS * len(sites))


@pytest.mark.slow
def test_heartbeats_come_through_when_nobody_writes_and_prove_that_nothing_is_lost(
    serve_site: ServeSite, spark: SparkSession
) -> None:
    served, topology = share(serve_site, ("oslo", "rome"))
    oslo, rome = (each.site for each in served.values())
    with Replication(spark, topology):
        wait_checked(rome, 2)
        write_everywhere([oslo, rome], ROUNDS)
        wait_checked(oslo, 2)
        wait_checked(rome, 2)
        for link in [*oslo.replication().links, *rome.replication().links]:
            assert link.intervals_wrong == 0
            assert link.heartbeat_age_ms is not None
    require_equal([oslo, rome])


@pytest.mark.parametrize("fault", only(["lost"], ["lost", "doubled"]))
def test_a_change_that_goes_wrong_in_the_query_is_named(
    serve_site: ServeSite, spark: SparkSession, tmp_path: Path, fault: str
) -> None:
    served, topology = share(serve_site, ("oslo", "rome"))
    oslo, rome = (each.site for each in served.values())
    with Replication(spark, topology):
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
            HANG_SECONDS,
            lambda: f"{rome.replication()}",
        )
    finally:
        query.stop()
    (found,) = [each for each in rome.replication().links if each.findings]
    assert (found.source, found.namespace, found.intervals_wrong) == ("oslo", "users", 1)
    expected = "1 of 10 changes" if fault == "lost" else "1 more changes"
    assert found.findings[0].startswith(expected), found.findings
    assert any("oslo to rome, users" in alarm for alarm in rome.replication().alarms)


def test_a_site_that_is_not_what_the_topology_says_is_refused(
    serve_site: ServeSite, spark: SparkSession
) -> None:
    oslo, rome = serve_site("oslo"), serve_site("rome")
    topology: Topology = parse_topology(
        f"""
        epoch = 1
        sites.oslo = {{id = {oslo.site.id}, url = "{oslo.url}"}}
        sites.bonn = {{id = {rome.site.id}, url = "{rome.url}"}}
        namespaces.users = {{}}
        """
    )
    with pytest.raises(InvalidConfiguration, match="rome"):
        replicate_topology(topology, site_addresses(topology), once=True, spark=spark)
