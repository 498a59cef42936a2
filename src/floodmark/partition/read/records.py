"""Reading versioned records.  The engine stores the versions of a key next to each other, newest first."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from struct import error as StructError
from typing import Final, NamedTuple

import numpy
import pyarrow

from floodmark.codec.columns import StoredRows, records_schema
from floodmark.codec.ordered import (
    GROUP,
    MARKED_GROUP,
    NAMESPACE_BYTES,
    RAW,
    VERSION_BYTES,
    decode_key,
    decode_user_key,
    decode_version,
    encode_prefix,
    encode_version,
    user_key_shape,
)
from floodmark.codec.records import Places
from floodmark.codec.states import decode_state, render_value
from floodmark.codec.values import PLAIN_ENDS, TOMBSTONE, decode_value
from floodmark.columns.packed import empty_batch
from floodmark.engine import Engine, Row
from floodmark.model.change import Stamp
from floodmark.model.errors import Corruption, VersionCollected
from floodmark.model.limits import PAGE_BYTES_MAX, PAGE_ROWS_MAX
from floodmark.model.partition import Content
from floodmark.model.ranges import KeyRange, after, prefix_end
from floodmark.model.record import Record, Versioned
from floodmark.model.version import Version, moment_of, physical_ms
from floodmark.partition.families import DATA
from floodmark.partition.generations import as_of

# After every version of a key: the inverse of version 0 is the largest suffix.
_BEHIND_OLDEST = b"\xff" * VERSION_BYTES + b"\x00"

# Columns pay off from some thousands of rows on; a page still has about a megabyte.
RECORDS_PAGE_ROWS_MAX: Final = 8_192
# This many versions of one key at the end of a page are worth a seek, and then a short read.
MANY_VERSIONS: Final = 8
SHORT_READ_ROWS: Final = 8


class ScanPage(NamedTuple):
    """Live (user key, value) pairs in order, and the engine key from which to continue; None at the end."""

    rows: list[Row]
    resume: bytes | None


def find_stored(engine: Engine, prefix: bytes, at: Version | None) -> tuple[Version, bytes] | None:
    """The newest version of a key, or the newest at or below `at`, and its stored record."""
    row = engine.ceiling(DATA, prefix if at is None else prefix + encode_version(at), prefix)
    return None if row is None else (decode_version(row[0]), row[1])


def find_first(engine: Engine, keys: KeyRange, within: KeyRange, site_id: int) -> Versioned | None:
    """The newest record of the first qualified key of a range, if that is plain and found by one look-up.

    None does not mean that the range is empty.
    """
    row = engine.ceiling(DATA, encode_prefix(keys.start))
    if row is None or row[1][-1:] not in PLAIN_ENDS:
        return None
    engine_key, stored = row
    prefix = engine_key[:-VERSION_BYTES]
    found = decode_user_key(prefix)
    qualified = keys.start[:NAMESPACE_BYTES] + found
    # The key found may be of another namespace: then it encodes to another prefix.
    if encode_prefix(qualified) != prefix or not (keys.contains(qualified) and within.contains(qualified)):
        return None
    version = decode_version(engine_key)
    return Versioned(key=found, value=stored[:-1], version=version, stamp=Stamp(version, site_id))


def find_before(engine: Engine, wanted: Sequence[tuple[bytes, Version, int]]) -> list[bytes | None]:
    """The stored record of each qualified key just before a version, if it is alive at a time."""
    prefixes = [encode_prefix(key) for key, _, _ in wanted]
    starts = [
        prefix + encode_version(version - 1) for prefix, (_, version, _) in zip(prefixes, wanted, strict=True)
    ]
    rows = engine.ceilings(DATA, prefixes, starts)
    return [
        None if row is None or _is_dead(row, at_ms) else row[1]
        for row, (_, _, at_ms) in zip(rows, wanted, strict=True)
    ]


def _is_dead(row: Row, at_ms: int) -> bool:
    return row[1][-1:] not in PLAIN_ENDS and decode_record(*row).is_dead_at(at_ms)


def read_record(engine_key: bytes, stored: bytes, physical_ms: int) -> tuple[Record, bytes] | None:
    """A stored record and the value that a reader finds in it at a time; None if it is dead then."""
    try:
        record = decode_value(stored)
        return None if record.is_dead_at(physical_ms) else (record, render_value(record, physical_ms))
    except Corruption as error:
        raise _name_key(engine_key, error) from error


def decode_whole(stored: bytes) -> Record:
    """`decode_value`, which also decodes every part of a state."""
    record = decode_value(stored)
    if record.stamps is not None:
        decode_state(stored)
    return record


def require_sound(engine_key: bytes, stored: bytes) -> None:
    """Decode every part of a stored record; raises Corruption with the key if it is damaged."""
    try:
        decode_whole(stored)
    except Corruption as error:
        raise _name_key(engine_key, error) from error


def decode_record(engine_key: bytes, stored: bytes) -> Record:
    """`decode_value`, with the key in the error if the record is damaged."""
    try:
        return decode_value(stored)
    except Corruption as error:
        raise _name_key(engine_key, error) from error


def _name_key(engine_key: bytes, error: Corruption) -> Corruption:
    namespace, key, version = decode_key(engine_key)
    return Corruption(
        f"key {key!r} of namespace {namespace} is damaged at version {version}: {error}. "
        "Restore it from a backup or from a peer, or overwrite it",
        key=key,
        namespace=namespace,
        version=version,
    )


def scan_page(
    engine: Engine,
    start: bytes,
    end: bytes,
    at: Version,
    physical_ms: int,
    *,
    rows_max: int,
    reverse: bool,
) -> ScanPage:
    """One page of the live records as of `at`, between two engine keys."""
    read = _read_backward if reverse else _read_forward
    suffix = encode_version(at)
    rows, resume = read(as_of(engine, at), start, end, suffix, min(rows_max, PAGE_ROWS_MAX))
    found = _newest(rows, suffix, physical_ms)
    if reverse:
        found.reverse()
    return ScanPage(found, resume)


def _read_forward(
    engine: Engine, start: bytes, end: bytes, suffix: bytes, rows_max: int
) -> tuple[list[Row], bytes | None]:
    """Rows with, for each key, the newest version at or below a snapshot, and the key to continue from.

    Reading on is quicker than seeking where keys have a few versions.  If the last key of a page has many, a
    seek skips those above the snapshot and those below the wanted one, and the next read is short.
    """
    rows: list[Row] = []
    wanted, size = rows_max, 0
    while page := engine.scan(DATA, start, end, rows_max=wanted, bytes_max=PAGE_BYTES_MAX - size):
        is_whole = len(page) == wanted
        last = page[-1][0]
        prefix = last[:-VERSION_BYTES]
        start = prefix + (_BEHIND_OLDEST if last[-VERSION_BYTES:] >= suffix else suffix)
        if is_whole and page[-min(wanted, MANY_VERSIONS)][0].startswith(prefix):
            page, wanted = _pick(page, suffix), SHORT_READ_ROWS
        rows += page
        if not is_whole or _is_enough(rows, rows_max):
            return rows, start
        size += _size_of(page)
        if size >= PAGE_BYTES_MAX:
            return rows, start
        wanted = min(2 * wanted, rows_max)
    return rows, None


def _read_backward(
    engine: Engine, start: bytes, end: bytes, suffix: bytes, rows_max: int
) -> tuple[list[Row], bytes | None]:
    """`_read_forward` from the end of a range, where the versions of a key come oldest first.

    The rows returned are in order of keys all the same.  A page may end in the middle of a key's versions,
    before the newest ones.  One look-up finds the wanted version, and the next read begins below the key.
    If it finds none, the key was dead and has been collected since: the versions read of it are older than
    its tombstone.
    """
    rows: list[Row] = []
    wanted, size = rows_max, 0
    while page := engine.scan(
        DATA, start, end, rows_max=wanted, bytes_max=PAGE_BYTES_MAX - size, reverse=True
    ):
        is_whole = len(page) == wanted
        end = page[-1][0][:-VERSION_BYTES]
        has_many = is_whole and page[-min(wanted, MANY_VERSIONS)][0].startswith(end)
        page.reverse()
        newest = engine.ceiling(DATA, end + suffix, end)
        page[: bisect_left(page, end + _BEHIND_OLDEST, key=_key_of)] = [] if newest is None else [newest]
        if has_many:
            page, wanted = _pick(page, suffix), SHORT_READ_ROWS
        rows[:0] = page
        if not is_whole or _is_enough(rows, rows_max):
            return rows, end
        size += _size_of(page)
        if size >= PAGE_BYTES_MAX:
            return rows, end
        wanted = min(2 * wanted, rows_max)
    return rows, None


def _pick(rows: Sequence[Row], suffix: bytes) -> list[Row]:
    """For each key, the first row whose suffix is at or after the given one."""
    picked: list[Row] = []
    done = b""
    for row in rows:
        prefix = row[0][:-VERSION_BYTES]
        if prefix != done and row[0][-VERSION_BYTES:] >= suffix:
            picked.append(row)
            done = prefix
    return picked


def _is_enough(rows: Sequence[Row], rows_max: int) -> bool:
    return 2 * len(rows) >= rows_max


def _size_of(rows: Sequence[Row]) -> int:
    return sum(len(engine_key) + len(stored) for engine_key, stored in rows)


def _key_of(row: Row) -> bytes:
    return row[0]


def _newest(rows: Sequence[Row], earliest_suffix: bytes, physical_ms: int) -> list[Row]:
    """For each key, the newest version at or below the snapshot, if it is live.

    Suffixes are inverted versions, so "at or below" is "at or after" among the bytes.
    """
    found: list[Row] = []
    append, join = found.append, b"".join
    done = shape = b""
    try:
        for engine_key, stored in rows:
            prefix = engine_key[:-VERSION_BYTES]
            if prefix == done or engine_key[-VERSION_BYTES:] < earliest_suffix:
                continue
            done = prefix
            if stored[-1:] in PLAIN_ENDS:
                # `decode_user_key`, without a call for each row.
                markers = prefix[GROUP::MARKED_GROUP]
                if markers != shape:
                    shape, unpack = markers, user_key_shape(markers)
                append((join(unpack(prefix)), stored[:-1]))
            elif stored != TOMBSTONE:
                live = read_record(engine_key, stored, physical_ms)
                if live is not None:
                    append((decode_user_key(prefix), live[1]))
    except StructError as error:
        raise Corruption(f"engine key {engine_key.hex()} is not made of whole groups") from error
    return found


class RecordsPage(NamedTuple):
    """Records as columns, and the engine key from which to continue; None at the end."""

    batch: pyarrow.RecordBatch
    resume: bytes | None


def scan_records_page(
    engine: Engine,
    start: bytes,
    end: bytes,
    at: Version,
    partition: int,
    *,
    dead: bool,
    content: Content,
    judged_ms: int | None = None,
) -> RecordsPage:
    """One page of the records as of `at`, between two engine keys, as columns.

    It has the newest record at or below `at` of each key; tombstones and expired records only with `dead`.
    If `content` is not whole, a column of digests replaces the values.  Whether a record has expired is
    judged at the time of `at`, or at `judged_ms`.
    """
    rows, resume = _read_forward(as_of(engine, at), start, end, encode_version(at), RECORDS_PAGE_ROWS_MAX)
    if not rows:
        return RecordsPage(empty_batch(records_schema(content)), resume)
    columns = StoredRows(rows)
    reached = columns.versions <= at
    # The versions of a key descend: the first that is reached follows one that is not, or another key.
    newest = reached.copy()
    newest[1:] &= ~(columns.repeats()[1:] & reached[:-1])
    chosen = numpy.flatnonzero(newest)
    try:
        gone = columns.dead(chosen, physical_ms(at) if judged_ms is None else judged_ms)
        if not dead:
            chosen = chosen[~gone]
        batch = columns.take(chosen, partition, content, physical_ms(at))
    except Corruption:
        _require_sound(rows, chosen)
        raise
    return RecordsPage(batch, resume)


def _require_sound(rows: Sequence[Row], chosen: Places) -> None:
    """Raise Corruption with the key of the first damaged record: a column cannot say which it is."""
    for row in chosen.tolist():
        decode_record(*rows[row])


def require_kept(at: Version, collected: Version) -> None:
    """Raise VersionCollected if garbage collection may have removed records that a read at `at` needs."""
    if at < collected:
        raise VersionCollected(
            f"version {at} ({moment_of(at).isoformat()}) was collected; the oldest that can be "
            f"read is {collected} ({moment_of(collected).isoformat()}). Keep history longer with "
            "the namespace's `retention` or a safe point",
            version=at,
            oldest=collected,
        )


class VersionsPage(NamedTuple):
    """Stored versions as (version, qualified key, stored value), and how many bytes were read for them."""

    rows: list[tuple[Version, bytes, bytes]]
    bytes_read: int


def scan_versions(engine: Engine, keys: KeyRange, since: Version, until: Version) -> Iterator[VersionsPage]:
    """All versions in `(since, until]` of the qualified keys of a range, in order of keys, page by page.

    They are from the generation that is read as of `until`.
    """
    engine = as_of(engine, until)
    start = encode_prefix(keys.start)
    end = prefix_end(RAW) if keys.end is None else encode_prefix(keys.end)
    # Suffixes are inverted versions: the newest comes first.
    newest, behind_oldest = encode_version(until), encode_version(since)
    while page := engine.scan(DATA, start, end, rows_max=PAGE_ROWS_MAX, bytes_max=PAGE_BYTES_MAX):
        rows = [
            (decode_version(engine_key), _qualified(engine_key[:-VERSION_BYTES]), stored)
            for engine_key, stored in page
            if newest <= engine_key[-VERSION_BYTES:] < behind_oldest
        ]
        yield VersionsPage(rows, _size_of(page))
        start = _next_wanted(page[-1][0], newest, behind_oldest)


def _next_wanted(last: bytes, newest: bytes, behind_oldest: bytes) -> bytes:
    """The engine key from which to continue after `last`, past the versions that are not wanted."""
    prefix, suffix = last[:-VERSION_BYTES], last[-VERSION_BYTES:]
    if suffix < newest:
        return prefix + newest
    return after(last) if suffix < behind_oldest else prefix + _BEHIND_OLDEST


def behind_versions(engine_key: bytes) -> bytes:
    """An engine key after all versions of the same key."""
    return engine_key[:-VERSION_BYTES] + _BEHIND_OLDEST


def _qualified(prefix: bytes) -> bytes:
    return prefix[len(RAW) : len(RAW) + NAMESPACE_BYTES] + decode_user_key(prefix)
