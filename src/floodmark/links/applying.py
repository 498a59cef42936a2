"""Applies changes of another site: commits stay whole, and each change counts at most once.

**Commits stay whole.** A batch becomes one commit in each partition of the target, so it ends only where a
commit of the source ends.  A batch ends before a commit that writes one of its keys again.  A batch that is
too large for one commit of the target is sent in halves.

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
from itertools import pairwise
from types import TracebackType
from typing import Final

import numpy
import pyarrow
import pyarrow.compute
from numpy.typing import NDArray

from floodmark.accounting.counting import Digests, Versions
from floodmark.codec.records import digest_records, qualify_keys
from floodmark.columns.pairs import Pairs
from floodmark.host.ports import Host
from floodmark.links.reading import RowKind, decode_beat
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
        self._parts = [
            _NamespacePart(namespace, self._sender, batch_rows_max, batch_bytes_max)
            for namespace in step.namespaces
        ]

    def __enter__(self) -> "Applier":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._sender.close()

    def add(self, rows: pyarrow.RecordBatch) -> None:
        """Apply rows of `reading.py`.  A commit may continue in the next batch."""
        indexes, kinds = rows.column(0).to_numpy(), rows.column(2).to_numpy()
        borders = numpy.flatnonzero((indexes[1:] != indexes[:-1]) | (kinds[1:] != kinds[:-1])) + 1
        for start, end in pairwise([0, *borders.tolist(), rows.num_rows]):
            if start == end:
                continue
            part, run = self._parts[indexes[start]], rows.slice(start, end - start)
            if kinds[start] == RowKind.CHANGE:
                part.add_changes(run)
            elif kinds[start] == RowKind.HEARTBEAT:
                part.add_beats(run)
            else:
                part.applied.scanned = True

    def finish(self) -> Applied:
        """Return when all rows are applied and durable."""
        for part in self._parts:
            part.finish()
        self._sender.settle(0)
        return Applied({part.step.name: part.applied for part in self._parts})


class _NamespacePart:
    """One namespace of a step on its way into the target."""

    def __init__(self, step: NamespaceStep, sender: "Sender", rows_max: int, bytes_max: int) -> None:
        self.step = step
        self.applied = NamespaceApplied()
        self._batches = Batches(sender, self.applied.lags, rows_max, bytes_max)
        # Digests of changes whose heartbeat has not come yet.
        self._digests = Digests()

    def add_changes(self, rows: pyarrow.RecordBatch) -> None:
        rows = self._within(rows)
        if not rows.num_rows:
            return
        versions: Versions = rows.column(1).to_numpy()
        keys, records = rows.column(3), rows.column(4)
        self._digests.add(versions, digest_records(keys, records))
        self.applied.changes += len(versions)
        self.applied.latest = int(versions[-1])
        self._batches.add(CommitBatch(versions, qualify_keys(self.step.target_id, keys), records))

    def add_beats(self, rows: pyarrow.RecordBatch) -> None:
        for encoded in self._within(rows).column(4).to_pylist():
            beat = decode_beat(encoded)
            self.applied.beats.append(beat)
            if beat.log is None:
                self.applied.count(beat.through, self._digests.take_tally(beat.through))

    def finish(self) -> None:
        self._batches.finish()
        self.applied.rest = self._digests.take_tally()

    def _within(self, rows: pyarrow.RecordBatch) -> pyarrow.RecordBatch:
        """The rows after the position of the link, up to the end of the step."""
        versions = rows.column(1).to_numpy()
        if versions.min() > self.step.since and versions.max() <= self.step.until:
            return rows
        return rows.filter(pyarrow.array((versions > self.step.since) & (versions <= self.step.until)))


@dataclass(slots=True)
class CommitBatch:
    """Rows of whole commits of the source, in order, for one commit of the target."""

    versions: Versions
    keys: pyarrow.BinaryArray
    records: pyarrow.BinaryArray
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
        """Two halves, cut at the end of a commit if there are several; None for a single row."""
        count = len(self.keys)
        if count < 2:
            return None
        middle = count // 2
        start = int(numpy.searchsorted(self.versions, self.versions[middle], side="left"))
        end = int(numpy.searchsorted(self.versions, self.versions[middle], side="right"))
        cut = start if start > 0 else end if end < count else middle
        return self.part(0, cut), self.part(cut, count)

    def part(self, start: int, end: int) -> "CommitBatch":
        return CommitBatch(self.versions[start:end], self.keys[start:end], self.records[start:end])


class Batches:
    """Gathers rows until they are enough for a batch, and sends it."""

    def __init__(
        self,
        sender: "Sender",
        lags: LagCounts | None = None,
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
        self._sent: deque[tuple[CommitBatch, LagCounts | None, Future[int]]] = deque()

    def send(self, batch: CommitBatch, lags: LagCounts | None) -> None:
        self._sent.append((batch, lags, self._stream.send(batch.pairs())))
        self.settle(UNSETTLED_MAX)

    def settle(self, unsettled_max: int) -> None:
        """Take acknowledgements; wait while more than `unsettled_max` batches have none."""
        while self._sent and (len(self._sent) > unsettled_max or self._sent[0][2].done()):
            batch, lags, answer = self._sent.popleft()
            self._finish(batch, answer)
            if lags is not None:
                lags.add_versions(batch.versions, self._target.physical_ms())

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
