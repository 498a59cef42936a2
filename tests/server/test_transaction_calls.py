"""The calls of transactions over RESP: how many there are, and that no worker thread runs them."""

from collections.abc import Iterator
from typing import Any

import pytest
from tests.server.support import connected, serving

from floodmark import Namespace, Site
from floodmark.model.errors import Conflict
from floodmark.server import Server, ServerOptions


@pytest.fixture
def served() -> Iterator[tuple[Server, Site]]:
    with serving(ServerOptions(resp_listen="127.0.0.1:0")) as (_, server), connected(server) as client:
        yield server, client


def count_calls(server: Server, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of calls over RESP from now on, with a mark for those that a worker thread runs."""
    assert server._door is not None
    door: Any = server._door
    called: list[str] = []
    for call in door.calls.values():

        def begin(*args: Any, begin: Any = call.begin, name: str = call.command.name, **named: Any) -> Any:
            reply = begin(*args, **named)
            called.append(name if reply is not None else f"{name} in a worker")
            return reply

        monkeypatch.setattr(call, "begin", begin)
    return called


def test_a_transaction_of_a_key_is_two_calls(
    served: tuple[Server, Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, client = served
    users = client.create_namespace("users")
    users.put(b"ada", b"1")
    called = count_calls(server, monkeypatch)
    client.run_transaction(lambda t: t.put(users, b"ada", t.get(users, b"ada") + b"1"))
    assert called == ["get_fresh", "write"]
    assert users.get(b"ada") == b"11"


def test_further_reads_are_at_the_version_of_the_first(
    served: tuple[Server, Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, client = served
    users = client.create_namespace("users")
    users.put_many({b"ada": b"1", b"bob": b"1"})
    called = count_calls(server, monkeypatch)
    with client.transaction() as transaction:
        assert transaction.get(users, b"ada") == b"1"
        users.put(b"bob", b"2")
        assert transaction.get(users, b"bob") == b"1"
    assert called == ["get_fresh", "put", "get"]


def test_a_transaction_of_several_keys_commits_in_a_round(
    served: tuple[Server, Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, client = served
    users = client.create_namespace("users")
    users.put(b"carol", b"1")
    called = count_calls(server, monkeypatch)

    def work(transaction: Any) -> None:
        assert transaction.get(users, b"ada") is None
        transaction.put(users, b"ada", b"1")
        transaction.put(users, b"bob", b"2")

    client.run_transaction(work)
    assert called == ["get_fresh", "write"]
    assert users.get_many([b"ada", b"bob"]) == [b"1", b"2"]


def test_a_conflict_is_told(served: tuple[Server, Site]) -> None:
    _, client = served
    users: Namespace = client.create_namespace("users")
    transaction = client.transaction()
    transaction.get(users, b"ada")
    users.put(b"ada", b"1")
    transaction.put(users, b"ada", b"2")
    with pytest.raises(Conflict) as caught:
        transaction.commit()
    assert caught.value.details["key"] == b"ada"
    assert users.get(b"ada") == b"1"
