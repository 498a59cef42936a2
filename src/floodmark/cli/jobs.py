"""Jobs on Spark from the command line: the choice of Spark, the addresses of sites, and progress.

Spark's workers reach a site by its URL.  A directory is served on loopback while the job runs, behind a
token of its own.  Spark is an extra and takes a second to load, so its room is imported when a job runs.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread
from typing import Annotated, Any, Final

import typer
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

import floodmark
from floodmark.cli.arguments import text_option
from floodmark.cli.connection import ConnectionOptions, connection_options
from floodmark.cli.credentials import access_entry
from floodmark.cli.failures import UNREACHABLE, Usage, exit_code
from floodmark.cli.locations import is_url
from floodmark.cli.opening import require_site
from floodmark.cli.render.output import console_on
from floodmark.cli.signals import on_stop_signal
from floodmark.model.access import Role
from floodmark.model.errors import CannotOpen, InvalidConfiguration
from floodmark.server import ServerOptions, hash_token, new_token
from floodmark.server import serve as serve_site
from floodmark.site.address import SiteAddress
from floodmark.site.connecting import TIMEOUT

EXTRA: Final = "floodmark[spark]"
# Poll interval of the thread that cancels a job.
_CANCEL_SECONDS: Final = 0.2

Master = Annotated[
    str | None, text_option("--master", "URL", "Where Spark runs: local[4], spark://…; here if not said.")
]
Remote = Annotated[str | None, text_option("--remote", "URL", "A Spark Connect server: sc://host:15002.")]
Conf = Annotated[
    list[str] | None, text_option("--conf", "KEY=VALUE", "A setting of Spark; may be given several times.")
]


@dataclass(frozen=True, kw_only=True)
class SparkChoice:
    """The options about Spark."""

    master: str | None
    remote: str | None
    conf: list[str] | None

    def settings(self) -> dict[str, str]:
        """The settings by name.

        >>> SparkChoice(master=None, remote=None, conf=["spark.executor.memory=2g"]).settings()
        {'spark.executor.memory': '2g'}
        """
        pairs = [setting.partition("=") for setting in self.conf or ()]
        for key, equals, _ in pairs:
            if not key or not equals:
                raise Usage(f"--conf {key!r:.60} has no value", "--conf spark.executor.memory=2g")
        return {key: value for key, _, value in pairs}


@dataclass(frozen=True)
class Job:
    """What a job needs besides its own arguments; a signal sets `stop`."""

    functions: Any
    session: Any
    progress: "Bars"
    stop: Event


@contextmanager
def spark_job(choice: SparkChoice, what: str, *, in_order: bool = False) -> Iterator[Job]:
    """A session to run a job in, with progress on stderr; Spark's errors are raised as Floodmark's.

    Ctrl-C and SIGTERM set the job's `stop`.  A job that ends `in_order` polls it, finishes its step, and
    returns its summary.  Other jobs are cancelled, and the command ends with the signal's exit code.  A Spark
    that is starting cannot be cancelled: the command ends when it has started.
    """
    spark = load("floodmark.spark")
    functions = load_functions()
    failures = load("floodmark.spark.runtime.failures")
    spark_session = load("floodmark.spark.session")
    options = spark.SparkOptions(master=choice.master, remote=choice.remote, conf=choice.settings())
    stop = Event()
    with (
        Bars(what) as bars,
        on_stop_signal(stop.set) as received,
        failures.raising_floodmark_errors(),
        spark.open_session(options, name=f"floodmark {what}") as session,
    ):
        job = Job(functions, session, bars, stop)
        if in_order:
            yield job
            return
        if received.exit_code is not None:
            raise typer.Exit(received.exit_code)
        try:
            with _cancelling(lambda: spark_session.abandon_jobs(session), stop):
                yield job
        except Exception:
            if received.exit_code is None:
                raise
            raise typer.Exit(received.exit_code) from None


@contextmanager
def _cancelling(cancel: Callable[[], None], stop: Event) -> Iterator[None]:
    """Cancel Spark's work when `stop` is set: from another thread, for this one waits for Spark."""
    ended = Event()

    def look() -> None:
        while not ended.wait(_CANCEL_SECONDS):
            if stop.is_set():
                # The session may be gone by now, and the next look is soon.
                with suppress(Exception):
                    cancel()

    looking = Thread(target=look, name="floodmark-cancel", daemon=True)
    looking.start()
    try:
        yield
    finally:
        ended.set()
        looking.join()


@contextmanager
def reach(
    *locations: str, target: ConnectionOptions | None = None, doubts: list[str] | None = None
) -> Iterator[list[SiteAddress]]:
    """The addresses of sites, as Spark's workers use them.

    The options before the command hold for all sites; `target` replaces them for the last one.  With
    `doubts`, a directory that cannot be opened is left out, and the reason is added to them.
    """
    with ExitStack() as stack:
        found = []
        for number, location in enumerate(locations, 1):
            options = connection_options.get()
            if target is not None and number == len(locations):
                options = target
            if is_url(location):
                found.append(_address(location, options))
                continue
            try:
                found.append(stack.enter_context(_serving(location)))
            except CannotOpen as error:
                if doubts is None or exit_code(error) != UNREACHABLE:
                    raise
                doubts.append(f"{location} cannot be opened: {error}")
        yield found


def shared_credentials() -> dict[str, str]:
    """The credential files of the options before the command, for sites without their own."""
    return _files(connection_options.get())


def _files(options: ConnectionOptions) -> dict[str, str]:
    files = {
        "token_file": options.token_file,
        "tls_root": options.tls_root,
        "tls_certificate": options.tls_certificate,
        "tls_key": options.tls_key,
    }
    return {name: os.fspath(file.absolute()) for name, file in files.items() if file is not None}


def _address(url: str, options: ConnectionOptions) -> SiteAddress:
    given = _files(options)
    return SiteAddress(
        location=url,
        token_file=given.get("token_file"),
        tls_root=given.get("tls_root"),
        tls_certificate=given.get("tls_certificate"),
        tls_key=given.get("tls_key"),
        timeout=TIMEOUT if options.timeout is None else options.timeout,
    )


@contextmanager
def _serving(location: str) -> Iterator[SiteAddress]:
    """Serve a directory on loopback, to callers with a token in a file that only this user can read."""
    with TemporaryDirectory(prefix="floodmark-job-") as directory:
        token = new_token()
        token_file, access = Path(directory, "token"), Path(directory, "access.toml")
        token_file.write_text(token, "ascii")
        access.write_text(access_entry("job", str(Role.ADMIN), hash_token(token)), "utf-8")
        with (
            floodmark.open(require_site(location)) as site,
            serve_site(site, "127.0.0.1:0", ServerOptions(access=access)) as server,
        ):
            yield _address(server.url, ConnectionOptions(token_file=token_file))


def load_functions() -> Any:
    """The room of jobs.  Raises InvalidConfiguration if Spark is not installed; starts nothing."""
    return load("floodmark.spark.jobs")


def load(module: str) -> Any:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.startswith("floodmark"):
            raise
        raise InvalidConfiguration(
            f"this runs on Spark, which is not installed here ({error.name} is missing); "
            f"install it with: pip install '{EXTRA}'"
        ) from error


class Bars:
    """The progress of a job: one bar a stage, on a terminal only."""

    def __init__(self, what: str, doing: str = "starting Spark") -> None:
        console = console_on(sys.stderr)
        self._display = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:,.0f}/{task.fields[known]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}
        self._what = what
        self._doing = doing

    def __enter__(self) -> "Bars":
        self._display.start()
        self._tasks[self._what] = self._display.add_task(
            f"{self._what}: {self._doing}", total=None, known="?"
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._display.stop()

    def report(self, stage: str, done: int, total: int | None) -> None:
        """Show how far a stage is."""
        if self._what in self._tasks:
            self._display.remove_task(self._tasks.pop(self._what))
        known = "?" if total is None else f"{total:,}"
        if stage not in self._tasks:
            self._tasks[stage] = self._display.add_task(stage, total=total, known=known)
        self._display.update(self._tasks[stage], completed=done, total=total, known=known)
