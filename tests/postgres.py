"""A PostgreSQL of the tests' own, on loopback, and a proxy that cuts its connections.

The programs are Debian's; tests that need them are skipped with the command that installs them.
"""

import os
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

import psycopg
import pytest
from benchmarks.peers.base import LOOPBACK, free_port, scratch_directory, server_process
from benchmarks.peers.postgres import ROLE, UNPRIVILEGED, find, initialize, make_directory
from tests.waiting import wait_until

INSTALL: Final = "apt-get install --no-install-recommends postgresql"
# The tests sync thousands of times and do not cut the power.
SETTINGS: Final = ("-c", "fsync=off", "-c", "shared_buffers=64MB", "-c", "wal_level=replica")
HANG_SECONDS: Final = 60
CHUNK_BYTES: Final = 65_536


class PostgresServer:
    """A server that can be ended and started again; a standby if it has a primary."""

    def __init__(self, home: Path, primary: "PostgresServer | None" = None) -> None:
        initdb, program, copy = find("initdb"), find("postgres"), find("pg_basebackup")
        if initdb is None or program is None or copy is None:
            pytest.skip(f"PostgreSQL is not installed, so this is NOT TESTED; install it: {INSTALL}")
        # PostgreSQL refuses to be run by root.
        self._user = UNPRIVILEGED if os.geteuid() == 0 else None
        if self._user is not None:
            shutil.chown(home, self._user, self._user)
        if primary is None:
            initialize(initdb, home / "data", self._user)
        else:
            source = ["-h", LOOPBACK, "-p", str(primary.port), "-U", ROLE]
            make_directory([copy, *source, "-R", "-c", "fast"], home / "data", self._user)
        self.port: int = free_port()
        self._home = home
        self._command: list[str | Path] = [program, "-D", home / "data", "-p", str(self.port), *SETTINGS]
        self._running = ExitStack()
        self.start()

    @property
    def url(self) -> str:
        """The address of the server, for its owner."""
        return self.url_at(self.port)

    def url_at(self, port: int, role: str = ROLE) -> str:
        """The address at another port, such as a proxy's, or for another role."""
        return f"postgresql://{role}@{LOOPBACK}:{port}/postgres"

    def start(self) -> None:
        """Start the server, and return when it takes connections."""
        self._process = self._running.enter_context(
            server_process("postgres", self._command, self._home, user=self._user, stop_signal=signal.SIGINT)
        )
        self._process.wait_until_ready(lambda: self.execute("SELECT 1"), (psycopg.OperationalError,))

    def stop(self) -> None:
        """Shut the server down, without waiting for its clients."""
        self._running.close()

    def kill(self) -> None:
        """End the server and its backends at once, as a crash of the machine does."""
        # Each has a session of its own, and would answer for a moment longer than the server.
        backends = self.execute("SELECT pid FROM pg_stat_activity")
        os.killpg(self._process.process.pid, signal.SIGKILL)
        for (backend,) in backends:
            assert isinstance(backend, int)
            with suppress(ProcessLookupError):
                os.kill(backend, signal.SIGKILL)
        self._process.process.wait()
        self._running.close()

    def execute(self, statement: str, *values: object) -> list[tuple[object, ...]]:
        """Run one statement on a connection of its own."""
        with psycopg.connect(self.url, autocommit=True) as connection:
            cursor = connection.execute(statement.encode(), values)
            return cursor.fetchall() if cursor.description else []


@contextmanager
def postgres_server() -> Iterator[PostgresServer]:
    """A running server with its data in a new folder, for as long as the context is open."""
    # Not within a directory of pytest, which the server's user cannot enter.
    with scratch_directory(Path(tempfile.gettempdir())) as home:
        server = PostgresServer(home)
        try:
            yield server
        finally:
            server.stop()


@contextmanager
def synchronous_pair() -> Iterator[tuple[PostgresServer, PostgresServer]]:
    """A primary whose durable commits wait for its standby, and the standby."""
    with postgres_server() as primary, scratch_directory(Path(tempfile.gettempdir())) as home:
        standby = PostgresServer(home, primary)
        try:
            primary.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
            primary.execute("SELECT pg_reload_conf()")
            wait_until(
                lambda: primary.execute("SELECT sync_state FROM pg_stat_replication") == [("sync",)],
                "the standby does not become synchronous",
            )
            yield primary, standby
        finally:
            standby.stop()


class CuttingProxy:
    """Passes bytes on to a server, and cuts every connection at a message of a client or of the server."""

    def __init__(self, port: int) -> None:
        self._server_port = port
        self._listener = socket.create_server((LOOPBACK, 0))
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._left: int | None = None
        self.seen = 0
        self._acceptor = threading.Thread(target=self._accept, daemon=True)
        self._acceptor.start()

    def cut_after(self, messages: int | None) -> bool:
        """Pass so many more messages on, then cut once; None cuts nothing.  Whether the last cut happened."""
        with self._lock:
            has_cut = self.has_cut
            self._left, self.seen = messages, 0
            return has_cut

    @property
    def has_cut(self) -> bool:
        """Whether the planned cut has happened."""
        return self._left is None

    def close(self) -> None:
        """End all connections."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._acceptor.join(HANG_SECONDS)
        self._listener.close()
        with self._lock:
            self._cut()
        for thread in self._threads:
            thread.join(HANG_SECONDS)
        # Not before: a thread that is about to send would send to what has the number of a closed socket.
        for each in self._open:
            each.close()

    def counts(self, message: bytes) -> bool:
        """Whether a message is one at which the connections may be cut."""
        return True

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection((LOOPBACK, self._server_port), timeout=HANG_SECONDS)
            except OSError:
                client.close()
                continue
            server.settimeout(None)
            for each in (client, server):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._open += (client, server)
            for source, target in ((client, server), (server, client)):
                thread = threading.Thread(target=self._pass_on, args=(source, target), daemon=True)
                thread.start()
                self._threads.append(thread)

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(CHUNK_BYTES):
                for message in _messages(data):
                    with self._lock:
                        counts = self.counts(message)
                        self.seen += counts
                        if counts and self._left is not None:
                            self._left -= 1
                            if self._left < 0:
                                self._left = None
                                self._cut()
                                return
                    target.sendall(message)
            target.shutdown(socket.SHUT_WR)

    def _cut(self) -> None:
        for each in self._open:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


def _messages(data: bytes) -> Iterator[bytes]:
    """The protocol messages in a chunk: a letter, and a length that counts itself.

    What is cut by the end of the chunk, or is no such message, goes on as it is.
    """
    at = 0
    while at < len(data):
        length = int.from_bytes(data[at + 1 : at + 5], "big") + 1
        end = at + length if data[at : at + 1].isalnum() and length > 4 else len(data)
        yield data[at:end]
        at = end
