"""Spark, and the links that it runs between the sites: one query, in a thread of this process.

Spark takes a while to start, and nobody has to wait for it: it starts while the first steps are shown.  At
the end its Java is gone before the demo is, with all that it kept in files.
"""

import shutil
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from pathlib import Path
from threading import Event
from typing import Any, Final, TypeAlias, TypeVar

from floodmark.model.errors import LinkStalled
from floodmark.replication.topology import Topology
from floodmark.spark import SparkOptions, open_session
from floodmark.spark.jobs import TopologySummary, replicate_topology, site_addresses
from floodmark.spark.links.beside import beside
from floodmark.spark.session import end_java

# Spark's own types stay in the room `spark`.
Session: TypeAlias = Any
Frame: TypeAlias = Any
Result = TypeVar("Result")

START_SECONDS_MAX: Final = 240.0
STOP_SECONDS_MAX: Final = 30.0


def spark_options(scratch: Path) -> SparkOptions:
    """Here, on two cores: more would only start more workers; and with all files in one directory.

    Java runs for a minute, so it had better start quickly than become fast.
    """
    java = [
        "-XX:TieredStopAtLevel=1",
        "-XX:+UseSerialGC",
        "-XX:-UsePerfData",
        f'"-Djava.io.tmpdir={scratch}"',
    ]
    return SparkOptions(
        master="local[2]",
        conf={
            "spark.driver.extraJavaOptions": " ".join(java),
            "spark.local.dir": str(scratch),
            "spark.sql.shuffle.partitions": "2",
        },
    )


class Spark:
    """A session that starts beside everything else.

    In its directory it has its files while it runs; what its workers say on stderr stays there.
    """

    def __init__(self, directory: Path) -> None:
        self._scratch = directory / "scratch"
        self._log = directory / "stderr.log"
        self._starting: Future[Session] | None = None
        self._opening: AbstractContextManager[Session] | None = None
        self._stderr: Any = None

    def begin(self) -> None:
        """Begin to start it."""
        self._starting = beside("spark", self._start)

    @property
    def session(self) -> Session:
        """The session, as soon as it is there."""
        assert self._starting is not None, "nobody has begun to start Spark"
        return _result_of(self._starting, "Spark has not started", START_SECONDS_MAX)

    def require_well(self) -> None:
        """Nothing while it starts or runs; the error if it could not."""
        if self._starting is not None and self._starting.done():
            self._starting.result()

    def _start(self) -> Session:
        self._scratch.mkdir(parents=True)
        self._opening = open_session(spark_options(self._scratch.resolve()), name="floodmark demo")
        session: Session = self._opening.__enter__()
        # A worker whose query ends in the middle of its work complains, in the middle of what is shown here.
        java = session.sparkContext._jvm.java
        self._stderr = java.lang.System.err
        java.lang.System.setErr(java.io.PrintStream(str(self._log.resolve())))
        return session

    def stop(self) -> None:
        """Stop it, once it runs."""
        if self._starting is None:
            return
        context = self.session.sparkContext
        java = context._jvm.java
        assert self._opening is not None
        # Tasks that end after the session has are nobody's concern.
        context.setLogLevel("OFF")
        self._opening.__exit__(None, None, None)
        is_shared = context._jsc is not None
        if is_shared:
            java.lang.System.setErr(self._stderr)
        end_java(STOP_SECONDS_MAX)
        shutil.rmtree(self._scratch, ignore_errors=True)


class Links:
    """All links of a topology.  They run from `start` to `stop`, and may be started again."""

    def __init__(self, spark: Spark) -> None:
        self._spark = spark
        self._stop = Event()
        self._running: Future[TopologySummary | None] | None = None

    def start(self, topology: Topology, transform: Callable[[Frame], Frame] | None = None) -> None:
        """Let the links run as soon as Spark does, with a stage in their middle if one is given."""
        self._stop = stop = Event()

        def run() -> TopologySummary | None:
            session, addresses = self._spark.session, site_addresses(topology)
            if stop.is_set():
                return None
            return replicate_topology(topology, addresses, spark=session, stop=stop, transform=transform)

        self._running = beside("links", run)

    def require_well(self) -> None:
        """Nothing while they run; the error if they could not go on."""
        if self._running is not None and self._running.done():
            self._running.result()

    def stop(self) -> None:
        """End them, if they run."""
        running, self._running = self._running, None
        if running is not None:
            self._stop.set()
            _result_of(running, "The links have not ended", START_SECONDS_MAX)


def _result_of(outcome: Future[Result], what: str, seconds: float) -> Result:
    try:
        return outcome.result(seconds)
    except TimeoutError as error:
        if outcome.done():
            raise
        raise LinkStalled(f"{what} in {seconds:.0f} s; try again when the machine has less to do") from error
