"""Nodes that are killed, suspended and restarted lose nothing that was acknowledged, and no feed skips."""

from pathlib import Path

import pytest
from benchmarks.node_processes import connect, node_processes
from tests.node_processes import Clients, prepare, suspend
from tests.postgres import PostgresServer


@pytest.mark.slow
def test_nothing_is_lost_and_no_feed_skips_when_nodes_are_killed_and_suspended(
    postgres: PostgresServer, tmp_path: Path
) -> None:
    postgres.execute("DROP SCHEMA IF EXISTS floodmark_oslo CASCADE")
    with node_processes(postgres.url, tmp_path) as nodes:
        prepare(nodes)
        clients = Clients(nodes, writers=3, readers=1, followers=2)
        first, second, third = nodes
        clients.wait_for_writes()
        first.kill()
        clients.wait_for_writes()
        first.start()
        suspend(second, seconds=8)
        clients.wait_for_writes()
        third.kill()
        third.start()
        clients.wait_for_writes()
        with connect(nodes) as site:
            clients.finish(site)
