"""What of a consumer's deliveries is held by transactions: live, but not to be delivered now.

An acknowledgement in a transaction is *sent* until its answer comes.  If none came it is *doubtful*: the site
may have it or not.  Only the site can tell then, and it is asked about nothing that is still on its way.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from floodmark.feed.subscription.acknowledgement import Deliveries, Position
from floodmark.feed.subscription.pending import Pending, PendingAcknowledgement


class Held:
    """The positions that are held, and by which transaction.

    >>> held = Held()
    >>> held.begin("0-7", [Position(5, 0), Position(5, 1)])
    [Position(version=5, index=0), Position(version=5, index=1)]
    >>> held.owner(Position(5, 1)), held.certain("0-7")
    ('0-7', [])
    >>> held.confirm([Position(5, 0), Position(5, 1)])
    >>> held.release("0-7", held.certain("0-7")), len(held)
    ([Position(version=5, index=0), Position(version=5, index=1)], 0)
    """

    def __init__(self, owners: Mapping[Position, str] = MappingProxyType({})) -> None:
        self._owners = dict(owners)
        self._sent: set[Position] = set()
        self._doubtful: set[Position] = set()

    def __len__(self) -> int:
        return len(self._owners)

    def __contains__(self, position: Position) -> bool:
        return position in self._owners

    def owner(self, position: Position) -> str | None:
        """The transaction that holds a change."""
        return self._owners.get(position)

    def begin(self, transaction: str, positions: Iterable[Position]) -> list[Position]:
        """Hold what is sent now; those that nobody held before."""
        fresh = [position for position in positions if position not in self._owners]
        self._owners.update(dict.fromkeys(fresh, transaction))
        self._sent.update(fresh)
        return fresh

    def confirm(self, positions: Iterable[Position]) -> None:
        """The site has what was sent."""
        self._sent.difference_update(positions)

    def doubt(self, positions: Iterable[Position]) -> None:
        """No answer came."""
        for position in positions:
            if position in self._sent:
                self._sent.remove(position)
                self._doubtful.add(position)

    def certain(self, transaction: str) -> list[Position]:
        """What the site is known to have for a transaction, in order."""
        unclear = self._sent | self._doubtful
        return sorted(
            position
            for position, owner in self._owners.items()
            if owner == transaction and position not in unclear
        )

    def answered(self) -> dict[Position, str]:
        """What is held and not on its way, with its transactions: the site can be asked about it."""
        return {position: owner for position, owner in self._owners.items() if position not in self._sent}

    def release(self, transaction: str, positions: Iterable[Position]) -> list[Position]:
        """Hold something no longer, as far as it is still that transaction which holds it."""
        released = [position for position in positions if self._owners.get(position) == transaction]
        for position in released:
            del self._owners[position]
            self._sent.discard(position)
            self._doubtful.discard(position)
        return released


def find_pending(
    deliveries: Deliveries, acknowledgements: Iterable[PendingAcknowledgement]
) -> dict[Position, str]:
    """The live changes that are pending, with their transactions."""
    pending = Pending("")
    for each in acknowledgements:
        pending.add(each.transaction, each.acknowledgement)
    owners = {position: pending.owner(position) for position in deliveries.live_positions()}
    return {position: owner for position, owner in owners.items() if owner is not None}


def find_ended(
    asked: Mapping[Position, str], acknowledgements: Iterable[PendingAcknowledgement]
) -> dict[Position, str]:
    """What was asked about and is not pending in its transaction any more."""
    pending = Pending("")
    for each in acknowledgements:
        pending.add(each.transaction, each.acknowledgement)
    return {position: owner for position, owner in asked.items() if pending.owner(position) != owner}
