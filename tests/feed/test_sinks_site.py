"""The sink that writes to another site: what arrives there, and over its server, with tokens and TLS."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.feed.support_feeds import USERS, World
from tests.server.certificates import make_certificates
from tests.server.support import open_memory, serving

from floodmark.feed.named.feeds import FeedState
from floodmark.feed.sinks import Sink, open_sink
from floodmark.feed.sinks.site import APPLY_BYTES_MAX, SiteSink
from floodmark.model.change import Change, Stamp
from floodmark.model.errors import (
    ClockSkew,
    InvalidArgument,
    InvalidConfiguration,
    NamespaceNotFound,
    NotAllowed,
    NotAuthenticated,
    SinkFailed,
    WrongPolicy,
)
from floodmark.model.version import Version
from floodmark.server import Server, ServerOptions, hash_token
from floodmark.site import Site
from floodmark.testing.sinks import SINCE, change, context, write


class Recording:
    """Takes down what is applied."""

    def __init__(self) -> None:
        self.rows: list[dict[bytes, bytes]] = []

    def apply(self, rows: dict[bytes, bytes], *, durable: bool) -> Version:
        assert durable
        self.rows.append(rows)
        return 1


def stored(sink_changes: list[Change], world: World | None = None) -> World:
    """A site after some changes have come to it."""
    world = world or World()
    sink = SiteSink(world.router, USERS)
    sink.write(sink_changes, since=SINCE, through=sink_changes[-1].version)
    sink.flush()
    return world


# What arrives


def test_a_change_arrives_with_the_stamp_that_it_was_first_written_with() -> None:
    original = change(5, b"a", b"1", expires_at=4_000_000_000)
    world = stored([original])
    (arrived,) = world.changes()
    assert arrived.stamp == Stamp(SINCE + 5, 7)
    assert (arrived.value, arrived.expires_at) == (b"1", 4_000_000_000)


def test_an_older_change_does_not_overwrite_a_newer_write_of_the_other_site() -> None:
    world = World()
    world.time.advance(10)
    world.put(b"a", b"newer")
    stored([change(1, b"a", b"older"), change(2, b"b", b"new")], world)
    assert [(each.key, each.value) for each in world.changes()] == [(b"a", b"newer"), (b"b", b"new")]


def test_a_delete_that_comes_again_late_does_not_remove_what_came_after() -> None:
    world = stored([change(1, b"a", b"1"), change(2, b"a", None), change(3, b"a", b"2")])
    stored([change(1, b"a", b"1"), change(2, b"a", None)], world)
    assert [(each.value) for each in world.changes()] == [b"1", None, b"2"]


def test_each_change_of_a_key_is_a_commit_of_its_own() -> None:
    router = Recording()
    changes = [change(1, b"a"), change(2, b"b"), change(3, b"a"), change(4, b"c"), change(5, b"a")]
    SiteSink(router, USERS).write(changes, since=SINCE, through=SINCE + 5)
    keys = [[key[3:] for key in rows] for rows in router.rows]
    assert keys == [[b"a", b"b"], [b"a", b"c"], [b"a"]]


def test_a_large_batch_goes_in_portions() -> None:
    router = Recording()
    changes = [change(number, b"%d" % number, bytes(1_000_000)) for number in range(1, 11)]
    SiteSink(router, USERS).write(changes, since=SINCE, through=SINCE + 10)
    sizes = [sum(len(key) + len(value) for key, value in rows.items()) for rows in router.rows]
    assert len(sizes) > 1
    assert max(sizes) <= APPLY_BYTES_MAX
    assert sum(map(len, router.rows)) == 10


def test_a_change_from_the_future_stalls_the_feed_and_is_not_dropped() -> None:
    world = World()
    ahead = change(60_000 << 18, b"a")
    with pytest.raises(SinkFailed, match="future") as failure:
        stored([ahead], world)
    assert isinstance(failure.value.__cause__, ClockSkew)
    world.time.advance(60_000)
    stored([ahead], world)
    assert [each.key for each in world.changes()] == [b"a"]


# Over a server


@pytest.fixture
def served() -> Iterator[tuple[Site, Server]]:
    with serving() as (site, server):
        site.create_namespace("copies")
        yield site, server


def uri(server: Server, namespace: str = "copies", parameters: str = "", *, tls: bool = False) -> str:
    scheme = "floodmark+tls" if tls else "floodmark"
    return f"{scheme}://{server.address.host}:{server.address.port}/{namespace}{parameters}"


def opened(sink_uri: str) -> Sink:
    return open_sink(sink_uri, context())


def test_changes_arrive_at_a_server(served: tuple[Site, Server]) -> None:
    site, server = served
    sink = opened(uri(server))
    write(sink, [change(1, b"a", b"1"), change(2, b"b", b"2"), change(3, b"a", None)], since=0, through=3)
    sink.close()
    assert dict(site.namespace("copies").scan()) == {b"b": b"2"}
    assert [each.stamp.version - SINCE for each in site.changes("copies")] == [1, 2, 3]


def test_a_feed_copies_a_namespace_to_another_site(served: tuple[Site, Server]) -> None:
    copy, server = served
    with open_memory("bergen") as source:
        users = source.create_namespace("users")
        source.split("users", b"m")
        for number in range(50):
            users.put(b"%c%d" % (b"az"[number % 2], number % 9), b"%d" % number)
        until = users.delete(b"a0")
        source.feeds.create("copy", "users", uri(server), since="beginning", until=until)
        assert source.feeds.runner("copy", sinks=[uri(server)]).run() is FeedState.FINISHED
        assert dict(copy.namespace("copies").scan()) == dict(users.scan())
        wanted = [(each.key, each.value, each.stamp) for each in source.changes("users")]
        arrived = [(each.key, each.value, each.stamp) for each in copy.changes("copies")]
        assert sorted(arrived, key=lambda each: each[2]) == wanted


def test_a_namespace_that_is_not_there_is_told_at_once(served: tuple[Site, Server]) -> None:
    with pytest.raises(NamespaceNotFound, match="nowhere"):
        opened(uri(served[1], "nowhere"))


@pytest.mark.parametrize("merge", ["fields", "counter"])
def test_a_namespace_that_holds_no_whole_values_is_refused_at_once(
    served: tuple[Site, Server], merge: str
) -> None:
    site, server = served
    site.create_namespace("merged", merge=merge)
    with pytest.raises(WrongPolicy, match="floodmark replicate"):
        opened(uri(server, "merged"))


def test_a_feed_carries_whole_records_of_fields(served: tuple[Site, Server]) -> None:
    copy, server = served
    with open_memory("bergen") as source:
        people = source.create_namespace("people", merge="fields")
        people.put(b"ada", {"name": "Ada"})
        until = people.update(b"ada", {"city": "London"})
        source.feeds.create("copy", "people", uri(server), until=until)
        assert source.feeds.runner("copy", sinks=[uri(server)]).run() is FeedState.FINISHED
        assert dict(copy.namespace("copies").scan()) == dict(people.scan())


def test_a_feed_into_itself_is_refused(served: tuple[Site, Server]) -> None:
    site, server = served
    site.create_namespace("users")
    with pytest.raises(InvalidArgument, match="into itself"):
        opened(uri(server, "users"))


@pytest.mark.parametrize("place", ["floodmark://host:7100", "floodmark://host:7100/a/b", "floodmark:/users"])
def test_a_uri_without_host_or_namespace_is_refused(place: str) -> None:
    with pytest.raises(InvalidArgument, match="host:port/namespace"):
        opened(place)


def test_an_unknown_parameter_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="token_file"):
        opened("floodmark://host:7100/users?timeout=5")


def write_access(file: Path, **tokens: str) -> Path:
    """An access file with a token for each of some roles on the namespace `copies`."""
    entries = [
        f'[[access]]\nname = "{role}"\nrole = "{role}"\n'
        f'token_sha256 = "{hash_token(token)}"\nnamespaces = ["copies"]\n'
        for role, token in tokens.items()
    ]
    file.write_text("\n".join(entries))
    return file


def test_a_token_is_read_from_a_file_and_shown_to_nobody(tmp_path: Path) -> None:
    access = write_access(tmp_path / "access.toml", write="writes-1234", read="reads-5678")
    token_file = tmp_path / "token"
    with serving(ServerOptions(access=access)) as (site, server):
        site.create_namespace("copies")
        named = uri(server, parameters=f"?token_file={token_file}")
        token_file.write_text("writes-1234\n")
        sink = opened(named)
        write(sink, [change(1, b"a", b"1")], since=0, through=1)
        sink.close()
        assert site.namespace("copies").get(b"a") == b"1"
        token_file.write_text("reads-5678\n")
        reader = opened(named)
        with pytest.raises(NotAllowed) as refusal:
            write(reader, [change(2, b"b")], since=1, through=2)
        reader.close()
        assert "reads-5678" not in str(refusal.value)
        with pytest.raises(NotAuthenticated):
            opened(uri(server))
        with pytest.raises(InvalidConfiguration, match="cannot read"):
            opened(uri(server, parameters=f"?token_file={tmp_path}/missing"))


def test_the_way_can_be_encrypted(tmp_path: Path) -> None:
    certificates = make_certificates(tmp_path)
    own = certificates.server
    options = ServerOptions(tls_certificate=own.certificate_path, tls_key=own.key_path)
    with serving(options) as (site, server):
        site.create_namespace("copies")
        sink = opened(uri(server, parameters=f"?tls_root_file={certificates.root_path}", tls=True))
        write(sink, [change(1, b"a", b"1")], since=0, through=1)
        sink.close()
        assert site.namespace("copies").get(b"a") == b"1"
