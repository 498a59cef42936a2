"""An external merge sort: any number of rows into commit order, within a fixed amount of memory.

Rows are gathered in memory.  When they fill the quota they are sorted and written to a file as a *run*, and
in the end the runs are merged.  If there are more runs than fit into the quota, groups of neighbouring runs
are first merged into longer ones.  The sort is stable: rows of equal version and key keep the order in which
they were added.

The files have no names, so they vanish when they are closed, also after kill -9.  All runs of one pass are in
one file, so at most three files are open.  A run is a sequence of blocks:

    +-------------+----------+----------------------+
    | body length | checksum | rows, as messagepack |
    |      4      |    8     |                      |
    +-------------+----------+----------------------+

Numbers are little-endian.  The checksum is XXH64 of the body, seeded with the block's position in the file,
so that a block at a wrong position is detected too.  `docs/decisions/013-libraries.md` compares this layout
with Arrow's.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from heapq import merge
from io import FileIO
from itertools import chain
from operator import itemgetter
from os import pread, pwrite
from pathlib import Path
from struct import Struct
from tempfile import TemporaryFile
from typing import Final, NamedTuple, Self, TypeAlias

import msgspec

from floodmark.codec.digest import hash_bytes
from floodmark.files.local import FULL_DISK
from floodmark.model.errors import Closed, Corruption, InvalidArgument, StorageFailed, StorageFull
from floodmark.model.limits import MIB
from floodmark.model.version import Version

# Version, key, partition, value.
Row: TypeAlias = tuple[Version, bytes, int, bytes]

# The memory of a row beyond the bytes of its key and value: a tuple, two integers, two bytes objects, its
# entry in a growing list, and the sort's own.  Rounded up; a test measures it.
ROW_BYTES: Final = 288
MERGE_RUNS_MAX: Final = 128

_BLOCK_SHARE: Final = 2 * MERGE_RUNS_MAX
_BLOCK_BYTES_MAX: Final = MIB

_HEAD: Final = Struct("<IQ")
_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(list[Row])

_by_version: Final = itemgetter(0)
_by_key: Final = itemgetter(1)
_order: Final = itemgetter(0, 1)


class _Run(NamedTuple):
    """Sorted rows in a file, and the memory of the largest block."""

    file: FileIO
    start: int
    end: int
    block_bytes_max: int


def open_nameless(directory: Path | None) -> FileIO:
    """Open an unnamed file in a directory, or in the system's temporary directory."""
    return TemporaryFile("w+b", buffering=0, dir=directory)


class Sorter:
    """Sorts rows by version and key, keeping those of equal version and key in the order of adding.

    Use it as a context manager; leaving it frees its memory and its disk space.  When the disk is full,
    `add_page` and `rows` raise StorageFull with nothing changed: make room, then call again.  The quota is
    kept as long as eight of the largest rows fit into it.

    >>> with Sorter() as sorter:
    ...     sorter.add_page([(7, b"b", 1, b"second"), (7, b"a", 2, b"first")])
    ...     sorter.add_page([(5, b"c", 1, b"zeroth")])
    ...     [value for _, _, _, value in sorter.rows()]
    [b'zeroth', b'first', b'second']
    """

    def __init__(
        self,
        directory: Path | None = None,
        memory_bytes_max: int = 64 * MIB,
        open_file: Callable[[Path | None], FileIO] = open_nameless,
    ) -> None:
        if memory_bytes_max < 1:
            raise InvalidArgument(f"a sorter cannot work within {memory_bytes_max} bytes of memory")
        self._directory = directory
        self._memory_bytes_max = memory_bytes_max
        self._block_bytes_max = min(memory_bytes_max // _BLOCK_SHARE, _BLOCK_BYTES_MAX)
        self._open_file = open_file
        self._pending: list[Row] = []
        # The rest of the quota is for writing the rows.
        self._gather_bytes_max = memory_bytes_max * 3 // 4
        # Negative when no row may be added any more, which saves `add_page` a check.
        self._room = self._gather_bytes_max
        self._files: list[FileIO] = []
        self._runs: list[_Run] = []
        # The work so far; the bytes include intermediate merges.
        self.runs_spilled = self.bytes_spilled = 0
        self._sorted = self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Drop all rows and files.  Closing twice is harmless."""
        self._closed = True
        self._room = -1
        self._pending = []
        self._runs = []
        self._keep_files(())

    def add_page(self, rows: Sequence[Row]) -> None:
        """Add rows, all of them or none: versions of 8 bytes, keys below 64 KiB, partitions of 4 bytes."""
        cost = sum(map(_cost, rows))
        if cost > self._room:
            self._make_room()
        self._room -= cost
        self._pending += rows

    def rows(self) -> Iterator[Row]:
        """All rows in order.  No row can be added afterwards."""
        self._require_open()
        if self._runs and self._pending:
            self._spill()
        if not self._runs:
            _sort(self._pending)
        while len(self._runs) > self._merge_runs_max():
            self._merge_neighbours()
        self._sorted, self._room = True, -1
        return self._merge(self._runs) if self._runs else iter(self._pending)

    # Runs

    def _make_room(self) -> None:
        self._require_open()
        if self._sorted:
            raise Closed("this sorter's rows are being read; add rows before, or use another sorter")
        if self._pending:
            self._spill()

    def _require_open(self) -> None:
        if self._closed:
            raise Closed("this sorter is closed")

    def _spill(self) -> None:
        _sort(self._pending)
        if not self._files:
            self._open()
        start = self._runs[-1].end if self._runs else 0
        self._runs.append(self._write_run(self._files[-1], start, self._pending))
        self.runs_spilled += 1
        self._pending = []
        self._room = self._gather_bytes_max

    def _write_run(self, file: FileIO, start: int, rows: Iterable[Row]) -> _Run:
        position, largest = start, 0
        for block, cost in _blocks(rows, self._block_bytes_max):
            body = _encoder.encode(block)
            self._write(file, position, _HEAD.pack(len(body), hash_bytes(body, position)))
            self._write(file, position + _HEAD.size, body)
            position += _HEAD.size + len(body)
            largest = max(largest, cost)
        return _Run(file, start, position, largest)

    def _merge_runs_max(self) -> int:
        """The number of runs to merge at once: a block of each must fit into half of the quota."""
        largest = max((run.block_bytes_max for run in self._runs), default=1)
        return max(2, min(MERGE_RUNS_MAX, self._memory_bytes_max // 2 // largest))

    def _merge_neighbours(self) -> None:
        """Merge only as many neighbouring runs as needed to merge the rest at once."""
        runs_max = self._merge_runs_max()
        excess = len(self._runs) - runs_max
        target = self._open()
        merged: list[_Run] = []
        taken = end = 0
        try:
            while excess > 0 and taken < len(self._runs) - 1:
                group = self._runs[taken : taken + min(runs_max, excess + 1)]
                run = self._write_run(target, end, self._merge(group))
                merged.append(run)
                end = run.end
                taken += len(group)
                excess -= len(group) - 1
        except BaseException:
            self._keep_files(file for file in self._files if file is not target)
            raise
        self._runs = merged + self._runs[taken:]
        self._keep_files({id(run.file): run.file for run in self._runs}.values())

    def _merge(self, runs: Sequence[_Run]) -> Iterator[Row]:
        """The rows of all runs in order."""
        share = self._memory_bytes_max // 2 // len(runs)
        return merge(*(chain.from_iterable(self._pages(run, share)) for run in runs), key=_order)

    def _pages(self, run: _Run, bytes_max: int) -> Iterator[list[Row]]:
        """The rows of a run, in pages of as many blocks as fit into the memory, at least one."""
        page: list[Row] = []
        cost, position = 0, run.start
        while position < run.end:
            rows, end = self._read_block(run.file, position)
            cost += end - position + len(rows) * ROW_BYTES
            position = end
            page += rows
            if cost + run.block_bytes_max > bytes_max:
                yield page
                page, cost = [], 0
        if page:
            yield page

    # Files

    def _read_block(self, file: FileIO, position: int) -> tuple[list[Row], int]:
        length, checksum = _HEAD.unpack(self._read(file, position, _HEAD.size))
        body = self._read(file, position + _HEAD.size, length)
        if hash_bytes(body, position) != checksum:
            raise _damaged(position, "its checksum does not match")
        return _decoder.decode(body), position + _HEAD.size + length

    def _read(self, file: FileIO, position: int, size: int) -> bytes:
        self._require_open()
        with self._storage_errors():
            data = pread(file.fileno(), size, position)
        if len(data) < size:
            raise _damaged(position, f"{size} bytes were written and {len(data)} are there")
        return data

    def _write(self, file: FileIO, position: int, data: bytes) -> None:
        with self._storage_errors():
            rest = memoryview(data)
            while rest:
                written = pwrite(file.fileno(), rest, position)
                self.bytes_spilled += written
                position += written
                rest = rest[written:]

    def _open(self) -> FileIO:
        with self._storage_errors():
            file = self._open_file(self._directory)
        self._files.append(file)
        return file

    def _keep_files(self, kept: Iterable[FileIO]) -> None:
        kept = list(kept)
        for file in self._files:
            if file not in kept:
                with suppress(OSError):
                    file.close()
        self._files = kept

    @contextmanager
    def _storage_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            place = self._directory or "the directory for temporary files"
            if error.errno in FULL_DISK:
                raise StorageFull(
                    f"{place} has no room for {self.bytes_spilled:,} bytes and more of changes that are "
                    f"being sorted ({error.strerror}); make room, then call again",
                    bytes_spilled=self.bytes_spilled,
                ) from error
            raise StorageFailed(
                f"changes could not be sorted in {place} ({error.strerror}); check it, then call again"
            ) from error


def _sort(rows: list[Row]) -> None:
    """Two stable sorts: faster than one by pairs, because a scan delivers its rows sorted by key."""
    rows.sort(key=_by_key)
    rows.sort(key=_by_version)


def _cost(row: Row) -> int:
    return len(row[1]) + len(row[3]) + ROW_BYTES


def _blocks(rows: Iterable[Row], bytes_max: int) -> Iterator[tuple[list[Row], int]]:
    """Cut rows into blocks of at most `bytes_max` of memory, or of one row; each with its memory."""
    block: list[Row] = []
    size = 0
    for row in rows:
        cost = _cost(row)
        if size + cost > bytes_max and block:
            yield block, size
            block, size = [], 0
        block.append(row)
        size += cost
    if block:
        yield block, size


def _damaged(position: int, reason: str) -> Corruption:
    return Corruption(
        f"the block at byte {position} of a file for sorting is damaged: {reason}. Nothing of the site is "
        "lost; check the disk that holds temporary files, then start again",
        position=position,
    )
