"""Find the Spark session of this process, or create one.

In a notebook, a Connect client or a program with a session of its own, a job uses that session and leaves it
running.  Under `spark-submit` it uses the submitted one.  Otherwise it makes a session and stops it again: on
this machine, unless a master or a Connect server is named.

The caller's options win over Spark's configuration (`spark-submit`, spark-defaults.conf), which wins over the
defaults below for one machine and a command line.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any, Final, cast
from urllib.parse import urlsplit

import pyspark
from pyspark import SparkConf, SparkContext
from pyspark.errors import PySparkException
from pyspark.sql import DataFrameWriter, SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter
from pyspark.sql.utils import is_remote

from floodmark.model.errors import InvalidConfiguration
from floodmark.spark.runtime.programs import find_java, make_java_home, make_python
from floodmark.spark.source.source import FORMAT, FloodmarkSource

_LOOPBACK: Final = "127.0.0.1"
_LOG4J: Final = "log4j2.properties"

# Wherever the session runs.
_EVERYWHERE: Final = {
    # Versions are moments in UTC, so output does not depend on the machine.
    "spark.sql.session.timeZone": "UTC",
    # Batches for writing tasks: large, but bounded.
    "spark.sql.execution.arrow.maxRecordsPerBatch": "16384",
    "spark.sql.execution.arrow.maxBytesPerBatch": str(4 << 20),
}

# When the workers run on this machine.
_LOCAL: Final = {
    "spark.driver.host": _LOOPBACK,
    "spark.driver.bindAddress": _LOOPBACK,
    "spark.ui.enabled": "false",
    # Spark's default of 200 is for clusters.
    "spark.sql.shuffle.partitions": str(2 * (os.cpu_count() or 1)),
}

# Spark takes a process that starts its Java for its shell, and draws progress bars.
_AT_START: Final = {"spark.ui.showConsoleProgress": "false"}


# Errors of a connection that the other side has closed.
_HUNG_UP: Final = (EOFError, ConnectionError)


@dataclass(frozen=True, kw_only=True)
class SparkOptions:
    """A master or a Spark Connect server, and settings that win over all others."""

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
def open_session(
    options: SparkOptions | None = None, *, name: str = "floodmark", spark: SparkSession | None = None
) -> Iterator[SparkSession]:
    """A session with the format `floodmark`: the given one, or the active one, or a new one until the end."""
    options = options or SparkOptions()
    session = spark or find_session()
    if session is not None:
        _check_place(session, options)
        _configure(session, options.conf)
        register(session)
        yield session
        return
    remote = options.remote
    if remote is None and options.master is None:
        remote = os.environ.get("SPARK_REMOTE")
    # Spark reads these variables for as long as the session lives.
    with _environment({"SPARK_REMOTE": remote, "SPARK_CONNECT_MODE_ENABLED": remote and "1"}):
        session = _start_connect(remote, options, name) if remote else _start_classic(options, name)
        try:
            if remote is not None:
                _configure(session, options.conf)
            register(session)
            yield session
        finally:
            if isinstance(session, SparkSession):
                # Tasks that end with the session log errors that mean nothing.
                with suppress(Exception):
                    session.sparkContext.setLogLevel("OFF")
            session.stop()


def abandon_jobs(session: SparkSession) -> None:
    """Cancel all jobs of a session that is about to be stopped.  May be called from any thread."""
    if isinstance(session, SparkSession):
        # Cancelled tasks log errors that mean nothing.
        session.sparkContext.setLogLevel("OFF")
        session.sparkContext.cancelAllJobs()
    else:
        session.interruptAll()


def find_session() -> SparkSession | None:
    """The session of this process, classic or Connect; None without one."""
    context = None if is_remote() else SparkContext._active_spark_context
    if context is not None:
        # A session that another thread made is not active in this one.
        return SparkSession.getActiveSession() or SparkSession._instantiatedSession or SparkSession(context)
    # A Connect session that was made without Spark's builder is found only here.
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
            _quiet_accumulators(SparkContext.getOrCreate(conf))
        return SparkSession.builder.config(conf=conf).getOrCreate()


def _quiet_accumulators(context: SparkContext) -> None:
    """Keep the server of a context's accumulators from printing that Java has closed the connection.

    Spark's Java closes it before that server is told to stop, which then prints a traceback.
    """
    server: Any = context._accumulatorServer
    show = server.handle_error

    def handle_error(request: object, address: object) -> None:
        if not isinstance(sys.exception(), _HUNG_UP):
            show(request, address)

    server.handle_error = handle_error


@contextmanager
def _keeping_interrupts() -> Iterator[None]:
    """Restore a program's own handler of Ctrl-C, which a Spark context replaces at its start."""
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        if before not in (None, signal.default_int_handler) and current_thread() is main_thread():
            signal.signal(signal.SIGINT, before)


def _submitted() -> bool:
    return "PYSPARK_GATEWAY_PORT" in os.environ


def _start_java(settings: Mapping[str, str]) -> None:
    """Start Spark's Java, unless it runs under spark-submit or since an earlier session."""
    if _submitted() or SparkContext._gateway is not None:
        SparkContext._ensure_initialized()
        return
    conf = SparkConf(loadDefaults=False).setAll([*_AT_START.items(), *settings.items()])
    with _environment(_java_environment()):
        SparkContext._ensure_initialized(conf=conf)


def _java_environment() -> dict[str, str | None]:
    """The environment of Spark's Java.  Unlike settings, spark-defaults.conf wins over it."""
    spark_home = os.environ.get("SPARK_HOME") or str(Path(pyspark.__file__).parent)
    environment: dict[str, str | None] = {
        "JAVA_HOME": str(make_java_home(find_java())),
        # Used before there is a session.
        "PYSPARK_DRIVER_PYTHON": os.environ.get("PYSPARK_DRIVER_PYTHON") or make_python(sys.executable),
        "SPARK_DRIVER_MEMORY": os.environ.get("SPARK_DRIVER_MEMORY", "2g"),
        "SPARK_HOME": spark_home,
        # Otherwise it would look for a server.
        "SPARK_REMOTE": None,
    }
    conf_directory = os.environ.get("SPARK_CONF_DIR") or str(Path(spark_home, "conf"))
    if not Path(conf_directory, _LOG4J).exists():
        quiet = f"-Dlog4j2.configurationFile={Path(__file__).with_name(_LOG4J).as_uri()}"
        environment["SPARK_SUBMIT_OPTS"] = f"{quiet} {os.environ.get('SPARK_SUBMIT_OPTS', '')}"
    return environment


def _python_environment() -> dict[str, str | None]:
    # Workers on this machine share this process's Python; those on other machines have their own.
    return {"PYSPARK_PYTHON": os.environ.get("PYSPARK_PYTHON") or make_python(sys.executable)}


@contextmanager
def _environment(variables: Mapping[str, str | None]) -> Iterator[None]:
    """Set environment variables inside the block; None removes one."""
    before = {name: os.environ.pop(name) for name in variables if name in os.environ}
    os.environ.update({name: value for name, value in variables.items() if value is not None})
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)
        os.environ.update(before)


def register(spark: SparkSession) -> None:
    """Make the format `floodmark` known to a session, and to every thread that writes with it.

    Spark's Java looks up the format of a write in the active session of the calling thread, which only the
    thread that created the session has.  In threads of web servers, notebooks and schedulers the write of a
    Python data source fails with DATA_SOURCE_NOT_FOUND.  So `df.write.format(...)` first makes the session of
    its DataFrame the active one.
    """
    spark.dataSource.register(FloodmarkSource)
    for writer in (DataFrameWriter, DataStreamWriter):
        if not hasattr(writer.format, "activates"):
            # Assigned by name: to a type checker a method is not a variable.
            setattr(writer, "format", _activating(writer.format))  # noqa: B010


def _activating(choose: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    @wraps(choose)
    def activate(writer: Any, chosen: str) -> Any:
        if chosen.lower() == FORMAT:
            make_active(writer._spark)
        return choose(writer, chosen)

    activate.__dict__["activates"] = True
    return activate


def make_active(session: SparkSession) -> None:
    """Make a session the active one of this thread.  With Spark Connect the server does that."""
    if isinstance(session, SparkSession):
        java = SparkSession._get_j_spark_session_class(session._jvm)
        java.setActiveSession(session._jsparkSession)
