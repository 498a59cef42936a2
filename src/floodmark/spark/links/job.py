"""Runs the links of a topology as one Spark streaming query (`steps.py`), and restarts it when it fails.

Spark's checkpoint of the query lives in a temporary directory: a new query begins at the positions that the
targets store.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from threading import Event
from typing import Final, TypeAlias

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from floodmark.clock import monotonic_ms
from floodmark.clock.backoff import Backoff
from floodmark.links.driver import LinkProgress, Runner, TopologySummary, run_links
from floodmark.links.pair import LinkPair
from floodmark.links.planning import LinkOptions
from floodmark.replication.topology import Topology
from floodmark.site.address import SiteAddress
from floodmark.spark.links.steps import DIRECT, FORMAT, OPTION, LinksSource, encode_links
from floodmark.spark.runtime.failures import find_error, raising_floodmark_errors
from floodmark.spark.runtime.threads import make_active
from floodmark.spark.session import use_session

_log = logging.getLogger("floodmark.replication")

# The pause before a failed query is restarted, at first and at most.
BACKOFF_MS: Final = 500
BACKOFF_MS_MAX: Final = 30_000

_CHECKPOINT_FILES: Final = "spark.sql.streaming.checkpointFileManagerClass"
_QUICK_FILES: Final = (
    "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
)

Transform: TypeAlias = Callable[[DataFrame], DataFrame]


def replicate_topology(
    topology: Topology,
    addresses: Mapping[str, SiteAddress],
    *,
    once: bool = False,
    spark: SparkSession | None = None,
    progress: LinkProgress | None = None,
    stop: Event | None = None,
    transform: Transform | None = None,
) -> TopologySummary:
    """Run all links of a topology on Spark (`links/driver.py`).

    `transform` is a stage of the query: it gets the rows of all links between sources and targets, in the
    columns of `spark/links/steps.py`, and returns them.  It is meant for inspection: the next heartbeat
    reveals a row that it drops or changes.
    """
    runner = spark_runner(spark, transform)
    return run_links(topology, addresses, runner, once=once, progress=progress, stop=stop)


def replicate(
    source: SiteAddress,
    target: SiteAddress,
    namespaces: Sequence[str] = (),
    *,
    once: bool = False,
    spark: SparkSession | None = None,
    progress: LinkProgress | None = None,
    stop: Event | None = None,
) -> TopologySummary:
    """Copy namespaces, by default all, from one site to another on Spark (`links/pair.py`)."""
    pair = LinkPair.of(source, target, namespaces)
    runner = spark_runner(spark)
    return run_links(pair.topology, pair.addresses, runner, once=once, progress=progress, stop=stop)


@contextmanager
def spark_runner(spark: SparkSession | None, transform: Transform | None = None) -> Iterator[Runner]:
    """A runner on a session, by default on one of its own."""
    with (
        use_session(spark, "floodmark replicate") as session,
        raising_floodmark_errors(),
        TemporaryDirectory(prefix="floodmark-links-") as checkpoints,
    ):
        session.dataSource.register(LinksSource)
        runner = _SparkRunner(session, f"file://{checkpoints}", transform)
        try:
            yield runner
        finally:
            runner.end()


class _SparkRunner:
    """Runs the query of all links."""

    def __init__(self, spark: SparkSession, checkpoints: str, transform: Transform | None) -> None:
        self.restarts = 0
        self._spark = spark
        self._checkpoints = checkpoints
        self._transform = transform
        self._links: Sequence[LinkOptions] = ()
        self._query: StreamingQuery | None = None
        self._backoff = Backoff(BACKOFF_MS, longest_ms=BACKOFF_MS_MAX)
        self._began_ms = 0

    def start(self, links: Sequence[LinkOptions]) -> None:
        self._links = links
        self._begin()

    def check(self, stop: Event) -> None:
        query = self._query
        assert query is not None
        if query.isActive:
            return
        error = query.exception()
        assert error is not None, "a query that has no end has ended"
        if monotonic_ms() - self._began_ms >= BACKOFF_MS_MAX:
            self._backoff.reset()
        failure, pause_ms = find_error(error) or error, self._backoff.next_ms()
        if pause_ms is None:
            raise failure
        _log.warning("the query of the links failed and is restarted: %s", str(failure).partition("\n")[0])
        self.end()
        if not stop.wait(pause_ms / 1000):
            self.restarts += 1
            self._begin()

    def end(self) -> None:
        """Stop the query.  The next one repeats an interrupted step."""
        query, self._query = self._query, None
        if query is not None:
            query.stop()

    def _begin(self) -> None:
        make_active(self._spark)
        option = encode_links(self._links)
        reader = self._spark.readStream.format(FORMAT).option(OPTION, option)
        if self._transform is None:
            rows = reader.option(DIRECT, "true").load()
        else:
            rows = self._transform(reader.load())
        writer = (
            rows.writeStream.format(FORMAT)
            .option(OPTION, option)
            # A new checkpoint for each query: the targets know the positions.
            .option("checkpointLocation", f"{self._checkpoints}/{self.restarts}")
        )
        with _quick_checkpoints(self._spark):
            self._query = writer.start()
        self._began_ms = monotonic_ms()


@contextmanager
def _quick_checkpoints(spark: SparkSession) -> Iterator[None]:
    """Let a query that starts here write its checkpoint without starting a program for each file.

    By default Spark runs `chmod` for both files of each batch in a local directory.
    """
    if spark.conf.get(_CHECKPOINT_FILES, None) is not None:
        yield
        return
    spark.conf.set(_CHECKPOINT_FILES, _QUICK_FILES)
    try:
        yield
    finally:
        spark.conf.unset(_CHECKPOINT_FILES)
