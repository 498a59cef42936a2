"""Settling prepared writes: a caller asks the coordinator for the decision and carries it out.

Every wait ends.  After the deadline of a transaction its coordinator answers that it is aborted; without an
answer the caller is refused after a while.

The caller must not hold the turn, since the answer may need a write.
"""

from collections.abc import Iterable
from typing import Final, Protocol

from floodmark.model.errors import PartitionMoved
from floodmark.model.partition import Decision, Settler
from floodmark.model.version import Version
from floodmark.partition.prepared.writes import OpenWrite, conflict

# The poll interval for an undecided transaction, and how often it is polled.
ASK_SECONDS: Final = 0.05
ASKS_MAX: Final = 1_200
# How often one call settles prepared writes on its keys before it fails with a conflict.
SETTLES_MAX: Final = 100


def wait_seconds_max(asks: int) -> float:
    """How long so many polls take."""
    return asks * ASK_SECONDS


class SettlingPartition(Protocol):
    """The partition of a prepared write, as far as settling needs it."""

    id: int
    retired: bool

    def commit_prepared(self, transaction: str, version: Version) -> bool: ...

    def abort_prepared(self, transaction: str) -> bool: ...


def settle_writes(
    partition: SettlingPartition, writes: Iterable[OpenWrite], settler: Settler, *, asks: int = ASKS_MAX
) -> None:
    """Return when some prepared writes have ended; raises `Retryable` after so many polls."""
    for write in writes:
        for _ in range(asks - 1):
            if try_settle(partition, write, settler) or write.ended.wait(ASK_SECONDS):
                break
        else:
            if not try_settle(partition, write, settler):
                raise conflict(write)
        if partition.retired:
            raise PartitionMoved(
                f"partition {partition.id} was split, merged or moved; ask for the map again",
                partition=partition.id,
            )


def try_settle(partition: SettlingPartition, write: OpenWrite, settler: Settler) -> bool:
    """End a prepared write if its transaction is decided; whether it has ended."""
    if write.ended.is_set():
        return True
    fate = settler(write.transaction)
    if fate.decision is Decision.COMMIT:
        partition.commit_prepared(write.transaction, fate.version)
    elif fate.decision is Decision.ABORT:
        partition.abort_prepared(write.transaction)
    return fate.decision is not Decision.UNDECIDED
