"""Rows among changes that are not changes: heartbeats, and markers of a scan.

They pass through the same tasks as the changes, so that the task that writes the changes can count them and
compare the count with the heartbeats.

    _change_type   key     value                     _commit_version
    heartbeat      empty   a `NamespaceBeat`         its own
    scanned        empty   empty                     changes up to this one were found by a scan
    counted        empty   the count of a task       0
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import msgspec
import numpy
import pyarrow
import pyarrow.compute

from floodmark.accounting.counting import Counted, RowCounting, slim_beat
from floodmark.model.change import ChangeType, Heartbeat, NamespaceBeat
from floodmark.model.version import Version
from floodmark.spark.source.rows import RowFormat, special_rows
from floodmark.spark.source.schemas import CHANGE_DIGEST, SNAPSHOT
from floodmark.spark.source.schemas import COUNTED as COUNTED_CHANGES

HEARTBEAT: Final = "heartbeat"
SCANNED: Final = "scanned"
COUNTED: Final = "counted"
SPECIAL: Final = (HEARTBEAT, SCANNED, COUNTED)

_encode: Final = msgspec.msgpack.Encoder().encode
_decode_beat: Final = msgspec.msgpack.Decoder(NamespaceBeat).decode
_decode_counted: Final = msgspec.msgpack.Decoder(Counted).decode


def beat_rows(heartbeats: Sequence[Heartbeat], rows: RowFormat, namespace: int) -> pyarrow.RecordBatch:
    """Heartbeats as rows."""
    beats = [slim_beat(heartbeat, rows.site_id, namespace) for heartbeat in heartbeats]
    return special_rows(HEARTBEAT, [beat.version for beat in beats], [_encode(beat) for beat in beats], rows)


def scanned_row(through: Version, rows: RowFormat) -> pyarrow.RecordBatch:
    """A row that marks the changes before it as found by a scan."""
    return special_rows(SCANNED, [through], [b""], rows)


class CountedRows:
    """The changes among rows, counted while they are iterated."""

    def __init__(self, batches: Iterable[pyarrow.RecordBatch]) -> None:
        self._batches = batches
        self._counting = RowCounting()

    def __iter__(self) -> Iterator[pyarrow.RecordBatch]:
        for batch in self._batches:
            kinds = batch.column("_change_type").cast(pyarrow.string())
            special = pyarrow.compute.is_in(kinds, value_set=pyarrow.array(SPECIAL, pyarrow.string()))
            if special.true_count == 0:
                self._count(batch, kinds)
                yield batch
                continue
            changes = pyarrow.compute.invert(special)
            if changes.true_count:
                self._count(batch.filter(changes), kinds.filter(changes))
                yield batch.filter(changes)
            self._take(batch.filter(special), kinds.filter(special))

    def finish(self) -> bytes:
        """The count, for `add_counted`."""
        return _encode(self._counting.finish())

    def _count(self, changes: pyarrow.RecordBatch, kinds: pyarrow.StringArray) -> None:
        # Of an update the image after it counts.
        after = pyarrow.compute.not_equal(kinds, ChangeType.UPDATE_PREIMAGE.value)
        # Heartbeats sum up commits, not the rows of a snapshot.
        after = pyarrow.compute.and_not(after, changes.column(SNAPSHOT.name))
        versions = changes.column("_commit_version").filter(after)
        digests = changes.column(CHANGE_DIGEST.name).filter(after)
        self._counting.add(
            versions.to_numpy().astype(numpy.uint64),
            None if digests.null_count else digests.to_numpy().view(numpy.uint64),
        )

    def _take(self, rows: pyarrow.RecordBatch, kinds: pyarrow.StringArray) -> None:
        values, versions = rows.column("value").to_pylist(), rows.column("_commit_version").to_pylist()
        for kind, value, version in zip(kinds.to_pylist(), values, versions, strict=True):
            if kind == HEARTBEAT:
                self._counting.add_beats([_decode_beat(value)])
            else:
                self._counting.add_scanned(version)


def pass_counted(batches: Iterable[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
    """Pass changes on, followed by a row with their count."""
    counted = CountedRows(batches)
    yield from counted
    rows = RowFormat(COUNTED_CHANGES, None, 0)
    yield special_rows(COUNTED, [0], [counted.finish()], rows)


def add_counted(parts: Iterable[bytes]) -> Counted:
    """The sum of the counts of tasks."""
    counted = Counted()
    for part in parts:
        counted = counted.plus(_decode_counted(part))
    return counted
