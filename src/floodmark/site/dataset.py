"""Encodes the rows of a data set, as users pass them, into columns of stored records.

Rows are pairs, or Arrow batches with the columns `key` and `value`.  Arrow batches are encoded by column;
only an invalid row is handled in Python by itself.
"""

import csv
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import IO, Any, Final, TypeAlias

import numpy
import pyarrow
import pyarrow.compute as compute

from floodmark.codec.ordered import NAMESPACE_BYTES
from floodmark.codec.records import join_values, qualify_keys
from floodmark.columns.packed import numbers_to_arrow, pack
from floodmark.columns.pairs import PAIRS, Pairs
from floodmark.columns.sorting import sort_pairs
from floodmark.host.catalog import NamespaceRow
from floodmark.model.errors import (
    FloodmarkError,
    InvalidArgument,
    InvalidKey,
    InvalidValue,
    LimitExceeded,
    SchemaMismatch,
)
from floodmark.model.limits import KEY_BYTES_MAX, VALUE_BYTES_MAX
from floodmark.partition.commit.entering import refuse_key
from floodmark.site.arguments import refuse_value
from floodmark.site.writer import Encoding

Rows: TypeAlias = (
    Mapping[bytes, bytes]
    | Iterable[tuple[bytes, bytes] | pyarrow.RecordBatch]
    | pyarrow.Table
    | pyarrow.RecordBatchReader
)
Refuse: TypeAlias = Callable[[Any, FloodmarkError], None]
# Several rows with one key fail the publication, or the last of them counts.
DUPLICATES: Final = ("fail", "last")
# The publication fails at the next refused row after this number.
REFUSED_MAX: Final = 1_000

_BATCH_ROWS: Final = 4_096
_BINARY: Final = pyarrow.binary()


class DataSet:
    """Encodes and sorts the rows of a data set, and counts the rows yielded and the rows refused."""

    def __init__(
        self,
        row: NamespaceRow,
        encoding: Encoding,
        duplicates: str,
        on_refused: Refuse | None,
        report: Callable[[str, int], None],
    ) -> None:
        self.rows = self.refused = 0
        self._row = row
        self._policy, self._qualify, expire = encoding
        self._expires_at = expire(None)
        self._refuse_duplicate = refuse_duplicates(duplicates, row.name)
        self._on_refused = on_refused
        self._report = report

    def pairs(self, rows: Rows) -> Iterator[Pairs]:
        """Stored records under qualified keys, in key order, each key once.

        Raises InvalidKey or InvalidValue for an invalid row, unless there is an `on_refused`; InvalidKey for
        a duplicate key, unless the last row counts; SchemaMismatch if the columns are not `key` and `value`.
        """
        for pairs in sort_pairs(self._counted(self._batches(rows)), self._refuse_duplicate):
            self.rows += len(pairs)
            yield pairs

    def _counted(self, batches: Iterable[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
        read = 0
        for batch in batches:
            yield batch
            read += len(batch)
            self._report("reading", read)

    def _batches(self, rows: Rows) -> Iterator[pyarrow.RecordBatch]:
        if isinstance(rows, pyarrow.Table):
            rows = rows.to_batches()
        gathered: list[Any] = []
        for each in rows.items() if isinstance(rows, Mapping) else rows:
            if isinstance(each, pyarrow.RecordBatch):
                yield self._encode_batch(each)
                continue
            gathered.append(each)
            if len(gathered) == _BATCH_ROWS:
                yield self._encode_pairs(gathered)
                gathered = []
        yield self._encode_pairs(gathered)

    def _encode_pairs(self, pairs: list[Any]) -> pyarrow.RecordBatch:
        keys, values = [], []
        for pair in pairs:
            try:
                key, value = pair
                stored = self._policy.put(key, value, self._expires_at)
                keys.append(self._qualify(key))
                values.append(stored)
            except (InvalidKey, InvalidValue) as error:
                self._refuse(pair, error)
        return pyarrow.RecordBatch.from_arrays([pack(keys).to_arrow(), pack(values).to_arrow()], schema=PAIRS)

    def _encode_batch(self, batch: pyarrow.RecordBatch) -> pyarrow.RecordBatch:
        keys, values = _column(batch, "key"), _column(batch, "value")
        key_lengths = compute.binary_length(keys).fill_null(0)
        wrong_keys = compute.or_(compute.equal(key_lengths, 0), compute.greater(key_lengths, KEY_BYTES_MAX))
        wrong_values = compute.or_(
            values.is_null(), compute.greater(compute.binary_length(values).fill_null(0), VALUE_BYTES_MAX)
        )
        wrong = compute.or_(wrong_keys, wrong_values)
        if wrong.true_count:
            for place in numpy.flatnonzero(wrong.to_numpy(zero_copy_only=False)).tolist():
                key, value = keys[place].as_py(), values[place].as_py()
                error = refuse_key(key) if wrong_keys[place].as_py() else refuse_value(key, value)
                self._refuse((key, value), error)
            keys, values = keys.filter(compute.invert(wrong)), values.filter(compute.invert(wrong))
        expiries = None
        if self._expires_at is not None:
            expiries = numbers_to_arrow(numpy.full(len(keys), self._expires_at, numpy.int64))
        columns = [qualify_keys(self._row.id, keys), join_values(values, expires_at=expiries)]
        return pyarrow.RecordBatch.from_arrays(columns, schema=PAIRS)

    def _refuse(self, pair: Any, error: FloodmarkError) -> None:
        if self._on_refused is None:
            raise error
        self._on_refused(pair, error)
        self.refused += 1


class RefusedRows:
    """Writes refused rows, each with its error, to a CSV file, up to a limit."""

    def __init__(self, file: IO[str], rows_max: int = REFUSED_MAX) -> None:
        self._count = 0
        self._rows_max = rows_max
        self._writer = csv.writer(file)
        self._writer.writerow(["key", "value", "error"])

    def add(self, pair: Any, error: object) -> None:
        """Write a row to the file.  Raises LimitExceeded above the limit."""
        self._count += 1
        if self._count > self._rows_max:
            raise LimitExceeded(f"more than {self._rows_max:,} rows are refused, the last because {error}")
        self._writer.writerow([*map(as_text, pair), error])


def as_text(value: Any) -> str:
    """A key or value in the text form of the CSV file of refused rows."""
    return value.decode(errors="backslashreplace") if isinstance(value, bytes) else str(value)


def refuse_duplicates(duplicates: object, namespace: str) -> Callable[[bytes], None] | None:
    """The function that raises InvalidKey for a duplicate qualified key; None if the last row counts."""
    if duplicates not in DUPLICATES:
        raise InvalidArgument(f"duplicates is one of fail and last, not {duplicates!r:.60}")
    return None if duplicates == "last" else partial(_refuse_duplicate, namespace)


def _refuse_duplicate(namespace: str, qualified: bytes) -> None:
    key = qualified[NAMESPACE_BYTES:]
    raise InvalidKey(
        f"the key {key[:40]!r} stands in several rows of the data set for {namespace!r}; leave out all but "
        "one, or publish with duplicates='last'",
        key=key,
    )


def _column(batch: pyarrow.RecordBatch, name: str) -> pyarrow.BinaryArray:
    """A column of bytes or text, cast to bytes."""
    names = batch.schema.names
    kind = batch.schema.field(name).type if names.count(name) == 1 else None
    if kind in (pyarrow.large_string(), pyarrow.large_binary()):
        return batch.column(name).cast(pyarrow.large_binary()).cast(_BINARY)
    if kind not in (pyarrow.string(), _BINARY):
        raise SchemaMismatch(
            f"rows of a data set have the columns key and value, of bytes or text, and these have "
            f"{', '.join(map(str, batch.schema))}; select and cast them first",
            column=name,
        )
    return batch.column(name).cast(_BINARY)
