"""Make a Spark session, or use the one that is there.

A job runs wherever Spark runs.  In a notebook, a Connect client or a program with a session of its own, that
session is used and left running.  Under `spark-submit` the job takes what was submitted.  Otherwise a session
is made and stopped again: on this machine, unless a master or a Connect server is named.

Settings come from whoever is closest: the caller's options, then what Spark was configured with
(`spark-submit`, spark-defaults.conf), then ours below, which suit one machine and a command line.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any, Final, cast
from urllib.parse import urlsplit

import pyspark
from pyspark import SparkConf, SparkContext
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.utils import is_remote

from floodmark.model.errors import InvalidConfiguration
from floodmark.spark.runtime.java import find_java, make_java_home
from floodmark.spark.runtime.python import make_python
from floodmark.spark.source.source import register

_LOOPBACK: Final = "127.0.0.1"
_LOG4J: Final = "log4j2.properties"

# Wherever the session runs.
_EVERYWHERE: Final = {
    # Versions are moments in UTC: what is shown and written does not depend on where it was run.
    "spark.sql.session.timeZone": "UTC",
    # What a worker is handed at once, to be written: large batches, but of a bounded size.
    "spark.sql.execution.arrow.maxRecordsPerBatch": "16384",
    "spark.sql.execution.arrow.maxBytesPerBatch": str(4 << 20),
}

# When the workers run on this machine.
_LOCAL: Final = {
    "spark.driver.host": _LOOPBACK,
    "spark.driver.bindAddress": _LOOPBACK,
    "spark.ui.enabled": "false",
    # Spark's 200 are for clusters: here they only cost the start of each task.
    "spark.sql.shuffle.partitions": str(2 * (os.cpu_count() or 1)),
}

# When its Java is started for us, Spark takes us for its shell and draws progress bars.
_AT_START: Final = {"spark.ui.showConsoleProgress": "false"}


@dataclass(frozen=True, kw_only=True)
class SparkOptions:
    """Where a job runs (a master or a Spark Connect server), and settings that win over all others."""

    master: str | None = None
    remote: str | None = None
    conf: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.master == "" or self.remote == "":
            raise InvalidConfiguration(
                "A Spark master or Spark Connect server has a name; leave it out instead."
            )
        if self.master is not None and self.remote is not None:
            raise InvalidConfiguration(
                f"Both a master ({self.master}) and a Spark Connect server ({self.remote}) are named: "
                "a job runs on one of them."
            )


@contextmanager
def open_session(options: SparkOptions | None = None, *, name: str = "floodmark") -> Iterator[SparkSession]:
    """A session that knows the format `floodmark`.  Stopped at the end, but only if it was made here."""
    options = options or SparkOptions()
    session = find_session()
    if session is not None:
        _check_place(session, options)
        _configure(session, options.conf)
        register(session)
        yield session
        return
    remote = options.remote
    if remote is None and options.master is None:
        remote = os.environ.get("SPARK_REMOTE")
    # Spark's builder and functions go by these variables: they hold for as long as the session lives.
    with _environment({"SPARK_REMOTE": remote, "SPARK_CONNECT_MODE_ENABLED": remote and "1"}):
        session = _start_connect(remote, options, name) if remote else _start_classic(options, name)
        try:
            if remote is not None:
                _configure(session, options.conf)
            register(session)
            yield session
        finally:
            session.stop()


def end_java(seconds: float) -> None:
    """End the Java that was started here, and wait until it is gone, with the files that it had.

    Without that it ends a moment after this process.  One that serves a session, or that others have started,
    is left alone.
    """
    java = getattr(SparkContext._gateway, "proc", None)
    if java is None or SparkContext._active_spark_context is not None:
        return
    SparkContext._gateway = SparkContext._jvm = None
    java.stdin.close()
    try:
        java.wait(seconds)
    except subprocess.TimeoutExpired:
        java.kill()
        java.wait()


def abandon_jobs(session: SparkSession) -> None:
    """Cancel all that a session runs, which is to be stopped then; may be called from any thread."""
    if isinstance(session, SparkSession):
        # Tasks that are cancelled complain of much, and nobody waits for them.
        session.sparkContext.setLogLevel("OFF")
        session.sparkContext.cancelAllJobs()
    else:
        session.interruptAll()


def find_session() -> SparkSession | None:
    """The session that this process works with, classic or Connect; None if there is none."""
    context = None if is_remote() else SparkContext._active_spark_context
    if context is not None:
        # One that was made by another thread is not the active one of this thread.
        return SparkSession.getActiveSession() or SparkSession._instantiatedSession or SparkSession(context)
    # A Connect session can also be made without Spark's own builder, and then it is found only here.
    connect: Any = sys.modules.get("pyspark.sql.connect.session")
    if connect is None:
        return None
    kind = connect.SparkSession
    return cast("SparkSession | None", kind.getActiveSession() or kind._get_default_session())


def _check_place(session: SparkSession, options: SparkOptions) -> None:
    classic = isinstance(session, SparkSession)
    here = session.sparkContext.master if classic else session.client.host
    asked = options.master if classic else options.remote and urlsplit(options.remote).hostname
    elsewhere = options.remote if classic else options.master
    if elsewhere is not None or asked not in (None, here):
        raise InvalidConfiguration(
            f"A Spark session on {here} is active in this process, and {elsewhere or asked} is asked for. "
            "Stop that session first, or leave the choice to it."
        )


def _configure(session: SparkSession, conf: Mapping[str, str]) -> None:
    for key, value in conf.items():
        try:
            if session.conf.get(key, None) != value:
                session.conf.set(key, value)
        except PySparkException as error:
            raise InvalidConfiguration(
                f"{key} cannot be changed in a Spark session that runs already: set it where that is started."
            ) from error


def _start_connect(remote: str, options: SparkOptions, name: str) -> SparkSession:
    builder = SparkSession.builder.remote(remote).config(map={**_EVERYWHERE, "spark.app.name": name})
    if not remote.startswith("local"):
        return builder.getOrCreate()
    # The server is started with the session, and takes its settings from its Java.
    _start_java({**_LOCAL, "spark.connect.grpc.binding.address": _LOOPBACK, **options.conf})
    with _environment(_python_environment()):
        return builder.getOrCreate()


def _start_classic(options: SparkOptions, name: str) -> SparkSession:
    asked = dict(options.conf)
    if options.master is not None:
        asked["spark.master"] = options.master
    if not _submitted():
        asked.setdefault("spark.app.name", name)
    _start_java(asked)
    # Now that Java runs, this is all that Spark was configured with.
    conf = SparkConf().setAll(list(asked.items())).setIfMissing("spark.master", "local[*]")
    local = str(conf.get("spark.master")).startswith("local")
    for key, value in (_EVERYWHERE | _LOCAL if local else _EVERYWHERE).items():
        conf.setIfMissing(key, value)
    with _environment(_python_environment() if local else {}):
        with _keeping_interrupts():
            SparkContext.getOrCreate(conf)
        return SparkSession.builder.config(conf=conf).getOrCreate()


@contextmanager
def _keeping_interrupts() -> Iterator[None]:
    """Leave Ctrl-C to a program that has its own way with it; a context takes it for itself at its start."""
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        if before not in (None, signal.default_int_handler) and current_thread() is main_thread():
            signal.signal(signal.SIGINT, before)


def _submitted() -> bool:
    return "PYSPARK_GATEWAY_PORT" in os.environ


def _start_java(settings: Mapping[str, str]) -> None:
    """Start Spark's Java, unless it runs: under spark-submit, or since an earlier session."""
    if _submitted() or SparkContext._gateway is not None:
        SparkContext._ensure_initialized()
        return
    conf = SparkConf(loadDefaults=False).setAll([*_AT_START.items(), *settings.items()])
    with _environment(_java_environment()):
        SparkContext._ensure_initialized(conf=conf)


def _java_environment() -> dict[str, str | None]:
    """What Spark's Java is started with.  Unlike settings, these leave spark-defaults.conf its say."""
    spark_home = os.environ.get("SPARK_HOME") or str(Path(pyspark.__file__).parent)
    environment: dict[str, str | None] = {
        "JAVA_HOME": str(make_java_home(find_java())),
        # What it asks before there is a session.
        "PYSPARK_DRIVER_PYTHON": os.environ.get("PYSPARK_DRIVER_PYTHON") or make_python(sys.executable),
        "SPARK_DRIVER_MEMORY": os.environ.get("SPARK_DRIVER_MEMORY", "2g"),
        "SPARK_HOME": spark_home,
        # Else it would look for a server instead of being one.
        "SPARK_REMOTE": None,
    }
    conf_directory = os.environ.get("SPARK_CONF_DIR") or str(Path(spark_home, "conf"))
    if not Path(conf_directory, _LOG4J).exists():
        quiet = f"-Dlog4j2.configurationFile={Path(__file__).with_name(_LOG4J).as_uri()}"
        environment["SPARK_SUBMIT_OPTS"] = f"{quiet} {os.environ.get('SPARK_SUBMIT_OPTS', '')}"
    return environment


def _python_environment() -> dict[str, str | None]:
    # Workers on other machines have a Python of their own; those on this one share ours, and so floodmark.
    return {"PYSPARK_PYTHON": os.environ.get("PYSPARK_PYTHON") or make_python(sys.executable)}


@contextmanager
def _environment(variables: Mapping[str, str | None]) -> Iterator[None]:
    """Set and remove environment variables for a while."""
    before = {name: os.environ.get(name) for name in variables}
    _change_environment(variables)
    try:
        yield
    finally:
        _change_environment(before)


def _change_environment(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextmanager
def use_session(spark: SparkSession | None, name: str) -> Iterator[SparkSession]:
    """The session that a caller gave, or the one that is active, or one for the time of the job."""
    if spark is None:
        with open_session(name=name) as session:
            yield session
    else:
        register(spark)
        yield spark
