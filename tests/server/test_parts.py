"""The parts of a server by themselves: cutting connections, leases, the gate, places for streams."""

import io
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from threading import Event, Thread

import msgspec
import pytest
from tests.server.support import connected, serving
from tests.waiting import HANG_SECONDS, wait_until

from floodmark.engine import MemoryEngine
from floodmark.model.access import Role
from floodmark.model.errors import NotAllowed, Retryable, Unreachable, VersionCollected
from floodmark.model.version import Version
from floodmark.partition import FAMILIES
from floodmark.server import Server, ServerOptions, configure_logging
from floodmark.server.access import Caller
from floodmark.server.calls import require_role
from floodmark.server.leases import LEASE_MS, Leases
from floodmark.server.memory import GIVE_BACK_EVERY_MS, FreedMemory, give_back
from floodmark.server.stalled import Watchdog, cut_connections
from floodmark.server.visits import Gate, StreamPlaces
from floodmark.site import Site, open_engine
from floodmark.testing.clock import SimulatedTime


@contextmanager
def connection(family: socket.AddressFamily, host: str) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection over loopback: the server's, and the client's."""
    with socket.socket(family) as listener:
        listener.bind((host, 0))
        listener.listen()
        with socket.create_connection(listener.getsockname()[:2]) as client:
            server, _ = listener.accept()
            with server:
                yield server, client


@pytest.mark.parametrize(
    ("family", "host", "peer"),
    [(socket.AF_INET, "127.0.0.1", "ipv4:127.0.0.1:{}"), (socket.AF_INET6, "::1", "ipv6:%5B::1%5D:{}")],
)
def test_only_the_connection_of_the_peer_is_cut(family: socket.AddressFamily, host: str, peer: str) -> None:
    with connection(family, host) as (server, client), connection(family, host) as (other, other_client):
        assert cut_connections({peer.format(client.getsockname()[1])}) == 1
        assert client.recv(1) == b"", "the client's end is still open"
        assert server.recv(1) == b"", "the server's end is still open"
        other.sendall(b"x")
        assert other_client.recv(1) == b"x"


@pytest.mark.parametrize("peer", ["", "unix:", "unix:/tmp/x", "ipv4:127.0.0.1:1", "nonsense", "a:b:c"])
def test_a_peer_that_is_not_there_is_nobody(peer: str) -> None:
    assert cut_connections({peer}) == 0


def test_cutting_leaves_no_descriptor_behind() -> None:
    with connection(socket.AF_INET, "127.0.0.1"):
        before = len(os.listdir("/dev/fd"))
        for _ in range(5):
            cut_connections({"ipv4:127.0.0.1:1"})
        assert len(os.listdir("/dev/fd")) == before


def test_a_watchdog_cuts_only_who_is_away_for_too_long() -> None:
    time = SimulatedTime(0)
    watchdog = Watchdog(time, stall_seconds=10)
    with connection(socket.AF_INET, "127.0.0.1") as (_, client):
        peer = f"ipv4:127.0.0.1:{client.getsockname()[1]}"
        with watchdog.watching(peer) as activity:
            time.advance(60_000)
            assert watchdog.cut_stalled() == 0, "it is at work"
            activity.leave()
            time.advance(9_999)
            assert watchdog.cut_stalled() == 0, "it has a little time left"
            activity.come_back()
            activity.leave()
            time.advance(9_999)
            assert watchdog.cut_stalled() == 0, "it has come back in between"
            time.advance(1)
            assert watchdog.cut_stalled() == 1
        assert watchdog.cut_waiting() == 0, "it is not watched any more"


def test_a_watchdog_outlives_a_bad_look() -> None:
    looks: list[int] = []

    def look() -> None:
        looks.append(1)
        raise ValueError("a bad look")

    watchdog = Watchdog(SimulatedTime(0), stall_seconds=0.01, on_look=[look])
    watchdog.start()
    wait_until(lambda: len(looks) > 3, "it has stopped looking")
    assert watchdog.is_alive()
    watchdog.close()
    assert not watchdog.is_alive()


# Leases


@pytest.fixture
def time() -> SimulatedTime:
    return SimulatedTime(1_700_000_000_000)


@pytest.fixture
def brief(time: SimulatedTime) -> Iterator[Site]:
    """A site whose namespace keeps no history."""
    with open_engine(MemoryEngine(FAMILIES), site="oslo", site_id=7, time_source=time) as site:
        site.create_namespace("brief", retention=timedelta(0))
        yield site


def is_kept(site: Site, time: SimulatedTime, version: Version) -> bool:
    """Whether the past is still there after garbage collection."""
    site.namespace("brief").put(b"ada", b"2")
    time.advance(1_000)
    site.collect_garbage()
    try:
        return site.namespace("brief").get(b"ada", at=version) == b"1"
    except VersionCollected:
        return False


def test_a_lease_keeps_a_version_until_it_is_released(brief: Site, time: SimulatedTime) -> None:
    leases = Leases(brief.host, time)
    version = brief.namespace("brief").put(b"ada", b"1")
    lease = leases.hold("ada", version, 1, None)
    assert is_kept(brief, time, version)
    leases.release("eve", lease)
    assert is_kept(brief, time, version), "somebody else has released it"
    leases.release("ada", lease)
    leases.release("ada", lease)
    assert not is_kept(brief, time, version)
    with pytest.raises(VersionCollected):
        leases.hold("ada", version, 1, None)


def test_a_lease_that_is_not_renewed_ends(brief: Site, time: SimulatedTime) -> None:
    leases = Leases(brief.host, time)
    version = brief.namespace("brief").put(b"ada", b"1")
    lease = leases.hold("ada", version, 1, None)
    time.advance(LEASE_MS - 1)
    leases.expire()
    lease = leases.hold("ada", version, 1, lease)
    time.advance(LEASE_MS - 5_000)
    leases.expire()
    assert is_kept(brief, time, version)
    assert len(leases) == 1
    time.advance(4_000)
    leases.expire()
    assert len(leases) == 0
    assert not is_kept(brief, time, version)


def test_leases_are_bounded(brief: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("floodmark.server.leases.LEASES_MAX", 3)
    leases = Leases(brief.host, SimulatedTime(0))
    for _ in range(3):
        leases.hold("ada", brief.now(), 1, None)
    with pytest.raises(Retryable):
        leases.hold("ada", brief.now(), 1, None)
    leases.close()
    assert len(leases) == 0


def test_one_caller_does_not_use_up_the_leases_of_all(brief: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("floodmark.server.leases.LEASES_PER_CALLER_MAX", 2)
    leases = Leases(brief.host, SimulatedTime(0))
    first = leases.hold("ada", brief.now(), 1, None)
    leases.hold("ada", brief.now(), 1, None)
    for earlier in (None, 12345):
        with pytest.raises(Retryable, match="'ada' holds"):
            leases.hold("ada", brief.now(), 1, earlier)
    renewed = leases.hold("ada", brief.now(), 1, first)
    for _ in range(2):
        leases.hold("eve", brief.now(), 1, None)
    with pytest.raises(Retryable):
        leases.hold("eve", brief.now(), 1, renewed)
    leases.release("ada", renewed)
    leases.hold("ada", brief.now(), 1, None)
    leases.close()


# Memory


def test_memory_is_given_back_after_somebody_used_much_and_not_too_often(
    time: SimulatedTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[int] = []
    monkeypatch.setattr("floodmark.server.memory.give_back", lambda: given.append(time()))
    memory = FreedMemory(time)
    time.advance(GIVE_BACK_EVERY_MS)
    memory.give_back_if_due()
    assert not given, "nobody has used much"
    memory.note_much_used()
    memory.give_back_if_due()
    memory.note_much_used()
    time.advance(GIVE_BACK_EVERY_MS - 1)
    memory.give_back_if_due()
    assert len(given) == 1, "it was given back a moment ago"
    time.advance(1)
    memory.give_back_if_due()
    assert len(given) == 2


def test_giving_back_harms_nobody() -> None:
    kept = [bytes(10_000) for _ in range(1_000)]
    give_back()
    assert sum(map(len, kept)) == 10_000_000


# The gate, places and roles


def test_a_gate_lets_those_inside_finish_and_nobody_in() -> None:
    gate, finish, inside = Gate(), Event(), Event()

    def visit() -> None:
        with gate.passing():
            inside.set()
            assert finish.wait(HANG_SECONDS)

    visitor = Thread(target=visit)
    visitor.start()
    assert inside.wait(HANG_SECONDS)
    gate.stop()
    with pytest.raises(Unreachable), gate.passing():
        pass
    assert not gate.wait_empty(0.01)
    finish.set()
    assert gate.wait_empty(HANG_SECONDS)
    visitor.join()


def test_places_are_bounded_in_all_and_by_caller() -> None:
    ended: list[int] = []
    places = StreamPlaces(2, 1, on_end=lambda: ended.append(1))
    ada, bob, cyd = (Caller(name, Role.READ) for name in ("ada", "bob", "cyd"))
    with places.taking(ada):
        with pytest.raises(Retryable, match="'ada'"), places.taking(ada):
            pass
        with places.taking(bob), pytest.raises(Retryable, match="takes no more"), places.taking(cyd):
            pass
        with places.taking(cyd):
            pass
    with places.taking(ada):
        pass
    assert len(ended) == 4


def test_a_role_is_required_wherever_it_is_held() -> None:
    require_role(Caller("ada", Role.WRITE, frozenset({"users"})), Role.WRITE)
    for namespaces in (None, frozenset({"users"}), frozenset[str]()):
        with pytest.raises(NotAllowed):
            require_role(Caller("ada", Role.READ, namespaces), Role.WRITE)


def test_health_and_metrics_are_served_beside() -> None:
    with serving(ServerOptions(metrics_listen="127.0.0.1:0")) as (_, server):
        with connected(server) as client:
            client.create_namespace("users").put(b"ada", b"1")
            list(client.changes("users"))
        assert fetch(server, "/healthz") == "ok\n"
        assert fetch(server, "/readyz") == "ok\n"
        page = fetch(server, "/metrics")
        assert 'action="put",outcome="done",site="oslo"} 1.0' in page
        assert 'action="changes",outcome="done",site="oslo"} 1.0' in page
        server.service.gate.stop()
        assert "stopping" in fetch(server, "/readyz")


def test_metrics_tell_how_far_each_feed_lies_behind() -> None:
    """The checkpoint's lag is the recovery point: an alarm stands on it."""
    with serving(ServerOptions(metrics_listen="127.0.0.1:0")) as (site, server):
        site.create_namespace("users").put(b"ada", b"1")
        site.feeds.create("lake", "users", "blackhole:")
        page = fetch(server, "/metrics")
        for name in ("checkpoint", "resolved"):
            lines = [
                line for line in page.splitlines() if line.startswith(f"floodmark_feed_{name}_lag_seconds")
            ]
            assert len(lines) == 1
            assert 'feed="lake"' in lines[0]
            assert float(lines[0].split()[-1]) >= 0
        site.feeds.remove("lake")
        assert 'feed="lake"' not in fetch(server, "/metrics")


def test_log_tells_of_feeds_and_partitions_by_name() -> None:
    """Whoever searches the lines of a feed or a partition finds what became of it."""
    lines = io.StringIO()
    undo = configure_logging(site="oslo", stream=lines)
    try:
        with serving() as (site, _):
            site.create_namespace("users").put(b"ada", b"1")
            (partition,) = site.partitions()
            site.split("users", b"m")
            site.feeds.create("lake", "users", "blackhole:")
            site.feeds.pause("lake")
    finally:
        undo()
    records = [msgspec.json.decode(line) for line in lines.getvalue().splitlines()]
    assert [record["message"] for record in records if record.get("feed") == "lake"] == [
        "feed lake is normal",
        "feed lake is stopped",
    ]
    assert [record["site"] for record in records if record.get("partition") == partition.id] == ["oslo"]


def fetch(server: Server, path: str) -> str:
    assert server.metrics_address is not None
    with socket.create_connection(server.metrics_address, timeout=10) as client:
        client.sendall(f"GET {path} HTTP/1.0\r\n\r\n".encode())
        response = b""
        while piece := client.recv(65_536):
            response += piece
    return response.partition(b"\r\n\r\n")[2].decode()
