"""What the tests of the command share: running it, in this process or as a process of its own."""

import io
import json
import os
import subprocess
import sys
import sysconfig
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

from floodmark.cli import main

ROOT: Final = Path(__file__).resolve().parents[2]
FLOODMARK: Final = str(Path(sysconfig.get_path("scripts")) / "floodmark")
PROCESS_SECONDS_MAX: Final = 60.0


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
