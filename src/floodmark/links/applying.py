"""Applies changes of another site: commits stay whole, and each change counts at most once.

**Commits stay whole.** A batch becomes one commit of the target, so it ends only where a commit of the source
ends.  A batch ends before a commit that writes one of its keys again.  A batch that is too large for one
commit of the target is sent in halves; an atomic batch of the source is never divided, and a target that does
not take it refuses the step.

**No change comes late.**  The target refuses the writes of a slow task that was repeated, inside the commit,
because the link has moved on: a tombstone that would have kept them dead may be collected.

**No change counts twice.**  Rows at or below the position of the link are dropped, by their version at the
source: the account of the target contains their sums already.

The target decides by stamp, in its own commit, so applying again has no effect.  An acknowledged batch is
durable: a target that crashes between two calls loses nothing that was counted.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final

import numpy
import pyarrow
import pyarrow.compute
from numpy.typing import NDArray

from floodmark.accounting.counting import Digests, Versions
from floodmark.codec.ordered import encode_namespace
from floodmark.codec.records import digest_records, qualify_keys
from floodmark.codec.values import IN_BATCH
from floodmark.columns.pairs import Pairs
from floodmark.host.ports import Host
from floodmark.links.reading import RowKind, decode_beat
from floodmark.model.change import NamespaceBeat
from floodmark.model.errors import CommitTooLarge
from floodmark.model.limits import MIB
from floodmark.model.partition import ApplyStream, LinkGuard, LoadStream, WriteStream
from floodmark.replication.applied import Applied, NamespaceApplied
from floodmark.replication.lag import LagCounts
from floodmark.replication.step import LinkStep, NamespaceStep

BATCH_ROWS_MAX: Final = 8_192
BATCH_BYTES_MAX: Final = 4 * MIB
# Batches without an acknowledgement; they are kept, because one may have to be halved.
UNSETTLED_MAX: Final = 8


class Applier:
    """Applies the rows of a step, or of one range of it, in their order.  A context manager."""

    def __init__(
        self,
        target: Host,
        step: LinkStep,
        *,
        batch_rows_max: int = BATCH_ROWS_MAX,
        batch_bytes_max: int = BATCH_BYTES_MAX,
    ) -> None:
        guard = LinkGuard(
            step.source_id,
            positions={each.target_id: each.since for each in step.namespaces},
            incarnation=step.incarnation,
            starts={each.target_id: each.start for each in step.namespaces},
        )
        self._sender = Sender(target, ApplyStream(True, guard))
        self._parts = [_NamespacePart(namespace) for namespace in step.namespaces]
        lags = [part.applied.lags for part in self._parts]
        self._batches = Batches(self._sender, lags, batch_rows_max, batch_bytes_max)
        self._since = numpy.array([each.since for each in step.namespaces], numpy.uint64)
        self._until = numpy.array([each.until for each in step.namespaces], numpy.uint64)
        self._names = pyarrow.array([encode_namespace(each.target_id) for each in step.namespaces])

    def __enter__(self) -> "Applier":
        return self

    def __exit__(self, *_: object) -> None:
        self._sender.close()

    def add(self, rows: pyarrow.RecordBatch) -> None:
        """Apply rows of `reading.py`.  A commit may continue in the next batch."""
        rows = self._within(rows)
        is_change = rows.column(2).to_numpy() == RowKind.CHANGE
        changes = _only(rows, is_change)
        if changes.num_rows:
            self._add_changes(changes)
        if changes.num_rows == rows.num_rows:
            return
        # After the changes: the sums of a heartbeat hold those at or below it, whatever follows.
        others = _only(rows, ~is_change)
        for index, _, kind, _, record in zip(*(column.to_pylist() for column in others.columns), strict=True):
            if kind == RowKind.HEARTBEAT:
                self._parts[index].add_beat(decode_beat(record))
            else:
                self._parts[index].applied.scanned = True

    def _within(self, rows: pyarrow.RecordBatch) -> pyarrow.RecordBatch:
        """The rows after the positions of the link, up to the end of the step."""
        indexes, versions = rows.column(0).to_numpy(), rows.column(1).to_numpy()
        if rows.num_rows and self._since.max() < versions.min() and versions.max() <= self._until.min():
            return rows
        return _only(rows, (versions > self._since[indexes]) & (versions <= self._until[indexes]))

    def _add_changes(self, rows: pyarrow.RecordBatch) -> None:
        places, versions, records = rows.column(0).to_numpy(), rows.column(1).to_numpy(), rows.column(4)
        named = _distinct(places)
        for place in named:
            own = _only(rows, places == place)
            self._parts[place].count(own.column(1).to_numpy(), own.column(3), own.column(4))
        one = self._parts[named[0]].step.target_id
        keys = qualify_keys(one if len(named) == 1 else self._names.take(rows.column(0)), rows.column(3))
        self._batches.add(CommitBatch(versions, keys, records, places))

    def finish(self) -> Applied:
        """Return when all rows are applied and durable."""
        self._batches.finish()
        self._sender.settle(0)
        return Applied({part.step.name: part.finish() for part in self._parts})


class _NamespacePart:
    """The account of one namespace of a step."""

    def __init__(self, step: NamespaceStep) -> None:
        self.step = step
        self.applied = NamespaceApplied()
        # Digests of changes whose heartbeat has not come yet.
        self._digests = Digests()

    def count(self, versions: Versions, keys: pyarrow.BinaryArray, records: pyarrow.BinaryArray) -> None:
        self._digests.add(versions, digest_records(keys, records))
        self.applied.changes += len(versions)
        self.applied.latest = int(versions[-1])

    def add_beat(self, beat: NamespaceBeat) -> None:
        self.applied.beats.append(beat)
        if beat.log is None:
            self.applied.count(beat.through, self._digests.take_tally(beat.through))

    def finish(self) -> NamespaceApplied:
        self.applied.rest = self._digests.take_tally()
        return self.applied


def _distinct(places: NDArray[numpy.uint16]) -> list[int]:
    return numpy.flatnonzero(numpy.bincount(places)).tolist()


def _only(rows: pyarrow.RecordBatch, wanted: NDArray[numpy.bool_]) -> pyarrow.RecordBatch:
    return rows if wanted.all() else rows.filter(pyarrow.array(wanted))


@dataclass(slots=True)
class CommitBatch:
    """Rows of whole commits of the source, in order, for one commit of the target.

    `places` are those of their namespaces in the step.
    """

    versions: Versions
    keys: pyarrow.BinaryArray
    records: pyarrow.BinaryArray
    places: NDArray[numpy.uint16]
    _pairs: Pairs | None = None

    def pairs(self) -> Pairs:
        """The rows in key order, as the target stores them."""
        if self._pairs is None:
            self._pairs = Pairs.sort(self.keys, self.records)
        return self._pairs

    def sizes(self) -> NDArray[numpy.int32]:
        """The bytes of each record."""
        sizes: NDArray[numpy.int32] = pyarrow.compute.binary_length(self.records).to_numpy()
        return sizes

    def halves(self) -> "tuple[CommitBatch, CommitBatch] | None":
        """Two halves, cut at the end of a commit if there are several; None for one row or atomic batch."""
        count = len(self.keys)
        if count < 2:
            return None
        middle = count // 2
        start = int(numpy.searchsorted(self.versions, self.versions[middle], side="left"))
        end = int(numpy.searchsorted(self.versions, self.versions[middle], side="right"))
        cut = start if start > 0 else end if end < count else middle
        if cut == middle and self.records[0].as_py()[-1] & IN_BATCH:
            return None
        return self.part(0, cut), self.part(cut, count)

    def part(self, start: int, end: int) -> "CommitBatch":
        rows = slice(start, end)
        return CommitBatch(self.versions[rows], self.keys[rows], self.records[rows], self.places[rows])


class Batches:
    """Gathers rows until they are enough for a batch, and sends it."""

    def __init__(
        self,
        sender: "Sender",
        lags: Sequence[LagCounts] = (),
        rows_max: int = BATCH_ROWS_MAX,
        bytes_max: int = BATCH_BYTES_MAX,
    ) -> None:
        self._sender = sender
        self._lags = lags
        self._rows_max = rows_max
        self._bytes_max = bytes_max
        self._pieces: list[CommitBatch] = []
        self._rows = self._bytes = 0

    def add(self, piece: CommitBatch) -> None:
        """Take rows in their order.  The last commit is kept back: it may continue in the next piece."""
        if not len(piece.versions):
            return
        if self._pieces and piece.versions[0] < self._pieces[-1].versions[-1]:
            # Another namespace begins.
            self.finish()
        self._keep(piece)
        if self._rows > self._rows_max or self._bytes > self._bytes_max:
            self._send(complete=False)

    def finish(self) -> None:
        """Send the remaining rows."""
        if self._rows:
            self._send(complete=True)

    def _keep(self, piece: CommitBatch) -> None:
        self._pieces.append(piece)
        self._rows += len(piece.versions)
        self._bytes += int(piece.sizes().sum())

    def _send(self, *, complete: bool) -> None:
        whole, total = _join(self._pieces), self._rows
        sizes = numpy.cumsum(whole.sizes(), dtype=numpy.int64)
        start = 0
        while start < total:
            spent = int(sizes[start - 1]) if start else 0
            full = min(
                start + self._rows_max, int(numpy.searchsorted(sizes, spent + self._bytes_max, side="right"))
            )
            end = total if full >= total else _commit_end(whole.versions, start, full)
            if not complete and end == total:
                break
            for batch in _cut_repeats(whole.part(start, end)):
                self._sender.send(batch, self._lags)
            start = end
        self._pieces, self._rows, self._bytes = [], 0, 0
        if start < total:
            self._keep(whole.part(start, total))


def _join(pieces: Sequence[CommitBatch]) -> CommitBatch:
    return CommitBatch(
        numpy.concatenate([piece.versions for piece in pieces]),
        pyarrow.concat_arrays([piece.keys for piece in pieces]),
        pyarrow.concat_arrays([piece.records for piece in pieces]),
        numpy.concatenate([piece.places for piece in pieces]),
    )


def _commit_end(versions: Versions, start: int, full: int) -> int:
    """The end of a batch from `start` that is full at `full`: after one commit at least."""
    end = int(numpy.searchsorted(versions, versions[full], side="left"))
    return end if end > start else int(numpy.searchsorted(versions, versions[start], side="right"))


def _cut_repeats(batch: CommitBatch) -> Iterator[CommitBatch]:
    """A batch in pieces without repeated keys, cut before the commits that repeat one."""
    if batch.pairs().is_ordered:
        yield batch
        return
    start = commit = 0
    last: dict[bytes, int] = {}
    versions = batch.versions.tolist()
    for row, (key, version) in enumerate(zip(batch.keys.to_pylist(), versions, strict=True)):
        if version != versions[commit]:
            commit = row
        if commit > start and last.get(key, -1) >= start:
            yield batch.part(start, commit)
            start = commit
        last[key] = row
    yield batch.part(start, len(versions))


class Sender:
    """Sends batches, some at a time, and records the age of changes when they were applied."""

    def __init__(self, target: Host, command: ApplyStream | LoadStream) -> None:
        self._target = target
        self._stream: WriteStream = target.write_stream(command)
        self._sent: deque[tuple[CommitBatch, Sequence[LagCounts], Future[int]]] = deque()

    def send(self, batch: CommitBatch, lags: Sequence[LagCounts]) -> None:
        """Send a batch; `lags` are those of the namespaces, by place."""
        self._sent.append((batch, lags, self._stream.send(batch.pairs())))
        self.settle(UNSETTLED_MAX)

    def settle(self, unsettled_max: int) -> None:
        """Take acknowledgements; wait while more than `unsettled_max` batches have none."""
        while self._sent and (len(self._sent) > unsettled_max or self._sent[0][2].done()):
            batch, lags, answer = self._sent.popleft()
            self._finish(batch, answer)
            for place in _distinct(batch.places) if lags else ():
                lags[place].add_versions(batch.versions[batch.places == place], self._target.physical_ms())

    def close(self) -> None:
        self._stream.close()

    def _finish(self, batch: CommitBatch, answer: "Future[int]") -> None:
        try:
            answer.result()
        except CommitTooLarge:
            halves = batch.halves()
            if halves is None:
                raise
            for half in halves:
                self._finish(half, self._stream.send(half.pairs()))
