"""Publishing over a connection."""

from threading import Event
from typing import Any

import pytest
from tests.server.support import connected, connection_of, cut_everything, serving

from floodmark import ChangeType
from floodmark.host.catalog import GenerationRow
from floodmark.host.publishing import LocalGenerations
from floodmark.model.errors import GenerationSwapped, InvalidValue, PublicationConflict


def test_a_client_publishes_and_others_go_on_with_the_handles_that_they_have() -> None:
    with serving() as (_, server), connected(server) as site, connected(server) as other:
        users = site.create_namespace("users")
        before = users.put_many({b"%03d" % number: b"old" for number in range(100)})
        theirs = other.namespace("users")
        following = other.changes("users", since=before, follow=True)
        theirs.put(b"mine", b"1")
        assert next(following).key == b"mine"
        rows = ((b"%05d" % number, b"new") for number in range(3_000))
        published = site.generations.publish("users", rows, base=before)
        assert (published.rows, published.replayed) == (3_000, 1)
        assert len(dict(theirs.scan())) == 3_001
        assert (theirs.get(b"000"), theirs.get(b"00000")) == (None, b"new")
        assert theirs.get(b"000", at=before) == b"old"
        theirs.put(b"00000", b"2")
        assert users.get(b"00000") == b"2"
        with pytest.raises(GenerationSwapped):
            next(following)
        assert [each.state.value for each in other.generations.list("users")] == ["kept", "current"]
        back = site.generations.rollback("users")
        assert back.source == 1
        assert len(dict(theirs.scan())) == 102


def test_an_error_of_a_batch_ends_a_publication_and_removes_it() -> None:
    with serving() as (_, server), connected(server) as site:
        users = site.create_namespace("users")
        users.put(b"ada", b"1")
        with pytest.raises(InvalidValue):
            site.generations.publish("users", {b"bob": bytes(2 << 20)})
        assert dict(users.scan()) == {b"ada": b"1"}
        assert len(site.generations.list("users")) == 1


def test_two_publishers_do_not_mix() -> None:
    with serving() as (_, server), connected(server) as site, connected(server) as other:
        site.create_namespace("users")
        site.host.generations.begin_generation("users", 0, "nightly")
        with pytest.raises(PublicationConflict, match="nightly"):
            other.generations.publish("users", {b"ada": b"2"})
        published = other.generations.publish("users", {b"ada": b"1"}, publisher="nightly")
        assert published.generation == 3


@pytest.mark.parametrize("way", ["difference", "snapshot"])
def test_a_stream_goes_on_over_a_swap_through_cut_connections(way: Any) -> None:
    with serving() as (_, server), connected(server) as site:
        users = site.create_namespace("users")
        before = users.put_many({b"%04d" % number: b"old" for number in range(0, 4_000, 2)})
        site.generations.publish("users", ((b"%04d" % number, bytes(1_000)) for number in range(3_000)))
        copy = dict.fromkeys((b"%04d" % number for number in range(0, 4_000, 2)), b"old")
        cuts = 0
        for number, change in enumerate(site.changes("users", since=before, on_generation=way)):
            if change.type is ChangeType.GENERATION:
                copy = {} if change.snapshot else copy
            elif change.value is None:
                copy.pop(change.key, None)
            else:
                copy[change.key] = change.value
            if number % 500 == 0:
                cuts += cut_everything(server)
        assert copy == dict(users.scan())
        assert cuts


def test_a_publisher_waits_for_its_turn_as_long_as_another_one_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = LocalGenerations.begin_generation

    def begin_late(port: LocalGenerations, **arguments: Any) -> GenerationRow:
        # As while a rollback of another namespace copies.
        Event().wait(0.5)
        return begin(port, **arguments)

    monkeypatch.setattr(LocalGenerations, "begin_generation", begin_late)
    with serving() as (_, server), connected(server) as site:
        site.create_namespace("users")
        connection, port = connection_of(site), site.host.generations
        ask = port.begin_generation

        def ask_quickly(*arguments: Any) -> GenerationRow:
            with monkeypatch.context() as patch:
                patch.setattr(connection, "timeout_seconds", 0.1)
                return ask(*arguments)

        monkeypatch.setattr(port, "begin_generation", ask_quickly)
        assert site.generations.publish("users", {b"ada": b"1"}).rows == 1
        assert [each.state.value for each in site.generations.list("users")] == ["kept", "current"]
