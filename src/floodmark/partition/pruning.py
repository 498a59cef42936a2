"""Removes stamps of fields that were deleted long ago from merged records.

A record of fields keeps a stamp of each deleted field, and would grow without end with ever new fields.  A
pass over a namespace rewrites the newest version of every key in place, without the stamps that hide nothing
any more (`merge/parts.py`).  The value stays the same, so no snapshot and no change is affected.  A key with
a prepared write keeps them: a copy that is prepared may be older, as in `retention/collect.py`.

Only versions that are resolved for the whole site are rewritten: a recovery may still undo others, and the
owner of a partition writes only above them.  The same write raises the collected horizon.
"""

from collections.abc import Callable, Iterator, Sequence

from floodmark.codec.ordered import RAW, VERSION_BYTES, decode_version, encode_namespace
from floodmark.codec.values import HAS_STAMPS
from floodmark.engine import Engine, Guard, Row, WriteRow
from floodmark.merge.parts import Pruned, prune_record
from floodmark.model.errors import Corruption
from floodmark.model.limits import PAGE_BYTES_MAX, PAGE_ROWS_MAX
from floodmark.model.ranges import prefix_end
from floodmark.model.version import Version, physical_ms
from floodmark.partition.families import DATA
from floodmark.partition.node import Node
from floodmark.partition.prepared.writes import prepared_prefixes
from floodmark.partition.read.records import behind_versions, require_sound


def prune_namespace(
    node: Node,
    namespace: int,
    settled: Version,
    pause: Callable[[], bool],
    guards: Sequence[Guard] = (),
) -> int:
    """Remove deletions at or below `settled` from the records of a namespace; returns how many it changed.

    Deletions above the collected version stay, for readers that catch up by a scan.  `pause` is called
    between pages and ends the pass if it returns False.
    """
    collected = node.retention.collected_version(namespace)
    forgotten, pruned = min(settled, collected), 0
    # Read after the caller has found what is settled.
    prepared = prepared_prefixes(node.engine, encode_namespace(namespace))
    for page in _newest_states(node.engine, namespace):
        resolved = node.resolved_version()
        found = {
            engine_key: _prune(engine_key, stored, forgotten, physical_ms(collected))
            for engine_key, stored in page
            if decode_version(engine_key) <= resolved and engine_key[:-VERSION_BYTES] not in prepared
        }
        less = {engine_key: record for engine_key, record in found.items() if record is not None}
        if less:
            rows: list[WriteRow] = [(DATA, engine_key, record.stored) for engine_key, record in less.items()]
            horizon = max(record.newest for record in less.values())
            node.storage.remove([node.retention.raise_horizon(namespace, horizon), *rows], guards)
            pruned += len(less)
        if not pause():
            break
    return pruned


def _newest_states(engine: Engine, namespace: int) -> Iterator[list[Row]]:
    """The newest version of each key, page by page, if it is a state."""
    start = RAW + encode_namespace(namespace)
    end, seen = prefix_end(start), b""
    while page := engine.scan(DATA, start, end, rows_max=PAGE_ROWS_MAX, bytes_max=PAGE_BYTES_MAX):
        newest: list[Row] = []
        for engine_key, stored in page:
            prefix = engine_key[:-VERSION_BYTES]
            if prefix != seen and stored[-1] & HAS_STAMPS:
                newest.append((engine_key, stored))
            seen = prefix
        yield newest
        start = behind_versions(page[-1][0])


def _prune(engine_key: bytes, stored: bytes, settled: Version, now_ms: int) -> Pruned | None:
    try:
        return prune_record(stored, settled, now_ms)
    except Corruption:
        # Says which record it is.
        require_sound(engine_key, stored)
        raise
