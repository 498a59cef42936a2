"""The outcome of an atomic batch over several nodes: one metadata row at each of its partitions.

A commit of one node has such a row too, without other partitions, if its answer may get lost on the way to a
client.  The commit reads the row in its round and writes it in its engine write, so an id is committed at
most once, and never after it was refused.

    "batch/" | id: 30 bytes, ASCII | the first qualified key of the batch in the partition
        ->  MessagePack: [decision, version, first keys of the batch in all its partitions]

The row of a prepared batch is `undecided`, at p.  Prepare, commit and abort write it in the engine write of
their other rows.  It names no partition: a split, a merge, a move or a takeover leaves it as it is.

**Refused.**  A partition that is asked about a batch which it has not prepared stores `abort` before it
answers, and refuses a later prepare.  So a batch that one partition has refused is never prepared everywhere,
and a batch that is prepared everywhere is refused nowhere: all partitions reach the same outcome.

**Kept** until the id is too old to prepare, since a prepare may be repeated, and until no sibling has the
batch prepared, since that sibling will ask for the outcome.  The age is measured with the node's versions,
which never go back.
"""

from collections.abc import Iterator
from typing import Final

import msgspec

from floodmark.engine import Engine, WriteRow
from floodmark.engine.base import scan_rows
from floodmark.model.batch import BATCH_ID_CHARACTERS, batch_age_ms, batches_from
from floodmark.model.errors import Corruption, TransactionEnded
from floodmark.model.limits import BATCH_AGE_MS_MAX
from floodmark.model.partition import Decision
from floodmark.model.version import Version, physical_ms
from floodmark.partition.families import META

BATCHES: Final = b"batch/"


class BatchOutcome(msgspec.Struct, frozen=True, array_like=True):
    """The outcome of a batch at a partition.  `version` is p, the commit version, or 0."""

    decision: Decision
    version: Version = 0
    siblings: tuple[bytes, ...] = ()


REFUSED: Final = BatchOutcome(Decision.ABORT)


def store_outcome(batch: str, key: bytes, outcome: BatchOutcome | None) -> WriteRow:
    """The write that sets or removes the row of a batch.

    >>> family, key, value = store_outcome("b-0000000000a-0123456789abcdef", b"key", REFUSED)
    >>> family, key, value.hex()
    ('meta', b'batch/b-0000000000a-0123456789abcdefkey', '93a561626f72740090')
    """
    return META, _prefix(batch) + key, None if outcome is None else msgspec.msgpack.encode(outcome)


def load_outcome(engine: Engine, batch: str, key: bytes) -> BatchOutcome | None:
    """The outcome of a batch at a partition; None if it is unknown here."""
    row_key = _prefix(batch) + key
    stored = engine.get(META, row_key)
    return None if stored is None else _decode(row_key, stored)


def read_outcomes(engine: Engine, until_ms: int) -> Iterator[tuple[str, bytes, BatchOutcome]]:
    """Id, key and outcome of all batches whose ids were minted before a time, the oldest first."""
    place = len(BATCHES) + BATCH_ID_CHARACTERS
    for row_key, stored in scan_rows(engine, META, BATCHES, _prefix(batches_from(until_ms))):
        yield row_key[len(BATCHES) : place].decode(), row_key[place:], _decode(row_key, stored)


class NamedCommit:
    """The outcome of a commit of one node, known by an id and the first qualified key."""

    def __init__(self, engine: Engine, batch: str, key: bytes) -> None:
        self._engine = engine
        self._batch = batch
        self._key = key

    def earlier(self, now: Version) -> Version:
        """The version at which it is committed already, or 0.

        Raises TransactionEnded if it is refused, or its id is too old at a fresh version.
        """
        outcome = load_outcome(self._engine, self._batch, self._key)
        if outcome is None:
            if is_too_old(self._batch, now):
                raise refused(self._batch)
            return 0
        if outcome.decision is not Decision.COMMIT:
            raise refused(self._batch)
        return outcome.version

    def row(self, version: Version) -> WriteRow:
        """The row that records its commit."""
        return store_outcome(self._batch, self._key, BatchOutcome(Decision.COMMIT, version))


def is_too_old(batch: str, version: Version) -> bool:
    """Whether an id is too old, or too far ahead, for its batch to be prepared or committed at a version."""
    return abs(batch_age_ms(batch, physical_ms(version))) > BATCH_AGE_MS_MAX


def refused(batch: str) -> TransactionEnded:
    """The error for a batch or commit that can never happen any more."""
    return TransactionEnded(
        f"the batch or commit {batch} is refused here: its outcome was asked for before it arrived, or it "
        "took too long; begin another one",
        transaction=batch,
    )


def _prefix(batch: str) -> bytes:
    return BATCHES + batch.encode()


def _decode(row_key: bytes, stored: bytes) -> BatchOutcome:
    try:
        return msgspec.msgpack.decode(stored, type=BatchOutcome)
    except msgspec.MsgspecError as error:
        raise Corruption(
            f"the atomic batch {row_key.hex()} is damaged: {error}. Restore the site from a backup"
        ) from error
