"""What the tests of the command share: running it, in this process or as a process of its own."""

import io
import json
import os
import pty
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch
from urllib.request import urlopen

from floodmark.cli import main

ROOT: Final = Path(__file__).resolve().parents[2]
FLOODMARK: Final = str(Path(sysconfig.get_path("scripts")) / "floodmark")
PROCESS_SECONDS_MAX: Final = 300.0


@dataclass(frozen=True)
class Outcome:
    """What a run of the command printed, and how it ended."""

    code: int
    output: bytes
    errors: str

    @property
    def text(self) -> str:
        return self.output.decode()

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    @property
    def json(self) -> dict[str, Any]:
        """The one object that was printed."""
        (line,) = self.lines
        parsed: dict[str, Any] = json.loads(line)
        return parsed

    @property
    def json_lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines]


def run(*arguments: str | Path, stdin: bytes = b"", encoding: str = "utf-8") -> Outcome:
    """Run the command in this process."""
    output, errors = io.BytesIO(), io.BytesIO()
    with (
        redirect_stdout(io.TextIOWrapper(output, encoding, write_through=True)) as stdout,
        redirect_stderr(io.TextIOWrapper(errors, "utf-8", "backslashreplace", write_through=True)) as stderr,
        patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin))),
    ):
        code = main([str(argument) for argument in arguments])
        # Kept from closing what is read below.
        stdout.detach()
        stderr.detach()
    return Outcome(code, output.getvalue(), errors.getvalue().decode())


def run_process(*arguments: str | Path, **environment: str) -> Outcome:
    """Run the installed command as a process of its own."""
    finished = subprocess.run(
        [FLOODMARK, *map(str, arguments)],
        capture_output=True,
        stdin=subprocess.DEVNULL,
        timeout=PROCESS_SECONDS_MAX,
        env=os.environ | environment,
        check=False,
    )
    return Outcome(finished.returncode, finished.stdout, finished.stderr.decode())


@dataclass(frozen=True)
class Server:
    """A `floodmark serve` of its own process that is ready."""

    process: "subprocess.Popen[bytes]"
    ready: dict[str, Any]
    log_path: Path

    @property
    def url(self) -> str:
        url: str = self.ready["url"]
        return url

    @property
    def log(self) -> list[dict[str, Any]]:
        """What was logged so far: every line must be JSON."""
        return [json.loads(line) for line in self.log_path.read_text("utf-8").splitlines()]

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """End it by a signal; its exit code."""
        self.process.send_signal(number)
        return self.process.wait(PROCESS_SECONDS_MAX)


@contextmanager
def running(*arguments: str | Path) -> Iterator["subprocess.Popen[bytes]"]:
    """The command as a process, with its outputs as pipes.  It does not outlive the block."""
    command = [FLOODMARK, *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def serving(directory: Path, *options: str | Path) -> Iterator[Server]:
    """Serve a site on a free port of this machine."""
    log_path = directory.with_name(f"{directory.name}.log")
    command = [FLOODMARK, "serve", str(directory), "--listen", "127.0.0.1:0", "--json", *map(str, options)]
    with (
        log_path.open("wb") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, stdin=subprocess.DEVNULL) as process,
    ):
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, f"the server did not start: {log_path.read_text('utf-8')}"
            yield Server(process, json.loads(line), log_path)
        finally:
            process.terminate()
            try:
                process.wait(PROCESS_SECONDS_MAX)
            except subprocess.TimeoutExpired:
                process.kill()
                raise


def read_pages_url(process: "subprocess.Popen[bytes]") -> str:
    """Where a command serves its pages, as the first line on its stderr says."""
    assert process.stderr is not None
    line = process.stderr.readline().decode()
    assert line.startswith("metrics on http://"), line
    return line.split()[-1].removesuffix("/metrics")


def get_page(url: str) -> str:
    """The text of a page."""
    with urlopen(url, timeout=PROCESS_SECONDS_MAX) as answer:
        return str(answer.read().decode())


def on_terminal(
    *arguments: str | Path, until: Callable[[str], bool] | None = None, kind: str = "xterm-256color"
) -> str:
    """What the command shows where stdout and stderr are a terminal.

    If what is shown satisfies `until`, Ctrl-C is pressed.
    """
    master, slave = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "TERM")}
    environment |= {"TERM": kind, "COLUMNS": "200", "LINES": "50"}
    command = [FLOODMARK, *map(str, arguments)]
    with subprocess.Popen(command, stdout=slave, stderr=slave, env=environment) as process:
        os.close(slave)
        shown = bytearray()
        pressed = False
        # Linux says "input/output error" where others say "end of file".
        with suppress(OSError):
            while piece := os.read(master, 4096):
                shown += piece
                if until is not None and not pressed and until(shown.decode(errors="replace")):
                    process.send_signal(signal.SIGINT)
                    pressed = True
    os.close(master)
    return shown.decode()
