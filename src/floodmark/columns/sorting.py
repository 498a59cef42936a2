"""Sorts keys and values in columns, any number within a fixed amount of memory: an external merge sort.

Rows are gathered in memory.  When they fill the quota they are sorted and written to a file without a name,
as a *run* of Arrow messages; in the end the runs are merged.  A merge takes the first rows of all runs, up to
the lowest key that ends a message, and sorts those: no row costs a call of Python.

Of rows with one key the last that was added is kept, or the sort is refused.
"""

import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from tempfile import TemporaryFile
from typing import Final

import numpy
import pyarrow
import pyarrow.compute

from floodmark.columns.pairs import Pairs
from floodmark.model.errors import StorageFull
from floodmark.model.limits import KIB, MIB

MEMORY_BYTES_MAX: Final = 64 * MIB
# What a run holds in memory while it is merged.
_MESSAGE_BYTES: Final = 256 * KIB

# Is called with a key that comes twice, and raises.
Refuse = Callable[[bytes], None]


class PairSorter:
    """Sorts batches of two columns, keys and values.  Use it as a context manager.

    >>> with PairSorter() as sorter:
    ...     for key in (b"b", b"a", b"b"):
    ...         rows = pyarrow.RecordBatch.from_pydict({"key": [key], "value": [key]})
    ...         sorter.add(rows)
    ...     [dict(pairs) for pairs in sorter.pairs()]
    [{b'a': b'a', b'b': b'b'}]
    """

    def __init__(self, refuse: Refuse | None = None, *, memory_bytes_max: int = MEMORY_BYTES_MAX) -> None:
        self._refuse = refuse
        # A sort copies its rows.
        self._gather_bytes_max = memory_bytes_max // 3
        self._gathered: list[pyarrow.RecordBatch] = []
        self._bytes = 0
        # Where each message of a run begins, and the last ends.
        self._runs: list[list[int]] = []
        directory = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0]
        self._file = TemporaryFile(dir=directory if os.path.isdir(directory) else None)

    def __enter__(self) -> "PairSorter":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, rows: pyarrow.RecordBatch) -> None:
        """Add rows."""
        self._gathered.append(rows)
        self._bytes += rows.nbytes
        if self._bytes >= self._gather_bytes_max:
            self._spill()

    def pairs(self, bytes_max: int = 8 * MIB) -> Iterator[Pairs]:
        """All rows in order of keys, each key once, in portions of about some bytes."""
        if self._runs:
            self._spill()
            batches = self._merge()
        else:
            batches = iter([self._sort(self._gathered)] if self._gathered else [])
            self._gathered = []
        return (Pairs(*batch.columns) for batch in _portions(batches, bytes_max))

    def _spill(self) -> None:
        if not self._gathered:
            return
        places = [self._file.seek(0, os.SEEK_END)]
        try:
            for batch in _portions([self._sort(self._gathered)], _MESSAGE_BYTES):
                self._file.write(batch.serialize())
                places.append(self._file.tell())
            self._file.flush()
        except OSError as error:
            raise StorageFull(
                f"rows do not fit into the directory of temporary files ({error.strerror or error}); make "
                "room, or name another one in TMPDIR"
            ) from error
        self._runs.append(places)
        self._gathered, self._bytes = [], 0

    def _merge(self) -> Iterator[pyarrow.RecordBatch]:
        runs = [run for places in self._runs if (run := _Run(self._messages(places))).is_open]
        while runs:
            bound = min(run.last for run in runs)
            yield self._sort([run.take(bound) for run in runs])
            runs = [run for run in runs if run.is_open]

    def _messages(self, places: list[int]) -> Iterator[pyarrow.RecordBatch]:
        for start, end in pairwise(places):
            self._file.seek(start)
            yield pyarrow.ipc.read_record_batch(pyarrow.py_buffer(self._file.read(end - start)), self._schema)

    def _sort(self, batches: list[pyarrow.RecordBatch]) -> pyarrow.RecordBatch:
        """Rows in order; of those with one key the last."""
        rows = pyarrow.concat_batches(batches)
        self._schema = rows.schema
        keys = rows.column(0)
        if _ascend(keys):
            return rows
        rows = rows.take(pyarrow.compute.sort_indices(keys))
        return drop_repeated(rows, self._refuse)


class _Run:
    """What is left of a sorted run."""

    def __init__(self, messages: Iterator[pyarrow.RecordBatch]) -> None:
        self._messages = messages
        self.is_open = True
        self._next()

    def _next(self) -> None:
        message = next(self._messages, None)
        self.is_open = message is not None
        if message is not None:
            self._rows, self._taken = message, 0
            self.last: bytes = message.column(0)[-1].as_py()

    def take(self, bound: bytes) -> pyarrow.RecordBatch:
        """The rows up to a key, all of which are in the message that is held."""
        rows, start = self._rows, self._taken
        self._taken = bisect_right(rows.column(0), bound, start, key=lambda key: key.as_py())
        if self._taken == len(rows):
            self._next()
        return rows.slice(start, self._taken - start if self._rows is rows else None)


def drop_repeated(rows: pyarrow.RecordBatch, refuse: Refuse | None) -> pyarrow.RecordBatch:
    """Of sorted rows with one key the last."""
    keys = rows.column(0)
    repeated = pyarrow.compute.equal(keys[:-1], keys[1:])
    if not repeated.true_count:
        return rows
    if refuse is not None:
        refuse(keys[repeated.index(True).as_py()].as_py())
    kept = numpy.append(~repeated.to_numpy(zero_copy_only=False), True)
    return rows.take(pyarrow.array(numpy.flatnonzero(kept)))


def _ascend(keys: pyarrow.BinaryArray) -> bool:
    ascends = pyarrow.compute.less(keys[:-1], keys[1:])
    return bool(pyarrow.compute.all(ascends).as_py())


def _portions(batches: Iterable[pyarrow.RecordBatch], bytes_max: int) -> Iterator[pyarrow.RecordBatch]:
    """Batches cut and joined to about some bytes."""
    gathered: list[pyarrow.RecordBatch] = []
    size = 0
    for batch in batches:
        step = max(1, len(batch) * bytes_max // max(1, batch.nbytes))
        for start in range(0, len(batch), step):
            piece = batch.slice(start, step)
            gathered.append(piece)
            size += piece.nbytes
            if size >= bytes_max // 2:
                yield pyarrow.concat_batches(gathered)
                gathered, size = [], 0
    if gathered:
        yield pyarrow.concat_batches(gathered)
