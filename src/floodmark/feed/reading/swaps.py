"""How a stream of changes crosses a swap, at which a published data set replaces the records read before.

The records of the new generation are no changes, so a stream that simply continued would silently miss them.
It is complete up to the version before the swap, X.  There it fails, or it continues as its reader chose:

place        (X - 1, "")     (X - 1, way)  (X - 1, way, key)  …  X
delivered    all before X    the marker    up to the key         all rows of the swap

The marker is a row whose key is the id of the namespace alone.  The rows after it have version X and are in
key order: all records of the new generation, or the difference between the generations.  The difference is
one pass over two scans, as of X - 1 and as of X, and a safe point at the place protects both.
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

# After this number of records, a batch is yielded even if it is not full, so that the reader gets the place.
_PASSED_MAX: Final = 10_000

# A user key, its version, its partition and the stored record.
_Row: TypeAlias = tuple[bytes, Version, int, bytes]
_NONE: Final[_Row] = (b"", 0, 0, b"")


class ScanRecords(Protocol):
    """Reads the records of a range of qualified keys as of a version, page by page."""

    def __call__(
        self, keys: KeyRange, at: Version, *, dead: bool = False
    ) -> Iterator[pyarrow.RecordBatch]: ...


class Swap(NamedTuple):
    """The version from which readers see another generation of a namespace, given by its id.

    The changes of the difference have the stamp (`stamped`, `origin`), with `origin` 0 for this site.
    `stamped` is just above the base of this data set and of earlier ones.
    """

    version: Version
    namespace: int
    stamped: Version
    origin: int


def no_swap(_namespace: int | None, _position: Version) -> Swap | None:
    """`swap_after` for a site without published data sets: there is no swap."""
    return None


def end_before_swap(swap: Swap | None, position: Version, end: Version) -> Version:
    """The version up to which a stream can read before a swap.  Raises GenerationSwapped if it is there."""
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
    """Gathers the rows of a swap for a batch."""

    def __init__(self, request: ChangesRequest, swap: Swap) -> None:
        self.size = 0
        self._request = request
        self._swap = swap
        self._rows: list[tuple[Version, int, bytes, bytes, bytes | None]] = []

    def add(self, row: _Row, key: bytes, stored: bytes, before: bytes | None) -> None:
        self._rows.append((row[1], row[2], key, b"" if self._request.keys_only else stored, before))
        self.size += len(key) + len(stored) + len(before or b"") + CHANGE_BYTES

    def take(self, place: SwapPlace) -> ChangeBatch:
        """Return the gathered rows as a batch that ends at a place."""
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
    """A batch with the marker of a swap."""
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
    """The puts and deletes that turn the records before a swap into those after it, in key order.

    Both include dead records: whether a record has expired would depend on the clock of the reading, if the
    clock was set back.  An expired record of both is no difference; its expiry is a change of its own.

    The stamp of these changes is just above the base of the data set: above all stamps that it replaces, and
    below those of later writes of other sites, which may arrive later.
    """
    prefix, gathered, passed = encode_namespace(swap.namespace), _Gathered(request, swap), 0
    stamp = Stamp(swap.stamped, swap.origin or site_id)
    for user_key, before, after in _aligned(_rows(old), _rows(new)):
        key, passed = prefix + user_key, passed + 1
        earlier, later = _without_deletion(before), _without_deletion(after)
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
    """The rows of a swap, after a place if one was reached.  The last batch is empty, and ends them."""
    if place is None:
        yield mark(request, swap)
        place = SwapPlace(request.on_generation)
    within = qualify_range(swap.namespace).intersect(request.keys)
    left = within and within.intersect(KeyRange(behind(place.key)))
    if left is not None:
        if place.way is OnGeneration.SNAPSHOT:
            yield from all_records(request, swap, scan(left, swap.version))
        else:
            old, new = (scan(left, at, dead=True) for at in (swap.version - 1, swap.version))
            yield from difference(request, swap, old, new, site_id)
    yield ChangeBatch(through=swap.version, way=Way.SNAPSHOT)


def _aligned(old: Iterator[_Row], new: Iterator[_Row]) -> Iterator[tuple[bytes, _Row | None, _Row | None]]:
    """The keys of two scans in key order, each with its row in either scan, or None."""
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


def _without_deletion(row: _Row | None) -> bytes | None:
    """The record of a row without its stamp; None if there is none, or if it is a deletion."""
    return None if row is None or row[3][-1] & DELETED else _unstamped(row[3])


def _unstamped(stored: bytes) -> bytes:
    """A record without its origin and batch flag."""
    if stored[-1:] == PLAIN:
        return stored
    return _stamped(stored, None)


def _stamped(stored: bytes, stamp: Stamp | None) -> bytes:
    record = decode_value(stored)
    return encode_value(record.value, record.expires_at, record.deleted, stamps=record.stamps, origin=stamp)
