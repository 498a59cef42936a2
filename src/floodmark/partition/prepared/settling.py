"""Settling prepared writes: whoever needs to know how one ends asks, and carries out the answer.

Nobody waits for ever.  A transaction has a deadline, after which whoever decides about it answers that it is
aborted; and where nobody decides, a caller is refused after a while.

The question is never asked by someone who has the turn: the answer may need a write.
"""

from collections.abc import Iterable
from typing import Final, Protocol

from floodmark.model.errors import PartitionMoved
from floodmark.model.partition import Decision, Settler
from floodmark.model.version import Version
from floodmark.partition.prepared.writes import OpenWrite, conflict

# An undecided transaction is asked about again after this time, and so often.
ASK_SECONDS: Final = 0.05
ASKS_MAX: Final = 1_200


def wait_seconds_max(asks: int) -> float:
    """For how long a transaction is waited for that is asked about so often."""
    return asks * ASK_SECONDS


class SettlingPartition(Protocol):
    """What settling needs of the partition that a write is prepared in."""

    id: int
    retired: bool

    def commit_prepared(self, transaction: str, version: Version) -> bool: ...

    def abort_prepared(self, transaction: str) -> bool: ...


def settle_writes(
    partition: SettlingPartition, writes: Iterable[OpenWrite], settler: Settler, *, asks: int = ASKS_MAX
) -> None:
    """Return when some prepared writes have ended, or refuse after so many asks."""
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
