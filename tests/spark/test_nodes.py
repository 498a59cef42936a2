"""Spark over a site that several nodes serve: each task reads from the owner of its keys."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from tests.nodes import NodeCluster, node_cluster
from tests.server.support import LOOPBACK, open_memory
from tests.spark.support_read import open_reader, read_pairs, read_part, read_rows

from floodmark.links.pair import begin_copy, pair_topology
from floodmark.links.steps import plan_step, run_step
from floodmark.server import serve
from floodmark.site.connecting import connect
from floodmark.spark import SiteAddress
from floodmark.spark.jobs.backups.backup import backup
from floodmark.spark.jobs.verifying.verify import verify
from floodmark.wire import Connection

PAIRS = {b"ada": b"a", b"ken": b"k", b"zoe": b"z"}


@pytest.fixture
def cluster() -> Iterator[NodeCluster]:
    """Three nodes, each with a third of the keys of `users`."""
    with node_cluster() as nodes:
        nodes.spread()
        nodes.sites[1].namespace("users").put_many(PAIRS)
        yield nodes


def test_a_task_reads_from_the_owner_of_its_range(
    cluster: NodeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = open_reader(cluster.url)
    parts = list(reader.partitions())
    opened: list[str] = []
    original = Connection.open_reader

    def open_stream(self: Connection, ticket: bytes) -> Any:
        opened.append(self.url)
        return original(self, ticket)

    monkeypatch.setattr(Connection, "open_reader", open_stream)
    rows = [row["key"] for part in parts for row in read_part(reader, part)]
    assert rows == list(PAIRS)
    assert opened == [cluster.servers[number].url for number in (1, 2, 3)]


def test_a_reading_that_was_planned_goes_on_after_a_takeover(cluster: NodeCluster) -> None:
    reader = open_reader(cluster.url)
    parts = list(reader.partitions())
    cluster.kill(1)
    cluster.take_over()
    assert [row["key"] for part in parts for row in read_part(reader, part)] == list(PAIRS)
    assert read_pairs(cluster.url) == PAIRS
    changes = read_rows(cluster.url, readChangeFeed=True, startingVersion="earliest")
    assert sorted(row["key"] for row in changes) == list(PAIRS)


def test_sites_of_several_nodes_are_compared_backed_up_and_read_by_spark(
    spark: SparkSession, cluster: NodeCluster, tmp_path: Path
) -> None:
    url = cluster.url
    with connect(url) as oslo, serve(open_memory("rome"), LOOPBACK) as server, connect(server.url) as rome:
        rome.create_namespace("users")
        topology = pair_topology(oslo, rome, ["users"])
        for site in (oslo, rome):
            site.set_topology(topology)
        begin_copy(oslo.host, rome.host, "users")
        run_step(oslo.host, rome.host, plan_step(oslo.host, rome.host, ["users"]))
        addresses = [SiteAddress(location=url), SiteAddress(location=server.url)]
        summary = verify(addresses, ["users"], spark=spark)
        assert (summary.drift, summary.lag, [pair.agree for pair in summary.pairs]) == (0, 0, [3])
        saved = backup(addresses[0], "users", str(tmp_path / "backup"), spark=spark)
        assert saved.rows.live == 3
        frame = spark.read.format("floodmark").option("namespace", "users").load(url)
        assert {bytes(row.key): bytes(row.value) for row in frame.collect()} == PAIRS
