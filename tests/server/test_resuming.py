"""Streams that lose their connection go on where they were; reads are repeated, writes never."""

from collections.abc import Callable, Iterator
from datetime import timedelta
from threading import Event
from typing import Any, TypeVar

import pytest
from tests.server.support import (
    connected,
    connection_of,
    cut_everything,
    cut_lines,
    cut_streams,
    intercept,
    restartable,
    serving,
)
from tests.waiting import HANG_SECONDS, wait_until

from floodmark.host.remote import ReaderHolds
from floodmark.model.errors import (
    Closed,
    NamespaceNotFound,
    OutcomeUnknown,
    Retryable,
    Unreachable,
    VersionCollected,
)
from floodmark.model.ranges import KeyRange
from floodmark.model.stream import ChangesRequest
from floodmark.server import Server, ServerOptions
from floodmark.site import Namespace, Site
from floodmark.site.beginning import find_scope
from floodmark.site.connecting import connect

# Enough that a stream is never done before it is cut.
ROWS = 12_000
VALUE = bytes(4_000)
CUTS = 3

Item = TypeVar("Item")


@pytest.fixture
def full(users: Namespace) -> Namespace:
    # Whole commits arrive, so they must be small for a stream that is to be cut between them.
    for start in range(0, ROWS, 500):
        users.put_many({b"%05d" % number: VALUE for number in range(start, start + 500)}, durability="async")
    return users


def has_streams(server: Server) -> bool:
    """Whether a client reads a stream of rows."""
    return server.service.places.count() > 0


def read_and_cut(server: Server, rows: Iterator[Item]) -> list[Item]:
    """Read to the end, and cut the stream a few times on the way."""
    seen: list[Item] = []
    cuts = 0

    def is_cut_or_done() -> bool:
        nonlocal cuts
        cut = cut_streams(server)
        cuts += cut
        return cut > 0 or not has_streams(server)

    for row in rows:
        seen.append(row)
        if cuts < CUTS and len(seen) % 100 == 0:
            # It waits for its client as soon as all is full that lies between them.
            wait_until(is_cut_or_done, "a stream that waits for its client")
    assert cuts >= CUTS, "the stream was never cut: this proves nothing"
    return seen


@pytest.mark.parametrize("reverse", [False, True])
def test_a_scan_goes_on_behind_the_last_row(server: Server, full: Namespace, reverse: bool) -> None:
    seen = read_and_cut(server, full.scan(reverse=reverse))
    expected = [b"%05d" % number for number in range(ROWS)]
    assert [key for key, _ in seen] == (expected[::-1] if reverse else expected)


def test_a_limited_scan_goes_on_to_its_limit(server: Server, full: Namespace) -> None:
    assert len(read_and_cut(server, full.scan(limit=ROWS - 5))) == ROWS - 5


@pytest.mark.usefixtures("full")
def test_changes_go_on_behind_the_last_one(server: Server, remote: Site) -> None:
    seen = read_and_cut(server, remote.changes("users"))
    assert [change.key for change in seen] == [b"%05d" % number for number in range(ROWS)]


def test_a_commit_larger_than_a_message_comes_whole(remote: Site, users: Namespace) -> None:
    rows = {b"%05d" % number: VALUE for number in range(1_000)}
    for key in (b"00300", b"00900"):
        remote.split("users", key)
    versions = [users.put_many(rows), users.put(b"between", b"x"), users.put_many(rows)]
    batches = list(remote.host.changes(ChangesRequest()))
    found = {version: list(batch.versions) for batch in batches for version in set(batch.versions)}
    assert [found[version].count(version) for version in versions] == [1_000, 1, 1_000]
    assert all(batch.versions[-1] <= batch.through for batch in batches if batch.keys)


def test_a_commit_whose_stream_is_cut_comes_once(
    remote: Site, users: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = {b"%05d" % number: VALUE for number in range(1_000)}
    users.put_many(rows)
    cuts = 0

    def cut(batches: Iterator[Any]) -> Iterator[Any]:
        nonlocal cuts
        for batch, metadata in batches:
            yield batch, metadata
            if cuts < CUTS and batch.num_rows:
                cuts += 1
                raise Unreachable("the connection was cut")

    connection = connection_of(remote)
    opened = connection.open_reader
    monkeypatch.setattr(connection, "open_reader", lambda ticket: cut(iter(opened(ticket))))
    seen = [change.key for change in remote.changes("users")]
    assert (seen, cuts) == (list(rows), CUTS)


def test_a_follower_outlives_a_restart_of_the_server() -> None:
    with restartable() as (start, stop):
        url = start()
        with connect(url) as client:
            mine = client.create_namespace("users")
            follower = client.changes("users", follow=True)
            mine.put(b"ada", b"1")
            assert next(follower).value == b"1"
            stop()
            start()
            wait_until(lambda: is_reachable(mine), "the server does not come back")
            mine.put(b"ada", b"2")
            assert next(follower).value == b"2"
            follower.close()  # type: ignore[attr-defined]


def test_a_watch_outlives_a_restart_of_the_server() -> None:
    with restartable() as (start, stop), connect(start()) as client:
        mine = client.create_namespace("users")
        watched = client.watch(mine, b"ada")
        stop()
        start()
        wait_until(lambda: is_reachable(mine), "the server does not come back")
        assert mine.put(b"ada", b"2") == watched.result(HANG_SECONDS)


def is_reachable(namespace: Namespace) -> bool:
    try:
        namespace.get(b"ada")
    except Unreachable:
        return False
    return True


# Slow readers


def hold_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let clients hold what they read after a moment, and not only after seconds."""
    defaults: Any = ReaderHolds.__init__.__kwdefaults__
    monkeypatch.setitem(defaults, "hold_seconds", 0.05)


def test_a_reader_that_pauses_is_cut_off_and_goes_on_where_it_was() -> None:
    with serving(ServerOptions(stall_seconds=0.2)) as (_, server), connected(server) as client:
        users = client.create_namespace("users")
        users.put_many({b"%05d" % number: VALUE for number in range(ROWS)}, durability="async")
        rows = users.scan()
        first = next(rows)
        wait_until(lambda: not has_streams(server), "it was not cut off")
        assert len([first, *rows]) == ROWS


@pytest.mark.slow
def test_what_a_paused_reader_needs_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    hold_soon(monkeypatch)
    with serving(ServerOptions(stall_seconds=0.2)) as (site, server), connected(server) as client:
        brief = client.create_namespace("brief", retention=timedelta(0))
        first = brief.put_many({b"%05d" % number: VALUE for number in range(ROWS)}, durability="async")
        rows, leases = brief.scan(at=first), server.service.leases
        wait_until(lambda: len(leases) > 0, "the version is not held")
        wait_until(lambda: not has_streams(server), "it was not cut off")
        for number in range(0, ROWS, 100):
            brief.put(b"%05d" % number, b"new", durability="async")
        site.sync()
        site.collect_garbage()
        assert {value for _, value in rows} == {VALUE}
        wait_until(lambda: len(leases) == 0, "the version is still held")
        site.collect_garbage()
        with pytest.raises(VersionCollected):
            brief.scan(at=first)


def test_a_scan_over_several_partitions_is_held_from_the_call_on(
    server: Server, remote: Site, users: Namespace
) -> None:
    users.put_many({b"a": b"1", b"b": b"2"})
    remote.split("users", b"b")
    leases = server.service.leases
    rows = users.scan()
    assert len(leases) == 1
    assert list(rows) == [(b"a", b"1"), (b"b", b"2")]
    assert len(leases) == 0


def test_a_changes_stream_moves_its_hold_along(monkeypatch: pytest.MonkeyPatch, server: Server) -> None:
    hold_soon(monkeypatch)
    with connected(server) as client:
        users = client.create_namespace("users")
        follower = client.changes("users", since="now", follow=True)
        wait_until(lambda: len(server.service.leases) == 1, "the position is not held")
        users.put(b"ada", b"1")
        assert next(follower).value == b"1"
        follower.close()  # type: ignore[attr-defined]
        wait_until(lambda: len(server.service.leases) == 0, "the position is still held")


# Calls


over_both_ways = pytest.mark.parametrize(
    "served", [ServerOptions(), ServerOptions(resp_listen=None)], ids=["lines", "flight"], indirect=True
)


class Flaky:
    """A server that fails some calls, by cutting their connection before they are answered."""

    def __init__(self, server: Server, action: str, times: int) -> None:
        self.calls = 0

        def answer_and_cut(handle: Callable[[], bytes]) -> bytes:
            self.calls += 1
            answer = handle()
            if self.calls <= times:
                assert cut(server) > 0
            return answer

        cut = cut_lines if intercept(server, action, answer_and_cut) else cut_everything


@over_both_ways
def test_a_read_is_repeated_when_its_answer_is_lost(server: Server, users: Namespace) -> None:
    users.put(b"ada", b"1")
    flaky = Flaky(server, "get", times=2)
    assert users.get(b"ada") == b"1"
    assert flaky.calls == 3


@over_both_ways
def test_a_read_is_not_repeated_for_ever(server: Server, users: Namespace) -> None:
    flaky = Flaky(server, "get", times=100)
    with pytest.raises(Unreachable):
        users.get(b"ada")
    assert 2 <= flaky.calls <= 10


@over_both_ways
def test_a_write_whose_answer_is_lost_is_unknown_and_not_repeated(server: Server, users: Namespace) -> None:
    flaky = Flaky(server, "put", times=1)
    with pytest.raises(OutcomeUnknown):
        users.put(b"ada", b"1")
    assert flaky.calls == 1
    assert users.get(b"ada") == b"1", "this one did happen"


def test_a_call_that_changes_something_is_not_repeated_either(server: Server, remote: Site) -> None:
    flaky = Flaky(server, "administration.create_namespace", times=1)
    with pytest.raises(OutcomeUnknown):
        remote.create_namespace("users")
    assert flaky.calls == 1
    assert remote.namespaces() == ["users"]


def test_a_call_that_may_be_repeated_is(server: Server, remote: Site) -> None:
    flaky = Flaky(server, "administration.now", times=1)
    assert remote.now() > 0
    assert flaky.calls == 2


@over_both_ways
def test_a_call_has_a_deadline(server: Server, remote: Site, users: Namespace) -> None:
    users.put(b"ada", b"1")
    let_go = Event()

    def answer_late(handle: Callable[[], bytes]) -> bytes:
        assert let_go.wait(HANG_SECONDS)
        return handle()

    intercept(server, "put", answer_late)
    connection_of(remote).timeout_seconds = 0.3
    with pytest.raises(OutcomeUnknown, match=r"no answer within 0\.3 s"):
        users.put(b"ada", b"2")
    let_go.set()


def test_a_closed_connection_ends_its_streams(remote: Site, users: Namespace, server: Server) -> None:
    users.put(b"ada", b"1")
    follower = remote.changes("users", follow=True)
    assert next(follower).key == b"ada"
    remote.close()
    cut_everything(server)
    with pytest.raises(Closed):
        list(follower)


# How many streams may be open


def test_more_streams_than_the_server_takes_are_told_to_come_later() -> None:
    with serving(ServerOptions(streams_max=2)) as (site, server), connected(server) as client:
        site.create_namespace("users")
        followers = [client.changes("users", follow=True) for _ in range(2)]
        with pytest.raises(Retryable, match="2 open streams"):
            client.changes("users", follow=True)
        followers.pop().close()  # type: ignore[attr-defined]

        def has_room() -> bool:
            try:
                followers.append(client.changes("users", follow=True))
            except Retryable:
                return False
            return True

        wait_until(has_room, "the place is not free again")
        for follower in followers:
            follower.close()  # type: ignore[attr-defined]


def test_a_stream_of_a_namespace_that_is_not_there_fails_at_the_call(remote: Site, site: Site) -> None:
    remote.create_namespace("users")
    keys, namespace, since = find_scope(remote.host, "users", KeyRange())
    request = ChangesRequest(keys=keys, namespace=namespace, since=since)
    site.drop_namespace("users")
    with pytest.raises(NamespaceNotFound):
        remote.host.changes(request)
