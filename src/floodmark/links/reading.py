"""Reads the changes of a step as Arrow batches, which travel from the reading to the applying process.

    namespace: uint16 | version: uint64 | kind: uint8 | key: binary | record: binary

A row is a change, a heartbeat, or a mark that a scan found the rows before it:

    kind        version         key             record
    CHANGE      its commit's    the user's      the stored value with its origin, (version, source)
    HEARTBEAT   its own         empty           a `NamespaceBeat`
    SCANNED     the step's end  empty           empty

`namespace` is the index of the namespace in the step.  Rows of a namespace are in version order; in a step
with atomic batches, the rows of all namespaces are, so that the rows of a batch are adjacent.  A part that
reads only some of the keys still gets all heartbeats, closes its own sums at each of them, and the sums of
all parts are added.
"""

from collections.abc import Iterator, Sequence
from enum import IntEnum
from itertools import chain
from typing import Any, Final, NamedTuple

import msgspec
import numpy
import pyarrow
import pyarrow.compute

from floodmark.codec.ordered import NAMESPACE_BYTES, qualify_range
from floodmark.codec.records import add_origins
from floodmark.host.ports import Host
from floodmark.model.change import NamespaceBeat, narrow_heartbeat
from floodmark.model.limits import KEY_BYTES_MAX
from floodmark.model.ranges import KeyRange
from floodmark.model.stream import ChangeBatch, ChangesRequest, Way
from floodmark.replication.step import LinkStep

_BINARY: Final = pyarrow.binary()
_ALL: Final = KeyRange()

ROWS: Final = pyarrow.schema(
    [
        pyarrow.field("namespace", pyarrow.uint16(), nullable=False),
        pyarrow.field("version", pyarrow.uint64(), nullable=False),
        pyarrow.field("kind", pyarrow.uint8(), nullable=False),
        pyarrow.field("key", _BINARY, nullable=False),
        pyarrow.field("record", _BINARY, nullable=False),
    ]
)

encode_beat: Final = msgspec.msgpack.Encoder().encode
decode_beat: Final = msgspec.msgpack.Decoder(NamespaceBeat).decode


class RowKind(IntEnum):
    """The kind of a row."""

    CHANGE = 0
    HEARTBEAT = 1
    SCANNED = 2


class Piece(NamedTuple):
    """A range of user keys of one namespace of a step, which is given by its index there."""

    place: int
    keys: KeyRange


def whole_step(step: LinkStep) -> list[Piece]:
    """The pieces that make up a whole step."""
    places = enumerate(step.namespaces)
    return [Piece(place, KeyRange()) for place, each in places if each.until > each.since]


def read_step(source: Host, step: LinkStep) -> Iterator[pyarrow.RecordBatch]:
    """All rows of a step."""
    return read_pieces(source, step, whole_step(step))


def read_pieces(source: Host, step: LinkStep, pieces: Sequence[Piece]) -> Iterator[pyarrow.RecordBatch]:
    """The rows of pieces of a step: one after the other, or in version order if it has atomic batches."""
    parts = [read_part(source, step, place, keys) for place, keys in pieces]
    return _merge(parts) if step.batches and len(parts) > 1 else chain.from_iterable(parts)


def _merge(parts: Sequence[Iterator[pyarrow.RecordBatch]]) -> Iterator[pyarrow.RecordBatch]:
    """The rows of all parts in version order.  A batch of each is in memory, and ends with a whole commit."""
    heads = {part: rows for part in parts if (rows := next(part, None)) is not None}
    while heads:
        # As a number of the columns' own kind: any other is compared as a float.
        last = min(rows.column("version").to_numpy()[-1] for rows in heads.values())
        taken = []
        for part, rows in list(heads.items()):
            end = int(numpy.searchsorted(rows.column("version").to_numpy(), last, side="right"))
            taken.append(rows.slice(0, end))
            left = rows.slice(end) if end < rows.num_rows else next(part, None)
            if left is None:
                del heads[part]
            else:
                heads[part] = left
        yield _in_order(taken)


def _in_order(batches: Sequence[pyarrow.RecordBatch]) -> pyarrow.RecordBatch:
    filled = [batch for batch in batches if batch.num_rows]
    if len(filled) == 1:
        return filled[0]
    rows = pyarrow.concat_batches(filled)
    order = numpy.argsort(rows.column("version").to_numpy(), kind="stable")
    return rows.take(pyarrow.array(order))


def read_part(
    source: Host, step: LinkStep, index: int, keys: KeyRange = _ALL
) -> Iterator[pyarrow.RecordBatch]:
    """The rows of one namespace of a step: the changes of a range of user keys, and all heartbeats."""
    namespace = step.namespaces[index]
    if namespace.until <= namespace.since:
        return
    request = ChangesRequest(
        keys=qualify_range(namespace.source_id, keys),
        namespace=namespace.source_id,
        since=namespace.begin,
        until=namespace.until,
        heartbeats=True,
        own=True,
        partial=True,
    )
    scanned = False
    for batch in source.changes(request):
        scanned = scanned or (batch.way is Way.SCAN)
        rows = [_encode_changes(batch, index, step.source_id)] if len(batch.keys) else []
        if batch.heartbeats:
            beats = [narrow_heartbeat(beat, step.source_id, namespace.source_id) for beat in batch.heartbeats]
            encoded = [(beat.version, encode_beat(beat)) for beat in beats]
            rows.append(_special_rows(index, RowKind.HEARTBEAT, encoded))
        if rows:
            yield _in_order(rows)
    if scanned:
        yield _special_rows(index, RowKind.SCANNED, [(namespace.until, b"")])


def _encode_changes(batch: ChangeBatch, index: int, source_id: int) -> pyarrow.RecordBatch:
    versions = numpy.array(batch.versions, numpy.uint64)
    qualified = pyarrow.array(batch.keys, _BINARY)
    stored = pyarrow.array(batch.values, _BINARY)
    keys = pyarrow.compute.binary_slice(qualified, NAMESPACE_BYTES, NAMESPACE_BYTES + KEY_BYTES_MAX)
    return _rows(index, RowKind.CHANGE, versions, keys, add_origins(stored, versions, source_id))


def _special_rows(index: int, kind: RowKind, rows: Sequence[tuple[int, bytes]]) -> pyarrow.RecordBatch:
    """Rows without keys, by their versions and records."""
    versions, records = zip(*rows, strict=True)
    keys = pyarrow.array([b""] * len(rows), _BINARY)
    return _rows(index, kind, numpy.array(versions, numpy.uint64), keys, pyarrow.array(records, _BINARY))


def _rows(index: int, kind: RowKind, versions: Any, keys: Any, records: Any) -> pyarrow.RecordBatch:
    count = len(versions)
    columns = [
        pyarrow.array(numpy.full(count, index, numpy.uint16)),
        pyarrow.array(versions),
        pyarrow.array(numpy.full(count, kind, numpy.uint8)),
        keys,
        records,
    ]
    return pyarrow.RecordBatch.from_arrays(columns, schema=ROWS)
