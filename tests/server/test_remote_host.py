"""What a remote site stands on: the server's clock, and commits that outlive a restart."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from typing import Any

import pytest
from tests.server.support import qualify, restartable, serving, stored
from tests.site.support import node_of
from tests.waiting import HANG_SECONDS, wait_until

from floodmark.host.remote import CLOCK_MS_MAX, ServerClock
from floodmark.model.partition import Decision, Fate, HoldKind
from floodmark.partition import holds
from floodmark.server import Server
from floodmark.site import Namespace, Site
from floodmark.site.connecting import connect
from floodmark.testing.clock import SimulatedTime
from floodmark.wire import Connection


class SlowConnection:
    """Takes its time for an answer, which was right when the server gave it."""

    def __init__(self, connection: Connection, time: SimulatedTime, delay_ms: int) -> None:
        self._connection = connection
        self._time = time
        self._delay_ms = delay_ms
        self.calls = 0

    def run(self, work: Callable[["SlowConnection"], Any]) -> Any:
        """Do something over this connection."""
        return work(self)

    def hello(self) -> Any:
        """Ask, and let time pass on the way there and back."""
        self.calls += 1
        self._time.advance(self._delay_ms)
        answer = self._connection.hello()
        self._time.advance(self._delay_ms)
        return answer


@pytest.fixture
def connection(server: Server) -> Iterator[Connection]:
    with closing(Connection(server.url)) as connection:
        yield connection


def test_the_clock_of_the_server_is_never_told_too_early(connection: Connection) -> None:
    time = SimulatedTime(0)
    slow: Any = SlowConnection(connection, time, delay_ms=400)
    clock = ServerClock(slow, time)
    answered = clock.hello().physical_ms
    # Half of the way has passed since the server looked at its clock.
    assert clock.physical_ms() >= answered + 400
    assert clock.physical_ms() <= answered + 800
    time.advance(1_000)
    assert clock.physical_ms() >= answered + 1_400


def test_the_time_of_the_next_version_is_the_servers_after_its_clock_was_set_back() -> None:
    time, here = SimulatedTime(), SimulatedTime(0)
    with serving(time=time) as (_, server), closing(Connection(server.url)) as connection:
        slow: Any = SlowConnection(connection, here, delay_ms=0)
        clock = ServerClock(slow, here)
        began = clock.hello().physical_ms
        assert clock.version_ms() == began
        time.advance(-3_600_000)
        assert clock.hello().physical_ms <= began - 3_600_000 + 500
        here.advance(30_000)
        assert clock.version_ms() == began
        time.advance(3_600_000 + 10_000)
        clock.hello()
        assert clock.version_ms() == began + 10_000


def test_what_holds_the_resolved_version_back_is_named_to_a_client(
    site: Site, remote: Site, users: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holds, "HOLD_MS_MAX", -1)
    node = node_of(site)
    node.settle_by(lambda _: Fate(Decision.UNDECIDED))
    version = node.map.route(b"").prepare("0-7", [qualify(users, b"ada")], [stored(b"countess")])
    (hold,) = remote.statistics().held_back_by
    assert (hold.kind, hold.version, hold.transaction) == (HoldKind.PREPARED, version - 1, "0-7")
    found = {finding.check: finding for finding in remote.host.verification.examine(True)}
    assert "transaction 0-7 has held the resolved version" in found["resolved"].message


def test_the_clock_is_asked_for_again_after_a_while(connection: Connection) -> None:
    time = SimulatedTime(0)
    slow: Any = SlowConnection(connection, time, delay_ms=0)
    clock = ServerClock(slow, time)
    clock.hello()
    clock.physical_ms()
    assert slow.calls == 1
    time.advance(CLOCK_MS_MAX + 1)
    clock.physical_ms()
    assert slow.calls == 2


def test_a_time_to_live_begins_at_the_servers_time(users: Namespace, site: Site) -> None:
    users.put(b"ada", b"1", ttl=timedelta(seconds=100))
    record = users.record(b"ada")
    assert record is not None
    assert record.expires_at is not None
    assert 99_000 <= record.expires_at * 1000 - site.host.physical_ms() <= 102_000


def test_a_commit_is_asked_for_until_a_server_that_is_restarted_answers() -> None:
    with restartable() as (start, stop), connect(start()) as client, ThreadPoolExecutor(1) as thread:
        users = client.create_namespace("users")
        transaction = thread.submit(client.transaction, coordinator=0).result(HANG_SECONDS)
        thread.submit(transaction.put, users, b"ada", b"countess").result(HANG_SECONDS)
        stop()
        committing = thread.submit(transaction.commit)
        start()
        assert committing.result(HANG_SECONDS) > 0
        wait_until(lambda: users.get(b"ada") == b"countess", "the server does not come back")
