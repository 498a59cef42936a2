"""Encodes rows as Arrow columns and decodes them, whole columns at a time.

    scan      key: binary (the user's) | value: binary (the user's)
    changes   version: uint64 | partition: uint32 | key: binary | value: binary [ | before: binary, or null ]
    write     key: binary | value: binary
    records   as in `codec/columns.py`

The fields of a batch of changes as a whole are sent in its metadata.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

import msgspec
import numpy
import pyarrow

from floodmark.columns.column import Column
from floodmark.columns.pairs import PAIRS, Pairs
from floodmark.model.change import Heartbeat
from floodmark.model.errors import InvalidArgument, WireMismatch
from floodmark.model.limits import KIB
from floodmark.model.stream import ChangeBatch, SwapPlace, Way
from floodmark.model.version import Version

MESSAGE_BYTES_MAX: Final = 512 * KIB

_BINARY: Final = pyarrow.binary()

CHANGES: Final = pyarrow.schema(
    [
        pyarrow.field("version", pyarrow.uint64(), nullable=False),
        pyarrow.field("partition", pyarrow.uint32(), nullable=False),
        *PAIRS,
    ]
)
CHANGES_WITH_BEFORES: Final = CHANGES.append(pyarrow.field("before", _BINARY))


class BatchMetadata(msgspec.Struct, frozen=True, omit_defaults=True):
    """The metadata of a batch of changes."""

    through: Version
    way: Way = Way.LOG
    heartbeats: list[Heartbeat] = []
    snapshot: bytes | None = None


_metadata: Final = msgspec.msgpack.Decoder(BatchMetadata)


def encode_pairs(
    pairs: Iterable[tuple[bytes, bytes]], *, bytes_max: int = MESSAGE_BYTES_MAX
) -> list[pyarrow.RecordBatch]:
    """Pairs of key and value, as messages of about `bytes_max` bytes."""
    keys, values = tuple(zip(*pairs, strict=True)) or ((), ())
    return cut_batch(_batch([keys, values], PAIRS), bytes_max)


def encode_rows(rows: Mapping[bytes, bytes]) -> pyarrow.RecordBatch:
    """Values under distinct keys."""
    if isinstance(rows, Pairs) and rows.is_ordered:
        columns = [rows.key_column.array, rows.value_column.array]
        return pyarrow.RecordBatch.from_arrays(columns, schema=PAIRS)
    return _batch([list(rows), list(rows.values())], PAIRS)


def decode_pairs(batch: pyarrow.RecordBatch) -> list[tuple[bytes, bytes]]:
    """The pairs of one message of `encode_pairs`.

    >>> (message,) = encode_pairs([(b"a", b"1"), (b"b", b"")])
    >>> decode_pairs(message)
    [(b'a', b'1'), (b'b', b'')]
    """
    keys, values = decode_columns(batch)
    return list(zip(keys, values, strict=True))


def decode_columns(batch: pyarrow.RecordBatch) -> tuple[list[bytes], list[bytes]]:
    """The keys and the values of a batch of pairs."""
    return batch.column(0).to_pylist(), batch.column(1).to_pylist()


def require_pairs(batch: pyarrow.RecordBatch) -> None:
    """Raise InvalidArgument unless a batch has the columns of pairs, undamaged and without nulls."""
    if not batch.schema.equals(PAIRS):
        raise InvalidArgument("a batch of writes has two columns of bytes without nulls, key and value")
    try:
        batch.validate(full=True)
    except pyarrow.ArrowException as error:
        raise InvalidArgument(f"a batch of writes is damaged: {error!s:.200}") from None
    if any(column.null_count for column in batch.columns):
        raise InvalidArgument("a batch of writes holds a null; a deletion is a record of its own kind")


def require_records(batch: pyarrow.RecordBatch, schema: pyarrow.Schema) -> None:
    """Raise WireMismatch if records have other columns, as those of another release may."""
    if not batch.schema.equals(schema):
        raise WireMismatch(
            "a batch of records has other columns than were asked for; use the same release on both sides"
        )


def changes_schema(*, before_images: bool) -> pyarrow.Schema:
    """The columns of a stream of changes."""
    return CHANGES_WITH_BEFORES if before_images else CHANGES


def encode_changes(
    batch: ChangeBatch, since: Version, *, before_images: bool, bytes_max: int = MESSAGE_BYTES_MAX
) -> list[tuple[pyarrow.RecordBatch, bytes]]:
    """A batch of changes as messages of rows and metadata; `before_images` is that of the request.

    Messages are small, so that a slow reader's buffers hold little.  The metadata of each states how far a
    reader is with it: up to its last whole commit, at least `since`, where the batch begins; in a snapshot,
    up to its last key.
    """
    columns: list[Sequence[object]] = [batch.versions, batch.partitions, batch.keys, batch.values]
    if before_images:
        columns.append(batch.befores or ())
    messages = cut_batch(_batch(columns, changes_schema(before_images=before_images)), bytes_max)
    if batch.snapshot is not None:
        places = [*(_place_behind(batch.snapshot, message) for message in messages[:-1]), batch.snapshot]
        return [
            (message, _encode(BatchMetadata(batch.through, batch.way, snapshot=place)))
            for message, place in zip(messages, places, strict=True)
        ]
    ends = [_whole_through(*pair, since) for pair in pairwise(messages)]
    spans = pairwise([since, *ends, batch.through])
    return [
        (message, _encode(BatchMetadata(end, batch.way, _beats_between(batch, begin, end))))
        for message, (begin, end) in zip(messages, spans, strict=True)
    ]


def _whole_through(message: pyarrow.RecordBatch, following: pyarrow.RecordBatch, since: Version) -> Version:
    """The version through which commits are whole with a message."""
    last: Version = message.column("version")[-1].as_py()
    return max(since, last if following.column("version")[0].as_py() != last else last - 1)


def _beats_between(batch: ChangeBatch, since: Version, through: Version) -> list[Heartbeat]:
    return [beat for beat in batch.heartbeats if since < beat.version <= through]


def _place_behind(place: bytes, message: pyarrow.RecordBatch) -> bytes:
    """The place after the last key of a message, in the form of the place of its batch."""
    last: bytes = message.column("key")[-1].as_py()
    swap = SwapPlace.decode(place)
    return last if swap is None else SwapPlace(swap.way, last).encode()


def decode_changes(batch: pyarrow.RecordBatch, metadata: bytes) -> ChangeBatch:
    """The changes of one message of `encode_changes`; raises WireMismatch if they cannot be read."""
    try:
        facts = _metadata.decode(metadata)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise WireMismatch(
            f"a batch of changes cannot be read ({error}); use the same release on both sides"
        ) from error
    versions, partitions, keys, values, *befores = map(Column[Any], batch.columns)
    return ChangeBatch(
        through=facts.through,
        way=facts.way,
        versions=versions,
        partitions=partitions,
        keys=keys,
        values=values,
        befores=befores[0] if befores else None,
        heartbeats=facts.heartbeats,
        snapshot=facts.snapshot,
    )


def cut_batch(batch: pyarrow.RecordBatch, bytes_max: int = MESSAGE_BYTES_MAX) -> list[pyarrow.RecordBatch]:
    """Cut a batch into messages of about `bytes_max` bytes; at least one, which may be empty."""
    step = max(1, batch.num_rows * bytes_max // max(1, batch.nbytes))
    return [batch.slice(start, step) for start in range(0, max(1, batch.num_rows), step)]


def _batch(columns: Sequence[Sequence[Any]], schema: pyarrow.Schema) -> pyarrow.RecordBatch:
    arrays = [_column(column, field) for column, field in zip(columns, schema, strict=True)]
    return pyarrow.RecordBatch.from_arrays(arrays, schema=schema)


def _column(values: Sequence[Any], field: pyarrow.Field) -> pyarrow.Array:
    """A column.  Without nulls it avoids `pyarrow.array`, which imports pandas for half a second."""
    if isinstance(values, Column):
        return values.array
    if field.nullable:
        return pyarrow.array(values, field.type, memory_pool=_memory)
    count = len(values)
    if field.type != _BINARY:
        numbers = numpy.array(values, field.type.to_pandas_dtype())
        return pyarrow.Array.from_buffers(field.type, count, [None, pyarrow.py_buffer(numbers)])
    borders = numpy.zeros(count + 1, numpy.int64)
    numpy.cumsum(numpy.fromiter(map(len, values), numpy.int64, count), out=borders[1:])
    buffers = [None, pyarrow.py_buffer(borders.astype(numpy.int32)), pyarrow.py_buffer(b"".join(values))]
    return pyarrow.Array.from_buffers(field.type, count, buffers)


# Arrow's own pool keeps freed memory for the thread that freed it, and a server has many short-lived threads.
_memory: Final = pyarrow.system_memory_pool()
_encode: Final = msgspec.msgpack.Encoder().encode
