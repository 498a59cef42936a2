"""The two sites as servers: processes of their own on this machine, which the demo starts, kills and ends.

A server takes a free port the first time and the same one ever after, because the topology names it.  It is
the leader of its own session: Ctrl-C reaches the demo alone, which then ends the servers by their ids.
"""

import subprocess
import sys
from pathlib import Path
from threading import Timer
from typing import Final

import msgspec

import floodmark
from floodmark.model.errors import CannotOpen, Unreachable

START_SECONDS_MAX: Final = 60.0
STOP_SECONDS_MAX: Final = 20.0


class Ready(msgspec.Struct):
    """What `floodmark serve --json` says when it is ready."""

    site: str
    site_id: int
    address: str
    url: str


class Server:
    """`floodmark serve` of one site."""

    def __init__(self, name: str, home: Path) -> None:
        self.name = name
        self.directory = home / name
        self.listen = "127.0.0.1:0"
        self._log = home / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._ready: Ready | None = None
        self._site: floodmark.Site | None = None

    @property
    def site(self) -> floodmark.Site:
        """The site behind the server."""
        assert self._site is not None, "the server was not started"
        return self._site

    @property
    def url(self) -> str:
        """Where the server is."""
        assert self._ready is not None, "the server was not started"
        return self._ready.url

    @property
    def process_id(self) -> int:
        """The id of its process."""
        assert self._process is not None, "the server was not started"
        return self._process.pid

    def begin(self) -> None:
        """Start the process, without waiting for it."""
        command = [sys.executable, "-m", "floodmark.cli", "serve", str(self.directory), "--site", self.name]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, "--listen", self.listen, "--log-level", "warning", "--json"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )

    def connect(self) -> None:
        """Wait until the server that was begun is ready, and connect to it."""
        process = self._process
        assert process is not None
        assert process.stdout is not None
        patience = Timer(START_SECONDS_MAX, process.kill)
        patience.start()
        try:
            line = process.stdout.readline()
        finally:
            patience.cancel()
        if not line:
            process.wait()
            raise CannotOpen(
                f"the server of {self.name} did not start on {self.listen}: {self._last_words()}; "
                "run the demo again, it will take other ports"
            )
        self._ready = msgspec.json.decode(line, type=Ready)
        self.listen = self._ready.address
        self._site = floodmark.connect(self._ready.url)

    def require_running(self) -> None:
        """Nothing unless the process has ended; then an error that says how."""
        code = None if self._process is None else self._process.poll()
        if code is not None:
            raise Unreachable(
                f"the server of {self.name} (process {self.process_id}) has ended with code {code}: "
                f"{self._last_words()}"
            )

    def kill(self) -> None:
        """Kill -9, and wait until it is gone."""
        assert self._process is not None
        self._process.kill()
        self._reap(self._process)
        self._disconnect()

    def stop(self) -> None:
        """End the server, by force if it takes too long.  Harmless if it is gone."""
        self._disconnect()
        process = self._process
        if process is None:
            return
        # To a process that has ended no signal is sent: its id may be another's by now.
        process.terminate()
        try:
            process.wait(STOP_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
        self._reap(process)

    def _disconnect(self) -> None:
        if self._site is not None:
            self._site.close()
            self._site = None

    def _reap(self, process: "subprocess.Popen[bytes]") -> None:
        process.wait()
        if process.stdout is not None:
            process.stdout.close()

    def _last_words(self) -> str:
        """The last line of its log, which says why it ended."""
        lines = self._log.read_text("utf-8", "replace").strip().splitlines()
        said = next((line for line in reversed(lines) if line.startswith("error: ")), None)
        return (said or (lines[-1] if lines else "it said nothing")).removeprefix("error: ")
