"""Streams from outside over the wire: who may open epochs and cut changes, and hold which safe points."""

from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest
from tests.server.support import (
    connected,
    in_threads,
    nodes_at,
    qualify,
    restartable,
    serving,
    stored,
    token_of,
    write_roles,
)
from tests.waiting import HANG_SECONDS

from floodmark.codec.values import TOMBSTONE, encode_value
from floodmark.model.access import Role
from floodmark.model.change import Stamp
from floodmark.model.errors import (
    InvalidArgument,
    InvalidName,
    InvalidValue,
    InvalidVersion,
    LimitExceeded,
    NotAllowed,
    SafePointNotFound,
)
from floodmark.model.limits import VALUE_BYTES_MAX
from floodmark.model.partition import ApplyStream, PutUnchangedStream
from floodmark.model.version import Version
from floodmark.server import Server, ServerOptions
from floodmark.site import Site
from floodmark.site.connecting import connect
from floodmark.wire import RemoteWriteStream

MINE, OTHER = "mine", "other"
LARGE_COPY = encode_value(bytes(VALUE_BYTES_MAX + 1), origin=Stamp(1, 9))
DAY = timedelta(days=1)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    access = write_roles(Path(tmp_path_factory.mktemp("access")) / "access.toml", MINE, OTHER)
    with serving(ServerOptions(access=access)) as (site, server):
        site.create_namespace(MINE)
        site.create_namespace(OTHER)
        yield server


def as_caller(server: Server, role: Role, limit: str | None, use: Callable[[Site], object]) -> bool:
    """Whether a caller is let through."""
    with connected(server, token=token_of(role, limit)) as site:
        try:
            use(site)
        except (NotAllowed, SafePointNotFound):
            return False
        return True


# Who may do what


def test_opening_an_epoch_needs_write_on_its_namespace(server: Server) -> None:
    def use(site: Site) -> object:
        # A stream of its own for each caller: the first to open an epoch owns the stream.
        stream = f"spark/{len(opened)}"
        opened.append(stream)
        return site.host.versions.open_epoch(MINE, stream, 1)

    opened: list[str] = []
    enough = [role >= Role.WRITE for role in Role]
    assert [as_caller(server, role, MINE, use) for role in Role] == enough
    assert [as_caller(server, role, None, use) for role in Role] == enough
    assert not as_caller(server, Role.ADMIN, OTHER, use)


def test_the_epochs_of_a_stream_are_opened_by_its_owner_or_the_site(server: Server) -> None:
    """A version that another draws early would make the owner's later writes lose."""

    def use(epoch: int) -> Callable[[Site], object]:
        return lambda site: site.host.versions.open_epoch(MINE, "spark/owned", epoch)

    assert as_caller(server, Role.WRITE, MINE, use(0))
    for other, limit in ((Role.WRITE, None), (Role.REPLICATE, MINE), (Role.ADMIN, MINE)):
        assert not as_caller(server, other, limit, use(1))
        assert not as_caller(server, other, limit, use(0))
    assert as_caller(server, Role.ADMIN, None, use(1))
    assert as_caller(server, Role.WRITE, MINE, use(1))
    assert not as_caller(server, Role.WRITE, None, use(2))


def test_an_owner_cannot_be_claimed(server: Server) -> None:
    """The server says who calls; what a request says of its owner is not heard."""
    assert as_caller(server, Role.WRITE, MINE, lambda site: open_claimed(site, ""))
    assert not as_caller(server, Role.WRITE, None, lambda site: open_claimed(site, ""))


def open_claimed(site: Site, owner: str) -> Version:
    return site.host.versions.open_epoch(MINE, "spark/claimed", 0, owner)


def test_cutting_changes_needs_read_on_their_namespace(server: Server) -> None:
    def use(site: Site) -> object:
        return site.host.versions.cut_changes(MINE, 0, 10, None, False)

    assert all(as_caller(server, role, limit, use) for role in Role for limit in (MINE, None))
    assert not as_caller(server, Role.ADMIN, OTHER, use)


def hold(name: str, namespace: str | None = MINE, lifetime: timedelta = DAY) -> Callable[[Site], object]:
    def use(site: Site) -> object:
        host = site.host
        return host.retention.hold_safe_point(name, host.versions.now(), lifetime, namespace)

    return use


def release(name: str) -> Callable[[Site], object]:
    return lambda site: site.host.retention.release_safe_point(name)


def test_reader_keeps_what_it_reads_by_a_safe_point_of_its_own(server: Server) -> None:
    assert as_caller(server, Role.READ, MINE, hold("spark/reader"))
    assert as_caller(server, Role.READ, MINE, hold("spark/reader"))
    assert not as_caller(server, Role.READ, OTHER, release("spark/reader"))
    assert as_caller(server, Role.READ, MINE, release("spark/reader"))


def test_reader_holds_nothing_else(server: Server) -> None:
    """Not under any name, not of the whole site, not of others' namespaces, and not for years."""
    for use in (
        hold("reader"),
        hold("spark/all", None),
        hold("spark/theirs", OTHER),
        hold("spark/long", lifetime=31 * DAY),
    ):
        assert not as_caller(server, Role.READ, MINE, use)
    with connected(server, token=token_of(Role.ADMIN)) as site:
        assert site.host.retention.safe_points() == []


def test_safe_points_of_others_are_neither_taken_nor_released(server: Server) -> None:
    assert as_caller(server, Role.READ, OTHER, hold("spark/theirs", OTHER))
    assert as_caller(server, Role.ADMIN, None, hold("spark/all", None))
    assert as_caller(server, Role.ADMIN, None, hold("administrator's"))
    for name in ("spark/theirs", "spark/all"):
        assert not as_caller(server, Role.READ, MINE, hold(name))
        assert not as_caller(server, Role.READ, MINE, release(name))
    assert not as_caller(server, Role.READ, MINE, release("administrator's"))
    with connected(server, token=token_of(Role.ADMIN)) as site:
        points = {point.name: point.namespace for point in site.host.retention.safe_points()}
        assert list(points) == ["administrator's", "spark/all", "spark/theirs"]
        assert points["spark/all"] is None
        for name in points:
            site.host.retention.release_safe_point(name)


def test_an_administrator_of_a_namespace_does_not_take_over_what_the_site_holds(server: Server) -> None:
    assert as_caller(server, Role.ADMIN, None, hold("nightly-backup", None))
    assert as_caller(server, Role.ADMIN, None, hold("of-mine"))
    for name in ("nightly-backup", "of-mine"):
        assert not as_caller(server, Role.ADMIN, MINE, hold(name))
        assert not as_caller(server, Role.ADMIN, MINE, release(name))
    assert as_caller(server, Role.ADMIN, MINE, hold("own"))
    assert not as_caller(server, Role.ADMIN, OTHER, hold("own", OTHER))
    assert as_caller(server, Role.ADMIN, MINE, hold("own"))
    assert as_caller(server, Role.ADMIN, MINE, release("own"))
    with connected(server, token=token_of(Role.ADMIN)) as site:
        points = {point.name: point.namespace for point in site.host.retention.safe_points()}
        assert points["nightly-backup"] is None
        for name in points:
            site.host.retention.release_safe_point(name)


def test_one_caller_does_not_use_up_the_safe_points_of_all(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("floodmark.feed.safepoints.SAFE_POINTS_PER_CALLER_MAX", 3)
    with connected(server, token=token_of(Role.READ, MINE)) as site:
        for number in range(3):
            hold(f"spark/{number}")(site)
        with pytest.raises(LimitExceeded, match="one caller"):
            hold("spark/3")(site)
        hold("spark/2")(site)
        assert as_caller(server, Role.READ, OTHER, hold("spark/3", OTHER))
        release("spark/0")(site)
        hold("spark/4")(site)
    with connected(server, token=token_of(Role.ADMIN)) as site:
        for point in site.host.retention.safe_points():
            site.host.retention.release_safe_point(point.name)


def test_safe_point_that_is_gone_is_not_found_and_others_are_not_named(server: Server) -> None:
    assert as_caller(server, Role.READ, OTHER, hold("spark/theirs", OTHER))
    with connected(server, token=token_of(Role.READ, MINE)) as site:
        with pytest.raises(SafePointNotFound) as caught:
            site.host.retention.release_safe_point("spark/gone")
        assert "theirs" not in str(caught.value)
    assert as_caller(server, Role.READ, OTHER, release("spark/theirs"))


@pytest.mark.parametrize("name", ["spark/", "spark/a b", "spark/a/b", "feed/spark/a", "spark//a"])
def test_name_of_a_readers_safe_point_is_a_name(server: Server, name: str) -> None:
    with connected(server, token=token_of(Role.ADMIN)) as site, pytest.raises(InvalidName):
        hold(name)(site)


# Over the wire


def test_epoch_is_the_same_after_the_server_was_started_again() -> None:
    with restartable() as (start, stop), connect(start()) as site:
        site.create_namespace(MINE)
        version = site.host.versions.open_epoch(MINE, "spark/query", 4)
        stop()
        start()
        assert site.host.versions.open_epoch(MINE, "spark/query", 4) == version


def test_many_clients_get_one_version(server: Server) -> None:
    def open_epochs(_: int) -> list[Version]:
        with connected(server, token=token_of(Role.WRITE, MINE)) as site:
            return [site.host.versions.open_epoch(MINE, "spark/many", epoch) for epoch in range(5)]

    found = in_threads(open_epochs, 6)
    assert all(versions == found[0] for versions in found)
    assert found[0] == sorted(set(found[0]))


def test_long_stream_of_an_epoch_is_written_again_without_harm(server: Server) -> None:
    with connected(server, token=token_of(Role.ADMIN)) as site:
        namespace = site.namespace(MINE)
        version = site.host.versions.open_epoch(MINE, "spark/long", 0)
        keys = [qualify(namespace, b"%05d" % number) for number in range(4_000)]

        def write(value: bytes) -> int:
            stream = site.host.write_stream(PutUnchangedStream(True, version))
            with closing(stream):
                batches = [keys[start : start + 500] for start in range(0, len(keys), 500)]
                sent = [stream.send(dict.fromkeys(batch, stored(value))) for batch in batches]
                return sum(future.result(HANG_SECONDS) for future in sent)

        assert write(b"1") == 4_000
        namespace.put(b"00007", b"later")
        namespace.delete(b"03999")
        assert write(b"2") == 0
        state = dict(namespace.scan())
        assert (len(state), state[b"00007"], state[b"00008"]) == (3_999, b"later", b"1")


def test_records_that_do_not_belong_into_a_stream_are_refused(server: Server) -> None:
    copy, own = encode_value(b"x", origin=Stamp(1, 9)), stored(b"x")
    with connected(server, token=token_of(Role.ADMIN)) as site:
        key = qualify(site.namespace(OTHER), b"key")
        now = site.now()
        unchanged = site.host.write_stream(PutUnchangedStream(True, now))
        applying = site.host.write_stream(ApplyStream(True))
        with closing(unchanged), closing(applying):
            damaged = [b"\x04", copy[1 - 10 :], copy[:-1] + b"\x0c", copy[:-1] + b"\x06", b"", LARGE_COPY]
            for stream, wrong in [
                (unchanged, copy),
                *((applying, bad) for bad in (own, TOMBSTONE, *damaged)),
            ]:
                with pytest.raises(InvalidValue):
                    stream.send({key: wrong, key + b"fine": copy}).result(HANG_SECONDS)
            assert unchanged.send({key: own}).result(HANG_SECONDS) == 1
            assert applying.send({key: copy}).result(HANG_SECONDS) == 0


def test_version_that_is_none_is_refused(server: Server) -> None:
    with connected(server, token=token_of(Role.ADMIN)) as site:
        key = qualify(site.namespace(OTHER), b"key")
        partition = site.host.router.maps.map.partitions[0]
        with closing(nodes_at(server.url, token=token_of(Role.ADMIN))) as nodes:
            stream = RemoteWriteStream(nodes, PutUnchangedStream(True, 0))
            stream._command = msgspec.msgpack.encode({"type": "put_unchanged", "durable": True, "since": -1})
            with closing(stream), pytest.raises(InvalidVersion):
                stream.send({key: stored(b"x")}).result(HANG_SECONDS)
        with pytest.raises(InvalidVersion):
            partition.put_unchanged([key], [stored(b"x")], -1, durable=True)
        with pytest.raises(InvalidVersion):
            site.host.versions.cut_changes(OTHER, -1, 1, None, False)
        with pytest.raises(InvalidVersion):
            site.host.versions.cut_changes(OTHER, 0, 1, -1, False)
        with pytest.raises(InvalidArgument):
            partition.put_unchanged([key, key], [stored(b"x")] * 2, 1, durable=True)


def test_one_caller_does_not_use_up_the_streams_of_all(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("floodmark.host.epochs.EPOCH_STREAMS_PER_CALLER_MAX", 3)
    with connected(server, token=token_of(Role.REPLICATE, OTHER)) as site:
        for number in range(3):
            site.host.versions.open_epoch(OTHER, f"query-{number}", 0)
        with pytest.raises(LimitExceeded, match="one caller"):
            site.host.versions.open_epoch(OTHER, "query-3", 0)
        site.host.versions.open_epoch(OTHER, "query-2", 1)
    with connected(server, token=token_of(Role.ADMIN)) as site:
        for number in range(3, 8):
            site.host.versions.open_epoch(OTHER, f"query-{number}", 0)
