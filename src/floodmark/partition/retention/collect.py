"""Garbage collection: removes versions that no reader can ask for any more.

At or below the safe point only the newest version of a key can still be read, and not even that one if
it is a tombstone or has expired.  The safe point is stored *before* the first row is removed, so that a crash
in between cannot leave a reader with half a history and no warning.

Of a dead key the older versions are removed first and the tombstone last: a crash in between leaves the key
deleted.  The tombstone of a key with a prepared write stays, since a copy that is prepared may be older, and
has not been compared with it yet.  A copy that is prepared later is refused by the guard of its link: the
link had passed all older changes before the tombstone could be removed.
"""

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Final

from floodmark.codec.ordered import VERSION_BYTES, decode_version
from floodmark.engine import Guard, WriteRow
from floodmark.engine.base import scan_pages
from floodmark.model.version import Version, physical_ms
from floodmark.partition.commit.storage import Storage
from floodmark.partition.families import DATA, HORIZON, META
from floodmark.partition.generations import pinned
from floodmark.partition.read.records import decode_record

BATCH_ROWS: Final = 1_000


@dataclass(frozen=True, kw_only=True)
class Collected:
    """What one pass over a namespace removed."""

    versions_read: int = 0
    versions_removed: int = 0
    keys_removed: int = 0


class Collector:
    """One pass over the versions of one namespace, in order of keys, newest version first.

    `pause` is called between pages; it returns False to end the pass early, which is harmless.
    """

    def __init__(
        self,
        storage: Storage,
        namespace: bytes,
        safe_point: Version,
        settled: Version,
        horizon: Version,
        told_through: int,
        pause: Callable[[], bool],
        guards: Sequence[Guard],
        prepared: Set[bytes],
    ) -> None:
        self._storage = storage
        # Garbage in the generation that is read now may be the newest record in the next one.
        self._engine = pinned(storage.engine)
        self._namespace = namespace
        self._safe_point = safe_point
        # Tombstones above this may still be needed to hide something older from another site.
        self._settled = settled
        # The expiry of a record that expires later is not written yet (`expiring.py`).
        self._judged_ms = min(physical_ms(safe_point), told_through * 1000)
        self._pause = pause
        # The encoded keys with prepared writes.
        self._prepared = prepared
        self._guards = guards
        self._prefix = b""
        self._found_newest = False
        self._dead: bytes | None = None
        self._doomed: list[bytes] = []
        self.horizon = horizon
        self._stored_horizon = horizon
        self._read = self._removed = self._keys = 0

    def run(self, start: bytes, end: bytes) -> Collected:
        """Collect between two engine keys."""
        for page in scan_pages(self._engine, DATA, start, end):
            self._read += len(page)
            for engine_key, stored in page:
                self._visit(engine_key, stored)
            if not self._pause():
                break
        else:
            self._finish_key()
        self._flush()
        return Collected(versions_read=self._read, versions_removed=self._removed, keys_removed=self._keys)

    def _visit(self, engine_key: bytes, stored: bytes) -> None:
        prefix = engine_key[:-VERSION_BYTES]
        if prefix != self._prefix:
            self._finish_key()
            self._prefix, self._found_newest = prefix, False
        version = decode_version(engine_key)
        if version > self._safe_point:
            return
        if self._found_newest:
            self._doom(engine_key)
            return
        self._found_newest = True
        record = decode_record(engine_key, stored)
        stamp_version = record.origin.version if record.origin else version
        is_settled = stamp_version <= self._settled and prefix not in self._prepared
        if record.is_dead_at(self._judged_ms) and is_settled:
            self._dead = engine_key
            self.horizon = max(self.horizon, stamp_version)

    def _finish_key(self) -> None:
        if self._dead is not None:
            self._keys += 1
            self._doom(self._dead)
            self._dead = None

    def _doom(self, engine_key: bytes) -> None:
        self._doomed.append(engine_key)
        if len(self._doomed) >= BATCH_ROWS:
            self._flush()

    def _flush(self) -> None:
        rows: list[WriteRow] = []
        # First: the rows that the horizon covers may be removed only after it is stored.
        if self.horizon > self._stored_horizon:
            rows.append((META, HORIZON + self._namespace, self.horizon.to_bytes(8, "big")))
        rows += ((DATA, engine_key, None) for engine_key in self._doomed)
        if rows:
            self._storage.remove(rows, self._guards, self._engine)
        self._removed += len(self._doomed)
        self._stored_horizon = self.horizon
        self._doomed = []
