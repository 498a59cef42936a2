"""Servers and clients as processes of their own, and what they use of the machine."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from tests.server import support_client, support_server


class Process:
    """A script that runs beside the test, and says when it is ready."""

    def __init__(self, script: str, *arguments: str) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, script, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.said = ""

    def wait_ready(self) -> "Process":
        """Return when it has said its first line."""
        assert self.popen.stdout is not None
        assert self.popen.stderr is not None
        self.said = self.popen.stdout.readline().strip()
        if not self.said:
            errors = self.popen.stderr.read()
            self.kill()
            raise AssertionError(errors)
        return self

    def kill(self) -> None:
        """Kill -9, and wait until it is gone."""
        self.popen.kill()
        self.popen.communicate()

    @property
    def threads(self) -> int:
        """How many threads it has now."""
        return psutil.Process(self.popen.pid).num_threads()

    @property
    def resident_bytes(self) -> int:
        """How much memory it has now."""
        return psutil.Process(self.popen.pid).memory_info().rss

    def thread_names(self) -> list[str]:
        """What its threads are called, where the system tells."""
        tasks = Path(f"/proc/{self.popen.pid}/task")
        return sorted(task.joinpath("comm").read_text("utf-8").strip() for task in tasks.glob("*"))


def start_server(directory: Path, listen: str = "127.0.0.1:0", stall_seconds: float = 20.0) -> Process:
    """A server; it has said its URL."""
    return Process(support_server.__file__, str(directory), listen, str(stall_seconds)).wait_ready()


@contextmanager
def stalled_clients(url: str, *kinds: str) -> Iterator[list[Process]]:
    """Clients that have begun something and do nothing any more, for as long as the block lasts."""
    clients = [Process(support_client.__file__, url, kind) for kind in kinds]
    try:
        yield [client.wait_ready() for client in clients]
    finally:
        for client in clients:
            client.kill()
