"""What a coordinator knows after a restart: the transactions whose records its log still holds.

**Orphans.**  A record may be there without the beginning of its transaction, and nothing follows from it.
The beginning is written first, is known before anybody hears the transaction's id, and goes together with
all other records that are known, when every participant has done its part.  So whatever is left behind is a
record that its coordinator did not know of, since the process was torn out of a step:

- that something takes part: its owner never heard that it does, so it has done nothing that could be undone;
- a decision: nobody was told of it, and the transaction ended by another one, which came later.

Hence orphans are let go of.  To refuse would keep a site shut over what nobody can need.

**Aborts.**  An open transaction is aborted at once if no live caller can still commit it as it stands:

- a partition takes part.  It joins only inside a commit, so the restart cut that commit off between its
  prepared write and its decision, and the prepared write holds the resolved version back.  A client that
  repeats the commit is told that the transaction is aborted, and may run it anew;
- the process that began it has ended, because it had the site open itself.

The abort needs no record: the next recovery finds the same records and comes to the same decision.  Other
open transactions belong to clients of a server, which may have their writes ready, and stay open until their
deadline.
"""

import logging
from collections.abc import Callable, Iterable
from typing import Final

from floodmark.log import Position
from floodmark.transaction.held import Held
from floodmark.transaction.records import Aborting, Begun, Joined, Record

# Reasons of aborts.
RESTARTED: Final = "the site was restarted in the middle of its commit"
ABANDONED: Final = "the process that began it has ended"

_log = logging.getLogger("floodmark.transaction")


def replay(
    coordinator: int,
    live: Iterable[tuple[Position, Record]],
    *,
    now_ms: int,
    wall_ms: int,
    is_abandoned: Callable[[str], bool],
) -> tuple[dict[str, Held], list[Position]]:
    """The transactions of the records that are live, by id; and where orphans stand.

    A deadline was noted by the clock on the wall, which may have been set since: what is left of it is
    never more than the timeout that the transaction had.  `is_abandoned` says of an id whether the process
    that began the transaction has ended.
    """
    found: dict[str, Held] = {}
    orphans: list[Position] = []
    for position, record in live:
        transaction = record.transaction
        if isinstance(record, Begun):
            left_ms = min(max(0, record.deadline_ms - wall_ms), record.timeout_ms)
            found[transaction] = Held(transaction, now_ms + left_ms - record.timeout_ms, now_ms + left_ms)
        held = found.get(transaction)
        if held is None:
            orphans.append(position)
            _log.warning(
                "the log of coordinator %d has a record (%s) of transaction %s, which has ended; nothing "
                "follows from it, and it is let go of",
                *(coordinator, type(record).__name__.lower(), transaction),
            )
            continue
        held.positions.append(position)
        if isinstance(record, Joined):
            if record.participant not in held.waiting:
                held.join(record.participant)
        elif not isinstance(record, Begun):
            # If there are two, nobody was told of the first.
            held.decide(record)
    for held in found.values():
        if held.is_open and (held.wrote or is_abandoned(held.id)):
            held.decide(Aborting(held.id, RESTARTED if held.wrote else ABANDONED))
    return found, orphans
