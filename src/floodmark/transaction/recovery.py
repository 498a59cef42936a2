"""What a coordinator knows after a restart: the transactions whose records its log still holds."""

from collections.abc import Iterable

from floodmark.log import Position
from floodmark.model.errors import Corruption
from floodmark.transaction.held import Held
from floodmark.transaction.records import Begun, Joined, Record


def replay(
    coordinator: int, live: Iterable[tuple[Position, Record]], *, now_ms: int, wall_ms: int
) -> dict[str, Held]:
    """The transactions of the records that are live, by id.

    A deadline was noted by the clock on the wall, which may have been set since: what is left of it is
    never more than the timeout that the transaction had.
    """
    found: dict[str, Held] = {}
    for position, record in live:
        transaction = record.transaction
        if isinstance(record, Begun):
            left_ms = min(max(0, record.deadline_ms - wall_ms), record.timeout_ms)
            found[transaction] = Held(transaction, now_ms + left_ms - record.timeout_ms, now_ms + left_ms)
        # Records are let go all at once, so whatever is there of a transaction begins with its beginning.
        held = found.get(transaction)
        if held is None:
            raise Corruption(
                f"the log of coordinator {coordinator} has no beginning of transaction {transaction}; "
                "restore the site from a backup",
                transaction=transaction,
            )
        held.positions.append(position)
        if isinstance(record, Joined):
            if record.participant not in held.waiting:
                held.join(record.participant)
        elif not isinstance(record, Begun):
            held.decide(record)
    return found
