"""The page about nodes: its way from a directory to a shared database runs, command by command."""

import shlex
from contextlib import ExitStack, closing
from datetime import timedelta
from pathlib import Path

import pytest
from benchmarks.peers.base import free_port
from tests.cli.support import ROOT, run, running
from tests.cli.test_tutorial import find_blocks
from tests.postgres import PostgresServer

import floodmark

PAGE = ROOT / "docs" / "operations" / "nodes.md"
HEADING = "### From a directory to a shared database"

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("spark")]


def commands(address: str, database: str) -> list[list[str]]:
    """The commands below the heading, with addresses that hold here."""
    text = PAGE.read_text("utf-8").split(HEADING)[1]
    text = text.replace("postgresql://db/floodmark", database).replace("oslo-1:7100", address)
    return [shlex.split(line, comments=True)[1:] for line in find_blocks(text)[0].text.splitlines()]


def test_a_directory_moves_into_a_shared_database(
    postgres: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with floodmark.open("data/oslo", site="oslo") as site:
        users = site.create_namespace("users")
        users.put_many({b"user-%03d" % number: b"%d" % number for number in range(300)})
        users.put(b"session", b"1", ttl=timedelta(days=1))
    address = f"127.0.0.1:{free_port()}"
    serve, full, incremental, restore = commands(address, postgres.url)
    with ExitStack() as stack:
        node = stack.enter_context(running(*serve, "--json"))
        assert node.stdout is not None
        assert node.stdout.readline()
        assert (outcome := run(*full)).code == 0, outcome.errors
        with floodmark.open("data/oslo") as site:
            users = site.namespace("users")
            users.delete(b"user-007")
            users.put(b"user-300", b"300")
            records = {key: users.record(key) for key in (b"user-001", b"user-007", b"user-300", b"session")}
            pairs = list(users.scan())
        for command in (incremental, restore):
            assert (outcome := run(*command)).code == 0, outcome.errors
        with closing(floodmark.connect(f"grpc://{address}")) as moved:
            users = moved.namespace("users")
            assert list(users.scan()) == pairs
            for key, before in records.items():
                after = users.record(key)
                assert (after and after.stamp) == (before and before.stamp)
                assert (after and after.expires_at) == (before and before.expires_at)
            assert users.put(b"user-001", b"written at the node")
            assert users.get(b"user-001") == b"written at the node"
