"""A site as a server process of its own, which the demo starts, kills and ends.

The process leads its own session, so that Ctrl-C reaches the demo alone.
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
    """The line of `floodmark serve --json` when it is ready."""

    address: str
    url: str


class DemoServer:
    """`floodmark serve` of one site, from `start` to `stop`.  Started again, it keeps its port."""

    site: floodmark.Site

    def __init__(self, name: str, home: Path, listen: str = "127.0.0.1:0") -> None:
        self.name = name
        self.listen = listen
        self.url = ""
        self.process: subprocess.Popen[bytes] | None = None
        self._directory = home / name
        self._log = home / f"{name}.log"

    def start(self) -> None:
        """Start the process, wait until it serves, and connect to it."""
        command = [sys.executable, "-m", "floodmark.cli", "serve", str(self._directory), "--site", self.name]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, "--listen", self.listen, "--log-level", "warning", "--json"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        assert self.process.stdout is not None
        patience = Timer(START_SECONDS_MAX, self.process.kill)
        patience.start()
        line = self.process.stdout.readline()
        patience.cancel()
        if not line:
            self.process.wait()
            raise CannotOpen(
                f"the server of {self.name} did not start on {self.listen}: {self._last_words()}; "
                "run the demo again, it will take other ports"
            )
        ready = msgspec.json.decode(line, type=Ready)
        self.listen, self.url = ready.address, ready.url
        self.site = floodmark.connect(ready.url)

    def require_running(self) -> None:
        """Raise an error with the last words of a process that has ended by itself."""
        code = None if self.process is None else self.process.poll()
        if self.process is not None and code is not None:
            raise Unreachable(
                f"the server of {self.name} (process {self.process.pid}) has ended with code {code}: "
                f"{self._last_words()}"
            )

    def stop(self, *, kill: bool = False) -> None:
        """End the process, with kill -9 if asked for or if it takes too long."""
        process, self.process = self.process, None
        if process is None:
            return
        if kill:
            process.kill()
        if self.url:
            self.site.close()
        process.terminate()
        try:
            process.wait(STOP_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()

    def _last_words(self) -> str:
        """The last error in the log, or its last line."""
        lines = self._log.read_text("utf-8", "replace").strip().splitlines()
        said = next((line for line in reversed(lines) if line.startswith("error: ")), None)
        return (said or (lines[-1] if lines else "no message")).removeprefix("error: ")
