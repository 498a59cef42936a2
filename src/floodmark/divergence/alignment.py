"""Records of several sites side by side: streams in key order, cut into windows of the same keys.

No record is sorted, shuffled or stored.  A window ends where all streams have been read: at the smallest of
their last keys.

    oslo    | a  b  c  d | e  f ...
    rome    | a  c  d  e | g ...            window: all keys up to d
    bonn    | a  b  c  d  e  f  g | ...

Within a window keys and digests are compared as whole columns.  Only records that differ become objects.
A stream that fails is left out from there on, so that it does not hide drift between the other sites.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations
from typing import Final, NamedTuple, TypeAlias

import numpy
import pyarrow
import pyarrow.compute
from numpy.typing import NDArray

from floodmark.codec.columns import RECORDS_WITH_DIGESTS
from floodmark.columns.column import Column
from floodmark.columns.packed import empty_batch
from floodmark.model.errors import FloodmarkError
from floodmark.model.record import FoundRecord

# Below this size, the fixed cost of a window would exceed the cost of its rows.
WINDOW_ROWS: Final = 8_192

_NO_RECORDS: Final = empty_batch(RECORDS_WITH_DIGESTS)
_UNSIGNED: Final = (1 << 64) - 1


class Unlike(NamedTuple):
    """A key in which two sites differ, and its thin records (`codec/thin.py`); one may be missing."""

    key: bytes
    left: FoundRecord | None
    right: FoundRecord | None


class Aligned(NamedTuple):
    """The keys of one window in which two sites, given by their indexes, differ."""

    left: int
    right: int
    compared: int
    unlike: list[Unlike]


class Failed(NamedTuple):
    """The index of a stream that cannot be read further, and the error."""

    place: int
    error: FloodmarkError


Alignment: TypeAlias = Aligned | Failed


def align(
    streams: Sequence[Iterable[pyarrow.RecordBatch]], *, window_rows: int = WINDOW_ROWS
) -> Iterator[Alignment]:
    """Compare streams of thin records of the same range of keys, each with each.

    Each window has one result for each pair of streams, in order of their places.  At most one window is in
    memory, and one batch of each stream.
    """
    sources = {place: _Source(stream, window_rows) for place, stream in enumerate(streams)}
    while len(sources) > 1:
        failed = list(_fill(sources))
        yield from failed
        if failed:
            # Fewer than two streams may be left.
            continue
        if not any(source.rows for source in sources.values()):
            return
        ends = [source.last_key() for source in sources.values() if not source.is_exhausted]
        end = min(ends, default=None)
        window = {place: source.take(end) for place, source in sources.items()}
        for left, right in combinations(window, 2):
            yield _compare(left, right, window[left], window[right])


def _fill(sources: dict[int, "_Source"]) -> Iterator[Failed]:
    for place in list(sources):
        try:
            sources[place].fill()
        except FloodmarkError as error:
            del sources[place]
            yield Failed(place, error)


class _Source:
    """A stream that is read as far as necessary."""

    def __init__(self, stream: Iterable[pyarrow.RecordBatch], rows_min: int) -> None:
        self._stream = iter(stream)
        self._rows_min = rows_min
        self._batches: list[pyarrow.RecordBatch] = []
        self.rows = 0
        self.is_exhausted = False

    def fill(self) -> None:
        """Read on until there are enough rows for a window."""
        while self.rows < self._rows_min and not self.is_exhausted:
            batch = next(self._stream, None)
            if batch is None:
                self.is_exhausted = True
            elif batch.num_rows:
                self._batches.append(batch)
                self.rows += batch.num_rows

    def last_key(self) -> bytes:
        """The last key that was read."""
        key: bytes = self._batches[-1].column("key")[-1].as_py()
        return key

    def take(self, end: bytes | None) -> pyarrow.RecordBatch:
        """Remove and return the rows up to a key, or all rows."""
        batches: list[pyarrow.RecordBatch] = []
        while self._batches:
            batch = self._batches[0]
            count = batch.num_rows if end is None else bisect_right(Column(batch.column("key")), end)
            if count == batch.num_rows:
                self._batches.pop(0)
            else:
                self._batches[0] = batch.slice(count)
            if count:
                batches.append(batch.slice(0, count))
            if count < batch.num_rows:
                break
        self.rows -= sum(batch.num_rows for batch in batches)
        return pyarrow.concat_batches(batches) if batches else _NO_RECORDS


def _compare(left: int, right: int, on_left: pyarrow.RecordBatch, on_right: pyarrow.RecordBatch) -> Aligned:
    if on_left.column("key").equals(on_right.column("key")):
        differing = numpy.flatnonzero(_digests(on_left) != _digests(on_right))
        return Aligned(left, right, on_left.num_rows, _pair(on_left, differing, on_right, differing))
    places = pyarrow.compute.index_in(on_left.column("key"), value_set=on_right.column("key"))
    found: NDArray[numpy.int64] = places.fill_null(-1).to_numpy(zero_copy_only=False).astype(numpy.int64)
    shared = numpy.flatnonzero(found >= 0)
    differing = shared[_digests(on_left)[shared] != _digests(on_right)[found[shared]]]
    only_left = numpy.flatnonzero(found < 0)
    only_right = numpy.setdiff1d(numpy.arange(on_right.num_rows), found[shared], assume_unique=True)
    unlike = [
        *_pair(on_left, differing, on_right, found[differing]),
        *(Unlike(key, row, None) for key, row in _rows_of(on_left, only_left)),
        *(Unlike(key, None, row) for key, row in _rows_of(on_right, only_right)),
    ]
    unlike.sort(key=lambda each: each.key)
    return Aligned(left, right, on_left.num_rows + len(only_right), unlike)


def _digests(batch: pyarrow.RecordBatch) -> NDArray[numpy.int64]:
    digests: NDArray[numpy.int64] = batch.column("digest").to_numpy()
    return digests


def _pair(
    on_left: pyarrow.RecordBatch,
    left_rows: NDArray[numpy.int64],
    on_right: pyarrow.RecordBatch,
    right_rows: NDArray[numpy.int64],
) -> list[Unlike]:
    if not len(left_rows):
        return []
    pairs = zip(_rows_of(on_left, left_rows), _rows_of(on_right, right_rows), strict=True)
    return [Unlike(key, left, right) for (key, left), (_, right) in pairs]


def _rows_of(batch: pyarrow.RecordBatch, chosen: NDArray[numpy.int64]) -> Iterator[tuple[bytes, FoundRecord]]:
    """Some rows of a batch as objects."""
    batch = batch.take(pyarrow.array(chosen))
    columns = (batch.column(name).to_pylist() for name in ("key", "version", "value", "digest"))
    for key, version, thin, digest in zip(*columns, strict=True):
        yield key, FoundRecord(version, thin, digest & _UNSIGNED)
