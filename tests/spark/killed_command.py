"""The command `floodmark` in a process that kills itself in the middle of its work, as `kill -9` would.

    python -m tests.spark.killed_command before|after MODULE NAME ARGUMENT...

The process ends right before or after its first call of a function, so a test kills at the same place each
time, however slow the machine is.
"""

import importlib
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from floodmark.cli import main


def killing(function: Callable[..., Any], when: str) -> Callable[..., Any]:
    """A function whose first call ends the process."""

    def call(*arguments: object, **options: object) -> None:
        if when == "after":
            function(*arguments, **options)
        os.kill(os.getpid(), signal.SIGKILL)

    return call


if __name__ == "__main__":
    when, module, name, *arguments = sys.argv[1:]
    *owners, last = name.split(".")
    owner: Any = importlib.import_module(module)
    for each in owners:
        owner = getattr(owner, each)
    setattr(owner, last, killing(getattr(owner, last), when))
    sys.exit(main(arguments))
