"""A replication, an export or a feed as a process that dies at a certain point.

    python support_jobs_kill.py ARGUMENTS

The arguments are JSON, as `Arguments` says.  The process and all that it has started are killed at the point
that is named; if it gets past that point it prints what became of it.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec
from tests.spark.support_kill import Outcome, die, die_when
from tests.waiting import HANG_SECONDS

from floodmark.files.directory import Directory
from floodmark.model.errors import FloodmarkError
from floodmark.site.address import SiteAddress
from floodmark.site.connecting import connect
from floodmark.spark.jobs import export, replicate, run_feed
from floodmark.spark.jobs.exports.delta import DeltaTarget
from floodmark.spark.jobs.exports.parquet import ParquetTarget
from floodmark.spark.session import SparkOptions, open_session

Point = Literal["writing", "written", "renaming", "committed", "never"]


class Arguments(msgspec.Struct, frozen=True, kw_only=True):
    """What to do, and where to die."""

    job: Literal["replicate", "export", "feed"]
    url: str
    target: str
    point: Point = "never"
    format: str = "parquet"
    view: str = "history"
    feed: str = ""
    lease_seconds: float = 2.0


def run_job(arguments: Arguments) -> Outcome:
    """Run a job in a process of its own, and wait for its end."""
    process = subprocess.run(
        [sys.executable, __file__, msgspec.json.encode(arguments).decode()],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        timeout=HANG_SECONDS,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    return Outcome(killed=process.returncode == -signal.SIGKILL, said=process.stdout.strip())


def die_around(owner: type, name: str, *, before: bool) -> None:
    """Die right before or after a method of somebody is called."""
    method: Callable[..., Any] = getattr(owner, name)

    def call_and_die(*arguments: Any) -> None:
        if not before:
            method(*arguments)
        die()

    setattr(owner, name, call_and_die)


def die_publishing_nth(count: int) -> None:
    """Die right after the state was written so many times."""
    publish, left = Directory.publish, [count]

    def publish_and_die(self: Directory, name: str, content: bytes) -> None:
        publish(self, name, content)
        left[0] -= 1
        if not left[0]:
            die()

    setattr(Directory, "publish", publish_and_die)  # noqa: B010


def run_export(session: Any, arguments: Arguments) -> Any:
    target = DeltaTarget if arguments.format == "delta" else ParquetTarget
    directory = Path(arguments.target)
    if arguments.point == "writing":
        # A task has begun its file, and is not at its end.
        die_when(lambda: any(directory.rglob("step-*.parquet")))
    elif arguments.point == "written":
        die_around(target, "commit", before=True)
    elif arguments.point == "renaming":
        # The state says that the step will happen, and nothing of it has.
        die_publishing_nth(1 if directory.joinpath("_floodmark.json").exists() else 2)
    elif arguments.point == "committed":
        die_around(target, "commit", before=False)
    source = SiteAddress(location=arguments.url)
    options: Any = {"format": arguments.format, "view": arguments.view}
    return export(source, "users", arguments.target, spark=session, **options)


def run_replicate(session: Any, arguments: Arguments) -> Any:
    if arguments.point == "writing":
        copy = connect(arguments.target)
        die_when(lambda: "users" in copy.namespaces() and any(copy.changes("users")))
    source, target = SiteAddress(location=arguments.url), SiteAddress(location=arguments.target)
    return replicate(source, target, ["users"], spark=session)


def run_the_feed(session: Any, arguments: Arguments) -> Any:
    if arguments.point == "writing":
        die_when(lambda: any(Path(arguments.target).glob("changes-*.parquet")))
    source = SiteAddress(location=arguments.url)
    return run_feed(
        source, arguments.feed, sinks=["parquet:"], spark=session, lease_seconds=arguments.lease_seconds
    )


def main(text: str) -> None:
    """Do it, and say what came of it."""
    arguments = msgspec.json.decode(text, type=Arguments)
    options = SparkOptions(master="local[2]", conf={"spark.sql.shuffle.partitions": "2"})
    run = {"replicate": run_replicate, "export": run_export, "feed": run_the_feed}[arguments.job]
    try:
        with open_session(options) as session:
            print(run(session, arguments))
    except FloodmarkError as error:
        print(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main(sys.argv[1])
