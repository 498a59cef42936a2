"""Nodes of a site as processes, on a PostgreSQL that runs already."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final

from benchmarks.peers.base import free_port

import floodmark

SITE: Final = "oslo"
STOP_SECONDS_MAX: Final = 120


class NodeProcess:
    """A node that can be ended, suspended and started again on its port."""

    def __init__(self, database: str, number: int, directory: Path, *options: str) -> None:
        self.number = number
        self.port = free_port()
        self.command = [sys.executable, "-m", "floodmark.cli", "serve", database, "--site", SITE]
        self.command += ["--node", str(number), "--listen", f"127.0.0.1:{self.port}", "--json", *options]
        self._scheme = "grpc+tls" if "--tls-key" in options else "grpc"
        self._log = directory / f"node-{number}.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The URL at which it listens."""
        return f"{self._scheme}://127.0.0.1:{self.port}"

    def start(self) -> dict[str, Any]:
        """Start it; returns the JSON line that it prints when it serves."""
        log: IO[bytes]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self.command, stdout=subprocess.PIPE, stderr=log)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, self._log.read_text()
        ready: dict[str, Any] = json.loads(line)
        return ready

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """End it with kill -9."""
        self.signal(signal.SIGKILL)
        self.wait()

    def wait(self) -> int:
        """Wait until it has ended; returns its exit code."""
        assert self._process is not None
        code = self._process.wait(STOP_SECONDS_MAX)
        if self._process.stdout is not None:
            self._process.stdout.close()
        return code

    def end(self) -> None:
        """Kill it if it is running."""
        if self._process is not None and self._process.poll() is None:
            self.kill()


@contextmanager
def node_processes(
    database: str, directory: Path, *options: str, count: int = 3
) -> Iterator[list[NodeProcess]]:
    """Start nodes with the given options of `floodmark serve`; they are killed when the context ends."""
    nodes = [NodeProcess(database, number, directory, *options) for number in range(1, count + 1)]
    try:
        for node in nodes:
            node.start()
        yield nodes
    finally:
        for node in nodes:
            node.end()


def url_of(nodes: list[NodeProcess]) -> str:
    """One URL that names all nodes."""
    scheme = nodes[0].url.partition("://")[0]
    return f"{scheme}://" + ",".join(node.url.removeprefix(f"{scheme}://") for node in nodes)


def connect(nodes: list[NodeProcess], **credentials: Any) -> floodmark.Site:
    """Connect to the site of all nodes."""
    return floodmark.connect(url_of(nodes), **credentials)
