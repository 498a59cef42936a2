"""Nodes as processes: killed and suspended, they lose nothing; with TLS, they verify each other."""

from pathlib import Path

import pytest
from benchmarks.node_processes import connect, node_processes
from tests.cli.support import run
from tests.node_processes import Clients, prepare, suspend
from tests.postgres import PostgresServer
from tests.server.certificates import Certificates
from tests.waiting import wait_until

from floodmark.model.errors import NotAuthenticated


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


@pytest.mark.slow
def test_nodes_reach_each_other_by_tls_and_the_secret_of_their_database(
    postgres: PostgresServer, certificates: Certificates, tmp_path: Path
) -> None:
    postgres.execute("DROP SCHEMA IF EXISTS floodmark_oslo CASCADE")
    token, own = tmp_path / "token", certificates.server
    access = tmp_path / "access.toml"
    access.write_text(run("token", "--name", "ops", "--role", "admin", "--output", token).text, "utf-8")
    options = ["--tls-certificate", own.certificate_path, "--tls-key", own.key_path]
    options += ["--access", access, "--tls-root", certificates.root_path]
    with node_processes(postgres.url, tmp_path, *map(str, options), count=2) as nodes:
        with pytest.raises(NotAuthenticated), connect(nodes, tls_root=certificates.root_path) as stranger:
            stranger.create_namespace("users")
        with connect(nodes, tls_root=certificates.root_path, token_file=token) as site:
            users = site.create_namespace("users")
            _, right = site.split("users", b"m")
            administration = site.host.node_port
            wait_until(
                lambda: (
                    [node.lives and node.url for node in administration.nodes()] == [n.url for n in nodes]
                ),
                "the keeper does not see the other node",
            )
            moved = administration.move(right, 2)
            users.put_many({b"ada": b"1", b"zoe": b"2"})
            # At a version that the nodes ask each other for.
            assert dict(users.scan()) == {b"ada": b"1", b"zoe": b"2"}
            following = site.changes("users", since="beginning", follow=True)
            assert {next(following).key, next(following).key} == {b"ada", b"zoe"}
            following.close()  # type: ignore[attr-defined]
            # The keeper asks the other node for it.
            assert administration.move(moved, 1) != moved
