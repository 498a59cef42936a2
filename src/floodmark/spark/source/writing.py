"""Idempotent writes of a DataFrame or a stream into a namespace.

Spark repeats a failed task, runs a slow one twice at the same time, and repeats a whole micro-batch if the
driver died before it committed it.  Changes of a Floodmark feed are stored where their stamps win: the
second time they win nowhere.  Other rows have no stamps.  For them a version V is drawn once per batch
write or epoch of a query, and a row is stored unless its key was changed after V: by another writer, or by
an earlier attempt.

So of several rows with one key the first to arrive stays, where users expect the last.  Therefore a task
spools its rows and sends them from the last to the first.  A repeated task begins with the last rows again,
so an earlier row of a key never arrives before a later one.
"""

import os
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, pairwise
from threading import Event
from typing import Final

import msgspec
import numpy
import pyarrow
import pyarrow.compute
import pyarrow.ipc
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from floodmark.columns.pairs import PAIRS
from floodmark.links.returning import Portion
from floodmark.model.errors import (
    FloodmarkError,
    InvalidConfiguration,
    InvalidOption,
    OutcomeUnknown,
    Retryable,
    StorageFailed,
    StorageFull,
)
from floodmark.model.limits import LOG_ROW_BYTES_MAX, MIB
from floodmark.model.partition import ApplyStream, LoadStream, PutUnchangedStream, WriteStream
from floodmark.model.version import Version
from floodmark.site.address import SiteAddress
from floodmark.site.policies import POLICIES, LastWrite
from floodmark.site.site import Site
from floodmark.spark.runtime.patience import PAUSES, Wait, ask_patiently
from floodmark.spark.source.incoming import Encoder, Layout, check_columns, check_policy, check_stamps
from floodmark.spark.source.options import COMMON, Options
from floodmark.spark.source.schemas import JSON
from floodmark.wire.columns import decode_columns

# Spark's own option, which it passes to the source.
_SPARKS: Final = frozenset({"checkpointLocation"})
OPTIONS: Final = COMMON | _SPARKS | {"valueFormat", "distinctKeys", "stamps"}
# The option `stamps`: a copy keeps those of the rows.
KEEP: Final = "keep"
KEEP_STAMPS: Final = {"stamps": KEEP}
_STAMPS: Final = ("refuse", KEEP)
# The part of each record to write, for jobs that rebuild a site: a `Portion` in JSON.
PORTION: Final = "portion"
# A batch becomes one row of the site's change log, which it packs fastest.
BATCH_BYTES_MAX: Final = LOG_ROW_BYTES_MAX

# The batches of a task that may be unacknowledged, and the bytes of its spooled rows in memory.
BATCHES_IN_FLIGHT_MAX: Final = 4
MEMORY_BYTES_MAX: Final = 64 * MIB

LAST_WRITE: Final = LastWrite("")

_QUERY: Final = "sql.streaming.queryId"
_EPOCH: Final = "streaming.sql.batchId"


class BatchSender:
    """Sends batches of encoded values under qualified keys.  For one thread.

    A task's writes are idempotent: the site stores a record only if its stamp wins, or if the key was not
    changed since a version.  So a batch without an answer is sent again.  Of two batches with the same key
    the first must be stored first, and a repeated batch comes late.  So with `in_order` a batch waits until
    those that share a key with it are acknowledged.

    `sent` and `stored` count records; `stored` only for a stream with `unchanged_since`.
    """

    def __init__(
        self,
        stream: WriteStream,
        *,
        in_order: bool,
        pauses: Sequence[float] = PAUSES,
        wait: Callable[[float], object] | None = None,
    ) -> None:
        self.sent = 0
        self.stored = 0
        self._stream = stream
        self._in_order = in_order
        self._pauses = pauses
        self._wait = wait or Event().wait
        self._under_way: deque[tuple[Mapping[bytes, bytes], Future[int] | FloodmarkError]] = deque()
        self._keys: set[bytes] = set()

    def send(self, rows: Mapping[bytes, bytes]) -> None:
        """Send a batch.  Waits while too many are unacknowledged."""
        if not rows:
            return
        if self._in_order:
            if not self._keys.isdisjoint(rows):
                self.finish()
            self._keys.update(rows)
        self._under_way.append((rows, self._start(rows)))
        while len(self._under_way) >= BATCHES_IN_FLIGHT_MAX:
            self._settle()

    def finish(self) -> None:
        """Return when every batch is acknowledged."""
        while self._under_way:
            self._settle()

    def _start(self, rows: Mapping[bytes, bytes]) -> "Future[int] | FloodmarkError":
        try:
            return self._stream.send(rows)
        except FloodmarkError as error:
            # Raised or retried after the batches before it.
            return error

    def _settle(self) -> None:
        rows, answer = self._under_way.popleft()
        self.stored += self._result(rows, answer)
        self.sent += len(rows)
        if self._in_order:
            self._keys.difference_update(rows)

    def _result(self, rows: Mapping[bytes, bytes], answer: "Future[int] | FloodmarkError") -> int:
        pauses = iter(self._pauses)
        while True:
            try:
                if isinstance(answer, FloodmarkError):
                    raise answer
                return answer.result()
            except StorageFull:
                # An operator has to make room: a retry does not help.
                raise
            except (Retryable, OutcomeUnknown) as error:
                pause = next(pauses, None)
                if pause is None:
                    raise type(error)(
                        f"the site did not take a batch of records, sent {len(self._pauses) + 1} times over "
                        f"{sum(self._pauses):.0f} s: {error}. Earlier rows are stored; it is safe to write "
                        "the same rows again",
                        **error.details,
                    ) from error
                self._wait(pause)
            answer = self._start(rows)


@dataclass(frozen=True, kw_only=True)
class Target:
    """The namespace to write to, and the layout of the rows.  Pickled into every task."""

    address: SiteAddress
    namespace: str
    layout: Layout
    distinct_keys: bool
    portion: Portion | None = None


@dataclass(frozen=True, kw_only=True)
class TaskResult(WriterCommitMessage):
    """The result of a task: the number of records that it sent, and of those that were stored.

    `stored` is None for changes with stamps, whose number is not known.
    """

    records: int = 0
    stored: int | None = None


class FrameWriter(DataSourceArrowWriter):
    """Writes a DataFrame."""

    def __init__(self, target: Target, since: Version) -> None:
        self._target = target
        self._since = since

    def write(self, iterator: Iterator[pyarrow.RecordBatch]) -> TaskResult:
        return write_rows(self._target, iterator, lambda _: self._since)


class StreamWriter(DataSourceStreamArrowWriter):
    """Writes the micro-batches of a query."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def write(self, iterator: Iterator[pyarrow.RecordBatch]) -> TaskResult:
        return write_rows(self._target, iterator, self._open_epoch)

    def _open_epoch(self, site: Site) -> Version:
        query, epoch = read_epoch()
        return site.host.versions.open_epoch(self._target.namespace, f"spark/{query}", epoch)


def open_writer(options: Mapping[str, str], schema: StructType) -> FrameWriter:
    """A writer for a DataFrame.  Raises errors of options and columns before a job starts."""
    target = read_target(options, schema)
    with target.address.connect() as site:
        require_writable(site, target)
        return FrameWriter(target, site.now())


def open_stream_writer(
    options: Mapping[str, str], schema: StructType, overwrite: bool, *, wait: Wait | None = None
) -> StreamWriter:
    """A writer for the micro-batches of a query; Spark opens one before and after each of them.

    Waits for a server that is starting.
    """
    if overwrite:
        raise InvalidOption(
            'a stream upserts its rows: use outputMode("append"). To replace the whole content of a '
            'namespace, write a DataFrame with mode("overwrite")',
            option="mode",
        )
    target = read_target(options, schema)

    def check() -> None:
        with target.address.connect() as site:
            require_writable(site, target)

    ask_patiently(check, wait=wait)
    return StreamWriter(target)


def read_target(given: Mapping[str, str], schema: StructType) -> Target:
    """The target of these options and columns."""
    options = Options(given, OPTIONS | {PORTION})
    address = options.address()
    address.require_url("written")
    layout = check_columns(schema, json=options.value_format() == JSON)
    check_stamps(layout, keep=options.choice("stamps", _STAMPS) == KEEP)
    return Target(
        address=address,
        namespace=options.namespace(),
        layout=layout,
        distinct_keys=options.flag("distinctKeys"),
        portion=_read_portion(options.text(PORTION)),
    )


def _read_portion(text: str | None) -> Portion | None:
    try:
        return None if text is None else msgspec.json.decode(text, type=Portion)
    except msgspec.MsgspecError as error:
        raise InvalidOption(f"the option {PORTION!r} is for jobs of Floodmark: {error}") from error


def require_writable(site: Site, target: Target) -> None:
    """Raise an error for a namespace that does not exist, is read-only to the caller, or merges otherwise."""
    host = site.host
    check_policy(target.layout, host.namespaces.find_namespace(target.namespace))
    # Needs the role to write, and changes nothing.
    host.versions.sync()


def read_epoch() -> tuple[str, int]:
    """The query and the micro-batch of this task."""
    context = TaskContext.get()
    query = context and context.getLocalProperty(_QUERY)
    epoch = context and context.getLocalProperty(_EPOCH)
    if not query or not epoch:
        raise InvalidConfiguration(
            f"Spark did not tell this task which query and micro-batch it works for ({_QUERY}, {_EPOCH}); a "
            "stream is written with writeStream, or batch by batch with foreachBatch and write"
        )
    return query, int(epoch)


def write_rows(
    target: Target, rows: Iterator[pyarrow.RecordBatch], draw_version: Callable[[Site], Version]
) -> TaskResult:
    """Write the rows of a task, and return when all of them are acknowledged."""
    first = next((batch for batch in rows if batch.num_rows), None)
    if first is None:
        return TaskResult(stored=0)
    with ask_patiently(target.address.connect) as site:
        namespace = ask_patiently(lambda: site.host.namespaces.find_namespace(target.namespace))
        encoder = Encoder(
            target.layout, namespace.id, namespace.settings.ttl, site.host.physical_ms, namespace.merge
        )
        batches = (piece for batch in chain([first], rows) for piece in cut_batch(encoder.encode(batch)))
        if target.layout.has_origin:
            delivery = _apply(site, batches, target.portion)
            return TaskResult(records=delivery.sent)
        policy = POLICIES[namespace.merge](namespace.name)
        since = ask_patiently(lambda: draw_version(site))
        delivery = _put_unchanged(site, since, batches, policy, distinct_keys=target.distinct_keys)
        return TaskResult(records=delivery.sent, stored=delivery.stored)


def _put_unchanged(
    site: Site,
    since: Version,
    batches: Iterator[pyarrow.RecordBatch],
    policy: LastWrite,
    *,
    distinct_keys: bool,
) -> BatchSender:
    with closing(site.host.write_stream(PutUnchangedStream(True, since))) as stream:
        delivery = BatchSender(stream, in_order=True)
        send_rows(delivery, batches if distinct_keys else reverse(batches), policy)
        return delivery


def _apply(site: Site, batches: Iterator[pyarrow.RecordBatch], portion: Portion | None) -> BatchSender:
    load = portion is not None and portion.load
    with closing(site.host.write_stream(LoadStream(True) if load else ApplyStream(True))) as stream:
        # Stamps decide, in any order of arrival.
        delivery = BatchSender(stream, in_order=False)
        for batch in batches:
            for rows in cut_at_repeats(*decode_columns(batch)):
                if portion is None:
                    delivery.send(rows)
                else:
                    taken = ((key, portion.take(record)) for key, record in rows.items())
                    delivery.send({key: part for key, part in taken if part is not None})
        delivery.finish()
        return delivery


def reverse(
    batches: Iterator[pyarrow.RecordBatch], *, memory_bytes_max: int = MEMORY_BYTES_MAX
) -> Iterator[pyarrow.RecordBatch]:
    """All batches, from the last to the first; above a limit they are spooled in an unnamed file."""
    # Spark's local directory, if Spark names it to its workers.
    named = [each for each in os.environ.get("SPARK_LOCAL_DIRS", "").split(",") if os.path.isdir(each)]
    directory = named[0] if named else tempfile.gettempdir()
    places = [0]
    with tempfile.SpooledTemporaryFile(memory_bytes_max, dir=directory) as file:
        for batch in batches:
            try:
                file.write(batch.serialize())
                file.flush()
            except OSError as error:
                raise StorageFailed(
                    f"rows on their way to a site do not fit into {directory!r} ({error.strerror or error}); "
                    "make room, let Spark use another directory (spark.local.dir), cut the rows into more "
                    'partitions, or set option("distinctKeys", "true") if no key comes twice'
                ) from error
            places.append(file.tell())
        for start, end in reversed(list(pairwise(places))):
            file.seek(start)
            yield pyarrow.ipc.read_record_batch(pyarrow.py_buffer(file.read(end - start)), PAIRS)


def send_rows(
    delivery: BatchSender, batches: Iterator[pyarrow.RecordBatch], policy: LastWrite = LAST_WRITE
) -> None:
    """Send batches.  Of rows with the same key in a batch the last counts, or the last of each field."""
    for batch in batches:
        keys, values = decode_columns(batch)
        delivery.send(join_rows(keys, values, policy))
    delivery.finish()


def join_rows(keys: list[bytes], values: list[bytes], policy: LastWrite) -> dict[bytes, bytes]:
    """Rows by key; rows with the same key are joined."""
    rows = dict(zip(keys, values, strict=True))
    if policy.merges and len(rows) < len(keys):
        rows = {}
        for key, value in zip(keys, values, strict=True):
            joined = policy.join(rows[key], value) if key in rows else value
            assert joined is not None
            rows[key] = joined
    return rows


def cut_batch(batch: pyarrow.RecordBatch, bytes_max: int = BATCH_BYTES_MAX) -> Iterator[pyarrow.RecordBatch]:
    """Pieces of at most some bytes, or of one row."""
    lengths = [pyarrow.compute.binary_length(column).to_numpy() for column in batch.columns]
    ends = numpy.cumsum(sum(lengths), dtype=numpy.int64)
    start, done = 0, 0
    while start < batch.num_rows:
        end = max(start + 1, int(numpy.searchsorted(ends, done + bytes_max, side="right")))
        yield batch.slice(start, end - start)
        start, done = end, int(ends[end - 1])


def cut_at_repeats(keys: list[bytes], values: list[bytes]) -> Iterator[dict[bytes, bytes]]:
    """Rows in their order, in portions in which each key comes once.

    >>> list(cut_at_repeats([b"a", b"b", b"a"], [b"1", b"2", b"3"]))
    [{b'a': b'1', b'b': b'2'}, {b'a': b'3'}]
    """
    portion = dict(zip(keys, values, strict=True))
    if len(portion) == len(keys):
        yield portion
        return
    portion = {}
    for key, value in zip(keys, values, strict=True):
        if key in portion:
            yield portion
            portion = {}
        portion[key] = value
    yield portion
