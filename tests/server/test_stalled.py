"""Clients that stall or vanish: the server gets its threads and its memory back.

The server and its clients are processes of their own.  "Back" is measured against what the server used
after other clients had read everything and had gone.
"""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.server.processes import Process, stalled_clients, start_server
from tests.waiting import wait_until

import floodmark
from floodmark.server.stalled import STALL_SECONDS
from floodmark.site.connecting import connect

KINDS = ["scan", "changes", "write"]
ROWS = 20_000
VALUE = bytes(3_000)
TOLERANCE = 1.05
# Looks at the server, 0.1 s apart: longer than it takes before it gives memory back.
REST_LOOKS = 30


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A site with 60 MB of data, more than the buffers between a server and its clients hold."""
    path = Path(tmp_path_factory.mktemp("stalled")) / "oslo"
    with floodmark.open(path, site="oslo", background=False) as site:
        big = site.create_namespace("big")
        for start in range(0, ROWS, 1_000):
            big.put_many({b"%d" % number: VALUE for number in range(start, start + 1_000)})
    return path


@pytest.fixture
def server(directory: Path, request: pytest.FixtureRequest) -> Iterator[Process]:
    process = start_server(directory, stall_seconds=request.param)
    warm_up(process)
    yield process
    process.kill()


def warm_up(server: Process) -> None:
    """Let the server do once what it will do: caches fill, and threads come and go."""
    with stalled_clients(server.said, *KINDS):
        pass
    read_all(server)


def read_all(server: Process) -> None:
    with connect(server.said) as site:
        assert sum(1 for _ in site.namespace("big").scan()) >= ROWS
        assert sum(1 for _ in site.changes("big")) >= ROWS


class Usage:
    """What a server uses once it has come to rest: for a while it uses no less.

    It has served such readers before: what allocators keep of the first ones is no loss.
    """

    def __init__(self, server: Process) -> None:
        read_all(server)
        self._server = server
        self._threads, self.resident_bytes = server.threads, server.resident_bytes
        self._looks = 0
        wait_until(self._is_at_rest, "the server does not come to rest", pause_seconds=0.1)

    def _is_at_rest(self) -> bool:
        threads, resident_bytes = self._server.threads, self._server.resident_bytes
        less = threads < self._threads or resident_bytes < self.resident_bytes
        self._looks = 0 if less else self._looks + 1
        self._threads = min(self._threads, threads)
        self.resident_bytes = min(self.resident_bytes, resident_bytes)
        return self._looks == REST_LOOKS

    def wait_back(self) -> None:
        """Return when the server uses no more than that, and 5 %."""
        wait_until(self._is_back, self._describe)

    def threads_grown(self) -> int:
        """How many more threads it has now."""
        return self._server.threads - self._threads

    def _is_back(self) -> bool:
        server = self._server
        return (
            server.threads <= self._threads * TOLERANCE
            and server.resident_bytes <= self.resident_bytes * TOLERANCE
        )

    def _describe(self) -> str:
        return (
            f"threads {self._threads} → {self._server.threads}, "
            f"resident {self.resident_bytes:,} → {self._server.resident_bytes:,}, "
            f"{self._server.thread_names()}"
        )


@pytest.mark.slow
@pytest.mark.parametrize("server", [2.0], indirect=True)
def test_threads_and_memory_come_back(server: Process) -> None:
    usage = Usage(server)
    with stalled_clients(server.said, *KINDS, *KINDS) as clients:
        assert usage.threads_grown() >= len(KINDS) - 1, "the clients hold nothing: this proves nothing"
        # The others live on, and do nothing any more.
        for client in clients[: len(KINDS)]:
            client.popen.kill()
        usage.wait_back()
        with connect(server.said) as site:
            assert site.namespace("big").get(b"1") == VALUE


@pytest.mark.slow
@pytest.mark.parametrize("server", [STALL_SECONDS], indirect=True)
def test_a_stopped_client_is_gone_after_the_time_that_servers_are_set_up_with(server: Process) -> None:
    usage = Usage(server)
    with stalled_clients(server.said, *KINDS) as clients:
        assert usage.threads_grown() >= len(KINDS) - 1
        for client in clients:
            client.popen.send_signal(signal.SIGSTOP)
        usage.wait_back()


@pytest.mark.slow
@pytest.mark.parametrize("server", [3600.0], indirect=True)
def test_a_blocked_reader_costs_no_memory_while_others_write(server: Process) -> None:
    with connect(server.said) as site:
        big = site.namespace("big")

        def write_much() -> int:
            """Two hundred megabytes; what the server holds when it has come to rest."""
            for _ in range(20):
                big.put_many({b"%d" % number: bytes(100_000) for number in range(100)}, durability="async")
            return Usage(server).resident_bytes

        without_reader = write_much()
        with stalled_clients(server.said, "changes"):
            assert write_much() < without_reader + 100_000_000
