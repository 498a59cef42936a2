"""Ledgers beside the data of a node: they are written in turn with everything else, and recover with it."""

from collections.abc import Sequence
from contextlib import AbstractContextManager

from floodmark.engine import Engine, WriteRow
from floodmark.partition.commit.storage import Storage


class LedgerStore:
    """Where a node keeps the ledgers of `floodmark.log`."""

    def __init__(self, storage: Storage) -> None:
        self.engine: Engine = storage.engine
        self._storage = storage

    @property
    def recoveries(self) -> int:
        """How often it had to recover."""
        return self._storage.recoveries

    def settled(self) -> AbstractContextManager[None]:
        """Take the turn to write."""
        return self._storage.settled()

    def store(self, rows: Sequence[WriteRow]) -> None:
        """Write rows as one, for good.  The caller holds the turn."""
        self._storage.store(rows)

    def remove(self, rows: Sequence[WriteRow]) -> None:
        """Write rows that a crash may undo, until something later is stored.  The caller holds the turn."""
        try:
            self.engine.write(rows)
        except BaseException:
            self._storage.stop()
            raise
