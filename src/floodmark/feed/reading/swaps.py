"""Where a stream of changes meets a data set that was published in the place of what it has read.

The records that a swap brings are no changes, so a stream that read on would miss them without a word.  It is
complete up to the version before the swap, X.  There it fails, or it goes on as its reader chose:

    place        (X - 1, "")     (X - 1, way)  (X - 1, way, key)  …  X
    delivered    all before X    the marker    up to the key         all that comes at X

The marker is a row whose key is the id of the namespace alone.  What follows has version X and stands in
order of keys: all records of the new generation, or the difference between the generations.  That is one pass
over two scans, as of X - 1 and as of X, and a safe point at the place keeps both.
"""

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple, Protocol, TypeAlias

import pyarrow

from floodmark.codec.ordered import encode_namespace, qualify_range
from floodmark.codec.values import DELETED, PLAIN, TOMBSTONE, decode_value, encode_value
from floodmark.feed.reading.columns import BATCH_BYTES_MAX, CHANGE_BYTES
from floodmark.model.change import Stamp
from floodmark.model.errors import GenerationSwapped
from floodmark.model.ranges import KeyRange
from floodmark.model.ranges import after as behind
from floodmark.model.stream import ChangeBatch, ChangesRequest, OnGeneration, SwapPlace, Way
from floodmark.model.version import Version, moment_of

# After so many records without a difference a reader learns how far the pass is.
_PASSED_MAX: Final = 10_000

# A user key, its version, its partition and what is stored.
_Row: TypeAlias = tuple[bytes, Version, int, bytes]
_NONE: Final[_Row] = (b"", 0, 0, b"")


class ScanRecords(Protocol):
    """Reads the records of a range of qualified keys as of a version, page by page."""

    def __call__(
        self, keys: KeyRange, at: Version, *, dead: bool = False
    ) -> Iterator[pyarrow.RecordBatch]: ...


class Swap(NamedTuple):
    """The version from which readers find another generation of a namespace, named by its id.

    What the data set has changed is stamped with the version `stamped` of the site `origin`, 0 for this one:
    behind the base of this data set and those of earlier ones.
    """

    version: Version
    namespace: int
    stamped: Version
    origin: int


def no_swap(_namespace: int | None, _position: Version) -> Swap | None:
    """The first swap above a position at a site at which no data set was published."""
    return None


def end_before_swap(swap: Swap | None, position: Version, end: Version) -> Version:
    """How far a stream at a position may go towards an end; GenerationSwapped if not at all."""
    if swap is None or swap.version > end:
        return end
    if swap.version - 1 <= position:
        raise GenerationSwapped(
            f"a data set was published at version {swap.version} ({moment_of(swap.version).isoformat()}) and "
            f"replaced what was read so far; the stream is complete up to {position}. Go on with "
            f'on_generation="difference" or "snapshot", begin again with a snapshot (since="snapshot"), or, '
            f"to leave the data set out, read the changes after version {swap.version}",
            version=position,
            oldest=swap.version,
        )
    return swap.version - 1


class _Gathered:
    """Rows that come at a swap, on their way into a batch."""

    def __init__(self, request: ChangesRequest, swap: Swap) -> None:
        self.size = 0
        self._request = request
        self._swap = swap
        self._rows: list[tuple[Version, int, bytes, bytes, bytes | None]] = []

    def add(self, row: _Row, key: bytes, stored: bytes, before: bytes | None) -> None:
        self._rows.append((row[1], row[2], key, b"" if self._request.keys_only else stored, before))
        self.size += len(key) + len(stored) + len(before or b"") + CHANGE_BYTES

    def take(self, place: SwapPlace) -> ChangeBatch:
        """The rows so far, as a batch that ends at a place."""
        rows, self._rows, self.size = self._rows, [], 0
        versions, partitions, keys, values, befores = zip(*rows, strict=True) if rows else ((),) * 5
        return ChangeBatch(
            through=self._swap.version - 1,
            way=Way.SNAPSHOT,
            versions=versions,
            partitions=partitions,
            keys=keys,
            values=values,
            befores=befores if self._request.before_images else None,
            snapshot=place.encode(),
        )


def mark(request: ChangesRequest, swap: Swap) -> ChangeBatch:
    """The marker of a swap."""
    gathered = _Gathered(request, swap)
    gathered.add((b"", swap.version, 0, b""), encode_namespace(swap.namespace), PLAIN, None)
    return gathered.take(SwapPlace(request.on_generation))


def all_records(
    request: ChangesRequest, swap: Swap, pages: Iterable[pyarrow.RecordBatch]
) -> Iterator[ChangeBatch]:
    """Pages of records as of a swap."""
    prefix, gathered = encode_namespace(swap.namespace), _Gathered(request, swap)
    for page in pages:
        for row in _rows([page]):
            gathered.add(row, prefix + row[0], row[3], None)
        if page.num_rows:
            yield gathered.take(SwapPlace(OnGeneration.SNAPSHOT, prefix + row[0]))


def difference(
    request: ChangesRequest,
    swap: Swap,
    old: Iterable[pyarrow.RecordBatch],
    new: Iterable[pyarrow.RecordBatch],
    site_id: int,
) -> Iterator[ChangeBatch]:
    """Puts and deletes that make the records before a swap into those after it, in order of keys.

    `old` holds dead records, too.  One that has expired is deleted: its expiry may not have been told.

    Their stamp is right behind the base of the data set: above all that it replaces, and below what other
    sites have written since, which may come later.
    """
    prefix, gathered, passed = encode_namespace(swap.namespace), _Gathered(request, swap), 0
    stamp = Stamp(swap.stamped, swap.origin or site_id)
    for user_key, before, after in _aligned(_rows(old), _rows(new)):
        key, passed = prefix + user_key, passed + 1
        earlier = None if before is None or before[3][-1] & DELETED else _unstamped(before[3])
        later = None if after is None else _unstamped(after[3])
        if later != earlier:
            partition = (after or before or _NONE)[2]
            row = user_key, swap.version, partition, b""
            gathered.add(row, key, _stamped(later or TOMBSTONE, stamp), earlier)
        if gathered.size >= BATCH_BYTES_MAX or passed == _PASSED_MAX:
            yield gathered.take(SwapPlace(OnGeneration.DIFFERENCE, key))
            passed = 0
    if passed:
        yield gathered.take(SwapPlace(OnGeneration.DIFFERENCE, key))


def cross(
    request: ChangesRequest, swap: Swap, place: SwapPlace | None, scan: ScanRecords, site_id: int
) -> Iterator[ChangeBatch]:
    """What comes at a swap, behind a place, if one was reached; the last batch is empty, and ends it."""
    if place is None:
        yield mark(request, swap)
        place = SwapPlace(request.on_generation)
    within = qualify_range(swap.namespace).intersect(request.keys)
    left = within and within.intersect(KeyRange(behind(place.key)))
    if left is not None:
        if place.way is OnGeneration.SNAPSHOT:
            yield from all_records(request, swap, scan(left, swap.version))
        else:
            old, new = scan(left, swap.version - 1, dead=True), scan(left, swap.version)
            yield from difference(request, swap, old, new, site_id)
    yield ChangeBatch(through=swap.version, way=Way.SNAPSHOT)


def _aligned(old: Iterator[_Row], new: Iterator[_Row]) -> Iterator[tuple[bytes, _Row | None, _Row | None]]:
    """Two scans in order of keys, side by side."""
    before, after = next(old, None), next(new, None)
    while before is not None or after is not None:
        if after is None or (before is not None and before[0] < after[0]):
            assert before is not None
            yield before[0], before, None
            before = next(old, None)
        elif before is None or after[0] < before[0]:
            yield after[0], None, after
            after = next(new, None)
        else:
            yield after[0], before, after
            before, after = next(old, None), next(new, None)


def _rows(pages: Iterable[pyarrow.RecordBatch]) -> Iterator[_Row]:
    for page in pages:
        yield from zip(*(column.to_pylist() for column in page.columns), strict=True)


def _unstamped(stored: bytes) -> bytes:
    """A record without what tells where and how it was written."""
    if stored[-1:] == PLAIN:
        return stored
    return _stamped(stored, None)


def _stamped(stored: bytes, stamp: Stamp | None) -> bytes:
    record = decode_value(stored)
    return encode_value(record.value, record.expires_at, record.deleted, stamps=record.stamps, origin=stamp)
