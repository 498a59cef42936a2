"""Rebuilds the transactions of a coordinator from the live records of its log.

**Orphans.**  A record without the beginning of its transaction has no effect and is dropped.  The beginning
is written first and removed together with all records that the coordinator knows.  So an orphan is a record
of unknown outcome that a crash left behind:

- a participant: its caller never learned that it had joined, so it has done nothing;
- a decision: no participant was told, and a later decision ended the transaction.

**Aborts.**  An open transaction is aborted at once if no caller can still commit it:

- a partition takes part.  Partitions join only inside a commit, so the restart cut that commit off between
  the prepared write and the decision, and the prepared write holds the resolved version back.  A client that
  repeats the commit learns that the transaction is aborted, and may run it again;
- the process that began it has ended, because it had the site open itself.

The abort needs no record: every recovery from the same records decides the same.  Other open transactions
belong to clients of a server and stay open until their deadline.
"""

import logging
from collections.abc import Callable, Iterable
from typing import Final

from floodmark.log import Position
from floodmark.transaction.book import RESTARTED, HeldTransaction
from floodmark.transaction.records import Aborting, Begun, Joined, Record

# The reason of an abort.
ABANDONED: Final = "the process that began it has ended"

_log = logging.getLogger("floodmark.transaction")


def replay(
    coordinator: int,
    live: Iterable[tuple[Position, Record]],
    *,
    now_ms: int,
    wall_ms: int,
    is_abandoned: Callable[[str], bool],
) -> tuple[dict[str, HeldTransaction], list[Position]]:
    """The transactions of the live records, by id, and the positions of orphans.

    A deadline was stored in wall-clock time, and the clock may have been set since: the rest of it is at most
    the timeout of the transaction.  `is_abandoned` tells whether the process that began one has ended.
    """
    found: dict[str, HeldTransaction] = {}
    orphans: list[Position] = []
    for position, record in live:
        transaction = record.transaction
        if isinstance(record, Begun):
            left_ms = min(max(0, record.deadline_ms - wall_ms), record.timeout_ms)
            found[transaction] = HeldTransaction(
                transaction, now_ms + left_ms - record.timeout_ms, now_ms + left_ms
            )
        held = found.get(transaction)
        if held is None:
            orphans.append(position)
            _log.warning(
                "the log of coordinator %d has a record (%s) of transaction %s, which has ended; it has no "
                "effect and is removed",
                *(coordinator, type(record).__name__.lower(), transaction),
            )
            continue
        held.positions.append(position)
        if isinstance(record, Joined):
            held.join(record.participant)
        elif not isinstance(record, Begun):
            # The last decision counts: no participant was told of an earlier one.
            held.decide(record)
    for held in found.values():
        if held.is_open and (held.wrote or is_abandoned(held.id)):
            held.decide(Aborting(held.id, RESTARTED if held.wrote else ABANDONED))
    return found, orphans
