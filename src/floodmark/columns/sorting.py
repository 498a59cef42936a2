"""Sorts any number of keys and values, in columns, within a fixed amount of memory: an external merge sort.

Rows are gathered in memory.  When they fill the quota they are sorted and written to a file without a name,
as a *run* of Arrow messages; in the end the runs are merged.  A merge takes the first rows of all runs, up to
the lowest key that ends a message, and sorts these: no row takes a Python call of its own.

Of rows with the same key the one that was added last is kept, or the sort is refused.
"""

import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from tempfile import TemporaryFile
from typing import IO, Final

import numpy
import pyarrow
import pyarrow.compute
import pyarrow.ipc

from floodmark.columns.packed import numbers_to_arrow
from floodmark.columns.pairs import Pairs
from floodmark.model.errors import InvalidArgument, StorageFull
from floodmark.model.limits import KIB, MIB

MEMORY_BYTES_MAX: Final = 64 * MIB
# The size of a portion, which a site stores in some ten milliseconds.
PORTION_BYTES_MAX: Final = 4 * MIB
# The memory of a run while it is merged.
_MESSAGE_BYTES_MAX: Final = 256 * KIB

# Called with a key that occurs twice; raises an error.
Refuse = Callable[[bytes], None]


def sort_pairs(
    batches: Iterable[pyarrow.RecordBatch],
    refuse: Refuse | None = None,
    *,
    in_order: bool = False,
    bytes_max: int = PORTION_BYTES_MAX,
    memory_bytes_max: int = MEMORY_BYTES_MAX,
) -> Iterator[Pairs]:
    """Sort batches of two columns, keys and values; yields each key once, in portions of about `bytes_max`.

    With `in_order`, the rows are only checked to be in order, and yielded as they come.

    >>> rows = pyarrow.RecordBatch.from_pydict({"key": [b"b", b"a", b"b"], "value": [b"1", b"2", b"3"]})
    >>> [dict(pairs) for pairs in sort_pairs([rows])]
    [{b'a': b'2', b'b': b'3'}]
    """
    if in_order:
        for batch in _portions(_check_order(batches, refuse), bytes_max):
            yield Pairs(*batch.columns)
        return
    with _Sorter(refuse, memory_bytes_max) as sorter:
        for batch in batches:
            sorter.add(batch)
        for batch in _portions(sorter.rows(), bytes_max):
            yield Pairs(*batch.columns)


class _Sorter:
    """Rows in memory, and sorted runs in a file."""

    def __init__(self, refuse: Refuse | None, memory_bytes_max: int) -> None:
        self._refuse = refuse
        # A sort copies its rows.
        self._gather_bytes_max = memory_bytes_max // 3
        self._message_bytes_max = min(memory_bytes_max // 16, _MESSAGE_BYTES_MAX)
        self._gathered: list[pyarrow.RecordBatch] = []
        self._bytes = 0
        # Where each message of a run begins, and the last ends.
        self._runs: list[list[int]] = []
        self._file = _open_nameless()

    def __enter__(self) -> "_Sorter":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, rows: pyarrow.RecordBatch) -> None:
        if not len(rows):
            return
        self._gathered.append(rows)
        self._bytes += rows.nbytes
        if self._bytes >= self._gather_bytes_max:
            self._spill()

    def rows(self) -> Iterator[pyarrow.RecordBatch]:
        """All rows in order."""
        if self._runs:
            self._spill()
            return self._merge()
        return iter([_sort(self._gathered, self._refuse)] if self._gathered else [])

    def _spill(self) -> None:
        if not self._gathered:
            return
        places = [self._file.seek(0, os.SEEK_END)]
        self._schema = self._gathered[0].schema
        try:
            for batch in _portions([_sort(self._gathered, self._refuse)], self._message_bytes_max):
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
        runs = [_SortedRun(self._messages(places)) for places in self._runs]
        while runs:
            bound = min(run.last for run in runs)
            # A later run follows an earlier one: of rows with the same key, its row is the last.
            yield _sort([run.take(bound) for run in runs], self._refuse)
            runs = [run for run in runs if run.is_open]

    def _messages(self, places: list[int]) -> Iterator[pyarrow.RecordBatch]:
        for start, end in pairwise(places):
            self._file.seek(start)
            yield pyarrow.ipc.read_record_batch(pyarrow.py_buffer(self._file.read(end - start)), self._schema)


class _SortedRun:
    """The rest of a sorted run, none of whose messages is empty."""

    def __init__(self, messages: Iterator[pyarrow.RecordBatch]) -> None:
        self._messages = messages
        self._next()

    def _next(self) -> None:
        message = next(self._messages, None)
        self.is_open = message is not None
        if message is not None:
            self._rows, self._taken = message, 0
            self.last: bytes = message.column(0)[-1].as_py()

    def take(self, bound: bytes) -> pyarrow.RecordBatch:
        """The rows up to a key, which must be at most the last key of the present message."""
        start, keys = self._taken, self._rows.column(0)
        self._taken = bisect_right(keys, bound, start, key=lambda key: key.as_py())
        taken = self._rows.slice(start, self._taken - start)
        if self._taken == len(keys):
            self._next()
        return taken


def _open_nameless() -> IO[bytes]:
    # Spark's local directory, if Spark names it to its workers.
    directory = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0]
    return TemporaryFile(dir=directory if os.path.isdir(directory) else None)


def _sort(batches: list[pyarrow.RecordBatch], refuse: Refuse | None) -> pyarrow.RecordBatch:
    """The rows in order; of those with the same key only the last."""
    rows = pyarrow.concat_batches(batches)
    keys = rows.column(0)
    if pyarrow.compute.all(pyarrow.compute.less(keys[:-1], keys[1:])).as_py():
        return rows
    return _drop_repeated(rows.take(pyarrow.compute.sort_indices(keys)), refuse)


def _check_order(
    batches: Iterable[pyarrow.RecordBatch], refuse: Refuse | None
) -> Iterator[pyarrow.RecordBatch]:
    held: list[pyarrow.RecordBatch] = []
    for batch in batches:
        if not len(batch):
            continue
        rows = pyarrow.concat_batches([*held, batch])
        keys = rows.column(0)
        if pyarrow.compute.any(pyarrow.compute.greater(keys[:-1], keys[1:])).as_py():
            raise InvalidArgument(
                "rows that were said to stand in order of their keys do not; sort them first"
            )
        rows = _drop_repeated(rows, refuse)
        # The next batch may begin with the key of the last row.
        held = [rows.slice(len(rows) - 1)]
        yield rows.slice(0, len(rows) - 1)
    yield from held


def _drop_repeated(rows: pyarrow.RecordBatch, refuse: Refuse | None) -> pyarrow.RecordBatch:
    """Sorted rows without those that the next one repeats; calls `refuse` with the first repeated key."""
    keys = rows.column(0)
    repeated = pyarrow.compute.equal(keys[:-1], keys[1:])
    if not repeated.true_count:
        return rows
    if refuse is not None:
        refuse(keys[repeated.index(True).as_py()].as_py())
    kept = numpy.append(~repeated.to_numpy(zero_copy_only=False), True)
    return rows.take(numbers_to_arrow(numpy.flatnonzero(kept)))


def _portions(batches: Iterable[pyarrow.RecordBatch], bytes_max: int) -> Iterator[pyarrow.RecordBatch]:
    """Cut and join batches to pieces of about `bytes_max`, with at least one row each."""
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
