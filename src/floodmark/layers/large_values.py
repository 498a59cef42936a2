"""Values of any size in one namespace: written and read as streams, visible whole or not at all.

    r | key                                 0 | value                              up to CHUNK_BYTES
                                            1 | pointer: 16 | size: 8 | chunk size: 4
    c | pointer: 16                         key of the garbage row                 while a put writes chunks
    c | pointer: 16 | index: 4 | XXH3 of the chunk: 8   chunk
    g | site: 1 | since, ms: 8 | pointer: 16   key of the value

A chunk is owned by a record or by a garbage row.  A put first writes a garbage row and a lease; then the
chunks, several commits at a time, each of which reads the lease; then one transaction writes the record,
removes both, and gives the chunks of the old value to a garbage row.  An hour after a garbage row was
written, a sweep removes the lease, the chunks and the row, in this order.  So a put that was swept can
neither end nor leave a chunk behind.  Chunks that fit into one commit are written by the last transaction.

A site sweeps only the rows that it wrote itself: those of another site may have been removed there already.
Rows of a site that sends no more changes, as in a backup that was restored elsewhere, it sweeps as well.
If a site was lost while a link copied a value, a part of its rows may stay here for good: a sweep removes no
chunk that the present record owns, and no chunk of the previous value if the present record lacks chunks.

All rows are in one namespace, so links, backups and exports take all or none.  A link applies the changes of
a step in any order, by ranges of keys or at several nodes.  So at another site a record becomes visible only
when that site has everything that the record's site had committed before.  Until then the previous record is
read, as of the version before the new one, because a step that covers more than an hour may also remove the
previous chunks.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime, timedelta
from functools import partial
from io import DEFAULT_BUFFER_SIZE, SEEK_CUR, SEEK_END, SEEK_SET, BufferedIOBase, BytesIO
from itertools import chain, islice
from struct import Struct
from typing import Any, BinaryIO, Final, NamedTuple, cast
from uuid import uuid4

from floodmark.codec.digest import checksum
from floodmark.feed import at_present
from floodmark.layers.ports import LayerRecords, LayerSite, LayerTransaction, claim, present
from floodmark.model.change import Stamp
from floodmark.model.errors import (
    Corruption,
    InvalidArgument,
    InvalidKey,
    InvalidValue,
    KeyNotFound,
    LinkStalled,
    TransactionEnded,
    VersionCollected,
)
from floodmark.model.limits import KEY_BYTES_MAX, KIB
from floodmark.model.ranges import after
from floodmark.model.version import VERSION_MAX, Version, physical_ms

LARGE_VALUES: Final = b"large values 1"

CHUNK_BYTES: Final = 512 * KIB
# The chunks of one commit, and the commits in flight.  They bound the memory of a put, here and at the
# server.
COMMIT_CHUNKS: Final = 8
COMMITS: Final = 2
# A value of at most this many chunks is read by key.  A scan costs more, but protects the chunks still
# unread.
FEW_CHUNKS: Final = 4
GARBAGE_AGE: Final = timedelta(hours=1)
# The age for garbage rows of another site, whose changes may arrive late by other ways than a link.
FOREIGN_GARBAGE_AGE: Final = timedelta(days=1)

_RECORD: Final = Struct(">B16sQL")
_GARBAGE: Final = Struct(">cBQ16s")
_INLINE: Final = b"\x00"

At = Version | datetime


class Stored(NamedTuple):
    """The decoded pointer of a record: the location, the size and the chunk size of the value."""

    pointer: bytes
    size: int
    chunk_bytes: int


class Whole(NamedTuple):
    """A record that has all of its chunks: now, or as of the version before a link replaced it."""

    row: bytes
    before: Version | None


class LargeValues:
    """A namespace with values of any size.  Safe to use from many threads.

    >>> import floodmark, tempfile
    >>> from floodmark.layers import LargeValues
    >>> with floodmark.open(tempfile.mkdtemp(), site="oslo") as site:
    ...     configs = LargeValues(site, "configs")
    ...     _ = configs.put(b"switch-17", b"<port/>" * 1_000_000)
    ...     with configs.open(b"switch-17") as stream:
    ...         stream.seek(-7, 2), stream.read()
    (6999993, b'<port/>')
    """

    def __init__(self, site: LayerSite, name: str) -> None:
        self._site = site
        # The namespace that holds the rows of the layer.
        self.stored = claim(site, name, LARGE_VALUES)

    @property
    def name(self) -> str:
        """The name of the namespace."""
        return self.stored.name

    def __repr__(self) -> str:
        return f"LargeValues({self.name!r})"

    # Reads

    def get(self, key: bytes, *, at: At | None = None) -> bytes | None:
        """The whole value of a key; None if the key is absent."""
        row = self.stored.get(_record_key(key), at=at)
        if row is None or row[:1] == _INLINE:
            return None if row is None else row[1:]
        try:
            with self.open(key, at=at) as stream:
                return stream.read()
        except KeyNotFound:
            return None

    def __contains__(self, key: bytes) -> bool:
        name = _record_key(key)
        return self._whole(name, self.stored.get(name), None) is not None

    def open(self, key: bytes, *, at: At | None = None) -> BinaryIO:
        """Open the value of a key as a binary file that can be read and seeked.  Raises KeyNotFound.

        The stream reads one version, and protects it from garbage collection until it is closed.  Raises
        Corruption if a chunk is missing or damaged, and LinkStalled if a link has copied only a part of a new
        value and the old one is gone.
        """
        name = _record_key(key)

        def find(transaction: LayerTransaction) -> tuple[bytes | None, At]:
            return transaction.get(self.stored, name), transaction.read_version

        def read(found: tuple[bytes | None, At]) -> BinaryIO:
            whole = self._whole(name, *found)
            if whole is None:
                raise KeyNotFound(
                    f"{self!r} has no key {key!r:.60}; get returns None for such a key", key=key
                )
            return self._open_row(key, whole, found[1])

        if at is not None:
            return read((self.stored.get(name, at=at), at))
        return at_present(lambda: self._site.run_transaction(find), read)

    def sizes(
        self,
        start: bytes = b"",
        end: bytes | None = None,
        *,
        prefix: bytes | None = None,
        limit: int | None = None,
        reverse: bool = False,
        at: At | None = None,
    ) -> Iterator[tuple[bytes, int]]:
        """The keys in `[start, end)` with the sizes of their values in bytes, in order, as of one version."""
        for _, key, (row, _) in self._rows(start, end, prefix, limit=limit, reverse=reverse, at=at):
            yield key, len(row) - 1 if row[:1] == _INLINE else _stored(key, row).size

    def scan(
        self,
        start: bytes = b"",
        end: bytes | None = None,
        *,
        prefix: bytes | None = None,
        limit: int | None = None,
        reverse: bool = False,
        at: At | None = None,
    ) -> Iterator[tuple[bytes, bytes]]:
        """The keys in `[start, end)` with their values, in order, as of one version; one value in memory."""
        for version, key, whole in self._rows(start, end, prefix, limit=limit, reverse=reverse, at=at):
            with self._open_row(key, whole, version) as stream:
                yield key, stream.read()

    def _rows(
        self,
        start: bytes,
        end: bytes | None,
        prefix: bytes | None,
        *,
        limit: int | None,
        reverse: bool,
        at: At | None,
    ) -> Iterator[tuple[At, bytes, Whole]]:
        """Keys and their records, each with the version of the scan."""
        for bound in (start, end, prefix):
            if not isinstance(bound, bytes | None):
                raise InvalidArgument(f"start, end and prefix are bytes, not {bound!r:.60}")
        first, last = b"r" + start, b"s" if end is None else b"r" + end
        within = b"r" + (prefix or b"")

        def rows(version: At) -> tuple[At, Iterator[tuple[bytes, bytes]]]:
            options: Any = {"prefix": within, "limit": limit, "reverse": reverse, "at": version}
            return version, self.stored.scan(first, last, **options)

        version, found = at_present(lambda: present(self._site), rows) if at is None else rows(at)
        while True:
            read, hidden, name = 0, 0, b""
            for name, row in found:
                read += 1
                if (whole := self._whole(name, row, version)) is None:
                    hidden += 1
                else:
                    yield version, name[1:], whole
            if not hidden or read != limit:
                return
            # Skipped rows, which a link has not copied completely, must be replaced by rows after them.
            limit = hidden
            first, last = (first, name) if reverse else (after(name), last)
            _, found = rows(version)

    def _whole(self, name: bytes, row: bytes | None, at: At | None) -> Whole | None:
        """The record, or the previous one while a link has not copied all chunks of the record."""
        before: Version | None = None
        while row is not None and row[:1] != _INLINE:
            try:
                found = self.stored.record(name, at=at if before is None else before)
                if found is None:
                    return None
                if self._site.covers(self.name, found.stamp, at=at):
                    return Whole(found.value, before)
                before = found.version - 1
                row = self.stored.get(name, at=before)
            except VersionCollected as error:
                if before is None:
                    raise
                raise _not_brought(name[1:]) from error
        return None if row is None else Whole(row, before)

    def _open_row(self, key: bytes, whole: Whole, version: At) -> BinaryIO:
        row, before = whole
        if row[:1] == _INLINE:
            return BytesIO(row[1:])
        return cast(BinaryIO, _Chunks(self.stored, key, _stored(key, row), version, before))

    # Writes

    def put(self, key: bytes, value: bytes | bytearray | memoryview | BinaryIO) -> Version:
        """Write a value, or the rest of a binary file; return the version at which it becomes visible.

        Until then the old value is kept, whatever fails.  A large value is written in several commits, and
        memory holds only the few in flight.
        """
        name = _record_key(key)
        source = BytesIO(value) if isinstance(value, bytes | bytearray | memoryview) else value
        chunks = iter(lambda: _read(key, source, CHUNK_BYTES), b"")
        first = [*islice(chunks, COMMIT_CHUNKS)]
        if len(first) <= 1:
            return self._move(name, _INLINE + b"".join(first))
        self._sweep(GARBAGE_AGE, 2)
        pointer = uuid4().bytes
        if len(first) < COMMIT_CHUNKS:
            size = sum(map(len, first))
            return self._move(name, _RECORD.pack(1, pointer, size, CHUNK_BYTES), _rows(pointer, 0, first))
        self._site.run_transaction(lambda t: self._lease(t, pointer, key))
        size = self._write_chunks(key, pointer, chain(first, chunks))
        return self._move(name, _RECORD.pack(1, pointer, size, CHUNK_BYTES), leased=pointer)

    def delete(self, key: bytes) -> Version:
        """Delete a key, present or not, and return the version of the deletion."""
        return self._move(_record_key(key), None)

    def _lease(self, transaction: LayerTransaction, pointer: bytes, key: bytes) -> None:
        """Write the garbage row that owns the chunks of a put, and the lease of the put."""
        transaction.put(self.stored, b"c" + pointer, self._discard(transaction, pointer, key))

    def _discard(self, transaction: LayerTransaction, pointer: bytes, key: bytes) -> bytes:
        """Write a garbage row for chunks; return its key."""
        row = _GARBAGE.pack(b"g", self._site.id, physical_ms(transaction.read_version), pointer)
        transaction.put(self.stored, row, key)
        return row

    def _write_chunks(self, key: bytes, pointer: bytes, chunks: Iterator[bytes]) -> int:
        """Write chunks in index order, with several commits in flight; return the size of the value."""
        size = index = 0
        under_way: deque[Future[None]] = deque()
        with ThreadPoolExecutor(COMMITS, "floodmark-large-values") as pool:
            while portion := [*islice(chunks, COMMIT_CHUNKS)]:
                rows = _rows(pointer, index, portion)
                size, index = size + sum(map(len, portion)), index + len(portion)
                under_way.append(pool.submit(self._commit_chunks, key, pointer, rows))
                if len(under_way) == COMMITS:
                    under_way.popleft().result()
            while under_way:
                under_way.popleft().result()
        return size

    def _commit_chunks(self, key: bytes, pointer: bytes, rows: list[tuple[bytes, bytes]]) -> None:
        def write(transaction: LayerTransaction) -> None:
            garbage = self._require_lease(transaction, pointer, key)
            since_ms = _GARBAGE.unpack(garbage)[2]
            if physical_ms(transaction.read_version) - since_ms > GARBAGE_AGE / timedelta(milliseconds=4):
                transaction.delete(self.stored, garbage)
                self._lease(transaction, pointer, key)
            for row_key, row in rows:
                transaction.put(self.stored, row_key, row)

        self._site.run_transaction(write)

    def _require_lease(self, transaction: LayerTransaction, pointer: bytes, key: bytes) -> bytes:
        """The key of the garbage row of a put.  Raises TransactionEnded if a sweep has removed the lease."""
        garbage: bytes | None = transaction.get(self.stored, b"c" + pointer)
        if garbage is None:
            raise TransactionEnded(
                f"the put of {key!r:.60} stood still for longer than {GARBAGE_AGE} and was swept; the old "
                "value stays. Put it again",
                key=key,
            )
        return garbage

    def _move(
        self,
        name: bytes,
        row: bytes | None,
        chunks: Iterable[tuple[bytes, bytes]] = (),
        *,
        leased: bytes | None = None,
    ) -> Version:
        """Make `row` the record, with `chunks` or those of a lease; discard the chunks of the old one."""

        def move(transaction: LayerTransaction) -> LayerTransaction:
            if leased is not None:
                transaction.delete(self.stored, self._require_lease(transaction, leased, name[1:]))
                transaction.delete(self.stored, b"c" + leased)
            old: bytes | None = transaction.get(self.stored, name)
            if old is not None and old[:1] != _INLINE:
                self._discard(transaction, _stored(name[1:], old).pointer, name[1:])
            for key, chunk in chunks:
                transaction.put(self.stored, key, chunk)
            if row is None:
                transaction.delete(self.stored, name)
            else:
                transaction.put(self.stored, name, row)
            return transaction

        return self._site.run_transaction(move).version

    # Upkeep

    def sweep(self, *, older_than: timedelta = GARBAGE_AGE) -> int:
        """Remove the chunks of replaced, deleted and incomplete values; return the number of these values.

        Only values that this site discarded more than `older_than` ago are swept, and those discarded more
        than a day ago by a site whose changes no link brings: one that was removed, or whose backup was
        restored here.  Each put also sweeps two such values.
        """
        if not isinstance(older_than, timedelta):
            raise InvalidArgument(f"older_than is a timedelta, not {older_than!r:.60}")
        return self._sweep(older_than, None)

    def _sweep(self, older_than: timedelta, limit: int | None) -> int:
        swept, start, now_ms = 0, b"g", physical_ms(present(self._site))
        while (first := self.stored.first(start, b"h")) and swept != limit:
            site = first[0][1]
            start = b"g" + bytes([site]) + b"\xff" * _GARBAGE.size
            age = older_than if site == self._site.id else max(older_than, FOREIGN_GARBAGE_AGE)
            end = _GARBAGE.pack(b"g", site, max(0, now_ms - age // timedelta(milliseconds=1)), b"")
            if first[0] < end and self._site.covers(self.name, Stamp(VERSION_MAX, site)):
                swept += self._sweep_rows(first[0], end, None if limit is None else limit - swept)
        return swept

    def _sweep_rows(self, start: bytes, end: bytes, limit: int | None) -> int:
        """Remove the garbage rows in a range, and the chunks that they own; return the number of rows."""
        swept = 0
        for garbage, key in self.stored.scan(start, end):
            if swept == limit:
                break
            if self._is_whole(key) and self._site.run_transaction(partial(self._revoke, garbage, key)):
                self.stored.delete_range(prefix=b"c" + garbage[-16:])
                self.stored.delete(garbage)
                swept += 1
        return swept

    def _is_whole(self, key: bytes) -> bool:
        """Whether the record of a key has all of its chunks; one that this site has written has them."""
        found = self.stored.record(b"r" + key)
        if found is None or found.value[:1] == _INLINE or found.stamp == Stamp(found.version, self._site.id):
            return True
        try:
            with self._open_row(key, Whole(found.value, None), present(self._site)) as stream:
                while stream.read(CHUNK_BYTES):
                    pass
        except Corruption:
            return False
        return True

    def _revoke(self, garbage: bytes, key: bytes, transaction: LayerTransaction) -> bool:
        """Remove the lease of a put, so that it cannot end; return whether the garbage row owns chunks."""
        if transaction.get(self.stored, garbage) is None:
            return False
        transaction.delete(self.stored, b"c" + garbage[-16:])
        row: bytes | None = transaction.get(self.stored, b"r" + key)
        if row is None or row[:1] == _INLINE or _stored(key, row).pointer != garbage[-16:]:
            return True
        transaction.delete(self.stored, garbage)
        return False


class _Chunks(BufferedIOBase):
    """The chunks of a value as of one version, as a file.

    A value of few chunks is in memory; for others, an open scan protects the version from garbage collection.
    A read of a whole chunk returns it without a copy.
    """

    def __init__(
        self, records: LayerRecords, key: bytes, stored: Stored, version: At, before: Version | None
    ) -> None:
        super().__init__()
        self._key = key
        self._stored = stored
        self._is_replaced = before is not None
        at = version if before is None else before
        count = -(-stored.size // stored.chunk_bytes)
        end = _chunk_key(stored.pointer, count)

        def scan(index: int) -> Iterator[tuple[bytes, bytes]]:
            return records.scan(_chunk_key(stored.pointer, index), end, at=at)

        def first(index: int) -> tuple[bytes, bytes] | None:
            return records.first(_chunk_key(stored.pointer, index), end, at=at)

        self._scan = scan
        self._position = 0
        # The index of the chunk that the scan yields next, and the chunk before that.
        self._next = 0
        self._chunk = b""
        self._few, self._rows = list[bytes](), iter(list[tuple[bytes, bytes]]())
        if count <= FEW_CHUNKS:
            self._few = [self._check(index, partial(first, index)) for index in range(count)]
        else:
            self._rows = scan(0)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = SEEK_SET, /) -> int:
        self._checkClosed()
        start = {SEEK_SET: 0, SEEK_CUR: self._position, SEEK_END: self._stored.size}.get(whence)
        if start is None or start + offset < 0:
            raise InvalidArgument(f"cannot seek to {offset} from {whence!r}: the value begins at 0")
        self._position = start + offset
        return self._position

    def read(self, size: int | None = -1, /) -> bytes:
        left = self._stored.size if size is None or size < 0 else size
        parts = []
        while left and (part := self.read1(left)):
            parts.append(part)
            left -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def read1(self, size: int = -1, /) -> bytes:
        part = self._rest(self._stored.size if size < 0 else size)
        self._position += len(part)
        return bytes(part)

    def readinto(self, buffer: Any, /) -> int:
        count, view = 0, memoryview(buffer).cast("B")
        while part := self._rest(len(view) - count):
            view[count : count + len(part)] = part
            count, self._position = count + len(part), self._position + len(part)
        return count

    def peek(self, _: int = 0, /) -> bytes:
        """The next bytes, without changing the position.  `readline` uses this."""
        return bytes(self._rest(DEFAULT_BUFFER_SIZE))

    def close(self) -> None:
        self._rows = iter(())
        super().close()

    def _rest(self, size: int) -> bytes | memoryview:
        """The rest of the chunk at the present position, at most `size` bytes."""
        self._checkClosed()
        if self._position >= self._stored.size or not size:
            return b""
        index, offset = divmod(self._position, self._stored.chunk_bytes)
        if index != self._next - 1:
            if index != self._next and not self._few:
                self._rows = self._scan(index)
            # A damaged chunk must raise the error again at the next read.
            self._next = -1
            self._chunk = (
                self._few[index] if self._few else self._check(index, lambda: next(self._rows, None))
            )
            self._next = index + 1
        if not offset and size >= len(self._chunk):
            return self._chunk
        return memoryview(self._chunk)[offset : offset + size]

    def _check(self, index: int, read: Callable[[], tuple[bytes, bytes] | None]) -> bytes:
        """The chunk with an index.  Raises Corruption unless `read` returns it undamaged."""
        pointer, size, chunk_bytes = self._stored
        try:
            found, chunk = read() or (b"", b"")
        except Corruption as error:
            raise _damaged(self._key, f"chunk {index} cannot be read ({error})") from error
        except VersionCollected as error:
            if not self._is_replaced:
                raise
            raise _not_brought(self._key) from error
        is_there = found.startswith(_chunk_key(pointer, index))
        if self._is_replaced and not is_there:
            raise _not_brought(self._key)
        if not is_there or len(chunk) != min(chunk_bytes, size - index * chunk_bytes):
            raise _damaged(self._key, f"chunk {index} is missing or cut")
        if found != _chunk_key(pointer, index) + checksum(chunk):
            raise _damaged(self._key, f"chunk {index} is not what was written")
        return chunk


def _read(key: bytes, source: BinaryIO, size: int) -> bytes:
    """The next bytes of a file: `size` of them, or less at its end."""
    parts = []
    while size:
        part = source.read(size) if hasattr(source, "read") else None
        if not isinstance(part, bytes):
            raise InvalidValue(
                f"the value of {key!r:.60} must be bytes or a blocking file in binary mode, not "
                f"{source!r:.60}",
                key=key,
            )
        if not part:
            break
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _record_key(key: bytes) -> bytes:
    if type(key) is not bytes or not 0 < len(key) < KEY_BYTES_MAX:
        raise InvalidKey(
            f"a key of large values is 1 to {KEY_BYTES_MAX - 1:,} bytes, not {key!r:.60}", key=key
        )
    return b"r" + key


def _chunk_key(pointer: bytes, index: int) -> bytes:
    return b"c" + pointer + index.to_bytes(4, "big")


def _rows(pointer: bytes, index: int, chunks: Iterable[bytes]) -> list[tuple[bytes, bytes]]:
    """The rows of consecutive chunks, from an index on."""
    return [
        (_chunk_key(pointer, place) + checksum(chunk), chunk) for place, chunk in enumerate(chunks, index)
    ]


def _stored(key: bytes, row: bytes) -> Stored:
    if len(row) != _RECORD.size or row[0] != 1:
        raise _damaged(key, "its record has a form that this release does not know")
    return Stored(*_RECORD.unpack(row)[1:])


def _damaged(key: bytes, what: str) -> Corruption:
    return Corruption(
        f"the large value {key!r:.60} is damaged: {what}. If a link is catching up, read it again "
        "afterwards; else put it again, or restore it from a backup",
        key=key,
    )


def _not_brought(key: bytes) -> LinkStalled:
    return LinkStalled(
        f"a link has brought a part of a new value of {key!r:.60}, and the one before it is gone: read it "
        "again when the link has brought the rest; `floodmark status` shows what it waits for",
        key=key,
    )
