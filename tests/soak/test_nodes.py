"""Nodes and their database are killed, suspended and restarted at random; nothing acknowledged is lost.

A second site, which a link keeps up to date meanwhile, agrees at the end.
"""

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from random import Random

import pytest
from benchmarks.node_processes import connect, node_processes
from benchmarks.peers.postgres import ROLE
from tests.bank import run_bank
from tests.node_processes import Clients, Mirror, prepare, suspend, terminate
from tests.postgres import PostgresServer, postgres_server, synchronous_pair

ROUNDS = 30
SUSPENDED_SECONDS = 8
BANK_SECONDS = 600


@pytest.fixture
def database() -> Iterator[PostgresServer]:
    with postgres_server() as server:
        yield server


@pytest.mark.soak
@pytest.mark.parametrize("seed", [1])
def test_nothing_is_lost_when_random_nodes_are_killed_suspended_and_restarted(
    database: PostgresServer, tmp_path: Path, seed: int
) -> None:
    random = Random(seed)
    with node_processes(database.url, tmp_path) as nodes, ExitStack() as stack:
        prepare(nodes)
        mirror = Mirror(nodes, tmp_path / "rome")
        stack.callback(mirror.end)
        clients = Clients(nodes, writers=8, readers=2, followers=2)
        for _ in range(ROUNDS):
            clients.wait_for_writes(200)
            node = random.choice(nodes)
            match random.choice(["kill", "restart", "suspend"]):
                case "kill":
                    node.kill()
                    clients.wait_for_writes(50)
                    node.start()
                case "restart":
                    terminate(node)
                    node.start()
                case _:
                    suspend(node, SUSPENDED_SECONDS)
        clients.wait_for_writes(200)
        with connect(nodes) as site:
            clients.finish(site)
        mirror.finish()


@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_lost_when_the_database_is_restarted(
    database: PostgresServer, tmp_path: Path, number: signal.Signals
) -> None:
    with node_processes(database.url, tmp_path) as nodes:
        prepare(nodes)
        clients = Clients(nodes, writers=4, readers=1, followers=2)
        for _ in range(3):
            clients.wait_for_writes(200)
            if number is signal.SIGKILL:
                database.kill()
            else:
                database.stop()
            database.start()
        clients.wait_for_writes(200)
        with connect(nodes) as site:
            clients.finish(site)


@pytest.mark.soak
def test_nothing_is_lost_when_the_primary_is_killed_and_its_standby_promoted(tmp_path: Path) -> None:
    with synchronous_pair() as (primary, standby):
        hosts = f"127.0.0.1:{primary.port},127.0.0.1:{standby.port}"
        url = f"postgresql://{ROLE}@{hosts}/postgres?target_session_attrs=read-write"
        with node_processes(url, tmp_path) as nodes:
            prepare(nodes)
            clients = Clients(nodes, writers=4, readers=1, followers=2)
            clients.wait_for_writes(200)
            primary.kill()
            standby.execute("SELECT pg_promote()")
            clients.wait_for_writes(200)
            with connect(nodes) as site:
                clients.finish(site)


@pytest.mark.soak
def test_transactions_are_serializable_when_random_clients_and_nodes_are_killed(
    database: PostgresServer, tmp_path: Path
) -> None:
    assert run_bank(database.url, tmp_path, BANK_SECONDS, seed=2) > 0
