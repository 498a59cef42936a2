"""Connections to the nodes of a site."""

import pytest

from floodmark.model.errors import Closed
from floodmark.wire.cluster import Connections
from floodmark.wire.connection import Connection

FIRST, SECOND = "grpc://127.0.0.1:1", "grpc://127.0.0.1:2"


def test_a_connection_is_made_once_for_each_url() -> None:
    connections = Connections(Connection)
    assert connections.at(FIRST) is connections.at(FIRST)
    assert connections.at(FIRST) is not connections.at(SECOND)
    connections.close()


def test_connections_close_together() -> None:
    connections = Connections(Connection)
    opened = [connections.at(FIRST), connections.at(SECOND)]
    connections.close()
    connections.close()
    for connection in opened:
        with pytest.raises(Closed):
            connection.require_open()
    with pytest.raises(Closed):
        connections.at("grpc://127.0.0.1:3")


def test_a_server_that_is_gone_is_forgotten_and_closed_with_the_others() -> None:
    connections = Connections(Connection)
    first, second = connections.at(FIRST), connections.at(SECOND)
    connections.keep([SECOND])
    first.require_open()
    assert connections.at(SECOND) is second
    assert connections.at(FIRST) is not first
    connections.close()
    with pytest.raises(Closed):
        first.require_open()
