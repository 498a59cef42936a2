"""Servers that end under load: killed, or stopped cleanly.  What was acknowledged is there afterwards.

Every attempt writes a key of its own.  What was acknowledged must be there; what was refused must not;
what is told to be unknown may be either.
"""

import signal
from collections.abc import Callable
from itertools import count
from pathlib import Path
from random import Random
from threading import Barrier, Event, Lock, Thread
from typing import Any

import pytest
from tests.server.processes import start_server
from tests.server.support import connected, qualify, serving, stored
from tests.site.support import node_of
from tests.sizes import only
from tests.waiting import HANG_SECONDS, wait_until

import floodmark
from floodmark.model.errors import Closed, FloodmarkError, OutcomeUnknown, Retryable, Unreachable
from floodmark.model.partition import PutStream
from floodmark.server import ServerOptions
from floodmark.site import Namespace, Site
from floodmark.site.connecting import connect

THREADS = 4
BATCH = 5


class Load:
    """Threads that write to a server until it is gone, and remember what they were told."""

    def __init__(self, site: Site) -> None:
        self._users = site.namespace("users")
        self._site = site
        self._lock = Lock()
        self.acknowledged: set[bytes] = set()
        self.refused: set[bytes] = set()
        self.unknown: set[bytes] = set()
        self._began = Barrier(2 * THREADS + 1)
        kinds: list[Callable[[int], None]] = [self._put, self._stream]
        self._threads = [
            Thread(target=kind, args=(number,), daemon=True) for number in range(THREADS) for kind in kinds
        ]

    def start(self) -> None:
        """Return when every thread has had an answer."""
        for thread in self._threads:
            thread.start()
        self._began.wait(HANG_SECONDS)

    def join(self) -> None:
        """Return when every thread has noticed that the server is gone."""
        for thread in self._threads:
            thread.join(HANG_SECONDS)
            assert not thread.is_alive(), "a writer hangs"

    def _put(self, number: int) -> None:
        for step in count():
            key = b"put-%d-%d" % (number, step)
            try:
                self._users.put(key, b"x")
            except FloodmarkError as error:
                self._note(error, [key])
                return
            self._note(None, [key])
            if step == 0:
                self._began.wait(HANG_SECONDS)

    def _stream(self, number: int) -> None:
        stream = self._site.host.write_stream(PutStream(True))
        ended = Event()
        waiting = []
        for step in count():
            keys = [b"stream-%d-%d-%d" % (number, step, place) for place in range(BATCH)]
            try:
                future = stream.send({qualify(self._users, key): stored(b"x") for key in keys})
            except FloodmarkError as error:
                self._note(error, keys)
                break
            waiting.append((future, keys))
            if step == 0:
                future.result(HANG_SECONDS)
                self._began.wait(HANG_SECONDS)
            if future.done() and future.exception() is not None:
                ended.set()
            if ended.is_set():
                break
        for future, keys in waiting:
            self._note(future.exception(HANG_SECONDS), keys)

    def _note(self, error: BaseException | None, keys: list[bytes]) -> None:
        with self._lock:
            if error is None:
                self.acknowledged.update(keys)
            elif isinstance(error, OutcomeUnknown):
                self.unknown.update(keys)
            else:
                assert isinstance(error, Retryable | Closed), repr(error)
                self.refused.update(keys)

    def check(self, site: Site) -> None:
        """Compare with what is there."""
        there = {key for key, _ in site.namespace("users").scan()}
        assert self.acknowledged <= there, f"lost: {sorted(self.acknowledged - there)[:3]}"
        assert not self.refused & there, f"refused, but there: {sorted(self.refused & there)[:3]}"
        assert there <= self.acknowledged | self.unknown
        batches: dict[bytes, int] = {}
        for key in there:
            if key.startswith(b"stream-"):
                name = key.rpartition(b"-")[0]
                batches[name] = batches.get(name, 0) + 1
        assert set(batches.values()) <= {BATCH}, "a commit was split"


@pytest.mark.parametrize("seed", only([0], range(3)))
def test_a_killed_server_has_lost_nothing_that_it_acknowledged(tmp_path: Path, seed: int) -> None:
    server = start_server(tmp_path / "oslo")
    with connect(server.said) as site:
        site.create_namespace("users")
        load = Load(site)
        load.start()
        Event().wait(Random(seed).uniform(0.05, 0.6))
        server.kill()
        load.join()
    assert len(load.acknowledged) > THREADS
    with floodmark.open(tmp_path / "oslo", background=False) as site:
        load.check(site)


@pytest.mark.parametrize("seed", only([0], range(2)))
def test_a_stopped_server_finishes_what_it_began_and_refuses_the_rest(tmp_path: Path, seed: int) -> None:
    server = start_server(tmp_path / "oslo")
    with connect(server.said) as site:
        site.create_namespace("users")
        follower = site.changes("users", follow=True)
        load = Load(site)
        load.start()
        Event().wait(Random(seed).uniform(0.05, 0.4))
        server.popen.send_signal(signal.SIGTERM)
        said, errors = server.popen.communicate(timeout=HANG_SECONDS)
        load.join()
        follower.close()  # type: ignore[attr-defined]
    assert said == "closed\n"
    assert server.popen.returncode == 0, errors
    assert "Traceback" not in errors, errors
    with floodmark.open(tmp_path / "oslo", background=False) as site:
        load.check(site)


def test_the_check_finds_what_is_missing_and_what_is_too_much(users: Namespace, remote: Site) -> None:
    """The canary."""
    users.put(b"put-0-0", b"x")
    load = Load(remote)
    load.acknowledged = {b"put-0-0"}
    load.check(remote)
    for told in ("acknowledged", "refused"):
        broken = Load(remote)
        broken.acknowledged = {b"put-0-0"}
        getattr(broken, told).add(b"put-0-1" if told == "acknowledged" else b"put-0-0")
        with pytest.raises(AssertionError):
            broken.check(remote)


def test_closing_waits_for_calls_and_ends_streams() -> None:
    with serving() as (site, server), connected(server) as client:
        users = client.create_namespace("users")
        follower = client.changes("users", follow=True)
        users.put(b"ada", b"1")
        assert next(follower).key == b"ada"
        server.close()
        with pytest.raises(Closed):
            site.namespaces()
        with pytest.raises(Unreachable):
            users.get(b"ada")
        with pytest.raises(Unreachable):
            users.put(b"ada", b"2")
        client.close()
        with pytest.raises(Closed):
            list(follower)


def test_closing_does_not_wait_until_idle_followers_look_around(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("floodmark.feed.reading.reader.FOLLOW_SECONDS", 10 * HANG_SECONDS)
    with serving() as (site, server), connected(server) as client:
        client.create_namespace("users")
        follower: Any = client.changes("users", since="now", follow=True)
        followers = node_of(site).committer.followers
        wait_until(lambda: followers.is_watched, "no reader waits")
        cuts: list[None] = []
        monkeypatch.setattr(server.service.watchdog, "cut_waiting", lambda: cuts.append(None))
        server.close(timeout_seconds=HANG_SECONDS)
        assert not cuts, "the server had to cut a stream off"
        client.close()
        follower.close()


def test_closing_does_not_wait_for_a_client_that_does_not_read() -> None:
    with serving(ServerOptions(stall_seconds=3600)) as (_, server), connected(server) as client:
        users = client.create_namespace("users")
        for start in range(0, 12_000, 2_000):
            users.put_many(
                {b"%05d" % number: bytes(2_000) for number in range(start, start + 2_000)}, durability="async"
            )
        rows = users.scan()
        next(rows)
        watchdog = server.service.watchdog
        wait_until(
            lambda: any(each.away_since_ms for each in watchdog._activities),
            "the server does not wait",
        )
        server.close(timeout_seconds=1.0)
        client.close()
