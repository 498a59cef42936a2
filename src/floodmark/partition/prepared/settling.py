"""Settling prepared writes: a caller asks for the decision and carries it out.

The coordinator of a transaction has the decision.  That of an atomic batch follows from the answers of its
partitions, and each partition carries it out on its own.

Every wait ends.  After the deadline of a transaction its coordinator answers that it is aborted; if it does
not answer, the caller gets `Retryable` after some time.

The caller must not hold the turn, since the answer may need a write.
"""

from collections.abc import Callable, Iterable
from typing import Final, Protocol

from floodmark.model.errors import PartitionMoved
from floodmark.model.partition import Decision, Fate
from floodmark.model.version import Version
from floodmark.partition.prepared.writes import OpenWrite, conflict

# The poll interval for an undecided transaction, and how often it is polled.  A batch is given this time
# before its siblings are asked: one that is being prepared would be refused.
ASK_SECONDS: Final = 0.05
ASKS_MAX: Final = 1_200
# How often one call settles prepared writes on its keys before it fails with a conflict.
SETTLES_MAX: Final = 100


def wait_seconds_max(asks: int) -> float:
    """The duration of a number of polls."""
    return asks * ASK_SECONDS


# Returns how a prepared write ends.
Ask = Callable[[OpenWrite], Fate]


class SettlingPartition(Protocol):
    """The partition of a prepared write, as far as settling needs it."""

    id: int
    retired: bool

    def commit_prepared(self, transaction: str, version: Version) -> bool: ...

    def abort_prepared(self, transaction: str) -> bool: ...


def settle_writes(
    partition: SettlingPartition, writes: Iterable[OpenWrite], ask: Ask, *, asks: int = ASKS_MAX
) -> None:
    """Return when all given prepared writes have ended; raises `Retryable` after `asks` polls of one."""
    for write in writes:
        if write.siblings:
            write.ended.wait(ASK_SECONDS)
        for _ in range(asks - 1):
            if try_settle(partition, write, ask) or write.ended.wait(ASK_SECONDS):
                break
        else:
            if not try_settle(partition, write, ask):
                raise conflict(write)
        if partition.retired:
            raise PartitionMoved(
                f"partition {partition.id} was split, merged or moved; ask for the map again",
                partition=partition.id,
            )


def try_settle(partition: SettlingPartition, write: OpenWrite, ask: Ask) -> bool:
    """End a prepared write if its transaction or batch is decided; returns whether it has ended."""
    if write.ended.is_set():
        return True
    fate = ask(write)
    if fate.decision is Decision.COMMIT:
        partition.commit_prepared(write.transaction, fate.version)
    elif fate.decision is Decision.ABORT:
        partition.abort_prepared(write.transaction)
    return fate.decision is not Decision.UNDECIDED
