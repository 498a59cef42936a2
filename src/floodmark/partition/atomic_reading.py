"""The node's side of an atomic read; `routing/atomic.py` has the reader's.

The resolved version is taken **before** the first record is read.  So an answer can lack only records above
it, written meanwhile, and none at or below it.
"""

from collections.abc import Callable, Sequence
from typing import Final

from floodmark.clock import HybridClock
from floodmark.codec.ordered import NAMESPACE_BYTES, decode_version, encode_prefixes, encode_version
from floodmark.codec.values import PLAIN, PLAIN_ENDS
from floodmark.engine import Engine, Row
from floodmark.model.change import Stamp
from floodmark.model.limits import PAGE_BYTES_MAX
from floodmark.model.record import AtomicAnswer, AtomicRecord
from floodmark.model.version import Version
from floodmark.partition.commit.batches import BatchCache
from floodmark.partition.committer import Committer
from floodmark.partition.deciding import Serving, require_served, route
from floodmark.partition.families import DATA
from floodmark.partition.generations import pinned, shown, swapped_at
from floodmark.partition.read.records import decode_record, read_record

# Keys that are read from the engine at once: the values of more might need too much memory.
READ_KEYS: Final = 32

_ABSENT: Final = AtomicRecord(0, Stamp(0, 0), None, False, False)


def read_batches(
    committer: Committer,
    engine: Engine,
    clock: HybridClock,
    serving: Serving,
    keys: Sequence[bytes],
    among: Sequence[bytes],
    at: Version | None,
    require_kept: Callable[[bytes, Version], None],
) -> AtomicAnswer:
    """See `Partition.read_batches`.  `engine` must refuse to read after the node's lease."""
    served = serving()
    partitions = [route(served, key) for key in keys]
    for key, partition in zip(keys, partitions, strict=True):
        if at is not None:
            partition.settle((key,), at)
        partition.heat.reads += 1
    while True:
        present, resolved = shown(engine), _resolve(committer, clock, keys)
        records = _read(engine, keys, at, committer.place.site, clock.physical_ms())
        swapped = max(swapped_at(engine, each) for each in {key[:NAMESPACE_BYTES] for key in (*keys, *among)})
        # Once more if a data set was published while the records were read.
        if present is shown(engine):
            break
    for partition in partitions:
        # If a partition was given away meanwhile, its new owner may still write below `resolved`.
        require_served(partition)
    if at is not None:
        for namespace in {key[:NAMESPACE_BYTES] for key in keys}:
            # Garbage collection may have run while the records were read.
            require_kept(namespace, at)
    # Within one answer, nothing at or below its resolved version can be missing.
    known = 0 if among or len(records) < len(keys) else resolved
    siblings = _find_siblings(committer.place.batches, records, known, keys, among)
    return AtomicAnswer(resolved, records, siblings, swapped)


def read_together(
    committer: Committer, engine: Engine, clock: HybridClock, keys: Sequence[bytes], bytes_max: int
) -> tuple[list[Row | None], Version | None]:
    """The newest rows of keys of this node as of one moment, and the version at which they were read, if any.

    The rows end soon after `bytes_max` bytes.  Waits for nothing, so it may be called in a round.

    If a row is above the resolved version, its commit may have written other keys after they were read.
    Then all are read again, as of the newest row.  A commit is one engine write, and a round writes in the
    order of versions, so every record at or below that version can be read by then, except for copies that
    a link applies and for batches over several nodes.
    """
    engine, settled = pinned(engine), _resolve(committer, clock, keys)
    rows = _read_rows(engine, keys, None, bytes_max)
    newest = max((decode_version(row[0]) for row in rows if row is not None), default=0)
    if newest <= settled:
        return rows, None
    return _read_rows(engine, keys, newest, bytes_max), newest


def _read_rows(engine: Engine, keys: Sequence[bytes], at: Version | None, bytes_max: int) -> list[Row | None]:
    rows: list[Row | None] = []
    size = 0
    while len(rows) < len(keys) and size <= bytes_max:
        found = _find_rows(engine, keys[len(rows) : len(rows) + READ_KEYS], at)
        size += sum(len(row[1]) for row in found if row is not None)
        rows += found
    return rows


def _read(
    engine: Engine, keys: Sequence[bytes], at: Version | None, site: int, now_ms: int
) -> list[AtomicRecord]:
    """The records of the first keys; they end soon after `PAGE_BYTES_MAX` bytes."""
    records: list[AtomicRecord] = []
    size = 0
    while len(records) < len(keys) and size <= PAGE_BYTES_MAX:
        wanted = keys[len(records) : len(records) + READ_KEYS]
        for row in _find_rows(engine, wanted, at):
            records.append(_ABSENT if row is None else _judge(row, site, now_ms))
            size += 0 if row is None else len(row[1])
            if size > PAGE_BYTES_MAX:
                break
    return records


def _resolve(committer: Committer, clock: HybridClock, keys: Sequence[bytes]) -> Version:
    """A version up to which all commits to the keys are written, though perhaps not synced."""
    version = clock.latest
    # In this order: a round enters its prepared writes before it removes its own floor.
    floor = committer.floors.round
    if floor is not None and floor < version:
        version = floor
    for write in committer.prepared.on(keys):
        version = min(version, write.version - 1)
    return version


def _find_rows(engine: Engine, keys: Sequence[bytes], at: Version | None) -> list[Row | None]:
    prefixes = encode_prefixes(keys)
    starts = None if at is None else [prefix + encode_version(at) for prefix in prefixes]
    return engine.ceilings(DATA, prefixes, starts)


def _judge(row: Row, site: int, now_ms: int) -> AtomicRecord:
    engine_key, stored = row
    version, end = decode_version(engine_key), stored[-1:]
    if end in PLAIN_ENDS:
        return AtomicRecord(version, Stamp(version, site), stored[:-1], end != PLAIN, False)
    record, live = decode_record(*row), read_record(*row, now_ms)
    stamp = record.origin or Stamp(version, site)
    value = None if live is None else live[1]
    return AtomicRecord(version, stamp, value, record.batched, record.stamps is not None)


def _find_siblings(
    batches: BatchCache,
    records: Sequence[AtomicRecord],
    known: Version,
    keys: Sequence[bytes],
    among: Sequence[bytes],
) -> dict[Version, list[int]]:
    """By version of each batch above `known` that wrote a record: the places of its keys in both lists."""
    siblings: dict[Version, list[int]] = {}
    for record in records:
        version = record.version
        if not record.batched or version <= known or version in siblings:
            continue
        written = batches.find(version)
        if written is not None:
            siblings[version] = [place for place, key in enumerate((*keys, *among)) if key in written]
    return siblings
