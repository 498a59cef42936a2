"""The newest stamp of each of many keys, for a commit that decides by stamps.

The keys of a commit are in order, and so is the engine, so both are walked at once.  A page of rows shows
for every key up to its last row whether it exists: keys that are all new cost one page, and keys that
lie close together cost little more than a scan.  Where they lie far apart, a page would answer for hardly
any of them, and each is looked up on its own, which the engine's filters make cheap.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

from floodmark.codec.ordered import VERSION_BYTES
from floodmark.codec.stamps import NO_STAMP, find_origins, own_stamp
from floodmark.engine import Engine, Row
from floodmark.model.errors import Corruption
from floodmark.model.limits import MIB
from floodmark.partition.families import DATA
from floodmark.partition.read.records import decode_record

# Rows of the first page, and of the largest.
_PROBE_ROWS: Final = 16
_PAGE_ROWS_MAX: Final = 512
_PAGE_BYTES_MAX: Final = 1 * MIB
# Reading this many rows takes about as long as looking up one key.
_ROWS_PER_LOOK_UP: Final = 2
# Keys that are looked up one by one before another page is tried; each time twice as many.
_LOOK_UPS: Final = 256

# After every version of a key.
_BEHIND: Final = b"\xff" * (VERSION_BYTES + 1)


def newest_stamps(engine: Engine, prefixes: Sequence[bytes], site_id: int) -> list[bytes]:
    """The stamp of the newest record of each encoded key, or `NO_STAMP`; the keys are in order."""
    rows = newest_rows(engine, prefixes)
    stored = [row for row in rows if row is not None]
    if not stored:
        return [NO_STAMP] * len(prefixes)
    try:
        origins = find_origins([record for _, record in stored])
    except Corruption:
        for engine_key, record in stored:
            decode_record(engine_key, record)
        raise
    site = bytes([site_id])
    stamps = [
        origin or own_stamp(engine_key, site) for origin, (engine_key, _) in zip(origins, stored, strict=True)
    ]
    if len(stored) == len(rows):
        return stamps
    found = iter(stamps)
    return [NO_STAMP if row is None else next(found) for row in rows]


def newest_rows(engine: Engine, prefixes: Sequence[bytes]) -> list[Row | None]:
    """The newest stored version under each of some encoded keys, which are in order."""
    found: list[Row | None] = [None] * len(prefixes)
    index, rows_max, look_ups = 0, _PROBE_ROWS, _LOOK_UPS
    while index < len(prefixes):
        page = engine.scan(
            DATA,
            prefixes[index],
            prefixes[-1] + _BEHIND,
            rows_max=rows_max,
            bytes_max=_PAGE_BYTES_MAX,
        )
        if not page:
            break
        start, index = index, _match(page, prefixes, index, found)
        if (index - start) * _ROWS_PER_LOOK_UP >= len(page):
            rows_max = min(rows_max * 4, _PAGE_ROWS_MAX)
            continue
        rows_max = _PROBE_ROWS
        end = min(index + look_ups, len(prefixes))
        look_ups *= 2
        found[index:end] = engine.ceilings(DATA, prefixes[index:end])
        index = end
    return found


def _match(page: Sequence[Row], prefixes: Sequence[bytes], index: int, found: list[Row | None]) -> int:
    """Assign the rows of a page to their keys, from `index` on; returns the first key that it leaves open."""
    wanted = prefixes[index]
    for row in page:
        prefix = row[0][:-VERSION_BYTES]
        if prefix < wanted:
            # An older version of the last key, or a key that is not wanted.
            continue
        if prefix != wanted:
            index = bisect_left(prefixes, prefix, index)
            if index == len(prefixes):
                return index
            wanted = prefixes[index]
            if prefix != wanted:
                continue
        found[index] = row
        index += 1
        if index == len(prefixes):
            return index
        wanted = prefixes[index]
    return index
