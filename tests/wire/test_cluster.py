"""Connections to the nodes of a site."""

from types import SimpleNamespace
from typing import Any

import pytest

from floodmark.model.errors import Closed, FloodmarkError, PartitionMoved, Unreachable
from floodmark.wire.cluster import BEGIN_SECONDS, STREAM_SECONDS, Attempts, Connections
from floodmark.wire.connection import Connection
from floodmark.wire.partition import RemoteMoves

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


@pytest.mark.parametrize(
    ("error", "seconds"),
    [(Unreachable("no answer"), BEGIN_SECONDS), (PartitionMoved("moved"), STREAM_SECONDS)],
    ids=["does not answer", "answers"],
)
def test_a_stream_that_begins_is_patient_with_a_server_that_answers(
    error: FloodmarkError, seconds: float
) -> None:
    passed = 0.0

    def wait(pause: float) -> None:
        nonlocal passed
        passed += pause

    nodes: Any = SimpleNamespace(
        seconds=lambda: passed, wait=wait, random=lambda: 1.0, urls=[FIRST], are_several=False
    )
    nodes.stream_attempts = lambda: Attempts(nodes, BEGIN_SECONDS, STREAM_SECONDS)
    maps: Any = SimpleNamespace(look=lambda _: None)
    moves = RemoteMoves(maps, nodes, stream=True)

    def ask_on() -> None:
        while True:
            moves.follow(error, None)

    with pytest.raises(type(error), match=f"for {seconds:.0f} s"):
        ask_on()
    assert passed == seconds
