"""Jobs on Spark from the command line: the choice of Spark, the addresses of sites, and progress.

Spark's workers reach a site by its URL.  A directory is served on loopback while the job runs, behind a
token of its own.  Spark is an extra and takes a second to load, so its room is imported when a job runs.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread
from typing import Annotated, Any, Final

import tomlkit
import typer
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

import floodmark
from floodmark.cli.failures import UNREACHABLE, Usage, exit_code
from floodmark.cli.opening import ConnectionOptions, connection_options, is_url, require_site
from floodmark.cli.render.output import console_on
from floodmark.cli.signals import on_stop_signal
from floodmark.model.access import Role
from floodmark.model.errors import CannotOpen, InvalidConfiguration
from floodmark.server import ServerOptions, hash_token, new_token
from floodmark.server import serve as serve_site
from floodmark.site.address import SiteAddress

EXTRA: Final = "floodmark[spark]"
JOBS: Final = "floodmark.spark.jobs"
# Poll interval of the thread that cancels a job.
_CANCEL_SECONDS: Final = 0.2


@dataclass(frozen=True, kw_only=True)
class SparkChoice:
    """The options about Spark."""

    master: Annotated[str | None, "URL", "The Spark master: local[4], spark://…; local by default."] = None
    remote: Annotated[str | None, "URL", "A Spark Connect server: sc://host:15002."] = None
    conf: Annotated[list[str] | None, "KEY=VALUE", "A setting of Spark; may be given several times."] = None

    def settings(self) -> dict[str, str]:
        """The settings by name.

        >>> SparkChoice(conf=["spark.executor.memory=2g"]).settings()
        {'spark.executor.memory': '2g'}
        """
        pairs = [setting.partition("=") for setting in self.conf or ()]
        for key, equals, _ in pairs:
            if not key or not equals:
                raise Usage(f"--conf {key!r:.60} has no value", "--conf spark.executor.memory=2g")
        return {key: value for key, _, value in pairs}


@dataclass(frozen=True)
class Job:
    """A Spark session, and functions to run on it.  A signal sets `stop`; with `in_order`, jobs poll it."""

    functions: Any
    session: Any
    progress: "Bars"
    stop: Event
    in_order: bool

    def run(self, name: str, *arguments: object, **options: object) -> Any:
        """Run a function of `floodmark.spark.jobs`."""
        if self.in_order:
            options["stop"] = self.stop
        function = getattr(self.functions, name)
        return function(*arguments, **options, spark=self.session, progress=self.progress)


@contextmanager
def spark_job(choice: SparkChoice, what: str, *, in_order: bool = False) -> Iterator[Job]:
    """A session to run a job in, with progress on stderr; Spark's errors are raised as Floodmark's.

    Ctrl-C and SIGTERM set the job's `stop`.  A job that ends `in_order` polls it, finishes its step, and
    returns its summary.  Other jobs are cancelled, and the command ends with the signal's exit code.  A Spark
    that is starting cannot be cancelled: the command ends when it has started.
    """
    spark = load("floodmark.spark")
    functions = load(JOBS)
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
        job = Job(functions, session, bars, stop, in_order)
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
    """Cancel Spark's work when `stop` is set, from another thread: this one waits for Spark."""
    ended = Event()

    def look() -> None:
        while not ended.wait(_CANCEL_SECONDS):
            if stop.is_set():
                # The session may have ended; if not, the next poll tries again.
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
    return connection_options.get().files()


def _address(url: str, options: ConnectionOptions) -> SiteAddress:
    given: dict[str, Any] = {**options.given(), **options.files()}
    return SiteAddress(location=url, **given)


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


def access_entry(name: str, role: str, digest: str, namespaces: list[str] | None = None) -> str:
    """An entry for a server's access file, in TOML.

    >>> print(access_entry("indexer", "read", "41ef", ["users"]))
    [[access]]
    name = "indexer"
    role = "read"
    token_sha256 = "41ef"
    namespaces = ["users"]
    """
    fields: dict[str, object] = {"name": name, "role": role, "token_sha256": digest}
    if namespaces:
        fields["namespaces"] = namespaces
    return tomlkit.dumps({"access": [fields]}).rstrip("\n")


def load(module: str) -> Any:
    """A module that needs Spark.  Raises InvalidConfiguration if Spark is not installed; starts nothing."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.startswith("floodmark"):
            raise
        raise InvalidConfiguration(
            f"this runs on Spark, which is not installed here ({error.name} is missing); "
            f"install it with: pip install '{EXTRA}'"
        ) from error


class Bars(Progress):
    """The progress of a job: one bar a stage, on a terminal only."""

    def __init__(self, what: str, doing: str = "starting Spark") -> None:
        console = console_on(sys.stderr)
        count = TextColumn("{task.completed:,.0f}/{task.fields[known]}")
        columns = (TextColumn("{task.description}"), BarColumn(), count, TimeElapsedColumn())
        super().__init__(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._stages: dict[str, TaskID] = {}
        self._first: TaskID | None = self.add_task(f"{what}: {doing}", total=None, known="?")

    def report(self, stage: str, done: int, total: int | None, doing: str = "") -> None:
        """Show how far a stage is, under its name or what it is doing."""
        if self._first is not None:
            self.remove_task(self._first)
            self._first = None
        known = "?" if total is None else f"{total:,}"
        if stage not in self._stages:
            self._stages[stage] = self.add_task(stage, total=total, known=known)
        shown = doing or stage
        self.update(self._stages[stage], description=shown, completed=done, total=total, known=known)
