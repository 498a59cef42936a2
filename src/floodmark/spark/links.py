"""The links of a topology as one Spark streaming query, whose tasks read at sources and write at targets.

The rules are in the room `links`; here its steps become micro-batches.  The driver plans the next step of
every link.  A task gets a row with a step and its ranges of keys, reads them at the source and applies them
at the target: a change goes through one process, and not through Java.  After all tasks have ended the
targets note the step.  The targets store the positions, so Spark's offsets and commits only have to last as
long as the query: its checkpoint lives in a temporary directory, and a query that fails is restarted with a
new one.

All links share a query, because the cost of a micro-batch hardly depends on its size.  They do not share
failures: a link whose site is away, or refuses, takes no step and is retried later.  A site that falls silent
in the middle of a step delays the others by some eight seconds, once: its tasks give up (`attend`), and the
commit does not wait for it.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial, reduce
from tempfile import TemporaryDirectory
from threading import Event
from typing import Any, Final, TypeAlias

import msgspec
import pyarrow
from msgspec import structs
from pyspark.sql import SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import BinaryType, StructField, StructType

from floodmark.clock import monotonic_ms
from floodmark.clock.backoff import Backoff
from floodmark.codec.ordered import qualify_range
from floodmark.links.applying import Applier
from floodmark.links.connections import SiteConnections, attend, begin
from floodmark.links.driver import LinkProgress, LinkWatch, Runner, TopologySummary, run_links
from floodmark.links.pair import LinkPair
from floodmark.links.planning import (
    PAUSE_SECONDS,
    QUIET_PAUSE_SECONDS,
    LinkOptions,
    Planner,
    plan_all,
    report_stalled,
)
from floodmark.links.reading import Piece, read_pieces, whole_step
from floodmark.model.errors import FloodmarkError, StaleLink
from floodmark.replication.applied import Applied
from floodmark.replication.step import LinkStep
from floodmark.replication.topology import Topology
from floodmark.site.address import SiteAddress
from floodmark.site.site import Site
from floodmark.spark.runtime.failures import find_error, raising_floodmark_errors
from floodmark.spark.session import make_active, open_session
from floodmark.spark.source.planning import plan_ranges, users_keys
from floodmark.spark.source.schemas import arrow_schema

FORMAT: Final = "floodmark_links"
OPTION: Final = "links"

# Up to this many changes one task is quicker than several.
TASK_CHANGES: Final = 10_000
# The time that the commit of a micro-batch waits for the targets to note their steps.
COMMIT_SECONDS: Final = 2.0
# The connections of a worker, which serves one task after the other.
WORKER_SITES: Final = SiteConnections()
# A row is the step of a task.
SCHEMA: Final = StructType([StructField("step", BinaryType(), False)])

# The pause before a failed query is restarted, at first and at most.
BACKOFF_MS: Final = 500
BACKOFF_MS_MAX: Final = 30_000

_CHECKPOINT_FILES: Final = "spark.sql.streaming.checkpointFileManagerClass"
_QUICK_FILES: Final = (
    "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
)

Transform: TypeAlias = Callable[[pyarrow.RecordBatch], pyarrow.RecordBatch]

_log = logging.getLogger("floodmark.replication")


class StepOfLink(msgspec.Struct, frozen=True):
    """A step, the index of its link, the number of tasks that share it, and the pieces of one task.

    A task has at most one piece of each namespace, so that rows come in version order.
    """

    link: int
    step: LinkStep
    tasks: int = 1
    pieces: tuple[Piece, ...] = ()


class LinksSource(DataSource):
    """The data source of links: its reader plans their steps, and its writer takes them."""

    transform: Transform | None = None

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> StructType:
        return SCHEMA

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return LinksReader(self._links())

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        return LinksWriter(self._links(), self.transform)

    def _links(self) -> list[LinkOptions]:
        return msgspec.json.decode(self.options[OPTION], type=list[LinkOptions])


# Reading


@dataclass(frozen=True)
class LinkPart(InputPartition):
    """The step of one task."""

    head: StepOfLink


class LinksReader(DataSourceStreamReader):
    """Plans the steps of links on the driver.  An offset names the steps that led to it."""

    def __init__(self, links: Sequence[LinkOptions]) -> None:
        self._links = links
        # Made on the driver, after the reader was pickled for its tasks.
        self._sites: SiteConnections | None = None
        self._planners: list[Planner] = []

    def initialOffset(self) -> dict[str, Any]:
        return {"steps": []}

    def latestOffset(self, start: dict[str, Any], limit: object = None) -> dict[str, Any]:
        steps = [StepOfLink(place, step) for place, step in plan_all(self._driver)]
        if not steps:
            is_quiet = all(planner.pace.is_quiet for planner in self._driver)
            Event().wait(QUIET_PAUSE_SECONDS if is_quiet else PAUSE_SECONDS)
            return start
        return {"steps": msgspec.to_builtins(steps)}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[LinkPart]:
        if start == end:
            return []
        parts = []
        for head in msgspec.convert(end["steps"], list[StepOfLink]):
            shares = self._driver[head.link].shares(head.step)
            shared = structs.replace(head, tasks=len(shares))
            parts += [LinkPart(structs.replace(shared, pieces=tuple(pieces))) for pieces in shares]
        return parts

    def commit(self, end: dict[str, Any]) -> None:
        pass

    def stop(self) -> None:
        if self._sites is not None:
            self._sites.close()

    @property
    def _driver(self) -> list[Planner]:
        if self._sites is None:
            self._sites = SiteConnections()
            self._planners = [Planner(link, self._sites, share_step) for link in self._links]
        return self._planners

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        assert isinstance(partition, LinkPart)
        rows = {"step": [msgspec.msgpack.encode(partition.head)]}
        yield pyarrow.RecordBatch.from_pydict(rows, schema=arrow_schema(SCHEMA))


def share_step(step: LinkStep, source: Site) -> list[list[Piece]]:
    """Pieces for each task, by the source's partitions; a step that is small or has batches has one task."""
    whole = whole_step(step)
    if step.batches or (step.changes is not None and step.changes <= TASK_CHANGES):
        return [whole]
    maps = source.host.router.maps
    maps.refresh()
    partitions = [partition.range for partition in maps.map.partitions]
    return [
        [Piece(place, users_keys(keys))]
        for place, _ in whole
        for keys in plan_ranges(partitions, qualify_range(step.namespaces[place].source_id))
    ]


# Writing


@dataclass(frozen=True)
class AppliedPart(WriterCommitMessage):
    """The result of a task: the changes that it applied, or its error; nothing of a task without rows.

    A step is stale if another process has moved the link since it was planned.
    """

    head: StepOfLink | None = None
    applied: Applied | None = None
    failure: str | None = None
    is_stale: bool = False


class LinksWriter(DataSourceStreamArrowWriter):
    """Takes the steps of links: reads at their sources, and applies at their targets."""

    def __init__(self, links: Sequence[LinkOptions], transform: Transform | None = None) -> None:
        self._links = links
        self._transform = transform

    def write(self, iterator: Iterator[pyarrow.RecordBatch]) -> AppliedPart:
        steps = [step for rows in iterator for step in rows.column(0).to_pylist()]
        if not steps:
            return AppliedPart()
        head = msgspec.msgpack.decode(steps[0], type=StepOfLink)
        link, told = self._links[head.link], structs.replace(head, pieces=())
        # The target refuses the writes of an abandoned task as soon as the link has moved.
        work = partial(_take_step, link, head, self._transform)
        try:
            return AppliedPart(told, attend(work, WORKER_SITES, [link.source, link.target]))
        except StaleLink:
            return AppliedPart(told, is_stale=True)
        except FloodmarkError as error:
            WORKER_SITES.drop(link.source)
            WORKER_SITES.drop(link.target)
            return AppliedPart(told, failure=str(error))

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Record the steps at their targets; waits `COMMIT_SECONDS` at most.

        A target that answers later still records its step; the same step planned again is then stale.
        """
        parts: dict[int, list[AppliedPart]] = {}
        for part in messages:
            if isinstance(part, AppliedPart) and part.head is not None:
                parts.setdefault(part.head.link, []).append(part)
        begun = [begin(partial(self._advance, self._links[link], each)) for link, each in parts.items()]
        for outcome in wait(begun, COMMIT_SECONDS).done:
            outcome.result()

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        pass

    def _advance(self, link: LinkOptions, parts: Sequence[AppliedPart]) -> None:
        """Record a step at its target if all tasks applied their part; else the step is planned again."""
        head = parts[0].head
        assert head is not None
        if any(part.is_stale for part in parts):
            return
        # The driver notices when a target is away.
        with suppress(FloodmarkError):
            target = WORKER_SITES.get(link.target)
            failures = [part.failure for part in parts if part.failure is not None]
            if len(parts) < head.tasks:
                failures.append(f"only {len(parts)} of {head.tasks} tasks reported a result")
            if failures:
                report_stalled(target, link, failures[0])
                return
            applied = reduce(Applied.plus, [part.applied for part in parts if part.applied is not None])
            try:
                target.host.replication.advance_link(head.step, applied)
            except StaleLink:
                # Another process runs the link as well; the next step begins at the present position.
                pass
            except FloodmarkError as error:
                report_stalled(target, link, str(error))


def _take_step(link: LinkOptions, head: StepOfLink, transform: Transform | None) -> Applied:
    """Read the pieces of a task at the source, and apply them at the target."""
    source = WORKER_SITES.get(link.source).host
    with Applier(WORKER_SITES.get(link.target).host, head.step) as applier:
        for rows in read_pieces(source, head.step, head.pieces):
            applier.add(rows if transform is None else transform(rows))
        return applier.finish()


# The query


def replicate_topology(
    topology: Topology,
    addresses: Mapping[str, SiteAddress],
    *,
    once: bool = False,
    spark: SparkSession | None = None,
    progress: LinkProgress | None = None,
    watch: LinkWatch | None = None,
    stop: Event | None = None,
    transform: Transform | None = None,
) -> TopologySummary:
    """Run all links of a topology on Spark (`links/driver.py`).

    `transform` gets the rows of all links (`links/reading.py`) between sources and targets, in the tasks, and
    returns them.  It is meant for inspection: the next heartbeat reveals a row that it drops or changes.
    """
    runner = spark_runner(spark, transform)
    return run_links(topology, addresses, runner, once=once, progress=progress, watch=watch, stop=stop)


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
    return pair.complete(
        run_links(pair.topology, pair.addresses, runner, once=once, progress=progress, stop=stop)
    )


@contextmanager
def spark_runner(spark: SparkSession | None, transform: Transform | None = None) -> Iterator[Runner]:
    """A runner on a session, by default on one of its own."""
    with (
        open_session(name="floodmark replicate", spark=spark) as session,
        raising_floodmark_errors(),
        TemporaryDirectory(prefix="floodmark-links-") as checkpoints,
    ):
        source: Any = LinksSource
        if transform is not None:
            # A class of its own, which Spark pickles with the function.
            source = type("LinksSource", (LinksSource,), {"transform": staticmethod(transform)})
        session.dataSource.register(source)
        runner = _SparkRunner(session, f"file://{checkpoints}")
        try:
            yield runner
        finally:
            runner.end()


class _SparkRunner:
    """Runs the query of all links."""

    def __init__(self, spark: SparkSession, checkpoints: str) -> None:
        self.restarts = 0
        self._spark = spark
        self._checkpoints = checkpoints
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
        option = msgspec.json.encode(list(self._links)).decode()
        writer = (
            self._spark.readStream.format(FORMAT)
            .option(OPTION, option)
            .load()
            .writeStream.format(FORMAT)
            .option(OPTION, option)
            # A new checkpoint for each query: the targets know the positions.
            .option("checkpointLocation", f"{self._checkpoints}/{self.restarts}")
        )
        with _quick_checkpoints(self._spark):
            self._query = writer.start()
        self._began_ms = monotonic_ms()


@contextmanager
def _quick_checkpoints(spark: SparkSession) -> Iterator[None]:
    """Make queries that start in the block write checkpoints without starting a program for each file.

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
