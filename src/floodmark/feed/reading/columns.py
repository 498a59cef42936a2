"""Gathers changes into the columns of batches.

Lines of the change log are queued and decoded together, into arrays.  If there are few lines, or records must
be looked up or filtered, each line is decoded by itself, and the columns are lists.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from operator import itemgetter
from typing import Any, Final

import numpy
import pyarrow
import pyarrow.compute
from numpy.typing import NDArray

from floodmark.codec.changelog import (
    COMMIT_BYTE,
    Commits,
    count_of,
    decode_commits,
    decode_row,
    decode_single,
    holds_copies_only,
    names_values,
)
from floodmark.codec.ordered import VERSION_BYTES
from floodmark.codec.stamps import is_first_written_at
from floodmark.codec.values import EXPIRY_BYTES, HAS_EXPIRY, HAS_ORIGIN, HAS_STAMPS, PLAIN, decode_value
from floodmark.columns.column import Column
from floodmark.columns.packed import numbers_to_arrow, pack
from floodmark.model.change import Heartbeat
from floodmark.model.limits import PAGE_BYTES_MAX
from floodmark.model.ranges import KeyRange
from floodmark.model.stream import ChangeBatch, Way
from floodmark.model.version import Version, physical_ms
from floodmark.partition import LogLine

BATCH_BYTES_MAX: Final = PAGE_BYTES_MAX
# The approximate memory of a change beyond its bytes.
CHANGE_BYTES: Final = 100

# The record of a qualified key at a version; None if its namespace is gone.
LookUp = Callable[[bytes, Version], bytes | None]
# For (key, version, milliseconds): the record just before the version, with its expiry judged at that time.
Before = Callable[[Sequence[tuple[bytes, Version, int]]], list[bytes | None]]


# Above all flags.
_NEVER: Final = b"\xff\xff"
_WITH_ORIGIN: Final = frozenset(bytes([flags]) for flags in range(256) if flags & HAS_ORIGIN)
_NO_FLAGS: Final[frozenset[bytes]] = frozenset()
_flags: Final = itemgetter(slice(-1, None))
# From this number of changes on, decoding lines together is quicker.
_MANY: Final = 128
# The number of before-images that are looked up together.
_LOOK_UPS: Final = 16
_NAMES: Final = ("versions", "partitions", "keys", "values")


class Columns:
    """Gathers the changes of a key range, and returns them as batches.

    With `own`, the id of the site, only changes first written there; with `keys_only`, no values.
    """

    def __init__(
        self,
        keys: KeyRange,
        look_up: LookUp,
        before: Before | None,
        *,
        heartbeats: bool = False,
        own: int | None = None,
        partial: bool = False,
        keys_only: bool = False,
    ) -> None:
        self._range = keys
        self._heartbeats_wanted = heartbeats
        # Values in the log with flags from this one on are not the whole record, which must be looked up.
        self._incomplete = _NEVER if partial or keys_only else bytes([HAS_STAMPS])
        self._keys_only = keys_only
        # Looked-up records may be large, and are counted at once.
        self._may_wait = partial and not keys_only and before is None
        # The flags of records whose origin must be checked: they may come from other sites.
        self._doubtful = _NO_FLAGS if own is None else _WITH_ORIGIN
        self._own = own or 0
        # With `keys_only`, only a reader of own changes needs the records.
        self._look_up = _pass_over if keys_only and own is None else look_up
        self._before = before
        # Whether an earlier gathered change of a key is also the record before the next one.
        self._is_whole = own is None and not partial and not keys_only
        self.clear()

    def clear(self) -> None:
        self._bytes = 0
        # Queued lines, the number of their changes, and the decoded changes, as arrays or as lists.
        self._lines: list[LogLine] = []
        self._waiting = 0
        self._arrays: list[pyarrow.RecordBatch] = []
        self._heartbeats: list[Heartbeat] = []
        self._versions: list[Version] = []
        self._partitions: list[int] = []
        self._keys: list[bytes] = []
        self._values: list[bytes] = []

    @property
    def gathered_bytes(self) -> int:
        """The gathered bytes: an upper estimate, exact once they make a batch."""
        if self._bytes >= BATCH_BYTES_MAX:
            self._settle()
        return self._bytes

    @property
    def is_empty(self) -> bool:
        self._settle()
        return not self._arrays and not self._keys and not self._heartbeats

    def add_line(self, line: LogLine) -> None:
        """Add the changes of a change-log line that are in the range, or its heartbeat."""
        row = line[1]
        if not self._may_wait or row[-1:] in self._doubtful or row[:1] != COMMIT_BYTE or names_values(row):
            self._add_alone(line)
            return
        count = count_of(row)
        self._lines.append(line)
        self._waiting += count
        self._bytes += len(row) + CHANGE_BYTES * count

    def _settle(self) -> None:
        """Decode the queued lines."""
        if not self._lines:
            return
        lines, count, self._lines, self._waiting = self._lines, self._waiting, [], 0
        self._bytes -= sum(len(row) for _, row, _ in lines) + CHANGE_BYTES * count
        commits = decode_commits([row for _, row, _ in lines]) if count >= _MANY else None
        if commits is not None and not self._keys and self._are_plain(commits.flags):
            self._add_arrays(lines, commits)
        else:
            for line in lines:
                self._add_alone(line)

    def _are_plain(self, flags: NDArray[numpy.uint8]) -> bool:
        """Whether no record's origin must be checked."""
        return not self._doubtful or not (flags & HAS_ORIGIN).any()

    def _add_arrays(self, lines: Sequence[LogLine], commits: Commits) -> None:
        """Add the changes of lines that are in the range, as arrays."""
        orders = b"".join([order[:VERSION_BYTES] for order, _, _ in lines])
        versions = numpy.frombuffer(orders, ">u8").astype(numpy.uint64)
        partitions = numpy.array([log.partition or 0 for _, _, log in lines], numpy.uint32)
        columns = [
            numbers_to_arrow(numpy.repeat(versions, commits.counts)),
            numbers_to_arrow(numpy.repeat(partitions, commits.counts)),
            commits.keys,
            commits.values,
        ]
        changes = pyarrow.RecordBatch.from_arrays(columns, names=_NAMES)
        start, end = self._range
        bounds = pack([start, end or b""]).to_arrow()
        inside = pyarrow.compute.greater_equal(commits.keys, bounds[0])
        if end is not None:
            inside = pyarrow.compute.and_(inside, pyarrow.compute.less(commits.keys, bounds[1]))
        if not pyarrow.compute.all(inside).as_py():
            changes = changes.filter(inside)
        if changes.num_rows:
            self._arrays.append(changes)
            size = sum(_size(changes.column(name)) for name in ("keys", "values"))
            self._bytes += size + CHANGE_BYTES * changes.num_rows

    def _prepare_lists(self) -> None:
        """Convert the gathered changes to lists, so that single changes can be added."""
        if self._lines:
            self._settle()
        if self._arrays:
            for changes in self._arrays:
                versions, partitions, keys, values = (column.to_pylist() for column in changes.columns)
                self._versions += versions
                self._partitions += partitions
                self._keys += keys
                self._values += values
            self._arrays = []

    def _add_alone(self, line: LogLine) -> None:
        order, row, log = line
        version = int.from_bytes(order[:VERSION_BYTES], "big")
        single = decode_single(row)
        if single is not None:
            key, value = single
            start, end = self._range
            if key >= start and (end is None or key < end):
                if value[-1:] >= self._incomplete:
                    self.add_commit(version, log.partition or 0, (key,), (None,))
                elif self.wants(value):
                    self.add_change(version, log.partition or 0, key, value)
            return
        if self._doubtful and holds_copies_only(row, self._own):
            return
        decoded = decode_row(version, row)
        if isinstance(decoded, Heartbeat):
            # Heartbeats of single nodes are left out: the site's heartbeats have their sums.
            if self._heartbeats_wanted and not decoded.node:
                self._heartbeats.append(decoded)
            return
        keys, values = decoded
        self.add_commit(version, log.partition or 0, keys, values)

    def wants(self, stored: bytes) -> bool:
        """Whether a record was requested, by its origin; its key is not checked."""
        return stored[-1:] not in self._doubtful or is_first_written_at(self._own, stored)

    def add_change(self, version: Version, partition: int, key: bytes, value: bytes) -> None:
        """Add a change that is known to be in the range, and to be wanted."""
        self._prepare_lists()
        self._versions.append(version)
        self._partitions.append(partition)
        self._keys.append(key)
        self._values.append(value)
        self._bytes += len(key) + len(value) + CHANGE_BYTES

    def add_commit(
        self, version: Version, partition: int, keys: Sequence[bytes], values: Sequence[bytes | None]
    ) -> None:
        """Add the changes of a commit that are in the range; values of None are looked up."""
        self._prepare_lists()
        start, end = self._range
        if len(keys) == 1 and (value := values[0]) is not None and value[-1:] < self._incomplete:
            key = keys[0]
            if key >= start and (end is None or key < end) and self.wants(value):
                self.add_change(version, partition, key, value)
            return
        if min(keys) < start or (end is not None and max(keys) >= end):
            inside = [
                (key, value)
                for key, value in zip(keys, values, strict=True)
                if key >= start and (end is None or key < end)
            ]
            keys, values = [key for key, _ in inside], [value for _, value in inside]
        found = [value for value in values if value is not None]
        if len(found) < len(values) or max(map(_flags, found), default=b"") >= self._incomplete:
            keys, found = self._complete(version, keys, values)
        if not self._doubtful.isdisjoint(map(_flags, found)):
            keys = [key for key, stored in zip(keys, found, strict=True) if self.wants(stored)]
            found = list(filter(self.wants, found))
        self._keys += keys
        self._values += found
        self._versions += [version] * len(keys)
        self._partitions += [partition] * len(keys)
        self._bytes += sum(map(len, keys)) + sum(map(len, found)) + CHANGE_BYTES * len(keys)

    def _complete(
        self, version: Version, keys: Sequence[bytes], values: Sequence[bytes | None]
    ) -> tuple[list[bytes], list[bytes]]:
        """Replace values of None by looking up the records; leave out those of dropped namespaces."""

        def is_named(value: bytes | None) -> bool:
            return value is None or value[-1:] >= self._incomplete

        complete = [
            (key, stored)
            for key, value in zip(keys, values, strict=True)
            if (stored := self._look_up(key, version) if is_named(value) else value) is not None
        ]
        return [key for key, _ in complete], [stored for _, stored in complete]

    def drain(self, through: Version, way: Way) -> Iterator[ChangeBatch]:
        """Return everything gathered so far as batches, and clear it.  The last batch goes through `through`.

        The caller must have added whole commits.  They are one batch, unless before-images are wanted, whose
        size is known only when they are read.
        """
        self._settle()
        versions, partitions, keys, values = self._columns()
        gathered = ChangeBatch(
            through=through,
            way=way,
            versions=versions,
            partitions=partitions,
            keys=keys,
            values=[b""] * len(keys) if self._keys_only else values,
            heartbeats=self._heartbeats,
        )
        self.clear()
        if self._before is None:
            yield gathered
        else:
            yield from self._with_before_images(gathered, self._before)

    def _columns(self) -> Sequence[Sequence[Any]]:
        if not self._arrays:
            return self._versions, self._partitions, self._keys, self._values
        return [Column(column) for column in pyarrow.concat_batches(self._arrays).columns]

    def _with_before_images(self, gathered: ChangeBatch, before: Before) -> Iterator[ChangeBatch]:
        start = size = since = 0
        befores: list[bytes | None] = []
        versions, last = gathered.versions, len(gathered.keys) - 1
        rows = zip(versions, gathered.values, self._find_images(gathered, before), strict=True)
        for index, (version, value, image) in enumerate(rows):
            befores.append(image)
            size += len(value) + len(image or b"") + CHANGE_BYTES
            if size >= BATCH_BYTES_MAX and index < last and versions[index + 1] != version:
                yield _cut(gathered, slice(start, index + 1), befores, since, version)
                start, size, since, befores = index + 1, 0, version, []
        yield _cut(gathered, slice(start, last + 1), befores, since, gathered.through)

    def _find_images(self, gathered: ChangeBatch, before: Before) -> Iterator[bytes | None]:
        """The record before each change.  A few are looked up together, which bounds the memory."""
        # The records of earlier changes, so that a key that changes again is not looked up.
        stored: dict[bytes, bytes] = {}
        rows = zip(gathered.keys, gathered.versions, gathered.values, strict=True)
        while chunk := [*islice(rows, _LOOK_UPS)]:
            images: list[bytes | None] = []
            missing: dict[int, tuple[bytes, Version, int]] = {}
            for place, (key, version, value) in enumerate(chunk):
                at_ms, earlier = moment_before(version, value), stored.get(key)
                if earlier is None:
                    missing[place] = key, version, at_ms
                images.append(None if earlier is None else _alive_at(at_ms, earlier))
                if self._is_whole:
                    stored[key] = value
            for place, image in zip(missing, before([*missing.values()]), strict=True):
                images[place] = image
            yield from images


def _size(column: pyarrow.BinaryArray) -> int:
    size: int = pyarrow.compute.sum(pyarrow.compute.binary_length(column)).as_py()
    return size


def moment_before(version: Version, stored: bytes) -> int:
    """The time at which a before-image is read, in unix milliseconds.

    It is the time of the change; for an expiry, just before the record expires, so that it is still alive.
    """
    at_ms = physical_ms(version)
    if not stored[-1:] or not stored[-1] & HAS_EXPIRY:
        return at_ms
    expires_at = int.from_bytes(stored[-1 - EXPIRY_BYTES : -1], "big")
    return min(at_ms, expires_at * 1000 - 1)


def _alive_at(at_ms: int, stored: bytes) -> bytes | None:
    """The stored record if it is alive at that time, otherwise None."""
    if stored[-1:] == PLAIN:
        return stored
    return None if decode_value(stored).is_dead_at(at_ms) else stored


def _pass_over(_key: bytes, _version: Version) -> bytes:
    """The placeholder of a value that was not requested."""
    return PLAIN


def _cut(
    batch: ChangeBatch, part: slice, befores: list[bytes | None], since: Version, through: Version
) -> ChangeBatch:
    """A part of a batch, with the heartbeats in `(since, through]`."""
    return ChangeBatch(
        through=through,
        way=batch.way,
        versions=batch.versions[part],
        partitions=batch.partitions[part],
        keys=batch.keys[part],
        values=batch.values[part],
        befores=befores,
        heartbeats=[beat for beat in batch.heartbeats if since < beat.version <= through],
    )
