"""The links of a topology as one Spark stream: it reads at the sources and writes at the targets.

The rules are in the room `replication`; here its steps become micro-batches.  The driver plans the next step
of every link, tasks read it by ranges of keys and apply what they read, and after all tasks have ended the
targets note the step.  The targets store the positions, so Spark's offsets and commits only have to last as
long as the query.

All links share a query, because the cost of a micro-batch hardly depends on its size.  They do not share
failures: a link whose site is away, or refuses, takes no step and is retried later.  A site that falls silent
in the middle of a step delays the others by some eight seconds, once: its tasks give up (`attend`), and the
commit does not wait for it.

The first row of every task names the link and the step.  The rows of `links/reading.py` follow, in
types of Spark; a row with an error message ends a task that could not read on.  With the option `direct` no
rows follow, and the task that applies them also reads them: a change then goes through one process, and not
through Java and two workers, which takes several times as long.  A transformation of the query sees only rows
that pass through it.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial, reduce
from threading import Event, Lock
from typing import Any, Final

import msgspec
import pyarrow
from msgspec import structs
from pyspark.sql.datasource import (
    DataSource,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.types import BinaryType, IntegerType, LongType, StructField, StructType

from floodmark.codec.ordered import NAMESPACE_BYTES, encode_namespace
from floodmark.links.applying import Applier
from floodmark.links.connections import Connections, attend, begin
from floodmark.links.planning import (
    PAUSE_SECONDS,
    QUIET_PAUSE_SECONDS,
    LinkOptions,
    Piece,
    Planner,
    moving_namespaces,
    plan_all,
    report_stalled,
    whole_step,
)
from floodmark.links.reading import ROWS, read_part
from floodmark.model.errors import FloodmarkError, StaleLink, Unreachable
from floodmark.model.ranges import KeyRange, prefix_end
from floodmark.replication.applied import Applied
from floodmark.replication.step import LinkStep
from floodmark.site.site import Site
from floodmark.spark.source.planning import plan_ranges

FORMAT: Final = "floodmark_links"
OPTION: Final = "links"
DIRECT: Final = "direct"

# Up to this many changes one task is quicker than several.
TASK_CHANGES: Final = 10_000
# The time that the commit of a micro-batch waits for the targets to note their steps.
COMMIT_SECONDS: Final = 2.0
# The connections of a worker, which serves one task after the other.
WORKER_SITES: Final = Connections()
# The kinds of rows that only Spark's tasks know: the step of a task, and the error that ended it early.
_HEAD: Final = 255
_FAILURE: Final = 254

SCHEMA: Final = StructType(
    [
        StructField("namespace", IntegerType(), False),
        StructField("version", LongType(), False),
        StructField("kind", IntegerType(), False),
        StructField("key", BinaryType(), False),
        StructField("record", BinaryType(), False),
    ]
)
_ARROW: Final = pyarrow.schema(
    [
        pyarrow.field("namespace", pyarrow.int32(), nullable=False),
        pyarrow.field("version", pyarrow.int64(), nullable=False),
        pyarrow.field("kind", pyarrow.int32(), nullable=False),
        pyarrow.field("key", pyarrow.binary(), nullable=False),
        pyarrow.field("record", pyarrow.binary(), nullable=False),
    ]
)


class StepOfLink(msgspec.Struct, frozen=True):
    """A step, the place of its link among the others, and how many tasks share it.

    A task reads the `pieces` itself; there are none if the rows come through the query.
    """

    link: int
    step: LinkStep
    tasks: int = 1
    pieces: tuple[Piece, ...] = ()


def encode_links(links: Sequence[LinkOptions]) -> str:
    """The value of the option `links`."""
    return msgspec.json.encode(list(links)).decode()


def decode_links(options: Mapping[str, str]) -> list[LinkOptions]:
    """The links in the option `links`."""
    return msgspec.json.decode(options[OPTION], type=list[LinkOptions])


class LinksSource(DataSource):
    """Reads the steps of links, and writes them."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> StructType:
        return SCHEMA

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return LinksReader(decode_links(self.options), direct=self.options.get(DIRECT) == "true")

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        return LinksWriter(decode_links(self.options))


# Reading


@dataclass(frozen=True)
class LinkPart(InputPartition):
    """The pieces of a step that one task reads: one of each namespace, so that rows come in version order."""

    head: StepOfLink
    pieces: Sequence[Piece]


class LinksReader(DataSourceStreamReader):
    """Plans the steps of links on the driver, and reads them in its tasks.

    An offset names the steps that led to it.
    """

    def __init__(self, links: Sequence[LinkOptions], *, direct: bool) -> None:
        self._links = links
        self._direct = direct
        # Made on the driver, after the reader was pickled for its tasks.
        self._sites: Connections | None = None
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
            parts += [LinkPart(shared, pieces) for pieces in shares]
        return parts

    def commit(self, end: dict[str, Any]) -> None:
        pass

    def stop(self) -> None:
        if self._sites is not None:
            self._sites.close()

    @property
    def _driver(self) -> list[Planner]:
        if self._sites is None:
            self._sites = Connections()
            self._planners = [Planner(link, self._sites, share_step) for link in self._links]
        return self._planners

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        assert isinstance(partition, LinkPart)
        head = partition.head
        if self._direct:
            yield _note(_HEAD, msgspec.msgpack.encode(structs.replace(head, pieces=tuple(partition.pieces))))
            return
        yield _note(_HEAD, msgspec.msgpack.encode(head))
        link = self._links[head.link]
        batches = _read(link, head.step, partition.pieces)
        try:
            while (rows := attend(partial(next, batches, None), WORKER_SITES, [link.source])) is not None:
                yield rows.cast(_ARROW)
        except FloodmarkError as error:
            if isinstance(error, Unreachable):
                WORKER_SITES.drop(link.source)
            yield _note(_FAILURE, str(error).encode())


def _read(link: LinkOptions, step: LinkStep, pieces: Sequence[Piece]) -> Iterator[pyarrow.RecordBatch]:
    """The rows of some pieces of a step."""
    site = WORKER_SITES.get(link.source)
    for place, keys in pieces:
        yield from read_part(site.host, step, place, keys)


def share_step(step: LinkStep, source: Site) -> list[list[Piece]]:
    """The tasks of a step, along the partitions of the source; a small step is one task."""
    if step.changes is not None and step.changes <= TASK_CHANGES:
        return whole_step(step)
    maps = source.host.router.maps
    maps.refresh()
    partitions = [partition.range for partition in maps.map.partitions]
    return [
        [Piece(place, _user_keys(keys))]
        for place, namespace in moving_namespaces(step)
        for keys in plan_ranges(partitions, _all_keys(namespace.source_id))
    ]


def _all_keys(namespace: int) -> KeyRange:
    prefix = encode_namespace(namespace)
    return KeyRange(prefix, prefix_end(prefix))


def _user_keys(qualified: KeyRange) -> KeyRange:
    prefix, end = qualified.start[:NAMESPACE_BYTES], qualified.end
    inside = end is not None and end.startswith(prefix)
    return KeyRange(
        qualified.start[NAMESPACE_BYTES:], end[NAMESPACE_BYTES:] if end is not None and inside else None
    )


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
    """Applies the steps of links."""

    def __init__(self, links: Sequence[LinkOptions]) -> None:
        self._links = links

    def write(self, iterator: Iterator[pyarrow.RecordBatch]) -> AppliedPart:
        batches = _Shared(iterator)
        first = next((rows for rows in batches if rows.num_rows), None)
        if first is None:
            return AppliedPart()
        head = msgspec.msgpack.decode(_text_of(first, 0, _HEAD), type=StepOfLink)
        link = self._links[head.link]
        # The target refuses the writes of an abandoned task as soon as the link has moved.
        work = partial(_apply, link, head, first.slice(1), batches)
        try:
            part = attend(work, WORKER_SITES, [link.source, link.target])
        except StaleLink:
            part = AppliedPart(structs.replace(head, pieces=()), is_stale=True)
        except FloodmarkError as error:
            WORKER_SITES.drop(link.source)
            WORKER_SITES.drop(link.target)
            part = AppliedPart(structs.replace(head, pieces=()), failure=str(error))
        # The reading task must come to its end.
        for _ in batches:
            pass
        return part

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Let the targets note their steps; waits for two seconds at most.

        A target that answers later notes its step all the same; the same step planned again is then stale.
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
        """Let the target note a step if all tasks applied their part; else the step is planned again."""
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


def _apply(
    link: LinkOptions, head: StepOfLink, first: pyarrow.RecordBatch, others: Iterator[pyarrow.RecordBatch]
) -> AppliedPart:
    """Apply the rows that the task reads itself, and those that came through the query."""
    with Applier(WORKER_SITES.get(link.target).host, head.step) as applier:
        for rows in _read(link, head.step, head.pieces):
            applier.add(rows)
        failure = _add(applier, first)
        for rows in others:
            failure = failure or _add(applier, rows)
        told = structs.replace(head, pieces=())
        return AppliedPart(told, applier.finish()) if failure is None else AppliedPart(told, failure=failure)


class _Shared:
    """An iterator over rows that several threads may use."""

    def __init__(self, rows: Iterator[pyarrow.RecordBatch]) -> None:
        self._rows = rows
        self._lock = Lock()

    def __iter__(self) -> Iterator[pyarrow.RecordBatch]:
        return self

    def __next__(self) -> pyarrow.RecordBatch:
        with self._lock:
            return next(self._rows)


def _add(applier: Applier, rows: pyarrow.RecordBatch) -> str | None:
    """Apply rows.  Returns the error message if the last row is one."""
    if not rows.num_rows:
        return None
    if rows.column(2)[-1].as_py() == _FAILURE:
        return _text_of(rows, rows.num_rows - 1, _FAILURE).decode()
    applier.add(pyarrow.RecordBatch.from_arrays(rows.columns, schema=_ARROW).cast(ROWS))
    return None


def _note(kind: int, text: bytes) -> pyarrow.RecordBatch:
    columns = [[0], [0], [kind], [b""], [text]]
    arrays = [pyarrow.array(column, field.type) for column, field in zip(columns, _ARROW, strict=True)]
    return pyarrow.RecordBatch.from_arrays(arrays, schema=_ARROW)


def _text_of(rows: pyarrow.RecordBatch, row: int, kind: int) -> bytes:
    assert rows.column(2)[row].as_py() == kind
    text: bytes = rows.column(4)[row].as_py()
    return text
