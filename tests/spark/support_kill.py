"""A backup or a restore as a process that dies at a certain point.

    python support_kill.py ARGUMENTS

The arguments are JSON, as `Arguments` says.  The process and all that it has started are killed at the point
that is named; if it gets past that point it prints what became of it.
"""

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from threading import Event, Thread
from typing import Any, Literal

import msgspec
from tests.waiting import HANG_SECONDS

from floodmark.files.directory import Directory
from floodmark.model.errors import FloodmarkError
from floodmark.site.address import SiteAddress
from floodmark.site.connecting import connect
from floodmark.spark.jobs.backups.backup import backup
from floodmark.spark.jobs.backups.restore import restore
from floodmark.spark.session import SparkOptions, open_session

POLL_SECONDS = 0.002

Point = Literal["planned", "writing", "written", "complete", "never"]


class Arguments(msgspec.Struct, frozen=True, kw_only=True):
    """What to do, and where to die."""

    job: Literal["backup", "restore"]
    url: str
    directory: str
    point: Point = "never"
    incremental: bool = False
    file_bytes_max: int | None = None


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a process ended: by a signal, or with what it said."""

    killed: bool
    said: str


def run_job(arguments: Arguments) -> Outcome:
    """Run a job in a process of its own, and wait for its end."""
    command = [sys.executable, __file__, msgspec.json.encode(arguments).decode()]
    process = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        timeout=HANG_SECONDS,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    return Outcome(killed=process.returncode == -signal.SIGKILL, said=process.stdout.strip())


def die() -> None:
    """Kill this process with Spark's Java, which is in the same group."""
    os.killpg(0, signal.SIGKILL)


class Deadly:
    """Watches a job's progress, and kills it at the beginning of a stage."""

    def __init__(self, stage: str) -> None:
        self._stage = stage

    def report(self, stage: str, done: int, total: int | None) -> None:
        if stage == self._stage:
            die()


def die_publishing(name: str, *, before: bool) -> None:
    """Die right before or after a file appears."""
    publish = Directory.publish

    def publish_and_die(self: Directory, published: str, content: bytes) -> None:
        if before and published == name:
            die()
        publish(self, published, content)
        if published == name:
            die()

    setattr(Directory, "publish", publish_and_die)  # noqa: B010


def die_when(arrived: Any) -> None:
    """Die as soon as a condition holds."""

    def watch() -> None:
        rest = Event()
        while not arrived():
            rest.wait(POLL_SECONDS)
        die()

    Thread(target=watch, daemon=True).start()


def run_backup(session: Any, arguments: Arguments) -> Any:
    progress = Deadly("write rows") if arguments.point == "planned" else None
    if arguments.point == "writing":
        # One task is done, and others are not.
        die_when(lambda: any(Path(arguments.directory).glob("*/rows-*/_temporary/0/task_*")))
    elif arguments.point in ("written", "complete"):
        die_publishing("manifest.json", before=arguments.point == "written")
    source = SiteAddress(location=arguments.url)
    return backup(
        source,
        "users",
        arguments.directory,
        incremental=arguments.incremental,
        spark=session,
        progress=progress,
    )


def run_restore(session: Any, arguments: Arguments) -> Any:
    progress = {"planned": Deadly("restore rows"), "written": Deadly("verify")}.get(arguments.point)
    if arguments.point == "writing":
        site = connect(arguments.url)
        die_when(lambda: "users" in site.namespaces() and any(site.namespace("users").scan(limit=1)))
    target = SiteAddress(location=arguments.url)
    return restore(arguments.directory, target, "users", spark=session, progress=progress)


def main(text: str) -> None:
    """Do it, and say what came of it."""
    arguments = msgspec.json.decode(text, type=Arguments)
    if arguments.file_bytes_max is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (arguments.file_bytes_max, hard))
    options = SparkOptions(master="local[2]", conf={"spark.sql.shuffle.partitions": "2"})
    run = {"backup": run_backup, "restore": run_restore}[arguments.job]
    try:
        with open_session(options) as session:
            print(run(session, arguments))
    except FloodmarkError as error:
        print(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main(sys.argv[1])
